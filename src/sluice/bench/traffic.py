"""The connections of a generator process: publishers that keep their window full, readers that answer at once.

Compiled, on the compiled wire code, so that the generator costs less than the broker that it measures. A packet is put
together from pieces that were encoded before the clock ran: only its packet id and the head of its payload are new.
These are asyncio protocols without the base class, as `broker/connection` is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

from sluice.bench.tally import HEAD, Stream, Tally, slot_of
from sluice.errors import ProtocolViolation
from sluice.wire.decode import decode, decode_ack, decode_publish
from sluice.wire.encode import write_ack
from sluice.wire.framing import Framer, body_of, length_of
from sluice.wire.packets import V5, Ack, Connack, Disconnect, Packet, Publish, Suback
from sluice.wire.primitives import varint_size, write_u16, write_varint
from sluice.wire.properties import PUBACK, PUBLISH

LARGEST: Final = 268_435_460
REFUSED: Final = 0x80  # reason codes from here on say no
ID_PROPERTY: Final = b"\x26\x00\x0amessage-id"  # stands first in every delivery of a queue
FLUSH_AT: Final = 262_144


class Traffic:
    """What all connections of one process share: the counts, and how much may be under way."""

    def __init__(self, tally: Tally, backlog: i64, copies: i64, told: Callable[[], None]) -> None:
        self.tally: Tally = tally
        self.told: Callable[[], None] = told  # a line is ready, or is lost
        self.senders: list[Sender] = []
        self.sending: bool = False
        self.paced: bool = False  # by the clock: answers and deliveries make nobody send
        self.hungry: bool = False  # a sender waits for deliveries, not for answers
        self.sent: i64 = 0
        self.confirmed: i64 = 0
        self.refused: i64 = 0
        self.ready: i64 = 0
        self.faults: list[str] = []
        self._backlog: i64 = backlog  # deliveries that may be outstanding; 0: any number
        self._copies: i64 = copies  # deliveries that one message leads to
        self._turn: i64 = 0

    def is_full(self) -> bool:
        return self._backlog > 0 and self.sent * self._copies - self.tally.delivered >= self._backlog

    def pump(self, now: i64) -> None:
        self.hungry = False
        for sender in self.senders:
            sender.fill(now)

    def send_due(self, due: i64, gap: i64, now: i64) -> i64:
        """Open loop: send what is due, stamped with the time it was due. What cannot leave yet stays due."""
        tally = self.tally
        while self.sending and due <= now:
            sender = self.senders[self._turn % len(self.senders)]
            if sender.left == 0 or not sender.has_room():
                break
            sender.write(due)
            sender.flush()
            if tally.measuring:
                tally.lateness.add(now - due)
            self._turn += 1
            due += gap
        return due


class Line:
    """A connection: CONNECT, perhaps a SUBSCRIBE, and from then on what a kind of line does."""

    def __init__(self, traffic: Traffic, hello: bytes, subscribe: bytes) -> None:
        self.traffic: Traffic = traffic
        self.is_ready: bool = False
        self.receive_maximum: i64 = 0xFFFF
        self._hello: bytes = hello
        self._subscribe: bytes = subscribe
        self._transport: Any = None
        self._out: BytesWriter = BytesWriter()
        self._framer: Framer = Framer(LARGEST)
        self._last_topic: bytes = b""
        self._closing: bool = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._hello)

    def data_received(self, data: bytes) -> None:
        try:
            self._read(self._framer.join(data))
        except ProtocolViolation as fault:
            self._fail(f"the broker sent what cannot be read: {fault}")
        self.turn(time.monotonic_ns())
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

    def say(self, packet: bytes) -> None:
        self._transport.write(packet)

    def flush(self) -> None:
        if len(self._out):
            data = self._out.getvalue()
            self._out = BytesWriter()
            self._transport.write(data)

    # What a kind of line does.

    def turn(self, now: i64) -> None:
        """A read is worked off."""

    def delivered(self, packet: Publish) -> None:
        pass

    def confirmed(self, packet_id: i64, reason: i64) -> None:
        pass

    def _read(self, data: bytes) -> None:
        size: i64 = len(data)
        at: i64 = 0
        needed: i64 = 0
        while at < size:
            body = body_of(data, at, size)
            if body == 0:
                break
            length = length_of(data, at, body)
            end: i64 = body + length
            if end > size:
                needed = end - at
                break
            head: i64 = data[at]
            kind: i64 = head >> 4
            if kind == PUBLISH:
                packet = decode_publish(data, head & 15, body, end, V5, self._last_topic)
                self._last_topic = packet.topic
                self.delivered(packet)
            elif kind == PUBACK:
                if length == 2:
                    self.confirmed((i64(data[body]) << 8) | i64(data[body + 1]), 0)
                else:
                    self._acked(decode_ack(data, PUBACK, body, end, V5))
            else:
                self._other(decode(data, head, body, end, V5))
            at = end
        if at < size:
            self._framer.keep(data, at, needed)

    def _acked(self, ack: Ack) -> None:
        if ack.reason >= REFUSED:
            self.traffic.refused += 1
            said = ack.properties.reason_string if ack.properties is not None else None
            self._complain(f"a publish was refused: {said or hex(int(ack.reason))}")
        self.confirmed(ack.packet_id, ack.reason)

    def _other(self, packet: Packet) -> None:
        if isinstance(packet, Connack):
            if packet.reason:
                said = packet.properties.reason_string if packet.properties is not None else None
                self._fail(f"the broker refused a connection: {said or hex(packet.reason)}")
                return
            if packet.properties is not None and packet.properties.receive_maximum is not None:
                self.receive_maximum = packet.properties.receive_maximum
            if self._subscribe:
                self._transport.write(self._subscribe)
            else:
                self._become_ready()
        elif isinstance(packet, Suback):
            for reason in packet.reasons:
                if reason >= REFUSED:
                    said = packet.properties.reason_string if packet.properties is not None else None
                    self._fail(f"the broker refused a subscription: {said or hex(reason)}")
                    return
            self._become_ready()
        elif isinstance(packet, Disconnect):
            self._fail(f"the broker ended a connection with {hex(packet.reason)}")

    def _become_ready(self) -> None:
        self.is_ready = True
        self.traffic.ready += 1
        self.traffic.told()

    def _complain(self, what: str) -> None:
        if len(self.traffic.faults) < 10:
            self.traffic.faults.append(what)

    def _fail(self, what: str) -> None:
        self._complain(what)
        self._closing = True
        if self._transport is not None:
            self._transport.close()
        self.traffic.told()


class Sender(Line):
    """A publisher. `before` and `behind` are, for each slot, the bytes around the packet id; `left` is how many
    messages it has still to send, -1 for as many as the time allows."""

    def __init__(
        self,
        traffic: Traffic,
        hello: bytes,
        number: i64,
        qos: i64,
        window: i64,
        left: i64,
        pieces: tuple[list[bytes], list[bytes], bytes],
    ) -> None:
        super().__init__(traffic, hello, b"")
        self.number: i64 = number
        self.left: i64 = left
        self.sequence: i64 = 0
        self.times_confirms: bool = False  # its latencies are those of the answers: nobody reads meanwhile
        self._before: list[bytes] = pieces[0]
        self._behind: list[bytes] = pieces[1]
        self._filling: bytes = pieces[2]
        self._slots: i64 = len(pieces[0])
        self._qos: i64 = qos
        self._window: i64 = window
        self._under_way: i64 = 0
        self._packet_id: i64 = 0
        self._sent_at: list[int] = [0] * 65536 if qos else []
        self._choked: bool = False

    def pause_writing(self) -> None:
        self._choked = True

    def resume_writing(self) -> None:
        self._choked = False
        self.turn(time.monotonic_ns())
        self.flush()

    def has_room(self) -> bool:
        if self._choked or not self.is_ready or self._closing:
            return False
        return self._qos == 0 or (self._under_way < self._window and self._under_way < self.receive_maximum)

    def turn(self, now: i64) -> None:
        if not self.traffic.paced:
            self.fill(now)

    def fill(self, now: i64) -> None:
        """Send until the window, the backlog or the count is full."""
        traffic = self.traffic
        while traffic.sending and self.left != 0 and self.has_room():
            if traffic.is_full():
                traffic.hungry = True
                break
            self.write(now)
            if len(self._out) > FLUSH_AT:
                self.flush()
        self.flush()

    def write(self, stamp: i64) -> None:
        sequence = self.sequence
        slot = slot_of(sequence, self._slots)
        out = self._out
        out.write(self._before[slot])
        if self._qos:
            packet_id = self._packet_id + 1
            if packet_id > 0xFFFF:
                packet_id = 1
            self._packet_id = packet_id
            self._under_way += 1
            self._sent_at[packet_id] = int(stamp)
            write_u16(out, packet_id)
        out.write(self._behind[slot])
        write_i32_le(out, i32(self.traffic.tally.run))
        write_i32_le(out, i32(self.number))
        write_i64_le(out, sequence)
        write_i64_le(out, stamp)
        out.write(self._filling)
        self.sequence = sequence + 1
        if self.left > 0:
            self.left -= 1
        self.traffic.sent += 1

    def confirmed(self, packet_id: i64, reason: i64) -> None:
        traffic = self.traffic
        self._under_way -= 1
        traffic.confirmed += 1
        if self.times_confirms:
            now = time.monotonic_ns()
            traffic.tally.last_at = now
            if traffic.tally.measuring:
                traffic.tally.latency.add(now - self._sent_at[packet_id])


class Reader(Line):
    """A subscriber. One of a queue answers each delivery twice: the line's PUBACK, and an `$ack` of its own."""

    def __init__(
        self, traffic: Traffic, hello: bytes, subscribe: bytes, lane: int, acknowledges: bool
    ) -> None:
        super().__init__(traffic, hello, subscribe)
        self._streams: list[Stream] = traffic.tally.lane(lane)
        self._acknowledges: bool = acknowledges
        self._now: i64 = 0  # asked once for each read
        self._answer_of: bytes = b""
        self._answer: bytes = b""

    def turn(self, now: i64) -> None:
        self._now = 0
        traffic = self.traffic
        if traffic.hungry and not traffic.is_full():
            traffic.pump(now)

    def delivered(self, packet: Publish) -> None:
        tally = self.traffic.tally
        if self._now == 0:
            self._now = time.monotonic_ns()
            tally.last_at = self._now
        payload = packet.payload
        publisher: i64 = -1
        if len(payload) >= HEAD and i64(read_i32_le(payload, 0)) == tally.run:
            publisher = i64(read_i32_le(payload, 4))
        if publisher < 0 or publisher >= i64(len(self._streams)):
            tally.strange += 1
        else:
            tally.delivered += 1
            if tally.measuring:
                tally.latency.add(self._now - read_i64_le(payload, 16))
            self._streams[publisher].arrived(read_i64_le(payload, 8))
        if packet.qos:
            write_ack(self._out, PUBACK, packet.packet_id, 0, None, V5)
        if self._acknowledges:
            self._settle(packet)
        if len(self._out) > FLUSH_AT:
            self.flush()

    def _settle(self, packet: Publish) -> None:
        """`$ack` at QoS 0, with the property of the delivery that names it, copied as it stands there."""
        raw = packet.raw
        if not raw.startswith(ID_PROPERTY) or len(raw) < 15:
            raise ProtocolViolation("a delivery of a queue does not begin with its message-id")
        named: i64 = 15 + ((i64(raw[13]) << 8) | i64(raw[14]))
        if packet.topic != self._answer_of:
            self._answer_of = packet.topic
            self._answer = packet.topic + b"/$ack"
        topic = self._answer
        out = self._out
        out.append(0x30)
        write_varint(out, 2 + len(topic) + varint_size(named) + named)
        write_u16(out, len(topic))
        out.write(topic)
        write_varint(out, named)
        out.write(raw[:named])
