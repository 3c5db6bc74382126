"""The properties of section 2.2.2: each one in each packet, repeated, out of range, truncated."""

from __future__ import annotations

import pytest

from sluice.errors import MalformedPacket, ProtocolViolation
from sluice.wire.properties import (
    Properties,
    encode_properties,
    read_properties,
    read_property_block,
)
from tests.wire.raw_packets import MALFORMED, PROTOCOL_ERROR, block, text, u16, u32, user, varint

WILL, CONNECT, CONNACK, PUBLISH, PUBACK, PUBREC, PUBREL, PUBCOMP = range(8)
SUBSCRIBE, SUBACK, UNSUBSCRIBE, UNSUBACK, DISCONNECT, AUTH = 8, 9, 10, 11, 14, 15
PACKETS = (*range(12), DISCONNECT, AUTH)

# Table 2-4 of the specification, written a second time: (encoded, attribute, value, packets).
EXAMPLES: dict[int, tuple[bytes, str, object, tuple[int, ...]]] = {
    0x01: (b"\x01", "payload_format", 1, (PUBLISH, WILL)),
    0x02: (u32(7), "message_expiry", 7, (PUBLISH, WILL)),
    0x03: (text("json"), "content_type", "json", (PUBLISH, WILL)),
    0x08: (text("re/ply"), "response_topic", "re/ply", (PUBLISH, WILL)),
    0x09: (text(b"\x00\xff"), "correlation_data", b"\x00\xff", (PUBLISH, WILL)),
    0x0B: (varint(300), "subscription_ids", [300], (PUBLISH, SUBSCRIBE)),
    0x11: (u32(0xFFFF_FFFF), "session_expiry", 0xFFFF_FFFF, (CONNECT, CONNACK, DISCONNECT)),
    0x12: (text("id"), "assigned_client_id", "id", (CONNACK,)),
    0x13: (u16(0xFFFF), "server_keep_alive", 0xFFFF, (CONNACK,)),
    0x15: (text("SCRAM"), "auth_method", "SCRAM", (CONNECT, CONNACK, AUTH)),
    0x16: (text(b"\xfe"), "auth_data", b"\xfe", (CONNECT, CONNACK, AUTH)),
    0x17: (b"\x00", "request_problem", 0, (CONNECT,)),
    0x18: (u32(1), "will_delay", 1, (WILL,)),
    0x19: (b"\x01", "request_response", 1, (CONNECT,)),
    0x1A: (text("info"), "response_information", "info", (CONNACK,)),
    0x1C: (text("other:1883"), "server_reference", "other:1883", (CONNACK, DISCONNECT)),
    0x1F: (
        text("ü"),
        "reason_string",
        "ü",
        (CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH),
    ),
    0x21: (u16(1), "receive_maximum", 1, (CONNECT, CONNACK)),
    0x22: (u16(0), "topic_alias_maximum", 0, (CONNECT, CONNACK)),
    0x23: (u16(1), "topic_alias", 1, (PUBLISH,)),
    0x24: (b"\x01", "maximum_qos", 1, (CONNACK,)),
    0x25: (b"\x00", "retain_available", 0, (CONNACK,)),
    0x26: (text("k") + text("v"), "user", [("k", "v")], PACKETS),
    0x27: (u32(1), "maximum_packet_size", 1, (CONNECT, CONNACK)),
    0x28: (b"\x00", "wildcard_available", 0, (CONNACK,)),
    0x29: (b"\x01", "subscription_ids_available", 1, (CONNACK,)),
    0x2A: (b"\x00", "shared_available", 0, (CONNACK,)),
}
AUTH_METHOD = b"\x15" + text("m")  # required with authentication data


def read(raw: bytes, kind: int) -> Properties:
    """Read amid other bytes, so that a read past the end shows."""
    return read_properties(b"\x01\x00" + raw + b"\x01\x00\x00\x00\x00", 2, 2 + len(raw), kind)


def reason_of(raw: bytes, kind: int) -> int:
    with pytest.raises(ProtocolViolation) as caught:
        read(raw, kind)
    return caught.value.reason


def required_properties(identifier: int) -> bytes:
    return AUTH_METHOD if identifier == 0x16 else b""


@pytest.mark.parametrize("kind", PACKETS)
@pytest.mark.parametrize("identifier", EXAMPLES)
def test_property_is_allowed_only_in_the_packets_of_the_table(identifier: int, kind: int) -> None:
    """Section 2.2.2.2: an identifier not valid for its packet type makes the packet malformed."""
    encoded, name, value, packets = EXAMPLES[identifier]
    raw = bytes([identifier]) + encoded
    if kind not in packets:
        assert reason_of(raw, kind) == MALFORMED
        return
    found = read(required_properties(identifier) + raw, kind)
    assert getattr(found, name) == value
    assert found.to_dict().keys() == {name} | ({"auth_method"} if identifier == 0x16 else set())


@pytest.mark.parametrize("kind", PACKETS)
def test_unknown_property_is_malformed(kind: int) -> None:
    for identifier in {*range(256)} - EXAMPLES.keys():
        assert reason_of(bytes([identifier]) + b"\x00\x00\x00\x00", kind) == MALFORMED


@pytest.mark.parametrize("identifier", EXAMPLES)
def test_repeated_property_is_a_protocol_error_unless_repeatable(identifier: int) -> None:
    encoded, name, value, packets = EXAMPLES[identifier]
    twice = required_properties(identifier) + (bytes([identifier]) + encoded) * 2
    for kind in packets:
        if identifier == 0x26 or (identifier == 0x0B and kind == PUBLISH):
            assert isinstance(value, list)
            assert getattr(read(twice, kind), name) == value * 2
        else:
            assert reason_of(twice, kind) == PROTOCOL_ERROR


@pytest.mark.parametrize("identifier", EXAMPLES)
def test_truncated_property_is_malformed(identifier: int) -> None:
    encoded, _, _, packets = EXAMPLES[identifier]
    raw = bytes([identifier]) + encoded
    for size in range(1, len(raw)):
        assert reason_of(raw[:size], packets[0]) == MALFORMED


OUT_OF_RANGE = [
    (0x01, b"\x02", PUBLISH),
    (0x01, b"\xff", WILL),
    (0x0B, b"\x00", PUBLISH),  # section 3.3.2.3.8
    (0x0B, b"\x00", SUBSCRIBE),  # section 3.8.2.1.2
    (0x17, b"\x02", CONNECT),
    (0x19, b"\x02", CONNECT),
    (0x21, u16(0), CONNECT),  # section 3.1.2.11.3
    (0x21, u16(0), CONNACK),
    (0x23, u16(0), PUBLISH),
    (0x24, b"\x02", CONNACK),  # section 3.2.2.3.4
    (0x25, b"\x02", CONNACK),
    (0x27, u32(0), CONNECT),  # section 3.1.2.11.4
    (0x27, u32(0), CONNACK),
    (0x28, b"\x02", CONNACK),
    (0x29, b"\x02", CONNACK),
    (0x2A, b"\x02", CONNACK),
]


@pytest.mark.parametrize(("identifier", "encoded", "kind"), OUT_OF_RANGE)
def test_value_out_of_range_is_a_protocol_error(identifier: int, encoded: bytes, kind: int) -> None:
    assert reason_of(bytes([identifier]) + encoded, kind) == PROTOCOL_ERROR


@pytest.mark.parametrize("kind", [CONNECT, CONNACK, AUTH])
def test_authentication_data_without_a_method_is_a_protocol_error(kind: int) -> None:
    """Section 3.1.2.11.10"""
    assert reason_of(b"\x16" + text("data"), kind) == PROTOCOL_ERROR
    assert read(b"\x16" + text("data") + AUTH_METHOD, kind).auth_data == b"data"


@pytest.mark.parametrize("kind", [PUBLISH, WILL])
@pytest.mark.parametrize("topic", ["+", "a/#", "ü/+"])
def test_response_topic_with_a_wildcard_is_an_invalid_topic(topic: str, kind: int) -> None:
    """[MQTT-3.3.2-14], and section 3.1.3.2.6 for the will"""
    assert reason_of(b"\x08" + text(topic), kind) == 0x90


@pytest.mark.parametrize(
    "identifier", [i for i, row in EXAMPLES.items() if isinstance(row[2], str)]
)
@pytest.mark.parametrize("bad", [b"\x00", b"a\x00", b"\xff", b"\xed\xa0\x80"])
def test_text_property_that_is_not_utf_8_is_malformed(identifier: int, bad: bytes) -> None:
    assert reason_of(bytes([identifier]) + text(bad), EXAMPLES[identifier][3][0]) == MALFORMED


@pytest.mark.parametrize(
    "raw", [user(b"\x00", "v"), user("k", b"\x00"), user(b"\xff", "v"), user("k", b"\xff")]
)
def test_user_property_that_is_not_utf_8_is_malformed(raw: bytes) -> None:
    for kind in PACKETS:
        assert reason_of(raw, kind) == MALFORMED


def test_user_properties_preserve_order_and_repetitions() -> None:
    """[MQTT-3.3.2-18]"""
    found = read(user("b", "1") + user("a", "2") + user("b", "1") + user("", ""), PUBLISH)
    assert found.user == [("b", "1"), ("a", "2"), ("b", "1"), ("", "")]


@pytest.mark.parametrize(
    "encoded", [b"\x80\x00", b"\x80\x80\x80\x80", b"\xff\xff\xff\xff\x01", b"\x80"]
)
def test_subscription_id_that_is_no_integer_is_malformed(encoded: bytes) -> None:
    assert reason_of(b"\x0b" + encoded, SUBSCRIBE) == MALFORMED


def test_property_identifier_of_two_bytes_is_malformed() -> None:
    """Identifiers are variable byte integers, and every existing one has a single byte."""
    assert reason_of(b"\x81\x00\x01", PUBLISH) == MALFORMED


@pytest.mark.parametrize("lie", [1, 2, 100, 16_384, 268_435_455])
def test_property_block_longer_than_its_packet_is_malformed(lie: int) -> None:
    data = varint(lie)
    with pytest.raises(MalformedPacket):
        read_property_block(data + b"\x26\x00\x00\x00\x00" * 30_000, 0, len(data), PUBLISH)


def test_property_block_ends_at_its_length() -> None:
    data = block(user("a", "b")) + user("c", "d")
    found, past = read_property_block(data, 0, len(data), PUBACK)
    assert found.user == [("a", "b")]
    assert past == len(data) - len(user("c", "d"))


def test_property_may_not_extend_past_its_block() -> None:
    """Each length is checked against the block, not against the packet around it."""
    data = b"\x04" + b"\x1f\x00\x05abcdef"
    with pytest.raises(MalformedPacket):
        read_property_block(data, 0, len(data), PUBACK)


@pytest.mark.parametrize("identifier", EXAMPLES)
def test_property_round_trips(identifier: int) -> None:
    encoded, name, value, _ = EXAMPLES[identifier]
    properties = Properties()
    setattr(properties, name, value)
    assert encode_properties(properties) == bytes([identifier]) + encoded


def test_properties_are_equal_when_their_values_are() -> None:
    one, other = Properties(), Properties()
    assert one == other
    one.receive_maximum = 3
    assert one != other
    other.receive_maximum = 3
    assert one == other
    assert hash(one) == hash(other)
    assert one != "something else"
    assert repr(one) == "Properties(receive_maximum=3)"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("receive_maximum", 0x10000),
        ("receive_maximum", -1),
        ("session_expiry", 1 << 32),
        ("session_expiry", -1),
        ("subscription_ids", [1 << 28]),
        ("content_type", "x" * 65_536),
        ("correlation_data", b"x" * 65_536),
        ("user", [("k", "x" * 65_536)]),
        ("reason_string", "\ud800"),
    ],
)
def test_value_that_cannot_be_encoded_is_refused_rather_than_truncated(
    name: str, value: object
) -> None:
    properties = Properties()
    setattr(properties, name, value)
    # The message differs between versions of the library.
    with pytest.raises(ValueError):  # noqa: PT011
        encode_properties(properties)
