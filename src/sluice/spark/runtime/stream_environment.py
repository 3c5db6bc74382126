"""Work around a race between streams that start at the same moment in one Spark session.

Each stream writes four variables for its Python process into one Java map. The map belongs to the
source, and all streams of a session share it. Two concurrent writes can leave the map with a wrong
size; from then on every task fails with "Task not serializable", even after a restart of the
stream. Overwriting an existing name does not change the size, so this module inserts the names
before any stream starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The variables that Spark's StreamingPythonRunner sets; it assigns their values each time.
VARIABLE_NAMES: Final = (
    "SPARK_LOCAL_DIRS",
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_PYTHON_RUNTIME",
)


def preset_stream_variables(spark: SparkSession) -> SparkSession:
    """Insert the stream variables into the Java map and return the same session.

    This uses internals of Spark. If they differ in another version, the function does nothing.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]

    try:
        sources = spark._jsparkSession.sessionState().dataSourceManager()
        variables = sources.lookupDataSource("sluice").dataSourceCls().envVars()
        for name in VARIABLE_NAMES:
            variables.putIfAbsent(name, "")
    except (Py4JError, AttributeError, TypeError):
        pass
    return spark
