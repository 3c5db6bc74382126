"""Writing: what a queue takes, and that a batch counts once. Without Java where Java adds nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from sluice.units import parse_duration
from sluice.queues.bulk.bulk_ops import ONCE
from sluice.spark.source.columns import check_written
from sluice.spark.errors import InvalidOption, Refused
from sluice.spark.source import SluiceSource
from sluice.spark.source.sink import STAGE_BYTES, commit_stages, stage_rows
from tests.support.broker_process import StartBroker
from tests.spark.conftest import House


def batches(*values: bytes) -> Iterator[pa.RecordBatch]:
    """Of one row each, with a column too many."""
    for value in values:
        yield pa.record_batch({"value": [value], "more": [1]})


@pytest.mark.usefixtures("spark")  # it reads the schemas
@pytest.mark.parametrize(
    ("schema", "options", "told"),
    [
        ("value string", {}, "which queue the rows are for. Give the option queue, or a column queue"),
        ("payload string, queue string", {}, r"no place for the column 'payload'.*to_json"),
        ("key string", {"queue": "q"}, "no column value"),
        ("value struct<a: int>", {"queue": "q"}, r"column value is struct<a:int>.*to_json\(value\)"),
        ("value string, priority string", {"queue": "q"}, r"column priority is string. Make it int: cast"),
        ("value string", {"topic": "q"}, r"nobody knows the option 'topic' when writing to a queue.*queue"),
        ("value string", {"queue": "q", "txnAppId": "a"}, "Give both|numbers its batches by itself"),
        ("value string", {"queue": "q", "path": "tasks"}, r"was given 'tasks'.*option\(\"queue\""),
    ],
)
def test_rows_that_cannot_be_messages_are_refused_before_anything_runs(
    schema: str, options: dict[str, str], told: str, house: House
) -> None:
    source, kind = SluiceSource({"url": house.url, **options}), StructType.fromDDL(schema)
    assert isinstance(kind, StructType)
    for write in (source.writer, source.streamWriter):
        with pytest.raises(InvalidOption, match=told):
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
def test_the_cure_of_a_column_is_one_that_spark_takes(
    column: str, expression: str, spark: SparkSession
) -> None:
    rest = [] if column == "value" else ["'v' AS value"]
    frame = spark.range(1).selectExpr(f"{expression} AS {column}", *rest)
    with pytest.raises(InvalidOption, match=f"column {column} is") as refused:
        check_written(frame.schema, "q")
    cure = refused.value.do.rpartition(": ")[2]
    cured = frame.selectExpr(f"{cure} AS {column}", *(["value"] if rest else []))
    assert column in check_written(cured.schema, "q")
    row = cured.first()
    assert row is not None
    if column == "delay":
        assert parse_duration(row.delay) == 5.0


def test_a_task_sends_its_rows_in_pieces_and_nothing_shows_before_the_commit(house: House) -> None:
    house.make()
    values = [bytes([65 + nth]) * (STAGE_BYTES // 10) for nth in range(11)] + [b""]
    staged = stage_rows(house.where, "pieces", 0, house.queue, ["value"], batches(*values))
    assert (len(staged.stages), staged.rows) == (2, 12)
    assert house.values() == []
    commit_stages(house.where, "pieces", 0, [staged, None])
    assert house.values() == [value.decode() for value in values]
    again = stage_rows(house.where, "pieces", 0, house.queue, ["value"], batches(b"again"))
    commit_stages(house.where, "pieces", 0, [again])
    assert len(house.values()) == 12


def test_a_batch_that_is_too_large_says_how_to_make_smaller_ones(start_broker: StartBroker) -> None:
    house = House(start_broker("[bulk]\nmax_batch_bytes = 1000000\n"), "q")
    with pytest.raises(Refused, match=r"maxBytesPerTrigger.*bulk.max_batch_bytes"):
        stage_rows(house.where, "large", 0, "q", ["value"], batches(b"x" * 2_000_000))
    house.close()


def job(house: House, queue: str, version: int, value: bytes, name: str = "") -> None:
    """A batch write with a name and a number, as Spark runs it."""
    given = {"url": house.url, "txnAppId": name or f"job-{house.queue}", "txnVersion": f"{version}"}
    row = {"value": [value]} if queue else {"value": [value], "queue": [house.queue]}
    fields = [StructField(column, BinaryType() if column == "value" else StringType()) for column in row]
    writer = SluiceSource({**given, "queue": queue}).writer(StructType(fields), False)
    writer.commit([writer.write(iter([pa.record_batch(row)]))])


def test_a_named_write_counts_once_in_each_queue(house: House) -> None:
    one, two = f"{house.queue}/one", f"{house.queue}/two"
    for queue in (one, two, "", one, two, ""):
        job(house, queue, 7, queue.encode())
    assert (house.values(subscribe=one), house.values(subscribe=two), house.values()) == ([one], [two], [""])
    job(house, one, 8, b"next")
    job(house, one, 7, b"late")
    assert house.values(subscribe=one) == [one, "next"]
    for length in (250, 300):
        for version in (1, 1, 2):
            job(house, two, version, b"%d" % length, "x" * length)
    assert house.values(subscribe=two) == [two, "250", "250", "300", "300"]


def test_a_named_write_of_before_each_queue_had_a_name_is_known(house: House) -> None:
    """The broker has the number of its last batch under the name of the job alone."""
    name = f"job-{house.queue}"
    staged = stage_rows(house.where, name, 7, house.queue, ["value"], batches(b"before"))
    commit_stages(house.where, name, 7, [staged])
    for version in (6, 7, 8):
        job(house, house.queue, version, b"%d" % version)
    assert house.values() == ["before", "8"]


def test_a_stream_refuses_to_be_named_as_a_batch_write_is(house: House) -> None:
    given = {"url": house.url, "queue": "q", "txnAppId": "a", "txnVersion": "1"}
    with pytest.raises(InvalidOption, match=r"numbers its batches by itself.*Leave them out"):
        SluiceSource(given).streamWriter(StructType([StructField("value", BinaryType())]), False)


def test_a_name_that_would_be_forgotten_after_a_day_is_refused(house: House) -> None:
    with pytest.raises(InvalidOption, match=r"txnAppId is 'once/job'.*Give another one"):
        job(house, house.queue, 1, b"x", "once/job")


def test_a_batch_that_came_too_late_says_why_and_what_helps(house: House) -> None:
    staged = stage_rows(house.where, "late", 0, house.queue, ["value"], batches(b"x"))
    house.door.abort("late", 0)
    with pytest.raises(Refused, match=r"bulk.stage_ttl\. So start the query again.*raise that"):
        commit_stages(house.where, "late", 0, [staged])


def test_every_column_of_a_message_arrives(spark: SparkSession, house: House) -> None:
    house.make()
    other = f"{house.queue}/other"
    rows = [
        ("a", b"k", None, {"colour": b"red"}, None, 3, "id-1"),
        ("b", None, other, None, "1h", None, None),
        ("c", None, "", None, None, None, "id-1"),  # seen lately: left out, as a repeated publish is
    ]
    frame = spark.createDataFrame(
        rows,
        "value string, key binary, queue string, headers map<string,binary>, delay string, priority int,"
        " message_id string",
    ).coalesce(1)
    frame = frame.selectExpr(
        "*", "1 AS partition", "current_timestamp() AS timestamp"
    )  # ours, and of no use here
    named = frame.selectExpr("* except(queue)", f"coalesce(nullif(queue, ''), '{house.queue}') AS queue")
    write(named, house)
    [first] = house.read(includeHeaders="true")
    assert (first["value"], first["key"], first["message_id"]) == (b"a", b"k", "id-1")
    assert dict(first["headers"])["colour"] == b"red"
    assert dict(first["headers"])["priority"] == b"3"
    [second] = house.read(subscribe=other, includeHeaders="true")
    assert dict(second["headers"])["delay"] == b"1h"
    # The option goes before the column.
    write(named.where("value = 'b'").drop("delay"), house, queue=house.queue)
    assert house.values() == ["a", "b"]


def write(frame: DataFrame, house: House, **options: str) -> None:
    frame.write.format("sluice").options(url=house.url, **options).mode("append").save()


def test_a_write_without_a_name_is_remembered_for_a_day_and_one_with_a_name_longer(house: House) -> None:
    for options, is_once in (({}, True), ({"txnAppId": "job", "txnVersion": "7"}, False)):
        source = SluiceSource({"url": house.url, "queue": "q", **options})
        writer = source.writer(StructType([StructField("value", StringType())]), overwrite=False)
        assert writer._app.startswith(ONCE) == is_once


def test_a_batch_write_is_all_or_nothing_and_counts_once_if_it_is_named(
    spark: SparkSession, house: House
) -> None:
    house.make()
    frame = spark.range(20).selectExpr("cast(id AS string) AS value").repartition(2)
    bad = frame.selectExpr("CASE WHEN value = '13' THEN raise_error('no luck') ELSE value END AS value")
    with pytest.raises(Exception, match="no luck"):
        write(bad, house, queue=house.queue)
    assert house.values() == []
    for _ in range(2):
        write(frame, house, queue=house.queue, txnAppId=f"job-{house.queue}", txnVersion="7")
    assert sorted(house.values(), key=int) == [f"{nth}" for nth in range(20)]
    write(frame, house, queue=house.queue)
    write(frame, house, queue=house.queue)
    assert len(house.values()) == 60


def test_a_micro_batch_that_is_run_again_is_stored_once(
    spark: SparkSession, house: House, tmp_path: Path
) -> None:
    """The crash between the sink's commit and Spark's own: its mark that the batch is done is taken away."""
    target = f"{house.queue}/to"
    house.make(partitions=2)
    house.door.advance(
        house.queue, "keeps", {}, create=True
    )  # the group of Spark is further than its mark then
    house.fill([f"{nth}" for nth in range(10)])

    def run() -> None:
        stream = house.stream(spark, group="g", maxOffsetsPerTrigger="6").select("value", "key")
        query = (
            stream.writeStream.format("sluice")
            .options(url=house.url, queue=target, checkpointLocation=str(tmp_path))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run()
    assert house.lag("g") == 0
    marks = sorted((tmp_path / "commits").glob("[0-9]*"), key=lambda mark: int(mark.name))
    for mark in (marks[-1], marks[-1].with_name(f".{marks[-1].name}.crc")):
        mark.unlink(missing_ok=True)
    house.fill(["new"])
    run()
    assert sorted(house.values(subscribe=target)) == sorted([*(f"{nth}" for nth in range(10)), "new"])
