"""The simulation with the queues in a real Redis, behind a connection with faults.

Threads decide about the timing here, so a seed determines the actions and not their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.recovery.note_decoder import QueueNoteDecoder
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
    """The Redis store with the controls that the simulator uses on the memory store."""

    def __init__(self, world: RedisMixin, server: RedisProcess, prefix: str) -> None:
        self._world = world
        self._server = server
        # The threads of a crashed owner still run in this process: they must not renew its lease.
        self._options = RedisOptions(
            prefix=prefix, answer_seconds=2.0, lease_seconds=6000.0, renew_seconds=2000.0
        )
        self._sizes = (
            world.rng.choice((1500, 4000, 20_000)),
            world.rng.choice((3000, 10_000)),
        )
        self._store: RedisStore | None = None
        self.proxy = FaultProxy(server.port)
        self.pending = 0
        self.is_held = False
        self.failures: list[Exception] = []

    def open(self, loader: RecoveryLoader) -> RecoveryReport:
        self._run = _StoreRun(self)
        self._note_decoder = QueueNoteDecoder(self._world.engine)
        self._store = RedisStore(
            f"redis://127.0.0.1:{self.proxy.port}",
            self._run.call_soon,
            self.failures.append,
            note_decoder=self._note_decoder,
            options=self._options,
            segment_bytes=self._sizes[0],
            snapshot_bytes=self._sizes[1],
        )
        return self._store.open(loader)

    def begin(self) -> None:
        self._note_decoder.load_names()
        self.inner.start_views()

    @property
    def inner(self) -> RedisStore:
        assert self._store is not None
        return self._store

    def poll(self) -> None:
        self.inner.poll_views(self._world.loop.now)

    # ---- store interface

    def next_frame_address(self) -> int:
        return self.inner.next_frame_address()

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        return self.inner.commit(frame, count, sync, self._run.count_pending(done))

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        self.inner.read(addresses, self._run.count_pending(done))

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self.inner.scan_segment(segment, self._run.count_pending(done))

    def begin_snapshot(self) -> None:
        self.inner.begin_snapshot()

    def snapshot(
        self, state: list[bytes], freed_segments: Sequence[int], done: Callable[[], None]
    ) -> None:
        self.inner.snapshot(state, freed_segments, self._run.count_pending(done))

    def is_snapshot_due(self) -> bool:
        return self.inner.is_snapshot_due()

    def seal_segment(self) -> bool:
        return self.inner.seal_segment()

    def segment_sizes(self) -> dict[int, int]:
        return self.inner.segment_sizes()

    def close(self) -> None:
        self.release()
        self.inner.close()
        self._run.has_ended = True
        self.pending = 0

    # ---- controls

    def hold(self) -> None:
        self.is_held = True
        self.proxy.hold()

    def release(self, steps: int = -1) -> None:
        self.is_held = False
        self.proxy.release()

    def count_unsynced(self) -> int:
        return self.pending

    def crash(self, keep: int) -> RedisBehindProxy:
        """Crash the process during its writes; return the store for the next run.

        The next run does not wait for the lease; the threads of the crashed one go on, and the
        fence refuses them.
        """
        old = self.inner
        self._run.has_ended = True
        self.pending = 0
        if keep % 2:
            self.proxy.cut()
        self.release()
        client = self._server.client()
        client.delete(RedisKeys(self._options.prefix).lease)
        client.close()
        self._world.crashed_stores.append(old)
        return self


class _StoreRun:
    """Callbacks of one run, which end with it."""

    def __init__(self, store: RedisBehindProxy) -> None:
        self._store = store
        self.has_ended = False

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        self._store._world.loop.call_soon(self._call, callback, *args)

    def _call(self, callback: Callable[..., object], *args: object) -> None:
        if not self.has_ended:
            callback(*args)

    def count_pending(self, done: Callable[..., None]) -> Callable[..., None]:
        self._store.pending += 1

        def answer(*args: Any) -> None:
            self._store.pending -= 1
            done(*args)

        return answer


class RedisMixin:
    """Overrides of a world for Redis. Comes before the world in the bases."""

    engine: Engine
    loop: Loop
    rng: Random
    commit_loop: CommitLoop
    store: RedisBehindProxy
    counts: dict[str, int]

    def __init__(self, seed: int, server: RedisProcess, prefix: str) -> None:
        self._server_and_prefix = (server, prefix)
        self.crashed_stores: list[RedisStore] = []
        super().__init__(seed)  # type: ignore[call-arg]

    def _make_store(self) -> RedisBehindProxy:
        return RedisBehindProxy(self, *self._server_and_prefix)

    def _open(self) -> None:
        super()._open()  # type: ignore[misc]
        self.store.begin()

    def _run_all(self) -> None:
        """Run all callbacks, and wait for outstanding results of threads."""
        self.loop.turn(self._waits_for_store)

    def _waits_for_store(self) -> bool:
        if self.store.failures:
            raise Violation(f"the store has failed: {self.store.failures[0]}")
        return self.store.pending > 0 and not self.store.is_held

    def check_turn(self) -> None: ...

    def step(self) -> None:
        rng = self.rng.random()
        if rng < 0.02:
            self.store.proxy.cut()
            self.counts["connections cut"] = self.counts.get("connections cut", 0) + 1
        elif rng < 0.04:
            self.store.proxy.cut_after(self.rng.randrange(3000))
            self.counts["connections torn"] = self.counts.get("connections torn", 0) + 1
        if rng > 0.8:
            self.store.poll()
        elif not self.store.is_held and rng > 0.5:
            self._run_all()
            self.check_turn()
        super().step()  # type: ignore[misc]

    def check_redis(self) -> None:
        """Check the views in Redis after everything is committed."""
        self.store.release()
        self.commit_loop.end_turn()
        self._run_all()
        stored: list[int] = []
        self.commit_loop.after_commit(lambda: stored.append(1))
        self.loop.turn(lambda: not stored)
        check_views(
            self.store.inner,
            self.loop,
            self._server_and_prefix[0],
            self._server_and_prefix[1],
            self.engine,
        )

    def end(self) -> None:
        self.store.close()
        for old in self.crashed_stores:
            old.close()
        self.store.proxy.close()


class RedisWorld(RedisMixin, World):
    def check_turn(self) -> None:
        World.check_turn(self)


class RedisLastValues(RedisMixin, CompactedWorld):
    """Compacted queues in Redis, shared and exclusive."""

    def _run_until_idle(self) -> None:
        self.engine.now = self.loop.now
        self.commit_loop.end_turn()
        self._run_all()


def run(
    seed: int, steps: int, server: RedisProcess, prefix: str, compacted: bool = False
) -> RedisWorld | RedisLastValues:
    """Run one world; check the views in Redis three times on the way, and at the end."""
    kind = RedisLastValues if compacted else RedisWorld
    world: RedisWorld | RedisLastValues = kind(seed, server, prefix)
    try:
        for _ in range(3):
            for _ in range(steps // 3):
                world.step()
            world.check_redis()
        world.drain()
        world.check_redis()
    except Exception as error:
        tail = "\n".join(world.log[-40:])
        raise Violation(
            f"{kind.__name__}, seed {seed}, step {world.steps}: {error}\n{tail}"
        ) from error
    finally:
        world.end()
    return world
