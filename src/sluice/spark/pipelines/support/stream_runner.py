"""Run a stream to its end: report its progress, and restart it after failures.

Spark does not restart a failed query; this module does, with growing pauses, unless the query was
to run once. Our streams continue from their checkpoint, so a restart repeats nothing and skips
nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from threading import Event
from typing import TYPE_CHECKING, Final

from sluice.backoff import Backoff
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

POLL_SECONDS: Final = 0.5
RESTART_BACKOFF: Final = Backoff(1.0, max_seconds=60.0)
PYTHON_START_TIMEOUT: Final = "Late"
MAX_START_TRIES: Final = 5
MAX_UNKNOWN_TRIES: Final = 5  # half a minute in total
# The last line of a Python traceback that came through Java; our errors include a remedy.
_SLUICE_ERROR: Final = re.compile(r"^sluice\.(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)
# The parts of Spark's messages that are for programs.
_SPARK_FRAMING: Final = re.compile(
    r"^\[[A-Z_.]+\] (?:Query \[.*?\] terminated with exception: )?|\s*SQLSTATE: .*$"
)
_START_TIMEOUT_TEXT: Final = "Python worker failed to connect back"
# Refusals after which a later attempt can succeed: the broker restarted between staging and commit,
# or is out of capacity or without its store at the moment. Only the text of a refusal comes through
# Java; a test compares these patterns with the places that create the texts.
_TRANSIENT_REFUSAL: Final = re.compile(
    r"cannot be committed: |between staging and commit|wait for their commit|is full|is stopping|"
    r"more at once|in a moment|\bRetry\b|Ask again|[Tt]ry again|again later|Commit the batch again|"
    r"Send fewer at once"
)
# Refusals that are final: an invalid row in the batch, or its size.
_PERMANENT_REFUSAL: Final = re.compile(r" cannot be used: |bytes or more, and ")
_TRACEBACK_FRAME: Final = re.compile(r'^\s*File "([^"]+)", line (\d+), in ', re.MULTILINE)
_LIBRARY_PATH: Final = re.compile(r"/(?:pyspark|py4j|sluice|site-packages)[/.]|/lib/python\d|^<")
_OTHER_ERROR: Final = re.compile(
    r"^(?:: )?(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE
)


class StreamFailed(SluiceError):
    """A stream failed. `kind` is the class name of the error: BrokerGone, DataLost ..."""

    def __init__(self, resource: str, remedy: str = "", kind: str = "") -> None:
        super().__init__(resource, remedy)
        self.kind = kind


@dataclass
class StreamProgress:
    rows: int = 0
    batches: int = 0
    restarts: int = 0
    seconds: float = 0.0
    written: int | None = None  # rows that the sink has reported, if it does
    rows_by_batch: dict[int, int] = field(default_factory=dict, repr=False)
    written_by_batch: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    def update_from(self, query: StreamingQuery) -> None:
        """Update from Spark, which remembers the last hundred batches; a batch without rows is idle
        polling.
        """
        for batch_progress in query.recentProgress:
            if batch_progress.numInputRows:
                self.rows_by_batch[batch_progress.batchId] = batch_progress.numInputRows
            if batch_progress.sink.numOutputRows >= 0:
                self.written_by_batch[batch_progress.batchId] = batch_progress.sink.numOutputRows
        self.written = sum(self.written_by_batch.values()) if self.written_by_batch else None
        self.rows = sum(self.rows_by_batch.values())
        self.batches = len(self.rows_by_batch)


def run(
    start: Callable[[], StreamingQuery],
    once: bool,
    on_progress: Callable[[StreamProgress], None] = lambda progress: None,
    stop_requested: Event | None = None,
    on_retry: Callable[[StreamFailed, float], None] = lambda failure, pause: None,
) -> StreamProgress:
    """Run until the stream ends by itself (`once`), or `stop_requested` is set.

    Raises `StreamFailed` with the text of the cause. `on_retry` gets each failure that is followed
    by another attempt, and the pause in seconds.

    An error at the first start is for the user to fix, and raised as it is. At a later start the
    stream has run before, so the environment has changed (the broker is down for longer than a read
    waits) and may recover. Java waits 10 s for the planning Python process, which may be too short
    on a loaded machine: that error is always retried. Permanent errors end the run; unknown ones
    are retried a few times, as long as there is no progress between them.
    """
    from pyspark.errors import PySparkException

    stop_requested = stop_requested or Event()
    progress = StreamProgress()
    began = time.monotonic()
    start_timeouts = tries_without_rows = 0
    while True:
        query: StreamingQuery | None = None
        rows_before = progress.rows
        try:
            query = start()
            _watch_query(query, progress, began, on_progress, stop_requested)
            return progress
        except PySparkException as fault:
            if query is not None:
                progress.update_from(query)
            elif not progress.restarts:
                raise
            failure = explain_error(fault)
            start_timeouts = start_timeouts + 1 if failure.kind == PYTHON_START_TIMEOUT else 0
            tries_without_rows = tries_without_rows + 1 if progress.rows == rows_before else 1
            if tries_without_rows > _max_tries(failure) or (
                once and not 0 < start_timeouts <= MAX_START_TRIES
            ):
                raise failure from None
            pause = RESTART_BACKOFF.delay(tries_without_rows - 1)
            progress.restarts += 1
            on_progress(progress)
            on_retry(failure, pause)
            if stop_requested.wait(pause):
                return progress


def _watch_query(
    query: StreamingQuery,
    progress: StreamProgress,
    began: float,
    on_progress: Callable[[StreamProgress], None],
    stop_requested: Event,
) -> None:
    while not query.awaitTermination(POLL_SECONDS):  # type: ignore[arg-type]
        _update_progress(query, progress, began, on_progress)
        if stop_requested.is_set():
            query.stop()
            break
    _update_progress(query, progress, began, on_progress)


def _update_progress(
    query: StreamingQuery,
    progress: StreamProgress,
    began: float,
    on_progress: Callable[[StreamProgress], None],
) -> None:
    progress.update_from(query)
    progress.seconds = time.monotonic() - began
    on_progress(progress)


def _max_tries(failure: StreamFailed) -> float:
    """Return how many failures in a row are retried; no limit for those that can recover by
    themselves.
    """
    if failure.kind in ("InvalidOption", "DataLost"):
        return 0
    if failure.kind == "Refused" and not _TRANSIENT_REFUSAL.search(failure.what):
        return 0 if _PERMANENT_REFUSAL.search(failure.what) else MAX_UNKNOWN_TRIES
    return (
        inf
        if failure.kind in ("BrokerGone", "StreamCut", "Refused", PYTHON_START_TIMEOUT)
        else MAX_UNKNOWN_TRIES
    )


def explain_error(fault: Exception) -> StreamFailed:
    """Extract the line of a Java and Python traceback that says what happened."""
    text = str(fault).strip()
    sluice_errors = _SLUICE_ERROR.findall(text)
    if sluice_errors:
        kind, message = sluice_errors[-1]
        return StreamFailed(message, kind=kind)
    if _START_TIMEOUT_TEXT in text:
        return StreamFailed(
            "Spark's Python did not start within the 10 s that Java waits for it",
            "This machine has too much to do at the moment: try again, or let it do less",
            PYTHON_START_TIMEOUT,
        )
    other_errors = list(_OTHER_ERROR.finditer(text))
    if other_errors:
        kind, message = other_errors[-1].groups()
        return StreamFailed(
            f"{kind}: {message}{_user_frame(text[: other_errors[-1].start()])}", kind=kind
        )
    first_line = _SPARK_FRAMING.sub("", text.splitlines()[0]) if text else ""
    return StreamFailed(first_line or type(fault).__name__)


def _user_frame(trace: str) -> str:
    """Return the innermost line of user code in a traceback, or ""."""
    user_frames = [
        found for found in _TRACEBACK_FRAME.findall(trace) if not _LIBRARY_PATH.search(found[0])
    ]
    return f" ({user_frames[-1][0]}, line {user_frames[-1][1]})" if user_frames else ""
