"""`explain`: the trace of a message, one test for each kind of event and each state."""

from __future__ import annotations

import json

import pytest

from sluice.admin.model import Event, MessageTrace, OutgoingMessage
from sluice.admin.queries.diagnosis import phrases
from sluice.errors import UnknownMessage
from tests.admin.conftest import MakeHarness
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, settle, take

STARTED = 1_800_000_000.0


async def explain(
    harness: BrokerHarness, message_id: str = "order-7", queue: str = "tasks"
) -> MessageTrace:
    return await harness.call(harness.admin.trace_message(queue, message_id))


def steps(trace: MessageTrace) -> list[str]:
    """Return the events with the seconds since the start: "delivered@10"."""
    return [f"{event.what}@{event.at - STARTED:g}" for event in trace.events]


def event(trace: MessageTrace, what: str) -> Event:
    return next(one for one in trace.events if one.what == what)


# ---- messages without failures


async def test_trace_of_message_without_group(harness: BrokerHarness) -> None:
    harness.publish(b"x", message_id="order-7")
    trace = await explain(harness)
    assert (steps(trace), trace.states, trace.dead_letters) == (["enqueued@0"], [], [])
    assert trace.message is not None and trace.message.payload == b"x"
    assert "waits for a first group" in trace.summary


async def test_trace_of_message_without_consumer(harness: BrokerHarness) -> None:
    harness.publish(b"x", message_id="order-7")
    await harness.call(harness.admin.create_group("tasks", "w"))
    (state,) = (await explain(harness)).states
    assert (state.group, state.state, state.do) == (
        "w",
        "waiting",
        phrases.start_worker_hint("tasks", "w"),
    )
    assert state.why == "group w has no consumers"


async def test_trace_of_delayed_message(harness: BrokerHarness) -> None:
    harness.worker()
    await harness.call(
        harness.admin.publish("tasks", OutgoingMessage(b"x", message_id="order-7", delay=60.0))
    )
    trace = await explain(harness)
    (state,) = trace.states
    assert (state.state, state.due) == ("delayed", STARTED + 60) and "(in 1 min)" in state.why
    assert "not before 2027-01-15T08:01:00" in event(trace, "enqueued").detail


async def test_trace_of_message_blocked_by_its_key(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"1", partition_key="k", message_id="first")
    harness.publish(b"2", partition_key="k", message_id="order-7")
    assert "consumer w-1 holds message first" in (await explain(harness)).states[0].why
    settle(worker, "nack", take(worker)[0], description="no luck")
    why = (await explain(harness)).states[0].why
    assert "message first of the same key waits for its retry" in why and "no luck" in why


async def test_trace_of_message_whose_consumer_has_no_capacity(harness: BrokerHarness) -> None:
    harness.worker(prefetch=1)
    harness.publish(b"1")
    harness.publish(b"2", message_id="order-7")
    state = (await explain(harness)).states[0]
    assert (state.state, "holds 1 delivery" in state.why) == ("waiting", True)


async def test_trace_of_delivered_message_names_consumer_and_deadline(
    harness: BrokerHarness,
) -> None:
    harness.worker()
    harness.advance(10)
    harness.publish(b"x", message_id="order-7")
    harness.advance(4)
    trace = await explain(harness)
    (state,) = trace.states
    assert steps(trace) == ["enqueued@10", "delivered@10"]
    assert (event(trace, "delivered").consumer, event(trace, "delivered").attempt) == ("w-1", 1)
    assert (state.state, state.consumer, state.attempt) == ("delivered", "w-1", 1)
    assert state.deadline == STARTED + 40
    assert "(4 s ago)" in state.why and "(in 26 s)" in state.why


async def test_trace_shows_extended_delivery(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    (message,) = take(worker)
    harness.advance(20)
    settle(worker, "extend", message)
    assert steps(await explain(harness)) == ["enqueued@0", "delivered@0", "extended@20"]
    harness.advance(5)
    settle(worker, "nack", message)
    assert steps(await explain(harness)) == [
        "enqueued@0",
        "delivered@0",
        "extended@20",
        "nacked@25",
    ]


async def test_trace_of_message_acknowledged_at_first_attempt_is_empty(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    harness.publish(b"x")
    group = harness.queue("tasks").groups["w"]
    leases = [lease for cursor in group.cursors for lease in cursor.leases.values()]
    assert len(leases) == 1 and leases[0].history is None
    settle(worker, "ack", take(worker)[0])
    assert leases[0].history is None
    assert all(cursor.released_history is None and not cursor.leases for cursor in group.cursors)


# ---- messages with failures


async def test_trace_shows_nack_with_reason_and_next_retry(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    harness.advance(2)
    settle(worker, "nack", take(worker)[0], description="disk full")
    trace = await explain(harness)
    assert steps(trace) == ["enqueued@0", "delivered@0", "nacked@2"]
    nacked = event(trace, "nacked")
    assert (nacked.group, nacked.consumer, nacked.attempt, nacked.detail) == (
        "w",
        "w-1",
        1,
        "disk full",
    )
    (state,) = trace.states
    assert (state.state, state.failures, state.due) == ("retrying", 1, STARTED + 7)
    assert "disk full" in state.why and "(in 5 s)" in state.why
    harness.advance(5)
    trace = await explain(harness)
    assert steps(trace)[-1] == "delivered@7" and trace.states[0].attempt == 2


async def test_trace_shows_passed_deadline(harness: BrokerHarness) -> None:
    harness.worker()
    harness.publish(b"x", message_id="order-7")
    harness.advance(31)
    trace = await explain(harness)
    assert steps(trace) == ["enqueued@0", "delivered@0", "timed-out@30"]
    assert event(trace, "timed-out").detail == "not settled within 30 s"


async def test_trace_shows_consumer_that_disconnected(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    harness.advance(3)
    worker.drop()
    trace = await explain(harness)
    assert steps(trace) == ["enqueued@0", "delivered@0", "vanished@3"]
    assert event(trace, "vanished").consumer == "w-1"
    assert trace.states[0].state == "retrying" and "has no consumers" in trace.states[0].why


async def test_trace_shows_released_delivery(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    (message,) = take(worker)
    harness.advance(1)
    settle(worker, "release", message)
    assert steps(await explain(harness)) == [
        "enqueued@0",
        "delivered@0",
        "released@1",
        "delivered@1",
    ]
    harness.advance(1)
    settle(worker, "nack", take(worker)[0])
    assert steps(await explain(harness))[1:] == [
        "delivered@0",
        "released@1",
        "delivered@1",
        "nacked@2",
    ]
    harness.advance(5)
    settle(worker, "release", take(worker)[0])
    assert steps(await explain(harness))[5:] == ["delivered@7", "released@7", "delivered@7"]


async def test_trace_survives_restarts(make_harness: MakeHarness) -> None:
    harness = make_harness(segment_bytes=1 << 12)  # small, so that snapshots are made
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    harness.publish(b"y", message_id="given-back")
    given_back, failing = sorted(
        take(worker), key=lambda one: delivery_properties(one)["message-id"]
    )
    settle(worker, "release", given_back)
    settle(worker, "nack", failing, description="first")
    before = (steps(await explain(harness)), steps(await explain(harness, "given-back")))
    worker.disconnect()
    for number in range(3):
        harness.restart()
        trace = await explain(harness)
        assert steps(trace) == before[0]
        assert [one.consumer for one in trace.events if one.what == "nacked"] == ["w-1"]
        assert trace.states[0].consumer == "w-1"
        assert steps(await explain(harness, "given-back"))[:3] == before[1][:3]
        for _ in range(20):  # fills segments, which makes a snapshot
            harness.publish(b"f" * 1000, "filler")
        assert number < 2 or len(harness.store.segment_sizes()) > 1
    worker = harness.worker()
    harness.advance(5)
    taken = {delivery_properties(one)["message-id"]: one for one in take(worker)}
    settle(worker, "nack", taken["order-7"], description="second")
    harness.restart()
    reported = [one.detail for one in (await explain(harness)).events if one.what == "nacked"]
    assert reported == ["first", "second"]


async def test_trace_stores_only_the_last_events(make_harness: MakeHarness) -> None:
    harness = make_harness(("tasks", {"retry_policy": {"max_retries": 100}}))
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    for number in range(40):
        settle(worker, "nack", take(worker)[0], delay="1s", description=f"{number} " + "x" * 500)
        harness.advance(1)
    trace = await explain(harness)
    assert len([one for one in trace.events if one.what == "nacked"]) == 16
    assert trace.events[-2].detail.startswith("39 ") and len(trace.events[-2].detail) == 160
    settle(worker, "reject", take(worker)[0])
    (dead_letter,) = await harness.call(harness.admin.dead_letters("tasks"))
    assert len(dead_letter.headers["history"]) <= 4000
    assert json.loads(dead_letter.headers["history"])[-1][1] == "dead"


# ---- dead letters and redriven messages


async def test_trace_of_dead_letter_and_redriven_message_is_complete(
    make_harness: MakeHarness,
) -> None:
    harness = make_harness(("tasks", {"retry_policy": {"max_retries": 1}}))
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    settle(worker, "nack", take(worker)[0], description="one")
    harness.advance(5)
    settle(worker, "nack", take(worker)[0], description="two")
    trace = await explain(harness)
    story = ["enqueued@0", "delivered@0", "nacked@0", "delivered@5", "nacked@5", "dead@5"]
    assert steps(trace) == story
    assert event(trace, "dead").detail == "max_retries: two"
    (state,) = trace.states
    assert (trace.message, state.group, state.state, state.attempt) == (None, "w", "dead", 2)
    (dead_letter,) = trace.dead_letters
    assert state.do == f"Fix the cause, then `sluice dlq retry tasks {dead_letter}`"
    assert steps(await explain(harness, dead_letter, "dlq/tasks")) == story, (
        "the dead letter itself has the same events"
    )
    assert await explain(harness, dead_letter) == trace, "and leads to the original message"
    harness.restart()
    assert steps(await explain(harness)) == story
    harness.advance(5)
    await harness.call(harness.admin.retry_dead_letter("tasks", dead_letter))
    trace = await explain(harness)
    assert steps(trace) == [*story, "redriven@10"]
    assert event(trace, "redriven").detail == "from dlq/tasks" and trace.dead_letters == []
    worker = harness.worker()
    (again,) = take(worker)
    assert delivery_properties(again)["message-id"] == "order-7"
    assert steps(await explain(harness)) == [*story, "redriven@10", "delivered@10"]
    settle(worker, "reject", again, description="three")
    assert steps(await explain(harness)) == [*story, "redriven@10", "delivered@10", "dead@10"]


async def test_redriven_message_without_own_id_is_found_by_its_old_id(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    harness.publish(b"x")
    (message,) = take(worker)
    name = delivery_properties(message)["message-id"]
    settle(worker, "reject", message)
    worker.disconnect()
    await harness.call(harness.admin.retry_dead_letter("tasks", name))
    assert steps(await explain(harness, name)) == [
        "enqueued@0",
        "delivered@0",
        "dead@0",
        "redriven@0",
    ]


async def test_redriven_bound_message_has_its_original_topic(harness: BrokerHarness) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks", "bindings": ["a/+"]}))
    worker = harness.worker()
    harness.connect("author").publish("a/1", b"x", 0)
    (message,) = take(worker)
    name = delivery_properties(message)["message-id"]
    assert "captured from a/1" in (await explain(harness, name)).events[0].detail
    settle(worker, "reject", message)
    await harness.call(harness.admin.retry_dead_letter("tasks", name))
    assert delivery_properties(take(worker)[0])["original-topic"] == "a/1"


async def test_trace_shows_expiry(make_harness: MakeHarness) -> None:
    harness = make_harness(("tasks", {"limits": {"on_expiry": "dead-letter"}}))
    harness.worker("w-1").disconnect()
    await harness.call(
        harness.admin.publish("tasks", OutgoingMessage(b"x", message_id="order-7", expiry=3.0))
    )
    harness.advance(5)
    trace = await explain(harness)
    assert [one.what for one in trace.events] == ["enqueued", "expired"]
    assert trace.states[0].state == "dead" and "expired" in trace.states[0].why


async def test_trace_of_message_rejected_at_enqueue(make_harness: MakeHarness) -> None:
    harness = make_harness(("tasks", {"limits": {"max_queue_depth": 1, "overflow": "dead-letter"}}))
    harness.publish(b"1")
    harness.publish(b"2", message_id="order-7")
    trace = await explain(harness)
    assert [(one.what, one.detail) for one in trace.events] == [("dead", "overflow")]


# ---- several groups, and deleted ones


async def test_trace_shows_the_state_in_each_group(harness: BrokerHarness) -> None:
    done, failing = harness.worker("done-1"), harness.worker("failing-1")
    await harness.call(harness.admin.create_group("tasks", "idle"))
    harness.publish(b"x", message_id="order-7")
    settle(done, "ack", take(done)[0])
    settle(failing, "reject", take(failing)[0], description="no")
    trace = await explain(harness)
    states = {one.group: one.state for one in trace.states}
    assert states == {"done": "acked", "failing": "dead", "idle": "waiting"}
    assert trace.message is not None and len(trace.dead_letters) == 1
    assert sorted(steps(trace)) == [
        "acked@0",
        "dead@0",
        "delivered@0",
        "delivered@0",
        "enqueued@0",
    ]
    for reported in (
        "in group done it is acked",
        "in group failing it is dead",
        "in group idle it is waiting",
    ):
        assert reported in trace.summary


async def test_message_redriven_for_one_group_is_not_shown_for_the_other(
    harness: BrokerHarness,
) -> None:
    failing, other = harness.worker("failing-1"), harness.worker("other-1")
    harness.publish(b"x", message_id="order-7")
    settle(other, "ack", take(other)[0])
    settle(failing, "reject", take(failing)[0])
    await harness.call(harness.admin.retry_dead_letter("tasks", "order-7"))
    states = {one.group: one.state for one in (await explain(harness)).states}
    assert states == {"failing": "delivered", "other": "not-for-it"}


async def test_deleted_message_is_known_to_have_existed(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"x")
    harness.publish(b"y", message_id="order-7")
    taken = take(worker)
    names = [delivery_properties(one)["message-id"] for one in taken]
    for message in taken:
        settle(worker, "ack", message)
    harness.restart()  # which forgets who acknowledged what
    for name in names:
        trace = await explain(harness, name)
        assert trace.message is None and trace.states[0].state == (
            "settled" if name == "order-7" else "acked"
        )
        assert "no longer stored" in trace.summary
    assert steps(await explain(harness)) == ["enqueued@0"], "the dedup window has its arrival time"


async def test_message_that_never_existed_is_unknown(harness: BrokerHarness) -> None:
    harness.publish(b"x")
    (stored,) = await harness.call(harness.admin.peek("tasks"))
    partition = stored.message_id.partition("-")[0]
    for name in ("order-9", f"{partition}-99", "ffff-0", "", "\ud800"):
        with pytest.raises(UnknownMessage) as refused:
            await explain(harness, name)
        assert refused.value.remedy


async def test_message_is_found_without_its_queue(harness: BrokerHarness) -> None:
    async def find(name: str) -> list[str]:
        return await harness.call(harness.admin.find(name))

    harness.publish(b"x", "a", message_id="order-7")
    harness.publish(b"x", "b", message_id="order-7")
    harness.publish(b"x", "c")
    (stored,) = await harness.call(harness.admin.peek("c"))
    assert await find("order-7") == ["a", "b"]
    assert await find(stored.message_id) == ["c"]
    assert await find("unknown") == []
    harness.publish(b"x", "d", message_id="order-8")
    harness.advance(1000)
    harness.publish(b"x", "d", message_id="order-9")
    harness.restart()
    assert await find("order-8") == ["d"], "also after the dedup window"
    worker = harness.connect("w-1")
    join(worker, "$queue/c")
    settle(worker, "reject", take(worker)[0])
    assert await find(stored.message_id) == ["c"], "a dead letter has its original queue"


# ---- events of acknowledged messages


async def test_message_acknowledged_after_failures_is_remembered_for_a_while(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    settle(worker, "nack", take(worker)[0], description="disk full")
    harness.advance(5.0)
    settle(worker, "ack", take(worker)[0])
    trace = await explain(harness)
    assert steps(trace) == ["enqueued@0", "delivered@0", "nacked@0", "delivered@5", "acked@5"]
    assert trace.states[0].state == "acked" and "attempt 2" in trace.states[0].why


async def test_trace_of_acknowledged_message_names_its_consumer_and_times(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    harness.advance(2)
    settle(worker, "ack", take(worker)[0])
    harness.advance(600)
    trace = await explain(harness)
    assert steps(trace) == ["enqueued@0", "delivered@0", "acked@2"]
    assert event(trace, "acked").consumer == "w-1" and event(trace, "acked").attempt == 1
    (state,) = trace.states
    assert (state.group, state.state, state.consumer) == ("w", "acked", "w-1")
    assert "consumer w-1 acknowledged it at" in state.why
    found = await harness.call(harness.admin.find("order-7"))
    assert found == ["tasks"]


async def test_trace_of_acknowledged_message_with_generated_id(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"x")
    delivery = take(worker)[0]
    settle(worker, "ack", delivery)
    trace = await explain(harness, delivery_properties(delivery)["message-id"])
    assert steps(trace) == ["enqueued@0", "delivered@0", "acked@0"]


async def test_stored_message_has_no_acknowledgement_of_an_earlier_one_with_its_id(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    settle(worker, "ack", take(worker)[0])
    harness.advance(1000)
    harness.publish(b"y", message_id="order-7")
    trace = await explain(harness)
    assert steps(trace) == ["enqueued@1000", "delivered@1000"]
    assert trace.states[0].state == "delivered"


async def test_acknowledgements_of_a_deleted_group_are_left_out(harness: BrokerHarness) -> None:
    worker = harness.worker()
    other = harness.worker("v-1", group="v")
    harness.publish(b"x", message_id="order-7")
    settle(worker, "ack", take(worker)[0])
    settle(other, "ack", take(other)[0])
    other.disconnect()
    await harness.call(harness.admin.delete_group("tasks", "v"))
    trace = await explain(harness)
    assert [state.group for state in trace.states] == ["w"]
    assert steps(trace) == ["enqueued@0", "delivered@0", "acked@0"]


async def test_redriven_and_acknowledged_dead_letter_shows_its_whole_trace(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    settle(worker, "reject", take(worker)[0], description="no such customer")
    await harness.call(harness.admin.retry_dead_letter("tasks", "order-7"))
    settle(worker, "ack", take(worker)[0])
    trace = await explain(harness)
    assert [event.what for event in trace.events] == [
        "enqueued",
        "delivered",
        "dead",
        "redriven",
        "delivered",
        "acked",
    ]
    assert trace.states[0].state == "acked"


async def test_only_the_last_acknowledged_messages_are_remembered(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    for nth in range(3):
        harness.publish(b"x", message_id=f"order-{nth}")
        settle(worker, "nack", take(worker)[0], delay="0s")
        settle(worker, "ack", take(worker)[0])
    past = harness.admin._facade.engine.settlement.recent_history
    assert [len(past.get("tasks", f"order-{nth}")) for nth in range(3)] == [5, 5, 5]
    assert past.get("tasks", "order-3") == [] and past.get("other", "order-1") == []
