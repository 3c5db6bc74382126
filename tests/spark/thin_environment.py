"""Environments that have PySpark, pyarrow and the wheel `sluice-spark`, and nothing else."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKED = ("pyspark", "py4j", "pyarrow", "pyarrow.libs")
PROGRAM = """
import sys
url, folder, java_options, queue = sys.argv[1:]
from sluice.spark import session
spark = session("thin", "local[2,3]", **{
    "spark.ui.enabled": "false", "spark.log.level": "ERROR",
    "spark.driver.extraJavaOptions": java_options,
})
rows = spark.createDataFrame([(f"{nth}",) for nth in range(50)], "value string")
rows.write.format("sluice").options(url=url, queue=f"{queue}/a").mode("append").save()
moved = spark.readStream.format("sluice").options(url=url, subscribe=f"{queue}/a", group="g").load()
query = (
    moved.select("value", "key").writeStream.format("sluice")
    .options(url=url, queue=f"{queue}/b", checkpointLocation=folder)
    .trigger(availableNow=True).start()
)
query.awaitTermination()
print("rows:", spark.read.format("sluice").options(url=url, subscribe=f"{queue}/b").load().count())
spark.stop()
"""


def build_wheel(folder: Path) -> Path:
    found = importlib.util.spec_from_file_location("spark_wheel", ROOT / "packaging/spark_wheel.py")
    assert found is not None and found.loader is not None
    builder = importlib.util.module_from_spec(found)
    found.loader.exec_module(builder)
    built: Path = builder.build(folder)
    return built


def install_wheel(environment: Path, wheel: Path) -> None:
    [packages] = (environment / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)


def make_environment(folder: Path, wheel: Path) -> Path:
    """Create an environment with the wheel, PySpark and pyarrow, and return its Python."""
    venv.create(folder, symlinks=True)
    [packages] = (folder / "lib").glob("python*/site-packages")
    found = importlib.util.find_spec("pyspark")
    assert found is not None and found.origin is not None
    installed = Path(found.origin).parents[1]
    for name in LINKED:
        if (installed / name).exists():
            (packages / name).symlink_to(installed / name)
    install_wheel(folder, wheel)
    return folder / "bin/python"


def run_program(python: Path | str, program: str, *arguments: str) -> str:
    """Run a program that sees none of the sources, and return what it prints."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLUICE_", "PYTHON", "PYSPARK_", "SPARK_"))
    }
    done = subprocess.run(
        [python, "-W", "ignore", "-c", program, *arguments],
        cwd="/",
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
