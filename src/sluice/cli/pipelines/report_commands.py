"""`sluice pipeline dead-letters`, `flow` and `audit`: pipelines that report and change nothing."""

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
from sluice.cli.support import (
    EXIT_FINDINGS,
    parse_time_argument,
    usage_error,
)

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
    """Show what fails, why, and since when: a table, and a report with charts. Without --queue: of
    all queues.
    """
    from sluice.report import page
    from sluice.spark.pipelines.jobs import dead_letters as job

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
            found = job.summarize(rows)
    else:
        found = job.NO_FINDINGS
    if to is not None:
        page.save(job.report(found, queue or "all queues"), to)
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
        bool, typer.Option("--follow", help="Continue, and rewrite the report with each batch.")
    ] = False,
    every: Every = "10s",
) -> None:
    """Show throughput and latency percentiles per window: a table, and a report with charts."""
    require_exactly_one(queue=queue, **{"from": source})
    if follow and (to is None or source is not None):
        raise usage_error("--follow watches a queue and writes a report", "Give --queue and --to")
    if not follow:
        reject_unused(context, "every", "without --follow", "Leave it out, or add --follow")
    from sluice.report import page
    from sluice.spark.pipelines.jobs import flow as job
    from sluice.spark.pipelines.queues import exact_subscription
    from sluice.spark.pipelines.tables import open_table

    span = job.spark_window(window)
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
            page.save(job.report(windows, named), to)

    with cli.spark() as spark:
        queues = cli.queues
        if follow:
            watch = job.FlowWatch()
            # A reader that opens the report before the first batch sees an empty one.
            write(watch.windows)
            # A stream that fails continues from its checkpoint, with its counts.
            with TemporaryDirectory(
                prefix="sluice-flow-", ignore_cleanup_errors=True
            ) as checkpoint:
                run_stream(
                    cli,
                    "watching",
                    lambda: job.start(
                        spark,
                        queues,
                        exact_subscription(queue),
                        write,
                        window=span,
                        since=since,
                        until=until,
                        every=pause,
                        watch=watch,
                        checkpoint=checkpoint,
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
                found = job.collect_windows(rows, span, since, until)
            write(found)
    totals = job.summary(found)
    if since and totals["messages"] and totals["latency"] is None:
        cli.out.note(
            f"--since {since!r} with --until {until!r} gives no time for any message:"
            " no latency is known"
        )
    if job.window_note(found):
        cli.out.note(job.window_note(found))
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
            help="Published messages: queue:NAME, json:, csv: or parquet:PATH, or an archive.",
        ),
    ],
    acked: Annotated[
        str, typer.Option(metavar="SOURCE", help="Processed messages, as reported by the workers.")
    ] = "",
    dead: Annotated[
        str,
        typer.Option(metavar="SOURCE", help="Dead letters: letters:QUEUE."),  # words: allowed
    ] = "",
    waiting: Annotated[
        str,
        typer.Option(metavar="SOURCE", help="Unprocessed messages: queue:NAME?group=GROUP."),
    ] = "",
    archived: Annotated[str, typer.Option(metavar="SOURCE", help="An archive.")] = "",
) -> None:
    """Compare published with processed messages: which are missing, which are double. Exit code 5
    if any is.

    SOURCE#EXPR gives the id of a row, in SQL; else it is message_id, or id.
    """
    from sluice.spark.pipelines.jobs import audit as job

    sources = {
        "published": published,
        "acked": acked,
        "dead": dead,
        "waiting": waiting,
        "archived": archived,
    }
    given = {name: job.parse_source(source) for name, source in sources.items() if source}
    job.check_sides(given)
    for name, source in given.items():
        _check_source(cli, name, source)
    # Many small partitions rather than few large ones: the data of a task must fit into memory, or
    # is spilled.
    with cli.spark(**{"spark.sql.shuffle.partitions": "64"}) as spark, spinner(cli, "comparing"):
        result = job.run(spark, cli.queues, given)
    if not cli.print_if_json(result.summary()):
        show_audit(cli, result.summary(), job.FAULTS)
    if not result.is_good:
        exit_with(EXIT_FINDINGS)


def _check_source(cli: SparkCommandContext, side: str, source: AuditSource) -> None:
    """Check that a queue exists, except a dead-letter queue: the first dead letter creates it.

    The side `dead` must be a dead-letter queue.
    """
    from sluice.spark.pipelines.jobs import audit as job

    if source.kind == job.DEAD_LETTERS:
        cli.dead_letter_queues(source.location)
    elif source.group:
        _check_group(cli, source)
    elif source.queue:
        _check_queue(cli, side, source.queue)


def _check_group(cli: SparkCommandContext, source: AuditSource) -> None:
    """Check that the group exists: a missing one would leave all messages waiting, and hide missing
    ones.
    """
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
        from sluice.spark.pipelines.jobs import audit as job
        from sluice.spark.pipelines.support.dead_letter_queues import dead_letter_targets

        targets = [f"queue:{one}" for one in dead_letter_targets(description)]
        raise usage_error(
            f"{queue} holds no dead letters",
            f"Name the queue that does: {' or '.join(targets) or 'it has none'};"
            f" or {job.DEAD_LETTERS}:{queue} for all its dead-letter queues",
        )
    elif side == "waiting" and (groups := sorted(cli.groups(queue))):
        cli.out.note(
            f"all messages of {queue} count as waiting, also processed ones that are not deleted"
            f" yet; the backlog of a group is queue:{queue}?group={groups[0]}"
        )
