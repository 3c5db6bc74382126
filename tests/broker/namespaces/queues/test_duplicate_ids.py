"""Deliveries whose publishers have given them the same id: a settlement finds the right one, and searches once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.queues.model.ledger import verify
from tests.broker.kit import Client
from tests.broker.namespaces.kit import QueueHouse, facts, join, put, settle, take

COUNT = 20


def build() -> tuple[QueueHouse, Client]:
    """A worker that holds deliveries of one queue, all with the id 1."""
    house = QueueHouse([("jobs", {"bindings": ["dev/#"]})])
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=COUNT)
    maker = house.connect("maker")
    for nth in range(COUNT):
        put(maker, f"dev/{nth}", b"%d" % nth, user=[("message-id", "1")])
    return house, worker


def settle_many(client: Client, ids: list[str], **properties: Any) -> tuple[int, str]:
    return put(client, "$queue/jobs/$ack", json.dumps(ids).encode(), **properties)


def test_refused_id_is_searched_once_for_each_packet() -> None:
    """Repeats count as refused, too, but cost nothing: a search may visit thousands of deliveries."""
    house, _ = build()
    thief = house.connect("thief")
    user = [("consumer-group", "worker"), ("delivery-token", "1-2")]
    reason, why = settle_many(thief, ["1"] * 50, user=user)
    assert reason >= 0x80
    assert "50 of 50" in why
    assert house.counters.wrong_tokens == 1
    assert house.depth("jobs") == COUNT


def test_repeated_id_settles_as_many_deliveries_of_its_holder() -> None:
    house, worker = build()
    take(worker)
    assert settle_many(worker, ["1"] * 5)[0] == 0
    assert house.depth("jobs") == COUNT - 5
    assert "5 of 20" in settle_many(worker, ["1"] * COUNT)[1]
    assert house.depth("jobs") == 0


@pytest.mark.parametrize("order", ["oldest first", "newest first", "from the middle"])
def test_deliveries_with_one_id_are_settled_in_any_order(order: str) -> None:
    house, worker = build()
    messages = take(worker)
    if order == "newest first":
        messages.reverse()
    elif order == "from the middle":
        messages = messages[COUNT // 2 :] + messages[: COUNT // 2]
    for left, message in enumerate(messages, 1):
        assert settle(worker, "ack", message, delivery_token=facts(message)["delivery-token"])[0] == 0
        assert house.depth("jobs") == COUNT - left
    assert house.queue("jobs").groups["worker"].own_ids == {}
    assert verify(house.engine) == []
