"""`replay`: an archive back into a queue, all of it or a part.

Rows go in portions that are numbered under a name, in an order that does not change for one version of the table. A
replay that was cut short and is started again with the same name goes on behind the last portion that counts: nothing
is published twice, nothing left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql import functions as f

from sluice.spark.faults import InvalidOption
from sluice.spark.pipelines.portions import portions
from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.tables import Table, open_table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES_BYTES: Final = 64 << 20  # of files that are brought to the driver together
REPLAYED: Final = "replayed-from"
# Asked of the queue by the publisher, the first time.
ONCE_ONLY: Final = ("message-id", "delay", "deliver-at")


def messages(
    rows: DataFrame, where: str = "", since: str = "", until: str = "", queue: str = ""
) -> DataFrame:
    """Rows of an archive as messages, oldest first within their partition. Ids are left out: the broker would take a
    message that it has seen lately for a repetition. The header `replayed-from` has the old one."""
    if where:
        rows = rows.where(where)
    if since:
        rows = rows.where(f.col("timestamp") >= f.lit(since).cast("timestamp"))
    if until:
        rows = rows.where(f.col("timestamp") < f.lit(until).cast("timestamp"))
    marked = f.map_from_arrays(f.array(f.lit(REPLAYED)), f.array(f.col("message_id").cast("binary")))
    headers = f.create_map().cast("map<string,binary>")
    if "headers" in rows.columns:
        own = f.map_filter("headers", lambda name, value: ~name.isin(*ONCE_ONLY, REPLAYED))
        headers = f.coalesce(own, headers)
    return rows.orderBy("queue", "partition", "sequence").select(
        "value",
        "key",
        (f.lit(queue) if queue else f.col("queue")).alias("queue"),
        f.map_concat(headers, marked).alias("headers"),
    )


@dataclass(frozen=True)
class Replayed:
    name: str
    version: int
    published: int
    known: int  # published by an earlier run under the same name


def name_of(table: Table, version: int, *facts: str) -> str:
    """The same question of the same version of a table has the same name."""
    said = "\n".join([str(table.path), str(version), *facts])
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def run(
    spark: SparkSession,
    queues: Queues,
    source: str | Path,
    queue: str = "",
    *,
    where: str = "",
    since: str = "",
    until: str = "",
    name: str = "",
    version: int | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Replayed:
    """Publish what fits. `tell` hears how many rows are done, and how many files of how many."""
    table = open_table(source)
    if version is not None:
        table.check_version(version)
    pinned = table.version() if version is None else version
    files = table.files(pinned)
    if not files:
        raise InvalidOption(f"{table.path} holds no rows", "Give the directory of an archive")
    name = name or name_of(table, pinned, where, since, until, queue)
    app = f"replay/{name}"
    last = queues.last_portion(app)
    published = known = 0
    for number, portion in enumerate(_portions(spark, table, pinned, files, where, since, until, queue), 1):
        if number <= last or not queues.publish(app, number, queue, portion):
            known += portion.num_rows
        else:
            published += portion.num_rows
        tell(published + known, len(files))
    return Replayed(name, pinned, published, known)


def _portions(
    spark: SparkSession, table: Table, version: int, files: Sequence[str], *how: str
) -> Iterator[pa.Table]:
    for some in _bundles(files):
        yield from portions(messages(table.rows(spark, some, version), *how).toArrow())


def _bundles(files: Sequence[str]) -> Iterator[list[str]]:
    """Files in their order, some at a time."""
    bundle: list[str] = []
    size = 0
    for file in files:
        bytes_ = Path(file).stat().st_size
        if bundle and size + bytes_ > FILES_BYTES:
            yield bundle
            bundle, size = [], 0
        bundle.append(file)
        size += bytes_
    if bundle:
        yield bundle


def count(spark: SparkSession, table: Table, version: int | None = None, **how: Any) -> int:
    """How many messages a replay would publish."""
    return messages(table.read(spark, version), **how).count()
