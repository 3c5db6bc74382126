"""Requests and replies: one subscription per client, one pending entry per open request.

Replies go to `$queue/responses/<client id>/<random>/<number>`. A Sluice broker stores them for a
while if our connection is down; other brokers treat it as an ordinary topic. The client id is there
for access rules (`responses/%c/#`), the random part so that no other client can guess the topic. A
reply is matched by its correlation data, by its `correlation-id`, or by its topic, depending on
what the responder has preserved.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from typing import Any, Final

from sluice.client.errors import ClientClosed, ClientError, Unsupported
from sluice.client.message import Message
from sluice.client.net import Confirm, wait_done
from sluice.client.options import UserProperties, user_pairs
from sluice.client.outcomes import RESPONSE_ERROR, RESPONSE_ERROR_TYPE
from sluice.client.payload_codecs import encode_payload
from sluice.client.protocol import PublishProperties, make_publish
from sluice.client.queues.ports import QueueClient
from sluice.client.queues.replies import REPLY_QUEUE_PREFIX, correlation_of
from sluice.wire.packets import V5

_LEVEL: Final = re.compile(r"[^/+#$\0]+")


class RequestTimeout(ClientError, TimeoutError):
    """No reply arrived in time. A responder may still be working on the request."""

    def __init__(self, topic: str, seconds: float) -> None:
        super().__init__(
            f"no answer from {topic!r} within {seconds:g} s",
            "Check that a responder runs, or give a longer timeout",
        )


class RequestFailed(ClientError):
    """The responder answered with an error: `text`, its class name in `error_type`, if known.

    `response` is the message, with the other headers of the responder.
    """

    def __init__(self, topic: str, text: str, error_type: str, response: Message) -> None:
        shown = f"{error_type}: {text}" if error_type and text != error_type else text
        super().__init__(f"{topic!r} answered with an error: {shown}")
        self.text = text
        self.error_type = error_type
        self.response = response


class Requester:
    """The open requests of one client."""

    def __init__(self, client: QueueClient) -> None:
        self._client = client
        self._reply_path = _make_reply_path(client.client_id)
        self._count = 0
        self._pending: dict[bytes, asyncio.Future[Message]] = {}
        self._by_topic: dict[str, bytes] = {}
        self._subscribing: asyncio.Task[None] | None = None

    async def request(
        self,
        topic: str,
        payload: object,
        timeout: float,
        correlation: str | bytes | None,
        headers: UserProperties | None,
    ) -> Message:
        client = self._client
        if client.options.version != V5:
            raise Unsupported("MQTT 3.1.1 cannot carry a response topic", "Connect with version=5")
        self._count += 1
        correlation_data = correlation.encode() if isinstance(correlation, str) else correlation
        if correlation_data is None:
            correlation_data = f"{self._reply_path}/{self._count}".encode()
        if correlation_data in self._pending:
            raise Unsupported(
                f"a request with correlation id {correlation!r} is already waited for",
                "Choose another one",
            )
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        response_topic = f"{REPLY_QUEUE_PREFIX}{self._reply_path}/{self._count}"
        self._pending[correlation_data] = answer
        self._by_topic[response_topic] = correlation_data
        try:
            async with asyncio.timeout(timeout):
                await self._ensure_subscribed()
                confirm = _make_request(
                    client, topic, payload, timeout, correlation_data, response_topic, headers
                )
                client.submit(confirm)
                try:
                    await wait_done(confirm)
                except asyncio.CancelledError:
                    client.withdraw(confirm)
                    raise
                confirm.result()
                response = await answer
        except TimeoutError as cause:
            raise RequestTimeout(topic, timeout) from cause
        finally:
            del self._pending[correlation_data]
            del self._by_topic[response_topic]
            _consume_exception(answer)
        answered = dict(response.properties.user)
        text = answered.get(RESPONSE_ERROR)
        if text is not None:
            error_type = answered.get(RESPONSE_ERROR_TYPE, "")
            raise RequestFailed(topic, text, error_type, response)
        return response

    async def _ensure_subscribed(self) -> None:
        """Subscribe before the first request.

        Concurrent requests wait for the same SUBACK, and a cancelled request does not cancel the
        subscription.
        """
        if self._subscribing is None or (
            self._subscribing.done()
            and (self._subscribing.cancelled() or self._subscribing.exception() is not None)
        ):
            self._client.dispatcher.remove(self)
            self._client.dispatcher.add(f"{REPLY_QUEUE_PREFIX}{self._reply_path}/+", self)
            self._subscribing = asyncio.create_task(self._subscribe(), name="sluice-responses")
            self._subscribing.add_done_callback(_consume_exception)
        await asyncio.shield(self._subscribing)

    async def _subscribe(self) -> None:
        await self._client.subscribe(f"{REPLY_QUEUE_PREFIX}{self._reply_path}/+", qos=1)

    # Called by the dispatcher

    def receive(self, message: Message) -> None:
        self._client.acknowledge(message)
        correlation = correlation_of(message.properties)
        if correlation is None or correlation not in self._pending:
            correlation = self._by_topic.get(message.topic, b"")
        answer = self._pending.get(correlation)
        if answer is not None and not answer.done():
            self._client.attach_replier(message)
            answer.set_result(message)

    def flush(self) -> None:
        """Do nothing: requests are sent at once."""

    async def leave(self) -> None:
        """Do nothing: there are no deliveries here. `end` fails the open requests."""

    def on_reconnected(self) -> None: ...

    def on_session_lost(self) -> None:
        """Do nothing: the client renews the subscription, and the broker stores replies."""

    def end(self, error: ClientError | None) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(
                    error or ClientClosed("the client is closed", "Make a new Client")
                )


def _make_request(
    client: QueueClient,
    topic: str,
    payload: object,
    timeout: float,
    correlation: bytes,
    response_topic: str,
    headers: UserProperties | None,
) -> Confirm:
    """Return the publish of a request. It expires when the request times out."""
    body, content_type = encode_payload(payload)
    user = [("response-topic", response_topic)]
    try:
        user.append(("correlation-id", correlation.decode()))
    except UnicodeDecodeError:
        pass
    given: PublishProperties = {
        "response_topic": response_topic,
        "correlation_data": correlation,
        "content_type": content_type,
        "expiry_seconds": max(1, math.ceil(timeout)),
        "user": [*user, *user_pairs(headers or ())],
    }
    return Confirm(make_publish(client.options.version, topic, body, 1, False, given))


def _make_reply_path(client_id: str) -> str:
    random_part = secrets.token_hex(8)
    return f"{client_id}/{random_part}" if _LEVEL.fullmatch(client_id) else random_part


def _consume_exception(future: asyncio.Future[Any]) -> None:
    """Mark an exception as retrieved, because the requester may have been cancelled meanwhile."""
    if future.done() and not future.cancelled():
        future.exception()
