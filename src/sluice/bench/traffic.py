"""The connections of a generator process: publishers that keep their window full, and readers.

Compiled, on the compiled wire code, so that the generator costs less than the broker that it
measures. A packet is assembled from parts that were encoded before the measurement: only its packet
id and the header of its payload are new. The classes are asyncio protocols without the base class,
like `broker.net.connection`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.bench.tally import HEADER_BYTES, Stream, Tally, slot_of
from sluice.errors import ProtocolViolation
from sluice.wire.decode import decode, decode_ack, decode_publish
from sluice.wire.encode import write_ack
from sluice.wire.packets import V5, Ack, Connack, Disconnect, Packet, Publish, Suback
from sluice.wire.primitives import varint_size, write_u16, write_varint
from sluice.wire.properties import PUBACK, PUBLISH
from sluice.wire.reader import PacketReader

FIRST_ERROR_REASON: Final = 0x80  # reason codes from here on are errors
ID_PROPERTY: Final = b"\x26\x00\x0amessage-id"  # the first property of every delivery of a queue
FLUSH_AT: Final = 262_144


class Traffic:
    """The state that all connections of one process share: counters and the backlog limit."""

    def __init__(
        self, tally: Tally, backlog: i64, copies: i64, on_change: Callable[[], None]
    ) -> None:
        self.tally: Tally = tally
        self.on_change: Callable[[], None] = on_change  # a connection is ready, or lost
        self.publishers: list[PublisherConnection] = []
        self.sending: bool = False
        self.paced: bool = False  # at a fixed rate: PUBACKs and deliveries do not trigger sending
        self.waits_for_deliveries: bool = False  # a publisher waits for deliveries, not for PUBACKs
        self.sent: i64 = 0
        self.confirmed: i64 = 0
        self.refused: i64 = 0
        self.ready: i64 = 0
        self.faults: list[str] = []
        self._backlog: i64 = backlog  # outstanding deliveries allowed; 0: any number
        self._copies: i64 = copies  # deliveries per message
        self._next_publisher: i64 = 0

    def is_full(self) -> bool:
        return (
            self._backlog > 0 and self.sent * self._copies - self.tally.delivered >= self._backlog
        )

    def send_all(self, now: i64) -> None:
        self.waits_for_deliveries = False
        for sender in self.publishers:
            sender.fill(now)

    def send_due(self, due: i64, gap: i64, now: i64) -> i64:
        """Open loop: send messages that are due, stamped with their due time. Others stay due."""
        tally = self.tally
        while self.sending and due <= now:
            sender = self.publishers[self._next_publisher % len(self.publishers)]
            if sender.left == 0 or not sender.has_capacity():
                break
            sender.write(due)
            sender.flush()
            if tally.measuring:
                tally.lateness.add(now - due)
            self._next_publisher += 1
            due += gap
        return due


class BenchConnection:
    """A connection: CONNECT, perhaps SUBSCRIBE, and then what a subclass does."""

    def __init__(self, traffic: Traffic, connect_packet: bytes, subscribe_packet: bytes) -> None:
        self.traffic: Traffic = traffic
        self.is_ready: bool = False
        self.receive_maximum: i64 = 0xFFFF
        self._connect_packet: bytes = connect_packet
        self._subscribe_packet: bytes = subscribe_packet
        self._transport: Any = None
        self._out: BytesWriter = BytesWriter()
        self._reader: PacketReader = PacketReader()
        self._last_topic: bytes = b""
        self._closing: bool = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._connect_packet)

    def data_received(self, data: bytes) -> None:
        try:
            self._read(data)
        except ProtocolViolation as fault:
            self._fail(f"the broker sent what cannot be read: {fault}")
        self.after_read(time.monotonic_ns())
        self.flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self._closing:
            self._fail("the broker ended a connection")

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def close(self) -> None:
        self._closing = True
        if self._transport is not None:
            self._transport.write(b"\xe0\x00")
            self._transport.close()

    def send(self, packet: bytes) -> None:
        self._transport.write(packet)

    def flush(self) -> None:
        if len(self._out):
            data = self._out.getvalue()
            self._out = BytesWriter()
            self._transport.write(data)

    # Overridden by subclasses.

    def after_read(self, now: i64) -> None:
        """Called after each read."""

    def on_publish(self, packet: Publish) -> None:
        pass

    def on_puback(self, packet_id: i64, reason: i64) -> None:
        pass

    def _read(self, data: bytes) -> None:
        reader = self._reader
        if not reader.begin(data):
            return
        data = reader.data
        while reader.advance():
            head: i64 = reader.head
            body: i64 = reader.body
            end: i64 = reader.end
            kind: i64 = head >> 4
            if kind == PUBLISH:
                packet = decode_publish(data, head & 15, body, end, V5, self._last_topic)
                self._last_topic = packet.topic
                self.on_publish(packet)
            elif kind == PUBACK:
                if end - body == 2:
                    self.on_puback((i64(data[body]) << 8) | i64(data[body + 1]), 0)
                else:
                    self._handle_ack(decode_ack(data, PUBACK, body, end, V5))
            else:
                self._handle_packet(decode(data, head, body, end, V5))

    def _handle_ack(self, ack: Ack) -> None:
        if ack.reason >= FIRST_ERROR_REASON:
            self.traffic.refused += 1
            reason_text = ack.properties.reason_string if ack.properties is not None else None
            self._record_fault(f"a publish was refused: {reason_text or hex(int(ack.reason))}")
        self.on_puback(ack.packet_id, ack.reason)

    def _handle_packet(self, packet: Packet) -> None:
        if isinstance(packet, Connack):
            if packet.reason:
                reason_text = (
                    packet.properties.reason_string if packet.properties is not None else None
                )
                self._fail(f"the broker refused a connection: {reason_text or hex(packet.reason)}")
                return
            if packet.properties is not None and packet.properties.receive_maximum is not None:
                self.receive_maximum = packet.properties.receive_maximum
            if self._subscribe_packet:
                self._transport.write(self._subscribe_packet)
            else:
                self._become_ready()
        elif isinstance(packet, Suback):
            for reason in packet.reasons:
                if reason >= FIRST_ERROR_REASON:
                    reason_text = (
                        packet.properties.reason_string if packet.properties is not None else None
                    )
                    self._fail(f"the broker refused a subscription: {reason_text or hex(reason)}")
                    return
            self._become_ready()
        elif isinstance(packet, Disconnect):
            self._fail(f"the broker ended a connection with {hex(packet.reason)}")

    def _become_ready(self) -> None:
        self.is_ready = True
        self.traffic.ready += 1
        self.traffic.on_change()

    def _record_fault(self, what: str) -> None:
        if len(self.traffic.faults) < 10:
            self.traffic.faults.append(what)

    def _fail(self, what: str) -> None:
        self._record_fault(what)
        self._closing = True
        if self._transport is not None:
            self._transport.close()
        self.traffic.on_change()


class PublisherConnection(BenchConnection):
    """A publisher. `templates` are, for each slot, the bytes around the packet id, and the padding.

    `left` is how many messages it has still to send, -1 for as many as the time allows.
    """

    def __init__(
        self,
        traffic: Traffic,
        connect_packet: bytes,
        number: i64,
        qos: i64,
        window: i64,
        left: i64,
        templates: tuple[list[bytes], list[bytes], bytes],
    ) -> None:
        super().__init__(traffic, connect_packet, b"")
        self.number: i64 = number
        self.left: i64 = left
        self.sequence: i64 = 0
        # Its latencies are those of the PUBACKs: there are no readers.
        self.measures_acks: bool = False
        self._before_packet_id: list[bytes] = templates[0]
        self._after_packet_id: list[bytes] = templates[1]
        self._padding: bytes = templates[2]
        self._slots: i64 = len(templates[0])
        self._qos: i64 = qos
        self._window: i64 = window
        self._in_flight: i64 = 0
        self._packet_id: i64 = 0
        self._sent_at: list[int] = [0] * 65536 if qos else []
        self._is_write_paused: bool = False

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self.after_read(time.monotonic_ns())
        self.flush()

    def has_capacity(self) -> bool:
        if self._is_write_paused or not self.is_ready or self._closing:
            return False
        return self._qos == 0 or (
            self._in_flight < self._window and self._in_flight < self.receive_maximum
        )

    def after_read(self, now: i64) -> None:
        if not self.traffic.paced:
            self.fill(now)

    def fill(self, now: i64) -> None:
        """Send until the window, the backlog or the count is reached."""
        traffic = self.traffic
        while traffic.sending and self.left != 0 and self.has_capacity():
            if traffic.is_full():
                traffic.waits_for_deliveries = True
                break
            self.write(now)
            if len(self._out) > FLUSH_AT:
                self.flush()
        self.flush()

    def write(self, stamp: i64) -> None:
        sequence = self.sequence
        slot = slot_of(sequence, self._slots)
        out = self._out
        out.write(self._before_packet_id[slot])
        if self._qos:
            packet_id = self._packet_id + 1
            if packet_id > 0xFFFF:
                packet_id = 1
            self._packet_id = packet_id
            self._in_flight += 1
            self._sent_at[packet_id] = int(stamp)
            write_u16(out, packet_id)
        out.write(self._after_packet_id[slot])
        write_i32_le(out, i32(self.traffic.tally.run))
        write_i32_le(out, i32(self.number))
        write_i64_le(out, sequence)
        write_i64_le(out, stamp)
        out.write(self._padding)
        self.sequence = sequence + 1
        if self.left > 0:
            self.left -= 1
        self.traffic.sent += 1

    def on_puback(self, packet_id: i64, reason: i64) -> None:
        traffic = self.traffic
        self._in_flight -= 1
        traffic.confirmed += 1
        if self.measures_acks:
            now = time.monotonic_ns()
            traffic.tally.last_at = now
            if traffic.tally.measuring:
                traffic.tally.latency.add(now - self._sent_at[packet_id])


class ReaderConnection(BenchConnection):
    """A subscriber. A consumer of a queue answers each delivery twice: with PUBACK and `$ack`."""

    def __init__(
        self,
        traffic: Traffic,
        connect_packet: bytes,
        subscribe_packet: bytes,
        lane: int,
        sends_ack: bool,
    ) -> None:
        super().__init__(traffic, connect_packet, subscribe_packet)
        self._streams: list[Stream] = traffic.tally.lane(lane)
        self._sends_ack: bool = sends_ack
        self._now: i64 = 0  # read once per read
        self._ack_source_topic: bytes = b""
        self._ack_topic: bytes = b""

    def after_read(self, now: i64) -> None:
        self._now = 0
        traffic = self.traffic
        if traffic.waits_for_deliveries and not traffic.is_full():
            traffic.send_all(now)

    def on_publish(self, packet: Publish) -> None:
        tally = self.traffic.tally
        if self._now == 0:
            self._now = time.monotonic_ns()
            tally.last_at = self._now
        payload = packet.payload
        publisher: i64 = -1
        if len(payload) >= HEADER_BYTES and i64(read_i32_le(payload, 0)) == tally.run:
            publisher = i64(read_i32_le(payload, 4))
        if publisher < 0 or publisher >= i64(len(self._streams)):
            tally.foreign += 1
        else:
            tally.delivered += 1
            if tally.measuring:
                tally.latency.add(self._now - read_i64_le(payload, 16))
            self._streams[publisher].record(read_i64_le(payload, 8))
        if packet.qos:
            write_ack(self._out, PUBACK, packet.packet_id, 0, None, V5)
        if self._sends_ack:
            self._settle(packet)
        if len(self._out) > FLUSH_AT:
            self.flush()

    def _settle(self, packet: Publish) -> None:
        """Send `$ack` at QoS 0, with the first property of the delivery copied, which identifies
        it.
        """
        raw = packet.raw_properties
        if not raw.startswith(ID_PROPERTY) or len(raw) < 15:
            raise ProtocolViolation("a delivery of a queue does not begin with its message-id")
        named: i64 = 15 + ((i64(raw[13]) << 8) | i64(raw[14]))
        if packet.topic != self._ack_source_topic:
            self._ack_source_topic = packet.topic
            self._ack_topic = packet.topic + b"/$ack"
        topic = self._ack_topic
        out = self._out
        out.append(0x30)
        write_varint(out, 2 + len(topic) + varint_size(named) + named)
        write_u16(out, len(topic))
        out.write(topic)
        write_varint(out, named)
        out.write(raw[:named])
