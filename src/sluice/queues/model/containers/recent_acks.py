"""The last acknowledgements of a queue: who acknowledged which message, and when.

`sluice explain` answers from them after a message is deleted. They are in memory only. Each is a
row of native integers and two references, written in place: an acknowledgement allocates nothing.
The number of rows is bounded for each queue, and for all queues together.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i64

DEFAULT_ROWS: Final = 1000  # of one queue
MAX_ROWS: Final = 500_000  # of all queues: about 35 MB
MIN_ROWS: Final = 16  # of a queue, also when all rows are in use
GROWTH: Final = 64  # rows that a queue takes at once
WIDTH: Final = 7  # numbers of a row


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
    """A ring of rows. It grows up to its bound, then the newest row replaces the oldest.

    The numbers of a row are next to each other, so that a row is one or two cache lines.
    """

    def __init__(self, budget: RowBudget) -> None:
        self._budget: RowBudget = budget
        self._next: i64 = 0  # the row that is written next
        self._bound: i64 = 0  # rows that it may have without asking for more
        self._numbers: vec[i64] = vec[i64]()
        self._holders: list[str] = []
        self._message_ids: list[bytes] = []  # of the publisher; empty: a generated id

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
        self._next = at + 1
        if at == len(self._holders):
            self._append_row()
        numbers = self._numbers
        start: i64 = at * WIDTH
        numbers[start] = pid
        numbers[start + 1] = seq
        numbers[start + 2] = gid
        numbers[start + 3] = attempt
        numbers[start + 4] = enqueued_ms
        numbers[start + 5] = delivered_ms
        numbers[start + 6] = acked_ms
        self._holders[at] = holder
        self._message_ids[at] = message_id

    def _append_row(self) -> None:
        numbers = self._numbers
        for _ in range(WIDTH):
            numbers = append(numbers, i64(0))
        self._numbers = numbers
        self._holders.append("")
        self._message_ids.append(b"")

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
        self._numbers = vec[i64]()
        self._holders = []
        self._message_ids = []

    def find(self, message_id: bytes, pid: i64, seq: i64) -> list[Acknowledgement]:
        """Return the newest row of each group for a message, by its id or its location.

        An empty id or a `pid` of -1 matches no row.
        """
        found: list[Acknowledgement] = []
        groups: list[int] = []
        numbers = self._numbers
        count: i64 = len(self._holders)
        step: i64 = 0
        while step < count:
            at: i64 = self._next - 1 - step
            if at < 0:
                at += count
            step += 1
            start: i64 = at * WIDTH
            if (numbers[start + 1] != seq or numbers[start] != pid) and (
                not message_id or self._message_ids[at] != message_id
            ):
                continue
            gid = numbers[start + 2]
            if int(gid) not in groups:
                groups.append(int(gid))
                found.append(
                    Acknowledgement(
                        gid,
                        self._holders[at],
                        numbers[start + 3],
                        float(numbers[start + 4]) / 1000.0,
                        float(numbers[start + 5]) / 1000.0,
                        float(numbers[start + 6]) / 1000.0,
                    )
                )
        return found
