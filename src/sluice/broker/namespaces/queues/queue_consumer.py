"""A subscription to a queue: the engine's `Consumer`, in MQTT.

Each delivery is a QoS 1 (or 0) PUBLISH. User properties before the publisher's own carry what the
consumer needs to settle it. The parts that deliveries have in common are encoded once.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.broker.namespaces.queues.memberships import QueueMemberships, open_memberships
from sluice.broker.routing import NEVER_EXPIRES
from sluice.broker.sessions import UNBUILT_PACKET, Delivery
from sluice.broker.turn import Turn
from sluice.message import Message
from sluice.queues.engine import Engine
from sluice.queues.flow import Settlement, format_iso_time
from sluice.queues.model import Consumer, Lease
from sluice.queues.names import write_hex, write_hex_16
from sluice.queues.ports import ConnectionState
from sluice.wire.packets import V5, Publish
from sluice.wire.primitives import varint_size, write_binary, write_u16, write_varint

if TYPE_CHECKING:
    from sluice.broker.sessions import Session

_PUBLISH_QOS1: Final = 0x32  # first byte of a PUBLISH at QoS 1
_USER_PROPERTY: Final = 0x26
_SEQUENCE: Final = b"\x26\x00\x08sequence"
_ATTEMPT: Final = b"\x26\x00\x07attempt"
_TOKEN: Final = b"\x26\x00\x0edelivery-token"
_MESSAGE_ID: Final = b"\x26\x00\x0amessage-id"
_TOPIC: Final = b"\x26\x00\x0eoriginal-topic"
_FIRST_ATTEMPT: Final = b"\x26\x00\x07attempt\x00\x011"
# Ends with the length of its value, an ISO time with milliseconds.
_ENQUEUED_AT: Final = b"\x26\x00\x0benqueued-at\x00\x18"
TAG_DIGITS: Final = 16  # of a delivery token
CACHED_SECONDS: Final = 64  # a power of two


def encode_user_property(name: bytes, value: bytes) -> bytes:
    out = BytesWriter()
    out.append(_USER_PROPERTY)
    write_binary(out, name)
    write_binary(out, value)
    return out.getvalue()


class _TimestampCache:
    """Cache of encoded times up to their seconds.

    A client may consume ten thousand queues, each with a consumer of its own, and encoding a time
    costs as much as half a delivery.
    """

    def __init__(self) -> None:
        self._seconds: list[int] = [-1] * CACHED_SECONDS
        self._texts: list[bytes] = [b""] * CACHED_SECONDS

    def get_text(self, second: i64) -> bytes:
        slot: i64 = second & (CACHED_SECONDS - 1)
        if self._seconds[slot] != second:
            self._seconds[slot] = int(second)
            self._texts[slot] = _ENQUEUED_AT + format_iso_time(float(second))[:-4].encode()
        return self._texts[slot]


_TIMESTAMP_CACHE: Final = _TimestampCache()


class QueueDelivery(Delivery):
    """A message from a queue, in flight to a consumer."""

    def __init__(self, packet: Publish, consumer: QueueConsumer, lease: Lease) -> None:
        super().__init__(packet, packet.qos, False, consumer.extra_properties, None)
        self.is_from_queue = True
        self.consumer: QueueConsumer = consumer
        self.lease: Lease | None = lease  # while this consumer holds it
        # When sent: a later one is another delivery.
        self.token_counter: i64 = lease.token_counter

    def is_obsolete(self) -> bool:
        """Return whether the message is settled or leased to another consumer by now.

        An acknowledgement of it then only frees the packet id.
        """
        consumer = self.consumer
        lease = self.lease
        return (
            lease is None
            or lease.token_counter != self.token_counter
            or lease.consumer is not consumer
            or consumer.group is None
        )

    def build_packet(self) -> Publish:
        message = self.message
        lease = self.lease
        if message is UNBUILT_PACKET and lease is not None:
            return self.consumer.build_packet(lease)
        return message

    def on_acknowledged(self, reason: i64) -> None:
        consumer = self.consumer
        lease = self.lease
        if consumer.acks_by_puback and lease is not None and not self.is_obsolete():
            consumer.on_puback(lease, reason)
        else:
            consumer.schedule_dispatch()

    def on_abandoned(self) -> None:
        if self.lease is not None:
            self.consumer.on_too_large(self.lease)


class QueueConsumer(Consumer):
    def __init__(
        self,
        engine: Engine,
        turn: Turn,
        session: Session,
        topic_filter: bytes,
        queue: str,
        group: str,
        qos: i64,
        prefetch: i64,
        priority: i64,
        is_exclusive: bool,
        acks_by_puback: bool,
        id_in_topic: bool,
        extra_properties: bytes,
    ) -> None:
        super().__init__(session.client_id, prefetch, priority, is_exclusive)
        self.identity = session.identity
        self._engine: Engine = engine
        self._settlement: Settlement = engine.settlement
        self._turn: Turn = turn
        self.session: Session = session
        self._memberships: QueueMemberships = open_memberships(session)
        self.topic_filter: bytes = topic_filter  # as subscribed; may match many queues
        self.queue: str = queue
        self.group_name: str = group
        self.qos: i64 = qos
        self.acks_by_puback: bool = acks_by_puback  # a PUBACK settles the delivery
        self.topic: bytes = b"$queue/" + queue.encode()
        self.id_in_topic: bool = id_in_topic  # for clients that cannot read user properties
        self.extra_properties: bytes = extra_properties  # subscription identifier
        self._fixed_properties: bytes = encode_user_property(
            b"queue", queue.encode()
        ) + encode_user_property(b"consumer-group", group.encode())
        # By partition number: what its deliveries have in common, up to the value of the sequence.
        self._partition_prefixes: list[bytes] = []
        self._cached_second: i64 = -1  # the second that is cached
        self._cached_second_text: bytes = b""
        self._encoded_topic: bytes = b""  # the topic with its length
        self._scratch: BytesWriter = BytesWriter()
        # `has_capacity` was False because of the session, not the prefetch.
        self.is_blocked: bool = False

    def has_capacity(self) -> bool:
        """Return whether the consumer accepts one more delivery.

        If only its session does not, list it as blocked.
        """
        if self.in_flight >= self.prefetch:
            return False
        if self.session.outbound.has_capacity():
            return True
        self._memberships.blocked.add(self)
        return False

    def next_blocked_consumer(self) -> Consumer | None:
        return (
            self._memberships.blocked.pop_next() if self.session.outbound.has_capacity() else None
        )

    def deliver(self, lease: Lease) -> None:
        session = self.session
        connection = session.connection
        if connection is None:
            return
        message = lease.message
        assert message is not None
        if (
            self.qos == 1
            and connection.has_fast_path
            and not self.id_in_topic
            and not message.headers
            and not message.topic
            and (
                message.expires == 0
                or self._publisher_expiry(message, lease.cursor.partition.queue.rules.message_ttl)
                == 0.0
            )
        ):
            packet_id = session.outbound.inflight.next_id()
            out = connection.get_output()
            before: i64 = len(out)
            self._write_delivery(out, lease, message, packet_id)
            delivery = QueueDelivery(UNBUILT_PACKET, self, lease)
            delivery.size = len(out) - before
            session.outbound.on_delivery_written(packet_id, delivery)
            connection.on_publish_written(len(message.payload), out)
            return
        packet = self.build_packet(lease)
        if packet.qos > 0:
            session.outbound.deliver_now(QueueDelivery(packet, self, lease))
        elif not session.outbound.deliver_unacknowledged(packet, self.extra_properties):
            self.on_too_large(lease)
        elif self.acks_by_puback:
            self.on_puback(lease, 0)  # QoS 0 has no PUBACK: sent means settled

    def _begin_engine_call(self) -> None:
        """Prepare the engine for a call: set its time, and schedule the end of the turn."""
        self._engine.now = self._turn.now
        self._turn.schedule_flush()

    def on_puback(self, lease: Lease, reason: i64) -> None:
        """Ack a delivery by its PUBACK, or nack it if the PUBACK has a failure reason."""
        self._begin_engine_call()
        if reason < 0x80:
            self._settlement.ack(lease)
        else:
            self._settlement.nack(lease, -1.0, f"the consumer's PUBACK has reason 0x{reason:02x}")

    def on_too_large(self, lease: Lease) -> None:
        """Nack a delivery that exceeds the client's packet size: another consumer may accept it."""
        self._begin_engine_call()
        self._settlement.nack(lease, -1.0, "larger than the consumer's maximum packet size")

    def schedule_dispatch(self) -> None:
        """Dispatch to this consumer at the end of the turn: it has capacity again."""
        self._turn.schedule_flush()
        self._engine.dispatch_schedule.add(self)

    def _write_delivery(
        self, out: BytesWriter, lease: Lease, message: Message, packet_id: i64
    ) -> None:
        """Write the usual delivery (MQTT 5, QoS 1) into the output, without building a packet.

        The bytes are those of `build_packet`.
        """
        partition = lease.cursor.partition
        seq = lease.seq
        partition_prefix = self._partition_prefix(partition.number)
        second: i64 = message.enqueued_at_ms // 1000
        if second != self._cached_second:
            self._cache_second(second)
        id_size: i64 = len(message.id)
        if id_size == 0:
            id_size = _hex_size(partition.pid) + 1 + _hex_size(seq)
        attempt: i64 = lease.failures + 1
        token_size: i64 = self._token_size(lease, partition.pid, message)
        properties: i64 = (
            len(self.extra_properties)
            + len(_MESSAGE_ID) + 2 + id_size
            + len(partition_prefix) + 2 + _decimal_size(seq)
            + len(_ATTEMPT) + 2 + _decimal_size(attempt)
            + len(self._cached_second_text) + 4
            + len(_TOKEN) + 2 + token_size
            + len(message.props)
        )  # fmt: skip
        if not self._encoded_topic:
            encoded_topic = BytesWriter()
            write_binary(encoded_topic, self.topic)
            self._encoded_topic = encoded_topic.getvalue()
        out.append(_PUBLISH_QOS1)
        write_varint(
            out,
            len(self._encoded_topic)
            + 2
            + varint_size(properties)
            + properties
            + len(message.payload),
        )
        out.write(self._encoded_topic)
        write_u16(out, packet_id)
        write_varint(out, properties)
        if self.extra_properties:
            out.write(self.extra_properties)
        out.write(_MESSAGE_ID)
        if message.id:
            write_binary(out, message.id)
        else:
            write_u16(out, id_size)
            write_hex(out, partition.pid)
            out.append(0x2D)
            write_hex(out, seq)
        out.write(partition_prefix)
        _write_decimal(out, seq)
        if attempt == 1:
            out.write(_FIRST_ATTEMPT)
        else:
            out.write(_ATTEMPT)
            _write_decimal(out, attempt)
        self._write_enqueued_at(out, message.enqueued_at_ms)
        out.write(_TOKEN)
        write_u16(out, token_size)
        self._write_token(out, lease, partition.pid, message)
        out.write(message.props)
        out.write(message.payload)

    def build_packet(self, lease: Lease) -> Publish:
        """Return a delivery as a packet."""
        message = lease.message
        assert message is not None
        session = self.session
        packet = Publish(self.topic, message.payload, self.qos)
        partition = lease.cursor.partition
        if self.id_in_topic:
            out = BytesWriter()
            out.write(self.topic)
            out.write(b"/$msg/")
            if message.id and b"+" not in message.id and b"#" not in message.id:
                out.write(message.id)
            else:  # every message can also be settled by this id
                write_hex(out, partition.pid)
                out.append(0x2D)
                write_hex(out, lease.seq)
            packet.topic = out.getvalue()
        if session.version == V5:
            packet.raw_properties = self._encode_properties(lease)
            if message.expires:
                packet.expires_at = self._publisher_expiry(
                    message, partition.queue.rules.message_ttl
                )
        return packet

    def _publisher_expiry(self, message: Message, ttl: float) -> float:
        """Return the publisher's expiry of a message, or 0.0 if the queue's TTL ends it."""
        if ttl > 0.0 and message.expires >= int(float(message.enqueued_at_ms) / 1000.0 + ttl):
            return 0.0
        return message.expires_at()

    def on_lease_revoked(self, lease: Lease) -> None:
        """Detach a lease that is no longer this client's: its PUBACK only frees the packet id."""
        for delivery in self.session.outbound.inflight.list_in_send_order():
            if isinstance(delivery, QueueDelivery) and delivery.lease is lease:
                delivery.lease = None
                return

    def describe_connection(self) -> ConnectionState:
        session = self.session
        connection = session.connection
        outbound = session.outbound
        expires = session.expiry_seconds != NEVER_EXPIRES
        return ConnectionState(
            connection is not None and connection.is_write_paused,
            0.0 if connection is None else connection.last_read_at,
            0 if connection is None else len(outbound.inflight),
            int(outbound.window),
            session.disconnected_at,
            session.disconnected_at + float(session.expiry_seconds) if expires else inf,
        )

    def _encode_properties(self, lease: Lease) -> bytes:
        message = lease.message
        assert message is not None
        partition = lease.cursor.partition
        out = self._scratch
        out.truncate(0)
        out.write(_MESSAGE_ID)
        if message.id:
            write_binary(out, message.id)
        else:
            _write_id(out, partition.pid, lease.seq)
        out.write(self._partition_prefix(partition.number))
        _write_decimal(out, lease.seq)
        out.write(_ATTEMPT)
        _write_decimal(out, lease.failures + 1)
        self._write_enqueued_at(out, message.enqueued_at_ms)
        out.write(_TOKEN)
        write_u16(out, self._token_size(lease, partition.pid, message))
        self._write_token(out, lease, partition.pid, message)
        if message.headers:
            write_headers(out, message.headers)
        elif message.topic:
            out.write(_TOPIC)  # of a bound message; dead letters have it in `headers`
            write_binary(out, message.topic)
        out.write(message.props)
        return out.getvalue()

    def _partition_prefix(self, number: i64) -> bytes:
        while len(self._partition_prefixes) <= number:
            partition = encode_user_property(b"partition", b"%d" % len(self._partition_prefixes))
            self._partition_prefixes.append(self._fixed_properties + partition + _SEQUENCE)
        return self._partition_prefixes[number]

    def _write_enqueued_at(self, out: BytesWriter, milliseconds: i64) -> None:
        """Write the time in ISO 8601; all but the milliseconds are cached per second."""
        second: i64 = milliseconds // 1000
        if second != self._cached_second:
            self._cache_second(second)
        rest: i64 = milliseconds - second * 1000
        out.write(self._cached_second_text)
        out.append(int(0x30 + rest // 100))
        out.append(int(0x30 + rest // 10 % 10))
        out.append(int(0x30 + rest % 10))
        out.append(0x5A)

    def _token_size(self, lease: Lease, pid: i64, message: Message) -> i64:
        size: i64 = _hex_size(lease.token_counter) + len(self.token_run_text) + TAG_DIGITS
        return size + 2 + _hex_size(pid) + _hex_size(lease.seq) if message.id else size

    def _write_token(self, out: BytesWriter, lease: Lease, pid: i64, message: Message) -> None:
        """Write `<counter>-<run><tag>`.

        If the message id is its publisher's own, `.<pid>-<seq>` follows: by it the next owner of a
        queue finds a delivery of the previous one.
        """
        write_hex(out, lease.token_counter)
        out.write(self.token_run_text)
        write_hex_16(out, lease.token_tag)
        if message.id:
            out.append(0x2E)
            write_hex(out, pid)
            out.append(0x2D)
            write_hex(out, lease.seq)

    def _cache_second(self, second: i64) -> None:
        self._cached_second = second
        self._cached_second_text = _TIMESTAMP_CACHE.get_text(second)


def _decimal_size(value: i64) -> i64:
    size: i64 = 1
    power: i64 = 10
    while power <= value:
        power *= 10
        size += 1
    return size


def _hex_size(value: i64) -> i64:
    size: i64 = 1
    value >>= 4
    while value:
        size += 1
        value >>= 4
    return size


def _write_id(out: BytesWriter, pid: i64, seq: i64) -> None:
    write_u16(out, _hex_size(pid) + 1 + _hex_size(seq))
    write_hex(out, pid)
    out.append(0x2D)
    write_hex(out, seq)


def _write_decimal(out: BytesWriter, value: i64) -> None:
    """Write a number as text after its length."""
    size: i64 = 1
    power: i64 = 10
    while power <= value:
        power *= 10
        size += 1
    write_u16(out, size)
    while size > 0:
        power //= 10
        out.append(int(0x30 + (value // power) % 10))
        size -= 1


def write_headers(out: BytesWriter, headers: bytes) -> None:
    """Write the headers that Sluice has added as user properties: a marker before each pair."""
    at: i64 = 0
    end: i64 = len(headers)
    while at < end:
        start: i64 = at
        at += 2 + ((i64(headers[at]) << 8) | i64(headers[at + 1]))
        at += 2 + ((i64(headers[at]) << 8) | i64(headers[at + 1]))
        out.append(_USER_PROPERTY)
        out.write(headers[start:at])
