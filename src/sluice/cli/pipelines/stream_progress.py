"""A stream under the eyes of a command: a bar while it runs, a line when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sluice.cli.support.errors import wrong_command
from sluice.cli.pipelines.spark_command import SparkVisit, asked_to_stop, counted, speed
from sluice.cli.support.formatting import duration, plural
from sluice.units import parse_duration

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from sluice.spark.pipelines.support.stream_runner import Progress


def run_stream(
    visit: SparkVisit,
    doing: str,
    start: Callable[[], StreamingQuery],
    once: bool,
    total: int | None,
    remembers: bool = True,
) -> Progress:
    """`remembers`: it has a checkpoint that the user can give again."""
    from sluice.spark.pipelines.support import stream_runner

    if not once:
        more = ", and it goes on from there the next time" if remembers else ""
        visit.out.note(f"{doing}; Ctrl-C stops it{more}")
    with counted(visit, doing, total) as tell, asked_to_stop() as asked:
        done = stream_runner.run(
            start,
            once,
            lambda progress: tell(progress.rows),
            asked,
            # What it says of a cure is not for one who tries again by himself.
            lambda failure, pause: visit.out.note(
                f"{failure.what.partition('. ')[0]}; trying again in {duration(pause)}"
            ),
        )
    if once and asked.is_set():
        raise KeyboardInterrupt  # it has not come to its end
    return done


def report_stream(
    visit: SparkVisit, done: Progress, words: Callable[[str, str], str], more: dict[str, Any]
) -> None:
    """`words` make a sentence of what was read and, where a stream knows, of what it has written."""
    told = {**more, "rows": done.rows, "batches": done.batches, "seconds": round(done.seconds, 3)}
    if done.written is not None:
        told["written"] = done.written
    if visit.answered({**told, "restarts": done.restarts}):
        return
    parts = [plural(done.batches, "batch", "batches"), duration(done.seconds)]
    parts += [speed(done)] if speed(done) else []
    parts += [plural(done.restarts, "restart")] if done.restarts else []
    written = "" if done.written is None else plural(done.written, "message")
    visit.out.show(f"{words(plural(done.rows, 'message'), written)} ({', '.join(parts)}).")
    if more["lag"]:
        visit.out.note(f"{plural(more['lag'], 'message')} came in meanwhile and wait for the next run.")


def spark_time(flag: str, text: str) -> str:
    """A duration as Spark says it."""
    try:
        return f"{max(0, round(parse_duration(text) * 1000))} milliseconds"
    except ValueError as fault:
        raise wrong_command(f"{flag} {text!r}: {fault}", "Write it as 500ms, 30s or 5m") from None
