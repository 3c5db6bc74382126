"""Messages from the server: the receiving half of QoS 1 and 2, topic aliases, and who still waits for an answer.

`held` outlives connections: a message that the application has not acknowledged yet and that the server sends again
after a reconnect is the same message, and is not handed out twice. An acknowledgement is written only on a connection
on which the server sent the message, for then the server surely knows what it is about.

    QoS 1   PUBLISH -> held ──acknowledge──> PUBACK
    QoS 2   PUBLISH -> held ──acknowledge──> PUBREC, unreleased ──PUBREL──> PUBCOMP
A server that exceeds our receive maximum is warned about and borne with: widely used ones do, and ending the
connection would send them back to the same messages. No socket, no clock.
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
    def __init__(self, version: int, output: WriteBuffer, window: int, alias_maximum: int) -> None:
        self.version = version
        self.unacknowledged: dict[int, Message] = {}
        self.unreleased: set[int] = set()
        self._open_ids: set[int] = (
            set()
        )  # identifiers the server has in use on this connection, as far as we can see
        self._output = output
        self._window = window
        self._has_warned = False
        self._alias_maximum = alias_maximum
        self._aliases: dict[int, bytes] = {}

    def on_connected(self, session_present: bool) -> None:
        """A connection is open."""
        self._aliases = {}
        self._open_ids = set()
        if not session_present:
            self.unacknowledged = {}
            self.unreleased = set()

    def on_disconnected(self) -> None:
        """The connection is gone: acknowledgements from here on wait for the message to come again."""
        self._open_ids = set()

    def receive(self, packet: Publish) -> Message | None:
        """The message to hand out, or None for one that was handed out before."""
        if packet.topic_alias:
            self._resolve_alias(packet)
        if packet.qos == 0:
            return Message(packet, packet.topic.decode(), self)
        packet_id = int(packet.packet_id)
        self._open_ids.add(packet_id)
        if len(self._open_ids) > self._window and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the server has more than our receive maximum of %d messages open", self._window
            )
        if packet_id in self.unreleased:  # [MQTT-4.3.3-10]
            self._write(PUBREC, packet_id, 0, None)
            return None
        before = self.unacknowledged.get(packet_id)
        # Without DUP a QoS 1 identifier is a new message: the server gave the old one up while we were away.
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
        """PUBREL."""
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
        packet.topic_alias = 0  # it meant something on this connection alone
