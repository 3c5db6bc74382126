"""Requests and replies, in memory, and with paho-mqtt at either end of a real broker."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from sluice.client import (
    Client,
    ClientClosed,
    Delivery,
    Message,
    RequestFailed,
    RequestTimeout,
    Retry,
    SubscribeRefused,
    Unsupported,
    response_info,
)
from sluice.testing import VirtualBroker
from sluice.worker import Worker
from tests.support.broker_process import Broker, StartBroker


def make_responder() -> Worker:
    app = Worker(name="auth")

    @app.task("requests/auth")
    async def auth(user: str) -> dict[str, bool]:
        return {user: user == "ann"}

    return app


async def test_request_to_a_queue_is_answered_with_the_handlers_result(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.working(make_responder()), sluice_broker.client() as client:
        answers = await asyncio.gather(
            *(client.request("$queue/requests/auth", name) for name in ("ann", "eve", "ann"))
        )
    assert [one.payload for one in answers] == [b'{"ann":true}', b'{"eve":false}', b'{"ann":true}']


async def test_request_to_a_plain_topic_is_answered(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as one, sluice_broker.client() as other:
        await other.subscribe("time", qos=1)
        asking = asyncio.create_task(one.request("time", headers={"zone": "UTC"}))
        question = await anext(other.messages())
        assert ("zone", "UTC") in question.properties.user
        await question.reply("noon", headers={"by": "the clock"})
        answer = await asking
        assert answer.payload == b"noon" and ("by", "the clock") in answer.properties.user


def make_failing_responder() -> Worker:
    app = Worker(name="calc")

    @app.task("calc", reject=(KeyError,))
    async def calc(number: int, delivery: Delivery) -> int:
        match number:
            case 0:
                raise ZeroDivisionError("division by zero")
            case 1:
                raise KeyError("one")
            case 2 if delivery.attempt == 1:
                raise Retry("not yet", delay=0)
        return number

    return app


@pytest.mark.parametrize(
    ("payload", "error_type", "text"),
    [
        ("0", "ZeroDivisionError", "division by zero"),
        ("1", "KeyError", "'one'"),
        ("x", "UnreadablePayload", "Invalid JSON"),
    ],
    ids=["raised", "rejected", "unreadable"],
)
async def test_request_whose_handler_fails_is_answered_with_the_error_at_once(
    sluice_broker: VirtualBroker, payload: str, error_type: str, text: str
) -> None:
    async with (
        sluice_broker.working(make_failing_responder()),
        sluice_broker.client() as client,
    ):
        with pytest.raises(
            RequestFailed, match=f"'\\$queue/calc' answered with .*{text}"
        ) as caught:
            await client.request("$queue/calc", payload)
        assert caught.value.error_type == error_type and text in caught.value.text
        assert dict(caught.value.response.properties.user)["response-error-type"] == error_type
        await sluice_broker.settle()
    ledger = sluice_broker.ledger("calc", "calc")
    assert (ledger.acked, ledger.dead) == ((1, 0) if error_type == "ZeroDivisionError" else (0, 1))


async def test_handler_that_asks_for_a_retry_answers_the_request_later(
    sluice_broker: VirtualBroker,
) -> None:
    async with (
        sluice_broker.working(make_failing_responder()),
        sluice_broker.client() as client,
    ):
        assert (await client.request("$queue/calc", "2")).payload == b"2"


async def test_job_with_a_response_topic_of_its_own_is_retried_when_it_fails(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.working(make_failing_responder()), sluice_broker.client() as client:
        await client.subscribe("results", qos=1)
        await client.publisher("calc").send("0", response_topic="results")
        await client.publisher("calc").send("1", response_topic="results")
        answer = await anext(client.messages())
        assert dict(answer.properties.user)["response-error"] == "'one'"
        await sluice_broker.settle()
    assert sluice_broker.ledger("calc", "calc").retrying == 1


async def test_any_responder_can_answer_with_an_error(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client, sluice_broker.client() as other:
        await other.subscribe("time", qos=1)
        messages = other.messages()
        for answer in ("reply_error", "headers"):
            asking = asyncio.create_task(client.request("time"))
            question = await anext(messages)
            if answer == "headers":
                await question.reply("", headers={"response-error": "no clock"})
            else:
                await question.reply_error("no clock")
            with pytest.raises(RequestFailed, match="'time' answered with an error: no clock") as e:
                await asking
            assert e.value.error_type == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"response_topic": "r", "correlation_data": b"c"}, ("r", "c")),
        ({"user": {"response-topic": "r", "correlation-id": "c"}}, ("r", "c")),
        ({"response_topic": "r", "user": {"response-topic": "s"}}, ("r", None)),
        ({"correlation_data": b"\xff"}, (None, "\udcff")),
        ({}, (None, None)),
    ],
)
async def test_response_info_reads_properties_and_user_properties(
    sluice_broker: VirtualBroker, options: Any, expected: tuple[str | None, str | None]
) -> None:
    async with sluice_broker.client() as client:
        await client.subscribe("t", qos=1)
        await client.publish("t", qos=1, **options)
        assert response_info(await anext(client.messages())) == expected
        await client.publish("$queue/q", qos=1, **options)
        delivery = await anext(client.consumer("q"))
        info = response_info(delivery)
        assert (info.response_topic, info.correlation_id) == expected


async def test_request_without_responder_times_out(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        with pytest.raises(RequestTimeout, match="no answer from 'no-responder' within") as caught:
            await client.request("no-responder", timeout=0.01)
        assert isinstance(caught.value, TimeoutError)


async def test_cancelled_request_leaves_nothing_behind(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client, sluice_broker.client() as other:
        await other.subscribe("time", qos=1)
        asking = asyncio.create_task(client.request("time", correlation_id="mine"))
        question = await anext(other.messages())
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await question.reply("too late")
        again = asyncio.create_task(client.request("time", correlation_id="mine"))
        await (await anext(other.messages())).reply("in time")
        assert (await again).payload == b"in time"


async def test_correlation_id_is_used_by_one_request_at_a_time(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client() as client:
        first = asyncio.create_task(client.request("time", correlation_id="x"))
        await sluice_broker.settle()
        with pytest.raises(Unsupported, match="already waited for"):
            await client.request("time", correlation_id="x")
        first.cancel()


async def test_open_requests_end_with_the_client(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        asking = asyncio.create_task(client.request("time"))
        await sluice_broker.settle()
    with pytest.raises(ClientClosed):
        await asking


async def test_reply_arrives_after_the_connection_broke(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client, sluice_broker.client() as other:
        await other.subscribe("time", qos=1)
        asking = asyncio.create_task(client.request("time"))
        question = await anext(other.messages())
        sluice_broker.disconnect_clients()
        await other.wait_connected()
        await question.reply("noon")
        assert (await asking).payload == b"noon"


async def test_message_without_response_topic_cannot_be_answered(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.client() as client:
        await client.subscribe("news")
        await client.publish("news", "hello")
        with pytest.raises(Unsupported, match="asks for no answer"):
            await (await anext(client.messages())).reply("why")


async def test_request_expires_with_its_timeout(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        with pytest.raises(RequestTimeout):
            await client.request("$queue/requests/auth", "ann", timeout=0.01)
        assert sluice_broker.depth("requests/auth") == 1
        await sluice_broker.advance(seconds=2)
        assert sluice_broker.depth("requests/auth") == 0


@pytest.mark.parametrize("preserved", ["data", "id", "topic"])
async def test_reply_is_matched_by_whatever_the_responder_preserved(
    sluice_broker: VirtualBroker, preserved: str
) -> None:
    async with sluice_broker.client() as client, sluice_broker.client() as other:
        await other.subscribe("time", qos=1)
        asking = asyncio.create_task(client.request("time"))
        asked = (await anext(other.messages())).properties
        reported = dict(asked.user)
        assert (
            asked.response_topic == reported["response-topic"]
            and asked.correlation_data is not None
        )
        assert asked.response_topic.startswith(f"$queue/responses/{client.client_id}/")
        assert asked.correlation_data.decode() == reported["correlation-id"]
        await other.publish(
            reported["response-topic"],
            "noon",
            qos=1,
            correlation_data=asked.correlation_data if preserved == "data" else None,
            user={"correlation-id": reported["correlation-id"]} if preserved == "id" else None,
        )
        assert (await asking).payload == b"noon"


async def test_request_by_user_properties_alone_is_answered_with_both(
    sluice_broker: VirtualBroker,
) -> None:
    async with sluice_broker.working(make_responder()), sluice_broker.client() as client:
        await client.subscribe("answers/7", qos=1)
        asked = {"response-topic": "answers/7", "correlation-id": "seven"}
        await client.publish("$queue/requests/auth", "ann", qos=1, user=asked)
        answer: Message = await anext(client.messages())
        assert answer.properties.correlation_data == b"seven"
        assert dict(answer.properties.user)["correlation-id"] == "seven"


# ---- paho-mqtt at the other end


class Paho:
    """A paho client in its own thread, connected and subscribed before it is used."""

    def __init__(self, broker: Broker, client_id: str, topic: str) -> None:
        self.received: asyncio.Queue[Any] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._ready = threading.Event()
        self._topic = topic
        self.client = paho.Client(CallbackAPIVersion.VERSION2, client_id, protocol=paho.MQTTv5)
        self.client.on_connect = self._connected
        self.client.on_subscribe = self._subscribed
        self.client.on_message = self._received
        self.client.connect(broker.mqtt.host, broker.mqtt.port)
        self.client.loop_start()

    def _connected(self, *_: Any) -> None:
        self.client.subscribe(self._topic, 1)

    def _subscribed(self, *_: Any) -> None:
        self._ready.set()

    def _received(self, _: Any, __: Any, message: paho.MQTTMessage) -> None:
        self._loop.call_soon_threadsafe(self.received.put_nowait, message)

    async def __aenter__(self) -> Paho:
        assert await asyncio.to_thread(self._ready.wait, 30)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.disconnect()
        await asyncio.to_thread(self.client.loop_stop)
        self.client._reset_sockets()  # paho leaves them to the garbage collector


def sent_messages(**values: Any) -> PahoProperties:
    properties = PahoProperties(PacketTypes.PUBLISH)
    for name, value in values.items():
        setattr(properties, name, value)
    return properties


async def test_paho_responder_answers_a_request(broker: Broker) -> None:
    async with (
        Paho(broker, "paho-1", "$queue/paho/requests") as responder,
        Client(broker.mqtt.host, broker.mqtt.port) as client,
    ):
        asking = asyncio.create_task(client.request("$queue/paho/requests", "ping", timeout=30))
        question = await responder.received.get()
        asked = question.properties
        responder.client.publish(
            asked.ResponseTopic,
            b"pong",
            1,
            properties=sent_messages(CorrelationData=asked.CorrelationData),
        )
        settle = sent_messages(
            UserProperty=[("message-id", dict(asked.UserProperty)["message-id"])]
        )
        responder.client.publish("$queue/paho/requests/$ack", b"", 1, properties=settle)
        assert (await asking).payload == b"pong"


async def test_paho_requester_is_answered_by_a_worker(broker: Broker) -> None:
    app = make_responder()
    async with Client(broker.mqtt.host, broker.mqtt.port, client_id="auth-1") as client:
        running = await app.start(client)
        async with Paho(broker, "paho-2", "$queue/responses/paho-2") as requester:
            requester.client.publish(
                "$queue/requests/auth",
                b"ann",
                1,
                properties=sent_messages(
                    ResponseTopic="$queue/responses/paho-2", CorrelationData=b"\xff\x01"
                ),
            )
            answer = await requester.received.get()
            assert answer.payload == b'{"ann":true}'
            assert answer.properties.CorrelationData == b"\xff\x01"
        await running.stop(0)


RULES = """
[[rule]]
allow = ["connect"]

[[rule]]
allow = ["queue-publish"]
queues = ["requests/#", "responses/#"]

[[rule]]
allow = ["queue-consume", "queue-settle"]
clients = ["auth-*"]
queues = ["requests/#"]

[[rule]]
name = "replies are for their requester"
allow = ["queue-consume"]
queues = ["responses/%c/#"]
"""


async def test_access_rules_can_limit_each_client_to_its_own_replies(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    address = start_broker(config=f'[auth]\nrules = "{tmp_path}/rules.toml"\n').mqtt
    async with (
        Client(address.host, address.port, client_id="auth-1") as service,
        Client(address.host, address.port, client_id="web-1") as client,
    ):
        running = await make_responder().start(service)
        assert (await client.request("$queue/requests/auth", "ann")).payload == b'{"ann":true}'
        with pytest.raises(SubscribeRefused):
            await client.subscribe("$queue/responses/auth-1/#", qos=1)
        await running.stop(0)
