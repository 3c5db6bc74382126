"""Queues of other cells: clients use a queue at another node like a local one."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext

import pytest

from sluice.client import Client
from sluice.client.errors import PublishRefused, SubscribeRefused
from sluice.client.message import Message
from sluice.client.queues.consumer import Consumer
from sluice.client.queues.delivery import Delivery
from tests.cluster.kit import until
from tests.cluster.memory_cluster import CELLS, client_in, queue_in, two_nodes

# Cells with even numbers are at node a. A client may connect to the other node, and its queue may
# be in a cell of either.


async def take(consumer: Consumer) -> Delivery:
    async with asyncio.timeout(30):
        return await anext(aiter(consumer))


async def next_message(client: Client) -> Message:
    async with asyncio.timeout(30):
        return await anext(aiter(client.messages()))


async def next_payload(client: Client) -> bytes:
    return bytes((await next_message(client)).payload)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("session", [0, 1, 2])
async def test_message_is_published_and_consumed_through_any_node(
    session: int, version: int
) -> None:
    async with two_nodes() as net:
        for cell in (0, 1, 3):
            name = queue_in(cell)
            async with (
                net.nodes["a"].client(client_in(session), version=version) as publisher,
                net.nodes["b"].client(client_in(4, "worker"), version=version) as worker,
            ):
                await publisher.publish(f"$queue/{name}", b"work", qos=1)
                await publisher.publish(f"$queue/{name}", b"more", qos=2)
                await publisher.publish(f"$queue/{name}", b"last", qos=0)
                async with worker.consumer(name, group="g") as tasks:
                    seen = []
                    for _ in range(3):
                        task = await take(tasks)
                        seen.append(bytes(task.payload))
                        await task.ack()
                    assert sorted(seen) == [b"last", b"more", b"work"]


async def test_refusal_of_another_cell_is_returned_with_its_reason() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as client:
        await client.publish(
            "$admin/queue/create",
            json.dumps({"name": name, "limits": {"max_queue_depth": 1}}),
            qos=1,
        )
        await client.publish(f"$queue/{name}", b"one", qos=1)
        with pytest.raises(PublishRefused, match="full") as refused:
            await client.publish(f"$queue/{name}", b"two", qos=1)
        assert refused.value.reason == 0x97
        with pytest.raises(PublishRefused, match="full"):
            await client.publish(f"$queue/{name}", b"two", qos=2)
        with pytest.raises(SubscribeRefused, match="prefetch"):
            await client.subscribe(f"$queue/{name}", qos=1, user=[("prefetch", "none")])


async def test_dead_letter_queue_must_be_in_the_cell_of_its_queue() -> None:
    name, other = queue_in(1), queue_in(2)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as client:
        config = {"name": name, "dlq_config": {"topic": other}}
        with pytest.raises(PublishRefused, match=f"Use dlq/{name}"):
            await client.publish("$admin/queue/create", json.dumps(config), qos=1)
        config = {"name": name, "dlq_config": {"topic": f"dlq/dlq/{name}"}}
        await client.publish("$admin/queue/create", json.dumps(config), qos=1)


async def test_wildcard_filter_joins_queues_of_all_cells_now_and_later() -> None:
    names = [queue_in(cell, "many/") for cell in range(CELLS)]
    async with two_nodes() as net, net.nodes["a"].client(client_in(1)) as client:
        for name in names[:3]:
            await client.publish(f"$queue/{name}", name.encode(), qos=1)
        async with (
            net.nodes["b"].client(client_in(2, "worker")) as worker,
            worker.consumer("many/#") as tasks,
        ):
            for name in names[3:]:
                await client.publish(f"$queue/{name}", name.encode(), qos=1)
            seen = set()
            for _ in names:
                task = await take(tasks)
                seen.add(task.payload.decode())
                await task.ack()
        assert seen == set(names)


async def test_prefetch_limits_deliveries_of_a_remote_queue() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as client:
        for n in range(5):
            await client.publish(f"$queue/{name}", b"%d" % n, qos=1)
        async with client.consumer(name, prefetch=2) as tasks:
            held = [await take(tasks), await take(tasks)]
            queue = net.nodes["b"].engine(1).queues[name]
            assert sum(group.in_flight for group in queue.groups.values()) == 2
            await held[0].ack()
            await take(tasks)


async def test_failed_delivery_of_a_remote_queue_is_retried_and_dead_lettered() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as client:
        await client.publish(f"$queue/{name}", b"poison", qos=1)
        async with client.consumer(name) as tasks, client.consumer(f"dlq/{name}") as dead:
            task = await take(tasks)
            await task.nack(delay=0)
            task = await take(tasks)
            assert task.attempt == 2
            await task.reject("unacceptable", "bad")
            dead_letter = await take(dead)
            assert dead_letter.payload == b"poison"
            await dead_letter.ack()


async def test_a_request_is_answered_across_nodes() -> None:
    name = queue_in(3)
    async with (
        two_nodes() as net,
        net.nodes["a"].client(client_in(0)) as requester,
        net.nodes["b"].client(client_in(2, "server")) as server,
        server.consumer(name) as questions,
    ):
        asking = asyncio.create_task(requester.request(f"$queue/{name}", b"2+2", timeout=30))
        question = await take(questions)
        await question.reply(b"4")
        await question.ack()
        assert (await asking).payload == b"4"


async def test_exclusive_queue_is_written_from_any_node_and_read_by_its_owner() -> None:
    owner = client_in(1, "owner")
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as writer:
        await writer.publish(f"$ECQ/w/{owner}/color", b"red", qos=1)
        await writer.publish(f"$ECQ/w/{owner}/color", b"blue", qos=1)
        async with net.nodes["a"].client(owner) as reader:
            await reader.subscribe(f"$ECQ/{owner}/#", qos=1)
            assert await next_payload(reader) == b"blue"


async def test_stats_of_a_remote_queue_can_be_watched() -> None:
    name = queue_in(1)
    async with two_nodes() as net, net.nodes["a"].client(client_in(0)) as client:
        await client.publish(f"$queue/{name}", b"one", qos=1)
        await client.subscribe(f"$admin/queue/{name}/stats", qos=0)
        assert json.loads(await next_payload(client))["name"] == name


async def test_client_that_resumes_its_session_continues_with_its_remote_queue() -> None:
    name = queue_in(1)
    options = {"clean_start": False, "session_expiry": 600}
    async with two_nodes() as net:
        engine = net.nodes["b"].engine(1)
        first = net.nodes["a"].client(client_in(0), manual_ack=True, reconnect=False, **options)
        await first.connect()
        await first.subscribe(f"$queue/{name}", qos=1, user=[("ack-mode", "puback")])
        await first.publish(f"$queue/{name}", b"one", qos=1)
        await next_message(first)
        net.nodes["a"].cut_clients()
        group = next(iter(engine.queues[name].groups.values()))
        await until(lambda: group.consumers[0].is_paused)
        assert group.in_flight == 1  # its lease lasts until the deadline
        async with net.nodes["b"].client(client_in(0), **options) as second:
            assert second.session_present
            assert await next_payload(second) == b"one"
            await until(lambda: group.in_flight == 0)


async def test_client_that_publishes_and_then_subscribes_in_one_cell_publishes_once() -> None:
    name, other = queue_in(1), queue_in(1, "other")
    async with two_nodes() as net:
        async with net.nodes["a"].client(
            client_in(0), clean_start=False, session_expiry=60
        ) as client:
            publishing = [
                asyncio.create_task(client.publish(f"$queue/{name}", b"", qos=1)) for _ in range(20)
            ]
            await asyncio.sleep(0)
            await client.subscribe(f"$queue/{other}", qos=1)
            await asyncio.gather(*publishing)
            await client.publish(f"$queue/{name}", b"", qos=1)
        assert net.nodes["b"].engine(1).queues[name].depth == 21


async def test_session_that_ends_releases_its_remote_deliveries() -> None:
    name = queue_in(1)
    async with two_nodes() as net:
        async with net.nodes["a"].client(client_in(0, "g-"), reconnect=False) as first:
            await first.publish(f"$queue/{name}", b"one", qos=1)
            tasks = first.consumer(name, group="g")
            await tasks.open()
            await take(tasks)
            net.nodes["a"].cut_clients()
        async with (
            net.nodes["a"].client(client_in(2, "g-")) as second,
            second.consumer(name, group="g") as tasks,
        ):
            task = await take(tasks)
            assert task.attempt == 2
            await task.ack()


async def test_consumers_and_publishers_follow_a_moved_queue_and_late_settlements_count() -> None:
    name = queue_in(1)
    async with (
        two_nodes() as net,
        net.nodes["a"].client(client_in(0)) as client,
        client.consumer(name) as tasks,
    ):
        for n in range(3):
            await client.publish(f"$queue/{name}", b"%d" % n, qos=1, user=[("partition-key", "k")])
        held = await take(tasks)
        await net.move(1, "a")
        await held.ack()  # by its id and token: the lease was with the old owner
        await client.publish(f"$queue/{name}", b"3", qos=1, user=[("partition-key", "k")])
        seen: list[bytes] = []
        while len(seen) < 3:
            task = await take(tasks)
            if task.payload != b"0" or seen:
                seen.append(bytes(task.payload))
            await task.ack()
        assert seen == [b"1", b"2", b"3"]


async def test_message_published_while_a_queue_has_no_owner_is_stored_by_the_next_one() -> None:
    name = queue_in(1)
    async with (
        two_nodes() as net,
        net.nodes["a"].client(client_in(0)) as client,
        client.consumer(name) as tasks,
    ):
        await client.publish(f"$queue/{name}", b"before", qos=1)
        lost = net.kill("b")
        publishing = asyncio.create_task(client.publish(f"$queue/{name}", b"after", qos=1))
        await asyncio.sleep(0)
        assert not publishing.done()
        for cell in lost:
            await net.nodes["a"].open(cell)
        await publishing
        seen: set[bytes] = set()
        while seen != {b"before", b"after"}:
            task = await take(tasks)
            seen.add(bytes(task.payload))
            await task.ack()


async def test_puback_to_a_delivery_of_the_old_owner_settles_it_at_the_new_one() -> None:
    name = queue_in(1)
    async with two_nodes() as net:
        client = net.nodes["a"].client(client_in(0), version=4, manual_ack=True)
        async with client:
            await client.subscribe(f"$queue/{name}/$group/g", qos=1)
            await client.publish(f"$queue/{name}", b"one", qos=1)
            message = await next_message(client)
            await net.move(1, "a")
            engine = net.nodes["a"].engine(1)
            group = engine.queues[name].groups["g"]
            await message.ack()
            await until(lambda: engine.queues[name].depth == 0)
            assert group.queue.name == name


async def test_puback_of_an_explicit_3_1_1_consumer_settles_at_no_owner() -> None:
    name = queue_in(1)
    async with two_nodes() as net:
        client = net.nodes["a"].client(client_in(0), version=4, manual_ack=True)
        async with client:
            await client.subscribe(f"$queue/{name}/$group/g/$explicit", qos=1)
            await client.publish(f"$queue/{name}", b"one", qos=1)
            message = await next_message(client)
            await net.move(1, "a")
            await message.ack()
            message_id = message.topic.rpartition("/")[2]
            await client.publish(f"$queue/{name}", b"two", qos=1)  # follows the PUBACK
            queue = net.nodes["a"].engine(1).queues[name]
            assert queue.depth == 2
            await client.publish(f"$queue/{name}/$ack/{message_id}", b"", qos=1)
            await until(lambda: queue.depth == 1)


@pytest.mark.parametrize("own", ["mine", ""])
@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("receiver", [True, False])
async def test_settlement_after_a_move_counts_by_the_receivers_token(
    own: str, by_token: bool, receiver: bool
) -> None:
    """With any kind of message id.

    Only the client that received the delivery may still settle it.
    """
    name = queue_in(1)
    user = [("message-id", own)] if own else []
    async with two_nodes() as net, net.nodes["a"].client(client_in(2), manual_ack=True) as client:
        async with net.nodes["a"].client(client_in(0), manual_ack=True) as worker:
            await worker.subscribe(f"$queue/{name}/$group/g", qos=1)
            await client.publish(f"$queue/{name}", b"one", qos=1, user=user)
            reported = dict((await next_message(worker)).properties.user)
        await net.move(1, "a")
        queue = net.nodes["a"].engine(1).queues[name]
        settle = [("message-id", reported["message-id"]), ("consumer-group", "g")]
        if by_token:
            settle.append(("delivery-token", reported["delivery-token"]))
        counts = by_token and receiver
        # The new owner does not know an id that the publisher assigned.
        quiet = counts or (own and not by_token)
        refused = nullcontext() if quiet else pytest.raises(PublishRefused, match="delivery-token")
        async with net.nodes["a"].client(
            client_in(0) if receiver else client_in(2, "other")
        ) as settler:
            with refused:
                await settler.publish(f"$queue/{name}/$ack", b"", qos=1, user=settle)
        assert queue.depth == (0 if counts else 1)
