"""A node with several processes, as its operator and its clients see it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from sluice.client import Client
from sluice.placement import cell_of_queue
from tests.cluster.kit import until
from tests.support.broker_process import Broker

CELLS = 4


class NodeOfProcesses:
    """A node that can be restarted with another number of processes, at the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = 0
        self.broker: Broker | None = None

    def start(self, processes: int, *flags: str, cells: int = CELLS, config: str = "") -> Broker:
        config += f"[processes]\ncells = {cells}\n"
        flags = ("--processes", str(processes), "--mqtt", f"127.0.0.1:{self._port}", *flags)
        self.broker = Broker(self._folder, config, flags, {})
        self._port = self.broker.mqtt.port
        return self.broker

    @property
    def port(self) -> int:
        return self._port

    def pids(self) -> dict[int, int]:
        """Return the process ids by number, as the supervisor has last logged them."""
        assert self.broker is not None
        found = re.findall(r"process started number=(\d+) pid=(\d+)", self.broker.log_text())
        return {int(number): int(pid) for number, pid in found}

    def get(self, path: str) -> httpx.Response:
        assert self.broker is not None
        address = self.broker.address("http")
        return httpx.get(f"http://{address}{path}", timeout=30, trust_env=False)

    def owner_numbers(self) -> list[int]:
        """Return the number of the process that owns each cell."""
        cells = self.get("/api/v1/cluster").json()["cells"]
        return [int(one["node"].removeprefix("process-") or 0) for one in cells]

    def queue_of(self, process: int, prefix: str) -> str:
        """Return the name of a queue that a process owns."""
        owners = self.owner_numbers()
        return next(
            f"{prefix}-{n}"
            for n in range(999)
            if owners[cell_of_queue(f"{prefix}-{n}", CELLS)] == process
        )

    async def kill(self, process: int) -> None:
        """Kill a process, and wait until the supervisor has started the next one."""
        pid = self.pids()[process]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: self.pids()[process] != pid)

    def stop(self) -> None:
        if self.broker is not None:
            self.broker.stop()
            self.broker = None


@asynccontextmanager
async def clients_everywhere(node: NodeOfProcesses, count: int = 8) -> AsyncIterator[list[Client]]:
    """Connect clients that the kernel spreads over all processes, almost certainly."""
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        yield [
            await stack.enter_async_context(Client(port=node.port, client_id=f"c{n}"))
            for n in range(count)
        ]
