"""One plain publish, or one question for retained messages, on its way to several cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.queues.ports import Publisher
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.sessions.session import Session
    from sluice.cluster.plain.bridge_frames import Goal


# Faults of a publish, beside those of the cells that refuse it.
UNREACHABLE: Final = (
    "a part of the cluster does not answer: publish again (it may have been stored, so use a "
    "message-id where that matters), and see `sluice cluster status` if it stays so"
)
LONGEST_SWEEP: Final = 1.0  # seconds between two looks for what has waited too long
ABANDONED: Final = "its publisher is gone"


class Origin:
    """Whose a QoS 2 message is that must come once, whoever dies: the cell and number of its session, its mark there,
    and the lowest mark that is open (see `queues/once`)."""

    def __init__(self, cell: int, session: int, mark: int, lowest: int) -> None:
        self.cell = cell
        self.session = session
        self.mark = mark
        self.lowest = lowest


class Source:
    """The cell that publishes come from. It is asked before one of them is sent a second time."""

    def is_abandoned(self, spread: Spread) -> bool:
        """Whether nobody waits for the answer any more: the publish must not take effect late."""
        return False

    def is_superseded(self, spread: Spread) -> bool:
        """Whether the cell has sent a newer retained message for the same topic since."""
        return False


class Spread:
    """Answered when every cell that had to keep something has it: `done` gets how many receivers there were, and the
    first refusal, if there was one."""

    def __init__(
        self, message: Publish, done: Callable[[int, str], None], lost: Callable[[int], None] | None = None
    ) -> None:
        self.message = message
        self.mark = 0  # its number at the node it comes from: see `taken`
        self.origin: Origin | None = None
        self.taken = 0
        self.fault = ""
        self.until = 0.0  # when it is given up without an answer; 0: never
        self.source: Source | None = None
        self.session: Session | None = None  # whose it is,
        self.epoch = 0  # and by which of its connections it came
        self.lost = lost  # told of a cell that was to keep it and is not here any more
        self._done = done
        self._waiting = 1

    def wait(self) -> None:
        self._waiting += 1

    def finish(self, taken: int, fault: str = "") -> None:
        self.taken += taken
        self.fault = self.fault or fault
        self._waiting -= 1
        if self._waiting == 0:
            self._done(self.taken, self.fault)


class Kept(Publisher):
    """What the store of one cell of this node owes a publish."""

    def __init__(self, owed: set[Kept], spread: Spread) -> None:
        self._owed = owed
        self._spread = spread
        owed.add(self)
        spread.wait()

    def stored(self, tag: i64) -> None:
        if self in self._owed:
            self._owed.discard(self)
            self._spread.finish(0)

    def lose(self, cell: int) -> None:
        """The cell has moved, or is to: its next owner is asked."""
        if self._spread.lost is not None:
            self._spread.lost(cell)
        self.stored(0)


class WhenNoted(Publisher):
    """What happens once the store has what was noted last."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def stored(self, tag: i64) -> None:
        self._then()


class Seen:
    """Topics that were published to while a session has lookups, under way or pending.

    Publishes are numbered: a lookup leaves out only topics that were published to since its SUBSCRIBE."""

    def __init__(self) -> None:
        self.count = 0
        self._latest: dict[bytes, int] = {}  # by topic, the number of its newest publish

    def add(self, topic: bytes) -> None:
        self.count += 1
        self._latest[topic] = self.count

    def has(self, topic: bytes, since: int) -> bool:
        return self._latest.get(topic, 0) > since


class Lookup:
    """What is retained for a filter, cell by cell. A topic that was published to since number `since` is left out:
    what was retained before must not come after it."""

    def __init__(
        self, topic_filter: bytes, found: Callable[[list[Publish]], None], seen: Seen, since: int
    ) -> None:
        self.topic_filter = topic_filter
        self.seen = seen
        self.since = since
        self.left = 0  # cells that have not answered
        self.parked = 0  # those of them that have no owner
        self.is_active = True  # some cell is being asked: it takes one of the session's slots
        self.changed: Callable[[bool], None] | None = None  # told of each change of `is_active`
        self.wanted: Callable[[], bool] | None = None  # whether the subscription is still there
        self.over: Callable[[], None] | None = None
        self._found = found

    def add(self, messages: list[Publish], cells: int = 1) -> None:
        """So many cells have answered."""
        self.left -= cells
        self._found([one for one in messages if not self.seen.has(one.topic, self.since)])
        self._update()
        if self.left <= 0 and self.over is not None:
            self.over()

    def park(self, cells: int) -> None:
        """So many more of its cells wait for an owner; -1: one has an owner again."""
        self.parked += cells
        self._update()

    def _update(self) -> None:
        is_active = self.left > self.parked
        if is_active != self.is_active:
            self.is_active = is_active
            if self.changed is not None:
                self.changed(is_active)


class Parked:
    """Something for a cell that nobody answers for now."""

    def __init__(self, goal: Goal, what: Spread | Lookup, until: float) -> None:
        self.goal = goal
        self.what = what
        self.until = until
