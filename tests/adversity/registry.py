"""All adversities by name, and the function that runs one."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.adversity import clock_jumps, connection_floods, disk_faults, kill_storm, overload
from tests.adversity.kit import Adversity, Trial

ADVERSITIES: Final[dict[str, Adversity]] = {
    "kills": kill_storm.kills,
    "full-disk": disk_faults.full,
    "read-only-disk": disk_faults.read_only,
    "unreadable-disk": disk_faults.unreadable,
    "slow-disk": disk_faults.slow,
    "clock": clock_jumps.clock_jumps,
    "churn": connection_floods.churn,
    "connection-flood": connection_floods.connection_flood,
    "slow-consumers": connection_floods.slow_consumers,
    "malformed": connection_floods.malformed,
    "backlog": overload.backlog,
    "poison": overload.poison,
    "memory": overload.memory,
}


async def run_trial(name: str, folder: Path, seed: int = 1, stretch: float = 0.0) -> Trial:
    """Run one adversity and return its results and faults."""
    trial = Trial(folder, seed, stretch)
    try:
        await ADVERSITIES[name](trial)
    finally:
        trial.close()
    return trial
