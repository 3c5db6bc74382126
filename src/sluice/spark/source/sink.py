"""df.write and df.writeStream: each task stages its rows; the driver commits all stages in one step that counts once.

A micro-batch goes by the id of its query and its number, which a restart from the same checkpoint does not change: the
broker knows a batch that comes again and does not store it again. A batch write has an id of its own, or the pair
(txnAppId, txnVersion) by which a job that is run again is known.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from sluice.errors import SluiceError
from sluice.spark.http.bulk_client import Door, Where
from sluice.spark.errors import Refused
from sluice.spark.source.source_options import LONGEST_NAME, WriteOptions
from sluice.spark.source.source_options import ONCE as ONCE  # for those who write so

log = logging.getLogger(__name__)

STAGE_BYTES: Final = 8 << 20  # sent at once: what a task holds, and says again after a failure
QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"


@dataclass
class Staged(WriterCommitMessage):
    """What one task has brought."""

    app: str
    batch: int
    stages: list[str]
    rows: int


def stage_rows(
    where: Where, app: str, batch: int, queue: str, names: list[str], batches: Iterable[pa.RecordBatch]
) -> Staged:
    """Send the rows of a task, in pieces."""
    done = Staged(app, batch, [], 0)
    with Door(where) as door:
        for piece, rows in _pieces(names, batches):
            try:
                done.stages.append(door.stage(app, batch, queue, memoryview(piece)))
            except Refused as refusal:
                raise _explained(refusal) from None
            done.rows += rows
    return done


def _pieces(names: list[str], batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[pa.Buffer, int]]:
    """Rows as Arrow streams of about STAGE_BYTES each, and how many they are."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            held.append(batch.select(names))
        if sum(one.nbytes for one in held) >= STAGE_BYTES:
            yield _stream_of(held)
            held = []
    if held:
        yield _stream_of(held)


def _stream_of(batches: list[pa.RecordBatch]) -> tuple[pa.Buffer, int]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return sink.getvalue(), sum(batch.num_rows for batch in batches)


def commit_stages(where: Where, app: str, batch: int, messages: list[WriterCommitMessage | None]) -> None:
    """All stages of a batch in one step; nothing if there are no rows."""
    staged = [one for one in messages if isinstance(one, Staged)]
    rows = sum(one.rows for one in staged)
    if not rows:
        return
    with Door(where) as door:
        try:
            is_new = door.commit(app, batch, [name for one in staged for name in one.stages], rows)
        except Refused as refusal:
            raise _explained(refusal) from None
    if not is_new:
        log.warning("batch %d of %s was stored before, and is not stored again", batch, app)


def drop_stages(where: Where, app: str, batch: int) -> None:
    """What is not dropped here ends by itself after `bulk.stage_ttl`."""
    try:
        with Door(where) as door:
            door.abort(app, batch)
    except SluiceError as fault:
        log.warning("the stages of batch %d of %s are left to expire: %s", batch, app, fault)


def _explained(refusal: Refused) -> Refused:
    """What the broker cannot know: how Spark can do better."""
    if refusal.code == "batch_too_large":
        refusal.do = (
            "A batch is one atomic write. For a stream: set maxBytesPerTrigger (or maxOffsetsPerTrigger) on its source"
            " before its first run; a batch that is in the checkpoint already needs bulk.max_batch_bytes on the broker"
            " raised once. For df.write: raise it, or write in parts"
        )
    elif refusal.code == "stale_batch":
        refusal.do = (
            f"{refusal.do}. So start the query again: it repeats the batch. One that takes longer than bulk.stage_ttl"
            " fails each time: raise that, or make batches smaller, by maxBytesPerTrigger"
        )
    return refusal


class BatchWriter(DataSourceArrowWriter):
    """`app` is made on the driver and pickled with this object, so that all tasks and the commit have the same."""

    def __init__(self, options: WriteOptions, names: list[str], app: str) -> None:
        self._options = options
        self._names = names
        self._app = app

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        options = self._options
        return stage_rows(options.where, self._app, options.version, options.queue, self._names, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if self._was_stored_before():
            drop_stages(self._options.where, self._app, self._options.version)
        else:
            commit_stages(self._options.where, self._app, self._options.version, messages)

    def _was_stored_before(self) -> bool:
        """Jobs that were run before each queue had a name of its own (`fence`) are known by that of the job. None had a
        name that is too long for the broker."""
        options = self._options
        if not options.app or len(options.app) > LONGEST_NAME:
            return False
        with Door(options.where) as door:
            last = door.last_batch(options.app)
        if last is None or options.version > last:
            return False
        log.warning(
            "version %d of %s was stored before, and is not stored again", options.version, options.app
        )
        return True

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        drop_stages(self._options.where, self._app, self._options.version)


class StreamWriter(DataSourceStreamArrowWriter):
    """Which query and batch it is, only the tasks are told."""

    def __init__(self, options: WriteOptions, names: list[str]) -> None:
        self._options = options
        self._names = names

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        app, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        assert app is not None and batch is not None
        options = self._options
        return stage_rows(options.where, app, int(batch), options.queue, self._names, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for app in _apps(messages):
            commit_stages(self._options.where, app, batchId, messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for app in _apps(messages):
            drop_stages(self._options.where, app, batchId)


def _apps(messages: list[WriterCommitMessage | None]) -> set[str]:
    """One, or none when every task has failed."""
    return {one.app for one in messages if isinstance(one, Staged)}
