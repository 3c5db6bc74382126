"""The client's side of MQTT without socket, clock or asyncio: bytes in, events out.

It holds the session, so it outlives connections: `open` begins a connection, `connection_lost` ends
it, and the next one resumes unanswered operations. The two directions of messages are in `outbound`
and `inbound`; this module handles connecting, subscribing and the order of resuming.

    IDLE ──open──> CONNECTING ──CONNACK──> CONNECTED ──connection_lost──> IDLE
                   CONNECTING ──refusal, violation, connection_lost──> IDLE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from sluice.client.errors import (
    ConnectionLost,
    ConnectRefused,
    ServerDisconnected,
    SubscribeRefused,
    Unsupported,
)
from sluice.client.message import Message
from sluice.client.options import MAX_PACKET_BYTES, Options
from sluice.client.protocol.inbound import InboundMessages
from sluice.client.protocol.outbound import OutboundMessages, PacketIds
from sluice.client.protocol.pending import PendingPublish, PendingSubscription
from sluice.client.protocol.server_info import ServerInfo, read_server_info
from sluice.client.protocol.write_buffer import WriteBuffer
from sluice.errors import ProtocolViolation
from sluice.wire import reasons
from sluice.wire.encode import write_packet
from sluice.wire.packets import (
    V5,
    V311,
    Ack,
    Connack,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
    Unsubscribe,
)
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, Properties
from sluice.wire.reader import PacketReader
from sluice.wire.topics import SHARE_PREFIX, has_wildcard, topic_filter_error

# The return codes of a 3.1.1 CONNACK as the reason codes of 5.0.
REASON_BY_V311_CODE: Final[dict[int, int]] = {
    1: reasons.UNSUPPORTED_PROTOCOL_VERSION,
    2: reasons.CLIENT_IDENTIFIER_NOT_VALID,
    3: reasons.SERVER_UNAVAILABLE,
    4: reasons.BAD_USER_NAME_OR_PASSWORD,
    5: reasons.NOT_AUTHORIZED,
}

# First bytes of CONNACK, DISCONNECT and AUTH: one of them begins every MQTT server's output.
FIRST_BYTES: Final = b"\x20\xe0\xf0"


class State(Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    CONNECTED = "connected"


@dataclass(slots=True, frozen=True)
class Connected:
    """The server accepted the connection. `session_present`: it has the previous session."""

    session_present: bool
    server: ServerInfo


@dataclass(slots=True, frozen=True)
class ConnectDenied:
    """The server refused the connection."""

    error: ConnectRefused


@dataclass(slots=True, frozen=True)
class ConnectionEnded:
    """The connection is over by a DISCONNECT or a fault of the server.

    Close the socket when the output is written.
    """

    error: ConnectionLost


@dataclass(slots=True, frozen=True)
class SubscriptionLost:
    """After a lost session, the server refuses a subscription that it granted before."""

    error: SubscribeRefused


Event = Message | Connected | ConnectDenied | ConnectionEnded | SubscriptionLost


class ClientProtocol:
    """The client's session and its current connection."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.version = options.version
        self.client_id = options.client_id
        self.state = State.IDLE
        self.server = ServerInfo()
        self.write_buffer = WriteBuffer()
        self.subscriptions: dict[bytes, tuple[SubscriptionRequest, Properties | None]] = {}
        self._ids = PacketIds()
        self.outbound = OutboundMessages(
            self.version,
            self._ids,
            self.write_buffer,
            options.inflight_limit,
            options.topic_aliases,
        )
        window = options.window if self.version == V5 else 0xFFFF
        self.inbound = InboundMessages(
            self.version, self.write_buffer, window, options.topic_alias_maximum
        )
        self._pending_subscriptions: dict[int, PendingSubscription] = {}
        # Of the pending subscriptions, those that renew a lost session.
        self._renewed_ids: set[int] = set()
        self._has_connected = False
        self._reader = PacketReader(options.maximum_packet_size or MAX_PACKET_BYTES)

    @property
    def is_awaiting_answers(self) -> bool:
        """Return whether any operation is not answered yet."""
        outbound = self.outbound
        return bool(
            outbound.inflight
            or outbound.waiting
            or outbound.releasing
            or self._pending_subscriptions
        )

    # Connections

    def open(self) -> None:
        """Begin a connection: write CONNECT."""
        self.write_buffer.take_bytes()
        self._reader = PacketReader(self.options.maximum_packet_size or MAX_PACKET_BYTES)
        self.state = State.CONNECTING
        self._write(self.options.connect_packet(self.client_id, self._has_connected))

    def connection_lost(self) -> None:
        """End the connection. The session stays."""
        self.state = State.IDLE
        self.outbound.on_disconnected()
        self.inbound.on_disconnected()
        self.write_buffer.take_bytes()

    def disconnect(self, reason: int = 0, session_expiry: int | None = None) -> None:
        """Write DISCONNECT; the server publishes no will, unless `reason` is 0x04."""
        properties = None
        if session_expiry is not None:
            properties = Properties()
            properties.session_expiry = session_expiry
        self.outbound.is_open = False
        self._write(Disconnect(reason, properties))

    def ping(self) -> None:
        self._write(Pingreq())

    def fail(self, error: Exception) -> None:
        """Fail all operations, because no further connection follows."""
        self.outbound.fail(error)
        pending = list(self._pending_subscriptions.values())
        self._pending_subscriptions.clear()
        self._renewed_ids.clear()
        for subscription in pending:
            subscription.fail(error)

    # Requests of the application

    def publish(self, outgoing: PendingPublish) -> None:
        self.outbound.publish(outgoing)

    def send_subscription(self, pending: PendingSubscription) -> None:
        """Send a SUBSCRIBE or UNSUBSCRIBE, and resend it after a reconnect until it is answered."""
        if isinstance(pending.packet, Subscribe):
            self._check_subscribe(pending.packet)
        self._register(pending)
        if self.state is State.CONNECTED:
            self._write(pending.packet)

    def abandon(self, pending: PendingSubscription) -> None:
        """Drop an operation whose caller was cancelled.

        A packet that the server may have received keeps its packet id.
        """
        if self.state is not State.CONNECTED and not pending.done:
            self._pending_subscriptions.pop(pending.packet.packet_id, None)
            self._ids.used.discard(pending.packet.packet_id)

    # Packets of the server

    def receive(self, data: bytes) -> list[Event]:
        """Return the events in `data`. A protocol violation is the last event."""
        events: list[Event] = []
        version = self.version
        if version == V5 and self.state is State.CONNECTING and data[:2] == b"\x20\x02":
            version = V311  # a server without 5.0 refuses in the format of 3.1.1
        try:
            if (
                self.state is State.CONNECTING
                and not self._reader.buffered_bytes
                and data[0] not in FIRST_BYTES
            ):
                raise ProtocolViolation("it does not speak MQTT")
            for packet in self._reader.feed(data, version):
                if isinstance(packet, Ack) and self.state is State.CONNECTED:
                    kind = packet.kind
                    if kind == PUBACK:
                        self.outbound.on_puback(packet)
                    elif kind == PUBREC:
                        self.outbound.on_pubrec(packet)
                    elif kind == PUBCOMP:
                        self.outbound.on_pubcomp(packet)
                    else:
                        self.inbound.on_pubrel(packet)
                elif isinstance(packet, Publish) and self.state is State.CONNECTED:
                    message = self.inbound.receive(packet)
                    if message is not None:
                        events.append(message)
                elif not self._receive_other(packet, events):
                    return events
        except ProtocolViolation as fault:
            if self.version == V5 and self.state is State.CONNECTED:
                self.disconnect(fault.reason)
            events.append(
                ConnectionEnded(
                    ConnectionLost(f"the server violated MQTT: {fault.what}", fault.remedy)
                )
            )
            return events
        self.outbound.send_waiting()
        return events

    def _receive_other(self, packet: Packet, events: list[Event]) -> bool:
        """Handle a packet that is no message or acknowledgement; return False to disconnect."""
        if isinstance(packet, Connack) and self.state is State.CONNECTING:
            return self._receive_connack(packet, events)
        if isinstance(packet, Disconnect) and self.version == V5:
            events.append(ConnectionEnded(ServerDisconnected(packet.reason, packet.properties)))
            return False
        if self.state is State.CONNECTED:
            if isinstance(packet, Suback | Unsuback):
                self._receive_answer(packet, events)
                return True
            if isinstance(packet, Pingresp):
                return True
        raise ProtocolViolation(f"unexpected {type(packet).__name__} from the server")

    def _receive_connack(self, packet: Connack, events: list[Event]) -> bool:
        properties = packet.properties
        if packet.reason:
            reason = packet.reason
            if properties is None:  # in the format of 3.1.1
                reason = REASON_BY_V311_CODE.get(reason, reasons.UNSPECIFIED_ERROR)
            text = properties.reason_string if properties is not None else None
            events.append(ConnectDenied(ConnectRefused(reason, text, properties)))
            return False
        if self.version == V5 and properties is None:
            raise ProtocolViolation("the CONNACK has no properties")
        self.server = read_server_info(properties)
        self.client_id = self.server.assigned_client_id or self.client_id
        self.state = State.CONNECTED
        self._has_connected = True
        present = packet.session_present
        self.inbound.on_connected(present)
        self._resume_subscriptions(present)
        self.outbound.on_connected(self.server, present)
        events.append(Connected(present, self.server))
        return True

    def _receive_answer(self, answer: Suback | Unsuback, events: list[Event]) -> None:
        pending = self._pending_subscriptions.pop(answer.packet_id, None)
        if pending is None:
            return
        self._ids.used.discard(answer.packet_id)
        packet = pending.packet
        if isinstance(packet, Subscribe) != isinstance(answer, Suback):
            pending.fail(ConnectionLost("the server mixed up SUBACK and UNSUBACK"))
            raise ProtocolViolation("the server mixed up SUBACK and UNSUBACK")
        if len(answer.reasons) != len(pending.filters) and (
            self.version == V5 or isinstance(answer, Suback)
        ):
            pending.fail(
                ConnectionLost("the server answered a different number of filters than requested")
            )
            raise ProtocolViolation(
                "the server answered a different number of filters than requested"
            )
        pending.answer = answer
        if isinstance(packet, Subscribe):
            for request, reason in zip(packet.requests, answer.reasons):
                if reason < 0x80:
                    self.subscriptions[request.topic_filter] = (request, packet.properties)
                else:
                    self.subscriptions.pop(request.topic_filter, None)
        else:
            for topic_filter, reason in zip(packet.filters, pending.reasons()):
                if reason < 0x80:
                    self.subscriptions.pop(topic_filter, None)
        if answer.packet_id in self._renewed_ids:
            self._renewed_ids.discard(answer.packet_id)
            refusal = pending.refusal()
            if refusal is not None:
                events.append(SubscriptionLost(refusal))
        pending.complete(answer)

    # Resuming

    def _resume_subscriptions(self, session_present: bool) -> None:
        """Renew the subscriptions of a lost session, then resend all unanswered packets."""
        if not session_present:
            for packet_id in self._renewed_ids:
                self._pending_subscriptions.pop(packet_id, None)
                self._ids.used.discard(packet_id)
            self._renewed_ids.clear()
            waiting = list(self._pending_subscriptions.values())
            self._pending_subscriptions.clear()
            for requests, properties in self._subscriptions_by_properties():
                renewal = PendingSubscription(Subscribe(0, requests, properties))
                self._register(renewal)
                self._renewed_ids.add(renewal.packet.packet_id)
            for pending in waiting:
                self._pending_subscriptions[pending.packet.packet_id] = pending
        for pending in self._pending_subscriptions.values():
            self._write(pending.packet)

    def _subscriptions_by_properties(
        self,
    ) -> list[tuple[list[SubscriptionRequest], Properties | None]]:
        """Return the subscriptions, grouped by their properties."""
        groups: list[tuple[list[SubscriptionRequest], Properties | None]] = []
        for request, properties in self.subscriptions.values():
            if groups and groups[-1][1] is properties:
                groups[-1][0].append(request)
            else:
                groups.append(([request], properties))
        return groups

    def _register(self, pending: PendingSubscription) -> None:
        if len(self._ids.used) >= 0xFFFF:
            raise Unsupported(
                "all packet identifiers are in use",
                "Wait for some of the subscribes to be answered",
            )
        pending.packet.packet_id = self._ids.allocate()
        self._pending_subscriptions[pending.packet.packet_id] = pending

    def _check_subscribe(self, packet: Subscribe) -> None:
        """Refuse filters and options that no server grants, or that this one does not support."""
        for request in packet.requests:
            fault = topic_filter_error(request.topic_filter, 0xFFFF)
            if fault:
                raise Unsupported(
                    f"{request.topic_filter.decode()!r} is not a topic filter: {fault}"
                )
            shared = request.topic_filter.startswith(SHARE_PREFIX)
            if shared and request.no_local:
                raise Unsupported("a shared subscription cannot be no_local", "Leave no_local out")
            if self.state is not State.CONNECTED:
                continue
            if shared and not self.server.shared_available:
                raise Unsupported(
                    "this server has no shared subscriptions", "Subscribe without $share/<name>/"
                )
            if has_wildcard(request.topic_filter) and not self.server.wildcard_available:
                raise Unsupported(
                    "this server has no wildcard subscriptions",
                    "Subscribe to each topic by its name",
                )
        if packet.properties is not None and packet.properties.subscription_ids:
            if self.state is State.CONNECTED and not self.server.subscription_ids_available:
                raise Unsupported(
                    "this server has no subscription identifiers", "Leave the identifier out"
                )

    def _write(self, packet: Packet) -> None:
        write_packet(self.write_buffer.writer, packet, self.version)
        self.write_buffer.notify()


def requests_for(
    filters: Sequence[str],
    qos: int,
    no_local: bool,
    retain_as_published: bool,
    retain_handling: int,
) -> list[SubscriptionRequest]:
    """Return the entries of a SUBSCRIBE: one per filter, all with the same options."""
    if not 0 <= qos <= 2 or not 0 <= retain_handling <= 2:
        raise Unsupported(
            f"qos is {qos} and retain_handling {retain_handling}", "Each is 0, 1 or 2"
        )
    if not filters:
        raise Unsupported("there is no topic filter", "Name at least one")
    return [
        SubscriptionRequest(one.encode(), qos, no_local, retain_as_published, retain_handling)
        for one in filters
    ]


__all__ = [
    "ClientProtocol",
    "ConnectDenied",
    "Connected",
    "ConnectionEnded",
    "Event",
    "State",
    "SubscriptionLost",
    "Unsubscribe",
    "requests_for",
]
