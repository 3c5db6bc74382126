"""Commands on messages that are not delivered: cancel by id."""

from __future__ import annotations

import pytest

from sluice.errors import AlreadyDelivered, InvalidQueueConfig, UnknownMessage
from sluice.queues.model import IdSearch
from sluice.queues.names import format_message_id
from tests.queues.conftest import MakeEngine
from tests.queues.kit import EngineUnderTest


def cancel(engine: EngineUnderTest, message_id: bytes, queue: str = "tasks") -> None:
    """Cancel a message whose id leads to it."""
    commands = engine.engine.commands
    engine.engine.now = engine.loop.now
    location = commands.find(engine.engine.lifecycle.get_queue(queue), message_id)
    if location is None:
        raise UnknownMessage(queue, message_id.decode())
    try:
        commands.cancel(location[0], location[1], message_id, "ann")
    finally:
        engine.run_until_idle()


def generated_id(engine: EngineUnderTest, seq: int, queue: str = "tasks") -> bytes:
    return format_message_id(engine.engine.lifecycle.get_queue(queue).partitions[0].pid, seq)


def test_cancelled_message_is_never_delivered(engine: EngineUnderTest) -> None:
    for payload in (b"one", b"two", b"three"):
        engine.publish(payload, key=b"k")
    engine.group()
    cancel(engine, generated_id(engine, 1))
    assert engine.worker().ack_all() == [b"one", b"three"]
    ledger = engine.ledger()
    assert (ledger.cancelled, ledger.acked, ledger.balance(), engine.depth()) == (1, 2, 0, 0)


@pytest.mark.parametrize("snapshot", [False, True])
def test_cancellation_survives_a_crash(engine: EngineUnderTest, snapshot: bool) -> None:
    engine.publish(b"one")
    engine.publish(b"two", message_id=b"later", delay=60.0)
    engine.group()
    cancel(engine, generated_id(engine, 0))
    if snapshot:
        engine.take_snapshot()
    cancel(engine, b"later")
    engine.crash_and_restart()
    worker = engine.worker()
    engine.advance(minutes=5)
    assert worker.ack_all() == []
    assert engine.ledger().cancelled == 2


def test_delayed_message_is_cancelled_by_the_id_of_its_publisher(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"remind me", message_id=b"reminder-42", delay=3600.0)
    cancel(engine, b"reminder-42")
    engine.advance(hours=2)
    assert worker.ack_all() == [] and engine.depth() == 0


@pytest.mark.parametrize("snapshot", [False, True])
def test_id_of_delayed_message_is_known_after_a_restart(
    engine: EngineUnderTest, snapshot: bool
) -> None:
    engine.publish(b"remind me", message_id=b"reminder-42", delay=3600.0)
    if snapshot:
        engine.take_snapshot()
    engine.crash_and_restart()
    cancel(engine, b"reminder-42")
    assert engine.depth() == 0


def test_message_that_waits_for_its_retry_is_cancelled(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.publish(b"fails", key=b"k", message_id=b"mine")
    engine.publish(b"next", key=b"k")
    worker.nack(worker.lease(), delay=60.0)
    cancel(engine, b"mine")
    assert worker.ack_all() == [b"next"], "its key goes on"
    engine.advance(minutes=5)
    assert worker.ack_all() == [] and engine.ledger().cancelled == 1


def test_message_in_delivery_is_not_cancelled(engine: EngineUnderTest) -> None:
    engine.group("others")
    worker = engine.worker("ann-1")
    engine.publish(b"work", message_id=b"mine")
    delivery = worker.lease()
    with pytest.raises(AlreadyDelivered, match="in delivery to consumer ann-1 of group workers"):
        cancel(engine, b"mine")
    assert engine.ledger("others").cancelled == 0, "nothing changed for the other group"
    worker.ack(delivery)
    assert engine.worker(group="others").ack_all() == [b"work"]


def test_settled_message_is_not_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=3600.0)
    worker = engine.worker()
    engine.publish(b"done")
    worker.ack_all()
    with pytest.raises(UnknownMessage):
        cancel(engine, generated_id(engine, 0))
    with pytest.raises(UnknownMessage):
        cancel(engine, generated_id(engine, 1))


def test_cancelled_message_is_not_kept_for_retention(make_engine: MakeEngine) -> None:
    engine = make_engine(retention=3600.0)
    engine.group()
    engine.publish(b"no")
    cancel(engine, generated_id(engine, 0))
    engine.seek("earliest")
    assert engine.worker().ack_all() == []
    engine.crash_and_restart()
    engine.seek("earliest")
    assert engine.worker().ack_all() == []


def test_message_is_cancelled_before_the_first_group(engine: EngineUnderTest) -> None:
    engine.publish(b"no")
    cancel(engine, generated_id(engine, 0))
    engine.crash_and_restart()
    assert engine.worker().ack_all() == [] and engine.depth() == 0


def test_message_of_a_compacted_queue_is_not_cancelled(make_engine: MakeEngine) -> None:
    engine = make_engine(is_compacted=True)
    engine.publish(b"value", key=b"k")
    with pytest.raises(InvalidQueueConfig, match="is compacted"):
        cancel(engine, generated_id(engine, 0))


class Search(IdSearch):
    """A search that records its end."""

    done = False

    def on_done(self) -> None:
        self.done = True


def search(engine: EngineUnderTest, *wanted: bytes) -> dict[bytes, int]:
    found = Search(engine.engine.lifecycle.get_queue("tasks"), list(wanted))
    engine.engine.now = engine.loop.now
    engine.engine.id_searches.start(found)
    engine.run_until_idle()
    assert found.done
    return {message_id: seq for message_id, (_, seq) in found.found.items()}


@pytest.mark.parametrize("later", [0, 10])
def test_any_stored_message_is_found_by_the_id_of_its_publisher(
    make_engine: MakeEngine, later: int
) -> None:
    engine = make_engine(cache_bytes=0)
    for number in range(300):
        engine.send(b"work", message_id=b"id-%d" % number)
        engine.advance(0.01)
    engine.publish(b"work")
    engine.advance(minutes=later)  # within the dedup window, or after it
    assert search(engine, b"id-7", b"id-290", b"other") == {b"id-7": 7, b"id-290": 290}
    engine.crash_and_restart()
    assert search(engine, b"id-299") == {b"id-299": 299}


# ---- rescheduling


def reschedule(engine: EngineUnderTest, message_id: bytes, seconds: float) -> None:
    """Move a message to `seconds` from now; 0: deliver it now."""
    commands = engine.engine.commands
    engine.engine.now = engine.loop.now
    location = commands.find(engine.engine.lifecycle.get_queue("tasks"), message_id)
    assert location is not None
    try:
        commands.reschedule(location[0], location[1], message_id, engine.loop.now + seconds, "ann")
    finally:
        engine.run_until_idle()


@pytest.mark.parametrize("restart", ["", "crash", "snapshot"])
def test_delayed_message_is_moved_and_promoted(engine: EngineUnderTest, restart: str) -> None:
    engine.group()
    for name in (b"sooner", b"later", b"now"):
        engine.publish(name, message_id=name, delay=600.0)
    reschedule(engine, b"sooner", 60.0)
    reschedule(engine, b"later", 3600.0)
    reschedule(engine, b"now", 0.0)
    if restart == "snapshot":
        engine.take_snapshot()
    if restart:
        engine.crash_and_restart()
    worker = engine.worker()
    assert worker.ack_all() == [b"now"]
    engine.advance(59)
    assert worker.ack_all() == []
    engine.advance(2)
    assert worker.ack_all() == [b"sooner"]
    engine.advance(minutes=58)
    assert worker.ack_all() == []
    engine.advance(minutes=2)
    assert worker.ack_all() == [b"later"]


@pytest.mark.parametrize("restart", ["", "crash", "snapshot"])
def test_waiting_message_is_delayed_and_its_key_goes_on(
    engine: EngineUnderTest, restart: str
) -> None:
    worker = engine.worker(prefetch=1)
    for name in (b"held", b"moved", b"next"):
        engine.publish(name, key=b"k")
    held = worker.lease()
    reschedule(engine, generated_id(engine, 1), 60.0)
    if restart == "snapshot":
        engine.take_snapshot()
    if restart:
        engine.crash_and_restart()
        worker = engine.worker()
        held = worker.lease()
    worker.ack(held)
    assert worker.ack_all() == [b"next"]
    engine.advance(61)
    assert worker.ack_all() == [b"moved"]


def test_chosen_message_of_a_paused_group_is_delayed(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=1)
    for name in (b"held", b"moved", b"next"):
        engine.publish(name)
    held = worker.lease()
    engine.worker("full-1", prefetch=0)
    reschedule(engine, generated_id(engine, 1), 60.0)
    worker.ack(held)
    assert worker.ack_all() == [b"next"]
    engine.advance(61)
    assert worker.ack_all() == [b"moved"]


@pytest.mark.parametrize("restart", ["", "crash", "snapshot"])
def test_failed_message_is_retried_now_or_later(engine: EngineUnderTest, restart: str) -> None:
    worker = engine.worker()
    for name in (b"now", b"later"):
        engine.publish(name, message_id=name)
        worker.nack(worker.lease(), delay=600.0)
    reschedule(engine, b"now", 0.0)
    delivery = worker.lease()
    assert (delivery.payload, delivery.attempt) == (b"now", 2)
    worker.ack(delivery)
    reschedule(engine, b"later", 1800.0)
    if restart == "snapshot":
        engine.take_snapshot()
    if restart:
        engine.crash_and_restart()
        worker = engine.worker()
    engine.advance(1790)
    assert worker.lease_or_none() is None
    engine.advance(20)
    delivery = worker.lease()
    assert (delivery.payload, delivery.attempt) == (b"later", 2)
    worker.ack(delivery)


def test_retry_that_is_due_is_postponed(engine: EngineUnderTest) -> None:
    worker = engine.worker(prefetch=1)
    engine.publish(b"fails", key=b"k", message_id=b"mine")
    worker.nack(worker.lease(), delay=0.5)
    engine.publish(b"other")
    other = worker.lease()
    engine.advance(1)  # the retry is due, and waits for capacity
    reschedule(engine, b"mine", 60.0)
    worker.ack(other)
    assert worker.lease_or_none() is None
    engine.advance(61)
    assert worker.ack_all() == [b"fails"]


@pytest.mark.parametrize("priority", [0, 5])
def test_parked_message_that_is_delayed_is_delivered_once(
    make_engine: MakeEngine, priority: int
) -> None:
    engine = make_engine(batch_size=2)
    worker = engine.worker()
    for name in (b"a", b"b", b"parked"):
        engine.publish(name, key=b"k", priority=priority)
    first, second = worker.lease_all()
    for _ in range(2):
        reschedule(engine, generated_id(engine, 2), 5.0)
        engine.advance(6)  # it is due, and parked again
    worker.ack(first)
    worker.ack(second)
    assert worker.payloads() == [b"parked"]
    assert worker.ack_all() == [b"parked"]
    assert (engine.ledger().acked, engine.ledger().balance()) == (3, 0)


def test_delayed_message_that_is_moved_waits_for_its_key_and_is_delivered(
    engine: EngineUnderTest,
) -> None:
    worker = engine.worker()
    engine.publish(b"first", key=b"k")
    (first,) = worker.lease_all()
    engine.publish(b"moved", key=b"k", delay=60.0)
    engine.publish(b"last", key=b"k")
    reschedule(engine, generated_id(engine, 1), 5.0)
    engine.advance(6)  # it is due, and waits behind the first
    worker.ack(first)
    assert worker.ack_all() == [b"moved", b"last"]


def test_message_moved_while_its_expiry_reads_the_body_is_delivered(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(message_ttl=60.0, expired_to_dlq=True, cache_bytes=0)
    engine.publish(b"saved")
    engine.group()
    engine.loop.now = engine.loop.next_timer() + 1.0
    engine.loop.fire_timers()  # the search for expired messages plans to read the body
    reschedule(engine, generated_id(engine, 0), 30.0)
    engine.advance(31)
    assert engine.worker().ack_all() == [b"saved"]


def test_message_of_a_frame_in_commit_is_delayed_when_it_becomes_visible(
    engine: EngineUnderTest,
) -> None:
    group = engine.group()
    engine.send(b"later")
    engine.commit_loop.end_turn()
    reschedule_in_turn(engine, 0, 60.0)
    while group.queue.partitions[0].committed_end == 0:
        engine.loop.run_one()
    assert group.count_delayed() == 1


def test_message_is_rescheduled_before_its_commit(engine: EngineUnderTest) -> None:
    worker = engine.worker()
    engine.send(b"plain")
    engine.send(b"urgent", priority=5)
    engine.send(b"delayed", delay=600.0)
    for seq in range(3):
        reschedule_in_turn(engine, seq, 30.0 * (seq + 1))
    reschedule_in_turn(engine, 2, 0.0)
    engine.run_until_idle()
    assert worker.ack_all() == [b"delayed"]
    engine.advance(31)
    assert worker.ack_all() == [b"plain"]
    engine.advance(31)
    assert worker.ack_all() == [b"urgent"]


def reschedule_in_turn(engine: EngineUnderTest, seq: int, seconds: float) -> None:
    partition = engine.engine.lifecycle.get_queue("tasks").partitions[0]
    name = generated_id(engine, seq)
    engine.engine.commands.reschedule(partition, seq, name, engine.loop.now + seconds, "ann")


def test_message_lives_its_time_from_the_new_due_time_on(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=60.0)
    engine.group()
    engine.publish(b"a", message_id=b"a", delay=10.0)
    reschedule(engine, b"a", 600.0)
    engine.crash_and_restart()
    engine.advance(650)
    assert engine.worker().ack_all() == [b"a"]
    engine.publish(b"b", message_id=b"b", delay=10.0)
    reschedule(engine, b"b", 600.0)
    engine.advance(700)
    assert engine.ledger().expired == 1


def test_time_after_the_end_of_a_message_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(message_ttl=0.0, total_timeout=100.0)
    worker = engine.worker()
    engine.publish(b"a", message_id=b"a", delay=10.0, ttl=60.0)
    with pytest.raises(InvalidQueueConfig, match="expires at"):
        reschedule(engine, b"a", 600.0)
    engine.publish(b"b", message_id=b"b")
    worker.nack(worker.lease(), delay=50.0)
    with pytest.raises(InvalidQueueConfig, match="total_timeout"):
        reschedule(engine, b"b", 600.0)
    engine.advance(51)
    assert sorted(worker.ack_all()) == [b"a", b"b"], "nothing changed"


def test_message_is_rescheduled_for_groups_that_start_later(engine: EngineUnderTest) -> None:
    engine.publish(b"a")
    reschedule(engine, generated_id(engine, 0), 60.0)
    worker = engine.worker()
    assert worker.lease_or_none() is None
    engine.advance(61)
    assert worker.ack_all() == [b"a"]
