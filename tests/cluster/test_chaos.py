"""A short run of scripts/cluster-chaos."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.chaos import rampage


@pytest.mark.timeout(240)
async def test_nodes_killed_paused_cut_off_and_restarted_lose_nothing_and_keep_order(
    redis_folder: Path,
) -> None:
    """How fast they recover is not judged here: that depends on what else the machine does."""
    said: list[str] = []
    await rampage(redis_folder / "chaos", 1.0, 1, "etcd", said.append, hops=10)
    assert "all of them came" in "\n".join(said)
    assert "each by the last owner" in "\n".join(said)
    assert {"killed", "paused", "cut off", "stopped"} <= {one.split(":")[0] for one in said}
