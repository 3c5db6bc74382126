"""Properties that hold for every packet, every stream and every string of bytes (hypothesis)."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from random import Random

from hypothesis import event, given
from hypothesis import strategies as st

from sluice.errors import ProtocolViolation
from sluice.wire.decode import decode
from sluice.wire.encode import encode
from sluice.wire.packets import Packet, Publish
from sluice.wire.properties import encode_properties, read_properties
from sluice.wire.reader import PacketReader
from sluice.wire.topics import matches, topic_filter_error
from tests.wire import strategies
from tests.wire.corpus import SEEDS, check_input, mutated
from tests.wire.raw_packets import (
    block,
    body_start,
    decoded,
    field_values,
    packet,
    text,
    u16,
    u32,
    user,
    varint,
)

VERSIONS = st.sampled_from([4, 5])
CUTS = st.lists(st.integers(0, 1 << 20), max_size=8)


def fault_of(read: Callable[[], object]) -> ProtocolViolation | None:
    """Return the violation that `read` raises, or None; any other exception fails the test."""
    try:
        read()
    except ProtocolViolation as fault:
        return fault
    return None


@st.composite
def version_and_packet(draw: st.DrawFn) -> tuple[int, Packet]:
    version = draw(VERSIONS)
    return version, draw(strategies.packets(version))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[int, list[Packet]]:
    version = draw(VERSIONS)
    return version, draw(st.lists(strategies.packets(version), max_size=6))


@given(version_and_packet())
def test_packet_round_trips(sample: tuple[int, Packet]) -> None:
    version, original = sample
    event(type(original).__name__)
    written = encode(original, version)
    assert field_values(decoded(written, version)) == field_values(original)
    reader = PacketReader(len(written))
    assert field_values(reader.feed(written, version)) == field_values([original])


@given(conversations(), CUTS)
def test_stream_split_anywhere_gives_the_same_packets(
    sample: tuple[int, list[Packet]], cuts: list[int]
) -> None:
    version, packets = sample
    stream = b"".join(encode(each, version) for each in packets)
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    framer = PacketReader(1 << 20)
    found = [
        each for start, end in pairwise(edges) for each in framer.feed(stream[start:end], version)
    ]
    assert field_values(found) == field_values(packets)
    assert framer.buffered_bytes == 0


@given(st.binary(max_size=200), VERSIONS, CUTS)
def test_any_bytes_are_packets_or_incomplete_or_a_violation(
    data: bytes, version: int, cuts: list[int]
) -> None:
    check_input(data, version, cuts)


@given(st.integers(0, 255), st.binary(max_size=100), VERSIONS, CUTS)
def test_any_body_after_a_valid_header_is_a_packet_or_a_violation(
    head: int, body: bytes, version: int, cuts: list[int]
) -> None:
    check_input(packet(head, body), version, cuts)


@given(
    st.integers(0, 255), st.binary(max_size=60), st.data(), st.sampled_from([0, 3, 4, 5, 6, 255])
)
def test_any_slice_of_any_buffer_is_a_packet_or_a_violation(
    head: int, buffer: bytes, data: st.DataObject, version: int
) -> None:
    """This holds for an unknown version too: it must not cause another exception."""
    at = data.draw(st.integers(0, len(buffer)))
    end = data.draw(st.integers(at, len(buffer)))
    fault = fault_of(lambda: decode(buffer, head, at, end, version))
    assert fault is None or 0x81 <= fault.reason <= 0xA2


@given(version_and_packet(), st.integers(0, 1 << 32), CUTS)
def test_mutated_packet_is_a_packet_or_incomplete_or_a_violation(
    sample: tuple[int, Packet], chance: int, cuts: list[int]
) -> None:
    version, original = sample
    check_input(mutated(encode(original, version), Random(chance)), version, cuts)


@given(st.sampled_from(SEEDS), st.integers(0, 1 << 32), CUTS)
def test_mutated_corpus_seed_is_a_packet_or_incomplete_or_a_violation(
    seed: tuple[int, bytes], chance: int, cuts: list[int]
) -> None:
    version, data = seed
    check_input(mutated(data, Random(chance)), version, cuts)


@given(version_and_packet())
def test_bytes_after_a_packet_do_not_affect_it(sample: tuple[int, Packet]) -> None:
    """A truncated packet gives the same result at the end of its buffer and amid other bytes."""
    version, original = sample
    written = encode(original, version)
    body = written[body_start(written) :]
    for size in {len(body), max(0, len(body) - 1), len(body) // 2}:
        data = packet(written[0], body[:size])
        answers = set()
        for behind in (b"", b"\x00" * 8, b"\x26\x00\x01a\x00\x01b"):
            try:
                found = decode(data + behind, data[0], len(data) - size, len(data), version)
                answers.add(repr(field_values(found)))
            except ProtocolViolation as fault:
                answers.add(f"{type(fault)} {fault.reason} {fault}")
        assert len(answers) == 1


# Pieces of a PUBLISH's properties, valid and invalid, so that its two readers can be compared.
_pieces = st.one_of(
    st.builds(user, st.sampled_from(["", "k", "ü"]), st.sampled_from(["", "v", b"\x00", b"\xff"])),
    st.builds(lambda value: b"\x01" + bytes([value]), st.integers(0, 2)),
    st.builds(lambda value: b"\x02" + u32(value), strategies.u32s),
    st.builds(lambda value: b"\x03" + text(value), st.sampled_from(["", "json", b"\x00"])),
    st.builds(
        lambda value: b"\x08" + text(value), st.sampled_from(["a", "ü/b", "a/+", "ü#", b"\xff"])
    ),
    st.builds(lambda value: b"\x09" + text(value), strategies.binaries),
    st.builds(lambda value: b"\x0b" + varint(value), st.integers(0, 268_435_455)),
    st.builds(lambda value: b"\x23" + u16(value), st.integers(0, 0xFFFF)),
    st.binary(min_size=1, max_size=6),
)


@given(st.lists(_pieces, max_size=6).map(b"".join))
def test_both_readers_of_publish_properties_agree(raw: bytes) -> None:
    """The hot path scans raw bytes, all else builds `Properties`: the same rules, written twice."""
    fault = fault_of(lambda: decoded(packet(0x30, text("t"), block(raw), b"payload")))
    other = fault_of(lambda: read_properties(raw, 0, len(raw), 3))
    event("accepted" if fault is None else "refused")
    if fault is not None or other is not None:
        assert fault is not None
        assert other is not None
        # Alias 0 has a code of its own where aliases are used.
        assert fault.reason in (other.reason, 0x94)
        return
    walked = decoded(packet(0x30, text("t"), block(raw), b"payload"))
    assert isinstance(walked, Publish)
    assert walked.payload == b"payload"
    assert walked.decode_properties() == read_properties(raw, 0, len(raw), 3)


@given(st.sampled_from(sorted(strategies.LEGAL)), st.data())
def test_properties_round_trip(kind: int, data: st.DataObject) -> None:
    original = data.draw(strategies.properties(kind))
    raw = encode_properties(original)
    found = read_properties(raw, 0, len(raw), kind)
    assert found == original
    assert encode_properties(found) == raw


def reference(topic_filter: str) -> re.Pattern[str]:
    """Return section 4.7 as a regular expression, built without any part of Sluice."""
    out = ""
    levels = topic_filter.split("/")
    for nth, level in enumerate(levels):
        dollar = "(?!\\$)" if nth == 0 and level in "+#" and level else ""
        if level == "#":
            return re.compile("(?s)" + (f"{out}(/.*)?" if nth else f"{dollar}.*"))
        out += "/" if nth else ""
        out += f"{dollar}[^/]*" if level == "+" else re.escape(level)
    return re.compile("(?s)" + out)


LEVELS = ["", "a", "b", "+", "+", "$a", "ü", "a+", "#", "\n"]


@given(st.lists(st.sampled_from(LEVELS), min_size=1, max_size=5).map("/".join), st.data())
def test_filter_matches_like_an_independent_definition(
    topic_filter: str, data: st.DataObject
) -> None:
    if topic_filter_error(topic_filter.encode(), 128):
        event("not a filter")
        return
    # A name near the filter: each level the same or another; then perhaps longer or shorter.
    names = [
        data.draw(
            st.sampled_from([level] * 3 + ["a", ""] if level not in "+#" else ["a", "b", "", "$a"])
        )
        for level in topic_filter.split("/")
    ]
    names += data.draw(st.lists(st.sampled_from(["a", "", "b"]), max_size=2))
    topic = "/".join(names[: data.draw(st.integers(1, len(names)))])
    if not topic:
        return
    expected = reference(topic_filter).fullmatch(topic) is not None
    event(f"matches: {expected}")
    assert matches(topic_filter.encode(), topic.encode()) is expected


@given(st.lists(st.sampled_from([*LEVELS, "$share", "g"]), min_size=1, max_size=5).map("/".join))
def test_filter_is_invalid_like_an_independent_definition(topic_filter: str) -> None:
    plain = r"(?s)(?:(?:\+|[^+#/]*)/)*(?:\+|#|[^+#/]*)"
    shared = r"(?s)\$share/[^+#/]+/(.+)"
    inner = topic_filter
    if topic_filter == "$share" or topic_filter.startswith("$share/"):
        found = re.fullmatch(shared, topic_filter)
        inner = found[1] if found else ""
    good = bool(inner) and re.fullmatch(plain, inner) is not None
    nested = inner is not topic_filter and (inner == "$share" or inner.startswith("$share/"))
    assert (topic_filter_error(topic_filter.encode(), 128) == "") is (good and not nested)
