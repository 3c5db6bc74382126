"""Logs of finished jobs, for handlers that must not run a job twice.

Delivery is at least once, so a job can be redelivered after it was done: its ack was lost with the
connection. A deduplication store holds the ids of finished jobs, and the worker skips them. The
worker checks the store before the handler and adds the id after it. A crash in between repeats the
job, so a handler that moves money stores the id in its own transaction.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from sluice.errors import ConfigError
from sluice.units import parse_duration

if TYPE_CHECKING:
    from redis.asyncio import Redis

DEFAULT_RETENTION: Final = "7d"  # the default retention of a queue
SWEEP_EVERY: Final = 1000  # added ids between two deletions of old ones


class DeduplicationStore(Protocol):
    """Stores finished jobs. `key` identifies a job: its queue, its group and its message id."""

    async def has(self, key: str) -> bool: ...

    async def add(self, key: str) -> None:
        """Store a key. After the return, `has` returns True for it."""

    async def close(self) -> None: ...


class MemoryDeduplication:
    """The last `limit` ids, in memory."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._keys: OrderedDict[str, None] = OrderedDict()

    async def has(self, key: str) -> bool:
        return key in self._keys

    async def add(self, key: str) -> None:
        self._keys[key] = None
        if len(self._keys) > self._limit:
            self._keys.popitem(last=False)

    async def close(self) -> None:
        pass


class SqliteDeduplication:
    """Ids in an SQLite file, for `keep`. Processes on the same machine may share it."""

    def __init__(
        self,
        path: str | Path,
        keep: str = DEFAULT_RETENTION,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._path = Path(path)
        self._keep_seconds = parse_duration(keep)
        self._clock = clock
        self._added = 0
        self._lock = asyncio.Lock()
        self._database: sqlite3.Connection | None = None

    async def has(self, key: str) -> bool:
        async with self._lock:
            return await asyncio.to_thread(self._has, key)

    async def add(self, key: str) -> None:
        async with self._lock:
            await asyncio.to_thread(self._add, key)

    async def close(self) -> None:
        async with self._lock:
            if self._database is not None:
                self._database.close()
                self._database = None

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._database = sqlite3.connect(
                self._path, check_same_thread=False, isolation_level=None, timeout=30
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS done (key TEXT PRIMARY KEY, at REAL) WITHOUT ROWID"
            )
            self._database.execute("CREATE INDEX IF NOT EXISTS done_at ON done (at)")
        return self._database

    def _has(self, key: str) -> bool:
        since = self._clock() - self._keep_seconds
        row = (
            self._open()
            .execute("SELECT 1 FROM done WHERE key = ? AND at > ?", (key, since))
            .fetchone()
        )
        return row is not None

    def _add(self, key: str) -> None:
        database = self._open()
        now = self._clock()
        database.execute("INSERT OR REPLACE INTO done VALUES (?, ?)", (key, now))
        self._added += 1
        if self._added % SWEEP_EVERY == 0:
            database.execute("DELETE FROM done WHERE at <= ?", (now - self._keep_seconds,))


class RedisDeduplication:
    """Ids in Redis, for `keep`, shared by workers on several machines.

    Needs `pip install sluice[redis]`.
    """

    def __init__(
        self,
        url: str = "redis://127.0.0.1:6379/0",
        keep: str = DEFAULT_RETENTION,
        prefix: str = "sluice:done:",
    ) -> None:
        try:
            from redis.asyncio import Redis
        except ImportError as missing:
            raise ConfigError(
                "RedisDeduplication needs the package redis", "pip install 'sluice[redis]'"
            ) from missing
        self._redis: Redis = Redis.from_url(url)
        self._keep_ms = round(parse_duration(keep) * 1000)
        self._prefix = prefix

    async def has(self, key: str) -> bool:
        return bool(await self._redis.exists(self._prefix + key))

    async def add(self, key: str) -> None:
        await self._redis.set(self._prefix + key, b"1", px=self._keep_ms)

    async def close(self) -> None:
        await self._redis.aclose()
