"""Queues as DataFrames: the format `sluice` for Spark, batch and streaming, reading and writing.

    from sluice.spark import session

    spark = session()  # local[*,3]; with a builder of your own, Spark finds the format as well
    dead = spark.read.format("sluice").option("subscribe", "dlq/tasks/image").load()
    dead.groupBy("reason").count().show()

    queue = {"subscribe": "tasks/image", "group": "archive"}
    stream = spark.readStream.format("sluice").options(**queue).load()
    stream.writeStream.option("checkpointLocation", "ckpt").start("images", format="parquet")

    rows = frame.select("value", "key").write.format("sluice").mode("append")
    rows.option("queue", "tasks/image").save()

`url` and `token` are options; the defaults are SLUICE_URL and SLUICE_TOKEN. docs/spark.md describes
all options. `BulkClient` is the bulk API for programs that use it directly:
`BulkClient(Endpoint()).advance(...)` settles a range after a batch job.

Packages: `source` is the data source (readers, writer, offsets, options), `http` is the client of
the bulk API, `runtime` starts Spark and Java, `pipelines` has the jobs that ship with Sluice.
"""

from sluice.http_client import Endpoint
from sluice.spark.http import BulkClient
from sluice.spark.runtime import session

__all__ = ["BulkClient", "Endpoint", "session"]
