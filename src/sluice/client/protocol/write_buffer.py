"""What the client says in one turn of the loop, collected, so that it leaves in one write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librt.strings import BytesWriter

# Beyond this many bytes in one turn, messages wait in the outbox: the buffer is written first.
FULL: Final = 256 * 1024


def nobody() -> None:
    """The listener of an output that no connection empties."""


class Output:
    """`wake` is called once when there is something to take, and not again before it was taken."""

    __slots__ = ("_awake", "wake", "writer")

    def __init__(self) -> None:
        self.writer = BytesWriter()
        self.wake: Callable[[], None] = nobody
        self._awake = False

    def touch(self) -> None:
        """Something was written."""
        if not self._awake:
            self._awake = True
            self.wake()

    def take(self) -> bytes:
        self._awake = False
        data = self.writer.getvalue()
        self.writer.truncate(0)
        return data
