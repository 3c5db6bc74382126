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
# The last words of a Python traceback that came through Java: our own faults tell what to do.
_OURS: Final = re.compile(r"^sluice\.(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)
_THEIRS: Final = re.compile(r"^(?:[\w.]+\.)?(\w+(?:Error|Exception)): (.+)$", re.MULTILINE)


class StreamFailed(SluiceError):
    """A stream ended by a fault."""


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
) -> Progress:
    """Until it ends by itself (`once`), or `asked` is set. Raises `StreamFailed` with the words of the cause."""
    from pyspark.errors import StreamingQueryException

    asked = asked or Event()
    progress = Progress()
    began = time.monotonic()
    pause = 1.0
    while True:
        query = start()
        rows_before = progress.rows
        try:
            _follow(query, progress, began, tell, asked)
            return progress
        except StreamingQueryException as fault:
            progress.hear(query)
            failure = explained(fault)
            if once or _is_final(failure):
                raise failure from None
            pause = 1.0 if progress.rows > rows_before else min(2 * pause, LONGEST_PAUSE)
            progress.restarts += 1
            tell(progress)
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
    return failure.what.startswith(("InvalidOption", "DataLost"))


def explained(fault: Exception) -> StreamFailed:
    """The one line of a Java and Python traceback that says what happened."""
    text = str(fault)
    ours = _OURS.findall(text)
    theirs = ours or _THEIRS.findall(text)
    if not theirs:
        return StreamFailed(text.strip().splitlines()[0] if text.strip() else type(fault).__name__)
    name, words = theirs[-1]
    return StreamFailed(f"{name}: {words}")
