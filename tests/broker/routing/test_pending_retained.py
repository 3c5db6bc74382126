"""Pending retained messages of a persistent session survive the end of the broker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sluice.queues.log.broker_state import SESSIONS_PID
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Publish, Suback, Subscribe, SubscriptionRequest
from tests.adversity.crashes.queue_crash import client_of
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client
from tests.support.broker_process import StartBroker
from tests.support.redis_process import RedisProcess

COUNT = 300
TOPICS = {b"a/%d" % nth for nth in range(COUNT)}


@pytest.fixture
def harness() -> BrokerHarness:
    """A broker that queues at most 40 messages per session: retained lookups pause at 20."""
    harness = BrokerHarness(max_queued_messages=40)
    writer = harness.connect("writer")
    for nth in range(COUNT):
        writer.publish(f"a/{nth}", b"v", 1, retain=True)
    writer.disconnect()
    return harness


def connect(harness: BrokerHarness) -> Client:
    return harness.connect_persistent("reader", receive_maximum=10)


def read_all(client: Client) -> list[Publish]:
    """Acknowledge messages until no more arrive."""
    got: list[Publish] = []
    while messages := [packet for packet in client.take() if isinstance(packet, Publish)]:
        got += messages
        for message in messages:
            client.ack(message)
    return got


def topics(messages: list[Publish]) -> set[bytes]:
    return {message.topic for message in messages}


def records(harness: BrokerHarness) -> int:
    """Return how many records of sessions, retained and pending messages the broker has written."""
    return int(harness.engine.broker_state._next_seq)


def slow_clock(harness: BrokerHarness) -> None:
    """Let each read of the clock advance it by 4 ms, so that lookups take several turns."""
    harness.loop.tick = 0.004


@pytest.mark.parametrize("qos", [1, 2])
def test_pending_retained_messages_arrive_after_a_restart(
    harness: BrokerHarness, end: str, qos: int
) -> None:
    reader = connect(harness)
    reader.subscribe("a/+", qos=qos)
    getattr(harness, end)()
    reader = connect(harness)
    assert reader.connack.session_present
    assert topics(read_all(reader)) == TOPICS
    assert harness.broker.counters.publishes_dropped == 0


def test_filters_waiting_behind_others_are_stored_too(harness: BrokerHarness, end: str) -> None:
    reader = connect(harness)
    reader.subscribe("a/+", qos=1)
    assert reader.subscribe("a/207", "+/208", qos=1) == [1, 1]
    assert reader.unsubscribe("a/+") == [0]
    getattr(harness, end)()
    got = topics(read_all(connect(harness)))
    assert {b"a/207", b"a/208"} <= got
    assert got != TOPICS, "a/+ was unsubscribed"


def test_suback_is_sent_after_the_pending_filter_is_stored(harness: BrokerHarness) -> None:
    reader = connect(harness)
    slow_clock(harness)
    subscribe = Subscribe(9, [SubscriptionRequest(b"a/+", 1)])
    reader.connection.data_received(encode(subscribe, V5))
    while not any(isinstance(packet, Suback) for packet in reader.take()):
        harness.loop.step()
    harness.loop.tick = 0.0
    harness.kill()
    assert topics(read_all(connect(harness))) == TOPICS


@pytest.mark.parametrize("end", ["kill", "restart"])  # a power cut may lose acknowledgements
def test_retained_messages_are_not_sent_again_once_all_were_queued(
    harness: BrokerHarness, end: str
) -> None:
    reader = connect(harness)
    reader.subscribe("a/+", qos=1)
    assert len(read_all(reader)) == COUNT
    getattr(harness, end)()
    reader = connect(harness)
    assert read_all(reader) == []
    session = reader.connection.session
    assert session is not None and not session.retained_lookup.is_running()


def test_lookup_that_ends_within_its_subscribe_writes_one_session_record(
    harness: BrokerHarness,
) -> None:
    reader = connect(harness)
    before = records(harness)
    assert reader.subscribe("none/+", "a/+", qos=0) == [0, 0]
    assert records(harness) == before + 1


def test_value_published_after_the_restart_is_not_followed_by_the_older_one(
    harness: BrokerHarness, end: str
) -> None:
    reader = connect(harness)
    reader.subscribe("a/+", qos=1)
    getattr(harness, end)()
    writer = harness.connect("writer")
    for nth in range(0, COUNT, 50):
        writer.publish_fully(f"a/{nth}", b"new", 1, retain=True)
    last = {message.topic: message.payload for message in read_all(connect(harness))}
    assert set(last) == TOPICS
    assert all(last[b"a/%d" % nth] == b"new" for nth in range(0, COUNT, 50))


def test_session_record_of_the_previous_version_is_read(harness: BrokerHarness, end: str) -> None:
    record = {
        "sid": 77,
        "version": 5,
        "expiry": 3600,
        "user": None,
        "subscriptions": [["a/+", 1, False, False, 0, 0]],
        "queues": [],
    }
    harness.engine.broker_state.put_entry(
        SESSIONS_PID, b"reader", json.dumps(record).encode(), int(harness.loop.now * 1000)
    )
    harness.broker.turn.schedule_flush()
    harness.loop.settle()
    getattr(harness, end)()
    reader = connect(harness)
    assert reader.connack.session_present and read_all(reader) == []
    harness.connect("writer").publish_fully("a/1", b"live", 1)
    assert [message.payload for message in read_all(reader)] == [b"live"]


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("store", ["embedded", "redis"])
async def test_pending_retained_messages_survive_on_disk_and_in_redis(
    start_broker: StartBroker, request: pytest.FixtureRequest, tmp_path: Path, store: str, how: str
) -> None:
    config = "[mqtt]\nmax_queued_messages = 40\n"
    flags = ["--data", str(tmp_path / "data")]
    if store == "redis":
        redis: RedisProcess = request.getfixturevalue("redis_server")
        config += f'[redis]\nprefix = "{tmp_path.name}"\nlease = "2s"\nrenew = "100ms"\n'
        flags += ["--store", redis.url]
    broker = start_broker(config, flags)
    async with client_of(broker, "writer") as writer:
        publishes = [writer.publish(f"a/{nth}", b"v", qos=1, retain=True) for nth in range(COUNT)]
        await asyncio.gather(*publishes)
    options = {
        "clean_start": False,
        "session_expiry": 3600,
        "receive_maximum": 10,
        "manual_ack": True,
    }
    async with client_of(broker, "reader", **options) as reader:
        await reader.subscribe("a/+", qos=1)
        getattr(broker, how)()
    broker = start_broker(config, flags)
    got: set[str] = set()
    async with asyncio.timeout(20), client_of(broker, "reader", **options) as reader:
        async for message in reader.messages():
            got.add(message.topic)
            await message.ack()
            if len(got) == COUNT:
                break
    assert got == {topic.decode() for topic in TOPICS}
