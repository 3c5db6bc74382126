"""Two sessions of one client id at a time: the older one must not harm the newer one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sluice.broker.limits import Limits
from sluice.broker.net.memory_transport import connect_in_memory
from sluice.cluster.remote_queues.session_proxies import RemoteSessionEnder
from sluice.cluster.transport.stream_acceptor import PROXY_GREETING
from sluice.placement import cell_of
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connack, Connect, Disconnect
from tests.cluster.kit import until
from tests.cluster.memory_cluster import MemoryCluster, two_nodes
from tests.cluster.remote_queues.test_client_claims import (
    NAME,
    REMOTE,
    RawClient,
    connected,
    sessions_of,
)

LOCAL = [0, 2, 4][cell_of(NAME, 3)]  # the cell of the session of a client of node a


@pytest.fixture
async def net() -> AsyncIterator[MemoryCluster]:
    async with two_nodes() as made:
        yield made


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.005)


async def test_renewed_claim_does_not_end_a_stored_session(net: MemoryCluster) -> None:
    old = await connected(net, "a")
    net.cut_off("a")
    stored = await connected(net, "b", clean=False, expiry=600)
    stored.transport.close()
    await until(lambda: sessions_of(net, "b")[0].connection is None)
    net.unreachable.clear()
    await until(lambda: old.reason_of(Disconnect) >= 0)
    assert len(sessions_of(net, "b")) == 1


async def open_proxy(net: MemoryCluster, node: str, cell: int) -> RawClient:
    proxy = RawClient()
    acceptor = net.nodes[node].node.accept(cell, PROXY_GREETING, "b")
    assert acceptor is not None
    connect_in_memory(proxy, acceptor, asyncio.get_running_loop().call_soon)
    proxy.transport.write(encode(Connect(NAME, V5, True, 0), V5))
    await until(lambda: proxy.reason_of(Connack) >= 0)
    return proxy


async def test_proxy_of_an_earlier_session_does_not_end_the_client(net: MemoryCluster) -> None:
    client = await connected(net, "a")
    proxy = await open_proxy(net, "a", LOCAL)
    assert proxy.reason_of(Connack) >= 0x80
    await settle()
    assert client.reason_of(Disconnect) == -1 and len(sessions_of(net, "a")) == 1


async def test_late_end_of_a_replaced_session_does_not_end_the_client(net: MemoryCluster) -> None:
    client = await connected(net, "a")
    net.nodes["b"].node.dial(LOCAL, PROXY_GREETING, RemoteSessionEnder(NAME))
    await settle()
    assert client.reason_of(Disconnect) == -1 and len(sessions_of(net, "a")) == 1


async def test_keep_alive_limit_does_not_end_a_claim() -> None:
    limits = Limits()
    limits.max_keep_alive = 1
    async with two_nodes(limits=limits) as net:
        await connected(net, "a")
        cell = net.nodes["b"].node.local_cells[REMOTE]
        holder = cell.broker.registry.sessions[NAME].connection
        assert holder is not None and holder.keep_alive == 0  # type: ignore[attr-defined]


async def test_taking_over_a_session_elsewhere_counts_as_a_new_connection() -> None:
    limits = Limits()
    limits.max_connections = 1
    async with two_nodes(limits=limits) as net:
        await connected(net, "a")
        other = await RawClient().open(net, "b", Connect("", V5, True, 0))
        await until(lambda: other.reason_of(Connack) == 0)
        late = await RawClient().open(net, "b", Connect(NAME, V5, True, 0))
        await until(lambda: late.reason_of(Connack) >= 0)
        assert late.reason_of(Connack) >= 0x80
