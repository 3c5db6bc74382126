"""How a link ends: with a reason for the peer, and never with unbounded memory before it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.broker.net.memory_transport import MemoryTransport, connect_in_memory
from sluice.cluster.membership.coordinator import LINK_PROTOCOL_VERSION, NodeInfo
from sluice.cluster.transport import link_acceptor, link_connection, mux
from sluice.cluster.transport.link_authentication import LinkCall, prove_as_caller
from sluice.cluster.transport.link_connection import LinkConnection
from sluice.cluster.transport.link_handshake import (
    LINK,
    MAX_UNREAD_BYTES,
    HandshakeChannel,
    encode_greeting,
)
from sluice.cluster.transport.mux import Mux
from sluice.cluster.transport.streams import StreamLost
from tests.cluster.kit import LinkedNode, LinkEnd, RawCaller, call_link, until
from tests.cluster.transport.link_corpus import mux_frame, opening
from tests.cluster.transport.test_authentication import KEY, refusal_of, talk_to
from tests.cluster.transport.test_peer_link import make_pair


@pytest.fixture
async def node() -> AsyncIterator[LinkedNode]:
    """A node that accepts calls of the node `first-1`."""
    one = await LinkedNode("second", {}).open()
    first = NodeInfo("first-1", "first", "127.0.0.1:1")
    one.streams._known.update({one.id: one.info(), first.id: first})
    yield one
    await one.streams.close()


async def establish(call: RawCaller) -> None:
    """Finish the handshake as the node `first-1`."""
    greeting = LinkCall("sluice", "first-1", "second-1")
    await prove_as_caller(KEY, greeting, call.read, call.write)
    assert await call.read() == b""


async def read_frames(call: RawCaller) -> list[tuple[int, bytes]]:
    """Return kind and body of all frames up to the end of the connection."""
    frames = []
    async with asyncio.timeout(30):
        while header := await call.reader.read(1):
            header += await call.reader.readexactly(mux.HEADER_BYTES - 1)
            size = int.from_bytes(header[5:], "big")
            frames.append((header[0], await call.reader.readexactly(size)))
    return frames


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (mux_frame(99, 1), "unknown frame kind 99"),
        (b"\x03\0\0\0\1\xff\xff\xff\xff", "a frame of 4294967295 bytes exceeds the limit"),
    ],
)
async def test_malformed_frame_ends_the_link_with_a_reason_at_both_ends(
    node: LinkedNode, sent: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with talk_to(node, "first-1") as call:
        await establish(call)
        call.writer.write(sent)
        kind, text = (await read_frames(call))[-1]
    assert kind == mux.GOODBYE and reason in text.decode()
    assert any(reason in one.__dict__.get("reason", "") for one in caplog.records)
    await until(lambda: not node.streams._acceptor.links)


async def test_node_that_leaves_tells_its_peers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async for pair in make_pair(None, None):
        local, _ = await pair.open_stream()
        pair.second.streams.leave()
        await until(lambda: local.lost)  # noqa: B023 (called at once)
        assert "has ended the link: this node has left the cluster" in str(local.lost[0])
    assert "link ended" in caplog.messages


async def test_everything_written_before_the_end_of_a_link_arrives(node: LinkedNode) -> None:
    node.cells.add(0)
    async with talk_to(node, "first-1") as call:
        await establish(call)
        call.writer.write(opening(1, 0, b"hello"))
        await until(lambda: node.answering)
        node.answering[0].stream.write(b"last words")
        node.streams.leave()
        frames = await read_frames(call)
    assert [body for kind, body in frames if kind == mux.DATA] == [b"last words"]
    assert frames[-1][0] == mux.GOODBYE


async def test_peer_that_vanishes_without_closing_is_disconnected(node: LinkedNode) -> None:
    """A half-open connection: no heartbeat arrives, and no error."""
    async with talk_to(node, "first-1") as call:
        await establish(call)
        (link,) = node.streams._acceptor.links
        link._silent_ticks = link._max_silent_ticks - 1
        kind, text = (await read_frames(call))[-1]
    assert (kind, text) == (mux.GOODBYE, b"node first-1 is silent")


async def test_heartbeats_keep_an_idle_link(node: LinkedNode) -> None:
    async with talk_to(node, "first-1") as call:
        await establish(call)
        (link,) = node.streams._acceptor.links
        for _ in range(3):
            link._silent_ticks = link._max_silent_ticks - 2
            call.writer.write(mux_frame(mux.HEARTBEAT, 0))
            await until(lambda: link._silent_ticks <= 1)
        assert node.streams._acceptor.links == {link}


class StuckTransport:
    """The transport of a peer that sends and never reads."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


def new_link() -> LinkConnection:
    return LinkConnection(
        "first-1", lambda cell, greeting, peer: None, 60.0, 1.0, lambda peer: None
    )


async def test_peer_that_does_not_read_our_answers_is_disconnected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, transport = new_link(), StuckTransport()
    link.start(transport, b"")
    link.pause_writing()
    refused = b"".join(opening(nth, 9, b"") for nth in range(10_000))
    for _ in range(200):
        link.data_received(refused)
        if transport.is_closed:
            break
    assert transport.is_closed and link.ended.done() and "link failed" in caplog.messages
    assert link.mux.pending_bytes < link_connection.MAX_UNSENT_BYTES + 10 * len(refused)
    link.fail_streams()


async def test_streams_write_again_when_the_socket_has_sent() -> None:
    link, transport = LinkConnection("p", None, 60.0, 1.0, lambda peer: None), StuckTransport()
    end = LinkEnd()
    link.mux.dial(0, b"hello", end)
    link.start(transport, b"")
    link.data_received(mux_frame(mux.OPENED, 1))
    link.pause_writing()
    written = len(transport.written)
    end.stream.write(b"x" * 1000)
    await asyncio.sleep(0)
    assert len(transport.written) == written
    link.resume_writing()
    assert b"x" * 1000 in transport.written[-1]
    link.fail_streams()


async def test_links_run_over_any_transport() -> None:
    """Two links in memory, as in tests and between cells of one process."""
    accepted: list[LinkEnd] = []

    def accept(cell: int, greeting: bytes, peer: str) -> LinkEnd:
        accepted.append(LinkEnd(echo=True))
        return accepted[-1]

    first = LinkConnection("b", None, 60.0, 1.0, lambda peer: None)
    second = LinkConnection("a", accept, 60.0, 1.0, lambda peer: None)
    local = connect_in_memory(first, second, asyncio.get_running_loop().call_soon)
    assert isinstance(local, MemoryTransport)
    first.start(local, b"")
    second.start(local.peer, b"")
    end = LinkEnd()
    first.mux.dial(3, b"hello", end)
    await until(lambda: end.transport)
    end.stream.write(b"y" * 1_000_000)
    await until(lambda: len(end.data) == 1_000_000)
    first.end("the test is over")
    await until(second.ended.done)
    second.fail_streams()
    await until(lambda: accepted[0].lost)
    assert "the test is over" in str(accepted[0].lost[0])
    first.fail_streams()


async def test_nodes_connect_over_a_unix_socket(tmp_path: Path) -> None:
    cells: dict[int, NodeInfo] = {}
    path = tmp_path / "link"
    path.write_text("left by an earlier run")
    first = await LinkedNode("first", cells).open()
    second = await LinkedNode("second", cells, path=path).open()
    cells[7] = NodeInfo("second-1", "second", f"unix:{path}")
    nodes = {first.id: first.info(), second.id: cells[7]}
    first.streams.update_nodes(nodes)
    second.streams.update_nodes(nodes)
    second.cells.add(7)
    assert path.stat().st_mode & 0o777 == 0o600
    end = LinkEnd()
    first.streams.dial(7, b"hello", end)
    await until(lambda: end.transport)
    assert await first.streams.is_reachable(f"unix:{path}", [])
    await second.streams.close()
    await until(lambda: "second-1" in first.gone)
    await first.streams.close()


# ---- before a link


async def test_node_of_another_protocol_version_is_refused_with_both_versions(
    node: LinkedNode, caplog: pytest.LogCaptureFixture
) -> None:
    other = LINK_PROTOCOL_VERSION + 1
    greeting = bytearray(encode_greeting(LINK, LinkCall("sluice", "first-1", "second-1")))
    greeting[11:13] = other.to_bytes(2, "big")
    async with call_link(node.streams.address) as call:
        await call.write(bytes(greeting))
        reason = await refusal_of(call)
    assert f"the caller uses version {other} of the protocol between nodes" in reason
    assert f"this node uses version {LINK_PROTOCOL_VERSION}" in reason
    assert "link refused" in caplog.messages


@pytest.mark.parametrize("sent", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_program_that_is_no_node_is_answered_and_disconnected(
    node: LinkedNode, sent: bytes
) -> None:
    async with call_link(node.streams.address) as call:
        call.writer.write(sent)
        assert "does not follow the handshake" in await refusal_of(call)


async def test_repeated_refusals_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async for pair in make_pair(None, None):
        for _ in range(5):
            async with talk_to(pair.second, pair.first.id) as call:
                await call.read()
                await call.write(b"x" * 64)
                await refusal_of(call)
    assert caplog.messages.count("link refused") == 1


async def test_unknown_callers_are_limited_in_number(
    node: LinkedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_acceptor, "MAX_HANDSHAKES", 1)
    async with talk_to(node, "first-1") as call:
        await call.read()
        async with call_link(node.streams.address) as second:
            assert await second.is_closed()
    await until(lambda: node.streams._acceptor._handshakes == 0)
    async with talk_to(node, "first-1") as call:
        await establish(call)


async def test_unknown_caller_costs_bounded_memory() -> None:
    class Transport(StuckTransport):
        is_paused = False

        def pause_reading(self) -> None:
            self.is_paused = True

    channel, transport = HandshakeChannel(), Transport()
    channel.connection_made(transport)
    while not transport.is_paused:
        channel.data_received(bytes(10_000))
    assert len(channel._received) <= MAX_UNREAD_BYTES + 10_000


async def test_slow_handshake_is_ended(node: LinkedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_acceptor, "HANDSHAKE_SECONDS", 0.05)
    async with call_link(node.streams.address) as call:
        assert "took too long" in await refusal_of(call)


def test_lost_link_fails_its_streams_with_the_node_in_the_reason() -> None:
    one, end = Mux(lambda: None, None, lambda call, *given: call(*given), "peer-1"), LinkEnd()
    one.dial(0, b"hello", end)
    one.fail(StreamLost("the link to node peer-1 is broken"))
    assert "peer-1" in str(end.lost[0])
