"""What Spark looks for by itself: it imports the top-level modules named `pyspark_*` and takes their `DefaultSource`.
So `spark.read.format("sluice")` needs no registration; everything is in `sluice.spark`."""

from sluice.spark.source.data_source import SluiceSource as DefaultSource

__all__ = ["DefaultSource"]
