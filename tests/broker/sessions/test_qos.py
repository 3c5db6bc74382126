"""QoS 0, 1 and 2, both ways: who says what after what, and what repetitions lead to."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V5, Ack, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import House


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_message_arrives_with_the_lower_of_both_qos(
    house: House, version: int, sent: int, asked: int
) -> None:
    reader, writer = house.connect("r", version), house.connect("w", version)
    assert reader.subscribe("t", qos=asked) == [asked]
    writer.publish_fully("t", b"x", sent)
    [message] = reader.messages()
    assert (message.qos, message.payload, message.dup) == (min(sent, asked), b"x", False)
    assert (message.packet_id > 0) == (message.qos > 0)
    reader.ack(message)
    assert reader.take() == writer.take() == []


def test_qos_1_is_acknowledged_and_says_when_nobody_listens(house: House) -> None:
    writer, reader = house.connect("w"), house.connect("r")
    writer.first_ack(PUBACK, writer.publish("t", b"", 1), 0x10)
    reader.subscribe("t")
    writer.first_ack(PUBACK, writer.publish("t", b"", 1), 0)


def test_an_acknowledgement_is_four_bytes_in_3_1_1(house: House) -> None:
    writer = house.connect("w", 4)
    writer.publish("t", b"", 1, packet_id=0x1234)
    assert bytes(writer.transport.sent) == b"\x40\x02\x12\x34"


def test_a_qos_1_duplicate_is_passed_on_again(house: House) -> None:
    writer, reader = house.connect("w"), house.connect("r")
    reader.subscribe("t", qos=1)
    writer.publish("t", b"x", 1, packet_id=5)
    writer.publish("t", b"x", 1, packet_id=5, dup=True)
    messages = reader.messages()
    assert [message.payload for message in messages] == [b"x", b"x"]
    assert not any(message.dup for message in messages)  # the flag of the publisher's hop ends there


def test_a_qos_2_duplicate_is_acknowledged_and_not_passed_on(house: House, version: int) -> None:
    writer, reader = house.connect("w", version), house.connect("r", version)
    reader.subscribe("t", qos=0)
    for dup in (False, True, True):
        writer.publish("t", b"x", 2, packet_id=5, dup=dup)
        writer.first_ack(PUBREC, 5, 0)
    writer.send(Ack(PUBREL, 5))
    writer.first_ack(PUBCOMP, 5, 0)
    assert reader.payloads() == [b"x"]


def test_a_qos_2_identifier_is_free_again_after_its_release(house: House) -> None:
    writer, reader = house.connect("w"), house.connect("r")
    reader.subscribe("t")
    for payload in (b"one", b"two"):
        writer.publish("t", payload, 2, packet_id=5)
        writer.send(Ack(PUBREL, 5))
    assert reader.payloads() == [b"one", b"two"]


def test_a_release_of_an_unknown_identifier_is_answered_with_0x92(house: House) -> None:
    client = house.connect("a")
    client.send(Ack(PUBREL, 77))
    client.first_ack(PUBCOMP, 77, 0x92)
    client.ping()


def test_a_3_1_1_release_of_an_unknown_identifier_is_completed(house: House) -> None:
    client = house.connect("a", 4)
    client.send(Ack(PUBREL, 77))
    assert bytes(client.transport.sent) == b"\x70\x02\x00\x4d"


def test_a_receipt_of_an_unknown_identifier_is_answered_with_0x92(house: House) -> None:
    client = house.connect("a")
    client.send(Ack(PUBREC, 77))
    client.first_ack(PUBREL, 77, 0x92)
    client.send(Ack(PUBREC, 78, 0x92), Ack(PUBCOMP, 79), Ack(PUBACK, 80))
    assert client.take() == []
    client.ping()


def test_a_receipt_with_an_error_ends_the_delivery(house: House) -> None:
    reader = house.connect_lasting("r", receive_maximum=1)
    reader.subscribe("t", qos=2)
    writer = house.connect("w")
    writer.publish("t", b"one", 2)
    writer.publish("t", b"two", 2)
    [message] = reader.messages()
    reader.ack(message, 0x83)
    [message] = reader.messages()  # and no PUBREL; the window is free again
    assert message.payload == b"two"
    reader.drop()
    assert house.connect_lasting("r").payloads() == [b"two"]


@pytest.mark.parametrize("reason", [0x10, 0x80, 0x87, 0x97])
def test_an_acknowledgement_with_a_reason_is_an_acknowledgement(house: House, reason: int) -> None:
    reader = house.connect_lasting("r")
    reader.subscribe("t", qos=1)
    house.connect("w").publish("t", b"x", 1)
    [message] = reader.messages()
    reader.ack(message, reason)
    reader.drop()
    assert house.connect_lasting("r").take() == []


def test_a_receipt_may_be_repeated(house: House) -> None:
    reader = house.connect("r")
    reader.subscribe("t", qos=2)
    house.connect("w").publish("t", b"x", 2)
    [message] = reader.messages()
    for _ in range(2):
        reader.send(Ack(PUBREC, message.packet_id))
        reader.first_ack(PUBREL, int(message.packet_id), 0)
    reader.send(Ack(PUBCOMP, message.packet_id))
    assert reader.take() == []


def test_an_answer_of_the_wrong_kind_does_not_end_a_delivery(house: House) -> None:
    reader = house.connect_lasting("r")
    reader.subscribe("t", qos=2)
    writer = house.connect("w")
    writer.publish("t", b"one", 1)
    writer.publish("t", b"two", 2)
    one, two = reader.messages()
    reader.send(Ack(PUBCOMP, one.packet_id), Ack(PUBACK, two.packet_id), Ack(PUBCOMP, two.packet_id))
    reader.drop()
    assert house.connect_lasting("r").payloads() == [b"one", b"two"]


def test_identifiers_of_both_directions_are_independent(house: House) -> None:
    client = house.connect("a")
    client.subscribe("t", qos=2)
    client.publish("t", b"x", 2, packet_id=1)
    message = client.first(Publish)
    assert message.packet_id == 1
    client.first_ack(PUBREC, 1, 0)
    client.send(Ack(PUBREL, 1), Ack(PUBREC, 1))
    client.first_ack(PUBCOMP, 1, 0)
    client.first_ack(PUBREL, 1, 0)


def test_identifiers_go_round_and_skip_those_in_use(house: House) -> None:
    reader = house.connect("r", receive_maximum=10)
    reader.subscribe("t", qos=1)
    writer = house.connect("w")
    writer.publish("t", b"kept", 1)
    [kept] = reader.messages()
    seen = set()
    for _ in range(65_535):
        writer.publish("t", b"", 1)
        [message] = reader.messages()
        seen.add(message.packet_id)
        reader.feed(b"\x40\x02" + int(message.packet_id).to_bytes(2, "big"))
        writer.transport.sent.clear()
    assert kept.packet_id not in seen
    assert len(seen) > 60_000  # those that share its place in the row are passed over as well


@pytest.mark.parametrize("qos", [1, 2])
def test_messages_of_one_publisher_keep_their_order(house: House, qos: int) -> None:
    reader = house.connect("r", V5, receive_maximum=3)
    reader.subscribe("t", qos=qos)
    writer = house.connect("w")
    for nth in range(20):
        writer.publish("t", b"%d" % nth, qos)
    told: list[bytes] = []
    while messages := reader.messages():
        for message in messages:
            told.append(message.payload)
            packet_id = int(message.packet_id)
            if qos == 1:
                reader.send(Ack(PUBACK, packet_id))
            else:
                reader.send(Ack(PUBREC, packet_id))
                reader.first_ack(PUBREL, packet_id)
                reader.send(Ack(PUBCOMP, packet_id))
    assert told == [b"%d" % nth for nth in range(20)]


def test_what_the_server_does_not_offer_ends_the_connection() -> None:
    house = House(max_qos=1)
    client = house.connect("a")
    assert client.subscribe("t", qos=2) == [1]
    client.publish("t", b"", 2)
    assert client.fault()[0] == 0x9B


def test_one_read_is_answered_with_one_write(house: House) -> None:
    client = house.connect("a")
    client.subscribe("t", qos=1)
    client.transport.writes = 0
    client.feed(b"".join(b"\x32\x06\x00\x01t\x00" + bytes([nth]) + b"\x00" for nth in range(1, 101)))
    assert client.transport.writes == 1
    assert len(client.take()) == 200


def test_a_delivery_takes_nothing_over_from_those_that_were_acknowledged_before(house: House) -> None:
    writer = house.connect("w")
    marked, member, other = house.connect("marked"), house.connect("member"), house.connect("other")
    marked.subscribe("t", qos=1, identifier=7, as_published=True)
    member.subscribe("$share/g/t", qos=1)
    other.subscribe("$share/g/t", qos=1)
    for nth in range(4):
        writer.publish("t", b"%d" % nth, 1, retain=True)
        for reader in (marked, member, other):
            for message in reader.messages():
                reader.ack(message)
    plain = house.connect_lasting("plain")
    plain.subscribe("other/#", qos=1)
    for nth in range(6):
        writer.publish("other/x", b"%d" % nth, 1)
    found = plain.messages()
    assert [(one.payload, one.retain, one.subscription_ids) for one in found] == [
        (b"%d" % nth, False, None) for nth in range(6)
    ]
    plain.drop()
    again = house.connect_lasting("plain")
    assert [(one.payload, one.dup) for one in again.messages()] == [(b"%d" % nth, True) for nth in range(6)]
    again.disconnect(session_expiry=0)
    assert member.payloads() == other.payloads() == marked.payloads() == []
