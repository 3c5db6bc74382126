"""User properties: options of a publisher, fields of a delivery, options of a SUBSCRIBE."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from sluice.placement import fnv1a32
from sluice.wire.packets import V311, Ack, Publish
from sluice.wire.properties import PUBACK
from tests.broker.kit import BrokerHarness
from tests.broker.loop import MIDDAY
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, settle, take

MIDDAY_TEXT = datetime.fromtimestamp(MIDDAY, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")

# ---- options of a publisher


def test_id_within_the_dedup_window_is_acknowledged_and_not_stored_again(
    harness: BrokerHarness,
) -> None:
    maker = harness.connect("maker")
    for _ in range(3):
        assert put(maker, "$queue/jobs", b"x", options={"message-id": "order-7"}) == (0, "")
    assert harness.depth("jobs") == 1
    harness.advance(121)
    put(maker, "$queue/jobs", b"x", options={"message-id": "order-7"})
    assert harness.depth("jobs") == 2


def test_dedup_window_survives_a_crash(harness: BrokerHarness) -> None:
    put(harness.connect("maker"), "$queue/jobs", b"x", options={"message-id": "order-7"})
    harness.crash()
    put(harness.connect("maker"), "$queue/jobs", b"x", options={"message-id": "order-7"})
    assert harness.depth("jobs") == 1


def test_messages_of_one_key_stay_in_one_partition_in_order(harness: BrokerHarness) -> None:
    maker, worker = harness.connect("maker"), harness.connect("worker-1")
    join(worker, "$queue/jobs")
    for nth in range(4):
        put(maker, "$queue/jobs", b"%d" % nth, options={"partition-key": "customer-1"})
    got = []
    for _ in range(4):
        (message,) = take(worker)  # one at a time: the next one waits until it is settled
        got.append(message.payload)
        assert delivery_properties(message)["partition"] == str(fnv1a32(b"customer-1") % 10)
        settle(worker, "ack", message)
    assert got == [b"0", b"1", b"2", b"3"]


def test_higher_priority_is_delivered_first() -> None:
    harness = BrokerHarness([("jobs", {"partitions": 1})])
    maker = harness.connect("maker")
    for priority in ("0", "9", "5"):
        put(maker, "$queue/jobs", priority.encode(), options={"priority": priority})
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    assert payloads(take(worker)) == [b"9", b"5", b"0"]


@pytest.mark.parametrize(
    "option",
    [
        {"delay": "90s"},
        {"delay": "1.5m"},
        {"deliver-at": datetime.fromtimestamp(MIDDAY + 90, UTC).isoformat()},
        {"deliver-at": datetime.fromtimestamp(MIDDAY + 90, UTC).replace(tzinfo=None).isoformat()},
        {"deliver-at": str(int((MIDDAY + 90) * 1000))},
    ],
)
def test_delayed_message_is_delivered_when_due(
    harness: BrokerHarness, option: dict[str, object]
) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"later", options=option)
    harness.advance(89.9)
    assert worker.take() == []
    harness.advance(0.2)
    assert payloads(take(worker)) == [b"later"]


def test_delay_survives_a_crash(harness: BrokerHarness) -> None:
    put(harness.connect("maker"), "$queue/jobs", b"later", options={"delay": "1h"})
    harness.advance(1800)
    harness.crash()
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    harness.advance(1799)
    assert worker.take() == []
    harness.advance(2)
    assert payloads(take(worker)) == [b"later"]


def test_message_expiry_is_the_time_to_live(harness: BrokerHarness) -> None:
    maker = harness.connect("maker")
    put(maker, "$queue/jobs", b"short", message_expiry=60)
    put(maker, "$queue/jobs", b"long", message_expiry=3600)
    put(maker, "$queue/jobs", b"usual")
    harness.advance(120)
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    left = {message.payload: int(message.expiry_seconds) for message in take(worker)}
    assert left == {b"long": 3480, b"usual": -1}


@pytest.mark.parametrize("topic", ["$queue/jobs", "$ECQ/w/worker-1/jobs"])
@pytest.mark.parametrize("seconds", [0.0, 0.0004, 0.001, 0.3, 0.999])
def test_delivery_never_shows_a_longer_expiry_than_published(
    harness: BrokerHarness, topic: str, seconds: float
) -> None:
    harness.advance(seconds)
    worker = harness.connect("worker-1")
    join(worker, topic if topic == "$queue/jobs" else "$ECQ/worker-1/#")
    put(harness.connect("maker"), topic, b"x", message_expiry=10)
    (message,) = take(worker)
    assert message.expiry_seconds == 10


def test_maximum_expiry_is_stored_where_nothing_else_limits_it() -> None:
    harness = BrokerHarness([("#", {"limits": {"message_ttl": "0s"}})])
    put(harness.connect("maker"), "$queue/jobs", b"x", message_expiry=0xFFFF_FFFF)
    harness.crash()
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    assert payloads(take(worker)) == [b"x"]


@pytest.mark.parametrize(
    "option",
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
def test_property_with_an_impossible_value_is_refused_by_name(
    harness: BrokerHarness, option: dict[str, object]
) -> None:
    client = harness.connect("maker")
    reason, why = put(client, "$queue/jobs", b"x", options=option)
    assert reason == 0x99
    assert next(iter(option)) in why
    assert "jobs" not in harness.engine.queues
    client.ping()


# ---- fields of a delivery


def test_delivery_carries_what_is_needed_to_settle_it(harness: BrokerHarness) -> None:
    maker = harness.connect("maker")
    put(maker, "$queue/jobs/a", b"first", options={"partition-key": "k"})
    harness.advance(1.5)
    put(maker, "$queue/jobs/a", b"second", options={"partition-key": "k", "message-id": "own"})
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs/a", identifier=77)
    (first,) = take(worker)
    reported = delivery_properties(first)
    assert re.fullmatch(r"[1-9a-f][0-9a-f]*-[0-9a-f]{24}", reported.pop("delivery-token"))
    name = reported.pop("message-id")
    number = fnv1a32(b"k") % 10
    assert reported == {
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
    assert delivery_properties(second)["message-id"] == "own"
    assert delivery_properties(second)["sequence"] == "1"
    assert delivery_properties(second)["enqueued-at"] == MIDDAY_TEXT.replace(":00.000", ":01.500")
    harness.advance(30)
    harness.advance(5)
    (again,) = take(worker)
    assert delivery_properties(again)["attempt"] == "2"
    assert (
        delivery_properties(again)["delivery-token"]
        != delivery_properties(second)["delivery-token"]
    )


def test_other_user_properties_arrive_unchanged(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
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
    found = message.decode_properties()
    assert (found.content_type, found.response_topic) == ("text/plain", "answers/1")
    assert (found.correlation_data, found.payload_format) == (b"\x01\x02", 1)
    assert found.user[-4:] == [("b", "2"), ("a", "1"), ("b", "3"), ("priority", "4")]
    assert [value for name, value in found.user if name == "message-id"] == ["own"]
    assert message.payload == b"\x00\xff"


def test_user_properties_survive_a_crash(harness: BrokerHarness) -> None:
    put(harness.connect("maker"), "$queue/jobs", b"x", user=[("a", "1")], content_type="text/plain")
    harness.crash()
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    (message,) = take(worker)
    assert message.decode_properties().content_type == "text/plain"
    assert delivery_properties(message)["a"] == "1"


# ---- options of a consumer


@pytest.mark.parametrize(
    ("client_id", "group"),
    [
        ("images-1", "images"),
        ("a-b-c", "a-b"),
        ("alone", "alone"),
        ("-7", "-7"),
        ("trailing-", "trailing"),
    ],
)
def test_without_a_group_the_client_id_is_the_group(
    harness: BrokerHarness, client_id: str, group: str
) -> None:
    join(harness.connect(client_id), "$queue/jobs")
    assert list(harness.queue("jobs").groups) == [group]


def test_every_group_gets_every_message_at_one_of_its_members(harness: BrokerHarness) -> None:
    clients = [harness.connect(f"c{nth}") for nth in range(4)]
    for nth, client in enumerate(clients):
        join(client, "$queue/jobs", consumer_group="even" if nth % 2 == 0 else "odd")
    for nth in range(40):
        put(clients[0], "$queue/jobs", b"%d" % nth)
    got = [payloads(take(client)) for client in clients]
    assert (
        sorted(got[0] + got[2])
        == sorted(got[1] + got[3])
        == sorted(b"%d" % nth for nth in range(40))
    )
    assert got[0] and got[1] and got[2] and got[3]


def test_prefetch_limits_the_deliveries_of_a_consumer(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=3)
    for nth in range(10):
        put(worker, "$queue/jobs", b"%d" % nth)
    held = take(worker)
    assert len(held) == 3
    settle(worker, "ack", held[0])
    assert len(take(worker)) == 1
    join(worker, "$queue/jobs", prefetch=5)  # again, with another option
    assert len(take(worker)) == 2


def test_queue_configures_the_default_prefetch() -> None:
    harness = BrokerHarness([("#", {"performance": {"prefetch": 2}})])
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    for nth in range(10):
        put(worker, "$queue/jobs", b"%d" % nth)
    assert len(take(worker)) == 2


def test_with_puback_settlement_a_puback_acks(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(worker, "$queue/jobs", b"x")
    (message,) = worker.messages()
    assert harness.depth("jobs") == 1
    worker.ack(message)
    assert harness.depth("jobs") == 0


def test_with_puback_settlement_an_error_nacks(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(worker, "$queue/jobs", b"x")
    (message,) = worker.messages()
    worker.send(Ack(PUBACK, int(message.packet_id), 0x83))
    harness.advance(4.9)
    assert worker.take() == []
    harness.advance(0.2)
    (again,) = worker.messages()
    assert delivery_properties(again)["attempt"] == "2"
    worker.ack(again)
    assert harness.depth("jobs") == 0


def test_mqtt_5_clients_settle_explicitly_and_3_1_1_clients_by_puback_by_default(
    harness: BrokerHarness,
) -> None:
    new, old = harness.connect("new"), harness.connect("old", V311)
    join(new, "$queue/jobs")
    join(old, "$queue/jobs")
    put(new, "$queue/jobs", b"x")
    take(old)
    (message,) = take(new)
    stats = {group.name: int(group.in_flight) for group in harness.queue("jobs").groups.values()}
    assert stats == {"new": 1, "old": 0}
    settle(new, "ack", message)
    assert harness.depth("jobs") == 0


def test_with_puback_settlement_qos_0_is_acked_when_sent(harness: BrokerHarness) -> None:
    worker = harness.connect("old", V311)
    assert join(worker, "$queue/jobs", qos=0)[0] == 0
    put(harness.connect("maker"), "$queue/jobs", b"x")
    (message,) = worker.messages()
    assert message.qos == 0
    assert harness.depth("jobs") == 0


def test_puback_after_another_settlement_changes_nothing(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(worker, "$queue/jobs", b"x")
    (message,) = worker.messages()
    settle(worker, "nack", message, delay="0s")
    (again,) = worker.messages()
    worker.ack(message)  # the old packet id
    assert harness.depth("jobs") == 1
    worker.ack(again)
    assert harness.depth("jobs") == 0


def test_puback_after_unsubscribing_settles_nothing(harness: BrokerHarness) -> None:
    first, second = harness.connect("worker-1"), harness.connect("worker-2")
    join(first, "$queue/jobs", ack_mode="puback")
    put(first, "$queue/jobs", b"x")
    (message,) = first.messages()
    join(second, "$queue/jobs", ack_mode="puback")
    first.unsubscribe("$queue/jobs")
    (again,) = second.messages()
    first.ack(message)
    assert harness.depth("jobs") == 1
    second.ack(again)
    assert harness.depth("jobs") == 0
    first.ping()


def test_puback_after_another_consumer_settled_is_harmless(harness: BrokerHarness) -> None:
    first, second = harness.connect("worker-1"), harness.connect("worker-2")
    join(first, "$queue/jobs", ack_mode="puback")
    put(first, "$queue/jobs", b"x")
    (message,) = first.messages()
    join(second, "$queue/jobs", ack_mode="puback")
    first.unsubscribe("$queue/jobs")
    second.ack(second.messages()[0])
    first.ack(message)
    first.ping()
    assert harness.depth("jobs") == 0


def create_retaining_queue(harness: BrokerHarness, count: int) -> None:
    """Create a queue that retains settled messages, with `count` messages one minute apart."""
    maker = harness.connect("maker")
    for nth in range(count):
        put(maker, "$queue/jobs", b"%d" % nth)
        harness.advance(60)


KEEPING = [
    ("jobs", {"partitions": 1, "limits": {"retention": "1d"}, "performance": {"batch_size": 100}})
]


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
def test_new_group_starts_at_the_requested_position(start: str, first: int) -> None:
    harness = BrokerHarness(KEEPING)
    create_retaining_queue(harness, 5)
    worker = harness.connect("worker-1")
    assert join(worker, "$queue/jobs", start=start) == (1, "")
    put(worker, "$queue/jobs", b"5")
    assert payloads(take(worker)) == [b"%d" % nth for nth in range(first, 6)]


def test_existing_group_continues_at_its_position(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    settle(worker, "ack", take(worker)[0])
    other = harness.connect("worker-2")
    join(other, "$queue/jobs", start="earliest")
    assert other.take() == []


def test_only_consumers_of_the_highest_priority_are_served(harness: BrokerHarness) -> None:
    low, high = harness.connect("worker-low"), harness.connect("worker-high")
    join(low, "$queue/jobs")
    join(high, "$queue/jobs", consumer_priority=5)
    for _ in range(5):
        put(low, "$queue/jobs", b"x")
    assert (len(take(low)), len(take(high))) == (0, 5)
    high.disconnect()
    assert len(take(low)) == 5


def test_exclusive_consumer_is_served_alone(harness: BrokerHarness) -> None:
    first, second = harness.connect("worker-1"), harness.connect("worker-2")
    join(first, "$queue/jobs", exclusive="true")
    join(second, "$queue/jobs")
    for _ in range(5):
        put(first, "$queue/jobs", b"x")
    assert (len(take(first)), len(take(second))) == (5, 0)
    first.disconnect()
    assert len(take(second)) == 5


@pytest.mark.parametrize(
    "option",
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
def test_impossible_subscribe_option_refuses_the_subscription(
    harness: BrokerHarness, option: dict[str, Any]
) -> None:
    worker = harness.connect("worker-1")
    reason, why = join(
        worker, "$queue/jobs", **{name.replace("-", "_"): value for name, value in option.items()}
    )
    assert reason == 0x83  # SUBACK has no 0x99
    assert next(iter(option)) in why
    assert "jobs" not in harness.engine.queues or not harness.queue("jobs").groups
    worker.ping()


@pytest.mark.parametrize("group", ["+", "#", "a$b"])
def test_invalid_group_in_the_topic_is_refused(harness: BrokerHarness, group: str) -> None:
    reason, why = join(harness.connect("worker-1"), f"$queue/jobs/$group/{group}")
    assert reason in (0x83, 0x8F)
    assert why


def test_delivery_too_large_for_its_consumer_is_retried_and_dead_lettered() -> None:
    harness = BrokerHarness(
        [("jobs", {"retry_policy": {"max_retries": 1, "initial_backoff": "1s"}})]
    )
    worker = harness.connect("worker-1", maximum_packet_size=500)
    join(worker, "$queue/jobs")
    put(harness.connect("maker"), "$queue/jobs", b"x" * 1000)
    put(harness.connect("maker"), "$queue/jobs", b"small")
    assert payloads(take(worker)) == [b"small"]
    harness.advance(2)
    reader = harness.connect("reader")
    join(reader, "$queue/dlq/jobs")
    (dead_letter,) = take(reader)
    assert "maximum packet size" in delivery_properties(dead_letter)["dead-description"]


def test_message_that_became_too_large_for_its_consumer_fails_at_once() -> None:
    harness = BrokerHarness([("jobs", {"retry_policy": {"max_retries": 0}})])
    worker = harness.connect_persistent("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(harness.connect("maker"), "$queue/jobs", b"x" * 1000)
    assert len(worker.messages()) == 1  # and no PUBACK
    worker.drop()
    harness.connect_persistent("worker-1", maximum_packet_size=500)
    reader = harness.connect("reader")
    join(reader, "$queue/dlq/jobs")
    (dead_letter,) = take(reader)
    assert "maximum packet size" in delivery_properties(dead_letter)["dead-description"]


def deliveries(messages: list[Publish]) -> list[tuple[bytes, str]]:
    return [(message.payload, delivery_properties(message)["attempt"]) for message in messages]


def test_nack_with_delay_redelivers_after_it_and_without_at_once(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    settle(worker, "nack", take(worker)[0], delay="90s")
    harness.advance(89)
    assert worker.take() == []
    harness.advance(2)
    (message,) = take(worker)
    settle(worker, "nack", message, delay="0s")
    assert deliveries(take(worker)) == [(b"x", "3")]


def test_nack_with_an_invalid_delay_is_refused_and_changes_nothing(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    reason, why = settle(worker, "nack", message, delay="soon")
    assert (reason, "delay" in why) == (0x99, True)
    assert settle(worker, "ack", message) == (0, "")
