"""Register the format `sluice` with Spark, which imports each top-level `pyspark_*` module.

Spark takes its `DefaultSource`, so `spark.read.format("sluice")` needs no registration. The code is
in `sluice.spark`.
"""

from sluice.spark.source.data_source import SluiceSource as DefaultSource

__all__ = ["DefaultSource"]
