"""Read and write the integers and strings of packets (MQTT 5.0 section 1.5).

Readers take the buffer, a position and the end of the readable range; reading past the end raises
`MalformedPacket`, never `IndexError`. A reader returns the value alone if the value determines its
width, so that nothing is allocated.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i16_be, read_i32_be, write_i16_be, write_i32_be
from mypy_extensions import i16, i32, i64

from sluice.errors import MalformedPacket
from sluice.wire.topics import check_utf8

MAX_VARINT: Final = 268_435_455


def read_u16(data: bytes, at: i64, end: i64) -> i64:
    if at + 2 > end:
        raise MalformedPacket("the packet ends inside a two byte integer")
    return i64(read_i16_be(data, at)) & 0xFFFF


def read_u32(data: bytes, at: i64, end: i64) -> i64:
    if at + 4 > end:
        raise MalformedPacket("the packet ends inside a four byte integer")
    return i64(read_i32_be(data, at)) & 0xFFFF_FFFF


def read_varint(data: bytes, at: i64, end: i64) -> i64:
    """Read a variable byte integer; `varint_size` of the result is its encoded size."""
    value: i64 = 0
    shift: i64 = 0
    while shift < 28:
        if at >= end:
            raise MalformedPacket("the packet ends inside a variable byte integer")
        byte: i64 = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if byte == 0 and shift > 0:
                # [MQTT-1.5.5-1]
                raise MalformedPacket("a variable byte integer is not in its shortest form")
            return value
        shift += 7
    raise MalformedPacket("a variable byte integer is longer than four bytes")


def varint_size(value: i64) -> i64:
    if value < 128:
        return 1
    if value < 16_384:
        return 2
    return 3 if value < 2_097_152 else 4


def read_binary(data: bytes, at: i64, end: i64) -> bytes:
    """Read length-prefixed bytes; the caller advances by their length and two."""
    size = read_u16(data, at, end)
    start = at + 2
    if start + size > end:
        raise MalformedPacket("the packet ends inside a string")
    return data[start : start + size]


def read_text(data: bytes, at: i64, end: i64) -> bytes:
    """Read a UTF-8 string, checked, as bytes."""
    size = read_u16(data, at, end)
    start = at + 2
    if start + size > end:
        raise MalformedPacket("the packet ends inside a string")
    check_utf8(data, start, start + size)
    return data[start : start + size]


def write_u16(out: BytesWriter, value: i64) -> None:
    if value < 0 or value > 0xFFFF:
        raise ValueError(f"{value} does not fit a two byte integer")
    write_i16_be(out, i16(value if value < 0x8000 else value - 0x10000))


def write_u32(out: BytesWriter, value: i64) -> None:
    if value < 0 or value > 0xFFFF_FFFF:
        raise ValueError(f"{value} does not fit a four byte integer")
    write_i32_be(out, i32(value if value < 0x8000_0000 else value - 0x1_0000_0000))


def write_varint(out: BytesWriter, value: i64) -> None:
    if value < 0 or value > MAX_VARINT:
        raise ValueError(f"{value} does not fit a variable byte integer")
    while value > 127:
        out.append(int((value & 127) | 128))
        value >>= 7
    out.append(int(value))


def write_binary(out: BytesWriter, value: bytes) -> None:
    size: i64 = len(value)
    if size > 0xFFFF:
        raise ValueError(f"a string of {size} bytes does not fit an MQTT packet: at most 65,535")
    write_i16_be(out, i16(size if size < 0x8000 else size - 0x10000))
    out.write(value)
