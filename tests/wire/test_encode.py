"""Encoding, compared with bytes written by hand; a packet that MQTT cannot express is refused."""

from __future__ import annotations

import pytest
from librt.strings import BytesWriter

from sluice.wire.encode import (
    encode,
    encode_hop_properties,
    measure_publish,
    write_packet,
    write_publish,
)
from sluice.wire.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
    Unsubscribe,
    build_publish,
)
from sluice.wire.properties import Properties
from sluice.wire.reasons import REASON_NAMES, get_reason_name, map_connack_311
from tests.wire.raw_packets import block, connect, packet, text, u16, u32, user, varint

BOTH = pytest.mark.parametrize("version", [4, 5])


def make_properties(**values: object) -> Properties:
    properties = Properties()
    for name, value in values.items():
        setattr(properties, name, value)
    return properties


def props(version: int, *properties: bytes) -> bytes:
    return block(*properties) if version == 5 else b""


@BOTH
def test_small_connect(version: int) -> None:
    assert encode(Connect("c", version, True, 60), version) == connect(version, 2, text("c"))


@BOTH
def test_connect_with_all_fields(version: int) -> None:
    request = Connect("ü", version, False, 0)
    request.properties = make_properties(session_expiry=9, user=[("a", "b")])
    request.will = build_publish(
        b"t", b"\x00x", 2, True, make_properties(content_type="ct", message_expiry=5)
    )
    request.will_delay = 3
    request.username = "ann"
    request.password = b"\xff"
    assert encode(request, version) == connect(
        version,
        0xF4,
        text("ü"),
        props(version, b"\x02", u32(5), b"\x03", text("ct"), b"\x18", u32(3)),
        text("t"),
        text(b"\x00x"),
        text("ann"),
        text(b"\xff"),
        keep_alive=0,
        properties=block(b"\x11", u32(9), user("a", "b")),
    )


@BOTH
def test_connack(version: int) -> None:
    assert encode(Connack(True, 0), version) == packet(0x20, b"\x01\x00", props(version))
    answer = Connack(False, 0, make_properties(receive_maximum=7))
    assert encode(answer, version) == packet(0x20, b"\x00\x00", props(version, b"\x21", u16(7)))


def test_refusal_uses_3_1_1_return_codes() -> None:
    """3.1.1 section 3.2.2.3 has five return codes; no 5.0 error becomes an acceptance."""
    assert encode(Connack(False, 0x87), 5) == packet(0x20, b"\x00\x87", block())
    assert encode(Connack(False, 0x87), 4) == packet(0x20, b"\x00\x05")
    assert [map_connack_311(reason) for reason in (0, 0x84, 0x85, 0x88, 0x86, 0x87)] == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    for reason in REASON_NAMES:
        assert (map_connack_311(reason) == 0) == (reason == 0)
        assert map_connack_311(reason) <= 5


def test_every_reason_has_a_name_and_an_unknown_one_its_number() -> None:
    assert get_reason_name(0x97) == "quota exceeded"
    assert get_reason_name(0x7F) == "reason 0x7f"


@BOTH
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_publish_of_every_qos(version: int, qos: int) -> None:
    message = Publish(
        "ü".encode(), b"pay", qos, True, qos > 0, 0x8001 if qos else 0, user("a", "b")
    )
    message.expiry_seconds = 0xFFFF_FFFF
    message.topic_alias = 0xFFFF
    message.subscription_ids = [1, 300]
    assert encode(message, version) == packet(
        0x31 | qos << 1 | (8 if qos else 0),
        text("ü"),
        u16(0x8001) if qos else b"",
        props(
            version,
            b"\x02",
            u32(0xFFFF_FFFF),
            b"\x23",
            u16(0xFFFF),
            b"\x0b\x01\x0b\xac\x02",
            user("a", "b"),
        ),
        b"pay",
    )


@BOTH
@pytest.mark.parametrize(
    "size", [0, 1, 100, 120, 121, 122, 123, 124, 125, 126, 127, 128, 16_300, 16_380, 2_097_150]
)
@pytest.mark.parametrize("extra", [b"", b"\x0b\x01", user("k", "v" * 120)])
def test_size_of_a_publish_is_known_before_encoding(version: int, size: int, extra: bytes) -> None:
    for qos, raw in ((0, b""), (1, user("a", "x" * 130))):
        message = Publish(b"a/b", bytes(size), 0, raw_properties=raw)
        out = BytesWriter()
        write_publish(out, message, b"a", qos, False, False, 5, extra, version)
        assert len(out.getvalue()) == measure_publish(message, b"a", qos, extra, version)


def test_topic_qos_and_flags_are_those_of_the_outgoing_packet() -> None:
    message = Publish(b"long/name", b"x", 2, True, True, 9, user("a", "b"))
    out = BytesWriter()
    write_publish(out, message, b"", 1, False, False, 77, b"\x23\x00\x05", 5)
    assert out.getvalue() == packet(
        0x32, text(""), u16(77), block(b"\x23\x00\x05", user("a", "b")), b"x"
    )


def test_expiry_of_0_is_encoded_and_no_expiry_is_not() -> None:
    message = Publish(b"a", b"", 0)
    assert encode_hop_properties(message) == b""
    message.expiry_seconds = 0
    assert encode_hop_properties(message) == b"\x02\x00\x00\x00\x00"


@BOTH
def test_topic_of_65535_bytes_is_encoded_and_a_longer_one_refused(version: int) -> None:
    """With a truncated length, the rest of the topic would be read as the next packet."""
    longest = b"x" * 65_535
    assert encode(Publish(longest, b"p", 0), version) == packet(
        0x30, text(longest), props(version), b"p"
    )
    with pytest.raises(ValueError, match="too long"):
        encode(Publish(longest + b"x", b"p", 0), version)


@pytest.mark.parametrize(
    "invalid",
    [
        Publish(b"x" * 65_536, b"", 0),
        Ack(4, 1, 0x80, make_properties(reason_string="x" * 65_536)),
        Ack(6, 1, 0x92, make_properties(reason_string="\ud800")),
        Connect("x" * 65_536, 5, True, 0),
        Connect("c", 5, True, 65_536),
        Connack(False, 0, make_properties(receive_maximum=65_536)),
        Subscribe(1, [SubscriptionRequest(b"x" * 65_536, 0)]),
        Subscribe(65_536, [SubscriptionRequest(b"x", 0)]),
        Unsubscribe(1, [b"x" * 65_536]),
        Suback(-1, [0]),
        Disconnect(0x80, make_properties(reason_string="x" * 65_536)),
    ],
    ids=lambda packet: type(packet).__name__,
)
def test_packet_that_cannot_be_encoded_leaves_nothing_in_the_buffer(invalid: Packet) -> None:
    """The buffer holds other packets: half a packet after them would break the whole stream."""
    out = BytesWriter()
    write_packet(out, Pingresp(), 5)
    # The message differs between versions of the library.
    with pytest.raises(ValueError):  # noqa: PT011
        write_packet(out, invalid, 5)
    assert out.getvalue() == b"\xd0\x00"


@BOTH
@pytest.mark.parametrize(("kind", "head"), [(4, 0x40), (5, 0x50), (6, 0x62), (7, 0x70)])
def test_acknowledgement_is_as_short_as_possible(version: int, kind: int, head: int) -> None:
    assert encode(Ack(kind, 0xFFFE), version) == packet(head, u16(0xFFFE))
    reasoned = packet(head, u16(1), b"\x92") if version == 5 else packet(head, u16(1))
    assert encode(Ack(kind, 1, 0x92), version) == reasoned
    whole = packet(head, u16(1), b"\x92", block(b"\x1f", text("x" * 200)))
    reported = Ack(kind, 1, 0x92, make_properties(reason_string="x" * 200))
    assert encode(reported, version) == (whole if version == 5 else packet(head, u16(1)))


@BOTH
def test_subscribe_encodes_its_options_where_the_version_has_them(version: int) -> None:
    request = Subscribe(
        3,
        [SubscriptionRequest(b"a/+", 1, True, True, 2), SubscriptionRequest(b"#", 2)],
        make_properties(subscription_ids=[128]),
    )
    options = b"\x2d" if version == 5 else b"\x01"
    assert encode(request, version) == packet(
        0x82, u16(3), props(version, b"\x0b", varint(128)), text("a/+"), options, text("#"), b"\x02"
    )


@BOTH
def test_unsubscribe(version: int) -> None:
    request = Unsubscribe(3, [b"a", b"b/#"], make_properties(user=[("k", "v")]))
    expected = packet(0xA2, u16(3), props(version, user("k", "v")), text("a"), text("b/#"))
    assert encode(request, version) == expected


def test_suback_has_each_reason_in_5_0_and_only_success_or_failure_in_3_1_1() -> None:
    """3.1.1 [MQTT-3.9.3-2]: return codes other than 0, 1, 2 and 0x80 must not be used."""
    answer = Suback(5, [0, 1, 2, 0x80, 0x87, 0x8F, 0x97, 0xA2])
    assert encode(answer, 5) == packet(0x90, u16(5), block(), b"\x00\x01\x02\x80\x87\x8f\x97\xa2")
    assert encode(answer, 4) == packet(0x90, u16(5), b"\x00\x01\x02\x80\x80\x80\x80\x80")


def test_unsuback_in_3_1_1_has_no_reasons() -> None:
    assert encode(Unsuback(5, [0, 0x11]), 5) == packet(0xB0, u16(5), block(), b"\x00\x11")
    assert encode(Unsuback(5, [0, 0x11]), 4) == packet(0xB0, u16(5))


@BOTH
def test_pings_are_two_bytes(version: int) -> None:
    assert encode(Pingreq(), version) == b"\xc0\x00"
    assert encode(Pingresp(), version) == b"\xd0\x00"


def test_disconnect_is_as_short_as_possible() -> None:
    assert encode(Disconnect(), 5) == b"\xe0\x00"
    assert encode(Disconnect(), 4) == b"\xe0\x00"
    assert encode(Disconnect(0x8E), 5) == packet(0xE0, b"\x8e")
    assert encode(Disconnect(0x8E), 4) == b"\xe0\x00"
    whole = packet(0xE0, b"\x00", block(b"\x1f", text("bye")))
    assert encode(Disconnect(0, make_properties(reason_string="bye")), 5) == whole


def test_auth_is_empty_or_complete() -> None:
    """Section 3.15.2: the reason can be omitted only together with the properties."""
    assert encode(Auth(), 5) == b"\xf0\x00"
    assert encode(Auth(0x19), 5) == packet(0xF0, b"\x19\x00")
    whole = packet(0xF0, b"\x18", block(b"\x15", text("m"), b"\x16", text("d")))
    assert encode(Auth(0x18, make_properties(auth_method="m", auth_data=b"d")), 5) == whole


@BOTH
@pytest.mark.parametrize("size", [0, 120, 127, 128, 16_383, 16_384, 70_000])
def test_payload_of_any_size_has_its_length_in_the_header(version: int, size: int) -> None:
    message = Publish(b"t", bytes(size), 0)
    assert encode(message, version) == packet(0x30, text("t"), props(version), bytes(size))


def test_packets_are_appended_to_the_buffer() -> None:
    out = BytesWriter()
    for each in (Pingreq(), Ack(4, 1), Publish(b"a", b"b", 0), Disconnect()):
        write_packet(out, each, 4)
    assert out.getvalue() == b"\xc0\x00" + b"\x40\x02\x00\x01" + b"\x30\x04\x00\x01ab" + b"\xe0\x00"
