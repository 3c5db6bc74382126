"""Queues as the pipelines use them: read as DataFrames, written to in portions that the broker takes.

A commit of the bulk door is one write to the log and bounded (`bulk.max_batch_bytes`), so what may be large is
published in portions, numbered under a name: a run that was cut short goes on behind the last one that counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import pyarrow as pa

from sluice.spark.door import Door, Where
from sluice.spark.faults import InvalidOption, Refused
from sluice.spark.pipelines.homes import homes_of, own

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

PORTION_BYTES: Final = 8 << 20  # of a commit: publishers and consumers wait 5 ms for each MB
PORTION_ROWS: Final = 20_000
COLUMNS: Final = ("value", "key", "queue", "headers", "delay", "priority", "message_id")
LETTER: Final = "letter"  # where the dead letter lies whose place a row takes


class Queues:
    """The queues of one broker."""

    def __init__(self, where: Where) -> None:
        self.where = where

    def options(self) -> dict[str, str]:
        told = {
            "url": self.where.url,
            "token": self.where.token,
            "tokenFile": self.where.token_file,
            "ca": self.where.ca,
        }
        return {name: value for name, value in told.items() if value}

    def read(self, spark: SparkSession, queue: str, headers: bool = True, **more: str) -> DataFrame:
        """What is kept now. Settles nothing."""
        reader = spark.read.format("sluice").options(**self.options(), **_choice(queue))
        return reader.options(includeHeaders=_said(headers), **more).load()

    def stream(
        self,
        spark: SparkSession,
        queue: str,
        rows_per_batch: int,
        group: str = "",
        headers: bool = True,
        **more: str,
    ) -> DataFrame:
        """From where the group stands, a new one from the beginning; Spark's progress becomes the group's. Without one:
        from the earliest message that is kept."""
        reader = spark.readStream.format("sluice").options(**self.options(), **_choice(queue))
        if group:
            reader = reader.option("group", group).option("startingOffsets", "group")
        return (
            reader.option("includeHeaders", _said(headers))
            .option("maxOffsetsPerTrigger", str(rows_per_batch))
            .options(**more)
            .load()
        )

    def letters(
        self, spark: SparkSession, queue: str, homes: Sequence[str] = (), headers: bool = True
    ) -> DataFrame:
        """The dead letters of a queue, wherever they lie: in `homes`, if the caller knows."""
        found = homes or self.homes(queue)
        if not found:
            raise InvalidOption(f"no message of {queue} has died", "See with `sluice dlq list` what has")
        return own(self.read(spark, exactly(*found), headers), queue)

    def homes(self, queue: str) -> list[str]:
        """The queues in which its dead letters lie; none if nothing has died."""
        door = _Describing(self.where)
        with door:
            found = homes_of(queue, door.describe)
        if found is None:
            raise InvalidOption(
                f"there is no queue {queue!r}", "See with `sluice queue list` which there are"
            )
        return found

    def exists(self, queue: str) -> bool:
        with Door(self.where) as door:
            try:
                door.offsets(queue)
            except Refused as refusal:
                if refusal.code.startswith("unknown_"):
                    return False
                raise
            return True

    def lag(self, queue: str, group: str) -> int:
        """Messages between where the group stands and the end; of a group that is yet to come, all that are kept."""
        with Door(self.where) as door:
            told = door.offsets(queue)
            try:
                done = door.progress(queue, group)
            except Refused as refusal:
                if not refusal.code.startswith("unknown_"):
                    raise
                done = {}
            return sum(
                max(0, one.latest - max(one.earliest, done.get(one.partition, 0))) for one in told.partitions
            )

    def last_portion(self, app: str) -> int:
        """The number of the last portion of an application that counts; 0 for none."""
        with Door(self.where) as door:
            return door.last_batch(app) or 0

    def publish(self, app: str, number: int, queue: str, rows: pa.Table) -> bool:
        """One portion, whole and once; False if it was published before."""
        with Door(self.where) as door:
            stage = door.stage(app, number, queue, stream_of(rows))
            return door.commit(app, number, [stage], rows.num_rows)

    def mend(self, app: str, number: int, queue: str, rows: pa.Table, to_all: bool) -> int:
        """One portion of rows that take the place of dead letters (column `letter`); how many were gone already."""
        with Door(self.where) as door:
            stage = door.stage(app, number, queue, stream_of(rows))
            return door.mend(app, number, [stage], rows.num_rows, to_all)


class _Describing(Door):
    """The door of REST beside the bulk door: what is known of a queue."""

    def describe(self, queue: str) -> dict[str, Any] | None:
        try:
            told: dict[str, Any] = self._ask("GET", f"/queues/{quote(queue.replace('/', '$'), safe='$')}")
        except Refused as refusal:
            if refusal.code.startswith("unknown_"):
                return None
            raise
        return told


def portions(table: pa.Table) -> Iterator[pa.Table]:
    """Cut a table where a portion is full. The same table is cut in the same places."""
    start = size = 0
    for nth, bytes_ in enumerate(_row_bytes(table)):
        if nth > start and (size + bytes_ > PORTION_BYTES or nth - start >= PORTION_ROWS):
            yield table.slice(start, nth - start)
            start, size = nth, 0
        size += bytes_
    if start < table.num_rows:
        yield table.slice(start)


def _row_bytes(table: pa.Table) -> list[int]:
    """About what each row takes on its way: payload and key as they are, a guess for the rest."""
    import pyarrow.compute as pc

    sizes = pc.fill_null(pc.binary_length(table["value"]), 0)
    if "key" in table.column_names:
        sizes = pc.add(sizes, pc.fill_null(pc.binary_length(table["key"]), 0))
    extra = 300 if "headers" in table.column_names else 60
    found: list[int] = pc.add(sizes, extra).to_pylist()
    return found


def stream_of(table: pa.Table) -> bytes:
    """As the bytes of an Arrow stream; columns that the broker does not know are left out."""
    table = table.select([name for name in (*COLUMNS, LETTER) if name in table.column_names])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def exactly(*names: str) -> str:
    """What to say in order to read these queues and no others: a name may have a comma in it."""
    if any("," in name for name in names):
        return f"/{'|'.join(re.escape(name) for name in names)}/"
    return ",".join(names)


def _choice(queue: str) -> dict[str, str]:
    """A name, several with commas between them, or a pattern between slashes: /dlq\\/.*/"""
    if len(queue) > 2 and queue.startswith("/") and queue.endswith("/"):
        return {"subscribePattern": queue[1:-1]}
    return {"subscribe": queue}


def reads(queue: str, name: str) -> bool:
    """Whether who says `queue` reads the queue `name` as well."""
    chosen = _choice(queue)
    if "subscribePattern" in chosen:
        return re.fullmatch(chosen["subscribePattern"], name) is not None
    return name in (one.strip() for one in chosen["subscribe"].split(","))


def _said(flag: bool) -> str:
    return "true" if flag else "false"


def as_messages(rows: DataFrame) -> DataFrame:
    """The columns that a queue takes. Payload and key may be strings, or whatever has one: 7 becomes "7", and what has
    parts becomes JSON."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

    known: list[Column] = []
    for name in COLUMNS:
        if name not in rows.columns:
            continue
        column = rows[name]
        kind = rows.schema[name].dataType
        if name in ("value", "key") and not isinstance(kind, BinaryType):
            has_parts = isinstance(kind, StructType | MapType | ArrayType)
            column = (f.to_json(column) if has_parts else column.cast("string")).cast("binary").alias(name)
        known.append(column)
    return rows.select(*known)
