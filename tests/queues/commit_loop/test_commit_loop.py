"""The commit loop: commits, wake-ups, and its interface for other callers."""

from __future__ import annotations

import pytest

from sluice.queues.commit_loop import CommitLoop, read_messages
from sluice.queues.engine import Engine
from sluice.queues.log.broker_state import RestoredRecord
from sluice.queues.model.queue_rules import QueueRules
from sluice.store.memory import MemoryStore
from tests.queues.kit import EngineUnderTest, Loop, MemoryBackend, parse_rules


def test_after_commit_calls_back_after_everything_before_it_is_committed() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    engine.queue()
    assert backend.store is not None
    backend.store.hold()
    engine.publish(b"in commit")
    engine.send(b"in the next frame")
    called: list[int] = []
    engine.commit_loop.after_commit(lambda: called.append(len(engine.publisher.receipts)))
    for number in range(5):
        engine.publish(b"%d" % number)
        backend.store.release(1)
        engine.send(b"and so on")  # there is always more to commit
        engine.run_until_idle()
    assert called == [2 + 1], (
        "with the open frame of the call: the second, which includes the first publish"
    )


def test_after_commit_calls_back_at_once_when_nothing_is_pending(engine: EngineUnderTest) -> None:
    called: list[int] = []
    engine.commit_loop.after_commit(lambda: called.append(1))
    assert called == [1]


def test_engine_is_woken_only_when_something_is_due(engine: EngineUnderTest) -> None:
    assert engine.loop.next_timer() == 0.0
    engine.queue(message_ttl=0.0)
    engine.publish(b"later", delay=60)
    assert engine.loop.next_timer() == engine.loop.now + 60


def test_settlements_wait_a_moment_to_share_a_commit() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    engine.commit_loop._settlement_delay_seconds = 0.01
    worker = engine.worker()
    engine.publish(b"1")
    engine.publish(b"2")
    assert backend.store is not None
    first, second = worker.lease_all()
    before = backend.store.next_frame_address()
    worker.ack(first)
    assert backend.store.next_frame_address() == before
    engine.advance(seconds=0.02)
    after = backend.store.next_frame_address()
    assert after > before
    worker.ack(second)
    engine.publish(b"3")
    assert engine.publisher.receipts == [1, 2, 3], "a publish does not wait for settlements"
    engine.verify()


def test_close_commits_the_last_changes() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    worker = engine.worker()
    engine.publish(b"job")
    engine.engine.settlement.ack(worker.lease().lease)  # the turn has not ended
    engine.restart()
    assert engine.depth() == 0


def test_nothing_happens_after_close() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    engine.worker()
    engine.send(b"job")
    engine.commit_loop.end_turn()
    engine.commit_loop.close()
    engine.loop.turn(backend.is_busy)
    assert engine.publisher.receipts == []
    engine.commit_loop.close()


def test_read_messages_returns_stored_bodies_and_reports_deleted_ones(
    engine: EngineUnderTest,
) -> None:
    engine.group()
    engine.publish(b"stored")
    engine.publish(b"deleted")
    partition = engine.queue().partitions[0]
    engine.engine.removal.remove_for_all_groups(partition, 1, 3)
    found: list[bytes | None] = []
    read_messages(
        engine.commit_loop,
        [(partition, 0), (partition, 1)],
        lambda messages: found.extend(None if one is None else one.payload for one in messages),
    )
    engine.run_until_idle()
    assert found == [b"stored", None]


def test_token_secret_survives_a_power_cut_once_the_broker_serves() -> None:
    backend = MemoryBackend()
    engine = EngineUnderTest(backend)
    secret = engine.engine.tokens.secret
    backend.cut_power()
    engine.reopen()
    assert engine.engine.tokens.secret == secret


def test_broker_state_is_restored_after_the_token_secret_is_stored() -> None:
    loop, store = Loop(), MemoryStore(lambda call, *arguments: loop.call_soon(call, *arguments))
    engine = Engine(lambda name: (QueueRules(name), "{}"), lambda: 0.5)
    commit_loop = CommitLoop(
        engine, store, loop.clock, loop.call_later, lambda: None, lambda alerts, warnings: None
    )
    commit_loop.open(parse_rules)
    store.hold()
    restored: list[list[RestoredRecord]] = []
    commit_loop.restore_broker_state(restored.append)
    loop.turn(lambda: False)
    assert (restored, store.count_unsynced()) == ([], 1)
    store.release()
    loop.turn(lambda: False)
    assert (restored, store.count_unsynced()) == ([[]], 0)


@pytest.mark.parametrize("has_pending", [False, True])
def test_salvage_ends_with_a_snapshot_even_with_pending_records(has_pending: bool) -> None:
    backend = MemoryBackend(segment_bytes=4_000, snapshot_bytes=1 << 20)
    engine = EngineUnderTest(backend)
    engine.engine.broker_state.is_restored = False  # no snapshot while the broker is restored
    for _ in range(5):
        engine.publish(bytes(1_000))
    engine.engine.broker_state.is_restored = True
    assert engine.store.is_snapshot_due()
    if has_pending:
        engine.send(b"in the open frame")
    engine.commit_loop.housekeeping.snapshot_after_salvage()
    engine.loop.turn(backend.is_busy)
    assert not engine.store.is_snapshot_due()
    engine.crash_and_restart()
    assert engine.depth() == 5 + has_pending
