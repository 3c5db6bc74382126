"""The benchmark detects a broker that loses, doubles and swaps messages."""

from __future__ import annotations

import asyncio

from sluice.bench.measured_broker import MeasuredBroker
from sluice.bench.measurement import Timing
from sluice.bench.scenarios import Bench, ScenarioSizes, pubsub
from sluice.bench.workload import Address
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Ack, Connack, Connect, Publish, Suback, Subscribe
from sluice.wire.properties import PUBACK
from sluice.wire.reader import PacketReader


class FaultyBroker:
    """Accepts every publish. Of each topic it loses the sixth message, doubles the eighth, and
    swaps two.
    """

    def __init__(self) -> None:
        self.readers: dict[bytes, asyncio.StreamWriter] = {}
        self.counts: dict[bytes, int] = {}
        self.held: dict[bytes, Publish] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        packets = PacketReader(1 << 20)
        while data := await reader.read(65536):
            for packet in packets.feed(data, V5):
                if isinstance(packet, Connect):
                    writer.write(encode(Connack(False, 0), V5))
                elif isinstance(packet, Subscribe):
                    self.readers[packet.requests[0].topic_filter] = writer
                    writer.write(encode(Suback(packet.packet_id, [1]), V5))
                elif isinstance(packet, Publish):
                    writer.write(encode(Ack(PUBACK, packet.packet_id), V5))
                    self.forward(packet)
        writer.close()

    def forward(self, packet: Publish) -> None:
        nth = self.counts[packet.topic] = self.counts.get(packet.topic, 0) + 1
        if nth == 6:
            return
        if nth == 3:
            self.held[packet.topic] = packet
            return
        out = self.readers[packet.topic]
        out.write(encode(packet, V5))
        if nth == 4:
            out.write(encode(self.held.pop(packet.topic), V5))
        if nth == 8:
            out.write(encode(packet, V5))


async def test_lost_duplicated_and_reordered_messages_are_counted_across_processes() -> None:
    reported: list[int] = []
    size = ScenarioSizes(payload=64, timing=Timing(messages=80, stall_seconds=1.0))
    async with await asyncio.start_server(FaultyBroker().serve, "127.0.0.1", 0) as server:
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        bench = Bench(MeasuredBroker(address), size, "sync", 2, reported.append, 7)
        [result] = await asyncio.to_thread(pubsub, bench)
    assert (result.lost, result.doubled, result.disordered) == (
        4,
        4,
        4,
    )  # one of each on each of four topics
    assert not result.is_correct
    assert result.messages == 80
    assert result.per_cpu_second is None  # the process id is unknown
    assert reported and reported[-1] == 80
