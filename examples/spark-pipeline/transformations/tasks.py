"""Tables and flows of the pipeline. SLUICE_URL names the broker."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()


@dp.table
def tasks() -> DataFrame:
    """Return each message of the queue once; the broker's group follows."""
    queue = {"subscribe": "tasks/image", "group": "declarative"}
    messages = spark.readStream.format("sluice").options(**queue).load()
    return messages.selectExpr("cast(value AS string) AS text", "key", "partition", "timestamp")


@dp.materialized_view
def tasks_by_partition() -> DataFrame:
    return spark.read.table("tasks").groupBy("partition").count()


dp.create_sink("finished", "sluice", {"queue": "tasks/finished"})


@dp.append_flow(target="finished")
def finish() -> DataFrame:
    """Write a message for each row, once."""
    return spark.readStream.table("tasks").selectExpr("upper(text) AS value", "key")
