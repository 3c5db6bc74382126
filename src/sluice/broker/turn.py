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

MAX_SLICE_SECONDS: Final = 0.01  # that the work for one connection may take before others are heard
MAX_POOLED_BUFFERS: Final = 256
MAX_POOLED_BUFFER_BYTES: Final = 65_536  # a buffer that has grown beyond this is let go


class Turn:
    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Clock) -> None:
        self._clock = clock
        self.now: float = clock()
        self._call_soon = call_soon
        self._with_output: list[Connection] = []
        self._buffer_pool: list[BytesWriter] = []
        self._flush: Callable[[], None] = self.flush
        self._scheduled: bool = False
        self._waiting_slices: list[Callable[[], None]] = []
        self._run_next_slice: Callable[[], None] = self.run_next_slice
        self.deferred_work: Callable[[], None] | None = (
            None  # what somebody has put off to the end of this turn
        )
        self.before_flush: Callable[[], None] | None = (
            None  # what must be done before a turn's output leaves
        )

    def begin(self) -> float:
        """The time of this turn: asked once for each read, not for each message in it."""
        self.now = self._clock()
        return self.now

    def current_time(self) -> float:
        """The time now, however long this turn takes already."""
        return self._clock()

    def resume_later(self, run_slice: Callable[[], None]) -> None:
        """Call `go_on`, which does one slice of a longer piece of work, when others have had their turn."""
        self._waiting_slices.append(run_slice)
        if len(self._waiting_slices) == 1:
            self._call_soon(self._run_next_slice)

    def run_next_slice(self) -> None:
        """One piece of work goes on. Between any two of them the loop looks for input of everybody."""
        run_slice = self._waiting_slices.pop(0)
        if self._waiting_slices:
            self._call_soon(self._run_next_slice)
        run_slice()

    def register_output(self, connection: Connection) -> None:
        """Write to `connection` at the end of the turn."""
        if not self._scheduled:
            self.schedule_flush()
        self._with_output.append(connection)

    def schedule_flush(self) -> None:
        """Something was done in this turn: have it ended when all of its input is worked off."""
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._flush)

    def borrow_buffer(self) -> BytesWriter:
        """An empty buffer. They are lent: a connection that has nothing to say holds none."""
        return self._buffer_pool.pop() if self._buffer_pool else BytesWriter()

    def return_buffer(self, buffer: BytesWriter) -> None:
        if len(buffer) <= MAX_POOLED_BUFFER_BYTES and len(self._buffer_pool) < MAX_POOLED_BUFFERS:
            buffer.truncate(0)
            self._buffer_pool.append(buffer)

    def flush(self) -> None:
        """The end of the turn."""
        self._scheduled = False
        if self.deferred_work is not None:
            self.deferred_work()
        if self.before_flush is not None:
            self.before_flush()
        self.flush_connections()

    def flush_connections(self) -> None:
        """Write to every connection that was touched."""
        connections = self._with_output
        self._with_output = []
        for connection in connections:
            try:
                connection.flush()
            except (
                OSError,
                RuntimeError,
            ) as error:  # of its transport: the line costs itself and nobody else
                connection.broker.log(
                    "write failed", {"peer": connection.peer(), "fault": str(error)}
                )
                connection.abort()
