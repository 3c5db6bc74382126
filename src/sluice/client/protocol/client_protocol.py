"""The client's side of MQTT without a socket, a clock or asyncio: bytes in, events out, output collected in a buffer.

It holds the session, so it outlives connections: `open` begins one, `lost` ends it, and what was unanswered then is
taken up by the next. The two directions of messages live in `outbox` and `incoming`; here are connecting,
subscribing and the order in which things are taken up again.

    IDLE ──open──> CONNECTING ──CONNACK──> CONNECTED ──lost──> IDLE
                   CONNECTING ──refusal, violation, lost──> IDLE
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
from sluice.wire.framing import Framer
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
from sluice.wire.topics import SHARE_PREFIX, has_wildcard, topic_filter_error

# The return codes of a 3.1.1 CONNACK as the reason codes of 5.0.
REASON_BY_V311_CODE: Final[dict[int, int]] = {
    1: reasons.UNSUPPORTED_PROTOCOL_VERSION,
    2: reasons.CLIENT_IDENTIFIER_NOT_VALID,
    3: reasons.SERVER_UNAVAILABLE,
    4: reasons.BAD_USER_NAME_OR_PASSWORD,
    5: reasons.NOT_AUTHORIZED,
}

# CONNACK, DISCONNECT and AUTH: how an MQTT server can begin to speak.
FIRST_BYTES: Final = b"\x20\xe0\xf0"


class State(Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    CONNECTED = "connected"


@dataclass(slots=True, frozen=True)
class Connected:
    """The server accepted the connection; `session_present`: it still has the session from before."""

    session_present: bool
    server: ServerInfo


@dataclass(slots=True, frozen=True)
class ConnectDenied:
    """The server refused the connection."""

    error: ConnectRefused


@dataclass(slots=True, frozen=True)
class ConnectionEnded:
    """This connection is over, by the server's word or by its fault. Close the socket when the output is written."""

    error: ConnectionLost


@dataclass(slots=True, frozen=True)
class SubscriptionLost:
    """After the session was lost, the server no longer grants what it granted before."""

    error: SubscribeRefused


Event = Message | Connected | ConnectDenied | ConnectionEnded | SubscriptionLost


class ClientProtocol:
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
        self._renewed_ids: set[int] = set()  # those of `_asked` that nobody but ourselves asked
        self._has_connected = False
        self._framer = Framer(options.maximum_packet_size or MAX_PACKET_BYTES)

    @property
    def is_awaiting_answers(self) -> bool:
        """Whether anything said to the server still waits for its answer."""
        outbox = self.outbound
        return bool(
            outbox.inflight or outbox.waiting or outbox.releasing or self._pending_subscriptions
        )

    # The life of a connection

    def open(self) -> None:
        """A socket is there: say CONNECT."""
        self.write_buffer.take_bytes()
        self._framer = Framer(self.options.maximum_packet_size or MAX_PACKET_BYTES)
        self.state = State.CONNECTING
        self._write(self.options.connect_packet(self.client_id, self._has_connected))

    def connection_lost(self) -> None:
        """The socket is gone. The session stays."""
        self.state = State.IDLE
        self.outbound.on_disconnected()
        self.inbound.on_disconnected()
        self.write_buffer.take_bytes()

    def disconnect(self, reason: int = 0, session_expiry: int | None = None) -> None:
        """Say goodbye; the server publishes no will, unless `reason` is 0x04."""
        properties = None
        if session_expiry is not None:
            properties = Properties()
            properties.session_expiry = session_expiry
        self.outbound.is_open = False
        self._write(Disconnect(reason, properties))

    def ping(self) -> None:
        self._write(Pingreq())

    def fail(self, error: Exception) -> None:
        """There will be no further connection: nothing will be answered any more."""
        self.outbound.fail(error)
        asked = list(self._pending_subscriptions.values())
        self._pending_subscriptions.clear()
        self._renewed_ids.clear()
        for asking in asked:
            asking.fail(error)

    # What the application asks for

    def publish(self, outgoing: PendingPublish) -> None:
        self.outbound.publish(outgoing)

    def send_subscription(self, pending: PendingSubscription) -> None:
        """Send a SUBSCRIBE or UNSUBSCRIBE; again after a reconnect, until it is answered."""
        if isinstance(pending.packet, Subscribe):
            self._check_subscribe(pending.packet)
        self._register(pending)
        if self.state is State.CONNECTED:
            self._write(pending.packet)

    def abandon(self, pending: PendingSubscription) -> None:
        """Nobody waits for it any more. What the server may already have heard keeps its identifier."""
        if self.state is not State.CONNECTED and not pending.done:
            self._pending_subscriptions.pop(pending.packet.packet_id, None)
            self._ids.used.discard(pending.packet.packet_id)

    # What the server says

    def receive(self, data: bytes) -> list[Event]:
        """All that `data` brings. A fault of the server is the last event; what came before it counts."""
        events: list[Event] = []
        version = self.version
        if version == V5 and self.state is State.CONNECTING and data[:2] == b"\x20\x02":
            version = V311  # a server that knows no 5.0 refuses in the form of 3.1.1
        try:
            if (
                self.state is State.CONNECTING
                and not self._framer.buffered_bytes
                and data[0] not in FIRST_BYTES
            ):
                raise ProtocolViolation("it does not speak MQTT")
            for packet in self._framer.feed(data, version):
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
                    ConnectionLost(f"the server broke a rule of MQTT: {fault.what}", fault.remedy)
                )
            )
            return events
        self.outbound.send_waiting()
        return events

    def _receive_other(self, packet: Packet, events: list[Event]) -> bool:
        """All that is not a message or its acknowledgement; False ends the connection."""
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
        raise ProtocolViolation(f"a {type(packet).__name__} arrived that no server sends here")

    def _receive_connack(self, packet: Connack, events: list[Event]) -> bool:
        properties = packet.properties
        if packet.reason:
            reason = packet.reason
            if properties is None:  # in the form of 3.1.1
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
                ConnectionLost("the server answered another number of filters than were asked for")
            )
            raise ProtocolViolation(
                "the server answered another number of filters than were asked for"
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

    # Taking up again

    def _resume_subscriptions(self, session_present: bool) -> None:
        """Subscribe again to what a lost session had, then repeat every question that was not answered."""
        if not session_present:
            for packet_id in self._renewed_ids:
                self._pending_subscriptions.pop(packet_id, None)
                self._ids.used.discard(packet_id)
            self._renewed_ids.clear()
            waiting = list(self._pending_subscriptions.values())
            self._pending_subscriptions.clear()
            for requests, properties in self._subscriptions_by_properties():
                asking = PendingSubscription(Subscribe(0, requests, properties))
                self._register(asking)
                self._renewed_ids.add(asking.packet.packet_id)
            for asking in waiting:
                self._pending_subscriptions[asking.packet.packet_id] = asking
        for asking in self._pending_subscriptions.values():
            self._write(asking.packet)

    def _subscriptions_by_properties(
        self,
    ) -> list[tuple[list[SubscriptionRequest], Properties | None]]:
        """The subscriptions, gathered by the properties they share."""
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
        """What no server would grant, or this one said it would not."""
        for request in packet.requests:
            fault = topic_filter_error(request.topic_filter, 0xFFFF)
            if fault:
                raise Unsupported(f"{request.topic_filter.decode()!r} is no topic filter: {fault}")
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
    """One line of a SUBSCRIBE for each filter, all with the same options."""
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
