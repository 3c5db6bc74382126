"""df.write and df.writeStream: each task stages its rows; the driver commits all stages at once.

A micro-batch is identified by the id of its query and its number. A restart from the same
checkpoint does not change them, so the broker recognizes a repeated batch and does not store it
again. A batch write has an id of its own, or the pair (txnAppId, txnVersion) that identifies a
repeated job.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from sluice.errors import SluiceError
from sluice.http_client import Endpoint
from sluice.spark.errors import Refused
from sluice.spark.http import BulkClient
from sluice.spark.source.source_options import MAX_APP_NAME, WriteOptions

log = logging.getLogger(__name__)

# sent at once: what a task holds in memory, and resends after a failure
STAGE_BYTES: Final = 8 << 20
QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"


@dataclass
class StagedRows(WriterCommitMessage):
    """The rows that one task has staged."""

    app: str
    batch: int
    stages: list[str]
    rows: int


def stage_rows(
    where: Endpoint,
    app: str,
    batch: int,
    queue: str,
    columns: list[str],
    batches: Iterable[pa.RecordBatch],
) -> StagedRows:
    """Stage the rows of a task, in chunks."""
    staged = StagedRows(app, batch, [], 0)
    with BulkClient(where) as client:
        for piece, rows in _split_stages(columns, batches):
            try:
                staged.stages.append(client.stage(app, batch, queue, memoryview(piece)))
            except Refused as refusal:
                raise _with_remedy(refusal) from None
            staged.rows += rows
    return staged


def _split_stages(
    columns: list[str], batches: Iterable[pa.RecordBatch]
) -> Iterator[tuple[pa.Buffer, int]]:
    """Yield Arrow streams of about STAGE_BYTES each, with their row counts."""
    pending: list[pa.RecordBatch] = []
    for batch in batches:
        if batch.num_rows:
            pending.append(batch.select(columns))
        if sum(one.nbytes for one in pending) >= STAGE_BYTES:
            yield _arrow_stream(pending)
            pending = []
    if pending:
        yield _arrow_stream(pending)


def _arrow_stream(batches: list[pa.RecordBatch]) -> tuple[pa.Buffer, int]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return sink.getvalue(), sum(batch.num_rows for batch in batches)


def commit_stages(
    where: Endpoint,
    app: str,
    batch: int,
    messages: list[WriterCommitMessage | None],
    queue: str = "",
    create: str = "",
) -> None:
    """Commit all stages of a batch at once; do nothing if there are no rows.

    `create`: settings of `queue`, if it does not exist yet.
    """
    staged = [one for one in messages if isinstance(one, StagedRows)]
    rows = sum(one.rows for one in staged)
    if not rows:
        return
    with BulkClient(where) as client:
        if create:
            client.create_queue(queue, json.loads(create))
        try:
            is_new = client.commit(
                app, batch, [name for one in staged for name in one.stages], rows
            )
        except Refused as refusal:
            raise _with_remedy(refusal) from None
    if not is_new:
        log.warning("batch %d of %s was stored before, and is not stored again", batch, app)


def drop_stages(where: Endpoint, app: str, batch: int) -> None:
    """Drop the stages of a batch. If that fails, they expire after `bulk.stage_ttl`."""
    try:
        with BulkClient(where) as client:
            client.abort(app, batch)
    except SluiceError as fault:
        log.warning("the stages of batch %d of %s are left to expire: %s", batch, app, fault)


def _with_remedy(refusal: Refused) -> Refused:
    """Replace the broker's remedy by what a Spark user can do."""
    if refusal.code == "batch_too_large":
        refusal.remedy = (
            "A batch is one atomic write. For a stream: set maxBytesPerTrigger"
            " (or maxOffsetsPerTrigger) on its source before its first run; a batch that is in the"
            " checkpoint already needs bulk.max_batch_bytes on the broker raised once."
            " For df.write: raise it, or write in parts"
        )
    elif refusal.code == "stale_batch":
        refusal.remedy = (
            f"{refusal.remedy}. So start the query again: it repeats the batch."
            " A batch that takes longer than bulk.stage_ttl fails each time:"
            " raise that, or make batches smaller, by maxBytesPerTrigger"
        )
    return refusal


class BatchWriter(DataSourceArrowWriter):
    """df.write. The driver creates and pickles `app`, so that tasks and commit share it."""

    def __init__(self, options: WriteOptions, columns: list[str], app: str) -> None:
        self._options = options
        self._columns = columns
        self._app = app

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        options = self._options
        return stage_rows(
            options.where, self._app, options.version, options.queue, self._columns, iterator
        )

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        if self._is_stored():
            drop_stages(self._options.where, self._app, self._options.version)
        else:
            options = self._options
            commit_stages(
                options.where, self._app, options.version, messages, options.queue, options.create
            )

    def _is_stored(self) -> bool:
        """Return whether an older Sluice has stored this version.

        Before each queue had its own name (`WriteOptions.transaction_app`), a job was known by
        `txnAppId` alone, which never exceeded MAX_APP_NAME.
        """
        options = self._options
        if not options.app or len(options.app) > MAX_APP_NAME:
            return False
        with BulkClient(options.where) as client:
            last = client.last_batch(options.app)
        if last is None or options.version > last:
            return False
        log.warning(
            "version %d of %s was stored before, and is not stored again",
            options.version,
            options.app,
        )
        return True

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        drop_stages(self._options.where, self._app, self._options.version)


class StreamWriter(DataSourceStreamArrowWriter):
    """df.writeStream. Only the tasks know the ids of the query and the batch."""

    def __init__(self, options: WriteOptions, columns: list[str]) -> None:
        self._options = options
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        app, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        assert app is not None and batch is not None
        options = self._options
        return stage_rows(options.where, app, int(batch), options.queue, self._columns, iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for app in _apps(messages):
            options = self._options
            commit_stages(options.where, app, batchId, messages, options.queue, options.create)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for app in _apps(messages):
            drop_stages(self._options.where, app, batchId)


def _apps(messages: list[WriterCommitMessage | None]) -> set[str]:
    """Return the application names: one, or none if every task failed."""
    return {one.app for one in messages if isinstance(one, StagedRows)}
