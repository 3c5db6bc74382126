"""Real nodes of a cluster, each its own `sluice serve`, and load that runs during failures."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from sluice.client import Backoff, Client, ClientError
from tests.support.broker_process import Broker
from tests.support.redis_process import free_port

CELLS = 12
IDLE_SECONDS = 60.0  # without progress: then missing messages are lost


class Nodes:
    def __init__(
        self,
        folder: Path,
        store: str,
        config: str,
        coordinator: str = "redis",
        endpoint: str = "",
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = {"SLUICE_CLUSTER__COORDINATOR": coordinator, **(environ or {})}
        self._endpoint = endpoint  # of etcd
        self._folder = folder
        self._store = store
        self._config = config
        self.by_name: dict[str, Broker] = {}
        self._ports: dict[str, int] = {}

    def start(self, name: str) -> Broker:
        """Start a node, always with the same addresses, as an operator would."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        config = (
            f'{self._config}\n[cluster]\nnode = "{name}"\ncells = {CELLS}\n{self.settings_of(name)}'
        )
        config += f'name = "{self._folder.name}"\n[redis]\nprefix = "{self._folder.name}"\n'
        port = self._ports.setdefault(name, free_port())
        flags = ["--store", self._store, "--mqtt", f"127.0.0.1:{port}"]
        node = Broker(folder, config, flags, self._environ)
        self.by_name[name] = node
        return node

    def settings_of(self, name: str) -> str:
        """Return the settings for the link and the coordinator of a node."""
        found = 'listen = "127.0.0.1:0"\n'
        return f'{found}etcd_endpoints = ["{self._endpoint}"]\n' if self._endpoint else found

    def port(self, name: str) -> int:
        return self._ports[name]

    def owners(self, name: str) -> list[str | None]:
        """Return the owner of each cell, as this node sees it."""
        cells = {one["cell"]: one["node"] for one in self.cluster(name)["cells"]}
        return [cells.get(number) for number in range(CELLS)]

    def cluster(self, name: str) -> dict[str, Any]:
        address = self.by_name[name].address("http")
        answer = httpx.get(f"http://{address}/api/v1/cluster", timeout=10, trust_env=False)
        found: dict[str, Any] = answer.json()
        return found

    def ledger(self, name: str, queue: str) -> dict[str, int]:
        """Return the non-zero ledger counters of a queue's first group."""
        address = self.by_name[name].address("http")
        path = f"http://{address}/api/v1/queues/{queue.replace('/', '$')}/groups"
        answer = httpx.get(path, timeout=10, trust_env=False)
        groups = answer.json() if answer.status_code == 200 else []
        ledger = groups[0]["ledger"] if groups else {}
        return {what: count for what, count in ledger.items() if count and what != "enqueued"}

    def kill(self, name: str) -> None:
        self.by_name.pop(name).kill()

    def signal(self, name: str, number: signal.Signals) -> None:
        self.by_name[name].process.send_signal(number)

    def log(self, name: str) -> str:
        return (self._folder / name / "broker.log").read_text()

    def stop(self) -> None:
        for node in self.by_name.values():
            node.stop()


class ClusterLoad:
    """Publishers and workers at every node, on several queues. `check` verifies the promises."""

    def __init__(
        self, nodes: Nodes | Mapping[str, int], names: Sequence[str], queues: int = 4, keys: int = 3
    ) -> None:
        self._nodes = nodes if isinstance(nodes, Nodes) else None
        self._ports = [
            nodes.port(name) if isinstance(nodes, Nodes) else nodes[name] for name in names
        ]
        self._prefix = f"work{time.monotonic_ns()}"
        self._queues = [f"{self._prefix}/{nth}" for nth in range(queues)]
        self._keys = keys
        self._tasks: list[asyncio.Task[None]] = []
        self._publishing = True
        self.confirmed: set[str] = set()
        self.done: list[str] = []  # in the order of the first delivery
        self.gaps: list[float] = []
        self._seen: set[str] = set()

    async def __aenter__(self) -> Self:
        for nth, queue in enumerate(self._queues):
            port = self._ports[nth % len(self._ports)]
            other_port = self._ports[(nth + 1) % len(self._ports)]
            self._tasks.append(asyncio.create_task(self._publish(queue, port, f"maker-{nth}")))
            self._tasks.append(asyncio.create_task(self._work(queue, other_port, f"worker{nth}-1")))
        await self.more(10)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def more(self, count: int) -> None:
        """Wait until every queue has processed `count` more messages."""
        targets = {queue: self._done_of(queue) + count for queue in self._queues}
        async with asyncio.timeout(60):
            while any(self._done_of(queue) < target for queue, target in targets.items()):
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.02)

    def _done_of(self, queue: str) -> int:
        return sum(1 for one in self.done if one.startswith(f"{queue}:"))

    async def check(self) -> None:
        """Check that no confirmed message is lost and that each key was received in order."""
        self._publishing = False
        seen, until = -1, 0.0
        while missing := self.confirmed - self._seen:
            if len(self._seen) != seen:
                seen, until = len(self._seen), time.monotonic() + IDLE_SECONDS
            if time.monotonic() > until:
                raise AssertionError(await asyncio.to_thread(self._describe, missing))
            await asyncio.sleep(0.05)
        last: dict[str, int] = {}
        for one in self.done:
            key, _, number = one.rpartition(":")
            assert int(number) > last.get(key, -1), f"{one} came after {last[key]}"
            last[key] = int(number)

    def _describe(self, missing: set[str]) -> str:
        """Describe missing messages, with the ledgers of their queues."""
        lines = [f"{len(missing)} of {len(self.confirmed)} confirmed messages do not come"]
        node = next(iter(self._nodes.by_name.values())) if self._nodes is not None else None
        for queue in sorted({one.partition(":")[0] for one in missing}):
            numbers = sorted(
                int(one.rpartition(":")[2]) for one in missing if one.startswith(f"{queue}:")
            )
            lines.append(
                f"{queue}: {len(numbers)} from {numbers[0]} to {numbers[-1]}: {numbers[:20]}"
            )
            if node is None:
                continue
            for command_line in (("queue", "show", queue), ("consumers", queue), ("doctor", queue)):
                command = [
                    sys.executable,
                    "-m",
                    "sluice",
                    *command_line,
                    "--url",
                    f"http://{node.address('http')}",
                ]
                lines.append(
                    subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
                )
        return "\n".join(lines)

    def longest_gap(self) -> float:
        """Return the longest time that a publisher waited for an answer."""
        return max(self.gaps, default=0.0)

    async def _publish(self, queue: str, port: int, client_id: str) -> None:
        async with Client(
            port=port,
            client_id=client_id,
            backoff=Backoff(0.05, 0.2),
            connect_timeout=20,
            clean_start=False,
            session_expiry=600,
        ) as client:
            number = 0
            while self._publishing:
                key = f"k{number % self._keys}"
                text = f"{queue}:{key}:{number}"
                started_at = time.monotonic()
                await client.publish(f"$queue/{queue}", text, qos=1, user=[("partition-key", key)])
                self.gaps.append(time.monotonic() - started_at)
                self.confirmed.add(text)
                number += 1
                await asyncio.sleep(0.005)
            await asyncio.Event().wait()

    async def _work(self, queue: str, port: int, client_id: str) -> None:
        while True:
            try:
                await self._consume(queue, port, client_id)
            except (ClientError, OSError):
                await asyncio.sleep(0.1)

    async def _consume(self, queue: str, port: int, client_id: str) -> None:
        client = Client(
            port=port, client_id=client_id, backoff=Backoff(0.05, 0.2), connect_timeout=20
        )
        async with client, client.consumer(queue) as tasks:
            async for task in tasks:
                text = task.payload.decode()
                if text not in self._seen:
                    self._seen.add(text)
                    self.done.append(text)
                await task.ack()
