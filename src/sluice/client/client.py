"""The client as the application uses it: publishing, subscribing, receiving.

`ClientProtocol` makes the protocol decisions without an event loop, and `Reconnector` keeps the
connection up. This class connects both to the application's tasks. It has no task of its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self, Unpack
from urllib.parse import unquote, urlsplit

from sluice.backoff import Backoff
from sluice.client.errors import (
    ClientClosed,
    ClientError,
    PublishRefused,
    QueueConfigRefused,
    TooManyUnconfirmed,
    Unsupported,
)
from sluice.client.message import Message, ReplyOptions
from sluice.client.net import (
    ConditionWaiters,
    Confirm,
    Messages,
    NowaitConfirm,
    ReceiveBuffer,
    Reconnector,
    TopicDispatcher,
    UnseenFailures,
    wait_done,
)
from sluice.client.options import Dial, Options, UserProperties, Will, user_pairs
from sluice.client.protocol import (
    ClientProtocol,
    Connected,
    Payload,
    PendingSubscription,
    PublishProperties,
    PublishResult,
    ServerInfo,
    State,
    make_publish,
    refuse_properties,
    requests_for,
)
from sluice.client.queues import QUEUE_PREFIX, Consumer, Publisher, Requester, make_reply
from sluice.wire.packets import V5, Subscribe, Unsubscribe
from sluice.wire.properties import Properties
from sluice.wire.reasons import TOPIC_NAME_INVALID


class Client:
    """A connection to an MQTT server that reconnects automatically.

    async with Client("localhost") as client:
        await client.subscribe("greetings/#", qos=1)
        await client.publish("greetings/world", "hello", qos=1)
        async for message in client.messages():
            print(message.topic, message.payload)
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1883,
        *,
        client_id: str = "",
        version: int = V5,
        clean_start: bool = True,
        session_expiry: int = 0,
        keep_alive: int = 60,
        username: str | None = None,
        password: bytes | str | None = None,
        will: Will | None = None,
        receive_maximum: int | None = None,
        topic_alias_maximum: int = 0,
        maximum_packet_size: int | None = None,
        user_properties: UserProperties = (),
        tls: ssl.SSLContext | bool = False,
        server_hostname: str | None = None,
        connect_timeout: float = 10.0,
        reconnect: bool = True,
        backoff: Backoff | None = None,
        manual_ack: bool = False,
        topic_aliases: bool = False,
        max_inflight: int | None = None,
        max_buffered: int = 1_000,
        max_unconfirmed: int = 65_536,
        max_unconfirmed_bytes: int = 64 * 1024 * 1024,
        on_connect: Callable[[Connected], None] | None = None,
        on_disconnect: Callable[[ClientError], None] | None = None,
        draw: Callable[[], float] = random.random,
        dial: Dial | None = None,
    ) -> None:
        self.options = Options(
            host=host,
            port=port,
            client_id=client_id,
            version=version,
            clean_start=clean_start,
            session_expiry=session_expiry,
            keep_alive=keep_alive,
            username=username,
            password=password,
            will=will,
            receive_maximum=receive_maximum,
            topic_alias_maximum=topic_alias_maximum,
            maximum_packet_size=maximum_packet_size,
            user_properties=user_properties,
            tls=tls,
            server_hostname=server_hostname,
            connect_timeout=connect_timeout,
            reconnect=reconnect,
            backoff=backoff or Backoff(),
            manual_ack=manual_ack,
            topic_aliases=topic_aliases,
            max_inflight=max_inflight,
            max_buffered=max_buffered,
            max_unconfirmed=max_unconfirmed,
            max_unconfirmed_bytes=max_unconfirmed_bytes,
            dial=dial,
        )
        self._protocol = ClientProtocol(self.options)
        self.unseen_failures = UnseenFailures()
        self._buffer: ReceiveBuffer[Message] = ReceiveBuffer(
            self.options.max_buffered, self._on_handed_over
        )
        self.dispatcher = TopicDispatcher()
        self._conditions = ConditionWaiters()
        self._requester: Requester | None = None
        self._reconnector = Reconnector(
            self.options,
            self._protocol,
            self._buffer,
            self.dispatcher,
            self._conditions.check,
            self._on_final_loss,
            on_connect,
            on_disconnect,
            draw,
        )
        self._error: ClientError | None = ClientClosed(
            "the client is not connected", "Use `async with`, or connect()"
        )

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Return a client for `mqtt://user:password@host:port` or `mqtts://...`.

        `options` are those of the constructor.
        """
        parts = urlsplit(url if "://" in url else f"mqtt://{url}")
        if parts.scheme not in ("mqtt", "mqtts", "tcp"):
            raise Unsupported(
                f"the scheme {parts.scheme}:// is not supported",
                "Use mqtt://host:port or mqtts://host:port",
            )
        secure = parts.scheme == "mqtts"
        given: dict[str, object] = {"port": parts.port or (8883 if secure else 1883), "tls": secure}
        if parts.username:
            given["username"] = unquote(parts.username)
        if parts.password:
            given["password"] = unquote(parts.password)
        host = parts.hostname or "127.0.0.1"
        return cls(host, **(given | options))  # type: ignore[arg-type]  # checked there

    # Connecting

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close(drain_seconds=5.0 if error is None else 0.0)

    async def connect(self) -> Connected:
        """Open the first connection. Make one attempt and raise its error."""
        event = await self._reconnector.connect()
        self._error = None
        return event

    async def close(
        self, *, drain_seconds: float = 5.0, reason: int = 0, session_expiry: int | None = None
    ) -> None:
        """Close the client. Safe to call twice.

        First release the deliveries that consumers hold and wait for unconfirmed publishes, up to
        `drain_seconds` for both. Then send DISCONNECT and end every task. With `reason` 0x04 the
        server publishes the will; `session_expiry` changes how long it stores the session.
        """
        try:
            if drain_seconds > 0 and self._error is None:
                try:
                    async with asyncio.timeout(drain_seconds):
                        for receiver in self.dispatcher.receivers():
                            await receiver.leave()
                        await self.drain()
                except (TimeoutError, ClientError):
                    pass  # the remaining requests fail below
        finally:
            if self._error is None:
                self._error = ClientClosed("the client is closed", "Make a new Client")
            self._end(self._error, None)
            await self._reconnector.close(reason, session_expiry)

    @property
    def is_connected(self) -> bool:
        return self._protocol.state is State.CONNECTED

    @property
    def client_id(self) -> str:
        """Return the configured client id, or the one that the server assigned."""
        return self._protocol.client_id

    @property
    def server(self) -> ServerInfo:
        """Return the properties of the server's CONNACK."""
        return self._protocol.server

    @property
    def session_present(self) -> bool:
        """Return whether the server had the session when the current connection was opened."""
        return self._reconnector.session_present

    @property
    def last_loss(self) -> ClientError | None:
        """Return why the last connection ended or why the last reconnect attempt failed."""
        return self._reconnector.last_loss

    @property
    def unconfirmed(self) -> int:
        """Return the number of publishes that are not sent or not acknowledged yet."""
        return self._protocol.outbound.unconfirmed

    @property
    def unconfirmed_bytes(self) -> int:
        return self._protocol.outbound.unconfirmed_bytes

    @property
    def dropped(self) -> int:
        """Return the number of QoS 0 messages that were dropped (see `receive_buffer`)."""
        return self._buffer.dropped

    async def wait_connected(self) -> None:
        """Wait for a connection."""
        await self._wait_until(lambda: self._protocol.state is State.CONNECTED)

    async def drain(self) -> None:
        """Wait until every publish and settlement so far is acknowledged.

        Raise `PublishesFailed` if a publish without waiting failed since the last call and its
        `Confirm` was not awaited.
        """
        for receiver in self.dispatcher.receivers():
            receiver.flush()
        await self._wait_until(lambda: self._protocol.outbound.unconfirmed == 0)
        self.unseen_failures.raise_all()

    async def wait_for_capacity(self) -> None:
        """Wait until `publish_nowait` accepts another message."""
        await self._wait_until(lambda: self.has_capacity)

    # Publishing

    async def publish(
        self,
        topic: str,
        payload: Payload = b"",
        qos: int = 0,
        retain: bool = False,
        **more: Unpack[PublishProperties],
    ) -> PublishResult:
        """Publish a message and wait for its acknowledgement.

        QoS 1 and 2 wait for the server's acknowledgement, across reconnects. QoS 0 waits until the
        message is in the write buffer of this turn, which is delayed while the transport is full.
        Raise `PublishRefused` if the server refuses the message. Cancelling withdraws a message
        that was not sent yet.
        """
        confirm = Confirm(make_publish(self.options.version, topic, payload, qos, retain, more))
        if not self.has_capacity:
            await self.wait_for_capacity()
        self.submit(confirm)
        if not confirm.done:
            try:
                await wait_done(confirm)
            except asyncio.CancelledError:
                self._protocol.outbound.withdraw(confirm)
                raise
        return confirm.result()

    def publish_nowait(
        self,
        topic: str,
        payload: Payload = b"",
        qos: int = 0,
        retain: bool = False,
        **more: Unpack[PublishProperties],
    ) -> Confirm:
        """Publish without waiting; await the `Confirm`, or `drain()` for all of them.

        Messages beyond the server's receive maximum are queued in order, up to `max_unconfirmed`;
        then `TooManyUnconfirmed` is raised. Await `wait_for_capacity()` between batches.
        """
        packet = make_publish(self.options.version, topic, payload, qos, retain, more)
        confirm = NowaitConfirm(packet, self.unseen_failures)
        if not self.has_capacity:
            raise TooManyUnconfirmed(self.unconfirmed, self.unconfirmed_bytes)
        self.submit(confirm)
        return confirm

    # Subscribing and receiving

    async def subscribe(
        self,
        topic_filter: str | Sequence[str],
        qos: int = 0,
        *,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
        identifier: int | None = None,
        user: UserProperties | None = None,
        properties: Properties | None = None,
        check: bool = True,
    ) -> list[int]:
        """Subscribe to filters and return the reason code of each (0, 1, 2: the granted QoS).

        A failure code raises `SubscribeRefused`, unless `check` is False. The client subscribes
        again when the server has lost the session.
        """
        filters = [topic_filter] if isinstance(topic_filter, str) else list(topic_filter)
        requests = requests_for(filters, qos, no_local, retain_as_published, retain_handling)
        special = no_local or retain_as_published or retain_handling != 0
        refuse_properties(
            self.options.version, special or identifier is not None or bool(user or properties)
        )
        merged = properties
        if identifier is not None or user is not None:
            merged = Properties()
            if properties is not None:
                merged.user = list(properties.user)
                merged.subscription_ids = list(properties.subscription_ids)
            if identifier is not None:
                merged.subscription_ids = [identifier]
            if user is not None:
                merged.user += user_pairs(user)
        return await self._send_subscription(
            PendingSubscription(Subscribe(0, requests, merged)), check
        )

    async def unsubscribe(
        self,
        topic_filter: str | Sequence[str],
        *,
        user: UserProperties | None = None,
        check: bool = True,
    ) -> list[int]:
        """Unsubscribe from filters and return the reason code of each.

        0x11 means that there was no subscription.
        """
        filters = [topic_filter] if isinstance(topic_filter, str) else list(topic_filter)
        if not filters:
            raise Unsupported("there is no topic filter", "Name at least one")
        properties = None
        if user is not None:
            refuse_properties(self.options.version, True)
            properties = Properties()
            properties.user = user_pairs(user)
        return await self._send_subscription(
            PendingSubscription(Unsubscribe(0, [one.encode() for one in filters], properties)),
            check,
        )

    def messages(self) -> Messages:
        """Return an async iterator over received messages.

        It ends when the client is closed, and raises when the connection is lost for good. A
        message is acknowledged when it is handed out, or by `message.ack()` with `manual_ack`.
        """
        return Messages(self._buffer)

    # Queues

    async def declare_queue(self, queue: str, /, **config: object) -> bool:
        """Create `queue` or update its configuration (`retry_policy={"max_retries": 3}`).

        Return True if the queue was created. Settings that are not named keep their values, or get
        those of the server's templates. Raise `QueueConfigRefused` if a setting is not valid.
        """
        name = queue.removeprefix(QUEUE_PREFIX)
        try:
            try:
                await self.publish(f"$admin/queue/{name}/config", json.dumps(config), qos=1)
                return False
            except PublishRefused as refusal:
                if refusal.reason != TOPIC_NAME_INVALID:
                    raise
            await self.publish("$admin/queue/create", json.dumps({"name": name, **config}), qos=1)
            return True
        except PublishRefused as refusal:
            raise QueueConfigRefused(
                refusal.reason, refusal.reason_string, refusal.properties, repr(name)
            ) from None

    def publisher(self, queue: str) -> Publisher:
        """Return a publisher for `queue` (`tasks` or `$queue/tasks`).

        Each message gets an id, so that none is stored twice.
        """
        return Publisher(self, queue)

    def consumer(
        self,
        queue: str,
        *,
        group: str | None = None,
        prefetch: int | None = None,
        start: str | None = None,
        priority: int | None = None,
        exclusive: bool = False,
    ) -> Consumer:
        """Return a consumer of `queue`, or of all queues that match a filter such as `tasks/#`.

        The default group is the client id up to its last `-`. `start` is the start position of a
        new group: earliest, latest, a sequence or a time.
        """
        return Consumer(self, queue, group, prefetch, start, priority, exclusive)

    async def request(
        self,
        topic: str,
        payload: object = b"",
        *,
        timeout: float = 30.0,
        correlation_id: str | bytes | None = None,
        headers: UserProperties | None = None,
    ) -> Message:
        """Publish a request to `topic` (`$queue/...` or any other) and return the reply.

        Raise `RequestFailed` if the responder answers with an error, and `RequestTimeout` if no
        reply arrives in time. Cancelling abandons the request.
        """
        if self._requester is None:
            self._requester = Requester(self)
        return await self._requester.request(topic, payload, timeout, correlation_id, headers)

    async def reply(
        self, message: Message, payload: object = b"", **options: Unpack[ReplyOptions]
    ) -> None:
        """Reply to a message: publish to its response topic, with its correlation data."""
        confirm = make_reply(self.options.version, message, payload, options)
        if not self.has_capacity:
            await self.wait_for_capacity()
        self.submit(confirm)
        await confirm

    # For the other parts of the library

    @property
    def has_capacity(self) -> bool:
        """Return whether `publish_nowait` accepts another message."""
        outbound = self._protocol.outbound
        options = self.options
        return (
            len(outbound.waiting) + len(outbound.inflight) + len(outbound.releasing)
            < options.max_unconfirmed
            and outbound.unconfirmed_bytes < options.max_unconfirmed_bytes
        )

    def submit(self, confirm: Confirm) -> None:
        """Send a prepared publish. The caller has checked `has_capacity`."""
        if self._error is not None:
            raise self._error
        self._protocol.outbound.publish(confirm)
        connection = self._reconnector.connection
        if connection is not None and not connection.is_reading and not confirm.done:
            # The answer follows data that we did not want to read.
            connection.resume_reading()

    def withdraw(self, confirm: Confirm) -> None:
        """Withdraw a publish that was not sent yet."""
        self._protocol.outbound.withdraw(confirm)

    def acknowledge(self, message: Message) -> None:
        """Acknowledge the packet of a message."""
        if message.qos:
            self._protocol.inbound.acknowledge(message, 0, None)

    def requeue(self, message: Message) -> None:
        """Put a message that is not acknowledged behind those that wait for the application."""
        self._buffer.put(message)

    def attach_replier(self, message: Message) -> None:
        """Allow replies to a message, before the application gets it."""
        message.replier = self

    def forget_subscription(self, topic_filter: str) -> None:
        """Do not renew a subscription after a lost session."""
        self._protocol.subscriptions.pop(topic_filter.encode(), None)

    # Internals

    async def _send_subscription(self, pending: PendingSubscription, check: bool) -> list[int]:
        if self._error is not None:
            raise self._error
        self._protocol.send_subscription(pending)
        if self._reconnector.connection is not None:
            self._reconnector.connection.resume_reading()
        try:
            await wait_done(pending)
        except asyncio.CancelledError:
            self._protocol.abandon(pending)
            raise
        if pending.error is not None:
            raise pending.error
        refusal = pending.refusal()
        if check and refusal is not None:
            raise refusal
        return pending.reasons()

    def _on_handed_over(self, message: Message) -> None:
        """Acknowledge a message that the application has received."""
        message.replier = self
        if not self.options.manual_ack and message.qos:
            self._protocol.inbound.acknowledge(message, 0, None)
        connection = self._reconnector.connection
        if (
            connection is not None
            and not connection.is_reading
            and len(self._buffer) <= self._buffer.limit // 2
        ):
            connection.resume_reading()

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._error is not None:
                raise self._error
            await self._conditions.wait(condition)

    def _on_final_loss(self, error: ClientError) -> None:
        """End the client, because the connection is lost for good."""
        self._end(error, error)

    def _end(self, error: ClientError, final_error: ClientError | None) -> None:
        """Fail everything that waits with `error`, and end the receivers with `final_error`."""
        self._error = error
        self._protocol.fail(error)
        self._buffer.end(final_error)
        for receiver in self.dispatcher.receivers():
            receiver.end(final_error)
        self._conditions.wake_all()
