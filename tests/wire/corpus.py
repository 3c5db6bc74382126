"""Byte strings to test the wire code with, and what must hold for every one of them.

Run as a program, it prints one line for each byte string of a fixed corpus: the result of the
interpreted sources of Sluice, even if a compiled build is installed. `test_compiled.py` compares
that with the compiled build.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from itertools import pairwise
from pathlib import Path
from random import Random
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"


def read_sources_only(path: str) -> FileFinder:
    """A path hook that ignores the extension modules of an in-place build below src."""
    if not Path(path).is_relative_to(SOURCES):
        raise ImportError
    return FileFinder(path, (SourceFileLoader, SOURCE_SUFFIXES))


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCES))
    sys.path_hooks.insert(0, read_sources_only)
    # Ours: some libraries install a package of this name.
    sys.modules["tests"] = ModuleType("tests")
    sys.modules["tests"].__path__ = [str(ROOT / "tests")]

from sluice.errors import ProtocolViolation, UnsupportedVersion
from sluice.wire import decode as decode_module
from sluice.wire.decode import decode
from sluice.wire.encode import encode, encode_hop_properties, measure_publish
from sluice.wire.packets import Connack, Packet, Publish, Suback
from sluice.wire.reader import PacketReader
from tests.wire.raw_packets import (
    block,
    connect,
    field_values,
    packet,
    text,
    u16,
    u32,
    user,
    varint,
)

LIMIT = 1 << 20
COMPILED = not str(decode_module.__file__).endswith(".py")

_WILL = block(
    b"\x18", u32(5), b"\x01\x01", b"\x02", u32(60), b"\x08", text("re"), b"\x09", text("co")
)
_PUBLISH = (
    b"\x01\x01",
    b"\x02" + u32(9),
    user("k", "v"),
    b"\x03" + text("json"),
    b"\x0b" + varint(300),
    b"\x08" + text("re/ply"),
    b"\x23" + u16(3),
    b"\x09" + text(b"\x00\xff"),
    b"\x0b\x01",
    user("ü", "€"),
)

# Complete packets, each as (version, bytes): at least one for every function of the decoder.
SEEDS: list[tuple[int, bytes]] = [
    (4, connect(4, 0x02, text("client"))),
    (4, connect(4, 0xEE, text("c"), text("will/t"), text("gone"), text("user"), text("pass"))),
    (
        5,
        connect(
            5, 0x02, text(""), properties=block(b"\x11", u32(10), b"\x21", u16(5), user("a", "b"))
        ),
    ),
    (5, connect(5, 0xF6, text("c"), _WILL, text("will/ü"), text("x"), text("u"), text("p"))),
    (
        5,
        connect(
            5,
            0x02,
            text("c"),
            properties=block(b"\x15", text("m"), b"\x16", text("d"), b"\x27", u32(99)),
        ),
    ),
    (4, packet(0x20, b"\x01\x00")),
    (
        5,
        packet(
            0x20, b"\x00\x00", block(b"\x13", u16(9), b"\x12", text("id"), b"\x24\x01", b"\x2a\x00")
        ),
    ),
    (4, packet(0x30, text("a/b"), b"payload")),
    (4, packet(0x3D, text("a"), u16(7), b"")),
    (5, packet(0x30, text("a/b"), block(), b"payload")),
    (5, packet(0x33, text("ü/b"), u16(1), block(*_PUBLISH), b"payload")),
    (5, packet(0x30, text("t"), block(b"\x23", u16(1)))),
    (5, packet(0x34, text(""), u16(0xFFFF), block(b"\x23", u16(9)), b"p" * 130)),
    (5, packet(0x30, text("t"), block(*([user("a", "b"), b"\x0b\x05"] * 20)), b"")),
    *((version, packet(head, u16(1))) for version in (4, 5) for head in (0x40, 0x50, 0x62, 0x70)),
    (5, packet(0x40, u16(1), b"\x10")),
    (5, packet(0x62, u16(1), b"\x92", block(b"\x1f", text("why"), user("a", "b")))),
    (4, packet(0x82, u16(2), text("a/+"), b"\x01", text("#"), b"\x02")),
    (
        5,
        packet(
            0x82,
            u16(2),
            block(b"\x0b", varint(200)),
            text("$share/g/a"),
            b"\x29",
            text("b"),
            b"\x06",
        ),
    ),
    (4, packet(0x90, u16(2), b"\x01\x80")),
    (5, packet(0x90, u16(2), block(b"\x1f", text("no")), b"\x01\x87")),
    (4, packet(0xA2, u16(3), text("a/+"), text("b"))),
    (5, packet(0xA2, u16(3), block(user("a", "b")), text("a/+"))),
    (4, packet(0xB0, u16(3))),
    (5, packet(0xB0, u16(3), block(), b"\x00\x11")),
    (4, packet(0xC0) + packet(0xD0)),
    (4, packet(0xE0)),
    (5, packet(0xE0, b"\x04")),
    (5, packet(0xE0, b"\x8d", block(b"\x1f", text("late"), b"\x1c", text("other")))),
    (5, packet(0xF0, b"\x18", block(b"\x15", text("m"), b"\x16", text("d")))),
    (5, packet(0xF0)),
]

# Significant bytes: lengths at their limits, wildcards, surrogates, property identifiers.
_TOKENS = (
    *(
        b"\x00",
        b"\x01",
        b"\x7f",
        b"\x80",
        b"\xff",
        b"\x00\x00",
        b"\xff\xff",
        b"\x80\x00",
        b"\x80\x01",
    ),
    *(
        b"\xff\xff\xff\x7f",
        b"\x80\x80\x80\x80",
        b"+",
        b"#",
        b"/",
        b"$share/",
        b"\xed\xa0\x80",
        b"\xc3\xbc",
    ),
    *_PUBLISH,
)


def mutated(data: bytes, draw: Random) -> bytes:
    """Return `data` with a few small mutations.

    In half of the cases the remaining length is corrected, or nothing after the fixed header would
    ever be reached.
    """
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(out) + 1)
        size = draw.choice((1, 1, 2, 4, 8))
        match draw.randrange(6):
            case 0 if at < len(out):
                out[at] ^= 1 << draw.randrange(8)
            case 1 if at < len(out):
                out[at] = draw.randrange(256)
            case 2:
                out[at:at] = draw.choice(_TOKENS)
            case 3:
                del out[at : at + size]
            case 4:
                out[at:at] = out[at : at + size * 4]
            case _:
                token = draw.choice(_TOKENS)
                out[at : at + len(token)] = token
    if out and draw.random() < 0.5:
        body = 1
        while body < min(len(out), 4) and out[body] >= 0x80:
            body += 1
        return packet(out[0], bytes(out[body + 1 :]))
    return bytes(out)


def corpus(seed: int, count: int) -> Iterator[tuple[int, bytes]]:
    """Yield the seeds in both versions, then `count` mutations, splices and noise."""
    draw = Random(seed)
    for _, data in SEEDS:
        yield 4, data
        yield 5, data
    for _ in range(count):
        version, data = draw.choice(SEEDS)
        chance = draw.random()
        if chance < 0.1:
            data = draw.randbytes(draw.randrange(40))
        elif chance < 0.2:
            head = draw.randrange(256)
            data = packet(head, draw.randbytes(draw.randrange(24)))
        elif chance < 0.3:
            other = draw.choice(SEEDS)[1]
            data = data[: draw.randrange(len(data))] + other[draw.randrange(len(other)) :]
        else:
            data = mutated(data, draw)
        if draw.random() < 0.2:
            data = draw.choice(SEEDS)[1] + data
        yield (version if draw.random() < 0.9 else 9 - version), data


def parse_pieces(
    pieces: list[bytes], version: int
) -> tuple[list[Packet], ProtocolViolation | None, int]:
    """Return the packets of a stream in `pieces`, its violation if any, and the buffered bytes."""
    reader = PacketReader(LIMIT)
    found: list[Packet] = []
    try:
        for piece in pieces:
            found += reader.feed(piece, version)
    except ProtocolViolation as fault:
        return found, fault, 0
    return found, None, reader.buffered_bytes


def describe_error(fault: ProtocolViolation | None) -> str:
    return "" if fault is None else f"{type(fault).__name__} 0x{fault.reason:02x} {fault}"


def outcome_of(data: bytes, version: int) -> str:
    """Return the result for `data` in one line.

    Any exception except a `ProtocolViolation` is a bug, and is not caught.
    """
    found, fault, waiting = parse_pieces([data], version)
    again = [encode(each, version).hex() for each in found]
    head = data[0] if data else 0
    try:
        alone = repr(field_values(decode(data, head, min(2, len(data)), len(data), version)))
    except ProtocolViolation as refusal:
        alone = describe_error(refusal)
    return f"{field_values(found)!r} {describe_error(fault)!r} {waiting} {again!r} {alone!r}"


def check_input(data: bytes, version: int, cuts: list[int]) -> str:
    """Check what must hold for any byte string; return its kind of outcome."""
    found, fault, waiting = parse_pieces([data], version)
    # Split anywhere, the stream has the same result: the same violation, or the same packets and
    # the same remaining bytes.
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    found_in_pieces, fault_in_pieces, waiting_in_pieces = parse_pieces(pieces, version)
    assert describe_error(fault_in_pieces) == describe_error(fault)
    if fault is None:
        assert field_values(found_in_pieces) == field_values(found)
        assert waiting_in_pieces == waiting
    else:
        assert 0x81 <= fault.reason <= 0xA2
        assert str(fault)
    for each in found_in_pieces:
        _check_packet(each, version)
    last = type(found_in_pieces[-1]).__name__ if found_in_pieces else ""
    # UnsupportedVersion quotes its input.
    words = "" if isinstance(fault, UnsupportedVersion) else describe_error(fault)
    return f"{len(found_in_pieces[:2])} {last} {words} {waiting > 0}"


def _check_packet(each: Packet, version: int) -> None:
    """Check that an accepted packet can be encoded, and decodes to the same."""
    if isinstance(each, Publish):
        each.decode_properties()  # properties that the scan of raw bytes accepts can be decoded
    if version == 4 and isinstance(each, Connack | Suback):
        return  # a refusal in 3.1.1 is encoded from a 5.0 reason
    written = encode(each, version)
    again, fault, waiting = parse_pieces([written], version)
    assert (fault, waiting) == (None, 0)
    assert field_values(again) == field_values([each])
    if isinstance(each, Publish):
        extra = encode_hop_properties(each) if version == 5 else b""
        assert measure_publish(each, each.topic, each.qos, extra, version) == len(written)


def outcomes_of(seed: int, count: int) -> list[str]:
    return [outcome_of(data, version) for version, data in corpus(seed, count)]


if __name__ == "__main__":
    if COMPILED:
        sys.exit("the sources were to be interpreted, and a compiled build was found")
    for line in outcomes_of(int(sys.argv[1]), int(sys.argv[2])):
        print(line)
