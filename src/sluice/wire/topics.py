"""Topic names and topic filters: validation and matching (MQTT 5.0 section 4.7).

Names stay the bytes that were received: equal bytes are the same topic, and the message path does
not need text. Validation is a loop over small integers because the compiler makes that fast.
"""

from __future__ import annotations

from typing import Final

from librt.strings import read_i64_le
from mypy_extensions import i64

from sluice.errors import InvalidTopic, MalformedPacket, ProtocolViolation

DOLLAR: Final = 0x24  # "$", the first byte of a topic that is not plain
SHARE_PREFIX: Final = b"$share/"
SHARE_FORM: Final = (
    "a shared subscription is written $share/<name>/<filter>, the name without / + #"
)

# Process eight bytes at a time as one number. After subtracting `ONES`, the highest bit of a byte
# is set where the byte was 0. Numbers of more than 62 bits are slow, so the bits are shifted
# instead of masked.
WORD_BYTES: Final = 8
ONES: Final = 0x0101_0101_0101_0101
EIGHTS: Final = 0x0808_0808_0808_0808
PLUSES: Final = 0x2B2B_2B2B_2B2B_2B2B


def check_utf8(data: bytes, start: i64, end: i64) -> None:
    """Check for well-formed UTF-8 without surrogates and U+0000 [MQTT-1.5.4-1, -2]."""
    at: i64 = start
    if end - start >= WORD_BYTES:
        while at <= end - WORD_BYTES:
            if not _is_plain_ascii(read_i64_le(data, at)):
                break
            at += WORD_BYTES
        else:
            if _is_plain_ascii(read_i64_le(data, end - WORD_BYTES)):
                return
    while at < end:
        byte: i64 = data[at]
        if byte == 0:
            raise MalformedPacket("a string contains the character U+0000")
        if byte >= 0x80:
            _check_non_ascii(data[at:end])
            return
        at += 1


def _check_non_ascii(tail: bytes) -> None:
    """Check the rest of a string from its first non-ASCII byte on."""
    try:
        tail.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise MalformedPacket(f"a string is not UTF-8: {fault.reason}") from None
    if b"\x00" in tail:
        raise MalformedPacket("a string contains the character U+0000")


def check_topic_name(data: bytes, start: i64, end: i64) -> None:
    """Check a topic name of a publisher: UTF-8, and no wildcard [MQTT-3.3.2-2]."""
    at: i64 = start
    if end - start >= WORD_BYTES:
        while at <= end - WORD_BYTES:
            if not _is_plain_name(read_i64_le(data, at)):
                break
            at += WORD_BYTES
        else:
            if _is_plain_name(read_i64_le(data, end - WORD_BYTES)):
                return
    while at < end:
        byte: i64 = data[at]
        if byte == 0x2B or byte == 0x23:
            raise _wildcard_error()
        if byte == 0:
            raise MalformedPacket("a string contains the character U+0000")
        if byte >= 0x80:
            tail = data[at:end]
            _check_non_ascii(tail)
            if b"+" in tail or b"#" in tail:
                raise _wildcard_error()
            return
        at += 1


def _wildcard_error() -> InvalidTopic:
    return InvalidTopic(
        "the topic name contains a wildcard",
        "Publish to a name without + and #; only filters have wildcards",
    )


def _is_plain_ascii(word: i64) -> bool:
    """Return whether eight bytes are ASCII without U+0000."""
    return ((word | (word - ONES)) >> 7) & ONES == 0


def _is_plain_name(word: i64) -> bool:
    """Return whether eight bytes are plain ASCII without `+` (2B) and `#` (23).

    The two wildcards differ in one bit.
    """
    wild = (word | EIGHTS) ^ PLUSES  # 0 where a byte is one of them
    return ((word | (word - ONES) | (wild - ONES)) >> 7) & ONES == 0


def check_topic_filter(topic_filter: bytes) -> None:
    """Check a topic filter of a client for faults that end the connection.

    `topic_filter_error` also finds the faults for which the SUBACK refuses one filter.
    """
    fault = _incomplete_filter_error(topic_filter)
    if fault:
        raise ProtocolViolation(fault)


def _incomplete_filter_error(topic_filter: bytes) -> str:
    if not topic_filter:  # [MQTT-4.7.3-1]
        return "the topic filter is empty"
    if topic_filter.startswith(SHARE_PREFIX):  # [MQTT-4.8.2-1], [MQTT-4.8.2-2]
        share_name, inner = split_share(topic_filter)
        if not share_name or has_wildcard(share_name):
            return SHARE_FORM
        if not inner:
            return "the shared subscription has no topic filter after its name"
    return ""


def topic_filter_error(topic_filter: bytes, max_levels: int) -> str:
    """Return why `topic_filter` is invalid, or an empty string if it is valid.

    A shared filter is checked by the filter inside it. The bytes are known to be UTF-8.
    """
    fault = _incomplete_filter_error(topic_filter)
    if fault:
        return fault
    if topic_filter == b"$share":
        return SHARE_FORM
    if topic_filter.startswith(SHARE_PREFIX):
        _, inner = split_share(topic_filter)
        return (
            topic_filter_error(inner, max_levels)
            if not inner.startswith(SHARE_PREFIX)
            else "a share within a share"
        )
    count = topic_filter.count(b"/") + 1
    if count > max_levels:
        return (
            f"the topic filter has {count} levels, more than the {max_levels} allowed here "
            "(mqtt.max_topic_levels)"
        )
    levels = topic_filter.split(b"/")
    last = len(levels) - 1
    for nth, level in enumerate(levels):
        if b"#" in level and (level != b"#" or nth != last):
            return "# must stand alone in the last level of a topic filter"
        if b"+" in level and level != b"+":
            return "+ must stand alone in its level of a topic filter"
    return ""


def split_share(topic_filter: bytes) -> tuple[bytes, bytes]:
    """Return (name, filter) of `$share/name/filter`, or (b"", filter) of an ordinary filter."""
    if not topic_filter.startswith(SHARE_PREFIX):
        return b"", topic_filter
    rest = topic_filter[len(SHARE_PREFIX) :]
    slash = rest.find(b"/")
    return (rest, b"") if slash < 0 else (rest[:slash], rest[slash + 1 :])


def starts_with(topic: bytes, prefix: bytes) -> bool:
    """Return `topic.startswith(prefix)` by comparing a few bytes, without a call.

    For the message path.
    """
    nth: i64 = len(prefix)
    if len(topic) < nth:
        return False
    while nth > 0:
        nth -= 1
        if topic[nth] != prefix[nth]:
            return False
    return True


def has_wildcard(topic_filter: bytes) -> bool:
    return b"+" in topic_filter or b"#" in topic_filter


def matches(topic_filter: bytes, topic: bytes) -> bool:
    """Return whether `topic_filter` matches `topic`; the subscription tree must agree with this."""
    if topic[:1] == b"$" and topic_filter[:1] in (b"+", b"#"):  # [MQTT-4.7.2-1]
        return False
    wanted = topic_filter.split(b"/")
    levels = topic.split(b"/")
    for nth, level in enumerate(wanted):
        if level == b"#":
            return True
        if nth == len(levels) or level not in (b"+", levels[nth]):
            return False
    return len(wanted) == len(levels)
