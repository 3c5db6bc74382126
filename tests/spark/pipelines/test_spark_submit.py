"""A pipeline as docs/pipelines.md submits it, on a standalone cluster of the same PySpark.

The cluster has one master and one worker, on loopback.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import deltalake
import pytest

from sluice.spark.runtime.spark_home import spark_home_without_zip
from tests.spark.conftest import SparkHarness
from tests.support.broker_process import same_build
from tests.support.doc_pages import commands
from tests.support.external_programs import QUICK_JAVA, need_program

WAIT = 90.0
HERE = "127.0.0.1"
MASTER = "spark://127.0.0.1:7077"


def block(name: str) -> str:
    """Return what docs/pipelines.md passes to this program."""
    [text] = [text for text, _ in commands("docs/pipelines.md") if text.startswith(name)]
    return text


def program(name: str) -> str:
    import pyspark

    return str(Path(pyspark.__file__).parent / "bin" / name)


class Cluster:
    """Start master and worker, each a process with its own log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with spark_home_without_zip():  # also for executors, whose home is the worker's
            environ = same_build()
        self._environ = {
            **environ,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": HERE,
            "SPARK_WORKER_DIR": str(folder / "work"),
            "SPARK_DAEMON_JAVA_OPTS": QUICK_JAVA,
        }
        self._running: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def start(self) -> None:
        """Start the worker. It registers while Spark's driver starts; nothing waits for it here."""
        master, worker = (shlex.split(line) for line in block("spark-class").splitlines())
        log = self._start("master", *master[1:], "--port", "0", "--webui-port", "0")
        self.url = self._wait(log, r"Starting Spark master at (spark://\S+)")
        *words, reported = worker[1:]
        assert reported == MASTER
        more = ("--host", HERE, "--webui-port", "0", "--cores", "1", "--memory", "1g", self.url)
        self._start("worker", *words, *more)

    def submit(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run in bash, with limits for `spark-submit` that suit this machine, and the test's
        `sluice`.
        """
        settings = {
            "spark.driver.host": HERE,
            "spark.executor.memory": "600m",
            "spark.executorEnv.PYTHONPATH": self._environ["PYTHONPATH"],
            "spark.driver.extraJavaOptions": QUICK_JAVA,
            "spark.executor.extraJavaOptions": QUICK_JAVA,
            "spark.sql.shuffle.partitions": "1",
        }
        reported = shlex.join(
            part for name, value in settings.items() for part in ("--conf", f"{name}={value}")
        )
        tools = (
            f'spark-submit() {{ {program("spark-submit")} {reported} "$@"; }}\n'
            f'sluice() {{ {sys.executable} -m sluice "$@"; }}\n'
        )
        return subprocess.run(
            ["bash", "-ec", tools + script],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=200,
        )

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def close(self) -> None:
        for process in reversed(self._running):
            process.terminate()
            process.wait(30)

    def _start(self, name: str, *words: str) -> str:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen(
                    [program("spark-class"), *words],
                    env=self._environ,
                    cwd=self._folder,
                    stdout=log,
                    stderr=log,
                )
            )
        return name

    def _wait(self, name: str, pattern: str) -> str:
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            found = re.search(pattern, self.log(name))
            if found is not None:
                return found[1]
            assert self._running[-1].poll() is None, self.log(name)
            time.sleep(0.1)
        raise AssertionError(f"the {name} does not come up\n{self.log(name)}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    need_program("java")
    with ExitStack() as stack:
        running = Cluster(tmp_path)
        stack.callback(running.close)
        running.start()
        yield running


@pytest.mark.spark
@pytest.mark.own_java
def test_pipeline_runs_on_a_cluster_by_spark_submit(
    harness: SparkHarness, cluster: Cluster, tmp_path: Path
) -> None:
    harness.make(partitions=2)
    harness.fill([f"m{nth}" for nth in range(20)])
    table = tmp_path / "table"
    script = (
        block("spark-submit").replace(MASTER, cluster.url).replace("tasks/image", harness.queue)
    )
    done = cluster.submit(
        script.replace("/shared/images", str(table)).replace("http://127.0.0.1:8080", harness.url)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 20
    rows = deltalake.DeltaTable(table).to_pyarrow_table(columns=["value"])
    assert sorted(rows["value"].to_pylist()) == sorted(f"m{nth}".encode() for nth in range(20))
    assert harness.lag("archive") == 0
    assert "Asked to launch executor" in cluster.log("worker"), "the work was done elsewhere"
    assert os.listdir(tmp_path / "work")
