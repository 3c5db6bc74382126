"""The start: Java, the session, and the certificate of the broker."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from sluice.spark import BulkClient, Endpoint, session
from sluice.spark.errors import InvalidOption, JavaUnavailable
from sluice.spark.runtime.java import check_java
from sluice.spark.runtime.spark_session import (
    HEARTBEAT_TIMEOUT_SETTING,
    NETTY_CHUNK_OPTION,
    settings_for,
)
from sluice.spark.runtime.spark_version import version_error
from sluice.spark.runtime.unix_sockets import (
    DIRECTORY_SETTING,
    ENABLED_SETTING,
    unix_socket_settings,
)
from tests.conformance.conftest import Certificates, certificates
from tests.spark.conftest import BEFORE_ANY_STREAM, SparkHarness, stream_variables
from tests.support.broker_process import StartBroker

__all__ = ["certificates"]  # a fixture


def test_without_java_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("PYSPARK_GATEWAY_PORT", raising=False)
    with pytest.raises(
        JavaUnavailable,
        match=r"there is none\. Install Java 17 or later .*openjdk-17-jre-headless.*JAVA_HOME",
    ):
        session()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaUnavailable, match="no bin/java in it"):
        check_java()
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    java.chmod(0o755)
    with pytest.raises(JavaUnavailable, match="is Java 11, and Spark needs 17"):
        check_java()


def test_local_java_session_retains_batch_memory_unless_configured_otherwise() -> None:
    name = "spark.driver.defaultJavaOptions"
    local = settings_for("local[2]", {"spark.driver.extraJavaOptions": "-Xss4m"})
    assert local[name] == "-Dio.netty.allocator.maxOrder=11"
    assert local["spark.driver.extraJavaOptions"] == "-Xss4m", "Spark puts ours before it"
    given = settings_for("local[2]", {name: "-Xint", "spark.driver.host": "10.0.0.1"})
    assert (given[name], given["spark.driver.host"]) == ("-Xint", "10.0.0.1")
    assert name not in settings_for("spark://far:7077", {}), (
        "spark.executor.* configures its executors"
    )
    assert name not in settings_for("", {})


def test_local_session_survives_a_suspended_machine() -> None:
    assert HEARTBEAT_TIMEOUT_SETTING in settings_for("local[*,3]", {})
    assert HEARTBEAT_TIMEOUT_SETTING not in settings_for("spark://far:7077", {})


@pytest.mark.parametrize("version", ["3.5.9", "4.0.0", "4.1.4", "5.0.0.dev1", "10.1"])
def test_other_versions_of_pyspark_are_refused_with_the_version(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyspark, "__version__", version)
    monkeypatch.delitem(sys.modules, "pyspark_sluice", raising=False)
    source = importlib.import_module("pyspark_sluice").DefaultSource
    monkeypatch.delitem(sys.modules, "pyspark_sluice", raising=False)
    assert source.name() == "sluice"
    with pytest.raises(InvalidOption, match=rf"PySpark {version}, and .* 4.2 and later 4.x.*pip"):
        source({})


@pytest.mark.parametrize("version", ["4.2.0", "4.2.1", "4.3.0", "4.10.2"])
def test_versions_of_pyspark_that_work(version: str) -> None:
    assert version_error(version) is None


def test_java_and_python_use_a_private_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = unix_socket_settings()
    folder = Path(settings[DIRECTORY_SETTING])
    assert settings[ENABLED_SETTING] == "true" and folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert unix_socket_settings() == {}, (
        "the name of a socket there would be too long for the system"
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert unix_socket_settings() == {}


def test_session_has_the_settings_people_forget(spark: SparkSession) -> None:
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    assert spark.sparkContext.master == "local[2,3]"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.driver.defaultJavaOptions") == NETTY_CHUNK_OPTION
    assert spark.range(3).rdd.map(lambda row: row.id).sum() == 3
    assert list(Path(str(spark.conf.get(DIRECTORY_SETTING))).glob(".*.sock")), (
        "the line to a Python process"
    )
    java = spark.sparkContext._jvm
    assert java is not None
    assert java.java.lang.System.getProperty("io.netty.allocator.maxOrder") == "11"


def test_stream_adds_nothing_to_what_all_streams_share(
    spark: SparkSession, harness: SparkHarness, tmp_path: Path
) -> None:
    """Two streams that started at once could leave a session in which no task can be serialized."""
    harness.fill(["a"])
    writing = (
        harness.stream(spark).writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    )
    writing.trigger(availableNow=True).start().awaitTermination()
    assert stream_variables(spark) == BEFORE_ANY_STREAM


def test_broker_with_a_certificate_is_read_by_clients_that_trust_it(
    start_broker: StartBroker, certificates: Certificates
) -> None:
    broker = start_broker(
        f'[tls]\ncert = "{certificates.cert}"\nkey = "{certificates.key}"\nhttp = true\n'
    )
    harness = SparkHarness(broker, "q")
    harness.url = harness.url.replace("http://", "https://")
    harness.bulk_client = BulkClient(Endpoint(harness.url, ca=str(certificates.ca)))
    harness.fill(["a"])
    assert harness.values(ca=str(certificates.ca)) == ["a"]
    with pytest.raises(InvalidOption, match=r"is not trusted.*option ca"):
        harness.values()
    with pytest.raises(InvalidOption, match="option ca: /nowhere cannot be used"):
        harness.values(ca="/nowhere")
    harness.close()
