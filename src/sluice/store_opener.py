"""Opens the configured store. Only this module and `app` name concrete stores."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sluice.admin.queries import LossTracker
from sluice.clock import steady_time
from sluice.config.settings import Settings
from sluice.errors import ConfigError
from sluice.processes.cell_directory import cell_store_path
from sluice.queues.engine import Engine
from sluice.store.embedded import EmbeddedStore
from sluice.store.memory import MemoryStore
from sluice.store.protocol import Store

if TYPE_CHECKING:
    from sluice.queues.recovery import QueueNoteDecoder
    from sluice.store.redis import RedisStore, StoreStats


@dataclass(frozen=True)
class CellStore:
    """The store of one cell. `force_takeover`: its owner is known to be dead, so do not wait."""

    cell: int
    force_takeover: bool = False


class StoreEvents(Protocol):
    """What a store reports while it is open."""

    def on_failure(self, error: Exception) -> None: ...

    def on_low_space(self, reason: str) -> None:
        """The disk is nearly full; an empty reason means that it has space again."""

    def on_store_stalled(self, reason: str) -> None:
        """The store accepts no writes; an empty reason means that it does again."""


class OpenedStore:
    """A store, and what runs beside it while it is open: nothing, for most stores."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.read_stats: Callable[[], Awaitable[StoreStats]] | None = None

    def start_views(self) -> None:
        """Update the views for operators, if the store has any, after recovery and from now on."""

    def track_losses(self) -> LossTracker | None:
        """Return the frames that the store has lost, if it can lose any."""
        return None

    def stop_views(self) -> None: ...

    def update_views(self) -> None:
        """Apply the changes since the last update."""


def open_store_of(
    settings: Settings, engine: Engine, events: StoreEvents, cell_store: CellStore | None
) -> OpenedStore:
    """Return the configured store for the records of `engine`; `Store.open` recovers from it."""
    loop = asyncio.get_running_loop()
    if settings.store == "memory":
        return OpenedStore(MemoryStore(loop.call_soon))
    if settings.store == "embedded":
        directory = (
            settings.data if cell_store is None else cell_store_path(settings.data, cell_store.cell)
        )
        return OpenedStore(
            EmbeddedStore(
                str(directory),
                loop.call_soon_threadsafe,
                events.on_failure,
                salvage=settings.salvage,
                min_free_bytes=settings.disk.min_free,
                on_low_space=events.on_low_space,
                call_soon=loop.call_soon,
            )
        )
    return OpenedRedisStore(settings, engine, events, cell_store)


class OpenedRedisStore(OpenedStore):
    """A store in Redis, with its views for operators and its statistics."""

    def __init__(
        self, settings: Settings, engine: Engine, events: StoreEvents, cell_store: CellStore | None
    ) -> None:
        try:
            from sluice.queues.recovery import QueueNoteDecoder
            from sluice.store.redis import RedisOptions, RedisStore
        except ImportError as missing:
            raise ConfigError(
                f"the store in Redis needs packages that are not installed: {missing.name}",
                "Install sluice[redis]",
            ) from missing
        redis = settings.redis
        engine.publishing.max_partition_length = redis.max_length
        self._url = settings.store
        self._answer_seconds = redis.answer_timeout
        self._min_replicas = redis.min_replicas
        self._poll_seconds = redis.poll
        self._poll_timer: asyncio.TimerHandle | None = None
        self._cell_number = 0 if cell_store is None else cell_store.cell
        self._prefix = redis.prefix if cell_store is None else f"{redis.prefix}:c{cell_store.cell}"
        self._hash_tag = "log" if cell_store is None else f"log:c{cell_store.cell}"
        self._note_decoder: QueueNoteDecoder = QueueNoteDecoder(engine)
        self._redis_store: RedisStore = RedisStore(
            settings.store,
            asyncio.get_running_loop().call_soon_threadsafe,
            events.on_failure,
            on_stall=events.on_store_stalled,
            note_decoder=self._note_decoder,
            options=RedisOptions(
                prefix=self._prefix,
                tag=self._hash_tag,
                force_takeover=cell_store is not None and cell_store.force_takeover,
                lease_seconds=redis.lease,
                renew_seconds=redis.renew,
                answer_seconds=redis.answer_timeout,
                wait_seconds=redis.wait,
                min_replicas=redis.min_replicas,
                replicas_on_disk=redis.replica_ack == "disk",
                replica_timeout_seconds=redis.replica_timeout,
                poll_seconds=redis.poll,
                batch=redis.batch,
                pending_scan_seconds=redis.pending_scan,
                claim_idle_seconds=redis.claim_idle,
                claim_batch=redis.claim_batch,
                mover_batch=redis.mover_batch,
                mover_seconds=redis.mover_interval,
                max_length=redis.max_length,
            ),
        )
        super().__init__(self._redis_store)
        self.read_stats = self._read_stats

    def start_views(self) -> None:
        self._note_decoder.load_names()
        self._redis_store.start_views()
        self._poll_views()

    def _poll_views(self) -> None:
        self.update_views()
        self._poll_timer = asyncio.get_running_loop().call_later(
            self._poll_seconds, self._poll_views
        )

    def stop_views(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()

    def update_views(self) -> None:
        self._redis_store.poll_views(steady_time())

    async def _read_stats(self) -> StoreStats:
        """Return the statistics of the queues from Redis."""
        from sluice.store.redis import read_store_stats

        stats = await asyncio.to_thread(
            read_store_stats,
            self._url,
            self._prefix,
            self._answer_seconds,
            self._hash_tag,
            self._min_replicas,
        )
        stats.replica_timeouts = self._redis_store.replica_timeouts
        return stats

    def track_losses(self) -> LossTracker:
        return LossTracker(self._cell_number, self._redis_store.losses, self._confirm_loss)

    async def _confirm_loss(self, last: int) -> bool:
        from sluice.store.redis import confirm_loss

        return await asyncio.to_thread(
            confirm_loss, self._url, self._prefix, self._answer_seconds, self._hash_tag, last
        )
