"""Writing: what a queue accepts, and that a batch counts once. Without Java where possible."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from sluice.queues.bulk.batches import ONCE_APP_PREFIX
from sluice.spark.errors import InvalidOption, Refused
from sluice.spark.source.columns import check_write_schema
from sluice.spark.source.data_source import SluiceSource
from sluice.spark.source.sink import STAGE_BYTES, commit_stages, stage_rows
from sluice.spark.source.source_options import write_options
from sluice.units import parse_duration
from tests.spark.conftest import SparkHarness
from tests.support.broker_process import StartBroker


def batches(*values: bytes) -> Iterator[pa.RecordBatch]:
    """Return batches of one row each, with a column too many."""
    for value in values:
        yield pa.record_batch({"value": [value], "more": [1]})


@pytest.mark.usefixtures("spark")  # needed to parse the schemas
@pytest.mark.parametrize(
    ("schema", "options", "expected"),
    [
        (
            "value string",
            {},
            "which queue the rows are for. Give the option queue, or a column queue",
        ),
        ("payload string, queue string", {}, r"no place for the column 'payload'.*to_json"),
        ("key string", {"queue": "q"}, "no column value"),
        (
            "value struct<a: int>",
            {"queue": "q"},
            r"column value is struct<a:int>.*to_json\(value\)",
        ),
        (
            "value string, priority string",
            {"queue": "q"},
            r"column priority is string. Make it int: cast",
        ),
        (
            "value string",
            {"topic": "q"},
            r"there is no option 'topic' for writing to a queue.*queue",
        ),
        (
            "value string",
            {"queue": "q", "txnAppId": "a"},
            "Give both|numbers its batches by itself",
        ),
        ("value string", {"queue": "q", "path": "tasks"}, r"was given 'tasks'.*option\(\"queue\""),
    ],
)
def test_rows_that_cannot_be_messages_are_refused_before_anything_runs(
    schema: str, options: dict[str, str], expected: str, harness: SparkHarness
) -> None:
    source, kind = SluiceSource({"url": harness.url, **options}), StructType.fromDDL(schema)
    assert isinstance(kind, StructType)
    for write in (source.writer, source.streamWriter):
        with pytest.raises(InvalidOption, match=expected):
            write(kind, False)
        with pytest.raises(InvalidOption, match=r"cannot be overwritten.*append"):
            write(kind, True)


@pytest.mark.parametrize(
    ("column", "expression"),
    [
        ("value", "7"),
        ("value", "1.5D"),
        ("value", "named_struct('a', 1)"),
        ("key", "7"),
        ("key", "current_date()"),
        ("delay", "5"),
        ("headers", "map('a', 1)"),
        ("headers", "map(1, 1.5D)"),
        ("priority", "'3'"),
        ("message_id", "7"),
    ],
)
def test_suggested_cast_of_a_column_is_valid_in_spark(
    column: str, expression: str, spark: SparkSession
) -> None:
    rest = [] if column == "value" else ["'v' AS value"]
    frame = spark.range(1).selectExpr(f"{expression} AS {column}", *rest)
    with pytest.raises(InvalidOption, match=f"column {column} is") as refused:
        check_write_schema(frame.schema, "q")
    remedy = refused.value.remedy.rpartition(": ")[2]
    converted = frame.selectExpr(f"{remedy} AS {column}", *(["value"] if rest else []))
    assert column in check_write_schema(converted.schema, "q")
    row = converted.first()
    assert row is not None
    if column == "delay":
        assert parse_duration(row.delay) == 5.0


def test_task_sends_its_rows_in_parts_that_are_invisible_before_commit(
    harness: SparkHarness,
) -> None:
    harness.make()
    values = [bytes([65 + nth]) * (STAGE_BYTES // 10) for nth in range(11)] + [b""]
    staged = stage_rows(harness.where, "pieces", 0, harness.queue, ["value"], batches(*values))
    assert (len(staged.stages), staged.rows) == (2, 12)
    assert harness.values() == []
    commit_stages(harness.where, "pieces", 0, [staged, None])
    assert harness.values() == [value.decode() for value in values]
    again = stage_rows(harness.where, "pieces", 0, harness.queue, ["value"], batches(b"again"))
    commit_stages(harness.where, "pieces", 0, [again])
    assert len(harness.values()) == 12


def test_write_creates_the_queue_with_the_given_settings(harness: SparkHarness) -> None:
    settings = '{"partitions": 3, "limits": {"max_queue_depth": 7}}'
    schema = StructType([StructField("value", StringType())])

    def write_rows(count: int, create: str = settings) -> None:
        options = {"url": harness.url, "queue": harness.queue, "createOptions": create}
        writer = SluiceSource(options).writer(schema, overwrite=False)
        app = writer._app
        values = [b"x"] * count
        staged = stage_rows(harness.where, app, 0, harness.queue, ["value"], batches(*values))
        writer.commit([staged])

    write_rows(2)
    write_rows(1, '{"partitions": 5}')  # it exists by then, and keeps its settings
    parts = harness.api.get(f"/queues/{harness.queue}").json()["partitions"]
    assert (len(parts), harness.depth()) == (3, 3)
    with pytest.raises(Refused, match="max_queue_depth"):
        write_rows(5)
    harness.api.delete(f"/queues/{harness.queue}?force=true")
    with pytest.raises(Refused, match="partitons"):
        write_rows(1, '{"partitons": 2}')
    for create in ("[]", "{"):
        with pytest.raises(InvalidOption, match=r"option createOptions.*Give JSON"):
            write_rows(1, create)
    with pytest.raises(InvalidOption, match=r"each row names its queue.*option queue"):
        write_options({"createOptions": settings}, streaming=False)


def test_oversized_batch_error_explains_how_to_make_smaller_ones(start_broker: StartBroker) -> None:
    harness = SparkHarness(start_broker("[bulk]\nmax_batch_bytes = 1000000\n"), "q")
    with pytest.raises(Refused, match=r"maxBytesPerTrigger.*bulk.max_batch_bytes"):
        stage_rows(harness.where, "large", 0, "q", ["value"], batches(b"x" * 2_000_000))
    harness.close()


def job(harness: SparkHarness, queue: str, version: int, value: bytes, name: str = "") -> None:
    """Run a batch write with a name and a number, as Spark does."""
    given = {
        "url": harness.url,
        "txnAppId": name or f"job-{harness.queue}",
        "txnVersion": f"{version}",
    }
    row = {"value": [value]} if queue else {"value": [value], "queue": [harness.queue]}
    fields = [
        StructField(column, BinaryType() if column == "value" else StringType()) for column in row
    ]
    writer = SluiceSource({**given, "queue": queue}).writer(StructType(fields), False)
    writer.commit([writer.write(iter([pa.record_batch(row)]))])


def test_named_write_counts_once_in_each_queue(harness: SparkHarness) -> None:
    one, two = f"{harness.queue}/one", f"{harness.queue}/two"
    for queue in (one, two, "", one, two, ""):
        job(harness, queue, 7, queue.encode())
    assert (harness.values(subscribe=one), harness.values(subscribe=two), harness.values()) == (
        [one],
        [two],
        [""],
    )
    job(harness, one, 8, b"next")
    job(harness, one, 7, b"late")
    assert harness.values(subscribe=one) == [one, "next"]
    for length in (250, 300):
        for version in (1, 1, 2):
            job(harness, two, version, b"%d" % length, "x" * length)
    assert harness.values(subscribe=two) == [two, "250", "250", "300", "300"]


def test_named_write_of_an_earlier_version_is_recognized(harness: SparkHarness) -> None:
    """The broker has the number of the last batch under the name of the job alone."""
    name = f"job-{harness.queue}"
    staged = stage_rows(harness.where, name, 7, harness.queue, ["value"], batches(b"before"))
    commit_stages(harness.where, name, 7, [staged])
    for version in (6, 7, 8):
        job(harness, harness.queue, version, b"%d" % version)
    assert harness.values() == ["before", "8"]


def test_stream_refuses_the_name_option_of_batch_writes(harness: SparkHarness) -> None:
    given = {"url": harness.url, "queue": "q", "txnAppId": "a", "txnVersion": "1"}
    with pytest.raises(InvalidOption, match=r"numbers its batches by itself.*Leave them out"):
        SluiceSource(given).streamWriter(StructType([StructField("value", BinaryType())]), False)


def test_name_that_would_be_forgotten_after_a_day_is_refused(harness: SparkHarness) -> None:
    with pytest.raises(InvalidOption, match=r"txnAppId is 'once/job'.*Give another one"):
        job(harness, harness.queue, 1, b"x", "once/job")


def test_batch_that_came_too_late_is_explained_with_a_remedy(harness: SparkHarness) -> None:
    staged = stage_rows(harness.where, "late", 0, harness.queue, ["value"], batches(b"x"))
    harness.bulk_client.abort("late", 0)
    with pytest.raises(Refused, match=r"bulk.stage_ttl\. So start the query again.*raise that"):
        commit_stages(harness.where, "late", 0, [staged])


def test_every_column_of_a_message_is_stored(spark: SparkSession, harness: SparkHarness) -> None:
    harness.make()
    other = f"{harness.queue}/other"
    rows = [
        ("a", b"k", None, {"colour": b"red"}, None, 3, "id-1"),
        ("b", None, other, None, "1h", None, None),
        (
            "c",
            None,
            "",
            None,
            None,
            None,
            "id-1",
        ),  # a duplicate: left out, like a repeated publish
    ]
    frame = spark.createDataFrame(
        rows,
        "value string, key binary, queue string, headers map<string,binary>, delay string,"
        " priority int,"
        " message_id string",
    ).coalesce(1)
    frame = frame.selectExpr(
        "*", "1 AS partition", "current_timestamp() AS timestamp"
    )  # our own columns, ignored here
    named = frame.selectExpr(
        "* except(queue)", f"coalesce(nullif(queue, ''), '{harness.queue}') AS queue"
    )
    write(named, harness)
    [first] = harness.read(includeHeaders="true")
    assert (first["value"], first["key"], first["message_id"]) == (b"a", b"k", "id-1")
    assert dict(first["headers"])["colour"] == b"red"
    assert dict(first["headers"])["priority"] == b"3"
    [second] = harness.read(subscribe=other, includeHeaders="true")
    assert dict(second["headers"])["delay"] == b"1h"
    # The option overrides the column.
    write(named.where("value = 'b'").drop("delay"), harness, queue=harness.queue)
    assert harness.values() == ["a", "b"]


def write(frame: DataFrame, harness: SparkHarness, **options: str) -> None:
    frame.write.format("sluice").options(url=harness.url, **options).mode("append").save()


def test_unnamed_write_is_remembered_for_a_day_and_a_named_one_longer(
    harness: SparkHarness,
) -> None:
    for options, is_once in (({}, True), ({"txnAppId": "job", "txnVersion": "7"}, False)):
        source = SluiceSource({"url": harness.url, "queue": "q", **options})
        writer = source.writer(StructType([StructField("value", StringType())]), overwrite=False)
        assert writer._app.startswith(ONCE_APP_PREFIX) == is_once


def test_batch_write_is_atomic_and_counts_once_if_named(
    spark: SparkSession, harness: SparkHarness
) -> None:
    harness.make()
    frame = spark.range(20).selectExpr("cast(id AS string) AS value").repartition(2)
    bad = frame.selectExpr(
        "CASE WHEN value = '13' THEN raise_error('no luck') ELSE value END AS value"
    )
    with pytest.raises(Exception, match="no luck"):
        write(bad, harness, queue=harness.queue)
    assert harness.values() == []
    for _ in range(2):
        write(frame, harness, queue=harness.queue, txnAppId=f"job-{harness.queue}", txnVersion="7")
    assert sorted(harness.values(), key=int) == [f"{nth}" for nth in range(20)]
    write(frame, harness, queue=harness.queue)
    write(frame, harness, queue=harness.queue)
    assert len(harness.values()) == 60


def test_repeated_micro_batch_is_stored_once(
    spark: SparkSession, harness: SparkHarness, tmp_path: Path
) -> None:
    """Simulate a crash between the sink's commit and Spark's: remove Spark's mark of the batch."""
    target = f"{harness.queue}/to"
    harness.make(partitions=2)
    harness.bulk_client.advance(
        harness.queue, "keeps", {}, create=True
    )  # the group is then ahead of that mark
    harness.fill([f"{nth}" for nth in range(10)])

    def run() -> None:
        stream = harness.stream(spark, group="g", maxOffsetsPerTrigger="6").select("value", "key")
        query = (
            stream.writeStream.format("sluice")
            .options(url=harness.url, queue=target, checkpointLocation=str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    assert harness.lag("g") == 0
    marks = sorted((tmp_path / "commits").glob("[0-9]*"), key=lambda mark: int(mark.name))
    for mark in (marks[-1], marks[-1].with_name(f".{marks[-1].name}.crc")):
        mark.unlink(missing_ok=True)
    harness.fill(["new"])
    run()
    assert sorted(harness.values(subscribe=target)) == sorted(
        [*(f"{nth}" for nth in range(10)), "new"]
    )
