"""A message as the application receives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Unpack

from sluice.wire.packets import Publish
from sluice.wire.properties import Properties

if TYPE_CHECKING:
    from sluice.client.queues.replies import ReplyOptions


class Acknowledger(Protocol):
    """Whoever writes acknowledgements: declared here so that a message need not know the session it came from."""

    def acknowledge(self, message: Message, reason: int, properties: Properties | None) -> bool: ...


class Replier(Protocol):
    """Whoever can publish an answer."""

    async def reply(
        self, message: Message, payload: object = b"", **options: Unpack[ReplyOptions]
    ) -> None: ...


class Message:
    """What arrived, unread: the properties are decoded when somebody asks for them."""

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
        self.replier: Replier | None = None  # the client, once the message is with the application
        self._packet = packet
        self._properties: Properties | None = None
        self._acknowledger = acknowledger
        self.answer: tuple[int, Properties | None] = (0, None)  # what the server gets to hear

    @property
    def retain(self) -> bool:
        return self._packet.retain

    @property
    def dup(self) -> bool:
        """The server may have sent this message before."""
        return self._packet.dup

    @property
    def packet_id(self) -> int:
        return int(self._packet.packet_id)

    @property
    def subscription_ids(self) -> list[int]:
        """The identifiers of the subscriptions that matched, if they have any."""
        return self._packet.subscription_ids or []

    @property
    def properties(self) -> Properties:
        if self._properties is None:
            self._properties = self._packet.decode_properties()
        return self._properties

    async def ack(self, reason: int = 0, reason_string: str | None = None) -> bool:
        """Tell the server what became of the message (PUBACK, PUBREC for QoS 2); a reason of 0x80 or more refuses it.

        True: this call acknowledged it. False: nothing was left to acknowledge, because it was done before, has QoS 0,
        or belongs to a session that the server has lost. A message acknowledged while the line is down is
        acknowledged when the server sends it again, and is not handed out a second time."""
        properties = None
        if reason_string is not None:
            properties = Properties()
            properties.reason_string = reason_string
        return self._acknowledger.acknowledge(self, reason, properties)

    async def reply(self, payload: object = b"", **options: Unpack[ReplyOptions]) -> None:
        """Answer it: to its response topic, with its correlation. Returns when the answer is taken."""
        assert self.replier is not None, "a message that was handed out"
        await self.replier.reply(self, payload, **options)

    def __repr__(self) -> str:
        return f"Message({self.topic!r}, {len(self.payload)} bytes, qos={self.qos})"
