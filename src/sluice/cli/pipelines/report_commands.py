"""`sluice pipeline dead-letters`, `flow` and `audit`: pipelines that look, tell and change nothing."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.support.errors import SOMETHING_WRONG, wrong_command
from sluice.cli.pipelines.result_tables import show_causes, show_flow, show_verdict
from sluice.cli.support.time_arguments import moment
from sluice.cli.pipelines.job_options import Every, FailedQueue, Queue, Report
from sluice.cli.pipelines.spark_command import SparkVisit, at_work, leave, needless, pipeline, the_only
from sluice.cli.pipelines.stream_progress import run_stream, spark_time

if TYPE_CHECKING:
    from sluice.spark.pipelines.jobs.audit import Source
    from sluice.spark.pipelines.support.latency_windows import Windows


def add_to(app: typer.Typer) -> None:
    for name, report in (("dead-letters", dead_letters), ("flow", flow), ("audit", audit)):
        pipeline(app, name)(report)


def dead_letters(
    visit: SparkVisit,
    queue: FailedQueue = "",
    to: Report = None,
    since: Annotated[
        str, typer.Option(metavar="WHEN", help="Died at or after: a time, or 2h for two hours ago.")
    ] = "",
) -> None:
    """What fails, why, and since when: a table, and a report with charts. Without --queue: of all queues."""
    from sluice.spark.pipelines.jobs import dead_letters as making
    from sluice.spark.pipelines.report import page

    begin = moment("--since", since, visit.now)
    if to is not None:
        page.check(to)
    homes = visit.homes(queue)
    if homes:
        with visit.spark() as spark, at_work(visit, "reading dead letters"):
            from pyspark.sql import functions as f

            from sluice.spark.pipelines.queues import exactly

            if queue:
                letters = visit.queues.letters(spark, queue, homes, headers=False)
            else:
                letters = visit.queues.read(spark, exactly(*homes), headers=False)
            if begin:
                letters = letters.where(f.coalesce("dead_at", "timestamp") >= f.lit(begin).cast("timestamp"))
            found = making.look(letters)
    else:
        found = making.NONE
    if to is not None:
        page.save(making.report(found, queue or "all queues"), to)
    if visit.answered({**found.summary(), "report": None if to is None else str(to)}):
        return
    show_causes(visit, found.summary())
    if to is not None:
        visit.out.show(f"Report: {to}")


def flow(
    visit: SparkVisit,
    context: typer.Context,
    queue: Queue = "",
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="An archive, in place of --queue.")
    ] = None,
    window: Annotated[str, typer.Option(metavar="DURATION", help="Length of a window.")] = "1m",
    since: Annotated[
        str,
        typer.Option(metavar="EXPR", help="When a message began, for its latency: headers['sent-at'] ..."),
    ] = "",
    until: Annotated[str, typer.Option(metavar="EXPR", help="When it had arrived.")] = "timestamp",
    to: Report = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on, and write the report anew with each batch.")
    ] = False,
    every: Every = "10s",
) -> None:
    """Throughput and latency percentiles per window of time: a table, and a report with charts."""
    the_only(queue=queue, **{"from": source})
    if follow and (to is None or source is not None):
        raise wrong_command("--follow watches a queue and writes a report", "Give --queue and --to")
    if not follow:
        needless(context, "every", "without --follow", "Leave it out, or go on with --follow")
    from sluice.spark.pipelines.jobs import flow as making
    from sluice.spark.pipelines.queues import exactly
    from sluice.spark.pipelines.report import page
    from sluice.spark.pipelines.tables import open_table

    span = making.spark_window(window)
    pause = spark_time("--every", every)
    if to is not None:
        page.check(to)
    if source is not None:
        open_table(source).check()
    else:
        visit.check_queue(queue)
    named = queue or str(source)

    def write(windows: Windows) -> None:
        if to is not None:
            page.save(making.report(windows, named), to)

    with visit.spark() as spark:
        queues = visit.queues
        if follow:
            watch = making.Watch()
            write(watch.found)  # who opens it before the first batch sees that nothing has come yet
            # A stream that fails goes on from its memory, and so do the counts.
            with TemporaryDirectory(prefix="sluice-flow-", ignore_cleanup_errors=True) as memory:
                run_stream(
                    visit,
                    "watching",
                    lambda: making.start(
                        spark,
                        queues,
                        exactly(queue),
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
                    remembers=False,
                )
            found = watch.found
        else:
            with at_work(visit, "counting"):
                rows = open_table(source).read(spark) if source else queues.read(spark, exactly(queue))
                found = making.look(rows, span, since, until)
            write(found)
    told = making.summary(found)
    if since and told["messages"] and told["latency"] is None:
        visit.out.note(
            f"--since {since!r} with --until {until!r} gives no time for any message: no latency is known"
        )
    if making.lengthened(found):
        visit.out.note(making.lengthened(found))
    if visit.answered({**told, "report": None if to is None else str(to)}):
        return
    show_flow(visit, found.rows())
    if to is not None:
        visit.out.show(f"Report: {to}")


def audit(
    visit: SparkVisit,
    published: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="What was published: queue:NAME, json:, csv: or parquet:PATH, or an archive's DIR.",
        ),
    ],
    acked: Annotated[str, typer.Option(metavar="SOURCE", help="What was done, as the workers tell it.")] = "",
    dead: Annotated[str, typer.Option(metavar="SOURCE", help="Dead letters: letters:QUEUE.")] = "",
    waiting: Annotated[
        str, typer.Option(metavar="SOURCE", help="What is still to be done: queue:NAME?group=GROUP.")
    ] = "",
    archived: Annotated[str, typer.Option(metavar="SOURCE", help="An archive.")] = "",
) -> None:
    """What was published against what became of it: what is missing, what is double. Exit code 5 if anything is.

    SOURCE#EXPR says what the id of a row is, in SQL; else it is message_id, or id.
    """
    from sluice.spark.pipelines.jobs import audit as making

    told = {"published": published, "acked": acked, "dead": dead, "waiting": waiting, "archived": archived}
    given = {name: making.parse(source) for name, source in told.items() if source}
    making.check(given)
    for name, source in given.items():
        _check_source(visit, name, source)
    # Many small pieces rather than few large ones: what a task holds must fit into memory, or is spilled.
    with visit.spark(**{"spark.sql.shuffle.partitions": "64"}) as spark, at_work(visit, "comparing"):
        verdict = making.run(spark, visit.queues, given)
    if not visit.answered(verdict.summary()):
        show_verdict(visit, verdict.summary(), making.FAULTS)
    if not verdict.is_good:
        leave(SOMETHING_WRONG)


def _check_source(visit: SparkVisit, side: str, source: Source) -> None:
    """A queue must be there, but for one of dead letters: the first death makes it. And dead are only those there."""
    from sluice.spark.pipelines.jobs import audit as making

    if source.kind == making.LETTERS:
        visit.homes(source.place)
    elif source.group:
        _check_group(visit, source)
    elif source.queue:
        _check_queue(visit, side, source.queue)


def _check_group(visit: SparkVisit, source: Source) -> None:
    """One that is not there would have everything to do still, and nothing would be missing."""
    there = visit.groups(source.queue)
    if source.group not in there:
        others = (
            f"Name one of {', '.join(sorted(there))}" if there else f"It has none: say queue:{source.queue}"
        )
        raise wrong_command(f"{source.queue} has no group {source.group}", others)


def _check_queue(visit: SparkVisit, side: str, queue: str) -> None:
    told = visit.describe(queue)
    if told is None:
        if not visit.is_channel(queue):
            visit.check_queue(queue)
    elif side == "dead" and not told["stats"]["is_dead_letters"]:
        from sluice.spark.pipelines.support.dead_letter_queues import channels

        homes = [f"queue:{one}" for one in channels(told)]
        raise wrong_command(
            f"{queue} holds no dead letters",
            f"Name the queue that does: {' or '.join(homes) or 'it has none'}; or letters:{queue}, wherever they lie",
        )
    elif side == "waiting" and (groups := sorted(visit.groups(queue))):
        visit.out.note(
            f"all that {queue} keeps counts as waiting, also what is done and not deleted yet; what a group has still"
            f" to do is queue:{queue}?group={groups[0]}"
        )
