"""Handlers of plain topics: what becomes of a message, on both servers and in both versions."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

import pytest

from sluice.client import (
    Client,
    ConsumerFactory,
    DeadLetter,
    Message,
    Reject,
    Retry,
    Subscription,
    UnacceptableLimitReached,
    Unsupported,
    read_dead_letter,
)
from sluice.client import sync as blocking
from sluice.client.topics.topic_consumer import TopicConsumer
from tests.client.servers import Server
from tests.support.broker_process import Broker


@dataclass
class Order:
    item: str
    count: int = 1


def create(server: Server, version: int, subscription: Subscription[Order]) -> TopicConsumer[Order]:
    return ConsumerFactory(server.host, server.port, version=version).create(subscription)


def orders(**more: object) -> Subscription[Order]:
    return Subscription[Order](
        "orders",
        dead_letter_topic="dead/orders",
        invalid_message_topic="invalid/orders",
        **more,  # type: ignore[arg-type]
    )


async def next_dead_letter(watcher: Client) -> tuple[str, DeadLetter]:
    async with asyncio.timeout(30):
        message = await anext(watcher.messages())
    return message.topic, read_dead_letter(message)


async def test_handler_gets_the_type_of_the_subscription_and_its_return_acknowledges(
    server: Server, version: int, watcher: Client
) -> None:
    handled: list[tuple[Order, Message]] = []

    async def handle(order: Order, message: Message) -> None:
        handled.append((order, message))
        consumer.stop()

    async with create(server, version, orders()) as consumer:
        await watcher.publish("orders", '{"item": "apple"}', qos=1)
        await consumer.run(handle)
    [(order, message)] = handled
    assert order == Order("apple") and message.topic == "orders"
    assert message.acknowledged


async def test_failed_message_is_handled_again_and_then_rejected(
    server: Server, version: int, watcher: Client, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[str] = []

    async def handle(order: Order, message: Message) -> None:
        attempts.append(order.item)
        if order.item == "pear":
            consumer.stop()
        elif len(attempts) == 2:
            raise Retry("the till is locked", delay=0.0)
        else:
            raise ValueError("no apples")

    async with create(server, version, orders(requeue_count=2)) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await watcher.publish("orders", '{"item": "apple"}', qos=1)
        topic, dead_letter = await next_dead_letter(watcher)
        await watcher.publish("orders", '{"item": "pear"}', qos=1)
        await running
    assert attempts == ["apple", "apple", "apple", "pear"]
    assert (topic, dead_letter.payload) == ("dead/orders", b'{"item": "apple"}')
    assert dead_letter.metadata["rejectionReason"] == "DeliveryError"
    assert dead_letter.metadata["rejectionMessage"] == "ValueError: no apples"
    assert dead_letter.metadata["originalMessageType"] == "Order"
    assert "attempt 3: ValueError: no apples; rejected" in caplog.text


async def test_run_ends_when_too_many_messages_are_unacceptable(
    server: Server, version: int, watcher: Client
) -> None:
    async def handle(order: Order, message: Message) -> None:
        raise Reject("too many", reason="Unacceptable")

    async with create(server, version, orders(unacceptable_limit=2)) as consumer:
        await watcher.publish("orders", '{"count": 1}', qos=1)
        await watcher.publish("orders", '{"item": "apple", "count": 1000}', qos=1)
        with pytest.raises(UnacceptableLimitReached, match="2 unacceptable messages"):
            await consumer.run(handle)
    topic, first = await next_dead_letter(watcher)
    assert (topic, first.reason) == ("invalid/orders", "unacceptable")
    assert first.metadata["rejectionMessage"] == "item: Field required"
    topic, second = await next_dead_letter(watcher)
    assert (topic, second.metadata["rejectionMessage"]) == ("invalid/orders", "too many")


async def test_slow_handler_fails_after_its_timeout(
    server: Server, version: int, watcher: Client
) -> None:
    async def handle(order: Order, message: Message) -> None:
        await asyncio.Event().wait()

    async with create(server, version, orders(timeout_seconds=0.05)) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await watcher.publish("orders", '{"item": "apple"}', qos=1)
        topic, dead_letter = await next_dead_letter(watcher)
        consumer.stop()
        await running
    assert (topic, dead_letter.metadata["rejectionMessage"]) == ("dead/orders", "TimeoutError")


async def test_performers_run_at_once(server: Server, version: int, watcher: Client) -> None:
    together = asyncio.Barrier(3)

    async def handle(order: Order, message: Message) -> None:
        await together.wait()
        consumer.stop()

    async with create(server, version, orders(performers=3, buffer_size=3)) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        for _ in range(3):
            await watcher.publish("orders", '{"item": "apple"}', qos=1)
        async with asyncio.timeout(30):
            await running


def test_blocking_handlers_run_in_threads(broker: Broker) -> None:
    handled: list[tuple[Order, str, str]] = []
    subscription = Subscription(
        "blocking/orders", message_type=Order, name="till", performers=2, buffer_size=4
    )

    def handle(order: Order, message: blocking.Message) -> None:
        handled.append((order, message.topic, threading.current_thread().name))
        consumer.stop()

    factory = blocking.ConsumerFactory.from_url(f"mqtt://{broker.mqtt}")
    with (
        blocking.Client(broker.mqtt.host, broker.mqtt.port) as client,
        factory.create(subscription) as consumer,
    ):
        client.publish("blocking/orders", '{"item": "apple"}', qos=1)
        consumer.run(handle)
    [(order, topic, thread)] = handled
    assert (order, topic) == (Order("apple"), "blocking/orders")
    assert thread.startswith("till")


async def test_receive_waits_as_long_as_the_subscription_says(server: Server, version: int) -> None:
    async with create(server, version, orders(receive_timeout_seconds=0.01)) as consumer:
        with pytest.raises(TimeoutError):
            await consumer.receive()


# Subscriptions


class Foreign:
    """A subscription class of another library, with dead letters and without invalid messages."""

    topic = "orders"
    dead_letter_topic = "dead/orders"
    requeue_count = 3
    buffer_size = 7


class Silent:
    topic = "orders"


def test_factory_reads_subscriptions_of_other_classes_by_protocol() -> None:
    factory = ConsumerFactory()
    consumer = factory.create(Foreign())
    assert consumer.rejections.dead_letters is not None
    assert consumer.rejections.dead_letters.topic == "dead/orders"
    assert consumer.rejections.invalid_messages is None
    assert consumer.subscription.requeue_count == 3
    assert consumer.client.options.max_buffered == 7
    assert factory.create(Silent()).rejections.dead_letters is None


def test_subscription_names_its_factory_and_has_defaults() -> None:
    subscription = Subscription("orders")
    assert subscription.factory_type is ConsumerFactory
    assert blocking.ConsumerFactory().create(subscription).subscription is subscription
    assert (subscription.name, subscription.message_type_name) == ("orders", None)
    assert subscription.make_decoder()(b"x") == b"x"
    assert Subscription("orders", message_type="an order").message_type_name == "an order"
    assert Subscription("n", decoder=int).make_decoder()(b"7") == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"performers": 0},
        {"requeue_count": -2},
        {"unacceptable_limit": -1},
        {"performers": 4, "buffer_size": 3},
    ],
)
def test_impossible_subscription_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(Unsupported, match="subscription 'orders' has"):
        Subscription("orders", **wrong)  # type: ignore[arg-type]


def test_unknown_reason_is_refused_and_both_spellings_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from sluice.client.outcomes import normalize_reason

    assert [
        normalize_reason(one)
        for one in (None, "delivery-error", "DeliveryError", "unacceptable", "Unacceptable")
    ] == ["delivery-error"] * 3 + ["unacceptable"] * 2
    with pytest.raises(Unsupported, match="reason is 'bored'"):
        normalize_reason("bored")
