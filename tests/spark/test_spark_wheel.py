"""The wheel `sluice-spark`: complete, without the broker, and enough for Spark.

The environment of the tests has links to PySpark and pyarrow and nothing else: neither Sluice nor
what its broker needs.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.spark.conftest import SparkHarness
from tests.spark.thin_environment import PROGRAM, build_wheel, make_environment, run_program
from tests.support.external_programs import QUICK_JAVA, need_program

BROKER_MODULES = ("grpc", "google", "uvloop", "fastapi", "pydantic", "httpx", "pandas", "deltalake")
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import pyspark_sluice, sluice
assert sys.argv[1] in sluice.__file__, sluice.__file__
for found in pkgutil.walk_packages(sluice.__path__, "sluice."):
    importlib.import_module(found.name)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_has_every_module_that_its_modules_import(wheel: Path) -> None:
    run_program(sys.executable, IMPORT_ALL, str(wheel))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = archive.read(next(one for one in names if one.endswith("RECORD"))).decode()
    assert [line.split(",")[0] for line in record.splitlines()] == names
    tops = {name.split("/")[1] for name in names if name.startswith("sluice/")}
    assert not tops & {"broker", "queues", "store", "admin", "client", "cli", "wire", "cluster"}


@pytest.mark.spark
@pytest.mark.own_java
def test_spark_reads_and_writes_queues_without_the_broker_installed(
    wheel: Path, harness: SparkHarness, tmp_path: Path
) -> None:
    need_program("java")
    python = make_environment(tmp_path / "environment", wheel)
    lacking = (
        f"import importlib.util as u; print([one for one in {BROKER_MODULES} if u.find_spec(one)])"
    )
    assert run_program(python, lacking) == "[]\n"
    arguments = (harness.url, str(tmp_path / "checkpoint"), QUICK_JAVA, harness.queue)
    assert "rows: 50" in run_program(python, PROGRAM, *arguments)
    shutil.rmtree(tmp_path / "environment")
