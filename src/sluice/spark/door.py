"""The bulk door of the broker (docs/bulk.md), as Spark's driver and executors use it: HTTP by the standard library.

One door is one connection, opened when it is needed and never pickled; `Where` travels instead. Whatever could not be
delivered is said again for `retry_seconds`: a broker that restarts is an interruption, not a failure. That is safe for
every call, because reading settles nothing, progress only goes forwards, a stage that nobody names is dropped, and a
batch that was committed is known by its number.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from sluice.spark.body import Body
from sluice.spark.faults import BrokerGone, InvalidOption, Refused, StreamCut

if TYPE_CHECKING:
    import pyarrow as pa

ROOT: Final = "/api/v1"
ARROW: Final = "application/vnd.apache.arrow.stream"
DEFAULT_URL: Final = "http://127.0.0.1:8080"
RETRY_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 330.0  # a commit may take its time; the broker gives up first
CONNECT_SECONDS: Final = 10.0
LONGEST_PAUSE: Final = 2.0
PAGE: Final = 500
BUSY: Final = 503

T = TypeVar("T")


@dataclass(frozen=True)
class Where:
    """The broker, and how to come in. What is not given comes from the environment, as for the command line."""

    url: str = field(default_factory=lambda: os.environ.get("SLUICE_URL") or DEFAULT_URL)
    token: str = field(default="", repr=False)
    token_file: str = ""
    ca: str = field(default_factory=lambda: os.environ.get("SLUICE_CA", ""))
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        if not _is_address(self.url):
            raise InvalidOption(
                f"option url is {self.url!r}",
                f"Give the HTTP address of the broker, such as {DEFAULT_URL}; a port is 1 to 65535",
            )
        if not self.token and not self.token_file:
            object.__setattr__(self, "token", os.environ.get("SLUICE_TOKEN", "").strip())
            object.__setattr__(self, "token_file", os.environ.get("SLUICE_TOKEN_FILE", ""))

    def present_token(self) -> str:
        """Read when it is needed: the file may be renewed while a stream runs."""
        if self.token or not self.token_file:
            return self.token
        try:
            return Path(self.token_file).read_text("utf-8").strip()
        except OSError as fault:
            raise InvalidOption(
                f"option tokenFile: {self.token_file} cannot be read on {socket.gethostname()} ({fault.strerror})",
                "Put it on the driver and on every executor, or use the option token",
            ) from None


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

    def latest(self) -> dict[int, int]:
        return {one.partition: one.latest for one in self.partitions}

    def earliest(self) -> dict[int, int]:
        return {one.partition: one.earliest for one in self.partitions}


def row_bytes(found: Iterable[QueueOffsets]) -> float:
    """What a message has on the average, of those that are kept."""
    every = [one for seen in found for one in seen.partitions]
    kept = sum(one.latest - one.earliest for one in every)
    return sum(one.bytes for one in every) / max(kept, 1)


class Door:
    """Whoever opens one closes it, or lets `with` do so."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self._line: http.client.HTTPConnection | None = None

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    # ---- reading

    def queues(self) -> list[str]:
        """The names of all queues."""
        found: list[str] = []
        while True:
            query = urlencode({"after": found[-1] if found else "", "limit": PAGE})
            page = [one["name"] for one in self._ask("GET", f"/queues?{query}")]
            found += page
            if len(page) < PAGE:
                return found

    def offsets(self, queue: str, after: dict[int, int] | None = None, wait: int = 0) -> QueueOffsets:
        """How far each partition goes; with `after` and `wait`, as soon as some goes further."""
        query = ""
        if after is not None and wait:
            query = "?" + urlencode({"wait": wait, "after": json.dumps(after)})
        told = self._ask("GET", f"{_path_of(queue)}/offsets{query}")
        return QueueOffsets(
            told["queue"],
            told["dead_letters"],
            tuple(
                PartitionOffsets(one["partition"], one["earliest"], one["latest"], one["bytes"])
                for one in told["partitions"]
            ),
            told.get("incarnation", ""),
        )

    def offsets_at(self, queue: str, seconds: float) -> dict[int, int]:
        """The first sequence at or after a time, in each partition."""
        query = urlencode({"time": f"@{seconds:.3f}"})
        return _sequences(self._ask("GET", f"{_path_of(queue)}/offsets/at?{query}"))

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
                "ranges": json.dumps({str(number): ends for number, ends in ranges.items()}),
                "columns": ",".join(columns),
                "lenient": "true" if lenient else "false",
                "group": group,
                **({"incarnation": incarnation} if incarnation else {}),
            }
        )
        path = f"{_path_of(queue)}/rows?{query}"
        answer = self._patiently(lambda: self._send("GET", path))
        line = None if self._line is None else self._line.sock
        try:
            stream = pa.ipc.open_stream(Body(answer, line))
            while True:
                try:
                    batch = stream.read_next_batch()
                except StopIteration:
                    break
                yield batch
            if answer.read():
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
        return _sequences(self._ask("GET", _progress_path(queue, group)))

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
        body = {"partitions": {str(one): end for one, end in ends.items()}, "create": create, "start": start}
        if incarnation:
            body["incarnation"] = incarnation
        return _sequences(self._ask("PUT", _progress_path(queue, group), body))

    # ---- writing

    def stage(self, app: str, batch: int, queue: str, rows: bytes | memoryview) -> str:
        """Bring rows, as an Arrow stream; the name of the stage."""
        path = f"{_stages_path(app, batch)}?{urlencode({'queue': queue})}"
        answer = self._patiently(lambda: self._send("POST", path, rows, ARROW))
        return str(self._read(answer)["stage"])

    def commit(self, app: str, batch: int, stages: list[str], rows: int) -> bool:
        """Publish the rows of these stages in one step; False if the batch was committed before."""
        body = {"stages": stages, "rows": rows}
        return not self._ask("POST", f"{_stages_path(app, batch)}/commit", body)["replayed"]

    def mend(self, app: str, batch: int, stages: list[str], rows: int, to_all: bool) -> int:
        """The same for rows that take the place of dead letters, which end with it; how many were gone already."""
        body = {"stages": stages, "rows": rows, "to_all": to_all}
        skipped: int = self._ask("POST", f"{_stages_path(app, batch)}/commit", body)["skipped"]
        return skipped

    def abort(self, app: str, batch: int) -> None:
        """Drop what was staged of a batch."""
        self._ask("DELETE", _stages_path(app, batch))

    def last_batch(self, app: str) -> int | None:
        """The last batch of an application that was committed."""
        last: int | None = self._ask("GET", f"/bulk/stages/{quote(app, safe='')}")["last"]
        return last

    # ---- asking

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = b"" if body is None else json.dumps(body).encode()
        kind = "" if body is None else "application/json"

        def once() -> Any:
            return self._read(self._send(method, path, data, kind))

        return self._patiently(once)

    def _read(self, answer: http.client.HTTPResponse) -> Any:
        try:
            return json.loads(answer.read())
        except ValueError:
            raise self._stranger("answers something else than JSON") from None

    def _patiently(self, once: Callable[[], T]) -> T:
        """Until somebody answers: at once again first, because a connection that was kept may be one of yesterday."""
        began = time.monotonic()
        pause = 0.0
        while True:
            try:
                return once()
            except ssl.SSLCertVerificationError as fault:
                raise InvalidOption(
                    f"the certificate of {self.where.url} is not trusted: {fault.verify_message}",
                    "Give the CA that signed it by the option ca or SLUICE_CA",
                ) from None
            except _Busy as busy:
                self.close()
                why, refusal = busy.refusal.what, busy.refusal
            except (http.client.HTTPException, OSError) as fault:
                self.close()
                why, refusal = str(fault) or type(fault).__name__, None
            if time.monotonic() - began + pause > self.where.retry_seconds:
                raise refusal or BrokerGone(self.where.url, self.where.retry_seconds, why)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(max(2 * pause, 0.1), LONGEST_PAUSE)

    def _send(
        self, method: str, path: str, body: bytes | memoryview = b"", kind: str = ""
    ) -> http.client.HTTPResponse:
        """Ask once. The answer has begun, and it is a good one."""
        line = self._line or self._connect()
        headers = {"Content-Type": kind} if kind else {}
        token = self.where.present_token()
        if token:
            headers["Authorization"] = f"Bearer {token}"
        line.request(
            method, f"{urlsplit(self.where.url).path.rstrip('/')}{ROOT}{path}", body or None, headers
        )
        answer = line.getresponse()
        if answer.status < 300:
            return answer
        refusal = self._refusal(answer.status, answer.read())
        if answer.status == BUSY:
            raise _Busy(refusal)
        raise refusal

    def _connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.where.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            try:
                trust = ssl.create_default_context(cafile=self.where.ca or None)
            except OSError as fault:
                raise InvalidOption(
                    f"option ca: {self.where.ca} cannot be used ({fault.strerror or 'it holds no certificate'})",
                    "Give a PEM file with a certificate, on the driver and on every executor",
                ) from None
            line: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=CONNECT_SECONDS, context=trust
            )
        else:
            line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=CONNECT_SECONDS)
        line.connect()
        line.sock.settimeout(ANSWER_SECONDS)
        line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._line = line
        return line

    def _refusal(self, status: int, body: bytes) -> Refused:
        try:
            told = json.loads(body)
            code, what, do = str(told["error"]), str(told["message"]), str(told["do"])
        except (ValueError, KeyError, TypeError):
            return self._stranger(f"answers {status} in a way that Sluice does not")
        if status == 401:
            do = "Give the option token or tokenFile (or SLUICE_TOKEN); `sluice token add` makes one"
        elif status == 403:
            do = f"{do}. The role belongs to the option token or tokenFile"
        return Refused(code, f"the broker at {self.where.url} says: {what}", do, told)

    def _stranger(self, how: str) -> Refused:
        return Refused(
            "stranger",
            f"{self.where.url} {how}",
            "See whether the option url is the --http address of a Sluice of this version",
        )


class _Busy(Exception):
    """The broker asks to come again later."""

    def __init__(self, refusal: Refused) -> None:
        super().__init__(refusal.what)
        self.refusal = refusal


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, half an IPv6 address
        return False


def _path_of(queue: str) -> str:
    return f"/bulk/queues/{quote(queue, safe='')}"


def _progress_path(queue: str, group: str) -> str:
    return f"{_path_of(queue)}/groups/{quote(group, safe='')}/progress"


def _stages_path(app: str, batch: int) -> str:
    return f"/bulk/stages/{quote(app, safe='')}/{batch}"


def _sequences(told: Any) -> dict[int, int]:
    return {int(one): seq for one, seq in told["partitions"].items()}
