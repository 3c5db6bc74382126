"""Messages that will not be delivered again, as MQTT clients see them; schemas and compression of payloads."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.broker.kit import Client
from tests.broker.namespaces.kit import QueueHouse, facts, join, payloads, put, settle, take

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def letters(house: QueueHouse, queue: str) -> list[tuple[bytes, dict[str, str]]]:
    reader = house.connect("reader-1")
    join(reader, f"$queue/{queue}")
    return [(message.payload, facts(message)) for message in take(reader)]


def hold_one(house: QueueHouse, **properties: Any) -> Client:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x", **properties)
    return worker


def test_a_message_that_fails_too_often_is_found_in_the_dead_letters_with_its_story() -> None:
    house = QueueHouse([("jobs", {"retry_policy": {"max_retries": 2}})])
    worker = hold_one(house, user=[("a", "1"), ("message-id", "order-7")], content_type="text/plain")
    for backoff in (5, 10):
        (message,) = take(worker)
        settle(worker, "nack", message, description="disk full")
        house.advance(backoff)
    (message,) = take(worker)
    assert facts(message)["attempt"] == "3"
    settle(worker, "nack", message, description="disk full again")
    house.advance(1000)
    assert worker.take() == []
    ((payload, told),) = letters(house, "dlq/jobs")
    assert payload == b"x"
    for name in (
        "original-enqueued-at",
        "first-attempt-at",
        "last-attempt-at",
        "dead-at",
        "rejectionTimestamp",
    ):
        assert TIME.fullmatch(told[name]), name
    assert told["first-attempt-at"] < told["last-attempt-at"] <= told["dead-at"]
    expected = {
        "original-queue": "jobs",
        "original-topic": "$queue/jobs",
        "original-partition": facts(message)["partition"],
        "original-sequence": "0",
        "original-message-id": "order-7",
        "original-group": "worker",
        "dead-reason": "max_retries",
        "dead-description": "disk full again",
        "attempts": "3",
        "originalTopic": "$queue/jobs",
        "rejectionReason": "delivery-error",
        "rejectionMessage": "disk full again",
        "a": "1",
        "queue": "dlq/jobs",
        "attempt": "1",
    }
    assert {name: told.get(name) for name in expected} == expected
    assert "originalMessageType" in told


def test_a_dead_letter_is_settled_by_the_id_on_its_delivery(house: QueueHouse) -> None:
    worker = hold_one(house, user=[("message-id", "order-7")])
    settle(worker, "reject", take(worker)[0])
    reader = house.connect("reader-1")
    join(reader, "$queue/dlq/jobs")
    (letter,) = take(reader)
    assert settle(reader, "ack", letter) == (0, "")
    assert house.depth("dlq/jobs") == 0


@pytest.mark.parametrize("reason", ["", "delivery-error", "rejected"])
def test_reject_buries_at_once(house: QueueHouse, reason: str) -> None:
    worker = hold_one(house)
    wishes = {"reason": reason} if reason else {}
    assert settle(worker, "reject", take(worker)[0], description="no such customer", **wishes) == (0, "")
    ((payload, told),) = letters(house, "dlq/jobs")
    assert (payload, told["dead-reason"], told["dead-description"]) == (b"x", "rejected", "no such customer")
    assert told["attempts"] == "1"


def test_reject_for_a_reason_that_is_none_is_refused(house: QueueHouse) -> None:
    worker = hold_one(house)
    (message,) = take(worker)
    reason, why = settle(worker, "reject", message, reason="bored")
    assert (reason, "bored" in why and "unacceptable" in why) == (0x99, True)
    assert house.depth("dlq/jobs") == 0
    assert settle(worker, "ack", message) == (0, "")


@pytest.mark.parametrize(
    ("config", "home"),
    [
        ({"dlq_config": {"invalid_topic": "invalid/jobs"}}, "invalid/jobs"),
        ({"dlq_config": {"invalid_topic": "$queue/invalid/jobs", "enabled": False}}, "invalid/jobs"),
        ({}, "dlq/jobs"),
        ({"dlq_config": {"topic": "$queue/graveyard"}}, "graveyard"),
    ],
)
def test_what_is_unacceptable_goes_to_the_invalid_channel_where_there_is_one(
    config: dict[str, object], home: str
) -> None:
    house = QueueHouse([("jobs", config)])
    worker = hold_one(house)
    settle(worker, "reject", take(worker)[0], reason="unacceptable", description="no JSON")
    ((_, told),) = letters(house, home)
    assert (told["rejectionReason"], told["rejectionMessage"]) == ("unacceptable", "no JSON")
    assert house.depth("jobs") == 0


def test_a_delivery_error_goes_to_the_dead_letters_though_there_is_an_invalid_channel() -> None:
    house = QueueHouse([("jobs", {"dlq_config": {"invalid_topic": "invalid/jobs"}})])
    worker = hold_one(house)
    settle(worker, "reject", take(worker)[0], reason="delivery-error")
    assert len(letters(house, "dlq/jobs")) == 1
    assert "invalid/jobs" not in house.engine.queues


def test_where_there_is_no_place_for_the_dead_they_are_settled_with_a_warning() -> None:
    house = QueueHouse([("jobs", {"dlq_config": {"enabled": False}})])
    worker = hold_one(house)
    settle(worker, "reject", take(worker)[0])
    assert house.depth("jobs") == 0
    assert list(house.engine.queues) == ["jobs"]
    (warning,) = house.warnings
    assert "no dead-letter queue" in warning


def test_a_long_description_ends_with_a_whole_character(house: QueueHouse) -> None:
    worker = hold_one(house)
    settle(worker, "reject", take(worker)[0], description="ü" * 20_000)
    ((_, story),) = letters(house, "dlq/jobs")
    assert story["dead-description"] == "ü" * 16_383


@pytest.mark.parametrize("key", ["topic", "invalid_topic"])
def test_a_queue_cannot_be_the_place_for_its_own_dead(house: QueueHouse, key: str) -> None:
    config = {"name": "jobs", "dlq_config": {key: "$queue/jobs"}}
    maker = house.connect("maker")
    reason, why = put(maker, "$admin/queue/create", json.dumps(config).encode())
    assert (reason, f"dlq_config.{key} names the queue itself" in why) == (0x99, True)
    put(maker, "$queue/jobs", b"x")
    reason, why = put(maker, "$admin/queue/jobs/config", json.dumps(config).encode())
    assert (reason, "names the queue itself" in why) == (0x99, True)


def test_dead_letters_cannot_be_sent_round(house: QueueHouse) -> None:
    maker = house.connect("maker")
    for name, dead in (("a", "b"), ("b", "c")):
        config = {"name": name, "dlq_config": {"topic": dead}}
        assert put(maker, "$admin/queue/create", json.dumps(config).encode())[0] == 0
    reason, why = put(
        maker, "$admin/queue/create", json.dumps({"name": "c", "dlq_config": {"topic": "a"}}).encode()
    )
    assert (reason, "dead letters would go round for ever: c to a to b to c" in why) == (0x99, True)
    assert put(maker, "$admin/queue/create", json.dumps({"name": "c"}).encode())[0] == 0
    turn = json.dumps({"dlq_config": {"topic": "a"}}).encode()
    reason, why = put(maker, "$admin/queue/c/config", turn)
    assert (reason, "c to a to b to c" in why) == (0x99, True)
    put(maker, "$admin/queue/b/config", json.dumps({"dlq_config": {"enabled": False}}).encode())
    assert put(maker, "$admin/queue/c/config", turn)[0] == 0


def test_where_a_template_sends_the_dead_of_all_queues_to_one_they_stay_there() -> None:
    house = QueueHouse(
        [
            (
                "#",
                {
                    "dlq_config": {"topic": "failed", "invalid_topic": "failed"},
                    "retry_policy": {"max_retries": 0},
                },
            )
        ]
    )
    worker = hold_one(house)
    settle(worker, "reject", take(worker)[0])
    reader = house.connect("reader-1")
    join(reader, "$queue/failed")
    for attempt in ("1", "2", "3"):
        (letter,) = take(reader)
        assert (
            facts(letter)["attempt"] == attempt
        )  # the same letter: it neither dies nor comes back as another
        settle(reader, "nack", letter, delay="0s")
    settle(reader, "reject", take(reader)[0], reason="unacceptable")
    assert take(reader) == []
    assert house.depth("failed") == 0
    assert put(worker, "$admin/queue/failed/config", b'{"performance": {"prefetch": 7}}') == (0, "")


def test_a_total_timeout_buries() -> None:
    house = QueueHouse([("jobs", {"retry_policy": {"total_timeout": "1m", "max_retries": 1000}})])
    worker = hold_one(house)
    for _ in range(30):
        for message in take(worker):
            settle(worker, "nack", message)
        house.advance(10)
    ((_, told),) = letters(house, "dlq/jobs")
    assert told["dead-reason"] == "timeout"


def test_expired_messages_are_buried_where_the_queue_says_so() -> None:
    house = QueueHouse([("jobs", {"limits": {"on_expiry": "dead-letter"}})])
    put(house.connect("maker"), "$queue/jobs", b"late", message_expiry=10)
    house.advance(20)
    ((payload, told),) = letters(house, "dlq/jobs")
    assert (payload, told["dead-reason"]) == (b"late", "expired")


def test_a_captured_message_tells_its_own_topic_when_it_is_dead() -> None:
    house = QueueHouse()
    worker = house.connect("worker-1")
    put(worker, "$admin/queue/create", json.dumps({"name": "jobs", "bindings": ["sensors/#"]}).encode())
    join(worker, "$queue/jobs")
    put(worker, "sensors/7", b"x")
    settle(worker, "reject", take(worker)[0])
    ((_, told),) = letters(house, "dlq/jobs")
    assert (told["original-topic"], told["original-queue"]) == ("sensors/7", "jobs")


def test_an_alert_is_raised_for_every_death() -> None:
    house = QueueHouse([("jobs", {"dlq_config": {"alert_webhook": "http://127.0.0.1:1/hook"}})])
    worker = hold_one(house, user=[("message-id", "order-7")])
    settle(worker, "reject", take(worker)[0], description="broken")
    (alert,) = house.alerts
    assert (alert.url, alert.queue, alert.dlq) == ("http://127.0.0.1:1/hook", "jobs", "dlq/jobs")
    assert (alert.message_id, alert.group, alert.reason) == ("order-7", "worker", "rejected")


def test_dead_letters_survive_a_crash_in_exactly_one_place(house: QueueHouse) -> None:
    worker = hold_one(house)
    settle(worker, "reject", take(worker)[0])
    house.kill()
    assert (house.depth("jobs"), house.depth("dlq/jobs")) == (0, 1)


# ---- schemas

SCHEMA = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("payload", "words"),
    [(b"nonsense", "not JSON"), (b'{"id": "7"}', "/id"), (b"{}", "id"), (b"[" * 100_000, "not JSON")],
)
def test_a_payload_that_does_not_fit_the_schema_is_refused(payload: bytes, words: str) -> None:
    house = QueueHouse([("jobs", {"schema": SCHEMA})])
    maker = house.connect("maker")
    for qos in (1, 2):
        reason, why = put(maker, "$queue/jobs", payload, qos)
        assert (reason, words in why) == (0x99, True)
    assert put(maker, "$queue/jobs", b'{"id": 7}') == (0, "")
    assert house.depth("jobs") == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_a_payload_that_does_not_fit_goes_to_the_invalid_channel_where_there_is_one(enabled: bool) -> None:
    config = {"schema": SCHEMA, "dlq_config": {"invalid_topic": "invalid/jobs", "enabled": enabled}}
    house = QueueHouse([("jobs", config)])
    maker = house.connect("maker")
    for qos in (1, 2):
        assert put(maker, "$queue/jobs", b"nonsense", qos, user=[("a", "1")]) == (0, "")
    maker.publish("$queue/jobs", b"nonsense", 0)
    assert house.depth("jobs") == 0
    found = letters(house, "invalid/jobs")
    assert len(found) == 3
    payload, told = found[0]
    assert (payload, told["rejectionReason"], told["original-queue"]) == (b"nonsense", "unacceptable", "jobs")
    assert "not JSON" in told["dead-description"]


def test_the_answer_for_an_invalid_payload_waits_for_the_store_too() -> None:
    house = QueueHouse([("jobs", {"schema": SCHEMA, "dlq_config": {"invalid_topic": "invalid/jobs"}})])
    maker = house.connect("maker")
    house.store.hold()
    packet_id = maker.publish("$queue/jobs", b"nonsense", 1)
    assert maker.take() == []
    house.store.release()
    house.loop.settle()
    maker.first_ack(4, packet_id, 0)


def test_a_schema_that_is_changed_goes_for_the_next_message(house: QueueHouse) -> None:
    client = house.connect("admin")
    put(client, "$queue/jobs", b"nonsense")
    put(client, "$admin/queue/jobs/config", json.dumps({"schema": SCHEMA}).encode())
    assert put(client, "$queue/jobs", b"nonsense")[0] == 0x99
    put(client, "$admin/queue/jobs/config", json.dumps({"schema": None}).encode())
    assert put(client, "$queue/jobs", b"nonsense")[0] == 0
    reason, why = put(client, "$admin/queue/jobs/config", b'{"schema": {"type": 7}}')
    assert (reason, "schema" in why) == (0x99, True)


# ---- compression


def test_a_compressed_payload_comes_back_as_it_was_and_takes_less_room() -> None:
    sizes = {}
    body = json.dumps([{"nth": nth, "text": "the same again and again"} for nth in range(200)]).encode()
    for compression in ("none", "zstd"):
        house = QueueHouse([("jobs", {"performance": {"compression": compression}})])
        maker = house.connect("maker")
        put(maker, "$queue/jobs", body, user=[("a", "1")])
        put(maker, "$queue/jobs", b"tiny")
        sizes[compression] = int(house.queue("jobs").bytes)
        house.crash()
        worker = house.connect("worker-1")
        join(worker, "$queue/jobs")
        messages = take(worker)
        assert sorted(payloads(messages)) == sorted([body, b"tiny"])
        settle(worker, "reject", messages[0])
        settle(worker, "reject", messages[1])
        assert sorted(payload for payload, _ in letters(house, "dlq/jobs")) == sorted([body, b"tiny"])
    assert sizes["zstd"] < sizes["none"] / 5
