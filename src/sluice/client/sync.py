"""The client for programs without an event loop: the same code, on a loop in a thread.

    with Client("localhost") as client:
        client.publisher("tasks").send("resize cat.png")
        for task in client.consumer("tasks", group="workers"):
            print(task.text)
            task.ack()

No method is written twice. `wrap_coroutine(AsyncClass.method)` is a blocking form of that method:
its parameters, result and documentation are those of the original, also for type checkers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from sluice.client.client import Client as _Client
from sluice.client.errors import ClientError
from sluice.client.message import Message as _Message
from sluice.client.message import ReplyOptions
from sluice.client.net import Messages, Portal
from sluice.client.options import Options
from sluice.client.outcomes import Reason
from sluice.client.protocol import ServerInfo
from sluice.client.queues import Consumer as _Consumer
from sluice.client.queues import Delivery as _Delivery
from sluice.client.queues import Publisher as _Publisher
from sluice.client.topics import ConsumerFactory as _ConsumerFactory
from sluice.client.topics import Rejections, ReplayResult, Subscription, TopicSubscription
from sluice.client.topics import TopicConsumer as _TopicConsumer
from sluice.client.topics import replay_dead_letters as _replay_dead_letters
from sluice.wire.properties import Properties

A = TypeVar("A")  # the wrapped async class
B = TypeVar("B")
R = TypeVar("R")
T = TypeVar("T")
P = ParamSpec("P")


class SyncWrapper(Generic[A]):
    """An object of the async library and the portal to its event loop."""

    def __init__(self, inner: A, portal: Portal) -> None:
        self.inner = inner
        self._portal = portal

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{self.inner!r}"


def wrap_coroutine(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[SyncWrapper[A], P], R]:
    """Return a blocking method that runs a coroutine method and returns its result."""

    @functools.wraps(method)
    def call(self: SyncWrapper[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._portal.wait(method(self.inner, *args, **kwargs))

    return call


def wrap_function(
    method: Callable[Concatenate[A, P], R],
) -> Callable[Concatenate[SyncWrapper[A], P], R]:
    """Return a method that calls a plain method in the event loop."""

    @functools.wraps(method)
    def call(self: SyncWrapper[A], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._portal.run(method, self.inner, *args, **kwargs)

    return call


F = TypeVar("F", bound=SyncWrapper[Any])


def wrap_factory(
    method: Callable[Concatenate[A, P], B], facade: Callable[[B, Portal], F]
) -> Callable[Concatenate[SyncWrapper[A], P], F]:
    """Return a method that wraps the result of a plain method in `facade`."""

    @functools.wraps(method)
    def call(self: SyncWrapper[A], /, *args: P.args, **kwargs: P.kwargs) -> F:
        return facade(self._portal.run(method, self.inner, *args, **kwargs), self._portal)

    return call


def wrap_coroutine_factory(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, B]], facade: Callable[[B, Portal], F]
) -> Callable[Concatenate[SyncWrapper[A], P], F]:
    """Return a method that wraps the result of a coroutine method in `facade`."""

    @functools.wraps(method)
    def call(self: SyncWrapper[A], /, *args: P.args, **kwargs: P.kwargs) -> F:
        return facade(self._portal.wait(method(self.inner, *args, **kwargs)), self._portal)

    return call


class ForwardedAttribute(Generic[R]):
    """An attribute of the wrapped object, under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: SyncWrapper[Any], owner: type) -> R:
        value: R = getattr(wrapper.inner, self._name)
        return value


class Message(SyncWrapper[_Message]):
    topic = ForwardedAttribute[str]()
    payload = ForwardedAttribute[bytes]()
    qos = ForwardedAttribute[int]()
    retain = ForwardedAttribute[bool]()
    dup = ForwardedAttribute[bool]()
    packet_id = ForwardedAttribute[int]()
    acknowledged = ForwardedAttribute[bool]()
    subscription_ids = ForwardedAttribute[list[int]]()
    properties = ForwardedAttribute[Properties]()

    ack = wrap_coroutine(_Message.ack)
    reply = wrap_coroutine(_Message.reply)
    reply_error = wrap_coroutine(_Message.reply_error)


class Delivery(SyncWrapper[_Delivery]):
    id = ForwardedAttribute[str]()
    token = ForwardedAttribute[str]()
    topic = ForwardedAttribute[str]()
    payload = ForwardedAttribute[bytes]()
    settled = ForwardedAttribute[bool]()
    queue = ForwardedAttribute[str]()
    group = ForwardedAttribute[str]()
    partition = ForwardedAttribute[int]()
    sequence = ForwardedAttribute[int]()
    attempt = ForwardedAttribute[int]()
    enqueued_at = ForwardedAttribute[str]()
    key = ForwardedAttribute[str | None]()
    headers = ForwardedAttribute[dict[str, str]]()
    user_properties = ForwardedAttribute[list[tuple[str, str]]]()
    properties = ForwardedAttribute[Properties]()
    text = ForwardedAttribute[str]()
    json = wrap_function(_Delivery.json)

    ack = wrap_coroutine(_Delivery.ack)
    nack = wrap_coroutine(_Delivery.nack)
    reject = wrap_coroutine(_Delivery.reject)
    release = wrap_coroutine(_Delivery.release)
    extend = wrap_coroutine(_Delivery.extend)
    reply = wrap_coroutine(_Delivery.reply)
    reply_error = wrap_coroutine(_Delivery.reply_error)


class Publisher(SyncWrapper[_Publisher]):
    queue = ForwardedAttribute[str]()
    topic = ForwardedAttribute[str]()

    send = wrap_coroutine(_Publisher.send)
    send_many = wrap_coroutine(_Publisher.send_many)
    send_nowait = wrap_function(_Publisher.send_nowait)


class Consumer(SyncWrapper[_Consumer]):
    queue = ForwardedAttribute[str]()
    group = ForwardedAttribute[str | None]()
    buffered = ForwardedAttribute[int]()

    open = wrap_coroutine(_Consumer.open)
    close = wrap_coroutine(_Consumer.close)

    def take(self, timeout: float | None = None) -> Delivery | None:
        """Return the next delivery, or None after the end.

        Raise TimeoutError if none arrives in time.
        """
        delivery = self._portal.wait(self.inner.take(timeout))
        return None if delivery is None else Delivery(delivery, self._portal)

    def __iter__(self) -> Iterator[Delivery]:
        while (delivery := self.take()) is not None:
            yield delivery

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


class Client(SyncWrapper[_Client]):
    """The blocking form of `sluice.client.Client`, with the same options."""

    options = ForwardedAttribute[Options]()
    is_connected = ForwardedAttribute[bool]()
    client_id = ForwardedAttribute[str]()
    server = ForwardedAttribute[ServerInfo]()
    session_present = ForwardedAttribute[bool]()
    last_loss = ForwardedAttribute[ClientError | None]()
    unconfirmed = ForwardedAttribute[int]()
    unconfirmed_bytes = ForwardedAttribute[int]()
    has_capacity = ForwardedAttribute[bool]()
    dropped = ForwardedAttribute[int]()

    def __init__(self, host: str = "127.0.0.1", port: int = 1883, **options: Any) -> None:
        super().__init__(_Client(host, port, **options), Portal())

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        return cls.wrap(_Client.from_url(url, **options))

    @classmethod
    def wrap(cls, client: _Client) -> Self:
        """Return the blocking form of a client that is not connected yet."""
        made = cls()
        made.inner = client
        return made

    connect = wrap_coroutine(_Client.connect)
    wait_connected = wrap_coroutine(_Client.wait_connected)
    drain = wrap_coroutine(_Client.drain)
    wait_for_capacity = wrap_coroutine(_Client.wait_for_capacity)
    publish = wrap_coroutine(_Client.publish)
    publish_nowait = wrap_function(_Client.publish_nowait)
    subscribe = wrap_coroutine(_Client.subscribe)
    unsubscribe = wrap_coroutine(_Client.unsubscribe)
    declare_queue = wrap_coroutine(_Client.declare_queue)
    publisher = wrap_factory(_Client.publisher, Publisher)
    consumer = wrap_factory(_Client.consumer, Consumer)
    request = wrap_coroutine_factory(_Client.request, Message)

    def reply(
        self, message: Message, payload: object = b"", **options: Unpack[ReplyOptions]
    ) -> None:
        """Reply to a message: publish to its response topic, with its correlation data."""
        self._portal.wait(self.inner.reply(message.inner, payload, **options))

    replay_dead_letters = wrap_coroutine(_replay_dead_letters)

    def messages(self) -> Iterator[Message]:
        """Yield received messages until the client is closed."""
        messages = self.inner.messages()
        while True:
            try:
                yield Message(self._portal.wait(_next_message(messages)), self._portal)
            except StopAsyncIteration:
                return

    def close(
        self, *, drain_seconds: float = 5.0, reason: int = 0, session_expiry: int | None = None
    ) -> None:
        """Close the client and end the thread."""
        try:
            self._portal.wait(
                self.inner.close(
                    drain_seconds=drain_seconds, reason=reason, session_expiry=session_expiry
                )
            )
        finally:
            self._portal.close()

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self._portal.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(drain_seconds=5.0 if error is None else 0.0)


class TopicConsumer(SyncWrapper[_TopicConsumer[T]], Generic[T]):
    subscription = ForwardedAttribute[Subscription[Any]]()
    rejections = ForwardedAttribute[Rejections]()

    def open(self) -> None:
        self._portal.wait(self.inner.open())

    def close(self) -> None:
        try:
            self._portal.wait(self.inner.close())
        finally:
            self._portal.close()

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, or None after the end.

        Raise TimeoutError if none arrives in time.
        """
        message = self._portal.wait(self.inner.receive(timeout))
        return None if message is None else Message(message, self._portal)

    def acknowledge(self, message: Message) -> bool:
        return self._portal.wait(self.inner.acknowledge(message.inner))

    def reject(self, message: Message, reason: Reason | None = None, description: str = "") -> bool:
        """Reject a message, as the async form does; always return True."""
        return self._portal.wait(self.inner.reject(message.inner, reason, description))

    def decode(self, message: Message) -> T:
        """Return the payload as the subscription's type. Raise `UnreadablePayload`."""
        return self.inner.decode(message.inner)

    def run(self, handler: Callable[[T, Message], None]) -> None:
        """Call `handler(value, message)` in `performers` threads until `stop`."""

        def call(value: T, message: _Message) -> None:
            handler(value, Message(message, self._portal))

        self._portal.wait(self.inner.run(call))

    def stop(self) -> None:
        """End `run` when the handlers that run now have ended. Handlers may call it."""
        self._portal.run(self.inner.stop)

    def __iter__(self) -> Iterator[Message]:
        while (message := self.receive()) is not None:
            yield message

    def __enter__(self) -> Self:
        try:
            self.open()
        except BaseException:
            self._portal.close()
            raise
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


class ConsumerFactory:
    """The blocking form of `sluice.client.ConsumerFactory`; each consumer has its own thread."""

    def __init__(self, host: str = "127.0.0.1", port: int = 1883, **options: Any) -> None:
        self._factory = _ConsumerFactory(host, port, **options)

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        made = cls()
        made._factory = _ConsumerFactory.from_url(url, **options)
        return made

    @overload
    def create(self, subscription: Subscription[T]) -> TopicConsumer[T]: ...

    @overload
    def create(self, subscription: TopicSubscription) -> TopicConsumer[Any]: ...

    def create(self, subscription: TopicSubscription) -> TopicConsumer[Any]:
        """Return a consumer of a `Subscription`, or of an object that is described like one."""
        return TopicConsumer(self._factory.create(subscription), Portal())


def replay_dead_letters(
    client: Client,
    topic: str,
    *,
    group: str = "replay",
    idle_seconds: float = 2.0,
    limit: int | None = None,
) -> ReplayResult:
    """Publish dead letters to their original topic, as the async form does."""
    return client.replay_dead_letters(topic, group=group, idle_seconds=idle_seconds, limit=limit)


async def _next_message(messages: Messages) -> _Message:
    return await anext(messages)


__all__ = [
    "Client",
    "Consumer",
    "ConsumerFactory",
    "Delivery",
    "Message",
    "Publisher",
    "TopicConsumer",
    "replay_dead_letters",
]
