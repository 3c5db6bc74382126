"""W3C `traceparent` and `tracestate` of a publisher arrive with each delivery of its message.

They are user properties like any other (W3C Trace Context for MQTT). Sluice neither reads nor
changes nor creates them.
"""

from __future__ import annotations

import json

import pytest

from sluice.wire.packets import Publish
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, put, settle, take

TRACE = [
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("tracestate", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
]


def trace_of(message: Publish) -> list[tuple[str, str]]:
    return [
        pair
        for pair in message.decode_properties().user
        if pair[0] in ("traceparent", "tracestate")
    ]


@pytest.fixture
def harness() -> BrokerHarness:
    return BrokerHarness([("jobs", {"retry_policy": {"max_retries": 1, "initial_backoff": "5s"}})])


def test_trace_context_survives_delivery_retry_and_dead_letter(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    assert put(worker, "$queue/jobs", b"x", user=TRACE)[0] == 0
    (first,) = take(worker)
    assert (delivery_properties(first)["attempt"], trace_of(first)) == ("1", TRACE)
    settle(worker, "nack", first)
    harness.advance(6)
    (second,) = take(worker)
    assert (delivery_properties(second)["attempt"], trace_of(second)) == ("2", TRACE)
    settle(worker, "nack", second)
    reader = harness.connect("reader-1")
    join(reader, "$queue/dlq/jobs")
    (dead_letter,) = take(reader)
    assert delivery_properties(dead_letter)["dead-reason"] == "max_retries"
    assert trace_of(dead_letter) == TRACE


@pytest.mark.parametrize("end", ["kill", "restart"])
def test_trace_context_survives_a_restart(harness: BrokerHarness, end: str) -> None:
    put(harness.connect("maker"), "$queue/jobs", b"x", user=TRACE)
    getattr(harness, end)()
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    (message,) = take(worker)
    assert trace_of(message) == TRACE
    settle(worker, "reject", message)
    getattr(harness, end)()
    reader = harness.connect("reader-1")
    join(reader, "$queue/dlq/jobs")
    assert trace_of(take(reader)[0]) == TRACE


def test_every_group_gets_the_trace_context(harness: BrokerHarness) -> None:
    workers = [harness.connect("billing-1"), harness.connect("mailing-1")]
    for worker in workers:
        join(worker, "$queue/jobs")
    put(workers[0], "$queue/jobs", b"x", user=TRACE)
    for worker in workers:
        assert trace_of(take(worker)[0]) == TRACE


def test_bound_message_has_its_trace_context() -> None:
    harness = BrokerHarness()
    worker = harness.connect("worker-1")
    put(
        worker,
        "$admin/queue/create",
        json.dumps({"name": "heat", "bindings": ["sensors/+/temp"]}).encode(),
    )
    join(worker, "$queue/heat")
    put(harness.connect("sensor"), "sensors/7/temp", b"21", user=TRACE)
    assert trace_of(take(worker)[0]) == TRACE


def test_message_without_a_trace_context_gets_none(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    assert trace_of(take(worker)[0]) == []
