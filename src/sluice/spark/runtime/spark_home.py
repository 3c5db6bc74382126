"""A home for Spark in which its Python processes start in half the time.

Java puts `python/lib/pyspark.zip` of Spark's home before everything else on the path of each Python process that it
starts, and a zip file has no compiled modules: all of them (six for a first stream, one for each further) compile
PySpark anew, more than half a second of CPU each. The same modules lie compiled where PySpark is installed. Besides,
Java waits 10 seconds, and no setting says otherwise, for the process that plans a stream: too short on a machine with
much to do. So Java is given a home with all there is in PySpark's directory but that zip.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SPARK_HOME_VARIABLE: Final = "SPARK_HOME"
LINKED_DIRECTORIES: Final = ("bin", "conf", "data", "jars", "sbin")


@contextmanager
def spark_home_without_zip() -> Iterator[None]:
    """Java that is started meanwhile has it, unless somebody has chosen a home already. Nothing depends on it: where
    it cannot be made, PySpark's own is used."""
    made = None if os.environ.get(SPARK_HOME_VARIABLE) else _create_home()
    if made is None:
        yield
        return
    os.environ[SPARK_HOME_VARIABLE] = str(made)
    try:
        yield
    finally:
        del os.environ[SPARK_HOME_VARIABLE]  # what others start is not ours to change


def _create_home() -> Path | None:
    import pyspark

    pyspark_directory = Path(pyspark.__file__).parent
    if not (pyspark_directory / "jars").is_dir():  # it has the zip of another Spark, or none
        return None
    home = Path(tempfile.mkdtemp(prefix="sluice-spark-home-"))
    atexit.register(
        shutil.rmtree, home, ignore_errors=True
    )  # Java has opened what it needs by then
    try:
        for part in LINKED_DIRECTORIES:
            if (pyspark_directory / part).exists():
                (home / part).symlink_to(pyspark_directory / part)
    except OSError:
        return None
    return home
