"""What a node tells of itself under `$SYS/`, with cells that come and go."""

from __future__ import annotations

import asyncio

from sluice.app import access_of, limits_from
from sluice.broker.broker import Broker
from sluice.broker.namespaces.sys_topics import SysTopics
from sluice.config.settings import Settings


def make_broker() -> Broker:
    settings = Settings(store="memory")
    return Broker(
        asyncio.get_running_loop(), limits_from(settings), access_of(settings)[0], lambda event, facts: None
    )


def told(broker: Broker, name: str) -> list[bytes]:
    topic = f"$SYS/broker/{name}".encode()
    return [bytes(one.payload) for one in broker.router.retained.matching(topic, broker.turn.now)]


async def test_a_node_goes_on_without_a_cell_and_tells_the_next_one_everything() -> None:
    lobby, first, second = make_broker(), make_broker(), make_broker()
    cells = [first]
    topics = SysTopics(lobby, "1", lambda: list(cells))
    topics.due(10.0)
    assert told(first, "version") == [b"sluice 1"]
    cells.clear()
    topics.due(20.0)
    cells.append(second)
    topics.due(30.0)
    assert told(second, "version") == [b"sluice 1"]
    assert told(second, "messages/received") == [b"0"]


async def test_a_cell_that_goes_takes_its_counts_along_and_makes_no_rate_negative() -> None:
    lobby, busy, other = make_broker(), make_broker(), make_broker()
    busy.counters.packets_received += 6000
    cells = [busy, other]
    topics = SysTopics(lobby, "1", lambda: list(cells))
    for nth in range(1, 100):  # until what was counted once no longer shows in the average
        topics.due(nth * 10.0)
    cells.remove(busy)
    topics.due(1000.0)
    [rate] = told(other, "load/messages/received/1min")
    assert float(rate) >= 0.0
