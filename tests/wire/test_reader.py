"""Packet boundaries: packets arrive in any pieces, and are checked before they are buffered."""

from __future__ import annotations

import tracemalloc
from time import process_time

import pytest

from sluice.errors import MalformedPacket, PacketTooLarge
from sluice.wire.packets import Packet, Pingreq, Publish
from sluice.wire.reader import PacketReader
from tests.wire.raw_packets import field_values, packet, text, varint

STREAM = [
    packet(0x30, text("a"), b"one"),
    packet(0xC0),
    packet(0x32, text("b"), b"\x00\x01", b"x" * 300),
    packet(0x40, b"\x00\x01"),
    packet(0x30, text("c"), b"y" * 20_000),
    packet(0xE0),
]


def in_pieces(data: bytes, size: int, reader: PacketReader) -> list[Packet]:
    return [
        found
        for at in range(0, len(data), size)
        for found in reader.feed(data[at : at + size], version=4)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 1024, 1 << 20])
def test_stream_gives_the_same_packets_whatever_the_chunk_size(size: int) -> None:
    whole = PacketReader(1 << 20).feed(b"".join(STREAM), 4)
    assert [found.kind for found in whole] == [3, 12, 3, 4, 3, 14]
    reader = PacketReader(1 << 20)
    assert field_values(in_pieces(b"".join(STREAM), size, reader)) == field_values(whole)
    assert reader.buffered_bytes == 0


def test_stream_split_at_each_position_gives_the_same_packets() -> None:
    data = b"".join(STREAM[:4])
    whole = field_values(PacketReader(1000).feed(data, 4))
    for cut in range(len(data) + 1):
        reader = PacketReader(1000)
        first = reader.feed(data[:cut], 4)
        assert reader.buffered_bytes == cut - sum(len(each) for each in STREAM[: len(first)])
        assert field_values(first + reader.feed(data[cut:], 4)) == whole
        assert reader.buffered_bytes == 0


def test_no_bytes_give_no_packets() -> None:
    reader = PacketReader(100)
    assert reader.feed(b"", 5) == []
    assert reader.feed(b"\xc0", 5) == []
    assert reader.feed(b"", 5) == []
    assert reader.buffered_bytes == 1
    assert [found.kind for found in reader.feed(b"\x00", 5)] == [12]
    assert reader.feed(b"\x30\x0a", 5) == []
    assert reader.feed(b"", 5) == []
    assert reader.buffered_bytes == 2


@pytest.mark.parametrize(
    ("length", "header"),
    [
        (100, b"\x30\x64"),
        (128, b"\x30\x80\x01"),
        (20_000, b"\x30\xa0\x9c\x01"),
        (268_435_455, b"\x30\xff\xff\xff\x7f"),
    ],
)
def test_oversized_packet_is_refused_by_its_header_before_it_is_buffered(
    length: int, header: bytes
) -> None:
    reader = PacketReader(99)
    for byte in header[:-1]:
        assert reader.feed(bytes([byte]), 5) == []
    assert reader.buffered_bytes == len(header) - 1
    with pytest.raises(PacketTooLarge) as caught:
        reader.feed(header[-1:], 5)
    assert caught.value.reason == 0x95
    assert (caught.value.length, caught.value.limit) == (len(header) + length, 99)
    assert caught.value.remedy
    assert reader.buffered_bytes == 0


def test_limit_includes_the_packet_header() -> None:
    """Section 3.1.2.11.4: the packet size is the total number of bytes in the packet."""
    for size in (10, 129, 131, 16_386):
        body = size - 2 if size < 130 else size - 3 if size < 16_387 else size - 4
        data = packet(0x30, text("t"), bytes(body - 3))
        assert len(data) == size
        assert len(PacketReader(size).feed(data, 4)) == 1
        with pytest.raises(PacketTooLarge):
            PacketReader(size - 1).feed(data, 4)


def test_oversized_packet_after_small_ones_is_refused_too() -> None:
    reader = PacketReader(50)
    assert len(reader.feed(packet(0xC0) * 40 + b"\x30", 5)) == 40
    with pytest.raises(PacketTooLarge):
        reader.feed(b"\x33", 5)


@pytest.mark.parametrize("header", ["3080808080", "30ffffffff", "c08080808000", "108080808001"])
def test_remaining_length_of_five_bytes_is_malformed(header: str) -> None:
    raw = bytes.fromhex(header)
    with pytest.raises(MalformedPacket) as caught:
        PacketReader(1 << 30).feed(raw, 5)
    assert caught.value.reason == 0x81
    reader = PacketReader(1 << 30)
    assert reader.feed(raw[:4], 5) == []
    with pytest.raises(MalformedPacket):
        reader.feed(raw[4:5], 5)


@pytest.mark.parametrize("header", ["c08000", "30838000", "3083808000", "3080808000"])
def test_overlong_remaining_length_is_malformed(header: str) -> None:
    """[MQTT-1.5.5-1]"""
    with pytest.raises(MalformedPacket):
        PacketReader(1 << 30).feed(bytes.fromhex(header) + b"\x00\x01t", 5)


def test_incomplete_packet_counts_as_pending() -> None:
    reader = PacketReader(1000)
    data = packet(0x30, text("t"), bytes(500))
    reader.feed(data[:100], 4)
    assert reader.buffered_bytes == 100
    reader.feed(data[100:-1], 4)
    assert reader.buffered_bytes == len(data) - 1
    assert len(reader.feed(data[-1:] + b"\xc0", 4)) == 1
    assert reader.buffered_bytes == 1


def test_next_packet_has_head_body_and_end() -> None:
    """The functions that the broker's connection uses instead of `feed`."""
    for length in (0, 1, 127, 128, 16_383, 16_384, 2_097_151):
        header = b"\x32" + varint(length)
        data = b"\xff\xff" + header + bytes(length) + b"\x80"
        reader = PacketReader()
        assert reader.begin(data, 2)
        assert reader.advance()
        assert (reader.head, reader.body) == (0x32, 2 + len(header))
        assert reader.end == 2 + len(header) + length
        assert not reader.advance()
        assert reader.buffered_bytes == 1
        for size in range(1, len(header)):
            short = PacketReader(1)
            assert short.begin(data[: 2 + size], 2)
            assert not short.advance()
            assert short.buffered_bytes == size


def test_buffered_bytes_precede_the_next_chunk() -> None:
    reader = PacketReader(100)
    assert reader.begin(b"\xc0\x00\x30")
    assert reader.advance()
    assert not reader.advance()
    assert reader.begin(b"\x05abcde\x30\x06x")
    assert reader.data == b"\x30\x05abcde\x30\x06x"
    assert reader.advance()
    assert not reader.advance()
    assert not reader.begin(b"g")
    assert not reader.begin(b"h")
    assert reader.buffered_bytes == 5
    assert reader.begin(b"ijk\xc0")
    assert reader.data == b"\x30\x06xghijk\xc0"
    assert reader.advance()
    assert not reader.advance()
    assert reader.begin(b"\x00")
    assert reader.data == b"\xc0\x00"


def test_megabyte_of_two_byte_packets_takes_linear_time() -> None:
    before = process_time()
    found = PacketReader(1 << 20).feed(b"\xc0\x00" * (1 << 19), 5)
    assert process_time() - before < 8
    assert len(found) == 1 << 19
    assert isinstance(found[-1], Pingreq)


def test_large_packet_in_small_chunks_takes_linear_time() -> None:
    data = packet(0x30, text("t"), bytes(8 << 20))
    before = process_time()
    found = in_pieces(data, 500, PacketReader(1 << 24))
    # Usually a twentieth of this; four seconds if concatenated piece by piece.
    assert process_time() - before < 1.5
    assert isinstance(found[0], Publish)
    assert len(found[0].payload) == 8 << 20


@pytest.mark.parametrize("size", [2, 3, 10, 600])
def test_large_packet_in_tiny_chunks_takes_no_more_memory_than_its_bytes(size: int) -> None:
    """An object for every two bytes would hold thirty times what the peer has sent."""
    data = packet(0x30, text("t"), bytes(60_000))
    reader = PacketReader(1 << 20)
    tracemalloc.start()
    try:
        assert in_pieces(data[:-1], size, reader) == []
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reader.buffered_bytes == len(data) - 1
    assert held < 2 * len(data)
    assert len(reader.feed(data[-1:], 4)) == 1
