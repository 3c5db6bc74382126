"""Refuse versions of PySpark that the source does not work with, in words that a user sees.

Spark ignores a `pyspark_*` module that fails to import, and then says only that there is no format
of that name. So the module imports with every PySpark that has Python data sources, and the refusal
comes from the constructor of the source.
"""

from __future__ import annotations

import re
from typing import Final

from sluice.spark.errors import InvalidOption

MIN_VERSION: Final = (4, 2)  # streams with limits per batch
NEXT_MAJOR_VERSION: Final = 5


def version_error(version: str) -> InvalidOption | None:
    """Return why the source does not work with this version of PySpark, or None."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or MIN_VERSION <= (int(found[1]), int(found[2])) < (NEXT_MAJOR_VERSION, 0):
        return None
    return InvalidOption(
        f"this is PySpark {version}, and the format sluice works with 4.2 and later 4.x",
        "Use another PySpark: pip install 'pyspark>=4.2,<5'; on a cluster, another Spark as well",
    )
