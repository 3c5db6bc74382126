"""Streams between two nodes, over real links on loopback."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import trustme

from sluice.cluster.membership.coordinator import NodeInfo
from sluice.cluster.transport.link_sockets import LinkTls
from sluice.cluster.transport.streams import NODE_TARGET, NoOwner, StreamLost
from tests.cluster.kit import SECRET, LinkedNode, LinkEnd, until
from tests.support.fault_proxy import FaultProxy

CELL = 7  # owned by the second node


class Pair:
    """Two nodes that know each other; the first dials the second through a proxy that can fail."""

    def __init__(
        self, first: LinkedNode, second: LinkedNode, proxy: FaultProxy, cells: dict[int, NodeInfo]
    ) -> None:
        self.cells = cells
        self.first = first
        self.second = second
        self.proxy = proxy

    def dial(self, greeting: bytes = b"hello", cell: int = CELL) -> LinkEnd:
        end = LinkEnd()
        self.first.streams.dial(cell, greeting, end)
        return end

    async def open_stream(self) -> tuple[LinkEnd, LinkEnd]:
        local = self.dial()
        await until(lambda: local.transport is not None)
        return local, self.second.answering[-1]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    async for one in make_pair(None, None):
        yield one


async def make_pair(
    tls: LinkTls | None, other_tls: LinkTls | None, secret: str = SECRET
) -> AsyncIterator[Pair]:
    """Yield a pair of nodes; `secret` is that of the first node."""
    cells: dict[int, NodeInfo] = {}
    first = await LinkedNode("first", cells, tls, secret).open()
    second = await LinkedNode("second", cells, other_tls).open()
    second.cells.add(CELL)
    proxy = FaultProxy(second.streams.address.port)
    cells[CELL] = second.info(proxy.port)
    nodes = {first.id: first.info(), second.id: second.info(proxy.port)}
    first.streams.update_nodes(nodes)
    second.streams.update_nodes(nodes)
    try:
        yield Pair(first, second, proxy, cells)
    finally:
        await first.streams.close()
        await second.streams.close()
        proxy.close()


async def test_bytes_go_both_ways_in_order(pair: Pair) -> None:
    local, remote = await pair.open_stream()
    assert pair.second.greetings == [(CELL, b"hello")]
    for nth in range(100):
        local.stream.write(b"%d," % nth)
    remote.stream.write(b"answer")
    await until(lambda: local.data == b"answer")
    await until(lambda: remote.data == b"".join(b"%d," % nth for nth in range(100)))


async def test_node_can_be_dialed_and_knows_its_caller(pair: Pair) -> None:
    end, unknown = LinkEnd(), LinkEnd()
    pair.first.streams.dial_node(pair.second.id, b"to you", end)
    pair.first.streams.dial_node("unknown-1", b"to you", unknown)
    await until(lambda: end.transport and unknown.lost)
    assert pair.second.greetings == [(NODE_TARGET, b"to you")]
    assert pair.second.callers == [pair.first.id]


async def test_streams_do_not_mix(pair: Pair) -> None:
    pair.second.make_link_end = lambda: LinkEnd(echo=True)
    ends = [(await pair.open_stream())[0] for _ in range(20)]
    for nth, end in enumerate(ends):
        end.stream.write(b"%d" % nth)
    await until(lambda: all(end.data == b"%d" % nth for nth, end in enumerate(ends)))


async def test_close_delivers_what_was_written(pair: Pair) -> None:
    local, remote = await pair.open_stream()
    local.stream.write(b"x" * 3_000_000)
    local.stream.close()
    local.stream.write(b"too late")
    await until(lambda: remote.lost and local.lost)
    assert remote.lost == [None] and local.lost == [None]
    assert len(remote.data) == 3_000_000


async def test_abort_ends_both_ends(pair: Pair) -> None:
    local, remote = await pair.open_stream()
    remote.stream.abort()
    await until(lambda: local.lost and remote.lost)
    assert local.lost == [None] and local.stream.is_closing()


async def test_paused_reader_blocks_only_its_writer(pair: Pair) -> None:
    local, remote = await pair.open_stream()
    remote.stream.pause_reading()
    local.stream.write(b"x" * 1_000_000)
    await until(lambda: local.is_paused)
    other, its_peer = await pair.open_stream()
    other.stream.write(b"y" * 1_000_000)
    await until(lambda: len(its_peer.data) == 1_000_000)
    assert (
        len(remote.data) <= 262_144 and local.stream.get_write_buffer_size() >= 1_000_000 - 262_144
    )
    remote.stream.resume_reading()
    await until(lambda: len(remote.data) == 1_000_000)
    assert not local.is_paused


async def test_unread_data_of_a_paused_reader_survives_the_close(pair: Pair) -> None:
    local, remote = await pair.open_stream()
    remote.stream.pause_reading()
    local.stream.write(b"last words")
    local.stream.close()
    other, _ = await pair.open_stream()  # after them on the same link
    assert remote.data == b"" and remote.lost == []
    remote.stream.resume_reading()
    await until(lambda: remote.lost)
    assert remote.data == b"last words"
    other.stream.close()


async def test_cell_on_another_node_is_reported(pair: Pair) -> None:
    nowhere = pair.dial(cell=1)
    await until(lambda: nowhere.lost)
    assert isinstance(nowhere.lost[0], NoOwner)
    pair.second.cells.clear()
    moved = pair.dial()
    await until(lambda: moved.lost)
    assert isinstance(moved.lost[0], NoOwner)
    assert moved.transport is None


async def test_broken_link_loses_its_streams_and_the_next_one_reconnects(pair: Pair) -> None:
    local, remote = await pair.open_stream()
    pair.proxy.cut()
    await until(lambda: local.lost and remote.lost)
    assert isinstance(local.lost[0], StreamLost) and isinstance(remote.lost[0], StreamLost)
    again: list[LinkEnd] = [pair.dial()]

    def is_open() -> bool:
        if again[-1].lost:
            again.append(pair.dial())
        return again[-1].transport is not None

    await until(is_open)
    assert pair.first.gone == []  # its host accepts connections: it may be alive


async def test_dead_process_is_detected_because_its_host_refuses(pair: Pair) -> None:
    local, _ = await pair.open_stream()
    await pair.second.streams.close()
    pair.proxy.close()
    await until(lambda: pair.second.id in pair.first.gone)
    assert isinstance(local.lost[0], StreamLost)


async def test_silence_is_not_a_refusal(pair: Pair) -> None:
    local, _ = await pair.open_stream()
    pair.proxy.hold()  # the link from second to first does not count
    await until(lambda: pair.first.streams.silence_seconds("second-1") > 0.3)
    assert pair.first.gone == [] and local.lost == []
    pair.proxy.release()
    await until(lambda: pair.first.streams.silence_seconds("second-1") < 0.2)


async def test_unreachable_node_knows_it(pair: Pair) -> None:
    mine, other = pair.cells[CELL], pair.first.info()
    gone = NodeInfo("gone-1", "gone", "127.0.0.1:1")
    links = pair.second.streams
    assert await links.is_reachable(mine.link, [other, gone])  # nodes that are gone do not count
    pair.proxy.hold()
    assert not await links.is_reachable(mine.link, [other])
    assert not await pair.first.streams.is_reachable(other.link, [mine])


async def test_new_incarnation_at_the_same_address_proves_that_the_old_one_is_gone(
    pair: Pair,
) -> None:
    await pair.open_stream()
    pair.second.join("second-2")
    await until(lambda: "second-1" in pair.first.gone)


async def test_evicted_node_is_disconnected(pair: Pair) -> None:
    local, remote = await pair.open_stream()
    pair.second.streams.update_nodes({pair.second.id: pair.second.info()})
    await until(lambda: remote.lost and local.lost)
    again = pair.dial()
    await until(lambda: again.lost)
    assert pair.second.greetings == [(CELL, b"hello")]


async def test_exception_at_one_end_ends_only_its_stream(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty(LinkEnd):
        def data_received(self, data: bytes) -> None:
            raise ValueError(data)

    good, its_peer = await pair.open_stream()
    pair.second.make_link_end = Faulty
    bad, _ = await pair.open_stream()
    bad.stream.write(b"trouble")
    await until(lambda: bad.lost)
    good.stream.write(b"fine")
    await until(lambda: its_peer.data == b"fine")
    assert "stream failed" in caplog.text


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def has(end: LinkEnd, data: bytes) -> bool:
    return end.data == data


def tls_of(
    folder: Path, authority: trustme.CA, trusted: trustme.CA, name: str = "127.0.0.1"
) -> LinkTls:
    """Write the files of a node whose certificate has `name`."""
    issued = authority.issue_cert(name)
    paths = [folder / f"{secrets.token_hex(4)}.pem" for _ in range(3)]
    paths[0].write_bytes(b"".join(one.bytes() for one in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(paths[1])
    trusted.cert_pem.write_to_path(paths[2])
    return LinkTls(*paths)


async def test_nodes_that_trust_each_others_authority_connect_over_tls(
    tmp_path: Path, authority: trustme.CA
) -> None:
    first, second = (tls_of(tmp_path, authority, authority) for _ in range(2))
    async for pair in make_pair(first, second):
        local, remote = await pair.open_stream()
        local.stream.write(b"secret")
        await until(partial(has, remote, b"secret"))


@pytest.mark.parametrize("caller", ["plain", "another authority"])
async def test_untrusted_caller_is_refused_over_tls(
    tmp_path: Path, authority: trustme.CA, caller: str
) -> None:
    tls = None if caller == "plain" else tls_of(tmp_path, trustme.CA(), authority)
    async for pair in make_pair(tls, tls_of(tmp_path, authority, authority)):
        end = pair.dial()
        await until(partial(getattr, end, "lost"))
        assert end.transport is None
        assert pair.second.greetings == []


async def test_hundred_streams_share_writes(pair: Pair) -> None:
    """The output of one turn leaves together: far fewer reads than streams."""
    ends = [pair.dial() for _ in range(100)]
    await until(lambda: all(end.transport for end in ends))
    (link,) = pair.second.streams._acceptor.links
    reads: list[str] = []
    link._on_received = reads.append
    for end in ends:
        end.stream.write(b"now")
    await until(lambda: all(end.data == b"now" for end in pair.second.answering))
    assert len(reads) < 20
