"""Measure what monitoring costs: queue throughput with and without admin load.

    python bench/admin.py HARNESS [--rounds 5] [--secs 3] [--case q1k]

HARNESS is the folder of the load harness (mqload built in it, or in $SL_BIN). One broker runs a
case of the harness alternately without and with admin load: one scrape of /metrics each second, one
client of the live stream, 50 mixed REST reads per second. Prints messages per second, messages per
second of broker CPU, and the median of the ratios of each round. `sluice` is the command on the
PATH, or $SLUICE. The only target is 127.0.0.1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import run_case, start_broker

CALLS_PER_SECOND = 50
QUEUE = "bench$q1"
RATE, PER_CPU = "deliv_per_s", "msgs_per_cpu_s"  # field names of mqload
READS = (
    "/api/v1/queues",
    f"/api/v1/queues/{QUEUE}/stats",
    f"/api/v1/queues/{QUEUE}",
    f"/api/v1/queues/{QUEUE}/groups",
    f"/api/v1/queues/{QUEUE}/consumers",
    f"/api/v1/queues/{QUEUE}/messages?limit=10",
    f"/api/v1/queues/{QUEUE}/dlq",
    f"/api/v1/queues/{QUEUE}/diagnosis",
    "/api/v1/node",
    "/healthz",
)


class ApiConnection:
    """A persistent HTTP connection without a client library.

    The load shares its core with the generator, and a library would use more CPU than the requests
    cost the broker.
    """

    def __init__(self, root: str) -> None:
        self._host, _, self._port = root.removeprefix("http://").partition(":")
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def request(self, path: str) -> asyncio.StreamReader:
        """Send a request; the caller reads the response."""
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: {self._host}\r\n\r\n".encode())
        return self._reader

    async def get(self, path: str) -> bool:
        """Read a response and return whether its status is 200."""
        reader = await self.request(path)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
        return head.startswith(b"http/1.1 200 ")

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


async def load(root: str) -> None:
    """Generate admin load until SIGTERM; then print one line of JSON about it."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    took: list[float] = []
    counts = {"calls": 0, "failed": 0, "scrapes": 0, "events": 0}
    lines = [ApiConnection(root) for _ in range(3)]

    async def call() -> None:
        began = time.perf_counter()
        nth = 0
        while not stop.is_set():
            asked = time.perf_counter()
            counts["failed"] += not await lines[0].get(READS[nth % len(READS)])
            counts["calls"] += 1
            took.append(time.perf_counter() - asked)
            nth += 1
            await asyncio.sleep(max(0.0, began + nth / CALLS_PER_SECOND - time.perf_counter()))
        counts["per_second"] = round(counts["calls"] / (time.perf_counter() - began))

    async def scrape() -> None:
        while True:
            counts["failed"] += not await lines[1].get("/metrics")
            counts["scrapes"] += 1
            await asyncio.sleep(1)

    async def listen() -> None:
        reader = await lines[2].request("/api/v1/live")
        async for line in reader:
            counts["events"] += line.startswith(b"event:")

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(scrape()), group.create_task(listen())]
        await call()
        for task in tasks:
            task.cancel()
    for line in lines:
        line.close()
    print(json.dumps({**counts, "median_ms": round(statistics.median(took) * 1000, 1)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="What admin load costs queue throughput.")
    parser.add_argument("harness", help="folder of the load harness, or the word load")
    parser.add_argument("root", nargs="?", default="", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--secs", type=float, default=3.0)
    parser.add_argument("--case", default="q1k")
    parser.add_argument("--core", default="1", help="of the broker")
    parser.add_argument("--gen-core", default="0", help="of the generator and the admin load")
    options = parser.parse_args()
    if options.harness == "load":
        asyncio.run(load(options.root))
        return
    harness = Path(options.harness).resolve()
    sys.path.insert(0, str(harness))
    import compare

    mqload = str(Path(os.environ.get("SL_BIN", harness)) / "mqload")
    arguments: list[str] = compare.CASES[options.case][1]
    rows: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        broker, facts = start_broker(folder, options.core, grpc="127.0.0.1:0")
        try:
            run_case(mqload, arguments, facts, options)  # warm up, and create the queue
            for _ in range(options.rounds):
                alone = run_case(mqload, arguments, facts, options)
                watcher = subprocess.Popen(
                    [
                        "taskset",
                        "-c",
                        options.gen_core,
                        sys.executable,
                        __file__,
                        "load",
                        f"http://{facts['http']}",
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                time.sleep(1)
                watched = run_case(mqload, arguments, facts, options)
                watcher.terminate()
                args = watcher.communicate(timeout=20)[0]
                rows.append((alone, watched, json.loads(args)))
                print(f"  {show(alone)}   watched: {show(watched)}   {args.strip()}", flush=True)
        finally:
            broker.terminate()
            broker.wait(20)
    for key, name in (
        (RATE, "messages per second"),
        (PER_CPU, "messages per second of broker CPU"),
    ):
        before = statistics.median(alone[key] for alone, _, _ in rows)
        after = statistics.median(watched[key] for _, watched, _ in rows)
        ratio = statistics.median(watched[key] / alone[key] for alone, watched, _ in rows)
        print(
            f"{options.case}, {name}: {before:,.0f} alone, {after:,.0f} watched, ratio {ratio:.3f}"
        )


def show(row: dict[str, Any]) -> str:
    return f"{row[RATE]:,.0f}/s, {row[PER_CPU]:,.0f}/CPU-s"


if __name__ == "__main__":
    main()
