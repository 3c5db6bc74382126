"""QoS 0, 1 and 2, in both directions: the order of packets, and duplicates."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V5, Ack, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import BrokerHarness


@pytest.mark.parametrize("requested", [0, 1, 2])
@pytest.mark.parametrize("sent", [0, 1, 2])
def test_message_arrives_with_the_lower_of_both_qos(
    harness: BrokerHarness, version: int, sent: int, requested: int
) -> None:
    reader, writer = harness.connect("r", version), harness.connect("w", version)
    assert reader.subscribe("t", qos=requested) == [requested]
    writer.publish_fully("t", b"x", sent)
    [message] = reader.messages()
    assert (message.qos, message.payload, message.dup) == (min(sent, requested), b"x", False)
    assert (message.packet_id > 0) == (message.qos > 0)
    reader.ack(message)
    assert reader.take() == writer.take() == []


def test_qos_1_is_acknowledged_and_reports_missing_subscribers(harness: BrokerHarness) -> None:
    writer, reader = harness.connect("w"), harness.connect("r")
    writer.first_ack(PUBACK, writer.publish("t", b"", 1), 0x10)
    reader.subscribe("t")
    writer.first_ack(PUBACK, writer.publish("t", b"", 1), 0)


def test_an_acknowledgement_is_four_bytes_in_3_1_1(harness: BrokerHarness) -> None:
    writer = harness.connect("w", 4)
    writer.publish("t", b"", 1, packet_id=0x1234)
    assert bytes(writer.transport.sent) == b"\x40\x02\x12\x34"


def test_qos_1_duplicate_is_forwarded_again(harness: BrokerHarness) -> None:
    writer, reader = harness.connect("w"), harness.connect("r")
    reader.subscribe("t", qos=1)
    writer.publish("t", b"x", 1, packet_id=5)
    writer.publish("t", b"x", 1, packet_id=5, dup=True)
    messages = reader.messages()
    assert [message.payload for message in messages] == [b"x", b"x"]
    # The publisher's DUP flag is not forwarded.
    assert not any(message.dup for message in messages)


def test_qos_2_duplicate_is_acknowledged_and_not_forwarded(
    harness: BrokerHarness, version: int
) -> None:
    writer, reader = harness.connect("w", version), harness.connect("r", version)
    reader.subscribe("t", qos=0)
    for dup in (False, True, True):
        writer.publish("t", b"x", 2, packet_id=5, dup=dup)
        writer.first_ack(PUBREC, 5, 0)
    writer.send(Ack(PUBREL, 5))
    writer.first_ack(PUBCOMP, 5, 0)
    assert reader.payloads() == [b"x"]


def test_qos_2_packet_id_is_free_after_its_release(harness: BrokerHarness) -> None:
    writer, reader = harness.connect("w"), harness.connect("r")
    reader.subscribe("t")
    for payload in (b"one", b"two"):
        writer.publish("t", payload, 2, packet_id=5)
        writer.send(Ack(PUBREL, 5))
    assert reader.payloads() == [b"one", b"two"]


def test_pubrel_of_unknown_packet_id_gets_0x92(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.send(Ack(PUBREL, 77))
    client.first_ack(PUBCOMP, 77, 0x92)
    client.ping()


def test_3_1_1_pubrel_of_unknown_packet_id_gets_pubcomp(harness: BrokerHarness) -> None:
    client = harness.connect("a", 4)
    client.send(Ack(PUBREL, 77))
    assert bytes(client.transport.sent) == b"\x70\x02\x00\x4d"


def test_pubrec_of_unknown_packet_id_gets_0x92(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.send(Ack(PUBREC, 77))
    client.first_ack(PUBREL, 77, 0x92)
    client.send(Ack(PUBREC, 78, 0x97), Ack(PUBCOMP, 79), Ack(PUBACK, 80))
    assert client.take() == []
    client.ping()


@pytest.mark.parametrize(
    ("qos", "steps"),
    [
        (1, [PUBREC]),
        (1, [PUBCOMP]),
        (2, [PUBACK]),
        (2, [PUBCOMP]),
        (2, [PUBREC, PUBACK]),
    ],
)
def test_acknowledgement_of_the_wrong_type_ends_the_connection(
    harness: BrokerHarness, version: int, qos: int, steps: list[int]
) -> None:
    """[MQTT-3.3.4-1]; the delivery stays unacknowledged and is resent."""
    reader, writer = harness.connect_persistent("r", version), harness.connect("w")
    reader.subscribe("t", qos=2)
    writer.publish("t", b"x", qos)
    packet_id = int(reader.first(Publish).packet_id)
    reader.send(*[Ack(kind, packet_id) for kind in steps[:-1]])
    reader.take()
    reader.send(Ack(steps[-1], packet_id))
    assert reader.closed
    if version == V5:
        assert reader.fault()[0] == 0x82
    else:
        assert reader.take() == []
    reader = harness.connect_persistent("r", version)
    [resent] = reader.take()
    assert isinstance(resent, Ack if len(steps) == 2 else Publish)
    assert resent.packet_id == packet_id


def test_repeated_acknowledgements_are_harmless(harness: BrokerHarness, version: int) -> None:
    reader, writer = harness.connect("r", version), harness.connect("w")
    reader.subscribe("t", qos=2)
    for qos in (1, 2):
        writer.publish("t", b"x", qos)
        message = reader.first(Publish)
        reader.ack(message)
        reader.send(Ack(PUBACK if qos == 1 else PUBCOMP, message.packet_id))
    reader.ping()


def test_pubrec_with_an_error_ends_the_delivery(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("r", receive_maximum=1)
    reader.subscribe("t", qos=2)
    writer = harness.connect("w")
    writer.publish("t", b"one", 2)
    writer.publish("t", b"two", 2)
    [message] = reader.messages()
    reader.ack(message, 0x83)
    [message] = reader.messages()  # and no PUBREL; the window is free again
    assert message.payload == b"two"
    reader.drop()
    assert harness.connect_persistent("r").payloads() == [b"two"]


@pytest.mark.parametrize("reason", [0x10, 0x80, 0x87, 0x97])
def test_puback_with_an_error_reason_ends_the_delivery(harness: BrokerHarness, reason: int) -> None:
    reader = harness.connect_persistent("r")
    reader.subscribe("t", qos=1)
    harness.connect("w").publish("t", b"x", 1)
    [message] = reader.messages()
    reader.ack(message, reason)
    reader.drop()
    assert harness.connect_persistent("r").take() == []


def test_pubrec_may_be_repeated(harness: BrokerHarness) -> None:
    reader = harness.connect("r")
    reader.subscribe("t", qos=2)
    harness.connect("w").publish("t", b"x", 2)
    [message] = reader.messages()
    for _ in range(2):
        reader.send(Ack(PUBREC, message.packet_id))
        reader.first_ack(PUBREL, int(message.packet_id), 0)
    reader.send(Ack(PUBCOMP, message.packet_id))
    assert reader.take() == []


def test_packet_ids_of_both_directions_are_independent(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.subscribe("t", qos=2)
    client.publish("t", b"x", 2, packet_id=1)
    message = client.first(Publish)
    assert message.packet_id == 1
    client.first_ack(PUBREC, 1, 0)
    client.send(Ack(PUBREL, 1), Ack(PUBREC, 1))
    client.first_ack(PUBCOMP, 1, 0)
    client.first_ack(PUBREL, 1, 0)


def test_packet_ids_wrap_around_and_skip_those_in_use(harness: BrokerHarness) -> None:
    reader = harness.connect("r", receive_maximum=10)
    reader.subscribe("t", qos=1)
    writer = harness.connect("w")
    writer.publish("t", b"x", 1)
    [stored] = reader.messages()
    seen = set()
    for _ in range(65_535):
        writer.publish("t", b"", 1)
        [message] = reader.messages()
        seen.add(message.packet_id)
        reader.feed(b"\x40\x02" + int(message.packet_id).to_bytes(2, "big"))
        writer.transport.sent.clear()
    assert stored.packet_id not in seen
    assert len(seen) > 60_000  # ids that share its slot are skipped as well


@pytest.mark.parametrize("qos", [1, 2])
def test_messages_of_one_publisher_arrive_in_order(harness: BrokerHarness, qos: int) -> None:
    reader = harness.connect("r", V5, receive_maximum=3)
    reader.subscribe("t", qos=qos)
    writer = harness.connect("w")
    for nth in range(20):
        writer.publish("t", b"%d" % nth, qos)
    reported: list[bytes] = []
    while messages := reader.messages():
        for message in messages:
            reported.append(message.payload)
            packet_id = int(message.packet_id)
            if qos == 1:
                reader.send(Ack(PUBACK, packet_id))
            else:
                reader.send(Ack(PUBREC, packet_id))
                reader.first_ack(PUBREL, packet_id)
                reader.send(Ack(PUBCOMP, packet_id))
    assert reported == [b"%d" % nth for nth in range(20)]


def test_unsupported_qos_ends_the_connection() -> None:
    harness = BrokerHarness(max_qos=1)
    client = harness.connect("a")
    assert client.subscribe("t", qos=2) == [1]
    client.publish("t", b"", 2)
    assert client.fault()[0] == 0x9B


def test_packets_of_one_read_are_answered_with_one_write(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.subscribe("t", qos=1)
    client.transport.writes = 0
    client.feed(
        b"".join(b"\x32\x06\x00\x01t\x00" + bytes([nth]) + b"\x00" for nth in range(1, 101))
    )
    assert client.transport.writes == 1
    assert len(client.take()) == 200


def test_reused_delivery_has_no_state_of_earlier_ones(harness: BrokerHarness) -> None:
    writer = harness.connect("w")
    marked, member, other = (
        harness.connect("marked"),
        harness.connect("member"),
        harness.connect("other"),
    )
    marked.subscribe("t", qos=1, identifier=7, as_published=True)
    member.subscribe("$share/g/t", qos=1)
    other.subscribe("$share/g/t", qos=1)
    for nth in range(4):
        writer.publish("t", b"%d" % nth, 1, retain=True)
        for reader in (marked, member, other):
            for message in reader.messages():
                reader.ack(message)
    plain = harness.connect_persistent("plain")
    plain.subscribe("other/#", qos=1)
    for nth in range(6):
        writer.publish("other/x", b"%d" % nth, 1)
    found = plain.messages()
    assert [(one.payload, one.retain, one.subscription_ids) for one in found] == [
        (b"%d" % nth, False, None) for nth in range(6)
    ]
    plain.drop()
    again = harness.connect_persistent("plain")
    assert [(one.payload, one.dup) for one in again.messages()] == [
        (b"%d" % nth, True) for nth in range(6)
    ]
    again.disconnect(session_expiry=0)
    assert member.payloads() == other.payloads() == marked.payloads() == []
