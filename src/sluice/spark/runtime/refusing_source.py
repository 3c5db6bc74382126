"""The format `sluice` for a PySpark that it does not work with: each use says so."""

from __future__ import annotations

import pyspark
from pyspark.sql.datasource import DataSource

from sluice.spark.runtime.spark_version import version_error


class RefusingSource(DataSource):
    def __init__(self, options: dict[str, str]) -> None:
        error = version_error(pyspark.__version__)
        assert error is not None
        raise error

    @classmethod
    def name(cls) -> str:
        return "sluice"
