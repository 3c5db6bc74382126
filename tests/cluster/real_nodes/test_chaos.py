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
    """How fast they recover is not judged here: that depends on what else the machine does."""
    said: list[str] = []
    began = time.monotonic()
    await run_chaos(redis_folder / "chaos", SECONDS, 1, "etcd", said.append, hops=10)
    assert time.monotonic() - began >= SECONDS
    assert "all of them came" in "\n".join(said)
    assert "each by the last owner" in "\n".join(said)
    assert {"killed", "paused", "cut off", "stopped"} <= {one.split(":")[0] for one in said}
