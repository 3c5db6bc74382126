"""What an acknowledgement promises, when it is withheld, and how a refusal is reported."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sluice.broker.acl import QUEUE_ACTIONS, AccessControlList, Grant, Rule
from sluice.broker.namespaces.reason_mapping import get_reason_code, get_suback_reason_code
from sluice.errors import QueueError
from sluice.wire.packets import V311, Ack, Pingreq
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL, SUBACK
from sluice.wire.reasons import SERVER_REASONS
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import (
    delivery_properties,
    join,
    payloads,
    put,
    reason_string,
    settle,
    take,
)
from tests.broker.peers import Client

SMALL = [("#", {"limits": {"max_queue_depth": 2, "max_message_size": 10}})]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
def test_publish_is_acknowledged_after_commit(
    harness: BrokerHarness, version: int, qos: int, kind: int
) -> None:
    client = harness.connect("maker", version)
    harness.store.hold()
    packet_id = client.publish("$queue/jobs", b"x", qos)
    harness.advance(60)
    assert client.take() == []
    harness.store.release()
    harness.loop.settle()
    client.first_ack(kind, packet_id, 0)


def test_message_is_delivered_after_commit(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    harness.store.hold()
    worker.publish("$queue/jobs", b"x", 0)
    assert worker.take() == []
    harness.store.release()
    harness.loop.settle()
    assert payloads(worker.messages()) == [b"x"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_qos_enqueues(harness: BrokerHarness, qos: int) -> None:
    maker, worker = harness.connect("maker"), harness.connect("worker-1")
    maker.publish_fully("$queue/jobs", b"x", qos)
    join(worker, "$queue/jobs", qos=2)
    (message,) = take(worker)
    assert (message.payload, message.qos) == (b"x", 1)


@pytest.mark.parametrize("when", ["before the commit", "after the commit", "after a reconnect"])
def test_qos_2_is_stored_exactly_once(harness: BrokerHarness, when: str) -> None:
    maker = harness.connect_persistent("maker")
    harness.store.hold()
    maker.publish("$queue/jobs", b"x", 2, packet_id=7)
    if when == "before the commit":
        maker.publish("$queue/jobs", b"x", 2, packet_id=7, dup=True)
        assert maker.take() == []
    elif when == "after a reconnect":
        maker.drop()
        maker = harness.connect_persistent("maker")
        maker.publish("$queue/jobs", b"x", 2, packet_id=7, dup=True)
        assert maker.take() == []
    harness.store.release()
    harness.loop.settle()
    maker.first_ack(PUBREC, 7, 0)
    assert maker.take() == []
    maker.publish("$queue/jobs", b"x", 2, packet_id=7, dup=True)
    maker.first_ack(PUBREC, 7, 0)
    maker.send(Ack(PUBREL, 7))
    maker.first_ack(PUBCOMP, 7, 0)
    assert harness.depth("jobs") == 1


def test_packet_id_reused_after_reconnect_is_not_acknowledged_by_an_old_commit(
    harness: BrokerHarness,
) -> None:
    maker = harness.connect_persistent("maker")
    harness.store.hold()
    maker.publish("$queue/jobs", b"first", 1, packet_id=7)
    maker.drop()
    maker = harness.connect_persistent("maker")
    maker.publish("$queue/jobs", b"second", 1, packet_id=7)
    harness.store.release(1)
    harness.loop.settle()
    assert maker.take() == []  # the first one is stored, and the second one is not
    harness.store.release()
    harness.loop.settle()
    maker.first_ack(PUBACK, 7, 0)
    assert maker.take() == []


def test_unacknowledged_publishes_of_an_old_connection_do_not_count_against_a_new_one() -> None:
    harness = BrokerHarness(receive_maximum=3)
    maker = harness.connect_persistent("maker")
    harness.store.hold()
    for _ in range(3):
        maker.publish("$queue/jobs", b"x", 1)
    maker.drop()
    maker = harness.connect_persistent("maker")
    for _ in range(3):
        maker.publish("$queue/jobs", b"x", 1)
    assert not maker.closed
    harness.store.release()
    harness.loop.settle()
    assert len(maker.take()) == 3
    harness.store.hold()
    for _ in range(4):
        maker.publish("$queue/jobs", b"x", 1)
    assert maker.fault()[0] == 0x93


def test_ack_is_confirmed_after_commit(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    harness.store.hold()
    packet_id = worker.publish(
        "$queue/jobs/$ack", delivery_properties(message)["message-id"].encode(), 1
    )
    assert worker.take() == []
    harness.store.release()
    harness.loop.settle()
    worker.first_ack(PUBACK, packet_id, 0)
    harness.kill()
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    assert worker.take() == []


def test_acknowledged_messages_survive_a_crash(harness: BrokerHarness) -> None:
    maker = harness.connect("maker")
    put(maker, "$queue/jobs", b"kept")
    harness.store.hold()
    maker.publish("$queue/jobs", b"lost", 1)
    harness.crash()
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    assert payloads(take(worker)) == [b"kept"]


def test_unsettled_deliveries_are_redelivered_after_a_crash(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (before,) = take(worker)
    harness.advance(1)
    harness.crash()
    worker, other = harness.connect("worker-1"), harness.connect("worker-2")
    join(other, "$queue/jobs")
    (after,) = take(other)
    assert after.payload == b"x"
    assert delivery_properties(after)["message-id"] == delivery_properties(before)["message-id"]
    reason, _ = settle(
        worker, "ack", after, delivery_token=delivery_properties(before)["delivery-token"]
    )
    assert reason == 0x83  # another client holds it now
    assert settle(other, "ack", after)[0] == 0


def test_ack_sent_after_a_crash_for_a_delivery_before_it_counts(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (before,) = take(worker)
    harness.advance(1)
    harness.crash()
    worker = harness.connect("worker-1")
    reason, _ = settle(worker, "ack", before, delivery_token="7fffffffffffffff")
    assert reason == 0x83  # it was never delivered
    reason, _ = settle(
        worker, "ack", before, delivery_token=delivery_properties(before)["delivery-token"]
    )
    assert reason == 0
    join(worker, "$queue/jobs")
    assert take(worker) == []


def test_delivery_with_a_publishers_id_is_settled_by_its_token_after_a_crash(
    harness: BrokerHarness,
) -> None:
    """The id has no position in the log, so the token must have it."""
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x", options={"message-id": "mine"})
    (before,) = take(worker)
    assert delivery_properties(before)["message-id"] == "mine"
    harness.advance(1)
    harness.crash()
    worker = harness.connect("worker-1")
    reason, _ = settle(
        worker, "ack", before, delivery_token=delivery_properties(before)["delivery-token"]
    )
    assert reason == 0
    join(worker, "$queue/jobs")
    assert take(worker) == []


# ---- refusals


def fill_queue(harness: BrokerHarness) -> None:
    maker = harness.connect("filler")
    for _ in range(2):
        assert put(maker, "$queue/jobs", b"x")[0] == 0


@pytest.mark.parametrize("qos", [1, 2])
def test_full_queue_is_reported(qos: int) -> None:
    harness = BrokerHarness(SMALL)
    fill_queue(harness)
    maker = harness.connect("maker")
    reason, why = put(maker, "$queue/jobs", b"x", qos)
    assert reason == 0x97
    assert "full at 2" in why and "max_queue_depth" in why
    assert harness.depth("jobs") == 2
    if qos == 2:  # refused: the id is free at once, and there is no PUBREL
        assert put(maker, "$queue/other", b"x", qos, packet_id=1)[0] == 0


@pytest.mark.parametrize("topic", ["$queue/jobs", "$ECQ/w/car-1/speed"])
def test_publish_that_the_store_cannot_accept_is_refused_with_the_reason(
    harness: BrokerHarness, topic: str
) -> None:
    maker = harness.connect("maker")
    harness.engine.publishing.unavailable_reason = "the connection to the store is lost"
    reason, why = put(maker, topic, b"x")
    assert reason == 0x83
    assert "connection to the store" in why and "again later" in why
    harness.engine.publishing.unavailable_reason = ""
    assert put(maker, topic, b"x") == (0, "")


@pytest.mark.parametrize("kind", [PUBREC, PUBCOMP])
def test_qos_2_acknowledgement_of_a_delivery_ends_the_connection_and_settles_nothing(
    harness: BrokerHarness, kind: int
) -> None:
    """The next consumer gets the message, as after any disconnect."""
    worker, other = harness.connect("worker-1"), harness.connect("worker-2")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(harness.connect("maker"), "$queue/jobs", b"x")
    (message,) = worker.messages()
    join(other, "$queue/jobs", ack_mode="puback")
    worker.send(Ack(kind, message.packet_id))
    assert worker.fault()[0] == 0x82
    assert payloads(other.messages()) == [b"x"]


def test_refusals_use_reason_codes_valid_for_their_packet() -> None:
    kinds, puback, suback = [QueueError], set[int](), set[int]()
    while kinds:
        kind = kinds.pop()
        kinds.extend(kind.__subclasses__())
        puback.add(get_reason_code(kind.__new__(kind)))
        suback.add(get_suback_reason_code(kind.__new__(kind)))
    assert puback <= SERVER_REASONS[PUBACK] == SERVER_REASONS[PUBREC]
    assert suback <= SERVER_REASONS[SUBACK]


@pytest.mark.parametrize("qos", [1, 2])
def test_refusal_truncates_long_text_of_a_client(harness: BrokerHarness, qos: int) -> None:
    client = harness.connect("worker-1")
    join(client, "$queue/jobs")
    reason, why = put(client, "$queue/jobs/$ack", "😀".encode() * 30_000, qos)
    assert reason == 0x10
    assert len(why) <= 1024
    assert why.startswith("no delivery '😀😀") and why.endswith("the group is wrong")


@pytest.mark.parametrize("name", ["\\u0000", "\\n"])
def test_refusal_contains_no_unprintable_text(harness: BrokerHarness, name: str) -> None:
    reason, why = put(
        harness.connect("maker"),
        "$admin/queue/create",
        b'{"name": "jobs", "a%sb": 1}' % name.encode(),
    )
    assert reason == 0x99
    assert "a?b is not a setting" in why


@pytest.mark.parametrize("qos", [1, 2])
def test_oversized_message_is_refused_with_the_limit(qos: int) -> None:
    harness = BrokerHarness(SMALL)
    reason, why = put(harness.connect("maker"), "$queue/jobs", b"x" * 11, qos)
    assert reason == 0x97
    assert "11" in why and "10" in why and "max_message_size" in why
    assert harness.depth("jobs") == 0


@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize(
    ("topic", "payload"), [("$queue/jobs", b"x"), ("$queue/new", b"x" * 11), ("$queue/a//b", b"x")]
)
def test_3_1_1_client_is_disconnected_without_puback_when_its_message_was_not_stored(
    topic: str, payload: bytes, qos: int
) -> None:
    harness = BrokerHarness(SMALL)
    fill_queue(harness)
    maker = harness.connect("maker", V311)
    maker.publish(topic, payload, qos)
    assert maker.closed
    assert maker.take() == []
    assert harness.depth("jobs") == 2


def test_messages_accepted_before_a_refusal_are_stored_though_the_client_is_disconnected() -> None:
    harness = BrokerHarness(SMALL)
    maker = harness.connect("maker", V311)
    maker.publish("$queue/jobs", b"x", 1)
    maker.publish("$queue/jobs", b"x" * 11, 1)
    assert maker.closed
    assert harness.depth("jobs") == 1


def test_client_without_problem_information_gets_the_reason_code_only() -> None:
    harness = BrokerHarness(SMALL)
    fill_queue(harness)
    assert put(harness.connect("maker", request_problem=0), "$queue/jobs", b"x") == (0x97, "")


def test_full_queue_with_drop_oldest_accepts_the_new_message() -> None:
    harness = BrokerHarness([("#", {"limits": {"max_queue_depth": 2, "overflow": "drop-oldest"}})])
    maker, worker = harness.connect("maker"), harness.connect("worker-1")
    for nth in range(4):
        assert put(maker, "$queue/jobs", b"%d" % nth) == (0, "")
        harness.advance(1)
    join(worker, "$queue/jobs")
    assert sorted(payloads(take(worker))) == [b"2", b"3"]


def test_full_queue_that_dead_letters_its_overflow_acknowledges_it() -> None:
    harness = BrokerHarness(
        [("jobs", {"limits": {"max_queue_depth": 2, "overflow": "dead-letter"}})]
    )
    maker, reader = harness.connect("maker"), harness.connect("reader-1")
    for nth in range(3):
        assert put(maker, "$queue/jobs", b"%d" % nth) == (0, "")
    join(reader, "$queue/dlq/jobs")
    (dead_letter,) = take(reader)
    assert (dead_letter.payload, delivery_properties(dead_letter)["dead-reason"]) == (
        b"2",
        "overflow",
    )
    assert harness.depth("jobs") == 2


# ---- a slow disk


def test_publisher_faster_than_the_disk_is_not_read_until_the_disk_caught_up(
    harness: BrokerHarness,
) -> None:
    flood, other = harness.connect("flood"), harness.connect("other")
    join(other, "$queue/jobs")
    harness.store.hold()
    sent = 0
    while flood.transport.reading:
        flood.publish("$queue/jobs", b"x" * 100_000, 0)
        sent += 1
        assert sent < 200, "nothing holds it back"
    assert 80 <= sent <= 90  # 8 MiB after the frame that is being committed
    assert other.transport.reading
    other.ping()
    harness.store.release(1)
    harness.loop.settle()
    assert flood.transport.reading
    harness.store.release()
    harness.loop.settle()
    assert harness.queue("jobs").enqueued == sent


def test_plain_publisher_that_fills_the_write_backlog_is_paused_too(
    harness: BrokerHarness,
) -> None:
    sleeper = harness.connect_persistent("sleeper")
    sleeper.subscribe("news", qos=1)
    sleeper.drop()
    flood = harness.connect("flood")
    harness.store.hold()
    sent = 0
    while flood.transport.reading:
        flood.publish("news", b"x" * 100_000, 1)
        sent += 1
        assert sent < 200, "nothing holds it back"
    harness.store.release()
    harness.loop.settle()
    assert flood.transport.reading
    assert len(flood.take()) == sent


def test_paused_publisher_does_not_hit_keep_alive(harness: BrokerHarness) -> None:
    flood = harness.connect("flood", keep_alive=10)
    harness.store.hold()
    while flood.transport.reading:
        flood.publish("$queue/jobs", b"x" * 1_000_000, 0)
    harness.advance(60)
    assert not flood.closed
    harness.store.release()
    harness.loop.settle()
    harness.advance(14)
    assert not flood.closed
    harness.advance(3)
    assert flood.closed


def test_publisher_that_disconnects_while_paused_is_forgotten(harness: BrokerHarness) -> None:
    flood = harness.connect("flood")
    harness.store.hold()
    while flood.transport.reading:
        flood.publish("$queue/jobs", b"x" * 1_000_000, 0)
    flood.drop()
    harness.store.release()
    harness.loop.settle()
    harness.connect("other").ping()


def test_qos_0_flood_into_a_binding_is_paused_too() -> None:
    harness = BrokerHarness([("copies", {"bindings": ["sensors/#"]})])
    flood = harness.connect("flood")
    join(flood, "$queue/copies")
    harness.store.hold()
    sent = 0
    while flood.transport.reading:
        flood.publish("sensors/1", b"x" * 100_000, 0)
        sent += 1
        assert sent < 200, "nothing holds it back"
    harness.store.release()
    harness.loop.settle()
    assert flood.transport.reading
    assert harness.queue("copies").enqueued == sent


def test_connection_paused_for_two_reasons_resumes_when_both_are_over(
    harness: BrokerHarness,
) -> None:
    harness.limits.write_buffer_high = 10_000
    flood = harness.connect("flood")
    flood.subscribe("echo")
    flood.transport.is_blocked = True
    for _ in range(3):
        flood.publish("echo", b"x" * 10_000, 0)
    while flood.transport.reading:
        flood.send(Pingreq())  # sends requests without reading the responses
    harness.store.hold()
    harness.connect("other").publish("$queue/jobs", b"x", 0)
    while not flood.connection.is_throttled:  # input that was read already is still processed
        flood.publish("$queue/jobs", b"x" * 1_000_000, 0)
    flood.transport.drain()
    assert not flood.transport.reading  # the client reads again, the store does not write yet
    harness.store.release()
    harness.loop.settle()
    assert flood.transport.reading


def test_caught_up_store_does_not_lift_a_rate_limit(harness: BrokerHarness) -> None:
    harness.limits.max_publish_rate = 20.0
    flood = harness.connect("flood")
    harness.store.hold()
    harness.connect("other").publish("$queue/jobs", b"x", 0)
    while not flood.connection.is_throttled:
        flood.publish("$queue/jobs", b"x" * 1_000_000, 0)
    for _ in range(100):  # input that was read already is processed
        flood.publish("$queue/jobs", b"x", 0)
    harness.store.release()
    harness.loop.settle()
    assert not flood.transport.reading
    harness.advance(3)
    assert not flood.transport.reading
    harness.advance(3)
    assert flood.transport.reading


# ---- authorization


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("topic", ["$queue/jobs", "$queue/jobs/$ack/1-1", "$admin/queue/create"])
def test_unauthorized_request_is_refused_and_nothing_happens(
    harness: BrokerHarness, topic: str, qos: int
) -> None:
    client = harness.connect("unknown")
    harness.broker.registry.sessions["unknown"].grant = Grant(
        AccessControlList([]), "", "unknown"
    )  # allows nothing
    reason, why = put(client, topic, b'{"name": "a"}', qos)
    assert (reason, "may not" in why) == (0x87, True)
    assert join(client, "$queue/jobs")[0] == 0x87
    assert not harness.engine.queues


# ---- settlements whose dead letters need a body from the store


def receive_before_restart(harness: BrokerHarness) -> dict[str, str]:
    """Return the properties of a delivery of the previous run; its body is not in memory."""
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    harness.restart()
    return delivery_properties(message)


def send_settlement(
    worker: Client, verb: str, reported: dict[str, str], qos: int, dup: bool = False
) -> None:
    pairs = [(name, reported[name]) for name in ("message-id", "delivery-token")]
    worker.publish(f"$queue/jobs/${verb}", b"", qos, packet_id=9, dup=dup, user=pairs)


def has_acks(client: Client) -> bool:
    return any(isinstance(packet, Ack) for packet in client.take())


@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
@pytest.mark.parametrize("verb", ["reject", "nack"])
def test_settlement_is_acknowledged_after_the_commit_of_its_dead_letter(
    verb: str, qos: int, kind: int
) -> None:
    harness = BrokerHarness([("jobs", {"retry_policy": {"max_retries": 0}})])
    reported = receive_before_restart(harness)
    worker = harness.connect("worker-1")
    harness.store.hold()
    send_settlement(worker, verb, reported, qos)
    assert not has_acks(worker)
    harness.store.release()
    harness.loop.settle()
    worker.first_ack(kind, 9, 0)
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 1)


def test_settlement_without_a_connection_for_its_acknowledgement_is_carried_out() -> None:
    harness = BrokerHarness()
    reported = receive_before_restart(harness)
    worker = harness.connect("worker-1")
    harness.store.hold()
    send_settlement(worker, "reject", reported, 1)
    worker.drop()
    worker = harness.connect("worker-1")
    harness.store.release()
    harness.loop.settle()
    assert not has_acks(worker)
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 1)


class SlowReads(BrokerHarness):
    """A broker whose store reads nothing while `is_slow`."""

    is_slow = False

    def _call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        if not self.is_slow or getattr(callback, "__name__", "") != "_complete_read":
            super()._call_soon(callback, *arguments)


def test_qos_2_settlement_resent_after_a_kill_is_carried_out() -> None:
    """The receipt of its packet id is not stored before its dead letter."""
    harness = SlowReads()
    reported = receive_before_restart(harness)
    worker = harness.connect_persistent("worker-1")
    worker.subscribe("mail")
    harness.is_slow = True
    send_settlement(worker, "reject", reported, 2)
    assert put(harness.connect("maker"), "$queue/other", b"y") == (0, "")
    assert not has_acks(worker)
    harness.is_slow = False  # sessions are read at the start, too
    harness.kill()
    assert (harness.depth("jobs"), harness.depth("other")) == (1, 1)
    worker = harness.connect_persistent("worker-1")
    assert worker.connack.session_present
    send_settlement(worker, "reject", reported, 2, dup=True)
    worker.first_ack(PUBREC, 9, 0)
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 1)


@pytest.mark.parametrize("times", [1, 2])
def test_mqtt_3_settlement_of_several_ids_waits_for_all_dead_letters(
    harness: BrokerHarness, times: int
) -> None:
    """Also if it is resent, and its deliveries are no longer leased."""
    worker = harness.connect("old", version=V311)
    join(worker, "$queue/jobs/$group/g")
    for payload in (b"x", b"y"):
        put(harness.connect("maker"), "$queue/jobs", payload)
    ids = [message.topic.decode().partition("/$msg/")[2] for message in worker.messages()]
    harness.restart()
    harness.engine.queues["jobs"].rules.prefetch = 0
    worker = harness.connect("old", version=V311)
    join(worker, "$queue/jobs/$group/g")
    harness.store.hold()
    packet_ids = [
        worker.publish("$queue/jobs/$reject", json.dumps(ids).encode(), 1) for _ in range(times)
    ]
    assert not has_acks(worker)
    harness.store.release()
    harness.loop.settle()
    for packet_id in packet_ids:
        worker.first_ack(PUBACK, packet_id, 0)
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 2)


def test_acknowledged_nack_of_an_expired_message_survives_a_kill() -> None:
    """Its body is read for the dead letter after the nack is acknowledged."""
    harness = SlowReads([("jobs", {"limits": {"message_ttl": "10s", "on_expiry": "dead-letter"}})])
    reported = receive_before_restart(harness)
    worker = harness.connect("worker-1")
    harness.is_slow = True
    harness.advance(11)
    send_settlement(worker, "nack", reported, 1)
    worker.first_ack(PUBACK, 9, 0)
    harness.is_slow = False
    harness.kill()
    harness.advance(1)
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 1)
    reader = harness.connect("reader-1")
    join(reader, "$queue/dlq/jobs")
    (dead_letter,) = take(reader)
    assert "nacked" in delivery_properties(dead_letter)["history"]


# ---- batches of which a part fails


def send_batch(worker: Client, ids: list[str], qos: int, verb: str = "ack") -> None:
    worker.publish(f"$queue/jobs/${verb}", json.dumps(ids).encode(), qos, packet_id=9)


def take_ids(worker: Client, count: int) -> list[str]:
    join(worker, "$queue/jobs")
    for _ in range(count):
        put(worker, "$queue/jobs", b"x")
    return [delivery_properties(message)["message-id"] for message in take(worker)]


@pytest.mark.parametrize(("qos", "kind"), [(1, PUBACK), (2, PUBREC)])
def test_batch_is_refused_after_the_commit_of_the_part_that_succeeded(
    harness: BrokerHarness, qos: int, kind: int
) -> None:
    worker = harness.connect_persistent("worker-1")
    ids = take_ids(worker, 2)
    harness.store.hold()
    send_batch(worker, [*ids, "unknown"], qos)
    assert not has_acks(worker)
    harness.store.release()
    harness.loop.settle()
    assert "1 of 3 could not be settled" in reason_string(worker.first_ack(kind, 9, 0x10))
    harness.kill()
    assert harness.depth("jobs") == 0


def test_batch_without_any_success_is_refused_at_once(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    take_ids(worker, 1)
    harness.store.hold()
    send_batch(worker, ["unknown", "unknown-too"], 1)
    worker.first_ack(PUBACK, 9, 0x10)


def test_partly_failed_batch_waits_for_the_dead_letters_of_its_other_part() -> None:
    harness = BrokerHarness()
    worker = harness.connect("worker-1")
    ids = take_ids(worker, 2)
    harness.restart()
    boss = harness.connect("boss")
    rule = Rule(True, QUEUE_ACTIONS, [], [], [], ["#"], "rule 1")
    harness.broker.registry.sessions["boss"].grant = Grant(AccessControlList([rule]), "", "boss")
    harness.store.hold()
    ids.append("unknown")
    boss.publish(
        "$queue/jobs/$reject",
        json.dumps(ids).encode(),
        1,
        packet_id=9,
        user=[("consumer-group", "worker")],
    )
    assert not has_acks(boss)
    harness.store.release()
    harness.loop.settle()
    boss.first_ack(PUBACK, 9, 0x10)
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 2)


def test_refusal_of_a_batch_does_not_reach_a_later_connection(harness: BrokerHarness) -> None:
    worker = harness.connect_persistent("worker-1")
    ids = take_ids(worker, 1)
    harness.store.hold()
    send_batch(worker, [*ids, "unknown"], 1)
    worker.drop()
    worker = harness.connect_persistent("worker-1")
    harness.store.release()
    harness.loop.settle()
    assert not has_acks(worker)
    assert harness.depth("jobs") == 0
