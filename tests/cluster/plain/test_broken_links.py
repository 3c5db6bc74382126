"""Plain messages between nodes whose link breaks repeatedly: none is lost or duplicated."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sluice.client import Backoff, Client, Will
from sluice.cluster.plain.node_inbox import RETENTION_SECONDS, NodeInbox, entry_key
from sluice.placement import cell_of
from tests.cluster.kit import until
from tests.cluster.memory_cluster import client_in, queue_in, two_nodes
from tests.cluster.real_nodes.chaos import ProxiedNodes
from tests.cluster.real_nodes.node_processes import CELLS
from tests.support.redis_process import RedisProcess

BURST = 300
CUTS = 30


class Reader:
    """Counts received messages up to an end marker."""

    def __init__(self, client: Client) -> None:
        self.got: Counter[bytes] = Counter()
        self._client = client

    async def read(self) -> Counter[bytes]:
        async for message in self._client.messages():
            if message.payload == b"last":
                break
            self.got[bytes(message.payload)] += 1
        return self.got


async def publish_all(client: Client, qos: int, cut: asyncio.Event) -> None:
    """Publish a burst, followed by the end marker."""

    async def one(number: int) -> None:
        await client.publish("burst/a", b"%d" % number, qos=qos)
        if number % (BURST // CUTS) == 0:
            cut.set()

    await asyncio.gather(*(one(number) for number in range(BURST)))
    await client.publish("burst/a", b"last", qos=qos)


ONCE = Counter({b"%d" % number: 1 for number in range(BURST)})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("qos", [1, 2])
async def test_plain_message_arrives_once_however_often_the_link_breaks(
    qos: int, seed: int
) -> None:
    draw = random.Random(seed)
    options = {"clean_start": False, "session_expiry": 600}
    async with (
        two_nodes() as net,
        net.nodes["a"].client(client_in(0)) as here,
        net.nodes["a"].client(client_in(2)) as member,
        net.nodes["b"].client(client_in(1), max_inflight=20) as publisher,
    ):
        async with net.nodes["a"].client(client_in(4, "away"), **options) as persistent:
            await persistent.subscribe("burst/#", qos=2)
        await here.subscribe("burst/#", qos=2)
        await member.subscribe("$share/g/burst/#", qos=2)
        publishing = asyncio.create_task(publish_all(publisher, qos, asyncio.Event()))
        bridge = net.nodes["b"].node._bridges["a"]
        while not publishing.done():
            for _ in range(draw.randrange(1, 12)):
                await asyncio.sleep(0)
            net.cut_streams()
            await asyncio.sleep(0)  # both ends are notified in the next turn
            await until(lambda: bridge.is_open or publishing.done())
        async with (
            asyncio.timeout(30),
            net.nodes["a"].client(client_in(4, "away"), **options) as persistent,
        ):
            assert await Reader(here).read() == ONCE
            assert await Reader(member).read() == ONCE
            assert await Reader(persistent).read() == ONCE


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("moving", [1, 4])
async def test_plain_message_arrives_once_while_cells_are_handed_over(
    moving: int, seed: int
) -> None:
    """The handed-over cell is that of the publisher's or of the receiver's session."""
    draw = random.Random(seed)
    options = {"clean_start": False, "session_expiry": 600}
    async with (
        two_nodes() as net,
        net.nodes["b"].client(client_in(1), max_inflight=20, **options) as publisher,
    ):
        async with net.nodes["a"].client(client_in(4), **options) as persistent:
            await persistent.subscribe("burst/#", qos=2)
        publishing = asyncio.create_task(publish_all(publisher, 2, asyncio.Event()))
        while not publishing.done():
            for _ in range(draw.randrange(1, 20)):
                await asyncio.sleep(0)
            await net.move(moving, "b" if net.owners[moving] == "a" else "a")
            await asyncio.wait([publishing], timeout=draw.uniform(0.0, 0.03))
        await publishing
        async with (
            asyncio.timeout(30),
            net.nodes["a"].client(client_in(4), **options) as persistent,
        ):
            assert await Reader(persistent).read() == ONCE


async def test_message_stored_during_a_handover_is_not_sent_to_the_next_owner_as_well() -> None:
    options = {"clean_start": False, "session_expiry": 600}
    async with two_nodes() as net, net.nodes["b"].client(client_in(1)) as publisher:
        async with net.nodes["a"].client(client_in(4), **options) as persistent:
            await persistent.subscribe("news/#", qos=2)
        net.stores[4].hold()
        publishing = asyncio.create_task(publisher.publish("news/1", b"one", qos=2))
        await until(lambda: net.nodes["a"].node.local_cells[4].pending_commits)
        moving = asyncio.create_task(net.move(4, "b"))
        await until(lambda: 4 not in net.nodes["a"].node.local_cells)
        net.stores[4].release()
        await moving
        assert (await publishing).reason == 0
        await publisher.publish("news/1", b"last", qos=2)
        async with (
            asyncio.timeout(30),
            net.nodes["a"].client(client_in(4), **options) as persistent,
        ):
            assert await Reader(persistent).read() == Counter([b"one"])


async def test_will_for_a_queue_of_another_node_arrives_once_though_the_link_breaks() -> None:
    name = queue_in(3)
    async with two_nodes() as net:
        for turns in range(12):
            will = Will(f"$queue/{name}", b"%d" % turns, qos=1)
            dying = net.nodes["a"].client(client_in(0), will=will, reconnect=False)
            await dying.connect()
            net.nodes["a"].cut_clients()
            for _ in range(turns):
                await asyncio.sleep(0)
            net.cut_streams()
            await dying.close()
        queue = net.nodes["b"].engine(3).queues
        await until(lambda: name in queue and queue[name].depth >= 12)
        async with (
            net.nodes["b"].client(client_in(3)) as reader,
            reader.consumer(name) as dead_letters,
        ):
            await reader.publisher(name).send("last")
            async with asyncio.timeout(30):
                got = [(await anext(dead_letters)).payload for _ in range(13)]
        assert sorted(got) == sorted([*(b"%d" % turns for turns in range(12)), b"last"])


async def test_acknowledged_entries_are_forgotten() -> None:
    async with (
        two_nodes() as net,
        net.nodes["a"].client(client_in(0)) as reader,
        net.nodes["b"].client(client_in(1)) as publisher,
    ):
        await reader.subscribe("burst/#", qos=1)
        for _ in range(3):
            await asyncio.gather(*(publisher.publish("burst/a", b"", qos=1) for _ in range(100)))
        inbox = net.nodes["a"].node._inboxes["b"]
        await until(lambda: len(inbox) < 64)


def test_entries_unacknowledged_when_a_link_broke_are_remembered_for_a_while() -> None:
    inbox = NodeInbox()
    first = inbox.open_stream(0.0)
    for dedup_id in range(2):
        inbox.find_or_add(entry_key(dedup_id, 3), 3, first)
    inbox.on_stream_lost(first, 1.0)
    second = inbox.open_stream(2.0)
    inbox.find_or_add(entry_key(1, 3), 3, second)  # resent
    inbox.open_stream(2.0 + RETENTION_SECONDS)
    assert len(inbox) == 1
    inbox.on_stream_lost(second, 70.0)
    inbox.open_stream(71.0 + RETENTION_SECONDS)
    assert len(inbox) == 0


async def test_shared_message_moved_to_another_node_goes_to_its_share_only() -> None:
    async with (
        two_nodes() as net,
        net.nodes["b"].client(client_in(1)) as plain,
        net.nodes["b"].client(client_in(1, "member")) as member,
        net.nodes["b"].client(client_in(3)) as publisher,
    ):
        await plain.subscribe("jobs/#", qos=1)
        async with net.nodes["a"].client(client_in(0), manual_ack=True, reconnect=False) as first:
            await first.subscribe("$share/g/jobs/#", qos=1)
            await publisher.publish("jobs/1", b"one", qos=1)
            async with asyncio.timeout(30):
                assert (await anext(aiter(first.messages()))).payload == b"one"
            await member.subscribe("$share/g/jobs/#", qos=1)
            net.nodes["a"].cut_clients()  # its session ends with the message unacknowledged
            async with asyncio.timeout(30):
                assert (await anext(aiter(member.messages()))).payload == b"one"
        await publisher.publish("jobs/1", b"last", qos=1)
        async with asyncio.timeout(30):
            assert await Reader(plain).read() == Counter([b"one"])


@pytest.fixture
def proxied(redis_server: RedisProcess, tmp_path: Path) -> Iterator[ProxiedNodes]:
    with ExitStack() as stack:
        nodes = ProxiedNodes(tmp_path, redis_server.url, None, stack)
        stack.callback(nodes.stop)
        for name in ("one", "two"):
            nodes.start(name)
        yield nodes


async def test_real_nodes_deliver_each_message_once_while_their_link_breaks(
    proxied: ProxiedNodes,
) -> None:
    await until(lambda: proxied.owners("one").count("two") == CELLS // 2)
    owners = proxied.owners("one")
    ids = {
        name: next(f"c{n}" for n in range(999) if owners[cell_of(f"c{n}", CELLS)] == name)
        for name in ("one", "two")
    }
    backoff = Backoff(0.05, 0.2)
    async with (
        Client(port=proxied.port("one"), client_id=ids["one"], backoff=backoff) as reader,
        Client(
            port=proxied.port("two"), client_id=ids["two"], backoff=backoff, max_inflight=20
        ) as publisher,
    ):
        await reader.subscribe("burst/#", qos=2)
        reading = asyncio.create_task(Reader(reader).read())
        cut = asyncio.Event()
        publishing = asyncio.create_task(publish_all(publisher, 2, cut))
        async with asyncio.timeout(60):
            while not publishing.done():
                waiting = asyncio.create_task(cut.wait())
                await asyncio.wait([waiting, publishing], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                cut.clear()
                for name in ("one", "two"):
                    proxied.proxies[name][0].cut()
            await publishing
            assert await reading == ONCE
