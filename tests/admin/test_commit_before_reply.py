"""What an answer of the admin service promises: the store has it. While the store is silent, so is the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from sluice.admin.service import AdminService
from sluice.admin.views import DeadLetterFilter, OutgoingMessage
from tests.admin.kit import AdminHarness, settle, take

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
    "purge letters": lambda admin: admin.purge_dead_letters("tasks"),
    "delete letter": lambda admin: admin.delete_dead_letter("tasks", "poison"),
}


@pytest.fixture
def harness(tmp_path: Path) -> AdminHarness:
    harness = AdminHarness("memory", tmp_path)
    worker = harness.worker()
    harness.publish(b"x", message_id="poison")
    settle(worker, "reject", take(worker)[0])
    worker.disconnect()
    return harness


async def turn(harness: AdminHarness) -> None:
    """Everything that can happen by itself has happened."""
    for _ in range(50):
        await asyncio.sleep(0)
        harness.loop.settle()


@pytest.mark.parametrize("name", CHANGES)
async def test_change_is_answered_only_after_its_commit(harness: AdminHarness, name: str) -> None:
    await harness.call(harness.admin.create_group("tasks", "idle"))
    harness.publish(b"y", message_id="order-6")
    harness.store.hold()
    if name == "publish a duplicate":  # of one that is not kept yet
        first = asyncio.ensure_future(
            harness.admin.publish("tasks", OutgoingMessage(b"x", message_id="order-7"))
        )
        await turn(harness)
    asked = asyncio.ensure_future(CHANGES[name](harness.admin))
    await turn(harness)
    assert not asked.done() and harness.store.waiting()
    harness.store.release()
    await turn(harness)
    assert asked.done()
    asked.result()
    if name == "publish a duplicate":
        assert not first.result().duplicate and asked.result() != first.result()
    harness.close()


async def test_cancelled_caller_does_not_disturb_others(harness: AdminHarness) -> None:
    harness.store.hold()
    asked = asyncio.ensure_future(harness.admin.publish("tasks", OutgoingMessage(b"x")))
    await turn(harness)
    asked.cancel()
    await turn(harness)
    harness.store.release()
    await turn(harness)
    assert asked.cancelled()
    assert [one.payload for one in await harness.call(harness.admin.peek("tasks"))] == [b"x"]
    harness.close()


async def test_read_does_not_wait_for_a_commit(harness: AdminHarness) -> None:
    harness.publish(b"y")
    harness.store.hold()
    asked = asyncio.ensure_future(harness.admin.publish("tasks", OutgoingMessage(b"x")))
    await turn(harness)
    assert (await harness.call(harness.admin.stats("tasks"))).depth == 2
    assert (await harness.call(harness.admin.peek("tasks", limit=1)))[0].payload == b"y"
    harness.store.release()
    await turn(harness)
    assert asked.done()
    harness.close()
