"""Messages to the server: the sending half of QoS 0, 1 and 2 (MQTT 5.0 sections 4.3, 4.4, 4.9).

    waiting ──send──> inflight ──PUBACK──> done            QoS 1
                      inflight ──PUBREC──> releasing ──PUBCOMP──> done   QoS 2
    waiting ──send──> done                                 QoS 0

Invariants: `waiting` is one FIFO for all QoS, so messages are sent in the order of publishing.
`inflight` and `releasing` together never exceed the server's Receive Maximum; their sum is computed
and not counted, so it cannot drift. No socket, no clock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from sluice.client.errors import Unsupported
from sluice.client.protocol.pending import PendingPublish
from sluice.client.protocol.server_info import ServerInfo
from sluice.client.protocol.write_buffer import MAX_TURN_BYTES, WriteBuffer
from sluice.errors import ProtocolViolation
from sluice.wire.encode import encode_hop_properties, measure_publish, write_ack, write_publish
from sluice.wire.packets import Ack
from sluice.wire.properties import PUBREL
from sluice.wire.reasons import PACKET_IDENTIFIER_NOT_FOUND

# Packet ids reserved for SUBSCRIBE and UNSUBSCRIBE, however many publishes are in flight.
RESERVED_IDS: Final = 1_024
MAX_INFLIGHT: Final = 0xFFFF - RESERVED_IDS


class PacketIds:
    """The packet ids in use. The next one is always the longest unused."""

    __slots__ = ("_next", "used")

    def __init__(self) -> None:
        self.used: set[int] = set()
        self._next = 1

    def allocate(self) -> int:
        used = self.used
        found = self._next
        while found in used:
            found = found + 1 if found < 0xFFFF else 1
        used.add(found)
        self._next = found + 1 if found < 0xFFFF else 1
        return found


class OutboundMessages:
    """The session state of sent messages."""

    def __init__(
        self,
        version: int,
        ids: PacketIds,
        output: WriteBuffer,
        inflight_limit: int,
        use_aliases: bool,
    ) -> None:
        self.version = version
        self.is_open = False  # the connection has passed its CONNACK
        self.is_paused = False  # the transport's buffer is full
        self.waiting: deque[PendingPublish] = deque()
        self.inflight: dict[int, PendingPublish] = {}
        self.releasing: dict[int, PendingPublish] = {}
        self.unconfirmed_bytes = 0
        self._ids = ids
        self._output = output
        self._server = ServerInfo()
        self._has_limits = False
        self._inflight_limit = min(inflight_limit, MAX_INFLIGHT)
        self._window = self._inflight_limit
        self._use_aliases = use_aliases
        self._aliases: dict[bytes, int] = {}

    @property
    def unconfirmed(self) -> int:
        return len(self.waiting) + len(self.inflight) + len(self.releasing)

    def publish(self, outgoing: PendingPublish) -> None:
        """Send a message now, or queue it in order."""
        if (
            self.is_open
            and not self.is_paused
            and not self.waiting
            and len(self._output.writer) < MAX_TURN_BYTES
            and (
                outgoing.packet.qos == 0 or len(self.inflight) + len(self.releasing) < self._window
            )
        ):
            fault = self._limit_error(outgoing) if self._has_limits else None
            if fault is not None:
                raise fault
            self.unconfirmed_bytes += outgoing.size
            self._send(outgoing)
            self._output.notify()
        else:
            if self.is_open and self._has_limits:
                fault = self._limit_error(outgoing)
                if fault is not None:
                    raise fault
            self.unconfirmed_bytes += outgoing.size
            self.waiting.append(outgoing)

    def withdraw(self, outgoing: PendingPublish) -> bool:
        """Remove a message that was never sent; return False if it is too late."""
        if outgoing.done or outgoing.packet.packet_id or outgoing not in self.waiting:
            return False
        self.waiting.remove(outgoing)
        self.unconfirmed_bytes -= outgoing.size
        return True

    def send_waiting(self) -> None:
        """Send from `waiting` as far as connection, receive maximum and write buffer allow."""
        waiting = self.waiting
        if not waiting or not self.is_open or self.is_paused:
            return
        writer = self._output.writer
        sent = False
        while waiting and len(writer) < MAX_TURN_BYTES:
            outgoing = waiting[0]
            if outgoing.packet.qos and len(self.inflight) + len(self.releasing) >= self._window:
                break
            waiting.popleft()
            fault = self._limit_error(outgoing) if self._has_limits else None
            if fault is None:
                self._send(outgoing)
                sent = True
            else:  # accepted for an earlier connection whose server allowed more
                self._release(outgoing)
                outgoing.fail(fault)
        if sent:
            self._output.notify()

    def on_connected(self, server: ServerInfo, session_present: bool) -> None:
        """Start a connection: resend unanswered messages first, in order.

        If the server has the session, messages are resent as duplicates, and received ones are
        released by PUBREL [MQTT-4.4.0-1]. Otherwise all are sent as new messages. A server may
        publish a QoS 2 message only at the PUBREL, so a received message may be lost with the
        session; sending it again can duplicate it, not sending it can lose it.
        """
        self._server = server
        self._window = min(server.receive_maximum, self._inflight_limit)
        self._has_limits = server.limits_publishing
        self._aliases = {}
        self.is_open = True
        unanswered = list(self.inflight.values())
        self.inflight = {}
        if session_present:
            for packet_id in self.releasing:
                write_ack(self._output.writer, PUBREL, packet_id, 0, None, self.version)
                self._output.notify()
        else:
            unanswered = [*self.releasing.values(), *unanswered]
            self.releasing = {}
        for outgoing in unanswered:
            outgoing.packet.dup = session_present
        self.waiting.extendleft(reversed(unanswered))
        self.send_waiting()

    def on_disconnected(self) -> None:
        """End the connection. All state is kept for the next one."""
        self.is_open = False
        self.is_paused = False

    def on_puback(self, ack: Ack) -> None:
        """Handle a PUBACK."""
        packet_id = int(ack.packet_id)
        outgoing = self.inflight.pop(packet_id, None)
        if outgoing is None:
            return  # the answer to a message that was dropped with its session
        if outgoing.packet.qos != 1:
            self.inflight[packet_id] = outgoing
            raise ProtocolViolation("the server answered a QoS 2 message with PUBACK")
        self._release(outgoing)
        outgoing.complete(ack)

    def on_pubrec(self, ack: Ack) -> None:
        """Handle a PUBREC."""
        packet_id = int(ack.packet_id)
        outgoing = self.inflight.get(packet_id)
        reason = 0
        if outgoing is None:
            if packet_id not in self.releasing:
                reason = PACKET_IDENTIFIER_NOT_FOUND
        else:
            if outgoing.packet.qos != 2:
                raise ProtocolViolation("the server answered a QoS 1 message with PUBREC")
            del self.inflight[packet_id]
            if ack.reason >= 0x80:
                self._release(outgoing)
                outgoing.complete(ack)
                return
            self.releasing[packet_id] = outgoing
            outgoing.properties = ack.properties
            outgoing.reason = int(ack.reason)
        write_ack(self._output.writer, PUBREL, packet_id, reason, None, self.version)
        self._output.notify()

    def on_pubcomp(self, ack: Ack) -> None:
        """Handle a PUBCOMP."""
        outgoing = self.releasing.pop(int(ack.packet_id), None)
        if outgoing is not None:
            self._release(outgoing)
            outgoing.complete(ack)

    def fail(self, error: Exception) -> None:
        """Fail all messages, because no answer can arrive any more."""
        unanswered = [*self.releasing.values(), *self.inflight.values(), *self.waiting]
        self.waiting.clear()
        self.inflight = {}
        self.releasing = {}
        for outgoing in unanswered:
            self._release(outgoing)
            outgoing.fail(error)

    def _release(self, outgoing: PendingPublish) -> None:
        self.unconfirmed_bytes -= outgoing.size
        self._ids.used.discard(int(outgoing.packet.packet_id))

    def _send(self, outgoing: PendingPublish) -> None:
        packet = outgoing.packet
        topic = packet.topic
        if self._use_aliases:
            topic = self._apply_alias(outgoing)
        extra = (
            b""
            if packet.expiry_seconds < 0 and packet.topic_alias == 0
            else encode_hop_properties(packet)
        )
        qos = packet.qos
        if qos:
            packet_id = packet.packet_id
            if packet_id == 0:
                packet_id = packet.packet_id = self._ids.allocate()
            self.inflight[packet_id] = outgoing
            write_publish(
                self._output.writer,
                packet,
                topic,
                qos,
                packet.retain,
                packet.dup,
                packet_id,
                extra,
                self.version,
            )
        else:
            write_publish(
                self._output.writer, packet, topic, 0, packet.retain, False, 0, extra, self.version
            )
            self.unconfirmed_bytes -= outgoing.size
            outgoing.complete(None)

    def _apply_alias(self, outgoing: PendingPublish) -> bytes:
        """Set the topic alias and return the topic to write.

        The first topics of a connection get the available aliases.
        """
        topic = outgoing.packet.topic
        alias = self._aliases.get(topic)
        if alias is not None:
            outgoing.packet.topic_alias = alias
            return b""
        outgoing.packet.topic_alias = 0
        if len(self._aliases) < self._server.topic_alias_maximum:
            outgoing.packet.topic_alias = self._aliases[topic] = len(self._aliases) + 1
        return topic

    def _limit_error(self, outgoing: PendingPublish) -> Unsupported | None:
        """Return why this server would close the connection because of this message, or None."""
        packet = outgoing.packet
        server = self._server
        if packet.qos > server.maximum_qos:
            return Unsupported(
                f"this server supports at most QoS {server.maximum_qos}",
                f"Publish with qos={server.maximum_qos}",
            )
        if packet.retain and not server.retain_available:
            return Unsupported(
                "this server stores no retained messages", "Publish with retain=False"
            )
        if server.maximum_packet_size is not None:
            # Size of the properties that are added when the message is sent.
            spare = 8 if self._use_aliases else 5
            extra = b"\0" * spare if packet.expiry_seconds >= 0 or self._use_aliases else b""
            size = int(measure_publish(packet, packet.topic, packet.qos, extra, self.version))
            if size > server.maximum_packet_size:
                return Unsupported(
                    f"the message makes a packet of {size} bytes "
                    f"and this server accepts {server.maximum_packet_size}",
                    "Send a smaller payload, or raise the server's maximum packet size",
                )
        return None
