"""The shell round the engine: commits, wake-ups, and those who ask from outside."""

from __future__ import annotations

import pytest

from sluice.queues.engine import Engine
from sluice.queues.log.broker_state import Kept
from sluice.queues.model.queue_rules import Rules
from sluice.queues.commit_loop import Runner
from sluice.store.memory import MemoryStore
from tests.queues.kit import EngineUnderTest, Loop, MemoryKeeper, parse_rules


def test_when_kept_calls_back_after_the_commit_of_all_so_far_and_not_of_what_comes_later() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    engine.queue()
    assert keeper.store is not None
    keeper.store.hold()
    engine.publish(b"under way")
    engine.send(b"in the next frame")
    called: list[int] = []
    engine.runner.when_kept(lambda: called.append(len(engine.author.receipts)))
    for number in range(5):
        engine.publish(b"%d" % number)
        keeper.store.release(1)
        engine.send(b"and so on")  # there is always something more to commit
        engine.settle_down()
    assert called == [2 + 1], (
        "with the frame that it was asked in: the second, which took the first publish along"
    )


def test_when_kept_calls_back_at_once_when_all_is_kept(engine: EngineUnderTest) -> None:
    called: list[int] = []
    engine.runner.when_kept(lambda: called.append(1))
    assert called == [1]


def test_the_engine_is_woken_when_something_is_due_and_not_before(engine: EngineUnderTest) -> None:
    assert engine.loop.next_timer() == 0.0
    engine.queue(message_ttl=0.0)
    engine.publish(b"later", delay=60)
    assert engine.loop.next_timer() == engine.loop.now + 60


def test_settlements_wait_a_moment_for_something_to_ride_with() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    engine.runner._settle_seconds = 0.01
    worker = engine.worker()
    engine.publish(b"1")
    engine.publish(b"2")
    assert keeper.store is not None
    first, second = worker.lease_all()
    before = keeper.store.next_frame()
    worker.ack(first)
    assert keeper.store.next_frame() == before
    engine.advance(seconds=0.02)
    after = keeper.store.next_frame()
    assert after > before
    worker.ack(second)
    engine.publish(b"3")
    assert engine.author.receipts == [1, 2, 3], "nobody waits for a settlement"
    engine.verify()


def test_close_keeps_what_was_decided_last() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    worker = engine.worker()
    engine.publish(b"job")
    engine.engine.ack(worker.lease().lease)  # the turn has not ended
    engine.restart()
    assert engine.depth() == 0


def test_nothing_happens_after_close() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    engine.worker()
    engine.send(b"job")
    engine.runner.end_turn()
    engine.runner.close()
    engine.loop.turn(keeper.is_busy)
    assert engine.author.receipts == []
    engine.runner.close()


def test_look_reads_what_is_kept_and_says_what_is_gone(engine: EngineUnderTest) -> None:
    engine.group()
    engine.publish(b"here")
    engine.publish(b"gone")
    partition = engine.queue().partitions[0]
    engine.engine.remove_for_all(partition, 1, 3)
    found: list[bytes | None] = []
    engine.runner.look(
        [(partition, 0), (partition, 1)],
        lambda messages: found.extend(None if one is None else one.payload for one in messages),
    )
    engine.settle_down()
    assert found == [b"here", None]


def test_the_secret_of_tokens_survives_a_power_cut_once_the_broker_serves() -> None:
    keeper = MemoryKeeper()
    engine = EngineUnderTest(keeper)
    secret = engine.engine.tokens.secret
    keeper.cut_power()
    engine.start_again()
    assert engine.engine.tokens.secret == secret


def test_a_broker_is_restored_after_its_secret_of_tokens_is_stored() -> None:
    loop, store = Loop(), MemoryStore(lambda call, *arguments: loop.call_soon(call, *arguments))
    engine = Engine(lambda name: (Rules(name), "{}"), lambda: 0.5)
    runner = Runner(engine, store, loop.clock, loop.call_later, lambda: None, lambda alerts, warnings: None)
    runner.open(parse_rules)
    store.hold()
    restored: list[list[Kept]] = []
    runner.restore(restored.append)
    loop.turn(lambda: False)
    assert (restored, store.unsynced()) == ([], 1)
    store.release()
    loop.turn(lambda: False)
    assert (restored, store.unsynced()) == ([[]], 0)


@pytest.mark.parametrize("waits", [False, True])
def test_a_salvage_ends_with_a_snapshot_also_when_records_wait(waits: bool) -> None:
    keeper = MemoryKeeper(segment_bytes=4_000, snapshot_bytes=1 << 20)
    engine = EngineUnderTest(keeper)
    engine.engine.keeping.is_whole = False  # no snapshot while the broker is restored
    for _ in range(5):
        engine.publish(bytes(1_000))
    engine.engine.keeping.is_whole = True
    assert engine.store.wants_snapshot()
    if waits:
        engine.send(b"in the open frame")
    engine.runner.leave_damage_behind()
    engine.loop.turn(keeper.is_busy)
    assert not engine.store.wants_snapshot()
    engine.crash_and_restart()
    assert engine.depth() == 5 + waits
