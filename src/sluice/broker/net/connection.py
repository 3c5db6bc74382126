"""One socket: bytes in, bytes out, timeouts. The session makes every decision about messages.

`Connection` is an asyncio protocol without the base class: duck typing is enough, and native
classes cannot have foreign bases. A read is processed in one pass over one `bytes` object. Output
collects in `_out` and is written once, at the end of the turn. A read that takes longer than
`MAX_SLICE_SECONDS` is processed in slices, and the loop serves other connections between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.broker.ports import NO_PACKET_LIMIT, ConnectionPort
from sluice.broker.routing import handle_subscribe, handle_unsubscribe
from sluice.broker.turn import MAX_SLICE_SECONDS
from sluice.clock import Deadline
from sluice.errors import PacketTooLarge, ProtocolViolation
from sluice.wire.decode import NO_PROPERTY_LIMIT, decode, decode_ack, decode_publish
from sluice.wire.encode import (
    measure_publish,
    write_ack,
    write_disconnect_or_auth,
    write_publish,
    write_suback,
)
from sluice.wire.packets import (
    V5,
    Ack,
    Connect,
    Disconnect,
    Packet,
    Publish,
    Subscribe,
    Unsubscribe,
)
from sluice.wire.primitives import read_u16, write_u16, write_u32
from sluice.wire.properties import (
    AUTH,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PUBACK,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBSCRIBE,
    Properties,
)
from sluice.wire.reader import PacketReader
from sluice.wire.reasons import (
    KEEP_ALIVE_TIMEOUT,
    PROTOCOL_ERROR,
    SUCCESS,
    TOPIC_ALIAS_INVALID,
    check_client_reason,
)

if TYPE_CHECKING:
    from sluice.broker.broker import Broker
    from sluice.broker.net.rate_limiter import RateLimiter
    from sluice.broker.sessions import Session

# More output than this is written before the end of the turn.
FLUSH_THRESHOLD_BYTES: Final = 262_144
MAX_REASON_STRING_LENGTH: Final = 1024  # in characters
# At most: fixed header, length of the properties, identifier and length of the string.
REASON_STRING_OVERHEAD: Final = 11
MAX_CONNECT_BYTES: Final = 524_288  # five fields of 64 KiB each, and properties
MAX_PUBLISH_USER_PROPERTIES: Final = 4096
CLOCK_CHECK_BYTES: Final = 2048  # input between two reads of the clock
CLOSE_TIMEOUT_SECONDS: Final = 5.0  # for a peer to read our last packets


class Connection(ConnectionPort):
    def __init__(self, broker: Broker) -> None:
        super().__init__()
        self.broker: Broker = broker
        self.session: Session | None = None
        self.transport: Any = None
        self.is_paused_for_output: bool = False  # the peer reads so slowly that we stop reading it
        # Publishes faster than the store accepts or the rate allows.
        self.is_throttled: bool = False
        self.keep_alive: float = 0.0  # seconds of silence that are allowed; 0.0: unlimited
        self.wants_reason_strings: bool = True
        self.max_outgoing_aliases: i64 = 0  # the client's topic alias maximum
        # The revocable credential that identified the user; empty: none.
        self.credential_id: str = ""
        self.rate_limiter: RateLimiter | None = None  # None: no rate limit
        # Input that arrived while authentication is running.
        self.auth_buffer: list[bytes] | None = None
        self._aliases_out: dict[bytes, int] | None = None
        self._aliases_in: dict[int, bytes] | None = None
        self._last_topic: bytes = b""  # of the last incoming PUBLISH
        self._reader: PacketReader | None = None  # only while a packet is incomplete
        self._out: BytesWriter | None = None
        # Its time slice is used up: the rest of its input waits for a later turn.
        self.is_input_deferred: bool = False
        self._deferred_input: bytes = b""  # input that was read and is not yet processed
        self._has_eof: bool = False  # the peer has closed its side: process the rest at once

    # ---- the asyncio protocol

    def connection_made(self, transport: Any) -> None:
        broker = self.broker
        self.transport = transport
        self.last_read_at = broker.turn.begin()
        self.opened_at = self.last_read_at
        broker.on_opened(self)

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        if self.auth_buffer is not None:
            self.auth_buffer.append(data)  # arrived before reading was paused
            return
        broker = self.broker
        broker.counters.bytes_received += len(data)
        if self.is_input_deferred:
            self._deferred_input += data  # arrived before reading was paused
            return
        self.last_read_at = broker.turn.begin()
        if self.is_write_paused:
            self._pause_if_output_full()
        self._process_input(data)

    def _process_input(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            reader = PacketReader()
        if not reader.begin(data):
            return
        self._reader = None
        rate_limiter = self.rate_limiter
        if rate_limiter is not None:
            rate_limiter.begin_read()
        try:
            self._process_packets(reader)
        except PacketTooLarge as fault:
            is_connect = fault.limit < self.broker.limits.max_packet_size
            self.handle_violation(PacketTooLarge(fault.length, fault.limit, is_connect))
        except ProtocolViolation as fault:
            self.handle_violation(fault)
        if rate_limiter is not None:
            rate_limiter.end_read()

    def eof_received(self) -> bool:
        if self.is_input_deferred:
            self._has_eof = True
            self.resume_input()
        return False

    def resume_input(self) -> None:
        """Process the deferred input, or as much of it as one turn allows."""
        if not self.is_input_deferred or self.lost:
            return
        data = self._deferred_input
        self._deferred_input = b""
        self.is_input_deferred = False
        if not self.closing:
            self.last_read_at = self.broker.turn.begin()
            try:
                input_task = self.input_task
                if input_task is not None:
                    self.input_task = None
                    input_task.advance()
                if self.input_task is not None:
                    self._defer_input(data)
                elif data and not self.closing:
                    self._process_input(data)
            except ProtocolViolation as fault:
                self.handle_violation(fault)
        if (
            not self.is_input_deferred
            and not self.is_paused_for_output
            and not self.is_throttled
            and not self.lost
        ):
            self.transport.resume_reading()

    def is_over_time_slice(self) -> bool:
        """Return whether the input of this connection has used up its time slice."""
        return (
            not self._has_eof
            and self.broker.turn.current_time() - self.last_read_at > MAX_SLICE_SECONDS
        )

    def has_eof(self) -> bool:
        """Return whether the client has closed its side.

        Then its input is processed without slices.
        """
        return self._has_eof

    def _defer_input(self, data: bytes) -> None:
        """Pause reading and process `data` after other connections have been served."""
        self._deferred_input = data
        self.is_input_deferred = True
        if not self.is_paused_for_output and not self.is_throttled:
            self.transport.pause_reading()
        self.broker.turn.resume_later(self.resume_input)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.lost = True
        self.closing = True
        self.broker.turn.begin()
        self._detach_session()
        self.broker.on_closed(self)
        self.transport = None
        self._out = None
        self._reader = None

    def pause_writing(self) -> None:
        # Lease nothing more: a slow reader costs queue depth, not memory.
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self.broker.turn.begin()
        if self.is_paused_for_output:
            self.is_paused_for_output = False
            if not self.is_throttled and not self.is_input_deferred:
                self.transport.resume_reading()
        session = self.session
        if session is not None:
            session.on_writable()

    def _pause_if_output_full(self) -> None:
        """Stop reading from a client that does not read its acknowledgements.

        Deliveries wait for a slow reader, acknowledgements do not. Without this limit a client that
        sends requests and never reads could fill our memory.
        """
        if (
            not self.is_paused_for_output
            and self.transport.get_write_buffer_size() > 2 * self.broker.limits.write_buffer_high
        ):
            self.is_paused_for_output = True
            if not self.is_throttled and not self.is_input_deferred:
                self.transport.pause_reading()

    def throttle(self) -> bool:
        """Pause reading, and return whether it was not paused before."""
        if self.is_throttled or self.closing:
            return False
        self.is_throttled = True
        if not self.is_paused_for_output and not self.is_input_deferred:
            self.transport.pause_reading()
        return True

    def unthrottle(self) -> None:
        if self.rate_limiter is not None and self.rate_limiter.is_waiting:
            return  # the store has caught up, but the client is still above its rate
        self.is_throttled = False
        if not self.is_paused_for_output and not self.is_input_deferred and not self.lost:
            self.transport.resume_reading()

    def await_auth(self) -> None:
        """Buffer input while authentication is running."""
        self.auth_buffer = []
        self.throttle()

    def finish_auth(self, on_result: Callable[[], None]) -> None:
        """End authentication: call `on_result`, then process the buffered input."""
        buffered = b"".join(self.auth_buffer or [])
        self.auth_buffer = None
        self.broker.turn.begin()
        self.unthrottle()
        on_result()
        if buffered:
            self.data_received(buffered)

    def address(self) -> str:
        """Return the peer's address without the port."""
        found = None if self.transport is None else self.transport.get_extra_info("peername")
        return str(found[0]) if isinstance(found, tuple) else ""

    def file_descriptor(self) -> int:
        """Return the file descriptor of the socket; the system assigns the lowest free one."""
        found = None if self.transport is None else self.transport.get_extra_info("socket")
        return -1 if found is None else int(found.fileno())

    def log(self, event: str, facts: dict[str, object]) -> None:
        self.broker.log(event, facts)

    def peer(self) -> str:
        """Return the peer's address and port, for logs and access rules."""
        address = None if self.transport is None else self.transport.get_extra_info("peername")
        return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else ""

    # ---- input

    def _process_packets(self, reader: PacketReader) -> None:
        """Process every complete packet of a read and buffer the rest."""
        counters = self.broker.counters
        incoming = self.broker.incoming
        max_packet_size = self.broker.limits.max_packet_size
        reader.limit = max_packet_size
        if self.session is None and max_packet_size > MAX_CONNECT_BYTES:
            reader.limit = MAX_CONNECT_BYTES  # an unauthenticated client gets less memory
        data = reader.data
        next_clock_check: i64 = CLOCK_CHECK_BYTES
        max_user_properties: i64 = (
            MAX_PUBLISH_USER_PROPERTIES if not self.is_from_cluster else NO_PROPERTY_LIMIT
        )
        while reader.advance():
            counters.packets_received += 1
            head: i64 = reader.head
            body: i64 = reader.body
            end: i64 = reader.end
            session = self.session
            if session is None:
                self._process_first_packet(data, head, body, end)
                reader.limit = max_packet_size
                if self.auth_buffer is not None:
                    self.auth_buffer.append(data[end:])
                    return
            elif head >> 4 == PUBLISH:
                packet = decode_publish(
                    data, head & 15, body, end, self.version, self._last_topic, max_user_properties
                )
                self._last_topic = packet.topic
                counters.publishes_received += 1
                counters.publish_bytes_received += len(packet.payload)
                incoming.receive(packet, session, self)
            elif head == PUBACK << 4:
                if end - body == 2:
                    session.outbound.on_puback(read_u16(data, body, end), 0)
                else:
                    ack = decode_ack(data, PUBACK, body, end, self.version)
                    if ack.reason != SUCCESS:
                        self._check_reason(PUBACK, ack.reason)
                    session.outbound.on_puback(ack.packet_id, ack.reason)
            elif head >> 4 == CONNECT:  # refused without decoding it
                raise ProtocolViolation("a second CONNECT on one connection")  # [MQTT-3.1.0-2]
            else:
                self._process_other_packet(decode(data, head, body, end, self.version), session)
            if self.closing:
                return
            if self.input_task is not None:
                self._defer_input(data[end:])
                return
            if end >= next_clock_check:
                next_clock_check = end + CLOCK_CHECK_BYTES
                if end < len(data) and self.is_over_time_slice():
                    self._defer_input(data[end:])
                    return
        if reader.buffered_bytes:
            self._reader = reader

    def _process_first_packet(self, data: bytes, head: i64, body: i64, end: i64) -> None:
        if head >> 4 == CONNECT and data[body : body + 7] == b"\x00\x04MQTT\x05":
            self.version = V5  # set early: a malformed 5.0 CONNECT gets a 5.0 CONNACK
        packet = decode(data, head, body, end, V5)
        if not isinstance(packet, Connect):
            raise ProtocolViolation("the first packet is not a CONNECT")  # [MQTT-3.1.0-1]
        self.version = packet.version
        self.broker.handshake.handle_connect(self, packet)

    def _process_other_packet(self, packet: Packet, session: Session) -> None:
        """Process a packet that is neither a PUBLISH nor a PUBACK."""
        kind = packet.kind
        if kind == PINGREQ:
            out = self.get_output()
            out.append(0xD0)
            out.append(0)
            self.broker.counters.packets_sent += 1
        elif PUBREC <= kind < SUBSCRIBE:
            assert isinstance(packet, Ack)
            if packet.reason != SUCCESS:
                self._check_reason(kind, packet.reason)
            if kind == PUBREL:
                session.inbound.on_pubrel(packet, self)
            else:
                session.outbound.on_qos2_ack(packet, self)
        elif isinstance(packet, Subscribe):
            handle_subscribe(self.broker.router, session, packet, self)
        elif isinstance(packet, Unsubscribe):
            handle_unsubscribe(self.broker.router, session, packet, self)
        elif isinstance(packet, Disconnect):
            self._on_disconnect(packet, session)
        elif kind == AUTH:
            # [MQTT-4.12.0-7]
            raise ProtocolViolation("this connection was made without an authentication method")
        else:
            raise ProtocolViolation(f"packet type {kind} is for servers to send")

    def _check_reason(self, kind: i64, reason: i64) -> None:
        """Check a reason code of a client.

        Those of another cell, which may run another version, are not checked.
        """
        if not self.is_from_cluster:
            check_client_reason(kind, reason)

    def _on_disconnect(self, packet: Disconnect, session: Session) -> None:
        self._check_reason(DISCONNECT, packet.reason)
        properties = packet.properties
        if properties is not None and properties.session_expiry is not None:
            if session.expiry_seconds == 0 and properties.session_expiry:
                raise ProtocolViolation(
                    "a session that ends with its connection cannot be prolonged on DISCONNECT"
                )
            session.expiry_seconds = min(
                properties.session_expiry, self.broker.limits.max_session_expiry
            )
            if session.persistent_id:
                self.broker.router.session_store.store_session(session)
        if packet.reason == SUCCESS:
            # [MQTT-3.14.4-3]; with any other reason the will is published [MQTT-3.1.2-8]
            session.will = None
        self.end(SUCCESS, "")

    def resolve_alias(self, packet: Publish) -> None:
        """Replace an incoming alias with its topic, or store the topic of a new alias."""
        alias = int(packet.topic_alias)
        if packet.topic_alias > self.broker.limits.topic_alias_maximum:
            raise ProtocolViolation(
                f"topic alias {alias} exceeds the topic alias maximum of "
                f"{self.broker.limits.topic_alias_maximum}",
                reason=TOPIC_ALIAS_INVALID,
            )
        aliases = self._aliases_in
        if aliases is None:
            aliases = self._aliases_in = {}
        if packet.topic:
            aliases[alias] = packet.topic
            return
        topic = aliases.get(alias)
        if topic is None:
            raise ProtocolViolation(f"topic alias {alias} is undefined", reason=PROTOCOL_ERROR)
        packet.topic = topic

    # ---- output

    def get_output(self) -> BytesWriter:
        """Return the output buffer of this turn and register the connection to be flushed."""
        out = self._out
        if out is None:
            out = self._out = self.broker.turn.borrow_buffer()
            self.broker.turn.register_output(self)
        return out

    def flush(self) -> BytesWriter | None:
        """Write the turn's output to the transport in one piece; return the buffer that it used."""
        out = self._out
        if out is not None:
            self._out = None
            if not self.lost and len(out):
                self.broker.counters.bytes_sent += len(out)
                self.transport.write(out.getvalue())
        return out

    def send_ack(self, kind: i64, packet_id: i64, reason: i64, reason_string: str) -> None:
        write_ack(
            self.get_output(),
            kind,
            packet_id,
            reason,
            self.build_reason_properties(reason_string, 3) if reason_string else None,
            self.version,
        )
        self.broker.counters.packets_sent += 1

    def send_puback(self, packet_id: i64) -> None:
        """Send a PUBACK without reason; its bytes are the same in 3.1.1 and 5.0."""
        out = self.get_output()
        out.append(PUBACK << 4)
        out.append(2)
        write_u16(out, packet_id)
        self.broker.counters.packets_sent += 1

    def send_suback(
        self, head: int, packet_id: int, reasons: list[int], reason_string: str
    ) -> None:
        """Send a SUBACK or an UNSUBACK."""
        properties = self.build_reason_properties(reason_string, 2 + len(reasons))
        write_suback(self.get_output(), head, packet_id, reasons, properties, int(self.version))
        self.broker.counters.packets_sent += 1

    def build_reason_properties(self, reason_string: str, other_bytes: int) -> Properties | None:
        """Return `reason_string` as properties of a packet with `other_bytes` further bytes.

        Return None if the client does not want reason strings or if the packet would exceed its
        maximum size [MQTT-3.2.2-19, 3.4.2-2, 3.9.2-1, 3.14.2-3].
        """
        if not reason_string or not self.wants_reason_strings or self.version != V5:
            return None
        reason_string = _sanitize_reason_string(reason_string)
        if (
            self.max_outgoing_packet != NO_PACKET_LIMIT
            and len(reason_string.encode()) + other_bytes + REASON_STRING_OVERHEAD
            > self.max_outgoing_packet
        ):
            return None
        properties = Properties()
        properties.reason_string = reason_string
        return properties

    def send_publish(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        dup: bool,
        packet_id: i64,
        extra_properties: bytes,
    ) -> bool:
        """Write a PUBLISH; return False if it exceeds the client's packet size [MQTT-3.1.2-24]."""
        topic = message.topic
        if self.version == V5:
            if message.expires_at != 0.0:
                extra_properties = self._prepend_expiry(message, extra_properties)
            if self.max_outgoing_aliases:
                return self._send_aliased(message, qos, retain, dup, packet_id, extra_properties)
        if self.max_outgoing_packet != NO_PACKET_LIMIT and (
            measure_publish(message, topic, qos, extra_properties, self.version)
            > self.max_outgoing_packet
        ):
            return False
        out = self.get_output()
        write_publish(
            out, message, topic, qos, retain, dup, packet_id, extra_properties, self.version
        )
        self.on_publish_written(len(message.payload), out)
        return True

    def on_publish_written(self, payload_bytes: i64, out: BytesWriter) -> None:
        """Count a PUBLISH with a payload of `payload_bytes` that was written to `out`."""
        counters = self.broker.counters
        counters.packets_sent += 1
        counters.publishes_sent += 1
        counters.publish_bytes_sent += payload_bytes
        if len(out) > FLUSH_THRESHOLD_BYTES:
            # The transport reports a slow peer only after it has received the output.
            self.flush()

    def _prepend_expiry(self, message: Publish, extra_properties: bytes) -> bytes:
        """Prepend the remaining lifetime of the message in seconds [MQTT-3.3.2-6]."""
        seconds_left = message.expires_at - self.broker.turn.now
        writer = BytesWriter()
        writer.append(0x02)
        write_u32(writer, int(seconds_left + 0.999) if seconds_left > 0 else 0)
        writer.write(extra_properties)
        return writer.getvalue()

    def _send_aliased(
        self,
        message: Publish,
        qos: i64,
        retain: bool,
        dup: bool,
        packet_id: i64,
        extra_properties: bytes,
    ) -> bool:
        """Send a PUBLISH with a topic alias; the first one also carries the topic."""
        aliases = self._aliases_out
        if aliases is None:
            aliases = self._aliases_out = {}
        topic = message.topic
        alias = aliases.get(topic, 0)
        known = alias != 0
        if not known and len(aliases) < self.max_outgoing_aliases:
            alias = len(aliases) + 1
        unaliased_properties = extra_properties
        if alias:
            writer = BytesWriter()
            writer.append(0x23)
            write_u16(writer, alias)
            writer.write(extra_properties)
            extra_properties = writer.getvalue()
        name = b"" if known else topic
        if (
            measure_publish(message, name, qos, extra_properties, self.version)
            > self.max_outgoing_packet
        ):
            # The alias itself may make the packet too large.
            if (
                not alias
                or measure_publish(message, topic, qos, unaliased_properties, self.version)
                > self.max_outgoing_packet
            ):
                return False
            name, extra_properties, alias = topic, unaliased_properties, 0
        if alias:
            aliases[topic] = alias
        out = self.get_output()
        write_publish(
            out, message, name, qos, retain, dup, packet_id, extra_properties, self.version
        )
        self.on_publish_written(len(message.payload), out)
        return True

    # ---- closing

    def handle_violation(self, violation: ProtocolViolation) -> None:
        """Close the connection after a protocol violation.

        Earlier packets keep their acknowledgements.
        """
        self.broker.on_violation(self, violation)
        self.end(violation.reason, str(violation))

    def end(self, reason: int, reason_string: str, was_answered: bool = False) -> None:
        """Close the connection and send the reason if the protocol has a packet for it.

        `was_answered`: the caller has already sent the reason.
        """
        if self.closing:
            return
        self.closing = True
        has_disconnect_packet = (
            reason != SUCCESS and self.version == V5 and self.session is not None
        )
        if has_disconnect_packet:
            write_disconnect_or_auth(
                self.get_output(), 0xE0, reason, self.build_reason_properties(reason_string, 1), V5
            )
            self.broker.counters.packets_sent += 1
        self._detach_session()
        self.flush()
        if not self.lost:
            if (has_disconnect_packet or was_answered) and self.transport.can_write_eof():
                # Closing while the peer still sends would reset the connection before the peer
                # reads our last packet. So we close only our side and discard input until the peer
                # closes.
                self.transport.write_eof()
            else:
                self.transport.close()
            self.broker.wake_at(
                self.broker.turn.now + CLOSE_TIMEOUT_SECONDS, ConnectionTimeout(self)
            )

    def abort(self) -> None:
        """Close the connection at once, without a DISCONNECT, and discard unsent output."""
        if not self.lost:
            self.closing = True
            self.transport.abort()

    def _detach_session(self) -> None:
        """Detach from the session; a second call does nothing."""
        session = self.session
        if session is not None:
            self.session = None
            self.broker.connection_limits.on_session_closed(self)
            if session.connection is self:
                self.broker.registry.on_disconnected(session)

    def fire(self, now: float) -> float:
        """Enforce the keep-alive: 1.5 times its seconds without a packet [MQTT-3.1.2-22]."""
        if self.is_throttled:
            self.last_read_at = now  # reading is paused by us, so silence does not count
        silence = now - self.last_read_at
        if silence < self.keep_alive:
            return self.last_read_at + self.keep_alive
        self.end(KEEP_ALIVE_TIMEOUT, f"no packet arrived for {silence:.0f} seconds")
        return 0.0

    def is_obsolete(self) -> bool:
        return self.closing


class ConnectionTimeout(Deadline):
    """Abort a connection that has no session, or is not closed, by this deadline.

    One instance limits the time until CONNECT, another the time that a peer takes to read our last
    packets.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection = connection
        self._closing: bool = connection.closing

    def fire(self, now: float) -> float:
        self._connection.abort()
        return 0.0

    def is_obsolete(self) -> bool:
        connection = self._connection
        return (
            connection.lost or connection.session is not None or connection.closing != self._closing
        )


def _sanitize_reason_string(text: str) -> str:
    """Make a text that quotes client input valid as an MQTT string.

    Replace unprintable characters. Shorten a long text in the middle: its beginning says what is
    wrong and its end says what to do.
    """
    if len(text) > MAX_REASON_STRING_LENGTH:
        half = MAX_REASON_STRING_LENGTH // 2
        text = f"{text[: half - 1]} … {text[2 - half :]}"
    if text.isprintable():
        return text
    return "".join([character if character.isprintable() else "?" for character in text])
