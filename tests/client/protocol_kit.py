"""A client protocol and the server's end of its connection, without a network."""

from __future__ import annotations

from typing import TypeVar

from sluice.client.message import Message
from sluice.client.options import Options
from sluice.client.protocol.client_protocol import ClientProtocol, Connected, Event
from sluice.client.protocol.pending import PendingPublish, PendingSubscription
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connack, Packet, Publish, Subscribe, SubscriptionRequest
from sluice.wire.properties import Properties
from sluice.wire.reader import PacketReader

P = TypeVar("P", bound=Packet)


def make_properties(**values: object) -> Properties:
    made = Properties()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def make_outgoing(
    qos: int, payload: bytes = b"x", topic: bytes = b"t", retain: bool = False
) -> PendingPublish:
    return PendingPublish(Publish(topic, payload, qos, retain))


def make_subscribe(*filters: bytes, properties: Properties | None = None) -> PendingSubscription:
    return PendingSubscription(
        Subscribe(0, [SubscriptionRequest(one, 1) for one in filters], properties)
    )


class ProtocolPair:
    """One client on one connection. `connect` also serves for every later connection."""

    def __init__(self, **options: object) -> None:
        options.setdefault("client_id", "one")
        self.protocol = ClientProtocol(Options(**options))  # type: ignore[arg-type]
        self.version = self.protocol.version
        self._reader = PacketReader(1 << 20)

    def connect(self, session_present: bool = False, **properties: object) -> Connected:
        """Exchange CONNECT and CONNACK; the CONNECT stays readable as `self.connect_packet`."""
        self._reader = PacketReader(1 << 20)
        self.protocol.open()
        (self.connect_packet,) = self.sent_packets()
        connack_properties = make_properties(**properties) if self.version == V5 else None
        (event,) = self.server_sends(Connack(session_present, 0, connack_properties))
        assert isinstance(event, Connected)
        return event

    def disconnect(self) -> None:
        self.protocol.connection_lost()

    def server_sends(self, *packets: Packet) -> list[Event]:
        """Let the server send all of `packets` in one read."""
        return self.protocol.receive(b"".join(encode(packet, self.version) for packet in packets))

    def messages(self, *packets: Packet) -> list[Message]:
        """Let the server send `packets`, and return the messages that they contain."""
        return [event for event in self.server_sends(*packets) if isinstance(event, Message)]

    def sent_packets(self) -> list[Packet]:
        """Return the packets that the server has received since the last call."""
        return self._reader.feed(self.protocol.write_buffer.take_bytes(), self.version)

    def sent_packet(self, kind: type[P]) -> P:
        (packet,) = self.sent_packets()
        assert isinstance(packet, kind)
        return packet

    def publish(self, qos: int, payload: bytes = b"x") -> PendingPublish:
        outgoing = make_outgoing(qos, payload)
        self.protocol.publish(outgoing)
        return outgoing
