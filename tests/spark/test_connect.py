"""Spark Connect: a server in a process of its own, and a client that has no Java."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pyspark
import pytest

from sluice.spark import session
from sluice.spark.errors import InvalidOption
from tests.spark.conftest import SparkHarness
from tests.support.broker_process import same_build
from tests.support.external_programs import QUICK_JAVA, need_program

SERVER_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
START_SECONDS = 120.0
TIMEOUT_SECONDS = 480  # a dozen Python processes start, on a machine that may be busy
PROGRAM = """
import sys
master, url, queue, folder = sys.argv[1:]
import deltalake
from sluice.spark import Endpoint, session
from sluice.spark.pipelines import archive
from sluice.spark.pipelines.queues import Queues

spark = session(master=master)
rows = spark.createDataFrame([(f"{nth}",) for nth in range(20)], "value string")
rows.write.format("sluice").options(url=url, queue=queue).mode("append").save()


def count(name):
    return spark.read.format("sluice").options(url=url, subscribe=name).load().count()


def stream(group):
    options = {"url": url, "subscribe": queue, "group": group}
    reading = spark.readStream.format("sluice").options(**options).load().select("value", "key")
    writing = reading.writeStream.option("checkpointLocation", f"{folder}/{group}")
    return writing.trigger(availableNow=True)


def store(batch, number):
    batch.createOrReplaceTempView("batch")  # the batch's session is a copy of the query's
    selected = batch.sparkSession.sql("SELECT value FROM batch")
    options = {"url": url, "queue": f"{queue}/batches", "txnAppId": queue, "txnVersion": number}
    selected.write.format("sluice").options(**options).mode("append").save()


assert count(queue) == 20
sink = stream("sink").format("sluice").options(url=url, queue=f"{queue}/sink")
sink.start().awaitTermination()
assert count(f"{queue}/sink") == 20
stream("batches").foreachBatch(store).start().awaitTermination()
assert count(f"{queue}/batches") == 20
query = archive.start(spark, Queues(Endpoint(url)), queue, f"{folder}/archive", once=True)
query.awaitTermination()
assert deltalake.DeltaTable(f"{folder}/archive").to_pyarrow_table().num_rows == 20
spark.stop()
print("finished")
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Start a server of Spark Connect, and yield its address."""
    need_program("java")
    if find_spec("grpc_status") is None:
        pytest.skip("Spark Connect needs the package grpcio-status")
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": QUICK_JAVA,
        "spark.driver.memory": "1g",
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
        "spark.ui.enabled": "false",
    }
    conf = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    submit = str(Path(pyspark.__file__).parent / "bin/spark-submit")
    log = tmp_path / "server.log"
    environ = {**same_build(), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [submit, "--class", SERVER_CLASS, "--master", "local[2,3]", *conf, "spark-internal"],
            stdout=output,
            stderr=output,
            cwd=tmp_path,
            env=environ,
            start_new_session=True,
        )
    try:
        until = time.monotonic() + START_SECONDS
        found = None
        while found is None:
            text = log.read_text()
            found = re.search(r"Connect server started at: (\S+)", text)
            assert time.monotonic() < until and process.poll() is None, text[-3000:]
            time.sleep(0.1)
        yield f"sc://{found[1]}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@pytest.mark.spark
@pytest.mark.own_java
@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_client_of_spark_connect_reads_writes_and_runs_streams(
    server: str, harness: SparkHarness, tmp_path: Path
) -> None:
    harness.make(limits={"retention": "1h"})  # each stream finds what earlier ones have settled
    harness.api.post("/queues", json={"name": f"{harness.queue}/sink"})
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            PROGRAM,
            server,
            harness.url,
            harness.queue,
            tmp_path,
        ],
        env=same_build(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.stdout == "finished\n", done.stderr[-4000:]


def test_remote_session_that_cannot_be_made_is_refused_with_a_remedy() -> None:
    with pytest.raises(InvalidOption, match=r"master is sc://.*pip install 'pyspark\[connect\]'"):
        session(master="sc://127.0.0.1:0/;no")
