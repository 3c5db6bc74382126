"""How much may be under way at once, how large a packet may be, and what a peer that does not read costs."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Ack, Packet, Pingresp, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import Client, House


def test_a_client_gets_no_more_than_its_receive_maximum_unacknowledged(house: House) -> None:
    reader = house.connect("r", receive_maximum=2)
    reader.subscribe("t", qos=2)
    writer = house.connect("w")
    for nth in range(5):
        writer.publish("t", b"%d" % nth, 1 + nth % 2)
    first, second = reader.messages()
    reader.ack(first)
    [third] = reader.messages()
    reader.send(Ack(PUBREC, second.packet_id))
    reader.first_ack(PUBREL, int(second.packet_id))
    assert reader.take() == []  # QoS 2 counts until its PUBCOMP
    reader.send(Ack(PUBCOMP, second.packet_id))
    reader.ack(third)
    assert reader.payloads() == [b"3", b"4"]


def test_qos_0_is_not_held_up_by_a_full_window(house: House) -> None:
    reader = house.connect("r", receive_maximum=1)
    reader.subscribe("t", qos=1)
    writer = house.connect("w")
    for payload, qos in ((b"1", 1), (b"2", 1), (b"0", 0)):
        writer.publish("t", payload, qos)
    assert reader.payloads() == [b"1", b"0"]


def test_the_server_has_a_limit_of_its_own_for_what_is_under_way(version: int) -> None:
    house = House(max_inflight=3)
    reader = house.connect("r", version)
    reader.subscribe("t", qos=1)
    writer = house.connect("w")
    for _ in range(5):
        writer.publish("t", b"", 1)
    assert len(reader.messages()) == 3


def test_a_resumed_session_keeps_to_the_receive_maximum_of_its_new_connection(house: House) -> None:
    reader = house.connect_lasting("r")
    reader.subscribe("t", qos=2)
    writer = house.connect("w")
    for nth in range(4):
        writer.publish("t", b"%d" % nth, 1 + nth % 2)
    sent = reader.messages()
    reader.send(Ack(PUBREC, sent[1].packet_id))
    reader.drop()
    writer.publish("t", b"4", 1)

    reader = house.connect_lasting("r", receive_maximum=1)
    told: list[tuple[bytes, bool]] = []
    released = 0
    while packets := reader.take():
        assert len(packets) == 1
        [packet] = packets
        if isinstance(packet, Publish):
            told.append((packet.payload, packet.dup))
            reader.ack(packet)
        else:
            assert isinstance(packet, Ack) and packet.kind == PUBREL
            assert packet.packet_id == sent[1].packet_id
            released += 1
            reader.send(Ack(PUBCOMP, packet.packet_id))
    assert told == [(b"0", True), (b"2", True), (b"3", True), (b"4", False)]
    assert released == 1


def test_acknowledgements_of_what_is_not_said_again_yet_count(house: House) -> None:
    reader = house.connect_lasting("r")
    reader.subscribe("t", qos=1)
    writer = house.connect("w")
    for nth in range(4):
        writer.publish("t", b"%d" % nth, 1)
    sent = reader.messages()
    reader.drop()
    reader = house.connect_lasting("r", receive_maximum=1)
    assert reader.payloads() == [b"0"]
    reader.send(*(Ack(PUBACK, one.packet_id) for one in sent[1:3]))
    assert reader.take() == []
    reader.send(Ack(PUBACK, sent[0].packet_id))
    assert reader.payloads() == [b"3"]
    assert house.broker.registry.sessions["r"].held_bytes == 2


def test_more_unreleased_messages_than_the_server_takes_end_the_connection() -> None:
    house = House(receive_maximum=3)
    writer = house.connect("w")
    for _ in range(3):
        writer.first_ack(PUBREC, writer.publish("t", b"", 2))
    writer.publish("t", b"", 1)
    writer.take()
    writer.publish("t", b"", 2)
    reason, why = writer.fault()
    assert reason == 0x93
    assert "receive maximum" in why


def test_released_messages_make_room() -> None:
    house = House(receive_maximum=1)
    writer = house.connect("w")
    for _ in range(5):
        writer.publish_fully("t", b"", 2)
    writer.ping()


def test_a_3_1_1_client_knows_no_receive_maximum_and_is_held_to_none() -> None:
    house = House(receive_maximum=3)
    writer = house.connect("w", V311)
    for _ in range(100):
        writer.publish("t", b"", 2)
    assert len(writer.take()) == 100
    assert not writer.closed


# ---- packet sizes


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_too_large_for_its_reader_is_dropped_and_counted(house: House, qos: int) -> None:
    reader, writer = house.connect("r", maximum_packet_size=64), house.connect("w")
    reader.subscribe("t", qos=qos)
    overhead = 1 + 1 + 2 + 1 + 1 + (2 if qos else 0)
    for size in (64 - overhead, 65 - overhead, 1):
        writer.publish("t", b"x" * size, qos)
    assert [len(message.payload) for message in reader.messages()] == [64 - overhead, 1]
    assert house.counters.publishes_dropped == 1
    assert house.broker.registry.sessions["r"].held_bytes == (64 - overhead + 1 + 2 if qos else 0)


def test_a_resumed_client_that_takes_only_smaller_packets_is_spared_the_large_ones(house: House) -> None:
    reader = house.connect_lasting("r")
    reader.subscribe("t", qos=1)
    writer = house.connect("w")
    writer.publish("t", b"x" * 200, 1)
    writer.publish("t", b"small", 1)
    reader.drop()
    reader = house.connect_lasting("r", maximum_packet_size=64)
    assert reader.payloads() == [b"small"]
    assert house.broker.registry.sessions["r"].held_bytes == 6


def test_reason_strings_are_left_out_where_they_do_not_fit() -> None:
    house = House(refused_filters=[b"no"])
    for limit, told in ((200, True), (40, False)):
        client = house.connect(f"c{limit}", maximum_packet_size=limit)
        client.subscribe("t")
        client.feed(b"\x82\x08\x00\x09\x00\x00\x02no\x00")
        assert len(client.transport.sent) <= limit
        assert client.take()[0].properties is not None or not told  # type: ignore[attr-defined]
        client.feed(b"\x00\x00")
        assert len(client.transport.sent) <= limit
        assert client.fault()[0] == 0x81


def test_a_packet_that_is_too_large_is_refused_before_its_bytes_arrive() -> None:
    house = House(max_packet_size=1000)
    client = house.connect("a")
    client.feed(b"\x30\xff\xff\xff\x7f")
    reason, why = client.fault()
    assert reason == 0x95
    assert "1000" in why


def test_a_packet_of_exactly_the_largest_size_is_taken() -> None:
    house = House(max_packet_size=1000)
    client = house.connect("a")
    client.subscribe("t")
    client.publish("t", b"x" * (1000 - 3 - 3 - 1))
    assert len(client.messages()) == 1
    client.publish("t", b"x" * (1000 - 3 - 3))
    assert client.fault()[0] == 0x95


# ---- readers that do not read


def flood(writer: Client, qos: int, count: int, size: int = 1000) -> None:
    for _ in range(count):
        writer.publish("t", b"x" * size, qos)
    writer.transport.sent.clear()


def test_a_slow_reader_loses_qos_0_beyond_its_buffer_and_the_loss_is_counted() -> None:
    house = House(write_buffer_high=10_000)
    reader, writer = house.connect("r"), house.connect("w")
    reader.subscribe("t")
    reader.transport.jammed = True
    flood(writer, 0, 1000)
    assert len(reader.transport.pending) < 12_000
    assert house.counters.publishes_dropped >= 985
    reader.transport.drain()
    reader.take()
    writer.publish("t", b"again")
    assert reader.transport.pending  # served again once it has read


def test_a_slow_reader_keeps_qos_1_up_to_its_limits_in_order() -> None:
    house = House(write_buffer_high=10_000, max_queued_messages=50)
    reader, writer = house.connect("r"), house.connect("w")
    reader.subscribe("t", qos=1)
    reader.transport.jammed = True
    for nth in range(200):
        writer.publish("t", b"%03d" % nth + b"x" * 1000, 1)
    assert len(reader.transport.pending) < 12_000
    told: list[bytes] = []
    while reader.transport.pending:
        reader.transport.drain()
        for message in reader.messages():
            told.append(message.payload[:3])
            reader.ack(message)
    assert told == [b"%03d" % nth for nth in range(len(told))]
    assert 55 <= len(told) <= 65
    assert house.counters.publishes_dropped == 200 - len(told)
    assert house.broker.registry.sessions["r"].held_bytes == 0


@pytest.mark.parametrize("online", [True, False])
def test_what_one_session_holds_is_bounded_in_bytes_properties_included(online: bool) -> None:
    house = House(max_queued_bytes=100_000)
    reader, writer = house.connect_lasting("r", receive_maximum=1), house.connect("w")
    reader.subscribe("t", qos=1)
    if not online:
        reader.drop()
    for _ in range(50):
        writer.publish("t", b"", 1, user=[("k", "v" * 10_000)])
    session = house.broker.registry.sessions["r"]
    assert 100_000 <= session.held_bytes <= 112_000
    assert session.dropped == 40


def test_a_client_that_asks_and_does_not_read_is_not_heard_until_it_reads() -> None:
    house = House(write_buffer_high=10_000)
    client = house.connect("a")
    client.transport.jammed = True
    reads = 0
    while client.transport.reading and reads < 100:
        client.feed(b"\xc0\x00" * 1000)
        reads += 1
    assert not client.transport.reading
    assert len(client.transport.pending) < 30_000
    client.transport.drain()
    assert client.transport.reading
    packets: list[Packet] = client.take()
    assert len(packets) == reads * 1000
    assert all(isinstance(packet, Pingresp) for packet in packets)


def test_a_slow_reader_does_not_slow_the_others() -> None:
    house = House(write_buffer_high=10_000)
    slow, quick, writer = house.connect("s"), house.connect("q"), house.connect("w")
    slow.subscribe("t", qos=1)
    quick.subscribe("t", qos=1)
    slow.transport.jammed = True
    for nth in range(100):
        writer.publish("t", b"%d" % nth + b"x" * 1000, 1)
        [message] = quick.messages()
        quick.ack(message)


def test_a_fan_out_larger_than_a_turn_is_handed_on_before_its_end() -> None:
    house = House(write_buffer_high=300_000)
    reader, writer = house.connect("r"), house.connect("w")
    reader.subscribe("t")
    reader.transport.jammed = True
    packet = b"\x30\x83\x9c\x01\x00\x01t\x00" + b"x" * (0x4E03 - 4)
    writer.feed(packet * 100)  # two million bytes in one read
    assert len(reader.transport.pending) < 700_000
    assert house.counters.publishes_dropped > 50
