"""All adversities by name, and how one is tried."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tests.adversity import clocks, crowds, disks, loads, storms
from tests.adversity.ground import Adversity, Ground

ADVERSITIES: Final[dict[str, Adversity]] = {
    "kills": storms.kills,
    "full-disk": disks.full,
    "read-only-disk": disks.read_only,
    "unreadable-disk": disks.unreadable,
    "slow-disk": disks.slow,
    "clock": clocks.clock,
    "churn": crowds.churn,
    "crowd": crowds.crowd,
    "slow-consumers": crowds.slow_consumers,
    "malformed": crowds.malformed,
    "backlog": loads.backlog,
    "poison": loads.poison,
    "memory": loads.memory,
}


async def endure(name: str, folder: Path, seed: int = 1, stretch: float = 0.0) -> Ground:
    """What was seen, and what was not as promised."""
    ground = Ground(folder, seed, stretch)
    try:
        await ADVERSITIES[name](ground)
    finally:
        ground.close()
    return ground
