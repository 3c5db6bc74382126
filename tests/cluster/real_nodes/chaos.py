"""Three real nodes under load while random ones are killed, paused, cut off or restarted.

Checked promises: no confirmed message is lost, the messages of each key arrive in order, and a cell
never has two owners that write (`owner_epochs`). Measured: how long after a failure every queue
accepts publishes again through the remaining nodes (recovery), how long after a join every cell is
at its planned node (rebalance), and how much a hop to another node adds to a publish.

A cut-off node keeps its clients and its Redis: it loses the other nodes and the coordinator.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from sluice.client import Backoff, Client, ConnectFailed
from sluice.placement import cell_of, cell_of_queue
from tests.cluster.real_nodes.node_processes import CELLS, ClusterLoad, Nodes
from tests.cluster.real_nodes.owner_epochs import OwnerEpochs, refused
from tests.support.etcd_process import EtcdProcess
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_process import RedisProcess, free_port

NAMES = ("one", "two", "three")
PROBES = [f"probe/{nth}" for nth in range(CELLS * 2)]  # in almost every cell
OUTAGE_SECONDS = (3.0, 7.0)  # how long a node is paused or cut off
HOPS = 200
RECOVERY_SECONDS = 5.0  # promised
REBALANCE_SECONDS = 1.0
HOP_SECONDS = 0.005


class ProxiedNodes(Nodes):
    """Nodes whose links to other nodes and to etcd can be cut."""

    def __init__(
        self, folder: Path, store: str, etcd: EtcdProcess | None, stack: ExitStack
    ) -> None:
        super().__init__(folder, store, "", "redis" if etcd is None else "etcd")
        self.proxies: dict[str, list[FaultProxy]] = {}
        self._settings: dict[str, str] = {}
        self._links: dict[str, int] = {}
        stack.callback(self._close)
        for name in NAMES:
            port = self._links[name] = free_port()
            link = FaultProxy(port, free_port())
            self.proxies[name] = [link]
            self._settings[name] = (
                f'listen = "127.0.0.1:{port}"\nadvertise_link = "127.0.0.1:{link.port}"\n'
            )
            if etcd is not None:
                proxy = FaultProxy(etcd.port)
                self.proxies[name].append(proxy)
                self._settings[name] += f'etcd_endpoints = ["127.0.0.1:{proxy.port}"]\n'

    def settings_of(self, name: str) -> str:
        return self._settings[name]

    def refuse(self, name: str) -> None:
        """Refuse connections, as the host of a dead process does."""
        self.proxies[name][0].close()

    def reconnect(self, name: str) -> None:
        self.proxies[name][0] = FaultProxy(self._links[name], self.proxies[name][0].port)

    def _close(self) -> None:
        for proxy in (one for proxies_of_node in self.proxies.values() for one in proxies_of_node):
            proxy.close()


class Chaos:
    def __init__(self, nodes: ProxiedNodes, seed: int, report: Callable[[str], None]) -> None:
        self.nodes = nodes
        self.recoveries: dict[str, list[float]] = {}
        self.rebalances: list[float] = []
        self._draw = random.Random(seed)
        self._report = report

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        actions = [self.kill, self.pause_node, self.partition, self.restart]
        async with ClusterLoad(self.nodes, NAMES, queues=6) as work:
            first = True
            while first or time.monotonic() < until:
                for action in self._draw.sample(actions, len(actions)):
                    if first or time.monotonic() < until:  # each action at least once
                        await self.settled()
                        await action(self._draw.choice(NAMES))
                first = False
            await self.settled()
            await work.check()
            self._report(
                f"{len(work.confirmed)} messages were confirmed, all of them came, "
                "in the order of their keys"
            )

    async def kill(self, name: str) -> None:
        self.nodes.kill(name)
        self.nodes.refuse(name)
        await self._recovered("killed", name)
        self.nodes.reconnect(name)
        await self._start(name)

    async def pause_node(self, name: str) -> None:
        self.nodes.signal(name, signal.SIGSTOP)
        try:
            started_at = time.monotonic()
            await self._recovered("paused", name)
            await asyncio.sleep(max(0.0, self._outage() - (time.monotonic() - started_at)))
        finally:
            self.nodes.signal(name, signal.SIGCONT)

    async def partition(self, name: str) -> None:
        for proxy in self.nodes.proxies[name]:
            proxy.hold()
        try:
            started_at = time.monotonic()
            await self._recovered("cut off", name)
            await asyncio.sleep(max(0.0, self._outage() - (time.monotonic() - started_at)))
        finally:
            for proxy in self.nodes.proxies[name]:
                proxy.cut()
                proxy.release()

    async def restart(self, name: str) -> None:
        node = self.nodes.by_name.pop(name)
        started_at = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(node.stop))
        await self._recovered("stopped", name, started_at)
        await stopping
        await self._start(name)

    def _outage(self) -> float:
        return self._draw.uniform(*OUTAGE_SECONDS)

    async def _start(self, name: str) -> None:
        """Start a node and wait until it is ready; the rebalance counts from its registration."""
        starting = asyncio.create_task(asyncio.to_thread(self.nodes.start, name))
        other = next(one for one in NAMES if one != name)
        seen_at = 0.0
        while True:
            found = await asyncio.to_thread(self.nodes.cluster, other)
            if not seen_at and any(one["name"] == name for one in found["nodes"]):
                seen_at = time.monotonic()
            if seen_at and found["moving"] == 0:
                break
            await asyncio.sleep(0.01)
        self.rebalances.append(time.monotonic() - seen_at)
        await starting

    async def settled(self) -> None:
        """Wait until all three nodes are members and every cell is at its planned node."""
        until = time.monotonic() + 60
        while True:
            found = [await asyncio.to_thread(self.nodes.cluster, name) for name in NAMES]
            if all(len(one["nodes"]) == 3 and one["moving"] == 0 and one["me"] for one in found):
                return
            if time.monotonic() > until:
                logs = "\n".join(f"--- {name}\n{self.nodes.log(name)[-3000:]}" for name in NAMES)
                raise AssertionError(f"the cluster does not settle: {found}\n{logs}")
            await asyncio.sleep(0.05)

    async def _recovered(self, action: str, name: str, started_at: float = 0.0) -> None:
        """Wait until every queue accepts a publish through every remaining node."""
        started_at = started_at or time.monotonic()
        left = [one for one in NAMES if one != name]
        await asyncio.gather(*(self._probe(one) for one in left))
        seconds = time.monotonic() - started_at
        self.recoveries.setdefault(action, []).append(seconds)
        self._report(
            f"{name} {action}: all {len(PROBES)} queues take publishes again after {seconds:.2f} s"
        )

    async def _probe(self, name: str) -> None:
        """Publish as a client of this node.

        A client whose session was at the killed node may be disconnected first and reconnects.
        """
        until = time.monotonic() + 30
        while True:
            try:
                return await self._publish_to_all(name)
            except ConnectFailed:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.02)

    async def _publish_to_all(self, name: str) -> None:
        async with Client(
            port=self.nodes.port(name),
            client_id=f"probe-{name}-{self._draw.random()}",
            backoff=Backoff(0.05, 0.2),
            connect_timeout=20,
        ) as client:
            await asyncio.gather(
                *(client.publish(f"$queue/{queue}", b"", qos=1) for queue in PROBES)
            )


async def measure_hop(nodes: ProxiedNodes, hops: int) -> float:
    """Return how much longer a publish to a queue of another node takes, at the median."""
    owners = {one["cell"]: one["node"] for one in nodes.cluster("one")["cells"]}
    local_queue = next(
        f"near-{n}" for n in range(999) if owners[cell_of_queue(f"near-{n}", CELLS)] == "one"
    )
    remote_queue = next(
        f"far-{n}" for n in range(999) if owners[cell_of_queue(f"far-{n}", CELLS)] == "two"
    )
    client_id = next(
        f"hopper-{n}" for n in range(999) if owners[cell_of(f"hopper-{n}", CELLS)] == "one"
    )
    async with Client(port=nodes.port("one"), client_id=client_id) as client:
        times: dict[str, list[float]] = {local_queue: [], remote_queue: []}
        for _ in range(hops):
            for queue, taken in times.items():
                started_at = time.perf_counter()
                await client.publish(f"$queue/{queue}", b"x" * 100, qos=1)
                taken.append(time.perf_counter() - started_at)
    return statistics.median(times[remote_queue]) - statistics.median(times[local_queue])


def check_epochs(folder: Path, late: int, report: Callable[[str], None]) -> None:
    found = OwnerEpochs().read(folder)
    assert not found.faults, f"two owners have written: {found.faults[:10]}"
    assert found.writes and len(found.taken) == CELLS, (
        "Redis has not stored the writes that were to be checked"
    )
    report(
        f"{found.writes} writes by {found.taken.total()} owners of {CELLS} cells, each by the last "
        f"owner that its cell had; {late} of former owners were refused"
    )


async def run_chaos(
    folder: Path,
    seconds: float,
    seed: int,
    coordinator: str,
    report: Callable[[str], None],
    hops: int = HOPS,
) -> list[str]:
    """Return the broken promises; empty if all hold."""
    with ExitStack() as stack:
        redis = RedisProcess(folder / "redis").start()
        stack.callback(redis.stop)
        etcd = None
        if coordinator == "etcd":
            etcd = EtcdProcess(folder / "etcd").start()
            stack.callback(etcd.stop)
        nodes = ProxiedNodes(folder, redis.url, etcd, stack)
        stack.callback(nodes.stop)
        await asyncio.gather(*(asyncio.to_thread(nodes.start, name) for name in NAMES))
        chaos = Chaos(nodes, seed, report)
        await chaos.settled()
        hop = await measure_hop(nodes, hops)
        report(f"a hop to another node adds {hop * 1000:.2f} ms to a publish (median of {hops})")
        await chaos.run(seconds)
        client = redis.client()
        late = refused(client)
        client.close()
    check_epochs(redis.directory, late, report)
    faults = []
    for action, found in sorted(chaos.recoveries.items()):
        report(
            f"{action}: {len(found)} times, recovery p50 {statistics.median(found):.2f} s, "
            f"max {max(found):.2f} s"
        )
        if max(found) > RECOVERY_SECONDS:
            faults.append(f"recovery after a node was {action} took {max(found):.2f} s")
    if chaos.rebalances:
        moves = chaos.rebalances
        report(
            f"rebalance after a join: p50 {statistics.median(moves):.2f} s, max {max(moves):.2f} s"
        )
        if statistics.median(moves) > REBALANCE_SECONDS:
            faults.append(f"a rebalance took {statistics.median(moves):.2f} s at the median")
    if hop > HOP_SECONDS:
        faults.append(f"a hop added {hop * 1000:.2f} ms")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster-chaos", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--coordinator", choices=("etcd", "redis"), default="etcd")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="sluice-chaos-", dir=base) as folder:
        faults = asyncio.run(
            run_chaos(
                Path(folder),
                arguments.seconds,
                arguments.seed,
                arguments.coordinator,
                lambda text: print(text, flush=True),
            )
        )
    for fault in faults:
        print(f"BROKEN: {fault}", file=sys.stderr)
    return 1 if faults else 0
