"""`sluice pipeline dead-letters`, `flow` and `audit`: pipelines that look, tell and change nothing."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.pipelines.job_options import Every, FailedQueue, Queue, ReportFile
from sluice.cli.pipelines.result_tables import show_audit, show_causes, show_flow
from sluice.cli.pipelines.spark_command import (
    SparkCommandContext,
    exit_with,
    pipeline_command,
    reject_unused,
    require_exactly_one,
    spinner,
)
from sluice.cli.pipelines.stream_progress import run_stream, spark_interval
from sluice.cli.support.errors import EXIT_FINDINGS, usage_error
from sluice.cli.support.time_arguments import parse_time_argument

if TYPE_CHECKING:
    from sluice.spark.pipelines.jobs.audit import AuditSource
    from sluice.spark.pipelines.support.latency_windows import Windows


def add_to(app: typer.Typer) -> None:
    for name, report in (("dead-letters", dead_letters), ("flow", flow), ("audit", audit)):
        pipeline_command(app, name)(report)


def dead_letters(
    cli: SparkCommandContext,
    queue: FailedQueue = "",
    to: ReportFile = None,
    since: Annotated[
        str, typer.Option(metavar="WHEN", help="Died at or after: a time, or 2h for two hours ago.")
    ] = "",
) -> None:
    """What fails, why, and since when: a table, and a report with charts. Without --queue: of all queues."""
    from sluice.spark.pipelines.jobs import dead_letters as making
    from sluice.spark.pipelines.report import page

    begin = parse_time_argument("--since", since, cli.now)
    if to is not None:
        page.check_writable(to)
    dead_letter_queues = cli.dead_letter_queues(queue)
    if dead_letter_queues:
        with cli.spark() as spark, spinner(cli, "reading dead letters"):
            from pyspark.sql import functions as f

            from sluice.spark.pipelines.queues import exact_subscription

            if queue:
                rows = cli.queues.dead_letters(spark, queue, dead_letter_queues, headers=False)
            else:
                rows = cli.queues.read(
                    spark, exact_subscription(*dead_letter_queues), headers=False
                )
            if begin:
                rows = rows.where(
                    f.coalesce("dead_at", "timestamp") >= f.lit(begin).cast("timestamp")
                )
            found = making.summarize(rows)
    else:
        found = making.NO_FINDINGS
    if to is not None:
        page.save(making.report(found, queue or "all queues"), to)
    if cli.print_if_json({**found.summary(), "report": None if to is None else str(to)}):
        return
    show_causes(cli, found.summary())
    if to is not None:
        cli.out.show(f"Report: {to}")


def flow(
    cli: SparkCommandContext,
    context: typer.Context,
    queue: Queue = "",
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="An archive, in place of --queue.")
    ] = None,
    window: Annotated[str, typer.Option(metavar="DURATION", help="Length of a window.")] = "1m",
    since: Annotated[
        str,
        typer.Option(
            metavar="EXPR", help="When a message began, for its latency: headers['sent-at'] ..."
        ),
    ] = "",
    until: Annotated[str, typer.Option(metavar="EXPR", help="When it had arrived.")] = "timestamp",
    to: ReportFile = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on, and write the report anew with each batch.")
    ] = False,
    every: Every = "10s",
) -> None:
    """Throughput and latency percentiles per window of time: a table, and a report with charts."""
    require_exactly_one(queue=queue, **{"from": source})
    if follow and (to is None or source is not None):
        raise usage_error("--follow watches a queue and writes a report", "Give --queue and --to")
    if not follow:
        reject_unused(context, "every", "without --follow", "Leave it out, or go on with --follow")
    from sluice.spark.pipelines.jobs import flow as making
    from sluice.spark.pipelines.queues import exact_subscription
    from sluice.spark.pipelines.report import page
    from sluice.spark.pipelines.tables import open_table

    span = making.spark_window(window)
    pause = spark_interval("--every", every)
    if to is not None:
        page.check_writable(to)
    if source is not None:
        open_table(source).existing_files()
    else:
        cli.check_queue(queue)
    named = queue or str(source)

    def write(windows: Windows) -> None:
        if to is not None:
            page.save(making.report(windows, named), to)

    with cli.spark() as spark:
        queues = cli.queues
        if follow:
            watch = making.FlowWatch()
            write(
                watch.windows
            )  # who opens it before the first batch sees that nothing has come yet
            # A stream that fails goes on from its memory, and so do the counts.
            with TemporaryDirectory(prefix="sluice-flow-", ignore_cleanup_errors=True) as memory:
                run_stream(
                    cli,
                    "watching",
                    lambda: making.start(
                        spark,
                        queues,
                        exact_subscription(queue),
                        write,
                        window=span,
                        since=since,
                        until=until,
                        every=pause,
                        watch=watch,
                        checkpoint=memory,
                    ),
                    False,
                    None,
                    has_checkpoint=False,
                )
            found = watch.windows
        else:
            with spinner(cli, "counting"):
                rows = (
                    open_table(source).read(spark)
                    if source
                    else queues.read(spark, exact_subscription(queue))
                )
                found = making.collect_windows(rows, span, since, until)
            write(found)
    totals = making.summary(found)
    if since and totals["messages"] and totals["latency"] is None:
        cli.out.note(
            f"--since {since!r} with --until {until!r} gives no time for any message: no latency is known"
        )
    if making.window_note(found):
        cli.out.note(making.window_note(found))
    if cli.print_if_json({**totals, "report": None if to is None else str(to)}):
        return
    show_flow(cli, found.rows())
    if to is not None:
        cli.out.show(f"Report: {to}")


def audit(
    cli: SparkCommandContext,
    published: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="What was published: queue:NAME, json:, csv: or parquet:PATH, or an archive's DIR.",
        ),
    ],
    acked: Annotated[
        str, typer.Option(metavar="SOURCE", help="What was done, as the workers tell it.")
    ] = "",
    dead: Annotated[str, typer.Option(metavar="SOURCE", help="Dead letters: letters:QUEUE.")] = "",
    waiting: Annotated[
        str,
        typer.Option(metavar="SOURCE", help="What is still to be done: queue:NAME?group=GROUP."),
    ] = "",
    archived: Annotated[str, typer.Option(metavar="SOURCE", help="An archive.")] = "",
) -> None:
    """What was published against what became of it: what is missing, what is double. Exit code 5 if anything is.

    SOURCE#EXPR says what the id of a row is, in SQL; else it is message_id, or id.
    """
    from sluice.spark.pipelines.jobs import audit as making

    sources = {
        "published": published,
        "acked": acked,
        "dead": dead,
        "waiting": waiting,
        "archived": archived,
    }
    given = {name: making.parse_source(source) for name, source in sources.items() if source}
    making.check_sides(given)
    for name, source in given.items():
        _check_source(cli, name, source)
    # Many small pieces rather than few large ones: what a task holds must fit into memory, or is spilled.
    with cli.spark(**{"spark.sql.shuffle.partitions": "64"}) as spark, spinner(cli, "comparing"):
        result = making.run(spark, cli.queues, given)
    if not cli.print_if_json(result.summary()):
        show_audit(cli, result.summary(), making.FAULTS)
    if not result.is_good:
        exit_with(EXIT_FINDINGS)


def _check_source(cli: SparkCommandContext, side: str, source: AuditSource) -> None:
    """A queue must be there, but for one of dead letters: the first death makes it. And dead are only those there."""
    from sluice.spark.pipelines.jobs import audit as making

    if source.kind == making.DEAD_LETTERS:
        cli.dead_letter_queues(source.location)
    elif source.group:
        _check_group(cli, source)
    elif source.queue:
        _check_queue(cli, side, source.queue)


def _check_group(cli: SparkCommandContext, source: AuditSource) -> None:
    """One that is not there would have everything to do still, and nothing would be missing."""
    groups = cli.groups(source.queue)
    if source.group not in groups:
        others = (
            f"Name one of {', '.join(sorted(groups))}"
            if groups
            else f"It has none: say queue:{source.queue}"
        )
        raise usage_error(f"{source.queue} has no group {source.group}", others)


def _check_queue(cli: SparkCommandContext, side: str, queue: str) -> None:
    description = cli.describe(queue)
    if description is None:
        if not cli.is_dead_letter_target(queue):
            cli.check_queue(queue)
    elif side == "dead" and not description["stats"]["is_dead_letters"]:
        from sluice.spark.pipelines.support.dead_letter_queues import dead_letter_targets

        targets = [f"queue:{one}" for one in dead_letter_targets(description)]
        raise usage_error(
            f"{queue} holds no dead letters",
            f"Name the queue that does: {' or '.join(targets) or 'it has none'}; or letters:{queue}, wherever they lie",
        )
    elif side == "waiting" and (groups := sorted(cli.groups(queue))):
        cli.out.note(
            f"all that {queue} keeps counts as waiting, also what is done and not deleted yet; what a group has still"
            f" to do is queue:{queue}?group={groups[0]}"
        )
