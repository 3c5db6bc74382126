"""Start a Spark session with the settings that Sluice needs. Any other session works as well."""

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

# All cores, and three attempts per task: plain local[*] fails at the first error.
DEFAULT_MASTER: Final = "local[*,3]"
LOOPBACK: Final = "127.0.0.1"
# Arrow allocates a batch of 8 MB as one buffer. The default netty chunks of 4 MiB are too small for
# it, so netty would request each such buffer from the system, page by page. Chunks of 16 MiB are
# pooled and reused.
NETTY_CHUNK_OPTION: Final = "-Dio.netty.allocator.maxOrder=11"
REMOTE_PREFIX: Final = "sc://"
HEARTBEAT_TIMEOUT_SETTING: Final = "spark.storage.blockManagerHeartbeatTimeoutMs"
HEARTBEAT_TIMEOUT_MILLISECONDS: Final = 30 * 86_400_000
# Set by spark-submit, which started this process; Java is already running.
GATEWAY_PORT_VARIABLE: Final = "PYSPARK_GATEWAY_PORT"


def settings_for(master: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a session. `given` overrides the defaults."""
    # The progress bar overwrites the output of the program.
    merged = {"spark.ui.showConsoleProgress": "false"}
    if master.startswith("local"):
        # A local driver has no executors, so no other host connects to it; the host name may not
        # resolve.
        merged |= {"spark.driver.host": LOOPBACK, "spark.driver.bindAddress": LOOPBACK}
        merged["spark.driver.defaultJavaOptions"] = NETTY_CHUNK_OPTION
        # Driver and executor are one process: if it did not run for a while (a suspended machine),
        # neither must conclude that the other one is gone.
        merged[HEARTBEAT_TIMEOUT_SETTING] = str(HEARTBEAT_TIMEOUT_MILLISECONDS)
    return {**merged, **given}


def session(app: str = "sluice", master: str = "", **settings: str) -> SparkSession:
    """Start Spark, or return the running session, which becomes that of the calling thread.

    A thread that writes to a queue, or starts a stream into one, must call this first: Java finds
    Python sources by the session of the thread, and a new thread has none.

    A master such as sc://host:15002 is a server of Spark Connect, where Sluice must be installed.
    `settings` are Spark's own: `session(**{"spark.executor.memory": "4g"})`. Under spark-submit the
    master comes from spark-submit.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise InvalidOption("pyspark is not installed", "pip install 'sluice[spark]'") from None
    if master.startswith(REMOTE_PREFIX):
        return _connect(app, master, settings)
    # The default of the executors is the first python3 on the PATH, which may not have pyarrow.
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
        # Otherwise Spark starts with two warnings about host names.
        os.environ.setdefault("SPARK_LOCAL_IP", LOOPBACK)
    is_running = SparkSession._instantiatedSession is not None
    is_new = chosen.startswith("local") and not is_running
    all_settings = {**(unix_socket_settings() if is_new else {}), **settings_for(chosen, settings)}
    for name, value in (settings if is_running else all_settings).items():
        builder = builder.config(name, value)
    if not is_new:
        return _activate(preset_stream_variables(builder.getOrCreate()))
    with spark_home_without_zip():
        return preset_stream_variables(builder.getOrCreate())


def _connect(app: str, url: str, settings: Mapping[str, str]) -> SparkSession:
    """Return a session on a server of Spark Connect, which runs Java."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app).remote(url)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        return builder.getOrCreate()
    except (ImportError, PySparkException) as fault:
        raise InvalidOption(
            f"master is {url}, and that does not work: {fault}",
            "Install what Spark Connect needs: pip install 'pyspark[connect]'; then see whether the"
            " server runs there. A running session of Java in this process must be stopped first",
        ) from None


def _activate(spark: SparkSession) -> SparkSession:
    """Make a session that of the calling thread in Java, and return it."""
    java_session = getattr(spark, "_jsparkSession", None)  # a session of Spark Connect has none
    if java_session is not None:
        java_session.setActiveSession(java_session)
    return spark
