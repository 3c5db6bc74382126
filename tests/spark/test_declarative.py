"""The declarative pipeline of examples/spark-pipeline, run as docs/spark.md says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyspark
import pytest

from tests.spark.conftest import SparkHarness
from tests.support.broker_process import same_build
from tests.support.external_programs import QUICK_JAVA, need_program

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 480


@pytest.mark.spark
@pytest.mark.own_java
@pytest.mark.timeout(TIMEOUT_SECONDS)
def test_declarative_pipeline_fills_a_table_a_view_and_a_queue(
    harness: SparkHarness, tmp_path: Path
) -> None:
    need_program("java")
    if find_spec("grpc_status") is None:
        pytest.skip("Spark Connect needs the package grpcio-status")
    harness.make("tasks/declared", partitions=1)
    harness.fill(["cat", "dog"], "tasks/declared")
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples/spark-pipeline", project)
    for name, before, after in (
        ("spark-pipeline.yml", "/tmp/sluice-spark-pipeline", str(tmp_path / "storage")),
        ("transformations/tasks.py", "tasks/image", "tasks/declared"),
    ):
        text = (project / name).read_text()
        assert before in text
        (project / name).write_text(text.replace(before, after))
    spark_pipelines = str(Path(pyspark.__file__).parent / "bin/spark-pipelines")
    settings = ("spark.ui.enabled=false", f"spark.driver.extraJavaOptions={QUICK_JAVA}")
    done = subprocess.run(
        [spark_pipelines, "run", *(word for one in settings for word in ("--conf", one))],
        cwd=project,
        env={
            **same_build(),
            "SLUICE_URL": harness.url,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(harness.values(subscribe="tasks/finished")) == ["CAT", "DOG"]
    assert harness.lag("declarative", "tasks/declared") == 0
