"""Statements of the MQTT standards that no other test names: see docs/conformance.md.

Bytes in, packets out, without sockets. The harness checks the reason codes of every packet that the
broker sends.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sluice
from sluice.wire import reasons
from sluice.wire.packets import (
    V5,
    V311,
    Ack,
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
)
from sluice.wire.properties import (
    CONNACK,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
)
from sluice.wire.reasons import SERVER_REASONS
from tests.broker.kit import BrokerHarness
from tests.broker.peers import will
from tests.support.reason_codes import check_reasons

SOURCES = Path(sluice.__file__).parent


@pytest.fixture
def harness() -> BrokerHarness:
    return BrokerHarness()


def kinds_and_ids(packets: list[Packet]) -> list[tuple[int, int]]:
    return [
        (int(packet.kind), int(packet.packet_id))
        for packet in packets
        if isinstance(packet, Ack | Suback | Unsuback)
    ]


# ---- strings and topics


@pytest.mark.parametrize("topic", ["\ufeff", "\ufefft", "t/\ufeff/u"])
def test_byte_order_mark_is_part_of_a_topic(harness: BrokerHarness, topic: str) -> None:
    client = harness.connect("\ufeffa")
    assert harness.sessions() == {"\ufeffa"}
    client.subscribe(topic, topic.replace("\ufeff", "") or "none")
    client.publish(topic, b"x")
    [message] = client.messages()
    assert message.topic == topic.encode()


def test_longest_topic_is_delivered(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("a", version)
    topic = "t" * 65_535
    client.subscribe(topic)
    client.publish(topic, b"x")
    [message] = client.messages()
    assert message.topic == topic.encode()


def test_topics_are_compared_without_normalization(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    for one in ("\u00e5", "a\u030a", "\u212b", "T", "t", " t", "t ", "/t", "t/", "t//u"):
        client.subscribe(one)
        client.publish("\u00e5" if one != "\u00e5" else "a\u030a", b"other")
        client.publish(one, one.encode())
        assert client.payloads() == [one.encode()]
        assert client.unsubscribe(one.upper() + "!") == [0x11]
        assert client.unsubscribe(one) == [0]


# ---- CONNECT and CONNACK


@pytest.mark.parametrize(
    "client_id", ["a", "0123456789abcdefghijklm", "nopqrstuvwxyzABCDEFGHIJ", "KLMNOPQRSTUVWXYZ"]
)
def test_client_ids_of_up_to_23_characters_are_accepted(
    harness: BrokerHarness, version: int, client_id: str
) -> None:
    assert harness.connect(client_id, version).connack.reason == 0
    assert harness.sessions() == {client_id}


def test_client_ids_that_the_server_assigns_differ(harness: BrokerHarness, version: int) -> None:
    clients = [harness.connect("", version) for _ in range(20)]
    assert len(harness.sessions()) == 20
    assert not any(client.closed for client in clients)


def test_connack_is_the_first_packet_and_there_is_only_one(
    harness: BrokerHarness, version: int
) -> None:
    """Nothing of a resumed session comes before it."""
    reader = harness.connect_persistent("r", version)
    reader.subscribe("t", qos=1)
    reader.drop()
    harness.connect("w").publish("t", b"x", 1)
    peer = harness.open()
    peer.version = version
    connect = Connect("r", version, False, 0)
    peer.send(connect, Pingreq())
    packets = peer.take()
    assert [type(packet) for packet in packets] == [Connack, Publish, Pingresp]
    assert isinstance(packets[0], Connack)
    assert packets[0].properties is None or packets[0].properties.auth_method is None


def test_data_after_a_refused_connect_is_not_processed(
    harness: BrokerHarness, version: int
) -> None:
    harness.broker.stopping = True  # refuses every CONNECT
    peer = harness.open()
    peer.version = version
    peer.send(
        Connect("a", version, True, 0),
        Subscribe(1, [SubscriptionRequest(b"t", 0)]),
        Publish(b"t", b"x", 1, packet_id=2),
    )
    connack = peer.only(Connack)
    assert (connack.reason, connack.session_present) == (0x88 if version == V5 else 3, False)
    assert peer.closed
    assert harness.sessions() == set()
    assert harness.counters.publishes_received == 0


def test_session_does_not_expire_while_it_is_connected(harness: BrokerHarness) -> None:
    client = harness.connect("a", clean=False, session_expiry=1)
    client.subscribe("t", qos=1)
    harness.advance(1000)
    harness.connect("w").publish("t", b"x", 1)
    assert client.payloads() == [b"x"]


def test_connection_without_a_will_publishes_none(harness: BrokerHarness, version: int) -> None:
    reader = harness.connect("r", version)
    reader.subscribe("#")
    harness.connect("a", version).drop()
    assert reader.take() == []
    harness.connect("b", version, will=will("w", b"gone")).drop()
    assert reader.payloads() == [b"gone"]
    late = harness.connect("late", version)
    late.subscribe("#")
    assert late.take() == []  # the will was not retained


def test_user_properties_of_a_will_stay_in_order(harness: BrokerHarness) -> None:
    pairs = [("b", "1"), ("a", "2"), ("b", "0"), ("", "")]
    reader = harness.connect("r")
    reader.subscribe("w")
    harness.connect("a", will=will("w", user=pairs)).drop()
    [message] = reader.messages()
    assert message.decode_properties().user == pairs


# ---- PUBLISH


def test_answers_carry_the_packet_id_of_their_request(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("a", version)
    client.send(
        Subscribe(65_535, [SubscriptionRequest(b"none", 2)]),
        Publish(b"t", b"x", 1, packet_id=40_000),
        Publish(b"t", b"x", 2, packet_id=1),
        Publish(b"t", b"x", 0),
        Ack(PUBREL, 1),
        Unsubscribe(256, [b"none"]),
    )
    found = kinds_and_ids(client.take())
    assert found == [
        (SUBACK, 65_535),
        (PUBACK, 40_000),
        (PUBREC, 1),
        (PUBCOMP, 1),
        (UNSUBACK, 256),
    ]


@pytest.mark.parametrize("qos", [1, 2])
def test_dup_of_a_publisher_is_not_forwarded(
    harness: BrokerHarness, version: int, qos: int
) -> None:
    client = harness.connect("a", version)
    client.subscribe("t", qos=qos)
    client.publish("t", b"x", qos, packet_id=9, dup=True)
    assert client.first(Publish).dup is False


def test_publish_without_retain_does_not_change_the_retained_message(
    harness: BrokerHarness,
) -> None:
    writer = harness.connect("w")
    writer.publish("t", b"kept", retain=True)
    writer.publish("t", b"passing")
    writer.publish("t", b"")
    reader = harness.connect("r")
    reader.subscribe("t")
    assert reader.payloads() == [b"kept"]


def test_retained_message_outlives_the_session_of_its_publisher(
    harness: BrokerHarness, version: int
) -> None:
    writer = harness.connect("w", version)
    writer.publish("t", b"kept", retain=True)
    writer.disconnect()
    assert harness.sessions() == set()
    reader = harness.connect("r", version)
    reader.subscribe("t")
    assert reader.payloads() == [b"kept"]


def test_messages_are_not_resent_while_the_connection_lasts(
    harness: BrokerHarness, version: int
) -> None:
    reader = harness.connect_persistent("r", version)
    reader.subscribe("t", qos=2)
    writer = harness.connect("w")
    writer.publish("t", b"1", 1)
    writer.publish("t", b"2", 2)
    assert reader.payloads() == [b"1", b"2"]
    harness.advance(86_400)
    reader.ping()
    assert reader.take() == []


def test_expiry_does_not_end_a_qos_2_exchange_that_has_begun(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("r")
    reader.subscribe("t", qos=2)
    writer = harness.connect("w")
    packet_id = writer.publish("t", b"x", 2, message_expiry=5)
    message = reader.first(Publish)
    harness.advance(60)
    reader.drop()
    reader = harness.connect_persistent("r")
    assert reader.first(Publish).packet_id == message.packet_id
    reader.send(Ack(PUBREC, message.packet_id))
    reader.first_ack(PUBREL, int(message.packet_id), 0)
    writer.publish("t", b"x", 2, packet_id=packet_id, dup=True, message_expiry=5)
    writer.send(Ack(PUBREL, packet_id))
    writer.first_ack(PUBREC, packet_id, 0)
    writer.first_ack(PUBCOMP, packet_id, 0)


def test_pubrels_have_the_order_of_their_pubrecs(harness: BrokerHarness, version: int) -> None:
    reader, writer = harness.connect("r", version), harness.connect("w")
    reader.subscribe("t", qos=2)
    for nth in range(5):
        writer.publish("t", b"%d" % nth, 2)
    ids = [int(message.packet_id) for message in reader.messages()]
    order = [ids[nth] for nth in (3, 0, 4, 1, 2)]
    reader.send(*[Ack(PUBREC, packet_id) for packet_id in order])
    packets = reader.take()
    assert kinds_and_ids(packets) == [(PUBREL, packet_id) for packet_id in order]


def test_full_window_delays_no_other_packet(harness: BrokerHarness) -> None:
    client = harness.connect("a", receive_maximum=1)
    client.subscribe("t", qos=2)
    writer = harness.connect("w")
    writer.publish("t", b"1", 1)
    writer.publish("t", b"2", 2)
    assert client.payloads() == [b"1"]
    client.send(
        Pingreq(),
        Subscribe(1, [SubscriptionRequest(b"u", 1)]),
        Publish(b"u", b"x", 2, packet_id=2),
        Ack(PUBREL, 2),
        Publish(b"v", b"x", 1, packet_id=3),
        Unsubscribe(4, [b"u"]),
    )
    kinds = [type(packet) for packet in client.take()]
    assert kinds == [Pingresp, Suback, Ack, Ack, Ack, Unsuback]


# ---- SUBSCRIBE and UNSUBSCRIBE


@pytest.mark.parametrize("maximum", [0, 1])
def test_server_with_a_lower_maximum_qos_accepts_every_subscription(maximum: int) -> None:
    client = BrokerHarness(max_qos=maximum).connect("a")
    for qos in (0, 1, 2):
        assert client.subscribe("t", qos=qos) == [min(qos, maximum)]


def test_replaced_subscription_gets_retained_messages_again_and_loses_nothing(
    harness: BrokerHarness, version: int
) -> None:
    client, writer = harness.connect("a", version), harness.connect("w")
    writer.publish("t/1", b"kept", retain=True)
    client.subscribe("t/+", qos=1)
    assert client.payloads() == [b"kept"]
    writer.publish("t/2", b"before", 1)
    client.subscribe("t/+", qos=1)
    writer.publish("t/2", b"after", 1)
    assert client.payloads() == [b"before", b"kept", b"after"]


def test_unsubscribe_from_unknown_filters_is_answered_once(
    harness: BrokerHarness, version: int
) -> None:
    client = harness.connect("a", version)
    client.send(Unsubscribe(77, [b"t", b"u/#", b"$share/g/t"]))
    unsuback = client.only(Unsuback)
    assert unsuback.packet_id == 77
    assert unsuback.reasons == ([0x11] * 3 if version == V5 else [])


def test_shared_messages_have_the_qos_granted_to_the_member(harness: BrokerHarness) -> None:
    members = [harness.connect(f"m{qos}") for qos in range(3)]
    for qos, member in enumerate(members):
        member.subscribe("$share/g/t", qos=qos)
    writer = harness.connect("w")
    for _ in range(6):
        writer.publish("t", b"x", 2)
    for qos, member in enumerate(members):
        assert {int(message.qos) for message in member.messages()} == {qos}


# ---- DISCONNECT and reason codes


def test_nothing_follows_the_disconnect_of_the_server(harness: BrokerHarness) -> None:
    first = harness.connect_persistent("a")
    first.subscribe("t")
    second = harness.connect_persistent("a")
    harness.connect("w").publish("t", b"x")
    [last] = first.take()
    assert isinstance(last, Disconnect)
    assert last.reason == 0x8E
    assert last.properties is not None and last.properties.session_expiry is None
    assert first.closed and not second.closed


def test_a_refusal_fits_the_packet_limit_of_its_client() -> None:
    harness = BrokerHarness(max_retained=0)
    for limit, has_text in ((200, True), (40, False)):
        client = harness.connect(f"c{limit}", maximum_packet_size=limit)
        for qos, kind in ((1, PUBACK), (2, PUBREC)):
            packet_id = client.publish("t", b"x", qos, retain=True)
            assert len(client.transport.sent) <= limit
            refusal = client.first_ack(kind, packet_id, 0x97)
            assert (refusal.properties is not None) is has_text
    harness.broker.stopping = True
    peer = harness.open()
    connect = Connect("a", V5, True, 0)
    connect.properties.maximum_packet_size = 40
    peer.send(connect)
    assert len(peer.transport.sent) <= 40
    assert peer.only(Connack).reason == 0x88


@pytest.mark.parametrize(
    ("packet", "version"),
    [
        (Ack(PUBACK, 1, reasons.PACKET_TOO_LARGE), V5),
        (Ack(PUBREC, 1, reasons.PACKET_IDENTIFIER_NOT_FOUND), V5),
        (Ack(PUBCOMP, 1, reasons.QUOTA_EXCEEDED), V5),
        (Suback(1, [0, reasons.NO_MATCHING_SUBSCRIBERS]), V5),
        (Suback(1, [reasons.NOT_AUTHORIZED]), V311),
        (Unsuback(1, [reasons.QUOTA_EXCEEDED]), V5),
        (Connack(False, reasons.SERVER_SHUTTING_DOWN), V5),
        (Connack(False, reasons.NOT_AUTHORIZED), V311),
        (Disconnect(reasons.UNSUPPORTED_PROTOCOL_VERSION), V5),
        (Disconnect(reasons.SUCCESS), V5),
    ],
)
def test_kit_checks_the_reason_codes_of_every_packet(packet: Packet, version: int) -> None:
    """`Peer.take` checks what the broker sends in the tests of the broker."""
    with pytest.raises(AssertionError):
        check_reasons([packet], version)


# What a call with a reason code sends, by the name of the function that is called.
SENDS = {
    "refuse": [PUBACK, PUBREC],
    "ack_deferred": [PUBACK, PUBREC],
    "end": [DISCONNECT],
    "stop": [DISCONNECT],
    "add_reason": [SUBACK],
    "ProtocolViolation": [DISCONNECT],
    "AuthResult": [CONNACK],
}


def codes_returned(tree: ast.Module, values: dict[str, int]) -> list[tuple[int, int]]:
    """Return the line and code of each `return CODE` and `return CODE, text`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            value = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
            code = values.get(getattr(value, "id", ""))
            if code is not None:
                found.append((node.lineno, code))
    return found


def reason_constants() -> dict[str, int]:
    return {
        name: value
        for name, value in vars(reasons).items()
        if name.isupper() and isinstance(value, int)
    }


def test_returned_reason_codes_are_allowed_in_their_packets() -> None:
    """Of functions whose result is sent by their caller, in the modules that check requests."""
    values, found = reason_constants(), 0
    for name, kind in (
        ("broker/net/handshake.py", CONNACK),
        ("broker/routing/subscribe.py", SUBACK),
        ("broker/namespaces/queues/queue_subscriptions.py", SUBACK),
        ("broker/namespaces/compacted/handler.py", SUBACK),
        ("broker/namespaces/queues/handler.py", SUBACK),
    ):
        for line, code in codes_returned(ast.parse((SOURCES / name).read_text("utf-8")), values):
            found += 1
            assert code in SERVER_REASONS[kind], f"{name}:{line}"
    assert found > 25


def test_named_reason_codes_are_allowed_in_their_packets() -> None:
    """Of every call in the sources that names a constant: also where no test goes."""
    values, found = reason_constants(), 0
    for path in sorted(SOURCES.glob("**/*.py")):
        if path.relative_to(SOURCES).parts[0] in ("client", "worker", "spark"):
            continue
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            called = call.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            kinds = SENDS.get(name)
            if name == "refuse" and isinstance(called, ast.Attribute) and "handshake" in str(path):
                kinds = [CONNACK]
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            for argument in arguments if kinds else []:
                code = values.get(getattr(argument, "id", ""))
                if code is None or (name == "end" and code == reasons.SUCCESS):
                    continue  # `end(SUCCESS)` sends no DISCONNECT
                found += 1
                for kind in kinds or []:
                    assert code in SERVER_REASONS[kind], f"{path}:{call.lineno}"
    assert found > 20
