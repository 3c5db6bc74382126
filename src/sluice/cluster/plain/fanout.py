"""The state of a publish or retained lookup that waits for the answers of several cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.queues.ports import Publisher
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.sessions import Session
    from sluice.cluster.plain.bridge_frames import CellTarget


# Faults of a publish, in addition to the refusals of cells.
UNREACHABLE: Final = (
    "a part of the cluster does not answer: publish again (the message may have been stored, so "
    "use a message-id to avoid duplicates), and check `sluice cluster status` if it persists"
)
MAX_SWEEP_SECONDS: Final = 1.0  # between two checks of deadlines
ABANDONED: Final = "its publisher has disconnected"


class PublishOrigin:
    """Identifies a QoS 2 message that must take effect once, across failures of nodes.

    It names the cell and number of the session, the dedup id there, and the session's lowest open
    dedup id (see `queues.log.cross_node_dedup`).
    """

    def __init__(self, cell: int, session: int, dedup_id: int, lowest_open_id: int) -> None:
        self.cell = cell
        self.session = session
        self.dedup_id = dedup_id
        self.lowest_open_id = lowest_open_id


class FanoutSource:
    """The cell that publishes come from. It decides whether one may be sent again."""

    def is_abandoned(self, fanout: Fanout) -> bool:
        """Return whether no client waits for the answer: the publish must not take effect late."""
        return False

    def is_superseded(self, fanout: Fanout) -> bool:
        """Return whether the cell has sent a newer retained message for the same topic since."""
        return False


class Fanout:
    """A publish to several cells.

    When every cell has committed it, `on_done` gets the number of receivers and the first refusal,
    or an empty string.
    """

    def __init__(
        self,
        message: Publish,
        on_done: Callable[[int, str], None],
        on_lost: Callable[[int], None] | None = None,
    ) -> None:
        self.message = message
        self.dedup_id = 0  # its number at the node it comes from: see `node_inbox`
        self.origin: PublishOrigin | None = None
        self.receivers = 0
        self.fault = ""
        self.deadline = 0.0  # of the answers; 0: none
        self.source: FanoutSource | None = None
        self.session: Session | None = None  # of the publisher
        self.epoch = 0  # of the publisher's connection
        self.on_lost = on_lost  # called with a cell that moved before it committed the message
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
    """A publish that waits for a commit of one local cell."""

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
        """Stop waiting, because the cell has moved or moves: send to its next owner."""
        if self._fanout.on_lost is not None:
            self._fanout.on_lost(cell)
        self.on_committed(0)


class AfterCommit(Publisher):
    """Calls `then` once the open frame is committed."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def on_committed(self, tag: i64) -> None:
        self._then()


class PublishedTopics:
    """Topics that were published to while a session has active or pending lookups.

    Publishes are numbered: a lookup skips only topics that were published to since its SUBSCRIBE.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last_numbers: dict[bytes, int] = {}  # by topic, the number of its newest publish

    def add(self, topic: bytes) -> None:
        self.count += 1
        self._last_numbers[topic] = self.count

    def has(self, topic: bytes, since: int) -> bool:
        return self._last_numbers.get(topic, 0) > since


class RetainedLookup:
    """A lookup of the retained messages for a filter, cell by cell.

    It skips topics that were published to since number `since`: an older retained message must not
    arrive after a newer publish. Who looks up overrides the notifications.
    """

    def __init__(self, topic_filter: bytes, published_topics: PublishedTopics, since: int) -> None:
        self.topic_filter = topic_filter
        self.published_topics = published_topics
        self.since = since
        self.remaining = 0  # cells that have not answered
        self.parked = 0  # of those, cells that have no owner
        self.is_active = True  # a cell is being searched: the lookup takes a slot of the session

    def is_wanted(self) -> bool:
        """Return whether the subscription still exists."""
        return True

    def on_found(self, messages: list[Publish]) -> None:
        """Deliver messages of one cell."""

    def on_active_changed(self) -> None:
        """Called with a new value of `is_active`."""

    def on_done(self) -> None:
        """Called when all cells have answered."""

    def add_answer(self, messages: list[Publish], cells: int = 1) -> None:
        """Deliver messages that were found; `cells` have answered completely."""
        self.remaining -= cells
        self.on_found(
            [one for one in messages if not self.published_topics.has(one.topic, self.since)]
        )
        self._update_active()
        if self.remaining <= 0:
            self.on_done()

    def park(self, cells: int) -> None:
        """Add to the number of cells that wait for an owner; -1: one has an owner again."""
        self.parked += cells
        self._update_active()

    def _update_active(self) -> None:
        is_active = self.remaining > self.parked
        if is_active != self.is_active:
            self.is_active = is_active
            self.on_active_changed()


class ParkedRequest:
    """A request for a cell that has no reachable owner now."""

    def __init__(
        self, target: CellTarget, request: Fanout | RetainedLookup, deadline: float
    ) -> None:
        self.target = target
        self.request = request
        self.deadline = deadline
