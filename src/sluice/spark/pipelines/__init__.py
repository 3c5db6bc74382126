"""Spark jobs that ship with Sluice; `sluice pipeline <name>` runs each of them as one command.

Each job is a module of `jobs`: a function on DataFrames that does the work, and an entry point that
reads from the broker and writes the result. `sluice pipeline <name>` calls the entry point, started
directly or by spark-submit. docs/pipelines.md has a section for each job.

    archive       copy a queue to a Delta table or Parquet files, each message once
    dead_letters  count what fails, why, and since when
    redrive       repair dead letters with SQL and put them back into their queue
    transform     copy a queue to a queue, through SQL or a Python function
    replay        publish an archive to a queue
    compact       store the last value of each key
    flow          measure throughput and latency per time window
    audit         compare published with processed messages: missing ones and duplicates

`keep_running` restarts a stream of your own as the jobs restart theirs.

Other modules: `tables` (Delta and Parquet), `queues` (reads from and writes to the broker),
`support` (streams, time windows, batches to publish), `report` (HTML and charts).

The job modules are imported on first use: executors import this package with each of its
sub-packages and need none of the jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from threading import Event
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from sluice.spark.pipelines.jobs import (
        archive,
        audit,
        compact,
        dead_letters,
        flow,
        redrive,
        replay,
        transform,
    )

log = logging.getLogger(__name__)

__all__ = [
    "archive",
    "audit",
    "compact",
    "dead_letters",
    "flow",
    "keep_running",
    "redrive",
    "replay",
    "transform",
]


def keep_running(start: Callable[[], StreamingQuery], stop: Event | None = None) -> None:
    """Start a stream of your own, and start it again after failures, from its checkpoint.

    Returns when the stream has ended by itself, or stops it when `stop` is set. Raises
    `StreamFailed` for a failure that no retry can fix (an invalid option, lost rows, a refused
    message) and after five others without a batch in between.
    """
    from sluice.spark.pipelines.support.stream_runner import run

    run(
        start,
        once=False,
        stop_requested=stop,
        on_retry=lambda failure, pause: log.warning("%s; again in %.0f s", failure, pause),
    )


def __getattr__(name: str) -> ModuleType:
    """Import the job module `name` (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.jobs.{name}")
