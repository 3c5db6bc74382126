"""The same worlds with their queues in a real Redis, behind a line that is held, cut and torn.

What happens when is decided by threads here, so a seed tells what people do and not what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.log.note_decoder import QueueNoteDecoder
from sluice.store.protocol import RecoveryLoader, RecoveryReport
from sluice.store.redis.keys import RedisKeys
from sluice.store.redis.options import RedisOptions
from sluice.store.redis.store import RedisStore
from tests.queues.kit import Loop
from tests.queues.redis.redis_backend import check_views
from tests.simulator.compacted_world import CompactedWorld
from tests.simulator.oracle import Violation
from tests.simulator.world import World
from tests.support.fault_proxy import FaultProxy
from tests.support.redis_process import RedisProcess


class RedisBehindProxy:
    """The store with the handles that the simulator has on the one in memory."""

    def __init__(self, world: RedisMixin, server: RedisProcess, prefix: str) -> None:
        self._world = world
        self._server = server
        # A dead owner of this process still has its threads: they must not renew what its heir waits for.
        self._options = RedisOptions(
            prefix=prefix, answer_seconds=2.0, lease_seconds=6000.0, renew_seconds=2000.0
        )
        self._sizes = (
            world.chance.choice((1500, 4000, 20_000)),
            world.chance.choice((3000, 10_000)),
        )
        self._store: RedisStore | None = None
        self.proxy = FaultProxy(server.port)
        self.pending = 0
        self.is_held = False
        self.failures: list[Exception] = []

    def open(self, loader: RecoveryLoader) -> RecoveryReport:
        self._life = _StoreRun(self)
        self._meaning = QueueNoteDecoder(self._world.engine)
        self._store = RedisStore(
            f"redis://127.0.0.1:{self.proxy.port}",
            self._life.call_soon,
            self.failures.append,
            note_decoder=self._meaning,
            options=self._options,
            segment_bytes=self._sizes[0],
            snapshot_bytes=self._sizes[1],
        )
        return self._store.open(loader)

    def begin(self) -> None:
        self._meaning.load_names()
        self.inner.start_views()

    @property
    def inner(self) -> RedisStore:
        assert self._store is not None
        return self._store

    def poll(self) -> None:
        self.inner.poll_views(self._world.loop.now)

    # -- the contract

    def next_frame_address(self) -> int:
        return self.inner.next_frame_address()

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> None:
        self.inner.commit(frame, count, sync, self._life.owe(done))

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        self.inner.read(addresses, self._life.owe(done))

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self.inner.scan_segment(segment, self._life.owe(done))

    def begin_snapshot(self) -> None:
        self.inner.begin_snapshot()

    def snapshot(self, state: list[bytes], free: Sequence[int], done: Callable[[], None]) -> None:
        self.inner.snapshot(state, free, self._life.owe(done))

    def is_snapshot_due(self) -> bool:
        return self.inner.is_snapshot_due()

    def seal_segment(self) -> bool:
        return self.inner.seal_segment()

    def segment_sizes(self) -> dict[int, int]:
        return self.inner.segment_sizes()

    def close(self) -> None:
        self.release()
        self.inner.close()
        self._life.is_over = True
        self.pending = 0

    # -- the handles

    def hold(self) -> None:
        self.is_held = True
        self.proxy.hold()

    def release(self, steps: int = -1) -> None:
        self.is_held = False
        self.proxy.release()

    def unsynced(self) -> int:
        return self.pending

    def crash(self, keep: int) -> RedisBehindProxy:
        """The process is gone, in the midst of what it wrote. The one that follows waits no lease out; the dead one's
        threads go on knocking, and find the fence."""
        old = self.inner
        self._life.is_over = True
        self.pending = 0
        if keep % 2:
            self.proxy.cut()
        self.release()
        client = self._server.client()
        client.delete(RedisKeys(self._options.prefix).lease)
        client.close()
        self._world.dead.append(old)
        return self


class _StoreRun:
    """Callbacks of one process, which end with it."""

    def __init__(self, store: RedisBehindProxy) -> None:
        self._store = store
        self.is_over = False

    def call_soon(self, callback: Callable[..., object], *facts: object) -> None:
        self._store._world.loop.call_soon(self._call, callback, *facts)

    def _call(self, callback: Callable[..., object], *facts: object) -> None:
        if not self.is_over:
            callback(*facts)

    def owe(self, done: Callable[..., None]) -> Callable[..., None]:
        self._store.pending += 1

        def answer(*facts: Any) -> None:
            self._store.pending -= 1
            done(*facts)

        return answer


class RedisMixin:
    """What a world does differently in Redis. To be named before the world itself."""

    engine: Engine
    loop: Loop
    chance: Random
    runner: CommitLoop
    store: RedisBehindProxy
    counts: dict[str, int]

    def __init__(self, seed: int, server: RedisProcess, prefix: str) -> None:
        self._made_with = (server, prefix)
        self.dead: list[RedisStore] = []
        super().__init__(seed)  # type: ignore[call-arg]

    def _make_store(self) -> RedisBehindProxy:
        return RedisBehindProxy(self, *self._made_with)

    def _open(self) -> None:
        super()._open()  # type: ignore[misc]
        self.store.begin()

    def _run_all(self) -> None:
        """Also what threads have still to answer."""
        self.loop.turn(self._waits_for_store)

    def _waits_for_store(self) -> bool:
        if self.store.failures:
            raise Violation(f"the store has failed: {self.store.failures[0]}")
        return self.store.pending > 0 and not self.store.is_held

    def check_turn(self) -> None: ...

    def step(self) -> None:
        chance = self.chance.random()
        if chance < 0.02:
            self.store.proxy.cut()
            self.counts["lines cut"] = self.counts.get("lines cut", 0) + 1
        elif chance < 0.04:
            self.store.proxy.cut_after(self.chance.randrange(3000))
            self.counts["lines torn"] = self.counts.get("lines torn", 0) + 1
        if chance > 0.8:
            self.store.poll()
        elif not self.store.is_held and chance > 0.5:
            self._run_all()
            self.check_turn()
        super().step()  # type: ignore[misc]

    def check_redis(self) -> None:
        """When all that was decided is kept, Redis tells of the queues what they are."""
        self.store.release()
        self.runner.end_turn()
        self._run_all()
        stored: list[int] = []
        self.runner.after_commit(lambda: stored.append(1))
        self.loop.turn(lambda: not stored)
        check_views(
            self.store.inner, self.loop, self._made_with[0], self._made_with[1], self.engine
        )

    def end(self) -> None:
        self.store.close()
        for old in self.dead:
            old.close()
        self.store.proxy.close()


class RedisWorld(RedisMixin, World):
    def check_turn(self) -> None:
        World.check_turn(self)


class RedisLastValues(RedisMixin, CompactedWorld):
    """The same for compacted queues, shared and exclusive."""

    def _quiet(self) -> None:
        self.engine.now = self.loop.now
        self.runner.end_turn()
        self._run_all()


def run(
    seed: int, steps: int, server: RedisProcess, prefix: str, compacted: bool = False
) -> RedisWorld | RedisLastValues:
    """One world; three times on the way, and at the end, Redis is asked what it knows of the queues."""
    kind = RedisLastValues if compacted else RedisWorld
    world: RedisWorld | RedisLastValues = kind(seed, server, prefix)
    try:
        for _ in range(3):
            for _ in range(steps // 3):
                world.step()
            world.check_redis()
        world.drain()
        world.check_redis()
    except Exception as fault:
        tail = "\n".join(world.log[-40:])
        raise Violation(
            f"{kind.__name__}, seed {seed}, step {world.steps}: {fault}\n{tail}"
        ) from fault
    finally:
        world.end()
    return world
