"""What the broker does when frames are submitted, and when the engine creates a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.queues.commit_loop import CommitListener

if TYPE_CHECKING:
    from sluice.broker.namespaces.queues.handler import QueueHandler
    from sluice.broker.router import Router
    from sluice.queues.model import Queue


class BackpressureListener(CommitListener):
    def __init__(self, router: Router) -> None:
        self._router: Router = router

    def on_frame_closed(self) -> None:
        """Read again from connections that were throttled because the open frame was too large."""
        self._router.release_backpressure()


class CreatedQueueListener(CommitListener):
    def __init__(self, queue_handler: QueueHandler) -> None:
        self._queue_handler: QueueHandler = queue_handler

    def on_queue_created(self, queue: Queue) -> None:
        """Serve subscribers that were waiting for a queue of this name."""
        self._queue_handler.on_queue_created(queue)
