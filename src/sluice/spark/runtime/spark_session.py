"""A Spark session with the settings that Sluice needs and people forget. Any other session works as well."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from sluice.spark.errors import InvalidOption
from sluice.spark.runtime.java import check_java
from sluice.spark.runtime.spark_home import spark_home_without_zip
from sluice.spark.runtime.stream_environment import preset_stream_variables
from sluice.spark.runtime.unix_sockets import unix_socket_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEFAULT_MASTER: Final = (
    "local[*,3]"  # all cores; three tries for a task: plain local[*] gives up at the first failure
)
LOOPBACK: Final = "127.0.0.1"
# Arrow takes a batch of 8 MB as one buffer; netty's pool has chunks of 4 MiB and would take each such buffer from the
# system anew, page by page. With chunks of 16 MiB it is used again.
NETTY_CHUNK_OPTION: Final = "-Dio.netty.allocator.maxOrder=11"
GATEWAY_PORT_VARIABLE: Final = (
    "PYSPARK_GATEWAY_PORT"  # spark-submit has started us, and Java runs already
)


def settings_for(master: str, given: Mapping[str, str]) -> dict[str, str]:
    """The settings of a session; those that are given count."""
    merged = {
        "spark.ui.showConsoleProgress": "false"
    }  # it writes over whatever else a program says
    if master.startswith("local"):
        # Nobody outside has business with a driver that has no executors, and a host name may lead nowhere.
        merged |= {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
        merged["spark.driver.defaultJavaOptions"] = NETTY_CHUNK_OPTION
    return {**merged, **given}


def session(app: str = "sluice", master: str = "", **settings: str) -> SparkSession:
    """Start Spark, or take the session that runs. `settings` are Spark's own:
    `session(**{"spark.executor.memory": "4g"})`. Under spark-submit the master is the one that it was told."""
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise InvalidOption("pyspark is not installed", "pip install 'sluice[spark]'") from None
    # The executors' default is whatever python3 is on the PATH, which has no pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    submitted = GATEWAY_PORT_VARIABLE in os.environ
    if not submitted:
        check_java()
    chosen = master or ("" if submitted else DEFAULT_MASTER)
    builder = SparkSession.builder.appName(app)
    if chosen:
        builder = builder.master(chosen)
    if chosen.startswith("local"):
        os.environ.setdefault(
            "SPARK_LOCAL_IP", LOOPBACK
        )  # else Spark begins with two warnings about names
    is_new = chosen.startswith("local") and SparkSession.getActiveSession() is None
    all_settings = {**(unix_socket_settings() if is_new else {}), **settings_for(chosen, settings)}
    for name, value in all_settings.items():
        builder = builder.config(name, value)
    if not is_new:
        return preset_stream_variables(builder.getOrCreate())
    with spark_home_without_zip():
        return preset_stream_variables(builder.getOrCreate())
