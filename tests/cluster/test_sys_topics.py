"""The `$SYS/` topics of a node whose cells open and close."""

from __future__ import annotations

import asyncio

from sluice.app import make_authenticators, make_limits
from sluice.broker.broker import Broker
from sluice.broker.sys_topics import SysTopics
from sluice.config.settings import Settings


def make_broker() -> Broker:
    settings = Settings(store="memory")
    return Broker(
        asyncio.get_running_loop(),
        make_limits(settings),
        make_authenticators(settings)[0],
        lambda event, facts: None,
    )


def published_value(broker: Broker, name: str) -> list[bytes]:
    topic = f"$SYS/broker/{name}".encode()
    return [
        bytes(one.payload) for one in broker.router.retained.find_matching(topic, broker.turn.now)
    ]


async def test_node_continues_without_a_cell_and_reports_all_values_to_the_next() -> None:
    node_broker, first, second = make_broker(), make_broker(), make_broker()
    cells = [first]
    topics = SysTopics(node_broker, "1", lambda: list(cells))
    topics.fire(10.0)
    assert published_value(first, "version") == [b"sluice 1"]
    cells.clear()
    topics.fire(20.0)
    cells.append(second)
    topics.fire(30.0)
    assert published_value(second, "version") == [b"sluice 1"]
    assert published_value(second, "messages/received") == [b"0"]


async def test_removed_cell_takes_its_counts_along_and_makes_no_rate_negative() -> None:
    node_broker, busy, other = make_broker(), make_broker(), make_broker()
    busy.counters.packets_received += 6000
    cells = [busy, other]
    topics = SysTopics(node_broker, "1", lambda: list(cells))
    for nth in range(1, 100):  # until the first count has left the average
        topics.fire(nth * 10.0)
    cells.remove(busy)
    topics.fire(1000.0)
    [rate] = published_value(other, "load/messages/received/1min")
    assert float(rate) >= 0.0
