"""A message of a queue, lent to this consumer until it says what became of it."""

from __future__ import annotations

import json
from typing import Any, Final, Literal, Protocol, Unpack

from sluice.client.message import Message
from sluice.client.queues.publisher import duration_text
from sluice.client.queues.replies import ReplyOptions
from sluice.wire.properties import Properties

Reason = Literal["delivery-error", "unacceptable"]

MAX_DESCRIPTION_BYTES: Final = 0x7FFF  # bytes: more is not kept with a dead letter

# What the broker writes on each delivery, in this order and in front of what the publisher wrote.
BROKER_PROPERTIES: Final = (
    "message-id",
    "queue",
    "consumer-group",
    "partition",
    "sequence",
    "attempt",
    "enqueued-at",
    "delivery-token",
)


class DeliverySettler(Protocol):
    """Who carries what is said of a delivery to the broker."""

    async def settle(
        self, delivery: Delivery, verb: str, extra: list[tuple[str, str]], confirm: bool
    ) -> bool: ...

    async def reply(self, message: Message, payload: object, options: ReplyOptions) -> None: ...


class Delivery:
    """One message with one consumer. Settle it once: `ack`, `nack`, `reject` or `release`.

    Each returns when the word is on its way, together with others of the same moment: waiting for every answer would
    cost a round trip per message, and a settlement that is lost means one more delivery, as a crash would. With
    `confirm=True` they wait for the broker's answer and raise `PublishRefused` when it comes too late. False: it was
    settled before."""

    __slots__ = (
        "_broker_properties",
        "_settler",
        "connection_number",
        "has_duplicate",
        "id",
        "is_acked",
        "is_taken",
        "message",
        "payload",
        "settled",
        "token",
        "topic",
    )

    def __init__(self, message: Message, settler: DeliverySettler) -> None:
        self.message = message
        self.payload = message.payload
        self.topic = message.topic  # `$queue/<name>`, without an id behind it
        self.settled = False
        self.is_acked = False  # settled by an ack
        self.connection_number = 0  # the how manieth connection it came on
        self.is_taken = False  # the application has it
        self.has_duplicate = (
            False  # another delivery of this id is with us: only the token tells them apart
        )
        self._settler = settler
        self._broker_properties: dict[str, str] | None = None
        user = message.properties.user
        if len(user) >= 8 and user[7][0] == "delivery-token":
            self.id = user[0][1]
            self.token = user[7][1]
        else:  # 3.1.1: the id stands in the topic
            self.topic, _, self.id = message.topic.partition("/$msg/")
            self.token = ""

    # What is known of it

    @property
    def queue(self) -> str:
        return self.topic.removeprefix("$queue/")

    @property
    def group(self) -> str:
        return self._read_broker_properties().get("consumer-group", "")

    @property
    def partition(self) -> int:
        return int(self._read_broker_properties().get("partition", -1))

    @property
    def sequence(self) -> int:
        return int(self._read_broker_properties().get("sequence", -1))

    @property
    def attempt(self) -> int:
        """1 for the first; 0 where the protocol, 3.1.1, cannot tell."""
        return int(self._read_broker_properties().get("attempt", 0))

    @property
    def position(self) -> tuple[str, int, int]:
        """Where the message lies: ids are the publishers' and may come twice, places do not."""
        return self.topic, self.partition, self.sequence

    @property
    def enqueued_at(self) -> str:
        return self._read_broker_properties().get("enqueued-at", "")

    @property
    def key(self) -> str | None:
        return self.headers.get("partition-key")

    @property
    def headers(self) -> dict[str, str]:
        """The publisher's own user properties; on a dead letter also its story."""
        user = self.message.properties.user
        return dict(user[len(BROKER_PROPERTIES) :] if self.token else user)

    @property
    def properties(self) -> Properties:
        return self.message.properties

    @property
    def text(self) -> str:
        return self.payload.decode()

    def json(self) -> Any:
        return json.loads(self.payload)

    def _read_broker_properties(self) -> dict[str, str]:
        if self._broker_properties is None:
            self._broker_properties = (
                dict(self.message.properties.user[: len(BROKER_PROPERTIES)]) if self.token else {}
            )
        return self._broker_properties

    # What became of it

    async def ack(self, *, confirm: bool = False) -> bool:
        """Done: it will not come again."""
        return await self._settler.settle(self, "$ack", [], confirm)

    async def nack(
        self, delay: float | str | None = None, description: str = "", *, confirm: bool = False
    ) -> bool:
        """Failed: again after its backoff, or after `delay` (seconds, or "5m"; 0 is now)."""
        extra = [] if delay is None else [("delay", duration_text(delay))]
        return await self._settler.settle(
            self, "$nack", extra + _description_property(description), confirm
        )

    async def reject(
        self, reason: Reason = "delivery-error", description: str = "", *, confirm: bool = False
    ) -> bool:
        """Never again: to the dead letters, or with `unacceptable` to the invalid-message channel if there is one."""
        extra = [] if reason == "delivery-error" else [("reason", reason)]
        return await self._settler.settle(
            self, "$reject", extra + _description_property(description), confirm
        )

    async def release(self, *, confirm: bool = False) -> bool:
        """Back to the queue, unused: not a failure."""
        return await self._settler.settle(self, "$release", [], confirm)

    async def extend(self, *, confirm: bool = False) -> bool:
        """Still working: the deadline starts anew."""
        return await self._settler.settle(self, "$extend", [], confirm)

    async def reply(self, payload: object = b"", **options: Unpack[ReplyOptions]) -> None:
        """Answer whoever asked: to its response topic, with its correlation. Returns when the answer is taken."""
        await self._settler.reply(self.message, payload, options)

    def __repr__(self) -> str:
        return f"Delivery({self.id!r} of {self.queue!r}, {len(self.payload)} bytes)"


def _description_property(description: str) -> list[tuple[str, str]]:
    return [("description", sanitize_text(description))] if description else []


def sanitize_text(description: str) -> str:
    """Words for people, as far as MQTT can carry them: how it failed must not be why nobody hears of it."""
    text = description.replace("\0", " ").encode("utf-8", "replace")
    return text[:MAX_DESCRIPTION_BYTES].decode("utf-8", "ignore")
