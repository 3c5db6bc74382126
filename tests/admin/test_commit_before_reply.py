"""The admin service answers a change only after the commit; while the store is silent, it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from sluice.admin.model import DeadLetterFilter, OutgoingMessage
from sluice.admin.service import AdminService
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import settle, take

CHANGES: dict[str, Callable[[AdminService], Coroutine[Any, Any, object]]] = {
    "create": lambda admin: admin.create_queue({"name": "new"}),
    "configure": lambda admin: admin.configure("tasks", {"performance": {"prefetch": 7}}),
    "delete": lambda admin: admin.delete_queue("tasks"),
    "purge": lambda admin: admin.purge("tasks"),
    "create group": lambda admin: admin.create_group("tasks", "new"),
    "delete group": lambda admin: admin.delete_group("tasks", "idle"),
    "seek": lambda admin: admin.seek("tasks", "idle", "latest"),
    "publish": lambda admin: admin.publish("tasks", OutgoingMessage(b"x")),
    "publish a duplicate": lambda admin: admin.publish(
        "tasks", OutgoingMessage(b"x", message_id="order-7")
    ),
    "retry one": lambda admin: admin.retry_dead_letter("tasks", "poison"),
    "retry many": lambda admin: admin.retry_dead_letters("tasks", DeadLetterFilter()),
    "purge dead letters": lambda admin: admin.purge_dead_letters("tasks"),
    "delete dead letter": lambda admin: admin.delete_dead_letter("tasks", "poison"),
}


@pytest.fixture
def harness(tmp_path: Path) -> BrokerHarness:
    harness = BrokerHarness()
    worker = harness.worker()
    harness.publish(b"x", message_id="poison")
    settle(worker, "reject", take(worker)[0])
    worker.disconnect()
    return harness


async def turn(harness: BrokerHarness) -> None:
    """Let everything happen that needs no store."""
    for _ in range(50):
        await asyncio.sleep(0)
        harness.loop.settle()


@pytest.mark.parametrize("name", CHANGES)
async def test_change_is_answered_only_after_its_commit(harness: BrokerHarness, name: str) -> None:
    await harness.call(harness.admin.create_group("tasks", "idle"))
    harness.publish(b"y", message_id="order-6")
    harness.store.hold()
    if name == "publish a duplicate":  # of a message that is not committed yet
        first = asyncio.ensure_future(
            harness.admin.publish("tasks", OutgoingMessage(b"x", message_id="order-7"))
        )
        await turn(harness)
    change = asyncio.ensure_future(CHANGES[name](harness.admin))
    await turn(harness)
    assert not change.done() and harness.store.count_pending()
    harness.store.release()
    await turn(harness)
    assert change.done()
    change.result()
    if name == "publish a duplicate":
        assert not first.result().duplicate and change.result() != first.result()
    harness.close()


async def test_cancelled_caller_does_not_disturb_others(harness: BrokerHarness) -> None:
    harness.store.hold()
    change = asyncio.ensure_future(harness.admin.publish("tasks", OutgoingMessage(b"x")))
    await turn(harness)
    change.cancel()
    await turn(harness)
    harness.store.release()
    await turn(harness)
    assert change.cancelled()
    assert [one.payload for one in await harness.call(harness.admin.peek("tasks"))] == [b"x"]
    harness.close()


async def test_read_does_not_wait_for_a_commit(harness: BrokerHarness) -> None:
    harness.publish(b"y")
    harness.store.hold()
    change = asyncio.ensure_future(harness.admin.publish("tasks", OutgoingMessage(b"x")))
    await turn(harness)
    assert (await harness.call(harness.admin.stats("tasks"))).total_messages == 2
    assert (await harness.call(harness.admin.peek("tasks", limit=1)))[0].payload == b"y"
    harness.store.release()
    await turn(harness)
    assert change.done()
    harness.close()
