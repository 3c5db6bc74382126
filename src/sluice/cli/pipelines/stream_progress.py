"""Run a stream for a command: a progress bar while it runs, a sentence when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sluice.cli.pipelines.spark_command import (
    SparkCommandContext,
    progress_bar,
    speed,
    stop_on_signal,
)
from sluice.cli.support import (
    format_duration,
    format_plural,
    usage_error,
)
from sluice.units import parse_duration

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

    from sluice.spark.pipelines.support.stream_runner import StreamProgress


def run_stream(
    cli: SparkCommandContext,
    action: str,
    start: Callable[[], StreamingQuery],
    once: bool,
    total: int | None,
    has_checkpoint: bool = True,
) -> StreamProgress:
    """Run a stream. `has_checkpoint`: it has a checkpoint that the user can give again."""
    from sluice.spark.pipelines.support import stream_runner

    if not once:
        more = ", and it goes on from there the next time" if has_checkpoint else ""
        cli.out.note(f"{action}; Ctrl-C stops it{more}")
    with progress_bar(cli, action, total) as update_bar, stop_on_signal() as stop_requested:
        result = stream_runner.run(
            start,
            once,
            lambda progress: update_bar(progress.rows),
            stop_requested,
            # The remedy is left out: the stream retries by itself.
            lambda failure, pause: cli.out.note(
                f"{failure.what.partition('. ')[0]}; trying again in {format_duration(pause)}"
            ),
        )
    if once and stop_requested.is_set():
        raise KeyboardInterrupt  # it was interrupted before its end
    return result


def report_stream(
    cli: SparkCommandContext,
    progress: StreamProgress,
    make_sentence: Callable[[str, str], str],
    more: dict[str, Any],
) -> None:
    """Print the result. `make_sentence` gets the number of read messages and, if known, of written
    ones.
    """
    summary = {
        **more,
        "rows": progress.rows,
        "batches": progress.batches,
        "seconds": round(progress.seconds, 3),
    }
    if progress.written is not None:
        summary["written"] = progress.written
    if cli.print_if_json({**summary, "restarts": progress.restarts}):
        return
    parts = [format_plural(progress.batches, "batch", "batches"), format_duration(progress.seconds)]
    parts += [speed(progress)] if speed(progress) else []
    parts += [format_plural(progress.restarts, "restart")] if progress.restarts else []
    written = "" if progress.written is None else format_plural(progress.written, "message")
    cli.out.show(
        f"{make_sentence(format_plural(progress.rows, 'message'), written)} ({', '.join(parts)})."
    )
    if more["lag"]:
        cli.out.note(
            f"{format_plural(more['lag'], 'message')} came in meanwhile and wait for the next run."
        )


def spark_interval(flag: str, text: str) -> str:
    """Convert a duration to a Spark interval."""
    try:
        return f"{max(0, round(parse_duration(text) * 1000))} milliseconds"
    except ValueError as fault:
        raise usage_error(f"{flag} {text!r}: {fault}", "Write it as 500ms, 30s or 5m") from None
