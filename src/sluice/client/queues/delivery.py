"""A message of a queue, leased to this consumer until it is settled."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, Protocol, Unpack

from sluice.client.message import Message, ReplyOptions
from sluice.client.outcomes import DELIVERY_ERROR, Reason, error_response, normalize_reason
from sluice.client.payload_codecs import duration_text
from sluice.wire.properties import Properties

MAX_DESCRIPTION_BYTES: Final = 0x7FFF  # a dead letter stores no more

# User properties that the broker adds to each delivery, in this order, before the publisher's.
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
    """Sends the settlements and replies of a delivery."""

    async def settle(
        self, delivery: Delivery, verb: str, extra: list[tuple[str, str]], confirm: bool
    ) -> bool: ...

    async def ack_and_publish(
        self, delivery: Delivery, messages: Iterable[tuple[str, object]]
    ) -> bool: ...

    async def reply(self, message: Message, payload: object, options: ReplyOptions) -> None: ...


class Delivery:
    """One message delivered to one consumer. Settle it once: `ack`, `nack`, `reject` or `release`.

    Each method returns when the settlement is scheduled to be sent, together with others of the
    same turn: waiting for every answer would cost a round trip per message, and a lost settlement
    means one more delivery, as a crash would. With `confirm=True` it waits for the broker's answer
    and raises `PublishRefused` if the settlement is too late. It returns False if the delivery was
    settled before.
    """

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
        self.topic = message.topic  # `$queue/<name>`, without a message id
        self.settled = False
        self.is_acked = False  # settled by an ack
        self.connection_number = 0  # of the connection on which it arrived
        self.is_taken = False  # the application has it
        # Another delivery of this id is tracked: only the token distinguishes them.
        self.has_duplicate = False
        self._settler = settler
        self._broker_properties: dict[str, str] | None = None
        user = message.properties.user
        if len(user) >= 8 and user[7][0] == "delivery-token":
            self.id = user[0][1]
            self.token = user[7][1]
        else:  # 3.1.1: the id is in the topic
            self.topic, _, self.id = message.topic.partition("/$msg/")
            self.token = ""

    # Properties

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
        """Return the number of this attempt, from 1; 0 with MQTT 3.1.1, which cannot carry it."""
        return int(self._read_broker_properties().get("attempt", 0))

    @property
    def position(self) -> tuple[str, int, int]:
        """Return queue, partition and sequence. Unlike message ids, positions are unique."""
        return self.topic, self.partition, self.sequence

    @property
    def enqueued_at(self) -> str:
        return self._read_broker_properties().get("enqueued-at", "")

    @property
    def key(self) -> str | None:
        return self.headers.get("partition-key")

    @property
    def headers(self) -> dict[str, str]:
        """Return the publisher's user properties; on a dead letter also its metadata."""
        return dict(self.user_properties)

    @property
    def user_properties(self) -> list[tuple[str, str]]:
        """Return `headers` in their order, with repeated names."""
        user = self.message.properties.user
        return user[len(BROKER_PROPERTIES) :] if self.token else user

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

    # Settlement

    async def ack(
        self, *, confirm: bool = False, publish: Iterable[tuple[str, object]] | None = None
    ) -> bool:
        """Settle the delivery as done.

        `publish` are messages for other queues, each a pair of queue and payload (or
        `OutgoingMessage`). Acknowledgement and messages are one step: after a crash, all or
        nothing of it happened. If a queue refuses its message, `PublishRefused` is raised and the
        delivery is not settled. Where the broker has the other queue in another cell, the messages
        are published first, and then the delivery is settled.
        """
        if publish is not None:
            return await self._settler.ack_and_publish(self, publish)
        return await self._settler.settle(self, "$ack", [], confirm)

    async def nack(
        self, delay: float | str | None = None, description: str = "", *, confirm: bool = False
    ) -> bool:
        """Report a failure: retry after the backoff, or after `delay` (seconds or "5m"; 0: now)."""
        extra = [] if delay is None else [("delay", duration_text("delay", delay))]
        return await self._settler.settle(
            self, "$nack", extra + _description_property(description), confirm
        )

    async def reject(
        self, reason: Reason | None = None, description: str = "", *, confirm: bool = False
    ) -> bool:
        """Give the message up: move it to the dead-letter queue.

        With `unacceptable` it moves to the invalid-message channel, if there is one. The default
        is `delivery-error`.
        """
        name = normalize_reason(reason)
        extra = [] if name == DELIVERY_ERROR else [("reason", name)]
        return await self._settler.settle(
            self, "$reject", extra + _description_property(description), confirm
        )

    async def release(self, *, confirm: bool = False) -> bool:
        """Return the message to the queue without counting a failure."""
        return await self._settler.settle(self, "$release", [], confirm)

    async def extend(self, *, confirm: bool = False) -> bool:
        """Restart the deadline of the lease."""
        return await self._settler.settle(self, "$extend", [], confirm)

    async def reply(self, payload: object = b"", **options: Unpack[ReplyOptions]) -> None:
        """Publish a reply to the message's response topic, with its correlation data.

        Return when the server has accepted the reply.
        """
        await self._settler.reply(self.message, payload, options)

    async def reply_error(self, error: BaseException | str) -> None:
        """Reply that the request failed: `client.request` raises `RequestFailed` with the text."""
        payload, headers = error_response(error)
        await self.reply(payload, headers=headers)

    def __repr__(self) -> str:
        return f"Delivery({self.id!r} of {self.queue!r}, {len(self.payload)} bytes)"


def _description_property(description: str) -> list[tuple[str, str]]:
    return [("description", sanitize_text(description))] if description else []


def sanitize_text(description: str) -> str:
    """Make a description fit into a packet, so that it cannot prevent the report of a failure."""
    text = description.replace("\0", " ").encode("utf-8", "replace")
    return text[:MAX_DESCRIPTION_BYTES].decode("utf-8", "ignore")
