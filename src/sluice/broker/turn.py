"""One turn of the event loop, as the broker sees it.

While the loop reads sockets, each connection collects its output in a buffer of its own, and the
queues collect records in the open frame. After all input of the turn is processed, `flush` submits
the frame to the store and writes once to each connection that has output. This costs one commit per
turn and one system call per connection, instead of one per packet.

Work that no packet starts has turns of its own: `Scheduler` runs all deadlines of the broker with
one timer, `SlicedTask` spreads long work over many turns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from librt.strings import BytesWriter

from sluice.broker.ports import ConnectionPort
from sluice.clock import Clock, Deadline, DeadlineHeap
from sluice.queues.ports import Committer

MAX_SLICE_SECONDS: Final = 0.01  # for the work of one connection, before others are served
MAX_POOLED_BUFFERS: Final = 256
MAX_POOLED_BUFFER_BYTES: Final = 65_536  # larger buffers are not pooled


class Turn:
    """Until `commit_with` is called, a turn has nothing to commit: the store is not open yet."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Clock) -> None:
        self._clock = clock
        self.now: float = clock()
        self._call_soon = call_soon
        self._with_output: list[ConnectionPort] = []
        self._buffer_pool: list[BytesWriter] = []
        self._flush: Callable[[], None] = self.flush
        self._scheduled: bool = False
        self._waiting_slices: list[Callable[[], None]] = []
        self._run_next_slice: Callable[[], None] = self.run_next_slice
        self._callbacks_at_end: list[Callable[[], None]] = []
        self._committer: Committer = Committer()

    def commit_with(self, committer: Committer) -> None:
        """Commit the records of each turn through `committer`."""
        self._committer = committer

    def call_at_end(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the end of each turn, before its commit."""
        self._callbacks_at_end.append(callback)

    def begin(self) -> float:
        """Read the clock and return the time.

        Called once for each read of a socket, not for each message in it.
        """
        self.now = self._clock()
        return self.now

    def current_time(self) -> float:
        """Return the time now, regardless of when this turn began."""
        return self._clock()

    def resume_later(self, run_slice: Callable[[], None]) -> None:
        """Call `run_slice`, one slice of a longer task, after other connections are served."""
        self._waiting_slices.append(run_slice)
        if len(self._waiting_slices) == 1:
            self._call_soon(self._run_next_slice)

    def run_next_slice(self) -> None:
        """Run one waiting slice. The loop reads the input of all connections between two slices."""
        run_slice = self._waiting_slices.pop(0)
        if self._waiting_slices:
            self._call_soon(self._run_next_slice)
        run_slice()

    def register_output(self, connection: ConnectionPort) -> None:
        """Write to `connection` at the end of the turn."""
        if not self._scheduled:
            self.schedule_flush()
        self._with_output.append(connection)

    def schedule_flush(self) -> None:
        """Schedule the end of this turn, after all of its input is processed."""
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._flush)

    def borrow_buffer(self) -> BytesWriter:
        """Return an empty buffer from the pool. A connection without output holds no buffer."""
        return self._buffer_pool.pop() if self._buffer_pool else BytesWriter()

    def flush(self) -> None:
        """End the turn: call those that collected input, commit records, write to connections.

        What waits for the commit, such as a PUBACK, is written by a later turn.
        """
        self._scheduled = False
        for callback in self._callbacks_at_end:
            callback()
        self._committer.end_turn()
        self.flush_connections()

    def flush_connections(self) -> None:
        """Write to every connection that has output."""
        connections = self._with_output
        self._with_output = []
        for connection in connections:
            try:
                buffer = connection.flush()
            except (OSError, RuntimeError) as error:
                # The transport failed. Only this connection ends.
                connection.log("write failed", {"peer": connection.peer(), "fault": str(error)})
                connection.abort()
                continue
            if (
                buffer is not None
                and len(buffer) <= MAX_POOLED_BUFFER_BYTES
                and len(self._buffer_pool) < MAX_POOLED_BUFFERS
            ):
                buffer.truncate(0)
                self._buffer_pool.append(buffer)


class PeriodicTask(Deadline):
    """Call a function periodically for as long as the broker runs."""

    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self._seconds = seconds
        self._callback = callback

    def fire(self, now: float) -> float:
        self._callback()
        return now + self._seconds


class Scheduler:
    """Run deadlines on the event loop: session expiry, delayed wills, keep-alives and others.

    `call_later(seconds, callback)` is the loop's function; it returns a handle that can be
    canceled.
    """

    def __init__(self, turn: Turn, call_later: Callable[[float, Callable[[], None]], Any]) -> None:
        self._turn = turn
        self._call_later = call_later
        self._deadlines = DeadlineHeap()
        self._timer: Any = None

    def __len__(self) -> int:
        return len(self._deadlines)

    def wake_at(self, when: float, deadline: Deadline) -> None:
        if self._deadlines.add(when, deadline):
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        first = self._deadlines.next_due_at()
        self._timer = (
            self._call_later(max(0.0, first - self._turn.now), self._run) if first else None
        )

    def _run(self) -> None:
        self._timer = None
        try:
            self._deadlines.run_due(self._turn.begin())
        finally:
            self._arm()  # if one deadline raises, the others still run

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SlicedTask:
    """Run `step` until it returns False, without blocking the event loop.

    Each turn runs the task for at most MAX_SLICE_SECONDS and then serves other connections. The
    task must leave the broker in a valid state after each step: anything may happen between two
    steps. `begin` prepares a turn, as for a client's packet.
    """

    def __init__(self, turn: Turn, begin: Callable[[], None]) -> None:
        self._turn: Turn = turn
        self._begin = begin
        self.is_cancelled: bool = False

    def step(self) -> bool:
        """Do a small part of the work and return whether there is more."""
        raise NotImplementedError

    def start(self) -> None:
        """Run the first slice in the current turn."""
        self._run(self._turn.now)

    def _resume(self) -> None:
        if not self.is_cancelled:
            self._run(self._turn.begin())

    def _run(self, started: float) -> None:
        self._begin()
        while not self.is_cancelled and self.step():
            if self._turn.current_time() - started > MAX_SLICE_SECONDS:
                self._turn.resume_later(self._resume)
                return
