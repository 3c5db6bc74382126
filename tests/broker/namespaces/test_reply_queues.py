"""`$queue/responses/<id>`: a response waits in memory for its requester, for a limited time."""

from __future__ import annotations

import pytest

from sluice.broker.namespaces.responses import MAX_PENDING_BYTES
from sluice.wire.packets import Ack
from sluice.wire.properties import PUBCOMP, PUBREL
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, payloads, put, take

TOPIC = "$queue/responses/4711"


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_reply_reaches_its_subscriber(harness: BrokerHarness, qos: int) -> None:
    requester, worker = harness.connect("asker"), harness.connect("worker")
    assert requester.subscribe(TOPIC, qos=qos) == [qos]
    worker.publish_fully(TOPIC, b"42", qos)
    (message,) = requester.messages()
    assert (message.topic.decode(), message.payload, message.qos) == (TOPIC, b"42", qos)


def test_reply_faster_than_the_subscription_waits_for_it(harness: BrokerHarness) -> None:
    worker, requester = harness.connect("worker"), harness.connect("asker")
    assert put(worker, TOPIC, b"42", user=[("a", "1")], correlation_data=b"c") == (0, "")
    harness.advance(29)
    requester.subscribe(TOPIC, qos=1)
    (message,) = take(requester)
    assert (message.payload, message.decode_properties().correlation_data) == (b"42", b"c")
    harness.connect("other").subscribe("$queue/responses/other")
    requester.unsubscribe(TOPIC)
    requester.subscribe(TOPIC, qos=1)
    assert requester.take() == []  # it is delivered once


def test_waiting_reply_arrives_with_at_most_the_qos_of_the_subscription(
    harness: BrokerHarness,
) -> None:
    worker, requester = harness.connect("worker"), harness.connect("asker")
    put(worker, TOPIC, b"42")
    requester.subscribe(TOPIC, qos=0)
    (message,) = requester.messages()
    assert (message.payload, message.qos) == (b"42", 0)


def test_unclaimed_reply_is_deleted_after_thirty_seconds(harness: BrokerHarness) -> None:
    put(harness.connect("worker"), TOPIC, b"42")
    harness.advance(31)
    requester = harness.connect("asker")
    requester.subscribe(TOPIC)
    assert requester.take() == []
    assert harness.core.responses.pending_count == 0
    assert "responses/4711" not in harness.engine.queues


def test_fetched_and_expired_replies_free_their_space(harness: BrokerHarness) -> None:
    """Twice as many bytes as the limit, but only one response of them waits at a time."""
    worker, requester = harness.connect("worker"), harness.connect("asker")
    size = harness.limits.max_packet_size // 2
    for nth in range(2 * MAX_PENDING_BYTES // size):
        assert put(worker, TOPIC, b"x" * size) == (0, ""), nth
        if nth % 2:
            harness.advance(31)
        else:
            requester.subscribe(TOPIC)
            assert len(requester.payloads()) == 1
            requester.unsubscribe(TOPIC)


def test_reply_queue_has_one_consumer(harness: BrokerHarness) -> None:
    first, second = harness.connect("first"), harness.connect("second")
    first.subscribe(TOPIC)
    reason, why = join(second, TOPIC)
    assert (reason, "another client" in why) == (0x87, True)
    assert first.subscribe(TOPIC) == [0]
    put(second, TOPIC, b"x")
    assert first.payloads() == [b"x"]
    first.disconnect()
    assert join(second, TOPIC)[0] == 1


def test_client_receives_all_its_replies_with_one_filter(harness: BrokerHarness) -> None:
    requester, worker = harness.connect("asker"), harness.connect("worker")
    put(worker, "$queue/responses/asker/1", b"1")
    requester.subscribe("$queue/responses/asker/+")
    put(worker, "$queue/responses/asker/2", b"2")
    put(worker, "$queue/responses/other/2", b"no")
    assert requester.payloads() == [b"1", b"2"]


@pytest.mark.parametrize(
    "topic_filter", ["$queue/responses/#", "$queue/responses/+", "$queue/responses/+/1"]
)
def test_subscription_to_all_replies_is_refused(harness: BrokerHarness, topic_filter: str) -> None:
    requester, other = harness.connect("asker"), harness.connect("other")
    requester.subscribe(TOPIC, qos=1)
    reason, why = join(other, topic_filter)
    assert (reason, "$queue/responses/<id>" in why) == (0x8F, True)
    put(harness.connect("worker"), TOPIC, b"42")
    assert payloads(take(requester)) == [b"42"]


def test_waiting_replies_are_limited_to_ten_thousand(harness: BrokerHarness) -> None:
    worker = harness.connect("worker")
    for nth in range(10_000):
        worker.publish(f"$queue/responses/{nth}", b"x", 0)
    reason, why = put(worker, TOPIC, b"x")
    assert (reason, "10000 responses are waiting" in why) == (0x97, True)
    requester = harness.connect("asker")
    requester.subscribe("$queue/responses/77")
    assert requester.payloads() == [b"x"]
    assert put(worker, TOPIC, b"x")[0] == 0


def test_qos_2_reply_is_completed(harness: BrokerHarness) -> None:
    worker = harness.connect("worker")
    assert put(worker, TOPIC, b"x", 2, packet_id=9) == (0, "")
    assert put(worker, TOPIC, b"x", 2, packet_id=9, dup=True) == (0, "")
    worker.send(Ack(PUBREL, 9))
    worker.first_ack(PUBCOMP, 9, 0)
    requester = harness.connect("asker")
    requester.subscribe(TOPIC)
    assert payloads(requester.messages()) == [b"x"]
