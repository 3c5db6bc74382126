"""Exclude imported modules from garbage collection in Spark's Python processes.

Such a process runs a full collection after each request: after each task on an executor, and after
each planning call on the driver. A collection over all imported modules takes 20 to 30 ms, longer
than reading a short range. Objects that exist when Sluice is called for the first time live as long
as the process.
"""

from __future__ import annotations

import gc
import os
from functools import cache
from typing import Final

# Spark sets this variable in a process that serves more than one request.
REUSE_WORKER_VARIABLE: Final = "SPARK_REUSE_WORKER"


@cache
def freeze_imports() -> None:
    """Freeze the heap once per process, and only in Spark's processes, not in a user's program."""
    if REUSE_WORKER_VARIABLE in os.environ:
        gc.freeze()
