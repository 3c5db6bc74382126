"""Allow one run at a time: a locked file in the directory, and a group that no other run uses.

The operating system releases the lock when the process ends, in any way; the file stays and means
nothing. On a file system without locks, the guarantee of the tables remains: no batch is added
twice.

Messages are deleted when their group settles them, so two runs in one group would each miss the
messages of the other.
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
    """Another process uses the directory."""


@contextmanager
def exclusive_run(folder: Path, do: str = "Wait until it has ended") -> Iterator[None]:
    """Lock the directory, or raise RunInProgress."""
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
    """Refuse a group that has settled messages while the checkpoint is new: another run uses it.

    `settled` is None for a group that does not exist. A group that was created in advance, so that
    messages are stored for it, is accepted.
    """
    if settled and not any(checkpoint.glob("offsets/[0-9]*")):
        raise InvalidOption(
            f"group {group} follows another run of this queue, which has another checkpoint than"
            f" {checkpoint}",
            "Give --group NAME, or the --checkpoint of that run. If that is lost, or dead letters"
            " were put back, which count as settled too, and there is no other run,"
            f" --group {group} goes on where the group stands",
        )
