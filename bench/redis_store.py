"""Measure the Redis store against a bare pipelined Redis client, and the embedded store.

    python bench/redis_store.py                 batches of 10, 100, 1000 messages of 1 KiB
    python bench/redis_store.py --fsync always  with a Redis that syncs before it answers
    python bench/redis_store.py --cache 0       every body is read back from the store

The work: store a batch of messages in eight partitions, deliver and settle it. The bare client
packs with hiredis and needs three round trips per batch (MULTI XADD ... EXEC; XREADGROUP of each
stream; MULTI XACK, XDEL ... EXEC). The stores run below the real engine, with one group whose
consumer acknowledges everything: two frames per batch. Recently published messages are delivered
from the engine's body cache, as in a broker that keeps up: the store reads nothing back, while the
bare client transfers every body by XREADGROUP. That favors the store; `--cache 0`, as with a long
backlog, does not. The script starts its own Redis on a free port. Rounds are interleaved. Prints
the median messages per second, and CPU microseconds per message of this process and of Redis.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hiredis
import redis
import uvloop

from sluice.bench.procfs import cpu_of
from sluice.message import Message
from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Consumer
from sluice.queues.ports import Publisher
from sluice.queues.recovery.note_decoder import QueueNoteDecoder
from sluice.queues.service.queue_config import read_config
from sluice.store.embedded.store import EmbeddedStore
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.store import RedisStore

BODY = random.Random(1).randbytes(1024)
PARTITIONS = 8
BATCHES = (10, 100, 1000)


def fatal(fault: Exception) -> None:
    sys.exit(str(fault))


class Server:
    def __init__(self, folder: Path, fsync: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        args = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "dir": str(folder)}
        args |= {"appendonly": "yes", "appendfsync": fsync, "auto-aof-rewrite-percentage": "0"}
        words = [word for name, value in args.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen(["redis-server", *words], stdout=subprocess.DEVNULL)
        while True:
            try:
                redis.Redis(port=self.port).ping()
                return
            except redis.ConnectionError:
                time.sleep(0.05)

    def cpu(self) -> float:
        return cpu_of(self.process.pid)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class BareClient:
    """A blocking socket and hiredis."""

    def __init__(self, port: int, prefix: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        self._streams = [f"{prefix}:{nth}" for nth in range(PARTITIONS)]
        self._next = 0
        self._ask([("XGROUP", "CREATE", name, "g", "0", "MKSTREAM") for name in self._streams])

    def _ask(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        pack: Callable[[Any], bytes] = hiredis.pack_command
        self._socket.sendall(b"".join([pack(command) for command in commands]))
        answers: list[Any] = []
        while len(answers) < len(commands):
            answer = self._reader.gets()
            if answer is False:
                self._reader.feed(self._socket.recv(1 << 20))
            else:
                answers.append(answer)
        return answers

    def run(self, batch: int, count: int) -> None:
        for _ in range(count // batch):
            adds: list[tuple[Any, ...]] = []
            for _ in range(batch):
                self._next += 1
                name = self._streams[self._next % PARTITIONS]
                adds.append(("XADD", name, f"{self._next}-1", "record", BODY))
            self._ask([("MULTI",), *adds, ("EXEC",)])
            share = batch // PARTITIONS + 1
            reads = [
                ("XREADGROUP", "GROUP", "g", "c", "COUNT", share, "STREAMS", name, ">")
                for name in self._streams
            ]
            ends: list[tuple[Any, ...]] = []
            for answer in self._ask(reads):
                if answer:
                    ((name, entries),) = answer
                    ids = [entry for entry, _ in entries]
                    ends += [("XACK", name, "g", *ids), ("XDEL", name, *ids)]
            self._ask([("MULTI",), *ends, ("EXEC",)])


class NullConsumer(Consumer):
    """Acknowledges every delivery, a turn later."""

    def __init__(self) -> None:
        super().__init__("eater", 1_000_000, 0, False)
        self.got: list[Lease] = []
        self.wanted = 0
        self.has_all = asyncio.Event()

    def deliver(self, lease: Lease) -> None:
        self.got.append(lease)
        if len(self.got) == self.wanted:
            self.has_all.set()


class StoreBench:
    def __init__(self, make: Callable[[Engine], Any], args: argparse.Namespace) -> None:
        loop = asyncio.get_running_loop()
        config = read_config(
            {"partitions": PARTITIONS, "limits": {"max_queue_depth": 10_000_000}}, "q"
        )
        self.engine = Engine(
            lambda name: (config.rules(), config.as_json()), random.random, args.cache
        )
        self.store = make(self.engine)
        self.runner = CommitLoop(
            self.engine,
            self.store,
            time.time,
            loop.call_later,
            lambda: None,
            lambda alerts, words: None,
        )
        self.runner.open(lambda name, text: read_config(json.loads(text), name).rules())
        if isinstance(self.store, RedisStore):
            self.store.start_views()
            self._look()
        self.queue = self.engine.lifecycle.get_or_create_queue("q")
        self.eater = NullConsumer()
        self.engine.dispatch.join(
            self.engine.lifecycle.get_or_create_group(self.queue, "g"), self.eater
        )

    def _look(self) -> None:
        """Do the work as the broker does: pending lists, counters, trimming."""
        if isinstance(self.store, RedisStore):
            self.store.poll_views(time.time())
            asyncio.get_running_loop().call_later(RedisOptions().poll_seconds, self._look)

    async def wait_committed(self) -> None:
        done = asyncio.get_running_loop().create_future()
        self.runner.end_turn()
        self.runner.after_commit(lambda: done.set_result(None))
        await done

    async def run(self, batch: int, count: int) -> None:
        author = Publisher()
        for _ in range(count // batch):
            self.runner.begin_turn()
            for nth in range(batch):
                self.engine.publishing.publish(self.queue, Message(BODY), author, nth)
            self.eater.wanted = batch
            self.eater.has_all.clear()
            await self.wait_committed()
            await self.eater.has_all.wait()
            got, self.eater.got = self.eater.got, []
            for lease in got:
                self.engine.settlement.ack(lease)
            await self.wait_committed()


async def measure(args: argparse.Namespace, folder: Path, server: Server) -> None:
    loop = asyncio.get_running_loop()
    bare = BareClient(server.port, "bare")

    def in_redis(engine: Engine) -> RedisStore:
        url = f"redis://127.0.0.1:{server.port}"
        return RedisStore(
            url,
            loop.call_soon_threadsafe,
            fatal,
            note_decoder=QueueNoteDecoder(engine),
            options=RedisOptions(),
        )

    def on_disk(engine: Engine) -> EmbeddedStore:
        return EmbeddedStore(str(folder / "log"), loop.call_soon_threadsafe, fatal)

    stores = {"redis": StoreBench(in_redis, args), "embedded": StoreBench(on_disk, args)}
    print(f"appendfsync {args.fsync}; per message: µs of CPU here + in Redis")
    for batch in BATCHES:
        count = max(batch, min(args.messages, batch * 1000))
        speeds: dict[str, list[float]] = {}
        costs: dict[str, list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            for name in ("bare", *stores):
                start, ours, theirs = time.perf_counter(), time.process_time(), server.cpu()
                if name == "bare":
                    bare.run(batch, count)
                else:
                    await stores[name].run(batch, count)
                speeds.setdefault(name, []).append(count / (time.perf_counter() - start))
                cost = (time.process_time() - ours, server.cpu() - theirs)
                costs.setdefault(name, []).append((cost[0] / count * 1e6, cost[1] / count * 1e6))
        base = statistics.median(speeds["bare"])
        for name, found in speeds.items():
            speed = statistics.median(found)
            ours, theirs = (statistics.median(one[nth] for one in costs[name]) for nth in (0, 1))
            whole = sum(statistics.median(one[nth] for one in costs["bare"]) for nth in (0, 1))
            print(
                f"batch {batch:5} {name:9} {speed:9,.0f} msg/s  {speed / base:5.2f} of bare"
                f"   {ours:6.1f} + {theirs:5.1f}  {whole / (ours + theirs):5.2f} of bare by CPU",
                flush=True,
            )
    for one in stores.values():
        one.runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The store in Redis beside a bare pipelined client."
    )
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cache", type=int, default=16_777_216, help="bytes of bodies kept in memory"
    )
    parser.add_argument("--fsync", choices=("everysec", "always"), default="everysec")
    args = parser.parse_args()
    sys.setswitchinterval(0.0005)
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=".") as folder:
        server = Server(Path(folder), args.fsync)
        try:
            uvloop.run(measure(args, Path(folder).resolve(), server))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
