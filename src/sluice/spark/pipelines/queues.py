"""Queues for pipelines: read as DataFrames, written to in batches (`publish_batches`).

Batches are numbered under a name: an interrupted run continues after its last committed batch.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from sluice.http_client import Endpoint, queue_path
from sluice.spark.errors import InvalidOption, Refused
from sluice.spark.http import BulkClient
from sluice.spark.pipelines.support.dead_letter_queues import (
    find_dead_letter_queues,
    only_from_queue,
)
from sluice.spark.pipelines.support.publish_batches import (
    MAX_BATCH_BYTES,
    MESSAGE_COLUMNS,
    arrow_stream_bytes,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

MAX_TRIES: Final = 5  # of a batch whose stage was lost before its commit
MAX_APP_NAME: Final = 256  # of an application, for the broker

T = TypeVar("T")


class Queues:
    """The queues of one broker."""

    def __init__(self, where: Endpoint) -> None:
        self.where = where

    def options(self) -> dict[str, str]:
        options = {
            "url": self.where.url,
            "token": self.where.token,
            "tokenFile": self.where.token_file,
            "ca": self.where.ca,
        }
        return {name: value for name, value in options.items() if value}

    def read(self, spark: SparkSession, queue: str, headers: bool = True, **more: str) -> DataFrame:
        """Read the stored messages. Settles nothing."""
        reader = spark.read.format("sluice").options(**self.options(), **_subscribe_option(queue))
        return reader.options(includeHeaders=_option_text(headers), **more).load()

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
        """Stream from the cursor of the group; a new group begins at the earliest message.

        The progress of the stream becomes that of the group. Without a group, the stream begins at
        the earliest stored message. `skip_lost`: messages that were removed before they were read
        are no error.
        """
        reader = spark.readStream.format("sluice").options(
            **self.options(), **_subscribe_option(queue)
        )
        if group:
            reader = reader.option("group", group).option("startingOffsets", "group")
        return (
            reader.option("includeHeaders", _option_text(headers))
            .option("maxOffsetsPerTrigger", str(rows_per_batch))
            .option("failOnDataLoss", _option_text(not skip_lost))
            .options(**more)
            .load()
        )

    def dead_letters(
        self,
        spark: SparkSession,
        queue: str,
        dead_letter_queues: Sequence[str] = (),
        headers: bool = True,
    ) -> DataFrame:
        """Read the dead letters of a queue from `dead_letter_queues`; by default the broker is
        asked for them.

        The result is fixed to those that exist now, so that each evaluation sees the same rows.
        """
        found = dead_letter_queues or self.dead_letter_queues(queue)
        if not found:
            raise InvalidOption(
                f"no message of {queue} has died", "See with `sluice dlq list` what has"
            )
        return only_from_queue(
            self.read(
                spark,
                exact_subscription(*found),
                headers,
                endingOffsets=self._latest_offsets_json(found),
            ),
            queue,
        )

    def _latest_offsets_json(self, found: Sequence[str]) -> str:
        """Return the current ends of queues, as an option."""
        with BulkClient(self.where) as client:
            ends = {name: client.offsets(name).latest() for name in found}
        return json.dumps(
            {name: {str(one): seq for one, seq in parts.items()} for name, parts in ends.items()}
        )

    def dead_letter_queues(self, queue: str) -> list[str]:
        """Return the existing dead-letter queues; none if no message has died."""
        client = _QueueInfoClient(self.where)
        with client:
            found = find_dead_letter_queues(queue, client.describe)
        if found is None:
            raise InvalidOption(
                f"there is no queue {queue!r}", "See with `sluice queue list` which there are"
            )
        return found

    def exists(self, queue: str) -> bool:
        with BulkClient(self.where) as client:
            try:
                client.offsets(queue)
            except Refused as refusal:
                if refusal.code.startswith("unknown_"):
                    return False
                raise
            return True

    def lag(self, queue: str, group: str) -> int:
        """Return the lag of the group; for a group that does not exist, all stored messages."""
        with BulkClient(self.where) as client:
            offsets = client.offsets(queue)
            try:
                settled = client.progress(queue, group)
            except Refused as refusal:
                if not refusal.code.startswith("unknown_"):
                    raise
                settled = {}
            return sum(
                max(0, one.latest - max(one.earliest, settled.get(one.partition, 0)))
                for one in offsets.partitions
            )

    def settled_count(self, queue: str, group: str) -> int | None:
        """Return how many messages a group has ever settled; None if there is no such group."""
        client = _QueueInfoClient(self.where)
        with client:
            return client.settled_count(queue, group)

    def last_batch_number(self, app: str) -> int:
        """Return the number of the last committed batch of an application; 0 for none."""
        with BulkClient(self.where) as client:
            return client.last_batch(app) or 0

    def publish(self, app: str, number: int, queue: str, rows: pa.Table) -> bool:
        """Publish one batch atomically and once; return False if another run has published it."""

        def commit(client: _CommitClient, stage: str) -> bool:
            return client.commit(app, number, [stage], rows.num_rows) or client.has_lost_response

        return self._stage_and_commit(app, number, queue, rows, commit)

    def publish_redriven(
        self, app: str, number: int, queue: str, rows: pa.Table, to_all: bool
    ) -> int:
        """Publish a batch that replaces dead letters; return how many were already gone."""

        def commit(client: _CommitClient, stage: str) -> int:
            return client.commit_redrive(app, number, [stage], rows.num_rows, to_all)

        return self._stage_and_commit(app, number, queue, rows, commit)

    def _stage_and_commit(
        self,
        app: str,
        number: int,
        queue: str,
        rows: pa.Table,
        commit: Callable[[_CommitClient, str], T],
    ) -> T:
        """Stage a batch and commit it. Stage it again if the broker restarted in between."""
        data = arrow_stream_bytes(rows)
        client = _CommitClient(self.where)
        with client:
            for tries_left in reversed(range(MAX_TRIES)):
                try:
                    stage = client.stage(app, number, queue, data)
                    client.has_lost_response = False
                    return commit(client, stage)
                except Refused as refusal:
                    if refusal.code == "batch_too_large":
                        refusal.remedy = (
                            f"What is sent at once has at most {MAX_BATCH_BYTES >> 20} MiB, or is"
                            " one message: raise bulk.max_batch_bytes on the broker to more than"
                            " that"
                        )
                    if refusal.code != "stale_batch" or not tries_left:
                        raise
        raise AssertionError  # the last attempt has returned or raised


class _CommitClient(BulkClient):
    """Remembers whether a response was lost.

    The broker may have committed and crashed before its response. Asked again, it says that the
    batch was committed before; then no other run has done it.
    """

    has_lost_response = False

    def _with_retries(self, attempt: Callable[[], T]) -> T:
        def noting_loss() -> T:
            try:
                return attempt()
            except ConnectionRefusedError:  # no broker received the request
                raise
            except (http.client.HTTPException, OSError):
                self.has_lost_response = True
                raise

        return super()._with_retries(noting_loss)


class _QueueInfoClient(BulkClient):
    """Calls of the admin REST API about queues."""

    def settled_count(self, queue: str, group: str) -> int | None:
        groups = self._request_json("GET", queue_path(queue, "groups"))
        return next((int(one["ledger"]["acked"]) for one in groups if one["name"] == group), None)

    def describe(self, queue: str) -> dict[str, Any] | None:
        try:
            description: dict[str, Any] = self._request_json("GET", queue_path(queue))
        except Refused as refusal:
            if refusal.code.startswith("unknown_"):
                return None
            raise
        return description


def app_name(*parts: str) -> str:
    """Return the name under which batches are numbered. A hash shortens one that is too long."""
    name = "/".join(parts)
    if len(name) <= MAX_APP_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{name[: MAX_APP_NAME - len(digest) - 1]}/{digest}"


def exact_subscription(*names: str) -> str:
    """Return a subscription to exactly these queues: a name may contain a comma."""
    if any("," in name for name in names):
        return f"/{'|'.join(re.escape(name) for name in names)}/"
    return ",".join(names)


def _subscribe_option(queue: str) -> dict[str, str]:
    """Parse a name, several with commas between them, or a pattern between slashes: /dlq\\/.*/"""
    if len(queue) > 2 and queue.startswith("/") and queue.endswith("/"):
        return {"subscribePattern": queue[1:-1]}
    return {"subscribe": queue}


def includes_queue(queue: str, name: str) -> bool:
    """Return whether the subscription `queue` includes the queue `name`."""
    chosen = _subscribe_option(queue)
    if "subscribePattern" in chosen:
        return re.fullmatch(chosen["subscribePattern"], name) is not None
    return name in (one.strip() for one in chosen["subscribe"].split(","))


def _option_text(flag: bool) -> str:
    return "true" if flag else "false"


def select_message_columns(rows: DataFrame) -> DataFrame:
    """Select the columns that a queue accepts."""
    known = [name for name in MESSAGE_COLUMNS if name in rows.columns]
    return rows.select(
        *(to_binary(rows, name) if name in ("value", "key") else rows[name] for name in known)
    )


def to_binary(rows: DataFrame, name: str) -> Column:
    """Convert a column to binary: 7 becomes "7", and a struct, map or array becomes JSON."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

    column, kind = rows[name], rows.schema[name].dataType
    if isinstance(kind, BinaryType):
        return column
    has_parts = isinstance(kind, StructType | MapType | ArrayType)
    return (f.to_json(column) if has_parts else column.cast("string")).cast("binary").alias(name)
