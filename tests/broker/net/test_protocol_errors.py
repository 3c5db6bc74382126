"""Invalid input ends its connection with the right reason.

Earlier packets keep their acknowledgements, and other clients are not affected.
"""

from __future__ import annotations

import random

import pytest

from sluice.wire.packets import V5, V311, Ack, Disconnect, Pingresp, Publish, Suback
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
