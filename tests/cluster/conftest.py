"""Fixtures for both coordination KVs, each on a real server."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from sluice.cluster.etcd.etcd_client import EtcdClient
from sluice.cluster.etcd.etcd_kv import EtcdKv
from sluice.cluster.membership.coordinator import LINK_PROTOCOL_VERSION, NodeInfo
from sluice.cluster.membership.kv import CoordinationKv
from sluice.cluster.membership.membership import Membership
from sluice.cluster.membership.redis_kv import RedisKv
from tests.support.etcd_process import EtcdProcess
from tests.support.redis_process import RedisProcess

CELLS = 6


@pytest.fixture(scope="session")
def etcd_server(redis_folder: Path) -> Iterator[EtcdProcess]:
    """An etcd for tests that do not damage it: each test uses its own cluster name."""
    running = EtcdProcess(redis_folder / "etcd").start()
    yield running
    running.stop()


class MembershipHarness:
    """Creates nodes that share one coordination KV."""

    def __init__(self, make_kv: Callable[[], CoordinationKv], stack: AsyncExitStack) -> None:
        self.make_kv = make_kv
        self._stack = stack

    async def join(
        self,
        name: str,
        lease: float = 5.0,
        cells: int = CELLS,
        link: str = "",
        kv: CoordinationKv | None = None,
        before: Callable[[str], None] = lambda node_id: None,
        speaks: int = LINK_PROTOCOL_VERSION,
        key: str = "",
    ) -> Node:
        node = Node(name, Membership(kv or self.make_kv(), cells, lease), link or f"{name}:1")
        node.before = before
        self._stack.push_async_callback(node.membership.stop)
        await node.start(speaks, key)
        return node


class Node:
    def __init__(self, name: str, membership: Membership, link: str) -> None:
        self.name = name
        self.link = link
        self.membership = membership
        self.before: Callable[[str], None] = lambda node_id: None
        self.lost = 0
        self.changes = 0
        self.this_node = NodeInfo("", name, link)
        membership.on_lost = self._lose
        membership.on_change = self._change

    async def start(self, speaks: int = LINK_PROTOCOL_VERSION, key: str = "") -> None:
        node_id = f"{self.name}-{os.urandom(4).hex()}"
        self.this_node = NodeInfo(node_id, self.name, self.link, speaks=speaks, key=key)
        self.before(self.this_node.id)
        await self.membership.start(self.this_node)

    @property
    def id(self) -> str:
        return self.this_node.id

    def sees(self, *nodes: Node) -> bool:
        return set(self.membership.nodes) == {one.id for one in nodes}

    def _lose(self) -> None:
        self.lost += 1

    def _change(self) -> None:
        self.changes += 1


def kv_at(server: Any, cluster: str) -> CoordinationKv:
    if isinstance(server, RedisProcess):
        return RedisKv(server.url, "sluice", cluster)
    if isinstance(server, EtcdProcess):
        return EtcdKv(EtcdClient([one.endpoint for one in server.members]), cluster)
    raise AssertionError(server)


@pytest.fixture(params=["etcd", "redis"])
def server(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture
async def cluster_members(server: Any) -> AsyncIterator[MembershipHarness]:
    cluster = os.urandom(4).hex()
    async with AsyncExitStack() as stack:
        yield MembershipHarness(lambda: kv_at(server, cluster), stack)
