"""HTTP requests of Spark to a broker: offsets, rows, batches."""

from sluice.spark.http.bulk_client import BulkClient, QueueOffsets, average_row_bytes

__all__ = [
    "BulkClient",
    "QueueOffsets",
    "average_row_bytes",
]
