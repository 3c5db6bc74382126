"""One run at a time: a locked file in the folder that two runs must not share, and a group that they must not share.

The lock is the operating system's and ends with the process that has it, however that ends; the file stays and means
nothing. Where a file system knows no locks, what a table does by itself is left: no batch enters it twice.

Messages go when the group is done with them, so that of two runs in one group each would take them from the other.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sluice.errors import SluiceError
from sluice.spark.errors import InvalidOption

LOCK_FILE: Final = "_sluice.lock"  # Spark and readers of tables skip names with _


class RunInProgress(SluiceError):
    """Another process has the folder."""


@contextmanager
def exclusive_run(folder: Path, do: str = "Wait until it has ended") -> Iterator[None]:
    """Have the folder for oneself, or say that another run has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunInProgress(f"another run is at work with {folder}", do) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def check_group_unused(checkpoint: Path, group: str, settled: int | None) -> None:
    """Refuse a group that has settled something when the checkpoint is new: it follows another one. `settled` is None
    for a group that is not there yet; one that was made beforehand, so that messages are kept, is free."""
    if settled and not any(checkpoint.glob("offsets/[0-9]*")):
        raise InvalidOption(
            f"group {group} follows another run of this queue, which has another checkpoint than {checkpoint}",
            "Give --group NAME, or the --checkpoint of that run. If that is lost, or dead letters were put back, which"
            f" count as settled too, and there is no other run, --group {group} goes on where the group stands",
        )
