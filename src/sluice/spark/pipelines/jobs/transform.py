"""`transform`: copy a queue to a queue, through SQL or a Python function, each message once.

The progress of the stream is that of the group. A micro-batch is committed to the target in one
step, identified by the checkpoint of the query and its number. A function takes the stream as a
DataFrame and returns one; it may keep state (`dropDuplicates`, windows, `transformWithState`).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as f

from sluice.errors import SluiceError
from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.queues import Queues, includes_queue, select_message_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

# For functions that keep state. Otherwise timers would trigger empty batches, and `once` would
# never end.
STATE_SETTINGS: Final = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
}


def by_sql(messages: DataFrame, sql: str, watermark: str = "") -> DataFrame:
    """Return the result of a query over the view `messages`.

    Besides the columns of a queue the view has `text`, the payload as a string. The query must
    return `value`, and may return key, headers, delay, priority and message_id.
    """
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
    return select_message_columns(rows)


def find_function(spec: str) -> Callable[[DataFrame], DataFrame]:
    """Load `package.module:function` or `file.py:function`."""
    location, _, name = spec.rpartition(":")
    if not location or not name:
        raise InvalidOption(
            f"--function {spec!r} names no function",
            "Write file.py:function or package.module:function",
        )
    try:
        module = (
            _from_file(Path(location))
            if location.endswith(".py")
            else importlib.import_module(location)
        )
        found = getattr(module, name)
    except (ImportError, OSError, AttributeError, SyntaxError) as fault:
        raise InvalidOption(
            f"--function {spec!r} cannot be loaded: {fault}", "See whether it is there"
        ) from None
    except Exception as fault:  # any error that the user's module raises on import
        raise InvalidOption(
            f"--function {spec!r} cannot be loaded: {type(fault).__name__}: {fault}",
            "Correct the file",
        ) from None
    if not callable(found):
        raise InvalidOption(
            f"{spec} is not a function", "Give one that takes a DataFrame and returns one"
        )

    def change(messages: DataFrame) -> DataFrame:
        return _apply_function(spec, found, messages)

    return change


def _apply_function(
    spec: str, function: Callable[[DataFrame], DataFrame], messages: DataFrame
) -> DataFrame:
    """Call the user's function. An error names the line that raised it."""
    from pyspark.errors import PySparkException

    from sluice.spark.pipelines.support.stream_runner import explain_error

    try:
        given: object = function(messages)
    except SluiceError:
        raise
    except Exception as fault:
        message = f"{type(fault).__name__}: {fault}"
        if isinstance(fault, PySparkException):
            message = explain_error(fault).what
        raise InvalidOption(
            f"--function {spec!r} has failed{_failing_line(fault, function)}: {message}",
            "Correct the function",
        ) from None
    if not isinstance(given, type(messages)):
        raise InvalidOption(
            f"--function {spec!r} gives {type(given).__name__}, not a DataFrame",
            "Return the DataFrame that it makes",
        )
    return given


def _failing_line(fault: BaseException, function: Callable[..., object]) -> str:
    """Return the line in the function's file that raised the error; "" if unknown."""
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    lines = [
        one.lineno for one in traceback.extract_tb(fault.__traceback__) if one.filename == file
    ]
    return f" in {file}, line {lines[-1]}" if lines else ""


def _from_file(path: Path) -> ModuleType:
    """Import a file as a module that is pickled by value: executors do not have the file."""
    from pyspark import cloudpickle

    spec = importlib.util.spec_from_file_location(f"sluice_transform_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module


def check_target(queue: str, to: str) -> None:
    """Refuse an empty target, and a queue that would feed itself."""
    if not to.strip():
        raise InvalidOption("--to is empty", "Name the queue that gets the result")
    if includes_queue(queue, to):
        raise InvalidOption(
            f"{to} is read from and written to: it would never end", "Give --to another queue"
        )


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
    skip_lost: bool = False,
) -> StreamingQuery:
    """Start the stream, or continue from its checkpoint; without one, a restart would repeat
    messages.

    `skip_lost`: messages that were removed before they were read are no error.
    """
    check_target(queue, to)
    for name, value in STATE_SETTINGS.items():
        spark.conf.set(name, value)
    messages = queues.stream(
        spark,
        queue,
        group=group,
        rows_per_batch=rows_per_batch,
        skip_lost=skip_lost,
        maxBytesPerTrigger="16m",
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
    return (
        writer.trigger(availableNow=True) if once else writer.trigger(processingTime=every)
    ).start()
