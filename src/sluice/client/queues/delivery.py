"""A message of a queue, lent to this consumer until it says what became of it."""

from __future__ import annotations

import json
from typing import Any, Final, Literal, Protocol, Unpack

from sluice.client.message import Message
from sluice.client.queues.publisher import duration_text
from sluice.client.queues.replies import ReplyOptions
from sluice.wire.properties import Properties

Reason = Literal["delivery-error", "unacceptable"]

LONGEST_DESCRIPTION: Final = 0x7FFF  # bytes: more is not kept with a dead letter

# What the broker writes on each delivery, in this order and in front of what the publisher wrote.
FACTS: Final = (
    "message-id",
    "queue",
    "consumer-group",
    "partition",
    "sequence",
    "attempt",
    "enqueued-at",
    "delivery-token",
)


class Settling(Protocol):
    """Who carries what is said of a delivery to the broker."""

    async def settle(
        self, delivery: Delivery, verb: str, told: list[tuple[str, str]], confirm: bool
    ) -> bool: ...

    async def reply(self, message: Message, payload: object, options: ReplyOptions) -> None: ...


class Delivery:
    """One message with one consumer. Settle it once: `ack`, `nack`, `reject` or `release`.

    Each returns when the word is on its way, together with others of the same moment: waiting for every answer would
    cost a round trip per message, and a settlement that is lost means one more delivery, as a crash would. With
    `confirm=True` they wait for the broker's answer and raise `PublishRefused` when it comes too late. False: it was
    settled before."""

    __slots__ = (
        "_facts",
        "_settling",
        "done",
        "has_twin",
        "id",
        "line",
        "message",
        "payload",
        "settled",
        "taken",
        "token",
        "topic",
    )

    def __init__(self, message: Message, settling: Settling) -> None:
        self.message = message
        self.payload = message.payload
        self.topic = message.topic  # `$queue/<name>`, without an id behind it
        self.settled = False
        self.done = False  # settled by an ack
        self.line = 0  # the how manieth connection it came on
        self.taken = False  # the application has it
        self.has_twin = False  # another delivery of this id is with us: only the token tells them apart
        self._settling = settling
        self._facts: dict[str, str] | None = None
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
        return self._told().get("consumer-group", "")

    @property
    def partition(self) -> int:
        return int(self._told().get("partition", -1))

    @property
    def sequence(self) -> int:
        return int(self._told().get("sequence", -1))

    @property
    def attempt(self) -> int:
        """1 for the first; 0 where the protocol, 3.1.1, cannot tell."""
        return int(self._told().get("attempt", 0))

    @property
    def place(self) -> tuple[str, int, int]:
        """Where the message lies: ids are the publishers' and may come twice, places do not."""
        return self.topic, self.partition, self.sequence

    @property
    def enqueued_at(self) -> str:
        return self._told().get("enqueued-at", "")

    @property
    def key(self) -> str | None:
        return self.headers.get("partition-key")

    @property
    def headers(self) -> dict[str, str]:
        """The publisher's own user properties; on a dead letter also its story."""
        user = self.message.properties.user
        return dict(user[len(FACTS) :] if self.token else user)

    @property
    def properties(self) -> Properties:
        return self.message.properties

    @property
    def text(self) -> str:
        return self.payload.decode()

    def json(self) -> Any:
        return json.loads(self.payload)

    def _told(self) -> dict[str, str]:
        if self._facts is None:
            self._facts = dict(self.message.properties.user[: len(FACTS)]) if self.token else {}
        return self._facts

    # What became of it

    async def ack(self, *, confirm: bool = False) -> bool:
        """Done: it will not come again."""
        return await self._settling.settle(self, "$ack", [], confirm)

    async def nack(
        self, delay: float | str | None = None, description: str = "", *, confirm: bool = False
    ) -> bool:
        """Failed: again after its backoff, or after `delay` (seconds, or "5m"; 0 is now)."""
        told = [] if delay is None else [("delay", duration_text(delay))]
        return await self._settling.settle(self, "$nack", told + _described(description), confirm)

    async def reject(
        self, reason: Reason = "delivery-error", description: str = "", *, confirm: bool = False
    ) -> bool:
        """Never again: to the dead letters, or with `unacceptable` to the invalid-message channel if there is one."""
        told = [] if reason == "delivery-error" else [("reason", reason)]
        return await self._settling.settle(self, "$reject", told + _described(description), confirm)

    async def release(self, *, confirm: bool = False) -> bool:
        """Back to the queue, unused: not a failure."""
        return await self._settling.settle(self, "$release", [], confirm)

    async def extend(self, *, confirm: bool = False) -> bool:
        """Still working: the deadline starts anew."""
        return await self._settling.settle(self, "$extend", [], confirm)

    async def reply(self, payload: object = b"", **options: Unpack[ReplyOptions]) -> None:
        """Answer whoever asked: to its response topic, with its correlation. Returns when the answer is taken."""
        await self._settling.reply(self.message, payload, options)

    def __repr__(self) -> str:
        return f"Delivery({self.id!r} of {self.queue!r}, {len(self.payload)} bytes)"


def _described(description: str) -> list[tuple[str, str]]:
    return [("description", plain_text(description))] if description else []


def plain_text(description: str) -> str:
    """Words for people, as far as MQTT can carry them: how it failed must not be why nobody hears of it."""
    text = description.replace("\0", " ").encode("utf-8", "replace")
    return text[:LONGEST_DESCRIPTION].decode("utf-8", "ignore")
