"""The source inside a real Spark: found by its name, SQL over it, streams with a checkpoint, errors as users see."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from tests.spark.conftest import House

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


async def test_dead_letters_are_a_table(spark: SparkSession, house: House) -> None:
    house.make()
    await house.reject(b'{"size": "12 MB"}')
    await house.reject(b'{"size": "9 MB"}')
    letters = house.load(spark, subscribe=f"dlq/{house.queue}", includeHeaders="true")
    assert letters.columns[:3] == ["key", "value", "queue"]
    assert {"headers", "reason", "original_queue", "dead_at"} <= set(letters.columns)
    found = letters.groupBy("original_queue", "reason", "description").count().collect()
    assert [tuple(row) for row in found] == [(house.queue, "rejected", "no good", 2)]
    # Repaired in SQL and put back.
    letters.createOrReplaceTempView("letters")
    spark.sql(
        "SELECT original_queue || '/fixed' AS queue, replace(cast(value AS string), ' MB', '') AS value FROM letters"
    ).write.format("sluice").option("url", house.url).mode("append").save()
    assert sorted(house.values(subscribe=f"{house.queue}/fixed")) == ['{"size": "12"}', '{"size": "9"}']


def test_filters_and_columns_bound_what_is_fetched(spark: SparkSession, house: House) -> None:
    house.make(partitions=2)
    house.fill([f"{nth}" for nth in range(50)])
    reading = spark.read.format("sluice").options(**house.options(pushdown="true", minPartitions="2"))
    reading = reading.schema("value binary, partition int, sequence bigint")
    spark.conf.set(PUSHDOWN, "true")
    try:
        found = reading.load().where("partition = 1 AND sequence >= 5 AND sequence < 8")
        assert sorted(row.sequence for row in found.collect()) == [5, 6, 7]
        assert reading.load().where("sequence = 5 AND partition = 0").rdd.getNumPartitions() == 1
        assert reading.load().rdd.getNumPartitions() == 2
        assert house.load(spark, pushdown="true").where("timestamp > '2100-01-01'").count() == 0
    finally:
        spark.conf.unset(PUSHDOWN)
    assert house.load(spark, minPartitions="6").rdd.getNumPartitions() >= 5


def test_a_frame_stays_what_it_was_at_its_first_action(spark: SparkSession, house: House) -> None:
    house.fill(["a", "b"])
    frame = house.load(spark)
    assert frame.count() == 2
    house.fill(["c"])
    assert (frame.count(), house.load(spark).count()) == (2, 3)


def test_a_stream_to_a_table_goes_on_after_a_restart_and_the_group_follows(
    spark: SparkSession, house: House, tmp_path: Path
) -> None:
    house.make(partitions=2)
    table, checkpoint = str(tmp_path / "table"), str(tmp_path / "checkpoint")
    for round_number in range(2):
        house.fill([f"{nth}" for nth in range(round_number * 10, round_number * 10 + 10)])
        query = (
            house.stream(spark, group="archive", maxOffsetsPerTrigger="6")
            .writeStream.format("parquet")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start(table)
        )
        query.awaitTermination()
        assert [progress.numInputRows for progress in query.recentProgress if progress.numInputRows] == [6, 4]
        # The last batch included: lag in the metrics, and the messages are let go.
        assert (house.lag("archive"), house.depth()) == (0, 0)
    values = [
        int(row.value) for row in spark.read.parquet(table).selectExpr("cast(value AS string)").collect()
    ]
    assert sorted(values) == list(range(20))


def test_a_running_stream_reports_and_stops(spark: SparkSession, house: House, tmp_path: Path) -> None:
    house.make()
    house.fill(["a", "b"])
    query = (
        house.stream(spark, group="g")
        .writeStream.format("memory")
        .queryName(house.queue)
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    try:
        query.processAllAvailable()
        assert spark.table(house.queue).count() == 2
        house.fill(["c"])
        query.processAllAvailable()
        assert sorted(bytes(row.value) for row in spark.table(house.queue).collect()) == [b"a", b"b", b"c"]
        progress = query.lastProgress
        assert progress is not None
        assert f'"{house.queue}": {{"0": 3}}' in str(progress["sources"][0]["latestOffset"])
    finally:
        query.stop()


def test_a_failing_stream_tells_what_to_do(spark: SparkSession, house: House, tmp_path: Path) -> None:
    house.make()
    house.fill(["a", "b"])
    options = {"startingOffsets": f'{{"{house.queue}": {{"0": 0}}}}'}
    house.door.advance(house.queue, "other", {0: 1}, create=True)
    query = (
        house.stream(spark, **options)
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match=r"is kept from 1 on.*failOnDataLoss=false"):
        query.awaitTermination()


def test_a_stream_knows_from_its_checkpoint_that_its_queue_was_made_again(
    spark: SparkSession, house: House, tmp_path: Path
) -> None:
    table, checkpoint = str(tmp_path / "table"), str(tmp_path / "checkpoint")

    def run(**options: str) -> None:
        query = (
            house.stream(spark, group="g", **options)
            .selectExpr("cast(value AS string)")
            .writeStream.format("parquet")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start(table)
        )
        query.awaitTermination()

    house.make()
    house.fill(["a", "b"])
    run()
    assert house.api.delete(f"/queues/{house.queue}?force=true").is_success
    house.make()
    house.fill(["c", "d", "e"])
    with pytest.raises(StreamingQueryException, match=r"deleted and made again.*new checkpointLocation"):
        run()
    assert house.depth() == 3
    run(failOnDataLoss="false")
    assert sorted(row.value for row in spark.read.parquet(table).collect()) == ["a", "b", "c", "d", "e"]
    assert house.lag("g") == 0
