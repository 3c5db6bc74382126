"""`sluice pipeline ...`: the ready-made pipelines of `sluice.spark.pipelines`, as commands.

Nothing of Spark is imported before a command needs it: `sluice --help` must not wait for Java, nor fail without it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sluice.cli.pipelines import report_commands
from sluice.cli.support.errors import wrong_command
from sluice.cli.pipelines.result_tables import show_repair
from sluice.cli.support.time_arguments import moment
from sluice.cli.support.options import DryRun, ToAll, Yes
from sluice.cli.pipelines.preflight import in_flags, keep_letters, own_group, read_query
from sluice.cli.pipelines.job_options import (
    By,
    DropEmpty,
    Every,
    FailedQueue,
    Group,
    Once,
    Queue,
    RowsPerBatch,
    Settle,
    SkipLost,
    Where,
)
from sluice.cli.pipelines.spark_command import SparkVisit, at_work, counted, needless, pipeline, the_only
from sluice.cli.pipelines.stream_progress import report_stream, run_stream, spark_time
from sluice.cli.support.formatting import plural
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from sluice.spark.pipelines.jobs.replay import Plan

AT_WORK: Final = "Wait until it has ended, or give this one another --checkpoint and a --group of its own"
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Spark on queues: archive, report, repair, transform, audit. Needs `pip install sluice\\[spark]` and Java 17.",
)


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="pipeline", rich_help_panel=panel)


@pipeline(app, "archive")
def archive(
    visit: SparkVisit,
    context: typer.Context,
    queue: Queue,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory of the table.")],
    group: Group = "",
    format: Annotated[
        str, typer.Option(metavar="FORMAT", help="delta or parquet; that of the table, a new one is delta.")
    ] = "",
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Spark's memory of it; _sluice/checkpoint in the table."),
    ] = None,
    once: Once = False,
    every: Every = "30s",
    rows_per_batch: RowsPerBatch = 200_000,
    files: Annotated[int, typer.Option(min=0, help="Files per batch at most; 0 leaves it to Spark.")] = 0,
    settle: Settle = False,
    skip_lost: SkipLost = False,
) -> None:
    """A queue into a Delta table or Parquet files, each message once. Goes on where it stopped."""
    from sluice.spark.pipelines.jobs import archive as making
    from sluice.spark.pipelines.support.run_lock import alone
    from sluice.spark.pipelines.tables import open_table

    table = open_table(to, format)
    table.check_archive()
    keeps = visit.check_queue(queue)["stats"]["is_dead_letters"] and not settle
    if keeps:
        why = f"for {queue}, whose dead letters stay"
        needless(context, "group", why, "Leave it out, or let them go with --settle")
    pause = spark_time("--every", every)
    home = making.checkpoint_of(table, checkpoint)
    if not keeps:
        group = own_group(visit, queue, group, "archive", home)
    minding = nullcontext() if keeps else visit.minding(queue, group)
    with alone(home, AT_WORK), minding, in_flags(), visit.spark() as spark:
        queues = visit.queues

        def lag() -> int | None:
            return None if keeps else queues.lag(queue, group)

        def start() -> StreamingQuery:
            return making.start(
                spark,
                queues,
                queue,
                to,
                group=group,
                keeps=keeps,
                kind=format,
                checkpoint=checkpoint,
                once=once,
                every=pause,
                rows_per_batch=rows_per_batch,
                files=files,
                skip_lost=skip_lost,
            )

        done = run_stream(visit, "archiving", start, once, lag() if once else None)
        left = lag()
    if keeps:
        visit.out.note(f"The dead letters stay in {queue}; --settle lets them go once they are archived.")
    report_stream(
        visit,
        done,
        lambda read, written: f"Archived {read} of {queue} into {to}",
        {"queue": queue, "to": str(to), "lag": left},
    )


@pipeline(app, "redrive")
def redrive(
    visit: SparkVisit,
    queue: FailedQueue,
    where: Where = "",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=EXPR", help="Change value, key, queue, headers, delay or priority."
        ),
    ] = None,
    sql: Annotated[
        str, typer.Option(metavar="QUERY", help="A whole query over the view letters, in place of --set.")
    ] = "",
    to_all: ToAll = False,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Repair dead letters with SQL and put them back, each once. What would be done is shown first, and asked for."""
    if sql and changes:
        raise wrong_command("--sql and --set exclude each other", "Put the changes into the query")
    homes = visit.homes(queue)
    if not homes:
        none = {"would_put_back": 0, "letters": []} if dry_run else {"put_back": 0, "skipped": 0}
        if not visit.answered(none):
            visit.out.show(f"No dead letters of {queue}.")
        return
    with visit.spark() as spark:
        from sluice.spark.pipelines.jobs import redrive as making

        queues = visit.queues
        letters = queues.letters(spark, queue, homes)
        # What is shown is what is done: others that die meanwhile are not in it.
        repaired = making.repaired(letters, where, changes or (), sql).persist()
        total, some = making.preview(repaired, letters)
        if dry_run:
            if not visit.answered({"would_put_back": total, "letters": some}):
                show_repair(visit, total, some)
            return
        if not visit.as_json and not yes:
            show_repair(visit, total, some)
        if total:
            visit.out.confirm(f"Put {plural(total, 'dead letter')} back?", yes)
        with counted(visit, "putting back", total) as tell:
            done = making.put_back(queues, queue, repaired, total, to_all, lambda number, total: tell(number))
        repaired.unpersist()
    if visit.answered({"put_back": done.put_back, "skipped": done.skipped}):
        return
    visit.out.show(f"Put {plural(done.put_back, 'dead letter')} of {queue} back.")
    if done.skipped:
        visit.out.note(f"{plural(done.skipped, 'other')} had gone meanwhile, or a consumer works on them.")


@pipeline(app, "transform")
def transform(
    visit: SparkVisit,
    queue: Queue,
    to: Annotated[str, typer.Option("--to", metavar="QUEUE", help="The queue that gets the result.")],
    checkpoint: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Spark's memory of it. Keep it: without it a restart would repeat."),
    ],
    sql: Annotated[str, typer.Option(metavar="QUERY", help="A query over the view messages.")] = "",
    sql_file: Annotated[Path | None, typer.Option(metavar="FILE", help="The query, in a file.")] = None,
    function: Annotated[
        str, typer.Option(metavar="FILE.py:NAME", help="A function from a DataFrame to a DataFrame.")
    ] = "",
    watermark: Annotated[
        str, typer.Option(metavar="DURATION", help="Of --sql with windows: how late a message may come.")
    ] = "",
    group: Group = "",
    once: Once = False,
    every: Every = "1s",
    rows_per_batch: RowsPerBatch = 10_000,
    settle: Settle = False,
    skip_lost: SkipLost = False,
) -> None:
    """A queue into a queue with SQL or a Python function, each message once. Goes on where it stopped."""
    the_only(sql=sql, sql_file=sql_file, function=function)
    if watermark and function:
        raise wrong_command(
            "--watermark does nothing with --function", 'Say withWatermark("timestamp", ...) in the function'
        )
    pause = spark_time("--every", every)
    late = spark_time("--watermark", watermark) if watermark else ""
    query = read_query(sql_file) if sql_file is not None else sql
    from sluice.spark.pipelines.jobs import transform as making
    from sluice.spark.pipelines.support.run_lock import alone

    making.check_target(queue, to)
    keep_letters(visit, queue, settle)
    group = own_group(visit, queue, group, "transform", checkpoint.absolute())
    change: Callable[[DataFrame], DataFrame]
    if function:
        change = making.find_function(function)
    else:

        def change(messages: DataFrame) -> DataFrame:
            return making.by_sql(messages, query, late)

    with (
        alone(checkpoint.absolute(), AT_WORK),
        visit.minding(queue, group),
        in_flags(),
        visit.spark() as spark,
    ):
        queues = visit.queues

        def start() -> StreamingQuery:
            return making.start(
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

        done = run_stream(visit, "transforming", start, once, queues.lag(queue, group) if once else None)
        left = queues.lag(queue, group)

    def words(read: str, written: str) -> str:
        made = f"{written} of {to}" if done.written is not None and done.written != done.rows else to
        return f"Transformed {read} of {queue} into {made}"

    report_stream(visit, done, words, {"queue": queue, "to": to, "lag": left})


@pipeline(app, "replay")
def replay(
    visit: SparkVisit,
    source: Annotated[Path, typer.Option("--from", metavar="DIR", help="Directory of an archive.")],
    queue: Annotated[
        str, typer.Option("--queue", "-q", metavar="QUEUE", help="Into this queue; else each into its own.")
    ] = "",
    where: Where = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Stored at or after, such as 2030-01-31T12:00:00Z.")
    ] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Stored before.")] = "",
    name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Of this replay: what began under a name goes on where it stopped, with the version it began with.",
        ),
    ] = "",
    version: Annotated[
        int | None,
        typer.Option(metavar="N", help="The archive as of this version; when it begins, the newest."),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """An archive back into a queue, or a part of it. Started again after a crash, it repeats nothing."""
    from sluice.spark.pipelines.jobs import replay as making
    from sluice.spark.pipelines.tables import open_table

    begin, end = moment("--since", since, None), moment("--until", until, None)
    open_table(source).check()
    visit.api.get("node")
    queues = visit.queues
    how = {"where": where, "since": begin, "until": end}
    chosen = making.plan(queues, source, queue, name=name, version=version, **how)
    begun = False
    try:
        with visit.spark() as spark:
            total = chosen.count(spark)
            if dry_run:
                told = {"would_publish": total, "version": chosen.version, "name": chosen.name}
                if not visit.answered(told):
                    visit.out.show(f"Would publish {plural(total, 'message')} of {source}.")
                    note_replay(visit, chosen)
                return
            note_replay(visit, chosen)
            if total:
                visit.out.confirm(f"Publish {plural(total, 'message')} of {source}?", yes)
            begun = True
            with counted(visit, "replaying", total) as tell:
                done = making.carry_out(spark, queues, chosen, lambda number, files: tell(number))
    except SluiceError as failure:
        if begun:
            go_on = f"Run it again to go on where it stopped, or with --name {chosen.name}"
            failure.do = f"{failure.do}. {go_on}" if failure.do else go_on
        raise
    if visit.answered(asdict(done)):
        return
    before = f" {plural(done.known, 'message')} had been published before." if done.known else ""
    visit.out.show(f"Published {plural(done.published, 'message')} of {source}.{before}")


def note_replay(visit: SparkVisit, chosen: Plan) -> None:
    """By what a replay is known: said before it begins, for whoever has to go on with it."""
    which = chosen.table.words_of(chosen.version)
    visit.out.note(f"Name of this replay: {chosen.name}, of {which}.")
    if chosen.done:
        visit.out.note("It began before, and goes on where it stopped; what it has published is left out.")
        if not chosen.is_newest:
            visit.out.note("The archive has grown since: what is new comes with another --name.")


@pipeline(app, "compact")
def compact(
    visit: SparkVisit,
    context: typer.Context,
    queue: Queue = "",
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="An archive, in place of --queue.")
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Delta table that is kept up to date.")
    ] = None,
    to_queue: Annotated[
        str, typer.Option(metavar="QUEUE", help="Publish the last values here, in place of --to.")
    ] = "",
    by: By = "key",
    drop_empty: DropEmpty = False,
    group: Group = "",
    settle: Settle = False,
    skip_lost: SkipLost = False,
) -> None:
    """The last value of each key: a table that each run brings up to date, or messages for a queue."""
    the_only(queue=queue, **{"from": source})
    the_only(to=to, to_queue=to_queue)
    if to is not None and source is not None:
        raise wrong_command(
            "--from goes with --to-queue", "Compact a queue into a table, or an archive into a queue"
        )
    if to is None:
        for option in ("group", "settle", "skip_lost"):
            needless(context, option, "with --to-queue, which looks at all that is kept", "Leave it out")
    from sluice.spark.pipelines.jobs import compact as making
    from sluice.spark.pipelines.tables import open_table

    if to is not None:
        making.last_values(to)
    if source is not None:
        open_table(source).check()
        visit.api.get("node")
    elif to is not None:
        keep_letters(visit, queue, settle)
    else:
        visit.check_queue(queue)
    group = group or "compact"
    minding = nullcontext() if to is None else visit.minding(queue, group)
    anew = "another directory and another --group"
    with minding, in_flags(anew), visit.spark() as spark, at_work(visit, "compacting"):
        queues = visit.queues
        if to is not None:
            done = making.to_table(
                spark, queues, queue, to, group=group, by=by, drop_empty=drop_empty, skip_lost=skip_lost
            )
        else:
            done = making.to_queue(
                spark, queues, to_queue, queue=queue, source=source, by=by, drop_empty=drop_empty
            )
    target = str(to or to_queue)
    if visit.answered({"read": done.read, "keys": done.keys, "to": target}):
        return
    visit.out.show(f"Read {plural(done.read, 'message')}; {target} has {plural(done.keys, 'key')}.")


report_commands.add_to(app)


@app.command("script")
def script() -> None:
    """The file to give to spark-submit, in place of `sluice pipeline`."""
    print(Path(__file__).with_name("spark_submit.py"))
