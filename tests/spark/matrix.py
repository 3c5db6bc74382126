"""Tries the wheel `sluice-spark` with versions of PySpark; `scripts/spark-matrix` runs it.

Prints a line for each version, and ends with 1 if one of them neither works nor is refused in our
words.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from sluice.spark.runtime.spark_version import version_error
from tests.spark.thin_environment import PROGRAM, build_wheel, install_wheel, run_program
from tests.support.broker_process import Broker
from tests.support.external_programs import QUICK_JAVA

REFUSED_PROGRAM = """
from pyspark.sql import SparkSession
import sys
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    spark.read.format("sluice").option("url", sys.argv[1]).option("subscribe", "q").load()
except Exception as error:
    print(error)
spark.stop()
"""


def registry_versions() -> list[str]:
    """Return every 4.x of PySpark that pip finds, oldest first."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "pyspark"]
    text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    [listed] = re.findall(r"Available versions: (.+)", text)
    found = [one.strip() for one in listed.split(",") if re.fullmatch(r"4\.[\d.]+", one.strip())]
    return sorted(found, key=lambda one: [int(part) for part in one.split(".")])


def try_version(version: str, wheel: Path, url: str, folder: Path) -> str:
    """Return what a version does: `works`, `refused`, or the error."""
    venv.create(folder, symlinks=True, with_pip=True)
    python = folder / "bin/python"
    install: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        f"pyspark=={version}",
        "pyarrow",
    ]
    subprocess.run(install, check=True, capture_output=True)
    install_wheel(folder, wheel)
    try:
        if version_error(version) is None:
            queue = f"matrix/{version}"
            printed = run_program(
                python, PROGRAM, url, str(folder / "checkpoint"), QUICK_JAVA, queue
            )
            return "works" if "rows: 50" in printed else printed
        printed = run_program(python, REFUSED_PROGRAM, url)
        refusal = re.search(rf"this is PySpark {re.escape(version)}, and .*?4\.x", printed)
        return "refused" if refusal else printed
    except AssertionError as fault:
        return str(fault)


def main() -> int:
    versions = sys.argv[1:] or registry_versions()
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build_wheel(folder / "wheel")
        (folder / "broker").mkdir()
        broker = Broker(folder / "broker", "", (), {})
        try:
            for version in versions:
                home = folder / version
                result = try_version(version, wheel, f"http://{broker.address('http')}", home)
                failed = failed or result not in ("works", "refused")
                print(f"PySpark {version}: {result}", flush=True)
                shutil.rmtree(home)
        finally:
            broker.stop()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
