"""CONNECT and CONNACK: who comes in, on which terms, and how the others are told no."""

from __future__ import annotations

import pytest

from sluice.broker.acl.access import Caller, Reply, Verdict
from sluice.broker.acl.grants import Grant
from sluice.broker.acl.acl import PUBLISH, SUBSCRIBE, Book, Rule
from sluice.wire.encode import encode
from sluice.wire.packets import (
    V5,
    V311,
    Connack,
    Connect,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
)
from tests.broker.kit import House, Peer, props, will


def answer(peer: Peer) -> Connack:
    """The refusal that closed this connection."""
    packet = peer.only(Connack)
    assert peer.closed
    return packet


def test_a_client_is_let_in_and_told_what_the_server_allows(house: House) -> None:
    client = house.connect("a")
    assert (client.connack.reason, client.connack.session_present) == (0, False)
    assert client.connack.properties == props(
        receive_maximum=1024, maximum_packet_size=2_097_152, topic_alias_maximum=64
    )
    assert not client.closed


def test_a_3_1_1_client_gets_a_four_byte_connack(house: House) -> None:
    peer = house.open()
    peer.feed(b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01a")
    assert bytes(peer.transport.sent) == b"\x20\x02\x00\x00"


def test_a_client_without_a_name_is_given_one_and_told_it(house: House) -> None:
    first, second = house.connect(""), house.connect("")
    names = {client.connack.properties.assigned_client_id for client in (first, second)}  # type: ignore[union-attr]
    assert len(names) == 2
    assert names == house.sessions()


def test_a_client_with_a_name_is_not_given_another(house: House) -> None:
    connack = house.connect("mine").connack
    assert connack.properties is not None and connack.properties.assigned_client_id is None


def test_a_3_1_1_client_without_a_name_must_start_clean(house: House) -> None:
    assert house.connect("", V311, clean=True).connack.reason == 0
    refused = house.connect("", V311, clean=False)
    assert refused.connack.reason == 2
    assert refused.closed


def test_the_server_keep_alive_replaces_a_longer_one(house: House) -> None:
    house = House(max_keep_alive=60)
    told = [
        house.connect(f"c{asked}", keep_alive=asked).connack.properties.server_keep_alive  # type: ignore[union-attr]
        for asked in (0, 30, 60, 61)
    ]
    assert told == [60, None, None, 60]


def test_a_session_expiry_beyond_the_limit_is_cut_and_told(house: House) -> None:
    house = House(max_session_expiry=100)
    long = house.connect("a", session_expiry=101)
    short = house.connect("b", session_expiry=100)
    assert long.connack.properties is not None and long.connack.properties.session_expiry == 100
    assert short.connack.properties is not None and short.connack.properties.session_expiry is None


def test_what_is_switched_off_is_told(house: House) -> None:
    house = House(max_qos=1, retain_available=False, wildcard_subscriptions=False, shared_subscriptions=False)
    told = house.connect("a").connack.properties
    assert told is not None
    assert (told.maximum_qos, told.retain_available, told.wildcard_available, told.shared_available) == (
        1,
        0,
        0,
        0,
    )


def test_response_information_is_given_to_those_who_ask(house: House) -> None:
    asked = house.connect("a", request_response=1).connack.properties
    silent = house.connect("b").connack.properties
    assert asked is not None and asked.response_information == "responses/a"
    assert silent is not None and silent.response_information is None


@pytest.mark.parametrize("client_id", ["x" * 65_535, "a/#", "+"])
def test_a_client_id_that_makes_no_topic_gets_no_response_information(house: House, client_id: str) -> None:
    client = house.connect(client_id, request_response=1)
    assert client.connack.reason == 0
    assert client.connack.properties is not None and client.connack.properties.response_information is None
    client.ping()


def test_enhanced_authentication_is_refused(house: House) -> None:
    refused = house.connect("a", auth_method="SCRAM-SHA-1", auth_data=b"n,,n=user")
    assert refused.connack.reason == 0x8C
    assert refused.connack.properties is not None and refused.connack.properties.reason_string
    assert refused.closed
    assert house.sessions() == set()


def test_authentication_data_without_a_method_is_a_protocol_error(house: House) -> None:
    assert house.connect("a", auth_data=b"secret").connack.reason == 0x82


@pytest.mark.parametrize("level", [0, 3, 6, 255])
def test_an_unknown_protocol_level_is_refused_in_words_its_client_may_know(level: int) -> None:
    peer = House().open()
    peer.version = V5 if level > V5 else V311
    peer.feed(b"\x10\x0d\x00\x04MQTT" + bytes([level]) + b"\x02\x00\x00\x00\x01a")
    assert answer(peer).reason == (0x84 if level > V5 else 1)


def test_mqtt_3_1_is_refused_with_return_code_1(house: House) -> None:
    peer = house.open()
    peer.version = V311
    peer.feed(b"\x10\x0f\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x01a")
    assert answer(peer).reason == 1


def test_a_protocol_name_of_the_greatest_length_is_refused_like_any_other(house: House) -> None:
    peer = house.open()
    name = b"x" * 65_535
    peer.feed(b"\x10\x87\x80\x04\xff\xff" + name + b"\x06\x02\x00\x00\x00\x00")
    assert answer(peer).reason == 0x84


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("a reserved flag", b"\x00\x04MQTT\x05\x03\x00\x00\x00\x00\x01a", 0x81),
        ("will QoS 3", b"\x00\x04MQTT\x05\x1e\x00\x00\x00\x00\x01a\x00\x00\x01t\x00\x00", 0x81),
        ("will QoS without a will", b"\x00\x04MQTT\x05\x0a\x00\x00\x00\x00\x01a", 0x81),
        ("it ends inside the client id", b"\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x09a", 0x81),
        ("bytes behind the end", b"\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01a!!", 0x81),
        ("a property of PUBLISH", b"\x00\x04MQTT\x05\x02\x00\x00\x03\x23\x00\x01\x00\x01a", 0x81),
        ("receive maximum 0", b"\x00\x04MQTT\x05\x02\x00\x00\x03\x21\x00\x00\x00\x01a", 0x82),
        ("maximum packet size 0", b"\x00\x04MQTT\x05\x02\x00\x00\x05\x27\x00\x00\x00\x00\x00\x01a", 0x82),
        ("a property twice", b"\x00\x04MQTT\x05\x02\x00\x00\x06\x21\x00\x01\x21\x00\x01\x00\x01a", 0x82),
        ("a client id with U+0000", b"\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01\x00", 0x81),
        ("a client id that is not UTF-8", b"\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01\xff", 0x81),
        ("a will for a wildcard", b"\x00\x04MQTT\x05\x06\x00\x00\x00\x00\x01a\x00\x00\x01#\x00\x00", 0x90),
    ],
)
def test_a_bad_5_0_connect_is_refused_with_a_reason(
    house: House, name: str, body: bytes, reason: int
) -> None:
    peer = house.open()
    peer.feed(bytes([0x10, len(body)]) + body)
    connack = answer(peer)
    assert connack.reason == reason, name
    assert connack.properties is not None and connack.properties.reason_string
    assert house.sessions() == set()


def test_a_bad_3_1_1_connect_is_cut_off_without_a_word(house: House) -> None:
    peer = house.open()
    peer.feed(b"\x10\x0d\x00\x04MQTT\x04\x03\x00\x00\x00\x01a")
    assert peer.closed
    assert peer.take() == []


@pytest.mark.parametrize("first", [b"\xc0\x00", b"\x30\x03\x00\x01a", b"\xe0\x00", b"\xf0\x00", b"\x00\x00"])
def test_a_first_packet_that_is_no_connect_ends_the_connection(house: House, first: bytes) -> None:
    peer = house.open()
    peer.feed(first)
    assert peer.closed
    assert peer.take() == []


def test_a_second_connect_is_a_protocol_error(house: House, version: int) -> None:
    client = house.connect("a", version)
    client.send(Connect("a", version, True, 0))
    if version == V5:
        assert client.fault()[0] == 0x82
    assert client.closed


def test_packets_may_follow_the_connect_in_the_same_read(house: House) -> None:
    client = house.open()
    subscribe = Subscribe(1, [SubscriptionRequest(b"t", 0)])
    client.send(Connect("a", V5, True, 0), subscribe, Pingreq())
    assert [type(packet) for packet in client.take()] == [Connack, Suback, Pingresp]
    assert client.transport.writes == 1


def test_a_packet_may_come_one_byte_at_a_time(house: House) -> None:
    peer = house.open()
    for byte in b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01a\xc0\x00":
        peer.feed(bytes([byte]))
    assert [type(packet) for packet in peer.take()] == [Connack, Pingresp]


def test_a_full_house_refuses_strangers_and_lets_its_own_clients_take_over() -> None:
    house = House(max_connections=2)
    house.connect("a"), house.connect("b")
    refused = house.connect("c")
    assert refused.connack.reason == 0x97 and refused.closed
    assert house.connect("c", V311).connack.reason == 3
    assert house.connect("a").connack.reason == 0
    house.connect("b").disconnect()
    assert house.connect("c").connack.reason == 0


def test_a_refused_connect_does_not_take_over_a_session() -> None:
    house = House(retain_available=False)
    client = house.connect("a")
    assert house.connect("a", will=will("t", retain=True)).connack.reason == 0x9A
    client.ping()


def test_a_will_must_keep_to_what_the_server_offers() -> None:
    house = House(max_qos=1, max_topic_levels=8)
    assert house.connect("a", will=will("t", qos=2)).connack.reason == 0x9B
    assert house.connect("a", will=will("t", qos=1)).connack.reason == 0
    assert house.connect("a", will=will("/" * 8, retain=True)).connack.reason == 0x90
    assert house.connect("a", will=will("/" * 7, retain=True)).connack.reason == 0


ONLY_PUBLIC = Book([Rule(True, PUBLISH | SUBSCRIBE, [], [], ["public/#"], [], "rule 1")])


class Doorman:
    def admit(self, connect: Connect, caller: Caller, reply: Reply) -> None:
        if connect.password != b"secret":
            reply(Verdict(0x86, "wrong password"))
        else:
            reply(Verdict(grant=Grant(ONLY_PUBLIC, "u", caller.client_id)))


def test_a_wrong_password_is_refused(version: int) -> None:
    house = House(Doorman())
    refused = house.connect("a", version, username="u", password=b"guess")
    assert refused.connack.reason == (0x86 if version == V5 else 4)
    assert refused.closed


def test_what_a_client_may_not_do_is_refused_with_0x87() -> None:
    house = House(Doorman())
    client = house.connect("a", username="u", password=b"secret")
    assert client.subscribe("public/#", "private/#") == [0, 0x87]
    for qos, kind in ((1, 4), (2, 5)):
        packet_id = client.publish("private/x", b"", qos)
        assert client.first_ack(kind, packet_id, 0x87).properties is not None
    client.publish("private/x", b"", 0)
    client.ping()
    assert house.connect("b", username="u", password=b"secret", will=will("private/w")).connack.reason == 0x87


def test_a_3_1_1_publish_that_is_not_taken_ends_the_connection_unacknowledged() -> None:
    house = House(Doorman())
    client = house.connect("a", V311, username="u", password=b"secret")
    client.publish("private/x", b"", 1)
    assert client.closed
    assert client.take() == []


def test_a_server_that_stops_refuses_new_clients(house: House) -> None:
    waiting = house.connect("a")
    waiting.transport.jammed = True
    house.broker.stop(lambda: None)
    assert house.connect("b").connack.reason == 0x88


def test_a_client_whose_packets_are_too_small_for_a_connack_is_refused(house: House) -> None:
    refused = house.connect("a", maximum_packet_size=12)
    assert refused.connack.reason == 0x95 and refused.closed
    assert house.connect("b", maximum_packet_size=64).connack.reason == 0


def test_who_has_not_said_who_it_is_cannot_make_us_hold_a_large_packet(house: House) -> None:
    client = house.open()
    client.feed(b"\x10\xff\xff\x3f" + b"\x00\x04MQTT\x05\x02")
    assert client.closed


def test_a_large_packet_may_follow_its_connect_at_once(house: House) -> None:
    reader, client = house.connect("r"), house.open()
    reader.subscribe("t")
    payload = b"x" * 1_000_000
    client.feed(
        b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01z" + encode(Publish(b"t", payload, 0), V5)[:700_000]
    )
    client.feed(encode(Publish(b"t", payload, 0), V5)[700_000:])
    assert reader.first(Publish).payload == payload
