"""A trace goes through: the W3C `traceparent` and `tracestate` of a publisher arrive wherever its message does.

They are user properties like any other (W3C Trace Context for MQTT). Sluice neither reads nor changes nor makes them.
"""

from __future__ import annotations

import json

import pytest

from sluice.wire.packets import Publish
from tests.broker.namespaces.kit import QueueHouse, facts, join, put, settle, take

TRACE = [
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("tracestate", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"),
]


def trace_of(message: Publish) -> list[tuple[str, str]]:
    return [pair for pair in message.properties().user if pair[0] in ("traceparent", "tracestate")]


@pytest.fixture
def house() -> QueueHouse:
    return QueueHouse([("jobs", {"retry_policy": {"max_retries": 1, "initial_backoff": "5s"}})])


def test_a_trace_goes_through_delivery_retry_and_dead_letter(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    assert put(worker, "$queue/jobs", b"x", user=TRACE)[0] == 0
    (first,) = take(worker)
    assert (facts(first)["attempt"], trace_of(first)) == ("1", TRACE)
    settle(worker, "nack", first)
    house.advance(6)
    (second,) = take(worker)
    assert (facts(second)["attempt"], trace_of(second)) == ("2", TRACE)
    settle(worker, "nack", second)
    reader = house.connect("reader-1")
    join(reader, "$queue/dlq/jobs")
    (letter,) = take(reader)
    assert facts(letter)["dead-reason"] == "max_retries"
    assert trace_of(letter) == TRACE


@pytest.mark.parametrize("end", ["kill", "restart"])
def test_a_trace_outlives_the_server(house: QueueHouse, end: str) -> None:
    put(house.connect("maker"), "$queue/jobs", b"x", user=TRACE)
    getattr(house, end)()
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    (message,) = take(worker)
    assert trace_of(message) == TRACE
    settle(worker, "reject", message)
    getattr(house, end)()
    reader = house.connect("reader-1")
    join(reader, "$queue/dlq/jobs")
    assert trace_of(take(reader)[0]) == TRACE


def test_every_group_gets_the_trace(house: QueueHouse) -> None:
    workers = [house.connect("billing-1"), house.connect("mailing-1")]
    for worker in workers:
        join(worker, "$queue/jobs")
    put(workers[0], "$queue/jobs", b"x", user=TRACE)
    for worker in workers:
        assert trace_of(take(worker)[0]) == TRACE


def test_a_captured_message_keeps_its_trace() -> None:
    house = QueueHouse()
    worker = house.connect("worker-1")
    put(worker, "$admin/queue/create", json.dumps({"name": "heat", "bindings": ["sensors/+/temp"]}).encode())
    join(worker, "$queue/heat")
    put(house.connect("sensor"), "sensors/7/temp", b"21", user=TRACE)
    assert trace_of(take(worker)[0]) == TRACE


def test_a_message_without_a_trace_gets_none(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    assert trace_of(take(worker)[0]) == []
