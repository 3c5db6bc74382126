"""Dead letters as MQTT clients see them; schemas and compression of payloads."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, settle, take
from tests.broker.peers import Client

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def list_dead_letters(harness: BrokerHarness, queue: str) -> list[tuple[bytes, dict[str, str]]]:
    reader = harness.connect("reader-1")
    join(reader, f"$queue/{queue}")
    return [(message.payload, delivery_properties(message)) for message in take(reader)]


def hold_one(harness: BrokerHarness, **properties: Any) -> Client:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x", **properties)
    return worker


def test_message_that_fails_too_often_becomes_a_dead_letter_with_its_history() -> None:
    harness = BrokerHarness([("jobs", {"retry_policy": {"max_retries": 2}})])
    worker = hold_one(
        harness, user=[("a", "1"), ("message-id", "order-7")], content_type="text/plain"
    )
    for backoff in (5, 10):
        (message,) = take(worker)
        settle(worker, "nack", message, description="disk full")
        harness.advance(backoff)
    (message,) = take(worker)
    assert delivery_properties(message)["attempt"] == "3"
    settle(worker, "nack", message, description="disk full again")
    harness.advance(1000)
    assert worker.take() == []
    ((payload, reported),) = list_dead_letters(harness, "dlq/jobs")
    assert payload == b"x"
    for name in (
        "original-enqueued-at",
        "first-attempt-at",
        "last-attempt-at",
        "dead-at",
        "rejectionTimestamp",
    ):
        assert TIME.fullmatch(reported[name]), name
    assert reported["first-attempt-at"] < reported["last-attempt-at"] <= reported["dead-at"]
    expected = {
        "original-queue": "jobs",
        "original-topic": "$queue/jobs",
        "original-partition": delivery_properties(message)["partition"],
        "original-sequence": "0",
        "original-message-id": "order-7",
        "original-group": "worker",
        "dead-reason": "max_retries",
        "dead-description": "disk full again",
        "attempts": "3",
        "originalTopic": "$queue/jobs",
        "rejectionReason": "DeliveryError",
        "rejectionMessage": "disk full again",
        "a": "1",
        "queue": "dlq/jobs",
        "attempt": "1",
    }
    assert {name: reported.get(name) for name in expected} == expected
    assert reported["originalMessageType"] == "text/plain"


def test_dead_letter_names_the_content_type_of_its_message(harness: BrokerHarness) -> None:
    worker = hold_one(harness, content_type="application/json")
    settle(worker, "reject", take(worker)[0])
    ((_, reported),) = list_dead_letters(harness, "dlq/jobs")
    assert reported["originalMessageType"] == "application/json"


def test_dead_letter_is_settled_by_the_id_of_its_delivery(harness: BrokerHarness) -> None:
    worker = hold_one(harness, user=[("message-id", "order-7")])
    settle(worker, "reject", take(worker)[0])
    reader = harness.connect("reader-1")
    join(reader, "$queue/dlq/jobs")
    (dead_letter,) = take(reader)
    assert settle(reader, "ack", dead_letter) == (0, "")
    assert harness.depth("dlq/jobs") == 0


@pytest.mark.parametrize("reason", ["", "delivery-error", "DeliveryError", "rejected"])
def test_reject_dead_letters_at_once(harness: BrokerHarness, reason: str) -> None:
    worker = hold_one(harness)
    options = {"reason": reason} if reason else {}
    assert settle(worker, "reject", take(worker)[0], description="no such customer", **options) == (
        0,
        "",
    )
    ((payload, reported),) = list_dead_letters(harness, "dlq/jobs")
    assert (payload, reported["dead-reason"], reported["dead-description"]) == (
        b"x",
        "rejected",
        "no such customer",
    )
    assert reported["attempts"] == "1"


def test_reject_with_an_unknown_reason_is_refused(harness: BrokerHarness) -> None:
    worker = hold_one(harness)
    (message,) = take(worker)
    reason, why = settle(worker, "reject", message, reason="bored")
    assert (reason, "bored" in why and "unacceptable" in why) == (0x99, True)
    assert harness.depth("dlq/jobs") == 0
    assert settle(worker, "ack", message) == (0, "")


@pytest.mark.parametrize(
    ("config", "home"),
    [
        ({"dlq_config": {"invalid_topic": "invalid/jobs"}}, "invalid/jobs"),
        (
            {"dlq_config": {"invalid_topic": "$queue/invalid/jobs", "enabled": False}},
            "invalid/jobs",
        ),
        ({}, "dlq/jobs"),
        ({"dlq_config": {"topic": "$queue/graveyard"}}, "graveyard"),
    ],
)
@pytest.mark.parametrize("reason", ["unacceptable", "Unacceptable"])
def test_unacceptable_message_goes_to_the_invalid_channel_if_there_is_one(
    config: dict[str, object], home: str, reason: str
) -> None:
    harness = BrokerHarness([("jobs", config)])
    worker = hold_one(harness)
    settle(worker, "reject", take(worker)[0], reason=reason, description="no JSON")
    ((_, reported),) = list_dead_letters(harness, home)
    assert (reported["rejectionReason"], reported["rejectionMessage"]) == (
        "Unacceptable",
        "no JSON",
    )
    assert harness.depth("jobs") == 0


def test_delivery_error_goes_to_the_dead_letters_despite_an_invalid_channel() -> None:
    harness = BrokerHarness([("jobs", {"dlq_config": {"invalid_topic": "invalid/jobs"}})])
    worker = hold_one(harness)
    settle(worker, "reject", take(worker)[0], reason="delivery-error")
    assert len(list_dead_letters(harness, "dlq/jobs")) == 1
    assert "invalid/jobs" not in harness.engine.queues


def test_without_a_dead_letter_queue_messages_are_settled_with_a_warning() -> None:
    harness = BrokerHarness([("jobs", {"dlq_config": {"enabled": False}})])
    worker = hold_one(harness)
    settle(worker, "reject", take(worker)[0])
    assert harness.depth("jobs") == 0
    assert list(harness.engine.queues) == ["jobs"]
    (warning,) = harness.warnings
    assert "no dead-letter queue" in warning


def test_long_description_is_cut_at_a_whole_character(harness: BrokerHarness) -> None:
    worker = hold_one(harness)
    settle(worker, "reject", take(worker)[0], description="ü" * 20_000)
    ((_, properties),) = list_dead_letters(harness, "dlq/jobs")
    assert properties["dead-description"] == "ü" * 16_383


@pytest.mark.parametrize("key", ["topic", "invalid_topic"])
def test_queue_cannot_be_its_own_dead_letter_queue(harness: BrokerHarness, key: str) -> None:
    config = {"name": "jobs", "dlq_config": {key: "$queue/jobs"}}
    maker = harness.connect("maker")
    reason, why = put(maker, "$admin/queue/create", json.dumps(config).encode())
    assert (reason, f"dlq_config.{key} names the queue itself" in why) == (0x99, True)
    put(maker, "$queue/jobs", b"x")
    reason, why = put(maker, "$admin/queue/jobs/config", json.dumps(config).encode())
    assert (reason, "names the queue itself" in why) == (0x99, True)


def test_dead_letter_queues_cannot_form_a_cycle(harness: BrokerHarness) -> None:
    maker = harness.connect("maker")
    for name, dead in (("a", "b"), ("b", "c")):
        config = {"name": name, "dlq_config": {"topic": dead}}
        assert put(maker, "$admin/queue/create", json.dumps(config).encode())[0] == 0
    reason, why = put(
        maker,
        "$admin/queue/create",
        json.dumps({"name": "c", "dlq_config": {"topic": "a"}}).encode(),
    )
    assert (reason, "dead letters would circulate forever: c to a to b to c" in why) == (0x99, True)
    assert put(maker, "$admin/queue/create", json.dumps({"name": "c"}).encode())[0] == 0
    turn = json.dumps({"dlq_config": {"topic": "a"}}).encode()
    reason, why = put(maker, "$admin/queue/c/config", turn)
    assert (reason, "c to a to b to c" in why) == (0x99, True)
    put(maker, "$admin/queue/b/config", json.dumps({"dlq_config": {"enabled": False}}).encode())
    assert put(maker, "$admin/queue/c/config", turn)[0] == 0


def test_common_dead_letter_queue_of_a_template_keeps_its_own_dead_letters() -> None:
    harness = BrokerHarness(
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
    worker = hold_one(harness)
    settle(worker, "reject", take(worker)[0])
    reader = harness.connect("reader-1")
    join(reader, "$queue/failed")
    for attempt in ("1", "2", "3"):
        (dead_letter,) = take(reader)
        # The same dead letter: it is neither dead-lettered again nor copied.
        assert delivery_properties(dead_letter)["attempt"] == attempt
        settle(reader, "nack", dead_letter, delay="0s")
    settle(reader, "reject", take(reader)[0], reason="unacceptable")
    assert take(reader) == []
    assert harness.depth("failed") == 0
    assert put(worker, "$admin/queue/failed/config", b'{"performance": {"prefetch": 7}}') == (0, "")


def test_total_timeout_dead_letters() -> None:
    harness = BrokerHarness(
        [("jobs", {"retry_policy": {"total_timeout": "1m", "max_retries": 1000}})]
    )
    worker = hold_one(harness)
    for _ in range(30):
        for message in take(worker):
            settle(worker, "nack", message)
        harness.advance(10)
    ((_, reported),) = list_dead_letters(harness, "dlq/jobs")
    assert reported["dead-reason"] == "timeout"


def test_expired_messages_are_dead_lettered_if_configured() -> None:
    harness = BrokerHarness([("jobs", {"limits": {"on_expiry": "dead-letter"}})])
    put(harness.connect("maker"), "$queue/jobs", b"late", message_expiry=10)
    harness.advance(20)
    ((payload, reported),) = list_dead_letters(harness, "dlq/jobs")
    assert (payload, reported["dead-reason"]) == (b"late", "expired")


def test_dead_letter_of_a_bound_message_has_its_topic() -> None:
    harness = BrokerHarness()
    worker = harness.connect("worker-1")
    put(
        worker,
        "$admin/queue/create",
        json.dumps({"name": "jobs", "bindings": ["sensors/#"]}).encode(),
    )
    join(worker, "$queue/jobs")
    put(worker, "sensors/7", b"x")
    settle(worker, "reject", take(worker)[0])
    ((_, reported),) = list_dead_letters(harness, "dlq/jobs")
    assert (reported["original-topic"], reported["original-queue"]) == ("sensors/7", "jobs")


def test_alert_is_raised_for_every_dead_letter() -> None:
    harness = BrokerHarness(
        [("jobs", {"dlq_config": {"alert_webhook": "http://127.0.0.1:1/hook"}})]
    )
    worker = hold_one(harness, user=[("message-id", "order-7")])
    settle(worker, "reject", take(worker)[0], description="broken")
    (alert,) = harness.alerts
    assert (alert.url, alert.queue, alert.dlq) == ("http://127.0.0.1:1/hook", "jobs", "dlq/jobs")
    assert (alert.message_id, alert.group, alert.reason) == ("order-7", "worker", "rejected")


def test_dead_letters_survive_a_crash_in_exactly_one_place(harness: BrokerHarness) -> None:
    worker = hold_one(harness)
    settle(worker, "reject", take(worker)[0])
    harness.kill()
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 1)


# ---- schemas

SCHEMA = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"nonsense", "not JSON"),
        (b'{"id": "7"}', "/id"),
        (b"{}", "id"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_payload_that_violates_the_schema_is_refused(payload: bytes, words: str) -> None:
    harness = BrokerHarness([("jobs", {"schema": SCHEMA})])
    maker = harness.connect("maker")
    for qos in (1, 2):
        reason, why = put(maker, "$queue/jobs", payload, qos)
        assert (reason, words in why) == (0x99, True)
    assert put(maker, "$queue/jobs", b'{"id": 7}') == (0, "")
    assert harness.depth("jobs") == 1


@pytest.mark.parametrize("enabled", [True, False])
def test_payload_that_violates_the_schema_goes_to_the_invalid_channel_if_there_is_one(
    enabled: bool,
) -> None:
    config = {"schema": SCHEMA, "dlq_config": {"invalid_topic": "invalid/jobs", "enabled": enabled}}
    harness = BrokerHarness([("jobs", config)])
    maker = harness.connect("maker")
    for qos in (1, 2):
        assert put(maker, "$queue/jobs", b"nonsense", qos, user=[("a", "1")]) == (0, "")
    maker.publish("$queue/jobs", b"nonsense", 0)
    assert harness.depth("jobs") == 0
    found = list_dead_letters(harness, "invalid/jobs")
    assert len(found) == 3
    payload, reported = found[0]
    assert (payload, reported["rejectionReason"], reported["original-queue"]) == (
        b"nonsense",
        "Unacceptable",
        "jobs",
    )
    assert "not JSON" in reported["dead-description"]


@pytest.mark.parametrize("qos", [1, 2])
def test_invalid_payload_is_refused_if_its_queue_cannot_be_created(qos: int) -> None:
    harness = BrokerHarness(
        [
            ("jobs", {"schema": SCHEMA, "dlq_config": {"invalid_topic": "invalid/jobs"}}),
            ("invalid/#", {"partitions": 0}),
        ]
    )
    reason, why = put(harness.connect("maker"), "$queue/jobs", b"nonsense", qos)
    assert (reason, "not JSON" in why, "create the queue 'invalid/jobs'" in why) == (
        0x99,
        True,
        True,
    )
    assert "invalid/jobs" not in harness.engine.queues
    assert harness.queue("jobs").dead_by_reason == {}
    (warning,) = harness.warnings
    assert warning.startswith(
        "message refused: invalid-message queue invalid/jobs of queue jobs cannot be created: "
    )
    assert "partitions" in warning


def test_acknowledgement_of_an_invalid_payload_waits_for_commit_too() -> None:
    harness = BrokerHarness(
        [("jobs", {"schema": SCHEMA, "dlq_config": {"invalid_topic": "invalid/jobs"}})]
    )
    maker = harness.connect("maker")
    harness.store.hold()
    packet_id = maker.publish("$queue/jobs", b"nonsense", 1)
    assert maker.take() == []
    harness.store.release()
    harness.loop.settle()
    maker.first_ack(4, packet_id, 0)


def test_changed_schema_applies_to_the_next_message(harness: BrokerHarness) -> None:
    client = harness.connect("admin")
    put(client, "$queue/jobs", b"nonsense")
    put(client, "$admin/queue/jobs/config", json.dumps({"schema": SCHEMA}).encode())
    assert put(client, "$queue/jobs", b"nonsense")[0] == 0x99
    put(client, "$admin/queue/jobs/config", json.dumps({"schema": None}).encode())
    assert put(client, "$queue/jobs", b"nonsense")[0] == 0
    reason, why = put(client, "$admin/queue/jobs/config", b'{"schema": {"type": 7}}')
    assert (reason, "schema" in why) == (0x99, True)


# ---- compression


def test_compressed_payload_is_delivered_unchanged_and_takes_less_space() -> None:
    sizes = {}
    body = json.dumps(
        [{"nth": nth, "text": "the same again and again"} for nth in range(200)]
    ).encode()
    for compression in ("none", "zstd"):
        harness = BrokerHarness([("jobs", {"performance": {"compression": compression}})])
        maker = harness.connect("maker")
        put(maker, "$queue/jobs", body, user=[("a", "1")])
        put(maker, "$queue/jobs", b"tiny")
        sizes[compression] = int(harness.queue("jobs").bytes)
        harness.crash()
        worker = harness.connect("worker-1")
        join(worker, "$queue/jobs")
        messages = take(worker)
        assert sorted(payloads(messages)) == sorted([body, b"tiny"])
        settle(worker, "reject", messages[0])
        settle(worker, "reject", messages[1])
        assert sorted(payload for payload, _ in list_dead_letters(harness, "dlq/jobs")) == sorted(
            [body, b"tiny"]
        )
    assert sizes["zstd"] < sizes["none"] / 5
