"""Register the format `sluice` with Spark, which imports each top-level `pyspark_*` module.

Spark takes its `DefaultSource`, so `spark.read.format("sluice")` needs no registration. The code is
in `sluice.spark`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyspark

from sluice.spark.runtime.spark_version import version_error

if TYPE_CHECKING or version_error(pyspark.__version__) is None:
    from sluice.spark.source.data_source import SluiceSource as DefaultSource
else:
    from sluice.spark.runtime.refusing_source import RefusingSource as DefaultSource

__all__ = ["DefaultSource"]
