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
    location = commands.find(engine.engine.get_queue(queue), message_id)
    if location is None:
        raise UnknownMessage(queue, message_id.decode())
    try:
        commands.cancel(location[0], location[1], message_id, "ann")
    finally:
        engine.run_until_idle()


def generated_id(engine: EngineUnderTest, seq: int, queue: str = "tasks") -> bytes:
    return format_message_id(engine.engine.get_queue(queue).partitions[0].pid, seq)


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
    found = Search(engine.engine.get_queue("tasks"), list(wanted))
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
