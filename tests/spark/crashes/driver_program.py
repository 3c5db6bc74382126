"""The program that crash_run.py kills: a stream from queue to queue, and one from queue to table.

    python tests/spark/crashes/driver_program.py FOLDER URL MASTER FORMAT

Failed streams are started again. The program ends when FOLDER/stop appears, after it has written
the rows of the table to FOLDER/table.json. On SIGUSR1 it writes the stacks of its threads.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from sluice.spark import Endpoint, session
from sluice.spark.pipelines.jobs import archive, transform
from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.support.stream_runner import explain_error
from sluice.spark.pipelines.tables import open_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

SOURCE, TARGET = "crash/from", "crash/to"
MOVER, ARCHIVE = "mover", "archive"
ROWS, AT_ONCE = 100, "0 seconds"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "1",
    "spark.driver.memory": "1g",
    "spark.log.level": "OFF",
}


class Streams:
    def __init__(self, folder: Path, url: str, spark: SparkSession, kind: str) -> None:
        self._folder = folder
        self._kind = kind
        self._queues = Queues(Endpoint(url))
        self._spark = spark
        self._running: dict[str, StreamingQuery] = {}

    def _move(self) -> StreamingQuery:
        return transform.start(
            self._spark,
            self._queues,
            SOURCE,
            TARGET,
            self._folder / "moving",
            lambda messages: messages.select("key", "value"),
            group=MOVER,
            every=AT_ONCE,
            rows_per_batch=ROWS,
        )

    def _archive(self) -> StreamingQuery:
        return archive.start(
            self._spark,
            self._queues,
            SOURCE,
            self.table,
            group=ARCHIVE,
            table_format=self._kind,
            every=AT_ONCE,
            rows_per_batch=ROWS,
        )

    @property
    def table(self) -> Path:
        return self._folder / "table"

    def keep_running(self) -> None:
        """Start a failed stream again, from its checkpoint."""
        starts: dict[str, Callable[[], StreamingQuery]] = {
            MOVER: self._move,
            ARCHIVE: self._archive,
        }
        for name, start in starts.items():
            query = self._running.get(name)
            if query is not None and query.isActive:
                continue
            if query is not None:
                print(f"{name} is started again: {_why(str(query.exception()))}", flush=True)
            try:
                self._running[name] = start()
            except PySparkException as fault:  # the planning process was killed
                print(f"{name} does not start: {explain_error(fault)}", flush=True)

    def end(self) -> None:
        for query in self._running.values():
            query.stop()
        rows = (
            open_table(self.table).read(self._spark).selectExpr("cast(value AS string)").collect()
        )
        (self._folder / "table.part").write_text(json.dumps([row.value for row in rows]))
        (self._folder / "table.part").rename(self._folder / "table.json")


def _why(message: str) -> str:
    """Return the broker's own text if there is one; else the first line, and the causes after
    it.
    """
    lines = message.strip().splitlines()
    reported = [line for line in lines if line.startswith("sluice.")][:1]
    causes = [
        line
        for line in lines
        if line.lstrip().startswith(("Caused by", "Serialization stack", "- object"))
    ]
    return " / ".join(line.strip()[:300] for line in reported or [*lines[:1], *causes])


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    folder, (url, master, kind) = Path(sys.argv[1]), sys.argv[2:5]
    spark = session("crash", master, **SETTINGS)
    streams = Streams(folder, url, spark, kind)
    while not (folder / "stop").exists():
        streams.keep_running()
        time.sleep(0.1)
    streams.end()
    spark.stop()


if __name__ == "__main__":
    main()
