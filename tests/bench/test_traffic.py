"""The connections of the generator, without sockets: what they send, and when they throttle."""

from __future__ import annotations

import struct

from sluice.bench.packet_templates import publish_templates
from sluice.bench.tally import HEADER_BYTES, Tally
from sluice.bench.traffic import PublisherConnection, ReaderConnection, Traffic
from sluice.bench.workload import Workload, split_workload
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Ack, Connack, Publish, build_publish
from sluice.wire.properties import PUBACK, Properties
from sluice.wire.reader import PacketReader

RUN = 77


class Transport:
    """Records what is written."""

    def __init__(self) -> None:
        self.reader = PacketReader(1 << 24)
        self.packets: list[object] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.packets += self.reader.feed(data, V5)

    def close(self) -> None:
        self.closed = True

    def publishes(self) -> list[Publish]:
        found = [packet for packet in self.packets if isinstance(packet, Publish)]
        self.packets = []
        return found


def sent_reports() -> None:
    pass


def connected(
    traffic: Traffic, work: Workload, publisher: int = 0
) -> tuple[PublisherConnection, Transport]:
    transport = Transport()
    pieces = publish_templates(work, publisher)
    sender = PublisherConnection(
        traffic, b"", publisher, work.qos, work.window, work.messages, pieces
    )
    traffic.publishers.append(sender)
    sender.connection_made(transport)
    sender.data_received(encode(Connack(False, 0), V5))
    return sender, transport


def head(packet: Publish) -> tuple[int, int, int, int]:
    run, publisher, sequence, stamp = struct.unpack("<iiqq", packet.payload[:HEADER_BYTES])
    return run, publisher, sequence, stamp


def test_publisher_fills_its_window_and_no_more() -> None:
    traffic = Traffic(Tally(RUN, 1, 4), 0, 1, sent_reports)
    work = Workload(RUN, topic="t/{slot}", slots=4, by_key=True, size=100, window=3)
    sender, transport = connected(traffic, work)
    assert transport.publishes() == []  # not before the start
    traffic.sending = True
    sender.fill(5)
    first = transport.publishes()
    assert [head(packet) for packet in first] == [(RUN, 0, 0, 5), (RUN, 0, 1, 5), (RUN, 0, 2, 5)]
    assert {len(packet.payload) for packet in first} == {100}
    assert len({packet.topic for packet in first}) == 3
    assert first[0].decode_properties().user[0][0] == "partition-key"
    sender.data_received(encode(Ack(PUBACK, first[0].packet_id), V5))
    [fourth] = transport.publishes()
    assert head(fourth)[2] == 3
    assert traffic.confirmed == 1


def test_publisher_without_acknowledgements_is_paced_by_deliveries() -> None:
    tally = Tally(RUN, 1, 1)
    traffic = Traffic(tally, 10, 2, sent_reports)
    sender, transport = connected(traffic, Workload(RUN, topic="t", qos=0, size=30))
    reader = ReaderConnection(traffic, b"", b"", 0, False)
    reader.connection_made(Transport())
    traffic.sending = True
    sender.fill(1)
    sent = transport.publishes()
    assert len(sent) == 5  # of two copies each
    for packet in sent:
        reader.data_received(encode(packet, V5))
    assert tally.delivered == 5
    assert len(transport.publishes()) == 3  # five of the ten deliveries are outstanding


def test_fixed_rate_messages_carry_the_time_at_which_they_were_due() -> None:
    tally = Tally(RUN, 2, 1)
    tally.measuring = True
    traffic = Traffic(tally, 0, 1, sent_reports)
    traffic.paced = True
    work = Workload(RUN, topic="t", size=30, rate=100.0, window=0xFFFF)
    lines = [connected(traffic, work, publisher) for publisher in (0, 1)]
    traffic.sending = True
    assert traffic.send_due(1000, 10, 1025) == 1030  # the loop was late: three are due
    stamps = [[head(packet)[3] for packet in transport.publishes()] for _, transport in lines]
    assert stamps == [[1000, 1020], [1010]]
    assert sum(tally.lateness.counts) == 3


def test_consumer_sends_puback_and_ack_for_each_delivery() -> None:
    tally = Tally(RUN, 1, 1)
    traffic = Traffic(tally, 0, 1, sent_reports)
    transport = Transport()
    reader = ReaderConnection(traffic, b"", b"", 0, True)
    reader.connection_made(transport)
    properties = Properties()
    properties.user = [("message-id", "abc"), ("queue", "q")]
    payload = struct.pack("<iiqq", RUN, 0, 0, 0) + b"rest"
    packet = build_publish(b"$queue/q", payload, 1, False, properties)
    packet.packet_id = 9
    reader.data_received(encode(packet, V5))
    ack, settled = transport.packets
    assert isinstance(ack, Ack) and ack.packet_id == 9
    assert isinstance(settled, Publish) and settled.topic == b"$queue/q/$ack"
    assert settled.decode_properties().user == [("message-id", "abc")]


def test_leftovers_of_another_run_are_not_counted() -> None:
    tally = Tally(RUN, 1, 1)
    reader = ReaderConnection(Traffic(tally, 0, 1, sent_reports), b"", b"", 0, False)
    reader.connection_made(Transport())
    for payload in (
        struct.pack("<iiqq", RUN + 1, 0, 0, 0),
        struct.pack("<iiqq", RUN, 5, 0, 0),
        b"short",
    ):
        reader.data_received(encode(Publish(b"t", payload, 0), V5))
    assert (tally.delivered, tally.foreign) == (0, 3)


def test_refusal_is_reported_with_the_brokers_reason() -> None:
    traffic = Traffic(Tally(RUN, 1, 1), 0, 1, sent_reports)
    sender, transport = connected(traffic, Workload(RUN, topic="t", size=30, window=1))
    traffic.sending = True
    sender.fill(1)
    [packet] = transport.publishes()
    why = Properties()
    why.reason_string = "the queue is full"
    sender.data_received(encode(Ack(PUBACK, packet.packet_id, 0x97, why), V5))
    assert traffic.faults == ["a publish was refused: the queue is full"]
    assert traffic.refused == 1


def test_processes_share_connections_and_rate() -> None:
    work = Workload(RUN, (0, 1, 2, 3), (0, 1, 2), 4, rate=1000.0)
    shares = split_workload(work, 2)
    assert sorted(each for share in shares for each in share.publishers) == [0, 1, 2, 3]
    assert sorted(each for share in shares for each in share.readers) == [0, 1, 2]
    assert sum(share.rate for share in shares) == 1000.0
    assert [share.idle for share in split_workload(Workload(RUN, idle=5), 2)] == [3, 2]
    assert len(split_workload(work, 64)) == 4
