"""What is said of a delivery after the server has died: it counts, once, and never against who has it by then."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.errors import StaleDelivery
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.ledger import verify
from sluice.queues.names import message_id
from sluice.queues.model.queue_rules import ANY_ORDER, STRICT
from sluice.queues.flow.delivery_tokens import Token
from tests.queues.conftest import MakeEngine
from tests.queues.kit import NO_TOKEN, Delivery, EngineUnderTest, MemoryKeeper


def retaken(engine: EngineUnderTest, old: Delivery) -> Lease | None:
    group = engine.engine.queues["tasks"].groups["workers"]
    engine.engine.now = engine.loop.now
    return engine.engine.retake(group, old.name, old.token, "w")


def say(engine: EngineUnderTest, old: Delivery, word: Callable[[Lease], None]) -> None:
    lease = retaken(engine, old)
    assert lease is not None
    word(lease)
    engine.settle_down()
    assert verify(engine.engine) == []


def nack(engine: EngineUnderTest, old: Delivery, delay: float = -1.0) -> None:
    say(engine, old, lambda lease: engine.engine.nack(lease, delay, "no luck"))


def reject(engine: EngineUnderTest, old: Delivery) -> None:
    say(engine, old, lambda lease: engine.engine.bury(lease, "unacceptable", "makes no sense"))


def release(engine: EngineUnderTest, old: Delivery) -> None:
    say(engine, old, lambda lease: engine.engine.release(lease))


def extend(engine: EngineUnderTest, old: Delivery) -> None:
    say(engine, old, lambda lease: engine.engine.extend(lease))


def had_before_a_crash(engine: EngineUnderTest) -> Delivery:
    engine.publish(b"job", key=b"k")
    engine.publish(b"next", key=b"k")
    old = engine.worker("w").lease()
    engine.crash_and_restart()
    return old


def test_a_reject_after_a_crash_puts_the_message_among_the_dead_letters(engine: EngineUnderTest) -> None:
    old = had_before_a_crash(engine)
    reject(engine, old)
    (letter,) = engine.letters()
    assert letter.payload == b"job" and letter.story["rejectionReason"] == "unacceptable"
    assert letter.story["dead-description"] == "makes no sense" and letter.story["attempts"] == "1"
    assert retaken(engine, old) is None, "said again, it finds nothing"
    assert engine.ledger().dead == 1
    assert engine.worker("w").payloads() == [b"next"]
    engine.crash_and_restart()
    assert engine.dead_letters() == [b"job"] and engine.worker("w").payloads() == [b"next"]


def test_a_nack_after_a_crash_counts_and_its_key_waits_for_the_retry(engine: EngineUnderTest) -> None:
    old = had_before_a_crash(engine)
    nack(engine, old, delay=60.0)
    worker = engine.worker("w")
    assert worker.lease_or_none() is None
    engine.advance(seconds=61)
    again = worker.lease()
    assert again.payload == b"job" and again.attempt == 2
    assert engine.group().nacked == 1


def test_a_bare_nack_after_a_crash_waits_the_backoff_of_its_attempt(engine: EngineUnderTest) -> None:
    engine.publish(b"job")
    worker = engine.worker("w")
    worker.nack(worker.lease(), delay=0.0)
    old = worker.lease()
    engine.crash_and_restart()
    nack(engine, old)
    worker = engine.worker("w")
    engine.advance(seconds=9)
    assert worker.lease_or_none() is None, "the second backoff is ten seconds"
    engine.advance(seconds=2)
    assert worker.lease().attempt == 3


@pytest.mark.parametrize("stop", ["crash", "restart"])
def test_a_nack_whose_answer_was_lost_with_its_server_is_not_counted_twice(
    engine: EngineUnderTest, stop: str
) -> None:
    engine.publish(b"job")
    worker = engine.worker("w")
    old = worker.lease()
    worker.nack(old, delay=60.0)
    engine.restart() if stop == "restart" else engine.crash_and_restart()
    nack(engine, old, delay=0.0)
    worker = engine.worker("w")
    assert worker.lease_or_none() is None, "what it asked for first is kept"
    engine.advance(seconds=61)
    assert worker.lease().attempt == 2


def test_the_last_nack_is_the_end_also_after_a_crash(make: MakeEngine) -> None:
    engine = make(max_retries=0)
    engine.publish(b"poison")
    old = engine.worker("w").lease()
    engine.crash_and_restart()
    nack(engine, old)
    assert engine.dead_letters() == [b"poison"] and engine.depth() == 0


def test_a_release_after_a_crash_changes_nothing_and_is_no_failure(engine: EngineUnderTest) -> None:
    old = had_before_a_crash(engine)
    release(engine, old)
    release(engine, old)
    again = engine.worker("other").lease()
    assert again.payload == b"job" and again.attempt == 1


def test_who_extends_after_a_crash_keeps_the_message_and_may_finish_it(make: MakeEngine) -> None:
    engine = make(delivery_timeout=30.0)
    old = had_before_a_crash(engine)
    extend(engine, old)
    other = engine.worker("other")
    assert other.lease_or_none() is None
    engine.advance(seconds=20)
    extend(engine, old)
    engine.advance(seconds=20)
    assert other.lease_or_none() is None
    group = engine.group()
    engine.engine.ack(engine.engine.lease_of(group, old.name, old.token, "w"))
    engine.settle_down()
    assert engine.ledger().acked == 1 and other.payloads() == [b"next"]
    assert verify(engine.engine) == []


@pytest.mark.parametrize("word", [reject, nack, release])
def test_after_a_late_extend_every_word_counts(
    engine: EngineUnderTest, word: Callable[[EngineUnderTest, Delivery], None]
) -> None:
    old = had_before_a_crash(engine)
    extend(engine, old)
    word(engine, old)
    engine.advance(seconds=6)
    again = engine.worker("w").lease()
    assert again.payload == (b"next" if word is reject else b"job")
    assert again.attempt == (2 if word is nack else 1)


def test_what_was_extended_late_and_not_settled_comes_again_after_its_deadline(make: MakeEngine) -> None:
    engine = make(delivery_timeout=30.0)
    old = had_before_a_crash(engine)
    extend(engine, old)
    worker = engine.worker("other")
    engine.advance(seconds=36)
    assert worker.lease().attempt == 2
    assert retaken(engine, old) is None


def test_no_late_word_counts_while_another_has_the_message(engine: EngineUnderTest) -> None:
    old = had_before_a_crash(engine)
    other = engine.worker("other")
    given = other.lease()
    assert retaken(engine, old) is None
    other.nack(given, delay=50.0)
    assert retaken(engine, old) is None, "it has failed with somebody else since"
    with pytest.raises(StaleDelivery):
        engine.engine.lease_of(engine.group(), old.name, old.token, "w")
    assert verify(engine.engine) == []


@pytest.mark.parametrize("word", [reject, nack, release, extend])
def test_who_was_given_it_again_itself_may_still_speak_of_it_by_the_old_token(
    engine: EngineUnderTest, word: Callable[[EngineUnderTest, Delivery], None]
) -> None:
    old = had_before_a_crash(engine)
    worker = engine.worker("w")
    again = worker.lease()
    assert again.payload == b"job"
    word(engine, old)
    assert engine.ledger().dead == (1 if word is reject else 0)
    assert engine.group().nacked == (1 if word is nack else 0)


@pytest.mark.parametrize("ordering", [STRICT, ANY_ORDER])
def test_a_late_word_does_not_pass_by_an_earlier_message_of_its_key(make: MakeEngine, ordering: int) -> None:
    engine = make(ordering=ordering, batch_size=1)
    engine.publish(b"first", key=b"k")
    engine.publish(b"second", key=b"k")
    engine.group()
    engine.restart()
    group = engine.group()
    pid = group.cursors[0].partition.pid
    lease = engine.engine.retake(group, message_id(pid, 1), NO_TOKEN, "w")
    assert (lease is None) == (ordering == STRICT), "as if the ack of the first had been lost"
    assert verify(engine.engine) == []
    assert engine.worker("other").payloads() == [b"first"]


def test_many_late_words_leave_the_rest_in_order(make: MakeEngine) -> None:
    engine = make(batch_size=3)
    for number in range(12):
        engine.publish(b"%d" % number, key=b"k" if number % 2 else b"other")
    held = engine.worker("w").lease_all()
    assert [one.payload for one in held] == [b"0", b"1", b"2", b"3", b"4", b"5"]
    engine.crash_and_restart()
    release(engine, held[3])
    nack(engine, held[0], delay=60.0)
    reject(engine, held[1])
    extend(engine, held[2])
    worker = engine.worker("w")
    assert worker.payloads() == [b"3", b"4", b"5", b"7"]
    done = worker.ack_all()
    for _ in range(2):
        engine.advance(seconds=36)  # 2 was not settled in time, and 0 waits for its retry
        done += worker.ack_all()
    assert sorted(done, key=int) == [b"%d" % n for n in range(12) if n != 1]
    assert engine.ledger().dead == 1 and verify(engine.engine) == []


def test_a_message_that_is_not_stored_yet_cannot_be_settled_by_a_token_of_a_previous_run() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    engine.group()
    assert keeper.store is not None
    keeper.store.hold()
    engine.publish(b"job")
    queue = engine.engine.queues["tasks"]
    name = message_id(queue.partitions[0].pid, 0)
    group = queue.groups["workers"]
    for token in (NO_TOKEN, Token(5, 1, 1)):
        assert not engine.engine.finish_late(group, name, token, "w")
        assert engine.engine.retake(group, name, token, "w") is None
    keeper.store.release()
    assert engine.worker("w").ack_all() == [b"job"]
