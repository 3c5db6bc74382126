"""The pipelines from queue to table, report or queue: a real broker, real Spark, and crashes.

crashes/test_crash_run.py tests `archive` and `transform` through kill -9 of driver, workers and
broker: its streams are these.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from sluice.cli.root import app
from sluice.spark.pipelines.jobs import archive, compact, dead_letters, redrive, replay, transform
from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.support import publish_batches, row_collection, stream_runner
from sluice.spark.pipelines.tables import open_table
from tests.spark.conftest import SparkHarness

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT = 60.0


def wait_until(condition: Any, what: str) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.05)


def values(path: Path, spark: SparkSession) -> Counter[str]:
    rows = open_table(path).read(spark).select("value").collect()
    return Counter(bytes(row["value"]).decode() for row in rows)


def stored(harness: SparkHarness, queue: str = "") -> Counter[str]:
    return Counter(harness.values(subscribe=queue or harness.queue))


def dead(harness: SparkHarness) -> int:
    """Return the number of dead letters."""
    return int(harness.api.get(f"/queues/dlq${harness.queue}/stats").json()["total_messages"])


def sluice(*words: str, harness: SparkHarness) -> Any:
    """Run the command in this process: it uses the running session."""
    environ = {
        "SLUICE_URL": harness.url,
        "SLUICE_MQTT": str(harness.broker.mqtt),
        "SLUICE_TRACEBACK": "1",
    }
    return CliRunner().invoke(app, ["pipeline", *words], env=environ, catch_exceptions=False)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_archive_has_each_message_once_and_its_progress_is_the_groups(
    harness: SparkHarness, spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    harness.make(partitions=2)
    harness.fill([f"m{nth}" for nth in range(50)])
    table = tmp_path / "[prod] {x,y}?"  # a name, and not a pattern
    words = (
        "archive",
        "--queue",
        harness.queue,
        "--to",
        str(table),
        "--format",
        kind,
        "--once",
        "--json",
    )
    first = json.loads(sluice(*words, "--rows-per-batch", "20", harness=harness).stdout)
    assert first["rows"] == 50 and first["batches"] >= 3 and first["lag"] == 0
    assert harness.lag("archive") == 0
    harness.fill(["late"])
    second = json.loads(sluice(*words, harness=harness).stdout)
    assert (second["rows"], second["batches"]) == (1, 1)
    wanted = Counter({**{f"m{nth}": 1 for nth in range(50)}, "late": 1})
    assert values(table, spark) == wanted
    # A batch that Spark repeats, because it crashed before it noted the batch as done.
    rows = open_table(table).read(spark).drop("archived_at")
    keep = archive.make_batch_writer(
        open_table(table), lambda: archive.query_id(table / "_sluice" / "checkpoint")
    )
    keep(rows, 0)
    assert values(table, spark) == wanted
    if kind == "parquet":  # the directory can be read in spite of other files
        assert pq.read_table(table, partitioning=None).num_rows == 51


def test_repaired_dead_letter_returns_once_to_the_group_that_failed_it(
    harness: SparkHarness, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = Queues(harness.where)
    harness.make(partitions=4)
    harness.bulk_client.advance(harness.queue, "other", {}, create=True)
    for text in ('{"n": NaN}', '{"n": 1}', "hopeless"):
        asyncio.run(harness.reject(text.encode(), message_id=f"id of {text}"))
    harness.bulk_client.advance(
        harness.queue, "other", harness.bulk_client.offsets(harness.queue).latest()
    )
    homes = {
        row["value"]: row["original_partition"]
        for row in harness.read(subscribe=f"dlq/{harness.queue}")
    }
    words = [
        "redrive",
        "-q",
        harness.queue,
        "--where",
        "text LIKE '%NaN%'",
        "--set",
        "value=replace(text, 'NaN', '0')",
    ]
    shown = sluice(*words, "--dry-run", harness=harness)
    assert "1 dead letter in all" in shown.stdout and '{"n": 0}' in shown.stdout
    assert dead(harness) == 3

    # The driver dies after the broker has put it back, and is started again; so does another driver
    # meanwhile.
    late = redrive.repair_rows(
        queues.read(spark, f"dlq/{harness.queue}"), "text LIKE '%NaN%'"
    ).persist()
    late.count()
    with monkeypatch.context() as broken:
        publish_redriven = Queues.publish_redriven

        def publish_and_die(*arguments: Any) -> int:
            publish_redriven(*arguments)
            raise KeyboardInterrupt

        broken.setattr(Queues, "publish_redriven", publish_and_die)
        with pytest.raises(KeyboardInterrupt):
            redrive.run(
                spark,
                queues,
                harness.queue,
                where="text LIKE '%NaN%'",
                changes=["value = 'repaired'"],
            )
    done = json.loads(sluice(*words, "--yes", "--json", harness=harness).stdout)
    assert done == {"put_back": 0, "skipped": 0}
    with monkeypatch.context() as slow:
        slow.setattr(redrive, "repair_rows", lambda *arguments: late)
        assert redrive.run(spark, queues, harness.queue) == redrive.RedriveResult(
            redriven=0, skipped=1
        )
    [row] = harness.read()
    assert (row["value"], row["message_id"]) == (b"repaired", 'id of {"n": NaN}')
    assert row["partition"] == homes[b'{"n": NaN}']
    assert (harness.lag("w"), harness.lag("other"), dead(harness)) == (1, 0, 2)

    reported = sluice("redrive", "-q", harness.queue, "--to-all", "--yes", harness=harness)
    assert "Put 2 dead letters" in reported.stdout
    assert stored(harness) == Counter(["repaired", '{"n": 1}', "hopeless"])
    assert (harness.lag("w"), harness.lag("other"), dead(harness)) == (3, 2, 0)


def test_dead_letters_are_found_in_the_configured_queue_and_stay_when_archived(
    harness: SparkHarness, spark: SparkSession, tmp_path: Path
) -> None:
    home, other = f"failed-{harness.queue}", f"other-{harness.queue}"
    for queue in (harness.queue, other):
        harness.make(queue, dlq_config={"topic": home})
    asyncio.run(harness.reject(b"bad"))
    reported = {
        queue: json.loads(sluice("dead-letters", "-q", queue, "--json", harness=harness).stdout)
        for queue in (harness.queue, other)
    }
    assert (
        reported[harness.queue][dead_letters.COUNT_COLUMN],
        reported[other][dead_letters.COUNT_COLUMN],
    ) == (
        1,
        0,
    )
    found = json.loads(sluice("dead-letters", "--json", harness=harness).stdout)["causes"]
    assert harness.queue in {cause["queue"] for cause in found}

    words = ["archive", "-q", home, "--to", str(tmp_path / "dead-letters"), "--once", "--json"]
    first, second = (json.loads(sluice(*words, harness=harness).stdout) for _ in range(2))
    assert (first["rows"], second["rows"], first["lag"]) == (1, 0, None)
    assert harness.depth(home) == 1 and not harness.api.get(f"/queues/{home}/groups").json()
    assert json.loads(
        sluice("redrive", "-q", harness.queue, "--yes", "--json", harness=harness).stdout
    ) == {
        "put_back": 1,
        "skipped": 0,
    }
    assert (harness.depth(home), stored(harness)) == (0, Counter(["bad"]))
    harness.fill(["worse"], queue=home)
    last = json.loads(sluice(*words, "--settle", harness=harness).stdout)
    assert (last["rows"], last["lag"], harness.depth(home)) == (1, 0, 0)
    assert values(tmp_path / "dead-letters", spark) == Counter(["bad", "worse"])

    harness.bulk_client.advance(
        harness.queue, "w", harness.bulk_client.offsets(harness.queue).latest()
    )
    asyncio.run(harness.reject(b"one"))
    shown = Queues(harness.where).dead_letters(spark, harness.queue, [home])
    asyncio.run(harness.reject(b"two"))
    # a confirmed preview of one must not become two
    assert (shown.count(), harness.depth(home)) == (1, 2)


FUNCTION = """
from pyspark.sql import functions as f

def triple_text(text):
    return str(int(text) * 3)

def drop_repetitions(messages):
    triple = f.udf(triple_text)
    rows = messages.dropDuplicates(["value"])
    return rows.withColumn("value", triple(f.col("value").cast("string")))
"""


def test_queue_is_transformed_with_sql_or_a_stateful_function(
    harness: SparkHarness, spark: SparkSession, tmp_path: Path
) -> None:
    harness.make(partitions=2)
    harness.fill(["1", "2"])
    query = (
        "SELECT int(text) * 2 AS value, key, map('by', binary('sql')) AS headers"
        " FROM messages WHERE text <> '2'"
    )
    words = ["transform", "-q", harness.queue, "--to", f"{harness.queue}/twice", "--once", "--json"]
    ran = sluice(*words, "--sql", query, "--checkpoint", str(tmp_path / "sql"), harness=harness)
    assert ran.exit_code == 0, ran.stderr
    assert {name: json.loads(ran.stdout)[name] for name in ("rows", "written")} == {
        "rows": 2,
        "written": 1,
    }
    [row] = harness.read(subscribe=f"{harness.queue}/twice", includeHeaders="true")
    assert (row["value"], row["key"], dict(row["headers"])["by"]) == (b"2", b"1", b"sql")

    own = tmp_path / "own.py"
    own.write_text(FUNCTION)
    change = transform.find_function(f"{own}:drop_repetitions")
    for more in (["2", "5"], ["5", "6"]):  # deduplication state is stored between runs
        harness.fill(more)
        stream_runner.run(
            lambda: transform.start(
                spark,
                Queues(harness.where),
                harness.queue,
                f"{harness.queue}/thrice",
                tmp_path / "own",
                change,
                group="own",
                once=True,
            ),
            once=True,
        )
    assert stored(harness, f"{harness.queue}/thrice") == Counter(["6", "15", "18"])
    sql = ["--sql", "SELECT nothing FROM messages", "--checkpoint", str(tmp_path / "x")]
    wrong = sluice(*words, *sql, "--group", "new", harness=harness)
    assert (
        wrong.exit_code == 2 and "nothing" in wrong.stderr and len(wrong.stderr.splitlines()) <= 3
    )
    sql = [
        "--sql",
        "SELECT value, 12 AS priority FROM messages",
        "--checkpoint",
        str(tmp_path / "y"),
    ]
    wrong = sluice(*words, *sql, "--group", "new", harness=harness)
    assert wrong.exit_code == 1 and "priority is 12" in wrong.stderr
    assert f"sluice group delete {harness.queue} new" in wrong.stderr


def test_interrupted_replay_resumes_after_what_it_has_published(
    harness: SparkHarness, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make(partitions=2)
    harness.fill([f"m{nth}" for nth in range(30)])
    table, target = tmp_path / "table", f"{harness.queue}/again"
    assert (
        sluice(
            "archive", "-q", harness.queue, "--to", str(table), "--once", harness=harness
        ).exit_code
        == 0
    )
    monkeypatch.setattr(publish_batches, "MAX_BATCH_ROWS", 7)
    monkeypatch.setattr(
        row_collection, "MAX_COLLECT_BYTES", 4000
    )  # about 16 rows, of some 15 in each partition
    monkeypatch.setattr(row_collection, "SPAN_SEQUENCES", 4)
    publish, calls = Queues.publish, []

    def cut_short(self: Queues, *arguments: Any) -> bool:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return publish(self, *arguments)

    monkeypatch.setattr(Queues, "publish", cut_short)
    with pytest.raises(KeyboardInterrupt):
        replay.run(spark, Queues(harness.where), table, target)
    published = sum(stored(harness, target).values())
    assert 0 < published <= 14
    harness.fill(["late"])
    assert (
        sluice(
            "archive", "-q", harness.queue, "--to", str(table), "--once", harness=harness
        ).exit_code
        == 0
    )
    words = ["replay", "--from", str(table), "--queue", target, "--json"]
    assert json.loads(sluice(*words, "--dry-run", harness=harness).stdout)["would_publish"] == 30
    done = json.loads(sluice(*words, "--yes", harness=harness).stdout)
    assert (done["published"], done["known"]) == (30 - published, published)
    assert stored(harness, target) == Counter({f"m{nth}": 1 for nth in range(30)})


def test_last_values_are_updated_in_a_table_or_a_queue(
    harness: SparkHarness, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.make(partitions=2)
    table = tmp_path / "last"
    words = ["compact", "-q", harness.queue, "--to", str(table), "--drop-empty", "--json"]
    seen = []
    for fresh, key in ((["a1", "a2"], "a"), (["b1"], "b"), (["a3"], "a"), ([""], "b")):
        harness.fill(fresh, key=key)
        reported = json.loads(sluice(*words, harness=harness).stdout)
        seen.append((reported["read"], reported["keys"], sorted(values(table, spark))))
    assert seen == [(2, 1, ["a2"]), (1, 2, ["a2", "b1"]), (1, 2, ["a3", "b1"]), (1, 1, ["a3"])]
    assert harness.lag("compact") == 0
    for more, expected in (
        (["--to", str(tmp_path / "second")], "for another table"),
        (["--to", str(table), "--group", "other"], "read by group compact"),
        (["--to", str(tmp_path / "third"), "--group", "third", "--by", "nothing"], "nothing"),
    ):
        wrong = sluice("compact", "-q", harness.queue, *more, harness=harness)
        assert wrong.exit_code == 2 and expected in wrong.stderr, wrong.stderr
    assert [one["name"] for one in harness.api.get(f"/queues/{harness.queue}/groups").json()] == [
        "compact"
    ]
    harness.fill(["a4"], key="a")
    words = ["compact", "-q", harness.queue, "--to", str(tmp_path / "third"), "--group", "third"]
    wrong = sluice(*words, "--by", "raise_error('no')", harness=harness)
    assert wrong.exit_code == 1 and f"sluice group delete {harness.queue} third" in wrong.stderr, (
        wrong.stderr
    )

    source, target = f"{harness.queue}/source", f"{harness.queue}/target"
    harness.fill(["c1", "c2"], queue=source, key="c")
    harness.fill(["d1", ""], queue=source, key="d")
    monkeypatch.chdir(tmp_path)
    (tmp_path / source).mkdir(parents=True)  # a directory of the same name means something else
    words = [
        "compact",
        "-q",
        source,
        "--to-queue",
        target,
        "--by",
        "concat('k-', string(key))",
        "--drop-empty",
    ]
    done = json.loads(sluice(*words, "--json", harness=harness).stdout)
    assert (done["read"], done["keys"]) == (4, 1)
    published = {row["key"]: row["value"] for row in harness.read(subscribe=target)}
    # in a compacted queue, the deletion of its key
    assert published == {b"k-c": b"c2", b"k-d": b""}
    publish = Queues.publish

    def publish_second(self: Queues, *arguments: Any) -> bool:
        publish(self, *arguments)  # by another run, which had the number first
        return publish(self, *arguments)

    monkeypatch.setattr(Queues, "publish", publish_second)
    with pytest.raises(compact.ConcurrentPublish, match="another run"):
        compact.to_queue(spark, Queues(harness.where), target, queue=source)


def test_reports_show_failures_flow_and_missing_messages(
    harness: SparkHarness, spark: SparkSession, tmp_path: Path
) -> None:
    page = tmp_path / "dead-letters.html"
    harness.make()
    reported = sluice("dead-letters", "--queue", harness.queue, "--to", str(page), harness=harness)
    assert "No dead letters" in reported.stdout and "There are none" in page.read_text()
    assert "No dead letters" in sluice("redrive", "--queue", harness.queue, harness=harness).stdout
    asyncio.run(harness.reject(b"bad"))
    reported = sluice("dead-letters", "--queue", harness.queue, "--to", str(page), harness=harness)
    assert (
        reported.exit_code == 0
        and "no good" in reported.stdout
        and "1 dead letter, 1 cause" in reported.stdout
    )
    assert "no good" in page.read_text() and f"dlq/{harness.queue}" not in reported.stderr

    harness.fill(["x", "y"], queue=f"{harness.queue}/in", message_id=["one", "two"])
    page = tmp_path / "flow.html"
    reported = sluice(
        *("flow", "-q", f"{harness.queue}/in", "--window", "1h", "--to", str(page), "--json"),
        *("--since", "key"),  # which is not a time
        harness=harness,
    )
    assert "--since 'key' with --until 'timestamp' gives no time for any message" in reported.stderr
    assert json.loads(reported.stdout)["messages"] == 2 and "<svg" in page.read_text()

    log = tmp_path / "published.json"
    log.write_text('{"job": "one"}\n{"job": "two"}\n{"job": "three"}\n')
    audit = ["audit", "--published", f"json:{log}#job", "--waiting", f"queue:{harness.queue}/in"]
    reported = sluice(*audit, harness=harness)
    assert (
        reported.exit_code == 5
        and "three" in reported.stdout
        and "Something is wrong" in reported.stdout
    )
    log.write_text('{"job": "one"}\n{"job": "two"}\n')
    assert sluice(*audit, harness=harness).exit_code == 0

    assert sluice("flow", "-q", f"{harness.queue}/none", harness=harness).exit_code == 3
    assert (
        sluice("flow", "-q", f"{harness.queue}/in", "--window", "soon", harness=harness).exit_code
        == 2
    )
    assert sluice("compact", "-q", "a", "--from", "b", harness=harness).exit_code == 2


def test_flow_watches_a_queue_without_retaining_its_messages(
    harness: SparkHarness, spark: SparkSession, tmp_path: Path
) -> None:
    from sluice.spark.pipelines.jobs import flow

    harness.make(partitions=1)
    harness.fill(["a"])
    received: list[int] = []
    query = flow.start(
        spark,
        Queues(harness.where),
        harness.queue,
        lambda rows: received.append(sum(row["messages"] for row in rows)),
        window="3600 seconds",
        every="100 milliseconds",
    )
    try:
        wait_until(lambda: received and received[-1] == 1, "the first message")
        harness.fill(["b", "c"])
        wait_until(lambda: received[-1] == 3, "the others")
    finally:
        query.stop()
    assert harness.api.get(f"/queues/{harness.queue}/groups").json() == []
