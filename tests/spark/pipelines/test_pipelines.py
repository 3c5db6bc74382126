"""The pipelines from queue to table, report or queue: a real broker, real Spark, and crashes in between.

How `archive` and `transform` survive a kill -9 of driver, workers and broker is in test_crash.py: its streams are they.
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

from sluice.cli import app
from sluice.spark.pipelines.jobs import archive
from sluice.spark.pipelines.support import row_collection
from sluice.spark.pipelines.jobs import compact
from sluice.spark.pipelines.support import publish_batches
from sluice.spark.pipelines.jobs import redrive
from sluice.spark.pipelines.jobs import replay
from sluice.spark.pipelines.support import stream_runner
from sluice.spark.pipelines.jobs import transform
from sluice.spark.pipelines.queues import Queues
from sluice.spark.pipelines.tables import open_table
from tests.spark.conftest import House

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT = 60.0


def until(condition: Any, what: str) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end, f"{what} did not come"
        time.sleep(0.05)


def values(path: Path, spark: SparkSession) -> Counter[str]:
    rows = open_table(path).read(spark).select("value").collect()
    return Counter(bytes(row["value"]).decode() for row in rows)


def kept(house: House, queue: str = "") -> Counter[str]:
    return Counter(house.values(subscribe=queue or house.queue))


def dead(house: House) -> int:
    """How many dead letters there are."""
    return int(house.api.get(f"/queues/dlq${house.queue}/stats").json()["depth"])


def sluice(*words: str, house: House) -> Any:
    """The command, in this process: it takes the session that runs."""
    environ = {"SLUICE_URL": house.url, "SLUICE_MQTT": str(house.broker.mqtt), "SLUICE_TRACEBACK": "1"}
    return CliRunner().invoke(app, ["pipeline", *words], env=environ, catch_exceptions=False)


@pytest.mark.parametrize("kind", ["delta", "parquet"])
def test_an_archive_holds_each_message_once_and_its_progress_is_the_groups(
    house: House, spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    house.make(partitions=2)
    house.fill([f"m{nth}" for nth in range(50)])
    table = tmp_path / "[prod] {x,y}?"  # a name, and no pattern
    words = ("archive", "--queue", house.queue, "--to", str(table), "--format", kind, "--once", "--json")
    first = json.loads(sluice(*words, "--rows-per-batch", "20", house=house).stdout)
    assert first["rows"] == 50 and first["batches"] >= 3 and first["lag"] == 0
    assert house.lag("archive") == 0
    house.fill(["late"])
    second = json.loads(sluice(*words, house=house).stdout)
    assert (second["rows"], second["batches"]) == (1, 1)
    wanted = Counter({**{f"m{nth}": 1 for nth in range(50)}, "late": 1})
    assert values(table, spark) == wanted
    # A batch that Spark tries again, because it died before it could note that it was done.
    rows = open_table(table).read(spark).drop("archived_at")
    keep = archive.keep(open_table(table), lambda: archive.key_of(table / "_sluice" / "checkpoint"))
    keep(rows, 0)
    assert values(table, spark) == wanted
    if kind == "parquet":  # anybody can read the directory, whatever lies beside the files
        assert pq.read_table(table, partitioning=None).num_rows == 51


def test_a_repaired_letter_goes_back_once_to_the_group_that_failed_it(
    house: House, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues = Queues(house.where)
    house.make(partitions=4)
    house.door.advance(house.queue, "other", {}, create=True)
    for text in ('{"n": NaN}', '{"n": 1}', "hopeless"):
        asyncio.run(house.reject(text.encode(), message_id=f"id of {text}"))
    house.door.advance(house.queue, "other", house.door.offsets(house.queue).latest())
    homes = {row["value"]: row["original_partition"] for row in house.read(subscribe=f"dlq/{house.queue}")}
    words = [
        "redrive",
        "-q",
        house.queue,
        "--where",
        "text LIKE '%NaN%'",
        "--set",
        "value=replace(text, 'NaN', '0')",
    ]
    shown = sluice(*words, "--dry-run", house=house)
    assert "1 dead letter in all" in shown.stdout and '{"n": 0}' in shown.stdout
    assert dead(house) == 3

    # The driver dies as soon as the broker has put it back, and is started again; so is somebody else meanwhile.
    late = redrive.repaired(queues.read(spark, f"dlq/{house.queue}"), "text LIKE '%NaN%'").persist()
    late.count()
    with monkeypatch.context() as broken:
        mend = Queues.mend

        def mend_and_die(*told: Any) -> int:
            mend(*told)
            raise KeyboardInterrupt

        broken.setattr(Queues, "mend", mend_and_die)
        with pytest.raises(KeyboardInterrupt):
            redrive.run(spark, queues, house.queue, where="text LIKE '%NaN%'", changes=["value = 'mended'"])
    done = json.loads(sluice(*words, "--yes", "--json", house=house).stdout)
    assert done == {"put_back": 0, "skipped": 0}
    with monkeypatch.context() as slow:
        slow.setattr(redrive, "repaired", lambda *told: late)
        assert redrive.run(spark, queues, house.queue) == redrive.Redriven(put_back=0, skipped=1)
    [row] = house.read()
    assert (row["value"], row["message_id"]) == (b"mended", 'id of {"n": NaN}')
    assert row["partition"] == homes[b'{"n": NaN}']
    assert (house.lag("w"), house.lag("other"), dead(house)) == (1, 0, 2)

    told = sluice("redrive", "-q", house.queue, "--to-all", "--yes", house=house)
    assert "Put 2 dead letters" in told.stdout
    assert kept(house) == Counter(["mended", '{"n": 1}', "hopeless"])
    assert (house.lag("w"), house.lag("other"), dead(house)) == (3, 2, 0)


def test_dead_letters_lie_where_the_queue_sends_them_and_stay_when_they_are_archived(
    house: House, spark: SparkSession, tmp_path: Path
) -> None:
    home, other = f"failed-{house.queue}", f"other-{house.queue}"
    for queue in (house.queue, other):
        house.make(queue, dlq_config={"topic": home})
    asyncio.run(house.reject(b"bad"))
    told = {
        queue: json.loads(sluice("dead-letters", "-q", queue, "--json", house=house).stdout)
        for queue in (house.queue, other)
    }
    assert (told[house.queue]["letters"], told[other]["letters"]) == (1, 0)
    found = json.loads(sluice("dead-letters", "--json", house=house).stdout)["causes"]
    assert house.queue in {cause["queue"] for cause in found}

    words = ["archive", "-q", home, "--to", str(tmp_path / "letters"), "--once", "--json"]
    first, second = (json.loads(sluice(*words, house=house).stdout) for _ in range(2))
    assert (first["rows"], second["rows"], first["lag"]) == (1, 0, None)
    assert house.depth(home) == 1 and not house.api.get(f"/queues/{home}/groups").json()
    assert json.loads(sluice("redrive", "-q", house.queue, "--yes", "--json", house=house).stdout) == {
        "put_back": 1,
        "skipped": 0,
    }
    assert (house.depth(home), kept(house)) == (0, Counter(["bad"]))
    house.fill(["worse"], queue=home)
    last = json.loads(sluice(*words, "--settle", house=house).stdout)
    assert (last["rows"], last["lag"], house.depth(home)) == (1, 0, 0)
    assert values(tmp_path / "letters", spark) == Counter(["bad", "worse"])

    house.door.advance(house.queue, "w", house.door.offsets(house.queue).latest())
    asyncio.run(house.reject(b"one"))
    shown = Queues(house.where).letters(spark, house.queue, [home])
    asyncio.run(house.reject(b"two"))
    assert (shown.count(), house.depth(home)) == (1, 2)  # whoever agrees to one is not given two


FUNCTION = """
from pyspark.sql import functions as f

def tripled(text):
    return str(int(text) * 3)

def without_repetitions(messages):
    triple = f.udf(tripled)
    return messages.dropDuplicates(["value"]).withColumn("value", triple(f.col("value").cast("string")))
"""


def test_a_queue_becomes_another_with_sql_or_a_function_with_memory(
    house: House, spark: SparkSession, tmp_path: Path
) -> None:
    house.make(partitions=2)
    house.fill(["1", "2"])
    query = "SELECT int(text) * 2 AS value, key, map('by', binary('sql')) AS headers FROM messages WHERE text <> '2'"
    words = ["transform", "-q", house.queue, "--to", f"{house.queue}/twice", "--once", "--json"]
    ran = sluice(*words, "--sql", query, "--checkpoint", str(tmp_path / "sql"), house=house)
    assert ran.exit_code == 0, ran.stderr
    assert {name: json.loads(ran.stdout)[name] for name in ("rows", "written")} == {"rows": 2, "written": 1}
    [row] = house.read(subscribe=f"{house.queue}/twice", includeHeaders="true")
    assert (row["value"], row["key"], dict(row["headers"])["by"]) == (b"2", b"1", b"sql")

    own = tmp_path / "own.py"
    own.write_text(FUNCTION)
    change = transform.find_function(f"{own}:without_repetitions")
    for more in (["2", "5"], ["5", "6"]):  # what was seen is remembered from one run to the next
        house.fill(more)
        stream_runner.run(
            lambda: transform.start(
                spark,
                Queues(house.where),
                house.queue,
                f"{house.queue}/thrice",
                tmp_path / "own",
                change,
                group="own",
                once=True,
            ),
            once=True,
        )
    assert kept(house, f"{house.queue}/thrice") == Counter(["6", "15", "18"])
    sql = ["--sql", "SELECT nothing FROM messages", "--checkpoint", str(tmp_path / "x")]
    wrong = sluice(*words, *sql, "--group", "new", house=house)
    assert wrong.exit_code == 2 and "nothing" in wrong.stderr and len(wrong.stderr.splitlines()) <= 3
    sql = ["--sql", "SELECT value, 12 AS priority FROM messages", "--checkpoint", str(tmp_path / "y")]
    wrong = sluice(*words, *sql, "--group", "new", house=house)
    assert wrong.exit_code == 1 and "priority is 12" in wrong.stderr
    assert f"sluice group delete {house.queue} new" in wrong.stderr


def test_a_replay_that_was_cut_short_goes_on_behind_what_it_had_published(
    house: House, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make(partitions=2)
    house.fill([f"m{nth}" for nth in range(30)])
    table, target = tmp_path / "table", f"{house.queue}/again"
    assert sluice("archive", "-q", house.queue, "--to", str(table), "--once", house=house).exit_code == 0
    monkeypatch.setattr(publish_batches, "PORTION_ROWS", 7)
    monkeypatch.setattr(row_collection, "AT_ONCE", 4000)  # about 16 rows, of some 15 in each partition
    monkeypatch.setattr(row_collection, "WIDTH", 4)
    publish, calls = Queues.publish, []

    def cut_short(self: Queues, *told: Any) -> bool:
        calls.append(told)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return publish(self, *told)

    monkeypatch.setattr(Queues, "publish", cut_short)
    with pytest.raises(KeyboardInterrupt):
        replay.run(spark, Queues(house.where), table, target)
    published = sum(kept(house, target).values())
    assert 0 < published <= 14
    house.fill(["late"])
    assert sluice("archive", "-q", house.queue, "--to", str(table), "--once", house=house).exit_code == 0
    words = ["replay", "--from", str(table), "--queue", target, "--json"]
    assert json.loads(sluice(*words, "--dry-run", house=house).stdout)["would_publish"] == 30
    done = json.loads(sluice(*words, "--yes", house=house).stdout)
    assert (done["published"], done["known"]) == (30 - published, published)
    assert kept(house, target) == Counter({f"m{nth}": 1 for nth in range(30)})


def test_the_last_values_are_kept_up_to_date_in_a_table_or_a_queue(
    house: House, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house.make(partitions=2)
    table = tmp_path / "last"
    words = ["compact", "-q", house.queue, "--to", str(table), "--drop-empty", "--json"]
    seen = []
    for fresh, key in ((["a1", "a2"], "a"), (["b1"], "b"), (["a3"], "a"), ([""], "b")):
        house.fill(fresh, key=key)
        told = json.loads(sluice(*words, house=house).stdout)
        seen.append((told["read"], told["keys"], sorted(values(table, spark))))
    assert seen == [(2, 1, ["a2"]), (1, 2, ["a2", "b1"]), (1, 2, ["a3", "b1"]), (1, 1, ["a3"])]
    assert house.lag("compact") == 0
    for more, said in (
        (["--to", str(tmp_path / "second")], "for another table"),
        (["--to", str(table), "--group", "other"], "group compact brings them"),
        (["--to", str(tmp_path / "third"), "--group", "third", "--by", "nothing"], "nothing"),
    ):
        wrong = sluice("compact", "-q", house.queue, *more, house=house)
        assert wrong.exit_code == 2 and said in wrong.stderr, wrong.stderr
    assert [one["name"] for one in house.api.get(f"/queues/{house.queue}/groups").json()] == ["compact"]
    house.fill(["a4"], key="a")
    words = ["compact", "-q", house.queue, "--to", str(tmp_path / "third"), "--group", "third"]
    wrong = sluice(*words, "--by", "raise_error('no')", house=house)
    assert wrong.exit_code == 1 and f"sluice group delete {house.queue} third" in wrong.stderr, wrong.stderr

    source, target = f"{house.queue}/source", f"{house.queue}/target"
    house.fill(["c1", "c2"], queue=source, key="c")
    house.fill(["d1", ""], queue=source, key="d")
    monkeypatch.chdir(tmp_path)
    (tmp_path / source).mkdir(parents=True)  # a directory of the same name is another thing
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
    done = json.loads(sluice(*words, "--json", house=house).stdout)
    assert (done["read"], done["keys"]) == (4, 1)
    published = {row["key"]: row["value"] for row in house.read(subscribe=target)}
    assert published == {b"k-c": b"c2", b"k-d": b""}  # in a compacted queue, the end of its key
    publish = Queues.publish

    def publish_second(self: Queues, *told: Any) -> bool:
        publish(self, *told)  # by another run, which had the number first
        return publish(self, *told)

    monkeypatch.setattr(Queues, "publish", publish_second)
    with pytest.raises(compact.PublishedMeanwhile, match="another run"):
        compact.to_queue(spark, Queues(house.where), target, queue=source)


def test_what_fails_what_flows_and_what_is_missing_is_told(
    house: House, spark: SparkSession, tmp_path: Path
) -> None:
    page = tmp_path / "letters.html"
    house.make()
    told = sluice("dead-letters", "--queue", house.queue, "--to", str(page), house=house)
    assert "No dead letters" in told.stdout and "There are none" in page.read_text()
    assert "No dead letters" in sluice("redrive", "--queue", house.queue, house=house).stdout
    asyncio.run(house.reject(b"bad"))
    told = sluice("dead-letters", "--queue", house.queue, "--to", str(page), house=house)
    assert told.exit_code == 0 and "no good" in told.stdout and "1 dead letter, 1 cause" in told.stdout
    assert "no good" in page.read_text() and f"dlq/{house.queue}" not in told.stderr

    house.fill(["x", "y"], queue=f"{house.queue}/in", message_id=["one", "two"])
    page = tmp_path / "flow.html"
    told = sluice(
        *("flow", "-q", f"{house.queue}/in", "--window", "1h", "--to", str(page), "--json"),
        *("--since", "key"),  # which is no time
        house=house,
    )
    assert "--since 'key' with --until 'timestamp' gives no time for any message" in told.stderr
    assert json.loads(told.stdout)["messages"] == 2 and "<svg" in page.read_text()

    log = tmp_path / "published.json"
    log.write_text('{"job": "one"}\n{"job": "two"}\n{"job": "three"}\n')
    audit = ["audit", "--published", f"json:{log}#job", "--waiting", f"queue:{house.queue}/in"]
    told = sluice(*audit, house=house)
    assert told.exit_code == 5 and "three" in told.stdout and "Something is wrong" in told.stdout
    log.write_text('{"job": "one"}\n{"job": "two"}\n')
    assert sluice(*audit, house=house).exit_code == 0

    assert sluice("flow", "-q", f"{house.queue}/none", house=house).exit_code == 3
    assert sluice("flow", "-q", f"{house.queue}/in", "--window", "soon", house=house).exit_code == 2
    assert sluice("compact", "-q", "a", "--from", "b", house=house).exit_code == 2


def test_flow_watches_a_queue_without_keeping_its_messages(
    house: House, spark: SparkSession, tmp_path: Path
) -> None:
    from sluice.spark.pipelines.jobs import flow

    house.make(partitions=1)
    house.fill(["a"])
    heard: list[int] = []
    query = flow.start(
        spark,
        Queues(house.where),
        house.queue,
        lambda rows: heard.append(sum(row["messages"] for row in rows)),
        window="3600 seconds",
        every="100 milliseconds",
    )
    try:
        until(lambda: heard and heard[-1] == 1, "the first message")
        house.fill(["b", "c"])
        until(lambda: heard[-1] == 3, "the others")
    finally:
        query.stop()
    assert house.api.get(f"/queues/{house.queue}/groups").json() == []
