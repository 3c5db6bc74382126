"""Sockets to the broker of the test kit.

`Peer` is one socket, `Client` a peer that has sent its CONNECT. Packets sent to a peer stay until
they are taken, so a test states exactly which packets it expects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from sluice.broker.net.connection import Connection
from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
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
    build_publish,
)
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL, Properties
from sluice.wire.reader import PacketReader
from tests.broker.loop import Loop
from tests.support.reason_codes import check_reasons

if TYPE_CHECKING:
    from tests.broker.kit import BrokerHarness

P = TypeVar("P", bound=Packet)


class Transport:
    """The transport of a socket. `is_blocked`: the peer does not read, so writes accumulate."""

    def __init__(self, loop: Loop, connection: Connection) -> None:
        self._loop = loop
        self._connection = connection
        self.sent = bytearray()
        self.pending = bytearray()
        self.writes = 0
        self.high = 64 * 1024
        self.low = 16 * 1024
        self.is_blocked = False
        self.reading = True
        self.closing = False
        self.aborted = False
        self.lost = False
        self._paused = False

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        self.high, self.low = high, low

    def get_write_buffer_size(self) -> int:
        return len(self.pending)

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 49152) if name == "peername" else default

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def write(self, data: bytes) -> None:
        assert not self.closing, "written to after close"
        self.writes += 1
        if not self.is_blocked:
            self.sent += data
            return
        self.pending += data
        if len(self.pending) > self.high and not self._paused:
            self._paused = True
            self._connection.pause_writing()

    def drain(self, size: int | None = None) -> None:
        """Read `size` bytes of the accumulated output as the peer, or all of it."""
        taken = self.pending if size is None else self.pending[:size]
        self.sent += taken
        del self.pending[: len(taken)]
        if self._paused and len(self.pending) <= self.low:
            self._paused = False
            if not self.lost:
                self._connection.resume_writing()
        if self.closing and not self.pending:
            self._drop()

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            if not self.pending:
                self._drop()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.close()  # the peer closes its side as soon as it has read everything

    def abort(self) -> None:
        self.closing = self.aborted = True
        self.pending.clear()
        self._drop()

    def _drop(self) -> None:
        if not self.lost:
            self.lost = True
            self._loop.call_soon(lambda: self._connection.connection_lost(None))


class Peer:
    """One socket to the broker, from the client's side."""

    def __init__(self, harness: BrokerHarness) -> None:
        self.harness = harness
        self.version = V5
        self.connection = harness.broker.connect()
        self.transport = Transport(harness.loop, self.connection)
        self._reader = PacketReader(268_435_460)
        self._inbox: list[Packet] = []
        self._ids = 0
        self.connection.connection_made(self.transport)
        harness.loop.settle()

    def feed(self, data: bytes) -> None:
        """Pass bytes from the network to the broker, in one read."""
        if not self.transport.lost:
            self.connection.data_received(data)
        self.harness.loop.settle()

    def send(self, *packets: Packet) -> None:
        self.feed(b"".join(encode(packet, self.version) for packet in packets))

    def drop(self) -> None:
        """Break the connection without a DISCONNECT."""
        self.transport.closing = True
        self.transport._drop()
        self.harness.loop.settle()

    @property
    def closed(self) -> bool:
        return self.transport.lost

    def take(self) -> list[Packet]:
        """Return all packets that have arrived since the last call, with valid reason codes."""
        data = bytes(self.transport.sent)
        self.transport.sent.clear()
        packets = self._reader.feed(data, self.version)
        check_reasons(packets, self.version)
        return packets

    def only(self, kind: type[P]) -> P:
        """Return the one packet that has arrived, which has this type."""
        packets = self.take()
        assert [type(packet) for packet in packets] == [kind]
        packet = packets[0]
        assert isinstance(packet, kind)
        return packet

    def messages(self) -> list[Publish]:
        """Return what has arrived, all of it messages."""
        packets = self.take()
        found = [packet for packet in packets if isinstance(packet, Publish)]
        assert len(found) == len(packets), [type(packet).__name__ for packet in packets]
        return found

    def payloads(self) -> list[bytes]:
        return [message.payload for message in self.messages()]

    def fault(self) -> tuple[int, str]:
        """Return reason code and text of the DISCONNECT that ended this connection."""
        packets = self.take()
        assert self.closed
        assert packets and isinstance(packets[-1], Disconnect), packets
        properties = packets[-1].properties
        return packets[-1].reason, (properties.reason_string or "") if properties else ""


class Client(Peer):
    """A peer that has connected."""

    connack: Connack

    def subscribe(
        self,
        *filters: str,
        qos: int = 0,
        no_local: bool = False,
        as_published: bool = False,
        handling: int = 0,
        identifier: int = 0,
    ) -> list[int]:
        """Subscribe and return the reason codes of the SUBACK; later messages stay to be taken."""
        requests = [
            SubscriptionRequest(one.encode(), qos, no_local, as_published, handling)
            for one in filters
        ]
        properties = props(subscription_ids=[identifier]) if identifier else None
        self.send(Subscribe(self.next_id(), requests, properties))
        return self.first(Suback).reasons

    def unsubscribe(self, *filters: str) -> list[int]:
        self.send(Unsubscribe(self.next_id(), [one.encode() for one in filters]))
        return self.first(Unsuback).reasons

    def publish(
        self,
        topic: str,
        payload: bytes = b"",
        qos: int = 0,
        retain: bool = False,
        packet_id: int = 0,
        dup: bool = False,
        **properties: Any,
    ) -> int:
        """Send a PUBLISH and return its packet id; its acknowledgement stays to be taken."""
        packet = build_publish(topic.encode(), payload, qos, retain, props(**properties))
        packet.dup = dup
        packet.packet_id = (packet_id or self.next_id()) if qos else 0
        self.send(packet)
        return int(packet.packet_id)

    def publish_fully(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        """Publish and complete the exchange."""
        packet_id = self.publish(topic, payload, qos, retain)
        if qos == 1:
            self.first_ack(PUBACK, packet_id)
        elif qos == 2:
            self.first_ack(PUBREC, packet_id)
            self.send(Ack(PUBREL, packet_id))
            self.first_ack(PUBCOMP, packet_id)

    def first(self, kind: type[P]) -> P:
        """Return the first packet of this type; the others stay to be taken."""
        self._inbox += super().take()
        for packet in self._inbox:
            if isinstance(packet, kind):
                self._inbox.remove(packet)
                return packet
        raise AssertionError(f"no {kind.__name__} among {self._inbox}")

    def first_ack(self, kind: int, packet_id: int, reason: int | None = None) -> Ack:
        self._inbox += super().take()
        for packet in self._inbox:
            if isinstance(packet, Ack) and (packet.kind, packet.packet_id) == (kind, packet_id):
                self._inbox.remove(packet)
                assert reason is None or packet.reason == reason, hex(packet.reason)
                return packet
        raise AssertionError(f"no acknowledgement {kind} of {packet_id} among {self._inbox}")

    def take(self) -> list[Packet]:
        packets = self._inbox + super().take()
        self._inbox = []
        return packets

    def ack(self, message: Publish, reason: int = 0) -> None:
        """Acknowledge a message completely, as its QoS requires."""
        packet_id = int(message.packet_id)
        if message.qos == 1:
            self.send(Ack(PUBACK, packet_id, reason))
        elif message.qos == 2:
            self.send(Ack(PUBREC, packet_id, reason))
            if reason < 0x80:
                self.first_ack(PUBREL, packet_id)
                self.send(Ack(PUBCOMP, packet_id))

    def ping(self) -> None:
        """Check that the connection is alive and served."""
        self.send(Pingreq())
        self.first(Pingresp)

    def disconnect(self, reason: int = 0, **properties: Any) -> None:
        self.send(Disconnect(reason, props(**properties) if properties else None))

    def next_id(self) -> int:
        self._ids = self._ids % 65_535 + 1
        return self._ids


def props(**values: Any) -> Properties:
    properties = Properties()
    for name, value in values.items():
        assert hasattr(properties, name), name
        setattr(properties, name, value)
    return properties


def will(
    topic: str, payload: bytes = b"gone", qos: int = 0, retain: bool = False, **properties: Any
) -> Publish:
    return build_publish(topic.encode(), payload, qos, retain, props(**properties))
