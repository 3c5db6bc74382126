"""Client of the bulk API (docs/bulk.md) for Spark's driver and executors, on the standard library.

One client is one connection, opened on first use and never pickled; `Endpoint` is pickled instead.
`HttpClient` may repeat every request, because reading settles nothing, progress only moves
forward, a reader that begins (`begin`) has read nothing yet, an unnamed stage is dropped, and the
broker recognizes a committed batch by its number. `begin` is retried only within one call, and
never by a reader that has begun before: it resets the lost ranges.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from sluice.http_client import HttpClient, Refused
from sluice.spark.errors import StreamCut
from sluice.spark.http.arrow_body import ArrowBody
from sluice.units import quote_path_segment

if TYPE_CHECKING:
    import pyarrow as pa

ARROW_CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
MISSING_NODES_HEADER: Final = "X-Sluice-Missing"  # nodes of a cluster whose queues a list lacks
WRITE_SECONDS: Final = 330.0  # a commit may take long; the broker gives up first
ROWS_IDLE_SECONDS: Final = 120.0  # without a byte: a busy broker sends slowly
WAIT_MARGIN_SECONDS: Final = 40.0  # for the response, in addition to the requested wait
MAX_QUERY_CHARS: Final = 48_000  # the broker accepts 64 KiB of request line and headers
PAGE_SIZE: Final = 500


@dataclass(frozen=True)
class PartitionOffsets:
    partition: int
    earliest: int
    latest: int
    bytes: int


@dataclass(frozen=True)
class QueueOffsets:
    queue: str
    dead_letters: bool
    partitions: tuple[PartitionOffsets, ...]
    incarnation: str = ""  # changes when the queue is deleted and created again
    compacted: bool = False

    def latest(self) -> dict[int, int]:
        return {one.partition: one.latest for one in self.partitions}

    def earliest(self) -> dict[int, int]:
        return {one.partition: one.earliest for one in self.partitions}


def average_row_bytes(found: Iterable[QueueOffsets]) -> float:
    """Return the average size of a stored message."""
    partitions = [one for seen in found for one in seen.partitions]
    stored = sum(one.latest - one.earliest for one in partitions)
    return sum(one.bytes for one in partitions) / max(stored, 1)


@dataclass(frozen=True)
class GroupProgress:
    """The progress of a group: all messages below `low_watermarks` are settled.

    `lost` is, by partition, the first sequence that was removed before the group settled it.
    """

    low_watermarks: dict[int, int]
    lost: dict[int, int]


class BulkClient(HttpClient):
    """The calls of the bulk API, over one connection."""

    # ---- reading

    def queues(self) -> list[str]:
        """Return the names of all queues."""
        found: list[str] = []
        while True:
            query = urlencode({"after": found[-1] if found else "", "limit": PAGE_SIZE})
            page = self._with_retries(partial(self._queue_names_page, f"/queues?{query}"))
            found += page
            if len(page) < PAGE_SIZE:
                return found

    def _queue_names_page(self, path: str) -> list[str]:
        """Return one page of names. An incomplete list is retried: a node may be about to be
        replaced.
        """
        response = self._send_request("GET", path)
        names = [one["name"] for one in self._read_json(response)]
        missing = response.headers.get(MISSING_NODES_HEADER)
        if missing:
            raise Refused(
                "missing_nodes",
                f"{self.where.display_url} does not know the queues of every node:"
                f" {missing} gave no answer",
                "Wait until another node has taken over, or start it;"
                " retrySeconds says how long to try",
                status=http.client.SERVICE_UNAVAILABLE,
            )
        return names

    def offsets(
        self, queue: str, after: dict[int, int] | None = None, wait: int = 0
    ) -> QueueOffsets:
        """Return the offsets of each partition.

        With `after` and `wait`: as soon as one partition is beyond `after`, or after `wait`
        seconds. Only if `can_wait(after)`.
        """
        query = (
            f"?wait={wait}&after={_encode_sequences(after)}" if after is not None and wait else ""
        )
        document = self._request_json(
            "GET", f"{_queue_path(queue)}/offsets{query}", seconds=wait + WAIT_MARGIN_SECONDS
        )
        return QueueOffsets(
            document["queue"],
            document["dead_letters"],
            tuple(
                PartitionOffsets(one["partition"], one["earliest"], one["latest"], one["bytes"])
                for one in document["partitions"]
            ),
            document.get("incarnation", ""),
            document.get("compacted", False),
        )

    @staticmethod
    def can_wait(after: dict[int, int]) -> bool:
        """Return whether `after` fits a URL: thousands of partitions do not."""
        return len(_encode_sequences(after)) <= MAX_QUERY_CHARS

    def offsets_at(self, queue: str, seconds: float) -> dict[int, int]:
        """Return the first sequence at or after a time, by partition."""
        query = urlencode({"time": f"@{seconds:.3f}"})
        return _parse_sequences(
            self._request_json("GET", f"{_queue_path(queue)}/offsets/at?{query}")
        )

    def rows(
        self,
        queue: str,
        ranges: Mapping[int, tuple[int, int]],
        columns: list[str],
        lenient: bool = False,
        group: str = "",
        incarnation: str = "",
    ) -> Iterator[pa.RecordBatch]:
        """Yield the stored messages of ranges. Each partition is in order; partitions are
        interleaved as in the log.

        The request is not repeated: `StreamCut` means that the remaining rows are missing. With a
        group, messages that are only for another group are left out. With an incarnation, the
        broker refuses if the queue was deleted and created again.
        """
        import pyarrow as pa  # not needed by clients that only read progress

        selection = _selection_query(ranges, lenient, group, incarnation)
        query = urlencode({**selection, "columns": ",".join(columns)})
        path = f"{_queue_path(queue)}/rows?{query}"
        response = self._with_retries(
            lambda: self._send_request("GET", path, seconds=ROWS_IDLE_SECONDS)
        )
        body = ArrowBody(response, self._socket())
        try:
            stream = pa.ipc.open_stream(body)
            while True:
                try:
                    batch = stream.read_next_batch()
                except StopIteration:
                    break
                yield batch
            # Arrow takes the end of the connection for the end of the rows
            if not body.has_ended():
                self.close()
                raise StreamCut("the answer ends before the rows do")
            if response.read():
                raise StreamCut("the response has data after the end of the rows")
        except (http.client.HTTPException, OSError, pa.ArrowInvalid) as fault:
            self.close()
            raise StreamCut(f"{type(fault).__name__}: {fault}") from None
        except GeneratorExit:
            self.close()
            raise

    def count(
        self,
        queue: str,
        ranges: Mapping[int, tuple[int, int]],
        lenient: bool = False,
        group: str = "",
        incarnation: str = "",
    ) -> dict[int, int]:
        """Return how many messages `rows` would yield, by partition. The broker reads none."""
        query = _selection_query(ranges, lenient, group, incarnation)
        path = f"{_queue_path(queue)}/rows/count?{urlencode(query)}"
        return _parse_sequences(self._request_json("GET", path, seconds=WRITE_SECONDS))

    # ---- progress

    def progress(self, queue: str, group: str) -> dict[int, int]:
        """Return the low watermarks of the group: everything below is settled."""
        return self.group_progress(queue, group).low_watermarks

    def advance(
        self,
        queue: str,
        group: str,
        ends: dict[int, int],
        create: bool = False,
        start: str = "earliest",
        incarnation: str = "",
    ) -> dict[int, int]:
        """Settle everything below `ends` for the group, and return its low watermarks.

        Progress never moves backward. With an incarnation, the broker refuses if the queue was
        deleted and created again.
        """
        return self.set_progress(queue, group, ends, create, start, incarnation).low_watermarks

    def set_progress(
        self,
        queue: str,
        group: str,
        ends: dict[int, int],
        create: bool = False,
        start: str = "earliest",
        incarnation: str = "",
        begin: bool = False,
    ) -> GroupProgress:
        """Settle like `advance`, and return what the group has lost from there on as well.

        With `begin`, a reader begins there: a group that is further goes back to `ends`.
        """
        body: dict[str, Any] = {
            "partitions": {str(one): end for one, end in ends.items()},
            "create": create,
            "start": start,
        }
        if incarnation:
            body["incarnation"] = incarnation
        if begin:
            body["begin"] = True
        return _parse_progress(
            self._request_json("PUT", _progress_path(queue, group), body, WRITE_SECONDS)
        )

    def group_progress(self, queue: str, group: str) -> GroupProgress:
        """Return the progress of the group and what it has lost since its last `set_progress`."""
        return _parse_progress(self._request_json("GET", _progress_path(queue, group)))

    # ---- writing

    def create_queue(self, queue: str, settings: dict[str, Any]) -> None:
        """Create a queue with these settings. One that exists keeps its own."""
        try:
            self._request_json("POST", "/queues", {**settings, "name": queue})
        except Refused as refusal:
            if refusal.status != http.client.CONFLICT:
                raise

    def stage(self, app: str, batch: int, queue: str, rows: bytes | memoryview) -> str:
        """Upload rows as an Arrow stream and return the name of the stage."""
        path = f"{_stages_path(app, batch)}?{urlencode({'queue': queue})}"
        document = self._with_retries(
            lambda: self._read_json(
                self._send_request("POST", path, rows, ARROW_CONTENT_TYPE, WRITE_SECONDS)
            )
        )
        return str(document["stage"])

    def commit(self, app: str, batch: int, stages: list[str], rows: int) -> bool:
        """Publish the rows of these stages in one step; False if the batch was committed before."""
        body = {"stages": stages, "rows": rows}
        return not self._request_json(
            "POST", f"{_stages_path(app, batch)}/commit", body, WRITE_SECONDS
        )["replayed"]

    def commit_redrive(
        self, app: str, batch: int, stages: list[str], rows: int, to_all: bool
    ) -> int:
        """Commit rows that replace dead letters, and return how many of those were already gone."""
        body = {"stages": stages, "rows": rows, "to_all": to_all}
        skipped: int = self._request_json(
            "POST", f"{_stages_path(app, batch)}/commit", body, WRITE_SECONDS
        )["skipped"]
        return skipped

    def abort(self, app: str, batch: int) -> None:
        """Drop the stages of a batch."""
        self._request_json("DELETE", _stages_path(app, batch))

    def last_batch(self, app: str) -> int | None:
        """Return the last committed batch of an application, or None."""
        last: int | None = self._request_json("GET", f"/bulk/stages/{quote_path_segment(app)}")[
            "last"
        ]
        return last


def _queue_path(queue: str) -> str:
    return f"/bulk/queues/{quote_path_segment(queue)}"


def _progress_path(queue: str, group: str) -> str:
    return f"{_queue_path(queue)}/groups/{quote_path_segment(group)}/progress"


def _stages_path(app: str, batch: int) -> str:
    return f"/bulk/stages/{quote_path_segment(app)}/{batch}"


def _parse_sequences(document: Any) -> dict[int, int]:
    return {int(one): seq for one, seq in document["partitions"].items()}


def _parse_progress(document: Any) -> GroupProgress:
    return GroupProgress(
        _parse_sequences(document), {int(one): seq for one, seq in document.get("lost", {}).items()}
    )


def _selection_query(
    ranges: Mapping[int, tuple[int, int]], lenient: bool, group: str, incarnation: str
) -> dict[str, str]:
    return {
        "ranges": _compact_json({str(number): ends for number, ends in ranges.items()}),
        "lenient": "true" if lenient else "false",
        "group": group,
        **({"incarnation": incarnation} if incarnation else {}),
    }


def _compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _encode_sequences(sequences: dict[int, int]) -> str:
    """Return sequences as a query parameter."""
    return quote(_compact_json(sequences), safe=":,")
