"""Runs one broker core in an event loop: opens its store and handles the store's failures.

A broker without a cluster has one host. In a cluster a node has one host for each cell that it
owns: then many cores share a process and a loop, and open and close independently. The parts of a
core are wired in `broker_core`; `store_opener` names the concrete stores.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.queries import StoreStatus
from sluice.admin.service import AdminService
from sluice.alerts import AlertSender, load_alert_handlers
from sluice.broker.acl import AccessControl
from sluice.broker.broker import Broker
from sluice.broker.limits import Limits
from sluice.broker.net import ConnectionLimits
from sluice.broker.turn import PeriodicTask
from sluice.broker_core import BrokerCore, LogEvent
from sluice.config.queue_settings import check_templates, make_exclusive_rules, make_templates
from sluice.config.settings import Settings
from sluice.errors import (
    BrokerBroken,
    FramesLost,
    NoRoom,
    SluiceError,
    StoreError,
    StoreFailed,
    StoreUnavailable,
)
from sluice.placement import cell_of_queue
from sluice.process.logs import hide_secrets
from sluice.process.memory_watermark import MemoryWatermark
from sluice.queues.commit_loop import CommitListener, CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.log import RestoredRecord
from sluice.queues.model import MAX_ROWS, Alert, Queue, RowBudget
from sluice.queues.recovery import unusable_record
from sluice.queues.service import QueueTemplates, parse_stored_rules
from sluice.store.protocol import RecoveryReport, Store
from sluice.store_opener import CellStore, OpenedStore, open_store_of
from sluice.wire import decode as wire_decode

logger = logging.getLogger(__name__)

MESSAGE_PATH_PACKAGES = re.compile(r"sluice/(broker|queues|store|cluster)/")
# Minimum cache of message bodies for a cell, independent of the number of cells.
MIN_CACHE_BYTES = 4 << 20
SETTLEMENT_DELAY_SECONDS = 0.005  # maximum delay of settlements that wait to share a frame
MAX_EXPIRY_CHECK_SECONDS = 60.0  # between two looks for unused groups


class BrokerHost(CommitListener):
    """Builds a core, opens its store, reports failures, and closes both.

    `on_failure` is called once when the store has failed: it contains everything acknowledged, and
    nothing more is acknowledged. With a `cell_store` this is the host of a cell: other cores run in
    the same loop and must not be blocked. `store_override` is a store for tests. `watermark` is the
    memory limit of the process. `templates` and `connection_limits` may be shared with other
    hosts.
    """

    def __init__(
        self,
        settings: Settings,
        limits: Limits,
        access: AccessControl,
        on_failure: Callable[[], object],
        cell_store: CellStore | None = None,
        store_override: Store | None = None,
        watermark: MemoryWatermark | None = None,
        templates: QueueTemplates | None = None,
        connection_limits: ConnectionLimits | None = None,
        log: LogEvent | None = None,
    ) -> None:
        self._settings = settings
        self._on_failure = on_failure
        self._cell_store = cell_store
        self._store_override = store_override
        self._watermark = watermark
        self._alerts = AlertSender(allowed=settings.webhooks.allow, handlers=load_alert_handlers())
        cells = settings.cluster.cells
        cache_bytes = settings.queues.cache_bytes
        max_ack_rows = MAX_ROWS
        if cell_store is not None:
            cache_bytes = max(cache_bytes // cells, MIN_CACHE_BYTES)
            max_ack_rows //= cells
        self._core = BrokerCore(
            asyncio.get_running_loop(),
            make_templates(settings) if templates is None else templates,
            limits=limits,
            access=access,
            log=log_event if log is None else log,
            queues_enabled=settings.queues.enabled,
            cache_bytes=cache_bytes,
            ack_rows=RowBudget(settings.queues.recent_acks, max_ack_rows),
            webhook_error=self._alerts.guard.fault_of_url,
            is_in_same_cell=_compare_cells(cells) if cell_store is not None else None,
            connection_limits=connection_limits,
        )
        self._core.engine.lifecycle.max_partitions = settings.queues.max_partitions
        schedules = self._core.engine.schedules
        schedules.max_schedules = settings.queues.max_schedules
        schedules.min_interval_ms = round(settings.queues.min_schedule_interval * 1000.0)
        self._core.engine.exclusive.rules = make_exclusive_rules(settings)
        self._restoring: asyncio.Future[list[RestoredRecord]] | None = None
        self._commit_loop: CommitLoop | None = None
        self._opened_store: OpenedStore | None = None
        self._admin_service: AdminService | None = None
        self._unavailable_reason = ""  # why the store accepts no writes
        self._is_disk_full = False
        self._memory_reason = ""  # why nothing is accepted although the store would accept it
        self.failure: Exception | None = None

    @property
    def broker(self) -> Broker:
        return self._core.broker

    @property
    def engine(self) -> Engine:
        return self._core.engine

    async def open(self, on_load: Callable[[], None] | None = None) -> None:
        """Recover the content of the store, before any client can connect.

        A store that another broker owns may be tried again. `on_load` is called in the loop when
        the thread of a cell's load has started.
        """
        check_templates(self._settings, self._alerts.guard.fault_of_url)
        opened = self._open_store()
        commit_loop = await self._recover_queues(opened, on_load)
        self._core.start()
        commit_loop.add_listener(self)
        opened.start_views()
        self._opened_store = opened
        self._commit_loop = commit_loop
        await self._restore_sessions(commit_loop)
        if self._settings.queues.enabled:
            self._schedule_owner_check()
            self._schedule_group_expiry()
        if self._settings.salvage:
            commit_loop.housekeeping.snapshot_after_salvage()
        if self._watermark is not None:
            self._watermark.register(self._on_memory_limit, self._count_memory_refusals)
        self._admin_service = self._make_admin_service(commit_loop, opened)

    def _open_store(self) -> OpenedStore:
        if self._store_override is not None:
            return OpenedStore(self._store_override)
        return open_store_of(self._settings, self._core.engine, self, self._cell_store)

    async def _recover_queues(
        self, opened: OpenedStore, on_load: Callable[[], None] | None
    ) -> CommitLoop:
        loop = asyncio.get_running_loop()
        commit_loop = self._core.attach_store(
            opened.store, self._report_events, SETTLEMENT_DELAY_SECONDS, loop.call_soon
        )
        if self._cell_store is None:
            recovery = commit_loop.load(parse_stored_rules)
        else:
            recovery = await loop.run_in_executor(None, _load, commit_loop, loop, on_load)
        self._log_recovery(recovery)
        return commit_loop

    def _log_recovery(self, recovery: RecoveryReport) -> None:
        logger.info(
            "store opened",
            extra={
                "store": hide_secrets(self._settings.store),
                "segments": recovery.segments,
                "messages": recovery.messages,
                "torn_bytes": recovery.torn_bytes,
            },
        )
        for note in recovery.warnings:
            logger.warning(note)

    async def _restore_sessions(self, commit_loop: CommitLoop) -> None:
        restoring: asyncio.Future[list[RestoredRecord]] = asyncio.get_running_loop().create_future()
        self._restoring = restoring
        commit_loop.restore_broker_state(partial(_set_restored, restoring))
        restored = await restoring
        try:
            self._core.restore(restored)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable_record("the stored sessions and retained messages", error) from error

    def _make_admin_service(self, commit_loop: CommitLoop, opened: OpenedStore) -> AdminService:
        store = hide_secrets(self._settings.store)
        store_status = StoreStatus(
            store,
            commit_loop.segment_sizes,
            self.store_fault,
            opened.read_stats,
            opened.track_losses(),
        )
        return AdminService(
            self._core.engine,
            commit_loop,
            self._core.queue_handler,
            self._core.broker,
            store,
            build_mode(),
            has_segment_files=self._settings.store == "embedded",
            store_status=store_status,
        )

    def _schedule_owner_check(self) -> None:
        """Check periodically that every subscribed owner is served."""
        broker = self._core.broker
        exclusive_handler = self._core.exclusive_handler
        seconds = self._settings.ecq.check_interval
        check = PeriodicTask(
            seconds,
            lambda: exclusive_handler.repair_subscribers(list(broker.registry.sessions.values())),
        )
        broker.scheduler.wake_at(broker.turn.now + seconds, check)

    def _schedule_group_expiry(self) -> None:
        """Look periodically for groups that have had no consumer for `limits.group_expiry`."""
        seconds = self._settings.limits.group_expiry
        if not seconds:
            return
        broker = self._core.broker
        handler = self._core.queue_handler
        interval = min(seconds / 4, MAX_EXPIRY_CHECK_SECONDS)
        check = PeriodicTask(interval, lambda: handler.expire_groups(seconds))
        broker.scheduler.wake_at(broker.turn.now + interval, check)

    @property
    def service(self) -> AdminService:
        """Return the admin service of an open core."""
        assert self._admin_service is not None
        return self._admin_service

    def check_same_cell(self, queue: Queue) -> None:
        """Refuse the rules of a recovered queue if they name queues of other cells."""
        self._core.queue_handler.service.check_same_cell(queue.rules)

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

    def _report_events(self, alerts: list[Alert], warnings: list[str]) -> None:
        for alert in alerts:
            self._alerts.send(alert)
        for warning in warnings:
            logger.warning(warning)

    def on_store_stalled(self, reason: str) -> None:
        """Refuse new messages while the store accepts no writes. Acknowledged messages are safe."""
        if reason:
            logger.error(
                "store accepts no writes, refusing publishers",
                extra={"reason": hide_secrets(reason)},
            )
        else:
            logger.warning("store accepts writes again")
        self._unavailable_reason = hide_secrets(reason)
        self._update_write_refusal()

    def on_low_space(self, reason: str) -> None:
        """Refuse new messages while the disk is nearly full.

        Stored messages are still delivered and settled, which frees space.
        """
        if reason:
            logger.error("disk nearly full, refusing publishers", extra={"reason": reason})
        else:
            logger.warning("disk has space again")
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
            + self._core.broker.router.refused_out_of_memory
        )

    def _update_write_refusal(self) -> None:
        """Set why the engine and the router refuse new messages; the store's reason comes first."""
        assert self._commit_loop is not None
        engine, router = self._commit_loop.engine, self._core.broker.router
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
                logger.critical(
                    "Redis has lost confirmed frames",
                    extra={
                        "cell": 0 if self._cell_store is None else self._cell_store.cell,
                        "first_frame": error.first,
                        "last_frame": error.last,
                        "queues": " ".join(
                            f"{name}={count}" for name, count in error.queues.items()
                        ),
                    },
                )
            logger.critical("broker failed", extra={"fault": str(error)})
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
                    None
                    if self._settings.store in ("embedded", "memory")
                    else self._settings.redis.wait
                ):
                    await committed.wait()

    async def close(self, keep: bool = True) -> None:
        """Close the store; without `keep` the store has a new owner: drop pending writes."""
        await self._alerts.close()
        if self._watermark is not None:
            self._watermark.remove(self._on_memory_limit)
        commit_loop = self._commit_loop
        opened = self._opened_store
        if commit_loop is not None and opened is not None:
            opened.stop_views()
            if keep:
                await self.flush()
                if self.failure is None:
                    opened.update_views()
            if self._cell_store is None:
                commit_loop.close()
            else:
                close_store = commit_loop.shut_down(keep)
                if close_store is not None:
                    await asyncio.get_running_loop().run_in_executor(None, close_store)


def _load(
    commit_loop: CommitLoop,
    loop: asyncio.AbstractEventLoop,
    on_load: Callable[[], None] | None,
) -> RecoveryReport:
    """Load in a thread, and say in the loop when that begins: loads of many cells wait for it."""
    if on_load is not None:
        loop.call_soon_threadsafe(on_load)
    return commit_loop.load(parse_stored_rules)


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


def build_mode() -> str:
    """Return `compiled` if the modules on the message path are native code, else `interpreted`."""
    return "interpreted" if (wire_decode.__file__ or "").endswith(".py") else "compiled"


def _compare_cells(cells: int) -> Callable[[str, str], bool]:
    """Return a function that tells whether two queues are in the same of `cells` cells."""
    return lambda queue, other: cell_of_queue(queue, cells) == cell_of_queue(other, cells)


def log_event(event: str, fields: dict[str, object]) -> None:
    logger.warning(event, extra=fields)
