"""Tests of `redis.min_replicas`: nothing is stored before that many replicas acknowledge it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from sluice.errors import FramesLost, StoreError
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.store import RedisStore
from tests.store.kit import StoreUnderTest, message
from tests.support.external_programs import need_valkey
from tests.support.redis_process import RedisProcess
from tests.support.redis_topologies import ReplicatedRedis

NEVER = 600.0
STREAM = "sluice:{1}:1"


@pytest.fixture
def servers(redis_folder: Path, tmp_path: Path) -> Iterator[ReplicatedRedis]:
    made = ReplicatedRedis(redis_folder / tmp_path.name, sentinels=0).start()
    yield made
    made.stop()


@pytest.fixture
def valkey(redis_folder: Path, tmp_path: Path) -> Iterator[ReplicatedRedis]:
    """A server with WAITAOF."""
    folder = redis_folder / tmp_path.name
    made = ReplicatedRedis(folder, sentinels=0, program=need_valkey()).start()
    yield made
    made.stop()


class Stalls:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)


def make_store(
    servers: ReplicatedRedis | RedisProcess,
    stalls: Callable[[str], None] | None = None,
    renew_seconds: float = NEVER,
    on_disk: bool = False,
    replica_timeout_seconds: float = 0.1,
) -> StoreUnderTest:
    options = RedisOptions(
        answer_seconds=5.0,
        wait_seconds=0.2,
        lease_seconds=NEVER,
        renew_seconds=renew_seconds,
        force_takeover=True,
        min_replicas=1,
        replicas_on_disk=on_disk,
        replica_timeout_seconds=replica_timeout_seconds,
    )
    return StoreUnderTest(
        None, redis=servers.url, options=options, on_stall=stalls if stalls else lambda reason: None
    )


class Pending:
    """A commit that is not acknowledged yet."""

    def __init__(self, store: StoreUnderTest, seq: int) -> None:
        self._store = store
        self.is_done = False
        store.start_commit(message(seq, b"%d" % seq), done=self._finish)

    def _finish(self) -> None:
        self.is_done = True

    def finish(self) -> None:
        self._store.loop.turn_until(lambda: self.is_done or bool(self._store.failures))
        assert not self._store.failures, self._store.failures


def timeouts(store: StoreUnderTest) -> int:
    assert isinstance(store.store, RedisStore)
    return store.store.replica_timeouts


def wait_for_timeouts(store: StoreUnderTest, count: int) -> None:
    """Wait until the writer has tried this many times in vain."""
    goal = timeouts(store) + count
    while timeouts(store) < goal:
        assert not store.failures
        store.loop.turn_once()


def entries(server: RedisProcess) -> list[bytes]:
    client: redis.Redis = server.client()
    found: list[bytes] = [entry for entry, _ in client.xrange(STREAM)]  # type: ignore[misc,union-attr]
    client.close()
    return found


def test_commit_is_acknowledged_when_the_replica_has_it(servers: ReplicatedRedis) -> None:
    store = make_store(servers, replica_timeout_seconds=4.0).open()
    assert store.report.warnings == []
    for seq in range(20):
        store.commit(message(seq))
        assert len(entries(servers.replicas[0])) == seq + 1, "without waiting: it is there already"
    assert timeouts(store) == 0
    store.store.close()


def test_commit_is_held_while_the_replica_hangs_and_is_stored_once(
    servers: ReplicatedRedis,
) -> None:
    stalls = Stalls()
    store = make_store(servers, stalls).open()
    servers.replicas[0].pause()
    held = Pending(store, 0)
    wait_for_timeouts(store, 3)
    assert not held.is_done
    store.loop.turn_until(lambda: bool(stalls.reasons))
    assert "0 of 1 replicas" in stalls.reasons[0] and "redis.min_replicas" in stalls.reasons[0]
    servers.replicas[0].resume()
    held.finish()
    store.loop.turn_until(lambda: stalls.reasons[-1] == "")
    assert len(entries(servers.master)) == 1
    store.commit(message(1))
    assert [record.seq for record in store.reopen().loaded.records] == [0, 1]
    store.store.close()


def test_repeat_over_a_new_connection_waits_for_replicas_too(servers: ReplicatedRedis) -> None:
    """WAIT covers what its own connection has written, and a repeated write is done already."""
    store = make_store(servers).open()
    servers.replicas[0].pause()
    held = Pending(store, 0)
    wait_for_timeouts(store, 1)
    for _ in range(3):
        servers.master.client().client_kill_filter(_type="normal", skipme=True)
        wait_for_timeouts(store, 1)
        assert not held.is_done
    servers.replicas[0].resume()
    held.finish()
    assert len(entries(servers.replicas[0])) == 1
    store.store.close()


def test_failover_to_a_replica_that_is_behind_loses_nothing_acknowledged(
    servers: ReplicatedRedis,
) -> None:
    store = make_store(servers).open()
    store.commit(message(0))
    replica = servers.replicas[0]
    replica.client().execute_command("REPLICAOF", "NO", "ONE")
    held = Pending(store, 1)
    wait_for_timeouts(store, 2)
    assert not held.is_done, "only the master has it"
    servers.master.kill()
    servers.master = replica  # for `url`
    options = RedisOptions(force_takeover=True)
    promoted = StoreUnderTest(None, redis=servers.url, options=options).open()
    assert [record.seq for record in promoted.loaded.records] == [0]
    promoted.store.close()
    store.store.close()


def test_missing_replica_is_warned_about_at_start_and_reported_before_anyone_publishes(
    redis_server: RedisProcess,
) -> None:
    stalls = Stalls()
    store = make_store(redis_server, stalls, renew_seconds=0.05).open()
    warnings = " ".join(store.report.warnings)
    assert "fewer replicas (0) than redis.min_replicas (1)" in warnings
    store.loop.turn_until(lambda: bool(stalls.reasons))
    assert "0 of 1 replicas" in stalls.reasons[0]
    assert not store.failures
    store.store.close()


def test_shortage_ends_when_the_replica_is_back(servers: ReplicatedRedis) -> None:
    stalls = Stalls()
    store = make_store(servers, stalls, renew_seconds=0.05).open()
    servers.replicas[0].pause()
    store.loop.turn_until(lambda: bool(stalls.reasons))
    servers.replicas[0].resume()
    store.loop.turn_until(lambda: stalls.reasons[-1] == "")
    store.store.close()


def test_failover_before_replicas_know_the_owner_is_no_other_owner(
    servers: ReplicatedRedis,
) -> None:
    options = RedisOptions(force_takeover=True, lease_seconds=NEVER, renew_seconds=NEVER)
    store = StoreUnderTest(None, redis=servers.url, options=options).open()
    store.commit(message(0))
    servers.master.client().decr("sluice:{log}:fence")  # as the replica would have it
    assert not store.try_commit(message(1))
    assert not isinstance(store.failures[0], FramesLost)
    assert "failed over" in str(store.failures[0]) and "Start this broker again" in str(
        store.failures[0].remedy  # type: ignore[attr-defined]
    )
    store.store.close()


def test_disk_acknowledgement_is_refused_where_redis_has_no_waitaof(
    redis_server: RedisProcess,
) -> None:
    with pytest.raises(StoreError, match="has no WAITAOF") as refusal:
        make_store(redis_server, on_disk=True).open()
    assert "Redis 7.2" in refusal.value.remedy


def test_disk_acknowledgement_is_refused_without_an_append_only_file(
    valkey: ReplicatedRedis,
) -> None:
    valkey.master.client().config_set("appendonly", "no")
    with pytest.raises(StoreError, match="appendonly no"):
        make_store(valkey, on_disk=True).open()


def test_disk_acknowledgement_waits_until_the_replica_has_it_on_disk(
    valkey: ReplicatedRedis,
) -> None:
    store = make_store(valkey, on_disk=True).open()
    store.commit(message(0))
    replica = valkey.replicas[0].client()
    replica.config_set("appendonly", "no")  # in memory it still has every write
    held = Pending(store, 1)
    wait_for_timeouts(store, 3)
    assert not held.is_done
    assert len(entries(valkey.replicas[0])) == 2
    replica.config_set("appendonly", "yes")
    held.finish()
    assert len(entries(valkey.master)) == 2
    store.store.close()
