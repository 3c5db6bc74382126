"""Ingress of clients: sockets and WebSockets, in pieces, early or slow, with client details."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from sluice.broker.net.connection import Connection
from sluice.broker.net.listener import open_listener
from sluice.broker.net.memory_transport import WRITE_HIGH_WATER, connect_in_memory
from sluice.cluster.client_ingress import ClientIngress, Tunnel
from sluice.cluster.transport.stream_acceptor import accept_stream, make_greeting
from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
    Connack,
    Connect,
    Packet,
    Publish,
    Subscribe,
    SubscriptionRequest,
)
from sluice.wire.reader import PacketReader
from tests.cluster.kit import LinkEnd, until
from tests.cluster.memory_cluster import MemoryCluster, client_in, two_nodes


@pytest.fixture
async def net() -> AsyncIterator[MemoryCluster]:
    async with two_nodes() as made:
        yield made


def make_ingress(net: MemoryCluster, connect_timeout: float = 10.0) -> ClientIngress:
    return ClientIngress(net.nodes["a"].node, 2_097_152, connect_timeout)


@asynccontextmanager
async def listening(net: MemoryCluster, name: str = "mqtt") -> AsyncIterator[tuple[str, int]]:
    listener = await open_listener(
        name, "127.0.0.1", 0, lambda: make_ingress(net), None, 65_536, 10.0
    )
    host, _, port = listener.address.rpartition(":")
    try:
        yield host, int(port)
    finally:
        listener.server.close()


async def read_packets(reader: asyncio.StreamReader, count: int) -> list[Packet]:
    packets = PacketReader(1 << 20)
    found: list[Packet] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += packets.feed(await reader.read(65_536), V5)
    return found


@pytest.mark.parametrize("cell", [0, 1])
async def test_connect_may_arrive_byte_by_byte(net: MemoryCluster, cell: int) -> None:
    async with listening(net) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        for byte in encode(Connect(client_in(cell), V5, True, 60), V5):
            writer.write(bytes([byte]))
            await writer.drain()
        (answer,) = await read_packets(reader, 1)
        assert isinstance(answer, Connack) and answer.reason == 0
        sessions = net.nodes["ab"[cell]].node.local_cells[cell].broker.registry.sessions
        assert client_in(cell) in sessions
        writer.close()
        await until(lambda: client_in(cell) not in sessions)


@pytest.mark.parametrize("cell", [0, 1])
async def test_websocket_client_reaches_its_cell(net: MemoryCluster, cell: int) -> None:
    async with listening(net, "ws") as (host, port):
        url = f"ws://{host}:{port}/mqtt"
        async with (
            connect(url, subprotocols=[Subprotocol("mqtt")], proxy=None) as websocket,
            asyncio.timeout(30),
        ):
            await websocket.send(encode(Connect(client_in(cell), V5, True, 60), V5))
            packets = PacketReader(1 << 20)
            (answer,) = packets.feed(cast(bytes, await websocket.recv()), V5)
            assert isinstance(answer, Connack) and answer.reason == 0
            await websocket.send(encode(Subscribe(1, [SubscriptionRequest(b"t", 0)]), V5))
            await websocket.send(encode(Publish(b"t", b"hello", 0), V5))
            found: list[Packet] = []
            while len(found) < 2:
                found += packets.feed(cast(bytes, await websocket.recv()), V5)
            assert b"hello" in [one.payload for one in found if isinstance(one, Publish)]


async def test_first_packet_other_than_connect_is_refused_by_a_local_cell(
    net: MemoryCluster,
) -> None:
    async with listening(net) as (host, port):
        # As long as its first bytes announce if they are read as MQTT.
        page = b"GET / HTTP/1.1\r\n" + b"Accept: text/html\r\n" * 5
        for nonsense in (page, b"\xff\xff\xff\xff\xff\xff", b"\x10\x05abcde"):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(nonsense)
            async with asyncio.timeout(30):
                await reader.read()
            writer.close()


async def test_client_whose_cell_has_no_owner_waits_for_one(net: MemoryCluster) -> None:
    await net.nodes["b"].close(1)
    client = net.nodes["a"].client(client_in(1), connect_timeout=30)
    connecting = asyncio.create_task(client.connect())
    done, _ = await asyncio.wait([connecting], timeout=0.1)
    assert not done
    await net.nodes["a"].open(1)
    await connecting
    await client.close()


async def test_client_that_does_not_read_slows_down_its_stream(net: MemoryCluster) -> None:
    """The backlog is bounded on every hop, and QoS 0 is dropped at the session, as on one node."""
    async with listening(net) as (host, port):
        _, writer = await asyncio.open_connection(host, port, limit=1024)
        name = client_in(1)
        connect = Connect(name, V5, True, 0)
        connect.properties.session_expiry = 60  # so that the session is not on this node
        writer.write(encode(connect, V5))
        writer.write(encode(Subscribe(1, [SubscriptionRequest(b"flood", 0)]), V5))
        session = net.nodes["b"].node.local_cells[1].broker.registry.sessions
        await until(lambda: name in session and session[name].subscriptions)
        body = b"x" * 65_536
        async with net.nodes["b"].client(client_in(3)) as publisher:
            for _ in range(1000):
                await publisher.publish("flood", body, qos=0)
                if session[name].outbound.dropped_count:
                    break
                await asyncio.sleep(0)
            await until(lambda: session[name].outbound.dropped_count)
            connection = session[name].connection
            assert isinstance(connection, Connection) and connection.is_write_paused
            assert connection.transport.get_write_buffer_size() < 3 * WRITE_HIGH_WATER
        writer.close()
        await until(lambda: session[name].connection is None)


async def test_cell_learns_address_and_certificate_of_its_client(net: MemoryCluster) -> None:
    certificate = {"subject": ((("commonName", "ann"),),), "serialNumber": "1F"}

    class Socket:
        def get_extra_info(self, name: str, default: object = None) -> object:
            return {"peername": ("10.1.2.3", 4567), "peercert": certificate}.get(name, default)

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    connection = net.nodes["a"].node.local_cells[0].broker.connect()
    accept_stream(connection, make_greeting(Socket())).connection_made(cast(Any, Socket()))
    assert connection.transport.get_extra_info("peername") == ("10.1.2.3", 4567)
    assert connection.transport.get_extra_info("peercert") == certificate
    connection.connection_lost(None)


async def test_client_that_leaves_before_its_stream_is_open_is_not_announced(
    net: MemoryCluster,
) -> None:
    """Otherwise its late CONNECT would take over the session from the client's next connection."""
    tunnel = Tunnel(make_ingress(net), encode(Connect(client_in(1), V5, True, 0), V5))
    far = LinkEnd()
    tunnel.end(None)
    connect_in_memory(tunnel, far, asyncio.get_running_loop().call_soon)
    await until(lambda: far.lost)
    assert far.data == b""
