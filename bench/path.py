"""Measure the CPU cost of a queue message in the broker's own code: no sockets, no other process.

    python bench/path.py                  1 KB and 100 B; then more queues, groups, backlog
    python bench/path.py --rounds 2000    more rounds: the best one counts
    python bench/path.py --disk 1000000   with the store on disk: backlog of 1,000 or 1,000,000
    python bench/path.py --plain          plain publishes at QoS 1 and 0, to one receiver, to ten,
                                          to one of a group

Bytes go to real connections and come back, through codec, session, handler, engine and a store in
memory: four publishers, four consumers, 1,024 keys, QoS 1, each delivery answered with PUBACK and
`$ack`. Prints the time of the best round: the cost of the code when nothing disturbs it. For whole
systems there is the load harness.

With `--disk` it is the CPU time of the whole process, including its writer and reader threads and
the kernel's copies.
"""

from __future__ import annotations

import argparse
import collections
import gc
import queue
import random
import struct
import tempfile
import time
from collections.abc import Callable, Sequence

from sluice.broker.net.connection import Connection
from sluice.broker_core import BrokerCore
from sluice.queues.service.templates import QueueTemplates, Template
from sluice.store.embedded.store import EmbeddedStore
from sluice.store.memory import MemoryStore
from sluice.store.protocol import RecoveryLoader, RecoveryReport, Store
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connect, Subscribe, SubscriptionRequest, build_publish
from sluice.wire.properties import Properties

PUBLISHERS = CONSUMERS = 4
BATCH_SIZE = 50  # messages that each of them sends in one read
KEYS = 1024
USES = 8  # of each queue before the measurement


class Handle:
    def cancel(self) -> None:
        pass


class Loop:
    """The part of an event loop that the broker needs without sockets."""

    def __init__(self) -> None:
        self._ready: collections.deque[tuple[Callable[..., object], tuple[object, ...]]] = (
            collections.deque()
        )

    def call_soon(self, function: Callable[..., object], *arguments: object) -> Handle:
        self._ready.append((function, arguments))
        return Handle()

    def call_later(
        self, delay: float, function: Callable[..., object], *arguments: object
    ) -> Handle:
        return Handle()

    def run(self) -> None:
        while self._ready:
            function, arguments = self._ready.popleft()
            function(*arguments)


class DiskLoop(Loop):
    """A loop with threads: it runs until all their callbacks are done."""

    def __init__(self) -> None:
        super().__init__()
        self.outstanding = 0
        self._calls: queue.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = (
            queue.SimpleQueue()
        )

    def call_threadsafe(self, function: Callable[..., object], *arguments: object) -> None:
        self._calls.put((function, arguments))

    def run(self) -> None:
        super().run()
        while self.outstanding:
            function, arguments = self._calls.get()
            function(*arguments)
            super().run()


class Disk:
    """The store on disk, with a count of its outstanding callbacks."""

    def __init__(self, loop: DiskLoop, directory: str) -> None:
        self._loop = loop
        self._store = EmbeddedStore(directory, loop.call_threadsafe, print)
        self.next_frame_address = self._store.next_frame_address
        self.segment_sizes = self._store.segment_sizes
        self.is_snapshot_due = self._store.is_snapshot_due
        self.seal_segment = self._store.seal_segment
        self.close = self._store.close

    def open(self, loader: RecoveryLoader) -> RecoveryReport:
        return self._store.open(loader)

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        return self._store.commit(frame, count, sync, self._defer(done))

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        self._store.read(addresses, self._defer(done))

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self._store.scan_segment(segment, self._defer(done))

    def begin_snapshot(self) -> None:
        self._store.begin_snapshot()

    def snapshot(
        self, state: list[bytes], freed_segments: Sequence[int], done: Callable[[], None]
    ) -> None:
        self._store.snapshot(state, freed_segments, self._defer(done))

    def _defer(self, done: Callable[..., None]) -> Callable[..., None]:
        self._loop.outstanding += 1

        def run_deferred(*answer: object) -> None:
            self._loop.outstanding -= 1
            done(*answer)

        return run_deferred


class ClientConnection:
    """The transport of a connection, and the client at its other end."""

    def __init__(self, harness: BrokerHarness, name: str) -> None:
        self.out: list[bytes] = []
        self.held: collections.deque[tuple[bytes, bytes, bytes]] = collections.deque()
        self._harness = harness
        self._last_id = 0
        self.connection: Connection = harness.broker.connect()
        self.connection.connection_made(self)
        self.send(encode(Connect(name, V5, True, 0), V5))

    def write(self, data: bytes) -> None:
        self.out.append(data)

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1)

    def pause_reading(self) -> None:
        pass

    resume_reading = close = abort = pause_reading

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)
        self._harness.loop.run()

    def next_id(self) -> int:
        self._last_id = self._last_id % 60_000 + 1
        return self._last_id

    def subscribe(self, topic: str, group: str = "") -> None:
        properties = Properties()
        if group:
            properties.user = [("consumer-group", group)]
        packet = Subscribe(self.next_id(), [SubscriptionRequest(topic.encode(), 1)], properties)
        self.send(encode(packet, V5))

    def publish(self, topic: str, payload: bytes, key: str) -> bytes:
        """Return the bytes of a publish."""
        properties = Properties()
        properties.user = [("partition-key", key)]
        packet = build_publish(topic.encode(), payload, 1, False, properties)
        packet.packet_id = self.next_id()
        return encode(packet, V5)

    def publish_plain(self, topic: str, payload: bytes, qos: int) -> bytes:
        """Return the bytes of the plain publishes of one read."""
        packets = []
        for _ in range(BATCH_SIZE):
            packet = build_publish(topic.encode(), payload, qos, False, Properties())
            packet.packet_id = self.next_id() if qos else 0
            packets.append(encode(packet, V5))
        return b"".join(packets)

    def pubacks(self) -> bytes:
        """Return the PUBACKs of all deliveries, which have one topic and size."""
        data = b"".join(self.out)
        self.out = []
        packets = []
        at = 0
        while at < len(data):
            start, size, shift = at + 1, 0, 0
            while True:
                size |= (data[start] & 127) << shift
                shift += 7
                start += 1
                if data[start - 1] < 128:
                    break
            if data[at] & 6:
                (length,) = struct.unpack_from(">H", data, start)
                packets.append(b"\x40\x02" + data[start + 2 + length : start + 4 + length])
            at = start + size
        return b"".join(packets)

    def take(self) -> None:
        """Read deliveries, and store them for acknowledgement."""
        data = b"".join(self.out)
        self.out = []
        at = 0
        while at < len(data):
            kind = data[at] >> 4
            at, size, shift = at + 1, 0, 0
            while True:
                size |= (data[at] & 127) << shift
                shift += 7
                at += 1
                if data[at - 1] < 128:
                    break
            if kind == 3:
                (length,) = struct.unpack_from(">H", data, at)
                topic = data[at + 2 : at + 2 + length]
                found = data.index(b"message-id", at) + 10
                (width,) = struct.unpack_from(">H", data, found)
                packet_id = data[at + 2 + length : at + 4 + length]
                self.held.append((packet_id, topic, data[found + 2 : found + 2 + width]))
            at += size

    def settle(self, most: int) -> bytes:
        """Return PUBACK and `$ack` for the oldest deliveries."""
        packets = []
        for _ in range(min(most, len(self.held))):
            packet_id, topic, name = self.held.popleft()
            properties = Properties()
            properties.user = [("message-id", name.decode())]
            packet = build_publish(topic + b"/$ack", b"", 1, False, properties)
            packet.packet_id = self.next_id()
            packets.append(b"\x40\x02" + packet_id + encode(packet, V5))
        return b"".join(packets)


class BrokerHarness:
    loop_class = DiskLoop  # with a disk

    def __init__(self, directory: str = "") -> None:
        self.loop: Loop = self.loop_class() if directory else Loop()
        templates = QueueTemplates(
            lambda pattern, name: True, [Template("#", {"limits": {"max_queue_depth": 10_000_000}})]
        )
        core = BrokerCore(self.loop, templates, log=print, draw=random.Random(1).random)
        self.broker = core.broker
        self.engine = core.engine
        self.exclusive_handler = core.exclusive_handler
        store: Store = MemoryStore(
            self.loop.call_soon, segment_bytes=64 << 20, snapshot_bytes=64 << 20
        )
        if isinstance(self.loop, DiskLoop):
            store = Disk(self.loop, directory)
        core.open(store, print)
        self.store = store
        self.runner = core.commit_loop
        self.close = self.runner.close


def measure(
    size: int, rounds: int, queues: int = 1, groups: int = 1, waiting: int = 1000, spread: int = 1
) -> float:
    """Return microseconds per delivered message in the best round. `queues` exist, `spread` are
    used.
    """
    harness = BrokerHarness()
    draw = random.Random(2)
    payload = draw.randbytes(size)
    for nth in range(queues):
        harness.engine.lifecycle.get_or_create_queue(f"bench/{nth}")
    topics = [f"$queue/bench/{nth}" for nth in range(spread)]
    keys = max(1, KEYS // spread)  # of each queue: the more queues, the fewer keys per queue
    consumers = [
        ClientConnection(harness, f"{group}-{nth}")
        for group in range(groups)
        for nth in range(CONSUMERS if groups == 1 else 1)
    ]
    for consumer in consumers:
        consumer.subscribe("$queue/bench/0" if spread == 1 else "$queue/bench/#")
    publishers = [ClientConnection(harness, f"p{nth}") for nth in range(PUBLISHERS)]
    at_once = BATCH_SIZE if groups == 1 else 10

    def publishes(publisher: ClientConnection, count: int) -> bytes:
        publishes = []
        for _ in range(count):
            nth = draw.randrange(spread)
            publishes.append(
                publisher.publish(topics[nth], payload, f"k{nth}-{draw.randrange(keys)}")
            )
        return b"".join(publishes)

    for _ in range(waiting // (BATCH_SIZE * PUBLISHERS)):
        for publisher in publishers:
            publisher.send(publishes(publisher, BATCH_SIZE))
            publisher.out = []
    gc.collect()
    gc.freeze()
    best = float("inf")
    warm = USES * spread // (PUBLISHERS * at_once)  # warm up
    for nth in range(warm + rounds):
        incoming = [(publisher, publishes(publisher, at_once)) for publisher in publishers]
        started = time.perf_counter()
        for line, data in incoming:
            line.connection.data_received(data)
        harness.loop.run()
        taken = time.perf_counter() - started
        count = 0
        outgoing = []
        for consumer in consumers:
            consumer.take()
            before = len(consumer.held)
            outgoing.append(
                (consumer, consumer.settle(at_once * PUBLISHERS if groups > 1 else at_once))
            )
            count += before - len(consumer.held)
        started = time.perf_counter()
        for line, data in outgoing:
            if data:
                line.connection.data_received(data)
        harness.loop.run()
        taken += time.perf_counter() - started
        for publisher in publishers:
            publisher.out = []
        wanted = PUBLISHERS * at_once * groups
        if nth >= warm and count >= wanted * 0.9:
            best = min(best, taken / count)
    return best * 1e6


def measure_disk(size: int, waiting: int, blocks: int = 7, rounds: int = 100) -> float:
    """Return CPU microseconds per message published and settled, in the best of several blocks."""
    with tempfile.TemporaryDirectory(prefix="sluice-path-") as directory:
        harness = BrokerHarness(directory)
        draw = random.Random(2)
        payload = draw.randbytes(size)
        topic = "$queue/bench/0"
        publishers = [ClientConnection(harness, f"p{nth}") for nth in range(PUBLISHERS)]
        first = ClientConnection(harness, "c-first")
        first.subscribe(topic)  # the group must exist, so that they are stored for it
        first.connection.connection_lost(None)

        def publishes(publisher: ClientConnection, count: int) -> bytes:
            return b"".join(
                publisher.publish(topic, payload, f"k{draw.randrange(KEYS)}") for _ in range(count)
            )

        for _ in range(waiting // (4 * BATCH_SIZE * PUBLISHERS)):
            for publisher in publishers:
                publisher.send(publishes(publisher, 4 * BATCH_SIZE))
                publisher.out = []
        consumers = [ClientConnection(harness, f"c-{nth}") for nth in range(CONSUMERS)]
        for consumer in consumers:
            consumer.subscribe(topic)
        gc.collect()
        gc.freeze()
        best = float("inf")
        for _ in range(blocks):
            taken, count = 0.0, 0
            for _ in range(rounds):
                incoming = [
                    (publisher, publishes(publisher, BATCH_SIZE)) for publisher in publishers
                ]
                for consumer in consumers:
                    consumer.take()
                    before = len(consumer.held)
                    incoming.append((consumer, consumer.settle(BATCH_SIZE)))
                    count += before - len(consumer.held)
                started = time.process_time()
                for line, data in incoming:
                    line.connection.data_received(data)
                harness.loop.run()
                taken += time.process_time() - started
                for publisher in publishers:
                    publisher.out = []
            assert count > 0.9 * rounds * BATCH_SIZE * CONSUMERS, count
            best = min(best, taken / count)
        harness.close()
        return best * 1e6


def measure_plain(
    size: int, rounds: int, qos: int = 1, receivers: int = 1, share: str = ""
) -> float:
    """Return microseconds per plain publish, with its deliveries and PUBACKs, in the best round."""
    harness = BrokerHarness()
    payload = random.Random(2).randbytes(size)
    publishers = [ClientConnection(harness, f"p{nth}") for nth in range(PUBLISHERS)]
    consumers: list[ClientConnection] = []
    for nth in range(PUBLISHERS):
        for _ in range(receivers):
            consumer = ClientConnection(harness, f"c{len(consumers)}")
            consumer.subscribe(f"{share}bench/{nth}")
            consumer.out = []
            consumers.append(consumer)
    packets = [
        publisher.publish_plain(f"bench/{nth}", payload, qos)
        for nth, publisher in enumerate(publishers)
    ]
    gc.collect()
    gc.freeze()
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        for publisher, data in zip(publishers, packets):
            publisher.connection.data_received(data)
        harness.loop.run()
        taken = time.perf_counter() - started
        answers = [(consumer, consumer.pubacks()) for consumer in consumers]
        assert not qos or sum(len(data) for _, data in answers) >= 4 * BATCH_SIZE * PUBLISHERS
        started = time.perf_counter()
        for consumer, data in answers:
            if data:
                consumer.connection.data_received(data)
        harness.loop.run()
        taken += time.perf_counter() - started
        for publisher in publishers:
            publisher.out = []
        best = min(best, taken / (BATCH_SIZE * PUBLISHERS))
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--disk", type=int, default=0, metavar="WAITING")
    args = parser.parse_args()
    rounds = args.rounds
    gc.set_threshold(100_000, 50, 1000)  # as in `sluice serve`
    if args.plain:
        for name, cost in (
            ("QoS 1, 100 B", measure_plain(100, 10 * rounds)),
            ("QoS 1, 1 KB", measure_plain(1000, 10 * rounds)),
            ("QoS 0, 100 B", measure_plain(100, 10 * rounds, 0)),
            ("QoS 1, 100 B, ten receivers each", measure_plain(100, 2 * rounds, receivers=10)),
            (
                "QoS 1, 100 B, shared by ten",
                measure_plain(100, 10 * rounds, receivers=10, share="$share/g/"),
            ),
        ):
            print(f"{name:34s} {cost:6.3f} us")
        return
    if args.disk:
        few = measure_disk(1000, 1000)
        print(f"{'1 KB, on disk, 1,000 waiting':34s} {few:6.2f} us")
        many = measure_disk(1000, args.disk)
        print(f"{f'1 KB, on disk, {args.disk:,} waiting':34s} {many:6.2f} us  {many / few:5.2f} x")
        return
    base = measure(100, rounds)
    print(f"{'1 KB':34s} {measure(1000, rounds):6.2f} us")
    print(f"{'100 B':34s} {base:6.2f} us")
    for name, cost in (
        ("100 B, 100,000 waiting", measure(100, rounds, waiting=100_000)),
        ("100 B, 10,000 queues, one in use", measure(100, rounds, queues=10_000)),
        ("100 B, 100 queues, all in use", measure(100, rounds, queues=100, spread=100)),
        ("100 B, 10,000 queues, all in use", measure(100, rounds, queues=10_000, spread=10_000)),
        ("100 B, 1,000 groups, per delivery", measure(100, max(10, rounds // 40), groups=1000)),
    ):
        print(f"{name:34s} {cost:6.2f} us  {cost / base:5.2f} x")


if __name__ == "__main__":
    main()
