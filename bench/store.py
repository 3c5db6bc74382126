"""Measure the embedded store: commits by batch size, reads, and a start with a million messages.

    python bench/store.py                      everything, in a directory below the current one
    python bench/store.py --directory /data/x  on another disk; the directory is removed at the end
    python bench/store.py --messages 100000    fewer messages for the start
    python bench/store.py --part waits         latency of single commits, by size

The store runs under uvloop as in the broker: a frame is built (`write_record` per message, which
also computes the checksum), committed, and the next one is built when it is done. CPU is that of
the whole process, both threads, per message; `build` is the part for building frames. Each start is
measured in a process of its own, because of its memory; its loader keeps 8 bytes per message, the
minimum of an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import shutil
import subprocess
import sys
import time
from array import array
from pathlib import Path

import uvloop
from librt.strings import BytesWriter

from sluice.store import protocol
from sluice.store.embedded import EmbeddedStore
from sluice.store.protocol import HEADER_BYTES, MESSAGE, Record, RecoveryReport, write_record

BODY = random.Random(1).randbytes(1024)
BATCHES = {1: 2_000, 10: 20_000, 100: 200_000, 1000: 400_000}
WAITS = {1: 2_000, 10: 1_000, 50: 500, 200: 200}  # commits by messages in each


class Addresses:
    """A loader that keeps only the addresses."""

    def __init__(self) -> None:
        self.found = array("Q")

    def load_snapshot(self, snapshot: bytes) -> None:
        pass

    def load_rows(self, rows: bytes) -> None:
        fields = array("Q", rows)
        self.found.extend(fields[::5])

    def load_record(self, record: Record) -> None:
        self.found.append(record.address)


def fatal(fault: Exception) -> None:
    sys.exit(str(fault))


def build(first: int, count: int) -> bytes:
    frame = BytesWriter()
    for seq in range(first, first + count):
        write_record(frame, MESSAGE, 0, seq % 8, seq, 0, 0, 1_700_000_000_000, BODY)
    return frame.getvalue()


class Bench:
    def __init__(self, directory: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.store = EmbeddedStore(directory, self.loop.call_soon_threadsafe, fatal)
        self.past = Addresses()
        self.report: RecoveryReport = self.store.open(self.past)

    async def commit(self, frame: bytes, count: int, sync: bool = True) -> None:
        done = self.loop.create_future()
        self.store.commit(frame, count, sync, lambda: done.set_result(None))
        await done

    async def snapshot(self, free: list[int]) -> None:
        done = self.loop.create_future()
        self.store.snapshot(b"", free, lambda: done.set_result(None))
        await done

    async def fill(self, messages: int, batch: int, keep: bool, sync: bool = True) -> None:
        for first in range(0, messages, batch):
            await self.commit(build(first, batch), batch, sync)
            if self.store.is_snapshot_due():
                segments = list(self.store.segment_sizes())
                await self.snapshot([] if keep else segments[:-1])

    async def read(self, addresses: list[int]) -> list[bytes | None]:
        done = self.loop.create_future()
        self.store.read(addresses, done.set_result)
        answer: list[bytes | None] = await done
        return answer


async def measure_commits(directory: str) -> None:
    print(f"\n{'batch':>6} {'sync':>9} {'msg/s':>9} {'CPU us/msg':>11} {'build':>6}")
    for sync in (True, False):
        for batch, messages in BATCHES.items():
            shutil.rmtree(directory, ignore_errors=True)
            bench = Bench(directory)
            await bench.fill(batch * 10, batch, keep=False)
            wall, cpu = time.perf_counter(), time.process_time()
            await bench.fill(messages, batch, keep=False, sync=sync)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            bench.store.close()
            begin = time.process_time()
            for first in range(0, min(messages, 50_000), batch):
                build(first, batch)
            making = (time.process_time() - begin) / min(messages, 50_000)
            word = "each" if sync else "interval"
            rate = messages / wall
            print(
                f"{batch:6} {word:>9} {rate:9.0f} {cpu / messages * 1e6:11.2f} {making * 1e6:6.2f}"
            )


async def measure_waits(directory: str) -> None:
    print(f"\n{'batch':>6} {'p50 us':>8} {'p90':>8} {'p99':>8} {'CPU us/commit':>14}")
    for batch, commits in WAITS.items():
        shutil.rmtree(directory, ignore_errors=True)
        bench = Bench(directory)
        await bench.fill(batch * 10, batch, keep=False)
        frame = build(0, batch)
        waits: list[float] = []
        cpu = time.process_time()
        for _ in range(commits):
            begin = time.perf_counter()
            await bench.commit(frame, batch)
            waits.append((time.perf_counter() - begin) * 1e6)
        cpu = time.process_time() - cpu
        bench.store.close()
        waits.sort()
        p50, p90, p99 = (waits[int(commits * share)] for share in (0.5, 0.9, 0.99))
        print(f"{batch:6} {p50:8.0f} {p90:8.0f} {p99:8.0f} {cpu / commits * 1e6:14.1f}")


async def measure_reads(directory: str) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    bench = Bench(directory)
    addresses: list[int] = []
    for first in range(0, 100_000, 1000):
        at = bench.store.next_frame_address()
        addresses += range(at, at + 1000 * (HEADER_BYTES + len(BODY)), HEADER_BYTES + len(BODY))
        await bench.commit(build(first, 1000), 1000)
    print(f"\n{'reads':>10} {'at once':>8} {'msg/s':>9} {'CPU us/msg':>11}")
    for word, order in (
        ("in order", addresses),
        ("by lot", random.Random(2).sample(addresses, 100_000)),
    ):
        for count in (10, 100, 1000):
            wall, cpu = time.perf_counter(), time.process_time()
            for nth in range(0, 50_000, count):
                assert None not in await bench.read(order[nth : nth + count])
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(f"{word:>10} {count:8} {50_000 / wall:9.0f} {cpu / 50_000 * 1e6:11.2f}")
    bench.store.close()


def memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1e6


async def measure_open(directory: str) -> None:
    before = memory_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    bench = Bench(directory)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    report = bench.report
    gc.collect()
    print(
        f"{len(bench.past.found)} messages, "
        f"{report.records} of them from frames after the snapshot, "
        f"{report.rebuilt_indexes} indexes made again: {wall:.2f} s, CPU {cpu:.2f} s, "
        f"memory {before:.0f} -> {memory_mb():.0f} MB"
    )
    bench.store.close()


def measure_starts(directory: str, messages: int) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    again = [
        sys.executable,
        __file__,
        "--directory",
        directory,
        "--messages",
        str(messages),
        "--part",
    ]
    subprocess.run([*again, "fill"], check=True)
    print("\nstart", flush=True)
    for _ in range(2):
        subprocess.run([*again, "open"], check=True)
    for index in list(Path(directory).glob("*.idx")):
        index.unlink()
    subprocess.run([*again, "open"], check=True)


async def run_part(part: str, directory: str, messages: int) -> None:
    if part == "commits":
        await measure_commits(directory)
    elif part == "waits":
        await measure_waits(directory)
    elif part == "reads":
        await measure_reads(directory)
    elif part == "open":
        await measure_open(directory)
    else:
        bench = Bench(directory)
        await bench.fill(messages, 500, keep=True)
        bench.store.close()


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--directory", default="bench-store")
    options.add_argument("--messages", type=int, default=1_000_000)
    options.add_argument("--part", choices=["commits", "waits", "reads", "starts", "fill", "open"])
    args = options.parse_args()
    if args.part in ("fill", "open"):
        uvloop.run(run_part(args.part, args.directory, args.messages))
        return
    print("compiled" if not protocol.__file__.endswith(".py") else "interpreted", flush=True)
    try:
        if args.part in (None, "commits"):
            uvloop.run(run_part("commits", args.directory, 0))
        if args.part in (None, "waits"):
            uvloop.run(run_part("waits", args.directory, 0))
        if args.part in (None, "reads"):
            uvloop.run(run_part("reads", args.directory, 0))
        if args.part in (None, "starts"):
            measure_starts(args.directory, args.messages)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)


if __name__ == "__main__":
    main()
