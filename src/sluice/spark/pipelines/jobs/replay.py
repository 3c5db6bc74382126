"""`replay`: publish an archive to a queue, all of it or a part.

Rows are published in batches that are numbered under a name, in an order that is fixed for one
version of the table. A replay that was interrupted and is started again with the same name
continues after its last committed batch: nothing is published twice, nothing is left out.

The archive may grow meanwhile, so the table version of a replay is part of each batch number. The
broker stores the number atomically with the rows, and a restarted run asks for it.
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
from sluice.spark.pipelines.jobs.redrive import BROKER_HEADERS
from sluice.spark.pipelines.queues import Queues, app_name
from sluice.spark.pipelines.support.publish_batches import split_batches
from sluice.spark.pipelines.support.row_collection import POSITION_COLUMNS, collect_in_order
from sluice.spark.pipelines.support.run_lock import exclusive_run
from sluice.spark.pipelines.tables import SLUICE_DIRECTORY, Table, open_table

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

MAX_FILE_BYTES: Final = 64 << 20  # of files that are read together
REPLAYED_HEADER: Final = "replayed-from"
# A queue that was created again has used each position twice.
TIE_BREAKERS: Final = (
    "stored_at",
    "old_id",
)
MAX_BATCHES: Final = 1 << 24  # of one replay, at most; the higher bits are the version plus 1


class VersionConflict(SluiceError):
    """Two runs of one replay began with different versions of the archive."""


def replay_messages(
    rows: DataFrame, where: str = "", since: str = "", until: str = "", queue: str = ""
) -> DataFrame:
    """Return rows of an archive as messages, oldest first within their partition.

    Ids are left out: the broker would take a recently seen id for a duplicate. The header
    `replayed-from` has the old id. Headers that the broker adds to dead letters are left out too: a
    live message must not look dead.
    """
    placed = _with_positions(rows, where, since, until, queue)
    return placed.orderBy(*POSITION_COLUMNS, *TIE_BREAKERS).drop(*POSITION_COLUMNS, *TIE_BREAKERS)


def _with_positions(rows: DataFrame, where: str, since: str, until: str, queue: str) -> DataFrame:
    """Return the same messages with their positions, unordered."""
    if where:
        rows = rows.where(where)
    if since:
        rows = rows.where(f.col("timestamp") >= f.lit(since).cast("timestamp"))
    if until:
        rows = rows.where(f.col("timestamp") < f.lit(until).cast("timestamp"))
    marked = f.map_from_arrays(
        f.array(f.lit(REPLAYED_HEADER)), f.array(f.col("message_id").cast("binary"))
    )
    headers = f.create_map().cast("map<string,binary>")
    if "headers" in rows.columns:
        user_headers = f.map_filter(
            "headers", lambda name, value: ~name.isin(*BROKER_HEADERS, REPLAYED_HEADER)
        )
        headers = f.coalesce(user_headers, headers)
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
class ReplayPlan:
    """A replay that is about to begin or to continue: its rows, table version and name."""

    table: Table
    version: int
    name: str
    app: str
    filters: tuple[str, str, str, str]  # where, since, until, queue
    published_batches: int  # batches published by earlier runs

    @property
    def is_newest(self) -> bool:
        return self.version == self.table.version()

    def batch_number(self, nth: int) -> int:
        return (self.version + 1) * MAX_BATCHES + nth

    def count(self, spark: SparkSession) -> int:
        """Count its messages, including those published before."""
        rows = self.table.read_files(spark, self.table.files(self.version), self.version)
        return _with_positions(rows, *self.filters).count()


@dataclass(frozen=True)
class ReplayResult:
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
) -> ReplayPlan:
    """Plan what to publish.

    The default name is derived from table and filters. Under one name, each combination of filters
    has its own batch numbers, so that one does not continue where another stopped.
    """
    table = open_table(source)
    if version is not None:
        table.check_version(version)
    if not table.files(version):
        raise InvalidOption(f"{table.path} holds no rows", "Give the directory of an archive")
    how = (where, since, until, queue)
    name = name or _short_hash(str(table.path), "" if version is None else str(version), *how)
    apps = [app_name("replay", name, _short_hash(one, *how)) for one in table.identities()]
    app, last = next(
        ((one, last) for one in apps if (last := queues.last_batch_number(one))), (apps[0], 0)
    )
    if not last and queues.last_batch_number(app_name("replay", name)):
        raise InvalidOption(
            f"replay {name} was begun by an earlier version of Sluice, which counted it otherwise",
            "Give another --name, with --since or --where that leaves out what it has published",
        )
    begun = last // MAX_BATCHES - 1 if last else None
    if version is not None and begun is not None and begun != version:
        raise InvalidOption(
            f"replay {name} began with version {begun} of {table.path}, not {version}",
            "Leave --version out to go on with it, or give another --name",
        )
    pinned = next(one for one in (begun, version, table.version()) if one is not None)
    done = last % MAX_BATCHES
    if not table.has_version(pinned):
        before = f"; replay {name} has published {done} of its batches" if done else ""
        raise InvalidOption(
            f"{table.path} does not keep {table.describe_version(pinned)} as it was:"
            f" files are gone, or others came before them{before}",
            "Publish what is left with another --name, and --since or --where that leaves out what"
            " was published"
            if done
            else "Leave --version out, or give one that is kept",
        )
    return ReplayPlan(table, pinned, name, app, how, done)


def _short_hash(*facts: str) -> str:
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def run(
    spark: SparkSession,
    queues: Queues,
    source: str | Path,
    queue: str = "",
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    **how: Any,
) -> ReplayResult:
    """Publish the rows that the filters select; `how` is passed to `plan`."""
    return run_plan(spark, queues, plan(queues, source, queue, **how), on_progress)


def run_plan(
    spark: SparkSession,
    queues: Queues,
    chosen: ReplayPlan,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ReplayResult:
    """Publish what was planned. `on_progress` gets the number of finished rows and of files."""
    files = chosen.table.files(chosen.version)
    published = known = 0
    with _exclusive_run(chosen):
        for nth, batch in enumerate(_batches(spark, chosen, files), 1):
            if nth > chosen.published_batches and _publish(queues, chosen, nth, batch):
                published += batch.num_rows
            else:
                known += batch.num_rows
            on_progress(published + known, len(files))
    return ReplayResult(chosen.name, chosen.version, published, known)


@contextmanager
def _exclusive_run(chosen: ReplayPlan) -> Iterator[None]:
    """Lock the replay against a second run.

    Two runs that both begin with nothing would not notice each other until each has published a
    batch. A user who can only read the archive gets no lock; the check before each batch remains.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(
                exclusive_run(
                    chosen.table.path / SLUICE_DIRECTORY / "replay" / _short_hash(chosen.app)
                )
            )
        yield


def _publish(queues: Queues, chosen: ReplayPlan, nth: int, batch: pa.Table) -> bool:
    """Publish one batch; return False if another run has published it.

    A batch of a later version has a higher number, and the broker would accept it; so ask for the
    version first.
    """
    if _published_batches(queues, chosen) >= nth:
        return False
    if queues.publish(chosen.app, chosen.batch_number(nth), chosen.filters[-1], batch):
        return True
    _published_batches(queues, chosen)
    return False


def _published_batches(queues: Queues, chosen: ReplayPlan) -> int:
    """Count the published batches of this replay. Refuse another version than this run's."""
    last = queues.last_batch_number(chosen.app)
    if last and last // MAX_BATCHES - 1 != chosen.version:
        raise VersionConflict(
            f"another run of replay {chosen.name} has begun with"
            f" {chosen.table.describe_version(last // MAX_BATCHES - 1)} {chosen.table.path},"
            f" and this one with {chosen.table.describe_version(chosen.version)}",
            "Wait until the other run has ended",
        )
    return last % MAX_BATCHES


def _batches(spark: SparkSession, chosen: ReplayPlan, files: Sequence[str]) -> Iterator[pa.Table]:
    for some in _group_files(files):
        rows = chosen.table.read_files(spark, some, chosen.version)
        for table in collect_in_order(_with_positions(rows, *chosen.filters), *TIE_BREAKERS):
            yield from split_batches(table)


def _group_files(files: Sequence[str]) -> Iterator[list[str]]:
    """Yield the files in order, in groups of at most MAX_FILE_BYTES."""
    group: list[str] = []
    size = 0
    for file in files:
        bytes_ = Path(file).stat().st_size
        if group and size + bytes_ > MAX_FILE_BYTES:
            yield group
            group, size = [], 0
        group.append(file)
        size += bytes_
    if group:
        yield group
