"""Publishes received from another node, remembered until that node has received our answer.

After a broken stream, the other node resends unanswered publishes and cannot know whether the
message or the answer was lost. So each message has a number at its origin. Invariant: a message
that we already applied to a cell under that number is answered again and not delivered again.

The inbox lasts for one run of the other node and one run of ours. Messages that must take effect
once beyond that (QoS 2 of persistent sessions) have a dedup id that cells store: see
`queues.log.cross_node_dedup`.
"""

from __future__ import annotations

from typing import Final

from sluice.cluster.plain.bridge_frames import ANY_CELL, SHARES_ONLY, CellTarget
from sluice.cluster.plain.fanout import Fanout, PublishOrigin
from sluice.cluster.plain.local_cell import LocalCell
from sluice.wire.packets import Publish

# For unconfirmed answers of a broken stream: longer than any node resends.
RETENTION_SECONDS: Final = 60.0


class InboxEntry:
    """One message in one cell."""

    def __init__(self, cell: int, stream_number: int) -> None:
        self.stream_number = stream_number  # the last stream on which it arrived
        self.is_lost = False  # the cell moved before it committed the message
        self._cell = cell
        self._is_routed = False  # the direct subscribers have it
        self._shares: list[bytes] = []  # shares that it was delivered to
        self._unassigned_shares: list[bytes] = []  # of those, shares without a member
        self._pending_commits = 0  # deliveries to the cell that are not committed yet
        self._receiver_count = 0
        self._fault = ""
        self._waiting_answers: list[tuple[Fanout, list[CellTarget]]] = []

    def deliver(
        self,
        local_cell: LocalCell,
        shares: list[bytes],
        message: Publish,
        origin: PublishOrigin | None,
    ) -> None:
        """Deliver the message to the subscribers and shares that do not have it yet."""
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
        """Record that one delivery is committed, and send the waiting answers after the last."""
        self._pending_commits -= 1
        self._receiver_count += count
        self._fault = self._fault or fault
        if self._pending_commits:
            return
        waiting, self._waiting_answers = self._waiting_answers, []
        for answer, moved in waiting:
            self._answer(answer, moved)

    def answer_when_committed(self, answer: Fanout, moved: list[CellTarget]) -> None:
        """Answer now or after the commit; add targets for other cells to `moved`."""
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
    """The inbox for one other node, across all its streams."""

    def __init__(self) -> None:
        self._entries: dict[int, InboxEntry] = {}
        self._stream_number = 0
        # Time and number of each broken stream, and its unconfirmed entries.
        self._broken_streams: list[tuple[float, int, list[int]]] = []

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
        """Return the entry of a message; create it if it is new."""
        found = self._entries.get(key)
        if found is None or found.is_lost:
            found = self._entries[key] = InboxEntry(cell, stream_number)
        found.stream_number = stream_number
        return found

    def remove(self, key: int) -> None:
        """Forget a message that will not be resent."""
        self._entries.pop(key, None)

    def __len__(self) -> int:
        return len(self._entries)


def entry_key(dedup_id: int, cell: int) -> int:
    return dedup_id << 16 | cell
