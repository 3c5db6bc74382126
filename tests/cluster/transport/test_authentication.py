"""Links accept nodes only: a caller that cannot prove the cluster secret is refused."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from sluice.cluster.transport.link_authentication import (
    ACCEPTOR,
    CALLER,
    NONCE_BYTES,
    LinkAuthenticationError,
    LinkCall,
    LinkKey,
    certificate_matches_host,
    check_caller,
    prove_as_caller,
)
from sluice.cluster.transport.link_handshake import LinkRefused
from tests.cluster.kit import SECRET, LinkedNode, RawCaller, call_link, until
from tests.cluster.transport.test_peer_link import Pair, make_pair, tls_of

CALL = LinkCall("sluice", "first-1", "second-1")
KEY = LinkKey(SECRET, "sluice")
OTHER = LinkKey("the secret of another cluster", "sluice")


class HandshakeWire:
    """The messages of a handshake, in memory, in both directions."""

    def __init__(self) -> None:
        self.to_acceptor: asyncio.Queue[Any] = asyncio.Queue()
        self.to_caller: asyncio.Queue[Any] = asyncio.Queue()
        self.transcript: list[bytes] = []

    async def caller_writes(self, message: bytes) -> None:
        self.transcript.append(message)
        await self.to_acceptor.put(message)

    async def acceptor_writes(self, message: bytes) -> None:
        self.transcript.append(message)
        await self.to_caller.put(message)


async def run_handshake(
    caller_key: LinkKey,
    acceptor_key: LinkKey,
    caller_call: LinkCall = CALL,
    acceptor_call: LinkCall = CALL,
) -> tuple[list[bytes], list[BaseException | None]]:
    """Return the messages, and how the handshake ended at the caller and at the acceptor."""
    wire = HandshakeWire()
    caller = prove_as_caller(caller_key, caller_call, wire.to_caller.get, wire.caller_writes)
    acceptor = asyncio.create_task(
        check_caller(acceptor_key, acceptor_call, wire.to_acceptor.get, wire.acceptor_writes)
    )
    # None is the end of the stream.
    acceptor.add_done_callback(lambda done: wire.to_caller.put_nowait(None))
    return wire.transcript, list(await asyncio.gather(caller, acceptor, return_exceptions=True))


async def test_two_nodes_with_one_secret_prove_it_without_sending_it() -> None:
    messages, faults = await run_handshake(KEY, KEY)
    assert faults == [None, None]
    assert SECRET.encode() not in b"".join(messages)
    assert len(set(messages)) == 3


@pytest.mark.parametrize(
    ("key", "call"),
    [
        (OTHER, CALL),
        (KEY, LinkCall("another", "first-1", "second-1")),
        (KEY, LinkCall("sluice", "third-1", "second-1")),
        (KEY, LinkCall("sluice", "first-1", "third-1")),
    ],
    ids=["secret", "cluster", "caller", "acceptor"],
)
async def test_wrong_proof_is_refused_without_a_reply(key: LinkKey, call: LinkCall) -> None:
    messages, faults = await run_handshake(key, KEY, call)
    assert [type(fault) for fault in faults] == [LinkAuthenticationError, LinkAuthenticationError]
    assert len(messages) == 2, "the acceptor has proved itself to an unknown caller"


async def test_acceptor_without_the_secret_is_detected() -> None:
    """An acceptor that sends random bytes, the caller's own proof, or nothing."""
    for answer in ("random", "mirror", "end"):
        wire = HandshakeWire()
        proving = asyncio.create_task(
            prove_as_caller(KEY, CALL, wire.to_caller.get, wire.caller_writes)
        )
        await wire.to_caller.put(b"c" * NONCE_BYTES)
        reported = await wire.to_acceptor.get()
        proof = reported[NONCE_BYTES:]
        await wire.to_caller.put(
            {"random": b"x" * len(proof), "mirror": proof, "end": None}[answer]
        )
        with pytest.raises(LinkAuthenticationError):
            await proving


def test_key_is_identified_by_fingerprint_and_depends_on_the_cluster_name() -> None:
    assert KEY.fingerprint == LinkKey(SECRET, "sluice").fingerprint
    assert len({KEY.fingerprint, OTHER.fingerprint, LinkKey(SECRET, "test").fingerprint}) == 3
    assert KEY.proof(CALLER, CALL, b"a", b"b") != KEY.proof(ACCEPTOR, CALL, b"a", b"b")
    assert KEY.proof(CALLER, CALL, b"ab", b"c") != KEY.proof(CALLER, CALL, b"a", b"bc")


@pytest.mark.parametrize(
    ("names", "host", "is_it"),
    [
        (["one.example.org"], "One.Example.org", True),
        (["one.example.org", "10.0.0.1"], "10.0.0.1", True),
        (["::1"], "[0:0:0:0:0:0:0:1]", True),
        (["*.example.org"], "one.example.org", True),
        (["*.example.org"], "a.one.example.org", False),
        (["*.example.org"], "example.org", False),
        (["*.org"], "example.org", False),
        (["*"], "one", False),
        (["device-7"], "one.example.org", False),
        ([], "one.example.org", False),
        (["10.0.0.11"], "10.0.0.1", False),
    ],
)
def test_certificate_is_valid_for_the_hosts_it_names(
    names: list[str], host: str, is_it: bool
) -> None:
    assert certificate_matches_host(names, host) is is_it


# ---- over real streams


async def refused_stream(pair: Pair) -> None:
    end = pair.dial()
    await until(lambda: end.lost)
    assert end.transport is None and pair.second.greetings == []


@asynccontextmanager
async def talk_to(node: LinkedNode, caller: str) -> AsyncIterator[RawCaller]:
    """Open a connection to a node as a program that claims to be `caller`."""
    async with call_link(node.streams.address, LinkCall("sluice", caller, node.id)) as call:
        yield call


async def refusal_of(call: RawCaller) -> str:
    """Return the reason of the refusal; the connection ends after it."""
    try:
        while True:
            await call.read()
    except LinkRefused as refusal:
        assert await call.is_closed()
        return str(refusal)


async def test_node_with_another_secret_is_refused_and_both_logs_say_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async for pair in make_pair(None, None, "a secret of this node only"):
        await refused_stream(pair)
        await until(lambda: {"link refused", "link not established"} <= set(caplog.messages))
    (refused,) = {one.__dict__["reason"] for one in caplog.records if one.msg == "link refused"}
    assert "does not know the cluster secret. Give every node the same cluster.secret" in refused
    assert {one.__dict__["node"] for one in caplog.records if one.msg == "link refused"} == {
        "first-1",
        "second-1",
    }


async def test_each_accepted_link_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async for pair in make_pair(None, None):
        await pair.open_stream()
    reported = [one.__dict__ for one in caplog.records if one.msg == "link accepted"]
    assert {one["node"] for one in reported} == {"first-1", "second-1"}
    assert all("127.0.0.1" in one["address"] for one in reported)


async def test_replayed_proof_is_refused() -> None:
    async for pair in make_pair(None, None):
        wire = HandshakeWire()
        async with talk_to(pair.second, pair.first.id) as call:
            proving = asyncio.create_task(prove_as_caller(KEY, CALL, call.read, wire.caller_writes))
            recorded = await wire.to_acceptor.get()
            await call.write(recorded)
            await proving  # the proof was valid
        async with talk_to(pair.second, pair.first.id) as call:
            await call.read()
            await call.write(recorded)
            assert "does not know the cluster secret" in await refusal_of(call)


async def test_unregistered_caller_with_the_secret_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async for pair in make_pair(None, None):
        async with talk_to(pair.second, "unknown-1") as call:
            await prove_as_caller(
                KEY, LinkCall("sluice", "unknown-1", "second-1"), call.read, call.write
            )
            assert "not a registered node" in await refusal_of(call)
    assert any(one.__dict__.get("node") == "unknown-1" for one in caplog.records)


async def test_caller_whose_registration_arrives_a_moment_later_is_accepted() -> None:
    second = await LinkedNode("second", {}).open()
    first = await LinkedNode("first", {}).open()
    try:
        second.streams.update_nodes({second.id: second.info()})
        async with talk_to(second, first.id) as call:
            await prove_as_caller(KEY, CALL, call.read, call.write)
            second.streams.update_nodes({second.id: second.info(), first.id: first.info()})
            assert await call.read() == b""  # the link is open
    finally:
        await first.streams.close()
        await second.streams.close()


@pytest.mark.parametrize("sent", [b"", b"x", b"x" * 64, b"x" * 4097])
async def test_anything_but_a_proof_is_refused(sent: bytes) -> None:
    async for pair in make_pair(None, None):
        async with talk_to(pair.second, pair.first.id) as call:
            await call.write(sent)
            assert await refusal_of(call)
        await pair.open_stream()


async def test_callers_that_disconnect_during_the_handshake_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async for pair in make_pair(None, None):
        for reads in (0, 1):
            async with talk_to(pair.second, pair.first.id) as call:
                for _ in range(reads):
                    await call.read()
        async with talk_to(pair.second, pair.first.id) as call:
            await call.read()  # the challenge
            call.writer.write_eof()
            assert await call.is_closed()
        await pair.open_stream()
        assert len(pair.second.streams._acceptor.links) == 1
    assert "Traceback" not in caplog.text


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("name", ["device-7.example.org", "127.0.0.2"])
async def test_certificate_of_the_same_authority_with_another_name_is_refused(
    authority: trustme.CA, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = tls_of(tmp_path, authority, authority, name)
    async for pair in make_pair(device, tls_of(tmp_path, authority, authority)):
        await refused_stream(pair)
        await until(lambda: "link refused" in caplog.messages)
    reasons = [one.__dict__["reason"] for one in caplog.records if one.msg == "link refused"]
    assert all("no subject alternative name 127.0.0.1" in reason for reason in reasons)
