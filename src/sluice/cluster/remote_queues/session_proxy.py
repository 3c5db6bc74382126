"""A session proxy: acts for a session at one remote cell, as an MQTT 5 client with the same id.

    local session ──SessionProxy──▶ stream ──▶ Connection and Session of the client id, remote cell

The remote cell treats the proxy as it treats every client: groups, prefetch, receive maximum,
settlement, reason strings. Packet ids are the proxy's own.

When the stream breaks or the cell moves, the proxy resends unanswered publishes. Deliveries that
the client received over an earlier stream are settled by token, because late settlements still
count. Invariant: these settlements go out before the new stream subscribes, so that no consumer
receives a message that is already done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.broker.queue_topics import EXPLICIT_SUFFIX, EXTEND, NACK, REJECT, RELEASE
from sluice.broker.routing import CLIENT_CLAIM, NO_USER_PROPERTIES, RemoteDelivery
from sluice.broker.routing import SessionProxy as Port
from sluice.broker.sessions import SubscribeOptions, encode_subscription_ids
from sluice.cluster.remote_queues.pending_requests import (
    PendingPublish,
    PendingSubscribe,
    SplitSettlement,
)
from sluice.cluster.remote_queues.routing import ECQ_PREFIX
from sluice.cluster.remote_queues.unsettled import (
    UnsettledDeliveries,
    make_settlement,
    message_id_of,
)
from sluice.cluster.transport import StreamTransport
from sluice.errors import ProtocolViolation
from sluice.wire.decode import decode, decode_publish
from sluice.wire.encode import write_ack, write_disconnect_or_auth, write_packet, write_publish
from sluice.wire.packets import (
    V5,
    Ack,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsubscribe,
)
from sluice.wire.primitives import read_u16
from sluice.wire.properties import PUBACK, PUBLISH, Properties
from sluice.wire.reader import MAX_PACKET_BYTES, PacketReader
from sluice.wire.reasons import (
    CLIENT_IDENTIFIER_NOT_VALID,
    IMPLEMENTATION_SPECIFIC_ERROR,
    SESSION_TAKEN_OVER,
)

if TYPE_CHECKING:
    from sluice.cluster.remote_queues.session_proxies import MqttSessionProxies

MIN_REDIAL_SECONDS: Final = 0.02  # before a broken stream is dialed again
MAX_REDIAL_SECONDS: Final = 0.5
OWNER_UNREACHABLE: Final = (
    "the node that owns this queue does not answer: subscribe again in a moment, "
    "and check `sluice cluster status` if the error persists"
)
MAX_BACKLOG: Final = 1024  # unsent publishes from which on the publisher is throttled


class MqttSessionProxy(Port):
    def __init__(self, proxies: MqttSessionProxies, cell: int, clean_start: bool) -> None:
        self.cell = cell
        self.is_persistent = False  # the remote session outlives its stream
        self._proxies = proxies
        # True: a remote session of this client id would be from a previous session; discard it.
        self._clean_start = clean_start
        self._connection_number = 0  # counts streams
        self._transport: StreamTransport | None = None
        self._is_dialing = False
        self._is_ended = False
        self._reader = PacketReader()
        self._last_topic: bytes = b""  # of the last delivery; the decoder reuses its bytes
        self._write_buffer: BytesWriter | None = None
        self._last_packet_id = 0
        self._in_flight: dict[int, PendingPublish] = {}  # publishes without an answer, in order
        self._backlog: deque[PendingPublish] = deque()  # publishes that are not sent yet
        self._receive_maximum = 1024  # of the remote cell
        self._pending_subscribes: dict[int, PendingSubscribe] = {}
        self._filters: dict[bytes, SubscribeOptions] = {}
        # Unacknowledged deliveries by the packet id of this stream.
        self._deliveries: dict[int, RemoteDelivery] = {}
        self._seen_packet_ids: set[int] = set()  # of those, the ones sent on the current stream
        # Deliveries that the client has not settled, for queues where a PUBACK does not settle.
        self._unsettled = UnsettledDeliveries()
        self._puback_settlement: dict[bytes, bool] = {}  # by topic: whether a PUBACK settles
        self._cached_topic: bytes = b""  # the topic of the last delivery
        self._cached_entries: dict[bytes, bytes] | None = None  # its queue's entries in _unsettled
        self._redial_seconds = MIN_REDIAL_SECONDS
        self._is_write_paused = False
        # Reconnect as soon as nothing on the stream is in flight.
        self._is_reconnecting = False
        self._is_sweep_scheduled = False
        # Set if this is the cell of the client id and the session is elsewhere: the value of the
        # CONNECT that claims the client id, and holds it while the stream is open.
        self._claim = ""

    # ---- the stream

    def adopt(self, claim: str, receive_maximum: int, transport: StreamTransport) -> None:
        """Use the stream that has claimed the client id."""
        self._claim = claim
        self._receive_maximum = receive_maximum or self._receive_maximum
        self._transport = transport
        self._connection_number += 1
        self._clean_start = False
        transport.set_protocol(self)

    def dial(self) -> None:
        if self._transport is None and not self._is_dialing and not self._is_ended:
            self._is_dialing = True
            self._proxies.dial(self.cell, self)

    def connection_made(self, transport: StreamTransport) -> None:
        self._is_dialing = False
        if self._is_ended:
            transport.close()
            return
        self._transport = transport
        self._reader = PacketReader()
        self._is_write_paused = False
        self._is_reconnecting = False
        self._connection_number += 1
        self._seen_packet_ids.clear()
        session = self._proxies.session
        self.is_persistent = bool(self._filters) and session.expiry_seconds > 0
        connection = session.connection
        max_packet = MAX_PACKET_BYTES if connection is None else int(connection.max_outgoing_packet)
        connect = make_connect(
            session.client_id,
            int(session.version),
            session.user,
            int(session.outbound.window),
            max_packet,
        )
        connect.clean_start = self._clean_start or not self.is_persistent
        connect.properties.session_expiry = session.expiry_seconds if self.is_persistent else 0
        if self._claim:
            connect.properties.user.append((CLIENT_CLAIM, f"{self._claim} again"))
        self._clean_start = False
        self._send_packet(connect)
        unanswered, self._in_flight = self._in_flight, {}
        self._backlog.extendleft(
            reversed([sent for sent in unanswered.values() if not sent.is_refused])
        )
        others = self._settle_earlier_deliveries()
        self._send_packet(Pingreq())  # the PINGRESP arrives after all redeliveries
        self._pending_subscribes = {
            key: pending
            for key, pending in self._pending_subscribes.items()
            if pending.topic_filter in self._filters
        }
        waiting, self._pending_subscribes = (
            {pending.topic_filter: pending for pending in self._pending_subscribes.values()},
            {},
        )
        for topic_filter, options in self._filters.items():
            pending = waiting.get(topic_filter)
            if pending is None:
                pending = PendingSubscribe(topic_filter, None)
                if topic_filter.startswith(ECQ_PREFIX):
                    options = SubscribeOptions(options.qos, options.identifier, [])  # no `start`
            self._send_subscribe(pending, options)
        self._backlog.extend(others)
        self._send_backlog()

    def _settle_earlier_deliveries(self) -> list[PendingPublish]:
        """Send the waiting settlements of earlier deliveries; return the other publishes."""
        self._unsettled.on_reconnected()
        self._invalidate_topic_cache()
        waiting, self._backlog = self._backlog, deque()
        others: list[PendingPublish] = []
        for sent in waiting:
            for part in self._split_settlement(sent):
                if part.is_command and part.epoch < 0:
                    self._backlog.append(part)
                else:
                    others.append(part)
        self._send_backlog()
        return others

    def _split_settlement(self, sent: PendingPublish) -> list[PendingPublish]:
        if not sent.is_command or sent.epoch < 0:
            return [sent]
        late, rest = self._unsettled.split_by_connection(sent.packet)
        if not late:
            return [sent]
        split = SplitSettlement(sent, len(late) if rest is None else len(late) + 1)
        parts = [PendingPublish(packet, True, -1, split, sent.deadline) for packet in late]
        if rest is not None:
            parts.append(PendingPublish(rest, True, sent.epoch, split, sent.deadline))
        return parts

    def data_received(self, data: bytes) -> None:
        self._proxies.begin_turn()
        try:
            self._read(self._reader, data)
        except ProtocolViolation as fault:
            self._proxies.warn(f"malformed packet from cell {self.cell}: {fault}")
            self._close_transport()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        self._transport = None
        self._is_dialing = False
        self._write_buffer = None
        if (
            not self._is_ended
            and (self._claim or self._filters or self._in_flight or self._backlog)
            and self._proxies.is_connected()
        ):
            self._proxies.call_later(self._redial_seconds, self.dial)
            self._redial_seconds = min(2 * self._redial_seconds, MAX_REDIAL_SECONDS)

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._send_backlog()
        self._proxies.unthrottle_connections()

    def is_full(self) -> bool:
        """Return whether the client should be throttled."""
        return self._is_write_paused or len(self._backlog) >= MAX_BACKLOG

    def set_reading(self, is_reading: bool) -> None:
        """Pause or resume reading, as the client stops or starts to read."""
        if self._transport is not None:
            if is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    # ---- requests of the session

    def publish(self, packet: Publish, is_command: bool, epoch: int) -> None:
        if packet.expires_at:
            packet.expiry_seconds = max(0, int(packet.expires_at - self._proxies.now() + 0.999))
        sent = PendingPublish(packet, is_command, epoch)
        if epoch >= 0 and packet.qos > 0:
            sent.deadline = self._proxies.answer_deadline()
            self._schedule_sweep()
        if is_command and epoch >= 0 and self._deliveries:
            self._note_explicit_settlement(packet)
        if self._transport is None:
            self._backlog.append(sent)
            self.dial()
        else:
            if is_command:
                self._backlog.extend(self._split_settlement(sent))
            else:
                self._backlog.append(sent)
            self._send_backlog()

    def _note_explicit_settlement(self, packet: Publish) -> None:
        """Note a nack or release, so that a later PUBACK of the same delivery is no ack."""
        verb = self._unsettled.verb(packet)
        if verb in (NACK, REJECT, RELEASE, EXTEND):
            message_ids = set(self._unsettled.message_ids(packet))
            for delivery in self._deliveries.values():
                message = delivery.message
                if (
                    message_id_of(message.raw_properties) in message_ids
                    or message.topic.partition(b"/$msg/")[2] in message_ids
                ):
                    delivery.is_nacked = delivery.is_nacked or verb != EXTEND
                    if self._proxies.session.version != V5:
                        self._unsettled.record_explicit(
                            message, delivery.connection_number != self._connection_number
                        )

    def subscribe(
        self,
        topic_filter: bytes,
        options: SubscribeOptions,
        on_reply: Callable[[int, str], None] | None,
    ) -> None:
        pending = PendingSubscribe(
            topic_filter, on_reply, self._proxies.answer_deadline(), self._filters.get(topic_filter)
        )
        self._schedule_sweep()
        self._filters[topic_filter] = options
        self._invalidate_topic_cache()
        if self._transport is None:
            self._pending_subscribes[-len(self._pending_subscribes) - 1] = pending
            self.dial()
        elif self._proxies.session.expiry_seconds > 0 and not self.is_persistent:
            self._pending_subscribes[-len(self._pending_subscribes) - 1] = pending
            # The remote session ends with its stream, and must persist from now on.
            self._is_reconnecting = True
            self._reconnect_if_idle()
        else:
            self._send_subscribe(pending, options)

    def unsubscribe(self, topic_filter: bytes) -> None:
        self._invalidate_topic_cache()
        if self._filters.pop(topic_filter, None) is not None and self._transport is not None:
            self._send_packet(Unsubscribe(self._next_packet_id(), [topic_filter]))

    def on_acknowledged(self, delivery: RemoteDelivery, reason: i64) -> None:
        remote_packet_id = int(delivery.remote_packet_id)
        if self._deliveries.get(remote_packet_id) is delivery:
            del self._deliveries[remote_packet_id]
        if delivery.connection_number == self._connection_number and self._transport is not None:
            write_ack(self._writer(), PUBACK, delivery.remote_packet_id, reason, None, V5)
        elif delivery.message.topic.startswith(ECQ_PREFIX):
            pass  # an exclusive queue has no tokens: it delivers the value again
        elif not delivery.is_nacked and self._settles_by_puback(delivery.message.topic):
            verb = b"/$ack" if reason < 0x80 else b"/$nack"
            self.publish(make_settlement(delivery.message, verb), True, -1)

    def restore_subscription(self, topic_filter: bytes, options: SubscribeOptions) -> None:
        """Restore a subscription after a restart; the remote session may have it too."""
        self._filters[topic_filter] = options
        self.is_persistent = True

    def on_attached(self) -> None:
        if self._filters or self._in_flight or self._backlog:
            self.dial()

    def on_detached(self) -> None:
        """Close the stream while the client is offline; the remote session waits too.

        The client itself resends its QoS 1 publishes, so these are dropped. QoS 2 publishes and
        settlements by token count as received and are sent when the client is back.
        """
        self._close_transport()
        self._in_flight = {
            key: one for key, one in self._in_flight.items() if one.packet.qos == 2 or one.epoch < 0
        }
        self._backlog = deque(one for one in self._backlog if one.packet.qos == 2 or one.epoch < 0)
        self._pending_subscribes.clear()

    def end(self) -> None:
        """End the remote session together with the local one."""
        self._is_ended = True
        if self._transport is not None:
            properties = Properties()
            properties.session_expiry = 0
            write_disconnect_or_auth(
                self._writer(), 0xE0, 0, properties if self.is_persistent else None, V5
            )
            self.flush()
            self._transport.close()
        elif self.is_persistent:
            self._proxies.end_remote_session(self.cell)

    # ---- packets of the remote cell

    def _read(self, reader: PacketReader, data: bytes) -> None:
        """Handle every complete packet.

        Nearly all packets are deliveries and plain PUBACKs, so these have a fast path.
        """
        if not reader.begin(data):
            return
        data = reader.data
        while reader.advance():
            head: i64 = reader.head
            body: i64 = reader.body
            end: i64 = reader.end
            if head >> 4 == PUBLISH:
                packet = decode_publish(data, head & 15, body, end, V5, self._last_topic)
                self._last_topic = packet.topic
                self._deliver(packet)
            elif head == PUBACK << 4 and end - body == 2:
                self._on_ack(int(read_u16(data, body, end)), 0, None)
            else:
                self._handle_packet(decode(data, head, body, end, V5))

    def _handle_packet(self, packet: Packet) -> None:
        if isinstance(packet, Ack):
            self._on_ack(int(packet.packet_id), int(packet.reason), packet.properties)
        elif isinstance(packet, Suback):
            pending = self._pending_subscribes.pop(packet.packet_id, None)
            reason = packet.reasons[0]
            if pending is not None and reason >= 0x80:
                self._filters.pop(pending.topic_filter, None)
            if pending is not None and pending.on_reply is not None:
                pending.on_reply(reason, _reason_string(packet.properties))
            elif (
                pending is not None and pending.topic_filter not in self._filters and reason < 0x80
            ):
                # The client was refused meanwhile.
                self._send_packet(Unsubscribe(self._next_packet_id(), [pending.topic_filter]))
        elif isinstance(packet, Connack):
            if packet.reason < 0x80:
                self._redial_seconds = MIN_REDIAL_SECONDS
            if self._claim and packet.reason == CLIENT_IDENTIFIER_NOT_VALID:
                self._proxies.on_claim_lost()
            elif packet.reason >= 0x80:
                self._proxies.warn(
                    f"cell {self.cell} refused a session proxy: {_reason_string(packet.properties)}"
                )
            elif packet.properties is not None and packet.properties.receive_maximum:
                self._receive_maximum = packet.properties.receive_maximum
            self._send_backlog()
        elif isinstance(packet, Pingresp):
            self._drop_stale_deliveries()
        elif isinstance(packet, Disconnect):
            if self._claim and packet.reason == SESSION_TAKEN_OVER:
                self._proxies.on_claim_lost()
            self._close_transport()

    def _deliver(self, packet: Publish) -> None:
        session = self._proxies.session
        extra = (
            b""
            if packet.subscription_ids is None
            else encode_subscription_ids(packet.subscription_ids)
        )
        if packet.expiry_seconds >= 0:
            packet.expires_at = self._proxies.now() + float(packet.expiry_seconds)
        if packet.topic is not self._cached_topic:
            self._select_topic(packet.topic)
        if self._cached_entries is not None:
            self._unsettled.record(self._cached_entries, packet.topic, packet.raw_properties)
        if packet.qos == 0:
            session.outbound.deliver(packet, 0, False, extra, None)
            return
        remote_packet_id = int(packet.packet_id)
        self._seen_packet_ids.add(remote_packet_id)
        existing = self._deliveries.get(remote_packet_id)
        if existing is not None and packet.dup:
            existing.connection_number = self._connection_number
            session.outbound.resend_remote(existing)
            return
        delivery = RemoteDelivery(packet, extra, self, packet.packet_id, self._connection_number)
        self._deliveries[remote_packet_id] = delivery
        session.outbound.deliver_remote(delivery)
        # Not if the stream holds the client id: a takeover arrives on it.
        if (
            session.connection is not None
            and session.connection.is_write_paused
            and not self._claim
        ):
            self.set_reading(False)

    def _drop_stale_deliveries(self) -> None:
        """Forget deliveries of earlier streams that were not redelivered on the current one.

        The client no longer holds their leases. It may still settle them by token; a delivery that
        was not sent on the client's current connection is dropped.
        """
        for remote_packet_id, delivery in list(self._deliveries.items()):
            if (
                remote_packet_id not in self._seen_packet_ids
                and delivery.connection_number != self._connection_number
            ):
                del self._deliveries[remote_packet_id]
                if delivery.needs_resend:
                    self._proxies.session.outbound.drop_remote(delivery)

    def _on_ack(self, packet_id: int, reason: int, properties: Properties | None) -> None:
        sent = self._in_flight.pop(packet_id, None)
        if sent is not None:
            if sent.is_command and reason < 0x80:
                self._unsettled.remove_settled(sent.packet)
            split = sent.split
            if sent.is_refused:
                pass
            elif split is not None:
                if split.add_answer(reason, _reason_string(properties)) and not split.is_refused:
                    original = split.original
                    self._proxies.answer_publish(
                        original.packet, True, original.epoch, split.reason, split.reason_string
                    )
            elif sent.epoch >= 0:
                self._proxies.answer_publish(
                    sent.packet, sent.is_command, sent.epoch, reason, _reason_string(properties)
                )
        if self._is_reconnecting:
            self._reconnect_if_idle()
        elif self._backlog:
            self._send_backlog()

    def _reconnect_if_idle(self) -> None:
        if all(sent.is_refused for sent in self._in_flight.values()):
            self._close_transport()

    # ---- timeouts

    def _schedule_sweep(self) -> None:
        if not self._is_sweep_scheduled:
            self._is_sweep_scheduled = True
            self._proxies.call_later(self._proxies.sweep_interval(), self._expire_requests)

    def _expire_requests(self) -> None:
        """Refuse requests that the remote cell has not answered in time."""
        self._is_sweep_scheduled = False
        self._proxies.begin_turn()
        now = self._proxies.now()
        late = [sent for sent in self._in_flight.values() if 0.0 < sent.deadline <= now]
        late += [sent for sent in self._backlog if 0.0 < sent.deadline <= now]
        if late:
            # Settlements by token are sent all the same: late settlements still count.
            kept = [
                sent for sent in self._backlog if not 0.0 < sent.deadline <= now or sent.epoch < 0
            ]
            self._backlog = deque(kept)
        for sent in late:
            sent.deadline = 0.0
            self._refuse(sent)
        for key, pending in list(self._pending_subscribes.items()):
            if pending.on_reply is not None and pending.deadline <= now:
                self._refuse_subscription(key, pending)
        has_pending = any(sent.deadline for sent in self._in_flight.values())
        has_pending = has_pending or any(sent.deadline for sent in self._backlog)
        if has_pending or any(
            pending.on_reply is not None for pending in self._pending_subscribes.values()
        ):
            self._schedule_sweep()

    def _refuse(self, sent: PendingPublish) -> None:
        split = sent.split
        if split is None:
            sent.is_refused = True
            self._proxies.refuse_timed_out(sent.packet, sent.is_command, sent.epoch)
        elif not split.is_refused:
            split.is_refused = True
            self._proxies.refuse_timed_out(split.original.packet, True, split.original.epoch)

    def _refuse_subscription(self, key: int, pending: PendingSubscribe) -> None:
        answer, pending.on_reply = pending.on_reply, None
        if pending.previous is None:
            self._filters.pop(pending.topic_filter, None)
        else:
            self._filters[pending.topic_filter] = pending.previous
        self._invalidate_topic_cache()
        if key < 0:
            del self._pending_subscribes[key]  # never sent
        if answer is not None:
            answer(IMPLEMENTATION_SPECIFIC_ERROR, OWNER_UNREACHABLE)

    # ---- sending

    def _send_backlog(self) -> None:
        if self._transport is None or self._is_reconnecting:
            return
        backlog = self._backlog
        while (
            backlog and len(self._in_flight) < self._receive_maximum and not self._is_write_paused
        ):
            sent = backlog.popleft()
            packet = sent.packet
            out = self._writer()
            extra = b""
            if packet.expiry_seconds >= 0:
                extra = b"\x02" + int(packet.expiry_seconds).to_bytes(4, "big")
            if packet.qos == 0 and sent.epoch >= 0:
                write_publish(out, packet, packet.topic, 0, packet.retain, False, 0, extra, V5)
                if sent.is_command:
                    self._unsettled.remove_settled(packet)
                continue
            packet_id = self._next_packet_id()
            self._in_flight[packet_id] = sent
            write_publish(out, packet, packet.topic, 1, packet.retain, False, packet_id, extra, V5)

    def _send_subscribe(self, pending: PendingSubscribe, options: SubscribeOptions) -> None:
        packet_id = self._next_packet_id()
        self._pending_subscribes[packet_id] = pending
        properties = Properties()
        if options.identifier:
            properties.subscription_ids = [options.identifier]
        properties.user = options.user
        if self._proxies.session.version != V5 and options.get("ack-mode") is None:
            properties.user = [*options.user, ("ack-mode", "puback")]
        request = SubscriptionRequest(pending.topic_filter, options.qos)
        self._send_packet(Subscribe(packet_id, [request], properties))

    def _select_topic(self, topic: bytes) -> None:
        """Cache, for the queue of a delivery, whether and where its deliveries are recorded."""
        self._cached_topic = topic
        self._cached_entries = None
        if self._proxies.session.version == V5:
            by_puback = self._puback_settlement.get(topic)
            if by_puback is None:
                by_puback = self._puback_settlement[topic] = self._settles_by_puback(topic)
            if not by_puback:
                self._cached_entries = self._unsettled.entries_for(topic)

    def _invalidate_topic_cache(self) -> None:
        """Drop what is cached about topics after subscriptions or the stream have changed."""
        self._cached_topic = b""
        self._puback_settlement.clear()

    def _settles_by_puback(self, topic: bytes) -> bool:
        if topic.startswith(ECQ_PREFIX):
            return True
        mode = "explicit" if self._proxies.session.version == V5 else "puback"
        for topic_filter, options in self._filters.items():
            if not topic_filter.startswith(ECQ_PREFIX) and self._proxies.covers(
                topic_filter, topic
            ):
                mode = options.get("ack-mode") or mode
                if topic_filter.endswith(EXPLICIT_SUFFIX):
                    mode = "explicit"
        return mode == "puback"

    def _next_packet_id(self) -> int:
        while True:
            self._last_packet_id = self._last_packet_id % 65_535 + 1
            if (
                self._last_packet_id not in self._in_flight
                and self._last_packet_id not in self._pending_subscribes
            ):
                return self._last_packet_id

    def _send_packet(self, packet: Packet) -> None:
        write_packet(self._writer(), packet, V5)

    def _writer(self) -> BytesWriter:
        if self._write_buffer is None:
            self._write_buffer = BytesWriter()
            self._proxies.call_soon(self.flush)
        return self._write_buffer

    def flush(self) -> None:
        out, self._write_buffer = self._write_buffer, None
        if out is not None and self._transport is not None:
            self._transport.write(out.getvalue())

    def _close_transport(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()


def make_connect(
    client_id: str, version: int, user: str | None, window: int, max_packet: int
) -> Connect:
    """Return the CONNECT of a client's session to another cell."""
    connect = Connect(client_id, V5, True, 0)
    connect.properties.session_expiry = 0
    connect.properties.receive_maximum = max(1, window)
    # The user name binds the remote deliveries to the user as well.
    connect.username = user or None
    if version != V5:
        connect.properties.user.append(NO_USER_PROPERTIES)
    elif max_packet != MAX_PACKET_BYTES:
        connect.properties.maximum_packet_size = max_packet
    return connect


def _reason_string(properties: Properties | None) -> str:
    return properties.reason_string or "" if properties is not None else ""
