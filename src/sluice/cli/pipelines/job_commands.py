"""`sluice pipeline ...`: the jobs of `sluice.spark.pipelines`, as commands.

Spark is imported only when a command needs it: `sluice --help` must neither wait for Java nor fail
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sluice.cli.pipelines import report_commands
from sluice.cli.pipelines.job_options import (
    DropEmpty,
    Every,
    FailedQueue,
    Group,
    KeyExpression,
    Once,
    Queue,
    RowFilter,
    RowsPerBatch,
    Settle,
    SkipLost,
)
from sluice.cli.pipelines.preflight import (
    check_dead_letters,
    choose_group,
    read_query,
    translate_options,
)
from sluice.cli.pipelines.result_tables import show_repair
from sluice.cli.pipelines.spark_command import (
    SparkCommandContext,
    pipeline_command,
    progress_bar,
    reject_unused,
    require_exactly_one,
    spinner,
)
from sluice.cli.pipelines.stream_progress import report_stream, run_stream, spark_interval
from sluice.cli.support import (
    DryRun,
    ToAll,
    Yes,
    format_plural,
    parse_time_argument,
    usage_error,
)
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from sluice.spark.pipelines.jobs.replay import ReplayPlan

IN_PROGRESS_REMEDY: Final = (
    "Wait until it has ended, or give this one another --checkpoint and a --group of its own"
)
PREVIEW_KEY: Final = "letters"  # words: allowed (JSON key)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Spark on queues: archive, report, repair, transform, audit."
    " Needs `pip install sluice\\[spark]` and Java 17.",
)


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="pipeline", rich_help_panel=panel)


@pipeline_command(app, "archive")
def archive(
    cli: SparkCommandContext,
    context: typer.Context,
    queue: Queue,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory of the table.")],
    group: Group = "",
    format: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="delta or parquet; that of the table, a new one is delta."
        ),
    ] = "",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Spark's checkpoint; _sluice/checkpoint in the table unless given."
        ),
    ] = None,
    once: Once = False,
    every: Every = "30s",
    rows_per_batch: RowsPerBatch = 200_000,
    files: Annotated[
        int, typer.Option(min=0, help="Files per batch at most; 0 leaves it to Spark.")
    ] = 0,
    settle: Settle = False,
    skip_lost: SkipLost = False,
) -> None:
    """Copy a queue to a Delta table or Parquet files, each message once. Continues where it
    stopped.
    """
    from sluice.spark.pipelines.jobs import archive as job
    from sluice.spark.pipelines.support.run_lock import exclusive_run
    from sluice.spark.pipelines.tables import open_table

    table = open_table(to, format)
    table.check_archive()
    read_only = cli.check_queue(queue)["stats"]["is_dead_letters"] and not settle
    if read_only:
        why = f"for {queue}, whose dead letters stay"
        reject_unused(context, "group", why, "Leave it out, or delete them with --settle")
    pause = spark_interval("--every", every)
    checkpoint_directory = job.checkpoint_path(table, checkpoint)
    if not read_only:
        group = choose_group(cli, queue, group, "archive", checkpoint_directory)
    group_warning = nullcontext() if read_only else cli.warn_about_new_group(queue, group)
    with (
        exclusive_run(checkpoint_directory, IN_PROGRESS_REMEDY),
        group_warning,
        translate_options(),
        cli.spark() as spark,
    ):
        queues = cli.queues

        def lag() -> int | None:
            return None if read_only else queues.lag(queue, group)

        def start() -> StreamingQuery:
            return job.start(
                spark,
                queues,
                queue,
                to,
                group=group,
                read_only=read_only,
                table_format=format,
                checkpoint=checkpoint,
                once=once,
                every=pause,
                rows_per_batch=rows_per_batch,
                files=files,
                skip_lost=skip_lost,
            )

        done = run_stream(cli, "archiving", start, once, lag() if once else None)
        left = lag()
    if read_only:
        cli.out.note(
            f"The dead letters stay in {queue}; --settle deletes them once they are archived."
        )
    report_stream(
        cli,
        done,
        lambda read, written: f"Archived {read} of {queue} into {to}",
        {"queue": queue, "to": str(to), "lag": left},
    )


@pipeline_command(app, "redrive")
def redrive(
    cli: SparkCommandContext,
    queue: FailedQueue,
    where: RowFilter = "",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=EXPR",
            help="Change value, key, queue, headers, delay or priority.",
        ),
    ] = None,
    sql: Annotated[
        str,
        typer.Option(
            metavar="QUERY",
            help="A whole query over the view letters, in place of --set.",  # words: allowed
        ),
    ] = "",
    to_all: ToAll = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Repair dead letters with SQL and put them back, each once. Shows the changes, and asks."""
    if sql and changes:
        raise usage_error("--sql and --set exclude each other", "Put the changes into the query")
    dead_letter_queues = cli.dead_letter_queues(queue)
    if not dead_letter_queues:
        nothing_done = (
            {"would_put_back": 0, PREVIEW_KEY: []} if dry_run else {"put_back": 0, "skipped": 0}
        )
        if not cli.print_if_json(nothing_done):
            cli.out.show(f"No dead letters of {queue}.")
        return
    with cli.spark() as spark:
        from sluice.spark.pipelines.jobs import redrive as job

        queues = cli.queues
        dead_letters = queues.dead_letters(spark, queue, dead_letter_queues)
        # What is shown is what is done: dead letters that arrive meanwhile are left out.
        repaired = job.repair_rows(dead_letters, where, changes or (), sql).persist()
        total, some = job.preview(repaired, dead_letters)
        if dry_run:
            if not cli.print_if_json({"would_put_back": total, PREVIEW_KEY: some}):
                show_repair(cli, total, some)
            return
        if not cli.as_json and not yes:
            show_repair(cli, total, some)
        if total:
            cli.out.confirm(f"Put {format_plural(total, 'dead letter')} back?", yes)
        with progress_bar(cli, "putting back", total) as update_bar:
            done = job.publish_repaired(
                queues, queue, repaired, total, to_all, lambda number, total: update_bar(number)
            )
        repaired.unpersist()
    if cli.print_if_json({"put_back": done.redriven, "skipped": done.skipped}):
        return
    cli.out.show(f"Put {format_plural(done.redriven, 'dead letter')} of {queue} back.")
    if done.skipped:
        cli.out.note(
            f"{format_plural(done.skipped, 'other')} had gone meanwhile,"
            " or a consumer works on them."
        )


@pipeline_command(app, "transform")
def transform(
    cli: SparkCommandContext,
    queue: Queue,
    to: Annotated[
        str, typer.Option("--to", metavar="QUEUE", help="The queue that gets the result.")
    ],
    checkpoint: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Spark's checkpoint. Keep it: without it a restart would repeat messages.",
        ),
    ],
    sql: Annotated[str, typer.Option(metavar="QUERY", help="A query over the view messages.")] = "",
    sql_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The query, in a file.")
    ] = None,
    function: Annotated[
        str,
        typer.Option(metavar="FILE.py:NAME", help="A function from a DataFrame to a DataFrame."),
    ] = "",
    watermark: Annotated[
        str,
        typer.Option(
            metavar="DURATION", help="For --sql with windows: how late a message may come."
        ),
    ] = "",
    group: Group = "",
    once: Once = False,
    every: Every = "1s",
    rows_per_batch: RowsPerBatch = 10_000,
    settle: Settle = False,
    skip_lost: SkipLost = False,
) -> None:
    """Copy a queue to a queue through SQL or a Python function, each message once.

    Continues where it stopped.
    """
    require_exactly_one(sql=sql, sql_file=sql_file, function=function)
    if watermark and function:
        raise usage_error(
            "--watermark does nothing with --function",
            'Say withWatermark("timestamp", ...) in the function',
        )
    pause = spark_interval("--every", every)
    late = spark_interval("--watermark", watermark) if watermark else ""
    query = read_query(sql_file) if sql_file is not None else sql
    from sluice.spark.pipelines.jobs import transform as job
    from sluice.spark.pipelines.support.run_lock import exclusive_run

    job.check_target(queue, to)
    check_dead_letters(cli, queue, settle)
    group = choose_group(cli, queue, group, "transform", checkpoint.absolute())
    change: Callable[[DataFrame], DataFrame]
    if function:
        change = job.find_function(function)
    else:

        def change(messages: DataFrame) -> DataFrame:
            return job.by_sql(messages, query, late)

    with (
        exclusive_run(checkpoint.absolute(), IN_PROGRESS_REMEDY),
        cli.warn_about_new_group(queue, group),
        translate_options(),
        cli.spark() as spark,
    ):
        queues = cli.queues

        def start() -> StreamingQuery:
            return job.start(
                spark,
                queues,
                queue,
                to,
                checkpoint,
                change,
                group=group,
                once=once,
                every=pause,
                rows_per_batch=rows_per_batch,
                skip_lost=skip_lost,
            )

        done = run_stream(
            cli, "transforming", start, once, queues.lag(queue, group) if once else None
        )
        left = queues.lag(queue, group)

    def make_sentence(read: str, written: str) -> str:
        made = (
            f"{written} of {to}" if done.written is not None and done.written != done.rows else to
        )
        return f"Transformed {read} of {queue} into {made}"

    report_stream(cli, done, make_sentence, {"queue": queue, "to": to, "lag": left})


@pipeline_command(app, "replay")
def replay(
    cli: SparkCommandContext,
    source: Annotated[Path, typer.Option("--from", metavar="DIR", help="Directory of an archive.")],
    queue: Annotated[
        str,
        typer.Option(
            "--queue", "-q", metavar="QUEUE", help="Into this queue; else each into its own."
        ),
    ] = "",
    where: RowFilter = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Stored at or after, such as 2030-01-31T12:00:00Z.")
    ] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Stored before.")] = "",
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name of this replay. A replay that was interrupted continues under its name,"
            " with the version it began with.",
        ),
    ] = "",
    version: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The archive as of this version; when it begins, the newest."
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Publish an archive, or a part of it, to a queue. Started again after a crash, it repeats
    nothing.
    """
    from sluice.spark.pipelines.jobs import replay as job
    from sluice.spark.pipelines.tables import open_table

    begin, end = (
        parse_time_argument("--since", since, None),
        parse_time_argument("--until", until, None),
    )
    open_table(source).existing_files()
    cli.api.get("/node")
    queues = cli.queues
    how = {"where": where, "since": begin, "until": end}
    chosen = job.plan(queues, source, queue, name=name, version=version, **how)
    begun = False
    try:
        with cli.spark() as spark:
            total = chosen.count(spark)
            if dry_run:
                summary = {"would_publish": total, "version": chosen.version, "name": chosen.name}
                if not cli.print_if_json(summary):
                    cli.out.show(f"Would publish {format_plural(total, 'message')} of {source}.")
                    note_replay(cli, chosen)
                return
            note_replay(cli, chosen)
            if total:
                cli.out.confirm(f"Publish {format_plural(total, 'message')} of {source}?", yes)
            begun = True
            with progress_bar(cli, "replaying", total) as update_bar:
                done = job.run_plan(spark, queues, chosen, lambda number, files: update_bar(number))
    except SluiceError as failure:
        if begun:
            go_on = f"Run it again to go on where it stopped, or with --name {chosen.name}"
            failure.remedy = f"{failure.remedy}. {go_on}" if failure.remedy else go_on
        raise
    if cli.print_if_json(asdict(done)):
        return
    before = (
        f" {format_plural(done.known, 'message')} had been published before." if done.known else ""
    )
    cli.out.show(f"Published {format_plural(done.published, 'message')} of {source}.{before}")


def note_replay(cli: SparkCommandContext, chosen: ReplayPlan) -> None:
    """Print what identifies a replay before it begins, so that a user can continue it."""
    which = chosen.table.describe_version(chosen.version)
    cli.out.note(f"Name of this replay: {chosen.name}, of {which}.")
    if chosen.published_batches:
        cli.out.note(
            "It began before, and goes on where it stopped; what it has published is left out."
        )
        if not chosen.is_newest:
            cli.out.note("The archive has grown since: what is new comes with another --name.")


@pipeline_command(app, "compact")
def compact(
    cli: SparkCommandContext,
    context: typer.Context,
    queue: Queue = "",
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="An archive, in place of --queue.")
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Delta table that is kept up to date."),
    ] = None,
    to_queue: Annotated[
        str, typer.Option(metavar="QUEUE", help="Publish the last values here, in place of --to.")
    ] = "",
    by: KeyExpression = "key",
    drop_empty: DropEmpty = False,
    group: Group = "",
    settle: Settle = False,
    skip_lost: SkipLost = False,
) -> None:
    """Store the last value of each key in a table, or publish it to a queue."""
    require_exactly_one(queue=queue, **{"from": source})
    require_exactly_one(to=to, to_queue=to_queue)
    if to is not None and source is not None:
        raise usage_error(
            "--from goes with --to-queue",
            "Compact a queue into a table, or an archive into a queue",
        )
    if to is None:
        for option in ("group", "settle", "skip_lost"):
            reject_unused(
                context, option, "with --to-queue, which looks at all that is kept", "Leave it out"
            )
    from sluice.spark.pipelines.jobs import compact as job
    from sluice.spark.pipelines.tables import open_table

    if to is not None:
        job.open_last_values(to)
    if source is not None:
        open_table(source).existing_files()
        cli.api.get("/node")
    elif to is not None:
        check_dead_letters(cli, queue, settle)
    else:
        cli.check_queue(queue)
    group = group or "compact"
    group_warning = nullcontext() if to is None else cli.warn_about_new_group(queue, group)
    start_over = "another directory and another --group"
    with (
        group_warning,
        translate_options(start_over),
        cli.spark() as spark,
        spinner(cli, "compacting"),
    ):
        queues = cli.queues
        if to is not None:
            done = job.to_table(
                spark,
                queues,
                queue,
                to,
                group=group,
                by=by,
                drop_empty=drop_empty,
                skip_lost=skip_lost,
            )
        else:
            done = job.to_queue(
                spark, queues, to_queue, queue=queue, source=source, by=by, drop_empty=drop_empty
            )
    target = str(to or to_queue)
    if cli.print_if_json({"read": done.read, "keys": done.keys, "to": target}):
        return
    cli.out.show(
        f"Read {format_plural(done.read, 'message')};"
        f" {target} has {format_plural(done.keys, 'key')}."
    )


report_commands.add_to(app)


@app.command("script")
def script() -> None:
    """Print the file to give to spark-submit, in place of `sluice pipeline`."""
    print(Path(__file__).with_name("spark_submit.py"))
