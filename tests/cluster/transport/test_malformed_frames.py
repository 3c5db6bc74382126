"""What a node does with frames that no node should send: it refuses them in the words of the protocol."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random

import pytest

from sluice.cluster.plain import bridge_frames
from sluice.cluster.transport import mux
from sluice.cluster.plain.bridge_frames import FrameBroken, Frames, frame
from sluice.cluster.ingress.stream_acceptor import CLIENT, LEG
from sluice.cluster.transport.streams import LineLost
from sluice.cluster.transport.mux import WINDOW, Trunk, TrunkBroken
from tests.cluster.transport import link_corpus as corpus
from tests.cluster.kit import End
from tests.cluster.transport.link_corpus import LinkBench, opening, trunk_frame


def call_now(call: Callable[..., object], *arguments: object) -> None:
    call(*arguments)


def dialed() -> tuple[Trunk, End]:
    """A trunk with one line that the other end has accepted."""
    one, end = Trunk(lambda: None, None, call_now, "peer-1"), End()
    one.dial(0, LEG, end)
    one.receive(trunk_frame(mux.OPENED, 1))
    return one, end


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (b"\1", "cut off"),
        (trunk_frame(mux.DATA, 1, b"abc")[:-1], "cut off"),
        (trunk_frame(9, 1), "kind 9"),
        (trunk_frame(mux.OPENED, 1), "opened twice"),
        (trunk_frame(mux.CREDIT, 1, b"\1"), "no number"),
        (trunk_frame(mux.CREDIT, 1, b"\0\0\0\1"), "more credit"),
        (trunk_frame(mux.CLOSE, 1, mux.NOT_HERE), "number of its cell"),
        (opening(1, 0, LEG), "wrong end"),
    ],
)
def test_a_message_that_no_trunk_sends_breaks_the_stream_with_a_reason(message: bytes, fault: str) -> None:
    one, _ = dialed()
    with pytest.raises(TrunkBroken, match=fault):
        one.receive(message)


def test_bytes_before_the_line_is_open_break_the_stream() -> None:
    one = Trunk(lambda: None, None, call_now, "peer-1")
    one.dial(0, LEG, End())
    with pytest.raises(TrunkBroken, match="before the line is open"):
        one.receive(trunk_frame(mux.DATA, 1, b"early"))


def test_a_peer_that_ignores_its_credit_cannot_fill_the_memory_of_a_node() -> None:
    one, end = dialed()
    end.line.pause_reading()
    piece = trunk_frame(mux.DATA, 1, b"x" * 65_536)
    for _ in range(WINDOW // 65_536):
        one.receive(piece + trunk_frame(mux.DATA, 1, b"") * 10)
    (line,) = one.lines.values()
    assert len(line._unread) == WINDOW // 65_536
    with pytest.raises(TrunkBroken, match="more bytes come than were asked for"):
        one.receive(piece)
    end.line.resume_reading()
    assert len(end.data) == WINDOW


def test_a_line_that_is_open_is_not_replaced_by_another_of_its_number() -> None:
    ends: list[End] = []

    def accept(cell: int, greeting: bytes, peer: str) -> End:
        ends.append(End())
        return ends[-1]

    one = Trunk(lambda: None, accept, call_now, "peer-1")
    one.receive(opening(1, 0, LEG))
    with pytest.raises(TrunkBroken, match="line 1 is opened twice"):
        one.receive(opening(1, 0, LEG))
    one.lose(LineLost("over"))
    assert len(ends) == 1 and len(ends[0].lost) == 1


@pytest.mark.parametrize("announced", [0, bridge_frames.LARGEST_FRAME + 1, 0xFFFF_FFFF])
def test_a_frame_of_no_size_or_of_any_size_is_refused_before_it_arrives(announced: int) -> None:
    with pytest.raises(FrameBroken, match=f"a frame of {announced} bytes"):
        list(Frames().feed(struct.pack(">I", announced) + b"\1"))


def test_a_large_frame_is_whole_whatever_pieces_it_arrives_in() -> None:
    body = bytes(range(256)) * 1000
    data = frame(3, body) + frame(4, b"") + frame(5, b"end")
    for size in (1, 3, 4, 5, 1000, 255_999, len(data)):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert corpus.frames_of(pieces) == [(3, body), (4, b""), (5, b"end")]


@pytest.fixture
async def bench() -> LinkBench:
    return await LinkBench().open()


FILTERS = struct.pack(">IHB", 1, 1, 1)
ORIGIN = struct.pack(">HQQQ", 1, 8, 1 << 40, 4)
PUBLISHED = corpus.publish([(0, [])], corpus.message())


@pytest.mark.parametrize(
    ("reader", "data", "fault"),
    [
        (corpus.ASKED, frame(bridge_frames.PUBLISH, b"\0"), "cut off"),
        (corpus.ASKED, frame(bridge_frames.PUBLISH, PUBLISHED[:-1]), "cut off"),
        (corpus.ASKED, frame(bridge_frames.PUBLISH, corpus.publish([(0, [])], b"")), "one message has 0"),
        (corpus.ASKED, frame(bridge_frames.PUBLISH, corpus.publish([(0, [])], b"\x30")), "not a PUBLISH"),
        (corpus.ASKED, frame(bridge_frames.PUBLISH, corpus.publish([(99, [])], corpus.message())), "no cell 99"),
        (corpus.ASKED, frame(bridge_frames.PUBLISH, corpus.publish([(0, [b"share"])], b"")[:-3]), "cut off"),
        (corpus.ASKED, frame(bridge_frames.ONCE, ORIGIN + PUBLISHED), "cannot be stored"),
        (corpus.ASKED, frame(bridge_frames.INTEREST, FILTERS + b"["), "not JSON"),
        (corpus.ASKED, frame(bridge_frames.INTEREST, FILTERS + b"[" * 100_000), "not JSON"),
        (corpus.ASKED, frame(bridge_frames.INTEREST, FILTERS + b"[]"), "not an object"),
        (corpus.ASKED, frame(bridge_frames.INTEREST, FILTERS + b'{"a": -1}'), "no number of subscriptions"),
        (corpus.ASKED, frame(bridge_frames.INTEREST, FILTERS + b'{"a": true}'), "no number of subscriptions"),
        (corpus.ASKED, frame(bridge_frames.INTEREST, FILTERS + b'{"\\ud800": 1}'), "not UTF-8"),
        (corpus.ASKING, frame(bridge_frames.ANSWER, b"\0\0"), "cut off"),
        (corpus.ASKING, frame(bridge_frames.FOUND, struct.pack(">IHHH", 3, 1, 0xFFFF, 0)), "no cell 65535"),
    ],
)
async def test_a_line_ends_with_a_reason_when_its_frames_cannot_be_read(
    bench: LinkBench, reader: int, data: bytes, fault: str
) -> None:
    assert fault in await bench.scrutinize(reader, 3, data)
    await bench.close()


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
async def test_a_client_with_a_greeting_that_cannot_be_read_is_refused_alone(
    bench: LinkBench, greeting: bytes
) -> None:
    one = Trunk(lambda: None, bench.node.accept, call_now, "peer-1")
    one.receive(opening(1, 0, CLIENT + greeting) + opening(2, 0, corpus.told()))
    assert list(one.lines) == [2]
    assert mux.BROKEN + b"the greeting of a client" in one.take()
    one.lose(LineLost("over"))
    await bench.close()


async def test_no_accident_to_a_frame_does_more_than_end_its_link(bench: LinkBench) -> None:
    """A part of what fuzz/fuzz_link.py does."""
    draw = Random(1)
    for reader, data in corpus.SEEDS:
        assert "taken" in await bench.scrutinize(reader, 3, data)
    for _ in range(1500):
        reader, data = draw.choice(corpus.SEEDS)
        await bench.scrutinize(reader, draw.randrange(256), corpus.mutated(reader, data, draw))
    await bench.close()
