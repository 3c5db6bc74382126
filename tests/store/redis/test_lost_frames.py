"""Tests of a Redis that lost confirmed frames: detected, recorded, reported until confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.errors import FramesLost
from sluice.store.changes import NoteDecoder
from sluice.store.redis.errors import StoreFenced
from sluice.store.redis.log.frame_losses import FrameLosses, confirm_loss
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.store import RedisStore
from tests.store.kit import StoreUnderTest, message
from tests.support.redis_process import FailoverPair, RedisProcess

NEVER = 600.0


class SingleQueueDecoder(NoteDecoder):
    """Maps every partition to the queue `jobs`."""

    def is_queue_partition(self, pid: int) -> bool:
        return True

    def locate_partition(self, pid: int) -> tuple[str, int] | None:
        return "jobs", pid


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[FailoverPair]:
    running = FailoverPair(tmp_path)
    yield running
    running.stop()


def open_store(pair: FailoverPair | RedisProcess, renew_seconds: float = NEVER) -> StoreUnderTest:
    options = RedisOptions(
        answer_seconds=2.0, wait_seconds=5.0, renew_seconds=renew_seconds, force_takeover=True
    )
    return StoreUnderTest(
        None, redis=pair.url, options=options, note_decoder=SingleQueueDecoder()
    ).open()


def recorded(under_test: StoreUnderTest) -> FrameLosses:
    assert isinstance(under_test.store, RedisStore)
    return under_test.store.losses


def failure_of(under_test: StoreUnderTest) -> Exception:
    under_test.loop.turn_until(lambda: bool(under_test.failures))
    return under_test.failures[0]


def confirm(pair: FailoverPair, last: int) -> bool:
    return confirm_loss(pair.url, "sluice", 2.0, "log", last)


def test_failover_to_an_up_to_date_replica_loses_nothing(pair: FailoverPair) -> None:
    store = open_store(pair)
    store.commit(message(0), message(1))
    pair.wait_until_level()
    pair.fail_over()
    store.commit(message(2))
    assert recorded(store.reopen()) == FrameLosses()
    assert [record.seq for record in store.loaded.records] == [0, 1, 2]
    store.store.close()


def test_failover_to_a_lagging_replica_names_lost_frames_until_confirmed(
    pair: FailoverPair,
) -> None:
    store = open_store(pair)
    store.commit(message(0))
    pair.wait_until_level()
    pair.fall_behind()
    store.commit(message(1), message(2))
    store.commit(message(3))
    pair.fail_over()
    assert not store.try_commit(message(4)), "a frame after lost ones is not confirmed"
    lost = failure_of(store)
    assert isinstance(lost, FramesLost)
    assert (lost.first, lost.last, lost.queues) == (2, 3, {"jobs": 3})
    assert "frames 2 to 3" in str(lost) and "jobs: 3" in str(lost)
    for _ in range(2):
        found = recorded(store.reopen())
        assert found.total == 2
        assert found.unconfirmed is not None
        assert (found.unconfirmed.first, found.unconfirmed.last) == (2, 3)
        assert found.unconfirmed.queues == {"jobs": 3} and found.unconfirmed.times == 1
        assert any("2 to 3" in note and "sluice losses" in note for note in store.report.warnings)
    assert [record.seq for record in store.loaded.records] == [0]
    assert not confirm(pair, 2), "a confirmation of another loss has no effect"
    assert confirm(pair, 3)
    assert recorded(store.reopen()) == FrameLosses(2)
    assert not any("lost" in note for note in store.report.warnings)
    store.store.close()


def test_broker_that_writes_nothing_detects_the_loss_with_the_next_lease_renewal(
    pair: FailoverPair,
) -> None:
    store = open_store(pair, renew_seconds=0.05)
    store.commit(message(0))
    pair.wait_until_level()
    pair.fall_behind()
    store.commit(message(1))
    pair.fail_over()
    lost = failure_of(store)
    assert isinstance(lost, FramesLost) and (lost.first, lost.last) == (2, 2)
    store.store.close()


@pytest.mark.parametrize("renew_seconds", [NEVER, 0.05])
def test_replica_from_before_this_owner_is_distinguished_from_another_owner(
    pair: FailoverPair, renew_seconds: float
) -> None:
    store = open_store(pair, renew_seconds)
    store.commit(message(0))
    pair.wait_until_level()
    pair.fall_behind()
    store.reopen()  # as a new owner, with a token that the replica does not have
    store.commit(message(1))
    pair.fail_over()
    if renew_seconds == NEVER:
        assert not store.try_commit(message(2))
    lost = failure_of(store)
    assert isinstance(lost, FramesLost) and (lost.first, lost.last) == (2, 2)
    store.store.close()


def test_redis_that_returns_empty_has_lost_every_frame(tmp_path: Path) -> None:
    running = RedisProcess(tmp_path / "redis", appendonly="no").start()
    try:
        store = open_store(running)
        store.commit(message(0))
        store.commit(message(1))
        running.kill()
        running.start()
        assert not store.try_commit(message(2))
        lost = failure_of(store)
        assert isinstance(lost, FramesLost) and (lost.first, lost.last) == (1, 2)
        found = recorded(store.reopen()).unconfirmed
        assert found is not None and found.frames == 2
        store.store.close()
    finally:
        running.stop()


def test_owner_that_was_replaced_reports_no_loss(pair: FailoverPair) -> None:
    first = open_store(pair)
    first.commit(message(0))
    second = open_store(pair)
    second.commit(message(1))
    assert not first.try_commit(message(2))
    assert isinstance(failure_of(first), StoreFenced)
    assert recorded(second.reopen()) == FrameLosses()
    second.store.close()
    first.store.close()


def test_second_loss_before_the_first_is_confirmed_adds_up(tmp_path: Path) -> None:
    running = RedisProcess(tmp_path / "redis").start()
    try:
        store = open_store(running)
        for nth in range(3):
            store.commit(message(nth))
        client = running.client()
        for count in (1, 2):
            client.hincrby("sluice:{log}", "frame", -count)
            assert not store.try_commit(message(9))
            store.failures.clear()
            client.hset("sluice:{log}", "frame", 3)  # the log itself is unchanged
            store.reopen()
        found = recorded(store)
        assert found.total == 3 and found.unconfirmed is not None
        assert (found.unconfirmed.first, found.unconfirmed.last) == (2, 3)
        assert found.unconfirmed.times == 2 and found.unconfirmed.queues == {"jobs": 1}
        store.store.close()
    finally:
        running.stop()


def test_replicas_without_min_replicas_to_write_are_warned_about_at_start(
    pair: FailoverPair,
) -> None:
    store = open_store(pair)
    assert any("min-replicas-to-write" in note for note in store.report.warnings)
    pair.master.client().config_set("min-replicas-to-write", 1)
    store.reopen()
    assert not any("min-replicas-to-write" in note for note in store.report.warnings)
    store.store.close()
