"""Measure a cluster: three nodes against one, on the same machine and Redis, and the cost of a hop.

    python bench/cluster.py                     20,000 messages of 1 KiB through eight queues
    python bench/cluster.py --messages 5000

One node is a `sluice serve` with its store in Redis and no cluster. Three nodes are a cluster with
`--cells` cells; publishers and workers are spread over the nodes, like clients that do not know
cells. In production every process has its own machine, so CPU counts here: microseconds of all
brokers, of Redis and of the clients per message. Also printed: messages per second, and the PUBACK
latency of single publishes if session and queue are on the client's node, if the queue is remote,
and if both are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from sluice.bench.procfs import cpu_of
from sluice.client import Client
from sluice.placement import cell_of, cell_of_queue

BODY = os.urandom(1024)
QUEUES = 8
WINDOW = 64
READY = re.compile(rb"mqtt=127\.0\.0\.1:(\d+)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Process:
    def __init__(self, words: list[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=log)

    def cpu(self) -> float:
        return cpu_of(self._process.pid)

    def ready(self) -> int:
        assert self._process.stdout is not None
        found = READY.search(self._process.stdout.readline())
        assert found is not None, "the node did not start"
        return int(found[1])

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


class Cluster:
    """Start `count` nodes; one is a broker without a cluster."""

    def __init__(self, folder: Path, redis: str, count: int, cells: int) -> None:
        self.cells = cells
        self.nodes = [self._start(folder / f"node{nth}", redis, count, nth) for nth in range(count)]
        self.ports = [node.ready() for node in self.nodes]

    def _start(self, folder: Path, redis: str, count: int, nth: int) -> Process:
        folder.mkdir(parents=True)
        config = f'[redis]\nprefix = "bench{count}"\n'
        if count > 1:
            config += (
                f'[cluster]\ncoordinator = "redis"\nnode = "node{nth}"\ncells = {self.cells}\n'
            )
            config += 'listen = "127.0.0.1:0"\n'
        (folder / "sluice.toml").write_text(config)
        words = [
            sys.executable,
            "-m",
            "sluice",
            "serve",
            "--config",
            "sluice.toml",
            "--store",
            redis,
        ]
        for listener in ("--mqtt", "--http", "--grpc"):
            words += [listener, "127.0.0.1:0"]
        return Process(words, folder)

    def cpu(self) -> float:
        return sum(node.cpu() for node in self.nodes)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


async def publish(port: int, queue: str, count: int, name: str) -> None:
    async with Client(port=port, client_id=name) as client:
        waiting: set[asyncio.Task[object]] = set()
        for nth in range(count):
            waiting.add(
                asyncio.create_task(
                    client.publish(
                        f"$queue/{queue}", BODY, qos=1, user=[("partition-key", str(nth % 100))]
                    )
                )
            )
            if len(waiting) >= WINDOW:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*waiting)


async def work(port: int, queue: str, count: int, name: str) -> None:
    async with Client(port=port, client_id=name) as client, client.consumer(queue) as tasks:
        done = 0
        async for task in tasks:
            await task.ack()
            done += 1
            if done == count:
                return


async def load(cluster: Cluster, redis: Process, messages: int, title: str) -> float:
    each = messages // QUEUES
    ports = cluster.ports
    before = cluster.cpu(), redis.cpu(), time.process_time(), time.perf_counter()
    jobs = []
    for nth in range(QUEUES):
        jobs.append(publish(ports[nth % len(ports)], f"load/{nth}", each, f"maker-{nth}"))
        jobs.append(work(ports[(nth + 1) % len(ports)], f"load/{nth}", each, f"worker{nth}-1"))
    await asyncio.gather(*jobs)
    after = cluster.cpu(), redis.cpu(), time.process_time(), time.perf_counter()
    brokers, store, clients, seconds = (end - start for end, start in zip(after, before))
    total = each * QUEUES
    cost = brokers / total * 1e6
    print(
        f"{title:12} {total / seconds:8.0f} msg/s   CPU us/msg: brokers {cost:6.0f}  "
        f"redis {store / total * 1e6:5.0f}  clients {clients / total * 1e6:5.0f}"
    )
    return cost


async def round_trip(port: int, name: str, queue: str) -> float:
    times = []
    async with Client(port=port, client_id=name) as client:
        for nth in range(300):
            began = time.perf_counter()
            await client.publish(f"$queue/{queue}", b"x", qos=1)
            if nth >= 50:
                times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e3


async def hops(cluster: Cluster, one: Cluster) -> None:
    """Measure the latency of hops. The location of cells is inferred: local queues and clients are
    the fastest of many.
    """
    port = cluster.ports[0]
    queues = {
        cell: f"hop{n}x"
        for n in range(500)
        if (cell := cell_of_queue(f"hop{n}x", cluster.cells)) >= 0
    }
    names = {
        cell: f"hopper{n}x"
        for n in range(500)
        if (cell := cell_of(f"hopper{n}x", cluster.cells)) >= 0
    }
    print(
        "a broker alone, queue in Redis:       "
        f"p50 {await round_trip(one.ports[0], 'alone', 'hop'):6.2f} ms"
    )
    found = {}
    for cell in list(queues)[:8]:
        for home in list(names)[:4]:
            found[home, cell] = await round_trip(port, names[home], queues[cell])
    times = sorted(found.values())
    middle = statistics.median(times)
    print(
        "through a node of three, p50 of the best pair of session and queue,"
        " the middle one, the worst:"
    )
    print(f"    {times[0]:.2f} ms   {middle:.2f} ms   {times[-1]:.2f} ms")


async def main(messages: int, cells: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        port = free_port()
        words = [
            "redis-server",
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            name,
        ]
        redis = Process(words, folder / "redis")
        url = f"redis://127.0.0.1:{port}"
        await asyncio.sleep(0.5)
        one, three = (
            Cluster(folder / "one", url, 1, cells),
            Cluster(folder / "three", url, 3, cells),
        )
        try:
            alone = await load(one, redis, messages, "one node")
            together = await load(three, redis, messages, "three nodes")
            print(f"CPU of the brokers per message, three to one: {together / alone:.2f}")
            await hops(three, one)
        finally:
            one.stop()
            three.stop()
            redis.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--cells", type=int, default=60)
    given = parser.parse_args()
    uvloop.run(main(given.messages, given.cells))
