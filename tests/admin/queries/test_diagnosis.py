"""`doctor`: one test for each reason why nothing arrives. The first finding is the true one, and its cure helps."""

from __future__ import annotations

import pytest

from sluice.admin.queries.diagnosis.group_diagnosis import MOST_EXAMINED, _busy_keys
from sluice.admin.views import Diagnosis, Finding, Outgoing
from sluice.message import Message
from tests.admin.conftest import MakeHouse
from tests.admin.kit import AdminHouse, join, put, settle, take


async def doctor(house: AdminHouse, queue: str = "tasks", group: str = "") -> Diagnosis:
    return await house.ask(house.admin.diagnose(queue, group))


async def first(house: AdminHouse, queue: str = "tasks", group: str = "") -> Finding:
    found = await doctor(house, queue, group)
    assert found.findings, "something is always said"
    assert found.healthy == (not any(one.is_fault for one in found.findings))
    return found.findings[0]


def codes(found: Diagnosis) -> list[str]:
    return [one.code for one in found.findings]


async def test_a_queue_that_is_not_there_is_said_so_with_names_near_it(house: AdminHouse) -> None:
    await house.ask(house.admin.create_queue({"name": "tasks/image"}))
    finding = await first(house, "task/image")
    assert (finding.code, finding.do) == ("no-queue", "sluice doctor tasks/image")
    assert "tasks/image" in finding.what
    assert (await first(house, "zzz")).do == "sluice queue create zzz"


async def test_a_queue_that_nobody_ever_published_to(house: AdminHouse) -> None:
    house.worker()
    finding = await first(house)
    assert (finding.code, finding.do) == ("never-published", "sluice publish tasks hello")


async def test_a_binding_that_matches_nothing(house: AdminHouse) -> None:
    await house.ask(house.admin.create_queue({"name": "tasks", "bindings": ["sensors/+/temp"]}))
    house.worker()
    put(house.connect("author"), "sensor/1/temp", b"21")
    finding = await first(house)
    assert finding.code == "nothing-captured" and "sensors/+/temp" in finding.what
    assert finding.do == "sluice queue config tasks"


async def test_an_empty_queue_whose_messages_were_all_acknowledged_is_well(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish()
    settle(worker, "ack", take(worker)[0])
    found = await doctor(house)
    assert found.healthy and codes(found) == ["empty"]
    assert "1 message came and was settled" in found.findings[0].what


async def test_messages_that_wait_for_a_first_group(house: AdminHouse) -> None:
    house.publish()
    finding = await first(house)
    assert finding.code == "no-group" and finding.what.startswith("1 message waits, and nobody")
    assert finding.do == (
        "Start a worker, which makes the group; to look without taking: `sluice peek tasks`"
    )
    assert (await first(house, group="mine")).do.startswith("Start a worker of group mine, which makes")
    assert not house.queue("tasks").groups


async def test_a_group_without_a_consumer(house: AdminHouse) -> None:
    house.publish()
    await house.ask(house.admin.create_group("tasks", "w"))
    finding = await first(house)
    assert finding.code == "no-consumer" and finding.what.endswith("in which 1 message waits")
    assert finding.do == (
        "Start a worker of group w; to look without taking: `sluice consume tasks --group w --leave`"
    )
    worker = house.worker()
    assert worker.payloads() == [b"x"], "the cure helps"


async def test_a_group_that_is_not_the_one_with_consumers(house: AdminHouse) -> None:
    house.worker("other-1")
    await house.ask(house.admin.create_group("tasks", "mine"))
    house.publish()
    finding = await first(house, group="mine")
    assert finding.code == "wrong-group" and "consumers are in other" in finding.what
    assert finding.do.startswith("Let workers subscribe with consumer-group mine.")
    assert finding.do.endswith("`sluice group delete tasks mine`"), (
        "which loses what waits in it: not the first advice"
    )
    finding = await first(house, group="othr")
    assert (finding.code, finding.do) == ("wrong-group", "sluice doctor tasks --group other")
    finding = await first(house, group="mien")
    assert (finding.code, finding.do) == ("wrong-group", "sluice doctor tasks --group mine")
    finding = await first(house, group="nobody")
    assert (finding.code, finding.do) == ("wrong-group", "sluice doctor tasks --group other")
    house.worker("mine-1")
    assert (await first(house, group="mine")).code == "in-work", "the cure helps"


async def test_a_group_misspelt_while_nobody_consumes(house: AdminHouse) -> None:
    house.publish()
    await house.ask(house.admin.create_group("tasks", "billing"))
    finding = await first(house, group="biling")
    assert (finding.code, finding.do) == ("wrong-group", "sluice doctor tasks --group billing")
    finding = await first(house, group="zzz")
    assert finding.code == "no-group" and "the queue has billing" in finding.what


async def test_a_group_that_began_behind_all_messages(house: AdminHouse) -> None:
    house.publish()
    worker = house.worker(start="latest")
    finding = await first(house)
    assert (finding.code, finding.do) == ("began-behind", "sluice seek tasks w --to earliest")
    await house.ask(house.admin.seek("tasks", "w", "earliest"))
    assert worker.payloads() == [b"x"], "the cure helps"


async def test_a_group_that_is_done_while_another_is_not(house: AdminHouse) -> None:
    worker = house.worker("a-1")
    await house.ask(house.admin.create_group("tasks", "b"))
    house.publish()
    settle(worker, "ack", take(worker)[0])
    finding = await first(house, group="a")
    assert finding.code == "empty" and "other groups" in finding.what


async def test_a_consumer_whose_session_lives_and_whose_connection_is_gone(house: AdminHouse) -> None:
    worker = house.connect_lasting("w-1")
    join(worker, "$queue/tasks")
    worker.drop()
    house.publish()
    finding = await first(house)
    assert finding.code == "consumer-away" and finding.is_fault
    assert "consumer w-1 is disconnected since" in finding.what
    assert finding.do == "Start another worker of group w, or w-1 again with the same client id"


async def test_deliveries_of_a_killed_worker_are_not_called_work(house: AdminHouse) -> None:
    worker = house.connect_lasting("w-1", session_expiry=10)
    join(worker, "$queue/tasks")
    house.publish()
    take(worker)
    idle = house.worker("w-2")
    worker.drop()
    house.advance(3)
    found = await doctor(house)
    assert (found.healthy, codes(found)) == (True, ["consumer-away"])
    assert "disconnected since" in found.findings[0].what and "(3 s ago)" in found.findings[0].what
    assert "its session expires at" in found.findings[0].what and "(in 7 s)" in found.findings[0].what
    assert found.findings[0].what.endswith("The delivery that it holds returns to the group then")
    house.advance(8)
    assert idle.payloads() == [b"x"], "as the finding says"


@pytest.mark.parametrize(
    ("expiry", "said"),
    [
        (60, "and its session expires at"),
        (0xFFFF_FFFF, "and its session does not expire"),
    ],
)
async def test_deliveries_of_a_killed_worker_return_at_their_deadlines_if_its_session_lasts(
    house: AdminHouse, expiry: int, said: str
) -> None:
    worker = house.connect_lasting("w-1", session_expiry=expiry)
    join(worker, "$queue/tasks")
    for _ in range(2):
        house.publish()
    take(worker)
    house.worker("w-2")
    worker.drop()
    house.publish()
    house.advance(10)
    found = await doctor(house)
    assert (found.healthy, codes(found)) == (True, ["in-work", "consumer-away"])
    assert "1 message is in work" in found.findings[0].what and "with w-2" in found.findings[0].what
    assert (
        said in found.findings[1].what and "return to the group at their deadlines" in found.findings[1].what
    )
    assert "(in 20 s)" in found.findings[1].what


async def test_a_consumer_that_let_a_deadline_pass(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish()
    assert len(take(worker)) == 1
    house.advance(31)
    finding = await first(house)
    assert finding.code == "consumer-stalled" and "w-1 has stalled" in finding.what


async def test_a_busy_consumer_within_its_deadlines_is_no_fault(house: AdminHouse) -> None:
    worker = house.worker(prefetch=2)
    for _ in range(5):
        house.publish()
    deliveries = take(worker)
    assert len(deliveries) == 2
    house.advance(10)
    found = await doctor(house)
    assert (found.healthy, codes(found)) == (True, ["prefetch"]), "its first jobs are long"
    finding = found.findings[0]
    assert "w-1 is busy: it holds 2 deliveries" in finding.what and "(10 s ago)" in finding.what
    assert "must settle or extend the first by" in finding.what and "(in 20 s)" in finding.what
    assert "settled nothing yet" in finding.what
    assert "larger prefetch" not in finding.do
    assert finding.do.startswith("Wait, or start more workers of group w") and "$ack" in finding.do
    settle(worker, "ack", deliveries[0])
    finding = await first(house)
    assert "it last settled at" in finding.what and "$ack" not in finding.do


async def test_a_consumer_that_never_settles_is_a_fault_when_its_deadline_has_passed(
    house: AdminHouse,
) -> None:
    worker = house.worker(prefetch=2)
    for _ in range(5):
        house.publish()
    take(worker)
    house.advance(31)
    finding = await first(house)
    assert finding.code == "consumer-stalled" and finding.is_fault


async def test_a_consumer_at_work_on_the_last_message_is_no_fault(house: AdminHouse) -> None:
    worker = house.worker(prefetch=1)
    house.publish()
    assert len(take(worker)) == 1
    found = await house.ask(house.admin.diagnose("tasks"))
    assert (found.healthy, codes(found)) == (True, ["in-work"])
    house.publish()
    found = await house.ask(house.admin.diagnose("tasks"))
    assert (found.healthy, codes(found)) == (True, ["prefetch"])


async def test_messages_behind_a_busy_key_do_not_wait_for_room(house: AdminHouse) -> None:
    """The consumer is full as well, but a larger prefetch would change nothing."""
    worker = house.worker(prefetch=1)
    for number in range(4):
        house.publish(b"x", partition_key="ann", message_id=f"a-{number}")
    take(worker)
    house.advance(5)
    found = await doctor(house)
    assert (found.healthy, codes(found)) == (True, ["key-busy"])
    finding = found.findings[0]
    assert finding.what.startswith(
        "3 messages wait because of the order per key: consumer w-1 holds message a-0 of key 'ann' since "
    )
    assert "(5 s ago)" in finding.what and "only one message of a key is delivered at a time" in finding.what
    assert "more keys" in finding.do and "performance.batch_size=10" in finding.do
    house.publish(b"x", partition_key="bob")
    assert "prefetch" in codes(await doctor(house)), "this one waits for room"


async def test_a_busy_key_of_a_killed_worker_says_when_it_is_free(house: AdminHouse) -> None:
    worker = house.connect_lasting("w-1", session_expiry=10)
    join(worker, "$queue/tasks")
    for _ in range(2):
        house.publish(b"x", partition_key="ann")
    take(worker)
    house.worker("w-2")
    worker.drop()
    finding = await first(house)
    assert finding.code == "key-busy" and "consumer w-1 is disconnected" in finding.what
    assert "returns to the group then" in finding.what and "batch_size" not in finding.do


async def test_a_delay_beside_a_busy_key_is_no_fault(house: AdminHouse) -> None:
    worker = house.worker()
    for _ in range(2):
        house.publish(b"x", partition_key="ann")
    take(worker)
    await house.ask(house.admin.publish("tasks", Outgoing(b"x", delay=60.0)))
    found = await doctor(house)
    assert (found.healthy, codes(found)) == (True, ["key-busy", "delayed"])


async def test_a_diagnosis_examines_a_bounded_number_of_delayed_messages(make_house: MakeHouse) -> None:
    """Behind them a message waits whose key is busy: it is not looked for among all of them."""
    house = make_house(("tasks", {"partitions": 1}))
    worker = house.worker()
    house.publish(b"x", partition_key="ann")
    take(worker)
    engine, queue = house.engine, house.queue("tasks")
    for _ in range(MOST_EXAMINED + 10):
        message = Message(b"later", b"", b"bob")
        message.deliver_at = int((engine.now + 3600.0) * 1000.0)
        engine.publish(queue, message, None, 0)
    house.publish(b"x", partition_key="ann")
    assert _busy_keys(queue.groups["w"], engine.now) == []


async def test_a_consumer_that_sends_no_pubacks(house: AdminHouse) -> None:
    worker = house.connect("w-1", receive_maximum=2)
    join(worker, "$queue/tasks")
    for _ in range(5):
        house.publish()
    finding = await first(house)
    assert finding.code == "window-full" and "has 2 packets to acknowledge" in finding.what
    assert len(worker.messages()) == 2


async def test_one_of_a_kind_is_spoken_of_as_one(make_house: MakeHouse) -> None:
    house = make_house(("small", {"limits": {"max_queue_depth": 1}}))
    await house.ask(house.admin.publish("late", Outgoing(b"x", delay=60.0)))
    house.worker("w-1", "late")
    assert (
        "1 message waits for a delay that the publisher asked for; it is over at"
        in (await first(house, "late")).what
    )
    house.publish(b"x", "small")
    assert "full at 1 message and refuses" in (await doctor(house, "small")).findings[1].what
    refusal = put(house.connect("author-3"), "$queue/small", b"more")[1]
    assert "is full at 1 message." in refusal, refusal
    alone = house.connect("a-1", receive_maximum=1)
    join(alone, "$queue/narrow")
    for _ in range(2):
        house.publish(b"x", "narrow")
    assert "has 1 packet to acknowledge" in (await first(house, "narrow")).what


async def test_a_consumer_that_reads_too_slowly(house: AdminHouse) -> None:
    worker = house.worker()
    worker.transport.jammed = True
    for _ in range(6):
        await house.ask(house.admin.publish("tasks", Outgoing(b"x" * 900_000)))
    finding = await first(house)
    assert finding.code == "consumer-slow" and "w-1 reads more slowly" in finding.what
    worker.transport.drain()


async def test_messages_that_are_all_delayed(house: AdminHouse) -> None:
    house.worker()
    await house.ask(house.admin.publish("tasks", Outgoing(b"x", delay=90.0)))
    await house.ask(house.admin.publish("tasks", Outgoing(b"x", delay=60.0)))
    found = await doctor(house)
    assert found.healthy and codes(found) == ["delayed"]
    assert "2 messages wait for a delay" in found.findings[0].what
    assert "the first is over at" in found.findings[0].what and "(in 1 min)" in found.findings[0].what


async def test_messages_that_all_wait_for_a_retry(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"x", message_id="order-7")
    settle(worker, "nack", take(worker)[0], description="disk full")
    finding = await first(house)
    assert (finding.code, finding.do) == ("all-retrying", "sluice explain order-7 --queue tasks")
    assert finding.what.startswith("1 message failed and waits for a retry, until ")
    assert "(in 5 s)" in finding.what and "disk full" in finding.what


async def test_a_key_that_is_blocked_by_a_message_in_retry(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish(b"1", partition_key="k", message_id="first")
    house.publish(b"2", partition_key="k")
    settle(worker, "nack", take(worker)[0], description="no luck")
    found = await doctor(house)
    assert codes(found) == ["all-retrying", "key-blocked"]
    assert "message first of the same key" in found.findings[1].what
    assert "no luck" in found.findings[1].what


async def test_a_strict_queue_whose_one_message_is_in_work(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"ordering": "strict"}))
    worker = house.worker()
    house.publish(b"1")
    house.publish(b"2")
    take(worker)
    found = await doctor(house)
    assert codes(found) == ["key-busy"] and found.healthy
    assert "1 message waits because of strict order: consumer w-1 holds" in found.findings[0].what
    assert "only one message of the queue is delivered at a time" in found.findings[0].what
    assert "key" not in found.findings[0].what
    house.worker("w-2")
    standby = (await doctor(house)).findings[1]
    assert standby.code == "standby" and "the order is strict" in standby.what
    assert "partitions" not in standby.do, "more of them cannot be had"


async def test_a_key_behind_the_gate_of_a_raise_of_partitions(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"partitions": 1}))
    worker = house.worker(prefetch=1)
    house.publish(b"old", partition_key="a")
    (old,) = take(worker)
    await house.ask(house.admin.configure("tasks", {"partitions": 7}))
    moved = 0
    for number in range(40):
        house.publish(b"new", partition_key=f"k{number}")
        found = await house.ask(house.admin.peek("tasks"))
        moved = sum(1 for one in found if one.partition != 0)
        if moved:
            break
    settle(worker, "nack", old)
    found_all = await doctor(house)
    assert moved and "gate" in codes(found_all), codes(found_all)


async def test_a_full_queue_that_refuses_publishes(make_house: MakeHouse) -> None:
    house = make_house(("tasks", {"limits": {"max_queue_depth": 1}}))
    house.publish()
    assert put(house.connect("author-2"), "$queue/tasks", b"more")[0] == 0x97
    await house.ask(house.admin.create_group("tasks", "w"))
    found = await doctor(house)
    assert codes(found) == ["no-consumer", "full"], "the cause before its effect"
    assert "1 so far" in found.findings[1].what
    assert found.findings[1].do == "sluice queue config tasks --set limits.max_queue_depth=2"


async def test_messages_that_went_to_the_dead_letters(house: AdminHouse) -> None:
    worker = house.worker()
    house.publish()
    settle(worker, "reject", take(worker)[0], description="no such image")
    found = await doctor(house)
    assert codes(found) == ["dead-letters", "empty"] and not found.healthy
    finding = found.findings[0]
    assert "1 message" in finding.what and "1 rejected" in finding.what and "no such image" in finding.what
    assert "sluice dlq list tasks" in finding.do and "sluice dlq retry tasks --all" in finding.do
    house.publish()
    settle(worker, "nack", take(worker)[0])
    assert codes(await doctor(house)) == ["all-retrying", "dead-letters"]


async def test_a_group_in_which_every_consumer_is_stopping_needs_another_worker(house: AdminHouse) -> None:
    house.worker("w-1", prefetch=0)
    house.publish()
    found = await doctor(house)
    assert codes(found) == ["draining"]
    assert "w-1" in found.findings[0].what


async def test_consumers_that_stand_by_are_told_why(house: AdminHouse) -> None:
    await house.ask(house.admin.create_queue({"name": "tasks", "partitions": 1}))
    house.worker("w-1", prefetch=1)
    house.worker("w-2", prefetch=1)
    house.publish(partition_key="a")
    house.publish(partition_key="b")
    found = await doctor(house)
    assert codes(found) == ["prefetch", "standby"]
    assert (
        "w-2 has no partition and stands by for messages with a key: the queue has 1 partition for 2 consumers"
        in found.findings[1].what
    )
    assert found.findings[1].do == "sluice queue config tasks --set partitions=2"


async def test_an_exclusive_consumer_and_a_higher_priority_are_named(house: AdminHouse) -> None:
    house.worker("a-1", "one", exclusive="true")
    house.worker("a-2", "one")
    house.worker("b-1", "two", consumer_priority=5)
    house.worker("b-2", "two")
    for name in ("one", "two"):
        house.publish(b"x", name)
    one, two = await doctor(house, "one"), await doctor(house, "two")
    assert codes(one) == ["in-work", "standby"] and "a-1 consumes exclusively" in one.findings[1].what
    assert codes(two) == ["in-work", "standby"] and "consumers of that priority" in two.findings[1].what
    assert one.healthy and two.healthy


async def test_messages_in_work_are_no_fault(house: AdminHouse) -> None:
    house.worker()
    house.publish(b"x", message_id="order-7")
    found = await doctor(house)
    assert found.healthy and codes(found) == ["in-work"]
    assert found.findings[0].what.startswith("nothing waits: 1 message is in work, order-7 with w-1 since")
    house.publish()
    assert "2 messages are in work, the oldest (order-7) with w-1" in (await first(house)).what


async def test_messages_that_flow_are_told_with_their_rates(house: AdminHouse) -> None:
    worker = house.worker(prefetch=1)
    await house.ask(house.admin.stats("tasks"))
    for _ in range(2):
        for _ in range(20):
            house.publish()
        for _ in range(10):
            settle(worker, "ack", take(worker)[0])
        await house.ask(house.admin.stats("tasks"))
        house.advance(1)
    house.queue("tasks").groups["w"].consumers[
        0
    ].prefetch = 100  # as if it had asked for more, and the turn had not ended yet
    found = await doctor(house)
    assert found.healthy and codes(found) == ["flowing"]
    assert "20/s in" in found.findings[0].what and "10/s acknowledged" in found.findings[0].what


async def test_each_group_with_a_problem_is_named(house: AdminHouse) -> None:
    for name in ("a", "b"):
        house.worker(f"{name}-1", prefetch=1)
    for _ in range(3):
        house.publish()
    found = await doctor(house)
    assert codes(found) == ["prefetch", "prefetch"]
    assert "group a" in found.findings[0].what and "group b" in found.findings[1].what
