"""The pipelines on DataFrames: no broker, no stream."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as f

from sluice.spark.errors import InvalidOption
from sluice.spark.pipelines import tables
from sluice.spark.pipelines.jobs import (
    archive,
    audit,
    compact,
    dead_letters,
    flow,
    redrive,
    replay,
    transform,
)
from sluice.spark.pipelines.support import dead_letter_queues, row_collection

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOON = datetime(2030, 5, 17, 12, 0, tzinfo=UTC)
MESSAGES = (
    "key binary, value binary, queue string, partition int, sequence bigint,"
    " timestamp timestamp, message_id string,"
    " attempt int, topic string, headers map<string,binary>"
)
DEAD_LETTERS = (
    MESSAGES + ", original_queue string, original_topic string, original_partition int,"
    " original_sequence bigint, original_message_id string, original_group string,"
    " reason string, description string, attempts int,"
    " first_attempt timestamp, last_attempt timestamp, dead_at timestamp"
)


def message(
    nth: int, value: str, queue: str = "jobs", at: datetime = NOON, **more: Any
) -> tuple[Any, ...]:
    headers = {name: text.encode() for name, text in more.get("headers", {}).items()}
    key = more.get("key", f"k{nth}")
    place = (queue, nth % 2, nth, at, more.get("id", f"m{nth}"), 1, f"$queue/{queue}", headers)
    return (None if key is None else key.encode(), value.encode(), *place)


def dead_letter(
    nth: int, value: str, reason: str, description: str, minutes: int = 0, **more: Any
) -> tuple[Any, ...]:
    died = NOON + timedelta(minutes=minutes)
    origin = more.pop("origin", "jobs")
    group = more.pop("group", "workers")
    story = (
        origin,
        f"$queue/{origin}",
        0,
        nth,
        f"m{nth}",
        group,
        reason,
        description,
        3,
        died,
        died,
        died,
    )
    return (*message(nth, value, f"dlq/{origin}", died, id=f"L{nth}", **more), *story)


@pytest.fixture(scope="module")
def dead_letter_frame(spark: SparkSession) -> DataFrame:
    rows = [
        dead_letter(
            1,
            '{"n": NaN}',
            "rejected",
            "row 17 has no number",
            headers={"site": "north", "attempts": "3"},
        ),
        dead_letter(2, '{"n": NaN}', "rejected", "row 18 has no number", 60, key="k1"),
        dead_letter(
            3,
            "x" * 500,
            "max_retries",
            "host 7f2504e0-4f89-11d3-9a0c-0305e82c3301 is away",
            61,
            group="mail",
        ),
        dead_letter(4, "<script>alert(1)</script>", "timeout", "", 62),
    ]
    return spark.createDataFrame(rows, DEAD_LETTERS)


def test_dead_letters_that_differ_in_numbers_and_ids_have_one_cause(
    dead_letter_frame: DataFrame,
) -> None:
    found = dead_letters.summarize(dead_letter_frame).summary()
    assert found[dead_letters.COUNT_COLUMN] == 4
    reported = [
        (one["cause"], one["reason"], one[dead_letters.COUNT_COLUMN], one["groups"])
        for one in found["causes"]
    ]
    assert reported[0] == ("row # has no number", "rejected", 2, ["workers"])
    assert reported[1:] == [
        ("(timeout, no description)", "timeout", 1, ["workers"]),
        ("host # is away", "max_retries", 1, ["mail"]),
    ]
    first = found["causes"][0]
    assert (first["since"], first["until"]) == (
        "2030-05-17T12:00:00+00:00",
        "2030-05-17T13:00:00+00:00",
    )
    assert (first["example"], first["attempts"], first["keys"]) == ("L2", 3.0, 1)


def test_payload_preview_is_its_beginning_and_size(dead_letter_frame: DataFrame) -> None:
    many = dead_letter_frame.where("message_id = 'L1'").drop("key", "value")
    many = many.crossJoin(dead_letter_frame.sparkSession.range(300)).select(
        f.col("id").cast("string").cast("binary").alias("key"),
        f.repeat(f.lit("あ"), 500).cast("binary").alias("value"),
        "*",
    )
    [cause] = dead_letters.causes(many.drop("id")).collect()
    assert (
        cause[dead_letters.COUNT_COLUMN],
        cause["keys"],
        cause["size"],
        len(cause["payload"]),
    ) == (
        300,
        300,
        1500,
        400,
    )


def test_dead_letter_report_is_self_contained_and_shows_payloads_as_text(
    dead_letter_frame: DataFrame,
) -> None:
    page = dead_letters.report(
        dead_letters.summarize(dead_letter_frame), "jobs", NOON + timedelta(hours=2)
    )
    assert page.startswith("<!doctype html>")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "<script" not in page
    assert "http://" not in page and "https://" not in page and "@import" not in page
    assert "<svg" in page and "2030-05-17 13:00:00: 1 row # has no number" in page
    assert "There are none" in dead_letters.report(
        dead_letters.summarize(dead_letter_frame.limit(0)), "jobs", NOON
    )


def test_causes_beyond_the_most_frequent_are_counted_too(
    dead_letter_frame: DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "SHOWN_CAUSES", 1)
    monkeypatch.setattr(dead_letters, "MAX_LAYERS", 1)
    found = dead_letters.summarize(dead_letter_frame)
    assert (found.total, found.kinds, len(found.causes)) == (4, 3, 1)
    assert (found.queues, found.reasons.kinds, found.groups.kinds) == (1, 3, 2)
    assert {one["cause"] for one in found.buckets} == {"row # has no number", None}
    page = dead_letters.report(found, "jobs", NOON + timedelta(hours=2))
    assert "These are the 1 most frequent" in page and "other causes" in page
    assert all(reason in page for reason in ("rejected", "max_retries", "timeout"))


def test_flow_counts_windows_and_latencies_for_any_time_format(spark: SparkSession) -> None:
    since = NOON.timestamp()
    sent = {
        NOON.isoformat(): 1.0,
        str(since): 2.0,
        str(int(since * 1e3)): 3.0,
        str(int(since * 1e6)): 4.0,
        str(int(since * 1e9)): 5.0,
        (NOON + timedelta(seconds=50)).isoformat(): 0.0,  # a clock slightly ahead of ours
        **dict.fromkeys(
            ["never", "NaN", "-Infinity", "Infinity", "inf", "1e300", "-1e300", "-5"], None
        ),
        (NOON + timedelta(minutes=9)).isoformat(): None,
    }
    rows = [
        message(nth, "12345", at=NOON + timedelta(seconds=nth + 1), headers={"sent-at": text})
        for nth, text in enumerate(sent)
    ]
    timed = spark.createDataFrame(rows, MESSAGES)
    taken = timed.select(
        flow.latency(timed, "headers['sent-at']", "timestamp").alias("taken"), "sequence"
    )
    reported = [row["taken"] for row in taken.orderBy("sequence").collect()]
    assert dict(zip(sent, reported)) == {
        text: None if seconds is None else pytest.approx(seconds, abs=1e-5)
        for text, seconds in sent.items()
    }

    rows.append(message(90, "1", at=NOON + timedelta(seconds=61), queue="other"))
    frame = spark.createDataFrame(rows, MESSAGES)
    found = flow.collect_windows(frame, "60 seconds", "headers['sent-at']")
    first, second = found
    assert {name: first[name] for name in ("queue", "messages", "bytes", "timed", "start")} == {
        "queue": "jobs",
        "messages": len(sent),
        "bytes": 5 * len(sent),
        "timed": 6,
        "start": NOON,
    }
    assert (first["p50"], first["slowest"]) == (
        pytest.approx(2.0, rel=0.025),
        pytest.approx(5.0, abs=1e-5),
    )
    assert (second["queue"], second["messages"], second["timed"], second["p99"]) == (
        "other",
        1,
        0,
        None,
    )
    page = flow.report(found, "jobs", NOON)
    assert "<svg" in page and "p99" in page and "5 s" in page and "http://" not in page

    # With few windows, they are longer. A stream out of order gives the same as all messages at
    # once.
    longer = flow.collect_windows(frame, "1 second", "headers['sent-at']", max_windows=8)
    assert (longer.requested_seconds, longer.seconds, longer.total()) == (1, 60, found.total())
    watch = flow.FlowWatch()
    for number, part in enumerate((frame.where("sequence > 7"), frame.where("sequence <= 7"))):
        for _ in range(2):  # a repeated batch
            watch.add_batch(flow.counts(part, "60 seconds", "headers['sent-at']"), number)
    assert list(watch.windows) == list(found)

    with pytest.raises(InvalidOption, match="--since"):
        flow.collect_windows(frame, "60 seconds", "no_such_column")
    with pytest.raises(InvalidOption, match=r"--since 'headers\[' cannot be used: \w+"):
        flow.collect_windows(frame, "60 seconds", "headers[")


def test_audit_finds_missing_and_duplicate_messages(spark: SparkSession) -> None:
    def side(*ids: str) -> DataFrame:
        return audit.select_ids(spark.createDataFrame([(one,) for one in ids], "id string"))

    # m4 died, was put back and archived again, from another position: one message, two rows, no
    # fault.
    second_life = message(14, "4", id="m4")
    archived = [message(nth, str(nth)) for nth in (1, 2, 3, 3, 4)] + [second_life]
    archive = audit.select_ids(spark.createDataFrame(archived, MESSAGES))
    verdict = audit.compare_sides(
        {
            "published": side("m1", "m2", "m3", "m4", "m5"),
            "acked": side("m1", "m1", "m4", "unpublished"),
            "dead": side("m2"),
            "archived": archive,
        }
    )
    assert verdict.ids == {"published": 5, "acked": 3, "dead": 1, "archived": 4}
    assert verdict.faults == {
        "without an id": 0,
        "missing": 2,
        "not archived": 1,
        "never published": 1,
        "acked twice": 1,
        "archived twice": 1,
    }
    assert verdict.examples == {
        "missing": ["m3", "m5"],
        "not archived": ["m5"],
        "never published": ["unpublished"],
        "acked twice": ["m1"],
        "archived twice": ["m3"],
    }
    assert not verdict.is_good
    assert audit.compare_sides({"published": side("a"), "acked": side("a")}).is_good
    nameless = audit.select_ids(spark.createDataFrame([("a",), (None,), (None,)], "id string"))
    verdict = audit.compare_sides({"published": nameless, "acked": side("a")})
    assert (verdict.ids, verdict.examples) == ({"published": 1, "acked": 1}, {})
    assert {name: found for name, found in verdict.faults.items() if found} == {"without an id": 2}
    assert not verdict.is_good
    with pytest.raises(InvalidOption, match="compares"):
        audit.compare_sides({"published": side("a")})


def test_dead_letters_are_repaired_with_sql(dead_letter_frame: DataFrame) -> None:
    chosen = redrive.repair_rows(
        dead_letter_frame, "reason = 'rejected'", ["value = replace(text, 'NaN', 'null')"]
    )
    rows = [row.asDict() for row in chosen.orderBy("sequence").collect()]
    assert [row["letter"] for row in rows] == ["L1", "L2"]  # words: allowed
    first = rows[0]
    assert bytes(first["value"]) == b'{"n": null}'
    assert (bytes(first["key"]), first["queue"]) == (b"k1", "jobs")
    # The publisher's headers stay, those of the dead letter do not.
    assert {name: bytes(data) for name, data in first["headers"].items()} == {"site": b"north"}


def test_full_query_may_repair_dead_letters_if_it_preserves_their_ids(
    dead_letter_frame: DataFrame,
) -> None:
    query = (
        "SELECT letter, upper(text) AS value, 'elsewhere' AS queue"  # words: allowed
        " FROM letters WHERE reason = 'timeout'"  # words: allowed
    )
    [row] = redrive.repair_rows(dead_letter_frame, sql=query).collect()
    assert (bytes(row["value"]), row["queue"]) == (b"<SCRIPT>ALERT(1)</SCRIPT>", "elsewhere")
    with pytest.raises(InvalidOption, match="letter"):  # words: allowed
        redrive.repair_rows(dead_letter_frame, sql="SELECT value FROM letters")  # words: allowed
    with pytest.raises(InvalidOption, match="--set"):
        redrive.repair_rows(dead_letter_frame, changes=["attempts = 0"])
    number, [shown] = redrive.preview(
        redrive.repair_rows(dead_letter_frame, changes=["value = 'new'"]), dead_letter_frame, 1
    )
    assert (number, shown["letter"], shown["reason"]) == (4, "L2", "rejected")  # words: allowed
    assert (shown["before"], shown["after"]) == ('{"n": NaN}', "new")


def test_repair_that_would_lose_or_duplicate_rows_is_refused_as_a_whole(
    dead_letter_frame: DataFrame,
) -> None:
    def count_repaired(**how: Any) -> int:
        return redrive.preview(redrive.repair_rows(dead_letter_frame, **how), dead_letter_frame)[0]

    with pytest.raises(InvalidOption, match=r"dead letter L1 is NULL.*coalesce"):
        count_repaired(changes=["value = get_json_object(text, '$.none')"])
    with pytest.raises(InvalidOption, match=r"dead letter L1 2 times"):
        count_repaired(
            sql="SELECT letter, explode(array('a', 'b')) AS value"  # words: allowed
            " FROM letters WHERE letter = 'L1'"  # words: allowed
        )
    with pytest.raises(InvalidOption, match=r"L1 does not say which queue"):
        count_repaired(changes=["queue = cast(NULL AS string)"])
    with pytest.raises(InvalidOption, match=r"L1 would be put back into its own dead-letter queue"):
        count_repaired(changes=["queue = 'dlq/jobs'"])
    elsewhere = redrive.repair_rows(dead_letter_frame, changes=["queue = 'dlq/others'"])
    assert {row["queue"] for row in elsewhere.collect()} == {"dlq/others"}
    assert count_repaired(where="reason = 'timeout'") == 1


def test_only_dead_letters_of_the_queue_are_selected(dead_letter_frame: DataFrame) -> None:
    shared = dead_letter_frame.withColumn(
        "original_queue", f.when(f.col("message_id") == "L1", "other").otherwise("jobs")
    )
    shared = shared.withColumn("queue", f.lit("ops/failed"))
    assert [
        row["message_id"] for row in dead_letter_queues.only_from_queue(shared, "other").collect()
    ] == ["L1"]
    [row] = redrive.repair_rows(dead_letter_queues.only_from_queue(shared, "other")).collect()
    assert (row["home"], row["queue"]) == ("ops/failed", "other")


def test_last_value_of_a_key_wins_and_an_empty_one_may_delete_it(spark: SparkSession) -> None:
    rows = [
        message(1, "old", key="a"),
        message(2, "new", key="a", at=NOON + timedelta(seconds=1)),
        message(3, "gone", key="b"),
        message(4, "", key="b", at=NOON + timedelta(seconds=1)),
        message(5, "no key", key=None),
    ]
    frame = spark.createDataFrame(rows, MESSAGES)
    stored = {
        bytes(one["key"]): bytes(one["value"]) for one in compact.last_messages(frame).collect()
    }
    assert stored == {b"a": b"new", b"b": b""}
    assert [
        bytes(one["key"]) for one in compact.last_messages(frame, drop_empty=True).collect()
    ] == [b"a"]


def test_transformation_returns_messages(spark: SparkSession, tmp_path: Path) -> None:
    frame = spark.createDataFrame([message(1, "7"), message(2, "8")], MESSAGES)
    result = transform.by_sql(
        frame, "SELECT int(text) * 2 AS value, key, 'even' AS note FROM messages"
    )
    assert result.columns == ["value", "key"]
    parts = transform.by_sql(
        frame, "SELECT struct(text AS n) AS value, array(text) AS key FROM messages"
    )
    assert [(bytes(row["value"]), bytes(row["key"])) for row in parts.limit(1).collect()] == [
        (b'{"n":"7"}', b'["7"]')
    ]
    with pytest.raises(InvalidOption, match="value"):
        transform.by_sql(frame, "SELECT key FROM messages")
    file = tmp_path / "own.py"
    file.write_text("def halve(messages):\n    return messages.limit(1)\n")
    assert transform.find_function(f"{file}:halve")(frame).count() == 1
    for wrong in ("halve", f"{file}:none", "no.such.module:f"):
        with pytest.raises(InvalidOption, match="--function"):
            transform.find_function(wrong)


def test_replayed_message_is_new_and_names_its_origin(spark: SparkSession) -> None:
    rows = [
        message(
            3,
            "c",
            headers={"site": "south", "delay": "5m", "dead-reason": "rejected", "history": "[]"},
        ),
        message(1, "a"),
        message(2, "b", at=NOON + timedelta(days=1)),
        message(1, "of the queue before", at=NOON - timedelta(days=1)),
    ]
    frame = spark.createDataFrame(rows, MESSAGES)
    found = replay.replay_messages(frame, until="2030-05-18 00:00:00", queue="again").collect()
    assert [bytes(one["value"]) for one in found] == [b"of the queue before", b"a", b"c"]
    assert {one["queue"] for one in found} == {"again"}
    headers = {name: bytes(data) for name, data in found[2]["headers"].items()}
    assert headers == {"site": b"south", "replayed-from": b"m3"}
    assert "message_id" not in found[0].asDict()


def test_rows_are_collected_in_order_however_many_fit(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [message(nth, "x", headers={"a": "b"}) for nth in (3, 1, 2)]
    frame = spark.createDataFrame(rows, MESSAGES).withColumn("home", f.col("queue"))
    frame = frame.withColumn("headers", f.when(f.col("sequence") != 1, f.col("headers")))
    for most, cut in (
        (1, [[2], [1], [3]]),
        (1000, [[2, 1, 3]]),
    ):  # the even ones are in the first partition
        monkeypatch.setattr(row_collection, "MAX_COLLECT_BYTES", most)
        assert [
            table["sequence"].to_pylist()
            for table in row_collection.collect_in_order(frame, "timestamp")
        ] == cut
    part = [row_collection.SequenceSpan("jobs", nth, 0, 999, 1) for nth in range(1, 5001)]
    assert [
        row["sequence"]
        for row in frame.where(row_collection._is_within(part)).orderBy("sequence").collect()
    ] == [
        1,
        3,
    ]
    part = [
        row_collection.SequenceSpan("before", 9, 7, 7, 1),
        row_collection.SequenceSpan("jobs", 0, 0, 999, 1),
        row_collection.SequenceSpan("jobs", 1, 0, 1, 1),
    ]
    assert [
        row["sequence"]
        for row in frame.where(row_collection._is_within(part)).orderBy("sequence").collect()
    ] == [
        1,
        2,
    ]


def test_archive_of_messages_and_dead_letters_is_read_with_the_columns_of_both(
    spark: SparkSession, dead_letter_frame: DataFrame, tmp_path: Path
) -> None:
    table = tables.open_table(tmp_path)
    table.add_batch(
        "work", 0, archive.archive_rows(spark.createDataFrame([message(1, "a")], MESSAGES))
    )
    table.add_batch("dead", 0, archive.archive_rows(dead_letter_frame))
    assert {row["reason"] for row in table.read(spark).collect()} == {
        None,
        "rejected",
        "max_retries",
        "timeout",
    }
