"""The core of one broker: its store, the queue engine, and the handlers and APIs above them.

A broker without a cluster has one core. In a cluster a node has one core for each cell that it
owns: then many cores share a process and a loop, and open and close independently. This module and
`app` are the only ones that name concrete stores.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.queries.store_status import LossTracker, StoreStatus
from sluice.admin.service import AdminService
from sluice.alerts import AlertSender, SsrfGuard
from sluice.broker.broker import Broker
from sluice.broker.commit_listener import BrokerCommitListener
from sluice.broker.namespaces.admin_topics import AdminTopics
from sluice.broker.namespaces.compacted.handler import ExclusiveQueueHandler
from sluice.broker.namespaces.queues.handler import QueueHandler
from sluice.broker.namespaces.responses import Responses
from sluice.broker.scheduler import PeriodicTask
from sluice.broker.sessions.session_store import SessionStore
from sluice.clock import steady_time
from sluice.cluster.membership.placement import cell_of_queue
from sluice.config.settings import Settings
from sluice.errors import (
    BrokerBroken,
    ConfigError,
    FramesLost,
    InvalidQueueConfig,
    NoRoom,
    SluiceError,
    StoreError,
    StoreFailed,
    StoreUnavailable,
)
from sluice.json_schema import build_validator, find_schema_error
from sluice.process.logs import hide_secrets
from sluice.process.memory_watermark import MemoryWatermark
from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.commit_loop import CommitListener, CommitLoop
from sluice.queues.compacted.exclusive import ExclusiveRules
from sluice.queues.config import DEFAULT_PARTITIONS, check_new_bindings, read_config
from sluice.queues.effects import Alert
from sluice.queues.engine import Engine
from sluice.queues.log.broker_state import RestoredRecord
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.recovery.loader import unusable_record
from sluice.queues.service import QueueService
from sluice.queues.templates import QueueTemplates, Template
from sluice.store.embedded.store import EmbeddedStore
from sluice.store.memory import MemoryStore
from sluice.store.protocol import Store
from sluice.wire import decode as wire_decode
from sluice.wire.topics import has_wildcard, matches

if TYPE_CHECKING:
    from sluice.queues.recovery.note_decoder import QueueNoteDecoder
    from sluice.store.redis.store import RedisStore
    from sluice.store.redis.views.stats import StoreStats

log = logging.getLogger(__name__)

MESSAGE_PATH_PACKAGES = re.compile(r"sluice/(broker|queues|store|cluster)/")
# Minimum cache of message bodies for a cell, independent of the number of cells.
MIN_CACHE_BYTES = 4 << 20
SETTLEMENT_DELAY_SECONDS = 0.005  # maximum delay of settlements that wait to share a frame


@dataclass(frozen=True)
class CellStore:
    """The store of one cell. `force_takeover`: its owner is known to be dead, so do not wait."""

    cell: int
    force_takeover: bool = False


class BrokerCore(CommitListener):
    """Builds, opens and closes the store, the queues and their APIs.

    `on_failure` is called once when the store has failed: it contains everything acknowledged, and
    nothing more is acknowledged. With a `cell_store` this is the core of a cell: other cores run in
    the same loop and must not be blocked. `store_override` is a store for tests. `watermark` is the
    memory limit of the process. `templates` are shared by the cores of a node.
    """

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        on_failure: Callable[[], object],
        cell_store: CellStore | None = None,
        store_override: Store | None = None,
        watermark: MemoryWatermark | None = None,
        templates: QueueTemplates | None = None,
    ) -> None:
        self._settings = settings
        self._templates = make_templates(settings) if templates is None else templates
        self._broker = broker
        self._on_failure = on_failure
        self._cell_store = cell_store
        self._store_override = store_override
        self._restoring: asyncio.Future[list[RestoredRecord]] | None = None
        self._alerts = AlertSender(allowed=settings.webhooks.allow)
        self._is_redis_store = settings.store not in ("embedded", "memory")
        self._commit_loop: CommitLoop | None = None
        self._admin_service: AdminService | None = None
        self._watermark = watermark
        self._unavailable_reason = ""  # why the store accepts no writes
        self._is_disk_full = False
        self._memory_reason = ""  # why nothing is accepted although the store would accept it
        self._on_opened: Callable[[], None] | None = None
        self._poll_timer: asyncio.TimerHandle | None = None
        self._redis_store: RedisStore | None = None
        self.failure: Exception | None = None
        # Called when the APIs exist and no client has connected yet.
        self.on_ready: Callable[[], None] | None = None

    async def open(self) -> None:
        """Recover the content of the store, before any client can connect."""
        check_templates(self._settings, self._alerts.guard.fault_of_url)
        loop = asyncio.get_running_loop()
        broker = self._broker
        turn = broker.turn
        cache_bytes = self._settings.queues.cache_bytes
        if self._cell_store is not None:
            cache_bytes = max(cache_bytes // self._settings.cluster.cells, MIN_CACHE_BYTES)
        engine = Engine(self._templates.rules_for, random.random, cache_bytes, ZstdCodec())
        engine.lifecycle.max_partitions = self._settings.queues.max_partitions
        engine.exclusive.rules = make_exclusive_rules(self._settings)
        commit_loop = CommitLoop(
            engine,
            self._make_store(engine),
            steady_time,
            loop.call_later,
            turn.flush_connections,
            self._report_events,
            SETTLEMENT_DELAY_SECONDS,
            loop.call_soon,
        )
        if self._cell_store is None:
            recovery = commit_loop.load(_parse_rules)
        else:
            recovery = await loop.run_in_executor(None, commit_loop.load, _parse_rules)
        commit_loop.start()
        commit_loop.add_listener(self)
        if self._on_opened is not None:
            self._on_opened()
        self._commit_loop = commit_loop
        log.info(
            "store opened",
            extra={
                "store": hide_secrets(self._settings.store),
                "segments": recovery.segments,
                "messages": recovery.messages,
                "torn_bytes": recovery.torn_bytes,
            },
        )
        for note in recovery.warnings:
            log.warning(note)
        restoring: asyncio.Future[list[RestoredRecord]] = loop.create_future()
        self._restoring = restoring
        commit_loop.restore_broker_state(partial(_set_restored, restoring))
        router = broker.router
        router.session_store = SessionStore(engine.broker_state, turn)
        turn.commit_with(commit_loop)
        commit_loop.add_listener(BrokerCommitListener(router))
        service = QueueService(
            engine, self._templates, find_schema_error, self._alerts.guard.fault_of_url
        )
        queue_handler = QueueHandler(engine, turn, router.subscriptions, service, build_validator)
        if self._settings.queues.enabled:
            router.queue_handler = queue_handler
            router.queue_handler.admin_topics = AdminTopics(
                router, router.queue_handler, broker.scheduler
            )
            router.queue_handler.responses = Responses(router, broker.scheduler)
            if self.on_ready is not None:
                self.on_ready()
            router.queue_handler.rebuild_bindings()
            self._schedule_owner_check(router.queue_handler.exclusive_handler)
        restored = await restoring
        try:
            router.session_store.restore(restored, router, broker.registry)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable_record("the stored sessions and retained messages", error) from error
        if self._settings.salvage:
            commit_loop.housekeeping.snapshot_after_salvage()
        router.retained.on_deleted = router.session_store.delete_retained
        store = hide_secrets(self._settings.store)
        is_embedded = self._settings.store == "embedded"
        redis = self._redis_store
        losses = None
        if redis is not None:
            losses = LossTracker(self._cell_number, redis.losses, self._confirm_loss)
        store_status = StoreStatus(
            store,
            commit_loop.segment_sizes,
            self.store_fault,
            self._read_redis_stats if redis is not None else None,
            losses,
        )
        if self._watermark is not None:
            self._watermark.register(self._on_memory_limit, self._count_memory_refusals)
        self._admin_service = AdminService(
            engine,
            commit_loop,
            queue_handler,
            broker,
            store,
            build_mode(),
            has_segment_files=is_embedded,
            store_status=store_status,
        )

    def _schedule_owner_check(self, compacted_handler: ExclusiveQueueHandler) -> None:
        """Check periodically that every subscribed owner is served."""
        registry = self._broker.registry
        seconds = self._settings.ecq.check_interval
        check = PeriodicTask(
            seconds, lambda: compacted_handler.repair_subscribers(list(registry.sessions.values()))
        )
        self._broker.scheduler.wake_at(self._broker.turn.now + seconds, check)

    @property
    def service(self) -> AdminService:
        """Return the admin service of an open core."""
        assert self._admin_service is not None
        return self._admin_service

    def make_loop_bridge(self) -> LoopBridge:
        """Return the bridge through which admin APIs call the loop of an open core."""
        assert self._admin_service is not None
        return LoopBridge(self._admin_service, asyncio.get_running_loop())

    def store_fault(self) -> str:
        """Return what is wrong with the store, or an empty string."""
        return self._unavailable_reason if self.failure is None else str(self.failure)

    def write_refusal(self) -> SluiceError | None:
        """Return the error with which new messages are refused, or None.

        A failed store needs a restart; a nearly full disk or an unreachable Redis does not.
        """
        if self.failure is not None:
            failure = self.failure
            return failure if isinstance(failure, StoreError) else StoreFailed(str(failure))
        if not self._unavailable_reason:
            return None
        return (
            NoRoom(self._unavailable_reason)
            if self._is_disk_full
            else StoreUnavailable(self._unavailable_reason)
        )

    def _make_store(self, engine: Engine) -> Store:
        loop = asyncio.get_running_loop()
        if self._store_override is not None:
            return self._store_override
        if self._settings.store == "memory":
            return MemoryStore(loop.call_soon)
        if self._settings.store == "embedded":
            return EmbeddedStore(
                str(self._settings.data),
                loop.call_soon_threadsafe,
                self.on_failure,
                salvage=self._settings.salvage,
                min_free_bytes=self._settings.disk.min_free,
                on_low_space=self._on_low_space,
            )
        try:
            from sluice.queues.recovery.note_decoder import QueueNoteDecoder
            from sluice.store.redis.options import RedisOptions
            from sluice.store.redis.store import RedisStore
        except ImportError as missing:
            raise ConfigError(
                f"the store in Redis needs packages that are not installed: {missing.name}",
                "Install sluice[redis]",
            ) from missing
        redis = self._settings.redis
        engine.publishing.max_partition_length = redis.max_length
        cell_store = self._cell_store
        note_decoder = QueueNoteDecoder(engine)
        store = RedisStore(
            self._settings.store,
            loop.call_soon_threadsafe,
            self.on_failure,
            on_stall=self._on_store_stalled,
            note_decoder=note_decoder,
            options=RedisOptions(
                prefix=self._key_prefix,
                tag=self._hash_tag,
                force_takeover=cell_store is not None and cell_store.force_takeover,
                lease_seconds=redis.lease,
                renew_seconds=redis.renew,
                answer_seconds=redis.answer_timeout,
                wait_seconds=redis.wait,
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
        self._redis_store = store
        self._on_opened = partial(self._start_views, store, note_decoder, redis.poll)
        return store

    @property
    def _key_prefix(self) -> str:
        prefix = self._settings.redis.prefix
        return prefix if self._cell_store is None else f"{prefix}:c{self._cell_store.cell}"

    @property
    def _hash_tag(self) -> str:
        return "log" if self._cell_store is None else f"log:c{self._cell_store.cell}"

    async def _read_redis_stats(self) -> StoreStats:
        """Return the statistics of the queues from Redis."""
        from sluice.store.redis.views.stats import read_store_stats

        seconds = self._settings.redis.answer_timeout
        return await asyncio.to_thread(
            read_store_stats, self._settings.store, self._key_prefix, seconds, self._hash_tag
        )

    async def _confirm_loss(self, last: int) -> bool:
        from sluice.store.redis.log.frame_losses import confirm_loss

        seconds = self._settings.redis.answer_timeout
        return await asyncio.to_thread(
            confirm_loss, self._settings.store, self._key_prefix, seconds, self._hash_tag, last
        )

    @property
    def _cell_number(self) -> int:
        return 0 if self._cell_store is None else self._cell_store.cell

    def _start_views(
        self, store: RedisStore, note_decoder: QueueNoteDecoder, poll_seconds: float
    ) -> None:
        """Repair the views in Redis after recovery and update them from now on."""
        note_decoder.load_names()
        store.start_views()
        self._poll_views(store, poll_seconds)

    def _poll_views(self, store: RedisStore, poll_seconds: float) -> None:
        store.poll_views(steady_time())
        self._poll_timer = asyncio.get_running_loop().call_later(
            poll_seconds, self._poll_views, store, poll_seconds
        )

    def _report_events(self, alerts: list[Alert], warnings: list[str]) -> None:
        for alert in alerts:
            self._alerts.send(alert)
        for warning in warnings:
            log.warning(warning)

    def _on_store_stalled(self, reason: str) -> None:
        """Refuse new messages while the store accepts no writes. Acknowledged messages are safe."""
        if reason:
            log.error(
                "store accepts no writes, refusing publishers",
                extra={"reason": hide_secrets(reason)},
            )
        else:
            log.warning("store accepts writes again")
        self._unavailable_reason = hide_secrets(reason)
        self._update_write_refusal()

    def _on_low_space(self, reason: str) -> None:
        """Refuse new messages while the disk is nearly full.

        Stored messages are still delivered and settled, which frees space.
        """
        if reason:
            log.error("disk nearly full, refusing publishers", extra={"reason": reason})
        else:
            log.warning("disk has space again")
        self._unavailable_reason = reason
        self._is_disk_full = bool(reason)
        assert self._commit_loop is not None
        self._commit_loop.housekeeping.set_disk_low(bool(reason))
        self._update_write_refusal()

    def _on_memory_limit(self, reason: str) -> None:
        """Refuse new messages while the process uses too much memory (see `memory_watermark`)."""
        self._memory_reason = reason
        self._update_write_refusal()

    def _count_memory_refusals(self) -> int:
        assert self._commit_loop is not None
        return (
            self._commit_loop.engine.publishing.refused_out_of_memory
            + self._broker.router.refused_out_of_memory
        )

    def _update_write_refusal(self) -> None:
        """Set why the engine and the router refuse new messages; the store's reason comes first."""
        assert self._commit_loop is not None
        engine, router = self._commit_loop.engine, self._broker.router
        is_memory_full = bool(self._memory_reason) and not self._unavailable_reason
        engine.publishing.is_out_of_memory = router.is_out_of_memory = is_memory_full
        engine.publishing.is_out_of_space = router.is_out_of_space = (
            self._is_disk_full or is_memory_full
        )
        engine.publishing.unavailable_reason = self._unavailable_reason or self._memory_reason
        router.set_unavailable(engine.publishing.unavailable_reason)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an uncaught exception of the loop.

        An exception in a callback of the message path has interrupted a turn: frames stay
        uncommitted and acknowledgements unsent. So has a lack of memory anywhere. The state is then
        unknown, so the process ends as if killed, and a restart recovers from the store. Any other
        exception costs one connection or task, and a log line.
        """
        error = find_fatal_error(context)
        if error is not None:
            self.on_failure(error)
        with suppress(MemoryError):
            loop.default_exception_handler(context)

    def on_failure(self, error: Exception) -> None:
        """Stop after a fatal error: acknowledge nothing more; a restart recovers from the store."""
        if self.failure is not None:
            return
        self.failure = error
        self._on_failure()
        if self._commit_loop is not None:
            self._commit_loop.freeze()
        with suppress(MemoryError):
            if isinstance(error, FramesLost):
                log.critical(
                    "Redis has lost confirmed frames",
                    extra={
                        "cell": self._cell_number,
                        "first_frame": error.first,
                        "last_frame": error.last,
                        "queues": " ".join(
                            f"{name}={count}" for name, count in error.queues.items()
                        ),
                    },
                )
            log.critical("broker failed", extra={"fault": str(error)})
        if self._restoring is not None and not self._restoring.done():
            self._restoring.set_exception(error)

    async def flush(self) -> None:
        """Wait until all pending writes are committed and their callbacks have run."""
        commit_loop = self._commit_loop
        if commit_loop is not None and self.failure is None:
            committed = asyncio.Event()
            commit_loop.after_commit(committed.set)
            with suppress(TimeoutError):  # uncommitted messages were not acknowledged
                async with asyncio.timeout(
                    self._settings.redis.wait if self._is_redis_store else None
                ):
                    await committed.wait()

    async def close(self, keep: bool = True) -> None:
        """Close the core; without `keep` the store has a new owner: drop pending writes."""
        await self._alerts.close()
        if self._watermark is not None:
            self._watermark.remove(self._on_memory_limit)
        commit_loop = self._commit_loop
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        if commit_loop is not None:
            if keep:
                await self.flush()
                if self._redis_store is not None and self.failure is None:
                    # Changes since the last poll.
                    self._redis_store.poll_views(steady_time())
            if self._cell_store is None:
                commit_loop.close()
            else:
                close_store = commit_loop.shut_down(keep)
                if close_store is not None:
                    await asyncio.get_running_loop().run_in_executor(None, close_store)


def find_fatal_error(context: dict[str, Any]) -> BrokerBroken | None:
    """Return the fatal error if an exception leaves the state unknown, else None."""
    error = context.get("exception")
    if isinstance(error, MemoryError) or ("handle" in context and is_in_message_path(error)):
        assert isinstance(error, Exception)
        return BrokerBroken(error)
    return None


def is_in_message_path(error: BaseException | None) -> bool:
    """Return whether a module on the message path raised this, and not only a library."""
    trace = error.__traceback__ if isinstance(error, Exception) else None
    while trace is not None:
        if MESSAGE_PATH_PACKAGES.search(trace.tb_frame.f_code.co_filename):
            return True
        trace = trace.tb_next
    return False


def _set_restored(
    restoring: asyncio.Future[list[RestoredRecord]], restored: list[RestoredRecord]
) -> None:
    """Set the result, unless the store failed meanwhile (another node took it over, say)."""
    if not restoring.done():
        restoring.set_result(restored)


def _parse_rules(name: str, text: str) -> QueueRules:
    return read_config(json.loads(text), name).rules()


def make_templates(settings: Settings) -> QueueTemplates:
    """Return the templates of the settings."""
    is_redis = settings.store not in ("embedded", "memory")
    partitions = settings.redis.partitions if is_redis else DEFAULT_PARTITIONS
    return QueueTemplates(
        matches, _read_templates(settings), settings.queues.auto_create, partitions
    )


def _read_templates(settings: Settings) -> list[Template]:
    return [
        Template(one.match, one.config, one.name, one.auto_create)
        for one in settings.queues.templates
    ]


def reload_templates(templates: QueueTemplates, read_settings: Callable[[], Settings]) -> None:
    """Read the configuration again and apply its templates; keep the present ones on an error.

    Other settings need a restart.
    """
    try:
        settings = read_settings()
        check_templates(settings, SsrfGuard(settings.webhooks.allow).fault_of_url)
    except SluiceError as error:
        log.error("queue templates not reloaded", extra={"reason": str(error)})
        return
    templates.replace(_read_templates(settings), settings.queues.auto_create)
    log.info("queue templates reloaded", extra={"templates": len(settings.queues.templates)})


def check_templates(settings: Settings, fault_of_webhook: Callable[[str], str]) -> None:
    """Refuse unusable templates at start, not when a client publishes to a matching queue."""
    names = [template.name for template in settings.queues.templates if template.name]
    if len(set(names)) < len(names):
        raise ConfigError(
            "queues.templates: two templates have the same name", "Give each a name of its own"
        )
    for template in settings.queues.templates:
        try:
            config = read_config(template.config, "any")
            check_new_bindings(config, None)
            rules = config.rules()
            fault = find_schema_error(rules.schema) if rules.schema else ""
            if not fault and rules.alert_webhook:
                fault = fault_of_webhook(rules.alert_webhook)
            if not fault and settings.cluster.coordinator != "off":
                fault = _find_misplaced_dlq(template.match, rules, settings.cluster.cells)
        except InvalidQueueConfig as error:
            fault = str(error)
        if fault:
            raise ConfigError(
                f"queues.templates: the one for {template.match!r} cannot be used: {fault}",
                "Correct the template",
            )


def _find_misplaced_dlq(match: str, rules: QueueRules, cells: int) -> str:
    """Return what is wrong with a template's dead-letter queue in a cluster, or an empty string.

    A message moves to its dead-letter queue in one commit of one store, so both queues must be in
    the same cell. `rules` are those of a queue named `any`.
    """
    matches_one_queue = not has_wildcard(match.encode())
    for name in (rules.dlq_name if rules.dlq_enabled else "", rules.invalid_queue_name):
        if not name or name == "dlq/any":
            continue
        if not matches_one_queue or cell_of_queue(name, cells) != cell_of_queue(match, cells):
            return (
                f"dlq_config names {name!r}, which is not in the cell of every queue that the "
                "template matches. Omit the name: dead letters then go to dlq/<queue>, which is in "
                "the "
                "cell of its queue"
            )
    return ""


def make_exclusive_rules(settings: Settings) -> ExclusiveRules:
    """Return the rules of exclusive queues. They get a quarter of the body cache."""
    ecq = settings.ecq
    rules = ExclusiveRules()
    rules.retention = ecq.retention
    rules.sweep_interval = ecq.sweep_interval
    rules.max_message_size = ecq.max_message_size
    rules.max_keys = ecq.max_keys
    rules.sync = ecq.durability == "sync"
    rules.cache_bytes = settings.queues.cache_bytes // 4
    return rules


def build_mode() -> str:
    """Return `compiled` if the modules on the message path are native code, else `interpreted`."""
    return "interpreted" if (wire_decode.__file__ or "").endswith(".py") else "compiled"
