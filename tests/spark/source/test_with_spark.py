"""The source inside a real Spark: found by name, SQL, streams with checkpoints, errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession

from sluice.spark import session
from tests.spark.conftest import SparkHarness

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


async def test_dead_letters_are_a_table(spark: SparkSession, harness: SparkHarness) -> None:
    harness.make()
    await harness.reject(b'{"size": "12 MB"}')
    await harness.reject(b'{"size": "9 MB"}')
    dead_letters = harness.load(spark, subscribe=f"dlq/{harness.queue}", includeHeaders="true")
    assert dead_letters.columns[:3] == ["key", "value", "queue"]
    assert {"headers", "reason", "original_queue", "dead_at"} <= set(dead_letters.columns)
    found = dead_letters.groupBy("original_queue", "reason", "description").count().collect()
    assert [tuple(row) for row in found] == [(harness.queue, "rejected", "no good", 2)]
    # Repaired in SQL and put back.
    dead_letters.createOrReplaceTempView("dead")
    spark.sql(
        "SELECT original_queue || '/fixed' AS queue,"
        " replace(cast(value AS string), ' MB', '') AS value FROM dead"
    ).write.format("sluice").option("url", harness.url).mode("append").save()
    assert sorted(harness.values(subscribe=f"{harness.queue}/fixed")) == [
        '{"size": "12"}',
        '{"size": "9"}',
    ]


def test_filter_of_one_query_does_not_change_another_on_the_same_data_frame(
    spark: SparkSession, harness: SparkHarness
) -> None:
    """Spark plans a Python source once for each load(), so a pushed-down filter would stay."""
    harness.make(partitions=2)
    harness.fill([f"{nth}" for nth in range(50)])
    spark.conf.set(PUSHDOWN, "true")
    try:
        frame = harness.load(spark, minPartitions="2")
        second = frame.where("partition = 1").count()
        assert 0 < second < 50
        assert (frame.where("partition = 0").count(), frame.count()) == (50 - second, 50)
        assert frame.where("sequence < 2").union(frame.where("sequence >= 2")).count() == 50
        assert frame.where("timestamp > '2100-01-01'").count() == 0
    finally:
        spark.conf.unset(PUSHDOWN)


def test_view_in_sql_is_read_and_inserted_into(spark: SparkSession, harness: SparkHarness) -> None:
    harness.make()
    harness.fill(["a", "b"])
    where = f"url '{harness.url}', subscribe '{harness.queue}', queue '{harness.queue}'"
    spark.sql(f"CREATE TEMPORARY VIEW sql_messages USING sluice OPTIONS ({where})")
    try:
        [row] = spark.sql("SELECT count(*) AS messages FROM sql_messages").collect()
        spark.sql("INSERT INTO sql_messages (value, key) VALUES (cast('c' AS binary), NULL)")
        assert (row.messages, sorted(harness.values())) == (2, ["a", "b", "c"])
    finally:
        spark.catalog.dropTempView("sql_messages")
    with pytest.raises(PySparkException, match=r"table of the catalog.*TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE sql_messages USING sluice OPTIONS ({where})")


def test_thread_that_has_called_session_writes_to_a_queue(
    spark: SparkSession, harness: SparkHarness
) -> None:
    harness.make()
    frame = spark.createDataFrame([("a",)], "value string")

    def write() -> None:
        assert session() is spark
        writing = frame.write.format("sluice").options(url=harness.url, queue=harness.queue)
        writing.mode("append").save()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(write).result()
    assert harness.values() == ["a"]


def test_schema_and_min_partitions_shape_a_read(spark: SparkSession, harness: SparkHarness) -> None:
    harness.make(partitions=2)
    harness.fill([f"{nth}" for nth in range(50)])
    reading = spark.read.format("sluice").options(**harness.options(minPartitions="6"))
    frame = reading.schema("value binary, partition int").load()
    assert frame.columns == ["value", "partition"]
    assert (frame.rdd.getNumPartitions() >= 5, frame.count()) == (True, 50)


def test_data_frame_is_fixed_at_its_first_action(
    spark: SparkSession, harness: SparkHarness
) -> None:
    harness.fill(["a", "b"])
    frame = harness.load(spark)
    assert frame.count() == 2
    harness.fill(["c"])
    assert (frame.count(), harness.load(spark).count()) == (2, 3)


def test_stream_to_a_table_resumes_after_a_restart_and_the_group_follows(
    spark: SparkSession, harness: SparkHarness, tmp_path: Path
) -> None:
    harness.make(partitions=2)
    table, checkpoint = str(tmp_path / "table"), str(tmp_path / "checkpoint")
    for round_number in range(2):
        harness.fill([f"{nth}" for nth in range(round_number * 10, round_number * 10 + 10)])
        query = (
            harness.stream(spark, group="archive", maxOffsetsPerTrigger="6")
            .writeStream.format("parquet")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start(table)
        )
        query.awaitTermination()
        assert [
            progress.numInputRows for progress in query.recentProgress if progress.numInputRows
        ] == [6, 4]
        # Including the last batch: the metrics show no lag, and the messages are deleted.
        assert (harness.lag("archive"), harness.depth()) == (0, 0)
    values = [
        int(row.value)
        for row in spark.read.parquet(table).selectExpr("cast(value AS string)").collect()
    ]
    assert sorted(values) == list(range(20))


def test_running_stream_reports_progress_and_stops(
    spark: SparkSession, harness: SparkHarness, tmp_path: Path
) -> None:
    harness.make()
    harness.fill(["a", "b"])
    query = (
        harness.stream(spark, group="g")
        .writeStream.format("memory")
        .queryName(harness.queue)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        query.processAllAvailable()
        assert spark.table(harness.queue).count() == 2
        harness.fill(["c"])
        query.processAllAvailable()
        assert sorted(bytes(row.value) for row in spark.table(harness.queue).collect()) == [
            b"a",
            b"b",
            b"c",
        ]
        progress = query.lastProgress
        assert progress is not None
        assert f'"{harness.queue}": {{"0": 3}}' in str(progress["sources"][0]["latestOffset"])
    finally:
        query.stop()


def test_failing_stream_error_has_a_remedy(
    spark: SparkSession, harness: SparkHarness, tmp_path: Path
) -> None:
    harness.make()
    harness.fill(["a", "b"])
    options = {"startingOffsets": f'{{"{harness.queue}": {{"0": 0}}}}'}
    harness.bulk_client.advance(harness.queue, "other", {0: 1}, create=True)
    query = (
        harness.stream(spark, **options)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match=r"is kept from 1 on.*failOnDataLoss=false"):
        query.awaitTermination()


def test_stream_detects_a_recreated_queue_from_its_checkpoint(
    spark: SparkSession, harness: SparkHarness, tmp_path: Path
) -> None:
    table, checkpoint = str(tmp_path / "table"), str(tmp_path / "checkpoint")

    def run(**options: str) -> None:
        query = (
            harness.stream(spark, group="g", **options)
            .selectExpr("cast(value AS string)")
            .writeStream.format("parquet")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start(table)
        )
        query.awaitTermination()

    harness.make()
    harness.fill(["a", "b"])
    run()
    assert harness.api.delete(f"/queues/{harness.queue}?force=true").is_success
    harness.make()
    harness.fill(["c", "d", "e"])
    with pytest.raises(
        StreamingQueryException, match=r"deleted and made again.*new checkpointLocation"
    ):
        run()
    assert harness.depth() == 3
    run(failOnDataLoss="false")
    assert sorted(row.value for row in spark.read.parquet(table).collect()) == [
        "a",
        "b",
        "c",
        "d",
        "e",
    ]
    assert harness.lag("g") == 0
