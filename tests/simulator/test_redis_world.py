"""A short simulation with the queues in Redis. Long runs: scripts/simulate --redis --steps 20000"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator.redis_world import run
from tests.support.redis_process import RedisProcess


@pytest.mark.parametrize("seed", range(20, 28))
def test_nothing_is_lost_duplicated_or_reordered_in_redis(
    seed: int, redis_server: RedisProcess, tmp_path: Path
) -> None:
    run(seed, 150, redis_server, tmp_path.name)


@pytest.mark.parametrize("seed", range(4))
def test_last_value_of_each_key_is_stored_in_redis(
    seed: int, redis_server: RedisProcess, tmp_path: Path
) -> None:
    run(seed, 150, redis_server, tmp_path.name, compacted=True)
