"""One turn of the event loop, as the broker sees it.

While sockets are read, connections collect what they have to say in buffers of their own. When all of the turn's input
is worked off, each connection that was touched is written to once. That is the difference between one system call per
packet and one per connection and turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter

from sluice.clock import Clock

if TYPE_CHECKING:
    from sluice.broker.net.connection import Connection

TURN_SECONDS: Final = 0.01  # that the work for one connection may take before others are heard
SPARE_BUFFERS: Final = 256
SPARE_BYTES: Final = 65_536  # a buffer that has grown beyond this is let go


class Turn:
    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Clock) -> None:
        self._clock = clock
        self.now: float = clock()
        self._call_soon = call_soon
        self._touched: list[Connection] = []
        self._spare: list[BytesWriter] = []
        self._flush: Callable[[], None] = self.flush
        self._scheduled: bool = False
        self._resting: list[Callable[[], None]] = []
        self._resume: Callable[[], None] = self.resume
        self.put_off: Callable[[], None] | None = None  # what somebody has put off to the end of this turn
        self.before_flush: Callable[[], None] | None = None  # what must be done before a turn's output leaves

    def begin(self) -> float:
        """The time of this turn: asked once for each read, not for each message in it."""
        self.now = self._clock()
        return self.now

    def time(self) -> float:
        """The time now, however long this turn takes already."""
        return self._clock()

    def go_on_later(self, go_on: Callable[[], None]) -> None:
        """Call `go_on`, which does one slice of a longer piece of work, when others have had their turn."""
        self._resting.append(go_on)
        if len(self._resting) == 1:
            self._call_soon(self._resume)

    def resume(self) -> None:
        """One piece of work goes on. Between any two of them the loop looks for input of everybody."""
        go_on = self._resting.pop(0)
        if self._resting:
            self._call_soon(self._resume)
        go_on()

    def touch(self, connection: Connection) -> None:
        """Write to `connection` at the end of the turn."""
        if not self._scheduled:
            self.schedule()
        self._touched.append(connection)

    def schedule(self) -> None:
        """Something was done in this turn: have it ended when all of its input is worked off."""
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._flush)

    def buffer(self) -> BytesWriter:
        """An empty buffer. They are lent: a connection that has nothing to say holds none."""
        return self._spare.pop() if self._spare else BytesWriter()

    def give_back(self, buffer: BytesWriter) -> None:
        if len(buffer) <= SPARE_BYTES and len(self._spare) < SPARE_BUFFERS:
            buffer.truncate(0)
            self._spare.append(buffer)

    def flush(self) -> None:
        """The end of the turn."""
        self._scheduled = False
        if self.put_off is not None:
            self.put_off()
        if self.before_flush is not None:
            self.before_flush()
        self.send()

    def send(self) -> None:
        """Write to every connection that was touched."""
        touched = self._touched
        self._touched = []
        for connection in touched:
            try:
                connection.flush()
            except (
                OSError,
                RuntimeError,
            ) as error:  # of its transport: the line costs itself and nobody else
                connection.broker.log("write failed", {"peer": connection.peer(), "fault": str(error)})
                connection.abort()
