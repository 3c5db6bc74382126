"""Interface through which a commit loop notifies its user of frames, queues and failures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from sluice.queues.log import Frame
    from sluice.queues.model import Queue


@mypyc_attr(allow_interpreted_subclasses=True)
class CommitListener:
    """Overrides what it needs. `CommitLoop.add_listener` registers it."""

    def on_queue_created(self, queue: Queue) -> None:
        """Called for each queue that the engine created on its own, for dead letters."""

    def on_frame_closed(self) -> None:
        """Called after a frame was submitted to the store. The open frame is empty."""

    def on_frame_committed(self, frame: Frame) -> None:
        """Called after the store has committed a frame and its publishers were notified."""

    def on_failure(self, error: Exception) -> None:
        """Called when the open frame is incomplete and must never be committed.

        Its records cannot be removed. So the process has to end as if it had been killed now, and a
        restart finds none of them.
        """
