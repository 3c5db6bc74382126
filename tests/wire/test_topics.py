"""Topic names and filters, section 4.7 of MQTT 5.0."""

from __future__ import annotations

import pytest

from sluice.errors import InvalidTopic, MalformedPacket
from sluice.wire.topics import (
    check_topic_name,
    check_utf8,
    has_wildcard,
    matches,
    split_share,
    topic_filter_error,
)

LEVELS = 128


@pytest.mark.parametrize(
    "name", ["a", "/", "//", "a/b/c", "/a", "a/", "a b", "$SYS/x", "ü/€", "A", "\ufeff/a"]
)
def test_topic_name_may_contain_anything_but_wildcards(name: str) -> None:
    """[MQTT-4.7.3-1]: names may contain spaces and empty levels; equal bytes are the same name."""
    raw = name.encode()
    check_topic_name(raw, 0, len(raw))


@pytest.mark.parametrize("name", ["+", "#", "a/+/b", "a/#", "a+", "ü/+", "ü#", "+ü", "/#/"])
def test_topic_name_with_a_wildcard_is_invalid(name: str) -> None:
    """[MQTT-3.3.2-2]"""
    raw = name.encode()
    with pytest.raises(InvalidTopic) as caught:
        check_topic_name(raw, 0, len(raw))
    assert caught.value.reason == 0x90
    assert caught.value.remedy


@pytest.mark.parametrize(
    "raw", [b"\x00", b"a\x00", "ü\x00".encode(), b"\xff", b"a/\xed\xa0\x80", b"\xc0\x80"]
)
def test_topic_name_that_is_not_utf_8_is_malformed(raw: bytes) -> None:
    """[MQTT-4.7.3-2]"""
    with pytest.raises(MalformedPacket):
        check_topic_name(raw, 0, len(raw))
    with pytest.raises(MalformedPacket):
        check_utf8(raw, 0, len(raw))


@pytest.mark.parametrize("size", [7, 8, 9, 15, 16, 17, 31])
def test_one_invalid_byte_is_found_at_any_position(size: int) -> None:
    """Names are checked eight bytes at a time, and all other bytes must pass."""
    good = bytes((0x24 + 3 * nth) % 7 + 0x24 for nth in range(size))
    for at in range(size):
        for byte in range(1, 128):
            raw = good[:at] + bytes([byte]) + good[at + 1 :]
            check_utf8(b"\0" + raw + b"\0", 1, size + 1)
            if byte not in b"+#":
                check_topic_name(b"#" + raw + b"+", 1, size + 1)
        for bad, error in (
            (b"+", InvalidTopic),
            (b"#", InvalidTopic),
            (b"\0", MalformedPacket),
            (b"\xff", MalformedPacket),
        ):
            with pytest.raises(error):
                check_topic_name(good[:at] + bad + good[at + 1 :], 0, size)
            if error is MalformedPacket:
                with pytest.raises(error):
                    check_utf8(good[:at] + bad + good[at + 1 :], 0, size)
        wide = good[:at] + "ü".encode() + good[at + 1 :]
        check_topic_name(wide, 0, len(wide))
        check_utf8(wide, 0, len(wide))


def test_only_the_bytes_between_start_and_end_are_checked() -> None:
    check_topic_name(b"\x00#ab\xff+", 2, 4)
    check_utf8(b"\xff\x00\xc3\xa4\x00\xff", 2, 4)


@pytest.mark.parametrize(
    "topic_filter",
    [
        "a",
        "#",
        "+",
        "/",
        "+/+",
        "/+",
        "a/#",
        "+/#",
        "/#",
        "a/+/b/#",
        "+/a/+",
        "$SYS/#",
        "ü/+",
        "a//b",
        " ",
    ],
)
def test_well_formed_filter_is_valid(topic_filter: str) -> None:
    """The examples of sections 4.7.1.2 and 4.7.1.3."""
    assert topic_filter_error(topic_filter.encode(), LEVELS) == ""


@pytest.mark.parametrize(
    "topic_filter",
    ["", "a#", "#a", "a/#/b", "#/", "##", "+#", "a+", "+a", "a/b+/c", "++", "a/+#", "/+a"],
)
def test_misplaced_wildcard_is_invalid(topic_filter: str) -> None:
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.7.3-1]"""
    assert topic_filter_error(topic_filter.encode(), LEVELS)


def test_levels_of_a_filter_are_limited() -> None:
    assert topic_filter_error(b"a/b/c", 3) == ""
    assert "4 levels" in topic_filter_error(b"a/b/c/#", 3)
    assert topic_filter_error(b"$share/g/a/b/c", 3) == ""


@pytest.mark.parametrize(
    ("topic_filter", "group", "inner"),
    [
        ("$share/g/a", "g", "a"),
        ("$share/g/a/b/#", "g", "a/b/#"),
        ("$share/g//a", "g", "/a"),
        ("$share/g/+", "g", "+"),
        ("$share/g/$SYS/x", "g", "$SYS/x"),
        ("$share/ü/x", "ü", "x"),
        ("$shared/g/a", "", "$shared/g/a"),
        ("share/g/a", "", "share/g/a"),
        ("a/$share/g", "", "a/$share/g"),
    ],
)
def test_shared_filter_is_split_into_share_and_filter(
    topic_filter: str, group: str, inner: str
) -> None:
    """Section 4.8.2"""
    assert split_share(topic_filter.encode()) == (group.encode(), inner.encode())
    assert topic_filter_error(topic_filter.encode(), LEVELS) == ""


@pytest.mark.parametrize(
    "topic_filter",
    [
        "$share",
        "$share/",
        "$share//",
        "$share//a",
        "$share/g",
        "$share/g/",
        "$share/+/a",
        "$share/#/a",
        "$share/g+/a",
        "$share/#",
        "$share/g/a#",
        "$share/g/#/a",
        "$share/g/$share/h/a",
    ],
)
def test_shared_filter_without_share_or_filter_is_invalid(topic_filter: str) -> None:
    """[MQTT-4.8.2-1], [MQTT-4.8.2-2]"""
    assert topic_filter_error(topic_filter.encode(), LEVELS)


@pytest.mark.parametrize(
    ("topic_filter", "topic", "expected"),
    [
        ("sport/tennis/player1/#", "sport/tennis/player1", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/ranking", True),
        ("sport/tennis/player1/#", "sport/tennis/player1/score/wimbledon", True),
        ("sport/tennis/player1/#", "sport/tennis/player10", False),
        ("sport/#", "sport", True),
        ("#", "anything/at/all", True),
        ("#", "/", True),
        ("sport/tennis/+", "sport/tennis/player1", True),
        ("sport/tennis/+", "sport/tennis/player1/ranking", False),
        ("sport/+", "sport", False),
        ("sport/+", "sport/", True),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("+", "/finance", False),
        ("+/tennis/#", "sport/tennis", True),
        ("#", "$SYS/monitor/Clients", False),
        ("+/monitor/Clients", "$SYS/monitor/Clients", False),
        ("+", "$SYS", False),
        ("$SYS/#", "$SYS/monitor/Clients", True),
        ("$SYS/#", "$SYS", True),
        ("$SYS/monitor/+", "$SYS/monitor/Clients", True),
        ("a/+", "a/$b", True),
        ("ACCOUNTS", "Accounts", False),
        ("/a", "a", False),
        ("a/", "a", False),
        ("a//b", "a/b", False),
        ("a/+/b", "a//b", True),
        ("a/b", "a/b/c", False),
        ("a/b/c", "a/b", False),
    ],
)
def test_filter_matches_as_the_specification_says(
    topic_filter: str, topic: str, expected: bool
) -> None:
    """Sections 4.7.1.2, 4.7.1.3, 4.7.2 and 4.7.3, example by example."""
    assert matches(topic_filter.encode(), topic.encode()) is expected


def test_filter_with_a_wildcard_is_recognized() -> None:
    assert has_wildcard(b"a/+")
    assert has_wildcard(b"#")
    assert not has_wildcard(b"a/b")
