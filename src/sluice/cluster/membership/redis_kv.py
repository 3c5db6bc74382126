"""The board in Redis, for clusters without etcd: four keys with one hash tag, changed by one script, looked at often.

      <base>:facts    hash    what is pinned
      <base>:hung     hash    under which lease, for those that hang on one
      <base>:leases   zset    leases by when they end, in ms of Redis' own clock
      <base>:rev      number  grows with every change, so that a look at a board without news is cheap

Leases that have ended are cleared away by whoever comes next, before anything else: nobody sees a fact whose lease is
over. What Redis forgets in a failover the fences of the stores make up for; a majority, which etcd has, it has not.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from sluice.cluster.membership.kv import BoardUnavailable, Change, Lease
from sluice.cluster.membership.coordinator import CoordinatorError
from sluice.store.redis.errors import passes
from sluice.store.redis.connection import Link, Server, Word

log = logging.getLogger(__name__)

ANSWER_SECONDS: Final = 1.0
PATIENCE_SECONDS: Final = 5.0
LOOK_SECONDS: Final = 0.1
PAUSE_SECONDS: Final = 0.05

SCRIPT: Final = b"""
local facts, hung, leases, rev = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function drop(id)
  redis.call('ZREM', leases, id)
  local pairs_of = redis.call('HGETALL', hung)
  for at = 1, #pairs_of, 2 do
    if pairs_of[at + 1] == id then
      redis.call('HDEL', facts, pairs_of[at])
      redis.call('HDEL', hung, pairs_of[at])
    end
  end
  redis.call('INCR', rev)
end

for _, id in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', now)) do drop(id) end

local what, a, b, c, d = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
if what == 'look' then
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
elseif what == 'pin' then
  if not redis.call('ZSCORE', leases, c) then return redis.error_reply('GONE the lease has ended') end
  redis.call('HSET', facts, a, b)
  redis.call('HSET', hung, a, c)
  redis.call('INCR', rev)
elseif what == 'swap' then
  local found = redis.call('HGET', facts, a) or ''
  if found == b and (d == '' or redis.call('HEXISTS', facts, d) == 1) then
    if c == '' then redis.call('HDEL', facts, a) else redis.call('HSET', facts, a, c) end
    redis.call('HDEL', hung, a)
    redis.call('INCR', rev)
    return c
  end
  return found
elseif what == 'evict' then
  local id = redis.call('HGET', hung, a)
  if id then drop(id) end
end
return 1
"""


class RedisBoard:
    """A `Board`. An empty value stands for none: no fact here is empty."""

    def __init__(self, url: str, prefix: str, cluster: str) -> None:
        base = f"{prefix}:{{cluster:{cluster}}}"
        self._keys = [f"{base}:{name}" for name in ("facts", "hung", "leases", "rev")]
        self._looking = _Asker(url, self._keys)
        self._writing = _Asker(url, self._keys)  # which does not wait for a look
        self._following: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    def follow(
        self, on_all: Callable[[dict[str, bytes]], None], on_changes: Callable[[Sequence[Change]], None]
    ) -> None:
        self._following = asyncio.get_running_loop().create_task(self._follow(on_all, on_changes))

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._following = None
        await asyncio.gather(self._looking.close(), self._writing.close())

    async def _follow(
        self, on_all: Callable[[dict[str, bytes]], None], on_changes: Callable[[Sequence[Change]], None]
    ) -> None:
        revision = b""
        facts: dict[str, bytes] | None = None
        while True:
            self._news.clear()
            try:
                answer = await self._ask("look", revision)
            except CoordinatorError as fault:
                log.warning("the coordinator does not answer", extra={"fault": str(fault)})
                await asyncio.sleep(LOOK_SECONDS)
                continue
            revision = answer[0]
            if len(answer) > 1:
                found = {name.decode(): value for name, value in zip(answer[1][::2], answer[1][1::2])}
                if facts is None:
                    on_all(dict(found))
                elif changes := _changes(facts, found):
                    on_changes(changes)
                facts = found
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def grant(self, seconds: float) -> Lease:
        lease = Lease(os.urandom(8).hex(), seconds)
        await self._ask("grant", lease.id, _ms(seconds))
        return lease

    async def keep(self, lease: Lease) -> bool:
        return bool(await self._ask("keep", lease.id, _ms(lease.seconds), tries=1))

    async def revoke(self, lease: Lease) -> None:
        await self._write("revoke", lease.id)

    async def pin(self, key: str, value: bytes, lease: Lease) -> None:
        await self._write("pin", key, value, lease.id)

    async def swap(self, key: str, old: bytes | None, new: bytes | None, guard: str = "") -> bytes | None:
        found: bytes = await self._write("swap", key, old or b"", new or b"", guard)
        return found or None

    async def evict(self, key: str) -> None:
        await self._write("evict", key)

    async def _write(self, what: str, *words: str | bytes) -> Any:
        answer = await self._ask(what, *words)
        self._news.set()
        return answer

    async def _ask(self, what: str, *words: str | bytes, tries: int = 1000) -> Any:
        """Asked again until there is an answer or patience ends: nothing here does harm when it is done twice."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_SECONDS
        asker = self._looking if what == "look" else self._writing
        while True:
            tries -= 1
            try:
                return await asker.ask((what, *words))
            except (RedisError, RedisClusterException, OSError) as fault:
                if isinstance(fault, ResponseError) and not passes(fault):
                    raise CoordinatorError(f"Redis refuses: {fault}") from None
                if loop.time() > until or tries <= 0:
                    raise BoardUnavailable(
                        f"Redis does not answer: {str(fault) or 'in time'}", "Start it, or correct store"
                    ) from None
            await asyncio.sleep(PAUSE_SECONDS)


class _Asker:
    """A connection to Redis and the one thread that uses it: the store's own links, which know Clusters and TLS, wait
    for their answers, and the loop must not."""

    def __init__(self, url: str, keys: list[str]) -> None:
        self._url = url
        self._keys = keys
        self._thread = ThreadPoolExecutor(1, "sluice-redis-board")
        self._link: Link | None = None
        self._closed = False

    async def ask(self, words: Sequence[Word]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, words)

    def _ask(self, words: Sequence[Word]) -> Any:
        try:
            if self._link is None:
                server = Server(self._url, ANSWER_SECONDS)
                server.look()
                self._link = server.link()
            command = ["EVAL", SCRIPT, len(self._keys), *self._keys, *words]
            return self._link.ask([(self._keys[0], command)])[0]
        except BaseException:
            self._hang_up()
            raise

    def _hang_up(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._hang_up)
        self._thread.shutdown(wait=False)


def _changes(old: dict[str, bytes], new: dict[str, bytes]) -> list[Change]:
    gone: list[Change] = [(key, None) for key in old if key not in new]
    return gone + [(key, value) for key, value in new.items() if old.get(key) != value]


def _ms(seconds: float) -> str:
    return str(round(seconds * 1000))
