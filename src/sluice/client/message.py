"""A message as the application receives it."""

from __future__ import annotations

from typing import Protocol, TypedDict, Unpack

from sluice.client.errors import Unsupported
from sluice.client.options import UserProperties
from sluice.client.outcomes import error_response
from sluice.wire.packets import Publish
from sluice.wire.properties import PUBACK, Properties
from sluice.wire.reasons import CLIENT_REASONS


class ReplyOptions(TypedDict, total=False):
    headers: UserProperties | None
    content_type: str | None


class Acknowledger(Protocol):
    """Writes acknowledgements. A message knows only this interface, not its session."""

    def acknowledge(self, message: Message, reason: int, properties: Properties | None) -> bool: ...


class Replier(Protocol):
    """Publishes a reply to a message."""

    async def reply(
        self, message: Message, payload: object = b"", **options: Unpack[ReplyOptions]
    ) -> None: ...


class Message:
    """A received message. Its properties are decoded on first access."""

    __slots__ = (
        "_acknowledger",
        "_packet",
        "_properties",
        "acknowledged",
        "answer",
        "payload",
        "qos",
        "replier",
        "topic",
    )

    def __init__(self, packet: Publish, topic: str, acknowledger: Acknowledger) -> None:
        self.topic = topic
        self.payload: bytes = packet.payload
        self.qos = int(packet.qos)
        self.acknowledged = packet.qos == 0
        self.replier: Replier | None = None  # the client; set when the application gets the message
        self._packet = packet
        self._properties: Properties | None = None
        self._acknowledger = acknowledger
        self.answer: tuple[int, Properties | None] = (0, None)  # of the acknowledgement

    @property
    def retain(self) -> bool:
        return self._packet.retain

    @property
    def dup(self) -> bool:
        """Return whether the server may have sent this message before."""
        return self._packet.dup

    @property
    def packet_id(self) -> int:
        return int(self._packet.packet_id)

    @property
    def subscription_ids(self) -> list[int]:
        """Return the identifiers of the matching subscriptions that have one."""
        return self._packet.subscription_ids or []

    @property
    def properties(self) -> Properties:
        if self._properties is None:
            self._properties = self._packet.decode_properties()
        return self._properties

    async def ack(self, reason: int = 0, reason_string: str | None = None) -> bool:
        """Acknowledge the message (PUBACK; PUBREC for QoS 2). A reason of 0x80 or more refuses it.

        Raise Unsupported for a reason that MQTT does not allow there: servers end the connection.
        Return True if this call acknowledged it. Return False if nothing was left to acknowledge:
        it was acknowledged before, has QoS 0, or belongs to a session that the server has lost.
        While the connection is down, the acknowledgement waits until the server resends the
        message; the message is not handed out a second time.
        """
        if reason not in CLIENT_REASONS[PUBACK]:
            allowed = ", ".join(f"0x{one:02x}" for one in sorted(CLIENT_REASONS[PUBACK]))
            raise Unsupported(f"0x{reason:02x} is no reason code of a PUBACK", f"Use {allowed}")
        properties = None
        if reason_string is not None:
            properties = Properties()
            properties.reason_string = reason_string
        return self._acknowledger.acknowledge(self, reason, properties)

    async def reply(self, payload: object = b"", **options: Unpack[ReplyOptions]) -> None:
        """Publish a reply to the message's response topic, with its correlation data.

        Return when the server has accepted the reply.
        """
        assert self.replier is not None, "the application has not received this message"
        await self.replier.reply(self, payload, **options)

    async def reply_error(self, error: BaseException | str) -> None:
        """Reply that the request failed: `client.request` raises `RequestFailed` with the text."""
        payload, headers = error_response(error)
        await self.reply(payload, headers=headers)

    def __repr__(self) -> str:
        return f"Message({self.topic!r}, {len(self.payload)} bytes, qos={self.qos})"
