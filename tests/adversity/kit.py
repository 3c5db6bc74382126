"""The environment of adversity trials: brokers on one data directory, clients, and results.

An adversity is a coroutine that takes a `Trial`. It injects a fault into a real broker and checks
with `expect` what is guaranteed in that case. The suite runs it in a short form,
`scripts/adversity` in a long form: `size(short, long)` selects the amount of work.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sluice.client import Client
from tests.adversity.shim import Shim
from tests.support.broker_process import Broker

SECONDS = 60.0  # time limit for anything that must happen: the machine may be busy
MIB = 1 << 20
# A broker without these listeners starts in half the time.
NO_ADMIN_LISTENERS = (
    "--ws",
    "off",
    "--http",
    "off",
    "--grpc",
    "off",
)


class Trial:
    def __init__(self, folder: Path, seed: int, stretch: float = 0.0) -> None:
        self.folder = folder
        self.seed = seed
        self.draw = random.Random(seed)
        self.stretch = stretch  # 0.0: the shortest useful form; 1.0: the long form
        self.seen: list[str] = []
        self.faults: list[str] = []
        self._running = ExitStack()

    def size(self, short: int, long: int) -> int:
        return int(short + (long - short) * self.stretch)

    def note(self, what: str) -> None:
        """Record a result worth reporting."""
        self.seen.append(what)

    def expect(self, holds: bool, fault: str) -> None:
        if not holds:
            self.faults.append(fault)

    def shim(self) -> Shim:
        return Shim(self.folder)

    def start(
        self,
        config: str = "",
        flags: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        under: Sequence[str] = (),
    ) -> Broker:
        """Start a broker on the data of the previous one; it is stopped with the trial."""
        broker = Broker(self.folder, config, flags, environ or {}, under)
        self._running.callback(self._end, broker)
        return broker

    def _end(self, broker: Broker) -> None:
        if broker.process.poll() is None:
            broker.kill()

    def close(self) -> None:
        self._running.close()


Adversity = Callable[[Trial], Coroutine[Any, Any, None]]


def connected_client(broker: Broker, name: str, lasting: bool = False, **options: Any) -> Client:
    if lasting:
        options |= {"clean_start": False, "session_expiry": 3600}
    options.setdefault("reconnect", False)
    return Client(broker.mqtt.host, broker.mqtt.port, client_id=name, **options)


async def until(holds: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        await asyncio.sleep(0.02)


def rss(broker: Broker) -> int:
    """Return the resident memory of the broker in bytes."""
    status = Path(f"/proc/{broker.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def descriptors(broker: Broker) -> int:
    return len(list(Path(f"/proc/{broker.process.pid}/fd").iterdir()))


async def ask(broker: Broker, path: str) -> Any:
    """Send a GET request to the admin API."""

    def get() -> Any:
        with urllib.request.urlopen(
            f"http://{broker.address('http')}{path}", timeout=SECONDS
        ) as answer:
            return json.loads(answer.read())

    return await asyncio.to_thread(get)


async def stats(broker: Broker, queue: str) -> Any:
    return await ask(broker, f"/api/v1/queues/{queue}/stats")
