"""The admin service in the plain cases, seen from the service and from the clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from sluice.admin.model import DeadLetterFilter, OutgoingMessage, QueueDetail
from sluice.errors import (
    GroupExists,
    InUse,
    InvalidPayload,
    InvalidQueueConfig,
    InvalidQueueName,
    QueueError,
    QueueExists,
    QueueFull,
    UnknownGroup,
    UnknownMessage,
    UnknownQueue,
)
from tests.admin.conftest import MakeHarness
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, put, settle, take
from tests.broker.peers import Client


async def test_queue_is_created_listed_updated_and_deleted(harness: BrokerHarness) -> None:
    admin = harness.admin
    detail = await harness.call(admin.create_queue({"name": "tasks", "partitions": 3}))
    assert (detail.stats.name, detail.stats.partitions, len(detail.partitions)) == ("tasks", 3, 3)
    assert detail.config["limits"]["message_ttl"] == "7d"  # type: ignore[index]
    with pytest.raises(QueueExists):
        await harness.call(admin.create_queue({"name": "tasks"}))
    after = await harness.call(admin.configure("$queue/tasks", {"performance": {"prefetch": 7}}))
    assert after["performance"]["prefetch"] == 7 and after["partitions"] == 3  # type: ignore[index]
    assert await harness.call(admin.config("tasks")) == after
    with pytest.raises(InvalidQueueConfig, match="number can only grow"):
        await harness.call(admin.configure("tasks", {"partitions": 1}))
    await harness.call(admin.create_queue({"name": "other"}))
    assert [view.name for view in await harness.call(admin.list_queues())] == ["other", "tasks"]
    await harness.call(admin.delete_queue("tasks"))
    assert [view.name for view in await harness.call(admin.list_queues())] == ["other"]
    for refused in (admin.stats("tasks"), admin.delete_queue("tasks"), admin.config("tasks")):
        with pytest.raises(UnknownQueue):
            await harness.call(refused)


async def test_queue_deleted_during_its_creation_was_created(harness: BrokerHarness) -> None:
    async def both() -> QueueDetail:
        creating = asyncio.ensure_future(harness.admin.create_queue({"name": "brief"}))
        await asyncio.sleep(0)
        await harness.admin.delete_queue("brief")
        return await creating

    assert (await harness.call(both())).stats.name == "brief"
    assert [one.name for one in await harness.call(harness.admin.list_queues())] == []


@pytest.mark.parametrize("name", ["responses/x", "$queue/responses/x", "responses"])
async def test_queue_cannot_be_created_among_reply_queues(
    harness: BrokerHarness, name: str
) -> None:
    with pytest.raises(QueueError, match=r"responses/? is reserved"):
        await harness.call(harness.admin.create_queue({"name": name}))
    reason, reported = put(
        harness.connect("c"), "$admin/queue/create", b'{"name": "%s"}' % name.encode()
    )
    assert reason == 0x99 and "is reserved" in reported
    assert not harness.engine.queues


async def test_list_is_filtered_by_prefix_and_paginated(harness: BrokerHarness) -> None:
    for name in ("b/2", "a/1", "b/1", "c", "b"):
        await harness.call(harness.admin.create_queue({"name": name}))

    async def names(**options: Any) -> list[str]:
        return [one.name for one in await harness.call(harness.admin.list_queues(**options))]

    assert await names() == ["a/1", "b", "b/1", "b/2", "c"]
    assert await names(prefix="b/") == ["b/1", "b/2"]
    assert await names(prefix="$queue/b") == ["b", "b/1", "b/2"]
    assert await names(after="b", limit=2) == ["b/1", "b/2"]
    assert await names(prefix="b", after="b/1") == ["b/2"]
    assert await names(prefix="x") == []


async def test_change_is_answered_after_commit_and_survives_restart(harness: BrokerHarness) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks", "partitions": 2}))
    await harness.call(harness.admin.create_group("tasks", "late", "latest"))
    await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"kept", key="k")))
    harness.restart()
    (message,) = await harness.call(harness.admin.peek("tasks"))
    assert (message.payload, message.key) == (b"kept", "k")
    assert [group.name for group in await harness.call(harness.admin.groups("tasks"))] == ["late"]


async def test_published_message_goes_to_a_waiting_consumer_at_once(harness: BrokerHarness) -> None:
    worker = harness.worker()
    published = await harness.call(
        harness.admin.publish(
            "tasks",
            OutgoingMessage(
                b'{"n": 1}',
                message_id="order-1",
                key="blue",
                content_type="application/json",
                response_topic="answers/1",
                correlation_data=b"\x01",
                properties=[("a", "1"), ("a", "2")],
            ),
        )
    )
    assert (published.message_id, published.queue, published.duplicate) == (
        "order-1",
        "tasks",
        False,
    )
    (delivery,) = worker.messages()
    properties = delivery.decode_properties()
    assert delivery.payload == b'{"n": 1}'
    assert properties.content_type == "application/json"
    assert (properties.response_topic, properties.correlation_data) == ("answers/1", b"\x01")
    assert [pair for pair in properties.user if pair[0] == "a"] == [("a", "1"), ("a", "2")]
    assert ("message-id", "order-1") in properties.user


async def test_publish_obeys_the_same_rules_as_clients(make_harness: MakeHarness) -> None:
    harness = make_harness(
        ("small", {"limits": {"max_queue_depth": 1}}),
        ("over", {"limits": {"max_queue_depth": 1, "overflow": "dead-letter"}}),
        ("typed", {"schema": {"type": "object"}}),
    )
    admin = harness.admin
    first = await harness.call(admin.publish("tasks", OutgoingMessage(b"1", message_id="same")))
    second = await harness.call(admin.publish("tasks", OutgoingMessage(b"2", message_id="same")))
    assert (first.duplicate, second.duplicate) == (False, True)
    assert [one.payload for one in await harness.call(admin.peek("tasks"))] == [b"1"]
    named = await harness.call(admin.publish("small", OutgoingMessage(b"1")))
    assert (await harness.call(admin.message("small", named.message_id))).payload == b"1"
    with pytest.raises(QueueFull):
        await harness.call(admin.publish("small", OutgoingMessage(b"2")))
    assert not (await harness.call(admin.publish("over", OutgoingMessage(b"1")))).dead_letter
    assert (await harness.call(admin.publish("over", OutgoingMessage(b"2")))).dead_letter
    with pytest.raises(InvalidPayload):
        await harness.call(admin.publish("typed", OutgoingMessage(b"[]")))
    for wrong in (
        OutgoingMessage(b"", priority=10),
        OutgoingMessage(b"", delay=-1.0),
        OutgoingMessage(b"", delay=float("nan")),
        OutgoingMessage(b"", content_type="x" * 70_000),
        OutgoingMessage(b"", response_topic="a/#"),
        OutgoingMessage(b"", properties=[("a", "\0")]),
        OutgoingMessage(b"", properties=[("a", "\ud800")]),
    ):
        with pytest.raises(InvalidQueueConfig):
            await harness.call(admin.publish("tasks", wrong))
    for name in ("", "a//b", "a/+", "responses/1", "dlq"):
        with pytest.raises(InvalidQueueName):
            await harness.call(admin.publish(name, OutgoingMessage(b"")))


async def test_delayed_and_expiring_messages_behave_like_those_of_clients(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"later", delay=5.0)))
    await harness.call(
        harness.admin.publish("tasks", OutgoingMessage(b"at", deliver_at=harness.loop.now + 7.0))
    )
    (one, two) = await harness.call(harness.admin.peek("tasks"))
    assert (one.state, two.state) == ("delayed", "delayed")
    assert (one.deliver_at, two.deliver_at) == (harness.loop.now + 5.0, harness.loop.now + 7.0)
    assert worker.messages() == []
    harness.advance(5)
    assert worker.payloads() == [b"later"]
    harness.advance(2)
    assert worker.payloads() == [b"at"]
    await harness.call(harness.admin.publish("other", OutgoingMessage(b"short", expiry=3.0)))
    harness.advance(4)
    assert await harness.call(harness.admin.peek("other")) == []


async def test_publish_takes_a_delay_or_a_time_but_not_both(harness: BrokerHarness) -> None:
    both = OutgoingMessage(b"when", delay=5.0, deliver_at=harness.loop.now + 7.0)
    with pytest.raises(InvalidQueueConfig, match="both delay and deliver_at"):
        await harness.call(harness.admin.publish("tasks", both))


async def test_strict_queue_reports_one_partition(harness: BrokerHarness) -> None:
    await harness.call(
        harness.admin.create_queue({"name": "line", "ordering": "strict", "partitions": 10})
    )
    assert (await harness.call(harness.admin.config("line")))["partitions"] == 1


async def test_stats_of_a_queue_follow_its_messages(harness: BrokerHarness) -> None:
    worker = harness.worker("w-1")
    for number in range(4):
        harness.publish(b"%d" % number)
    acked, nacked, held, _ = take(worker)
    settle(worker, "ack", acked)
    settle(worker, "nack", nacked)
    stats = await harness.call(harness.admin.stats("tasks"))
    assert (stats.total_messages, stats.inflight_messages, stats.retrying) == (3, 2, 1)
    assert (stats.acked, stats.enqueued) == (1, 4)
    assert (stats.active_consumers, stats.partitions_assigned, stats.groups) == (1, {"w-1": 10}, 1)
    assert (stats.retry_count, stats.dlq, stats.is_dead_letters) == (1, "dlq/tasks", False)
    settle(worker, "reject", held)
    stats = await harness.call(harness.admin.stats("tasks"))
    assert (stats.dead, stats.dlq_messages) == ({"rejected": 1}, 1)
    assert (await harness.call(harness.admin.stats("dlq/tasks"))).is_dead_letters
    group = await harness.call(harness.admin.group("tasks", "w"))
    ledger = group.ledger
    assert (ledger.enqueued, ledger.delivered, ledger.retrying, ledger.acked, ledger.dead) == (
        4,
        1,
        1,
        1,
        1,
    )
    assert (group.lag, group.nacked) == (2, 1)
    (consumer,) = await harness.call(harness.admin.consumers("tasks"))
    assert (consumer.client, consumer.inflight, consumer.connected) == ("w-1", 1, True)
    assert consumer.partitions == list(range(10))
    node = await harness.call(harness.admin.node())
    assert (node.queues, node.messages, node.connections) == (2, 3, 1)
    assert (await harness.call(harness.admin.nodes()))[0].name == "local"


async def test_latencies_and_nacks_are_averages_of_the_last_seconds(harness: BrokerHarness) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks"}))
    worker = harness.worker(prefetch=1000)
    for _ in range(10):
        await harness.call(harness.admin.stats("tasks"))
        harness.publish(b"x")
        harness.advance(0.25)
        (message,) = take(worker)
        harness.advance(0.75)
        settle(worker, "nack", message, delay="1h")
        harness.publish(b"x")
        (message,) = take(worker)
        harness.advance(0.5)
        settle(worker, "ack", message)
    stats = await harness.call(harness.admin.stats("tasks"))
    assert stats.nack_rate == pytest.approx(0.7, abs=0.1)
    assert stats.avg_process_latency == pytest.approx(0.5, abs=0.01)
    assert stats.avg_delivery_latency == pytest.approx(0.0, abs=0.01)
    harness.advance(60)
    await harness.call(harness.admin.stats("tasks"))
    harness.advance(60)  # nothing was settled: the last known average stays
    stats = await harness.call(harness.admin.stats("tasks"))
    assert stats.nack_rate == 0.0
    assert stats.avg_process_latency == pytest.approx(0.5, abs=0.01)


async def test_last_delivery_and_heartbeat_are_shown(harness: BrokerHarness) -> None:
    worker = harness.worker("w-1")
    detail = await harness.call(harness.admin.queue("tasks"))
    assert all(one.last_delivery == 0.0 for one in detail.partitions)
    harness.advance(5)
    harness.publish(b"x", partition_key="a")
    delivered_at = harness.loop.now
    harness.advance(5)
    worker.ping()
    pinged_at = harness.loop.now
    harness.advance(5)
    detail = await harness.call(harness.admin.queue("tasks"))
    (partition,) = [one for one in detail.partitions if one.messages]
    assert partition.last_delivery == pytest.approx(delivered_at, abs=1.0)
    (consumer,) = await harness.call(harness.admin.consumers("tasks"))
    assert consumer.last_heartbeat == pytest.approx(pinged_at, abs=1.0)


async def test_rates_do_not_depend_on_how_often_they_are_read(harness: BrokerHarness) -> None:
    worker = harness.worker(prefetch=1000)
    await harness.call(harness.admin.stats("tasks"))
    seen: list[tuple[float, float, float]] = []
    for second in range(12):
        for _ in range(10):
            harness.publish(b"x")
        for message in take(worker):
            settle(worker, "ack", message)
        harness.advance(0.5)
        for _ in range(second % 3 * 5):  # a caller that looks repeatedly
            await harness.call(harness.admin.list_queues())
        harness.advance(0.5)
        stats = await harness.call(harness.admin.stats("tasks"))
        seen.append((stats.enqueue_rate, stats.dequeue_rate, stats.ack_rate))
    assert seen[6:] == [(10.0, 10.0, 10.0)] * 6
    harness.advance(60)
    await harness.call(harness.admin.stats("tasks"))
    harness.advance(5)
    assert (await harness.call(harness.admin.stats("tasks"))).enqueue_rate == 0.0


async def test_peek_shows_the_oldest_first_and_consumes_nothing(harness: BrokerHarness) -> None:
    for number in range(6):
        harness.publish(b"%d" % number, partition_key=f"k{number}")
        harness.advance(1)
    found = await harness.call(harness.admin.peek("tasks"))
    assert [one.payload for one in found] == [b"%d" % number for number in range(6)]
    assert {one.state for one in found} == {"waiting"}
    assert [one.payload for one in await harness.call(harness.admin.peek("tasks", limit=2))] == [
        b"0",
        b"1",
    ]
    assert await harness.call(harness.admin.peek("tasks", limit=0)) == []
    (one,) = await harness.call(harness.admin.peek("tasks", partition=found[0].partition, limit=1))
    assert one.message_id == found[0].message_id
    cut = await harness.call(harness.admin.peek("tasks", limit=1, payload_bytes=0))
    assert (cut[0].payload, cut[0].size) == (b"", 1)
    worker = harness.worker(prefetch=2)
    first, _ = take(worker)
    settle(worker, "ack", first)
    left = await harness.call(harness.admin.peek("tasks", group="w"))
    assert len(left) == 5 and {one.state for one in left} == {"delivered", "waiting"}
    assert {one.consumer for one in left if one.state == "delivered"} == {"w-1"}
    with pytest.raises(InvalidQueueConfig, match="no partition 10"):
        await harness.call(harness.admin.peek("tasks", partition=10))
    with pytest.raises(UnknownGroup):
        await harness.call(harness.admin.peek("tasks", group="unknown"))


async def test_message_is_found_by_either_of_its_ids(harness: BrokerHarness) -> None:
    harness.publish(b"mine", message_id="order-1")
    harness.publish(b"ours")
    mine, ours = await harness.call(harness.admin.peek("tasks"))
    for name, payload in (("order-1", b"mine"), (ours.message_id, b"ours")):
        assert (await harness.call(harness.admin.message("tasks", name))).payload == payload
    harness.advance(1000)  # the dedup window has passed
    harness.publish(b"new", message_id="order-2")
    harness.restart()
    assert (await harness.call(harness.admin.message("tasks", "order-1"))).sequence == mine.sequence
    with pytest.raises(UnknownMessage):
        await harness.call(harness.admin.message("tasks", "order-3"))
    with pytest.raises(UnknownMessage):
        await harness.call(harness.admin.message("tasks", "1-99"))


async def test_purge_leaves_messages_in_flight(harness: BrokerHarness) -> None:
    worker = harness.worker(prefetch=2)
    for number in range(600):
        await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"%d" % number)))
    assert await harness.call(harness.admin.purge("tasks")) == 598
    assert (await harness.call(harness.admin.stats("tasks"))).total_messages == 2
    for message in take(worker):
        settle(worker, "ack", message)
    assert await harness.call(harness.admin.purge("tasks")) == 0


async def test_groups_are_created_moved_and_deleted(harness: BrokerHarness) -> None:
    admin = harness.admin
    harness.publish(b"1")
    harness.advance(10)
    harness.publish(b"2")
    late = await harness.call(admin.create_group("tasks", "late", "latest"))
    early = await harness.call(admin.create_group("tasks", "early"))
    assert (late.lag, early.lag) == (0, 2)
    assert early.oldest_at == harness.loop.now - 10
    with pytest.raises(GroupExists):
        await harness.call(admin.create_group("tasks", "late"))
    for name in ("", "a/b", "a+", "x" * 300):
        with pytest.raises(InvalidQueueConfig):
            await harness.call(admin.create_group("tasks", name))
    assert (await harness.call(admin.seek("tasks", "late", "earliest"))).lag == 2
    assert (await harness.call(admin.seek("tasks", "late", f"@{harness.loop.now - 5}"))).lag == 1
    assert (await harness.call(admin.seek("tasks", "late", "2000-01-01T00:00:00Z"))).lag == 2
    for wrong in ("", "soon", "@x", "@1e300"):
        with pytest.raises(InvalidQueueConfig):
            await harness.call(admin.seek("tasks", "late", wrong))
    await harness.call(admin.delete_group("tasks", "early"))
    with pytest.raises(UnknownGroup):
        await harness.call(admin.group("tasks", "early"))
    harness.worker("late-1")
    with pytest.raises(InUse, match=r"has 1 consumer\."):
        await harness.call(admin.delete_group("tasks", "late"))


async def test_seek_redelivers_messages_to_a_connected_consumer_at_once(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(("tasks", {"limits": {"retention": "1h"}}))
    worker = harness.worker()
    harness.publish(b"again")
    for message in take(worker):
        settle(worker, "ack", message)
    await harness.call(harness.admin.seek("tasks", "w", "earliest"))
    assert worker.payloads() == [b"again"]


async def test_consumer_of_a_deleted_queue_consumes_its_successor_of_the_same_name(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    await harness.call(harness.admin.delete_queue("tasks"))
    await harness.call(harness.admin.create_queue({"name": "tasks"}))
    await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"new")))
    assert worker.payloads() == [b"new"]


async def test_changed_binding_applies_to_later_messages(harness: BrokerHarness) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks", "bindings": ["a/+"]}))
    author = harness.connect("author")
    put(author, "a/1", b"1")
    await harness.call(harness.admin.configure("tasks", {"bindings": ["b/#"]}))
    put(author, "a/2", b"2")
    put(author, "b/3", b"3")
    found = await harness.call(harness.admin.peek("tasks"))
    assert [(one.payload, one.topic) for one in found] == [(b"1", "a/1"), (b"3", "b/3")]


# ---- dead letters


async def make_dead_letters(harness: BrokerHarness, *payloads: bytes, **properties: str) -> None:
    """Let a consumer of group w reject each payload, a second apart."""
    worker = harness.worker("w-9")
    for payload in payloads:
        harness.publish(payload)
        for message in take(worker):
            settle(worker, "reject", message, **properties)
        harness.advance(1)
    worker.disconnect()
    harness.advance(1)


async def test_dead_letters_are_listed_with_pagination_and_filter(harness: BrokerHarness) -> None:
    admin = harness.admin
    start = harness.loop.now
    await make_dead_letters(harness, b"red 1", b"blue 2", b"red 3", b"blue 4")
    await harness.call(admin.create_queue({"name": "other", "dlq_config": {"topic": "dlq/tasks"}}))
    other = harness.worker("o-1", "other")
    harness.publish(b"not ours", "other")
    settle(other, "reject", take(other)[0])

    async def payloads(after: str = "", limit: int = 50, **wanted: object) -> list[bytes]:
        criteria = DeadLetterFilter(**wanted)  # type: ignore[arg-type]
        return [
            one.payload
            for one in await harness.call(admin.dead_letters("tasks", criteria, after, limit))
        ]

    assert await payloads() == [b"red 1", b"blue 2", b"red 3", b"blue 4"]
    assert await payloads(contains="red") == [b"red 1", b"red 3"]
    assert await payloads(since=start + 1, until=start + 3) == [b"blue 2", b"red 3"]
    assert await payloads(group="w") != [] and await payloads(group="x") == []
    assert await payloads(reason="rejected") != [] and await payloads(reason="max_retries") == []
    first, second, *_ = await harness.call(admin.dead_letters("tasks"))
    assert await payloads(after=second.message_id) == [b"red 3", b"blue 4"]
    assert await payloads(after=first.message_id, limit=1) == [b"blue 2"]
    await harness.call(admin.delete_dead_letter("tasks", second.message_id))
    assert await payloads(after=second.message_id) == [b"red 3", b"blue 4"], (
        "also when that dead letter is gone"
    )
    assert second.headers["original-queue"] == "tasks"
    shown = await harness.call(admin.dead_letter("tasks", first.headers["original-message-id"]))
    assert shown.message_id == first.message_id
    assert [one.payload for one in await harness.call(admin.dead_letters("other"))] == [b"not ours"]


async def test_redriven_dead_letter_is_delivered_again_at_once(harness: BrokerHarness) -> None:
    await make_dead_letters(harness, b"poison")
    worker = harness.worker("w-1")
    other = harness.worker("v-1", start="latest")
    (dead_letter,) = await harness.call(harness.admin.dead_letters("tasks"))
    done = await harness.call(harness.admin.retry_dead_letter("tasks", dead_letter.message_id))
    assert (done.retried, done.skipped, done.left) == (1, 0, 0)
    (again,) = take(worker)
    assert again.payload == b"poison" and other.messages() == [], (
        "it goes to the group that failed it"
    )
    assert delivery_properties(again)["message-id"] == dead_letter.headers["original-message-id"]
    assert await harness.call(harness.admin.dead_letters("tasks")) == []
    with pytest.raises(UnknownMessage):
        await harness.call(harness.admin.retry_dead_letter("tasks", dead_letter.message_id))
    settle(worker, "reject", again)
    (dead_letter,) = await harness.call(harness.admin.dead_letters("tasks"))
    by_old_name = dead_letter.headers["original-message-id"]
    await harness.call(harness.admin.retry_dead_letter("tasks", by_old_name, to_all=True))
    assert worker.payloads() == other.payloads() == [b"poison"]


async def test_many_dead_letters_are_redriven_by_filter_and_up_to_a_limit(
    harness: BrokerHarness,
) -> None:
    await make_dead_letters(harness, b"red 1", b"blue 2", b"red 3", b"red 4")
    wanted = DeadLetterFilter(contains="red")
    done = await harness.call(harness.admin.retry_dead_letters("tasks", wanted, limit=2))
    assert (done.retried, done.skipped, done.left) == (2, 0, 1)
    left = [one.payload for one in await harness.call(harness.admin.dead_letters("tasks"))]
    assert left == [b"blue 2", b"red 4"]
    worker = harness.worker("w-1")
    assert sorted(worker.payloads()) == [b"red 1", b"red 3"]
    with pytest.raises(InvalidQueueConfig):
        await harness.call(harness.admin.retry_dead_letters("tasks", limit=0))


async def test_dead_letter_in_flight_is_not_redriven(harness: BrokerHarness) -> None:
    await make_dead_letters(harness, b"1", b"2")
    reader = harness.worker("r-1", "dlq/tasks", prefetch=1)
    (held,) = take(reader)
    name = delivery_properties(held)["message-id"]
    for refused in (
        harness.admin.retry_dead_letter("tasks", name),
        harness.admin.delete_dead_letter("tasks", name),
    ):
        with pytest.raises(InUse, match="is processing"):
            await harness.call(refused)
    done = await harness.call(harness.admin.retry_dead_letters("tasks"))
    assert (done.retried, done.skipped) == (1, 1)


async def test_dead_letter_whose_queue_is_gone_is_reported(harness: BrokerHarness) -> None:
    await make_dead_letters(harness, b"1")
    await harness.call(harness.admin.delete_queue("tasks"))
    (dead_letter,) = await harness.call(harness.admin.dead_letters("tasks"))
    with pytest.raises(InUse, match="is gone"):
        await harness.call(harness.admin.retry_dead_letter("tasks", dead_letter.message_id))


async def test_dead_letters_are_purged_by_filter(harness: BrokerHarness) -> None:
    await make_dead_letters(harness, b"red 1", b"blue 2", b"red 3")
    assert (
        await harness.call(
            harness.admin.purge_dead_letters("tasks", DeadLetterFilter(contains="red"))
        )
        == 2
    )
    assert [one.payload for one in await harness.call(harness.admin.dead_letters("dlq/tasks"))] == [
        b"blue 2"
    ]
    harness.restart()
    assert [one.payload for one in await harness.call(harness.admin.dead_letters("tasks"))] == [
        b"blue 2"
    ]


async def test_messages_of_the_invalid_channel_are_dead_letters_too(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(("tasks", {"dlq_config": {"invalid_topic": "invalid/tasks"}}))
    await make_dead_letters(harness, b"nonsense", reason="unacceptable")
    await make_dead_letters(harness, b"poison")
    dead_letters = await harness.call(harness.admin.dead_letters("tasks"))
    assert {(one.payload, one.queue) for one in dead_letters} == {
        (b"nonsense", "invalid/tasks"),
        (b"poison", "dlq/tasks"),
    }
    (only,) = await harness.call(
        harness.admin.dead_letters("tasks", DeadLetterFilter(reason="unacceptable"))
    )
    assert only.payload == b"nonsense"


async def test_ledger_is_verified_and_faults_are_named(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"1")
    take(worker)
    assert await harness.call(harness.admin.verify()) == []
    harness.engine.queues["tasks"].depth += 1
    (fault,) = await harness.call(harness.admin.verify())
    assert "depth 2 in the ledger, 1 counted" in fault
    harness.engine.queues["tasks"].depth -= 1


async def test_mqtt_admin_requests_are_carried_out_by_the_same_service(
    harness: BrokerHarness,
) -> None:
    client = harness.connect("boss")
    assert put(client, "$admin/queue/create", b'{"name": "tasks", "partitions": 4}')[0] == 0
    assert (await harness.call(harness.admin.stats("tasks"))).partitions == 4
    join(client, "$admin/queue/tasks/stats", 0)
    await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"x")))
    harness.advance(1.5)
    shown = json.loads(client.messages()[-1].payload)
    assert (shown["total_messages"], shown["last_delivery"]) == (1, None)
    harness.worker()
    harness.advance(1.5)
    shown = json.loads(client.messages()[-1].payload)
    (consumer,) = shown["groups"][0]["consumers"]
    assert shown["last_delivery"] > 0 and consumer["last_heartbeat"] > 0


async def test_mqtt_clients_pause_and_resume_queues_and_groups(harness: BrokerHarness) -> None:
    worker = harness.worker()
    client = harness.connect("ann")
    assert put(client, "$admin/queue/tasks/pause", b'{"reason": "repair"}') == (0, "")
    harness.publish(b"1")
    assert worker.messages() == []
    paused = (await harness.call(harness.admin.stats("tasks"))).pause
    assert paused is not None and (paused.by, paused.reason) == ("ann", "repair")
    assert put(client, "$admin/queue/tasks/pause", b'{"group": "w"}')[0] == 0
    assert put(client, "$admin/queue/tasks/resume", b"")[0] == 0
    assert (await harness.call(harness.admin.stats("tasks"))).pause is None
    group = await harness.call(harness.admin.group("tasks", "w"))
    assert group.held_by == ["paused"]
    assert worker.messages() == []
    assert put(client, "$admin/queue/tasks/resume", b'{"group": "w"}')[0] == 0
    assert [message.payload for message in worker.messages()] == [b"1"]


@pytest.mark.parametrize(
    ("topic", "payload", "reason_code", "explanation"),
    [
        ("$admin/queue/other/pause", b"", 0x90, "no queue 'other'"),
        ("$admin/queue/tasks/pause", b'{"group": "x"}', 0x10, "no group 'x'"),
        ("$admin/queue/tasks/pause", b'{"why": "x"}', 0x99, "group and reason"),
        ("$admin/queue/tasks/resume", b'{"group": 1}', 0x99, "must be texts"),
        ("$admin/queue/tasks/pause", b'{"reason": "%s"}' % (b"x" * 1001), 0x99, "at most 1000"),
        ("$admin/queue/tasks/stop", b"", 0x90, "pause or resume"),
    ],
)
async def test_pauses_over_mqtt_that_cannot_be_set_are_refused(
    harness: BrokerHarness, topic: str, payload: bytes, reason_code: int, explanation: str
) -> None:
    harness.worker()
    code, why = put(harness.connect("ann"), topic, payload)
    assert code == reason_code
    assert explanation in why


async def test_peek_past_many_settled_messages_does_not_block_the_broker(
    make_harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make_harness(("tasks", {"partitions": 1, "ordering": "none"}))
    busy, _ = harness.worker("busy-1", prefetch=2000), harness.worker("idle-1", prefetch=1)
    for _ in range(1000):
        await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"x")))
    first, *rest = take(busy)
    for message in rest:
        settle(busy, "ack", message)
    breaths = 0
    breathe = harness.admin._facade.yield_to_loop

    async def count() -> None:
        nonlocal breaths
        breaths += 1
        await breathe()

    monkeypatch.setattr(harness.admin._facade, "yield_to_loop", count)
    found = await harness.call(harness.admin.peek("tasks", "busy"))
    assert [one.message_id for one in found] == [delivery_properties(first)["message-id"]]
    assert breaths >= 4


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
async def test_name_that_no_packet_can_carry_is_refused(harness: BrokerHarness, name: str) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks"}))
    with pytest.raises(InvalidQueueConfig, match="is not a valid group name"):
        await harness.call(harness.admin.create_group("tasks", name))
    assert await harness.call(harness.admin.groups("tasks")) == []
    with pytest.raises(InvalidQueueName, match="can carry"):
        await harness.call(harness.admin.publish(name, OutgoingMessage(b"x")))


async def counters(harness: BrokerHarness) -> dict[str, int]:
    (found,) = [
        one
        for one in (await harness.call(harness.admin.collect_metrics())).queues
        if one.name == "tasks"
    ]
    return {
        "enqueued": found.enqueued,
        "dequeued": found.dequeued,
        "acked": found.acked,
        "nacked": found.nacked,
        "redelivered": found.redelivered,
        "retried": found.retried,
        "dead": sum(found.dead.values()),
    }


async def make_work(harness: BrokerHarness) -> Client:
    """Ack, nack, release, reject and kill messages, and leave one in flight."""
    worker = harness.worker("w-1")
    for verb in ("ack", "nack", "release", "reject"):
        harness.publish(verb.encode())
        (message,) = take(worker)
        settle(worker, verb, message)
        for again in take(worker):  # released
            settle(worker, "ack", again)
    for _ in range(3):  # the one that was nacked dies
        harness.advance(10)
        for message in take(worker):
            settle(worker, "nack", message)
    harness.publish(b"held")
    take(worker)
    return worker


SOME_RETRIES: dict[str, object] = {"retry_policy": {"max_retries": 2, "initial_backoff": "1s"}}


@pytest.mark.parametrize("restart", ["restart", "restart twice", "kill"])
async def test_all_counters_survive_a_restart_together(
    make_harness: MakeHarness, restart: str
) -> None:
    harness = make_harness(("tasks", SOME_RETRIES))
    await make_work(harness)
    before = await counters(harness)
    assert before == {
        "enqueued": 5,
        "dequeued": 8,
        "acked": 2,
        "nacked": 3,
        "redelivered": 2,
        "retried": 2,
        "dead": 2,
    }
    harness.kill() if restart == "kill" else harness.restart()
    if restart == "restart twice":
        harness.restart()
    # The delivery that was in flight did not end: it is counted when it is made again.
    assert await counters(harness) == {**before, "dequeued": 7}


async def test_counters_of_a_deleted_group_stay_in_the_sums(make_harness: MakeHarness) -> None:
    harness = make_harness(("tasks", SOME_RETRIES))
    worker = await make_work(harness)
    before = await counters(harness)
    worker.disconnect()
    await harness.call(harness.admin.delete_group("tasks", "w"))
    harness.restart()
    after = await counters(harness)
    assert after["acked"] == before["acked"]
    assert after["dequeued"] >= before["dequeued"] - 1


@pytest.mark.parametrize(
    ("older_than", "keep_newest", "left"),
    [
        (0.0, 0, []),
        (0.0, 2, [3, 4]),
        (25.0, 0, [2, 3, 4]),
        (5.0, 4, [1, 2, 3, 4]),
        (0.0, 9, [0, 1, 2, 3, 4]),
        (3600.0, 0, [0, 1, 2, 3, 4]),
    ],
)
async def test_purge_by_age_and_by_number(
    harness: BrokerHarness, older_than: float, keep_newest: int, left: list[int]
) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks", "partitions": 3}))
    for nth in range(5):  # 40, 30, 20, 10 and 0 seconds old
        harness.publish(b"%d" % nth)
        harness.advance(10 if nth < 4 else 0)
    harness.advance(0.001)
    purged = await harness.call(harness.admin.purge("tasks", older_than, keep_newest))
    stored = await harness.call(harness.admin.peek("tasks"))
    assert sorted(int(one.payload) for one in stored) == left
    assert purged == 5 - len(left)
