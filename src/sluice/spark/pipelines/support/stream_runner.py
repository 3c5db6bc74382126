"""A stream from its start to its end: how far it has come, and what becomes of it when it fails.

Spark does not restart a query that has failed; this does, with growing pauses, unless it was to run once. All our
streams go on from their checkpoint, so a restart repeats nothing and leaves nothing out.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from threading import Event
from typing import TYPE_CHECKING, Final

from sluice.errors import SluiceError

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_SECONDS: Final = 0.5
LONGEST_PAUSE: Final = 60.0
LATE: Final = "Late"
LATE_TRIES: Final = 5
UNKNOWN_TRIES: Final = 5  # half a minute in all
# The last words of a Python traceback that came through Java: our own faults tell what to do.
_OURS: Final = re.compile(r"^sluice\.(?:\w+\.)*(\w+): (.+)$", re.MULTILINE)
# What Spark puts around what it says, for programs.
_FRAME: Final = re.compile(r"^\[[A-Z_.]+\] (?:Query \[.*?\] terminated with exception: )?|\s*SQLSTATE: .*$")
_LATE: Final = "Python worker failed to connect back"
# What the broker says when it can take a batch later: it was restarted between the rows and their commit, it has no
# room, no hands or no store just now. Only the words of a refusal come through Java; a test compares them with the
# places where they are made.
_PASSING: Final = re.compile(
    r"cannot be committed: |between staging and commit|wait for their commit|is full|is stopping|more at once|"
    r"again in a moment|Ask again|[Tt]ry again|again later|Commit the batch again|Send fewer at once"
)
# And when it never will: something in the batch, or its size.
_NEVER: Final = re.compile(r" cannot be used: |bytes or more, and ")
_FRAME_OF: Final = re.compile(r'^\s*File "([^"]+)", line (\d+), in ', re.MULTILINE)
_LIBRARIES: Final = re.compile(r"/(?:pyspark|py4j|sluice|site-packages)[/.]|/lib/python\d|^<")
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
    written: int | None = None  # rows that the sink has told of, if it tells
    seen: dict[int, int] = field(default_factory=dict, repr=False)
    sunk: dict[int, int] = field(default_factory=dict, repr=False)

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else 0.0

    def hear(self, query: StreamingQuery) -> None:
        """Spark remembers the last hundred batches; one without rows is a look at an idle source."""
        for told in query.recentProgress:
            if told.numInputRows:
                self.seen[told.batchId] = told.numInputRows
            if told.sink.numOutputRows >= 0:
                self.sunk[told.batchId] = told.sink.numOutputRows
        self.written = sum(self.sunk.values()) if self.sunk else None
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
    waits 10 s for the Python that plans, which a machine may be too busy for: that one is tried again in any case. What
    no second try mends ends it; what nobody knows is given a few tries, as long as it gets nowhere between them."""
    from pyspark.errors import PySparkException

    asked = asked or Event()
    progress = Progress()
    began = time.monotonic()
    pause = 1.0
    late = stuck = 0
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
            stuck = stuck + 1 if progress.rows == rows_before else 1
            if stuck > _tries(failure) or (once and not 0 < late <= LATE_TRIES):
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


def _tries(failure: StreamFailed) -> float:
    """How often in a row a failure is followed by another try. Those that the world mends have no end."""
    if failure.kind in ("InvalidOption", "DataLost"):
        return 0
    if failure.kind == "Refused" and not _PASSING.search(failure.what):
        return 0 if _NEVER.search(failure.what) else UNKNOWN_TRIES
    return inf if failure.kind in ("BrokerGone", "StreamCut", "Refused", LATE) else UNKNOWN_TRIES


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
    theirs = list(_THEIRS.finditer(text))
    if theirs:
        kind, words = theirs[-1].groups()
        return StreamFailed(f"{kind}: {words}{_place(text[: theirs[-1].start()])}", kind=kind)
    said = _FRAME.sub("", text.splitlines()[0]) if text else ""
    return StreamFailed(said or type(fault).__name__)


def _place(trace: str) -> str:
    """The line of the user's own that a traceback leads to, if there is one."""
    theirs = [found for found in _FRAME_OF.findall(trace) if not _LIBRARIES.search(found[0])]
    return f" ({theirs[-1][0]}, line {theirs[-1][1]})" if theirs else ""
