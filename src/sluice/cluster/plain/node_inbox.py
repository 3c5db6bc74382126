"""What another node has given this one, remembered until that one has heard our answer.

A node that has lost its line to us says again what was not answered, and cannot know what was lost: the message or the
answer. So a message has a number at the node it comes from, and what we have taken in under that number for a cell is
answered again, and not given to anybody again. The memory is of one life of the other node and of one of ours. What
must come once beyond that (QoS 2 of lasting sessions) has a mark that cells keep: see `queues/once`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sluice.cluster.plain.bridge_frames import ALONE, ANY_CELL, Goal
from sluice.cluster.plain.fanout import Origin, Spread
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.cluster.cell import Cell

REMEMBER_SECONDS: Final = 60.0  # what was not heard on a line that broke: longer than anybody says it again


class Taken:
    """One message in one cell."""

    def __init__(self, cell: int, line: int) -> None:
        self.line = line  # the last one on which it was said
        self.lost = False  # the cell has moved before it was kept
        self._cell = cell
        self._is_routed = False  # who has subscribed by himself has it,
        self._shares: list[bytes] = []  # and these shared subscriptions have been asked,
        self._left: list[bytes] = []  # of which these had no member
        self._open = 0  # times it was given to the cell and is not kept yet
        self._count = 0
        self._fault = ""
        self._waiting: list[tuple[Spread, list[Goal]]] = []

    def give(self, here: Cell, shares: list[bytes], message: Publish, origin: Origin | None) -> None:
        """To whoever wants it, and to nobody twice."""
        alone = len(shares) > 0 and shares[0] == ALONE
        others = [name for name in shares if name != ALONE and name not in self._shares]
        if alone or self._is_routed:
            if not others:
                return
            shares = [ALONE, *others]
        else:
            self._is_routed = True
            shares = others
        self._shares = self._shares + others
        self._open += 1
        kept = Spread(message, self.finish, self.lose)
        kept.origin = origin
        self._left = self._left + here.take(message, shares, kept)
        kept.finish(0)

    def lose(self, cell: int) -> None:
        self.lost = True

    def finish(self, count: int, fault: str) -> None:
        """All that had to be kept is."""
        self._open -= 1
        self._count += count
        self._fault = self._fault or fault
        if self._open:
            return
        waiting, self._waiting = self._waiting, []
        for answer, gone in waiting:
            self._tell(answer, gone)

    def tell(self, answer: Spread, gone: list[Goal]) -> None:
        """What became of it, now or when that is known; `gone` gets what is for others to do."""
        answer.wait()
        if not self._open:
            self._tell(answer, gone)
        else:
            self._waiting.append((answer, gone))

    def _tell(self, answer: Spread, gone: list[Goal]) -> None:
        if self.lost:
            gone.append((self._cell, []))
        if self._left:
            gone.append((ANY_CELL, self._left))
        answer.finish(self._count, self._fault)


class Memory:
    """Of one other node, over all its lines."""

    def __init__(self) -> None:
        self._known: dict[int, Taken] = {}
        self._line = 0
        self._broken: list[
            tuple[float, int, list[int]]
        ] = []  # when which line broke, and what was not heard on it

    def new_line(self, now: float) -> int:
        while self._broken and self._broken[0][0] + REMEMBER_SECONDS < now:
            _, line, keys = self._broken.pop(0)
            for key in keys:
                found = self._known.get(key)
                if found is not None and found.line == line:
                    self.forget(key)
        self._line += 1
        return self._line

    def line_broke(self, line: int, now: float) -> None:
        self._broken.append((now, line, [key for key, one in self._known.items() if one.line == line]))

    def find(self, key: int, cell: int, line: int) -> Taken:
        """What is known of it; from now on it is."""
        found = self._known.get(key)
        if found is None or found.lost:
            found = self._known[key] = Taken(cell, line)
        found.line = line
        return found

    def forget(self, key: int) -> None:
        """It will not be said again."""
        self._known.pop(key, None)

    def __len__(self) -> int:
        return len(self._known)


def key_of(mark: int, cell: int) -> int:
    return mark << 16 | cell
