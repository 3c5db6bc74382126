"""One cell on the node that owns it: a complete broker, connected to the other cells.

`Cell` applies publishes that arrive from other cells. `CellClusterPort` is the broker's way out:
it routes queue requests, plain publishes, interest and retained lookups to the cells that own
them. Neither knows sockets or the coordinator; `Node` does the sending.

Invariant: a QoS 2 publish takes effect once per cell and share, because its dedup id goes into
the receiving cell's inbox in the same frame as its effects.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.broker.broker import Broker
from sluice.broker.namespaces import get_reason_code
from sluice.broker.ports import ConnectionPort
from sluice.broker.routing import LOCAL_CELL, ClientClaim, ClusterPort, SessionProxies
from sluice.broker.sessions import (
    RETAINED_FULL,
    Session,
    SharedSubscription,
    SubscribeOptions,
    Subscription,
    TopicBinding,
)
from sluice.broker.turn import Turn
from sluice.cluster.plain.bridge_frames import SHARES_ONLY
from sluice.cluster.plain.fanout import (
    ABANDONED,
    UNREACHABLE,
    AfterCommit,
    Fanout,
    FanoutSource,
    PendingCommit,
    PublishedTopics,
    PublishOrigin,
    RetainedLookup,
)
from sluice.cluster.plain.interest import BINDING_PREFIX
from sluice.cluster.plain.local_cell import LocalCell
from sluice.cluster.remote_queues.client_claim import RemoteClientClaim
from sluice.cluster.remote_queues.routing import ALL_CELLS, NO_CELL, cell_of_filter, cell_of_topic
from sluice.cluster.remote_queues.session_proxies import MqttSessionProxies, set_message_id
from sluice.cluster.remote_queues.session_proxy import make_connect
from sluice.errors import QueueError
from sluice.placement import cell_of
from sluice.queues.log import PART_BITS
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


MAX_LOOKUPS_PER_SESSION: Final = 64


class Cell(LocalCell):
    """A cell that is open on this node. `broker` is the core of the cell's broker instance."""

    def __init__(self, node: Node, number: int, broker: Broker) -> None:
        super().__init__(number, broker)
        self.filters: dict[bytes, int] = {}  # subscriptions of this cell per topic filter
        self.lookups: set[RetainedLookup] = set()
        # Publishes from other cells that wait for a commit of this cell's store.
        self.pending_commits: set[PendingCommit] = set()
        self.pending_publishes = 0  # publishes of this cell that wait for answers of other cells
        # Set when `pending_publishes` reaches 0; None unless `wait_answered` runs.
        self.all_answered: asyncio.Event | None = None
        self.is_lost = False
        self.cluster_port = CellClusterPort(node, self)
        broker.router.join_cluster(self.cluster_port)

    def deliver(self, message: Publish, shares: list[bytes], fanout: Fanout | None) -> list[bytes]:
        """Deliver a message from another cell; return the shares that have no member here."""
        router = self.broker.router
        router.turn.begin()
        stored_before = router.stored_count
        receivers = 0
        fault = ""
        origin = fanout.origin if fanout is not None else None
        if origin is not None:
            shares = self._new_recipients(origin, shares)
            if shares == [SHARES_ONLY] and fanout is not None:
                self._answer_duplicate(fanout)
                return []
        includes_direct = not shares or shares[0] != SHARES_ONLY
        namespace = router.namespaces.find(message.topic)
        is_will = False
        if shares and shares[0] == SHARES_ONLY:
            shares = shares[1:]
        elif namespace is not router.namespaces.plain:
            namespace.publish_will(message, None)
            is_will = True
        else:
            self.note_published(message)
            try:
                if origin is not None:
                    receivers = int(router.publish_after_commit(message, None))
                else:
                    receivers = int(router.publish(message, None))
            except QueueError as error:
                fault = str(error)
        if receivers < 0:
            receivers, fault = 0, RETAINED_FULL
        unassigned = self._deliver_to_shares(message, shares, origin is not None)
        receivers += len(shares) - len(unassigned)
        if origin is not None and not fault:
            self._record_inbox(
                origin, includes_direct, [name for name in shares if name not in unassigned]
            )
        if fanout is not None:
            fanout.expect_answer()
            if is_will or router.stored_count != stored_before:
                router.session_store.notify_after_commit(
                    PendingCommit(self.pending_commits, fanout), 0
                )
            fanout.add_answer(receivers, fault)
        return unassigned

    def _new_recipients(self, origin: PublishOrigin, shares: list[bytes]) -> list[bytes]:
        """Return the shares that have not received this message yet.

        The result begins with SHARES_ONLY if the direct subscribers have received it.
        """
        session_store = self.broker.router.session_store
        cell, session = origin.cell, origin.session
        others = [
            name
            for name in shares
            if name != SHARES_ONLY
            and not session_store.has_in_inbox(cell, session, _inbox_key(origin.dedup_id, name))
        ]
        shares_only = len(shares) > 0 and shares[0] == SHARES_ONLY
        if shares_only or session_store.has_in_inbox(
            cell, session, _inbox_key(origin.dedup_id, SHARES_ONLY)
        ):
            return [SHARES_ONLY, *others]
        return others

    def _record_inbox(
        self, origin: PublishOrigin, includes_direct: bool, shares: list[bytes]
    ) -> None:
        keys = [
            _inbox_key(origin.dedup_id, name)
            for name in ([SHARES_ONLY, *shares] if includes_direct else shares)
        ]
        if keys:
            session_store = self.broker.router.session_store
            session_store.record_inbox(origin.cell, origin.session, origin.lowest_open_id, keys)

    def _answer_duplicate(self, fanout: Fanout) -> None:
        """Answer a publish that was applied before, once the current frame is committed."""
        session_store = self.broker.router.session_store
        fanout.expect_answer()
        session_store.notify_after_commit(PendingCommit(self.pending_commits, fanout), 0)
        fanout.add_answer(1)

    async def wait_answered(self, seconds: float) -> None:
        """Wait until other cells have answered the publishes of this cell's clients.

        Otherwise the clients resend to the next owner, which cannot know that the other cells
        have these messages already.
        """
        if self.pending_publishes:
            self.all_answered = asyncio.Event()
            try:
                await asyncio.wait_for(self.all_answered.wait(), seconds)
            except TimeoutError:
                pass  # the clients resend

    def mark_lost(self) -> None:
        """Mark the cell as gone; its next owner answers what this one has not committed."""
        self.is_lost = True
        for pending in list(self.pending_commits):
            pending.mark_lost(self.number)

    def _deliver_to_shares(
        self, message: Publish, shares: list[bytes], after_commit: bool = False
    ) -> list[bytes]:
        """Choose members for shared subscriptions; return the shares that have none.

        With `after_commit`, the members receive the message when the open frame is committed.
        """
        router = self.broker.router
        unassigned: list[bytes] = []
        for name in shares:
            share = router.subscriptions.find_share(name)
            if share is None:
                unassigned.append(name)
            elif after_commit:
                if not router.deliver_to_share_after_commit(message, share):
                    unassigned.append(name)
            elif not router.deliver_to_share(message, share, None):
                unassigned.append(name)
        return unassigned

    def note_published(self, message: Publish) -> None:
        for topics in self.cluster_port.published_topics.values():
            topics.add(message.topic)

    def find_retained(self, topic_filter: bytes) -> list[Publish]:
        """Return all retained messages for a filter. Clients are served by `RetainedSearches`."""
        return self.broker.router.retained.find_matching(topic_filter, self.broker.turn.begin())


class CellSource(FanoutSource):
    """The publishes of this cell that go to other cells.

    `latest` holds the newest unanswered retained publish of each topic.
    """

    def __init__(self, cell: Cell) -> None:
        self.latest: dict[bytes, Publish] = {}  # by topic
        self._cell = cell

    def is_abandoned(self, fanout: Fanout) -> bool:
        """Return whether a publish must not be sent again.

        A QoS 2 message is recognized by its dedup id, so it may be sent while its session is here.
        """
        if self._cell.is_lost:
            return True
        session = fanout.session
        if session is None or fanout.message.qos != 1:
            return False
        return session.connection is None or session.inbound.get_epoch() != fanout.epoch

    def is_superseded(self, fanout: Fanout) -> bool:
        return self.latest.get(fanout.message.topic) is not fanout.message


class CellClusterPort(ClusterPort):
    """The cluster port of one cell's broker."""

    def __init__(self, node: Node, cell: Cell) -> None:
        super().__init__()
        self.has_other_cells = True
        self.node = node
        self.cell_number = cell.number
        self._cell = cell
        self._router = cell.broker.router
        self._source = CellSource(cell)
        # By session: filters whose retained messages are not looked up yet, with the value of
        # `PublishedTopics.count` at their SUBSCRIBE.
        self._pending_lookups: dict[Session, dict[bytes, tuple[Subscription, int]]] = {}
        # Running lookups of each session, without parked ones.
        self._active_lookups: dict[Session, int] = {}
        self._started_lookups: dict[Session, int] = {}  # all lookups that have begun
        # For sessions with pending or started lookups.
        self.published_topics: dict[Session, PublishedTopics] = {}
        self._is_resume_scheduled = False

    def turn(self) -> Turn:
        """Return the turn of this cell's broker."""
        return self._router.turn

    def owns_client(self, client_id: str) -> bool:
        return cell_of(client_id, self.node.cells) == self.cell_number

    def claim_client(
        self,
        connection: ConnectionPort,
        client_id: str,
        user: str,
        is_named: bool,
        window: int,
        on_done: Callable[[int, str], None],
    ) -> ClientClaim:
        connect = make_connect(
            client_id, int(connection.version), user, window, int(connection.max_outgoing_packet)
        )
        cell = cell_of(client_id, self.node.cells)
        return RemoteClientClaim(self.node, cell, connection, connect, is_named, on_done)

    def adopt_claim(self, session: Session, claim: ClientClaim) -> None:
        if isinstance(claim, RemoteClientClaim):
            self._proxies_of(session, True).adopt_claim(claim)

    # ---- queues

    def cell_for(self, topic: bytes, payload: bytes) -> i64:
        cell = cell_of_topic(topic, payload, self.node.cells)
        return LOCAL_CELL if cell == NO_CELL or cell == self.cell_number else cell

    def matches_remote(self, topic_filter: bytes) -> bool:
        return cell_of_filter(topic_filter, self.node.cells) not in (NO_CELL, self.cell_number)

    def matches_local(self, topic_filter: bytes) -> bool:
        return cell_of_filter(topic_filter, self.node.cells) in (
            NO_CELL,
            ALL_CELLS,
            self.cell_number,
        )

    def get_proxies(self, session: Session) -> SessionProxies:
        return self._proxies_of(session, True)

    def _proxies_of(self, session: Session, clean_start: bool) -> MqttSessionProxies:
        proxies = session.proxies
        if not isinstance(proxies, MqttSessionProxies):
            proxies = MqttSessionProxies(session, self, clean_start)
            session.proxies = proxies
        return proxies

    def restore_subscription(
        self, session: Session, topic_filter: bytes, options: SubscribeOptions
    ) -> None:
        self._proxies_of(session, False).restore_subscription(topic_filter, options)

    def send_will(self, cell: i64, will: Publish) -> None:
        self.node.send_will(int(cell), will)

    # ---- plain topics

    def stores_retained(self, topic: bytes) -> bool:
        return topic.startswith(b"$SYS/") or cell_of(topic, self.node.cells) == self.cell_number

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        router = self._router
        stored_before = router.stored_count
        session_store = router.session_store
        is_exactly_once = packet.qos == 2 and session.persistent_id != 0
        earlier_dedup_id = session.inbound.find_dedup_id(packet) if is_exactly_once else 0
        dedup_id = earlier_dedup_id or (session_store.new_dedup_id() if is_exactly_once else 0)
        targets, shares = self._targets_for(packet, dedup_id)
        if packet.retain:
            self._cell.note_published(packet)
        if earlier_dedup_id:
            # This cell applied the message in the frame that recorded the dedup id.
            receivers, shares = 1, []
        else:
            try:
                if is_exactly_once:
                    receivers = int(router.publish_after_commit(packet, session))
                else:
                    receivers = int(router.publish(packet, session))
            except QueueError as error:
                session.inbound.refuse(packet, connection, get_reason_code(error), str(error))
                return
        if receivers < 0:
            session.inbound.refuse(packet, connection, QUOTA_EXCEEDED, RETAINED_FULL)
            return
        unassigned = self._cell._deliver_to_shares(packet, shares, is_exactly_once)
        receivers += len(shares) - len(unassigned)
        awaits_commit = router.stored_count != stored_before or (
            packet.qos == 2 and session.persistent_id != 0
        )
        if not targets and not unassigned:
            if is_exactly_once:
                session.inbound.remove_from_outbox(int(packet.packet_id))
            if packet.qos > 0 and awaits_commit:
                router.ack_after_commit(session, packet)
            elif packet.qos > 0:
                reason = NO_MATCHING_SUBSCRIBERS if receivers == 0 else 0
                connection.send_ack(
                    PUBACK if packet.qos == 1 else PUBREC, packet.packet_id, reason, ""
                )
        elif packet.qos > 0:
            session.inbound.expect_commit(packet)
            self._cell.pending_publishes += 1
            epoch = session.inbound.get_epoch()
            fanout = self.node.new_fanout(
                packet, partial(self._on_fanout_done, session, packet, epoch)
            )
            fanout.source, fanout.session, fanout.epoch = self._source, session, epoch
            if packet.retain:
                self._source.latest[packet.topic] = packet
            if is_exactly_once:
                lowest = session.inbound.add_to_outbox(packet, dedup_id)
                fanout.origin = PublishOrigin(
                    self.cell_number, session.persistent_id, dedup_id, lowest
                )
                then = AfterCommit(
                    partial(self._send_to_cells, packet, targets, unassigned, fanout, receivers)
                )
                session_store.record_outbox(session, int(packet.packet_id), dedup_id, then)
            else:
                if awaits_commit:
                    session_store.notify_after_commit(PendingCommit(set(), fanout), 0)
                self._send_to_cells(packet, targets, unassigned, fanout, receivers)
        else:
            if packet.retain:
                self._source.latest.pop(packet.topic, None)
            self.node.fan_out(targets, packet, None)
        if awaits_commit:
            router.apply_backpressure(connection)
        self.node.throttle_if_congested(connection)

    def _send_to_cells(
        self,
        packet: Publish,
        targets: dict[int, list[bytes]],
        unassigned: list[bytes],
        fanout: Fanout,
        receivers: int,
    ) -> None:
        if self._cell.is_lost:
            return  # the client resends to the next owner
        self.node.fan_out(targets, packet, fanout)
        for name in unassigned:
            self.node.forward_shared(name, packet, fanout, {self.cell_number})
        fanout.add_answer(receivers)

    def forward_qos2(self, session: Session, packet: Publish, then: Callable[[], None]) -> None:
        """Give a QoS 2 publish for a queue of another cell a stable message id, then call `then`.

        The id stays the same however often the publish is resent, by any owner of this cell. A
        queue accepts a message id only once.
        """
        session_store = self._router.session_store
        if not session.persistent_id:
            set_message_id(packet, secrets.token_hex(12))
            then()
            return
        dedup_id = session.inbound.find_dedup_id(packet) or session_store.new_dedup_id()
        session.inbound.add_to_outbox(packet, dedup_id)
        set_message_id(packet, f"{self.cell_number:x}.{session.persistent_id:x}.{dedup_id:x}")
        session_store.record_outbox(session, int(packet.packet_id), dedup_id, AfterCommit(then))

    def _on_fanout_done(
        self, session: Session, packet: Publish, epoch: int, receivers: int, fault: str
    ) -> None:
        cell = self._cell
        cell.pending_publishes -= 1
        if cell.pending_publishes == 0 and cell.all_answered is not None:
            cell.all_answered.set()
        if packet.retain and self._source.latest.get(packet.topic) is packet:
            del self._source.latest[packet.topic]
        if not cell.is_lost and fault != ABANDONED:
            reason = NO_MATCHING_SUBSCRIBERS if receivers == 0 else 0
            if fault:
                reason = IMPLEMENTATION_SPECIFIC_ERROR if fault == UNREACHABLE else QUOTA_EXCEEDED
            session.inbound.ack_deferred(packet, False, epoch, reason, fault)

    def _targets_for(
        self, packet: Publish, dedup_id: int = 0
    ) -> tuple[dict[int, list[bytes]], list[bytes]]:
        """Return the shares to choose members for: by other cell, and those of this cell."""
        interest = self.node.interest
        match = interest.match(packet.topic)
        targets: dict[int, list[bytes]] = {
            cell: [] for cell in match.cells if cell != self.cell_number
        }
        if packet.qos > 0:
            for cell in interest.unknown_cells:
                targets.setdefault(cell, [])
        if packet.retain and not self.stores_retained(packet.topic):
            targets.setdefault(cell_of(packet.topic, self.node.cells), [])
        targets.pop(self.cell_number, None)
        shares: list[bytes] = []
        for name, cell in match.choose_cells(dedup_id) if match.shares else ():
            if cell == self.cell_number:
                shares.append(name)
            else:
                targets.setdefault(cell, []).append(name)
        return targets, shares

    def publish_will(self, will: Publish, session: Session) -> None:
        self.publish_unacknowledged(will, session)

    def publish_unacknowledged(self, message: Publish, session: Session | None) -> None:
        """Publish a message that has no publisher waiting for an acknowledgement."""
        targets, shares = self._targets_for(message)
        if message.retain:
            self._cell.note_published(message)
        try:
            self._router.publish(message, session)
        except QueueError as error:
            self.node.warn(f"will for {message.topic.decode()} not stored: {error}")
        self._cell._deliver_to_shares(message, shares)
        fanout = self.node.new_fanout(message, _ignore_result) if message.qos > 0 else None
        self.node.fan_out(targets, message, fanout)

    def forward_shared(self, message: Publish, share: SharedSubscription) -> None:
        name = b"$share/" + share.share_name + b"/" + share.topic_filter
        self.node.forward_shared(
            name, message, self.node.new_fanout(message, _ignore_result), {self.cell_number}
        )

    def change_interest(self, topic_filter: bytes, count: int) -> None:
        self._set_interest(topic_filter, self._cell.filters.get(topic_filter, 0) + count)

    def on_bindings_changed(self, bindings: list[TopicBinding]) -> None:
        wanted = {BINDING_PREFIX + one.topic_filter for one in bindings}
        for name in [
            one
            for one in self._cell.filters
            if one.startswith(BINDING_PREFIX) and one not in wanted
        ]:
            self._set_interest(name, 0)
        for name in wanted:
            if name not in self._cell.filters:
                self._set_interest(name, 1)

    def _set_interest(self, name: bytes, count: int) -> None:
        if count > 0:
            self._cell.filters[name] = count
        else:
            self._cell.filters.pop(name, None)
        self.node.broadcast_interest(self._cell, {name: max(0, count)})

    def after_interest_known(
        self, on_known: Callable[[], None], on_timeout: Callable[[], None]
    ) -> None:
        self.node.after_interest_known(on_known, on_timeout)

    def send_retained(self, subscription: Subscription) -> None:
        """Look up the retained messages for a subscription in all cells that may have some.

        A session has at most MAX_LOOKUPS_PER_SESSION active lookups; of the others only the
        filter is stored.
        """
        session = subscription.session
        topics = self.published_topics.get(session)
        if topics is None:
            topics = self.published_topics[session] = PublishedTopics()
        pending = self._pending_lookups.setdefault(session, {})
        pending.pop(subscription.topic_filter, None)
        pending[subscription.topic_filter] = (subscription, topics.count)
        self._start_lookups(session)

    def _start_lookups(self, session: Session) -> None:
        """Start pending lookups while slots are free, at most MAX_LOOKUPS_PER_SESSION per turn.

        The bound per turn is needed because parked lookups free their slots at once.
        """
        pending = self._pending_lookups.get(session)
        started = 0
        while (
            pending
            and started < MAX_LOOKUPS_PER_SESSION
            and self._active_lookups.get(session, 0) < MAX_LOOKUPS_PER_SESSION
        ):
            subscription, since = pending.pop(next(iter(pending)))
            if self.is_lookup_wanted(subscription):
                started += 1
                self._start_lookup(subscription, since)
        if not pending:
            self._pending_lookups.pop(session, None)
            if session not in self._started_lookups:
                self.published_topics.pop(session, None)
        elif (
            started == MAX_LOOKUPS_PER_SESSION
            and self._active_lookups.get(session, 0) < MAX_LOOKUPS_PER_SESSION
        ):
            self._schedule_resume()

    def _start_lookup(self, subscription: Subscription, since: int) -> None:
        session = subscription.session
        topic_filter = subscription.topic_filter
        if topic_filter.startswith(b"$SYS/"):
            cells = [self.cell_number]
        elif has_wildcard(topic_filter):
            cells = list(range(self.node.cells))
        else:
            cells = [cell_of(topic_filter, self.node.cells)]
        lookup = SubscriptionLookup(self, subscription, self.published_topics[session], since)
        self._active_lookups[session] = self._active_lookups.get(session, 0) + 1
        self._started_lookups[session] = self._started_lookups.get(session, 0) + 1
        lookup.remaining = len(cells)
        self._cell.lookups.add(lookup)
        self.node.look_up_all(cells, lookup)

    def on_lookup_done(self, session: Session, lookup: RetainedLookup) -> None:
        if lookup in self._cell.lookups:
            self._cell.lookups.discard(lookup)
            remaining = self._started_lookups.pop(session, 1) - 1
            if remaining:
                self._started_lookups[session] = remaining
            elif session not in self._pending_lookups:
                self.published_topics.pop(session, None)

    def on_slot_changed(self, session: Session, is_taken: bool) -> None:
        """Count a lookup that frees its slot (done or parked) or takes one again (resumed)."""
        running = self._active_lookups.pop(session, 0) + (1 if is_taken else -1)
        if running:
            self._active_lookups[session] = running
        if not is_taken and session in self._pending_lookups:
            self._schedule_resume()

    def _schedule_resume(self) -> None:
        if not self._is_resume_scheduled:
            self._is_resume_scheduled = True
            asyncio.get_running_loop().call_soon(self._resume_lookups)

    def _resume_lookups(self) -> None:
        self._is_resume_scheduled = False
        for session in list(self._pending_lookups):
            self._start_lookups(session)

    def is_lookup_wanted(self, subscription: Subscription) -> bool:
        session = subscription.session
        is_current = session.subscriptions.get(subscription.topic_filter) is subscription
        return is_current and not self._cell.is_lost

    def deliver_retained(self, subscription: Subscription, messages: list[Publish]) -> None:
        session = subscription.session
        if messages and session.subscriptions.get(subscription.topic_filter) is subscription:
            self._router.turn.begin()
            self._router.deliver_retained(subscription, messages)


class SubscriptionLookup(RetainedLookup):
    """A lookup for a new subscription of a session in a cell."""

    def __init__(
        self,
        port: CellClusterPort,
        subscription: Subscription,
        published_topics: PublishedTopics,
        since: int,
    ) -> None:
        super().__init__(subscription.topic_filter, published_topics, since)
        self._port = port
        self._subscription = subscription

    def is_wanted(self) -> bool:
        return self._port.is_lookup_wanted(self._subscription)

    def on_found(self, messages: list[Publish]) -> None:
        self._port.deliver_retained(self._subscription, messages)

    def on_active_changed(self) -> None:
        self._port.on_slot_changed(self._subscription.session, self.is_active)

    def on_done(self) -> None:
        self._port.on_lookup_done(self._subscription.session, self)


def _inbox_key(dedup_id: int, share: bytes) -> int:
    """Return the inbox key of one part of a message: one share, or all direct subscribers."""
    part = zlib.crc32(share) & ((1 << PART_BITS) - 1) | 1 if share else 0
    return dedup_id << PART_BITS | part


def _ignore_result(receivers: int, fault: str) -> None:
    """Ignore the outcome of a will, or of a shared message that moves to another member."""
