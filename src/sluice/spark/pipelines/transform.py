"""`transform`: a queue into a queue, with SQL or a Python function, each message once.

Spark's own progress is the group's, and a micro-batch reaches the target in one step of the broker, known by the
query's checkpoint and its number. A function gets the stream as a DataFrame and gives one back; it may keep state
(`dropDuplicates`, windows, `transformWithState`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from sluice.spark.faults import InvalidOption
from sluice.spark.pipelines.queues import Queues, as_messages

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

# For functions that keep state. Timers would otherwise ask for one empty batch after the other, and `once` never end.
STATE_SETTINGS: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


def by_sql(messages: DataFrame, sql: str, watermark: str = "") -> DataFrame:
    """What a query over the view `messages` gives. Beside the columns of a queue that has `text`, the payload as a
    string; the query must give `value`, and may give key, headers, delay, priority and message_id."""
    rows = messages.withColumn("text", f.col("value").cast("string"))
    if watermark:
        rows = rows.withWatermark("timestamp", watermark)
    rows.createOrReplaceTempView("messages")
    return as_checked_messages(messages.sparkSession.sql(sql))


def as_checked_messages(rows: DataFrame) -> DataFrame:
    if "value" not in rows.columns:
        raise InvalidOption(
            f"the result has {', '.join(rows.columns)}, and no column value",
            "Name the payload: SELECT ... AS value",
        )
    return as_messages(rows)


def find_function(named: str) -> Callable[[DataFrame], DataFrame]:
    """`package.module:function` or `file.py:function`."""
    place, _, name = named.rpartition(":")
    if not place or not name:
        raise InvalidOption(
            f"--function {named!r} names no function", "Write file.py:function or package.module:function"
        )
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name)
    except (ImportError, OSError, AttributeError, SyntaxError) as fault:
        raise InvalidOption(
            f"--function {named!r} cannot be loaded: {fault}", "See whether it is there"
        ) from None
    if not callable(found):
        raise InvalidOption(f"{named} is no function", "Give one that takes a DataFrame and returns one")
    function: Callable[[DataFrame], DataFrame] = found
    return function


def _from_file(path: Path) -> ModuleType:
    """A module of its own, which travels to the executors whole: they have no such file."""
    from pyspark import cloudpickle

    spec = importlib.util.spec_from_file_location(f"sluice_transform_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def start(
    spark: SparkSession,
    queues: Queues,
    queue: str,
    to: str,
    checkpoint: str | Path,
    change: Callable[[DataFrame], DataFrame],
    *,
    group: str = "transform",
    once: bool = False,
    every: str = "1 second",
    rows_per_batch: int = 10_000,
) -> StreamingQuery:
    """Begin, or go on where it stopped. `checkpoint` is the memory of it: without it, a restart would repeat."""
    for name, value in STATE_SETTINGS.items():
        spark.conf.set(name, value)
    messages = queues.stream(
        spark, queue, group=group, rows_per_batch=rows_per_batch, maxBytesPerTrigger="16m"
    )
    writer = (
        as_checked_messages(change(messages))
        .writeStream.queryName(f"transform {queue} to {to}")
        .format("sluice")
        .options(**queues.options())
        .option("queue", to)
        .option("checkpointLocation", str(Path(checkpoint).absolute()))
        .outputMode("append")
    )
    return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime=every)).start()
