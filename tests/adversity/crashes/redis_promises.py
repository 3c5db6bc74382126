"""Break the Redis of a real `sluice serve` under load, and count what it had confirmed.

    scripts/redis-failover [--row NAME]... [--rounds N] [--seconds S]

A row is a Redis (one server, a master with replicas and Sentinels, a Redis Cluster), its settings,
and those of the broker: a row of the promise table in docs/redis.md. Each round starts all of it,
publishes with ids, breaks the master in one way, waits until messages are confirmed again, and then
reads the whole queue: every message that was confirmed must be there, once. A row that promises
nothing for a deed only counts; if the broker noticed a loss, it must have reported it.

    kill       kill -9 of the master, which comes back as a replica later
    behind     its replicas hang for a moment before, so that they have less
    pause      SIGSTOP of the master until another one is promoted
    isolate    replicas and Sentinels lose the master, the broker does not
    restart    kill -9 of a server without replicas, which starts again with its files
    replicas   all replicas hang for a while: no failover
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sluice.client import Client, ClientError
from sluice.store.redis.keys import RedisKeys
from tests.adversity.crashes.queue_crash import client_of
from tests.support.broker_process import Broker
from tests.support.external_programs import need_valkey
from tests.support.redis_process import RedisProcess
from tests.support.redis_topologies import ReplicatedCluster, ReplicatedRedis, until

PUBLISHERS = 4
WINDOW = 20
QUEUE = "promises"
BEHIND_SECONDS = 0.7
RESUME_SECONDS = 60.0
CONFIG = """
[redis]
lease = "2s"
renew = "200ms"
wait = "1s"
answer_timeout = "1s"
replica_timeout = "500ms"
poll = "50ms"
{settings}
[[queues.templates]]
match = "{queue}"
[queues.templates.config.limits]
max_queue_depth = 10000000
dedup_window = "1h"
"""


@dataclass(frozen=True)
class Row:
    """`lossless`: deeds after which nothing may be missing; `others`: deeds that only count."""

    name: str
    lossless: Sequence[str]
    others: Sequence[str] = ()
    replicas: int = 0
    sentinels: int = 3
    is_cluster: bool = False
    is_valkey: bool = False
    settings: str = ""  # of the broker
    redis: dict[str, str] = field(default_factory=dict)


REPLICATED = ("kill", "behind", "pause", "isolate")
ROWS = (
    Row("always", ["restart"]),
    Row("everysec", ["restart"], redis={"appendfsync": "everysec"}),
    Row("no-sync", ["restart"], redis={"appendfsync": "no"}),
    Row("no-file", [], ["restart"], redis={"appendonly": "no"}),
    Row("sentinel", [], REPLICATED, replicas=2),
    Row(
        "sentinel-1-of-2",
        ["kill", "pause", "isolate", "replicas"],
        replicas=2,
        settings="min_replicas = 1",
    ),
    Row("sentinel-1-of-1", REPLICATED, replicas=1, settings="min_replicas = 1"),
    Row("sentinel-2-of-2", REPLICATED, replicas=2, settings="min_replicas = 2"),
    Row(
        "sentinel-disk",
        ["kill", "pause", "isolate"],
        replicas=2,
        is_valkey=True,
        settings='min_replicas = 1\nreplica_ack = "disk"',
    ),
    Row("cluster", [], ["kill", "pause"], is_cluster=True),
    Row("cluster-1", ["kill", "pause"], is_cluster=True, settings="min_replicas = 1"),
)


class Topology:
    """The Redis of a row, and what can be done to it."""

    def __init__(self, row: Row, folder: Path) -> None:
        program = need_valkey() if row.is_valkey else ""
        self.single: RedisProcess | None = None
        self.replicated: ReplicatedRedis | None = None
        self.cluster: ReplicatedCluster | None = None
        if row.is_cluster:
            self.cluster = ReplicatedCluster(folder, program, **row.redis)
            self.url = self.cluster.url
        elif row.replicas:
            self.replicated = ReplicatedRedis(
                folder, row.replicas, row.sentinels, program, **row.redis
            )
            self.url = self.replicated.url
        else:
            self.single = RedisProcess(folder, 0, program, **row.redis)
            self.url = self.single.url

    def start(self) -> None:
        for one in (self.single, self.replicated, self.cluster):
            if one is not None:
                one.start()

    def stop(self) -> None:
        for one in (self.single, self.replicated, self.cluster):
            if one is not None:
                one.stop()

    def restart(self) -> None:
        assert self.single is not None
        self.single.kill()
        self.single.start()

    def kill(self) -> None:
        master = self._master()
        master.kill()
        self._await_promotion(master)
        master.start()

    def behind(self) -> None:
        assert self.replicated is not None
        for replica in self.replicated.replicas:
            replica.client().execute_command("REPLICAOF", "127.0.0.1", "1")
        time.sleep(BEHIND_SECONDS)
        self.kill()

    def pause(self) -> None:
        master = self._master()
        master.pause()
        try:
            self._await_promotion(master)
        finally:
            master.resume()

    def isolate(self) -> None:
        assert self.replicated is not None
        self.replicated.isolate_master()
        self.replicated.promoted()
        time.sleep(BEHIND_SECONDS)
        self.replicated.heal_master()

    def replicas(self) -> None:
        assert self.replicated is not None
        for replica in self.replicated.replicas:
            replica.pause()
        time.sleep(3 * BEHIND_SECONDS)
        for replica in self.replicated.replicas:
            replica.resume()

    def _master(self) -> RedisProcess:
        if self.cluster is not None:
            return self.cluster.master_of(RedisKeys("sluice").log)
        assert self.replicated is not None
        return self.replicated.master

    def _await_promotion(self, master: RedisProcess) -> None:
        if self.replicated is not None:
            self.replicated.promoted()
            return
        cluster = self.cluster
        assert cluster is not None
        log = RedisKeys("sluice").log
        others = [node for node in cluster.nodes if node is not master]
        until(lambda: cluster.master_of(log, others) is not master, "no promotion")


class Round:
    """One round: counts what was confirmed and what is there at the end."""

    def __init__(self, row: Row, deed: str, folder: Path) -> None:
        self.row = row
        self.deed = deed
        self._folder = folder
        self._topology = Topology(row, folder / "redis")
        self._config = CONFIG.format(settings=row.settings, queue=QUEUE)
        self._broker: Broker | None = None
        self._publishing = True
        self.sent: set[str] = set()
        self.confirmed: set[str] = set()
        self.present: Counter[str] = Counter()
        self.outage_seconds = 0.0
        self.broker_ends = 0
        self.reported: list[dict[str, object]] = []

    async def run(self, seconds: float) -> None:
        await asyncio.to_thread(self._topology.start)
        publishers: list[asyncio.Task[None]] = []
        try:
            await asyncio.to_thread(self._start_broker)
            publishers = [asyncio.create_task(self._publish(nth)) for nth in range(PUBLISHERS)]
            watching = asyncio.create_task(self._watch())
            publishers.append(watching)
            await self._await_confirmed(WINDOW)
            await asyncio.sleep(seconds)
            started_at = time.monotonic()
            deed: Callable[[], None] = getattr(self._topology, self.deed)
            await asyncio.to_thread(deed)
            await self._await_confirmed(2 * WINDOW)
            self.outage_seconds = time.monotonic() - started_at
            await asyncio.sleep(seconds)
            self._publishing = False
            await asyncio.gather(*publishers)
            await self._read_all()
            self.reported = await self._losses()
        finally:
            self._publishing = False
            for task in publishers:
                task.cancel()
            await asyncio.gather(*publishers, return_exceptions=True)
            if self._broker is not None:
                await asyncio.to_thread(self._broker.kill)
            await asyncio.to_thread(self._topology.stop)

    @property
    def lost(self) -> set[str]:
        return self.confirmed - set(self.present)

    @property
    def doubled(self) -> int:
        return sum(count - 1 for count in self.present.values())

    def faults(self) -> list[str]:
        found: list[str] = []
        if self.lost and self.deed in self.row.lossless:
            found.append(f"{len(self.lost)} confirmed messages are lost, e.g. {min(self.lost)}")
        if self.lost and self.broker_ends and not self.reported:
            found.append("a loss that ended the broker is not reported after its next start")
        if self.doubled and self.deed in self.row.lossless:
            found.append(f"{self.doubled} messages are stored twice")
        if self.deed in self.row.lossless and self.broker_ends:
            found.append("the broker ended although nothing was lost")
        return [f"{self.row.name} {self.deed}: {fault}" for fault in found]

    def line(self) -> str:
        return (
            f"{self.row.name:<16} {self.deed:<9} confirmed {len(self.confirmed):>6}  "
            f"lost {len(self.lost):>5}  twice {self.doubled:>3}  "
            f"service back after {self.outage_seconds:>5.1f} s  broker ended {self.broker_ends}  "
            f"reported {len(self.reported)}"
        )

    def _start_broker(self) -> None:
        self._broker = Broker(self._folder, self._config, ("--store", self._topology.url), {})

    async def _watch(self) -> None:
        """Start the broker again when it has ended, as a supervisor does."""
        while self._publishing:
            broker = self._broker
            assert broker is not None
            if broker.process.poll() is not None:
                self.broker_ends += 1
                broker.kill()
                with suppress(AssertionError):
                    await asyncio.to_thread(self._start_broker)
            await asyncio.sleep(0.1)

    async def _publish(self, publisher: int) -> None:
        number = 0
        open_names: list[str] = []
        while self._publishing:
            broker = self._broker
            assert broker is not None
            try:
                async with client_of(broker, f"publisher-{publisher}-{time.monotonic_ns()}") as one:
                    while self._publishing:
                        while len(open_names) < WINDOW:
                            number += 1
                            open_names.append(f"p{publisher}/{number}")
                        open_names = await self._publish_window(one, open_names)
            except (ClientError, OSError):
                await asyncio.sleep(0.1)

    async def _publish_window(self, client: Client, names: list[str]) -> list[str]:
        """Publish a window and return the names that were not confirmed."""
        waiting = []
        for name in names:
            self.sent.add(name)
            user = [("message-id", name)]
            waiting.append(
                client.publish_nowait(f"$queue/{QUEUE}", name.encode(), qos=1, user=user)
            )
        results = await asyncio.gather(*waiting, return_exceptions=True)
        unconfirmed: list[str] = []
        for name, result in zip(names, results):
            if isinstance(result, BaseException):
                unconfirmed.append(name)
            else:
                self.confirmed.add(name)
        if unconfirmed:
            await asyncio.sleep(0.05)
        return unconfirmed

    async def _await_confirmed(self, more: int) -> None:
        goal = len(self.confirmed) + more
        deadline = time.monotonic() + RESUME_SECONDS
        while len(self.confirmed) < goal:
            if time.monotonic() > deadline:
                assert self._broker is not None
                raise AssertionError(
                    f"nothing is confirmed any more\n{self._broker.log_text()[-4000:]}"
                )
            await asyncio.sleep(0.02)

    async def _read_all(self) -> None:
        """Read the whole queue with a new group."""
        assert self._broker is not None
        async with client_of(self._broker, "reader") as client:
            properties = [
                ("consumer-group", "reader"),
                ("ack-mode", "puback"),
                ("start", "earliest"),
            ]
            await client.subscribe(f"$queue/{QUEUE}", qos=1, user=properties)
            await client.publish(f"$queue/{QUEUE}", b"end", qos=1)
            messages = client.messages()
            while True:
                try:
                    async with asyncio.timeout(3.0 if self.present["end"] else 30.0):
                        message = await anext(messages)
                except TimeoutError:
                    break
                self.present[message.payload.decode()] += 1
        del self.present["end"]

    async def _losses(self) -> list[dict[str, object]]:
        assert self._broker is not None
        address = self._broker.facts["http"]
        async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
            answer = await http.get(f"http://{address}/api/v1/losses")
        found: list[dict[str, object]] = json.loads(answer.text)
        return found


async def run_round(row: Row, deed: str, folder: Path, seconds: float) -> Round:
    made = Round(row, deed, folder)
    await made.run(seconds)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/redis-failover", description=__doc__.split("\n")[0]
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--row", action="append", choices=names, help="default: all rows")
    parser.add_argument("--deed", action="append", help="default: all deeds of the row")
    parser.add_argument("--rounds", type=int, default=1, help="of each row and deed")
    parser.add_argument("--seconds", type=float, default=2.0, help="load before and after the deed")
    arguments = parser.parse_args()
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    faults: list[str] = []
    for _ in range(arguments.rounds):
        for row in ROWS:
            if row.name not in (arguments.row or names):
                continue
            for deed in (*row.lossless, *row.others):
                if deed not in (arguments.deed or [deed]):
                    continue
                with tempfile.TemporaryDirectory(prefix="sluice-redis-", dir=base) as folder:
                    try:
                        done = asyncio.run(run_round(row, deed, Path(folder), arguments.seconds))
                    except AssertionError as failure:
                        faults.append(f"{row.name} {deed}: {failure}")
                        print(f"{row.name:<16} {deed:<9} FAILED", flush=True)
                        continue
                print(done.line(), flush=True)
                faults += done.faults()
    for fault in faults:
        print(f"BROKEN: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
