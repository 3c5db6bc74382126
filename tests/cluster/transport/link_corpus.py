"""Inputs for fuzzing the links between nodes, and the properties that hold for every input.

An input is what an authenticated node could send by mistake (bytes for a mux, or bytes of the
bridge for plain topics), or what an unknown caller sends first. For any input, the frames are
handled or the protocol fault is raised (`MuxProtocolError`, `MalformedFrame`, `LinkRefused`), the
result does not depend on where the bytes are cut, and the unread data of a reader is bounded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from sluice.cluster.plain import bridge as bridge_module
from sluice.cluster.plain import bridge_frames
from sluice.cluster.plain.bridge import BRIDGE_GREETING, Bridge, BridgeReceiver
from sluice.cluster.plain.bridge_frames import (
    SHARES_ONLY,
    FrameReader,
    MalformedFrame,
    encode_frame,
    write_message,
    write_targets,
)
from sluice.cluster.plain.fanout import Fanout, PublishedTopics, RetainedLookup
from sluice.cluster.plain.node_inbox import NodeInbox
from sluice.cluster.transport import mux
from sluice.cluster.transport.link_authentication import LinkAuthenticationError, LinkCall
from sluice.cluster.transport.link_handshake import (
    LINK,
    MAX_MESSAGE_BYTES,
    PING,
    HandshakeChannel,
    LinkRefused,
    decode_greeting,
    encode_greeting,
)
from sluice.cluster.transport.mux import WINDOW_BYTES, LinkEndedByPeer, Mux, MuxProtocolError
from sluice.cluster.transport.stream_acceptor import CLIENT_GREETING, PROXY_GREETING
from sluice.cluster.transport.streams import NODE_TARGET, StreamLost, StreamProtocol
from sluice.wire.packets import Publish
from tests.cluster.kit import LinkEnd
from tests.cluster.memory_cluster import MemoryCluster

COMPILED = not str(bridge_module.__file__).endswith(".py")
LISTENING, DIALING, ASKED, ASKING, CALLED = READERS = range(5)  # the reader of the input
MUX_SEEDS = (LISTENING, DIALING)
CELLS = (0, 2, 4)  # open at the node; 1, 3 and 5 have no owner

_HEAD = struct.Struct(">BII")
_NUMBERS = (
    b"\0",
    b"\1",
    b"\xff",
    b"\x7f\xff\xff\xff",
    b"\xff\xff\xff\xff",
    b"\0\0\0\1",
    b"\0\0",
    b"\x80",
)
_TEXTS = (
    b"$queue/q",
    b"$share/g/#",
    b"+",
    b"#",
    b"/",
    b"{",
    b"[",
    b"null",
    b"-1",
    b"1e9",
    b"true",
    b"\xc3",
)


def mux_frame(kind: int, number: int, body: bytes = b"") -> bytes:
    return _HEAD.pack(kind, number, len(body)) + body


def opening(number: int, cell: int, greeting: bytes) -> bytes:
    return mux_frame(mux.OPEN, number, struct.pack(">i", cell) + greeting)


def client_info(peername: object = ("10.0.0.1", 5), peercert: object = None) -> bytes:
    return CLIENT_GREETING + json.dumps({"peername": peername, "peercert": peercert}).encode()


def interest(filters: dict[str, int], cell: int = 1, whole: int = 1) -> bytes:
    return encode_frame(
        bridge_frames.INTEREST, struct.pack(">IHB", 7, cell, whole) + json.dumps(filters).encode()
    )


def message(
    topic: bytes = b"a/b", payload: bytes = b"x", qos: int = 1, retain: bool = False
) -> bytes:
    return write_message(Publish(topic, payload, qos, retain), 0.0)


def publish(
    goals: list[bridge_frames.CellTarget], packet: bytes, number: int = 3, dedup_id: int = 9
) -> bytes:
    return struct.pack(">IQ", number, dedup_id) + write_targets(goals) + packet


CONNECT = bytes.fromhex("101000044d5154540502003c00000363696400")
CERTIFICATE = {"subject": [[["commonName", "ann"]]], "subjectAltName": [["DNS", "ann"]]}
TO_ALL: list[bridge_frames.CellTarget] = [
    (0, []),
    (1, [b"$share/g/a/+"]),
    (2, [SHARES_ONLY, b"$share/g/a/+"]),
]
EXPIRING = b"\x32\x12\x00\x03a/b\x00\x01\x05\x02\x00\x00\x00\x09hello"

SEEDS: list[tuple[int, bytes]] = [
    (LISTENING, opening(1, 0, PROXY_GREETING) + mux_frame(mux.DATA, 1, CONNECT)),
    (LISTENING, opening(1, 2, client_info(None, CERTIFICATE)) + mux_frame(mux.DATA, 1, CONNECT)),
    (LISTENING, opening(1, 4, client_info()) + mux_frame(mux.CLOSE, 1, mux.CLOSED_NORMALLY)),
    (
        LISTENING,
        opening(1, 1, PROXY_GREETING) + opening(2, 0, b"something") + mux_frame(mux.HEARTBEAT, 0),
    ),
    (
        LISTENING,
        opening(1, NODE_TARGET, BRIDGE_GREETING) + mux_frame(mux.DATA, 1, interest({"a/#": 1})),
    ),
    (LISTENING, opening(5, 0, PROXY_GREETING) + mux_frame(mux.CREDIT, 5, bytes(4))),
    (DIALING, mux_frame(mux.OPENED, 1) + mux_frame(mux.DATA, 1, b"bytes")),
    (DIALING, mux_frame(mux.OPENED, 2) + mux_frame(mux.DATA, 2, b"x" * 300)),
    (DIALING, mux_frame(mux.CLOSE, 1, mux.CELL_NOT_HERE + struct.pack(">i", 7))),
    (DIALING, mux_frame(mux.OPENED, 2) + mux_frame(mux.CLOSE, 2, mux.CLOSED_WITH_ERROR + b"why")),
    (DIALING, mux_frame(mux.OPENED, 1) + mux_frame(mux.CREDIT, 1, bytes(4))),
    (ASKED, interest({"a/+": 2, "$share/g/b": 1, "\0queue/#": 1}) + interest({"a/+": 0}, 1, 0)),
    (ASKED, encode_frame(bridge_frames.PUBLISH, publish(TO_ALL, message()))),
    (
        ASKED,
        encode_frame(bridge_frames.PUBLISH, publish([(4, [])], message(retain=True), number=0)),
    ),
    (ASKED, encode_frame(bridge_frames.PUBLISH, publish([(2, [])], EXPIRING))),
    (ASKED, encode_frame(bridge_frames.PUBLISH, publish([(0, [])], message(b"$queue/q")))),
    (
        ASKED,
        encode_frame(
            bridge_frames.PUBLISH_ONCE,
            struct.pack(">HQQQ", 1, 8, 5, 4) + publish([(0, [])], message(qos=2)),
        ),
    ),
    (
        ASKED,
        encode_frame(
            bridge_frames.LOOKUP, struct.pack(">I", 4) + write_targets([(0, []), (1, [])]) + b"a/#"
        ),
    ),
    (ASKED, encode_frame(bridge_frames.ACKS_RECEIVED, struct.pack(">I", 1)) + interest({}, 3)),
    (ASKING, encode_frame(bridge_frames.INTEREST_ACK, struct.pack(">I", 2))),
    (
        ASKING,
        encode_frame(
            bridge_frames.PUBLISH_ACK,
            struct.pack(">II", 1, 4) + write_targets([]) + b"the disk is full",
        ),
    ),
    (
        ASKING,
        encode_frame(
            bridge_frames.PUBLISH_ACK,
            struct.pack(">II", 2, 0) + write_targets([(1, []), (0xFFFF, [b"s"])]),
        ),
    ),
    (
        ASKING,
        encode_frame(
            bridge_frames.LOOKUP_RESULT,
            struct.pack(">I", 3) + write_targets([(3, [])]) + message() + EXPIRING,
        ),
    ),
]

GREETING = encode_greeting(LINK, LinkCall("sluice", "first-1", "second-1"))
ALL_SEEDS = [
    *SEEDS,
    # Inputs that end with a reason.
    (DIALING, mux_frame(mux.OPENED, 1) + mux_frame(mux.GOODBYE, 0, b"left the cluster")),
    (CALLED, len(GREETING).to_bytes(2, "big") + GREETING),
    (CALLED, len(encode_greeting(PING)).to_bytes(2, "big") + encode_greeting(PING)),
    (CALLED, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
]


class QuietTransport:
    """The transport of a silent peer."""

    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def set_protocol(self, protocol: StreamProtocol) -> None: ...


class NoStreams:
    """A dialer that reaches no other node."""

    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None: ...
    def dial_node(self, node: str, greeting: bytes, protocol: StreamProtocol) -> None: ...


class FaultLog(logging.Handler):
    """Collects the faults that streams have ended with."""

    def __init__(self, faults: list[BaseException]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._faults.append(record.exc_info[1])


class LinkFuzzTarget:
    """A node in memory that reads inputs. It keeps accepted state, so replace it now and then."""

    def __init__(self) -> None:
        self._net = MemoryCluster(log_event=lambda event, facts: None)
        self._faults: list[BaseException] = []
        self._listener = FaultLog(self._faults)
        self._log = logging.getLogger("sluice.cluster.transport.mux")

    async def open(self) -> LinkFuzzTarget:
        here = self._net.add("a")
        for cell in CELLS:
            await here.open(cell)
        self.node = here.node
        self.node.dialer = NoStreams()
        self._log.addHandler(self._listener)
        self._log.propagate = False
        asyncio.get_running_loop().set_exception_handler(self._broke)
        return self

    async def close(self) -> None:
        self._log.removeHandler(self._listener)
        self._log.propagate = True
        asyncio.get_running_loop().set_exception_handler(None)
        for cell in CELLS:
            await self._net.nodes["a"].close(cell)

    def _broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._faults.append(context.get("exception") or AssertionError(context["message"]))

    async def check(self, reader: int, cut: int, data: bytes) -> str:
        """Feed the input to its reader and return the kind of answer; raise on a wrong one."""
        outcome = "taken"
        try:
            if reader == CALLED:
                outcome = await greetings_of([data[:cut], data[cut:]])
                assert outcome == await greetings_of([data[at : at + 1] for at in range(len(data))])
            elif reader in MUX_SEEDS:
                compare_mux_cuts(reader, data, cut)
                self._feed_mux(reader, data, cut % 6)
            else:
                compare_cuts(data, cut)
                self._feed_stream(reader, data, cut)
        except (MuxProtocolError, LinkEndedByPeer, MalformedFrame) as fault:
            outcome = str(fault)
        for _ in range(3):  # work deferred to later turns
            await asyncio.sleep(0)
        self.node._parked.clear()
        faults = list(self._faults)
        self._faults.clear()
        for broken in faults:  # a stream may end by a protocol fault only
            if not isinstance(broken, MalformedFrame):
                raise broken
            outcome += f", {broken}"
        return f"{reader} {outcome}"

    def _feed_mux(self, reader: int, data: bytes, more: int) -> None:
        """`more` is the number of large frames after the input, for a reader that pauses."""
        soon = asyncio.get_running_loop().call_soon
        accept = self.node.accept if reader == LISTENING else None
        one = Mux(lambda: None, accept, soon, "peer-1")
        ends = [LinkEnd(), LinkEnd()] if reader == DIALING else []
        for end in ends:
            one.dial(0, PROXY_GREETING, end)
        try:
            one.receive(data)
            if ends and ends[1].transport is not None:
                ends[1].transport.pause_reading()
                for _ in range(more):
                    one.receive(mux_frame(mux.DATA, 2, bytes(mux.MAX_DATA_BYTES)))
        finally:
            for stream in one.streams.values():
                assert stream._unread_bytes <= WINDOW_BYTES
                assert stream._unread_bytes == sum(map(len, stream._unread))
            one.take_output()
            one.fail(StreamLost("the input is over"))

    def _feed_stream(self, reader: int, data: bytes, cut: int) -> None:
        end: Bridge | BridgeReceiver
        end = BridgeReceiver(self.node, NodeInbox()) if reader == ASKED else self._asking()
        end.connection_made(QuietTransport())
        try:
            end.data_received(data[:cut])
            end.data_received(data[cut:])
        finally:
            if isinstance(end, Bridge):
                end._publishes.clear()
                end._lookups.clear()
                end.end()
            else:
                end.connection_lost(None)

    def _asking(self) -> Bridge:
        """Return a bridge that waits for two publishes and a lookup, numbered in this order."""
        asking = Bridge(self.node, "peer-1")
        for _ in range(2):
            packet = Publish(b"a/b", b"x", 1, False)
            asking.publish([(1, [])], packet, Fanout(packet, lambda taken, fault: None))
        asking.look_up([1, 3], RetainedLookup(b"a/#", PublishedTopics(), 0))
        return asking


def compare_mux_cuts(reader: int, data: bytes, cut: int) -> None:
    """Check that a mux reads the same from the same bytes however they are split."""
    whole = mux_events(reader, [data])
    assert whole == mux_events(reader, [data[:cut], data[cut:]])
    assert whole == mux_events(reader, [data[at : at + 1] for at in range(len(data))])


def mux_events(reader: int, pieces: list[bytes]) -> tuple[object, ...]:
    """Return everything that a mux reads and answers, and its fault."""
    ends: list[LinkEnd] = []
    opened: list[tuple[int, bytes]] = []

    def accept(cell: int, greeting: bytes, peer: str) -> LinkEnd | None:
        opened.append((cell, greeting))
        if cell not in CELLS:
            return None
        ends.append(LinkEnd())
        return ends[-1]

    def call_now(call: Callable[..., object], *arguments: object) -> None:
        call(*arguments)

    one = mux.Mux(lambda: None, accept if reader == LISTENING else None, call_now, "peer-1")
    if reader == DIALING:
        ends += [LinkEnd(), LinkEnd()]
        for end in ends:
            one.dial(0, PROXY_GREETING, end)
    fault = ""
    try:
        for piece in pieces:
            one.receive(piece)
            assert len(one._incomplete) < mux.HEADER_BYTES + mux.MAX_BODY_BYTES
    except (MuxProtocolError, LinkEndedByPeer) as error:
        fault = str(error)
    states = [(bytes(end.data), end.transport is not None, str(end.lost)) for end in ends]
    return opened, states, one.take_output(), fault


async def greetings_of(pieces: list[bytes]) -> str:
    """Return what the acceptor of a link understands from an unknown caller, or its refusal."""
    channel = HandshakeChannel()
    channel.connection_made(QuietTransport())
    for piece in pieces:
        channel.data_received(piece)
    channel.connection_lost(None)
    found = ""
    try:
        while True:
            message = await channel.read()
            assert 0 < len(message) <= MAX_MESSAGE_BYTES
            found += f"{decode_greeting(message)}, "
    except (LinkRefused, LinkAuthenticationError, ConnectionResetError) as fault:
        return found + str(fault)


def compare_cuts(data: bytes, cut: int) -> None:
    """Check that the same bytes give the same frames however they are split."""
    whole = frames_of([data])
    assert whole == frames_of([data[:cut], data[cut:]])
    assert whole == frames_of([data[at : at + 1] for at in range(len(data))]), "byte by byte"


def frames_of(pieces: list[bytes]) -> list[tuple[int, bytes] | str]:
    cutter = FrameReader()
    found: list[tuple[int, bytes] | str] = []
    try:
        for piece in pieces:
            found += cutter.feed(piece)
    except MalformedFrame as fault:
        found.append(str(fault))
    return found


def mutated(reader: int, data: bytes, draw: Random) -> bytes:
    """Return `data` with a few faults: in the raw bytes, or in frames that are complete again."""
    if reader == CALLED or draw.random() < 0.3:
        return mutate_once(data, draw)
    parts = list(split(reader, data))
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(parts)) if parts else 0
        match draw.randrange(5):
            case 0 if parts:
                del parts[at]
            case 1 if parts:
                parts.insert(draw.randrange(len(parts) + 1), parts[at])
            case 2 if parts:
                kind, number, body = parts[at]
                parts[at] = (draw.randrange(10), draw.choice((number, 0, 1, 2, 0xFFFFFFFF)), body)
            case _ if parts:
                kind, number, body = parts[at]
                parts[at] = (kind, number, mutate_once(body, draw))
    return b"".join(
        mux_frame(kind, number, body) if reader in MUX_SEEDS else encode_frame(kind, body)
        for kind, number, body in parts
    )


def split(reader: int, data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, stream number and body of each complete frame."""
    at = 0
    head = _HEAD.size if reader in MUX_SEEDS else 5
    while len(data) - at >= head:
        kind, number, size = (
            _HEAD.unpack_from(data, at) if reader in MUX_SEEDS else (data[at + 4], 0, 0)
        )
        if reader not in MUX_SEEDS:
            size = max(0, int.from_bytes(data[at : at + 4], "big") - 1)
        yield kind, number, data[at + head : at + head + size]
        at += head + size


def mutate_once(data: bytes, draw: Random) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        size = draw.choice((1, 1, 2, 4, 8))
        token = draw.choice(_NUMBERS if draw.random() < 0.7 else _TEXTS)
        match draw.randrange(5):
            case 0:
                out[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                out[at:at] = token
            case 2:
                out[at : at + len(token)] = token
            case 3:
                del out[at : at + size]
            case _:
                out[at:at] = out[at : at + size * 4]
    return bytes(out)
