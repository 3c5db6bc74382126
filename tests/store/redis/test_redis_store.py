"""Tests of the Redis store beyond the contract: ownership, and warnings about Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import StoreError, StoreFailed, StoreLocked
from sluice.store.redis.connection import SingleChannel
from sluice.store.redis.errors import StoreFenced
from sluice.store.redis.keys import RedisKeys
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.scripts import WRITE
from tests.store.kit import StoreUnderTest, message, note
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_process import RedisCluster, RedisProcess


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return tmp_path.name


class Stores:
    def __init__(self, server: RedisProcess, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self.client = server.client()
        self.keys = RedisKeys(prefix)
        self._made: list[StoreUnderTest] = []

    def make(self, **options: float) -> StoreUnderTest:
        chosen = RedisOptions(prefix=self.prefix, **options)  # type: ignore[arg-type]
        made = StoreUnderTest(None, redis=self.server.url, options=chosen)
        self._made.append(made)
        return made

    def close(self) -> None:
        for made in self._made:
            made.store.close()
        self.client.close()


@pytest.fixture
def stores(redis_server: RedisProcess, prefix: str) -> Iterator[Stores]:
    made = Stores(redis_server, prefix)
    yield made
    made.close()


def test_store_with_a_live_owner_is_not_opened_twice(stores: Stores) -> None:
    stores.make(lease_seconds=0.6, renew_seconds=0.1).open()
    with pytest.raises(StoreLocked, match="open in another process"):
        stores.make().open()


def test_closed_store_is_free_at_once(stores: Stores) -> None:
    first = stores.make().open()
    first.commit(message(1, b"kept"))
    first.store.close()
    assert not stores.client.exists(stores.keys.lease)
    assert [record.body for record in stores.make().open().loaded.records] == [b"kept"]


def test_store_of_a_dead_owner_is_taken_over_when_the_lease_has_expired(stores: Stores) -> None:
    stores.client.set(stores.keys.lease, "gone", px=400)
    stores.client.set(stores.keys.fence, 7)
    store = stores.make().open()
    assert int(stores.client.get(stores.keys.fence) or 0) == 8
    store.commit(message(1))


def test_store_of_an_owner_known_dead_is_taken_over_at_once_and_fenced(
    stores: Stores,
) -> None:
    first = stores.make(lease_seconds=3600.0, renew_seconds=1000.0).open()
    first.commit(message(1, b"before"))
    owner = stores.make(force_takeover=True).open()
    owner.commit(message(2, b"by the new owner"))
    assert not first.try_commit(message(2, b"by the old owner"))
    assert isinstance(first.failures[0], StoreFenced)
    assert [record.body for record in owner.reopen().loaded.records] == [
        b"before",
        b"by the new owner",
    ]


def test_paused_owner_is_fenced_by_redis_after_a_takeover(stores: Stores) -> None:
    sleeper = stores.make(renew_seconds=1000.0).open()
    sleeper.commit(message(1, b"before"))
    stores.client.delete(stores.keys.lease)  # it has expired
    owner = stores.make().open()
    owner.commit(message(2, b"by the new owner"))
    assert not sleeper.try_commit(message(2, b"by the old owner"))
    assert isinstance(sleeper.failures[0], StoreFenced)
    assert [record.body for record in owner.reopen().loaded.records] == [
        b"before",
        b"by the new owner",
    ]


def test_paused_owner_learns_of_the_takeover_when_it_renews_too(stores: Stores) -> None:
    sleeper = stores.make(lease_seconds=1.0, renew_seconds=0.05).open()
    stores.client.incr(stores.keys.fence)
    sleeper.loop.turn_until(lambda: bool(sleeper.failures))
    assert isinstance(sleeper.failures[0], StoreFenced)


def test_expired_lease_without_a_new_owner_is_renewed(stores: Stores) -> None:
    store = stores.make(lease_seconds=5.0, renew_seconds=0.05).open()
    stores.client.delete(stores.keys.lease)
    store.commit(message(1, b"still ours"))
    pause = threading.Event()
    for _ in range(600):
        if stores.client.exists(stores.keys.lease):
            break
        pause.wait(0.05)
    assert stores.client.exists(stores.keys.lease)


def test_frame_with_a_lost_reply_is_not_stored_twice(stores: Stores) -> None:
    store = stores.make().open()
    store.commit(message(1, b"one"))
    stores.client.client_kill_filter(_type="normal", skipme=True)
    store.commit(message(2, b"two"), note(3, b"three"))
    stores.client.client_kill_filter(_type="normal", skipme=True)
    address = store.commit(message(4, b"four"))
    assert store.bodies(address) == [b"four"]
    assert [record.body for record in store.reopen().loaded.records] == [
        b"one",
        b"two",
        b"three",
        b"four",
    ]


def test_scripts_forgotten_by_redis_are_loaded_again(stores: Stores) -> None:
    store = stores.make().open()
    store.commit(message(1))
    stores.client.script_flush()
    store.commit(message(2))
    assert len(store.reopen().loaded.records) == 2


def test_frames_lost_by_redis_end_the_process(stores: Stores) -> None:
    store = stores.make().open()
    store.commit(message(1))
    stores.client.hset(stores.keys.log, "frame", 0)
    assert not store.try_commit(message(2))
    assert isinstance(store.failures[0], StoreFailed) and "lost" in str(store.failures[0])


def test_message_is_an_entry_of_the_stream_of_its_partition(stores: Stores) -> None:
    store = stores.make().open()
    store.commit(message(0, b"zero", pid=7), message(1, b"one", pid=7))
    entries = stores.client.xrange(stores.keys.base_key("7", 7))
    assert [entry[0] for entry in entries] == [b"0-1", b"1-1"]  # type: ignore[union-attr]


def test_unreachable_redis_is_reported(prefix: str) -> None:
    store = StoreUnderTest(None, redis="redis://127.0.0.1:1", prefix=prefix)
    with pytest.raises(StoreError, match="Redis cannot be used"):
        store.open()


def test_redis_that_may_lose_confirmed_writes_is_warned_about(tmp_path: Path) -> None:
    server = RedisProcess(
        tmp_path / "redis", appendonly="no", maxmemory="100mb", maxmemory_policy="allkeys-lru"
    ).start()
    try:
        store = StoreUnderTest(None, redis=server.url).open()
        warnings = " ".join(store.report.warnings)
        assert "appendonly yes" in warnings and "noeviction" in warnings
        server.client().config_set("appendonly", "yes")
        server.client().config_set("appendfsync", "everysec")
        assert "appendfsync always" in " ".join(store.reopen().report.warnings)
        store.store.close()
    finally:
        server.stop()


def test_delayed_duplicate_of_a_write_does_nothing(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    execute = SingleChannel.execute

    def execute_and_record(channel: SingleChannel, commands: Any, acks: Any = None) -> list[Any]:
        sent.extend(command for _, command in commands if WRITE.sha in command)
        return execute(channel, commands)

    store = stores.make().open()
    monkeypatch.setattr(SingleChannel, "execute", execute_and_record)
    store.commit(message(1, b"one"))
    store.snapshot(b"first")
    store.commit(message(2, b"two"))
    store.snapshot(b"second")
    for command in sent[:3]:
        assert stores.client.execute_command(*command) == 0
    store.reopen()
    assert store.loaded.snapshot == b"second"
    assert [row.seq for row in store.loaded.rows] == [1, 2]


def test_start_survives_broken_connections(stores: Stores, prefix: str) -> None:
    store = stores.make().open()
    store.commit(*[message(seq, b"x" * 500) for seq in range(200)])
    store.store.close()
    proxy = FaultProxy(stores.server.port)
    try:
        for count in (0, 150, 4000, 7000, 9000, 12_000):
            proxy.cut_after(count)
            again = StoreUnderTest(
                None, redis=f"redis://127.0.0.1:{proxy.port}", prefix=prefix
            ).open()
            assert len(again.loaded.records) == 200
            again.store.close()
    finally:
        proxy.close()


def test_stores_of_several_cells_share_a_cluster_in_their_own_slots(
    redis_cluster: RedisCluster, prefix: str
) -> None:
    made = []
    for cell in range(3):
        options = RedisOptions(prefix=f"{prefix}:c{cell}", tag=f"log:c{cell}")
        made.append(StoreUnderTest(None, redis=redis_cluster.url, options=options).open())
    client = redis_cluster.nodes[0].client()
    slots = {
        int(client.execute_command("CLUSTER", "KEYSLOT", f"{prefix}:c{n}:{{log:c{n}}}"))
        for n in range(3)
    }
    client.close()
    assert len(slots) == 3
    for cell, store in enumerate(made):
        store.commit(message(1, b"of %d" % cell))
    for cell, store in enumerate(made):
        assert [record.body for record in store.reopen().loaded.records] == [b"of %d" % cell]
        store.store.close()
