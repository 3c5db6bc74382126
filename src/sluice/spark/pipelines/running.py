"""A stream from its start to its end: how far it has come, and what becomes of it when it fails.

Spark does not restart a query that has failed; this does, with growing pauses, unless it was to run once. All our
streams go on from their checkpoint, so a restart repeats nothing and leaves nothing out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import TYPE_CHECKING, Final

from sluice.errors import SluiceError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_SECONDS: Final = 0.5
LONGEST_PAUSE: Final = 60.0
LATE: Final = "Late"
LATE_TRIES: Final = 5
# The last words of a Python traceback that came through Java: our own faults tell what to do.
_OURS: Final = re.compile(r"^sluice\.(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)
# What Spark puts around what it says, for programs.
_FRAME: Final = re.compile(r"^\[[A-Z_.]+\] (?:Query \[.*?\] terminated with exception: )?|\s*SQLSTATE: .*$")
_LATE: Final = "Python worker failed to connect back"
_THEIRS: Final = re.compile(r"^(?:: )?(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)


class StreamFailed(SluiceError):
    """A stream ended by a fault. `kind` is the name of its class: BrokerGone, DataLost ..."""

    def __init__(self, what: str, do: str = "", kind: str = "") -> None:
        super().__init__(what, do)
        self.kind = kind


@dataclass
class Progress:
    rows: int = 0
    batches: int = 0
    restarts: int = 0
    seconds: float = 0.0
    seen: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    def hear(self, query: StreamingQuery) -> None:
        """Spark remembers the last hundred batches; one without rows is a look at an idle source."""
        for told in query.recentProgress:
            if told.numInputRows:
                self.seen[told.batchId] = told.numInputRows
        self.rows = sum(self.seen.values())
        self.batches = len(self.seen)


def run(
    start: Callable[[], StreamingQuery],
    once: bool,
    tell: Callable[[Progress], None] = lambda progress: None,
    asked: Event | None = None,
    mourn: Callable[[StreamFailed, float], None] = lambda failure, pause: None,
) -> Progress:
    """Until it ends by itself (`once`), or `asked` is set. Raises `StreamFailed` with the words of the cause. `mourn`
    hears of each failure that is followed by another try, and after how many seconds.

    What stops a first start is for the user to mend, and raised as it is. A later one had run before: then it is the
    world that has changed, a broker that is gone for longer than a read waits for it, and may change back. And Java
    waits 10 s for the Python that plans, which a machine may be too busy for: that one is tried again in any case."""
    from pyspark.errors import PySparkException

    asked = asked or Event()
    progress = Progress()
    began = time.monotonic()
    pause = 1.0
    late = 0
    while True:
        query: StreamingQuery | None = None
        rows_before = progress.rows
        try:
            query = start()
            _follow(query, progress, began, tell, asked)
            return progress
        except PySparkException as fault:
            if query is not None:
                progress.hear(query)
            elif not progress.restarts:
                raise
            failure = explained(fault)
            late = late + 1 if failure.kind == LATE else 0
            if _is_final(failure) or (once and not 0 < late <= LATE_TRIES):
                raise failure from None
            pause = 1.0 if progress.rows > rows_before else min(2 * pause, LONGEST_PAUSE)
            progress.restarts += 1
            tell(progress)
            mourn(failure, pause)
            if asked.wait(pause):
                return progress


def _follow(
    query: StreamingQuery,
    progress: Progress,
    began: float,
    tell: Callable[[Progress], None],
    asked: Event,
) -> None:
    while not query.awaitTermination(LOOK_SECONDS):  # type: ignore[arg-type]
        _take_stock(query, progress, began, tell)
        if asked.is_set():
            query.stop()
            break
    _take_stock(query, progress, began, tell)


def _take_stock(
    query: StreamingQuery, progress: Progress, began: float, tell: Callable[[Progress], None]
) -> None:
    progress.hear(query)
    progress.seconds = time.monotonic() - began
    tell(progress)


def _is_final(failure: StreamFailed) -> bool:
    """What no second try mends: an option that cannot be used, rows that are lost."""
    return failure.kind in ("InvalidOption", "DataLost")


def explained(fault: Exception) -> StreamFailed:
    """The one line of a Java and Python traceback that says what happened."""
    text = str(fault).strip()
    ours = _OURS.findall(text)
    if ours:
        kind, words = ours[-1]
        return StreamFailed(words, kind=kind)
    if _LATE in text:
        return StreamFailed(
            "Spark's Python did not start within the 10 s that Java waits for it",
            "This machine has too much to do at the moment: try again, or let it do less",
            LATE,
        )
    theirs = _THEIRS.findall(text)
    if theirs:
        return StreamFailed(": ".join(theirs[-1]), kind=theirs[-1][0])
    said = _FRAME.sub("", text.splitlines()[0]) if text else ""
    return StreamFailed(said or type(fault).__name__)
