"""All adversities by name, and how one is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.adversity import clock_jumps
from tests.adversity import connection_floods
from tests.adversity import disk_faults
from tests.adversity import overload
from tests.adversity import kill_storm
from tests.adversity.kit import Adversity, Ground

ADVERSITIES: Final[dict[str, Adversity]] = {
    "kills": kill_storm.kills,
    "full-disk": disk_faults.full,
    "read-only-disk": disk_faults.read_only,
    "unreadable-disk": disk_faults.unreadable,
    "slow-disk": disk_faults.slow,
    "clock": clock_jumps.clock,
    "churn": connection_floods.churn,
    "crowd": connection_floods.crowd,
    "slow-consumers": connection_floods.slow_consumers,
    "malformed": connection_floods.malformed,
    "backlog": overload.backlog,
    "poison": overload.poison,
    "memory": overload.memory,
}


async def endure(name: str, folder: Path, seed: int = 1, stretch: float = 0.0) -> Ground:
    """What was seen, and what was not as promised."""
    ground = Ground(folder, seed, stretch)
    try:
        await ADVERSITIES[name](ground)
    finally:
        ground.close()
    return ground
