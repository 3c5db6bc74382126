"""An ack that publishes: both in one step, or nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.broker.acl import AccessControlList, Grant
from sluice.wire.packets import Publish
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, settle, take
from tests.broker.peers import Client


def work(harness: BrokerHarness, count: int = 1) -> tuple[Client, list[Publish]]:
    """Return a worker of `tasks` and its deliveries."""
    author = harness.connect("author")
    for number in range(count):
        put(author, "$queue/tasks", b"%d" % number)
    worker = harness.connect("worker-1")
    join(worker, "$queue/tasks")
    return worker, take(worker)


def create(harness: BrokerHarness, config: dict[str, object]) -> None:
    author = harness.connect("author")
    assert put(author, "$admin/queue/create", json.dumps(config).encode()) == (0, "")


def then(topic: str, payload: str = "next", **more: object) -> str:
    return json.dumps({"topic": topic, "payload": payload, **more})


def test_ack_and_its_messages_are_one_step(harness: BrokerHarness) -> None:
    worker, (message,) = work(harness)
    more: dict[str, Any] = {
        "properties": {"partition-key": "k", "message-id": "m-1"},
        "content_type": "text/x",
    }
    assert settle(worker, "ack", message, then=then("$queue/next", **more)) == (0, "")
    harness.crash()
    assert harness.depth("tasks") == 0
    reader = harness.connect("reader")
    join(reader, "$queue/next")
    (found,) = take(reader)
    properties = delivery_properties(found)
    assert (found.payload, properties["message-id"], properties["partition-key"]) == (
        b"next",
        "m-1",
        "k",
    )
    assert found.decode_properties().content_type == "text/x"


@pytest.mark.parametrize("keep", [0, 1])
def test_power_cut_undoes_both_or_neither(harness: BrokerHarness, keep: int) -> None:
    worker, (message,) = work(harness)
    harness.store.hold()
    options = {"message-id": delivery_properties(message)["message-id"]}
    worker.publish(
        "$queue/tasks/$ack", b"", qos=1, user=[*options.items(), ("then", then("$queue/next"))]
    )
    harness.store.release(keep)
    harness.crash()
    assert harness.depth("tasks") == 1 - harness.depth("next")


def test_messages_are_given_as_payload_too(harness: BrokerHarness) -> None:
    worker, (message,) = work(harness)
    body = json.dumps(
        [
            {"topic": "$queue/a", "payload_base64": "AAH/"},
            {"topic": "$queue/b", "payload": "b", "expiry": "1h"},
        ]
    )
    message_id = delivery_properties(message)["message-id"]
    reason, why = put(
        worker,
        f"$queue/tasks/$ack/{message_id}",
        body.encode(),
        content_type="application/vnd.sluice.then+json",
    )
    assert (reason, why) == (0, "")
    assert (harness.depth("tasks"), harness.depth("a"), harness.depth("b")) == (0, 1, 1)
    reader = harness.connect("reader")
    join(reader, "$queue/a")
    assert payloads(take(reader)) == [b"\x00\x01\xff"]


def test_refused_message_refuses_the_step_and_the_lease_stays(harness: BrokerHarness) -> None:
    worker, (message,) = work(harness)
    create(harness, {"name": "small", "limits": {"max_queue_depth": 1}})
    put(worker, "$queue/small", b"full")
    for topic, reason in (("$queue/small", 0x97), ("plain", 0x90), ("$queue/a/$ack", 0x90)):
        found, _ = settle(worker, "ack", message, then=then(topic))
        assert found == reason
    assert settle(worker, "ack", message, then='{"topic": 1}')[0] == 0x99
    assert settle(worker, "ack", message, then=then("$queue/x", pay="x"))[0] == 0x99
    assert harness.depth("tasks") == 1 and harness.depth("next") == 0
    assert settle(worker, "ack", message, then=then("$queue/next")) == (0, "")
    assert (harness.depth("tasks"), harness.depth("next")) == (0, 1)


def test_all_messages_are_checked_before_the_first_is_published(harness: BrokerHarness) -> None:
    worker, (message,) = work(harness)
    create(harness, {"name": "small", "limits": {"max_queue_depth": 1}})
    ident = ("message-id", delivery_properties(message)["message-id"])
    texts = [then("$queue/next"), then("$queue/small"), then("$queue/small")]
    found = put(worker, "$queue/tasks/$ack", user=[ident, *(("then", one) for one in texts)])
    assert found[0] == 0x97
    assert (harness.depth("tasks"), harness.depth("next"), harness.depth("small")) == (1, 0, 0)


def test_message_that_the_rules_deny_refuses_the_step(harness: BrokerHarness) -> None:
    worker, (message,) = work(harness)
    rules = AccessControlList([])
    harness.broker.registry.sessions["worker-1"].grant = Grant(rules, "", "worker-1")
    grant = harness.broker.registry.sessions["worker-1"].grant
    assert grant is not None
    grant._publish_cache[b"$queue/tasks/$ack"] = True
    assert settle(worker, "ack", message, then=then("$queue/next"))[0] == 0x87
    assert (harness.depth("tasks"), harness.depth("next")) == (1, 0)


def test_step_that_is_repeated_happens_once(harness: BrokerHarness) -> None:
    worker, (message,) = work(harness)
    assert settle(worker, "ack", message, then=then("$queue/next")) == (0, "")
    assert settle(worker, "ack", message, then=then("$queue/next"))[0] == 0x10
    assert harness.depth("next") == 1


def test_batch_is_settled_as_a_whole(harness: BrokerHarness) -> None:
    worker, messages = work(harness, 3)
    ids = [("message-id", delivery_properties(one)["message-id"]) for one in messages]
    known = [("then", then("$queue/next"))]
    found = put(worker, "$queue/tasks/$ack", user=[*ids, ("message-id", "1-99"), *known])
    assert found[0] == 0x10 and harness.depth("tasks") == 3
    assert put(worker, "$queue/tasks/$ack", user=[*ids, *known]) == (0, "")
    assert (harness.depth("tasks"), harness.depth("next")) == (0, 1)


def test_bound_queues_get_their_copies(harness: BrokerHarness) -> None:
    worker, (message,) = work(harness)
    create(harness, {"name": "copy", "bindings": ["$queue/next"]})
    assert settle(worker, "ack", message, then=then("$queue/next")) == (0, "")
    assert (harness.depth("next"), harness.depth("copy")) == (1, 1)
