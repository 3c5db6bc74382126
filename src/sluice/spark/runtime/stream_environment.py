"""Streams that start at the same moment in one Spark.

Each of them notes four variables for its Python process in one Java map, which belongs to the source and which all
streams of a Spark share. Two that do so at once can leave that map with a wrong count of what is in it, and from then
on every task fails with "Task not serializable", however often a stream is started again. Where the names are in the
map already, nothing is counted: so they are put there before any stream is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What Spark's StreamingPythonRunner sets; it gives them their values each time.
VARIABLE_NAMES: Final = (
    "SPARK_LOCAL_DIRS",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_PYTHON_RUNTIME",
)


def preset_stream_variables(spark: SparkSession) -> SparkSession:
    """The same session, whose streams may start together. It is Spark's inside that is reached into: where that looks
    different one day, nothing is done."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        sources = spark._jsparkSession.sessionState().dataSourceManager()
        variables = sources.lookupDataSource("sluice").dataSourceCls().envVars()
        for name in VARIABLE_NAMES:
            variables.putIfAbsent(name, "")
    except (Py4JError, AttributeError, TypeError):
        pass
    return spark
