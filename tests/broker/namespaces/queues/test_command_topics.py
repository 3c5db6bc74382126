"""Commands on waiting messages over MQTT: `$cancel`, and what the broker answers."""

from __future__ import annotations

import json

import pytest

from sluice.wire.packets import V311
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, take
from tests.broker.peers import Client

IN_DELIVERY = 0x83
UNKNOWN = 0x10


def publish(client: Client, *ids: str, **options: str) -> None:
    for own_id in ids:
        assert (
            put(client, "$queue/tasks", own_id.encode(), options={"message-id": own_id} | options)[
                0
            ]
            == 0
        )


@pytest.mark.parametrize("qos", [1, 2])
def test_waiting_message_is_cancelled_by_the_id_of_its_publisher(
    harness: BrokerHarness, qos: int
) -> None:
    client = harness.connect("shop")
    publish(client, "a", "b", "c")
    assert put(client, "$queue/tasks/$cancel/b", qos=qos) == (0, "")
    worker = harness.connect("worker-1")
    join(worker, "$queue/tasks")
    assert sorted(payloads(take(worker))) == [b"a", b"c"]


def test_waiting_message_is_cancelled_by_its_generated_id(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    put(client, "$queue/tasks", b"work")
    (partition,) = (one for one in harness.queue("tasks").partitions if one.live_count)
    assert put(client, f"$queue/tasks/$cancel/{partition.pid}-0") == (0, "")
    assert harness.depth("tasks") == 0
    assert put(client, f"$queue/tasks/$cancel/{partition.pid}-0")[0] == UNKNOWN


def test_acknowledged_cancellation_survives_a_power_cut(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    publish(client, "a")
    assert put(client, "$queue/tasks/$cancel/a")[0] == 0
    harness.crash()
    worker = harness.connect("worker-1")
    join(worker, "$queue/tasks")
    assert take(worker) == []


def test_cancellation_is_too_late_while_a_consumer_has_the_message(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/tasks")
    client = harness.connect("shop")
    publish(client, "a")
    (message,) = take(worker)
    reason, text = put(client, "$queue/tasks/$cancel/a")
    assert reason == IN_DELIVERY
    assert "too late: message 'a' is in delivery to consumer worker-1 of group worker" in text
    name = delivery_properties(message)["message-id"]
    assert put(worker, f"$queue/tasks/$ack/{name}")[0] == 0
    reason, text = put(client, "$queue/tasks/$cancel/a")
    assert (reason, "has no message 'a'" in text) == (UNKNOWN, True)


def test_several_ids_are_cancelled_as_far_as_possible(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    publish(client, "a", "b", "c", "d", "e")
    user = [("message-id", "a"), ("message-id", "b")]
    assert put(client, "$queue/tasks/$cancel", user=user) == (0, "")
    assert put(client, "$queue/tasks/$cancel", json.dumps(["c", "x", "d"]).encode())[0] == UNKNOWN
    reason, text = put(client, "$queue/tasks/$cancel", json.dumps(["x", "y"]).encode())
    assert (reason, "This applies to 2 of 2" in text) == (UNKNOWN, True)
    assert harness.depth("tasks") == 1


def test_command_without_an_id_or_with_an_unknown_queue_is_refused(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    publish(client, "a")
    assert put(client, "$queue/tasks/$cancel")[0] == 0x99
    assert put(client, "$queue/other/$cancel/a")[0] == 0x90


@pytest.mark.parametrize("known", ["a", "x"])
def test_client_of_3_1_1_gets_its_puback_in_any_case(harness: BrokerHarness, known: str) -> None:
    publish(harness.connect("shop"), "a")
    client = harness.connect("old", V311)
    assert put(client, f"$queue/tasks/$cancel/{known}") == (0, "")
    assert harness.depth("tasks") == (0 if known == "a" else 1)


def test_delayed_message_is_promoted_and_waiting_message_is_delayed(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    publish(client, "a", delay="10m")
    publish(client, "b", "c")
    assert put(client, "$queue/tasks/$reschedule/a", options={"delay": "0s"}) == (0, "")
    assert put(client, "$queue/tasks/$reschedule/b", options={"delay": "10s"}) == (0, "")
    later = int((harness.loop.now + 20.0) * 1000)
    assert put(client, "$queue/tasks/$reschedule", b"c", options={"deliver-at": later})[0] == 0
    worker = harness.connect("worker-1")
    join(worker, "$queue/tasks")
    assert payloads(take(worker)) == [b"a"]
    harness.advance(11.0)
    assert payloads(take(worker)) == [b"b"]
    reason, text = put(client, "$queue/tasks/$reschedule/b", options={"delay": "1m"})
    assert (reason, "too late" in text) == (IN_DELIVERY, True)
    harness.advance(10.0)
    assert payloads(take(worker)) == [b"c"]


def test_reschedule_needs_a_time(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    publish(client, "a")
    reason, text = put(client, "$queue/tasks/$reschedule/a")
    assert (reason, "no time is given" in text) == (0x99, True)
    assert put(client, "$queue/tasks/$reschedule/a", options={"delay": "soon"})[0] == 0x99
