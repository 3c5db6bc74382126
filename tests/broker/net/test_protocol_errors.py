"""Invalid input ends its connection with the right reason.

Earlier packets keep their acknowledgements, and other clients are not affected.
"""

from __future__ import annotations

import random

import pytest

from sluice.wire.packets import V5, V311, Ack, Connack, Disconnect, Pingresp, Publish, Suback
from tests.broker.kit import BrokerHarness

# The error, the bytes of a 5.0 connection, and the reason code of the specification.
FAULTS: list[tuple[str, bytes, int]] = [
    ("packet type 0", b"\x00\x00", 0x81),
    ("a remaining length of five bytes", b"\x30\xff\xff\xff\xff\x01", 0x81),
    ("a remaining length not in its shortest form", b"\xc0\x80\x00", 0x81),
    ("a ping with flags", b"\xc1\x00", 0x81),
    ("a ping with bytes", b"\xc0\x01\x00", 0x81),
    ("QoS 3", b"\x36\x07\x00\x01t\x00\x01\x00x", 0x81),
    ("QoS 0 with DUP", b"\x38\x05\x00\x01t\x00x", 0x81),
    ("QoS 1 with packet identifier 0", b"\x32\x06\x00\x01t\x00\x00\x00", 0x81),
    ("a topic past the end", b"\x30\x04\x00\x09tt", 0x81),
    ("a topic with U+0000", b"\x30\x05\x00\x02t\x00\x00", 0x81),
    ("a topic that is not UTF-8", b"\x30\x04\x00\x01\xc3\x00", 0x81),
    ("a topic with a surrogate", b"\x30\x06\x00\x03\xed\xa0\x80\x00", 0x81),
    ("a topic with +", b"\x30\x04\x00\x01+\x00", 0x90),
    ("a topic with #", b"\x30\x06\x00\x03t/#\x00", 0x90),
    ("properties past the end", b"\x30\x05\x00\x01t\x05\x01", 0x81),
    ("a property of CONNECT on a PUBLISH", b"\x30\x09\x00\x01t\x05\x11\x00\x00\x00\x01", 0x81),
    ("a property twice", b"\x30\x08\x00\x01t\x04\x01\x01\x01\x01", 0x82),
    ("payload format 2", b"\x30\x06\x00\x01t\x02\x01\x02", 0x82),
    ("SUBSCRIBE with flags 0", b"\x80\x07\x00\x01\x00\x00\x01t\x00", 0x81),
    ("SUBSCRIBE without filters", b"\x82\x03\x00\x01\x00", 0x82),
    ("SUBSCRIBE with packet identifier 0", b"\x82\x07\x00\x00\x00\x00\x01t\x00", 0x81),
    ("SUBSCRIBE for QoS 3", b"\x82\x07\x00\x01\x00\x00\x01t\x03", 0x81),
    ("SUBSCRIBE with reserved bits", b"\x82\x07\x00\x01\x00\x00\x01t\x40", 0x81),
    ("SUBSCRIBE with retain handling 3", b"\x82\x07\x00\x01\x00\x00\x01t\x30", 0x82),
    ("SUBSCRIBE without options", b"\x82\x06\x00\x01\x00\x00\x01t", 0x81),
    ("SUBSCRIBE with two identifiers", b"\x82\x0b\x00\x01\x04\x0b\x01\x0b\x02\x00\x01t\x00", 0x82),
    ("UNSUBSCRIBE without filters", b"\xa2\x03\x00\x01\x00", 0x82),
    ("UNSUBSCRIBE with flags 0", b"\xa0\x06\x00\x01\x00\x00\x01t", 0x81),
    ("PUBREL with flags 0", b"\x60\x02\x00\x01", 0x81),
    ("PUBACK with flags", b"\x42\x02\x00\x01", 0x81),
    ("PUBACK with packet identifier 0", b"\x40\x02\x00\x00", 0x81),
    ("PUBREC with packet identifier 0", b"\x50\x02\x00\x00", 0x81),
    ("PUBACK cut short", b"\x40\x01\x00", 0x81),
    ("PUBACK of 3 bytes with a reserved reason", b"\x40\x03\x00\x01\x01", 0x82),
    ("PUBACK with the reason of a DISCONNECT", b"\x40\x04\x00\x01\x95\x00", 0x82),
    ("PUBREC with the reason of a PUBREL", b"\x50\x03\x00\x01\x92", 0x82),
    ("PUBREL with the reason of a PUBREC", b"\x62\x03\x00\x01\x97", 0x82),
    ("PUBCOMP with a reserved reason", b"\x70\x03\x00\x01\xff", 0x82),
    ("PUBACK with properties past the end", b"\x40\x04\x00\x01\x00\x01", 0x81),
    ("PUBACK with bytes after its properties", b"\x40\x05\x00\x01\x00\x00\x00", 0x81),
    ("PUBACK with two reason strings", b"\x40\x0c\x00\x01\x00\x08" + b"\x1f\x00\x01a" * 2, 0x82),
    ("PUBREC cut short", b"\x50\x01\x00", 0x81),
    ("PUBREL without a packet identifier", b"\x62\x00", 0x81),
    ("PUBREL with packet identifier 0", b"\x62\x02\x00\x00", 0x81),
    ("PUBCOMP with packet identifier 0", b"\x70\x02\x00\x00", 0x81),
    ("a DISCONNECT with a reserved reason", b"\xe0\x01\x05", 0x82),
    ("a DISCONNECT with a reason of servers", b"\xe0\x02\x8b\x00", 0x82),
    ("a DISCONNECT with properties past the end", b"\xe0\x02\x00\x01", 0x81),
    ("a DISCONNECT with a property of CONNACK", b"\xe0\x05\x00\x03\x13\x00\x01", 0x81),
    ("an AUTH of one byte", b"\xf0\x01\x18", 0x81),
    ("an empty response topic", b"\x30\x07\x00\x01t\x03\x08\x00\x00", 0x82),
    ("a response topic with +", b"\x30\x08\x00\x01t\x04\x08\x00\x01+", 0x90),
    ("topic alias 0", b"\x30\x07\x00\x01t\x03\x23\x00\x00", 0x94),
    ("a topic alias above the maximum", b"\x30\x07\x00\x01t\x03\x23\xff\xff", 0x94),
    ("a topic alias without a topic", b"\x30\x06\x00\x00\x03\x23\x00\x01", 0x82),
    ("a subscription identifier from a client", b"\x30\x06\x00\x01t\x02\x0b\x01", 0x82),
    ("SUBSCRIBE with an empty filter", b"\x82\x0a\x00\x01\x00\x00\x01t\x00\x00\x00\x00", 0x82),
    ("UNSUBSCRIBE with an empty filter", b"\xa2\x08\x00\x01\x00\x00\x01t\x00\x00", 0x82),
    ("SUBSCRIBE with + as its share", b"\x82\x10\x00\x01\x00\x00\x0a$share/+/t\x00", 0x82),
    ("SUBSCRIBE to a share without filter", b"\x82\x0e\x00\x01\x00\x00\x08$share/g\x00", 0x82),
    ("UNSUBSCRIBE with # as its share", b"\xa2\x0f\x00\x01\x00\x00\x0a$share/#/t", 0x82),
    ("SUBSCRIBE with a surrogate", b"\x82\x09\x00\x01\x00\x00\x03\xed\xa0\x80\x00", 0x81),
    ("a second CONNECT", b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01a", 0x82),
    ("a second CONNECT of another version", b"\x10\x0d\x00\x04MQTT\x09\x02\x00\x00\x00\x01a", 0x82),
    ("a CONNACK from a client", b"\x20\x03\x00\x00\x00", 0x82),
    ("a SUBACK from a client", b"\x90\x04\x00\x01\x00\x00", 0x82),
    ("an UNSUBACK from a client", b"\xb0\x04\x00\x01\x00\x00", 0x82),
    ("a PINGRESP from a client", b"\xd0\x00", 0x82),
    ("a DISCONNECT with flags", b"\xe1\x00", 0x81),
    ("an AUTH without a method", b"\xf0\x00", 0x82),
    ("an AUTH with a method", b"\xf0\x09\x18\x07\x15\x00\x04PLAN", 0x82),
    ("a packet that is too large", b"\x30\xff\xff\xff\x7f", 0x95),
]


@pytest.mark.parametrize(("what", "data", "reason"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_protocol_error_ends_its_connection_with_the_right_reason(
    harness: BrokerHarness, what: str, data: bytes, reason: int
) -> None:
    bystander, client = harness.connect("b"), harness.connect("a")
    client.feed(data)
    reported, why = client.fault()
    assert reported == reason
    assert why
    assert harness.counters.protocol_violations == 1
    [(event, facts)] = harness.log
    assert (event, facts["client"]) == ("protocol violation", "a")
    bystander.ping()


@pytest.mark.parametrize(("what", "data", "reason"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_packets_before_the_bad_one_are_acknowledged(
    harness: BrokerHarness, what: str, data: bytes, reason: int
) -> None:
    reader, client = harness.connect("r"), harness.connect("a")
    reader.subscribe("before")
    client.feed(
        b"\xc0\x00"
        + b"\x82\x07\x00\x01\x00\x00\x01t\x00"
        + b"\x32\x0b\x00\x06before\x00\x02\x00"
        + data
        + b"\x30\x09\x00\x06before\x00"
    )
    packets = client.take()
    assert [type(packet) for packet in packets] == [Pingresp, Suback, Ack, Disconnect]
    assert packets[-1].reason == reason  # type: ignore[attr-defined]
    assert len(reader.messages()) == 1  # and nothing from after the invalid packet


@pytest.mark.parametrize(
    ("what", "data", "reason"), FAULTS[:10], ids=[fault[0] for fault in FAULTS[:10]]
)
def test_a_3_1_1_connection_is_closed_without_a_packet(
    harness: BrokerHarness, what: str, data: bytes, reason: int
) -> None:
    client = harness.connect("a", V311)
    client.feed(data)
    assert client.closed
    assert client.take() == []


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\x09\x00\x01\x00\x01t\x00\x00\x00\x00",
        b"\x82\x0f\x00\x01\x00\x0a$share/+/t\x00",
        b"\xa2\x07\x00\x01\x00\x01t\x00\x00",
        b"\x40\x03\x00\x01\x00",
        b"\x62\x02\x00\x00",
    ],
    ids=["empty filter", "wildcard in a share", "empty filter to remove", "long PUBACK", "id 0"],
)
def test_a_3_1_1_connection_with_an_invalid_packet_is_closed_and_nothing_else_happens(
    harness: BrokerHarness, data: bytes
) -> None:
    client = harness.connect_persistent("a", V311)
    client.subscribe("kept")
    client.feed(data)
    assert client.closed
    assert client.take() == []
    assert list(harness.broker.registry.sessions["a"].subscriptions) == [b"kept"]


def test_subscribe_with_an_incomplete_filter_subscribes_to_none(harness: BrokerHarness) -> None:
    client = harness.connect_persistent("a")
    client.feed(b"\x82\x0a\x00\x01\x00\x00\x01t\x00\x00\x00\x00")
    assert client.fault()[0] == 0x82
    assert not harness.broker.registry.sessions["a"].subscriptions


def test_reason_of_an_older_cell_is_accepted(harness: BrokerHarness) -> None:
    cell, client = harness.connect("cell"), harness.connect("a")
    cell.connection.is_from_cluster = True
    for one in (cell, client):
        one.feed(b"\x40\x03\x00\x01\x95")
    assert (cell.closed, client.closed) == (False, True)


def test_will_with_an_empty_response_topic_is_refused(harness: BrokerHarness) -> None:
    peer = harness.open()
    peer.feed(b"\x10\x17\x00\x04MQTT\x05\x06\x00\x00\x00\x00\x01a\x03\x08\x00\x00\x00\x01t\x00\x00")
    assert peer.only(Connack).reason == 0x82
    assert peer.closed


def test_malformed_packet_may_arrive_in_pieces(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    for byte in b"\x30\x06\x00\x03t/#\x00":
        if not client.closed:
            client.feed(bytes([byte]))
    assert client.fault()[0] == 0x90


def test_data_after_the_end_is_not_read(harness: BrokerHarness) -> None:
    reader, client = harness.connect("r"), harness.connect("a")
    reader.subscribe("t")
    client.transport.is_blocked = True
    client.feed(b"\x00\x00")
    assert client.transport.closing and not client.closed
    client.feed(b"\x30\x04\x00\x01t\x00")
    assert reader.take() == []


def test_packets_after_disconnect_are_ignored(harness: BrokerHarness, version: int) -> None:
    reader, client = harness.connect("r"), harness.connect("a", version)
    reader.subscribe("t")
    client.feed(b"\xe0\x00" + (b"\x30\x04\x00\x01t\x00" if version == V5 else b"\x30\x03\x00\x01t"))
    assert client.closed
    assert client.take() == []
    assert reader.take() == []


def test_random_input_ends_only_its_connection(harness: BrokerHarness) -> None:
    chance = random.Random(1883)
    reader, writer = harness.connect("r"), harness.connect("w")
    reader.subscribe("good/#", qos=1)
    seeds = [fault[1] for fault in FAULTS]
    for nth in range(2000):
        peer = harness.open() if nth % 2 else harness.connect("")
        data = bytearray(
            chance.choice(seeds) if nth % 3 else chance.randbytes(chance.randrange(1, 60))
        )
        for _ in range(chance.randrange(3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if nth % 5 == 0:
            data[:0] = b"\x10\x0e\x00\x04MQTT\x05\x02\x00\x00\x00\x00\x01z"
        peer.feed(bytes(data))
        if not peer.closed:
            peer.drop()
        writer.publish("good/x", b"%d" % nth, 1)
        message = reader.first(Publish)
        assert message.payload == b"%d" % nth
        reader.ack(message)
        writer.take()
    assert set(harness.broker.connections) == {reader.connection, writer.connection}
    assert harness.sessions() == {"r", "w"}
