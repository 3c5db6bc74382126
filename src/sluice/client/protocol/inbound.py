"""Messages from the server: the receiving half of QoS 1 and 2, topic aliases, acknowledgements.

`unacknowledged` outlives connections: a message that the application has not acknowledged and that
the server resends after a reconnect is the same message and is not handed out twice. Invariant: an
acknowledgement is written only on a connection on which the server has sent the message, because
only then the server knows the packet id.

    QoS 1   PUBLISH -> unacknowledged ──acknowledge──> PUBACK
    QoS 2   PUBLISH -> unacknowledged ──acknowledge──> PUBREC, unreleased ──PUBREL──> PUBCOMP

A server that exceeds our receive maximum causes a warning only: widely used servers do it, and
after a reconnect they would send the same messages again. No socket, no clock.
"""

from __future__ import annotations

import logging

from sluice.client.message import Message
from sluice.client.protocol.write_buffer import WriteBuffer
from sluice.errors import ProtocolViolation
from sluice.wire.encode import write_ack
from sluice.wire.packets import Ack, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, Properties
from sluice.wire.reasons import PACKET_IDENTIFIER_NOT_FOUND, TOPIC_ALIAS_INVALID

log = logging.getLogger(__name__)


class InboundMessages:
    """The session state of received messages."""

    def __init__(self, version: int, output: WriteBuffer, window: int, alias_maximum: int) -> None:
        self.version = version
        self.unacknowledged: dict[int, Message] = {}
        self.unreleased: set[int] = set()
        # Packet ids that the server uses on this connection.
        self._open_ids: set[int] = set()
        self._output = output
        self._window = window
        self._has_warned = False
        self._alias_maximum = alias_maximum
        self._aliases: dict[int, bytes] = {}

    def on_connected(self, session_present: bool) -> None:
        """Start a connection; without the session, forget all state."""
        self._aliases = {}
        self._open_ids = set()
        if not session_present:
            self.unacknowledged = {}
            self.unreleased = set()

    def on_disconnected(self) -> None:
        """End the connection: later acknowledgements wait until the server resends the message."""
        self._open_ids = set()

    def receive(self, packet: Publish) -> Message | None:
        """Return the message to hand out, or None if it was handed out before."""
        if packet.topic_alias:
            self._resolve_alias(packet)
        if packet.qos == 0:
            return Message(packet, packet.topic.decode(), self)
        packet_id = int(packet.packet_id)
        self._open_ids.add(packet_id)
        if len(self._open_ids) > self._window and not self._has_warned:
            self._has_warned = True
            log.warning("the server exceeds our receive maximum of %d messages", self._window)
        if packet_id in self.unreleased:  # [MQTT-4.3.3-10]
            self._write(PUBREC, packet_id, 0, None)
            return None
        before = self.unacknowledged.get(packet_id)
        # Without DUP a QoS 1 packet id is a new message: the server dropped the old one.
        if before is not None and (packet.dup or packet.qos == 2):
            if before.acknowledged:
                self._send_ack(before)
            return None
        message = Message(packet, packet.topic.decode(), self)
        self.unacknowledged[packet_id] = message
        return message

    def acknowledge(self, message: Message, reason: int, properties: Properties | None) -> bool:
        packet_id = message.packet_id
        if message.acknowledged or self.unacknowledged.get(packet_id) is not message:
            return False
        message.acknowledged = True
        message.answer = (reason, properties)
        if packet_id in self._open_ids:
            self._send_ack(message)
        return True

    def on_pubrel(self, ack: Ack) -> None:
        """Handle a PUBREL."""
        packet_id = int(ack.packet_id)
        reason = 0 if packet_id in self.unreleased else PACKET_IDENTIFIER_NOT_FOUND
        self.unreleased.discard(packet_id)
        self._open_ids.discard(packet_id)
        self._write(PUBCOMP, packet_id, reason, None)

    def _send_ack(self, message: Message) -> None:
        packet_id = message.packet_id
        reason, properties = message.answer
        del self.unacknowledged[packet_id]
        if message.qos == 1:
            self._open_ids.discard(packet_id)
            self._write(PUBACK, packet_id, reason, properties)
            return
        if reason < 0x80:
            self.unreleased.add(packet_id)
        else:
            self._open_ids.discard(packet_id)
        self._write(PUBREC, packet_id, reason, properties)

    def _write(self, kind: int, packet_id: int, reason: int, properties: Properties | None) -> None:
        write_ack(self._output.writer, kind, packet_id, reason, properties, self.version)
        self._output.notify()

    def _resolve_alias(self, packet: Publish) -> None:
        alias = int(packet.topic_alias)
        if alias > self._alias_maximum:
            raise ProtocolViolation(
                f"the server used topic alias {alias}, beyond {self._alias_maximum}",
                reason=TOPIC_ALIAS_INVALID,
            )
        if packet.topic:
            self._aliases[alias] = packet.topic
        else:
            topic = self._aliases.get(alias)
            if topic is None:
                raise ProtocolViolation(
                    f"the server used topic alias {alias} before it had a topic",
                    reason=TOPIC_ALIAS_INVALID,
                )
            packet.topic = topic
        packet.topic_alias = 0  # an alias is valid on its connection only
