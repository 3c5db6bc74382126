"""Decoding: every packet of both versions, and every form that the specification forbids.

This is one long file, in the order of chapter 3 of the specification, so that the two can be
compared.
"""

from __future__ import annotations

from time import process_time

import pytest

from sluice.errors import UnsupportedVersion
from sluice.wire.decode import decode_publish
from sluice.wire.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from tests.wire.raw_packets import (
    BAD_TOPIC,
    MALFORMED,
    PROTOCOL_ERROR,
    block,
    connect,
    decoded,
    field_values,
    packet,
    refused,
    text,
    u16,
    u32,
    user,
    varint,
)

BOTH = pytest.mark.parametrize("version", [4, 5])
NONE = b"\x00"  # an empty block of properties


def props(version: int, *properties: bytes) -> bytes:
    """Return a block of properties if the version has one."""
    return block(*properties) if version == 5 else b""


# --- the fixed header


@BOTH
def test_packet_type_0_is_reserved(version: int) -> None:
    for flags in range(16):
        assert refused(packet(flags), version).reason == MALFORMED


@BOTH
def test_flags_other_than_the_prescribed_ones_are_malformed(version: int) -> None:
    """[MQTT-2.1.3-1]; also [MQTT-3.6.1-1], [MQTT-3.8.1-1], [MQTT-3.10.1-1]"""
    bodies = {
        1: connect(version, 2, text("c"))[2:],
        2: b"\x00\x00" + props(version),
        4: u16(1),
        5: u16(1),
        6: u16(1),
        7: u16(1),
        8: u16(1) + props(version) + text("a") + b"\x00",
        9: u16(1) + props(version) + b"\x00",
        10: u16(1) + props(version) + text("a"),
        11: u16(1) + (props(version) + b"\x00" if version == 5 else b""),
        12: b"",
        13: b"",
        14: b"",
        15: b"",
    }
    for kind, body in bodies.items():
        right = 2 if kind in (6, 8, 10) else 0
        for flags in range(16):
            data = packet(kind << 4 | flags, body)
            if flags != right:
                assert refused(data, version).reason == MALFORMED
            elif kind != 15 or version == 5:
                assert decoded(data, version).kind == kind


# --- CONNECT


@BOTH
def test_connect_with_a_client_id_alone(version: int) -> None:
    found = decoded(connect(version, 0x02, text("cliënt"), keep_alive=0xFFFF), version)
    assert isinstance(found, Connect)
    assert field_values(found) == {
        "packet": "Connect",
        "kind": 1,
        "client_id": "cliënt",
        "version": version,
        "clean_start": True,
        "keep_alive": 0xFFFF,
        "properties": {},
        "will": None,
        "will_delay": 0,
        "username": None,
        "password": None,
    }


@BOTH
def test_connect_with_all_fields(version: int) -> None:
    will_properties = props(
        version, b"\x18", u32(9), b"\x01\x01", b"\x02", u32(30), b"\x08", text("re"), user("a", "b")
    )
    data = connect(
        version,
        0x80 | 0x40 | 0x20 | 0x10 | 0x04,
        text("c"),
        will_properties,
        text("will/topic"),
        text(b"gone\x00"),
        text("ann"),
        text(b"\xff\x00"),
        properties=block(b"\x11", u32(100), b"\x21", u16(10)),
    )
    found = decoded(data, version)
    assert isinstance(found, Connect)
    assert (found.clean_start, found.username, found.password) == (False, "ann", b"\xff\x00")
    will = found.will
    assert will is not None
    assert (will.topic, will.payload, will.qos, will.retain) == (
        b"will/topic",
        b"gone\x00",
        2,
        True,
    )
    if version == 5:
        assert found.properties.to_dict() == {"session_expiry": 100, "receive_maximum": 10}
        assert found.will_delay == 9
        assert will.expiry_seconds == 30
        assert will.decode_properties().to_dict() == {
            "payload_format": 1,
            "message_expiry": 30,
            "response_topic": "re",
            "user": [("a", "b")],
        }


@BOTH
def test_version_of_a_connect_does_not_depend_on_the_previous_one(version: int) -> None:
    found = decoded(connect(version, 2, text("c")), 9 - version)
    assert isinstance(found, Connect)
    assert found.version == version


@BOTH
def test_empty_client_id_is_not_refused_by_the_decoder(version: int) -> None:
    """[MQTT-3.1.3-6]: the server may assign one; the session decides."""
    found = decoded(connect(version, 0, text("")), version)
    assert isinstance(found, Connect)
    assert found.client_id == ""


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("MQTT", 3),
        ("MQTT", 6),
        ("MQTT", 0),
        ("MQTT", 0x84),
        ("MQIsdp", 3),
        ("MQIsdp", 4),
        ("mqtt", 5),
        ("", 5),
    ],
)
def test_another_protocol_or_level_is_an_unsupported_version(name: str, level: int) -> None:
    """[MQTT-3.1.2-1], [MQTT-3.1.2-2]"""
    fault = refused(packet(0x10, text(name), bytes([level, 2]), u16(60), text("c")))
    assert isinstance(fault, UnsupportedVersion)
    assert fault.reason == 0x84
    assert fault.level == level


@BOTH
def test_reserved_flag_of_a_connect_is_malformed(version: int) -> None:
    """[MQTT-3.1.2-3]"""
    assert refused(connect(version, 0x03, text("c"))).reason == MALFORMED


@BOTH
@pytest.mark.parametrize("flags", [0x08, 0x10, 0x18, 0x20, 0x28, 0x38])
def test_will_qos_or_will_retain_without_a_will_is_malformed(version: int, flags: int) -> None:
    """[MQTT-3.1.2-11], [MQTT-3.1.2-13]"""
    assert refused(connect(version, flags | 2, text("c"))).reason == MALFORMED


@BOTH
def test_will_of_qos_3_is_malformed(version: int) -> None:
    """[MQTT-3.1.2-12]"""
    data = connect(version, 0x1E, text("c"), props(version), text("t"), text(""))
    assert refused(data).reason == MALFORMED


@BOTH
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [False, True])
def test_will_has_the_qos_and_retain_flag_of_the_connect(
    version: int, qos: int, retain: bool
) -> None:
    flags = 0x04 | qos << 3 | retain << 5
    found = decoded(connect(version, flags, text("c"), props(version), text("t"), text("")))
    assert isinstance(found, Connect)
    assert found.will is not None
    assert (found.will.qos, found.will.retain, found.will.payload) == (qos, retain, b"")


def test_password_without_a_user_name_is_malformed_in_3_1_1_only() -> None:
    """3.1.1 [MQTT-3.1.2-22]; 5.0 allows it (section 3.1.2.9)."""
    assert refused(connect(4, 0x42, text("c"), text("secret"))).reason == MALFORMED
    found = decoded(connect(5, 0x42, text("c"), text("secret")))
    assert isinstance(found, Connect)
    assert (found.username, found.password) == (None, b"secret")


@BOTH
def test_flag_without_its_field_is_malformed(version: int) -> None:
    for flags in (0x04, 0x80, 0xC0):
        assert refused(connect(version, flags | 2, text("c"))).reason == MALFORMED


@BOTH
def test_field_without_its_flag_is_malformed(version: int) -> None:
    """[MQTT-3.1.2-16], [MQTT-3.1.2-18]"""
    assert refused(connect(version, 2, text("c"), text("ann"))).reason == MALFORMED
    assert (
        refused(connect(version, 0x82, text("c"), text("ann"), text("secret"))).reason == MALFORMED
    )
    assert refused(connect(version, 2, text("c"), b"\x00")).reason == MALFORMED


@BOTH
@pytest.mark.parametrize(
    ("topic", "reason"), [("", 0x90), ("a/+", 0x90), ("#", 0x90), (b"\xff", MALFORMED)]
)
def test_will_with_an_invalid_topic_is_refused(
    version: int, topic: str | bytes, reason: int
) -> None:
    data = connect(version, 0x06, text("c"), props(version), text(topic), text("x"))
    assert refused(data).reason == reason


def test_will_with_a_wildcard_in_its_response_topic_is_refused() -> None:
    data = connect(5, 0x06, text("c"), block(b"\x08", text("a/#")), text("t"), text("x"))
    assert refused(data).reason == BAD_TOPIC


@BOTH
@pytest.mark.parametrize("bad", [b"\x00", b"\xff", b"\xed\xa0\x80", b"a\x00"])
def test_client_id_or_user_name_that_is_not_utf_8_is_malformed(version: int, bad: bytes) -> None:
    """[MQTT-3.1.3-4], [MQTT-3.1.3-11]"""
    assert refused(connect(version, 2, text(bad))).reason == MALFORMED
    assert refused(connect(version, 0x82, text("c"), text(bad))).reason == MALFORMED


def test_protocol_name_that_is_not_utf_8_is_malformed() -> None:
    assert refused(connect(5, 2, text("c"), name=b"MQ\x00T")).reason == MALFORMED
    assert refused(connect(5, 2, text("c"), name=b"\xff")).reason == MALFORMED


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (block(b"\x21", u16(0)), PROTOCOL_ERROR),
        (block(b"\x27", u32(0)), PROTOCOL_ERROR),
        (block(b"\x11", u32(1), b"\x11", u32(1)), PROTOCOL_ERROR),
        (block(b"\x16", text("data")), PROTOCOL_ERROR),
        (block(b"\x01\x01"), MALFORMED),
        (block(b"\x18", u32(1)), MALFORMED),  # the will delay belongs to the will
        (block(b"\x00"), MALFORMED),
        (b"\x05\x11\x00\x00", MALFORMED),
        (b"\x80\x00", MALFORMED),
        (b"\xff\xff\xff\x7f", MALFORMED),
    ],
)
def test_invalid_properties_of_a_connect_are_refused(bad: bytes, reason: int) -> None:
    assert refused(connect(5, 2, text("c"), properties=bad)).reason == reason


def test_invalid_properties_of_a_will_are_refused() -> None:
    for bad, reason in {
        block(b"\x18", u32(1), b"\x18", u32(1)): PROTOCOL_ERROR,
        block(b"\x01\x02"): PROTOCOL_ERROR,
        block(b"\x23", u16(1)): MALFORMED,  # an alias belongs to a PUBLISH
        block(b"\x0b\x01"): MALFORMED,
        block(b"\x11", u32(1)): MALFORMED,
        b"\x30\x18\x00": MALFORMED,
    }.items():
        assert refused(connect(5, 6, text("c"), bad, text("t"), text("x"))).reason == reason


@BOTH
def test_truncated_connect_is_malformed(version: int) -> None:
    whole = connect(
        version,
        0xC6,
        text("c"),
        props(version, user("a", "b")),
        text("t"),
        text("x"),
        text("u"),
        text("p"),
    )
    body = whole[2:]
    assert isinstance(decoded(whole), Connect)
    for size in range(len(body)):
        assert refused(packet(0x10, body[:size])).reason == MALFORMED


# --- CONNACK


@BOTH
def test_connack_has_session_present_and_reason(version: int) -> None:
    found = decoded(packet(0x20, b"\x01\x00", props(version)), version)
    assert isinstance(found, Connack)
    assert (found.session_present, found.reason) == (True, 0)
    found = decoded(packet(0x20, b"\x00\x05", props(version, b"\x13", u16(7))), version)
    assert isinstance(found, Connack)
    assert (found.session_present, found.reason) == (False, 5)
    if version == 5:
        assert found.properties is not None
        assert found.properties.server_keep_alive == 7


@BOTH
def test_connack_with_reserved_flags_or_wrong_length_is_malformed(version: int) -> None:
    """[MQTT-3.2.2-1]"""
    for flags in (0x02, 0x03, 0x80, 0xFF):
        assert (
            refused(packet(0x20, bytes([flags]), b"\x00", props(version)), version).reason
            == MALFORMED
        )
    assert refused(packet(0x20), version).reason == MALFORMED
    assert refused(packet(0x20, b"\x00"), version).reason == MALFORMED
    assert refused(packet(0x20, b"\x00\x00", props(version), b"\x00"), version).reason == MALFORMED


# --- PUBLISH


@BOTH
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("dup", [False, True])
def test_publish_with_every_allowed_flag(version: int, qos: int, retain: bool, dup: bool) -> None:
    head = 0x30 | dup << 3 | qos << 1 | retain
    identifier = u16(0xABCD) if qos else b""
    data = packet(head, text("a/ü"), identifier, props(version), b"pay\x00load")
    if dup and not qos:
        assert refused(data, version).reason == MALFORMED  # [MQTT-3.3.1-2]
        return
    found = decoded(data, version)
    assert isinstance(found, Publish)
    assert (found.topic, found.payload) == ("a/ü".encode(), b"pay\x00load")
    assert (found.qos, found.retain, found.dup) == (qos, retain, dup)
    assert found.packet_id == (0xABCD if qos else 0)
    assert (
        found.raw_properties,
        found.expiry_seconds,
        found.topic_alias,
        found.subscription_ids,
    ) == (
        b"",
        -1,
        0,
        None,
    )


@BOTH
def test_publish_of_qos_3_is_malformed(version: int) -> None:
    """[MQTT-3.3.1-4]"""
    for flags in (0x6, 0x7, 0xE, 0xF):
        data = packet(0x30 | flags, text("a"), u16(1), props(version))
        assert refused(data, version).reason == MALFORMED


@BOTH
@pytest.mark.parametrize("qos", [1, 2])
def test_publish_with_packet_id_0_is_malformed(version: int, qos: int) -> None:
    """[MQTT-2.2.1-3]"""
    assert (
        refused(packet(0x30 | qos << 1, text("a"), u16(0), props(version)), version).reason
        == MALFORMED
    )


@BOTH
def test_empty_payload_is_valid(version: int) -> None:
    found = decoded(packet(0x31, text("a"), props(version)), version)
    assert isinstance(found, Publish)
    assert found.payload == b""


@BOTH
@pytest.mark.parametrize("topic", ["+", "#", "a/+/b", "a/#", "ü/#"])
def test_publish_to_a_wildcard_is_an_invalid_topic(version: int, topic: str) -> None:
    """[MQTT-3.3.2-2]"""
    assert refused(packet(0x30, text(topic), props(version)), version).reason == BAD_TOPIC


@BOTH
@pytest.mark.parametrize(
    "topic", [b"\x00", b"a\x00b", b"\xff", b"\xed\xbf\xbf", b"\xc0\x80", "ü\x00".encode()]
)
def test_publish_to_a_topic_that_is_not_utf_8_is_malformed(version: int, topic: bytes) -> None:
    """[MQTT-3.3.2-1]"""
    assert refused(packet(0x30, text(topic), props(version)), version).reason == MALFORMED


def test_publish_without_a_topic_is_refused_in_3_1_1() -> None:
    """3.1.1 [MQTT-4.7.3-1]"""
    assert refused(packet(0x30, text(""), b"x"), 4).reason == BAD_TOPIC


def test_publish_with_neither_topic_nor_alias_is_a_protocol_error() -> None:
    """Section 3.3.2.1: it is a protocol error if topic name and topic alias are both missing."""
    assert refused(packet(0x30, text(""), NONE)).reason == PROTOCOL_ERROR
    assert refused(packet(0x30, text(""), block(user("a", "b")), b"x")).reason == PROTOCOL_ERROR


def test_alias_may_come_with_or_without_a_topic() -> None:
    for topic in ("", "a/b"):
        found = decoded(packet(0x30, text(topic), block(b"\x23", u16(0xFFFF)), b"x"))
        assert isinstance(found, Publish)
        assert (found.topic, found.topic_alias, found.raw_properties) == (
            topic.encode(),
            0xFFFF,
            b"",
        )


def test_alias_0_is_an_invalid_alias() -> None:
    """[MQTT-3.3.2-8]"""
    assert refused(packet(0x30, text("a"), block(b"\x23", u16(0)))).reason == 0x94
    assert refused(packet(0x30, text(""), block(b"\x23", u16(0)))).reason == 0x94


def test_connection_properties_are_removed_and_the_rest_is_unaltered_and_in_order() -> None:
    """[MQTT-3.3.2-17], [MQTT-3.3.2-18]: forwarded properties are forwarded unchanged."""
    forwarded = [
        user("z", "1"),
        b"\x09" + text(b"\x00\xff"),
        b"\x03" + text("text/plain"),
        user("a", "2"),
        b"\x01\x01",
        b"\x08" + text("re/ply"),
    ]
    hop = [
        b"\x0b" + varint(1),
        b"\x02" + u32(77),
        b"\x0b" + varint(268_435_455),
        b"\x23" + u16(5),
        b"\x0b\x01",
    ]
    mixed = [piece for pair in zip(forwarded, [*hop, b""]) for piece in pair]
    for order in (forwarded + hop, hop + forwarded, mixed, mixed[::-1]):
        found = decoded(packet(0x32, text("a"), u16(1), block(*order), b"payload"))
        assert isinstance(found, Publish)
        assert found.raw_properties == b"".join(piece for piece in order if piece in forwarded)
        assert (found.expiry_seconds, found.topic_alias, found.payload) == (77, 5, b"payload")
        assert found.subscription_ids is not None
        assert sorted(found.subscription_ids) == [1, 1, 268_435_455]
        properties = found.decode_properties()
        assert properties.message_expiry == 77
        assert properties.topic_alias == 5
        assert properties.response_topic == "re/ply"
        assert properties.correlation_data == b"\x00\xff"
        assert len(properties.subscription_ids) == 3


def test_message_expiry_of_0_differs_from_none() -> None:
    found = decoded(packet(0x30, text("a"), block(b"\x02", u32(0))))
    assert isinstance(found, Publish)
    assert found.expiry_seconds == 0
    found = decoded(packet(0x30, text("a"), block(b"\x02", u32(0xFFFF_FFFF))))
    assert isinstance(found, Publish)
    assert found.expiry_seconds == 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"\x01\x02", PROTOCOL_ERROR),
        (b"\x0b\x00", PROTOCOL_ERROR),
        (b"\x01\x00\x01\x00", PROTOCOL_ERROR),
        (b"\x02" + u32(1) + b"\x02" + u32(1), PROTOCOL_ERROR),
        (b"\x03" + text("") + b"\x03" + text(""), PROTOCOL_ERROR),
        (b"\x08" + text("r") + b"\x08" + text("r"), PROTOCOL_ERROR),
        (b"\x09" + text("") + b"\x09" + text(""), PROTOCOL_ERROR),
        (b"\x23" + u16(1) + b"\x23" + u16(1), PROTOCOL_ERROR),
        (b"\x08" + text("a/+"), BAD_TOPIC),  # [MQTT-3.3.2-14]
        (b"\x08" + text("ü/#"), BAD_TOPIC),
        (b"\x08" + text(b"\xff"), MALFORMED),  # [MQTT-3.3.2-13]
        (b"\x03" + text(b"\x00"), MALFORMED),
        (b"\x03" + text(b"\xed\xa0\x80"), MALFORMED),
        (user(b"\xff", ""), MALFORMED),
        (user("", b"\x00"), MALFORMED),
        (b"\x0b\x80\x00", MALFORMED),
        (b"\x0b\x80\x80\x80\x80", MALFORMED),
        (b"\x81\x00\x00", MALFORMED),
    ],
)
def test_invalid_properties_of_a_publish_are_refused(bad: bytes, reason: int) -> None:
    assert refused(packet(0x30, text("a"), block(bad), b"payload")).reason == reason
    assert refused(packet(0x30, text("a"), block(user("k", "v"), bad), b"payload")).reason == reason


def test_property_of_another_packet_makes_a_publish_malformed() -> None:
    allowed = {0x01, 0x02, 0x03, 0x08, 0x09, 0x0B, 0x23, 0x26}
    for identifier in set(range(256)) - allowed:
        data = packet(0x30, text("a"), block(bytes([identifier]), b"\x00\x01\x00\x01"), b"x")
        assert refused(data).reason == MALFORMED


def test_property_of_a_publish_may_not_extend_into_the_payload() -> None:
    for whole in (
        b"\x01\x01",
        b"\x02" + u32(1),
        b"\x03" + text("abc"),
        b"\x08" + text("abc"),
        b"\x09" + text("abc"),
        b"\x0b\x80\x01",
        b"\x23" + u16(1),
        user("ab", "cd"),
    ):
        for size in range(1, len(whole)):
            data = packet(0x30, text("a"), varint(size), whole, b"and more")
            assert refused(data).reason == MALFORMED


@pytest.mark.parametrize(
    "length", [b"\x01", b"\x05", b"\xff\x7f", b"\xff\xff\xff\x7f", b"\x80\x00", b"\x80", b""]
)
def test_wrong_property_length_makes_a_publish_malformed(length: bytes) -> None:
    assert refused(packet(0x30, text("a"), length)).reason == MALFORMED


@BOTH
@pytest.mark.parametrize("body", ["", "00", "0001", "000261", "ffff61", "000161", "00016100"])
def test_publish_with_truncated_topic_or_packet_id_is_malformed(version: int, body: str) -> None:
    assert refused(packet(0x32, bytes.fromhex(body)), version).reason == MALFORMED


@BOTH
@pytest.mark.parametrize("place", range(5))
def test_topic_that_differs_from_the_last_one_in_one_byte_is_decoded(
    version: int, place: int
) -> None:
    last = b"a/b/c"
    topic = bytearray(last)
    topic[place] = ord("x")
    body = text(bytes(topic)) + props(version) + b"payload"
    assert decode_publish(body, 0, 0, len(body), version, last).topic == bytes(topic)
    same = text(last) + props(version) + b"payload"
    assert decode_publish(same, 0, 0, len(same), version, last).topic is last


# --- PUBACK, PUBREC, PUBREL, PUBCOMP

ACK_HEADS = pytest.mark.parametrize("head", [0x40, 0x50, 0x62, 0x70])


@BOTH
@ACK_HEADS
def test_acknowledgement_of_two_bytes_is_a_success(version: int, head: int) -> None:
    """Section 3.4.2.1: reason and properties can be left out."""
    found = decoded(packet(head, u16(0xFFFF)), version)
    assert isinstance(found, Ack)
    assert (found.kind, found.packet_id, found.reason, found.properties) == (
        head >> 4,
        0xFFFF,
        0,
        None,
    )


@ACK_HEADS
def test_acknowledgement_with_a_reason_and_with_properties(head: int) -> None:
    found = decoded(packet(head, u16(1), b"\x92"))
    assert isinstance(found, Ack)
    assert (found.packet_id, found.reason, found.properties) == (1, 0x92, None)
    found = decoded(packet(head, u16(1), b"\x92", block(b"\x1f", text("why"), user("a", "b"))))
    assert isinstance(found, Ack)
    assert found.properties is not None
    assert found.properties.to_dict() == {"reason_string": "why", "user": [("a", "b")]}
    found = decoded(packet(head, u16(1), b"\x00\x00"))
    assert isinstance(found, Ack)
    assert field_values(found.properties) == {}


@BOTH
@ACK_HEADS
def test_acknowledgement_of_packet_id_0_is_malformed(version: int, head: int) -> None:
    assert refused(packet(head, u16(0)), version).reason == MALFORMED


@BOTH
@ACK_HEADS
def test_acknowledgement_that_is_too_short_or_too_long_is_malformed(
    version: int, head: int
) -> None:
    for body in (
        b"",
        b"\x00",
        b"\x01",
        u16(1) + b"\x00\x00\x00",
        u16(1) + b"\x00\x01",
        u16(1) + b"\x00\x80\x00",
    ):
        assert refused(packet(head, body), version).reason == MALFORMED


@ACK_HEADS
def test_3_1_1_acknowledgement_has_no_reason(head: int) -> None:
    assert refused(packet(head, u16(1), b"\x00"), 4).reason == MALFORMED


@ACK_HEADS
def test_invalid_properties_of_an_acknowledgement_are_refused(head: int) -> None:
    twice = block(b"\x1f", text("a"), b"\x1f", text("b"))
    assert refused(packet(head, u16(1), b"\x80", twice)).reason == PROTOCOL_ERROR
    assert refused(packet(head, u16(1), b"\x80", block(b"\x1c", text("x")))).reason == MALFORMED


# --- SUBSCRIBE and UNSUBSCRIBE


@BOTH
def test_subscribe_with_several_filters_preserves_their_order(version: int) -> None:
    data = packet(
        0x82,
        u16(10),
        props(version, b"\x0b", varint(200), user("a", "b")),
        text("a/+"),
        b"\x00",
        text("#"),
        b"\x01",
        text("$share/g/ü"),
        b"\x02",
    )
    found = decoded(data, version)
    assert isinstance(found, Subscribe)
    assert found.packet_id == 10
    assert [(r.topic_filter, r.qos) for r in found.requests] == [
        (b"a/+", 0),
        (b"#", 1),
        ("$share/g/ü".encode(), 2),
    ]
    if version == 5:
        assert field_values(found.properties) == {"subscription_ids": [200], "user": [("a", "b")]}


def test_subscription_options_are_accepted_or_refused_by_their_bits() -> None:
    """Section 3.8.3.1, [MQTT-3.8.3-5]"""
    for options in range(256):
        data = packet(0x82, u16(1), NONE, text("a"), bytes([options]))
        if options & 0xC0 or options & 3 == 3:
            assert refused(data).reason == MALFORMED
        elif options & 0x30 == 0x30:
            assert refused(data).reason == PROTOCOL_ERROR
        else:
            found = decoded(data)
            assert isinstance(found, Subscribe)
            assert field_values(found.requests[0]) == {
                "packet": "SubscriptionRequest",
                "topic_filter": b"a",
                "qos": options & 3,
                "no_local": bool(options & 4),
                "retain_as_published": bool(options & 8),
                "retain_handling": options >> 4,
            }


def test_3_1_1_subscription_has_only_a_qos() -> None:
    """3.1.1 [MQTT-3-8.3-4]"""
    for options in range(256):
        data = packet(0x82, u16(1), text("a"), bytes([options]))
        if options > 2:
            assert refused(data, 4).reason == MALFORMED
        else:
            found = decoded(data, 4)
            assert isinstance(found, Subscribe)
            assert found.requests[0].qos == options


@BOTH
@pytest.mark.parametrize("head", [0x82, 0xA2])
def test_request_without_a_filter_is_a_protocol_error(version: int, head: int) -> None:
    """[MQTT-3.8.3-2], [MQTT-3.10.3-2]"""
    assert refused(packet(head, u16(1), props(version)), version).reason == PROTOCOL_ERROR


@BOTH
@pytest.mark.parametrize("head", [0x82, 0xA2])
def test_request_with_packet_id_0_is_malformed(version: int, head: int) -> None:
    """[MQTT-2.2.1-3]"""
    options = b"\x00" if head == 0x82 else b""
    data = packet(head, u16(0), props(version), text("a"), options)
    assert refused(data, version).reason == MALFORMED


@BOTH
@pytest.mark.parametrize("head", [0x82, 0xA2])
@pytest.mark.parametrize("bad", [b"\x00", b"\xff", b"a/\xed\xa0\x80"])
def test_filter_that_is_not_utf_8_is_malformed(version: int, head: int, bad: bytes) -> None:
    """[MQTT-3.8.3-1], [MQTT-3.10.3-1]"""
    options = b"\x00" if head == 0x82 else b""
    data = packet(head, u16(1), props(version), text(bad), options)
    assert refused(data, version).reason == MALFORMED


@BOTH
@pytest.mark.parametrize("topic_filter", ["a/#/b", "a+", "$share", "$share/g/a+"])
def test_misplaced_wildcard_is_not_refused_by_the_decoder(version: int, topic_filter: str) -> None:
    """SUBACK has reason 0x8F for it: the other filters of the packet still take effect."""
    found = decoded(packet(0x82, u16(1), props(version), text(topic_filter), b"\x00"), version)
    assert isinstance(found, Subscribe)
    assert found.requests[0].topic_filter == topic_filter.encode()


@BOTH
@pytest.mark.parametrize(
    "topic_filter", ["", "$share/", "$share/g", "$share/g/", "$share//a", "$share/g+/a", "$share/#"]
)
@pytest.mark.parametrize("head", [0x82, 0xA2])
def test_incomplete_filter_is_a_protocol_error(version: int, head: int, topic_filter: str) -> None:
    """[MQTT-4.7.3-1], [MQTT-4.8.2-1], [MQTT-4.8.2-2]"""
    options = b"\x00" if head == 0x82 else b""
    data = packet(head, u16(1), props(version), text("ok"), options, text(topic_filter), options)
    assert refused(data, version).reason == PROTOCOL_ERROR


@BOTH
def test_truncated_subscribe_or_unsubscribe_is_refused(version: int) -> None:
    body = u16(1) + props(version, user("a", "b")) + text("a/b")
    before = len(body) - len(text("a/b"))  # cut exactly there, it is an empty request
    for head, whole in ((0x82, body + b"\x00"), (0xA2, body)):
        decoded(packet(head, whole), version)
        for size in range(len(whole)):
            expected = PROTOCOL_ERROR if size == before else MALFORMED
            assert refused(packet(head, whole[:size]), version).reason == expected


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (block(b"\x0b\x00"), PROTOCOL_ERROR),
        (block(b"\x0b\x01\x0b\x02"), PROTOCOL_ERROR),  # section 3.8.2.1.2
        (block(b"\x1f", text("x")), MALFORMED),
        (b"\x7f", MALFORMED),
    ],
)
def test_invalid_properties_of_a_subscribe_are_refused(bad: bytes, reason: int) -> None:
    assert refused(packet(0x82, u16(1), bad, text("a"), b"\x00")).reason == reason


def test_subscription_id_is_not_allowed_in_an_unsubscribe() -> None:
    assert refused(packet(0xA2, u16(1), block(b"\x0b\x01"), text("a"))).reason == MALFORMED


@BOTH
def test_unsubscribe_preserves_the_order_of_its_filters(version: int) -> None:
    found = decoded(
        packet(0xA2, u16(9), props(version, user("a", "b")), text("b"), text("a/#"), text("b")),
        version,
    )
    assert isinstance(found, Unsubscribe)
    assert (found.packet_id, found.filters) == (9, [b"b", b"a/#", b"b"])


# --- SUBACK and UNSUBACK


@BOTH
def test_suback_has_one_reason_per_filter(version: int) -> None:
    found = decoded(
        packet(0x90, u16(7), props(version, b"\x1f", text("why")), b"\x00\x01\x02\x80"), version
    )
    assert isinstance(found, Suback)
    assert (found.packet_id, found.reasons) == (7, [0, 1, 2, 0x80])
    assert field_values(found.properties) == ({"reason_string": "why"} if version == 5 else None)


def test_unsuback_has_reasons_in_5_0_and_none_in_3_1_1() -> None:
    found = decoded(packet(0xB0, u16(7), NONE, b"\x00\x11"))
    assert isinstance(found, Unsuback)
    assert (found.packet_id, found.reasons) == (7, [0, 0x11])
    found = decoded(packet(0xB0, u16(7)), 4)
    assert isinstance(found, Unsuback)
    assert found.reasons == []
    assert refused(packet(0xB0, u16(7), b"\x00"), 4).reason == MALFORMED


@BOTH
@pytest.mark.parametrize("head", [0x90, 0xB0])
def test_suback_with_packet_id_0_or_truncated_is_malformed(version: int, head: int) -> None:
    reasons = b"\x00" if version == 5 or head == 0x90 else b""
    assert refused(packet(head, u16(0), props(version), reasons), version).reason == MALFORMED
    assert refused(packet(head), version).reason == MALFORMED
    assert refused(packet(head, b"\x01"), version).reason == MALFORMED
    if version == 5:
        assert refused(packet(head, u16(1))).reason == MALFORMED
        assert refused(packet(head, u16(1), b"\x01")).reason == MALFORMED


# --- PINGREQ, PINGRESP, DISCONNECT, AUTH


@BOTH
def test_ping_has_no_body(version: int) -> None:
    assert isinstance(decoded(packet(0xC0), version), Pingreq)
    assert isinstance(decoded(packet(0xD0), version), Pingresp)
    assert refused(packet(0xC0, b"\x00"), version).reason == MALFORMED
    assert refused(packet(0xD0, b"\x00"), version).reason == MALFORMED


@BOTH
def test_empty_disconnect_is_a_normal_one(version: int) -> None:
    found = decoded(packet(0xE0), version)
    assert isinstance(found, Disconnect)
    assert (found.reason, found.properties) == (0, None)


def test_disconnect_with_a_reason_and_with_properties() -> None:
    """Section 3.14.2.2.1: below two bytes there are no properties."""
    found = decoded(packet(0xE0, b"\x04"))
    assert isinstance(found, Disconnect)
    assert (found.reason, found.properties) == (4, None)
    found = decoded(
        packet(0xE0, b"\x8d", block(b"\x11", u32(5), b"\x1c", text("other"), user("a", "b")))
    )
    assert isinstance(found, Disconnect)
    assert found.reason == 0x8D
    assert field_values(found.properties) == {
        "session_expiry": 5,
        "server_reference": "other",
        "user": [("a", "b")],
    }


def test_disconnect_with_a_wrong_length_or_trailing_bytes_is_malformed() -> None:
    for body in (
        b"\x00\x01",
        b"\x00\x00\x00",
        b"\x00\x80",
        b"\x00\x05\x11\x00\x00\x00",
        b"\x00\x80\x00",
    ):
        assert refused(packet(0xE0, body)).reason == MALFORMED
    assert refused(packet(0xE0, b"\x00"), 4).reason == MALFORMED


def test_auth_is_decoded_in_5_0_and_does_not_exist_in_3_1_1() -> None:
    found = decoded(packet(0xF0))
    assert isinstance(found, Auth)
    assert found.reason == 0
    found = decoded(packet(0xF0, b"\x18", block(b"\x15", text("SCRAM"), b"\x16", text(b"\x00"))))
    assert isinstance(found, Auth)
    assert found.reason == 0x18
    assert field_values(found.properties) == {"auth_method": "SCRAM", "auth_data": b"\x00"}
    assert refused(packet(0xF0), 4).reason == PROTOCOL_ERROR
    assert refused(packet(0xF0, b"\x00\x00\x00")).reason == MALFORMED
    assert refused(packet(0xF0, b"\x18", block(b"\x16", text("x")))).reason == PROTOCOL_ERROR


# --- size


def test_alternating_forwarded_and_removed_properties_cost_no_more_than_sorted_ones() -> None:
    """Concatenating each forwarded property took 2.5 seconds for these 1.4 MB, compiled too."""
    count = 160_000
    stored, hop = user("a", "b"), b"\x0b\x05"
    seconds = []
    for raw in (stored * count + hop * count, (stored + hop) * count):
        data = packet(0x30, text("t"), block(raw))
        before = process_time()
        found = decoded(data)
        seconds.append(process_time() - before)
        assert isinstance(found, Publish)
        assert found.raw_properties == stored * count
        assert found.subscription_ids == [5] * count
    assert seconds[1] < 6 * seconds[0] + 0.25


def test_many_user_properties_take_linear_time() -> None:
    count = 100_000
    data = packet(0x30, text("t"), block(user("ä", "b") * count))
    before = process_time()
    found = decoded(data)
    assert isinstance(found, Publish)
    assert len(found.decode_properties().user) == count
    assert process_time() - before < 5
