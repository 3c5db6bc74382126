"""Deliveries with the same publisher id: a settlement finds the right one, with one search."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.queues.model.ledger import verify
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, put, settle, take
from tests.broker.peers import Client

COUNT = 20


def build() -> tuple[BrokerHarness, Client]:
    """Return a worker that holds deliveries of one queue, all with the id 1."""
    harness = BrokerHarness([("jobs", {"bindings": ["dev/#"]})])
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=COUNT)
    maker = harness.connect("maker")
    for nth in range(COUNT):
        put(maker, f"dev/{nth}", b"%d" % nth, user=[("message-id", "1")])
    return harness, worker


def settle_many(client: Client, ids: list[str], **properties: Any) -> tuple[int, str]:
    return put(client, "$queue/jobs/$ack", json.dumps(ids).encode(), **properties)


def test_refused_id_is_searched_once_for_each_packet() -> None:
    """Repeats count as refused too, but cost nothing: a search may visit thousands."""
    harness, _ = build()
    thief = harness.connect("thief")
    user = [("consumer-group", "worker"), ("delivery-token", "1-2")]
    reason, why = settle_many(thief, ["1"] * 50, user=user)
    assert reason >= 0x80
    assert "50 of 50" in why
    assert harness.counters.wrong_tokens == 1
    assert harness.depth("jobs") == COUNT


def test_repeated_id_settles_as_many_deliveries_of_its_holder() -> None:
    harness, worker = build()
    take(worker)
    assert settle_many(worker, ["1"] * 5)[0] == 0
    assert harness.depth("jobs") == COUNT - 5
    assert "5 of 20" in settle_many(worker, ["1"] * COUNT)[1]
    assert harness.depth("jobs") == 0


@pytest.mark.parametrize("order", ["oldest first", "newest first", "from the middle"])
def test_deliveries_with_one_id_are_settled_in_any_order(order: str) -> None:
    harness, worker = build()
    messages = take(worker)
    if order == "newest first":
        messages.reverse()
    elif order == "from the middle":
        messages = messages[COUNT // 2 :] + messages[: COUNT // 2]
    for left, message in enumerate(messages, 1):
        assert (
            settle(
                worker,
                "ack",
                message,
                delivery_token=delivery_properties(message)["delivery-token"],
            )[0]
            == 0
        )
        assert harness.depth("jobs") == COUNT - left
    assert harness.queue("jobs").groups["worker"].leases_by_message_id == {}
    assert verify(harness.engine.queues) == []
