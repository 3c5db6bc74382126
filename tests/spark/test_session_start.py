"""Before anything is read: Java, the session, and the certificate of the broker."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from sluice.spark import Door, Where, session
from sluice.spark.errors import InvalidOption, NoJava
from sluice.spark.runtime.java import check_java
from sluice.spark.runtime.unix_sockets import ENABLED, FOLDER, unix_sockets
from sluice.spark.runtime.spark_session import LARGE_CHUNKS, settings_for
from tests.support.broker_process import StartBroker
from tests.conformance.conftest import Certificates, certificates
from tests.spark.conftest import BEFORE_ANY_STREAM, House, stream_variables

__all__ = ["certificates"]  # a fixture


def test_without_java_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    with pytest.raises(
        NoJava, match=r"there is none\. Install Java 17 or later .*openjdk-17-jre-headless.*JAVA_HOME"
    ):
        session()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NoJava, match="no bin/java in it"):
        check_java()
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(NoJava, match="is Java 11, and Spark needs 17"):
        check_java()


def test_java_of_a_local_session_keeps_the_memory_of_batches_unless_it_is_told_otherwise() -> None:
    name = "spark.driver.defaultJavaOptions"
    local = settings_for("local[2]", {"spark.driver.extraJavaOptions": "-Xss4m"})
    assert local[name] == "-Dio.netty.allocator.maxOrder=11"
    assert local["spark.driver.extraJavaOptions"] == "-Xss4m", "Spark puts ours before it"
    given = settings_for("local[2]", {name: "-Xint", "spark.driver.host": "10.0.0.1"})
    assert (given[name], given["spark.driver.host"]) == ("-Xint", "10.0.0.1")
    assert name not in settings_for("spark://far:7077", {}), "its executors are told by spark.executor...."
    assert name not in settings_for("", {})


def test_java_and_python_meet_where_nobody_else_may_enter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = unix_sockets()
    folder = Path(settings[FOLDER])
    assert settings[ENABLED] == "true" and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert unix_sockets() == {}, "the name of a socket there would be too long for the system"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert unix_sockets() == {}


def test_a_session_has_what_people_forget(spark: SparkSession) -> None:
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert spark.sparkContext.master == "local[2,3]"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.driver.defaultJavaOptions") == LARGE_CHUNKS
    assert spark.range(3).rdd.map(lambda row: row.id).sum() == 3
    assert list(Path(str(spark.conf.get(FOLDER))).glob(".*.sock")), "the line to a Python process"
    java = spark.sparkContext._jvm
    assert java is not None
    assert java.java.lang.System.getProperty("io.netty.allocator.maxOrder") == "11"


def test_a_stream_adds_nothing_to_what_all_streams_share(
    spark: SparkSession, house: House, tmp_path: Path
) -> None:
    """Two that did so at once could leave a Spark in which no task could be sent any more."""
    house.fill(["a"])
    writing = house.stream(spark).writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    writing.trigger(availableNow=True).start().awaitTermination()
    assert stream_variables(spark) == BEFORE_ANY_STREAM


def test_a_broker_with_a_certificate_is_read_by_those_who_trust_it(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = start_broker(f'[tls]\ncert = "{certificates.cert}"\nkey = "{certificates.key}"\nhttp = true\n')
    house = House(broker, "q")
    house.url = house.url.replace("http://", "https://")
    house.door = Door(Where(house.url, ca=str(certificates.ca)))
    house.fill(["a"])
    assert house.values(ca=str(certificates.ca)) == ["a"]
    with pytest.raises(InvalidOption, match=r"is not trusted.*option ca"):
        house.values()
    with pytest.raises(InvalidOption, match="option ca: /nowhere cannot be used"):
        house.values(ca="/nowhere")
    house.close()
