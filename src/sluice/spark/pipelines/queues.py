"""Queues as the pipelines use them: read as DataFrames, written to in portions that the broker takes (`portions`).

Portions are numbered under a name: a run that was cut short goes on behind the last one that counts.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sluice.units import path_segment
from sluice.spark.http.bulk_client import Door, Where
from sluice.spark.errors import InvalidOption, Refused
from sluice.spark.pipelines.support.dead_letter_queues import homes_of, own
from sluice.spark.pipelines.support.publish_batches import COLUMNS, PORTION_BYTES, stream_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

TRIES: Final = 5  # of a portion whose stage was gone when it was to be committed
LONGEST_APP: Final = 256  # of the name of an application, for the broker

T = TypeVar("T")


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
        skip_lost: bool = False,
        **more: str,
    ) -> DataFrame:
        """From where the group stands, a new one from the beginning; Spark's progress becomes the group's. Without one:
        from the earliest message that is kept. `skip_lost`: what is gone before it was read is no fault."""
        reader = spark.readStream.format("sluice").options(**self.options(), **_choice(queue))
        if group:
            reader = reader.option("group", group).option("startingOffsets", "group")
        return (
            reader.option("includeHeaders", _said(headers))
            .option("maxOffsetsPerTrigger", str(rows_per_batch))
            .option("failOnDataLoss", _said(not skip_lost))
            .options(**more)
            .load()
        )

    def letters(
        self, spark: SparkSession, queue: str, homes: Sequence[str] = (), headers: bool = True
    ) -> DataFrame:
        """The dead letters of a queue, wherever they lie: in `homes`, if the caller knows. Those that are there now,
        however often it is looked at: who was asked about some is not given others."""
        found = homes or self.homes(queue)
        if not found:
            raise InvalidOption(f"no message of {queue} has died", "See with `sluice dlq list` what has")
        return own(self.read(spark, exactly(*found), headers, endingOffsets=self._ends(found)), queue)

    def _ends(self, found: Sequence[str]) -> str:
        """Where queues end now, as an option."""
        with Door(self.where) as door:
            ends = {name: door.offsets(name).latest() for name in found}
        return json.dumps(
            {name: {str(one): seq for one, seq in parts.items()} for name, parts in ends.items()}
        )

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

    def settled(self, queue: str, group: str) -> int | None:
        """How many messages a group has settled in its life; None if there is no such group."""
        door = _Describing(self.where)
        with door:
            return door.settled(queue, group)

    def last_portion(self, app: str) -> int:
        """The number of the last portion of an application that counts; 0 for none."""
        with Door(self.where) as door:
            return door.last_batch(app) or 0

    def publish(self, app: str, number: int, queue: str, rows: pa.Table) -> bool:
        """One portion, whole and once; False if somebody else has published it."""

        def commit(door: _Committing, stage: str) -> bool:
            return door.commit(app, number, [stage], rows.num_rows) or door.is_unheard

        return self._bring(app, number, queue, rows, commit)

    def mend(self, app: str, number: int, queue: str, rows: pa.Table, to_all: bool) -> int:
        """One portion of rows that take the place of dead letters (column `letter`); how many were gone already."""

        def commit(door: _Committing, stage: str) -> int:
            return door.mend(app, number, [stage], rows.num_rows, to_all)

        return self._bring(app, number, queue, rows, commit)

    def _bring(
        self, app: str, number: int, queue: str, rows: pa.Table, commit: Callable[[_Committing, str], T]
    ) -> T:
        """Stage a portion and commit it. A broker that was restarted in between has lost the stage: it is brought
        again."""
        data = stream_of(rows)
        door = _Committing(self.where)
        with door:
            for left in reversed(range(TRIES)):
                try:
                    stage = door.stage(app, number, queue, data)
                    door.is_unheard = False
                    return commit(door, stage)
                except Refused as refusal:
                    if refusal.code == "batch_too_large":
                        refusal.do = (
                            f"What is sent at once has at most {PORTION_BYTES >> 20} MiB, or is one message: raise"
                            " bulk.max_batch_bytes on the broker to more than that"
                        )
                    if refusal.code != "stale_batch" or not left:
                        raise
        raise AssertionError  # the last try has returned or raised


class _Committing(Door):
    """Knows whether an answer went missing. The broker may have committed and died before it answered; asked again it
    says that the batch was committed before, which is then no other run's doing."""

    is_unheard = False

    def _patiently(self, once: Callable[[], T]) -> T:
        def noting() -> T:
            try:
                return once()
            except ConnectionRefusedError:  # nobody was there to do anything
                raise
            except (http.client.HTTPException, OSError):
                self.is_unheard = True
                raise

        return super()._patiently(noting)


class _Describing(Door):
    """The door of REST beside the bulk door: what is known of a queue."""

    def settled(self, queue: str, group: str) -> int | None:
        told = self._ask("GET", f"{_described(queue)}/groups")
        return next((int(one["ledger"]["acked"]) for one in told if one["name"] == group), None)

    def describe(self, queue: str) -> dict[str, Any] | None:
        try:
            told: dict[str, Any] = self._ask("GET", _described(queue))
        except Refused as refusal:
            if refusal.code.startswith("unknown_"):
                return None
            raise
        return told


def _described(queue: str) -> str:
    return f"/queues/{path_segment(queue.replace('/', '$'), '$')}"


def app_of(*parts: str) -> str:
    """The name under which portions are numbered. What is too long for the broker is told apart by its hash."""
    name = "/".join(parts)
    if len(name) <= LONGEST_APP:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name[: LONGEST_APP - len(mark) - 1]}/{mark}"


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
    """The columns that a queue takes."""
    known = [name for name in COLUMNS if name in rows.columns]
    return rows.select(*(as_binary(rows, name) if name in ("value", "key") else rows[name] for name in known))


def as_binary(rows: DataFrame, name: str) -> Column:
    """A column as payloads or keys. It may be of strings, or of whatever has one: 7 becomes "7", and what has parts
    becomes JSON."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

    column, kind = rows[name], rows.schema[name].dataType
    if isinstance(kind, BinaryType):
        return column
    has_parts = isinstance(kind, StructType | MapType | ArrayType)
    return (f.to_json(column) if has_parts else column.cast("string")).cast("binary").alias(name)
