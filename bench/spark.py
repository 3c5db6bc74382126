"""Measure how fast Spark reads a queue, against Spark reading the same rows from Parquet.

    python bench/spark.py [--rows 300000] [--size 1000] [--rounds 5] [--warm 12]
    python bench/spark.py --partitions 1     a queue of one partition, read by two tasks
    python bench/spark.py --tasks 200        with the option minPartitions
    python bench/spark.py --only-columns     count() and one column, without the slow tuples
    python bench/spark.py --harness HARNESS  and streaming, against the rate of MQTT publishes

One broker, compiled or not (`sluice` on the PATH, or $SLUICE), one Spark with two cores, `noop` as
the sink. Every round reads the same random rows from the queue, from the queue as Python tuples,
and from a Parquet file; a ratio is the median of the per-round ratios. Besides time, the CPU of all
processes counts, Spark's and the broker's: on a busy machine only that is fair, because the broker
serves bulk readers at a low priority. A stream drains the queue with a checkpoint, in batches, and
its group follows. Needs `pip install 'sluice[spark]'` and Java. The only target is 127.0.0.1.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from bulk import CONFIG
from harness import start_broker
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from sluice.spark import BulkClient, Endpoint, session
from sluice.spark.source.batch_reader import BatchReader
from sluice.spark.source.data_source import SluiceSource

QUEUES = {10: "wide/rows", 1: "bulk/rows", 200: "many/rows"}  # ten: the default of queues
MANY = """
[[queues.templates]]
match = "many/#"
config = { partitions = 200, limits = { max_queue_depth = 20000000 } }
"""
ENQUEUED = "bench/enqueued"
BATCH_ROWS = 20_000
TRIGGER_ROWS = 100_000
TICKS = os.sysconf("SC_CLK_TCK")
DRIVER = "driver"
PROCESSES = {  # by a part of the command line
    "Java": "SparkSubmit",
    "Spark's Python": "pyspark.daemon",
    "reading process": "sluice.bulk.read_worker",
    "broker": "serve",
    DRIVER: "",
}


class TupleReader(DataSourceReader):
    """Reads the same rows from the same API, passed to Spark one by one."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader

    def partitions(self) -> list[InputPartition]:
        return list(self._reader.partitions())

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        for batch in self._reader.read(partition):
            yield from zip(*(column.to_pylist() for column in batch.columns))


class TupleSource(SluiceSource):
    @classmethod
    def name(cls) -> str:
        return "sluice_tuples"

    def reader(self, schema: StructType) -> DataSourceReader:  # type: ignore[override]
        return TupleReader(super().reader(schema))


def fill(where: Endpoint, queue: str, rows: int, size: int) -> None:
    """Write random payloads: compressible ones would favor the file."""
    with BulkClient(where) as client:
        for batch in range(-(-rows // BATCH_ROWS)):
            count = min(BATCH_ROWS, rows - batch * BATCH_ROWS)
            offsets = pa.py_buffer(
                b"".join((nth * size).to_bytes(4, "little") for nth in range(count + 1))
            )
            values = pa.Array.from_buffers(
                pa.binary(), count, [None, offsets, pa.py_buffer(os.urandom(count * size))]
            )
            table = pa.table({"value": values, "key": [b"%d" % nth for nth in range(count)]})
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, table.schema) as stream:
                stream.write_table(table)
            stage = client.stage("bench", batch, queue, memoryview(sink.getvalue()))
            client.commit("bench", batch, [stage], count)


def cpu_seconds(roots: list[int]) -> Counter[str]:
    """Return CPU seconds of these processes and all descendants, by kind."""
    every: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                every[int(entry.name)] = (int(words[1]), (int(words[11]) + int(words[12])) / TICKS)
    found: Counter[str] = Counter()
    seen: set[int] = set()
    below = set(roots)
    while below:
        for pid in below:
            found[process_role(pid)] += every[pid][1]
        seen |= below
        below = {
            pid for pid, (parent, _) in every.items() if parent in below
        } - seen  # a root may be a descendant of another
    return found


def process_role(pid: int) -> str:
    words = ""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text()
    return next((name for name, word in PROCESSES.items() if word in words), DRIVER)


class Stopwatch:
    """Measure the time and the CPU time by kind of reading a frame."""

    def __init__(self, broker: int) -> None:
        self._roots = [os.getpid(), broker]

    def run(
        self, frame: DataFrame, action: Callable[[DataFrame], object]
    ) -> tuple[float, float, Counter[str]]:
        before, began = cpu_seconds(self._roots), time.perf_counter()
        action(frame)
        took, spent = time.perf_counter() - began, cpu_seconds(self._roots)
        spent.subtract(before)
        return took, spent.total(), spent


def read_all(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def batch_reads(
    spark: SparkSession,
    options: dict[str, str],
    folder: str,
    rows: int,
    rounds: int,
    warm: int,
    watch: Stopwatch,
    only_columns: bool,
) -> None:
    table = f"{folder}/table"
    spark.dataSource.register(TupleSource)
    spark.read.format("sluice").options(**options).load().write.parquet(table)

    def load(**more: str) -> DataFrame:
        return spark.read.format("sluice").options(**options, **more).load()

    # The frame is made outside of the measurement, except for what Spark does lazily.
    ways: dict[str, tuple[Callable[[], DataFrame], Callable[[DataFrame], object]]] = {
        "sluice": (load, read_all),
        "parquet": (lambda: spark.read.parquet(table), read_all),
        "sluice count": (lambda: load(columns="partition"), DataFrame.count),
        "parquet count": (lambda: spark.read.parquet(table), DataFrame.count),
        "sluice key": (lambda: load(columns="key"), read_all),
        "parquet key": (lambda: spark.read.parquet(table).select("key"), read_all),
    }
    pairs = [("sluice", "parquet"), ("sluice count", "parquet count")]
    pairs.append(("sluice key", "parquet key"))
    if not only_columns:
        tuples = spark.read.format("sluice_tuples").options(**options)
        ways["tuples"] = (lambda: tuples.load(), read_all)
        pairs.append(("sluice", "tuples"))
    for _ in range(warm):
        for make, action in ways.values():
            watch.run(make(), action)
    took: dict[str, list[tuple[float, float, Counter[str]]]] = {name: [] for name in ways}
    for nth in range(rounds):
        for name, (make, action) in ways.items():
            took[name].append(watch.run(make(), action))
        args = [
            f"{name} {rows / took[name][-1][0]:,.0f} rows/s, {took[name][-1][1]:.2f} CPU-s"
            for name in ways
        ]
        print(f"  round {nth + 1}: {'; '.join(args)}", flush=True)
    for who in PROCESSES:
        print(
            f"sluice, {who}: {statistics.median(one[2][who] for one in took['sluice']):.2f} CPU-s"
        )
    for which, unit in ((0, "second"), (1, "CPU second")):
        for name in ways:
            print(
                f"{name}: {rows / (statistics.median(one[which] for one in took[name]) or 1):,.0f}"
                f" rows per {unit}"
            )
        for one, other in pairs:
            rounds_of_both = zip(took[one], took[other], strict=True)
            ratio = statistics.median(
                theirs[which] / ours[which] if ours[which] else 0.0
                for ours, theirs in rounds_of_both
            )
            print(f"{one} to {other}, rows per {unit}: ratio {ratio:.2f}")


def enqueue(harness: str, facts: dict[str, str], rows: int, size: int) -> float:
    """Return the messages per second of four MQTT publishers, without readers."""
    mqload = str(Path(os.environ.get("SL_BIN", harness)) / "mqload")
    done = subprocess.run(
        [
            *(mqload, "queue", "--subs", "0", "--pubs", "4", "--size", str(size), "--keys", "1024"),
            *(
                "--count",
                str(rows),
                "--offline",
                "1",
                "--warmup",
                "0",
                "--cid",
                "bench",
                "--topic",
                f"$queue/{ENQUEUED}",
            ),
            *("--port", facts["mqtt"].rpartition(":")[2], "--mqtt", "5", "--pid", facts["pid"]),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"mqload said nothing: {done.stderr.strip()}")
    figures: dict[str, Any] = json.loads(lines[-1])
    return float(figures["pub_per_s"])


def stream(spark: SparkSession, url: str, folder: str, queue: str) -> float:
    """Return the rows per second of a stream that drains a queue, over all its batches."""
    options = {
        "url": url,
        "subscribe": queue,
        "group": "bench",
        "maxOffsetsPerTrigger": str(TRIGGER_ROWS),
    }
    query = (
        spark.readStream.format("sluice")
        .options(**options)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", f"{folder}/checkpoint-{queue.replace('/', '-')}")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    batches = [one for one in query.recentProgress if one.numInputRows]
    rows = sum(one.numInputRows for one in batches)
    took = sum(one.batchDuration for one in batches) / 1000.0
    print(
        f"  {len(batches)} batches of {rows // len(batches):,} rows,"
        f" slowest {max(b.batchDuration for b in batches)} ms"
    )
    return rows / took


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast Spark reads a queue.")
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--warm",
        type=int,
        default=12,
        help="reads before the first that counts: Java compiles meanwhile",
    )
    parser.add_argument("--partitions", type=int, default=10, choices=sorted(QUEUES))
    parser.add_argument("--tasks", type=int, default=0, help="minPartitions")
    parser.add_argument("--only-columns", action="store_true", help="without tuples and streams")
    parser.add_argument("--harness", default="", help="folder of the load harness")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker, facts = start_broker(folder, config=CONFIG + MANY)
        try:
            url = f"http://{facts['http']}"
            queue = QUEUES[args.partitions]
            fill(Endpoint(url), queue, args.rows, args.size)
            spark = session(
                "bench",
                "local[2]",
                **{
                    "spark.ui.enabled": "false",
                    "spark.log.level": "ERROR",
                    "spark.driver.memory": "2g",
                },
            )
            options = {"url": url, "subscribe": queue}
            if args.partitions == 1 or args.tasks:
                options["minPartitions"] = str(args.tasks or 2)
            watch = Stopwatch(broker.pid)
            batch_reads(
                *(spark, options, folder, args.rows, args.rounds, args.warm, watch),
                args.only_columns,
            )
            if args.only_columns:
                return
            print(f"stream: {stream(spark, url, folder, queue):,.0f} rows/s")
            if args.harness:
                rate = enqueue(args.harness, facts, args.rows, args.size)
                drained = stream(spark, url, folder, ENQUEUED)
                print(
                    f"enqueued over MQTT {rate:,.0f}/s, streamed {drained:,.0f}/s:"
                    f" ratio {drained / rate:.2f}"
                )
            spark.stop()
        finally:
            broker.terminate()
            broker.wait(20)


if __name__ == "__main__":
    main()
