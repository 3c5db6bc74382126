"""`doctor`: one test for each reason why nothing arrives; the first finding is the cause."""

from __future__ import annotations

import pytest

from sluice.admin.model import Diagnosis, Finding, OutgoingMessage
from sluice.message import Message
from sluice.queues.service.group_inspector import MAX_EXAMINED_MESSAGES, GroupInspector
from tests.admin.conftest import MakeHarness
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, put, settle, take


async def doctor(harness: BrokerHarness, queue: str = "tasks", group: str = "") -> Diagnosis:
    return await harness.call(harness.admin.diagnose(queue, group))


async def first(harness: BrokerHarness, queue: str = "tasks", group: str = "") -> Finding:
    found = await doctor(harness, queue, group)
    assert found.findings, "there is always a finding"
    assert found.healthy == (not any(one.is_fault for one in found.findings))
    return found.findings[0]


def codes(found: Diagnosis) -> list[str]:
    return [one.code for one in found.findings]


async def test_missing_queue_is_reported_with_similar_names(harness: BrokerHarness) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks/image"}))
    finding = await first(harness, "task/image")
    assert (finding.code, finding.do) == ("no-queue", "sluice doctor tasks/image")
    assert "tasks/image" in finding.what
    assert (await first(harness, "zzz")).do == "sluice queue create zzz"


async def test_queue_without_any_publish(harness: BrokerHarness) -> None:
    harness.worker()
    finding = await first(harness)
    assert (finding.code, finding.do) == ("never-published", "sluice publish tasks hello")


async def test_binding_without_matching_topic(harness: BrokerHarness) -> None:
    await harness.call(
        harness.admin.create_queue({"name": "tasks", "bindings": ["sensors/+/temp"]})
    )
    harness.worker()
    put(harness.connect("author"), "sensor/1/temp", b"21")
    finding = await first(harness)
    assert finding.code == "nothing-captured" and "sensors/+/temp" in finding.what
    assert finding.do == "sluice queue config tasks"


async def test_empty_queue_with_all_messages_acknowledged_is_healthy(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker()
    harness.publish()
    settle(worker, "ack", take(worker)[0])
    found = await doctor(harness)
    assert found.healthy and codes(found) == ["empty"]
    assert "1 message came and was settled" in found.findings[0].what


async def test_messages_without_a_group(harness: BrokerHarness) -> None:
    harness.publish()
    finding = await first(harness)
    assert finding.code == "no-group"
    assert finding.what.startswith("1 message waits, and no consumer")
    assert finding.do == (
        "Start a worker, which creates the group; to look without taking: `sluice peek tasks`"
    )
    assert (await first(harness, group="mine")).do.startswith(
        "Start a worker of group mine, which creates"
    )
    assert not harness.queue("tasks").groups


async def test_group_without_consumer(harness: BrokerHarness) -> None:
    harness.publish()
    await harness.call(harness.admin.create_group("tasks", "w"))
    finding = await first(harness)
    assert finding.code == "no-consumer" and finding.what.endswith("and 1 message waits")
    assert finding.do == (
        "Start a worker of group w; to look without taking:"
        " `sluice consume tasks --group w --leave`"
    )
    worker = harness.worker()
    assert worker.payloads() == [b"x"], "the remedy helps"


async def test_abandoned_group_of_a_generated_client_id_is_to_be_deleted(
    harness: BrokerHarness,
) -> None:
    harness.publish()
    await harness.call(harness.admin.create_group("tasks", "mqttjs_aa98f2c1"))
    finding = await first(harness)
    assert finding.code == "no-consumer" and "a generated client id" in finding.what
    assert "`sluice group delete tasks mqttjs_aa98f2c1`" in finding.do


async def test_consumers_are_in_another_group(harness: BrokerHarness) -> None:
    harness.worker("other-1")
    await harness.call(harness.admin.create_group("tasks", "mine"))
    harness.publish()
    finding = await first(harness, group="mine")
    assert finding.code == "wrong-group" and "consumers are in other" in finding.what
    assert finding.do.startswith("Let workers subscribe with consumer-group mine.")
    assert finding.do.endswith("`sluice group delete tasks mine`"), (
        "which loses what waits in it: not the first advice"
    )
    finding = await first(harness, group="othr")
    assert (finding.code, finding.do) == ("wrong-group", "sluice doctor tasks --group other")
    finding = await first(harness, group="mien")
    assert (finding.code, finding.do) == ("wrong-group", "sluice doctor tasks --group mine")
    finding = await first(harness, group="unknown")
    assert (finding.code, finding.do) == ("wrong-group", "sluice doctor tasks --group other")
    harness.worker("mine-1")
    assert (await first(harness, group="mine")).code == "in-work", "the remedy helps"


async def test_misspelled_group_without_consumers(harness: BrokerHarness) -> None:
    harness.publish()
    await harness.call(harness.admin.create_group("tasks", "billing"))
    finding = await first(harness, group="biling")
    assert (finding.code, finding.do) == ("wrong-group", "sluice doctor tasks --group billing")
    finding = await first(harness, group="zzz")
    assert finding.code == "no-group" and "the queue has billing" in finding.what


async def test_group_that_started_after_all_messages(harness: BrokerHarness) -> None:
    harness.publish()
    worker = harness.worker(start="latest")
    finding = await first(harness)
    assert (finding.code, finding.do) == ("began-behind", "sluice seek tasks w --to earliest")
    await harness.call(harness.admin.seek("tasks", "w", "earliest"))
    assert worker.payloads() == [b"x"], "the remedy helps"


async def test_finished_group_beside_an_unfinished_one(harness: BrokerHarness) -> None:
    worker = harness.worker("a-1")
    await harness.call(harness.admin.create_group("tasks", "b"))
    harness.publish()
    settle(worker, "ack", take(worker)[0])
    finding = await first(harness, group="a")
    assert finding.code == "empty" and "other groups" in finding.what


async def test_consumer_with_session_but_without_connection(harness: BrokerHarness) -> None:
    worker = harness.connect_persistent("w-1")
    join(worker, "$queue/tasks")
    worker.drop()
    harness.publish()
    finding = await first(harness)
    assert finding.code == "consumer-away" and finding.is_fault
    assert "consumer w-1 is disconnected since" in finding.what
    assert finding.do == "Start another worker of group w, or w-1 again with the same client id"


async def test_deliveries_of_a_killed_worker_are_not_reported_as_work(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect_persistent("w-1", session_expiry=10)
    join(worker, "$queue/tasks")
    harness.publish()
    take(worker)
    idle = harness.worker("w-2")
    worker.drop()
    harness.advance(3)
    found = await doctor(harness)
    assert (found.healthy, codes(found)) == (True, ["consumer-away"])
    assert "disconnected since" in found.findings[0].what and "(3 s ago)" in found.findings[0].what
    assert (
        "its session expires at" in found.findings[0].what and "(in 7 s)" in found.findings[0].what
    )
    assert found.findings[0].what.endswith("The delivery that it holds returns to the group then")
    harness.advance(8)
    assert idle.payloads() == [b"x"], "as the finding says"


@pytest.mark.parametrize(
    ("expiry", "expected"),
    [
        (60, "and its session expires at"),
        (0xFFFF_FFFF, "and its session does not expire"),
    ],
)
async def test_deliveries_of_killed_worker_with_session_return_at_their_deadlines(
    harness: BrokerHarness, expiry: int, expected: str
) -> None:
    worker = harness.connect_persistent("w-1", session_expiry=expiry)
    join(worker, "$queue/tasks")
    for _ in range(2):
        harness.publish()
    take(worker)
    harness.worker("w-2")
    worker.drop()
    harness.publish()
    harness.advance(10)
    found = await doctor(harness)
    assert (found.healthy, codes(found)) == (True, ["in-work", "consumer-away"])
    assert (
        "1 message is in delivery" in found.findings[0].what
        and "with w-2" in found.findings[0].what
    )
    assert (
        expected in found.findings[1].what
        and "return to the group at their deadlines" in found.findings[1].what
    )
    assert "(in 20 s)" in found.findings[1].what


async def test_consumer_that_missed_a_deadline(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish()
    assert len(take(worker)) == 1
    harness.advance(31)
    finding = await first(harness)
    assert finding.code == "consumer-stalled" and "w-1 has stalled" in finding.what


async def test_busy_consumer_within_its_deadlines_is_healthy(harness: BrokerHarness) -> None:
    worker = harness.worker(prefetch=2)
    for _ in range(5):
        harness.publish()
    deliveries = take(worker)
    assert len(deliveries) == 2
    harness.advance(10)
    found = await doctor(harness)
    assert (found.healthy, codes(found)) == (True, ["prefetch"]), "its first jobs are long"
    finding = found.findings[0]
    assert "w-1 is busy: it holds 2 deliveries" in finding.what and "(10 s ago)" in finding.what
    assert "must settle or extend the first by" in finding.what and "(in 20 s)" in finding.what
    assert "settled nothing yet" in finding.what
    assert "larger prefetch" not in finding.do
    assert finding.do.startswith("Wait, or start more workers of group w") and "$ack" in finding.do
    settle(worker, "ack", deliveries[0])
    finding = await first(harness)
    assert "it last settled at" in finding.what and "$ack" not in finding.do


async def test_consumer_that_never_settles_is_reported_after_its_deadline(
    harness: BrokerHarness,
) -> None:
    worker = harness.worker(prefetch=2)
    for _ in range(5):
        harness.publish()
    take(worker)
    harness.advance(31)
    finding = await first(harness)
    assert finding.code == "consumer-stalled" and finding.is_fault


async def test_consumer_working_on_the_last_message_is_healthy(harness: BrokerHarness) -> None:
    worker = harness.worker(prefetch=1)
    harness.publish()
    assert len(take(worker)) == 1
    found = await harness.call(harness.admin.diagnose("tasks"))
    assert (found.healthy, codes(found)) == (True, ["in-work"])
    harness.publish()
    found = await harness.call(harness.admin.diagnose("tasks"))
    assert (found.healthy, codes(found)) == (True, ["prefetch"])


async def test_messages_behind_a_busy_key_are_not_reported_as_lack_of_capacity(
    harness: BrokerHarness,
) -> None:
    """The consumer is full as well, but a larger prefetch would change nothing."""
    worker = harness.worker(prefetch=1)
    for number in range(4):
        harness.publish(b"x", partition_key="ann", message_id=f"a-{number}")
    take(worker)
    harness.advance(5)
    found = await doctor(harness)
    assert (found.healthy, codes(found)) == (True, ["key-busy"])
    finding = found.findings[0]
    assert finding.what.startswith(
        "3 messages wait because of the order per key: consumer w-1 holds message a-0 of key 'ann'"
        " since "
    )
    assert (
        "(5 s ago)" in finding.what
        and "only one message of a key is delivered at a time" in finding.what
    )
    assert "more keys" in finding.do and "performance.batch_size=10" in finding.do
    harness.publish(b"x", partition_key="bob")
    assert "prefetch" in codes(await doctor(harness)), "this one waits for capacity"


async def test_busy_key_of_killed_worker_is_reported_with_its_release_time(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect_persistent("w-1", session_expiry=10)
    join(worker, "$queue/tasks")
    for _ in range(2):
        harness.publish(b"x", partition_key="ann")
    take(worker)
    harness.worker("w-2")
    worker.drop()
    finding = await first(harness)
    assert finding.code == "key-busy" and "consumer w-1 is disconnected" in finding.what
    assert "returns to the group then" in finding.what and "batch_size" not in finding.do


async def test_delayed_message_beside_a_busy_key_is_healthy(harness: BrokerHarness) -> None:
    worker = harness.worker()
    for _ in range(2):
        harness.publish(b"x", partition_key="ann")
    take(worker)
    await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"x", delay=60.0)))
    found = await doctor(harness)
    assert (found.healthy, codes(found)) == (True, ["key-busy", "delayed"])


async def test_diagnosis_examines_a_bounded_number_of_delayed_messages(
    make_harness: MakeHarness,
) -> None:
    """A message with a busy key is beyond the examined ones: the diagnosis does not search all."""
    harness = make_harness(("tasks", {"partitions": 1}))
    worker = harness.worker()
    harness.publish(b"x", partition_key="ann")
    take(worker)
    engine, queue = harness.engine, harness.queue("tasks")
    for _ in range(MAX_EXAMINED_MESSAGES + 10):
        message = Message(b"later", b"", b"bob")
        message.deliver_at_ms = int((engine.now + 3600.0) * 1000.0)
        engine.publishing.publish(queue, message, None, 0)
    harness.publish(b"x", partition_key="ann")
    assert GroupInspector(engine, queue.groups["w"]).busy_keys() is None


async def test_consumer_that_sends_no_pubacks(harness: BrokerHarness) -> None:
    worker = harness.connect("w-1", receive_maximum=2)
    join(worker, "$queue/tasks")
    for _ in range(5):
        harness.publish()
    finding = await first(harness)
    assert finding.code == "window-full" and "has 2 packets to acknowledge" in finding.what
    assert len(worker.messages()) == 2


async def test_single_items_are_worded_in_singular(make_harness: MakeHarness) -> None:
    harness = make_harness(("small", {"limits": {"max_queue_depth": 1}}))
    await harness.call(harness.admin.publish("late", OutgoingMessage(b"x", delay=60.0)))
    harness.worker("w-1", "late")
    assert (
        "1 message waits for a delay that the publisher set; it ends at"
        in (await first(harness, "late")).what
    )
    harness.publish(b"x", "small")
    assert "full at 1 message and refuses" in (await doctor(harness, "small")).findings[1].what
    refusal = put(harness.connect("author-3"), "$queue/small", b"more")[1]
    assert "is full at 1 message." in refusal, refusal
    alone = harness.connect("a-1", receive_maximum=1)
    join(alone, "$queue/narrow")
    for _ in range(2):
        harness.publish(b"x", "narrow")
    assert "has 1 packet to acknowledge" in (await first(harness, "narrow")).what


async def test_consumer_that_reads_too_slowly(harness: BrokerHarness) -> None:
    worker = harness.worker()
    worker.transport.is_blocked = True
    for _ in range(6):
        await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"x" * 900_000)))
    finding = await first(harness)
    assert finding.code == "consumer-slow" and "w-1 reads more slowly" in finding.what
    worker.transport.drain()


async def test_all_messages_are_delayed(harness: BrokerHarness) -> None:
    harness.worker()
    await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"x", delay=90.0)))
    await harness.call(harness.admin.publish("tasks", OutgoingMessage(b"x", delay=60.0)))
    found = await doctor(harness)
    assert found.healthy and codes(found) == ["delayed"]
    assert "2 messages wait for a delay" in found.findings[0].what
    assert "the first ends at" in found.findings[0].what and "(in 1 min)" in found.findings[0].what


async def test_all_messages_wait_for_a_retry(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"x", message_id="order-7")
    settle(worker, "nack", take(worker)[0], description="disk full")
    finding = await first(harness)
    assert (finding.code, finding.do) == ("all-retrying", "sluice explain order-7 --queue tasks")
    assert finding.what.startswith("1 message failed and waits for a retry, until ")
    assert "(in 5 s)" in finding.what and "disk full" in finding.what


async def test_key_blocked_by_a_message_in_retry(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish(b"1", partition_key="k", message_id="first")
    harness.publish(b"2", partition_key="k")
    settle(worker, "nack", take(worker)[0], description="no luck")
    found = await doctor(harness)
    assert codes(found) == ["all-retrying", "key-blocked"]
    assert "message first of the same key" in found.findings[1].what
    assert "no luck" in found.findings[1].what


async def test_strict_queue_with_its_one_message_in_flight(make_harness: MakeHarness) -> None:
    harness = make_harness(("tasks", {"ordering": "strict"}))
    worker = harness.worker()
    harness.publish(b"1")
    harness.publish(b"2")
    take(worker)
    found = await doctor(harness)
    assert codes(found) == ["key-busy"] and found.healthy
    assert "1 message waits because of strict order: consumer w-1 holds" in found.findings[0].what
    assert "only one message of the queue is delivered at a time" in found.findings[0].what
    assert "key" not in found.findings[0].what
    harness.worker("w-2")
    standby = (await doctor(harness)).findings[1]
    assert standby.code == "standby" and "the order is strict" in standby.what
    assert "partitions" not in standby.do, "there are no more workers"


async def test_key_blocked_by_partition_gate(make_harness: MakeHarness) -> None:
    harness = make_harness(("tasks", {"partitions": 1}))
    worker = harness.worker(prefetch=1)
    harness.publish(b"old", partition_key="a")
    (old,) = take(worker)
    await harness.call(harness.admin.configure("tasks", {"partitions": 7}))
    moved = 0
    for number in range(40):
        harness.publish(b"new", partition_key=f"k{number}")
        found = await harness.call(harness.admin.peek("tasks"))
        moved = sum(1 for one in found if one.partition != 0)
        if moved:
            break
    settle(worker, "nack", old)
    found_all = await doctor(harness)
    assert moved and "gate" in codes(found_all), codes(found_all)


async def test_full_queue_that_refuses_publishes(make_harness: MakeHarness) -> None:
    harness = make_harness(("tasks", {"limits": {"max_queue_depth": 1}}))
    harness.publish()
    assert put(harness.connect("author-2"), "$queue/tasks", b"more")[0] == 0x97
    await harness.call(harness.admin.create_group("tasks", "w"))
    found = await doctor(harness)
    assert codes(found) == ["no-consumer", "full"], "the cause before its effect"
    assert "1 so far" in found.findings[1].what
    assert found.findings[1].do == "sluice queue config tasks --set limits.max_queue_depth=2"


async def test_messages_that_became_dead_letters(harness: BrokerHarness) -> None:
    worker = harness.worker()
    harness.publish()
    settle(worker, "reject", take(worker)[0], description="no such image")
    found = await doctor(harness)
    assert codes(found) == ["dead-letters", "empty"] and not found.healthy
    finding = found.findings[0]
    assert (
        "1 message" in finding.what
        and "1 rejected" in finding.what
        and "no such image" in finding.what
    )
    assert "sluice dlq list tasks" in finding.do and "sluice dlq retry tasks --all" in finding.do
    harness.publish()
    settle(worker, "nack", take(worker)[0])
    assert codes(await doctor(harness)) == ["all-retrying", "dead-letters"]


async def sample(harness: BrokerHarness) -> None:
    """Do what the broker does every five seconds."""
    await harness.call(harness.admin.sample_counters(100))


async def test_verdict_on_a_queue_with_few_dead_letters_is_steady(harness: BrokerHarness) -> None:
    worker = harness.worker()
    await sample(harness)
    verdicts = set()
    for nth in range(60):
        harness.advance(1)
        harness.publish()
        (delivery,) = take(worker)
        verdicts.add((await doctor(harness)).healthy)
        verb = "reject" if nth in (30, 50) else "nack" if nth % 20 == 7 else "ack"
        settle(worker, verb, delivery, **({"delay": "500ms"} if verb == "nack" else {}))
        found = await doctor(harness)  # empty, or with one message that waits for its retry
        verdicts.add(found.healthy)
        if verb == "nack":
            harness.advance(0.5)
            settle(worker, "ack", take(worker)[0])
        if nth % 5 == 4:
            await sample(harness)
    assert verdicts == {True}
    assert "dead-letters" in codes(found), "they are still reported"


async def test_many_dead_letters_are_a_fault_while_messages_flow(harness: BrokerHarness) -> None:
    worker = harness.worker()
    await sample(harness)
    for verb in ("ack", "reject", "ack", "ack"):
        harness.publish()
        settle(worker, verb, take(worker)[0])
    harness.publish()
    found = await doctor(harness)
    assert codes(found) == ["in-work", "dead-letters"] and not found.healthy
    settle(worker, "ack", take(worker)[0])
    assert not (await doctor(harness)).healthy


@pytest.mark.parametrize("last", ["ack", "reject"])
async def test_verdict_on_a_quiet_queue_is_that_of_its_last_message(
    harness: BrokerHarness, last: str
) -> None:
    worker = harness.worker()
    for verb in ("reject", "ack") if last == "ack" else ("ack", "reject"):
        await sample(harness)
        harness.advance(400)
        harness.publish()
        settle(worker, verb, take(worker)[0])
    await sample(harness)
    for _ in range(100):
        harness.advance(5)
        await sample(harness)
    assert (await doctor(harness)).healthy == (last == "ack")


async def test_all_messages_of_one_group_die_while_the_other_one_works(
    harness: BrokerHarness,
) -> None:
    good, bad = harness.worker("good-1"), harness.worker("bad-1")
    await sample(harness)
    for _ in range(3):
        harness.publish()
        settle(good, "ack", take(good)[0])
        settle(bad, "reject", take(bad)[0])
    assert not (await doctor(harness)).healthy
    assert not (await doctor(harness, group="bad")).healthy


async def test_group_in_which_every_consumer_is_draining_needs_another_worker(
    harness: BrokerHarness,
) -> None:
    harness.worker("w-1", prefetch=0)
    harness.publish()
    found = await doctor(harness)
    assert codes(found) == ["draining"]
    assert "w-1" in found.findings[0].what


async def test_standby_consumers_are_explained(harness: BrokerHarness) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks", "partitions": 1}))
    harness.worker("w-1", prefetch=1)
    harness.worker("w-2", prefetch=1)
    harness.publish(partition_key="a")
    harness.publish(partition_key="b")
    found = await doctor(harness)
    assert codes(found) == ["prefetch", "standby"]
    assert (
        "w-2 has no partition and stands by for messages with a key: the queue has 1 partition for"
        " 2 consumers" in found.findings[1].what
    )
    assert found.findings[1].do == "sluice queue config tasks --set partitions=2"


async def test_exclusive_consumer_and_higher_priority_are_named(harness: BrokerHarness) -> None:
    harness.worker("a-1", "one", exclusive="true")
    harness.worker("a-2", "one")
    harness.worker("b-1", "two", consumer_priority=5)
    harness.worker("b-2", "two")
    for name in ("one", "two"):
        harness.publish(b"x", name)
    one, two = await doctor(harness, "one"), await doctor(harness, "two")
    assert (
        codes(one) == ["in-work", "standby"] and "a-1 consumes exclusively" in one.findings[1].what
    )
    assert (
        codes(two) == ["in-work", "standby"]
        and "consumers of that priority" in two.findings[1].what
    )
    assert one.healthy and two.healthy


async def test_messages_in_flight_are_healthy(harness: BrokerHarness) -> None:
    harness.worker()
    harness.publish(b"x", message_id="order-7")
    found = await doctor(harness)
    assert found.healthy and codes(found) == ["in-work"]
    assert found.findings[0].what.startswith(
        "nothing waits: 1 message is in delivery, order-7 with w-1 since"
    )
    harness.publish()
    assert (
        "2 messages are in delivery, the oldest (order-7) with w-1" in (await first(harness)).what
    )


async def test_flowing_messages_are_reported_with_their_rates(harness: BrokerHarness) -> None:
    worker = harness.worker(prefetch=1)
    await harness.call(harness.admin.stats("tasks"))
    for _ in range(2):
        for _ in range(20):
            harness.publish()
        for _ in range(10):
            settle(worker, "ack", take(worker)[0])
        await harness.call(harness.admin.stats("tasks"))
        harness.advance(1)
    # as if it had asked for more in a turn that has not ended
    harness.queue("tasks").groups["w"].consumers[0].prefetch = 100
    found = await doctor(harness)
    assert found.healthy and codes(found) == ["flowing"]
    assert "20/s in" in found.findings[0].what and "10/s acknowledged" in found.findings[0].what


async def test_each_group_with_a_problem_is_named(harness: BrokerHarness) -> None:
    for name in ("a", "b"):
        harness.worker(f"{name}-1", prefetch=1)
    for _ in range(3):
        harness.publish()
    found = await doctor(harness)
    assert codes(found) == ["prefetch", "prefetch"]
    assert "group a" in found.findings[0].what and "group b" in found.findings[1].what


async def test_pause_is_the_first_finding_with_its_operator_and_reason(
    harness: BrokerHarness,
) -> None:
    harness.worker(prefetch=1)
    harness.publish()
    harness.publish()
    await harness.call(harness.admin.pause_queue("tasks", "ann", "the printer is on fire"))
    harness.advance(90.0)
    finding = await first(harness)
    assert (finding.code, finding.do) == ("paused", "sluice queue resume tasks")
    assert "by ann 1.5 min ago: the printer is on fire" in finding.what
    assert not finding.is_fault
    await harness.call(harness.admin.resume_queue("tasks"))
    group = (await harness.call(harness.admin.groups("tasks")))[0].name
    await harness.call(harness.admin.pause_group("tasks", group, "bob", ""))
    finding = await first(harness)
    assert (finding.code, finding.do) == ("paused", f"sluice group resume tasks {group}")


async def test_reached_limit_is_reported_without_a_fault(harness: BrokerHarness) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks", "limits": {"max_inflight": 1}}))
    harness.worker()
    harness.publish()
    harness.publish()
    found = await doctor(harness)
    limited = [one for one in found.findings if one.code == "limited"]
    assert limited and "limits.max_inflight allows: 1 delivery in flight" in limited[0].what


async def test_keys_at_their_limit_are_reported_and_explained(harness: BrokerHarness) -> None:
    limits = {"max_inflight_per_key": 1}
    config = {"name": "tasks", "limits": limits, "performance": {"batch_size": 9}}
    await harness.call(harness.admin.create_queue(config))
    harness.worker()
    for name in ("first", "second"):
        harness.publish(partition_key="meter-7", message_id=name)
    findings = (await doctor(harness)).findings
    finding = next(one for one in findings if one.code == "keys-limited")
    assert "messages of 1 key wait" in finding.what and not finding.is_fault
    assert "limits.max_inflight_per_key (1)" in finding.what
    group = (await harness.call(harness.admin.groups("tasks")))[0]
    assert group.held_by == ["max_inflight_per_key"]
    story = await harness.call(harness.admin.trace_message("tasks", "second"))
    assert story.states[0].why == "its key has reached limits.max_inflight_per_key"


async def test_open_breaker_is_a_fault(harness: BrokerHarness) -> None:
    await harness.call(harness.admin.create_queue({"name": "tasks", "breaker": {"failures": 1}}))
    worker = harness.worker()
    harness.publish()
    settle(worker, "nack", take(worker)[0])
    finding = await first(harness)
    assert finding.code == "breaker-open" and finding.is_fault
    assert "is open: 1 delivery failed in a row" in finding.what


async def test_keys_held_for_repair_are_named_with_what_ends_their_hold(
    harness: BrokerHarness,
) -> None:
    config = {"name": "tasks", "dlq_config": {"on_dead": "hold-key"}}
    await harness.call(harness.admin.create_queue(config))
    worker = harness.worker()
    harness.publish(b"3", partition_key="order-17", message_id="step-3")
    settle(worker, "reject", take(worker)[0])
    harness.publish(b"4", partition_key="order-17", message_id="step-4")
    assert take(worker) == []
    found = await doctor(harness)
    held = next(one for one in found.findings if one.code == "keys-held")
    assert "1 key for repair: 'order-17' (since step-3 died)" in held.what and not found.healthy
    assert "sluice dlq list tasks" in held.do
    group = await harness.call(harness.admin.group("tasks", "w"))
    assert [(one.key, one.dead_letters, one.waiting) for one in group.held_keys] == [
        ("order-17", 1, 1)
    ]
    trace = await harness.call(harness.admin.trace_message("tasks", "step-4"))
    assert "its key 'order-17' is held for repair since step-3 died" in trace.states[0].why
