"""Dead letters: their queue, their headers, and their redrive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.message import Message, decode_headers
from sluice.queues.flow.dead_letters import format_iso_time
from tests.queues.conftest import MakeEngine
from tests.queues.kit import START, EngineUnderTest, MemoryBackend


def history_of(*events: list[Any]) -> str:
    """Encode a history as in the header: times in milliseconds."""
    return json.dumps([[round(at * 1000), *rest] for at, *rest in events], separators=(",", ":"))


def test_rejected_message_is_dead_lettered_at_once(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"poison")
    worker.reject(worker.lease())
    assert engine.dead_letters() == [b"poison"] and engine.depth() == 0
    assert engine.ledger().dead == 1 and engine.engine.queues["tasks"].dead_by_reason == {
        "rejected": 1
    }


def test_log_names_the_dead_letter_queue_that_cannot_be_created(make_engine: MakeEngine) -> None:
    engine = make_engine(dlq_name="not//a name")
    worker = engine.worker()
    engine.publish(b"poison", message_id=b"order-7")
    worker.reject(worker.lease())
    (warning,) = engine.warnings
    assert warning.startswith(
        "message dropped: dead-letter queue not//a name of queue tasks cannot be created: "
    )
    assert "levels" in warning and warning.endswith("(message order-7, reason rejected)")
    assert engine.depth() == 0


def test_dead_letter_has_its_message_and_history(make_engine: MakeEngine) -> None:
    engine = make_engine(partitions=3)
    engine.group("workers")
    engine.publish(b"poison", key=b"k", props=b"\x26own", message_id=b"order-7", priority=3)
    engine.advance(seconds=10)
    worker = engine.worker("w-1")
    delivery = worker.lease()
    worker.nack(delivery, description="no luck")
    engine.advance(seconds=5)
    worker.reject(worker.lease(), description="no sense")
    dead_letter = engine.dead_letter_records()[0]
    assert (dead_letter.payload, dead_letter.message.key, dead_letter.message.props) == (
        b"poison",
        b"k",
        b"\x26own",
    )
    assert dead_letter.history == {
        "original-queue": "tasks",
        "original-topic": "$queue/tasks",
        "original-partition": str(delivery.partition),
        "original-sequence": "0",
        "original-message-id": "order-7",
        "original-group": "workers",
        "original-enqueued-at": format_iso_time(START),
        "original-priority": "3",
        "dead-reason": "rejected",
        "dead-description": "no sense",
        "dead-at": format_iso_time(START + 15),
        "attempts": "2",
        "first-attempt-at": format_iso_time(START + 10),
        "last-attempt-at": format_iso_time(START + 15),
        "originalTopic": "$queue/tasks",
        "originalMessageType": "bytes",
        "rejectionReason": "DeliveryError",
        "rejectionTimestamp": "2027-01-15T08:00:15.000Z",
        "rejectionMessage": "no sense",
        "history": history_of(
            [START, "enqueued", "", "", 0, ""],
            [START + 10, "delivered", "workers", "w-1", 1, ""],
            [START + 10, "nacked", "workers", "w-1", 1, "no luck"],
            [START + 15, "delivered", "workers", "w-1", 2, ""],
            [START + 15, "dead", "workers", "", 2, "rejected: no sense"],
        ),
    }


def test_dead_letter_of_a_bound_message_has_its_topic(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.engine.publishing.publish(engine.queue(), _bound_message(), None, 0)
    worker.reject(worker.lease())
    assert engine.dead_letter_records()[0].history["originalTopic"] == "sensors/1/temp"


def _bound_message() -> Message:
    message = Message(b"21.5")
    message.topic = b"sensors/1/temp"
    return message


def test_unacceptable_goes_to_the_invalid_channel_and_the_rest_to_the_dead_letters(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(invalid_queue_name="invalid/tasks")
    worker = engine.worker()
    engine.publish(b"nonsense")
    engine.publish(b"poison")
    for delivery in worker.lease_all():
        worker.reject(delivery, "unacceptable" if delivery.payload == b"nonsense" else "rejected")
    assert engine.dead_letters() == [b"poison"]
    invalid = engine.dead_letter_records(channel="invalid/tasks")
    assert [dead_letter.payload for dead_letter in invalid] == [b"nonsense"]
    assert invalid[0].history["rejectionReason"] == "Unacceptable"
    assert invalid[0].history["dead-reason"] == "rejected"


def test_unacceptable_goes_to_the_dead_letters_without_an_invalid_channel(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker()
    engine.publish(b"nonsense")
    worker.reject(worker.lease(), "unacceptable")
    assert engine.dead_letters() == [b"nonsense"]


def test_unacceptable_goes_to_the_invalid_channel_without_a_dead_letter_queue(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(invalid_queue_name="invalid", dlq_enabled=False)
    worker = engine.worker()
    engine.publish(b"nonsense")
    worker.reject(worker.lease(), "unacceptable")
    assert [
        dead_letter.payload for dead_letter in engine.dead_letter_records(channel="invalid")
    ] == [b"nonsense"]


def test_without_either_a_warning_is_given_and_the_message_settled(make_engine: MakeEngine) -> None:
    engine = make_engine(dlq_enabled=False)
    worker = engine.worker()
    engine.publish(b"poison", message_id=b"order-7")
    worker.reject(worker.lease())
    assert engine.depth() == 0 and engine.ledger().dead == 1
    assert any(
        "order-7" in warning and "no dead-letter queue" in warning for warning in engine.warnings
    )


def test_queue_observers_are_notified_of_a_new_dead_letter_queue(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker()
    for number in range(3):
        engine.publish(b"%d" % number)
    for delivery in worker.lease_all():
        worker.reject(delivery)
    assert engine.created_queues == ["dlq/tasks"]


def test_alert_is_raised_for_each_dead_letter(make_engine: MakeEngine) -> None:
    engine = make_engine(alert_webhook="https://example.org/hook", max_retries=0)
    worker = engine.worker()
    engine.publish(b"poison", message_id=b"order-7")
    worker.nack(worker.lease())
    alert = engine.alerts[0]
    assert (alert.url, alert.queue, alert.dlq, alert.message_id, alert.group, alert.reason) == (
        "https://example.org/hook",
        "tasks",
        "dlq/tasks",
        "order-7",
        "workers",
        "max_retries",
    )
    assert alert.headers["attempts"] == "1"


def test_dead_letters_can_be_consumed_like_any_queue(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"poison")
    worker.reject(worker.lease())
    operator = engine.worker(group="operators", queue="dlq/tasks")
    assert operator.ack_all() == [b"poison"]
    assert engine.dead_letters() == []


@pytest.mark.parametrize("committed", range(12))
def test_power_cut_while_dead_lettering_leaves_the_message_in_one_place(committed: int) -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend, max_retries=0)
    worker = engine.worker()
    for number in range(5):
        engine.publish(b"%d" % number)
    assert backend.store is not None
    backend.store.hold()
    # Each dead letter is submitted in a frame of its own, and none is committed.
    for delivery in worker.lease_all():
        worker.reject(delivery)
        backend.store.release(1) if delivery.seq < committed // 3 else None
    backend.cut_power(keep_unsynced=committed % 3)
    engine.reopen()
    engine.verify()
    dead = engine.dead_letters()
    live = engine.worker().ack_all()
    assert sorted(dead + live) == [b"%d" % number for number in range(5)]


def test_redriven_dead_letter_returns_to_its_group_on_its_old_partition(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(partitions=5)
    failing = engine.worker(group="failing")
    other = engine.worker(group="other")
    for number in range(5):
        engine.publish(b"%d" % number, message_id=b"id-%d" % number)
    partition_by_payload = {
        delivery.payload: delivery.partition for delivery in failing.lease_all()
    }
    other.ack_all()
    for delivery in list(engine.group("failing").cursors):
        for lease in list(delivery.leases.values()):
            engine.engine.settlement.dead_letter(lease, "rejected", "", True)
    engine.run_until_idle()
    for dead_letter in engine.dead_letter_records():
        assert engine.redrive(dead_letter)
    again = failing.lease_all()
    assert {one.payload: one.partition for one in again} == partition_by_payload
    assert {one.name for one in again} == {b"id-%d" % number for number in range(5)}
    assert [one.attempt for one in again] == [1] * 5
    assert other.lease_all() == [] and engine.dead_letters() == []
    for one in again:
        failing.ack(one)
        assert [name for name, _ in decode_headers(one.message.headers)] == ["history"], (
            "only the history header is added"
        )
    assert engine.depth() == 0


def test_dead_letter_is_redriven_to_all_groups_on_request(engine: EngineUnderTest) -> None:
    failing = engine.worker(group="failing")
    other = engine.worker(group="other")
    engine.publish(b"poison")
    other.ack_all()
    failing.reject(failing.lease())
    assert engine.redrive(engine.dead_letter_records()[0], to_all=True)
    assert failing.ack_all() == [b"poison"] and other.ack_all() == [b"poison"]


def test_redrive_target_survives_a_crash(engine: EngineUnderTest) -> None:
    failing = engine.worker(group="failing")
    engine.worker(group="other").ack_all()
    engine.publish(b"poison")
    failing.reject(failing.lease())
    engine.redrive(engine.dead_letter_records()[0])
    for _ in range(2):
        engine.crash_and_restart()
        engine.verify()
    assert engine.worker(group="other").ack_all() == [b"poison"], "the first time, not the second"
    assert engine.worker(group="failing").ack_all() == [b"poison"]
    assert engine.depth() == 0


def test_redriven_dead_letter_has_its_priority(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=1)
    engine.publish(b"urgent", priority=7)
    worker.reject(worker.lease())
    worker.is_open = False
    engine.publish(b"plain")
    engine.redrive(engine.dead_letter_records()[0])
    worker.is_open = True
    engine.engine.dispatch_schedule.add(worker)
    assert worker.ack_all() == [b"urgent", b"plain"]


def test_dead_letter_in_flight_is_not_redriven(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"poison")
    worker.reject(worker.lease())
    operator = engine.worker(group="operators", queue="dlq/tasks")
    held = operator.lease()
    dead_letter = engine.dead_letter_records()[0]
    assert not engine.redrive(dead_letter)
    operator.release(held)
    operator.is_open = False
    operator.leave()
    assert engine.redrive(dead_letter)
    assert worker.lease().payload == b"poison" and engine.dead_letters() == []


def test_dead_letter_whose_queue_is_gone_stays(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"poison")
    worker.reject(worker.lease())
    engine.engine.lifecycle.delete_queue(engine.engine.lifecycle.get_queue("tasks"))
    assert not engine.redrive(engine.dead_letter_records()[0])
    assert engine.dead_letters() == [b"poison"]


def test_dead_letter_of_a_deleted_group_is_redriven_to_all(engine: EngineUnderTest) -> None:
    worker = engine.worker(group="gone")
    engine.publish(b"poison")
    worker.reject(worker.lease())
    engine.engine.lifecycle.delete_group(engine.group("gone"))
    engine.redrive(engine.dead_letter_records()[0])
    assert engine.worker(group="new").ack_all() == [b"poison"]


def test_message_redriven_for_one_group_is_deleted_with_it(engine: EngineUnderTest) -> None:
    worker = engine.worker(group="failing")
    engine.group("other")
    engine.publish(b"poison")
    worker.reject(worker.lease())
    engine.worker(group="other").ack_all()
    engine.redrive(engine.dead_letter_records()[0])
    engine.engine.lifecycle.delete_group(engine.group("failing"))
    engine.run_until_idle()
    assert engine.depth() == 0
    engine.crash_and_restart()
    assert engine.depth() == 0


def test_dead_letters_are_purged_like_any_message(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    for number in range(3):
        engine.publish(b"%d" % number)
    for delivery in worker.lease_all():
        worker.reject(delivery)
    assert engine.engine.removal.purge_queue(engine.engine.lifecycle.get_queue("dlq/tasks")) == 3
    engine.run_until_idle()
    engine.crash_and_restart()
    assert engine.dead_letters() == []


def test_dead_letter_reasons_are_counted_across_restarts(make_engine: MakeEngine) -> None:
    engine = make_engine(max_retries=0)
    worker = engine.worker()
    engine.publish(b"1")
    engine.publish(b"2")
    first, second = worker.lease_all()
    worker.nack(first)
    worker.reject(second)
    for restart in (engine.crash_and_restart, engine.restart):
        restart()
        assert engine.engine.queues["tasks"].dead_by_reason == {"max_retries": 1, "rejected": 1}


@pytest.mark.parametrize("known", [False, True])
def test_empty_payload_is_stored_in_a_compacted_dead_letter_queue(
    make_engine: MakeEngine, known: bool
) -> None:
    """It deletes no key there: it is the message that failed."""
    engine = make_engine(dlq_name="graves")
    engine.queue("graves", is_compacted=True)
    worker = engine.worker()
    if known:
        engine.publish(b"first", key=b"k")
        worker.reject(worker.lease())
    engine.publish(b"", key=b"k")
    worker.reject(worker.lease())
    engine.crash_and_restart()
    assert engine.depth() == 0 and engine.depth("graves") == 1
    assert engine.worker("r", group="readers", queue="graves").payloads() == [b""]
