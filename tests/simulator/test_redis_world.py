"""A short run of the simulator with the queues in Redis. Long runs: scripts/simulate --redis --steps 20000"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.redis_process import RedisProcess
from tests.simulator.redis_world import run


@pytest.mark.parametrize("seed", range(20, 28))
def test_worlds_in_redis_in_which_nothing_is_lost_double_or_out_of_order(
    seed: int, redis_server: RedisProcess, tmp_path: Path
) -> None:
    run(seed, 150, redis_server, tmp_path.name)


@pytest.mark.parametrize("seed", range(4))
def test_worlds_in_redis_in_which_the_last_value_of_each_key_is_kept(
    seed: int, redis_server: RedisProcess, tmp_path: Path
) -> None:
    run(seed, 150, redis_server, tmp_path.name, compacted=True)
