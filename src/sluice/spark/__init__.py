"""Queues as DataFrames: the format `sluice` for Spark, batch and streaming, both ways.

    from sluice.spark import session

    spark = session()                                   # local[*,3]; or any builder of your own: Spark finds the format
    letters = spark.read.format("sluice").option("subscribe", "dlq/tasks/image").load()
    letters.groupBy("reason").count().show()

    stream = spark.readStream.format("sluice").option("subscribe", "tasks/image").option("group", "archive").load()
    stream.writeStream.format("parquet").option("checkpointLocation", "ckpt").start("images")

    frame.select("value", "key").write.format("sluice").mode("append").option("queue", "tasks/image").save()

`url` and `token` are options, else SLUICE_URL and SLUICE_TOKEN. All of them: docs/spark.md. `Door` is the bulk door for
programs that need it by itself: `Door(Where()).advance(...)` settles a range after a batch job.

Modules: `source` is what Spark meets; `options`; `reader` (batch), `stream` (streaming) and `rows` (on the executors);
`writer`; `offsets` and `pushdown` decide without I/O; `door` and `line` speak HTTP; `session` and `java` start Spark.
"""

from sluice.spark.http.bulk_client import BulkClient
from sluice.spark.http.http_connection import Endpoint
from sluice.spark.runtime.spark_session import session

__all__ = ["BulkClient", "Endpoint", "session"]
