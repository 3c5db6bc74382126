"""`$queue/responses/<id>`: an answer waits in memory for the one who asked, for a while."""

from __future__ import annotations

import pytest

from sluice.broker.namespaces.responses import MAX_BYTES
from sluice.wire.packets import Ack
from sluice.wire.properties import PUBCOMP, PUBREL
from tests.broker.namespaces.kit import QueueHouse, join, payloads, put, take

TOPIC = "$queue/responses/4711"


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_an_answer_reaches_who_waits_for_it(house: QueueHouse, qos: int) -> None:
    asker, worker = house.connect("asker"), house.connect("worker")
    assert asker.subscribe(TOPIC, qos=qos) == [qos]
    worker.publish_fully(TOPIC, b"42", qos)
    (message,) = asker.messages()
    assert (message.topic.decode(), message.payload, message.qos) == (TOPIC, b"42", qos)


def test_an_answer_that_is_faster_than_the_subscription_waits_for_it(house: QueueHouse) -> None:
    worker, asker = house.connect("worker"), house.connect("asker")
    assert put(worker, TOPIC, b"42", user=[("a", "1")], correlation_data=b"c") == (0, "")
    house.advance(29)
    asker.subscribe(TOPIC, qos=1)
    (message,) = take(asker)
    assert (message.payload, message.properties().correlation_data) == (b"42", b"c")
    house.connect("other").subscribe("$queue/responses/other")
    asker.unsubscribe(TOPIC)
    asker.subscribe(TOPIC, qos=1)
    assert asker.take() == []  # it is taken once


def test_an_answer_that_has_waited_comes_with_no_more_than_the_quality_of_the_subscription(
    house: QueueHouse,
) -> None:
    worker, asker = house.connect("worker"), house.connect("asker")
    put(worker, TOPIC, b"42")
    asker.subscribe(TOPIC, qos=0)
    (message,) = asker.messages()
    assert (message.payload, message.qos) == (b"42", 0)


def test_an_answer_that_nobody_wants_is_gone_after_half_a_minute(house: QueueHouse) -> None:
    put(house.connect("worker"), TOPIC, b"42")
    house.advance(31)
    asker = house.connect("asker")
    asker.subscribe(TOPIC)
    assert asker.take() == []
    assert house.broker.router.door is not None and house.broker.router.door.responses is not None
    assert house.broker.router.door.responses.count == 0
    assert "responses/4711" not in house.engine.queues


def test_answers_that_were_fetched_or_have_expired_take_no_room(house: QueueHouse) -> None:
    """Twice as many bytes as may wait at a time, and never more than one answer of them at once."""
    worker, asker = house.connect("worker"), house.connect("asker")
    size = house.limits.max_packet_size // 2
    for nth in range(2 * MAX_BYTES // size):
        assert put(worker, TOPIC, b"x" * size) == (0, ""), nth
        if nth % 2:
            house.advance(31)
        else:
            asker.subscribe(TOPIC)
            assert len(asker.payloads()) == 1
            asker.unsubscribe(TOPIC)


def test_answers_have_one_consumer(house: QueueHouse) -> None:
    first, second = house.connect("first"), house.connect("second")
    first.subscribe(TOPIC)
    reason, why = join(second, TOPIC)
    assert (reason, "another client" in why) == (0x87, True)
    assert first.subscribe(TOPIC) == [0]
    put(second, TOPIC, b"x")
    assert first.payloads() == [b"x"]
    first.disconnect()
    assert join(second, TOPIC)[0] == 1


def test_a_client_takes_all_of_its_answers_with_one_filter(house: QueueHouse) -> None:
    asker, worker = house.connect("asker"), house.connect("worker")
    put(worker, "$queue/responses/asker/1", b"1")
    asker.subscribe("$queue/responses/asker/+")
    put(worker, "$queue/responses/asker/2", b"2")
    put(worker, "$queue/responses/other/2", b"no")
    assert asker.payloads() == [b"1", b"2"]


@pytest.mark.parametrize("topic_filter", ["$queue/responses/#", "$queue/responses/+", "$queue/responses/+/1"])
def test_nobody_takes_the_answers_of_all(house: QueueHouse, topic_filter: str) -> None:
    asker, other = house.connect("asker"), house.connect("other")
    asker.subscribe(TOPIC, qos=1)
    reason, why = join(other, topic_filter)
    assert (reason, "$queue/responses/<id>" in why) == (0x8F, True)
    put(house.connect("worker"), TOPIC, b"42")
    assert payloads(take(asker)) == [b"42"]


def test_ten_thousand_small_answers_wait_and_no_more(house: QueueHouse) -> None:
    worker = house.connect("worker")
    for nth in range(10_000):
        worker.publish(f"$queue/responses/{nth}", b"x", 0)
    reason, why = put(worker, TOPIC, b"x")
    assert (reason, "10000 responses wait" in why) == (0x97, True)
    asker = house.connect("asker")
    asker.subscribe("$queue/responses/77")
    assert asker.payloads() == [b"x"]
    assert put(worker, TOPIC, b"x")[0] == 0


def test_an_answer_of_quality_2_comes_to_its_end(house: QueueHouse) -> None:
    worker = house.connect("worker")
    assert put(worker, TOPIC, b"x", 2, packet_id=9) == (0, "")
    assert put(worker, TOPIC, b"x", 2, packet_id=9, dup=True) == (0, "")
    worker.send(Ack(PUBREL, 9))
    worker.first_ack(PUBCOMP, 9, 0)
    asker = house.connect("asker")
    asker.subscribe(TOPIC)
    assert payloads(asker.messages()) == [b"x"]
