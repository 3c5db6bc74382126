"""Frames that no node should send: a node refuses them with a protocol error."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

import pytest

from sluice.cluster.plain import bridge_frames
from sluice.cluster.plain.bridge_frames import FrameReader, MalformedFrame, encode_frame
from sluice.cluster.transport import mux
from sluice.cluster.transport.mux import WINDOW_BYTES, Mux, MuxProtocolError
from sluice.cluster.transport.stream_acceptor import CLIENT_GREETING, PROXY_GREETING
from sluice.cluster.transport.streams import StreamLost
from tests.cluster.kit import LinkEnd
from tests.cluster.transport import link_corpus as corpus
from tests.cluster.transport.link_corpus import LinkFuzzTarget, mux_frame, opening


def call_now(call: Callable[..., object], *arguments: object) -> None:
    call(*arguments)


def dialed() -> tuple[Mux, LinkEnd]:
    """Return a mux with one stream that the other end has accepted."""
    one, end = Mux(lambda: None, None, call_now, "peer-1"), LinkEnd()
    one.dial(0, PROXY_GREETING, end)
    one.receive(mux_frame(mux.OPENED, 1))
    return one, end


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (mux_frame(9, 1), "kind 9"),
        (mux_frame(0, 1), "kind 0"),
        (struct.pack(">BII", mux.DATA, 1, mux.MAX_BODY_BYTES + 1), "exceeds the limit"),
        (struct.pack(">BII", mux.HEARTBEAT, 0, 0xFFFF_FFFF), "exceeds the limit"),
        (mux_frame(mux.OPENED, 1), "opened twice"),
        (mux_frame(mux.CREDIT, 1, b"\1"), "not a number"),
        (mux_frame(mux.CREDIT, 1, b"\0\0\0\1"), "more credit"),
        (mux_frame(mux.CLOSE, 1, mux.CELL_NOT_HERE), "has no cell"),
        (opening(1, 0, PROXY_GREETING), "wrong end"),
    ],
)
def test_invalid_mux_message_breaks_the_stream_with_a_reason(message: bytes, fault: str) -> None:
    one, _ = dialed()
    with pytest.raises(MuxProtocolError, match=fault):
        one.receive(message)


def test_frames_arrive_whole_wherever_the_bytes_are_cut() -> None:
    data = b"".join(mux_frame(mux.DATA, 1, b"%d," % nth * nth) for nth in range(50))
    for size in (1, 2, 8, 9, 10, 100, len(data)):
        one, end = dialed()
        for at in range(0, len(data), size):
            one.receive(data[at : at + size])
        assert end.data == b"".join(b"%d," % nth * nth for nth in range(50))


def test_incomplete_frame_costs_at_most_the_largest_body() -> None:
    one, end = dialed()
    frame = mux_frame(mux.DATA, 1, bytes(mux.MAX_DATA_BYTES))
    one.receive(frame[:-1])
    assert len(one._incomplete) == len(frame) - 1 and not end.data
    one.receive(frame[-1:])
    assert len(end.data) == mux.MAX_DATA_BYTES and one._incomplete == b""


def test_oversized_greeting_fails_only_its_stream() -> None:
    one, end = dialed()
    large = LinkEnd()
    one.dial(0, bytes(mux.MAX_BODY_BYTES), large)
    assert isinstance(large.lost[0], StreamLost) and not end.lost


def test_data_before_the_stream_is_open_breaks_the_link() -> None:
    one = Mux(lambda: None, None, call_now, "peer-1")
    one.dial(0, PROXY_GREETING, LinkEnd())
    with pytest.raises(MuxProtocolError, match="before the stream is open"):
        one.receive(mux_frame(mux.DATA, 1, b"early"))


def test_peer_that_ignores_its_credit_cannot_fill_the_memory_of_a_node() -> None:
    one, end = dialed()
    end.stream.pause_reading()
    piece = mux_frame(mux.DATA, 1, b"x" * 65_536)
    for _ in range(WINDOW_BYTES // 65_536):
        one.receive(piece + mux_frame(mux.DATA, 1, b"") * 10)
    (stream,) = one.streams.values()
    assert len(stream._unread) == WINDOW_BYTES // 65_536
    with pytest.raises(MuxProtocolError, match="more bytes than the credit allows"):
        one.receive(piece)
    end.stream.resume_reading()
    assert len(end.data) == WINDOW_BYTES


def test_open_stream_is_not_replaced_by_another_of_its_number() -> None:
    ends: list[LinkEnd] = []

    def accept(cell: int, greeting: bytes, peer: str) -> LinkEnd:
        ends.append(LinkEnd())
        return ends[-1]

    one = Mux(lambda: None, accept, call_now, "peer-1")
    one.receive(opening(1, 0, PROXY_GREETING))
    with pytest.raises(MuxProtocolError, match="stream 1 is opened twice"):
        one.receive(opening(1, 0, PROXY_GREETING))
    one.fail(StreamLost("over"))
    assert len(ends) == 1 and len(ends[0].lost) == 1


@pytest.mark.parametrize("announced", [0, bridge_frames.MAX_FRAME_BYTES + 1, 0xFFFF_FFFF])
def test_frame_of_zero_or_excessive_size_is_refused_before_it_arrives(announced: int) -> None:
    with pytest.raises(MalformedFrame, match=f"invalid size of {announced} bytes"):
        list(FrameReader().feed(struct.pack(">I", announced) + b"\1"))


def test_large_frame_is_complete_whatever_pieces_it_arrives_in() -> None:
    body = bytes(range(256)) * 1000
    data = encode_frame(3, body) + encode_frame(4, b"") + encode_frame(5, b"end")
    for size in (1, 3, 4, 5, 1000, 255_999, len(data)):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert corpus.frames_of(pieces) == [(3, body), (4, b""), (5, b"end")]


@pytest.fixture
async def target() -> LinkFuzzTarget:
    return await LinkFuzzTarget().open()


FILTERS = struct.pack(">IHB", 1, 1, 1)
ORIGIN = struct.pack(">HQQQ", 1, 8, 1 << 40, 4)
PUBLISHED = corpus.publish([(0, [])], corpus.message())


@pytest.mark.parametrize(
    ("reader", "data", "fault"),
    [
        (corpus.ASKED, encode_frame(bridge_frames.PUBLISH, b"\0"), "cut off"),
        (corpus.ASKED, encode_frame(bridge_frames.PUBLISH, PUBLISHED[:-1]), "cut off"),
        (
            corpus.ASKED,
            encode_frame(bridge_frames.PUBLISH, corpus.publish([(0, [])], b"")),
            "one message has 0",
        ),
        (
            corpus.ASKED,
            encode_frame(bridge_frames.PUBLISH, corpus.publish([(0, [])], b"\x30")),
            "not a PUBLISH",
        ),
        (
            corpus.ASKED,
            encode_frame(bridge_frames.PUBLISH, corpus.publish([(99, [])], corpus.message())),
            "no cell 99",
        ),
        (
            corpus.ASKED,
            encode_frame(bridge_frames.PUBLISH, corpus.publish([(0, [b"share"])], b"")[:-3]),
            "cut off",
        ),
        (
            corpus.ASKED,
            encode_frame(bridge_frames.PUBLISH_ONCE, ORIGIN + PUBLISHED),
            "too large to be stored",
        ),
        (corpus.ASKED, encode_frame(bridge_frames.INTEREST, FILTERS + b"["), "not JSON"),
        (corpus.ASKED, encode_frame(bridge_frames.INTEREST, FILTERS + b"[" * 100_000), "not JSON"),
        (corpus.ASKED, encode_frame(bridge_frames.INTEREST, FILTERS + b"[]"), "not an object"),
        (
            corpus.ASKED,
            encode_frame(bridge_frames.INTEREST, FILTERS + b'{"a": -1}'),
            "no number of subscriptions",
        ),
        (
            corpus.ASKED,
            encode_frame(bridge_frames.INTEREST, FILTERS + b'{"a": true}'),
            "no number of subscriptions",
        ),
        (
            corpus.ASKED,
            encode_frame(bridge_frames.INTEREST, FILTERS + b'{"\\ud800": 1}'),
            "not UTF-8",
        ),
        (corpus.ASKING, encode_frame(bridge_frames.PUBLISH_ACK, b"\0\0"), "cut off"),
        (
            corpus.ASKING,
            encode_frame(bridge_frames.LOOKUP_RESULT, struct.pack(">IHHH", 3, 1, 0xFFFF, 0)),
            "no cell 65535",
        ),
    ],
)
async def test_stream_with_unreadable_frames_ends_with_a_reason(
    target: LinkFuzzTarget, reader: int, data: bytes, fault: str
) -> None:
    assert fault in await target.check(reader, 3, data)
    await target.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"{",
        b"[]",
        b"3",
        b'{"peername": 5}',
        b'{"peername": []}',
        b'{"peername": [1, 2]}',
        b'{"peercert": [1]}',
    ],
)
async def test_client_with_an_unreadable_greeting_is_refused_alone(
    target: LinkFuzzTarget, greeting: bytes
) -> None:
    one = Mux(lambda: None, target.node.accept, call_now, "peer-1")
    one.receive(opening(1, 0, CLIENT_GREETING + greeting) + opening(2, 0, corpus.client_info()))
    assert list(one.streams) == [2]
    assert mux.CLOSED_WITH_ERROR + b"the greeting of a client" in one.take_output()
    one.fail(StreamLost("over"))
    await target.close()


async def test_corrupted_frame_ends_only_its_link(target: LinkFuzzTarget) -> None:
    """A small part of fuzz/fuzz_link.py."""
    draw = Random(1)
    for reader, data in corpus.SEEDS:
        assert "taken" in await target.check(reader, 3, data)
    for _ in range(1500):
        reader, data = draw.choice(corpus.ALL_SEEDS)
        await target.check(reader, draw.randrange(256), corpus.mutated(reader, data, draw))
    await target.close()
