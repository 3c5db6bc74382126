"""Three `sluice serve` under load while nodes are killed, paused, stopped and started again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sluice.client import Client
from tests.cluster.kit import until
from tests.cluster.processes import Nodes, Work
from tests.redis_process import RedisProcess

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def nodes(redis_server: RedisProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("cluster"), redis_server.url, "")
    try:
        with ThreadPoolExecutor() as hands:
            list(hands.map(made.start, NAMES))
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
    async with Work(nodes, ("one", "two")) as work:
        nodes.kill("three")
        await work.more(20)
        nodes.start("three")
        await work.more(20)
        await work.check()


async def test_a_node_that_slept_writes_nothing_and_comes_back_as_another(nodes: Nodes) -> None:
    async with Work(nodes, ("one", "three")) as work:
        nodes.signal("two", signal.SIGSTOP)
        try:
            await work.more(20)  # the others have taken over
        finally:
            nodes.signal("two", signal.SIGCONT)
        await until(lambda: nodes.log("two").count("cell opened") > nodes.log("two").count("cell closed"))
        await until(lambda: "no longer in the cluster" in nodes.log("two"))
        await work.more(20)
        await work.check()
    async with Client(port=nodes.port("two"), client_id="late") as client:
        await client.publish("$queue/late", b"", qos=1)


async def test_a_planned_leave_hands_everything_over_and_is_not_waited_for(nodes: Nodes) -> None:
    async with Work(nodes, ("one", "two")) as work:
        nodes.by_name.pop("three").stop()
        await work.more(10)
        assert "cell closed" in nodes.log("three")
        nodes.start("three")
        await work.more(10)
        await work.check()
