"""Sessions that end with their connection live where the client is; their cell has only the id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sluice.broker.net.memory_transport import connect_in_memory
from sluice.broker.routing.cluster_port import CLIENT_CLAIM
from sluice.broker.sessions.session import Session
from sluice.client import Client
from sluice.cluster.remote_queues import client_claim
from sluice.cluster.transport.stream_acceptor import PROXY_GREETING
from sluice.wire.encode import encode
from sluice.wire.packets import V5, V311, Connack, Connect, Disconnect, Packet, Publish
from sluice.wire.reader import PacketReader
from sluice.wire.reasons import CLIENT_IDENTIFIER_NOT_VALID, SERVER_BUSY, SESSION_TAKEN_OVER
from tests.cluster.kit import until
from tests.cluster.memory_cluster import MemoryCluster, client_in, queue_in, topic_in, two_nodes

REMOTE = 1  # a cell of node b
NAME = client_in(REMOTE)


@pytest.fixture
async def net() -> AsyncIterator[MemoryCluster]:
    async with two_nodes() as made:
        yield made


def sessions_of(net: MemoryCluster, node: str, client_id: str = NAME) -> list[Session]:
    """Return the sessions of a client on a node, without proxies."""
    cells = net.nodes[node].node.local_cells.values()
    found = [cell.broker.registry.sessions.get(client_id) for cell in cells]
    return [one for one in found if one is not None and not one.is_proxy]


def holds_claim(net: MemoryCluster, client_id: str = NAME, cell: int = REMOTE) -> bool:
    owner = net.nodes[net.owners[cell] or ""].node.local_cells.get(cell)
    found = owner.broker.registry.sessions.get(client_id) if owner is not None else None
    return found is not None and found.is_proxy and found.connection is not None


class RawClient(asyncio.Protocol):
    """A client that records the packets that it receives."""

    def __init__(self) -> None:
        self.packets: list[Packet] = []
        self.is_lost = False
        self.version = V5
        self._reader = PacketReader(1 << 20)

    async def open(self, net: MemoryCluster, node: str, connect: Connect) -> RawClient:
        self.version = connect.version
        await net.nodes[node].dial(self)
        self.transport.write(encode(connect, connect.version))
        return self

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.packets += self._reader.feed(data, self.version)

    def connection_lost(self, fault: Exception | None) -> None:
        self.is_lost = True

    def reason_of(self, kind: type[Connack] | type[Disconnect]) -> int:
        return next((one.reason for one in self.packets if isinstance(one, kind)), -1)


async def connected(
    net: MemoryCluster, node: str, clean: bool = True, expiry: int = 0, version: int = V5
) -> RawClient:
    connect = Connect(NAME, version, clean, 0)
    if version == V5:
        connect.properties.session_expiry = expiry
    client = await RawClient().open(net, node, connect)
    await until(lambda: client.reason_of(Connack) == 0)
    return client


@pytest.mark.parametrize("version", [V5, V311])
async def test_session_without_expiry_lives_on_the_node_of_its_client(
    net: MemoryCluster, version: int
) -> None:
    client = await connected(net, "a", version=version)
    assert len(sessions_of(net, "a")) == 1 and sessions_of(net, "b") == []
    assert holds_claim(net)
    client.transport.close()
    await until(lambda: not sessions_of(net, "a") and not holds_claim(net))


@pytest.mark.parametrize(("clean", "expiry"), [(True, 60), (False, 60), (False, 0)])
async def test_other_sessions_live_in_the_cell_of_their_client_id(
    net: MemoryCluster, clean: bool, expiry: int
) -> None:
    await connected(net, "a", clean, expiry)
    assert sessions_of(net, "a") == [] and len(sessions_of(net, "b")) == 1


@pytest.mark.parametrize(("first", "second"), ["ab", "ba", "aa"])
@pytest.mark.parametrize("expiry", [0, 60])
async def test_second_connection_takes_over_wherever_it_is(
    net: MemoryCluster, first: str, second: str, expiry: int
) -> None:
    old = await connected(net, first)
    new = await connected(net, second, expiry=expiry)
    await until(lambda: old.is_lost or old.reason_of(Disconnect) >= 0)
    assert old.reason_of(Disconnect) == SESSION_TAKEN_OVER
    await until(lambda: len(sessions_of(net, "a") + sessions_of(net, "b")) == 1)
    assert new.reason_of(Disconnect) == -1


async def test_clean_session_ends_the_stored_session_of_its_client(net: MemoryCluster) -> None:
    stored = await connected(net, "a", clean=False, expiry=600)
    await until(lambda: sessions_of(net, "b"))
    stored.transport.close()
    await connected(net, "a")
    assert sessions_of(net, "b") == []
    again = await connected(net, "a", clean=False, expiry=600)
    connack = next(one for one in again.packets if isinstance(one, Connack))
    assert not connack.session_present


@pytest.mark.parametrize("event", ["takeover", "death of the node"])
async def test_will_is_published_in_the_cell_of_the_client_id(
    net: MemoryCluster, event: str
) -> None:
    topic = topic_in(3)
    async with net.nodes["b"].client(client_in(3)) as watcher:
        await watcher.subscribe(topic)
        will = Connect(NAME, V5, True, 0)
        will.will = Publish(topic.encode(), b"gone", 1, False)
        await RawClient().open(net, "a", will)
        await until(lambda: bool(sessions_of(net, "b")))
        if event == "takeover":
            await connected(net, "a")
        else:
            net.kill("a")
        async with asyncio.timeout(30):
            assert (await anext(aiter(watcher.messages()))).payload == b"gone"


async def test_session_survives_the_move_of_the_cell_of_its_client_id(net: MemoryCluster) -> None:
    net.add("c")
    old = await connected(net, "a")
    await net.move(REMOTE, "c")
    await until(lambda: holds_claim(net))
    assert old.reason_of(Disconnect) == -1 and len(sessions_of(net, "a")) == 1
    new = await connected(net, "c")
    await until(lambda: old.reason_of(Disconnect) == SESSION_TAKEN_OVER)
    assert new.reason_of(Disconnect) == -1


async def test_claim_survives_a_broken_link(net: MemoryCluster) -> None:
    client = await connected(net, "a")
    net.cut_streams()
    await until(lambda: holds_claim(net))
    assert client.reason_of(Disconnect) == -1


async def test_session_that_was_cut_off_loses_its_id_to_a_newer_one(net: MemoryCluster) -> None:
    old = await connected(net, "a")
    net.cut_off("a")
    new = await connected(net, "b")
    net.unreachable.clear()
    await until(lambda: old.reason_of(Disconnect) == SESSION_TAKEN_OVER)
    await asyncio.sleep(0)
    assert new.reason_of(Disconnect) == -1 and len(sessions_of(net, "b")) == 1


async def test_client_is_refused_if_its_id_has_no_owner(
    net: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not str(client_claim.__file__).endswith(".py"):
        pytest.skip("the compiled module has its own constant")
    monkeypatch.setattr(client_claim, "CLAIM_SECONDS", 0.05)
    await net.nodes["b"].close(REMOTE)
    client = await RawClient().open(net, "a", Connect(NAME, V5, True, 0))
    await until(lambda: client.reason_of(Connack) == SERVER_BUSY)
    await net.nodes["b"].open(REMOTE)


async def claim(net: MemoryCluster, user: str, value: str) -> RawClient:
    """Claim the client id at its cell, as the cell of another node does; return the answer."""
    client = RawClient()
    acceptor = net.nodes["b"].node.accept(REMOTE, PROXY_GREETING, "a")
    assert acceptor is not None
    connect_in_memory(client, acceptor, asyncio.get_running_loop().call_soon)
    connect = Connect(NAME, V5, True, 0)
    connect.username = user
    connect.properties.user.append((CLIENT_CLAIM, value))
    client.transport.write(encode(connect, V5))
    await until(lambda: client.reason_of(Connack) >= 0)
    return client


async def test_id_of_another_user_is_not_taken_over(net: MemoryCluster) -> None:
    ann = await claim(net, "ann", "1 named")
    bob = await claim(net, "bob", "2 named")
    assert bob.reason_of(Connack) == CLIENT_IDENTIFIER_NOT_VALID and not ann.is_lost
    again = await claim(net, "ann", "3 named")
    assert again.reason_of(Connack) == 0
    await until(lambda: ann.reason_of(Disconnect) == SESSION_TAKEN_OVER)


async def test_renewed_claim_loses_against_a_newer_one_and_replaces_itself(
    net: MemoryCluster,
) -> None:
    first = await claim(net, "", "1")
    renewed = await claim(net, "", "1 again")  # the broken stream is not noticed yet
    assert renewed.reason_of(Connack) == 0
    await until(lambda: first.reason_of(Disconnect) == SESSION_TAKEN_OVER)
    late = await claim(net, "", "0 again")
    assert late.reason_of(Connack) == CLIENT_IDENTIFIER_NOT_VALID
    assert renewed.reason_of(Disconnect) == -1


async def test_client_that_leaves_early_takes_nothing_over(net: MemoryCluster) -> None:
    await net.nodes["b"].close(REMOTE)
    gone = await RawClient().open(net, "a", Connect(NAME, V5, True, 0))
    await asyncio.sleep(0)
    gone.transport.abort()
    await net.nodes["b"].open(REMOTE)
    client = await connected(net, "b")
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert client.reason_of(Disconnect) == -1 and len(sessions_of(net, "b")) == 1


def exclusive(payload: bytes) -> tuple[str, bytes]:
    return f"$ECQ/w/{NAME}/key", payload


async def test_exclusive_queue_of_the_client_stays_in_the_cell_of_its_id(
    net: MemoryCluster,
) -> None:
    async with (
        net.nodes["b"].client(client_in(3)) as writer,
        net.nodes["a"].client(NAME) as owner,
    ):
        assert len(sessions_of(net, "a")) == 1
        await owner.subscribe(f"$ECQ/{NAME}/#", qos=1)
        await writer.publish(*exclusive(b"one"), qos=1)
        async with asyncio.timeout(30):
            assert (await anext(aiter(owner.messages()))).payload == b"one"
        here = net.nodes["b"].engine(REMOTE).exclusive.owners[NAME]
        await until(lambda: here.acked > 0)
        net.cut_streams()  # the subscription is restored with the claim
        await writer.publish(*exclusive(b"two"), qos=1)
        async with asyncio.timeout(30):
            assert (await anext(aiter(owner.messages()))).payload == b"two"
        assert NAME not in net.nodes["a"].engine(0).exclusive.owners
        await owner.unsubscribe(f"$ECQ/{NAME}/#")
        await until(lambda: here.subscriber is None)


async def test_queues_work_for_a_session_outside_its_cell(net: MemoryCluster) -> None:
    async with net.nodes["a"].client(NAME) as client:
        for cell in (0, 1, 3):
            queue = queue_in(cell)
            await client.publish(f"$queue/{queue}", b"%d" % cell, qos=1)
            async with client.consumer(queue) as tasks:
                async with asyncio.timeout(30):
                    task = await anext(aiter(tasks))
                assert task.payload == b"%d" % cell
                await task.ack()


async def test_client_without_an_id_needs_no_claim(net: MemoryCluster) -> None:
    async with net.nodes["a"].client() as client:
        assert isinstance(client, Client)
        await client.publish(topic_in(3), b"x", qos=1)
