"""The page of nodes, in a cluster."""

from __future__ import annotations

import os

from playwright.sync_api import expect

from tests.admin.console.conftest import Open
from tests.support.broker_process import StartBroker
from tests.support.redis_process import RedisProcess


def test_nodes_page_shows_the_number_of_cells_per_node(
    start_broker: StartBroker, open_console: Open, redis_server: RedisProcess
) -> None:
    config = f"""
        [cluster]
        coordinator = "redis"
        name = "console-{os.urandom(4).hex()}"
        node = "lonely"
        cells = 3
        listen = "127.0.0.1:0"
        [redis]
        prefix = "console-{os.urandom(4).hex()}"
    """
    console = open_console(start_broker(config, flags=["--store", redis_server.url]))
    console.open("/nodes")
    card = console.page.get_by_role("region", name="Cluster console-")
    expect(card).to_contain_text("every cell is at its planned owner")
    expect(
        card.get_by_role("row", name="lonely (this node)").get_by_role("cell").first
    ).to_have_text("3")
    console.screenshot("cluster")
