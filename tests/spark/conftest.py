"""One Spark session and one broker for all tests of this package; each test has its own queues.

Most of a data source can be tested without Java: `harness.read(...)` does what Spark's processes
do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiomqtt
import httpx
import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition

from sluice.spark import BulkClient, Endpoint, session
from sluice.spark.source.data_source import SluiceSource
from sluice.spark.source.offsets import Range, Task
from tests.admin.live_broker import Worker, publish
from tests.support.broker_process import Broker, same_build
from tests.support.external_programs import QUICK_JAVA, need_program

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TEST_TIMEOUT_SECONDS = 240  # Java is slow on a busy machine
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": QUICK_JAVA,
    "spark.log.level": "ERROR",
}
_names = count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_SECONDS))
            if "spark" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.spark)


BEFORE_ANY_STREAM: set[str] = set()  # `stream_variables` at the start of the session


def stream_variables(spark: SparkSession) -> set[str]:
    """Return the variables that Spark has noted for the Python processes of streams from the
    source.
    """
    source = spark._jsparkSession.sessionState().dataSourceManager().lookupDataSource("sluice")
    return set(source.dataSourceCls().envVars())


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    need_program("java")
    os.environ.update(same_build())  # the workers import the same Sluice as this process
    running = session("tests", "local[2,3]", **SETTINGS)
    BEFORE_ANY_STREAM.update(stream_variables(running))
    yield running
    running.stop()


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    broker = Broker(tmp_path_factory.mktemp("broker"), "", (), {})
    yield broker
    broker.stop()


@pytest.fixture
def harness(running: Broker) -> Iterator[SparkHarness]:
    harness = SparkHarness(running, f"q{next(_names)}")
    yield harness
    harness.close()


def ranges_of(tasks: Sequence[InputPartition]) -> list[list[Range]]:
    return [list(task.ranges) for task in tasks if isinstance(task, Task)]


class SparkHarness:
    """A broker, a queue of the test's own, and helpers for both."""

    def __init__(self, broker: Broker, queue: str) -> None:
        self.broker = broker
        self.queue = queue
        self.url = f"http://{broker.address('http')}"
        self.where = Endpoint(self.url, retry_seconds=30)
        self.bulk_client = BulkClient(self.where)
        self.api = httpx.Client(base_url=f"{self.url}/api/v1", timeout=30)
        self._batches = count()

    def close(self) -> None:
        self.bulk_client.close()
        self.api.close()

    # ---- the broker

    def make(self, queue: str = "", partitions: int = 1, **config: Any) -> None:
        body = {"name": queue or self.queue, "partitions": partitions, **config}
        answer = self.api.post("/queues", json=body)
        assert answer.is_success, answer.text

    def fill(self, values: list[str], queue: str = "", key: str = "", **columns: list[Any]) -> None:
        """Publish one message for each value, with its text as the default key."""
        keys = [(key or value).encode() for value in values]
        table = pa.table({"value": [value.encode() for value in values], "key": keys, **columns})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table)
        app, batch = f"fill-{self.queue}", next(self._batches)
        stage = self.bulk_client.stage(app, batch, queue or self.queue, bytes(sink.getvalue()))
        assert self.bulk_client.commit(app, batch, [stage], len(values))

    def lag(self, group: str, queue: str = "") -> float:
        """Return a metric as Prometheus sees it."""
        page = httpx.get(f"{self.url}/metrics", timeout=30).text
        marks = (f'"$queue/{queue or self.queue}"', f'"{group}"')
        [line] = [
            line
            for line in page.splitlines()
            if line.startswith("mqtt_queue_lag{") and all(mark in line for mark in marks)
        ]
        return float(line.rsplit(" ", 1)[1])

    def depth(self, queue: str = "") -> int:
        """Return the number of stored messages."""
        return int(self.api.get(f"/queues/{queue or self.queue}/stats").json()["total_messages"])

    async def reject(self, payload: bytes, description: str = "no good", **properties: str) -> None:
        """Publish, and let a worker of group w reject it, which makes a dead letter."""
        mqtt = self.broker.mqtt
        version = aiomqtt.ProtocolVersion.V5
        async with aiomqtt.Client(
            mqtt.host, mqtt.port, identifier=f"w-{self.queue}", protocol=version
        ) as client:
            worker = Worker(client, self.queue)
            await worker.join(consumer_group="w")
            await publish(client, self.queue, payload, **properties)
            await worker.settle("reject", await worker.next(), description=description)

    # ---- the source without Java

    def options(self, **options: str) -> dict[str, str]:
        usual = {"url": self.url, "retrySeconds": "30"}
        if "subscribePattern" not in options:
            usual["subscribe"] = self.queue
        return {**usual, **options}

    def source(self, **options: str) -> SluiceSource:
        return SluiceSource(self.options(**options))

    def plan(self, **options: str) -> list[list[Range]]:
        """Return the ranges of each task of a batch read."""
        source = self.source(**options)
        return ranges_of(source.reader(source.schema()).partitions())

    def read(self, **options: str) -> list[dict[str, Any]]:
        """Return the rows of a batch read."""
        source = self.source(**options)
        reader = source.reader(source.schema())
        return [
            row
            for part in reader.partitions()
            for batch in reader.read(part)
            for row in batch.to_pylist()
        ]

    def values(self, **options: str) -> list[str]:
        return [row["value"].decode() for row in self.read(**options)]

    # ---- the source within Spark

    def load(self, spark: SparkSession, **options: str) -> DataFrame:
        return spark.read.format("sluice").options(**self.options(**options)).load()

    def stream(self, spark: SparkSession, **options: str) -> DataFrame:
        return spark.readStream.format("sluice").options(**self.options(**options)).load()
