"""CONNECT and CONNACK: admission, negotiated limits, and refusals."""

from __future__ import annotations

import pytest

from sluice.broker.acl import (
    PUBLISH,
    SUBSCRIBE,
    AccessControl,
    AccessControlList,
    AuthCallback,
    AuthResult,
    Grant,
    PeerInfo,
    Rule,
)
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
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Peer, props, will


def take_refusal(peer: Peer) -> Connack:
    """Return the CONNACK that refused this connection."""
    packet = peer.only(Connack)
    assert peer.closed
    return packet


def test_connack_announces_what_the_server_allows(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    assert (client.connack.reason, client.connack.session_present) == (0, False)
    assert client.connack.properties == props(
        receive_maximum=1024, maximum_packet_size=2_097_152, topic_alias_maximum=64
    )
    assert not client.closed


def test_a_3_1_1_client_gets_a_four_byte_connack(harness: BrokerHarness) -> None:
    peer = harness.open()
    peer.feed(b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01a")
    assert bytes(peer.transport.sent) == b"\x20\x02\x00\x00"


def test_client_without_id_is_assigned_one_in_connack(harness: BrokerHarness) -> None:
    first, second = harness.connect(""), harness.connect("")
    names = {client.connack.properties.assigned_client_id for client in (first, second)}  # type: ignore[union-attr]
    assert len(names) == 2
    assert names == harness.sessions()


def test_client_with_id_is_not_assigned_another(harness: BrokerHarness) -> None:
    connack = harness.connect("mine").connack
    assert connack.properties is not None and connack.properties.assigned_client_id is None


def test_3_1_1_client_without_id_must_use_clean_session(harness: BrokerHarness) -> None:
    assert harness.connect("", V311, clean=True).connack.reason == 0
    refused = harness.connect("", V311, clean=False)
    assert refused.connack.reason == 2
    assert refused.closed


def test_server_keep_alive_replaces_a_longer_one(harness: BrokerHarness) -> None:
    harness = BrokerHarness(max_keep_alive=60)
    reported = [
        harness.connect(f"c{requested}", keep_alive=requested).connack.properties.server_keep_alive  # type: ignore[union-attr]
        for requested in (0, 30, 60, 61)
    ]
    assert reported == [60, None, None, 60]


def test_session_expiry_above_the_limit_is_reduced_and_announced(harness: BrokerHarness) -> None:
    harness = BrokerHarness(max_session_expiry=100)
    long = harness.connect("a", session_expiry=101)
    short = harness.connect("b", session_expiry=100)
    assert long.connack.properties is not None and long.connack.properties.session_expiry == 100
    assert short.connack.properties is not None and short.connack.properties.session_expiry is None


def test_disabled_features_are_announced(harness: BrokerHarness) -> None:
    harness = BrokerHarness(
        max_qos=1, retain_available=False, wildcard_subscriptions=False, shared_subscriptions=False
    )
    reported = harness.connect("a").connack.properties
    assert reported is not None
    assert (
        reported.maximum_qos,
        reported.retain_available,
        reported.wildcard_available,
        reported.shared_available,
    ) == (
        1,
        0,
        0,
        0,
    )


def test_response_information_is_sent_on_request(harness: BrokerHarness) -> None:
    requested = harness.connect("a", request_response=1).connack.properties
    silent = harness.connect("b").connack.properties
    assert requested is not None and requested.response_information == "responses/a"
    assert silent is not None and silent.response_information is None


@pytest.mark.parametrize("client_id", ["x" * 65_535, "a/#", "+"])
def test_client_id_that_cannot_be_a_topic_gets_no_response_information(
    harness: BrokerHarness, client_id: str
) -> None:
    client = harness.connect(client_id, request_response=1)
    assert client.connack.reason == 0
    assert (
        client.connack.properties is not None
        and client.connack.properties.response_information is None
    )
    client.ping()


def test_enhanced_authentication_is_refused(harness: BrokerHarness) -> None:
    refused = harness.connect("a", auth_method="SCRAM-SHA-1", auth_data=b"n,,n=user")
    assert refused.connack.reason == 0x8C
    assert refused.connack.properties is not None and refused.connack.properties.reason_string
    assert refused.closed
    assert harness.sessions() == set()


def test_authentication_data_without_a_method_is_a_protocol_error(harness: BrokerHarness) -> None:
    assert harness.connect("a", auth_data=b"secret").connack.reason == 0x82


@pytest.mark.parametrize("level", [0, 3, 6, 255])
def test_unknown_protocol_level_is_refused_in_a_form_its_client_may_know(level: int) -> None:
    peer = BrokerHarness().open()
    peer.version = V5 if level > V5 else V311
    peer.feed(b"\x10\x0d\x00\x04MQTT" + bytes([level]) + b"\x02\x00\x00\x00\x01a")
    assert take_refusal(peer).reason == (0x84 if level > V5 else 1)


def test_mqtt_3_1_is_refused_with_return_code_1(harness: BrokerHarness) -> None:
    peer = harness.open()
    peer.version = V311
    peer.feed(b"\x10\x0f\x00\x06MQIsdp\x03\x02\x00\x3c\x00\x01a")
    assert take_refusal(peer).reason == 1


def test_protocol_name_of_maximum_length_is_refused(harness: BrokerHarness) -> None:
    peer = harness.open()
    name = b"x" * 65_535
    peer.feed(b"\x10\x87\x80\x04\xff\xff" + name + b"\x06\x02\x00\x00\x00\x00")
    assert take_refusal(peer).reason == 0x84


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("a reserved flag", b"\x00\x04MQTT\x05\x03\x00\x00\x00\x00\x01a", 0x81),
        ("will QoS 3", b"\x00\x04MQTT\x05\x1e\x00\x00\x00\x00\x01a\x00\x00\x01t\x00\x00", 0x81),
        ("will QoS without a will", b"\x00\x04MQTT\x05\x0a\x00\x00\x00\x00\x01a", 0x81),
        ("it ends inside the client id", b"\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x09a", 0x81),
        ("trailing bytes", b"\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01a!!", 0x81),
        ("a property of PUBLISH", b"\x00\x04MQTT\x05\x02\x00\x00\x03\x23\x00\x01\x00\x01a", 0x81),
        ("receive maximum 0", b"\x00\x04MQTT\x05\x02\x00\x00\x03\x21\x00\x00\x00\x01a", 0x82),
        (
            "maximum packet size 0",
            b"\x00\x04MQTT\x05\x02\x00\x00\x05\x27\x00\x00\x00\x00\x00\x01a",
            0x82,
        ),
        (
            "a property twice",
            b"\x00\x04MQTT\x05\x02\x00\x00\x06\x21\x00\x01\x21\x00\x01\x00\x01a",
            0x82,
        ),
        ("a client id with U+0000", b"\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01\x00", 0x81),
        ("a client id that is not UTF-8", b"\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01\xff", 0x81),
        (
            "a will for a wildcard",
            b"\x00\x04MQTT\x05\x06\x00\x00\x00\x00\x01a\x00\x00\x01#\x00\x00",
            0x90,
        ),
    ],
)
def test_a_bad_5_0_connect_is_refused_with_a_reason(
    harness: BrokerHarness, name: str, body: bytes, reason: int
) -> None:
    peer = harness.open()
    peer.feed(bytes([0x10, len(body)]) + body)
    connack = take_refusal(peer)
    assert connack.reason == reason, name
    assert connack.properties is not None and connack.properties.reason_string
    assert harness.sessions() == set()


def test_bad_3_1_1_connect_is_disconnected_without_a_packet(harness: BrokerHarness) -> None:
    peer = harness.open()
    peer.feed(b"\x10\x0d\x00\x04MQTT\x04\x03\x00\x00\x00\x01a")
    assert peer.closed
    assert peer.take() == []


@pytest.mark.parametrize(
    "first", [b"\xc0\x00", b"\x30\x03\x00\x01a", b"\xe0\x00", b"\xf0\x00", b"\x00\x00"]
)
def test_first_packet_other_than_connect_ends_the_connection(
    harness: BrokerHarness, first: bytes
) -> None:
    peer = harness.open()
    peer.feed(first)
    assert peer.closed
    assert peer.take() == []


def test_a_second_connect_is_a_protocol_error(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("a", version)
    client.send(Connect("a", version, True, 0))
    if version == V5:
        assert client.fault()[0] == 0x82
    assert client.closed


def test_packets_may_follow_the_connect_in_the_same_read(harness: BrokerHarness) -> None:
    client = harness.open()
    subscribe = Subscribe(1, [SubscriptionRequest(b"t", 0)])
    client.send(Connect("a", V5, True, 0), subscribe, Pingreq())
    assert [type(packet) for packet in client.take()] == [Connack, Suback, Pingresp]
    assert client.transport.writes == 1


def test_a_packet_may_come_one_byte_at_a_time(harness: BrokerHarness) -> None:
    peer = harness.open()
    for byte in b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01a\xc0\x00":
        peer.feed(bytes([byte]))
    assert [type(packet) for packet in peer.take()] == [Connack, Pingresp]


def test_full_broker_refuses_new_clients_and_allows_takeovers() -> None:
    harness = BrokerHarness(max_connections=2)
    harness.connect("a"), harness.connect("b")
    refused = harness.connect("c")
    assert refused.connack.reason == 0x97 and refused.closed
    assert harness.connect("c", V311).connack.reason == 3
    assert harness.connect("a").connack.reason == 0
    harness.connect("b").disconnect()
    assert harness.connect("c").connack.reason == 0


def test_a_refused_connect_does_not_take_over_a_session() -> None:
    harness = BrokerHarness(retain_available=False)
    client = harness.connect("a")
    assert harness.connect("a", will=will("t", retain=True)).connack.reason == 0x9A
    client.ping()


def test_will_must_respect_the_servers_limits() -> None:
    harness = BrokerHarness(max_qos=1, max_topic_levels=8)
    assert harness.connect("a", will=will("t", qos=2)).connack.reason == 0x9B
    assert harness.connect("a", will=will("t", qos=1)).connack.reason == 0
    assert harness.connect("a", will=will("/" * 8, retain=True)).connack.reason == 0x90
    assert harness.connect("a", will=will("/" * 7, retain=True)).connack.reason == 0


ONLY_PUBLIC = AccessControlList(
    [Rule(True, PUBLISH | SUBSCRIBE, [], [], ["public/#"], [], "rule 1")]
)


class FakeAuthenticator(AccessControl):
    def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
        if connect.password != b"secret":
            on_result(AuthResult(0x86, "wrong password"))
        else:
            on_result(AuthResult(grant=Grant(ONLY_PUBLIC, "u", peer.client_id)))


def test_a_wrong_password_is_refused(version: int) -> None:
    harness = BrokerHarness(access=FakeAuthenticator())
    refused = harness.connect("a", version, username="u", password=b"guess")
    assert refused.connack.reason == (0x86 if version == V5 else 4)
    assert refused.closed


def test_forbidden_action_is_refused_with_0x87() -> None:
    harness = BrokerHarness(access=FakeAuthenticator())
    client = harness.connect("a", username="u", password=b"secret")
    assert client.subscribe("public/#", "private/#") == [0, 0x87]
    for qos, kind in ((1, 4), (2, 5)):
        packet_id = client.publish("private/x", b"", qos)
        assert client.first_ack(kind, packet_id, 0x87).properties is not None
    client.publish("private/x", b"", 0)
    client.ping()
    assert (
        harness.connect(
            "b", username="u", password=b"secret", will=will("private/w")
        ).connack.reason
        == 0x87
    )


def test_refused_3_1_1_publish_ends_the_connection_unacknowledged() -> None:
    harness = BrokerHarness(access=FakeAuthenticator())
    client = harness.connect("a", V311, username="u", password=b"secret")
    client.publish("private/x", b"", 1)
    assert client.closed
    assert client.take() == []


def test_stopping_server_refuses_new_clients(harness: BrokerHarness) -> None:
    waiting = harness.connect("a")
    waiting.transport.is_blocked = True
    harness.broker.stop(lambda: None)
    assert harness.connect("b").connack.reason == 0x88


def test_client_whose_packet_limit_is_below_a_connack_is_refused(harness: BrokerHarness) -> None:
    refused = harness.connect("a", maximum_packet_size=12)
    assert refused.connack.reason == 0x95 and refused.closed
    assert harness.connect("b", maximum_packet_size=64).connack.reason == 0


def test_unauthenticated_client_cannot_make_the_server_buffer_a_large_packet(
    harness: BrokerHarness,
) -> None:
    client = harness.open()
    client.feed(b"\x10\xff\xff\x3f" + b"\x00\x04MQTT\x05\x02")
    assert client.closed


def test_large_packet_may_follow_its_connect_at_once(harness: BrokerHarness) -> None:
    reader, client = harness.connect("r"), harness.open()
    reader.subscribe("t")
    payload = b"x" * 1_000_000
    client.feed(
        b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01z"
        + encode(Publish(b"t", payload, 0), V5)[:700_000]
    )
    client.feed(encode(Publish(b"t", payload, 0), V5)[700_000:])
    assert reader.first(Publish).payload == payload
