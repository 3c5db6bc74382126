"""Integers and strings, section 1.5 of MQTT 5.0: every width at its limits, and invalid bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from librt.strings import BytesWriter

from sluice.errors import MalformedPacket
from sluice.wire.primitives import (
    MAX_VARINT,
    read_binary,
    read_text,
    read_u16,
    read_u32,
    read_varint,
    varint_size,
    write_binary,
    write_u16,
    write_u32,
    write_varint,
)
from tests.wire.raw_packets import text, u16, u32, varint


def written(write: Callable[[BytesWriter, int], None], value: int) -> bytes:
    out = BytesWriter()
    write(out, value)
    return out.getvalue()


@pytest.mark.parametrize("value", [0, 1, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF])
def test_two_byte_integer_is_big_endian_and_unsigned(value: int) -> None:
    assert read_u16(b"\xff" + u16(value) + b"\xff", 1, 3) == value
    assert written(write_u16, value) == u16(value)


@pytest.mark.parametrize("value", [0, 1, 0xFFFF, 0x10000, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF])
def test_four_byte_integer_is_big_endian_and_unsigned(value: int) -> None:
    assert read_u32(b"\xff" + u32(value) + b"\xff", 1, 5) == value
    assert written(write_u32, value) == u32(value)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [  # table 1-1 of the specification
        (0, "00"),
        (127, "7f"),
        (128, "8001"),
        (16_383, "ff7f"),
        (16_384, "808001"),
        (2_097_151, "ffff7f"),
        (2_097_152, "80808001"),
        (268_435_455, "ffffff7f"),
    ],
)
def test_variable_byte_integer_matches_the_table_of_the_specification(
    value: int, encoded: str
) -> None:
    raw = bytes.fromhex(encoded)
    assert varint(value) == raw
    assert written(write_varint, value) == raw
    assert varint_size(value) == len(raw)
    assert read_varint(b"\xff" + raw + b"\xff", 1, 1 + len(raw)) == value


@pytest.mark.parametrize("encoded", ["8000", "ff00", "808000", "81808000", "80808000"])
def test_overlong_variable_byte_integer_is_malformed(encoded: str) -> None:
    """[MQTT-1.5.5-1]"""
    raw = bytes.fromhex(encoded)
    with pytest.raises(MalformedPacket, match="not in its shortest form"):
        read_varint(raw, 0, len(raw))


@pytest.mark.parametrize("encoded", ["80808080", "ffffffff", "8080808001", "8080808080"])
def test_variable_byte_integer_of_more_than_four_bytes_is_malformed(encoded: str) -> None:
    raw = bytes.fromhex(encoded)
    with pytest.raises(MalformedPacket, match="longer than four bytes"):
        read_varint(raw, 0, len(raw))


@pytest.mark.parametrize("size", range(4))
def test_integer_past_the_end_is_malformed_though_bytes_follow(size: int) -> None:
    data = b"\x80" * size + b"\x01\x01\x01\x01"
    with pytest.raises(MalformedPacket):
        read_varint(data, 0, size)
    with pytest.raises(MalformedPacket):
        read_u32(data, 0, size)
    with pytest.raises(MalformedPacket):
        read_u16(data, 0, min(size, 1))


@pytest.mark.parametrize("write", [write_u16, write_u32, write_varint])
@pytest.mark.parametrize("value", [-1, -0x8000, 0x1_0000_0000, 1 << 40])
def test_integer_that_does_not_fit_is_refused_rather_than_truncated(
    write: Callable[[BytesWriter, int], None], value: int
) -> None:
    out = BytesWriter()
    with pytest.raises(ValueError, match="does not fit"):
        write(out, value)
    assert out.getvalue() == b""


def test_first_integer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        written(write_u16, 0x10000)
    with pytest.raises(ValueError, match="does not fit"):
        written(write_varint, MAX_VARINT + 1)


@pytest.mark.parametrize("read", [read_binary, read_text])
@pytest.mark.parametrize("size", [0, 1, 5, 0x7FFF, 0x8000, 0xFFFF])
def test_string_is_its_length_and_its_bytes(
    read: Callable[[bytes, int, int], bytes], size: int
) -> None:
    data = b"\xff" + text(b"x" * size)
    assert read(data + b"\xff\xff", 1, len(data)) == b"x" * size


@pytest.mark.parametrize("read", [read_binary, read_text])
@pytest.mark.parametrize("there", [0, 1, 2, 3, 4])
def test_string_with_a_wrong_length_is_malformed_though_bytes_follow(
    read: Callable[[bytes, int, int], bytes], there: int
) -> None:
    with pytest.raises(MalformedPacket):
        read(b"\x00\x03abcdef", 0, there)


def test_binary_data_may_contain_what_text_may_not() -> None:
    raw = b"\x00\xff\xed\xa0\x80"
    assert read_binary(text(raw), 0, 2 + len(raw)) == raw


@pytest.mark.parametrize(
    "value",
    [
        "",
        "a",
        "ü",
        "€",
        "A\U0002a6d4",
        "\ufeff",
        "\ufeffa",
        "\ufffd",
        "\x01\x1f\x7f\x80",
        "\U0010ffff",
        "\uffff",
    ],
)
def test_text_may_contain_every_other_character(value: str) -> None:
    """[MQTT-1.5.4-3] keeps U+FEFF; control and non-characters are only discouraged."""
    data = text(value)
    assert read_text(data, 0, len(data)) == value.encode()


BAD_TEXT = {
    "U+0000 alone": b"\x00",  # [MQTT-1.5.4-2]
    "U+0000 after ASCII": b"abc\x00",
    "U+0000 after other characters": "ü\x00".encode(),
    "a lone continuation byte": b"\x80",
    "a character that ends too soon": b"a\xe2\x82",
    "a continuation byte that is none": b"\xc3a",
    "U+0000 written in two bytes": b"\xc0\x80",
    "a slash written in two bytes": b"\xc0\xaf",
    "a character written in three bytes that needs two": b"\xe0\x80\xaf",
    "a character written in four bytes that needs three": b"\xf0\x82\x82\xac",
    "the first surrogate": b"\xed\xa0\x80",  # [MQTT-1.5.4-1]
    "the last surrogate": b"\xed\xbf\xbf",
    "a pair of surrogates": b"\xed\xa0\x81\xed\xb0\x80",
    "beyond U+10FFFF": b"\xf4\x90\x80\x80",
    "five bytes": b"\xf8\x88\x80\x80\x80",
    "the byte FF": b"abc\xff",
    "the byte FE": b"\xfeabc",
}


@pytest.mark.parametrize("raw", BAD_TEXT.values(), ids=list(BAD_TEXT))
def test_text_that_is_not_utf_8_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedPacket) as caught:
        read_text(text(raw), 0, 2 + len(raw))
    assert caught.value.reason == 0x81


def test_character_cut_by_the_end_of_its_string_is_malformed_though_the_rest_follows() -> None:
    with pytest.raises(MalformedPacket):
        read_text(b"\x00\x02\xe2\x82\xac", 0, 5)


def test_string_of_65535_bytes_can_be_encoded_and_no_longer_one() -> None:
    out = BytesWriter()
    write_binary(out, b"x" * 0xFFFF)
    assert out.getvalue() == b"\xff\xff" + b"x" * 0xFFFF
    out = BytesWriter()
    with pytest.raises(ValueError, match="at most 65,535"):
        write_binary(out, b"x" * 0x10000)
    assert out.getvalue() == b""
