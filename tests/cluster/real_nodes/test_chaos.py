"""A minute of scripts/cluster-chaos."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.real_nodes.chaos import run_chaos

SECONDS = 60.0


@pytest.mark.timeout(400)
async def test_nodes_killed_paused_partitioned_and_restarted_lose_nothing_and_keep_order(
    redis_folder: Path,
) -> None:
    """Recovery times are not checked here: they depend on the load of the machine."""
    reported: list[str] = []
    started_at = time.monotonic()
    await run_chaos(redis_folder / "chaos", SECONDS, 1, "etcd", reported.append, hops=10)
    assert time.monotonic() - started_at >= SECONDS
    assert "all of them came" in "\n".join(reported)
    assert "each by the last owner" in "\n".join(reported)
    assert {"killed", "paused", "cut off", "stopped"} <= {one.split(":")[0] for one in reported}
