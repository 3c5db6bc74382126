"""One socket: bytes in, bytes out, time-outs. Every decision about messages is the session's.

It is an asyncio protocol without the base class (duck typing is enough, and native classes have no foreign bases). A
read is worked off in one pass over one `bytes` object; answers collect in `out` and leave once, at the end of the turn.
A read that takes longer than `TURN_SECONDS` is worked off in slices, and the loop serves others between two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.broker.sessions import subscribe
from sluice.broker.turn import TURN_SECONDS
from sluice.clock import Deadline
from sluice.errors import PacketTooLarge, ProtocolViolation
from sluice.wire.decode import decode, decode_ack, decode_publish
from sluice.wire.encode import size_of_publish, write_ack, write_publish, write_reasoned, write_suback
from sluice.wire.framing import Framer, body_of, length_of
from sluice.wire.packets import V5, Ack, Connect, Disconnect, Packet, Publish, Subscribe, Unsubscribe
from sluice.wire.primitives import read_u16, write_u16, write_u32
from sluice.wire.properties import AUTH, CONNECT, PINGREQ, PUBACK, PUBLISH, PUBREC, SUBSCRIBE, Properties
from sluice.wire.reasons import (
    KEEP_ALIVE_TIMEOUT,
    PROTOCOL_ERROR,
    SUCCESS,
    TOPIC_ALIAS_INVALID,
)

if TYPE_CHECKING:
    from sluice.broker.broker import Broker
    from sluice.broker.net.rate_limiter import Meter
    from sluice.broker.sessions.session import Session
    from sluice.broker.sessions.subscribe import Subscribing

NO_LIMIT: Final = 268_435_460  # the largest packet that MQTT can express
FLUSH_AT: Final = 262_144  # bytes of output that are not kept until the end of the turn
LONGEST_REASON: Final = 1024  # characters of a reason string
REASON_STRING_COST: Final = (
    11  # at most: fixed header, length of the properties, identifier and length of the string
)
CONNECT_BYTES: Final = 524_288  # of a CONNECT: its five fields of 64 KiB, and properties
PUBLISH_PROPERTIES: Final = 4096  # user properties of one PUBLISH
LOOK_BYTES: Final = 2048  # of input between two looks at the clock
CLOSE_SECONDS: Final = 5.0  # how long a peer may take to read our last words


class Connection(Deadline):
    def __init__(self, broker: Broker) -> None:
        self.broker: Broker = broker
        self.session: Session | None = None
        self.transport: Any = None
        self.version: i64 = 0  # 0 until a CONNECT has said it
        self.choked: bool = False  # the peer reads more slowly than we write
        self.deaf: bool = False  # so slowly that we do not read it either
        self.held: bool = False  # it publishes faster than the store takes: not read either
        self.closing: bool = False
        self.lost: bool = False
        self.keep_alive: float = 0.0  # seconds of silence we allow; 0.0: any
        self.heard_at: float = 0.0
        self.peer_limit: i64 = NO_LIMIT  # the client's maximum packet size
        self.explain: bool = True  # the client wants reason strings
        self.alias_limit: i64 = 0  # outgoing topic aliases we may use
        self.trusted: bool = False  # from another cell of the cluster, where it was judged
        self.proof: str = ""  # by which its user was known; empty: by none that can be taken back
        self.meter: Meter | None = None  # None: it may publish as fast as it can
        self.asking: list[bytes] | None = None  # what came while it is being found out who this is
        self.is_simple: bool = False  # speaks 5.0, takes packets of any size and no aliases
        self._aliases_out: dict[bytes, int] | None = None
        self._aliases_in: dict[int, bytes] | None = None
        self._last_topic: bytes = b""  # of the last PUBLISH that came
        self._framer: Framer | None = None  # only while a packet is incomplete
        self._out: BytesWriter | None = None
        self.resting: bool = False  # it had its share of this turn: the rest of its input waits
        self.unfinished: Subscribing | None = None  # a SUBSCRIBE that takes more than one turn
        self._left_over: bytes = b""  # input that was read and is not worked off
        self._hurried: bool = False  # it ends: what is left is worked off at once

    # ---- the asyncio protocol

    def connection_made(self, transport: Any) -> None:
        broker = self.broker
        self.transport = transport
        self.heard_at = broker.turn.begin()
        broker.opened(self)

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        if self.asking is not None:
            self.asking.append(data)  # read before we could stop reading
            return
        broker = self.broker
        broker.counters.bytes_received += len(data)
        if self.resting:
            self._left_over += data  # read before we could stop reading
            return
        self.heard_at = broker.turn.begin()
        if self.choked:
            self._hold_back()
        self._work_off(data)

    def _work_off(self, data: bytes) -> None:
        framer = self._framer
        if framer is not None:
            data = framer.join(data)
            if not data:
                return
            self._framer = None
        meter = self.meter
        if meter is not None:
            meter.begin()
        try:
            self._read(data)
        except ProtocolViolation as fault:
            self.refuse(fault)
        if meter is not None:
            meter.end()

    def eof_received(self) -> bool:
        if self.resting:
            self._hurried = True
            self.go_on()
        return False

    def go_on(self) -> None:
        """Work off what was left of the input, or as much of it as one turn allows."""
        if not self.resting or self.lost:
            return
        data = self._left_over
        self._left_over = b""
        self.resting = False
        if not self.closing:
            self.heard_at = self.broker.turn.begin()
            try:
                unfinished = self.unfinished
                if unfinished is not None:
                    self.unfinished = None
                    unfinished.go_on()
                if self.unfinished is not None:
                    self._rest(data)
                elif data and not self.closing:
                    self._work_off(data)
            except ProtocolViolation as fault:
                self.refuse(fault)
        if not self.resting and not self.deaf and not self.held and not self.lost:
            self.transport.resume_reading()

    def is_late(self) -> bool:
        """Whether what it has sent has taken its share of this turn: others wait."""
        return not self._hurried and self.broker.turn.time() - self.heard_at > TURN_SECONDS

    def is_hurried(self) -> bool:
        """Return whether the client has closed its side: then what it has sent is worked off at once."""
        return self._hurried

    def _rest(self, data: bytes) -> None:
        """Read no more, and go on with `data` when others have had their turn."""
        self._left_over = data
        self.resting = True
        if not self.deaf and not self.held:
            self.transport.pause_reading()
        self.broker.turn.go_on_later(self.go_on)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost = True
        self.closing = True
        self.broker.turn.begin()
        self._leave()
        self.broker.closed(self)
        self.transport = None
        self._out = None
        self._framer = None

    def pause_writing(self) -> None:
        self.choked = True  # lease it nothing more: a slow reader costs queue depth, not memory

    def resume_writing(self) -> None:
        self.choked = False
        self.broker.turn.begin()
        if self.deaf:
            self.deaf = False
            if not self.held and not self.resting:
                self.transport.resume_reading()
        session = self.session
        if session is not None:
            session.pump()
            session.line_is_free()

    def _hold_back(self) -> None:
        """Deliveries wait for a slow reader, answers do not: one that asks without reading must not fill our memory
        with answers, so from some amount on it is not heard until it has read."""
        if (
            not self.deaf
            and self.transport.get_write_buffer_size() > 2 * self.broker.limits.write_buffer_high
        ):
            self.deaf = True
            if not self.held and not self.resting:
                self.transport.pause_reading()

    def hold(self) -> bool:
        """Read no more for now, whoever it is that speaks; whether that is new."""
        if self.held or self.closing:
            return False
        self.held = True
        if not self.deaf and not self.resting:
            self.transport.pause_reading()
        return True

    def unhold(self) -> None:
        if self.meter is not None and self.meter.waiting:
            return  # the store has caught up, and it still owes time for what it has published
        self.held = False
        if not self.deaf and not self.resting and not self.lost:
            self.transport.resume_reading()

    def ask(self) -> None:
        """Who it is takes a while to find out: it is heard again when that is known."""
        self.asking = []
        self.hold()

    def asked(self, known: Callable[[], None]) -> None:
        """It is known now. `known` gives the answer, then what came meanwhile is read."""
        early = b"".join(self.asking or [])
        self.asking = None
        self.broker.turn.begin()
        self.unhold()
        known()
        if early:
            self.data_received(early)

    def address(self) -> str:
        """The address it comes from, without the port."""
        found = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(found[0]) if isinstance(found, tuple) else ""

    def descriptor(self) -> int:
        """The number that the system has for its socket: the lowest that was free."""
        found = None if self.transport is None else self.transport.get_extra_info("socket")
        return -1 if found is None else int(found.fileno())

    def peer(self) -> str:
        """Where it comes from, for logs and access rules."""
        address = None if self.transport is None else self.transport.get_extra_info("peername")
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""

    # ---- input

    def _read(self, data: bytes) -> None:
        """Work off every whole packet of `data`; keep the rest."""
        counters = self.broker.counters
        limit = self.broker.limits.max_packet_size
        if self.session is None and limit > CONNECT_BYTES:
            limit = CONNECT_BYTES  # whoever has not said who it is gets less of our memory
        size: i64 = len(data)
        at: i64 = 0
        needed: i64 = 0
        look_at: i64 = LOOK_BYTES  # where the clock is looked at
        most: i64 = PUBLISH_PROPERTIES if not self.trusted else NO_LIMIT
        while at < size:
            body = body_of(data, at, size)
            if body == 0:
                break
            length = length_of(data, at, body)
            end: i64 = body + length
            if end - at > limit:
                raise PacketTooLarge(int(end - at), int(limit), limit < self.broker.limits.max_packet_size)
            if end > size:
                needed = end - at
                break
            counters.packets_received += 1
            head: i64 = data[at]
            kind: i64 = head >> 4
            session = self.session
            if session is None:
                self._greet(data, head, body, end)
                limit = self.broker.limits.max_packet_size
                if self.asking is not None:
                    self.asking.append(data[end:])
                    return
            elif kind == PUBLISH:
                packet = decode_publish(data, head & 15, body, end, self.version, self._last_topic, most)
                self._last_topic = packet.topic
                counters.publishes_received += 1
                counters.publish_bytes_received += len(packet.payload)
                session.on_publish(packet, self)
            elif head == 0x40:
                if length == 2:
                    session.on_puback(read_u16(data, body, end), 0)
                else:
                    ack = decode_ack(data, PUBACK, body, end, self.version)
                    session.on_puback(ack.packet_id, ack.reason)
            else:
                self._receive(decode(data, head, body, end, self.version), session)
            if self.closing:
                return
            at = end
            if self.unfinished is not None:
                self._rest(data[at:])
                return
            if at >= look_at:
                look_at = at + LOOK_BYTES
                if at < size and self.is_late():
                    self._rest(data[at:])
                    return
        if at < size:
            framer = Framer(int(limit))
            framer.keep(data, at, needed)
            self._framer = framer

    def _greet(self, data: bytes, head: i64, body: i64, end: i64) -> None:
        if head >> 4 == CONNECT and data[body : body + 7] == b"\x00\x04MQTT\x05":
            self.version = V5  # known before the rest is: a malformed 5.0 CONNECT gets a 5.0 answer
        packet = decode(data, head, body, end, V5)
        if not isinstance(packet, Connect):
            raise ProtocolViolation("the first packet is not a CONNECT")  # [MQTT-3.1.0-1]
        self.version = packet.version
        self.broker.handshake.welcome(self, packet)

    def _receive(self, packet: Packet, session: Session) -> None:
        """Everything that is neither a PUBLISH nor a PUBACK."""
        kind = packet.kind
        if kind == PINGREQ:
            out = self.output()
            out.append(0xD0)
            out.append(0)
            self.broker.counters.packets_sent += 1
        elif PUBREC <= kind < SUBSCRIBE:
            assert isinstance(packet, Ack)
            session.on_ack(packet, self)
        elif isinstance(packet, Subscribe):
            subscribe.subscribe(session, packet, self)
        elif isinstance(packet, Unsubscribe):
            subscribe.unsubscribe(session, packet, self)
        elif isinstance(packet, Disconnect):
            self._on_disconnect(packet, session)
        elif kind == CONNECT:
            raise ProtocolViolation("a second CONNECT on one connection")  # [MQTT-3.1.0-2]
        elif kind == AUTH:
            raise ProtocolViolation(
                "this connection was made without an authentication method"
            )  # [MQTT-4.12.0-7]
        else:
            raise ProtocolViolation(f"packet type {kind} is for servers to send")

    def _on_disconnect(self, packet: Disconnect, session: Session) -> None:
        properties = packet.properties
        if properties is not None and properties.session_expiry is not None:
            if session.expiry == 0 and properties.session_expiry:
                raise ProtocolViolation(
                    "a session that ends with its connection cannot be prolonged on DISCONNECT"
                )
            session.expiry = min(properties.session_expiry, self.broker.limits.max_session_expiry)
            if session.sid:
                self.broker.router.keep_session(session, 0)
        if packet.reason == SUCCESS:
            session.will = (
                None  # [MQTT-3.14.4-3]; every other reason leaves it to be published [MQTT-3.1.2-8]
            )
        self.end(SUCCESS, "")

    def resolve_alias(self, packet: Publish) -> None:
        """Put the topic that an incoming alias stands for in its place, or learn what it stands for."""
        alias = int(packet.alias)
        if packet.alias > self.broker.limits.topic_alias_maximum:
            raise ProtocolViolation(
                f"topic alias {alias} is beyond what was agreed", reason=TOPIC_ALIAS_INVALID
            )
        aliases = self._aliases_in
        if aliases is None:
            aliases = self._aliases_in = {}
        if packet.topic:
            aliases[alias] = packet.topic
            return
        topic = aliases.get(alias)
        if topic is None:
            raise ProtocolViolation(f"topic alias {alias} was never given a topic", reason=PROTOCOL_ERROR)
        packet.topic = topic

    # ---- output

    def output(self) -> BytesWriter:
        """The buffer of this turn; asking for it is what makes the connection part of the turn."""
        out = self._out
        if out is None:
            out = self._out = self.broker.turn.buffer()
            self.broker.turn.touch(self)
        return out

    def flush(self) -> None:
        """Hand the turn's output to the transport, in one piece."""
        out = self._out
        if out is None:
            return
        self._out = None
        data = out.getvalue()
        self.broker.turn.give_back(out)
        if not self.lost and data:
            self.broker.counters.bytes_sent += len(data)
            self.transport.write(data)

    def acknowledge(self, kind: i64, packet_id: i64, reason: i64, why: str) -> None:
        write_ack(
            self.output(), kind, packet_id, reason, self.explained(why, 3) if why else None, self.version
        )
        self.broker.counters.packets_sent += 1

    def say_received(self, packet_id: i64) -> None:
        """PUBACK with nothing to add: the same bytes in 3.1.1 and 5.0."""
        out = self.output()
        out.append(0x40)
        out.append(2)
        write_u16(out, packet_id)
        self.broker.counters.packets_sent += 1

    def answer_filters(self, head: int, packet_id: int, reasons: list[int], why: str) -> None:
        """SUBACK or UNSUBACK."""
        properties = self.explained(why, 2 + len(reasons))
        write_suback(self.output(), head, packet_id, reasons, properties, int(self.version))
        self.broker.counters.packets_sent += 1

    def explained(self, why: str, size: int) -> Properties | None:
        """`why` as a reason string for a packet with `size` other bytes; None for a client that has no wish or no room
        for it [MQTT-3.2.2-19, 3.4.2-2, 3.9.2-1, 3.14.2-3]."""
        if not why or not self.explain or self.version != V5:
            return None
        why = _as_reason(why)
        if self.peer_limit != NO_LIMIT and len(why.encode()) + size + REASON_STRING_COST > self.peer_limit:
            return None
        properties = Properties()
        properties.reason_string = why
        return properties

    def send(self, message: Publish, qos: i64, retain: bool, dup: bool, packet_id: i64, extra: bytes) -> bool:
        """Write a PUBLISH; False when this client cannot take one of this size [MQTT-3.1.2-24]."""
        topic = message.topic
        if self.version == V5:
            if message.expires_at != 0.0:
                extra = self._with_expiry(message, extra)
            if self.alias_limit:
                return self._send_aliased(message, qos, retain, dup, packet_id, extra)
        if self.peer_limit != NO_LIMIT and (
            size_of_publish(message, topic, qos, extra, self.version) > self.peer_limit
        ):
            return False
        out = self.output()
        write_publish(out, message, topic, qos, retain, dup, packet_id, extra, self.version)
        self.sent(len(message.payload), out)
        return True

    def sent(self, size: i64, out: BytesWriter) -> None:
        """A PUBLISH with a payload of `size` bytes was written to `out`."""
        counters = self.broker.counters
        counters.packets_sent += 1
        counters.publishes_sent += 1
        counters.publish_bytes_sent += size
        if len(out) > FLUSH_AT:
            # Past this the transport must see it: only then does it tell us that the peer is slow.
            self.flush()

    def _with_expiry(self, message: Publish, extra: bytes) -> bytes:
        """The seconds that are left to this message [MQTT-3.3.2-6]."""
        left = message.expires_at - self.broker.turn.now
        writer = BytesWriter()
        writer.append(0x02)
        write_u32(writer, int(left + 0.999) if left > 0 else 0)
        writer.write(extra)
        return writer.getvalue()

    def _send_aliased(
        self, message: Publish, qos: i64, retain: bool, dup: bool, packet_id: i64, extra: bytes
    ) -> bool:
        """The same with outgoing topic aliases: a topic is spelt out once and is a number from then on."""
        aliases = self._aliases_out
        if aliases is None:
            aliases = self._aliases_out = {}
        topic = message.topic
        alias = aliases.get(topic, 0)
        known = alias != 0
        if not known and len(aliases) < self.alias_limit:
            alias = len(aliases) + 1
        plain = extra
        if alias:
            writer = BytesWriter()
            writer.append(0x23)
            write_u16(writer, alias)
            writer.write(extra)
            extra = writer.getvalue()
        name = b"" if known else topic
        if size_of_publish(message, name, qos, extra, self.version) > self.peer_limit:
            # The alias itself may be what makes it too large.
            if not alias or size_of_publish(message, topic, qos, plain, self.version) > self.peer_limit:
                return False
            name, extra, alias = topic, plain, 0
        if alias:
            aliases[topic] = alias
        out = self.output()
        write_publish(out, message, name, qos, retain, dup, packet_id, extra, self.version)
        self.sent(len(message.payload), out)
        return True

    # ---- the end

    def refuse(self, fault: ProtocolViolation) -> None:
        """The peer broke a rule: packets before the bad one keep their answers, then the connection ends."""
        self.broker.violated(self, fault)
        self.end(fault.reason, str(fault))

    def end(self, reason: int, why: str, answered: bool = False) -> None:
        """Close from our side, saying why where the protocol has words for it. `answered`: it has been said."""
        if self.closing:
            return
        self.closing = True
        told = reason != SUCCESS and self.version == V5 and self.session is not None
        if told:
            write_reasoned(self.output(), 0xE0, reason, self.explained(why, 1), V5)
            self.broker.counters.packets_sent += 1
        self._leave()
        self.flush()
        if not self.lost:
            if (told or answered) and self.transport.can_write_eof():
                # Closing outright while the peer still sends would reset the line under our last words. So we only
                # stop speaking, read on without listening, and the peer closes when it has understood.
                self.transport.write_eof()
            else:
                self.transport.close()
            self.broker.wake_at(self.broker.turn.now + CLOSE_SECONDS, Cutoff(self))

    def abort(self) -> None:
        """Cut the line without a word, unread output included."""
        if not self.lost:
            self.closing = True
            self.transport.abort()

    def _leave(self) -> None:
        """Part from the session, once."""
        session = self.session
        if session is not None:
            self.session = None
            self.broker.crowd.left(self)
            if session.connection is self:
                self.broker.registry.departed(session)

    def due(self, now: float) -> float:
        """The keep-alive: one and a half times its seconds without a packet are too many [MQTT-3.1.2-22]."""
        if self.held:
            self.heard_at = now  # it is we who do not listen
        silence = now - self.heard_at
        if silence < self.keep_alive:
            return self.heard_at + self.keep_alive
        self.end(KEEP_ALIVE_TIMEOUT, f"nothing was heard for {silence:.0f} seconds")
        return 0.0

    def lapsed(self) -> bool:
        return self.closing


class Cutoff(Deadline):
    """The moment by which a connection must have a session, or be gone: else the line is cut.

    One guards the time until CONNECT, a second one the time that a peer takes to read our last words."""

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection = connection
        self._closing: bool = connection.closing

    def due(self, now: float) -> float:
        self._connection.abort()
        return 0.0

    def lapsed(self) -> bool:
        connection = self._connection
        return connection.lost or connection.session is not None or connection.closing != self._closing


def _as_reason(why: str) -> str:
    """Words that quote what a client has sent, fit to be sent back: without what no MQTT string may hold. Of too many
    the beginning stays, which says what is wrong, and the end, which says what to do."""
    if len(why) > LONGEST_REASON:
        half = LONGEST_REASON // 2
        why = f"{why[: half - 1]} … {why[2 - half :]}"
    if why.isprintable():
        return why
    return "".join([character if character.isprintable() else "?" for character in why])
