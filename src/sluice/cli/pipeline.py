"""`sluice pipeline ...`: the ready-made pipelines of `sluice.spark.pipelines`, as commands.

Nothing of Spark is imported before a command needs it: `sluice --help` must not wait for Java, nor fail without it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sluice.cli.completion import complete_queue
from sluice.cli.failures import SOMETHING_WRONG, wrong_command
from sluice.cli.findings import show_causes, show_flow, show_repair, show_verdict
from sluice.cli.options import DryRun, ToAll, Yes
from sluice.cli.remote import Visit, command
from sluice.cli.sparking import (
    asked_to_stop,
    check_queue,
    counted,
    leave,
    need_spark,
    queues_of,
    spark_for,
    speed,
    the_only,
)
from sluice.cli.wording import duration, plural
from sluice.notation import parse_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row
    from pyspark.sql.streaming.query import StreamingQuery

    from sluice.spark.pipelines.running import Progress

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Spark on queues: archive, report, repair, transform, audit. Needs `pip install sluice\\[spark]` and Java 17.",
)
PANEL: Final = "Spark"

Queue = Annotated[
    str,
    typer.Option("--queue", "-q", metavar="QUEUE", help="Name of the queue.", autocompletion=complete_queue),
]
OptionalQueue = Annotated[
    str,
    typer.Option("--queue", "-q", metavar="QUEUE", help="Name of the queue.", autocompletion=complete_queue),
]
Group = Annotated[
    str, typer.Option("--group", "-g", metavar="GROUP", help="Consumer group that Spark reads as.")
]
Once = Annotated[bool, typer.Option("--once", help="To the end of what is there now, then stop.")]
Every = Annotated[str, typer.Option(metavar="DURATION", help="How often a batch is made, when it goes on.")]
RowsPerBatch = Annotated[
    int, typer.Option(min=1, metavar="ROWS", help="At most so many messages in a batch.")
]
By = Annotated[str, typer.Option(metavar="EXPR", help="What the key is, in SQL.")]
DropEmpty = Annotated[bool, typer.Option("--drop-empty", help="An empty payload says that its key is gone.")]
Where = Annotated[str, typer.Option(metavar="EXPR", help="Only rows for which this SQL is true.")]
Report = Annotated[Path | None, typer.Option("--to", metavar="FILE", help="Write the report, one HTML file.")]
Master = Annotated[
    str,
    typer.Option(
        metavar="URL",
        help="Spark's master: local[*,3] unless given, spark://HOST:7077 ...",
        rich_help_panel=PANEL,
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option(
        "--conf", metavar="KEY=VALUE", help="Spark setting; can be repeated.", rich_help_panel=PANEL
    ),
]


def add_to(root: typer.Typer, panel: str) -> None:
    root.add_typer(app, name="pipeline", rich_help_panel=panel)


@command(app, "archive")
def archive(
    visit: Visit,
    queue: Queue,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Directory of the table.")],
    group: Group = "archive",
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
    master: Master = "",
    conf: Conf = None,
) -> None:
    """A queue into a Delta table or Parquet files, each message once. Goes on where it stopped."""
    need_spark()
    check_queue(visit, queue)
    pause = _spark_time("--every", every)
    with spark_for(visit, "archive", master, conf) as spark:
        from sluice.spark.pipelines import archive as pipeline

        queues = queues_of(visit)

        def start() -> StreamingQuery:
            return pipeline.start(
                spark,
                queues,
                queue,
                to,
                group=group,
                kind=format,
                checkpoint=checkpoint,
                once=once,
                every=pause,
                rows_per_batch=rows_per_batch,
                files=files,
            )

        done = _run(visit, "archiving", start, once, queues.lag(queue, group) if once else None)
        left = queues.lag(queue, group)
    _report_stream(
        visit, done, f"Archived {{}} of {queue} into {to}", {"queue": queue, "to": str(to), "lag": left}
    )


@command(app, "dead-letters")
def dead_letters(
    visit: Visit,
    queue: OptionalQueue = "",
    to: Report = None,
    since: Annotated[str, typer.Option(metavar="TIME", help="Died at or after.")] = "",
    master: Master = "",
    conf: Conf = None,
) -> None:
    """What fails, why, and since when: a table, and a report with charts. Without --queue: of all queues."""
    need_spark()
    from sluice.spark.pipelines import dead_letters as pipeline
    from sluice.spark.pipelines.report import page

    if _have_died(visit, queue):
        with spark_for(visit, "dead-letters", master, conf) as spark:
            from pyspark.sql import functions as f

            letters = queues_of(visit).read(spark, f"dlq/{queue}" if queue else "/dlq/.*/", headers=False)
            if since:
                letters = letters.where(f.coalesce("dead_at", "timestamp") >= f.lit(since).cast("timestamp"))
            found = pipeline.look(letters)
    else:
        found = pipeline.NONE
    if to is not None:
        page.save(pipeline.report(found, queue or "all queues"), to)
    if visit.answered({**found.summary(), "report": None if to is None else str(to)}):
        return
    show_causes(visit, found.summary())
    if to is not None:
        visit.out.show(f"Report: {to}")


@command(app, "redrive")
def redrive(
    visit: Visit,
    queue: Queue,
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
    master: Master = "",
    conf: Conf = None,
) -> None:
    """Repair dead letters with SQL and put them back, each once. What would be done is shown first, and asked for."""
    need_spark()
    if sql and changes:
        raise wrong_command("--sql and --set exclude each other", "Put the changes into the query")
    if not _have_died(visit, queue):
        if not visit.answered({"put_back": 0, "skipped": 0}):
            visit.out.show(f"No dead letters of {queue}.")
        return
    with spark_for(visit, "redrive", master, conf) as spark:
        from sluice.spark.pipelines import redrive as pipeline

        queues = queues_of(visit)
        letters = queues.read(spark, f"dlq/{queue}")
        total, some = pipeline.preview(pipeline.repaired(letters, where, changes or (), sql), letters)
        if dry_run:
            if not visit.answered({"would_put_back": total, "letters": some}):
                show_repair(visit, total, some)
            return
        if not visit.as_json and not yes:
            show_repair(visit, total, some)
        if total:
            visit.out.confirm(f"Put {plural(total, 'dead letter')} back?", yes)
        with counted(visit, "putting back", total) as tell:
            done = pipeline.run(
                spark,
                queues,
                queue,
                where=where,
                changes=changes or (),
                sql=sql,
                to_all=to_all,
                tell=lambda number, total: tell(number),
            )
    if visit.answered({"put_back": done.put_back, "skipped": done.skipped}):
        return
    visit.out.show(f"Put {plural(done.put_back, 'dead letter')} of {queue} back.")
    if done.skipped:
        visit.out.note(f"{plural(done.skipped, 'other')} had gone meanwhile, or a consumer works on them.")


@command(app, "transform")
def transform(
    visit: Visit,
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
    group: Group = "transform",
    once: Once = False,
    every: Every = "1s",
    rows_per_batch: RowsPerBatch = 10_000,
    master: Master = "",
    conf: Conf = None,
) -> None:
    """A queue into a queue with SQL or a Python function, each message once. Goes on where it stopped."""
    need_spark()
    the_only(sql=sql, sql_file=sql_file, function=function)
    check_queue(visit, queue)
    pause = _spark_time("--every", every)
    late = _spark_time("--watermark", watermark) if watermark else ""
    query = sql_file.read_text("utf-8") if sql_file is not None else sql
    from sluice.spark.pipelines import transform as pipeline

    change: Callable[[DataFrame], DataFrame]
    if function:
        change = pipeline.find_function(function)
    else:

        def change(messages: DataFrame) -> DataFrame:
            return pipeline.by_sql(messages, query, late)

    with spark_for(visit, "transform", master, conf) as spark:
        queues = queues_of(visit)

        def start() -> StreamingQuery:
            return pipeline.start(
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
            )

        done = _run(visit, "transforming", start, once, queues.lag(queue, group) if once else None)
        left = queues.lag(queue, group)
    _report_stream(
        visit, done, f"Transformed {{}} of {queue} into {to}", {"queue": queue, "to": to, "lag": left}
    )


@command(app, "replay")
def replay(
    visit: Visit,
    source: Annotated[Path, typer.Option("--from", metavar="DIR", help="Directory of an archive.")],
    queue: Annotated[
        str, typer.Option("--queue", "-q", metavar="QUEUE", help="Into this queue; else each into its own.")
    ] = "",
    where: Where = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="Stored at or after.")] = "",
    until: Annotated[str, typer.Option(metavar="TIME", help="Stored before.")] = "",
    name: Annotated[
        str,
        typer.Option(metavar="NAME", help="Of this replay: with the same name it goes on where it stopped."),
    ] = "",
    version: Annotated[
        int | None, typer.Option(metavar="N", help="The archive as of this version; the newest unless given.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    master: Master = "",
    conf: Conf = None,
) -> None:
    """An archive back into a queue, or a part of it. Started again after a crash, it repeats nothing."""
    need_spark()
    visit.api.get("node")
    with spark_for(visit, "replay", master, conf) as spark:
        from sluice.spark.pipelines import replay as pipeline
        from sluice.spark.pipelines.tables import open_table

        table_ = open_table(source)
        how = {"where": where, "since": since, "until": until, "queue": queue}
        total = pipeline.count(spark, table_, version, **how)
        if dry_run:
            if not visit.answered({"would_publish": total, "version": version or table_.version()}):
                visit.out.show(f"Would publish {plural(total, 'message')} of {source}.")
            return
        if total:
            visit.out.confirm(f"Publish {plural(total, 'message')} of {source}?", yes)
        with counted(visit, "replaying", total) as tell:
            done = pipeline.run(
                spark,
                queues_of(visit),
                source,
                name=name,
                version=version,
                tell=lambda number, files: tell(number),
                **how,
            )
    told = {"published": done.published, "known": done.known, "name": done.name, "version": done.version}
    if visit.answered(told):
        return
    before = f" {plural(done.known, 'message')} had been published before." if done.known else ""
    visit.out.show(f"Published {plural(done.published, 'message')} of {source}.{before}")
    visit.out.note(f"Name of this replay: {done.name}, version {done.version} of the archive.")


@command(app, "compact")
def compact(
    visit: Visit,
    queue: OptionalQueue = "",
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
    group: Group = "compact",
    master: Master = "",
    conf: Conf = None,
) -> None:
    """The last value of each key: a table that each run brings up to date, or messages for a queue."""
    need_spark()
    the_only(queue=queue, **{"from": source})
    the_only(to=to, to_queue=to_queue)
    if to is not None and source is not None:
        raise wrong_command(
            "--from goes with --to-queue", "Compact a queue into a table, or an archive into a queue"
        )
    if queue:
        check_queue(visit, queue)
    with spark_for(visit, "compact", master, conf) as spark:
        from sluice.spark.pipelines import compact as pipeline

        queues = queues_of(visit)
        if to is not None:
            done = pipeline.to_table(spark, queues, queue, to, group=group, by=by, drop_empty=drop_empty)
        else:
            done = pipeline.to_queue(
                spark, queues, str(source or queue), to_queue, by=by, drop_empty=drop_empty
            )
    target = str(to or to_queue)
    if visit.answered({"read": done.read, "keys": done.keys, "to": target}):
        return
    visit.out.show(f"Read {plural(done.read, 'message')}; {target} has {plural(done.keys, 'key')}.")


@command(app, "flow")
def flow(
    visit: Visit,
    queue: OptionalQueue = "",
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
    master: Master = "",
    conf: Conf = None,
) -> None:
    """Throughput and latency percentiles per window of time: a table, and a report with charts."""
    need_spark()
    the_only(queue=queue, **{"from": source})
    if follow and (to is None or source is not None):
        raise wrong_command("--follow watches a queue and writes a report", "Give --queue and --to")
    if queue:
        check_queue(visit, queue)
    pause = _spark_time("--every", every)
    named = queue or str(source)
    with spark_for(visit, "flow", master, conf) as spark:
        from sluice.spark.pipelines import flow as pipeline
        from sluice.spark.pipelines.report import page
        from sluice.spark.pipelines.tables import open_table

        span = pipeline.spark_window(window)
        queues = queues_of(visit)
        found: list[Row] = []
        if follow:
            assert to is not None

            def take(rows: list[Row]) -> None:
                found[:] = rows
                page.save(pipeline.report(rows, named, window), to)

            _run(
                visit,
                "watching",
                lambda: pipeline.start(
                    spark,
                    queues,
                    queue,
                    take,
                    window=span,
                    since=since,
                    until=until,
                    every=pause,
                ),
                False,
                None,
            )
        else:
            rows = open_table(source).read(spark) if source is not None else queues.read(spark, queue)
            found = pipeline.windows(rows, span, since, until).orderBy("start", "queue").collect()
            if to is not None:
                page.save(pipeline.report(found, named, window), to)
        told = pipeline.summary(found, window)
    if visit.answered({**told, "report": None if to is None else str(to)}):
        return
    show_flow(visit, found)
    if to is not None:
        visit.out.show(f"Report: {to}")


@command(app, "audit")
def audit(
    visit: Visit,
    published: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="What was published: queue:NAME, json:, csv: or parquet:PATH, or an archive's DIR.",
        ),
    ],
    acked: Annotated[str, typer.Option(metavar="SOURCE", help="What was done, as the workers tell it.")] = "",
    dead: Annotated[str, typer.Option(metavar="SOURCE", help="Dead letters.")] = "",
    waiting: Annotated[str, typer.Option(metavar="SOURCE", help="What is still to be done.")] = "",
    archived: Annotated[str, typer.Option(metavar="SOURCE", help="An archive.")] = "",
    master: Master = "",
    conf: Conf = None,
) -> None:
    """What was published against what became of it: what is missing, what is double. Exit code 5 if anything is.

    SOURCE#EXPR says what the id of a row is, in SQL; else it is message_id, or id.
    """
    need_spark()
    given = {"published": published, "acked": acked, "dead": dead, "waiting": waiting, "archived": archived}
    # Many small pieces rather than few large ones: what a task holds must fit into memory, or is spilled.
    with spark_for(visit, "audit", master, conf, **{"spark.sql.shuffle.partitions": "64"}) as spark:
        from sluice.spark.pipelines import audit as pipeline

        queues = queues_of(visit)
        sides = {name: pipeline.side_of(spark, queues, source) for name, source in given.items() if source}
        verdict = pipeline.judge(sides)
    if not visit.answered(verdict.summary()):
        show_verdict(visit, verdict.summary(), pipeline.FAULTS)
    if not verdict.is_good:
        leave(SOMETHING_WRONG)


@app.command("script")
def script() -> None:
    """The file to give to spark-submit, in place of `sluice pipeline`."""
    print(Path(__file__).with_name("spark_submit.py"))


# ---- running


def _have_died(visit: Visit, queue: str) -> bool:
    """Whether there is a dead-letter queue at all: the first death makes it. A wrong name is told."""
    names = {one["name"] for one in visit.api.queues(prefix="dlq/")}
    if not queue:
        return bool(names)
    if f"dlq/{queue}" not in names:
        check_queue(visit, queue)
        return False
    return True


def _run(
    visit: Visit, doing: str, start: Callable[[], StreamingQuery], once: bool, total: int | None
) -> Progress:
    from sluice.spark.pipelines import running

    if not once:
        visit.out.note(f"{doing}; Ctrl-C stops it, and it goes on from there the next time")
    with counted(visit, doing, total) as tell, asked_to_stop() as asked:
        done = running.run(start, once, lambda progress: tell(progress.rows), asked)
    if once and asked.is_set():
        raise KeyboardInterrupt  # it has not come to its end
    return done


def _report_stream(visit: Visit, done: Progress, words: str, more: dict[str, Any]) -> None:
    told = {**more, "rows": done.rows, "batches": done.batches, "seconds": round(done.seconds, 3)}
    if visit.answered({**told, "restarts": done.restarts}):
        return
    parts = [plural(done.batches, "batch", "batches"), duration(done.seconds)]
    parts += [speed(done)] if speed(done) else []
    parts += [plural(done.restarts, "restart")] if done.restarts else []
    visit.out.show(f"{words.format(plural(done.rows, 'message'))} ({', '.join(parts)}).")
    if more["lag"]:
        visit.out.note(f"{plural(more['lag'], 'message')} came in meanwhile and wait for the next run.")


def _spark_time(flag: str, text: str) -> str:
    """A duration as Spark says it."""
    try:
        return f"{max(0, round(parse_duration(text) * 1000))} milliseconds"
    except ValueError as fault:
        raise wrong_command(f"{flag} {text!r}: {fault}", "Write it as 500ms, 30s or 5m") from None
