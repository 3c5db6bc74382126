"""Handler of `$ECQ/`: writing and reading exclusive queues.

$ECQ/w/<client>/<key>     publish: the next value of a key of that client's queue; a key has one
                          or more levels
$ECQ/<client>/#           subscribe, at QoS 1 and as that client: its own queue

The `w` separates the two. The handler translates; the engine decides about values.

Writes are collected and applied together at the end of the turn: with millions of keys, the memory
that a write looks up is not in the CPU cache, and looking up many keys at once takes hardly longer
than one (`OwnerLookup.find_values`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i64

from sluice.broker.namespace import NamespaceHandler
from sluice.broker.namespaces.compacted.exclusive_subscriber import (
    ExclusiveDelivery,
    ExclusiveSubscriber,
)
from sluice.broker.namespaces.reason_mapping import get_reason_code, get_suback_reason_code
from sluice.broker.namespaces.remote_requests import (
    forward_publish,
    forward_will,
    unsubscribe_remote,
)
from sluice.broker.ports import NO_CAPACITY_LISTENER, CapacityListener, ConnectionPort
from sluice.broker.sessions import (
    SubscribeOptions,
    Subscription,
    encode_subscription_ids,
    read_options,
)
from sluice.broker.turn import Turn
from sluice.errors import InvalidQueueConfig, QueueError
from sluice.message import MAX_EXPIRES, Message
from sluice.queues.bulk import parse_iso_time
from sluice.queues.compacted import KeyCache, Owner, OwnerSubscriber, hash_name, zeros
from sluice.queues.engine import Engine
from sluice.wire.packets import Publish, Subscribe, SubscriptionRequest
from sluice.wire.reasons import (
    IMPLEMENTATION_SPECIFIC_ERROR,
    NOT_AUTHORIZED,
    TOPIC_FILTER_INVALID,
    TOPIC_NAME_INVALID,
)
from sluice.wire.topics import ONES, WORD_BYTES

if TYPE_CHECKING:
    from sluice.broker.routing import Router
    from sluice.broker.sessions import Session

PREFIX: Final = b"$ECQ/"
WRITE_PREFIX: Final = b"$ECQ/w/"
WRITE_PREFIX_WORD: Final = 0x2F_772F_5143_4524  # the same as a number of seven bytes
WRITE_PREFIX_MASK: Final = 0xFF_FFFF_FFFF_FFFF
SLASHES: Final = 0x2F2F_2F2F_2F2F_2F2F
WRITE_TOPIC_HELP: Final = "write to $ECQ/w/<client>/<key>, neither of them empty"
SUBSCRIBE_HELP: Final = (
    "a client subscribes to its own queue, $ECQ/<client>/# with its client id, "
    "and to nothing else below $ECQ"
)
NOT_SHARED: Final = "an exclusive queue is not shared: its owner subscribes to $ECQ/<client>/#"
TAG_QOS_MASK: Final = 3 << 16  # of a session's tag
MAX_COLLECTED_WRITES: Final = 64  # so that their memory stays in the CPU cache


class PendingWrite:
    """A PUBLISH that waits for the end of the turn.

    Instances are reused: a new object for every write would cost more than finding its owner.
    """

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.tag: i64 = 0  # the session's tag of the packet
        self.topic: bytes = b""
        self.client_end: i64 = 0  # where the client id ends in the topic
        self.key: bytes = b""
        self.props: bytes = b""
        self.payload: bytes = b""
        self.expires: i64 = 0

    def refuse(self, reason: i64, reason_string: str) -> None:
        session = self.session
        packet = Publish(b"", b"", (self.tag & TAG_QOS_MASK) >> 16, packet_id=self.tag & 0xFFFF)
        if packet.qos > 0:
            session.inbound.ack_deferred(packet, False, self.tag >> 20, reason, reason_string)
        elif session.connection is not None:
            session.inbound.refuse(packet, session.connection, reason, reason_string)


class ExclusiveQueueHandler(NamespaceHandler):
    def __init__(self, engine: Engine, router: Router) -> None:
        self._engine: Engine = engine
        self._router: Router = router
        self._turn: Turn = router.turn
        self.max_collected: int = MAX_COLLECTED_WRITES
        # Reused; the first `_write_count` of them are waiting.
        self._writes: list[PendingWrite] = []
        self._write_count: i64 = 0
        # For each waiting write: the hash of its client, the hash of its key, its value's position.
        self._client_hashes: vec[i64] = zeros(MAX_COLLECTED_WRITES)
        self._key_hashes: vec[i64] = zeros(MAX_COLLECTED_WRITES)
        self._value_positions: vec[i64] = zeros(MAX_COLLECTED_WRITES)
        self._key_cache: KeyCache = KeyCache()
        router.turn.call_at_end(self.apply_collected)
        self._has_warned_unbound: bool = False  # about a client id that is not bound to a user

    def _begin_engine_call(self) -> None:
        """Prepare the engine for a call, after the writes that came before it."""
        self.apply_collected()
        turn = self._turn
        self._engine.now = turn.now
        turn.schedule_flush()

    # ---- writing

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        """Collect a PUBLISH to a topic under `$ECQ/`."""
        if forward_publish(self._router, packet, session, connection):
            return
        turn = self._turn
        self._engine.now = turn.now
        turn.schedule_flush()
        topic = packet.topic
        client_end = find_client_end(topic)
        if client_end < 0:
            session.inbound.refuse(packet, connection, TOPIC_NAME_INVALID, WRITE_TOPIC_HELP)
            return
        if self._engine.publishing.unavailable_reason:
            try:
                self._engine.publishing.check_store_available()
            except QueueError as error:
                session.inbound.refuse(packet, connection, get_reason_code(error), str(error))
                return
        if packet.qos > 0:
            session.inbound.expect_commit(packet)
        nth = self._write_count
        if nth == len(self._writes):
            self._writes.append(PendingWrite(session))
        write = self._writes[nth]
        write.session = session
        write.tag = session.inbound.make_tag(packet)
        write.topic = topic
        write.client_end = client_end
        write.payload = packet.payload
        write.props = packet.raw_properties
        write.expires = get_expiry_seconds(packet)
        key_cache = self._key_cache
        slot = key_cache.find_slot(topic, client_end + 1)
        write.key = key_cache.keys[slot]
        self._key_hashes[nth] = key_cache.key_hashes[slot]
        self._client_hashes[nth] = hash_name(topic, len(WRITE_PREFIX), client_end)
        self._write_count = nth + 1
        if nth + 1 >= self.max_collected or (packet.qos == 2 and session.persistent_id):
            self.apply_collected()  # QoS 2: the value belongs in the frame of its packet id
        self._router.apply_backpressure(connection)

    def apply_collected(self) -> None:
        """Apply the collected writes.

        A later packet is acknowledged after them [MQTT-4.6.0-2]: see `Namespaces.publish`.
        """
        size = self._write_count
        if size == 0:
            return
        self._write_count = 0
        exclusive = self._engine.exclusive
        frame_builder = self._engine.frame_builder
        now = self._turn.now
        client_hashes, key_hashes, positions = (
            self._client_hashes,
            self._key_hashes,
            self._value_positions,
        )
        positions[0] = -1
        if size > 1:
            exclusive.lookup.find_values(client_hashes, key_hashes, positions, size)
        values = exclusive.value_count
        writes = self._writes
        nth: i64 = 0
        while nth < size:
            position = positions[nth]
            if exclusive.value_count != values:
                position = -1  # a new key was added, and all rows of its owner may have moved
            write = writes[nth]
            payload = write.payload
            # Free the payload: it may be large, and this slot may stay unused for long.
            write.payload = b""
            try:
                exclusive.write(
                    position,
                    b"" if position >= 0 else write.topic[len(WRITE_PREFIX) : write.client_end],
                    client_hashes[nth],
                    key_hashes[nth],
                    write.key,
                    write.props,
                    payload,
                    write.expires,
                    now,
                )
            except QueueError as error:
                write.refuse(get_reason_code(error), str(error))
            else:
                if write.tag & TAG_QOS_MASK:
                    frame_builder.add_commit_waiter(write.session.inbound, write.tag)
            nth += 1

    def publish_will(self, will: Publish, session: Session | None) -> None:
        if forward_will(self._router, will):
            return
        self._begin_engine_call()
        topic = will.topic
        client_end = find_client_end(topic)
        error_text = WRITE_TOPIC_HELP
        try:
            if client_end >= 0:
                self._engine.publishing.check_store_available()
                client = topic[len(WRITE_PREFIX) : client_end].decode()
                self._engine.exclusive.publish(
                    client, build_message(will, topic[client_end + 1 :]), self._engine.now
                )
                return
        except QueueError as error:
            error_text = str(error)
        self._engine.state.warn(f"a will for {will.topic.decode()} was not stored: {error_text}")

    # ---- subscribing

    def filter_error(self, session: Session, inner: bytes, is_shared: bool) -> tuple[int, str]:
        """Refuse filters that no rule can allow; the text must not suggest to add a rule."""
        if is_shared:
            return TOPIC_FILTER_INVALID, NOT_SHARED
        refusal = subscribe_refusal(inner, session.client_id)
        return refusal, SUBSCRIBE_HELP if refusal else ""

    def subscribe(
        self,
        session: Session,
        packet: Subscribe,
        request: SubscriptionRequest,
        granted: int,
        added: list[tuple[Subscription, bool]],
    ) -> tuple[int, str]:
        """Subscribe an owner to its queue; return the granted QoS, or a reason code and text."""
        self._begin_engine_call()
        options = read_options(packet, request.qos)
        if options.qos != 1 or self._router.limits.max_qos < 1:
            return (
                IMPLEMENTATION_SPECIFIC_ERROR,
                "an exclusive queue is read at QoS 1: its PUBACKs report the owner's progress",
            )
        try:
            self._join(session, options.identifier, options.get("start") or "")
        except QueueError as error:
            return get_suback_reason_code(error), str(error)
        session.queue_requests[request.topic_filter] = SubscribeOptions(1, options.identifier, [])
        if not self._has_warned_unbound:
            self._warn_if_unbound(session)
        return 1, ""

    def _warn_if_unbound(self, session: Session) -> None:
        """Warn once if other users' clients can connect with an owner's id and read its queue.

        An owner is a client id. Where clients have users, the rules must bind it to a user.
        """
        grant, connection = session.grant, session.connection
        if grant is None or not session.user or connection is None or grant.is_client_id_bound():
            return
        self._has_warned_unbound = True
        facts: dict[str, object] = {
            "client": session.client_id,
            "user": session.user,
            "why": "the access rules let other users connect with this client id, "
            "and read its exclusive queue",
            "do": 'have a rule allow "connect" with clients = ["%u", "%u:*"], '
            "and no rule allow it for all clients",
        }
        connection.log("exclusive queue not bound to a user", facts)

    def _join(self, session: Session, identifier: int, start: str) -> None:
        exclusive = self._engine.exclusive
        owner = exclusive.owners.get(session.client_id)
        # An invalid start is refused before the owner is created.
        after_sequence: i64 = resolve_start(owner, start) if start else -1
        if owner is None:
            owner = exclusive.create_owner(session.client_id, self._engine.now)
        extra = encode_subscription_ids([identifier] if identifier else [])
        subscriber = session.exclusive_subscriber
        if isinstance(subscriber, ExclusiveSubscriber) and owner.subscriber is subscriber:
            # Repeated, as clients do on each connect: deliveries in flight stay.
            subscriber.extra_properties = extra
            exclusive.schedule_dispatch(subscriber)
        else:
            subscriber = ExclusiveSubscriber(session, extra, self)
            session.exclusive_subscriber = subscriber
            session.outbound.follow_for_values(ExclusiveCapacity(self, subscriber))
            exclusive.subscribe(subscriber, session.client_id, self._engine.now)
        if after_sequence >= 0:
            exclusive.seek(owner, after_sequence, self._engine.now)

    def restore_subscription(
        self, session: Session, topic_filter: bytes, options: SubscribeOptions
    ) -> None:
        """Restore a subscription after a restart; it continues at its position."""
        self._begin_engine_call()
        self._join(session, options.identifier, "")

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Unsubscribe and return whether the subscription existed."""
        found = unsubscribe_remote(self._router, session, topic_filter)
        if found:
            self.on_session_ended(session)
        return found

    # ---- connecting and disconnecting

    def on_detached(self, session: Session) -> None:
        """Free cached bodies: the client is disconnected."""
        if session.exclusive_subscriber is not None:
            self._engine.exclusive.drop_cached_bodies(session.exclusive_subscriber)

    def on_attached(self, session: Session) -> None:
        """Resume deliveries: the client is connected again."""
        if session.exclusive_subscriber is not None:
            self.schedule_dispatch(session.exclusive_subscriber)

    def on_session_ended(self, session: Session) -> None:
        subscriber = session.exclusive_subscriber
        if subscriber is not None:
            self._begin_engine_call()
            session.exclusive_subscriber = None
            session.outbound.follow_for_values(NO_CAPACITY_LISTENER)
            self._engine.exclusive.unsubscribe(subscriber)

    def on_acknowledged(self, delivery: ExclusiveDelivery) -> None:
        """Settle a value by its PUBACK with any reason: its delivery is over [MQTT-4.3.2-5]."""
        self._begin_engine_call()
        self._engine.exclusive.ack(
            delivery.subscriber, delivery.seq, delivery.token, self._engine.now
        )

    def schedule_dispatch(self, subscriber: OwnerSubscriber) -> None:
        self._begin_engine_call()
        self._engine.exclusive.schedule_dispatch(subscriber)

    def repair_subscribers(self, sessions: list[Session]) -> None:
        """Serve subscribed owners that are not served for any reason; a safety net."""
        self._begin_engine_call()
        exclusive = self._engine.exclusive
        for session in sessions:
            request = (
                session.queue_requests.get(build_owner_filter(session.client_id))
                if session.queue_requests
                else None
            )
            if request is None or (
                not session.is_proxy
                and self._router.cluster.matches_remote(build_owner_filter(session.client_id))
            ):
                continue  # another cell serves it
            owner = exclusive.owners.get(session.client_id)
            subscriber = session.exclusive_subscriber
            if owner is None or subscriber is None or owner.subscriber is not subscriber:
                self._engine.state.warn(
                    f"{session.client_id} was subscribed to its queue, but was not served"
                )
                self._join(session, request.identifier, "")
            elif exclusive.restart_stalled_read(subscriber):
                self._engine.state.warn(
                    f"the store did not return values of {session.client_id}: reading them again"
                )


class ExclusiveCapacity(CapacityListener):
    """Asks for values when the client of a subscribed owner has capacity again."""

    def __init__(self, handler: ExclusiveQueueHandler, subscriber: OwnerSubscriber) -> None:
        self._handler: ExclusiveQueueHandler = handler
        self._subscriber: OwnerSubscriber = subscriber

    def on_capacity(self) -> None:
        self._handler.schedule_dispatch(self._subscriber)


def is_write_topic(topic: bytes) -> bool:
    """Return whether a topic begins with `WRITE_PREFIX` and continues.

    It compares seven bytes at once.
    """
    return (
        len(topic) >= WORD_BYTES and read_i64_le(topic, 0) & WRITE_PREFIX_MASK == WRITE_PREFIX_WORD
    )


def find_client_end(topic: bytes) -> i64:
    """Return where the client id ends in a write topic, or -1 for any other topic."""
    end: i64 = len(topic)
    if not is_write_topic(topic):
        return -1
    client_end: i64 = len(WRITE_PREFIX)
    while client_end + WORD_BYTES <= end:
        word = read_i64_le(topic, client_end) ^ SLASHES
        # One bit per slash; bits after the first one may be wrong, bits before it are not.
        slashes = (((word - ONES) & ~word) >> 7) & ONES
        if slashes:
            # One bit for each byte before the slash; the product counts them.
            bytes_before = ((slashes & -slashes) - 1) & ONES
            client_end += ((bytes_before * ONES) >> 56) & 0xFF
            break
        client_end += WORD_BYTES
    else:
        while client_end < end and topic[client_end] != 0x2F:
            client_end += 1
    return client_end if len(WRITE_PREFIX) < client_end < end - 1 else -1


def build_message(packet: Publish, key: bytes) -> Message:
    message = Message(packet.payload, packet.raw_properties, key)
    message.expires = get_expiry_seconds(packet)
    return message


def get_expiry_seconds(packet: Publish) -> i64:
    return min(int(packet.expires_at + 0.999), MAX_EXPIRES) if packet.expires_at != 0.0 else 0


def build_owner_filter(client_id: str) -> bytes:
    return PREFIX + client_id.encode() + b"/#"


def is_owner_filter(topic_filter: bytes, client_id: str) -> bool:
    """Return whether a filter is the queue of this client.

    A client id with a further level or a wildcard in it cannot have a queue.
    """
    if "/" in client_id or "+" in client_id or "#" in client_id:
        return False
    return topic_filter == build_owner_filter(client_id)


def subscribe_refusal(topic_filter: bytes, client_id: str) -> int:
    """Return the reason code if this client can never read the filter, or 0 if it can.

    The filter is another client's queue, or no queue at all; no rule can allow that.
    """
    if is_owner_filter(topic_filter, client_id):
        return 0
    levels = topic_filter.split(b"/")
    whole = len(levels) == 3 and levels[2] == b"#" and levels[1] not in (b"", b"+")
    return NOT_AUTHORIZED if whole else TOPIC_FILTER_INVALID


def resolve_start(owner: Owner | None, start: str) -> i64:
    """Return the sequence after which an owner continues that asks for `start`.

    -1: the owner is new, and has only one position to start at.
    """
    seconds: i64 = 0
    if start != "earliest" and start != "latest" and not is_sequence(start):
        try:
            start_time = float(start[1:]) if start.startswith("@") else parse_iso_time(start)
            if abs(start_time) >= float(MAX_EXPIRES):
                raise OverflowError
            seconds = int(start_time)
        except (ValueError, OverflowError):
            raise InvalidQueueConfig(
                f"start is {start!r}",
                "Use earliest, latest, a sequence, or a time such as 2030-01-31T12:00:00Z",
            ) from None
    if owner is None:
        return -1
    if start == "earliest":
        return 0
    if start == "latest":
        return owner.next_seq - 1
    if is_sequence(start):
        return max(0, int(start) - 1)
    slot = owner.slot_since(seconds)
    return owner.seq(slot) - 1 if slot >= 0 else owner.next_seq - 1


def is_sequence(start: str) -> bool:
    return start.isascii() and start.isdigit() and len(start) <= 18
