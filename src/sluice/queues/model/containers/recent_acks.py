"""The last acknowledgements of a queue: who acknowledged which message, and when.

`sluice explain` answers from them after a message is deleted. They are in memory only. Each is a
row of native integers and two references, written in place: an acknowledgement allocates nothing.
The number of rows is bounded for each queue, and for all queues together.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i16, i64

DEFAULT_ROWS: Final = 1000  # of one queue
MAX_ROWS: Final = 500_000  # of all queues: about 35 MB
MIN_ROWS: Final = 16  # of a queue, also when all rows are in use
GROWTH: Final = 64  # rows that a queue takes at once
MAX_ATTEMPT: Final = 32_767


class RowBudget:
    """The most rows that one queue may have, and those that all queues may still take."""

    def __init__(self, rows_per_queue: i64 = DEFAULT_ROWS, rows: i64 = MAX_ROWS) -> None:
        self.rows_per_queue: i64 = rows_per_queue
        self.remaining: i64 = rows


class Acknowledgement:
    """One row, for display."""

    def __init__(
        self,
        gid: i64,
        holder: str,
        attempt: i64,
        enqueued_at: float,
        delivered_at: float,
        acked_at: float,
    ) -> None:
        self.gid: i64 = gid
        self.holder: str = holder
        self.attempt: i64 = attempt
        self.enqueued_at: float = enqueued_at
        self.delivered_at: float = delivered_at
        self.acked_at: float = acked_at


class RecentAcks:
    """A ring of rows. It grows up to its bound, then the newest row replaces the oldest."""

    def __init__(self, budget: RowBudget) -> None:
        self._budget: RowBudget = budget
        self._next: i64 = 0  # the row that is written next
        self._bound: i64 = 0  # rows that it may have without asking for more
        self._pid: vec[i64] = vec[i64]()
        self._seq: vec[i64] = vec[i64]()
        self._gid: vec[i64] = vec[i64]()
        self._enqueued_ms: vec[i64] = vec[i64]()
        self._delivered_ms: vec[i64] = vec[i64]()
        self._acked_ms: vec[i64] = vec[i64]()
        self._attempt: vec[i16] = vec[i16]()
        self._holder: list[str] = []
        self._message_id: list[bytes] = []  # of the publisher; empty: a generated id

    def add(
        self,
        pid: i64,
        seq: i64,
        gid: i64,
        holder: str,
        message_id: bytes,
        attempt: i64,
        enqueued_ms: i64,
        delivered_ms: i64,
        acked_ms: i64,
    ) -> None:
        """Record that `holder` has acknowledged a message."""
        at = self._next
        if at == self._bound and not self._grow():
            at = 0
        if attempt > MAX_ATTEMPT:
            attempt = MAX_ATTEMPT
        self._next = at + 1
        if at < len(self._seq):
            self._pid[at] = pid
            self._seq[at] = seq
            self._gid[at] = gid
            self._enqueued_ms[at] = enqueued_ms
            self._delivered_ms[at] = delivered_ms
            self._acked_ms[at] = acked_ms
            self._attempt[at] = i16(attempt)
            self._holder[at] = holder
            self._message_id[at] = message_id
            return
        self._pid = append(self._pid, pid)
        self._seq = append(self._seq, seq)
        self._gid = append(self._gid, gid)
        self._enqueued_ms = append(self._enqueued_ms, enqueued_ms)
        self._delivered_ms = append(self._delivered_ms, delivered_ms)
        self._acked_ms = append(self._acked_ms, acked_ms)
        self._attempt = append(self._attempt, i16(attempt))
        self._holder.append(holder)
        self._message_id.append(message_id)

    def _grow(self) -> bool:
        """Take more rows; return whether there are any, or the oldest row is next."""
        budget = self._budget
        more: i64 = min(budget.rows_per_queue - self._bound, GROWTH)
        if more > budget.remaining:
            more = MIN_ROWS - self._bound
        if more <= 0:
            return False
        budget.remaining -= more
        self._bound += more
        return True

    def release(self) -> None:
        """Forget all rows and return them: the queue is deleted."""
        self._budget.remaining += self._bound
        self._bound = 0
        self._next = 0
        self._pid = vec[i64]()
        self._seq = vec[i64]()
        self._gid = vec[i64]()
        self._enqueued_ms = vec[i64]()
        self._delivered_ms = vec[i64]()
        self._acked_ms = vec[i64]()
        self._attempt = vec[i16]()
        self._holder = []
        self._message_id = []

    def find(self, message_id: bytes, pid: i64, seq: i64) -> list[Acknowledgement]:
        """Return the newest row of each group for a message, by its id or its location.

        An empty id or a `pid` of -1 matches no row.
        """
        found: list[Acknowledgement] = []
        groups: list[int] = []
        count: i64 = len(self._seq)
        step: i64 = 0
        while step < count:
            at: i64 = self._next - 1 - step
            if at < 0:
                at += count
            step += 1
            if (self._seq[at] != seq or self._pid[at] != pid) and (
                not message_id or self._message_id[at] != message_id
            ):
                continue
            gid = self._gid[at]
            if int(gid) not in groups:
                groups.append(int(gid))
                found.append(
                    Acknowledgement(
                        gid,
                        self._holder[at],
                        i64(self._attempt[at]),
                        float(self._enqueued_ms[at]) / 1000.0,
                        float(self._delivered_ms[at]) / 1000.0,
                        float(self._acked_ms[at]) / 1000.0,
                    )
                )
        return found
