"""What an answer of the admin service promises: the store has it. While the store is silent, so is the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from sluice.admin.service import AdminService
from sluice.admin.views import LetterFilter, Outgoing
from tests.admin.kit import AdminHouse, settle, take

CHANGES: dict[str, Callable[[AdminService], Coroutine[Any, Any, object]]] = {
    "create": lambda admin: admin.create_queue({"name": "new"}),
    "configure": lambda admin: admin.configure("tasks", {"performance": {"prefetch": 7}}),
    "delete": lambda admin: admin.delete_queue("tasks"),
    "purge": lambda admin: admin.purge("tasks"),
    "create group": lambda admin: admin.create_group("tasks", "new"),
    "delete group": lambda admin: admin.delete_group("tasks", "idle"),
    "seek": lambda admin: admin.seek("tasks", "idle", "latest"),
    "publish": lambda admin: admin.publish("tasks", Outgoing(b"x")),
    "publish a duplicate": lambda admin: admin.publish("tasks", Outgoing(b"x", message_id="order-7")),
    "retry one": lambda admin: admin.retry_dead_letter("tasks", "poison"),
    "retry many": lambda admin: admin.retry_dead_letters("tasks", LetterFilter()),
    "purge letters": lambda admin: admin.purge_dead_letters("tasks"),
    "delete letter": lambda admin: admin.delete_dead_letter("tasks", "poison"),
}


@pytest.fixture
def house(tmp_path: Path) -> AdminHouse:
    house = AdminHouse("memory", tmp_path)
    worker = house.worker()
    house.publish(b"x", message_id="poison")
    settle(worker, "reject", take(worker)[0])
    worker.disconnect()
    return house


async def turn(house: AdminHouse) -> None:
    """Everything that can happen by itself has happened."""
    for _ in range(50):
        await asyncio.sleep(0)
        house.loop.settle()


@pytest.mark.parametrize("name", CHANGES)
async def test_a_change_is_answered_by_the_store_and_by_nothing_else(house: AdminHouse, name: str) -> None:
    await house.ask(house.admin.create_group("tasks", "idle"))
    house.publish(b"y", message_id="order-6")
    house.store.hold()
    if name == "publish a duplicate":  # of one that is not kept yet
        first = asyncio.ensure_future(house.admin.publish("tasks", Outgoing(b"x", message_id="order-7")))
        await turn(house)
    asked = asyncio.ensure_future(CHANGES[name](house.admin))
    await turn(house)
    assert not asked.done() and house.store.waiting()
    house.store.release()
    await turn(house)
    assert asked.done()
    asked.result()
    if name == "publish a duplicate":
        assert not first.result().duplicate and asked.result() != first.result()
    house.close()


async def test_who_stops_waiting_for_an_answer_disturbs_nobody(house: AdminHouse) -> None:
    house.store.hold()
    asked = asyncio.ensure_future(house.admin.publish("tasks", Outgoing(b"x")))
    await turn(house)
    asked.cancel()
    await turn(house)
    house.store.release()
    await turn(house)
    assert asked.cancelled()
    assert [one.payload for one in await house.ask(house.admin.peek("tasks"))] == [b"x"]
    house.close()


async def test_reading_waits_for_no_commit(house: AdminHouse) -> None:
    house.publish(b"y")
    house.store.hold()
    asked = asyncio.ensure_future(house.admin.publish("tasks", Outgoing(b"x")))
    await turn(house)
    assert (await house.ask(house.admin.stats("tasks"))).depth == 2
    assert (await house.ask(house.admin.peek("tasks", limit=1)))[0].payload == b"y"
    house.store.release()
    await turn(house)
    assert asked.done()
    house.close()
