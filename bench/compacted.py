"""Measure exclusive compacted queues: 100,000 owners with 100 keys each, on disk.

    python bench/compacted.py                               100,000 owners, 100 keys, 100 B
    python bench/compacted.py --owners 10000 --writes 300000
    python bench/compacted.py --shared 1000000              one shared queue with so many keys

First every key of every owner is written once. Then keys are overwritten at random, in blocks that
alternate with blocks of publishes to one work queue, and to many, in the same process, and with
blocks of overwrites that are applied one by one instead of once per turn. Bytes go to real
connections, through codec, session, handler, engine and the store on disk, and the CPU time of the
whole process counts, including its threads and the kernel's copies. Snapshots and log compaction
run meanwhile, and count. At the end: memory, how long a snapshot blocks the loop, disk size after a
compaction, and the time of a start.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import random
import statistics
import tempfile
import time
from collections.abc import Callable

from path import BrokerHarness, ClientConnection, DiskLoop, Handle

from sluice.broker.namespaces.compacted.handler import MAX_COLLECTED_WRITES
from sluice.message import Message
from sluice.queues.commit_loop import SNAPSHOT_BATCH_SIZE
from sluice.queues.compacted.owner import Owner
from sluice.queues.recovery.incremental_snapshot import IncrementalSnapshot
from sluice.queues.service.queue_config import read_config

BLOCK = 2000  # publishes per block
BATCH_SIZE = 50  # of one read
QUEUES = 1000


class TimedLoop(DiskLoop):
    """A loop with timers, which fire when the loop is run."""

    def __init__(self) -> None:
        super().__init__()
        self._timers: list[tuple[float, int, Callable[..., object]]] = []
        self._count = 0

    def call_later(
        self, delay: float, function: Callable[..., object], *arguments: object
    ) -> Handle:
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + delay, self._count, function))
        return Handle()

    def run(self) -> None:
        super().run()
        while self._timers and self._timers[0][0] <= time.monotonic():
            heapq.heappop(self._timers)[2]()
            super().run()


class DiskHarness(BrokerHarness):
    loop_class = TimedLoop


def memory() -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def fill(harness: BrokerHarness, owners: int, keys: int, payload: bytes) -> None:
    exclusive = harness.engine.exclusive
    now = harness.broker.turn.begin()
    done = 0
    for key in range(keys):
        for number in range(owners):
            exclusive.publish(f"owner-{number}", Message(payload, b"", b"key/%d" % key), now)
            done += 1
            if done % BLOCK == 0:
                harness.broker.turn.schedule_flush()
                harness.loop.run()
                now = harness.broker.turn.begin()
    harness.broker.turn.schedule_flush()
    harness.loop.run()


def block_of(connection: ClientConnection, topic: Callable[[], str], payload: bytes) -> list[bytes]:
    return [
        b"".join(connection.publish(topic(), payload, f"k{nth}") for nth in range(BATCH_SIZE))
        for _ in range(BLOCK // BATCH_SIZE)
    ]


def cost(harness: BrokerHarness, connection: ClientConnection, packets: list[bytes]) -> float:
    started = time.process_time()
    for data in packets:
        connection.connection.data_received(data)
        harness.loop.run()
    connection.out = []
    return time.process_time() - started


def report_snapshot(harness: BrokerHarness) -> None:
    """Measure how long a snapshot blocks the loop: its start, and each of its parts."""
    while harness.engine.exclusive.is_saving:
        harness.loop.run()
        time.sleep(0.001)
    started = time.thread_time()
    saving = IncrementalSnapshot(harness.engine, SNAPSHOT_BATCH_SIZE)
    begun = time.thread_time() - started
    parts: list[float] = []
    done = False
    while not done:
        started = time.thread_time()
        done = saving.write_step()
        parts.append(time.thread_time() - started)
    started = time.thread_time()
    size = sum(len(piece) for piece in saving.chunks())
    parts.append(time.thread_time() - started)
    print(
        f"{'snapshot':40s} {begun * 1e3:8.1f} ms to begin, "
        f"{max(parts) * 1e3:.1f} the longest of {len(parts)} parts, "
        f"{(begun + sum(parts)) * 1e3:.0f} in all, {size / 2**20:.0f} MiB"
    )


def shared(keys: int, size: int) -> None:
    """Measure one shared queue: each key is written once, then a tenth of them ten times each."""
    draw = random.Random(2)
    payload = draw.randbytes(size)
    with tempfile.TemporaryDirectory(prefix="sluice-shared-") as directory:
        harness = DiskHarness(directory)
        config = read_config(
            {"type": "compacted", "limits": {"max_queue_depth": 100_000_000}}, "prices"
        )
        queue = harness.engine.lifecycle.create_queue(config.rules(), config.as_json())
        before = memory()
        for name, writes in (("every key once", keys), ("a tenth of them, over and over", keys)):
            started = time.process_time()
            for number in range(writes):
                key = number if name == "every key once" else 10 * draw.randrange(keys // 10)
                harness.engine.publishing.publish(
                    queue, Message(payload, b"", b"key/%d" % key), None, 0
                )
                if number % BLOCK == 0:
                    harness.broker.turn.begin()
                    harness.broker.turn.schedule_flush()
                    harness.loop.run()
            taken = time.process_time() - started
            gc.collect()
            used = memory() - before
            print(
                f"{name:40s} {taken / writes * 1e6:8.2f} us CPU, "
                f"{used / keys:5.0f} bytes of memory per key"
            )
        assert queue.depth == keys
        report_snapshot(harness)
        harness.close()


def live_bytes(owners: dict[str, Owner]) -> int:
    return sum(int(owner.stored_bytes) for owner in owners.values())


def sweep(harness: BrokerHarness) -> None:
    """Run a compaction and delete what it frees. It is the second one: the first skips recent
    segments.
    """
    for _ in range(2):
        harness.engine.exclusive.sweep_due_at = 1.0
        harness.runner._set_timer(1.0)
        harness.loop.run()
    until = time.monotonic() + 600.0
    quiet = until
    before = -1
    while time.monotonic() < until:
        harness.loop.run()
        time.sleep(0.05)
        size = sum(harness.store.segment_sizes().values())
        if size == before and time.monotonic() > quiet:
            return
        if size != before:
            before, quiet = size, time.monotonic() + 6.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--owners", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=100)
    parser.add_argument("--size", type=int, default=100)
    parser.add_argument(
        "--writes", type=int, default=2_000_000, help="overwrites after every key is there"
    )
    parser.add_argument(
        "--shared", type=int, default=0, metavar="KEYS", help="of a shared queue instead"
    )
    args = parser.parse_args()
    gc.set_threshold(100_000, 50, 1000)  # as in `sluice serve`
    if args.shared:
        shared(args.shared, args.size)
        return
    draw = random.Random(2)
    payload = draw.randbytes(args.size)
    count = args.owners * args.keys
    with (
        tempfile.TemporaryDirectory(prefix="sluice-owners-") as directory,
        tempfile.TemporaryDirectory(prefix="sluice-work-") as other,
    ):
        harness = DiskHarness(directory)
        before = memory()
        started = time.process_time()
        fill(harness, args.owners, args.keys, payload)
        gc.collect()
        print(f"{args.owners:,} owners x {args.keys} keys, {args.size} B")
        print(
            f"{'first write of each, engine alone':40s} "
            f"{(time.process_time() - started) / count * 1e6:8.2f} us CPU"
        )
        used = memory() - before
        print(f"{'memory':40s} {used / 2**20:8.0f} MiB  {used / count:5.0f} bytes per key")
        gc.freeze()
        work = DiskHarness(other)
        mine, theirs = ClientConnection(harness, "writer"), ClientConnection(work, "publisher")
        costs: list[float] = []
        single_costs: list[float] = []
        work_costs: list[float] = []
        spread_costs: list[float] = []

        def any_key() -> str:
            return f"$ECQ/w/owner-{draw.randrange(args.owners)}/key/{draw.randrange(args.keys)}"

        def any_queue() -> str:
            return f"$queue/bench/{draw.randrange(QUEUES)}"

        for number in range(QUEUES):
            work.engine.lifecycle.get_or_create_queue(f"bench/{number}")
        handler = harness.exclusive_handler
        for _ in range(args.writes // BLOCK):
            handler.max_collected = 1
            single_costs.append(cost(harness, mine, block_of(mine, any_key, payload)))
            handler.max_collected = MAX_COLLECTED_WRITES
            costs.append(cost(harness, mine, block_of(mine, any_key, payload)))
            work_costs.append(
                cost(work, theirs, block_of(theirs, lambda: "$queue/bench/0", payload))
            )
            spread_costs.append(cost(work, theirs, block_of(theirs, any_queue, payload)))
        gc.collect()
        for name, found in (
            ("overwrite, any key of any owner", costs),
            ("the same, one by one", single_costs),
            ("enqueue, one work queue", work_costs),
            (f"enqueue, any of {QUEUES:,} work queues", spread_costs),
        ):
            each = [one / BLOCK * 1e6 for one in found]
            print(
                f"{name:40s} {statistics.median(each):8.2f} us CPU in the median block, "
                f"{statistics.mean(each):.2f} in all, "
                f"{max(each) * BLOCK / 1e3:.0f} ms the longest block"
            )
        for name, found in (
            ("one work queue", work_costs),
            (f"{QUEUES:,} work queues", spread_costs),
        ):
            ratio = statistics.median(found) / statistics.median(costs)
            whole = sum(found) / sum(costs)
            print(
                f"{'write rate against ' + name:40s} {ratio:8.2f} x in the median block, "
                f"{whole:.2f} x in all"
            )
        used = memory() - before
        print(f"{'memory after the overwrites, both':40s} {used / 2**20:8.0f} MiB")
        work.close()
        report_snapshot(harness)
        live = live_bytes(harness.engine.exclusive.owners)
        size = sum(harness.store.segment_sizes().values())
        print(
            f"{'disk before compaction':40s} {size / 2**20:8.0f} MiB  "
            f"{size / live:5.2f} x of the live data"
        )
        sweep(harness)
        size = sum(harness.store.segment_sizes().values())
        print(
            f"{'disk after compaction':40s} {size / 2**20:8.0f} MiB  "
            f"{size / live:5.2f} x of the live data"
        )
        harness.close()
        del harness, mine
        started = time.thread_time()
        again = DiskHarness(directory)
        print(f"{'start':40s} {time.thread_time() - started:8.1f} s")
        assert live_bytes(again.engine.exclusive.owners) == live
        again.close()


if __name__ == "__main__":
    main()
