"""Tests of a long outage of Redis: hundreds of failed connections, then a successful one.

redis-py bounds a pool by the connections that it has handed out, 100 from version 8 on. These
tests refuse several times that many, so they fail on any version whose bound is reached by
connections that are not returned.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
import redis
from redis.exceptions import RedisClusterException, RedisError

from sluice.cluster.membership.coordinator import CoordinatorError
from sluice.cluster.membership.redis_kv import RedisKv
from sluice.store.redis.connection import RedisServer
from sluice.store.redis.log import reader, writer
from sluice.store.redis.options import RedisOptions
from tests.store.kit import StoreUnderTest, message
from tests.support.redis_process import RedisCluster, RedisProcess

REFUSALS = 330


class Attempts:
    """Counts the connections that redis-py tries to open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        connect = redis.Connection.connect

        def counted(connection: redis.Connection) -> None:
            self.count += 1
            connect(connection)

        monkeypatch.setattr(redis.Connection, "connect", counted)


def test_connection_recovers_after_hundreds_of_refused_connections(tmp_path: Path) -> None:
    running = RedisProcess(tmp_path / "redis").start()
    try:
        server = RedisServer(running.url, 1.0)
        server.detect()
        link = server.open_channel()
        assert link.execute([("key", ["SET", "key", "before"])]) == [b"OK"]
        running.kill()
        for _ in range(REFUSALS):
            with pytest.raises(RedisError):
                link.execute([("key", ["GET", "key"])])
        running.start()
        assert link.execute([("key", ["GET", "key"])]) == [b"before"]
        link.close()
        server.close()
    finally:
        running.stop()


def test_connection_to_redis_cluster_recovers_after_hundreds_of_refusals(tmp_path: Path) -> None:
    running = RedisCluster(tmp_path).start()
    try:
        server = RedisServer(running.url, 1.0)
        server.detect()
        link = server.open_channel()
        assert link.execute([("key", ["SET", "key", "before"])]) == [b"OK"]
        for node in running.nodes:
            node.kill()
        for _ in range(REFUSALS):
            with pytest.raises((RedisError, RedisClusterException)):
                link.execute([("key", ["GET", "key"])])
        for node in running.nodes:
            node.start()
        assert _retry_until_answered(link) == [b"before"]
        link.close()
        server.close()
    finally:
        running.stop()


def test_store_writes_and_reads_after_hundreds_of_refused_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MIN_BACKOFF_SECONDS", "_MAX_BACKOFF_SECONDS"):
        monkeypatch.setattr(writer, name, 0.0005)
    monkeypatch.setattr(reader, "_PAUSE_SECONDS", 0.0005)
    running = RedisProcess(tmp_path / "redis").start()
    stalls: list[str] = []
    options = RedisOptions(
        answer_seconds=0.5,
        wait_seconds=0.05,
        renew_seconds=0.0005,
        lease_seconds=60.0,
    )
    under_test = StoreUnderTest(None, redis=running.url, options=options, on_stall=stalls.append)
    under_test.open()
    try:
        address = under_test.commit(message(0, b"before"))
        attempts = Attempts(monkeypatch)
        running.kill()
        written: list[bool] = []
        found: list[list[bytes | None]] = []
        under_test.start_commit(message(1, b"during"), done=lambda: written.append(True))
        under_test.store.read(address, found.append)
        while attempts.count < 3 * REFUSALS:  # by the writer, the reader and the lease renewer
            assert not under_test.failures
            under_test.loop.turn_once()
        assert not written and not found
        running.start()
        under_test.loop.turn_until(lambda: bool(written and found) or bool(under_test.failures))
        assert not under_test.failures
        assert found[0][0] is not None
        under_test.loop.turn_until(lambda: not stalls or stalls[-1] == "")
    finally:
        if running.is_dead():
            running.start()
        under_test.store.close()
        running.stop()


@pytest.mark.parametrize("kind", [RedisProcess, RedisCluster])
async def test_redis_coordinator_recovers_after_hundreds_of_refused_connections(
    kind: type[RedisProcess] | type[RedisCluster], tmp_path: Path
) -> None:
    running = kind(tmp_path / "redis").start()
    nodes = running.nodes if isinstance(running, RedisCluster) else [running]
    board = RedisKv(running.url, "sluice", "west")
    try:
        assert await board.compare_and_swap("name", None, b"value") == b"value"
        lease = await board.grant(600.0)
        for node in nodes:
            node.kill()
        for _ in range(REFUSALS):
            with pytest.raises(CoordinatorError):
                await board.keep_alive(lease)  # has no retries of its own
        for node in nodes:
            node.start()
        assert (
            await asyncio.wait_for(board.compare_and_swap("name", None, b"other"), 10.0) == b"value"
        )
    finally:
        await board.close()
        running.stop()


def _retry_until_answered(link: object) -> object:
    """Retry, because nodes of a Redis Cluster refuse commands for a moment after a restart."""
    for _ in range(REFUSALS):
        try:
            return link.execute([("key", ["GET", "key"])])  # type: ignore[attr-defined]
        except (RedisError, RedisClusterException):
            time.sleep(0.05)
    raise AssertionError("no answer")
