"""What another node has given this one, remembered until that one has heard our answer.

A node that has lost its line to us says again what was not answered, and cannot know what was lost: the message or the
answer. So a message has a number at the node it comes from, and what we have taken in under that number for a cell is
answered again, and not given to anybody again. The memory is of one life of the other node and of one of ours. What
must come once beyond that (QoS 2 of lasting sessions) has a mark that cells keep: see `queues/once`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.cluster.plain.bridge_frames import ANY_CELL, SHARES_ONLY, CellTarget
from sluice.cluster.plain.fanout import Fanout, PublishOrigin
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.cluster.cell import Cell

RETENTION_SECONDS: Final = (
    60.0  # what was not heard on a line that broke: longer than anybody says it again
)


class InboxEntry:
    """One message in one cell."""

    def __init__(self, cell: int, stream_number: int) -> None:
        self.stream_number = stream_number  # the last one on which it was said
        self.is_lost = False  # the cell has moved before it was kept
        self._cell = cell
        self._is_routed = False  # who has subscribed by himself has it,
        self._shares: list[bytes] = []  # and these shared subscriptions have been asked,
        self._unassigned_shares: list[bytes] = []  # of which these had no member
        self._pending_commits = 0  # times it was given to the cell and is not kept yet
        self._receiver_count = 0
        self._fault = ""
        self._waiting_answers: list[tuple[Fanout, list[CellTarget]]] = []

    def deliver(
        self, local_cell: Cell, shares: list[bytes], message: Publish, origin: PublishOrigin | None
    ) -> None:
        """To whoever wants it, and to nobody twice."""
        shares_only = len(shares) > 0 and shares[0] == SHARES_ONLY
        others = [name for name in shares if name != SHARES_ONLY and name not in self._shares]
        if shares_only or self._is_routed:
            if not others:
                return
            shares = [SHARES_ONLY, *others]
        else:
            self._is_routed = True
            shares = others
        self._shares = self._shares + others
        self._pending_commits += 1
        fanout = Fanout(message, self.finish, self.mark_lost)
        fanout.origin = origin
        self._unassigned_shares = self._unassigned_shares + local_cell.deliver(
            message, shares, fanout
        )
        fanout.add_answer(0)

    def mark_lost(self, cell: int) -> None:
        self.is_lost = True

    def finish(self, count: int, fault: str) -> None:
        """All that had to be kept is."""
        self._pending_commits -= 1
        self._receiver_count += count
        self._fault = self._fault or fault
        if self._pending_commits:
            return
        waiting, self._waiting_answers = self._waiting_answers, []
        for answer, moved in waiting:
            self._answer(answer, moved)

    def answer_when_committed(self, answer: Fanout, moved: list[CellTarget]) -> None:
        """What became of it, now or when that is known; `gone` gets what is for others to do."""
        answer.expect_answer()
        if not self._pending_commits:
            self._answer(answer, moved)
        else:
            self._waiting_answers.append((answer, moved))

    def _answer(self, answer: Fanout, moved: list[CellTarget]) -> None:
        if self.is_lost:
            moved.append((self._cell, []))
        if self._unassigned_shares:
            moved.append((ANY_CELL, self._unassigned_shares))
        answer.add_answer(self._receiver_count, self._fault)


class NodeInbox:
    """Of one other node, over all its lines."""

    def __init__(self) -> None:
        self._entries: dict[int, InboxEntry] = {}
        self._stream_number = 0
        self._broken_streams: list[
            tuple[float, int, list[int]]
        ] = []  # when which line broke, and what was not heard on it

    def open_stream(self, now: float) -> int:
        while self._broken_streams and self._broken_streams[0][0] + RETENTION_SECONDS < now:
            _, stream_number, keys = self._broken_streams.pop(0)
            for key in keys:
                found = self._entries.get(key)
                if found is not None and found.stream_number == stream_number:
                    self.remove(key)
        self._stream_number += 1
        return self._stream_number

    def on_stream_lost(self, stream_number: int, now: float) -> None:
        self._broken_streams.append(
            (
                now,
                stream_number,
                [key for key, one in self._entries.items() if one.stream_number == stream_number],
            )
        )

    def find_or_add(self, key: int, cell: int, stream_number: int) -> InboxEntry:
        """What is known of it; from now on it is."""
        found = self._entries.get(key)
        if found is None or found.is_lost:
            found = self._entries[key] = InboxEntry(cell, stream_number)
        found.stream_number = stream_number
        return found

    def remove(self, key: int) -> None:
        """It will not be said again."""
        self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)


def entry_key(dedup_id: int, cell: int) -> int:
    return dedup_id << 16 | cell
