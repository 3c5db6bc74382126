"""Output of one turn of the event loop, collected so that it leaves in one write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from librt.strings import BytesWriter

# Beyond this many bytes in one turn, messages wait in `outbound` until the buffer is written.
MAX_TURN_BYTES: Final = 256 * 1024


def ignore_wake() -> None:
    """Ignore output while there is no connection."""


class WriteBuffer:
    """Collects output. `wake` is called once per batch, when the first bytes are written."""

    __slots__ = ("_is_notified", "wake", "writer")

    def __init__(self) -> None:
        self.writer = BytesWriter()
        self.wake: Callable[[], None] = ignore_wake
        self._is_notified = False

    def notify(self) -> None:
        """Report that output was written."""
        if not self._is_notified:
            self._is_notified = True
            self.wake()

    def take_bytes(self) -> bytes:
        self._is_notified = False
        data = self.writer.getvalue()
        self.writer.truncate(0)
        return data
