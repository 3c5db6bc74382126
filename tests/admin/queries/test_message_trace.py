"""`explain`: the life of a message, one test for each kind of event and for each place where it can be."""

from __future__ import annotations

import json

import pytest

from sluice.admin.queries.diagnosis import phrases
from sluice.admin.views import Biography, Event, Outgoing
from sluice.errors import UnknownMessage
from tests.admin.conftest import MakeHouse
from tests.admin.kit import AdminHouse, facts, join, settle, take

STARTED = 1_800_000_000.0


async def explain(house: AdminHouse, message_id: str = "order-7", queue: str = "tasks") -> Biography:
    return await house.ask(house.admin.biography(queue, message_id))


def steps(life: Biography) -> list[str]:
    """What happened, with the seconds since the start: "delivered@10"."""
    return [f"{event.what}@{event.at - STARTED:g}" for event in life.events]


def event(life: Biography, what: str) -> Event:
    return next(one for one in life.events if one.what == what)


# ---- what happens to one that goes its way


async def test_a_message_that_waits_for_its_first_group(house: AdminHouse) -> None:
    house.publish(b"x", message_id="order-7")
    life = await explain(house)
    assert (steps(life), life.states, life.dead_letters) == (["enqueued@0"], [], [])
    assert life.message is not None and life.message.payload == b"x"
    assert "waits for a first group" in life.summary


async def test_a_message_that_waits_because_nobody_consumes(house: AdminHouse) -> None:
    house.publish(b"x", message_id="order-7")
    await house.ask(house.admin.create_group("tasks", "w"))
    (state,) = (await explain(house)).states
    assert (state.group, state.state, state.do) == ("w", "waiting", phrases.start_worker("tasks", "w"))
    assert state.why == "nobody consumes for group w"


async def test_a_message_that_waits_for_its_delay(house: AdminHouse) -> None:
    house.worker()
    await house.ask(house.admin.publish("tasks", Outgoing(b"x", message_id="order-7", delay=60.0)))
    life = await explain(house)
    (state,) = life.states
    assert (state.state, state.due) == ("delayed", STARTED + 60) and "(in 1 min)" in state.why
    assert "not before 2027-01-15T08:01:00" in event(life, "enqueued").detail


async def test_a_message_that_waits_behind_one_of_its_key(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"1", partition_key="k", message_id="first")
    house.publish(b"2", partition_key="k", message_id="order-7")
    assert "consumer w-1 holds message first" in (await explain(house)).states[0].why
    settle(worker, "nack", take(worker)[0], description="no luck")
    why = (await explain(house)).states[0].why
    assert "message first of the same key waits for its retry" in why and "no luck" in why


async def test_a_message_that_waits_for_a_consumer_with_its_hands_full(house: AdminHouse) -> None:
    house.worker(prefetch=1)
    house.publish(b"1")
    house.publish(b"2", message_id="order-7")
    state = (await explain(house)).states[0]
    assert (state.state, "holds 1 delivery" in state.why) == ("waiting", True)


async def test_a_delivered_message_names_its_consumer_and_its_deadline(house: AdminHouse) -> None:
    house.worker()
    house.advance(10)
    house.publish(b"x", message_id="order-7")
    house.advance(4)
    life = await explain(house)
    (state,) = life.states
    assert steps(life) == ["enqueued@10", "delivered@10"]
    assert (event(life, "delivered").consumer, event(life, "delivered").attempt) == ("w-1", 1)
    assert (state.state, state.consumer, state.attempt) == ("delivered", "w-1", 1)
    assert state.deadline == STARTED + 40
    assert "(4 s ago)" in state.why and "(in 26 s)" in state.why


async def test_an_extended_delivery_tells_when(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    (message,) = take(worker)
    house.advance(20)
    settle(worker, "extend", message)
    assert steps(await explain(house)) == ["enqueued@0", "delivered@0", "extended@20"]
    house.advance(5)
    settle(worker, "nack", message)
    assert steps(await explain(house)) == ["enqueued@0", "delivered@0", "extended@20", "nacked@25"]


async def test_a_message_that_is_acknowledged_the_first_time_leaves_nothing_behind(
    house: AdminHouse,
) -> None:
    worker = house.worker()
    house.publish(b"x")
    group = house.queue("tasks").groups["w"]
    leases = [lease for cursor in group.cursors for lease in cursor.leases.values()]
    assert len(leases) == 1 and leases[0].history is None
    settle(worker, "ack", take(worker)[0])
    assert leases[0].history is None
    assert all(cursor.returned is None and not cursor.leases for cursor in group.cursors)


# ---- what happens to one that does not


async def test_a_nack_is_told_with_its_reason_and_the_next_retry(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    house.advance(2)
    settle(worker, "nack", take(worker)[0], description="disk full")
    life = await explain(house)
    assert steps(life) == ["enqueued@0", "delivered@0", "nacked@2"]
    nacked = event(life, "nacked")
    assert (nacked.group, nacked.consumer, nacked.attempt, nacked.detail) == ("w", "w-1", 1, "disk full")
    (state,) = life.states
    assert (state.state, state.failures, state.due) == ("retrying", 1, STARTED + 7)
    assert "disk full" in state.why and "(in 5 s)" in state.why
    house.advance(5)
    life = await explain(house)
    assert steps(life)[-1] == "delivered@7" and life.states[0].attempt == 2


async def test_a_deadline_that_passed_is_told(house: AdminHouse) -> None:
    house.worker()
    house.publish(b"x", message_id="order-7")
    house.advance(31)
    life = await explain(house)
    assert steps(life) == ["enqueued@0", "delivered@0", "timed-out@30"]
    assert event(life, "timed-out").detail == "no answer within 30 s"


async def test_a_consumer_that_vanished_is_told(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    house.advance(3)
    worker.drop()
    life = await explain(house)
    assert steps(life) == ["enqueued@0", "delivered@0", "vanished@3"]
    assert event(life, "vanished").consumer == "w-1"
    assert life.states[0].state == "retrying" and "nobody consumes" in life.states[0].why


async def test_a_delivery_that_was_given_back_is_told(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    (message,) = take(worker)
    house.advance(1)
    settle(worker, "release", message)
    assert steps(await explain(house)) == ["enqueued@0", "delivered@0", "released@1", "delivered@1"]
    house.advance(1)
    settle(worker, "nack", take(worker)[0])
    assert steps(await explain(house))[1:] == ["delivered@0", "released@1", "delivered@1", "nacked@2"]
    house.advance(5)
    settle(worker, "release", take(worker)[0])
    assert steps(await explain(house))[5:] == ["delivered@7", "released@7", "delivered@7"]


async def test_a_history_outlives_restarts(make_house: MakeHouse) -> None:
    house = make_house(segment_bytes=1 << 12)  # small ones: snapshots are made on the way
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    house.publish(b"y", message_id="given-back")
    given_back, failing = sorted(take(worker), key=lambda one: facts(one)["message-id"])
    settle(worker, "release", given_back)
    settle(worker, "nack", failing, description="first")
    before = (steps(await explain(house)), steps(await explain(house, "given-back")))
    worker.disconnect()
    for number in range(3):
        house.restart()
        life = await explain(house)
        assert steps(life) == before[0]
        assert [one.consumer for one in life.events if one.what == "nacked"] == ["w-1"]
        assert life.states[0].consumer == "w-1"
        assert steps(await explain(house, "given-back"))[:3] == before[1][:3]
        for _ in range(20):  # fills segments, and has a snapshot made
            house.publish(b"f" * 1000, "filler")
        assert number < 2 or len(house.store.segment_sizes()) > 1
    worker = house.worker()
    house.advance(5)
    taken = {facts(one)["message-id"]: one for one in take(worker)}
    settle(worker, "nack", taken["order-7"], description="second")
    house.restart()
    told = [one.detail for one in (await explain(house)).events if one.what == "nacked"]
    assert told == ["first", "second"]


async def test_only_the_last_events_are_kept(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"retry_policy": {"max_retries": 100}}))
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    for number in range(40):
        settle(worker, "nack", take(worker)[0], delay="1s", description=f"{number} " + "x" * 500)
        house.advance(1)
    life = await explain(house)
    assert len([one for one in life.events if one.what == "nacked"]) == 16
    assert life.events[-2].detail.startswith("39 ") and len(life.events[-2].detail) == 160
    settle(worker, "reject", take(worker)[0])
    (letter,) = await house.ask(house.admin.dead_letters("tasks"))
    assert len(letter.headers["history"]) <= 4000
    assert json.loads(letter.headers["history"])[-1][1] == "dead"


# ---- the dead and the redriven


async def test_a_dead_letter_and_a_redriven_message_tell_the_whole_story(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"retry_policy": {"max_retries": 1}}))
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    settle(worker, "nack", take(worker)[0], description="one")
    house.advance(5)
    settle(worker, "nack", take(worker)[0], description="two")
    life = await explain(house)
    story = ["enqueued@0", "delivered@0", "nacked@0", "delivered@5", "nacked@5", "dead@5"]
    assert steps(life) == story
    assert event(life, "dead").detail == "max_retries: two"
    (state,) = life.states
    assert (life.message, state.group, state.state, state.attempt) == (None, "w", "dead", 2)
    (letter,) = life.dead_letters
    assert state.do == f"Mend the cause, then sluice dlq retry tasks {letter}"
    assert steps(await explain(house, letter, "dlq/tasks")) == story, "the letter itself tells the same"
    assert await explain(house, letter) == life, "and leads to the message that it was"
    house.restart()
    assert steps(await explain(house)) == story
    house.advance(5)
    await house.ask(house.admin.retry_dead_letter("tasks", letter))
    life = await explain(house)
    assert steps(life) == [*story, "redriven@10"]
    assert event(life, "redriven").detail == "from dlq/tasks" and life.dead_letters == []
    worker = house.worker()
    (again,) = take(worker)
    assert facts(again)["message-id"] == "order-7"
    assert steps(await explain(house)) == [*story, "redriven@10", "delivered@10"]
    settle(worker, "reject", again, description="three")
    assert steps(await explain(house)) == [*story, "redriven@10", "delivered@10", "dead@10"]


async def test_a_redriven_message_without_an_id_of_its_own_is_found_by_its_old_name(
    house: AdminHouse,
) -> None:
    worker = house.worker()
    house.publish(b"x")
    (message,) = take(worker)
    name = facts(message)["message-id"]
    settle(worker, "reject", message)
    worker.disconnect()
    await house.ask(house.admin.retry_dead_letter("tasks", name))
    assert steps(await explain(house, name)) == ["enqueued@0", "delivered@0", "dead@0", "redriven@0"]


async def test_a_captured_message_that_was_redriven_keeps_its_topic(house: AdminHouse) -> None:
    await house.ask(house.admin.create_queue({"name": "tasks", "bindings": ["a/+"]}))
    worker = house.worker()
    house.connect("author").publish("a/1", b"x", 0)
    (message,) = take(worker)
    name = facts(message)["message-id"]
    assert "captured from a/1" in (await explain(house, name)).events[0].detail
    settle(worker, "reject", message)
    await house.ask(house.admin.retry_dead_letter("tasks", name))
    assert facts(take(worker)[0])["original-topic"] == "a/1"


async def test_an_expired_message_tells_so(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"limits": {"on_expiry": "dead-letter"}}))
    house.worker("w-1").disconnect()
    await house.ask(house.admin.publish("tasks", Outgoing(b"x", message_id="order-7", expiry=3.0)))
    house.advance(5)
    life = await explain(house)
    assert [one.what for one in life.events] == ["enqueued", "expired"]
    assert life.states[0].state == "dead" and "expired" in life.states[0].why


async def test_a_message_that_its_queue_never_took_tells_so(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"limits": {"max_queue_depth": 1, "overflow": "dead-letter"}}))
    house.publish(b"1")
    house.publish(b"2", message_id="order-7")
    life = await explain(house)
    assert [(one.what, one.detail) for one in life.events] == [("dead", "overflow")]


# ---- several groups, and those that are gone


async def test_a_message_tells_where_it_is_in_each_group(house: AdminHouse) -> None:
    done, failing = house.worker("done-1"), house.worker("failing-1")
    await house.ask(house.admin.create_group("tasks", "idle"))
    house.publish(b"x", message_id="order-7")
    settle(done, "ack", take(done)[0])
    settle(failing, "reject", take(failing)[0], description="no")
    life = await explain(house)
    states = {one.group: one.state for one in life.states}
    assert states == {"done": "acked", "failing": "dead", "idle": "waiting"}
    assert life.message is not None and len(life.dead_letters) == 1
    assert steps(life) == ["enqueued@0", "delivered@0", "dead@0"]
    for told in ("in group done it is acked", "in group failing it is dead", "in group idle it is waiting"):
        assert told in life.summary


async def test_a_message_that_was_put_back_for_one_group_is_not_for_the_other(house: AdminHouse) -> None:
    failing, other = house.worker("failing-1"), house.worker("other-1")
    house.publish(b"x", message_id="order-7")
    settle(other, "ack", take(other)[0])
    settle(failing, "reject", take(failing)[0])
    await house.ask(house.admin.retry_dead_letter("tasks", "order-7"))
    states = {one.group: one.state for one in (await explain(house)).states}
    assert states == {"failing": "delivered", "other": "not-for-it"}


async def test_a_message_that_is_gone_is_known_to_have_been(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"x")
    house.publish(b"y", message_id="order-7")
    taken = take(worker)
    names = [facts(one)["message-id"] for one in taken]
    for message in taken:
        settle(worker, "ack", message)
    for name in names:
        life = await explain(house, name)
        assert life.message is None and life.states[0].state == ("settled" if name == "order-7" else "acked")
        assert "not kept any more" in life.summary
    assert steps(await explain(house)) == ["enqueued@0"], "the dedup window remembers when it came"


async def test_a_message_that_never_was_is_unknown(house: AdminHouse) -> None:
    house.publish(b"x")
    (kept,) = await house.ask(house.admin.peek("tasks"))
    partition = kept.message_id.partition("-")[0]
    for name in ("order-9", f"{partition}-99", "ffff-0", "", "\ud800"):
        with pytest.raises(UnknownMessage) as refused:
            await explain(house, name)
        assert refused.value.do


async def test_a_message_is_found_without_its_queue(house: AdminHouse) -> None:
    async def find(name: str) -> list[str]:
        return await house.ask(house.admin.find(name))

    house.publish(b"x", "a", message_id="order-7")
    house.publish(b"x", "b", message_id="order-7")
    house.publish(b"x", "c")
    (kept,) = await house.ask(house.admin.peek("c"))
    assert await find("order-7") == ["a", "b"]
    assert await find(kept.message_id) == ["c"]
    assert await find("nobody") == []
    house.publish(b"x", "d", message_id="order-8")
    house.advance(1000)
    house.publish(b"x", "d", message_id="order-9")
    house.restart()
    assert await find("order-8") == ["d"], "also when no window remembers it"
    worker = house.connect("w-1")
    join(worker, "$queue/c")
    settle(worker, "reject", take(worker)[0])
    assert await find(kept.message_id) == ["c"], "dead, it is known where it died"


# ---- and its good end


async def test_a_message_that_was_done_after_some_trouble_is_remembered_for_a_while(
    house: AdminHouse,
) -> None:
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    settle(worker, "nack", take(worker)[0], description="disk full")
    house.advance(5.0)
    settle(worker, "ack", take(worker)[0])
    life = await explain(house)
    assert steps(life) == ["enqueued@0", "delivered@0", "nacked@0", "delivered@5", "acked@5"]
    assert life.states[0].state == "acked" and "attempt 2" in life.states[0].why


async def test_a_dead_letter_that_was_put_back_and_done_shows_its_whole_story(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    settle(worker, "reject", take(worker)[0], description="no such customer")
    await house.ask(house.admin.retry_dead_letter("tasks", "order-7"))
    settle(worker, "ack", take(worker)[0])
    life = await explain(house)
    assert [event.what for event in life.events] == [
        "enqueued",
        "delivered",
        "dead",
        "redriven",
        "delivered",
        "acked",
    ]
    assert life.states[0].state == "acked"


async def test_of_the_messages_that_came_to_a_good_end_the_last_ones_are_remembered(
    house: AdminHouse,
) -> None:
    worker = house.worker()
    for nth in range(3):
        house.publish(b"x", message_id=f"order-{nth}")
        settle(worker, "nack", take(worker)[0], delay="0s")
        settle(worker, "ack", take(worker)[0])
    past = house.admin._hands.engine.past
    assert [len(past.of("tasks", f"order-{nth}")) for nth in range(3)] == [5, 5, 5]
    assert past.of("tasks", "order-3") == [] and past.of("other", "order-1") == []
