"""Limits of messages in flight, packet sizes, and the cost of a peer that does not read."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Ack, Packet, Pingresp, Publish
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client


def test_unacknowledged_messages_are_limited_by_receive_maximum(harness: BrokerHarness) -> None:
    reader = harness.connect("r", receive_maximum=2)
    reader.subscribe("t", qos=2)
    writer = harness.connect("w")
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


def test_qos_0_is_not_blocked_by_a_full_window(harness: BrokerHarness) -> None:
    reader = harness.connect("r", receive_maximum=1)
    reader.subscribe("t", qos=1)
    writer = harness.connect("w")
    for payload, qos in ((b"1", 1), (b"2", 1), (b"0", 0)):
        writer.publish("t", payload, qos)
    assert reader.payloads() == [b"1", b"0"]


def test_server_has_its_own_limit_of_messages_in_flight(version: int) -> None:
    harness = BrokerHarness(max_inflight=3)
    reader = harness.connect("r", version)
    reader.subscribe("t", qos=1)
    writer = harness.connect("w")
    for _ in range(5):
        writer.publish("t", b"", 1)
    assert len(reader.messages()) == 3


def test_resumed_session_obeys_receive_maximum_of_its_new_connection(
    harness: BrokerHarness,
) -> None:
    reader = harness.connect_persistent("r")
    reader.subscribe("t", qos=2)
    writer = harness.connect("w")
    for nth in range(4):
        writer.publish("t", b"%d" % nth, 1 + nth % 2)
    sent = reader.messages()
    reader.send(Ack(PUBREC, sent[1].packet_id))
    reader.drop()
    writer.publish("t", b"4", 1)

    reader = harness.connect_persistent("r", receive_maximum=1)
    reported: list[tuple[bytes, bool]] = []
    released = 0
    while packets := reader.take():
        assert len(packets) == 1
        [packet] = packets
        if isinstance(packet, Publish):
            reported.append((packet.payload, packet.dup))
            reader.ack(packet)
        else:
            assert isinstance(packet, Ack) and packet.kind == PUBREL
            assert packet.packet_id == sent[1].packet_id
            released += 1
            reader.send(Ack(PUBCOMP, packet.packet_id))
    assert reported == [(b"0", True), (b"2", True), (b"3", True), (b"4", False)]
    assert released == 1


def test_acknowledgement_of_a_message_not_yet_resent_counts(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("r")
    reader.subscribe("t", qos=1)
    writer = harness.connect("w")
    for nth in range(4):
        writer.publish("t", b"%d" % nth, 1)
    sent = reader.messages()
    reader.drop()
    reader = harness.connect_persistent("r", receive_maximum=1)
    assert reader.payloads() == [b"0"]
    reader.send(*(Ack(PUBACK, one.packet_id) for one in sent[1:3]))
    assert reader.take() == []
    reader.send(Ack(PUBACK, sent[0].packet_id))
    assert reader.payloads() == [b"3"]
    assert harness.broker.registry.sessions["r"].outbound.buffered_bytes == 2


def test_too_many_unreleased_qos_2_messages_end_the_connection() -> None:
    harness = BrokerHarness(receive_maximum=3)
    writer = harness.connect("w")
    for _ in range(3):
        writer.first_ack(PUBREC, writer.publish("t", b"", 2))
    writer.publish("t", b"", 1)
    writer.take()
    writer.publish("t", b"", 2)
    reason, why = writer.fault()
    assert reason == 0x93
    assert "receive maximum" in why


def test_released_messages_free_the_window() -> None:
    harness = BrokerHarness(receive_maximum=1)
    writer = harness.connect("w")
    for _ in range(5):
        writer.publish_fully("t", b"", 2)
    writer.ping()


def test_3_1_1_client_has_no_receive_maximum() -> None:
    harness = BrokerHarness(receive_maximum=3)
    writer = harness.connect("w", V311)
    for _ in range(100):
        writer.publish("t", b"", 2)
    assert len(writer.take()) == 100
    assert not writer.closed


# ---- packet sizes


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_message_too_large_for_its_subscriber_is_dropped_and_counted(
    harness: BrokerHarness, qos: int
) -> None:
    reader, writer = harness.connect("r", maximum_packet_size=64), harness.connect("w")
    reader.subscribe("t", qos=qos)
    overhead = 1 + 1 + 2 + 1 + 1 + (2 if qos else 0)
    for size in (64 - overhead, 65 - overhead, 1):
        writer.publish("t", b"x" * size, qos)
    assert [len(message.payload) for message in reader.messages()] == [64 - overhead, 1]
    assert harness.counters.publishes_dropped == 1
    assert harness.broker.registry.sessions["r"].outbound.buffered_bytes == (
        64 - overhead + 1 + 2 if qos else 0
    )


def test_resumed_client_with_smaller_packet_limit_is_not_sent_larger_messages(
    harness: BrokerHarness,
) -> None:
    reader = harness.connect_persistent("r")
    reader.subscribe("t", qos=1)
    writer = harness.connect("w")
    writer.publish("t", b"x" * 200, 1)
    writer.publish("t", b"small", 1)
    reader.drop()
    reader = harness.connect_persistent("r", maximum_packet_size=64)
    assert reader.payloads() == [b"small"]
    assert harness.broker.registry.sessions["r"].outbound.buffered_bytes == 6


def test_reason_strings_are_omitted_where_they_do_not_fit() -> None:
    harness = BrokerHarness(refused_filters=[b"no"])
    for limit, reported in ((200, True), (40, False)):
        client = harness.connect(f"c{limit}", maximum_packet_size=limit)
        client.subscribe("t")
        client.feed(b"\x82\x08\x00\x09\x00\x00\x02no\x00")
        assert len(client.transport.sent) <= limit
        assert client.take()[0].properties is not None or not reported  # type: ignore[attr-defined]
        client.feed(b"\x00\x00")
        assert len(client.transport.sent) <= limit
        assert client.fault()[0] == 0x81


def test_oversized_packet_is_refused_before_its_bytes_arrive() -> None:
    harness = BrokerHarness(max_packet_size=1000)
    client = harness.connect("a")
    client.feed(b"\x30\xff\xff\xff\x7f")
    reason, why = client.fault()
    assert reason == 0x95
    assert "1000" in why


def test_packet_of_exactly_the_maximum_size_is_accepted() -> None:
    harness = BrokerHarness(max_packet_size=1000)
    client = harness.connect("a")
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


def test_slow_subscriber_loses_qos_0_above_its_buffer_and_the_loss_is_counted() -> None:
    harness = BrokerHarness(write_buffer_high=10_000)
    reader, writer = harness.connect("r"), harness.connect("w")
    reader.subscribe("t")
    reader.transport.is_blocked = True
    flood(writer, 0, 1000)
    assert len(reader.transport.pending) < 12_000
    assert harness.counters.publishes_dropped >= 985
    reader.transport.drain()
    reader.take()
    writer.publish("t", b"again")
    assert reader.transport.pending  # served again after it has read


def test_slow_subscriber_gets_qos_1_in_order_up_to_its_limits() -> None:
    harness = BrokerHarness(write_buffer_high=10_000, max_queued_messages=50)
    reader, writer = harness.connect("r"), harness.connect("w")
    reader.subscribe("t", qos=1)
    reader.transport.is_blocked = True
    for nth in range(200):
        writer.publish("t", b"%03d" % nth + b"x" * 1000, 1)
    assert len(reader.transport.pending) < 12_000
    reported: list[bytes] = []
    while reader.transport.pending:
        reader.transport.drain()
        for message in reader.messages():
            reported.append(message.payload[:3])
            reader.ack(message)
    assert reported == [b"%03d" % nth for nth in range(len(reported))]
    assert 55 <= len(reported) <= 65
    assert harness.counters.publishes_dropped == 200 - len(reported)
    assert harness.broker.registry.sessions["r"].outbound.buffered_bytes == 0


@pytest.mark.parametrize("online", [True, False])
def test_memory_of_one_session_is_bounded_including_properties(online: bool) -> None:
    harness = BrokerHarness(max_queued_bytes=100_000)
    reader, writer = harness.connect_persistent("r", receive_maximum=1), harness.connect("w")
    reader.subscribe("t", qos=1)
    if not online:
        reader.drop()
    for _ in range(50):
        writer.publish("t", b"", 1, user=[("k", "v" * 10_000)])
    session = harness.broker.registry.sessions["r"]
    assert 100_000 <= session.outbound.buffered_bytes <= 112_000
    assert session.outbound.dropped_count == 40


def test_client_that_sends_requests_and_does_not_read_is_paused() -> None:
    harness = BrokerHarness(write_buffer_high=10_000)
    client = harness.connect("a")
    client.transport.is_blocked = True
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


def test_slow_subscriber_does_not_slow_the_others() -> None:
    harness = BrokerHarness(write_buffer_high=10_000)
    slow, quick, writer = harness.connect("s"), harness.connect("q"), harness.connect("w")
    slow.subscribe("t", qos=1)
    quick.subscribe("t", qos=1)
    slow.transport.is_blocked = True
    for nth in range(100):
        writer.publish("t", b"%d" % nth + b"x" * 1000, 1)
        [message] = quick.messages()
        quick.ack(message)


def test_fan_out_larger_than_a_turn_is_sent_in_parts() -> None:
    harness = BrokerHarness(write_buffer_high=300_000)
    reader, writer = harness.connect("r"), harness.connect("w")
    reader.subscribe("t")
    reader.transport.is_blocked = True
    packet = b"\x30\x83\x9c\x01\x00\x01t\x00" + b"x" * (0x4E03 - 4)
    writer.feed(packet * 100)  # two million bytes in one read
    assert len(reader.transport.pending) < 700_000
    assert harness.counters.publishes_dropped > 50
