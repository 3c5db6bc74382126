"""Measure whether a Spark stream keeps up with publishers, in one run.

    python bench/ingest.py --harness HARNESS [--rows 2000000] [--size 1000]

One broker, compiled or not (`sluice` on the PATH, or $SLUICE), one Spark with two cores. A stream
reads a queue of ten partitions into the sink `noop` with a checkpoint, and its group follows. Then
four MQTT publishers send as fast as they get PUBACKs, at QoS 1 and `durability = sync`. Prints each
second the messages published, those finished by Spark, and the backlog; then how long the rest
took, and the CPU of all processes. The stream keeps up if it finishes as many rows per second as
are published: then the backlog is bounded by the messages of one batch. The only target is
127.0.0.1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from bulk import CONFIG
from harness import start_broker
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from spark import TICKS

from sluice.spark import BulkClient, Endpoint, session

QUEUE = "wide/ingest"
GROUP = "ingest"
KINDS = (  # by a part of the command line; Java's contains pyspark as well
    ("/java", "Java"),
    ("sluice.bulk.read_worker", "reading process"),
    ("pyspark", "Spark's Python"),
    ("mqload", "publishers"),
    ("serve", "broker"),
)


def cpu_by_kind(roots: list[int]) -> dict[str, float]:
    """Return the CPU seconds of these processes and all descendants, by kind."""
    every: dict[int, tuple[int, float, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                command = (entry / "cmdline").read_text()
                command = "/java" if command.partition("\0")[0].endswith("/java") else command
                every[int(entry.name)] = (
                    int(words[1]),
                    (int(words[11]) + int(words[12])) / TICKS,
                    command,
                )
    found: dict[str, float] = {}
    below = {pid for pid in roots if pid in every}
    while below:
        for pid in below:
            kind = next((name for mark, name in KINDS if mark in every[pid][2]), "this script")
            found[kind] = found.get(kind, 0.0) + every[pid][1]
        below = {pid for pid, (parent, _, _) in every.items() if parent in below}
    return found


def publish(harness: str, port: str, rows: int, size: int) -> subprocess.Popen[str]:
    mqload = str(Path(os.environ.get("SL_BIN", harness)) / "mqload")
    args = {
        "subs": "0",
        "pubs": "4",
        "size": str(size),
        "keys": "1024",
        "count": str(rows),
        "offline": "1",
        "warmup": "0",
        "cid": "ingest",
        "topic": f"$queue/{QUEUE}",
        "port": port,
        "mqtt": "5",
    }
    words = [word for name, value in args.items() for word in (f"--{name}", value)]
    return subprocess.Popen(
        [mqload, "queue", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def start_stream(spark: SparkSession, url: str, folder: str, rows: int) -> StreamingQuery:
    options = {"url": url, "subscribe": QUEUE, "group": GROUP, "maxOffsetsPerTrigger": str(rows)}
    return (
        spark.readStream.format("sluice")
        .options(**options)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", f"{folder}/checkpoint")
        .start()
    )


class Watch:
    """Counts published and finished messages, second by second."""

    def __init__(self, client: BulkClient) -> None:
        self._client = client
        self.began = time.perf_counter()
        self.highest = 0
        self.came = self.done = 0

    def sample(self) -> int:
        """Print a line and return the backlog."""
        before = self.came, self.done
        self.came = sum(one.latest for one in self._client.offsets(QUEUE).partitions)
        self.done = sum(self._client.progress(QUEUE, GROUP).values())
        waits = self.came - self.done
        self.highest = max(self.highest, waits)
        now = time.perf_counter() - self.began
        print(
            f"  {now:4.0f} s  {self.came - before[0]:9,} in  {self.done - before[1]:9,} finished"
            f"  {waits:9,} wait",
            flush=True,
        )
        return waits


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Whether a Spark stream keeps up with all that is published."
    )
    parser.add_argument("--harness", required=True, help="folder of the load harness")
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=400_000, help="maxOffsetsPerTrigger")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker, facts = start_broker(folder, config=CONFIG)
        spark = session(
            "ingest",
            "local[2]",
            **{
                "spark.ui.enabled": "false",
                "spark.log.level": "ERROR",
                "spark.driver.memory": "2g",
            },
        )
        roots = [os.getpid(), broker.pid]
        port = facts["mqtt"].rpartition(":")[2]
        url = f"http://{facts['http']}"
        try:
            with BulkClient(Endpoint(url)) as bulk_client:
                publish(args.harness, port, 100_000, args.size).wait(
                    600
                )  # creates the queue, and warms up Spark
                query = start_stream(spark, url, folder, args.batch)
                while (
                    not query.lastProgress
                    or sum(bulk_client.progress(QUEUE, GROUP).values()) < 100_000
                ):
                    if query.exception() is not None:
                        raise SystemExit(str(query.exception()))
                    time.sleep(0.2)
                spent = cpu_by_kind(roots)
                watch = Watch(bulk_client)
                watch.came = watch.done = 100_000
                spent_publishing: dict[str, float] = {}
                publishers = publish(args.harness, port, args.rows, args.size)
                while publishers.poll() is None:
                    used = cpu_by_kind([publishers.pid])
                    time.sleep(1.0)
                    watch.sample()
                    spent_publishing = used
                took = time.perf_counter() - watch.began
                finished = watch.done - 100_000
                while watch.sample():
                    time.sleep(1.0)
                drained = time.perf_counter() - watch.began - took
                now = cpu_by_kind(roots)
                query.stop()
            rate, streamed = args.rows / took, finished / took
            print(f"published over MQTT: {args.rows:,} in {took:.1f} s, {rate:,.0f} per second")
            print(
                f"streamed meanwhile: {finished:,}, {streamed:,.0f} per second: "
                f"{streamed / rate:.2f} of it;"
                f" the rest took {drained:.1f} s; never more than {watch.highest:,} waited"
            )
            cpu = {name: now[name] - spent.get(name, 0.0) for name in now} | spent_publishing
            print(
                "CPU seconds: "
                + ", ".join(f"{name} {seconds:.1f}" for name, seconds in sorted(cpu.items()))
            )
        finally:
            spark.stop()
            broker.terminate()
            broker.wait(20)


if __name__ == "__main__":
    main()
