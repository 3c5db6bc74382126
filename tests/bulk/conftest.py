"""A real broker and its bulk API over a socket, on every store; each test has its own queues."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from itertools import count
from typing import Any

import aiomqtt
import httpx
import pyarrow as pa
import pytest

from tests.admin.live_broker import Worker, publish
from tests.support.broker_process import Broker, StartBroker

ARROW = {"Content-Type": "application/vnd.apache.arrow.stream"}
CONFIG = """
[bulk]
max_batch_bytes = 4_000_000
max_stage_bytes = 10_000_000
"""
STORES = [
    "embedded",
    "memory",
    *(["redis"] if os.environ.get("SLUICE_EXPECT") != "interpreted" else []),
]
_names = count(1)


def arrow_body(table: pa.Table, batch_rows: int = 1000) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, batch_rows)
    return bytes(sink.getvalue())


def read_arrow(data: bytes) -> pa.Table:
    table = pa.ipc.open_stream(data).read_all()
    table.validate(full=True)
    return table


class BulkHarness:
    """The bulk API and the requests of a test."""

    def __init__(self, broker: Broker, queue: str) -> None:
        self.broker = broker
        self.queue = queue
        self.root = f"http://{broker.address('http')}"
        self.api = httpx.AsyncClient(base_url=f"{self.root}/api/v1", timeout=30)

    async def ok(self, method: str, path: str, **how: Any) -> Any:
        answer = await self.api.request(method, path, **how)
        assert answer.is_success, answer.text
        return answer.json()

    async def refused(
        self, status: int, error: str, method: str, path: str, **how: Any
    ) -> dict[str, Any]:
        answer = await self.api.request(method, path, **how)
        assert answer.status_code == status, answer.text
        reported: dict[str, Any] = answer.json()
        assert reported["error"] == error, reported
        assert reported["message"]
        assert reported["do"]
        return reported

    async def make(self, **config: Any) -> None:
        await self.ok("POST", "/queues", json={"name": self.queue, "partitions": 1, **config})

    async def publish(self, payload: str, **more: Any) -> None:
        await self.ok("POST", f"/queues/{self.queue}/messages", json={"payload": payload, **more})

    async def fill(self, table: pa.Table, batch: int = 0, app: str = "") -> dict[str, Any]:
        """Stage and commit."""
        app = app or f"fill-{self.queue}"
        stage = await self.stage(table, batch, app)
        body = {"stages": [stage["stage"]], "rows": table.num_rows}
        return await self.ok("POST", f"/bulk/stages/{app}/{batch}/commit", json=body)

    async def stage(self, table: pa.Table, batch: int, app: str) -> dict[str, Any]:
        return await self.ok(
            "POST",
            f"/bulk/stages/{app}/{batch}?queue={self.queue}",
            content=arrow_body(table),
            headers=ARROW,
        )

    async def offsets(self) -> list[dict[str, int]]:
        return (await self.ok("GET", f"/bulk/queues/{self.queue}/offsets"))["partitions"]

    async def rows(self, partition: int = 0, queue: str = "", **query: Any) -> pa.Table:
        """Read a range, by default the whole partition."""
        name = queue or self.queue
        if "end" not in query:
            [one] = [
                one
                for one in (await self.ok("GET", f"/bulk/queues/{name}/offsets"))["partitions"]
                if one["partition"] == partition
            ]
            query = {"start": one["earliest"], "end": one["latest"], **query}
        answer = await self.api.get(
            f"/bulk/queues/{name}/partitions/{partition}/rows", params=query
        )
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == ARROW["Content-Type"]
        return read_arrow(answer.content)

    async def ranges(self, ranges: dict[str, list[int]], **query: Any) -> pa.Table:
        """Read several partitions in one response."""
        path = f"/bulk/queues/{self.queue}/rows"
        answer = await self.api.get(path, params={"ranges": json.dumps(ranges), **query})
        assert answer.status_code == 200, answer.text
        return read_arrow(answer.content)

    def client(self, name: str) -> aiomqtt.Client:
        mqtt = self.broker.mqtt
        return aiomqtt.Client(
            mqtt.host, mqtt.port, identifier=name, protocol=aiomqtt.ProtocolVersion.V5
        )

    async def reject(self, payload: bytes, **properties: str) -> None:
        """Publish, and let a worker of group w reject the message."""
        async with self.client(f"w-{self.queue}") as client:
            worker = Worker(client, self.queue)
            await worker.join(consumer_group="w")
            await publish(client, self.queue, payload, **properties)
            await worker.settle("reject", await worker.next(), description="no good")


@pytest.fixture(scope="module", params=STORES)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    folder = tmp_path_factory.mktemp("broker")
    config, store = CONFIG, request.param
    if store == "redis":
        config += f'[redis]\nprefix = "{folder.name}"\n'
        store = request.getfixturevalue("redis_server").url
    broker = Broker(folder, config, ["--store", store], {})
    yield broker
    broker.stop()


@pytest.fixture
async def harness(running: Broker) -> AsyncIterator[BulkHarness]:
    harness = BulkHarness(running, f"q{next(_names)}")
    yield harness
    await harness.api.aclose()


@pytest.fixture
async def own_harness(start_broker: StartBroker) -> AsyncIterator[BulkHarness]:
    """Start a broker on disk for one test."""
    harness = BulkHarness(start_broker(config=CONFIG), f"q{next(_names)}")
    yield harness
    await harness.api.aclose()
