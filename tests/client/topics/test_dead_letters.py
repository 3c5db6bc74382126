"""Dead letters that the client sends for plain topics.

Every route is tested on both servers, in both versions of MQTT, async and blocking.
"""

from __future__ import annotations

import json
import logging
import re

import pytest

from sluice.client import (
    Client,
    ConsumerFactory,
    DeadLetter,
    Message,
    Properties,
    Subscription,
    TopicConsumer,
    Unsupported,
    read_dead_letter,
)
from sluice.client import sync as blocking
from sluice.client.topics.dead_letter_envelope import add_to_payload
from sluice.client.topics.rejections import Producer, Rejections
from tests.client.servers import Server, free_port
from tests.support.broker_process import Broker

RECORDED = {"delivery-error": "DeliveryError", "unacceptable": "Unacceptable"}
TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
BOTH = Subscription(
    "orders", dead_letter_topic="dead/orders", invalid_message_topic="invalid/orders"
)
DEAD_ONLY = Subscription("orders", dead_letter_topic="dead/orders")
INVALID_ONLY = Subscription("orders", invalid_message_topic="invalid/orders")
NEITHER = Subscription("orders")


def factory(server: Server, version: int, **options: object) -> ConsumerFactory:
    return ConsumerFactory(server.host, server.port, version=version, **options)


async def take(consumer: TopicConsumer) -> Message:
    message = await consumer.receive(30)
    assert message is not None
    return message


async def next_dead_letter(watcher: Client) -> tuple[str, DeadLetter]:
    message = await anext(watcher.messages())
    return message.topic, read_dead_letter(message)


# ---- routes


@pytest.mark.parametrize(
    ("subscription", "reason", "topic"),
    [
        (BOTH, "delivery-error", "dead/orders"),
        (BOTH, "unacceptable", "invalid/orders"),
        (DEAD_ONLY, "delivery-error", "dead/orders"),
        (DEAD_ONLY, "unacceptable", "dead/orders"),
        (INVALID_ONLY, "unacceptable", "invalid/orders"),
    ],
    ids=[
        "both-error",
        "both-unacceptable",
        "dead-error",
        "dead-unacceptable",
        "invalid-unacceptable",
    ],
)
async def test_rejected_message_goes_to_the_topic_of_its_reason(
    server: Server,
    version: int,
    watcher: Client,
    subscription: Subscription,
    reason: str,
    topic: str,
) -> None:
    async with factory(server, version).create(subscription) as consumer:
        await watcher.publish("orders", "one apple", qos=1)
        message = await take(consumer)
        assert await consumer.reject(message, reason, "out of apples") is True  # type: ignore[arg-type]
        assert message.acknowledged
    found, dead_letter = await next_dead_letter(watcher)
    assert found == topic
    assert dead_letter.payload == b"one apple"
    assert TIMESTAMP.fullmatch(dead_letter.metadata.pop("rejectionTimestamp"))
    assert dead_letter.metadata == {
        "originalTopic": "orders",
        "rejectionReason": RECORDED[reason],
        "originalMessageType": "bytes",
        "rejectionMessage": "out of apples",
    }


@pytest.mark.parametrize(
    ("subscription", "reason"),
    [(NEITHER, "delivery-error"), (NEITHER, "unacceptable"), (INVALID_ONLY, "delivery-error")],
    ids=["neither-error", "neither-unacceptable", "invalid-error"],
)
async def test_without_a_dead_letter_topic_a_warning_is_logged_and_the_message_settled(
    server: Server,
    version: int,
    watcher: Client,
    caplog: pytest.LogCaptureFixture,
    subscription: Subscription,
    reason: str,
) -> None:
    async with factory(server, version).create(subscription) as consumer:
        await watcher.publish("orders", "one apple", qos=1)
        message = await take(consumer)
        with caplog.at_level(logging.WARNING, "sluice.client"):
            assert await consumer.reject(message, reason) is True  # type: ignore[arg-type]
        assert message.acknowledged
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"rejected ({reason}) and dropped: no topic for rejected messages" in record.getMessage()


async def test_dead_letter_that_cannot_be_published_is_logged_as_error(
    server: Server, version: int, watcher: Client, caplog: pytest.LogCaptureFixture
) -> None:
    impossible = Subscription("orders", dead_letter_topic="dead/+")
    async with factory(server, version).create(impossible) as consumer:
        await watcher.publish("orders", "one apple", qos=1)
        message = await take(consumer)
        with caplog.at_level(logging.WARNING, "sluice.client"):
            assert await consumer.reject(message) is True
        assert message.acknowledged
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "message lost: it could not be sent to dead/+" in record.getMessage()
    assert "'originalTopic': 'orders'" in record.getMessage()


async def test_reason_defaults_to_delivery_error_and_description_is_optional(
    server: Server, version: int, watcher: Client
) -> None:
    async with factory(server, version).create(BOTH) as consumer:
        await watcher.publish("orders", "x", qos=1)
        assert await consumer.reject(await take(consumer))
        await watcher.publish("orders", "y", qos=1)
        with pytest.raises(Unsupported, match="Use delivery-error or unacceptable"):
            await consumer.reject(await take(consumer), "bored")  # type: ignore[arg-type]
    topic, dead_letter = await next_dead_letter(watcher)
    assert (topic, dead_letter.reason, dead_letter.original_topic) == (
        "dead/orders",
        "delivery-error",
        "orders",
    )
    assert "rejectionMessage" not in dead_letter.metadata


async def test_producers_are_created_independently_with_the_first_rejection(
    server: Server, version: int, watcher: Client
) -> None:
    async with factory(server, version, client_id=f"lazy-{version}").create(BOTH) as consumer:
        dead, invalid = consumer.rejections.dead_letters, consumer.rejections.invalid_messages
        assert dead is not None and invalid is not None
        for number in range(2):
            await watcher.publish("orders", str(number), qos=1)
        await consumer.acknowledge(await take(consumer))
        assert not dead.is_connected and not invalid.is_connected
        await consumer.reject(await take(consumer), "unacceptable")
        assert invalid.is_connected and not dead.is_connected
        # The producer has its own client id and did not take over the session.
        assert consumer.client.is_connected


async def test_dead_letter_has_the_publishers_properties(server: Server, watcher: Client) -> None:
    if watcher.options.version != 5:
        return
    typed = Subscription("orders", dead_letter_topic="dead/orders", message_type="Order")
    async with factory(server, 5).create(typed) as consumer:
        await watcher.publish(
            "orders",
            "{}",
            qos=1,
            content_type="application/json",
            user={"shop": "7"},
            correlation_data=b"c",
        )
        await consumer.reject(await take(consumer))
    message = await anext(watcher.messages())
    reported = dict(message.properties.user)
    assert (reported["shop"], reported["originalMessageType"]) == ("7", "Order")
    assert message.properties.content_type == "application/json"
    assert message.properties.correlation_data == b"c"


def test_sync_client_does_the_same(broker: Broker) -> None:
    shop = blocking.Client(broker.mqtt.host, broker.mqtt.port)
    made = blocking.ConsumerFactory.from_url(f"mqtt://{broker.mqtt}", client_id="sync-shop")
    topics = Subscription(
        "sync/orders", dead_letter_topic="dead/sync", invalid_message_topic="invalid/sync"
    )
    with shop as client, made.create(topics) as consumer:
        client.subscribe(["dead/sync", "invalid/sync"], qos=1)
        for payload in ("good", "bad", "ugly"):
            client.publish("sync/orders", payload, qos=1)
        good, bad, ugly = (consumer.receive(30) for _ in range(3))
        assert good is not None and bad is not None and ugly is not None
        assert consumer.acknowledge(good)
        assert consumer.reject(bad, "delivery-error", "no") is True
        assert consumer.reject(ugly, "unacceptable") is True
        dead_letters = client.messages()
        first, second = next(dead_letters), next(dead_letters)
        assert (first.topic, first.payload) == ("dead/sync", b"bad")
        assert (second.topic, second.payload) == ("invalid/sync", b"ugly")


# ---- the envelope of 3.1.1


def make_message(payload: bytes, user: list[tuple[str, str]] | None = None) -> Message:
    from sluice.client.protocol.inbound import InboundMessages
    from sluice.client.protocol.write_buffer import WriteBuffer
    from sluice.wire.packets import build_publish

    properties = Properties()
    properties.user = user or []
    return Message(
        build_publish(b"t", payload, 0, False, properties),
        "t",
        InboundMessages(5, WriteBuffer(), 10, 0),
    )


METADATA = {"originalTopic": "t", "rejectionReason": "unacceptable", "originalMessageType": "bytes"}


@pytest.mark.parametrize(
    "payload", [b"text", "café".encode(), b"\xff\x00", b"[1, 2]", b'{"header": 1}', b""]
)
def test_envelope_round_trips_any_payload(payload: bytes) -> None:
    dead_letter = read_dead_letter(make_message(add_to_payload(payload, "t", METADATA)))
    assert dead_letter == DeadLetter(payload, METADATA)


def test_envelope_has_a_stable_format_and_extra_fields() -> None:
    order = {
        "header": {"id": 7, "messageType": "Order", "bag": {"shop": "7", "rejectionReason": "old"}}
    }
    sent = json.loads(
        add_to_payload(json.dumps({**order, "body": {"n": 1}}).encode(), "t", METADATA)
    )
    assert sent["body"] == {"n": 1} and sent["header"]["id"] == 7
    assert sent["header"]["bag"] == {"shop": "7", **METADATA}
    assert read_dead_letter(make_message(json.dumps(sent).encode())).payload == b'{"n": 1}'


def test_message_that_is_no_dead_letter_has_no_metadata() -> None:
    assert read_dead_letter(make_message(b"plain")) == DeadLetter(b"plain", {})
    assert read_dead_letter(make_message(b'{"header": {}, "body": 1}')).metadata == {}


async def test_producer_that_cannot_connect_is_logged_as_error_and_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made: list[Client] = []

    def make_client() -> Client:
        made.append(Client("127.0.0.1", free_port()))
        return made[-1]

    rejections = Rejections(5, Producer(make_client, "dead"), None, None)
    with caplog.at_level(logging.WARNING, "sluice.client"):
        assert await rejections.reject(make_message(b"one"), "delivery-error", "") is True
        assert await rejections.reject(make_message(b"two"), "unacceptable", "") is True
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]
    assert "cannot reach 127.0.0.1" in caplog.text
    assert len(made) == 2
    await rejections.close()
