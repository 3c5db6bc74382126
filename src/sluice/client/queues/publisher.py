"""Publishing to a queue, with an acknowledgement for each message.

Every message gets a `message-id`. So a message whose acknowledgement was lost with the connection
can be resent without being stored twice: the queue remembers ids during its dedup window (2 minutes
by default).
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Final, TypedDict, Unpack

from sluice.client.errors import ClientError, TooManyUnconfirmed, Unsupported
from sluice.client.net import Confirm, NowaitConfirm, wait_done
from sluice.client.options import UserProperties, user_pairs
from sluice.client.payload_codecs import duration_text, encode_payload
from sluice.client.protocol import PublishProperties, make_publish
from sluice.client.queues.ports import QueueClient
from sluice.wire.packets import V5, Publish

QUEUE_PREFIX: Final = "$queue/"
YIELD_EVERY: Final = 256  # messages of `send_many` between two yields to the event loop


class SendOptions(TypedDict, total=False):
    """Options of a queue message. Durations are seconds, or text such as "5m"."""

    id: str | None
    key: str | None
    priority: int | None
    delay: float | str | None
    deliver_at: datetime | str | None
    expiry_seconds: int | None
    headers: UserProperties | None
    content_type: str | None
    response_topic: str | None
    correlation_data: bytes | None


@dataclass(slots=True)
class OutgoingMessage:
    """An unsent message for `send_many`: a payload and the options of `send`."""

    payload: object
    id: str | None = None
    key: str | None = None
    priority: int | None = None
    delay: float | str | None = None
    deliver_at: datetime | str | None = None
    expiry_seconds: int | None = None
    headers: UserProperties | None = None
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data: bytes | None = None


_OPTIONS: Final = tuple(field.name for field in fields(OutgoingMessage))[1:]


class PartialFailure(ClientError):
    """Some messages of `send_many` were not stored.

    `refused` maps the index of each such message to its error; all other messages are stored.
    """

    def __init__(self, refused: dict[int, Exception], count: int) -> None:
        first = next(iter(refused.values()))
        super().__init__(
            f"{len(refused)} of {count} messages were not stored, the first because: {first}",
            "Correct the cause and send the messages in `refused` again",
        )
        self.refused = refused


class Publisher:
    """Publishes to one queue. Created by `client.publisher("tasks")`.

    `await publisher.send(payload)` returns when the message is on disk.
    """

    def __init__(self, client: QueueClient, queue: str) -> None:
        self.queue = queue.removeprefix(QUEUE_PREFIX)
        self.topic = QUEUE_PREFIX + self.queue
        self._client = client
        self._id_prefix = secrets.token_hex(8)
        self._count = 0

    async def send(self, payload: object, **options: Unpack[SendOptions]) -> str:
        """Publish a message, wait until it is stored, across reconnects, and return its id.

        Raise `PublishRefused` if the queue refuses it. Cancelling withdraws a message that was not
        sent yet.
        """
        packet, message_id = self._make_packet(OutgoingMessage(payload, **options))
        client, confirm = self._client, Confirm(packet)
        if not client.has_capacity:
            await client.wait_for_capacity()
        client.submit(confirm)
        try:
            await wait_done(confirm)
        except asyncio.CancelledError:
            client.withdraw(confirm)
            raise
        confirm.result()
        return message_id

    def send_nowait(self, payload: object, **options: Unpack[SendOptions]) -> Confirm:
        """Publish without waiting. Await the `Confirm`, or `client.drain()` for all of them."""
        packet, _ = self._make_packet(OutgoingMessage(payload, **options))
        confirm = NowaitConfirm(packet, self._client.unseen_failures)
        if not self._client.has_capacity:
            raise TooManyUnconfirmed(self._client.unconfirmed, self._client.unconfirmed_bytes)
        self._client.submit(confirm)
        return confirm

    async def send_many(self, payloads: Iterable[object]) -> list[str]:
        """Publish payloads, or `OutgoingMessage`s with options, as fast as the broker accepts them.

        Return their ids when all are stored. A refused message does not stop the others:
        `PartialFailure` is raised at the end.
        """
        client = self._client
        message_ids: list[str] = []
        refused: dict[int, Exception] = {}
        # Acknowledged messages are dropped at once, so that a million messages need little memory.
        in_flight: deque[Confirm] = deque()
        for one in payloads:
            packet, message_id = self._make_packet(
                one if isinstance(one, OutgoingMessage) else OutgoingMessage(one)
            )
            confirm = Confirm(packet)
            if not client.has_capacity:
                await client.wait_for_capacity()
            client.submit(confirm)
            message_ids.append(message_id)
            if len(message_ids) % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            in_flight.append(confirm)
            while in_flight and in_flight[0].done:
                _collect_refusal(
                    in_flight.popleft(), len(message_ids) - len(in_flight) - 1, refused
                )
        while in_flight:
            await wait_done(in_flight[0])
            _collect_refusal(in_flight.popleft(), len(message_ids) - len(in_flight) - 1, refused)
        if refused:
            raise PartialFailure(refused, len(message_ids))
        return message_ids

    def make_packet(self, payload: object) -> Publish:
        """Return the packet of a payload or an `OutgoingMessage`, without sending it."""
        given = payload if isinstance(payload, OutgoingMessage) else OutgoingMessage(payload)
        return self._make_packet(given)[0]

    def _make_packet(self, draft: OutgoingMessage) -> tuple[Publish, str]:
        payload, content_type = encode_payload(draft.payload)
        version = self._client.options.version
        if version != V5:
            unsupported = [name for name in _OPTIONS if getattr(draft, name) is not None]
            if unsupported:
                raise Unsupported(
                    f"MQTT 3.1.1 cannot carry {', '.join(unsupported)}",
                    "Connect with version=5, or leave them out",
                )
            return make_publish(version, self.topic, payload, 1, False, {}), ""
        message_id = draft.id
        if message_id is None:
            self._count += 1
            message_id = f"{self._id_prefix}.{self._count}"
        user = [("message-id", message_id)]
        if draft.key is not None:
            user.append(("partition-key", draft.key))
        if draft.priority is not None:
            if not 0 <= draft.priority <= 9:
                raise Unsupported(f"priority is {draft.priority}", "Use 0 to 9; higher goes first")
            user.append(("priority", str(draft.priority)))
        if draft.delay is not None:
            user.append(("delay", duration_text("delay", draft.delay)))
        if draft.deliver_at is not None:
            user.append(("deliver-at", _time_text(draft.deliver_at)))
        if draft.headers is not None:
            user += user_pairs(draft.headers)
        given: PublishProperties = {"user": user}
        if draft.content_type is not None or content_type is not None:
            given["content_type"] = draft.content_type or content_type
        if draft.expiry_seconds is not None:
            given["expiry_seconds"] = draft.expiry_seconds
        if draft.response_topic is not None:
            given["response_topic"] = draft.response_topic
        if draft.correlation_data is not None:
            given["correlation_data"] = draft.correlation_data
        return make_publish(version, self.topic, payload, 1, False, given), message_id


def _collect_refusal(confirm: Confirm, index: int, refused: dict[int, Exception]) -> None:
    if confirm.error is not None:
        refused[index] = confirm.error


def _time_text(value: datetime | str) -> str:
    if isinstance(value, str):
        return value
    if value.tzinfo is None:
        raise Unsupported(f"deliver_at {value} has no time zone", "Give it one: datetime.now(UTC)")
    return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
