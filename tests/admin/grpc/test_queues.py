"""Queues, groups and messages over gRPC: each call against the real service."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from sluice.admin.grpc import queue_admin_pb2 as pb
from tests.admin.grpc.conftest import GrpcApi
from tests.admin.live_broker import Worker, publish


async def make(grpc_api: GrpcApi, name: str = "jobs", **config: object) -> pb.Queue:
    return await grpc_api.admin.CreateQueue(
        pb.CreateQueueRequest(config_json=json.dumps({"name": name, **config}))
    )


async def test_queue_is_created_read_updated_and_deleted(grpc_api: GrpcApi) -> None:
    created = await make(grpc_api, partitions=3, limits={"max_queue_depth": 7})
    assert (created.stats.name, created.stats.partitions, created.stats.max_depth) == ("jobs", 3, 7)
    assert created.stats.created_at.seconds > 0
    assert [one.number for one in created.partitions] == [0, 1, 2]
    config = json.loads(created.config_json)
    assert (config["name"], config["partitions"]) == ("jobs", 3)
    assert config["limits"]["max_queue_depth"] == 7
    assert config["retry_policy"]["max_backoff"] == "5m"

    change = '{"limits": {"max_queue_depth": 9}}'
    after = await grpc_api.admin.UpdateConfig(
        pb.UpdateConfigRequest(name="$queue/jobs", config_json=change)
    )
    shown = await grpc_api.admin.GetConfig(pb.GetConfigRequest(name="jobs"))
    assert after == shown
    assert json.loads(shown.config_json)["limits"]["max_queue_depth"] == 9
    assert json.loads(shown.config_json)["partitions"] == 3

    assert (await grpc_api.admin.GetQueue(pb.GetQueueRequest(name="jobs"))).stats.max_depth == 9
    await grpc_api.admin.DeleteQueue(pb.DeleteQueueRequest(name="jobs"))
    assert (await grpc_api.admin.ListQueues(pb.ListQueuesRequest())).queues == []


async def test_queues_are_listed_by_name_with_pagination(grpc_api: GrpcApi) -> None:
    for name in ("b", "a/2", "c", "a/1"):
        await make(grpc_api, name)
    found: list[str] = []
    after = ""
    while True:
        page = await grpc_api.admin.ListQueues(pb.ListQueuesRequest(after=after, limit=3))
        found += [one.name for one in page.queues]
        assert len(page.queues) <= 3
        if not page.next:
            break
        after = page.next
    assert found == ["a/1", "a/2", "b", "c"]
    page = await grpc_api.admin.ListQueues(pb.ListQueuesRequest(prefix="a/", limit=2))
    assert ([one.name for one in page.queues], page.next) == (["a/1", "a/2"], "")


async def test_stats_have_the_documented_fields(grpc_api: GrpcApi) -> None:
    await make(grpc_api, partitions=4)
    async with grpc_api.harness.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join()
        for _ in range(3):
            await publish(client, "jobs")
        await worker.settle("ack", await worker.next())
        await worker.settle("reject", await worker.next())
        await worker.next()
        stats = await grpc_api.admin.GetQueueStats(pb.GetQueueStatsRequest(name="jobs"))
    assert (stats.name, stats.total_messages) == ("jobs", 1)
    assert (stats.inflight_messages, stats.dlq_messages) == (1, 1)
    assert dict(stats.partitions_assigned) == {"worker-1": 4}
    assert (stats.active_consumers, stats.partitions) == (1, 4)
    assert (stats.enqueued, stats.acked, dict(stats.dead)) == (3, 1, {"rejected": 1})
    assert (stats.dlq_name, stats.groups, stats.retrying) == ("dlq/jobs", 1, 0)
    assert stats.enqueue_rate >= 0.0 and stats.ack_rate >= 0.0
    dead_letters = await grpc_api.admin.GetQueueStats(pb.GetQueueStatsRequest(name="dlq/jobs"))
    assert dead_letters.is_dead_letters


async def test_message_is_published_peeked_and_delivered_unchanged(grpc_api: GrpcApi) -> None:
    await make(grpc_api)
    request = pb.PublishRequest(
        queue="jobs",
        payload=b"\x00\xff",
        message_id="order-7",
        key="customer-1",
        priority=3,
        content_type="application/x-order",
        response_topic="answers/1",
        correlation_data=b"c\x00",
        properties=[pb.Property(name="a", value="1"), pb.Property(name="a", value="2")],
    )
    request.expiry.seconds = 3600
    sent = await grpc_api.admin.Publish(request)
    assert (sent.message_id, sent.queue, sent.duplicate) == ("order-7", "jobs", False)
    again = await grpc_api.admin.Publish(request)
    assert (again.message_id, again.duplicate) == ("order-7", True)

    (peeked,) = (await grpc_api.admin.PeekMessages(pb.PeekMessagesRequest(queue="jobs"))).messages
    shown = await grpc_api.admin.GetMessage(
        pb.GetMessageRequest(queue="jobs", message_id="order-7")
    )
    assert peeked == shown
    assert (shown.message_id, shown.queue, shown.payload, shown.size) == (
        "order-7",
        "jobs",
        b"\x00\xff",
        2,
    )
    assert (shown.key, shown.priority, shown.content_type) == (
        "customer-1",
        3,
        "application/x-order",
    )
    assert (shown.response_topic, shown.correlation_data) == ("answers/1", b"c\x00")
    assert [one.value for one in shown.properties if one.name == "a"] == ["1", "2"]
    assert shown.state == "waiting"
    assert 3590 <= shown.expires_at.seconds - shown.enqueued_at.seconds <= 3610
    assert not shown.HasField("deliver_at")

    async with grpc_api.harness.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join()
        message = await worker.next()
        assert message.payload == b"\x00\xff"
        stored: Any = message.properties
        assert [pair for pair in stored.UserProperty if pair[0] == "a"] == [
            ("a", "1"),
            ("a", "2"),
        ]
        assert stored.ContentType == "application/x-order"
        assert stored.CorrelationData == b"c\x00"


async def test_delayed_and_scheduled_messages_wait_until_due(grpc_api: GrpcApi) -> None:
    await make(grpc_api)
    request = pb.PublishRequest(queue="jobs", payload=b"later")
    request.delay.seconds = 500
    await grpc_api.admin.Publish(request)
    request = pb.PublishRequest(queue="jobs", payload=b"then")
    request.deliver_at.seconds = 4_000_000_000
    await grpc_api.admin.Publish(request)
    found = (await grpc_api.admin.PeekMessages(pb.PeekMessagesRequest(queue="jobs"))).messages
    assert {one.payload: one.state for one in found} == {b"later": "delayed", b"then": "delayed"}
    due = {one.payload: one.deliver_at.seconds for one in found}
    assert due[b"then"] == 4_000_000_000
    assert 490 <= due[b"later"] - found[0].enqueued_at.seconds <= 510


async def test_peek_takes_partition_start_limit_and_size(grpc_api: GrpcApi) -> None:
    await make(grpc_api, partitions=1)
    for nth in range(5):
        await grpc_api.admin.Publish(pb.PublishRequest(queue="jobs", payload=b"message %d" % nth))
    request = pb.PeekMessagesRequest(queue="jobs", partition=0, start=1, limit=2, payload_bytes=9)
    found = (await grpc_api.admin.PeekMessages(request)).messages
    assert [(one.sequence, one.payload, one.size) for one in found] == [
        (1, b"message 1", 9),
        (2, b"message 2", 9),
    ]
    request = pb.PeekMessagesRequest(queue="jobs", partition=0, start=0, limit=1, payload_bytes=3)
    (first,) = (await grpc_api.admin.PeekMessages(request)).messages
    assert (first.payload, first.size) == (b"mes", 9)


async def test_list_of_large_messages_fits_default_client_limits(grpc_api: GrpcApi) -> None:
    await make(grpc_api, limits={"max_message_size": 1 << 20})
    for nth in range(6):
        await grpc_api.admin.Publish(
            pb.PublishRequest(queue="jobs", payload=bytes([nth]) * (1 << 20))
        )
    found = (
        await grpc_api.admin.PeekMessages(
            pb.PeekMessagesRequest(queue="jobs", payload_bytes=1 << 20)
        )
    ).messages
    assert len(found) == 6
    assert sum(len(one.payload) for one in found) == 3 << 20
    assert {one.size for one in found} == {1 << 20}


async def test_groups_are_created_moved_read_and_deleted(grpc_api: GrpcApi) -> None:
    await make(grpc_api, partitions=1, limits={"retention": "1d"})
    for _ in range(4):
        await grpc_api.admin.Publish(pb.PublishRequest(queue="jobs", payload=b"x"))
    created = await grpc_api.admin.CreateGroup(
        pb.CreateGroupRequest(queue="jobs", group="late", start="latest")
    )
    assert (created.name, created.lag, list(created.floors)) == ("late", 0, [4])
    first = await grpc_api.admin.CreateGroup(pb.CreateGroupRequest(queue="jobs", group="early"))
    assert (first.lag, list(first.floors)) == (4, [0])
    moved = await grpc_api.admin.SeekGroup(pb.SeekGroupRequest(queue="jobs", group="late", to="1"))
    assert (moved.lag, list(moved.floors), moved.ledger.waiting) == (3, [1], 3)
    listed = (await grpc_api.admin.ListGroups(pb.ListGroupsRequest(queue="jobs"))).groups
    assert [one.name for one in listed] == ["early", "late"]
    shown = await grpc_api.admin.GetGroup(pb.GetGroupRequest(queue="jobs", group="late"))
    assert shown == listed[1]
    ledger = shown.ledger
    settled = ledger.acked + ledger.dead + ledger.expired + ledger.purged + ledger.cancelled
    assert ledger.enqueued == ledger.waiting + ledger.delivered + ledger.retrying + settled
    await grpc_api.admin.DeleteGroup(pb.DeleteGroupRequest(queue="jobs", group="late"))
    listed = (await grpc_api.admin.ListGroups(pb.ListGroupsRequest(queue="jobs"))).groups
    assert [one.name for one in listed] == ["early"]


async def test_consumers_are_listed_with_their_partitions(grpc_api: GrpcApi) -> None:
    await make(grpc_api, partitions=2)
    async with grpc_api.harness.client("worker-1") as client:
        await Worker(client, "jobs").join(
            consumer_group="team", prefetch="5", consumer_priority="2"
        )
        (one,) = (
            await grpc_api.admin.ListConsumers(pb.ListConsumersRequest(queue="jobs"))
        ).consumers
    assert (one.client, one.group, sorted(one.partitions)) == ("worker-1", "team", [0, 1])
    assert (one.prefetch, one.priority, one.exclusive, one.connected) == (5, 2, False, True)
    assert not one.HasField("settled_at"), "joining settles nothing"


async def test_a_queue_is_purged(grpc_api: GrpcApi) -> None:
    await make(grpc_api)
    for _ in range(3):
        await grpc_api.admin.Publish(pb.PublishRequest(queue="jobs", payload=b"x"))
    assert (await grpc_api.admin.PurgeQueue(pb.PurgeQueueRequest(name="jobs"))).purged == 3
    assert (
        await grpc_api.admin.GetQueueStats(pb.GetQueueStatsRequest(name="jobs"))
    ).total_messages == 0


async def test_node_describes_itself_and_ledger_adds_up(grpc_api: GrpcApi) -> None:
    await make(grpc_api)
    node = await grpc_api.admin.GetNode(pb.GetNodeRequest())
    assert (node.store, node.build, node.queues, node.stopping) == (
        "memory",
        "interpreted",
        1,
        False,
    )
    assert 0 < node.started_at.seconds <= node.now.seconds
    (same,) = (await grpc_api.admin.ListNodes(pb.ListNodesRequest())).nodes
    assert (same.name, same.version) == (node.name, node.version)
    assert (await grpc_api.admin.Verify(pb.VerifyRequest())).faults == []
    assert not (await grpc_api.admin.GetCluster(pb.GetClusterRequest())).enabled
    store = await grpc_api.admin.GetStore(pb.GetStoreRequest())
    assert (store.kind, store.healthy, len(store.queues)) == ("memory", True, 0)


async def test_watch_sends_stats_at_once_and_every_second(grpc_api: GrpcApi) -> None:
    await make(grpc_api, "quick/a")
    await make(grpc_api, "other")
    watch = grpc_api.admin.Watch(pb.WatchRequest(prefix="quick", queue="quick/a"))
    first = await watch.read()
    began = asyncio.get_running_loop().time()
    assert [one.name for one in first.queues] == ["quick/a"]
    assert (first.queue.stats.total_messages, first.node.queues) == (0, 2)
    await grpc_api.admin.Publish(pb.PublishRequest(queue="quick/a", payload=b"x"))
    seen = [await watch.read(), await watch.read()]
    assert asyncio.get_running_loop().time() - began > 0.9, "two more take a second at least"
    assert seen[1].queues[0].total_messages == 1
    assert seen[1].queue.stats.total_messages == 1
    watch.cancel()


async def test_watch_starts_without_delay(
    grpc_api: GrpcApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.grpc.servicer.WATCH_INTERVAL_SECONDS", 3600.0)
    watch = grpc_api.admin.Watch(pb.WatchRequest())
    assert (await watch.read()).node.queues == 0
    watch.cancel()


async def test_watch_of_missing_queue_sees_it_created(grpc_api: GrpcApi) -> None:
    watch = grpc_api.admin.Watch(pb.WatchRequest(queue="jobs"))
    assert not (await watch.read()).HasField("queue")
    await make(grpc_api)
    assert (await watch.read()).queue.stats.name == "jobs"
    watch.cancel()


async def test_watch_ends_after_a_while_so_that_the_caller_authenticates_again(
    grpc_api: GrpcApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.grpc.servicer.WATCH_INTERVAL_SECONDS", 0.01)
    monkeypatch.setattr("sluice.admin.grpc.servicer.MAX_WATCH_SECONDS", 0.1)
    async with asyncio.timeout(30):
        seen = [one.node.queues async for one in grpc_api.admin.Watch(pb.WatchRequest())]
    assert seen, "and then the call succeeds"


def test_stats_keep_the_numbers_and_types_of_their_fields() -> None:
    """Clients that were generated from another copy of the messages can read the statistics."""
    fields = pb.QueueStats.DESCRIPTOR.fields_by_number
    assert {number: fields[number].name for number in range(1, 9)} == {
        1: "name",
        2: "total_messages",
        3: "inflight_messages",
        4: "dlq_messages",
        5: "enqueue_rate",
        6: "ack_rate",
        7: "active_consumers",
        8: "partitions_assigned",
    }
    sent = pb.QueueStats(partitions_assigned={"w": 3}).SerializeToString()
    assert sent == b"\x42\x05\x0a\x01w\x10\x03"  # an entry of map<string, int32>


async def test_queue_and_group_are_paused_and_resumed(grpc_api: GrpcApi) -> None:
    await make(grpc_api)
    await grpc_api.admin.CreateGroup(pb.CreateGroupRequest(queue="jobs", group="team"))
    queue = await grpc_api.admin.PauseQueue(pb.PauseQueueRequest(name="jobs", reason="upgrade"))
    assert queue.pause.reason == "upgrade" and queue.pause.HasField("at")
    group = await grpc_api.admin.PauseGroup(pb.PauseGroupRequest(queue="jobs", group="team"))
    assert list(group.held_by) == ["queue-paused", "paused"]
    queue = await grpc_api.admin.ResumeQueue(pb.ResumeQueueRequest(name="jobs"))
    assert not queue.HasField("pause")
    group = await grpc_api.admin.ResumeGroup(pb.ResumeGroupRequest(queue="jobs", group="team"))
    assert not group.HasField("pause") and not group.held_by


async def test_messages_are_cancelled_and_rescheduled(grpc_api: GrpcApi) -> None:
    admin = grpc_api.admin
    await make(grpc_api)
    for number in range(3):
        await admin.Publish(pb.PublishRequest(queue="jobs", message_id=f"j-{number}"))
    moved = await admin.RescheduleMessage(
        pb.RescheduleMessageRequest(queue="jobs", message_id="j-0", delay=Duration(seconds=60))
    )
    assert moved.state == "delayed"
    done = await admin.RescheduleMessages(
        pb.RescheduleMessagesRequest(
            queue="jobs", filter=pb.MessageFilter(state="delayed"), delay=Duration()
        )
    )
    assert (done.changed, done.dry_run) == (1, False)
    await admin.CancelMessage(pb.CancelMessageRequest(queue="jobs", message_id="j-0"))
    done = await admin.CancelMessages(pb.CancelMessagesRequest(queue="jobs", dry_run=True))
    assert (done.changed, done.dry_run) == (2, True)
