"""`replay`: an archive back into a queue, all of it or a part.

Rows go in portions that are numbered under a name, in an order that does not change for one version of the table. A
replay that was cut short and is started again with the same name goes on behind the last portion that counts: nothing
is published twice, nothing left out.

The archive may grow meanwhile, so the version that a replay began with is part of the number of each portion: the
broker keeps it in one step with the rows, and whoever goes on asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f

from sluice.errors import SluiceError
from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines.support.run_lock import alone
from sluice.spark.pipelines.support.row_collection import PLACE, brought
from sluice.spark.pipelines.support.publish_batches import portions
from sluice.spark.pipelines.queues import Queues, app_of
from sluice.spark.pipelines.jobs.redrive import STORY
from sluice.spark.pipelines.tables import OWN, Table, open_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

FILES_BYTES: Final = 64 << 20  # of files that are looked at together
REPLAYED: Final = "replayed-from"
TIES: Final = ("stored_at", "old_id")  # a queue that was made again has had each place twice
PORTIONS: Final = 1 << 24  # of one replay, at most; above them lies the version, from 1 on


class OtherVersion(SluiceError):
    """Two runs of one replay began with different versions of the archive."""


def messages(
    rows: DataFrame, where: str = "", since: str = "", until: str = "", queue: str = ""
) -> DataFrame:
    """Rows of an archive as messages, oldest first within their partition. Ids are left out: the broker would take a
    message that it has seen lately for a repetition. The header `replayed-from` has the old one. What the broker wrote
    on a dead letter is left out too: a live message does not say that it is dead."""
    placed = _placed(rows, where, since, until, queue)
    return placed.orderBy(*PLACE, *TIES).drop(*PLACE, *TIES)


def _placed(rows: DataFrame, where: str, since: str, until: str, queue: str) -> DataFrame:
    """The same with where each row lay, and in no order."""
    if where:
        rows = rows.where(where)
    if since:
        rows = rows.where(f.col("timestamp") >= f.lit(since).cast("timestamp"))
    if until:
        rows = rows.where(f.col("timestamp") < f.lit(until).cast("timestamp"))
    marked = f.map_from_arrays(f.array(f.lit(REPLAYED)), f.array(f.col("message_id").cast("binary")))
    headers = f.create_map().cast("map<string,binary>")
    if "headers" in rows.columns:
        own = f.map_filter("headers", lambda name, value: ~name.isin(*STORY, REPLAYED))
        headers = f.coalesce(own, headers)
    return rows.select(
        "value",
        "key",
        (f.lit(queue) if queue else f.col("queue")).alias("queue"),
        f.map_concat(headers, marked).alias("headers"),
        f.col("queue").alias("home"),
        "partition",
        "sequence",
        f.col("timestamp").alias("stored_at"),
        f.col("message_id").alias("old_id"),
    )


@dataclass(frozen=True)
class Plan:
    """A replay that is about to begin, or to go on: which rows, of which version, under which name."""

    table: Table
    version: int
    name: str
    app: str
    how: tuple[str, str, str, str]  # where, since, until, queue
    done: int  # portions that were published before

    @property
    def is_newest(self) -> bool:
        return self.version == self.table.version()

    def number(self, nth: int) -> int:
        return (self.version + 1) * PORTIONS + nth

    def count(self, spark: SparkSession) -> int:
        """How many messages it is about, those that were published before included."""
        rows = self.table.rows(spark, self.table.files(self.version), self.version)
        return _placed(rows, *self.how).count()


@dataclass(frozen=True)
class Replayed:
    name: str
    version: int
    published: int
    known: int  # published by an earlier run under the same name


def plan(
    queues: Queues,
    source: str | Path,
    queue: str = "",
    *,
    where: str = "",
    since: str = "",
    until: str = "",
    name: str = "",
    version: int | None = None,
) -> Plan:
    """What is to be published. The same question of the same table has the same name, unless told; under a name each
    question is counted by itself, so that one does not go on where another has stopped."""
    table = open_table(source)
    if version is not None:
        table.check_version(version)
    if not table.files(version):
        raise InvalidOption(f"{table.path} holds no rows", "Give the directory of an archive")
    how = (where, since, until, queue)
    name = name or _mark(str(table.path), "" if version is None else str(version), *how)
    apps = [app_of("replay", name, _mark(one, *how)) for one in table.identities()]
    app, last = next(((one, last) for one in apps if (last := queues.last_portion(one))), (apps[0], 0))
    if not last and queues.last_portion(app_of("replay", name)):
        raise InvalidOption(
            f"replay {name} was begun by an earlier version of Sluice, which counted it otherwise",
            "Give another --name, with --since or --where that leaves out what it has published",
        )
    begun = last // PORTIONS - 1 if last else None
    if version is not None and begun is not None and begun != version:
        raise InvalidOption(
            f"replay {name} began with version {begun} of {table.path}, not {version}",
            "Leave --version out to go on with it, or give another --name",
        )
    pinned = next(one for one in (begun, version, table.version()) if one is not None)
    done = last % PORTIONS
    if not table.keeps(pinned):
        before = f"; replay {name} has published {done} of its portions" if done else ""
        raise InvalidOption(
            f"{table.path} does not keep {table.words_of(pinned)} as it was: files are gone, or others came before"
            f" them{before}",
            "Publish what is left with another --name, and --since or --where that leaves out what was published"
            if done
            else "Leave --version out, or give one that is kept",
        )
    return Plan(table, pinned, name, app, how, done)


def _mark(*facts: str) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def run(
    spark: SparkSession,
    queues: Queues,
    source: str | Path,
    queue: str = "",
    tell: Callable[[int, int], None] = lambda done, total: None,
    **how: Any,
) -> Replayed:
    """Publish what fits: `how` is that of `plan`."""
    return carry_out(spark, queues, plan(queues, source, queue, **how), tell)


def carry_out(
    spark: SparkSession,
    queues: Queues,
    chosen: Plan,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Replayed:
    """Publish what was planned. `tell` hears how many rows are done, and how many files there are."""
    files = chosen.table.files(chosen.version)
    published = known = 0
    with _only_run(chosen):
        for nth, portion in enumerate(_portions(spark, chosen, files), 1):
            if nth > chosen.done and _publish(queues, chosen, nth, portion):
                published += portion.num_rows
            else:
                known += portion.num_rows
            tell(published + known, len(files))
    return Replayed(chosen.name, chosen.version, published, known)


@contextmanager
def _only_run(chosen: Plan) -> Iterator[None]:
    """Two runs that have both begun with nothing would not know of one another until each has published something. Who
    may only read the archive has no lock, and what is asked before each portion."""
    with ExitStack() as held:
        with suppress(OSError):
            held.enter_context(alone(chosen.table.path / OWN / "replay" / _mark(chosen.app)))
        yield


def _publish(queues: Queues, chosen: Plan, nth: int, portion: pa.Table) -> bool:
    """False if another run has published this very portion. A portion of a later version has the higher number, and the
    broker would take it: so it is asked for the version first."""
    if _published(queues, chosen) >= nth:
        return False
    if queues.publish(chosen.app, chosen.number(nth), chosen.how[-1], portion):
        return True
    _published(queues, chosen)
    return False


def _published(queues: Queues, chosen: Plan) -> int:
    """How many portions there are of this replay. Whoever else is at it must be at the same version."""
    last = queues.last_portion(chosen.app)
    if last and last // PORTIONS - 1 != chosen.version:
        raise OtherVersion(
            f"another run of replay {chosen.name} has begun with {chosen.table.words_of(last // PORTIONS - 1)}"
            f" {chosen.table.path}, and this one with {chosen.table.words_of(chosen.version)}",
            "Let the other come to its end",
        )
    return last % PORTIONS


def _portions(spark: SparkSession, chosen: Plan, files: Sequence[str]) -> Iterator[pa.Table]:
    for some in _bundles(files):
        rows = chosen.table.rows(spark, some, chosen.version)
        for table in brought(_placed(rows, *chosen.how), *TIES):
            yield from portions(table)


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
