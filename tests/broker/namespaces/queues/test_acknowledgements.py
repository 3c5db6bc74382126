"""What an acknowledgement promises, when it is withheld, and how a refusal is told."""

from __future__ import annotations

import pytest

from sluice.broker.acl.grants import Grant
from sluice.broker.namespaces.queues.reason_mapping import reason_of, subscribe_reason_of
from sluice.broker.acl.acl import Book
from sluice.errors import QueueError
from sluice.wire.packets import V311, Ack, Pingreq
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.namespaces.kit import QueueHouse, facts, join, payloads, put, settle, take

SMALL = [("#", {"limits": {"max_queue_depth": 2, "max_message_size": 10}})]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
def test_the_acknowledgement_leaves_when_the_store_has_the_message_and_not_before(
    house: QueueHouse, version: int, qos: int, kind: int
) -> None:
    client = house.connect("maker", version)
    house.store.hold()
    packet_id = client.publish("$queue/jobs", b"x", qos)
    house.advance(60)
    assert client.take() == []
    house.store.release()
    house.loop.settle()
    client.first_ack(kind, packet_id, 0)


def test_a_message_is_delivered_when_the_store_has_it_and_not_before(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    house.store.hold()
    worker.publish("$queue/jobs", b"x", 0)
    assert worker.take() == []
    house.store.release()
    house.loop.settle()
    assert payloads(worker.messages()) == [b"x"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_quality_of_service_leads_into_a_queue(house: QueueHouse, qos: int) -> None:
    maker, worker = house.connect("maker"), house.connect("worker-1")
    maker.publish_fully("$queue/jobs", b"x", qos)
    join(worker, "$queue/jobs", qos=2)
    (message,) = take(worker)
    assert (message.payload, message.qos) == (b"x", 1)


@pytest.mark.parametrize("when", ["before the commit", "after the commit", "after a reconnect"])
def test_quality_2_is_stored_exactly_once(house: QueueHouse, when: str) -> None:
    maker = house.connect_lasting("maker")
    house.store.hold()
    maker.publish("$queue/jobs", b"x", 2, packet_id=7)
    if when == "before the commit":
        maker.publish("$queue/jobs", b"x", 2, packet_id=7, dup=True)
        assert maker.take() == []
    elif when == "after a reconnect":
        maker.drop()
        maker = house.connect_lasting("maker")
        maker.publish("$queue/jobs", b"x", 2, packet_id=7, dup=True)
        assert maker.take() == []
    house.store.release()
    house.loop.settle()
    maker.first_ack(PUBREC, 7, 0)
    assert maker.take() == []
    maker.publish("$queue/jobs", b"x", 2, packet_id=7, dup=True)
    maker.first_ack(PUBREC, 7, 0)
    maker.send(Ack(PUBREL, 7))
    maker.first_ack(PUBCOMP, 7, 0)
    assert house.depth("jobs") == 1


def test_an_id_that_is_used_again_after_a_reconnect_is_not_acknowledged_by_the_past(
    house: QueueHouse,
) -> None:
    maker = house.connect_lasting("maker")
    house.store.hold()
    maker.publish("$queue/jobs", b"first", 1, packet_id=7)
    maker.drop()
    maker = house.connect_lasting("maker")
    maker.publish("$queue/jobs", b"second", 1, packet_id=7)
    house.store.release(1)
    house.loop.settle()
    assert maker.take() == []  # the first one is safe, and the client did not say so for the second
    house.store.release()
    house.loop.settle()
    maker.first_ack(PUBACK, 7, 0)
    assert maker.take() == []


def test_unanswered_publishes_of_an_old_connection_do_not_count_against_a_new_one() -> None:
    house = QueueHouse(receive_maximum=3)
    maker = house.connect_lasting("maker")
    house.store.hold()
    for _ in range(3):
        maker.publish("$queue/jobs", b"x", 1)
    maker.drop()
    maker = house.connect_lasting("maker")
    for _ in range(3):
        maker.publish("$queue/jobs", b"x", 1)
    assert not maker.closed
    house.store.release()
    house.loop.settle()
    assert len(maker.take()) == 3
    house.store.hold()
    for _ in range(4):
        maker.publish("$queue/jobs", b"x", 1)
    assert maker.fault()[0] == 0x93


def test_an_ack_is_confirmed_when_the_store_has_it_and_not_before(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    house.store.hold()
    packet_id = worker.publish("$queue/jobs/$ack", facts(message)["message-id"].encode(), 1)
    assert worker.take() == []
    house.store.release()
    house.loop.settle()
    worker.first_ack(PUBACK, packet_id, 0)
    house.kill()
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    assert worker.take() == []


def test_what_was_acknowledged_survives_a_crash_and_what_was_not_may_not(house: QueueHouse) -> None:
    maker = house.connect("maker")
    put(maker, "$queue/jobs", b"kept")
    house.store.hold()
    maker.publish("$queue/jobs", b"lost", 1)
    house.crash()
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    assert payloads(take(worker)) == [b"kept"]


def test_what_was_delivered_and_not_settled_comes_again_after_a_crash(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (before,) = take(worker)
    house.advance(1)
    house.crash()
    worker, other = house.connect("worker-1"), house.connect("worker-2")
    join(other, "$queue/jobs")
    (after,) = take(other)
    assert after.payload == b"x"
    assert facts(after)["message-id"] == facts(before)["message-id"]
    reason, _ = settle(worker, "ack", after, delivery_token=facts(before)["delivery-token"])
    assert reason == 0x83  # it is another's now
    assert settle(other, "ack", after)[0] == 0


def test_work_that_was_done_before_a_crash_and_is_told_after_it_counts(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (before,) = take(worker)
    house.advance(1)
    house.crash()
    worker = house.connect("worker-1")
    reason, _ = settle(worker, "ack", before, delivery_token="7fffffffffffffff")
    assert reason == 0x83  # it was never given out
    reason, _ = settle(worker, "ack", before, delivery_token=facts(before)["delivery-token"])
    assert reason == 0
    join(worker, "$queue/jobs")
    assert take(worker) == []


def test_a_delivery_with_its_publishers_id_is_settled_after_a_crash_by_its_token(house: QueueHouse) -> None:
    """The id names no place in the log, so the token has to."""
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x", wishes={"message-id": "mine"})
    (before,) = take(worker)
    assert facts(before)["message-id"] == "mine"
    house.advance(1)
    house.crash()
    worker = house.connect("worker-1")
    reason, _ = settle(worker, "ack", before, delivery_token=facts(before)["delivery-token"])
    assert reason == 0
    join(worker, "$queue/jobs")
    assert take(worker) == []


# ---- refusals


def full(house: QueueHouse) -> None:
    maker = house.connect("filler")
    for _ in range(2):
        assert put(maker, "$queue/jobs", b"x")[0] == 0


@pytest.mark.parametrize("qos", [1, 2])
def test_a_full_queue_says_so(qos: int) -> None:
    house = QueueHouse(SMALL)
    full(house)
    maker = house.connect("maker")
    reason, why = put(maker, "$queue/jobs", b"x", qos)
    assert reason == 0x97
    assert "full at 2" in why and "max_queue_depth" in why
    assert house.depth("jobs") == 2
    if qos == 2:  # refused: the id is free at once, and nothing is to be released
        assert put(maker, "$queue/other", b"x", qos, packet_id=1)[0] == 0


@pytest.mark.parametrize("topic", ["$queue/jobs", "$ECQ/w/car-1/speed"])
def test_what_the_store_cannot_take_now_is_refused_with_the_reason(house: QueueHouse, topic: str) -> None:
    maker = house.connect("maker")
    house.engine.unavailable = "the line to the store is lost"
    reason, why = put(maker, topic, b"x")
    assert reason == 0x83
    assert "line to the store" in why and "again later" in why
    house.engine.unavailable = ""
    assert put(maker, topic, b"x") == (0, "")


def test_refusals_have_the_reasons_that_their_packets_know() -> None:
    """But for "too large" (0x95), which no other says."""
    kinds, puback, suback = [QueueError], set[int](), set[int]()
    while kinds:
        kind = kinds.pop()
        kinds.extend(kind.__subclasses__())
        puback.add(reason_of(kind.__new__(kind)))
        suback.add(subscribe_reason_of(kind.__new__(kind)))
    assert puback - {0x95} <= {0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99}
    # A subscription settles nothing and has no size: UnknownDelivery and its like have no code there.
    assert suback - {0x10, 0x95} <= {0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2}


@pytest.mark.parametrize("qos", [1, 2])
def test_a_refusal_that_quotes_a_client_at_length_is_told_in_short(house: QueueHouse, qos: int) -> None:
    client = house.connect("worker-1")
    join(client, "$queue/jobs")
    reason, why = put(client, "$queue/jobs/$ack", "😀".encode() * 30_000, qos)
    assert reason == 0x10
    assert len(why) <= 1024
    assert why.startswith("no delivery '😀😀") and why.endswith("the group is another one")


@pytest.mark.parametrize("name", ["\\u0000", "\\n"])
def test_a_refusal_quotes_nothing_that_no_client_could_read(house: QueueHouse, name: str) -> None:
    reason, why = put(
        house.connect("maker"), "$admin/queue/create", b'{"name": "jobs", "a%sb": 1}' % name.encode()
    )
    assert reason == 0x99
    assert "a?b is not a key" in why


@pytest.mark.parametrize("qos", [1, 2])
def test_a_message_too_large_is_told_the_limit(qos: int) -> None:
    house = QueueHouse(SMALL)
    reason, why = put(house.connect("maker"), "$queue/jobs", b"x" * 11, qos)
    assert reason == 0x95
    assert "11" in why and "10" in why and "max_message_size" in why
    assert house.depth("jobs") == 0


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize(
    ("topic", "payload"), [("$queue/jobs", b"x"), ("$queue/new", b"x" * 11), ("$queue/a//b", b"x")]
)
def test_an_old_client_whose_message_was_not_stored_is_not_answered_and_cut_off(
    topic: str, payload: bytes, qos: int
) -> None:
    house = QueueHouse(SMALL)
    full(house)
    maker = house.connect("maker", V311)
    maker.publish(topic, payload, qos)
    assert maker.closed
    assert maker.take() == []
    assert house.depth("jobs") == 2


def test_what_was_accepted_before_a_refusal_is_kept_though_the_old_client_is_cut_off() -> None:
    house = QueueHouse(SMALL)
    maker = house.connect("maker", V311)
    maker.publish("$queue/jobs", b"x", 1)
    maker.publish("$queue/jobs", b"x" * 11, 1)
    assert maker.closed
    assert house.depth("jobs") == 1


def test_a_client_that_wants_no_reasons_gets_the_code_alone() -> None:
    house = QueueHouse(SMALL)
    full(house)
    assert put(house.connect("maker", request_problem=0), "$queue/jobs", b"x") == (0x97, "")


def test_a_full_queue_that_drops_its_oldest_takes_the_new_one() -> None:
    house = QueueHouse([("#", {"limits": {"max_queue_depth": 2, "overflow": "drop-oldest"}})])
    maker, worker = house.connect("maker"), house.connect("worker-1")
    for nth in range(4):
        assert put(maker, "$queue/jobs", b"%d" % nth) == (0, "")
        house.advance(1)
    join(worker, "$queue/jobs")
    assert sorted(payloads(take(worker))) == [b"2", b"3"]


def test_a_full_queue_that_buries_what_it_cannot_take_acknowledges_it() -> None:
    house = QueueHouse([("jobs", {"limits": {"max_queue_depth": 2, "overflow": "dead-letter"}})])
    maker, reader = house.connect("maker"), house.connect("reader-1")
    for nth in range(3):
        assert put(maker, "$queue/jobs", b"%d" % nth) == (0, "")
    join(reader, "$queue/dlq/jobs")
    (letter,) = take(reader)
    assert (letter.payload, facts(letter)["dead-reason"]) == (b"2", "overflow")
    assert house.depth("jobs") == 2


# ---- a slow disk


def test_who_publishes_faster_than_the_disk_takes_is_not_read_until_it_has_taken(house: QueueHouse) -> None:
    flood, other = house.connect("flood"), house.connect("other")
    join(other, "$queue/jobs")
    house.store.hold()
    sent = 0
    while flood.transport.reading:
        flood.publish("$queue/jobs", b"x" * 100_000, 0)
        sent += 1
        assert sent < 200, "nothing holds it back"
    assert 80 <= sent <= 90  # 8 MiB behind the frame under way
    assert other.transport.reading
    other.ping()
    house.store.release(1)
    house.loop.settle()
    assert flood.transport.reading
    house.store.release()
    house.loop.settle()
    assert house.queue("jobs").enqueued == sent


def test_a_plain_publisher_is_held_back_as_well_when_it_fills_what_waits_for_the_disk(
    house: QueueHouse,
) -> None:
    sleeper = house.connect_lasting("sleeper")
    sleeper.subscribe("news", qos=1)
    sleeper.drop()
    flood = house.connect("flood")
    house.store.hold()
    sent = 0
    while flood.transport.reading:
        flood.publish("news", b"x" * 100_000, 1)
        sent += 1
        assert sent < 200, "nothing holds it back"
    house.store.release()
    house.loop.settle()
    assert flood.transport.reading
    assert len(flood.take()) == sent


def test_who_is_held_back_is_not_taken_for_silent(house: QueueHouse) -> None:
    flood = house.connect("flood", keep_alive=10)
    house.store.hold()
    while flood.transport.reading:
        flood.publish("$queue/jobs", b"x" * 1_000_000, 0)
    house.advance(60)
    assert not flood.closed
    house.store.release()
    house.loop.settle()
    house.advance(14)
    assert not flood.closed
    house.advance(3)
    assert flood.closed


def test_who_goes_away_while_held_back_is_forgotten(house: QueueHouse) -> None:
    flood = house.connect("flood")
    house.store.hold()
    while flood.transport.reading:
        flood.publish("$queue/jobs", b"x" * 1_000_000, 0)
    flood.drop()
    house.store.release()
    house.loop.settle()
    house.connect("other").ping()


def test_a_captured_flood_of_quality_0_is_held_back_as_well() -> None:
    house = QueueHouse([("copies", {"bindings": ["sensors/#"]})])
    flood = house.connect("flood")
    join(flood, "$queue/copies")
    house.store.hold()
    sent = 0
    while flood.transport.reading:
        flood.publish("sensors/1", b"x" * 100_000, 0)
        sent += 1
        assert sent < 200, "nothing holds it back"
    house.store.release()
    house.loop.settle()
    assert flood.transport.reading
    assert house.queue("copies").enqueued == sent


def test_a_line_that_is_held_for_two_reasons_is_read_again_when_both_are_over(house: QueueHouse) -> None:
    house.limits.write_buffer_high = 10_000
    flood = house.connect("flood")
    flood.subscribe("echo")
    flood.transport.jammed = True
    for _ in range(3):
        flood.publish("echo", b"x" * 10_000, 0)
    while flood.transport.reading:
        flood.send(Pingreq())  # asks without reading the answers
    house.store.hold()
    house.connect("other").publish("$queue/jobs", b"x", 0)
    while not flood.connection.held:  # what was read already is still worked off
        flood.publish("$queue/jobs", b"x" * 1_000_000, 0)
    flood.transport.drain()
    assert not flood.transport.reading  # it reads again, the store does not write yet
    house.store.release()
    house.loop.settle()
    assert flood.transport.reading


def test_a_store_that_has_caught_up_does_not_lift_a_limit_of_the_rate(house: QueueHouse) -> None:
    house.limits.max_publish_rate = 20.0
    flood = house.connect("flood")
    house.store.hold()
    house.connect("other").publish("$queue/jobs", b"x", 0)
    while not flood.connection.held:
        flood.publish("$queue/jobs", b"x" * 1_000_000, 0)
    for _ in range(100):  # what was read already is worked off
        flood.publish("$queue/jobs", b"x", 0)
    house.store.release()
    house.loop.settle()
    assert not flood.transport.reading
    house.advance(3)
    assert not flood.transport.reading
    house.advance(3)
    assert flood.transport.reading


# ---- who may not


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("topic", ["$queue/jobs", "$queue/jobs/$ack/1-1", "$admin/queue/create"])
def test_who_may_not_is_told_so_and_nothing_happens(house: QueueHouse, topic: str, qos: int) -> None:
    client = house.connect("stranger")
    house.broker.registry.sessions["stranger"].grant = Grant(Book([]), "", "stranger")  # allows nothing
    reason, why = put(client, topic, b'{"name": "a"}', qos)
    assert (reason, "may not" in why) == (0x87, True)
    assert join(client, "$queue/jobs")[0] == 0x87
    assert not house.engine.queues
