"""One plain publish, or one question for retained messages, on its way to several cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.queues.ports import Publisher
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.sessions.session import Session
    from sluice.cluster.plain.bridge_frames import CellTarget


# Faults of a publish, beside those of the cells that refuse it.
UNREACHABLE: Final = (
    "a part of the cluster does not answer: publish again (it may have been stored, so use a "
    "message-id where that matters), and see `sluice cluster status` if it stays so"
)
MAX_SWEEP_SECONDS: Final = 1.0  # seconds between two looks for what has waited too long
ABANDONED: Final = "its publisher is gone"


class PublishOrigin:
    """Whose a QoS 2 message is that must come once, whoever dies: the cell and number of its session, its mark there,
    and the lowest mark that is open (see `queues/once`)."""

    def __init__(self, cell: int, session: int, dedup_id: int, lowest_open_id: int) -> None:
        self.cell = cell
        self.session = session
        self.dedup_id = dedup_id
        self.lowest_open_id = lowest_open_id


class FanoutSource:
    """The cell that publishes come from. It is asked before one of them is sent a second time."""

    def is_abandoned(self, fanout: Fanout) -> bool:
        """Whether nobody waits for the answer any more: the publish must not take effect late."""
        return False

    def is_superseded(self, fanout: Fanout) -> bool:
        """Whether the cell has sent a newer retained message for the same topic since."""
        return False


class Fanout:
    """Answered when every cell that had to keep something has it: `done` gets how many receivers there were, and the
    first refusal, if there was one."""

    def __init__(
        self,
        message: Publish,
        on_done: Callable[[int, str], None],
        on_lost: Callable[[int], None] | None = None,
    ) -> None:
        self.message = message
        self.dedup_id = 0  # its number at the node it comes from: see `taken`
        self.origin: PublishOrigin | None = None
        self.receivers = 0
        self.fault = ""
        self.deadline = 0.0  # when it is given up without an answer; 0: never
        self.source: FanoutSource | None = None
        self.session: Session | None = None  # whose it is,
        self.epoch = 0  # and by which of its connections it came
        self.on_lost = on_lost  # told of a cell that was to keep it and is not here any more
        self._on_done = on_done
        self._pending = 1

    def expect_answer(self) -> None:
        self._pending += 1

    def add_answer(self, receivers: int, fault: str = "") -> None:
        self.receivers += receivers
        self.fault = self.fault or fault
        self._pending -= 1
        if self._pending == 0:
            self._on_done(self.receivers, self.fault)


class PendingCommit(Publisher):
    """What the store of one cell of this node owes a publish."""

    def __init__(self, pending: set[PendingCommit], fanout: Fanout) -> None:
        self._pending = pending
        self._fanout = fanout
        pending.add(self)
        fanout.expect_answer()

    def on_committed(self, tag: i64) -> None:
        if self in self._pending:
            self._pending.discard(self)
            self._fanout.add_answer(0)

    def mark_lost(self, cell: int) -> None:
        """The cell has moved, or is to: its next owner is asked."""
        if self._fanout.on_lost is not None:
            self._fanout.on_lost(cell)
        self.on_committed(0)


class AfterCommit(Publisher):
    """What happens once the store has what was noted last."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def on_committed(self, tag: i64) -> None:
        self._then()


class PublishedTopics:
    """Topics that were published to while a session has lookups, under way or pending.

    Publishes are numbered: a lookup leaves out only topics that were published to since its SUBSCRIBE."""

    def __init__(self) -> None:
        self.count = 0
        self._last_numbers: dict[bytes, int] = {}  # by topic, the number of its newest publish

    def add(self, topic: bytes) -> None:
        self.count += 1
        self._last_numbers[topic] = self.count

    def has(self, topic: bytes, since: int) -> bool:
        return self._last_numbers.get(topic, 0) > since


class RetainedLookup:
    """What is retained for a filter, cell by cell. A topic that was published to since number `since` is left out:
    what was retained before must not come after it."""

    def __init__(
        self,
        topic_filter: bytes,
        on_found: Callable[[list[Publish]], None],
        published_topics: PublishedTopics,
        since: int,
    ) -> None:
        self.topic_filter = topic_filter
        self.published_topics = published_topics
        self.since = since
        self.remaining = 0  # cells that have not answered
        self.parked = 0  # those of them that have no owner
        self.is_active = True  # some cell is being asked: it takes one of the session's slots
        self.on_active_changed: Callable[[bool], None] | None = (
            None  # told of each change of `is_active`
        )
        self.is_wanted: Callable[[], bool] | None = None  # whether the subscription is still there
        self.on_done: Callable[[], None] | None = None
        self._on_found = on_found

    def add_answer(self, messages: list[Publish], cells: int = 1) -> None:
        """So many cells have answered."""
        self.remaining -= cells
        self._on_found(
            [one for one in messages if not self.published_topics.has(one.topic, self.since)]
        )
        self._update_active()
        if self.remaining <= 0 and self.on_done is not None:
            self.on_done()

    def park(self, cells: int) -> None:
        """So many more of its cells wait for an owner; -1: one has an owner again."""
        self.parked += cells
        self._update_active()

    def _update_active(self) -> None:
        is_active = self.remaining > self.parked
        if is_active != self.is_active:
            self.is_active = is_active
            if self.on_active_changed is not None:
                self.on_active_changed(is_active)


class ParkedRequest:
    """Something for a cell that nobody answers for now."""

    def __init__(
        self, target: CellTarget, request: Fanout | RetainedLookup, deadline: float
    ) -> None:
        self.target = target
        self.request = request
        self.deadline = deadline
