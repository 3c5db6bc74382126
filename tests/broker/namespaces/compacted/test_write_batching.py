"""Batched writes to exclusive queues: clients see the same result as for single writes."""

from __future__ import annotations

import random

import pytest

from sluice.wire.encode import encode
from sluice.wire.packets import V5, Ack, Packet, Publish
from sluice.wire.properties import PUBACK
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join
from tests.broker.peers import Client

OWNERS = 5


class BatchedBroker:
    """A broker that applies at most `most` writes at a time, and all that its clients received."""

    def __init__(self, most: int) -> None:
        self.harness = BrokerHarness(segment_bytes=1 << 14)
        self.harness.engine.exclusive.rules.max_message_size = 100
        self.harness.engine.exclusive.rules.max_keys = 70
        self.max_batch = most
        self.got: list[object] = []
        self.clients: dict[str, Client] = {}
        self._set_max_batch()

    def _set_max_batch(self) -> None:
        self.harness.core.exclusive_handler.max_collected = self.max_batch

    def client(self, name: str) -> Client:
        if name not in self.clients:
            self.clients[name] = self.harness.connect(name)
        return self.clients[name]

    def send(self, reads: list[tuple[str, list[Packet]]]) -> None:
        """Process one read of each of these clients, all in one turn."""
        for name, packets in reads:
            client = self.client(name)
            client.connection.data_received(b"".join(encode(packet, V5) for packet in packets))
        self.harness.loop.settle()

    def receive(self) -> None:
        """Record what each client was sent since the last call, in order, and the state."""
        for name, client in sorted(self.clients.items()):
            # Immediate refusals are answered before committed writes.
            answers: list[tuple[int, int]] = []
            for packet in client.take():
                if isinstance(packet, Publish):
                    self.got.append(
                        (
                            name,
                            packet.topic,
                            packet.payload,
                            packet.packet_id,
                            packet.raw_properties,
                        )
                    )
                elif isinstance(packet, Ack):
                    answers.append((int(packet.packet_id), int(packet.reason)))
                else:
                    self.got.append((name, packet.kind))
            self.got.append((name, sorted(answers)))
        for client_id, owner in sorted(self.harness.engine.exclusive.owners.items()):
            rows = sorted(
                (int(owner.seq(slot)), int(owner.key_hash(slot)), bool(owner.is_tombstone(slot)))
                for slot in range(owner.row_count())
                if owner.seq(slot)
            )
            done = sorted(owner.acked_out_of_order)
            self.got.append(
                (
                    client_id,
                    int(owner.next_seq),
                    int(owner.acked),
                    int(owner.stored_bytes),
                    done,
                    rows,
                )
            )

    def restart(self) -> None:
        self.clients.clear()
        self.harness.restart()
        self.harness.engine.exclusive.rules.max_message_size = 100
        self.harness.engine.exclusive.rules.max_keys = 70
        self._set_max_batch()


def writes(chance: random.Random, first: int) -> list[Packet]:
    """Return writes of any size and of QoS 0 or 1.

    Some are too large, some are tombstones, some have an invalid topic, and some plain publishes
    and messages for a queue are among them.
    """
    packets: list[Packet] = []
    for nth in range(chance.choice([1, 2, 5, 30, 100])):
        owner, key = f"car-{chance.randrange(OWNERS)}", f"k{chance.randrange(50)}"
        topic = f"$ECQ/w/{owner}/{chance.choice(['', 'a-longer-name/'])}{key}"
        payload = b"%d" % (first + nth)
        draw = chance.random()
        if draw < 0.05:
            payload = bytes(101)
        elif draw < 0.15:
            payload = b""
        elif draw < 0.18:
            topic = "$ECQ/w/no-key"
        elif draw < 0.21:
            topic = "$queue/work"
        elif draw < 0.24:
            topic = "plain"
        qos = 1 if chance.random() < 0.8 else 0
        packet = Publish(
            topic.encode(), payload, qos, packet_id=first % 60_000 + nth + 1 if qos else 0
        )
        if chance.random() < 0.1:
            packet.expiry_seconds = chance.randrange(1, 100)
        packets.append(packet)
    return packets


def acks(chance: random.Random, out: list[int]) -> list[Packet]:
    chance.shuffle(out)
    taken, out[:] = out[: len(out) // 2], out[len(out) // 2 :]
    return [Ack(PUBACK, packet_id) for packet_id in taken]


@pytest.mark.parametrize("seed", range(6))
def test_batched_writes_have_the_same_result_as_single_ones(seed: int) -> None:
    chance = random.Random(seed)
    sides = [BatchedBroker(1), BatchedBroker(chance.choice([2, 7, 64]))]
    out: dict[str, list[int]] = {}  # deliveries that an owner has not acknowledged yet
    written = delivered = 0
    for _ in range(60):
        draw = chance.random()
        name = f"car-{chance.randrange(OWNERS)}"
        if draw < 0.3:
            reads = [
                (writer, writes(chance, written + 200 * nth))
                for nth, writer in enumerate(("one", "other"))
            ]
            written += 400
            for side in sides:
                side.send(reads)
        elif draw < 0.45:
            out[name] = []
            for side in sides:
                client = side.clients.pop(name, None)
                if client is not None:
                    client.disconnect()
                join(side.client(name), f"$ECQ/{name}/#", 1, 0)
        elif draw < 0.88:
            name = chance.choice([known for known in out if out[known]] or [name])
            reads = [("one", writes(chance, written)), (name, acks(chance, out.get(name, [])))]
            reads.append(("other", writes(chance, written + 200)))
            written += 400
            for side in sides:
                side.send(reads)
        elif draw < 0.95:
            for side in sides:
                exclusive = side.harness.engine.exclusive
                owner = exclusive.owners.get(name)
                if owner is not None:
                    exclusive.purge(owner, side.harness.loop.now)
                    side.harness.broker.turn.schedule_flush()
                    side.harness.loop.settle()
        else:
            out.clear()
            for side in sides:
                side.restart()
        for side in sides:
            side.receive()
        one, many = sides
        assert many.got == one.got
        for got in one.got:
            if isinstance(got, tuple) and len(got) == 5 and isinstance(got[1], bytes):
                out.setdefault(got[0], []).append(got[3])
                delivered += 1
        one.got.clear()
        many.got.clear()
    assert delivered > 30
