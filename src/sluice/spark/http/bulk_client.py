"""The bulk door of the broker (docs/bulk.md), as Spark's driver and executors use it: HTTP by the standard library.

One door is one connection, opened when it is needed and never pickled; `Where` travels instead. To say something again
(`line`) is safe for every call, because reading settles nothing, progress only goes forwards, who begins (`begin`) has
read nothing yet when he says it again, a stage that nobody names is dropped, and a batch that was committed is known by
its number. To begin is said in the same breath again, and never by a reader that has begun before: it forgets losses.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from sluice.spark.errors import Refused, StreamCut
from sluice.spark.http.arrow_body import ArrowBody
from sluice.spark.http.http_connection import BrokerBusy, HttpConnection
from sluice.units import quote_path_segment

if TYPE_CHECKING:
    import pyarrow as pa

ARROW_CONTENT_TYPE: Final = "application/vnd.apache.arrow.stream"
MISSING_NODES_HEADER: Final = "X-Sluice-Missing"  # nodes of a cluster that a list is without
WRITE_SECONDS: Final = 330.0  # a commit may take its time; the broker gives up first
ROWS_IDLE_SECONDS: Final = 120.0  # without a byte: a broker that is busy sends slowly
WAIT_MARGIN_SECONDS: Final = 40.0  # for an answer, besides those in which news were waited for
MAX_QUERY_CHARS: Final = 48_000  # the broker takes 64 KiB of a request before its body
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
    incarnation: str = ""  # another one after the queue was deleted and made again
    compacted: bool = False

    def latest(self) -> dict[int, int]:
        return {one.partition: one.latest for one in self.partitions}

    def earliest(self) -> dict[int, int]:
        return {one.partition: one.earliest for one in self.partitions}


def average_row_bytes(found: Iterable[QueueOffsets]) -> float:
    """What a message has on the average, of those that are kept."""
    partitions = [one for seen in found for one in seen.partitions]
    stored = sum(one.latest - one.earliest for one in partitions)
    return sum(one.bytes for one in partitions) / max(stored, 1)


@dataclass(frozen=True)
class GroupProgress:
    """How far a group is: everything below is settled. `lost`: the first sequence of each partition that is gone before
    the group was done with it."""

    low_watermarks: dict[int, int]
    lost: dict[int, int]


class BulkClient(HttpConnection):
    """What can be asked for and told; one connection."""

    # ---- reading

    def queues(self) -> list[str]:
        """The names of all queues."""
        found: list[str] = []
        while True:
            query = urlencode({"after": found[-1] if found else "", "limit": PAGE_SIZE})
            page = self._with_retries(partial(self._queue_names_page, f"/queues?{query}"))
            found += page
            if len(page) < PAGE_SIZE:
                return found

    def _queue_names_page(self, path: str) -> list[str]:
        """A list without those of a node that is about to be replaced is worse than none."""
        response = self._send_request("GET", path)
        names = [one["name"] for one in self._read_json(response)]
        missing = response.headers.get(MISSING_NODES_HEADER)
        if missing:
            raise BrokerBusy(
                Refused(
                    "missing_nodes",
                    f"{self.where.url} does not know the queues of every node: {missing} gave no answer",
                    "Wait until another node has taken over, or start it; retrySeconds says how long to try",
                )
            )
        return names

    def offsets(
        self, queue: str, after: dict[int, int] | None = None, wait: int = 0
    ) -> QueueOffsets:
        """How far each partition goes; with `after` and `wait`, as soon as some goes further, if that can be asked
        (`can_wait`)."""
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
        """Whether the broker can be asked to wait: a question about thousands of partitions is too long."""
        return len(_encode_sequences(after)) <= MAX_QUERY_CHARS

    def offsets_at(self, queue: str, seconds: float) -> dict[int, int]:
        """The first sequence at or after a time, in each partition."""
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
        """The kept messages of ranges, by partition: those of one in order, between one another as they lie in the log.
        Once and without a second try: `StreamCut` says that the rest is missing. With a group: without those that are
        for another one alone. With an incarnation: of this queue, and no other that has its name by now."""
        import pyarrow as pa  # whoever only asks for progress can do without

        query = urlencode(
            {
                "ranges": _compact_json({str(number): ends for number, ends in ranges.items()}),
                "columns": ",".join(columns),
                "lenient": "true" if lenient else "false",
                "group": group,
                **({"incarnation": incarnation} if incarnation else {}),
            }
        )
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
            if not body.has_ended():  # Arrow takes the end of a connection for that of the rows
                self.close()
                raise StreamCut("the answer ends before the rows do")
            if response.read():
                raise StreamCut("there is something behind the end of the rows")
        except (http.client.HTTPException, OSError, pa.ArrowInvalid) as fault:
            self.close()
            raise StreamCut(f"{type(fault).__name__}: {fault}") from None
        except GeneratorExit:
            self.close()
            raise

    # ---- progress

    def progress(self, queue: str, group: str) -> dict[int, int]:
        """Everything below is settled for the group."""
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
        """Settle everything below `ends` for the group, never backwards; where it stands then. With an incarnation:
        refused if the queue is another one by now."""
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
        """The same, and what the group has lost from there on. With `begin`: a reader begins there, and the group goes
        back to it if it is further."""
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
        """Where the group stands, and what it has lost since it was told something."""
        return _parse_progress(self._request_json("GET", _progress_path(queue, group)))

    # ---- writing

    def stage(self, app: str, batch: int, queue: str, rows: bytes | memoryview) -> str:
        """Bring rows, as an Arrow stream; the name of the stage."""
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
        """The same for rows that take the place of dead letters, which end with it; how many were gone already."""
        body = {"stages": stages, "rows": rows, "to_all": to_all}
        skipped: int = self._request_json(
            "POST", f"{_stages_path(app, batch)}/commit", body, WRITE_SECONDS
        )["skipped"]
        return skipped

    def abort(self, app: str, batch: int) -> None:
        """Drop what was staged of a batch."""
        self._request_json("DELETE", _stages_path(app, batch))

    def last_batch(self, app: str) -> int | None:
        """The last batch of an application that was committed."""
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


def _compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _encode_sequences(sequences: dict[int, int]) -> str:
    """As a query."""
    return quote(_compact_json(sequences), safe=":,")
