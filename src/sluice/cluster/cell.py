"""One cell of the cluster on the node that owns it: a whole broker, and what it sees of the other cells."""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.cluster_port import HERE, Abroad, Legs
from sluice.broker.broker import Broker
from sluice.broker.net.connection import Connection
from sluice.broker.namespaces.queues.reason_mapping import reason_of
from sluice.broker.sessions.retained import FULL
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.subscriptions import Capture, Share, Subscription
from sluice.cluster.plain.bridge_frames import ALONE
from sluice.cluster.plain.interest import BINDING
from sluice.cluster.remote_queues.session_proxies import SessionLegs, name_once
from sluice.cluster.membership.placement import cell_of, cell_of_queue
from sluice.cluster.plain.fanout import (
    ABANDONED,
    UNREACHABLE,
    Kept,
    Lookup,
    Origin,
    Seen,
    Source,
    Spread,
    WhenNoted,
)
from sluice.cluster.remote_queues.routing import EVERYWHERE, NOWHERE, cell_of_filter, cell_of_topic
from sluice.errors import QueueError
from sluice.queues.log.cross_node_dedup import KEY_BITS
from sluice.wire.packets import Publish
from sluice.wire.properties import PUBACK, PUBREC
from sluice.wire.reasons import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    NO_MATCHING_SUBSCRIBERS,
    QUOTA_EXCEEDED,
)
from sluice.wire.topics import has_wildcard

if TYPE_CHECKING:
    from sluice.cluster.node import Node


LOOKUPS_AT_ONCE: Final = 64  # of one session


class Cell:
    """`broker` is the core that the house of this cell is built round."""

    def __init__(self, node: Node, number: int, broker: Broker) -> None:
        self.number = number
        self.broker = broker
        self.filters: dict[bytes, int] = {}  # what it is interested in
        self.lookups: set[Lookup] = set()
        self.owed: set[Kept] = set()  # publishes from other cells that wait for this one's store
        self.asking = 0  # publishes of this cell that wait for others
        self.answered: asyncio.Event | None = None  # set when there are none: somebody waits for it
        self.is_lost = False
        self.is_closed = False  # nobody is let in to it any more: its tree is not searched
        self.abroad = CellAbroad(node, self)
        broker.has_room_for = self._has
        broker.router.abroad = self.abroad

    def _has(self, client_id: str) -> bool:
        return cell_of(client_id, self.abroad.node.cells) == self.number

    def furnish(self) -> None:
        """The house has its doors: they know from now on that there are other cells."""
        door = self.broker.router.door
        if door is not None:
            door.abroad = self.abroad
            door.service.lies_with = self._lie_together

    def _lie_together(self, queue: str, other: str) -> bool:
        cells = self.abroad.node.cells
        return cell_of_queue(queue, cells) == cell_of_queue(other, cells)

    def take(self, message: Publish, shares: list[bytes], spread: Spread | None) -> list[bytes]:
        """Give a message from another cell to whoever wants it here; the shares that have no member."""
        router = self.broker.router
        router.turn.begin()
        kept = router.kept
        taken = 0
        fault = ""
        origin = spread.origin if spread is not None else None
        if origin is not None:
            shares = self._unseen(origin, shares)
            if shares == [ALONE] and spread is not None:
                self._answer_again(spread)
                return []
        whole = not shares or shares[0] != ALONE
        door = router.door
        willed = False
        if shares and shares[0] == ALONE:
            shares = shares[1:]
        elif message.topic[:1] == b"$" and door is not None and door.takes(message.topic):
            door.publish_will(message)
            willed = True
        else:
            self.note(message)
            try:
                if origin is not None:
                    taken = int(router.publish_stored(message, None))
                else:
                    taken = int(router.publish(message, None))
            except QueueError as error:
                fault = str(error)
        if taken < 0:
            taken, fault = 0, FULL
        left = self._hand_out(message, shares, origin is not None)
        taken += len(shares) - len(left)
        if origin is not None and not fault:
            self._note_seen(origin, whole, [name for name in shares if name not in left])
        if spread is not None:
            spread.wait()
            if (willed or router.kept != kept) and router.keeper is not None:
                router.keeper.answer_when_kept(Kept(self.owed, spread), 0)
            spread.finish(taken, fault)
        return left

    def _unseen(self, origin: Origin, shares: list[bytes]) -> list[bytes]:
        """The shared subscriptions that have not had it; for them alone if those who subscribe by themselves have."""
        keeper = self.broker.router.keeper
        if keeper is None:
            return shares
        cell, session = origin.cell, origin.session
        others = [
            name
            for name in shares
            if name != ALONE and not keeper.has_taken(cell, session, _key(origin.mark, name))
        ]
        alone = len(shares) > 0 and shares[0] == ALONE
        if alone or keeper.has_taken(cell, session, _key(origin.mark, ALONE)):
            return [ALONE, *others]
        return others

    def _note_seen(self, origin: Origin, whole: bool, shares: list[bytes]) -> None:
        keys = [_key(origin.mark, name) for name in ([ALONE, *shares] if whole else shares)]
        keeper = self.broker.router.keeper
        if keys and keeper is not None:
            keeper.note_taken(origin.cell, origin.session, origin.lowest, keys)

    def _answer_again(self, spread: Spread) -> None:
        """All that it asks for was done, in this life or before: so much is true once the present frame is kept."""
        keeper = self.broker.router.keeper
        spread.wait()
        if keeper is not None:
            keeper.answer_when_kept(Kept(self.owed, spread), 0)
        spread.finish(1)

    async def answer_all(self, seconds: float) -> None:
        """Wait until its clients have heard of what they have published to other cells. They would say it again to the
        next owner, who cannot know that the others have it."""
        if self.asking:
            self.answered = asyncio.Event()
            try:
                await asyncio.wait_for(self.answered.wait(), seconds)
            except TimeoutError:
                pass  # they do say it again

    def lose(self) -> None:
        """It is not here any more: what its store still owes, its next owner does."""
        self.is_lost = True
        for kept in list(self.owed):
            kept.lose(self.number)

    def _hand_out(self, message: Publish, shares: list[bytes], stored: bool = False) -> list[bytes]:
        """Choose members for shared subscriptions; return those that have none. `stored`: the members
        get it when the store has the open frame."""
        router = self.broker.router
        left: list[bytes] = []
        for name in shares:
            share = router.subscriptions.share(name)
            if share is None:
                left.append(name)
            elif stored:
                if not router.hand_out_stored(message, share):
                    left.append(name)
            elif not router.hand_out(message, share, None):
                left.append(name)
        return left

    def note(self, message: Publish) -> None:
        for seen in self.abroad.seen.values():
            seen.add(message.topic)

    def retained(self, topic_filter: bytes) -> list[Publish]:
        """Return all messages for a filter at once. Clients are answered by `Searches`."""
        return self.broker.router.retained.matching(topic_filter, self.broker.turn.begin())


class CellSource(Source):
    """The publishes of this cell that go to others. `latest` holds its newest retained publish of each
    topic until that is answered."""

    def __init__(self, cell: Cell) -> None:
        self.latest: dict[bytes, Publish] = {}  # by topic
        self._cell = cell

    def is_abandoned(self, spread: Spread) -> bool:
        """A QoS 2 message is recognized by its mark, so it may be sent as long as its session is here."""
        if self._cell.is_lost:
            return True
        session = spread.session
        if session is None or spread.message.qos != 1:
            return False
        return session.connection is None or session.epoch() != spread.epoch

    def is_superseded(self, spread: Spread) -> bool:
        return self.latest.get(spread.message.topic) is not spread.message


class CellAbroad(Abroad):
    def __init__(self, node: Node, cell: Cell) -> None:
        self.node = node
        self.cell = cell.number
        self._cell = cell
        self._router = cell.broker.router
        self._source = CellSource(cell)
        # By session, filters whose retained messages are to be looked up, and `Seen.count` at their SUBSCRIBE.
        self._pending: dict[Session, dict[bytes, tuple[Subscription, int]]] = {}
        self._running: dict[Session, int] = {}  # lookups under way, without those that are parked
        self._lookups: dict[Session, int] = {}  # all lookups that have begun
        self.seen: dict[Session, Seen] = {}  # of sessions with lookups, begun or pending
        self._is_resuming = False

    # ---- queues

    def cell_for(self, topic: bytes, payload: bytes) -> i64:
        cell = cell_of_topic(topic, payload, self.node.cells)
        return HERE if cell == NOWHERE or cell == self.cell else cell

    def is_far(self, topic_filter: bytes) -> bool:
        return cell_of_filter(topic_filter, self.node.cells) not in (NOWHERE, self.cell)

    def is_near(self, topic_filter: bytes) -> bool:
        return cell_of_filter(topic_filter, self.node.cells) in (NOWHERE, EVERYWHERE, self.cell)

    def legs_of(self, session: Session) -> Legs:
        return self._legs(session, True)

    def _legs(self, session: Session, fresh: bool) -> SessionLegs:
        legs = session.legs
        if not isinstance(legs, SessionLegs):
            legs = SessionLegs(session, self, fresh)
            session.legs = legs
        return legs

    def rejoin(self, session: Session, topic_filter: bytes, qos: i64, wishes: list[str]) -> None:
        self._legs(session, False).rejoin(topic_filter, int(qos), wishes)

    def post_will(self, cell: i64, will: Publish) -> None:
        self.node.post_will(int(cell), will)

    # ---- plain topics

    def keeps(self, topic: bytes) -> bool:
        return topic.startswith(b"$SYS/") or cell_of(topic, self.node.cells) == self.cell

    def publish(self, packet: Publish, session: Session, connection: Connection) -> None:
        router = self._router
        kept = router.kept
        keeper = router.keeper
        once = packet.qos == 2 and session.sid != 0 and keeper is not None
        said_before = session.mark_of(packet) if once else 0
        mark = said_before or (keeper.new_mark() if once and keeper is not None else 0)
        goals, shares = self._goals(packet, mark)
        if packet.retain:
            self._cell.note(packet)
        if said_before:
            taken, shares = 1, []  # this cell had it in the frame in which the mark was noted
        else:
            try:
                if once:
                    taken = int(router.publish_stored(packet, session))
                else:
                    taken = int(router.publish(packet, session))
            except QueueError as error:
                session.refuse(packet, connection, reason_of(error), str(error))
                return
        if taken < 0:
            session.refuse(packet, connection, QUOTA_EXCEEDED, FULL)
            return
        left = self._cell._hand_out(packet, shares, once)
        taken += len(shares) - len(left)
        waits = router.kept != kept or (packet.qos == 2 and session.sid != 0)
        if not goals and not left:
            if once:
                session.end_pass(int(packet.packet_id))
            if packet.qos > 0 and waits:
                router.answer_when_kept(session, packet)
            elif packet.qos > 0:
                reason = NO_MATCHING_SUBSCRIBERS if taken == 0 else 0
                connection.acknowledge(PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, "")
        elif packet.qos > 0:
            session.answer_later(packet)
            self._cell.asking += 1
            epoch = session.epoch()
            spread = self.node.new_spread(packet, partial(self._answer, session, packet, epoch))
            spread.source, spread.session, spread.epoch = self._source, session, epoch
            if packet.retain:
                self._source.latest[packet.topic] = packet
            if once and keeper is not None:
                lowest = session.begin_pass(packet, mark)
                spread.origin = Origin(self.cell, session.sid, mark, lowest)
                then = WhenNoted(partial(self._send_out, packet, goals, left, spread, taken))
                keeper.pass_on(session, int(packet.packet_id), mark, then)
            else:
                if waits and keeper is not None:
                    keeper.answer_when_kept(Kept(set(), spread), 0)
                self._send_out(packet, goals, left, spread, taken)
        else:
            if packet.retain:
                self._source.latest.pop(packet.topic, None)
            self.node.spread(goals, packet, None)
        if waits:
            router.hold_back(connection)
        self.node.hold_back(connection)

    def _send_out(
        self, packet: Publish, goals: dict[int, list[bytes]], left: list[bytes], spread: Spread, taken: int
    ) -> None:
        if self._cell.is_lost:
            return  # the next owner does, when its client says it again
        self.node.spread(goals, packet, spread)
        for name in left:
            self.node.hand_on(name, packet, spread, {self.cell})
        spread.finish(taken)

    def pass_by_leg(self, session: Session, packet: Publish, then: Callable[[], None]) -> None:
        """A QoS 2 publish for a queue of another cell: `then` is called when it has a name that it keeps however often
        it is said, by whichever owner of this cell. A queue takes a name only once."""
        keeper = self._router.keeper
        if keeper is None or not session.sid:
            name_once(packet, secrets.token_hex(12))
            then()
            return
        mark = session.mark_of(packet) or keeper.new_mark()
        session.begin_pass(packet, mark)
        name_once(packet, f"{self.cell:x}.{session.sid:x}.{mark:x}")
        keeper.pass_on(session, int(packet.packet_id), mark, WhenNoted(then))

    def _answer(self, session: Session, packet: Publish, epoch: int, taken: int, fault: str) -> None:
        cell = self._cell
        cell.asking -= 1
        if cell.asking == 0 and cell.answered is not None:
            cell.answered.set()
        if packet.retain and self._source.latest.get(packet.topic) is packet:
            del self._source.latest[packet.topic]
        if not cell.is_lost and fault != ABANDONED:
            reason = NO_MATCHING_SUBSCRIBERS if taken == 0 else 0
            if fault:
                reason = IMPLEMENTATION_SPECIFIC_ERROR if fault == UNREACHABLE else QUOTA_EXCEEDED
            session.answer_far(packet, False, epoch, reason, fault)

    def _goals(self, packet: Publish, mark: int = 0) -> tuple[dict[int, list[bytes]], list[bytes]]:
        """By other cell, the shared subscriptions that it is to choose members for; and those of this cell."""
        interest = self.node.interest
        match = interest.match(packet.topic)
        goals: dict[int, list[bytes]] = {cell: [] for cell in match.cells if cell != self.cell}
        if packet.qos > 0:
            for cell in interest.unknown:
                goals.setdefault(cell, [])
        if packet.retain and not self.keeps(packet.topic):
            goals.setdefault(cell_of(packet.topic, self.node.cells), [])
        goals.pop(self.cell, None)
        shares: list[bytes] = []
        for name, cell in match.choose(mark) if match.shares else ():
            if cell == self.cell:
                shares.append(name)
            else:
                goals.setdefault(cell, []).append(name)
        return goals, shares

    def publish_will(self, will: Publish, session: Session) -> None:
        self.spread_own(will, session)

    def spread_own(self, message: Publish, session: Session | None) -> None:
        """A message that nobody waits to hear of."""
        goals, shares = self._goals(message)
        if message.retain:
            self._cell.note(message)
        try:
            self._router.publish(message, session)
        except QueueError as error:
            self.node.warn(f"a will for {message.topic.decode()} was not kept: {error}")
        self._cell._hand_out(message, shares)
        spread = self.node.new_spread(message, _nobody_waits) if message.qos > 0 else None
        self.node.spread(goals, message, spread)

    def hand_on(self, message: Publish, share: Share) -> None:
        name = b"$share/" + share.group + b"/" + share.topic_filter
        self.node.hand_on(name, message, self.node.new_spread(message, _nobody_waits), {self.cell})

    def interest(self, topic_filter: bytes, count: int) -> None:
        self._change(topic_filter, self._cell.filters.get(topic_filter, 0) + count)

    def captures_changed(self, captures: list[Capture]) -> None:
        wanted = {BINDING + one.topic_filter for one in captures}
        for name in [one for one in self._cell.filters if one.startswith(BINDING) and one not in wanted]:
            self._change(name, 0)
        for name in wanted:
            if name not in self._cell.filters:
                self._change(name, 1)

    def _change(self, name: bytes, count: int) -> None:
        if count > 0:
            self._cell.filters[name] = count
        else:
            self._cell.filters.pop(name, None)
        self.node.tell(self._cell, {name: max(0, count)})

    def when_known(self, known: Callable[[], None], late: Callable[[], None]) -> None:
        self.node.when_known(known, late)

    def send_retained(self, subscription: Subscription) -> None:
        """Look up what is retained for a subscription, in all cells that may have some.

        A session has at most LOOKUPS_AT_ONCE lookups under way; of others only the filter is kept."""
        session = subscription.session
        seen = self.seen.get(session)
        if seen is None:
            seen = self.seen[session] = Seen()
        pending = self._pending.setdefault(session, {})
        pending.pop(subscription.topic_filter, None)
        pending[subscription.topic_filter] = (subscription, seen.count)
        self._look_up_next(session)

    def _look_up_next(self, session: Session) -> None:
        """Begin lookups while there are slots, and at most LOOKUPS_AT_ONCE in this turn: parked ones
        leave their slots at once."""
        pending = self._pending.get(session)
        begun = 0
        while pending and begun < LOOKUPS_AT_ONCE and self._running.get(session, 0) < LOOKUPS_AT_ONCE:
            subscription, since = pending.pop(next(iter(pending)))
            if self._is_wanted(subscription):
                begun += 1
                self._look_up(subscription, since)
        if not pending:
            self._pending.pop(session, None)
            if session not in self._lookups:
                self.seen.pop(session, None)
        elif begun == LOOKUPS_AT_ONCE and self._running.get(session, 0) < LOOKUPS_AT_ONCE:
            self._resume_later()

    def _look_up(self, subscription: Subscription, since: int) -> None:
        session = subscription.session
        topic_filter = subscription.topic_filter
        if topic_filter.startswith(b"$SYS/"):
            cells = [self.cell]
        elif has_wildcard(topic_filter):
            cells = list(range(self.node.cells))
        else:
            cells = [cell_of(topic_filter, self.node.cells)]
        lookup = Lookup(topic_filter, partial(self._found, subscription), self.seen[session], since)
        self._running[session] = self._running.get(session, 0) + 1
        self._lookups[session] = self._lookups.get(session, 0) + 1
        lookup.changed = partial(self._slot_changed, session)
        lookup.left = len(cells)
        lookup.wanted = partial(self._is_wanted, subscription)
        self._cell.lookups.add(lookup)
        lookup.over = partial(self._looked_up, session, lookup)
        self.node.look_up_all(cells, lookup)

    def _looked_up(self, session: Session, lookup: Lookup) -> None:
        if lookup in self._cell.lookups:
            self._cell.lookups.discard(lookup)
            left = self._lookups.pop(session, 1) - 1
            if left:
                self._lookups[session] = left
            elif session not in self._pending:
                self.seen.pop(session, None)

    def _slot_changed(self, session: Session, taken: bool) -> None:
        """A lookup is over or parked and leaves its slot, or a parked one goes on and takes one again."""
        running = self._running.pop(session, 0) + (1 if taken else -1)
        if running:
            self._running[session] = running
        if not taken and session in self._pending:
            self._resume_later()

    def _resume_later(self) -> None:
        if not self._is_resuming:
            self._is_resuming = True
            asyncio.get_running_loop().call_soon(self._resume_lookups)

    def _resume_lookups(self) -> None:
        self._is_resuming = False
        for session in list(self._pending):
            self._look_up_next(session)

    def _is_wanted(self, subscription: Subscription) -> bool:
        session = subscription.session
        known = session.subscriptions.get(subscription.topic_filter) is subscription
        return known and not self._cell.is_lost

    def _found(self, subscription: Subscription, messages: list[Publish]) -> None:
        session = subscription.session
        if messages and session.subscriptions.get(subscription.topic_filter) is subscription:
            self._router.turn.begin()
            self._router.deliver_retained(subscription, messages)


def _key(mark: int, share: bytes) -> int:
    """One part of what becomes of a message: a shared subscription of its name, or all who subscribe by themselves."""
    part = zlib.crc32(share) & ((1 << KEY_BITS) - 1) | 1 if share else 0
    return mark << KEY_BITS | part


def _nobody_waits(taken: int, fault: str) -> None:
    """A will, or a shared message on its way from one member to another."""
