"""The coordination KV in Redis, for clusters without etcd: one script changes four keys.

The keys share one hash tag, and each node polls them.

      <base>:facts    hash    entries: key and value
      <base>:hung     hash    lease id of each entry that has a lease
      <base>:leases   zset    lease ids by expiry, in ms of the Redis clock
      <base>:rev      number  grows with every change, so that a poll without news is cheap

Every call first deletes expired leases, so no node sees an entry whose lease is over. Redis has
no majority, as etcd has: it may lose writes in a failover, and then the fences of the stores
keep a cell from having two owners.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from sluice.cluster.membership.coordinator import CoordinatorError
from sluice.cluster.membership.kv import Change, CoordinatorUnavailable, Lease
from sluice.store.redis import Argument, RedisChannel, RedisServer, is_transient

log = logging.getLogger(__name__)

REPLY_TIMEOUT_SECONDS: Final = 1.0
TOTAL_TIMEOUT_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.1
RETRY_SECONDS: Final = 0.05

SCRIPT: Final = b"""
local facts, leased, leases, rev = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function drop(id)
  redis.call('ZREM', leases, id)
  local pairs_of = redis.call('HGETALL', leased)
  for at = 1, #pairs_of, 2 do
    if pairs_of[at + 1] == id then
      redis.call('HDEL', facts, pairs_of[at])
      redis.call('HDEL', leased, pairs_of[at])
    end
  end
  redis.call('INCR', rev)
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do drop(id) end

local what, a, b, c, d = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if what == 'read' then
  local at = redis.call('GET', rev) or '0'
  if at == a then return {at} end
  return {at, redis.call('HGETALL', facts)}
elseif what == 'grant' then
  redis.call('ZADD', leases, now + b, a)
elseif what == 'keep' then
  if not redis.call('ZSCORE', leases, a) then return 0 end
  redis.call('ZADD', leases, now + b, a)
  return 1
elseif what == 'revoke' then
  if redis.call('ZSCORE', leases, a) then drop(a) end
elseif what == 'put' then
  if not redis.call('ZSCORE', leases, c) then
    return redis.error_reply('GONE the lease has ended')
  end
  redis.call('HSET', facts, a, b)
  redis.call('HSET', leased, a, c)
  redis.call('INCR', rev)
elseif what == 'swap' then
  local found = redis.call('HGET', facts, a) or ''
  if found == b and (d == '' or redis.call('HEXISTS', facts, d) == 1) then
    if c == '' then redis.call('HDEL', facts, a) else redis.call('HSET', facts, a, c) end
    redis.call('HDEL', leased, a)
    redis.call('INCR', rev)
    return c
  end
  return found
elseif what == 'evict' then
  local id = redis.call('HGET', leased, a)
  if id then drop(id) end
end
return 1
"""


class RedisKv:
    """A `CoordinationKv` in Redis. An empty value means that there is no entry."""

    def __init__(self, url: str, prefix: str, cluster: str) -> None:
        base = f"{prefix}:{{cluster:{cluster}}}"
        self._keys = [f"{base}:{name}" for name in ("facts", "hung", "leases", "rev")]
        self._reader = _ScriptRunner(url, self._keys)
        self._writer = _ScriptRunner(url, self._keys)  # separate: a write never waits for a poll
        self._watch_task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def watch(
        self,
        on_snapshot: Callable[[dict[str, bytes]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        self._watch_task = asyncio.get_running_loop().create_task(
            self._watch_loop(on_snapshot, on_changes)
        )

    async def close(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()
            await asyncio.gather(self._watch_task, return_exceptions=True)
            self._watch_task = None
        await asyncio.gather(self._reader.close(), self._writer.close())

    async def _watch_loop(
        self,
        on_snapshot: Callable[[dict[str, bytes]], None],
        on_changes: Callable[[Sequence[Change]], None],
    ) -> None:
        revision = b""
        entries: dict[str, bytes] | None = None
        while True:
            self._changed.clear()
            try:
                answer = await self._run("read", revision)
            except CoordinatorError as fault:
                log.warning("coordinator not reachable", extra={"fault": str(fault)})
                await asyncio.sleep(POLL_SECONDS)
                continue
            revision = answer[0]
            if len(answer) > 1:
                found = {
                    name.decode(): value for name, value in zip(answer[1][::2], answer[1][1::2])
                }
                if entries is None:
                    on_snapshot(dict(found))
                elif changes := _changes(entries, found):
                    on_changes(changes)
                entries = found
            try:
                async with asyncio.timeout(POLL_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def grant(self, seconds: float) -> Lease:
        lease = Lease(os.urandom(8).hex(), seconds)
        await self._run("grant", lease.id, _ms(seconds))
        return lease

    async def keep_alive(self, lease: Lease) -> bool:
        return bool(await self._run("keep", lease.id, _ms(lease.seconds), tries=1))

    async def revoke(self, lease: Lease) -> None:
        await self._write("revoke", lease.id)

    async def put_with_lease(self, key: str, value: bytes, lease: Lease) -> None:
        await self._write("put", key, value, lease.id)

    async def compare_and_swap(
        self, key: str, old: bytes | None, new: bytes | None, guard: str = ""
    ) -> bytes | None:
        found: bytes = await self._write("swap", key, old or b"", new or b"", guard)
        return found or None

    async def revoke_lease_of(self, key: str) -> None:
        await self._write("evict", key)

    async def _write(self, operation: str, *arguments: str | bytes) -> Any:
        answer = await self._run(operation, *arguments)
        self._changed.set()
        return answer

    async def _run(self, operation: str, *arguments: str | bytes, tries: int = 1000) -> Any:
        """Run the script, with retries until it answers or the deadline passes.

        Retries are safe: every operation of the script is idempotent.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + TOTAL_TIMEOUT_SECONDS
        runner = self._reader if operation == "read" else self._writer
        while True:
            tries -= 1
            try:
                return await runner.run((operation, *arguments))
            except (RedisError, RedisClusterException, OSError) as fault:
                if isinstance(fault, ResponseError) and not is_transient(fault):
                    raise CoordinatorError(f"Redis refused the command: {fault}") from None
                if loop.time() > deadline or tries <= 0:
                    raise CoordinatorUnavailable(
                        f"Redis does not answer: {str(fault) or 'in time'}",
                        "Start Redis, or correct the address in store",
                    ) from None
            await asyncio.sleep(RETRY_SECONDS)


class _ScriptRunner:
    """A connection to Redis and the thread that uses it.

    The store's channels support Redis Cluster and TLS but block; the event loop must not.
    """

    def __init__(self, url: str, keys: list[str]) -> None:
        self._url = url
        self._keys = keys
        self._thread = ThreadPoolExecutor(1, "sluice-redis-kv")
        self._link: RedisChannel | None = None
        self._closed = False

    async def run(self, arguments: Sequence[Argument]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, arguments)

    def _run(self, arguments: Sequence[Argument]) -> Any:
        try:
            if self._link is None:
                server = RedisServer(self._url, REPLY_TIMEOUT_SECONDS)
                server.detect()
                self._link = server.open_channel()
            command = ["EVAL", SCRIPT, len(self._keys), *self._keys, *arguments]
            return self._link.execute([(self._keys[0], command)])[0]
        except BaseException:
            self._close_link()
            raise

    def _close_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close_link)
        self._thread.shutdown(wait=False)


def _changes(old: dict[str, bytes], new: dict[str, bytes]) -> list[Change]:
    gone: list[Change] = [(key, None) for key in old if key not in new]
    return gone + [(key, value) for key, value in new.items() if old.get(key) != value]


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))
