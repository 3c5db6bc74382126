"""User properties: what a publisher may ask for, what a delivery tells, what a consumer may ask for on SUBSCRIBE."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from sluice.message import fnv1a32
from sluice.wire.packets import V311, Ack, Publish
from sluice.wire.properties import PUBACK
from tests.broker.kit import MIDDAY
from tests.broker.namespaces.kit import QueueHouse, facts, join, payloads, put, settle, take

MIDDAY_TEXT = datetime.fromtimestamp(MIDDAY, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")

# ---- what a publisher may set


def test_an_id_that_was_seen_in_the_dedup_window_is_acknowledged_and_not_stored_again(
    house: QueueHouse,
) -> None:
    maker = house.connect("maker")
    for _ in range(3):
        assert put(maker, "$queue/jobs", b"x", wishes={"message-id": "order-7"}) == (0, "")
    assert house.depth("jobs") == 1
    house.advance(121)
    put(maker, "$queue/jobs", b"x", wishes={"message-id": "order-7"})
    assert house.depth("jobs") == 2


def test_the_dedup_window_survives_a_crash(house: QueueHouse) -> None:
    put(house.connect("maker"), "$queue/jobs", b"x", wishes={"message-id": "order-7"})
    house.crash()
    put(house.connect("maker"), "$queue/jobs", b"x", wishes={"message-id": "order-7"})
    assert house.depth("jobs") == 1


def test_messages_of_one_key_stay_on_one_partition_in_their_order(house: QueueHouse) -> None:
    maker, worker = house.connect("maker"), house.connect("worker-1")
    join(worker, "$queue/jobs")
    for nth in range(4):
        put(maker, "$queue/jobs", b"%d" % nth, wishes={"partition-key": "customer-1"})
    got = []
    for _ in range(4):
        (message,) = take(worker)  # one at a time: its successor waits until it is settled
        got.append(message.payload)
        assert facts(message)["partition"] == str(fnv1a32(b"customer-1") % 10)
        settle(worker, "ack", message)
    assert got == [b"0", b"1", b"2", b"3"]


def test_a_higher_priority_goes_first() -> None:
    house = QueueHouse([("jobs", {"partitions": 1})])
    maker = house.connect("maker")
    for priority in ("0", "9", "5"):
        put(maker, "$queue/jobs", priority.encode(), wishes={"priority": priority})
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    assert payloads(take(worker)) == [b"9", b"5", b"0"]


@pytest.mark.parametrize(
    "wish",
    [
        {"delay": "90s"},
        {"delay": "1.5m"},
        {"deliver-at": datetime.fromtimestamp(MIDDAY + 90, UTC).isoformat()},
        {"deliver-at": datetime.fromtimestamp(MIDDAY + 90, UTC).replace(tzinfo=None).isoformat()},
        {"deliver-at": str(int((MIDDAY + 90) * 1000))},
    ],
)
def test_a_delayed_message_comes_when_its_time_has_come(house: QueueHouse, wish: dict[str, object]) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"later", wishes=wish)
    house.advance(89.9)
    assert worker.take() == []
    house.advance(0.2)
    assert payloads(take(worker)) == [b"later"]


def test_a_delay_survives_a_crash(house: QueueHouse) -> None:
    put(house.connect("maker"), "$queue/jobs", b"later", wishes={"delay": "1h"})
    house.advance(1800)
    house.crash()
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    house.advance(1799)
    assert worker.take() == []
    house.advance(2)
    assert payloads(take(worker)) == [b"later"]


def test_message_expiry_is_the_time_to_live(house: QueueHouse) -> None:
    maker = house.connect("maker")
    put(maker, "$queue/jobs", b"short", message_expiry=60)
    put(maker, "$queue/jobs", b"long", message_expiry=3600)
    put(maker, "$queue/jobs", b"usual")
    house.advance(120)
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    left = {message.payload: int(message.expiry) for message in take(worker)}
    assert left == {b"long": 3480, b"usual": -1}


@pytest.mark.parametrize("topic", ["$queue/jobs", "$ECQ/w/worker-1/jobs"])
@pytest.mark.parametrize("seconds", [0.0, 0.0004, 0.001, 0.3, 0.999])
def test_a_delivery_never_tells_of_more_time_than_the_publisher_gave(
    house: QueueHouse, topic: str, seconds: float
) -> None:
    house.advance(seconds)
    worker = house.connect("worker-1")
    join(worker, topic if topic == "$queue/jobs" else "$ECQ/worker-1/#")
    put(house.connect("maker"), topic, b"x", message_expiry=10)
    (message,) = take(worker)
    assert message.expiry == 10


def test_the_longest_expiry_of_all_is_kept_where_nothing_else_ends_a_message() -> None:
    house = QueueHouse([("#", {"limits": {"message_ttl": "0s"}})])
    put(house.connect("maker"), "$queue/jobs", b"x", message_expiry=0xFFFF_FFFF)
    house.crash()
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    assert payloads(take(worker)) == [b"x"]


@pytest.mark.parametrize(
    "wish",
    [
        {"priority": "10"},
        {"priority": "-1"},
        {"priority": "high"},
        {"delay": "soon"},
        {"delay": "5"},
        {"delay": "9" * 400 + "d"},
        {"deliver-at": "tomorrow"},
        {"deliver-at": "9" * 30},
        {"deliver-at": "9" * 5000},
        {"message-id": "x" * 1025},
    ],
)
def test_a_property_with_an_impossible_value_is_refused_by_its_name(
    house: QueueHouse, wish: dict[str, object]
) -> None:
    client = house.connect("maker")
    reason, why = put(client, "$queue/jobs", b"x", wishes=wish)
    assert reason == 0x99
    assert next(iter(wish)) in why
    assert "jobs" not in house.engine.queues
    client.ping()


# ---- what a delivery tells


def test_a_delivery_tells_what_is_needed_to_settle_it(house: QueueHouse) -> None:
    maker = house.connect("maker")
    put(maker, "$queue/jobs/a", b"first", wishes={"partition-key": "k"})
    house.advance(1.5)
    put(maker, "$queue/jobs/a", b"second", wishes={"partition-key": "k", "message-id": "own"})
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs/a", identifier=77)
    (first,) = take(worker)
    told = facts(first)
    assert re.fullmatch(r"[1-9a-f][0-9a-f]*-[0-9a-f]{24}", told.pop("delivery-token"))
    name = told.pop("message-id")
    number = fnv1a32(b"k") % 10
    assert told == {
        "queue": "jobs/a",
        "partition": str(number),
        "sequence": "0",
        "consumer-group": "worker",
        "attempt": "1",
        "enqueued-at": MIDDAY_TEXT,
        "partition-key": "k",
    }
    assert first.subscription_ids == [77]
    assert (first.qos, first.retain, first.dup) == (1, False, False)
    assert put(worker, "$queue/jobs/a/$ack", name.encode()) == (0, "")
    (second,) = take(worker)
    assert facts(second)["message-id"] == "own"
    assert facts(second)["sequence"] == "1"
    assert facts(second)["enqueued-at"] == MIDDAY_TEXT.replace(":00.000", ":01.500")
    house.advance(30)
    house.advance(5)
    (again,) = take(worker)
    assert facts(again)["attempt"] == "2"
    assert facts(again)["delivery-token"] != facts(second)["delivery-token"]


def test_what_else_a_publisher_attaches_arrives_unchanged(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(
        worker,
        "$queue/jobs",
        b"\x00\xff",
        user=[("b", "2"), ("message-id", "own"), ("a", "1"), ("b", "3"), ("priority", "4")],
        content_type="text/plain",
        response_topic="answers/1",
        correlation_data=b"\x01\x02",
        payload_format=1,
    )
    (message,) = take(worker)
    found = message.properties()
    assert (found.content_type, found.response_topic) == ("text/plain", "answers/1")
    assert (found.correlation_data, found.payload_format) == (b"\x01\x02", 1)
    assert found.user[-4:] == [("b", "2"), ("a", "1"), ("b", "3"), ("priority", "4")]
    assert [value for name, value in found.user if name == "message-id"] == ["own"]
    assert message.payload == b"\x00\xff"


def test_what_a_publisher_attaches_survives_a_crash(house: QueueHouse) -> None:
    put(house.connect("maker"), "$queue/jobs", b"x", user=[("a", "1")], content_type="text/plain")
    house.crash()
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    (message,) = take(worker)
    assert message.properties().content_type == "text/plain"
    assert facts(message)["a"] == "1"


# ---- what a consumer may ask for


@pytest.mark.parametrize(
    ("client_id", "group"),
    [("images-1", "images"), ("a-b-c", "a-b"), ("alone", "alone"), ("-7", "-7"), ("trailing-", "trailing")],
)
def test_without_a_group_the_client_id_names_it(house: QueueHouse, client_id: str, group: str) -> None:
    join(house.connect(client_id), "$queue/jobs")
    assert list(house.queue("jobs").groups) == [group]


def test_every_group_gets_every_message_and_one_member_of_it(house: QueueHouse) -> None:
    clients = [house.connect(f"c{nth}") for nth in range(4)]
    for nth, client in enumerate(clients):
        join(client, "$queue/jobs", consumer_group="even" if nth % 2 == 0 else "odd")
    for nth in range(40):
        put(clients[0], "$queue/jobs", b"%d" % nth)
    got = [payloads(take(client)) for client in clients]
    assert sorted(got[0] + got[2]) == sorted(got[1] + got[3]) == sorted(b"%d" % nth for nth in range(40))
    assert got[0] and got[1] and got[2] and got[3]


def test_prefetch_bounds_what_a_consumer_holds(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=3)
    for nth in range(10):
        put(worker, "$queue/jobs", b"%d" % nth)
    held = take(worker)
    assert len(held) == 3
    settle(worker, "ack", held[0])
    assert len(take(worker)) == 1
    join(worker, "$queue/jobs", prefetch=5)  # again, with another wish
    assert len(take(worker)) == 2


def test_the_queue_says_how_much_a_consumer_holds_when_it_does_not() -> None:
    house = QueueHouse([("#", {"performance": {"prefetch": 2}})])
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    for nth in range(10):
        put(worker, "$queue/jobs", b"%d" % nth)
    assert len(take(worker)) == 2


def test_by_puback_the_acknowledgement_of_the_line_settles(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(worker, "$queue/jobs", b"x")
    (message,) = worker.messages()
    assert house.depth("jobs") == 1
    worker.ack(message)
    assert house.depth("jobs") == 0


def test_by_puback_a_failure_is_a_nack(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(worker, "$queue/jobs", b"x")
    (message,) = worker.messages()
    worker.send(Ack(PUBACK, int(message.packet_id), 0x83))
    house.advance(4.9)
    assert worker.take() == []
    house.advance(0.2)
    (again,) = worker.messages()
    assert facts(again)["attempt"] == "2"
    worker.ack(again)
    assert house.depth("jobs") == 0


def test_explicitly_is_how_a_new_client_settles_and_by_puback_an_old_one(house: QueueHouse) -> None:
    new, old = house.connect("new"), house.connect("old", V311)
    join(new, "$queue/jobs")
    join(old, "$queue/jobs")
    put(new, "$queue/jobs", b"x")
    take(old)
    (message,) = take(new)
    stats = {group.name: int(group.out()) for group in house.queue("jobs").groups.values()}
    assert stats == {"new": 1, "old": 0}
    settle(new, "ack", message)
    assert house.depth("jobs") == 0


def test_by_puback_at_quality_0_sent_is_done(house: QueueHouse) -> None:
    worker = house.connect("old", V311)
    assert join(worker, "$queue/jobs", qos=0)[0] == 0
    put(house.connect("maker"), "$queue/jobs", b"x")
    (message,) = worker.messages()
    assert message.qos == 0
    assert house.depth("jobs") == 0


def test_a_puback_for_what_was_settled_otherwise_meanwhile_changes_nothing(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(worker, "$queue/jobs", b"x")
    (message,) = worker.messages()
    settle(worker, "nack", message, delay="0s")
    (again,) = worker.messages()
    worker.ack(message)  # the old packet id
    assert house.depth("jobs") == 1
    worker.ack(again)
    assert house.depth("jobs") == 0


def test_a_puback_after_unsubscribing_settles_nothing(house: QueueHouse) -> None:
    first, second = house.connect("worker-1"), house.connect("worker-2")
    join(first, "$queue/jobs", ack_mode="puback")
    put(first, "$queue/jobs", b"x")
    (message,) = first.messages()
    join(second, "$queue/jobs", ack_mode="puback")
    first.unsubscribe("$queue/jobs")
    (again,) = second.messages()
    first.ack(message)
    assert house.depth("jobs") == 1
    second.ack(again)
    assert house.depth("jobs") == 0
    first.ping()


def test_a_puback_that_comes_after_another_consumer_is_done_is_harmless(house: QueueHouse) -> None:
    first, second = house.connect("worker-1"), house.connect("worker-2")
    join(first, "$queue/jobs", ack_mode="puback")
    put(first, "$queue/jobs", b"x")
    (message,) = first.messages()
    join(second, "$queue/jobs", ack_mode="puback")
    first.unsubscribe("$queue/jobs")
    second.ack(second.messages()[0])
    first.ack(message)
    first.ping()
    assert house.depth("jobs") == 0


def kept(house: QueueHouse, count: int) -> None:
    """A queue that keeps what is settled, and this many messages in it, one minute apart."""
    maker = house.connect("maker")
    for nth in range(count):
        put(maker, "$queue/jobs", b"%d" % nth)
        house.advance(60)


KEEPING = [("jobs", {"partitions": 1, "limits": {"retention": "1d"}, "performance": {"batch_size": 100}})]


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("earliest", 0),
        ("latest", 5),
        ("3", 3),
        ("0", 0),
        ("99", 5),
        (datetime.fromtimestamp(MIDDAY + 90, UTC).isoformat(), 2),
        (datetime.fromtimestamp(MIDDAY + 90, UTC).replace(tzinfo=None).isoformat(), 2),
        (datetime.fromtimestamp(MIDDAY + 9000, UTC).isoformat(), 5),
    ],
)
def test_a_new_group_starts_where_it_asks_to(start: str, first: int) -> None:
    house = QueueHouse(KEEPING)
    kept(house, 5)
    worker = house.connect("worker-1")
    assert join(worker, "$queue/jobs", start=start) == (1, "")
    put(worker, "$queue/jobs", b"5")
    assert payloads(take(worker)) == [b"%d" % nth for nth in range(first, 6)]


def test_a_group_that_is_there_goes_on_where_it_was(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    settle(worker, "ack", take(worker)[0])
    other = house.connect("worker-2")
    join(other, "$queue/jobs", start="earliest")
    assert other.take() == []


def test_consumers_of_the_highest_priority_are_served_alone(house: QueueHouse) -> None:
    low, high = house.connect("worker-low"), house.connect("worker-high")
    join(low, "$queue/jobs")
    join(high, "$queue/jobs", consumer_priority=5)
    for _ in range(5):
        put(low, "$queue/jobs", b"x")
    assert (len(take(low)), len(take(high))) == (0, 5)
    high.disconnect()
    assert len(take(low)) == 5


def test_an_exclusive_consumer_is_served_alone(house: QueueHouse) -> None:
    first, second = house.connect("worker-1"), house.connect("worker-2")
    join(first, "$queue/jobs", exclusive="true")
    join(second, "$queue/jobs")
    for _ in range(5):
        put(first, "$queue/jobs", b"x")
    assert (len(take(first)), len(take(second))) == (5, 0)
    first.disconnect()
    assert len(take(second)) == 5


@pytest.mark.parametrize(
    "wish",
    [
        {"prefetch": "-1"},
        {"prefetch": "many"},
        {"prefetch": "65536"},
        {"ack-mode": "never"},
        {"start": "yesterday"},
        {"start": "9" * 5000},
        {"start": "²"},
        {"consumer-priority": "top"},
        {"exclusive": "perhaps"},
        {"consumer-group": "a/b"},
        {"consumer-group": ""},
        {"consumer-group": "x" * 257},
    ],
)
def test_a_wish_that_cannot_be_granted_refuses_the_subscription(
    house: QueueHouse, wish: dict[str, Any]
) -> None:
    worker = house.connect("worker-1")
    reason, why = join(
        worker, "$queue/jobs", **{name.replace("-", "_"): value for name, value in wish.items()}
    )
    assert reason == 0x83  # SUBACK has no 0x99
    assert next(iter(wish)) in why
    assert "jobs" not in house.engine.queues or not house.queue("jobs").groups
    worker.ping()


@pytest.mark.parametrize("group", ["+", "#", "a$b"])
def test_a_group_in_the_topic_that_cannot_be_one_is_refused(house: QueueHouse, group: str) -> None:
    reason, why = join(house.connect("worker-1"), f"$queue/jobs/$group/{group}")
    assert reason in (0x83, 0x8F)
    assert why


def test_a_delivery_too_large_for_its_consumer_is_retried_and_dies_with_a_reason() -> None:
    house = QueueHouse([("jobs", {"retry_policy": {"max_retries": 1, "initial_backoff": "1s"}})])
    worker = house.connect("worker-1", maximum_packet_size=500)
    join(worker, "$queue/jobs")
    put(house.connect("maker"), "$queue/jobs", b"x" * 1000)
    put(house.connect("maker"), "$queue/jobs", b"small")
    assert payloads(take(worker)) == [b"small"]
    house.advance(2)
    reader = house.connect("reader")
    join(reader, "$queue/dlq/jobs")
    (letter,) = take(reader)
    assert "maximum packet size" in facts(letter)["dead-description"]


def test_a_message_that_became_too_large_for_its_consumer_fails_at_once() -> None:
    house = QueueHouse([("jobs", {"retry_policy": {"max_retries": 0}})])
    worker = house.connect_lasting("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(house.connect("maker"), "$queue/jobs", b"x" * 1000)
    assert len(worker.messages()) == 1  # and no PUBACK
    worker.drop()
    house.connect_lasting("worker-1", maximum_packet_size=500)
    reader = house.connect("reader")
    join(reader, "$queue/dlq/jobs")
    (letter,) = take(reader)
    assert "maximum packet size" in facts(letter)["dead-description"]


def deliveries(messages: list[Publish]) -> list[tuple[bytes, str]]:
    return [(message.payload, facts(message)["attempt"]) for message in messages]


def test_nack_with_a_delay_comes_back_after_it_and_with_none_at_once(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    settle(worker, "nack", take(worker)[0], delay="90s")
    house.advance(89)
    assert worker.take() == []
    house.advance(2)
    (message,) = take(worker)
    settle(worker, "nack", message, delay="0s")
    assert deliveries(take(worker)) == [(b"x", "3")]


def test_nack_with_a_delay_that_is_none_is_refused_and_changes_nothing(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    reason, why = settle(worker, "nack", message, delay="soon")
    assert (reason, "delay" in why) == (0x99, True)
    assert settle(worker, "ack", message) == (0, "")
