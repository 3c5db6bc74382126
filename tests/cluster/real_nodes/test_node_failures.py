"""Three `sluice serve` under load while nodes are killed, paused, stopped and started again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from sluice.client import Backoff, Client, OutgoingMessage
from sluice.placement import cell_of, cell_of_queue
from tests.cluster.kit import until
from tests.cluster.plain.test_broken_links import Reader
from tests.cluster.real_nodes.node_processes import CELLS, ClusterLoad, Nodes
from tests.support.redis_process import RedisProcess

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def nodes(redis_server: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("cluster"), redis_server.url, "")
    try:
        with ThreadPoolExecutor() as executor:
            list(executor.map(made.start, NAMES))
        yield made
    finally:
        made.stop()


async def test_messages_go_from_any_node_to_any_other(nodes: Nodes) -> None:
    async with (
        Client(port=nodes.port("one"), client_id="a") as a,
        Client(port=nodes.port("two"), client_id="b") as b,
    ):
        await b.subscribe("plain/#", qos=1)
        await a.publish("plain/1", b"hello", qos=1)
        message = await anext(aiter(b.messages()))
        assert message.payload == b"hello"


async def test_nothing_is_lost_when_a_node_is_killed_under_load(nodes: Nodes) -> None:
    async with ClusterLoad(nodes, ("one", "two")) as work:
        nodes.kill("three")
        await work.more(20)
        nodes.start("three")
        await work.more(20)
        await work.check()


async def test_paused_node_writes_nothing_and_returns_with_a_new_id(nodes: Nodes) -> None:
    async with ClusterLoad(nodes, ("one", "three")) as work:
        nodes.signal("two", signal.SIGSTOP)
        try:
            await work.more(20)  # the other nodes have taken over
        finally:
            nodes.signal("two", signal.SIGCONT)
        await until(
            lambda: nodes.log("two").count("cell opened") > nodes.log("two").count("cell closed")
        )
        await until(lambda: "no longer in the cluster" in nodes.log("two"))
        await work.more(20)
        await work.check()
    async with Client(port=nodes.port("two"), client_id="late") as client:
        await client.publish("$queue/late", b"", qos=1)


async def test_planned_leave_hands_all_cells_over_without_delay(nodes: Nodes) -> None:
    async with ClusterLoad(nodes, ("one", "two")) as work:
        nodes.by_name.pop("three").stop()
        await work.more(10)
        assert "cell closed" in nodes.log("three")
        nodes.start("three")
        await work.more(10)
        await work.check()


@pytest.mark.parametrize("ending", ["killed", "stopped"])
async def test_ack_by_ids_after_the_owner_has_gone_counts_at_the_next_owner(
    nodes: Nodes, ending: str
) -> None:
    await until(lambda: nodes.owners("one").count("two") == CELLS // 3)
    owners = nodes.owners("one")
    client_id = next(f"w-{n}" for n in range(999) if owners[cell_of(f"w-{n}", CELLS)] == "one")
    queue = next(
        f"{ending}-{n}"
        for n in range(999)
        if owners[cell_of_queue(f"{ending}-{n}", CELLS)] == "two"
    )
    names = [f"job {n}" for n in range(20)]
    async with Client(port=nodes.port("one"), client_id=client_id) as worker:
        await worker.publisher(queue).send_many(OutgoingMessage(name, id=name) for name in names)
        await worker.subscribe(f"$queue/{queue}", qos=1)
        messages = worker.messages()
        for _ in names:
            await anext(messages)
        if ending == "killed":
            nodes.kill("two")
            leaving = asyncio.create_task(asyncio.sleep(0))
        else:
            leaving = asyncio.create_task(asyncio.to_thread(nodes.by_name.pop("two").stop))
            await until(lambda: "two" not in nodes.owners("one"))
        async with asyncio.timeout(30):
            ids = [("message-id", name) for name in names]
            assert (await worker.publish(f"$queue/{queue}/$ack", b"", qos=1, user=ids)).reason == 0
            async with (
                Client(port=nodes.port("three")) as other,
                other.consumer(queue, group="w") as jobs,
            ):
                await worker.unsubscribe(f"$queue/{queue}")
                await other.publisher(queue).send("new")
                assert (await anext(jobs)).text == "new"
            if ending == "killed":
                # Acked while the cell had no owner: not even the same client gets it again.
                await worker.subscribe("end", qos=1)
                await worker.publish("end", qos=1)
                assert (await anext(messages)).topic == "end"
    await leaving
    nodes.start("two")


@pytest.mark.parametrize("ending", ["killed", "stopped"])
async def test_every_settlement_after_the_owner_has_gone_counts_at_the_next_owner(
    nodes: Nodes, ending: str
) -> None:
    await until(lambda: nodes.owners("one").count("two") == CELLS // 3)
    owners = nodes.owners("one")
    client_id = next(f"v-{n}" for n in range(999) if owners[cell_of(f"v-{n}", CELLS)] == "one")
    queue = next(
        f"{ending}:{n}"
        for n in range(999)
        if owners[cell_of_queue(f"{ending}:{n}", CELLS)] == "two"
    )
    names = ["failed", "bad", "unused", "long"]
    async with Client(port=nodes.port("one"), client_id=client_id) as worker, asyncio.timeout(60):
        await worker.publisher(queue).send_many(OutgoingMessage(name, id=name) for name in names)
        await worker.subscribe(f"$queue/{queue}", qos=1)
        messages = worker.messages()
        for _ in names:
            await anext(messages)
        leaving = asyncio.create_task(
            asyncio.to_thread(
                nodes.by_name.pop("two").stop if ending == "stopped" else partial(nodes.kill, "two")
            )
        )
        if ending == "stopped":
            await until(lambda: "two" not in nodes.owners("one"))
        else:
            await leaving
        settlements = [
            ("$nack", b"", [("message-id", "failed"), ("delay", "1h")]),
            ("$reject/bad", b"", [("description", "no good")]),
            ("$release", b'["unused"]', []),
            ("$extend", b"long", []),
        ]
        sent = [
            worker.publish(f"$queue/{queue}/{verb}", load, qos=1, user=user)
            for verb, load, user in settlements
        ]
        assert [answer.reason for answer in await asyncio.gather(*sent)] == [0] * len(settlements)
        user = [("message-id", "long"), ("consumer-group", "v")]
        assert (await worker.publish(f"$queue/{queue}/$ack", b"", qos=1, user=user)).reason == 0
        await until(
            lambda: (
                nodes.ledger("three", queue)
                == {"acked": 1, "dead": 1, "retrying": 1, "delivered": 1}
            )
        )
    await leaving
    nodes.start("two")


def has_its_share(nodes: Nodes, name: str) -> bool:
    return nodes.owners("three").count(name) == CELLS // 3


ROUNDS = int(os.environ.get("KILLS", "3"))  # of the next test


@pytest.mark.timeout(120 + 60 * ROUNDS)
async def test_plain_qos_2_arrives_once_while_the_nodes_of_both_sides_are_killed_in_turn(
    nodes: Nodes,
) -> None:
    persistent: dict[str, Any] = {
        "clean_start": False,
        "session_expiry": 600,
        "backoff": Backoff(0.05, 0.2),
    }
    await until(lambda: nodes.owners("three").count("two") == CELLS // 3)
    owners = nodes.owners("three")
    ids = {
        name: next(f"q{n}" for n in range(999) if owners[cell_of(f"q{n}", CELLS)] == name)
        for name in ("one", "two")
    }
    async with Client(port=nodes.port("three"), client_id=ids["two"], **persistent) as reader:
        await reader.subscribe("once/#", qos=2)
    published: list[bytes] = []
    for number in range(ROUNDS):
        victim = ("two", "one")[number % 2]
        await until(partial(has_its_share, nodes, victim))
        some = asyncio.Event()
        confirmed: list[bytes] = []
        async with Client(
            port=nodes.port("three"), client_id=ids["one"], max_inflight=20, **persistent
        ) as writer:

            async def publish(
                payload: bytes,
                writer: Client = writer,
                acknowledged: list[bytes] = confirmed,
                some: asyncio.Event = some,
            ) -> None:
                await writer.publish("once/a", payload, qos=2)
                acknowledged.append(payload)
                if len(acknowledged) == 100:
                    some.set()

            async with asyncio.timeout(60):
                publishing = asyncio.gather(*(publish(b"%d/%d" % (number, n)) for n in range(300)))
                await some.wait()
                nodes.kill(victim)
                await publishing
        published += confirmed
        nodes.start(victim)
    async with (
        asyncio.timeout(60),
        Client(port=nodes.port("three"), client_id=ids["two"], **persistent) as reader,
    ):
        async with Client(port=nodes.port("three")) as writer:
            await writer.publish("once/a", b"last", qos=2)
        got = await Reader(reader).read()
    assert got == Counter(published) and len(published) == 300 * ROUNDS
