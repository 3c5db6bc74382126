"""Create a SPARK_HOME that halves the start time of Spark's Python processes.

Java puts `python/lib/pyspark.zip` of SPARK_HOME first on the path of each Python process. A zip
file contains no compiled modules, so each process (six for the first stream, one for each further
stream) compiles PySpark again, which takes more than half a second of CPU. The installed PySpark
package contains the same modules compiled. Java also waits at most 10 seconds for the process that
plans a stream, and no setting changes that; on a loaded machine this is too short. The directory
created here links everything of PySpark's directory except that zip.
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
    """Set SPARK_HOME for a Java process that starts meanwhile, unless it is already set.

    This is an optimization only: if the directory cannot be created, Spark uses PySpark's own.
    """
    made = None if os.environ.get(SPARK_HOME_VARIABLE) else _create_home()
    if made is None:
        yield
        return
    os.environ[SPARK_HOME_VARIABLE] = str(made)
    try:
        yield
    finally:
        del os.environ[SPARK_HOME_VARIABLE]  # child processes of the caller must not inherit it


def _create_home() -> Path | None:
    import pyspark

    pyspark_directory = Path(pyspark.__file__).parent
    if not (pyspark_directory / "jars").is_dir():  # this PySpark uses a Spark installed elsewhere
        return None
    home = Path(tempfile.mkdtemp(prefix="sluice-spark-home-"))
    # By then Java has opened the files that it needs.
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    try:
        for part in LINKED_DIRECTORIES:
            if (pyspark_directory / part).exists():
                (home / part).symlink_to(pyspark_directory / part)
    except OSError:
        return None
    return home
