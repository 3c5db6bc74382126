"""What Spark's Python processes have imported, left out of the search for garbage.

Such a process looks through its whole heap after everything that it is asked: a task on an executor, and on the driver
what a source is and which tasks there are. That is 20 to 30 ms for all that was imported, more than a short range takes
to read. What is there when Sluice is asked for the first time is there to stay.
"""

from __future__ import annotations

import gc
import os
from functools import cache
from typing import Final

REUSE_WORKER_VARIABLE: Final = (
    "SPARK_REUSE_WORKER"  # Spark says so to a process that it asks more than once
)


@cache
def freeze_imports() -> None:
    """Once in a process, and only in one of Spark's: the heap of a user's own program is none of our business."""
    if REUSE_WORKER_VARIABLE in os.environ:
        gc.freeze()
