"""Access rules decide who creates queues by use, also for clients of other nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.access.acl_file import read_rules
from sluice.access.authenticator import Authenticator
from sluice.access.watched_file import WatchedFile
from sluice.client import PublishRefused
from tests.cluster.memory_cluster import client_in, queue_in, two_nodes

RULES = """
[[rule]]
allow = ["connect", "queue-publish"]
clients = ["sensor*"]
auto_create = false

[[rule]]
allow = ["connect", "queue-publish"]
"""


async def test_owner_of_a_queue_applies_the_rule_of_a_client_of_another_node(
    tmp_path: Path,
) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    rules = WatchedFile(tmp_path / "rules.toml", read_rules)
    name = queue_in(1)
    async with two_nodes() as net:
        host = net.nodes["b"].hosts[1]
        host._core.queue_handler.access = Authenticator(True, rules=rules)
        async with net.nodes["a"].client(client_in(0, "sensor")) as sensor:
            with pytest.raises(PublishRefused, match="auto_create = false") as refused:
                await sensor.publisher(name).send(b"x")
            assert refused.value.reason == 0x90
            assert name not in host.engine.queues
            async with net.nodes["a"].client(client_in(0, "other")) as other:
                await other.publisher(name).send(b"x")
            await sensor.publisher(name).send(b"x")
        assert host.engine.queues[name].depth == 2
