"""A cluster whose Redis fails over to a stale replica: all nodes report it, any confirms it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sluice.client import Client
from tests.cli.shell import Shell
from tests.cluster.real_nodes.node_processes import Nodes
from tests.support.redis_process import FailoverPair

QUEUES = [f"orders{nth}" for nth in range(12)]  # of several cells and both nodes
TIMEOUT_SECONDS = 60.0


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[FailoverPair]:
    made = FailoverPair(tmp_path / "redis")
    yield made
    made.stop()


@pytest.fixture
def nodes(pair: FailoverPair, tmp_path: Path) -> Iterator[Nodes]:
    folder = tmp_path / "cluster"
    folder.mkdir()
    made = Nodes(folder, pair.url, "")
    try:
        made.start("one")
        made.start("two")
        yield made
    finally:
        made.stop()


async def ask(nodes: Nodes, name: str, path: str) -> Any:
    address = nodes.by_name[name].address("http")
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        return (await http.get(f"http://{address}{path}")).json()


async def test_loss_in_several_cells_is_reported_by_every_node_and_confirmed_through_one(
    nodes: Nodes, pair: FailoverPair
) -> None:
    shell = Shell(nodes.by_name["one"])
    assert shell.run("cluster", "status", "--nodes", "2", "--wait", "60s").code == 0
    async with Client(port=nodes.port("one"), client_id="maker") as client:
        for name in QUEUES:
            await client.publish(f"$queue/{name}", b"kept", qos=1)
        pair.wait_until_level()
        pair.fall_behind()
        for name in QUEUES:
            await client.publish(f"$queue/{name}", b"lost", qos=1)
        pair.fail_over()
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                found = await ask(nodes, "two", "/api/v1/losses")
                if {queue for loss in found for queue in loss["queues"]} == set(QUEUES):
                    break
                await asyncio.sleep(0.1)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            for name in QUEUES:  # service goes on
                await client.publish(f"$queue/{name}", b"after", qos=1)
    cells = [loss["cell"] for loss in found]
    assert cells == sorted(set(cells)) and len(cells) > 1
    both = [(await ask(nodes, name, "/api/v1/node"))["losses"] for name in ("one", "two")]
    assert all(both) and sum(both) >= len(cells)
    assert (await ask(nodes, "two", "/readyz"))["warnings"]
    assert "sluice losses list" in shell.run("cluster", "status").stdout
    assert "Redis has lost confirmed frames" in nodes.log("one") + nodes.log("two")
    assert shell.run("losses", "confirm", "--yes").code == 0
    for name in ("one", "two"):
        assert await ask(nodes, name, "/api/v1/losses") == []
        assert (await ask(nodes, name, "/readyz"))["warnings"] == []
    assert "sluice losses list" not in shell.run("cluster", "status").stdout
