"""A pipeline on a standalone cluster that is started from the same PySpark: one master, one worker, on loopback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import deltalake
import pytest
from typer.testing import CliRunner

from sluice.cli import app
from sluice.spark.home import lean_home
from tests.brokers import same_build
from tests.services import QUICK_JAVA, need_program
from tests.spark.conftest import House

WAIT = 90.0
HERE = "127.0.0.1"


def program(name: str) -> str:
    import pyspark

    return str(Path(pyspark.__file__).parent / "bin" / name)


class Cluster:
    """Master and worker, each a process of ours with a log of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with lean_home():  # for executors too, whose home is the worker's
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
        """The worker registers while Spark's driver starts: nobody waits for it here."""
        log = self._start("master", "--host", HERE, "--port", "0", "--webui-port", "0")
        self.url = self._wait(log, r"Starting Spark master at (spark://\S+)")
        more = ("--host", HERE, "--webui-port", "0", "--cores", "1", "--memory", "1g", self.url)
        self._start("worker", *more)

    def submit(self, *words: str) -> subprocess.CompletedProcess[str]:
        script = CliRunner().invoke(app, ["pipeline", "script"])
        settings = {
            "spark.driver.host": HERE,
            "spark.executor.memory": "600m",
            "spark.executorEnv.PYTHONPATH": self._environ["PYTHONPATH"],
            "spark.driver.extraJavaOptions": QUICK_JAVA,
            "spark.executor.extraJavaOptions": QUICK_JAVA,
            "spark.sql.shuffle.partitions": "1",
        }
        told = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
        return subprocess.run(
            [program("spark-submit"), "--master", self.url, *told, script.stdout.strip(), *words],
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
        entry = f"org.apache.spark.deploy.{name}.{name.capitalize()}"
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running.append(
                subprocess.Popen(
                    [program("spark-class"), entry, *words],
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
def test_a_pipeline_runs_on_a_cluster_by_spark_submit(house: House, cluster: Cluster, tmp_path: Path) -> None:
    house.make(partitions=2)
    house.fill([f"m{nth}" for nth in range(20)])
    table = tmp_path / "table"
    done = cluster.submit(
        "archive", "--queue", house.queue, "--to", str(table), "--once", "--json", "--url", house.url
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == 20
    rows = deltalake.DeltaTable(table).to_pyarrow_table(columns=["value"])
    assert sorted(rows["value"].to_pylist()) == sorted(f"m{nth}".encode() for nth in range(20))
    assert house.lag("archive") == 0
    assert "Asked to launch executor" in cluster.log("worker"), "the work was done elsewhere"
    assert os.listdir(tmp_path / "work")
