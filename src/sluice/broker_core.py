"""One broker's queues and what they stand on: the store, the engine that it brings back to life, and their doors.

A node has one house, or in a cluster one for each cell that it owns: then many houses share a process and a loop, and
open and close while the others go on. Besides `app` this is the only module that names concrete stores.
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

from sluice.admin.loop_bridge import Desk
from sluice.admin.service import AdminService
from sluice.admin.queries.store_status import LossDesk, StoreDesk
from sluice.alerts import AlertSender
from sluice.broker.namespaces.admin_topics import AdminTopics
from sluice.broker.broker import Broker
from sluice.broker.namespaces.compacted.handler import EcqDoor
from sluice.broker.sessions.session_store import Keeper
from sluice.broker.namespaces.queues.handler import QueueDoor
from sluice.broker.namespaces.responses import Responses
from sluice.broker.scheduler import Repeated
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
from sluice.process.logs import hide_secrets
from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.config import PARTITIONS, check_new_bindings, read_config
from sluice.queues.flow.dead_letters import Alert
from sluice.queues.engine import Engine
from sluice.queues.compacted.exclusive import ExclusiveRules
from sluice.queues.log.broker_state import Kept
from sluice.queues.log.recovery import unusable
from sluice.queues.model.queue_rules import Rules
from sluice.queues.commit_loop import Runner
from sluice.queues.service import QueueService
from sluice.json_schema import fault_of_schema, validator_of
from sluice.store.embedded.store import EmbeddedStore
from sluice.store.memory import MemoryStore
from sluice.store.protocol import Store
from sluice.process.memory_watermark import Watermark
from sluice.wire import decode as wire_decode
from sluice.wire.topics import has_wildcard, matches

if TYPE_CHECKING:
    from sluice.queues.log.note_decoder import QueueMeaning
    from sluice.store.redis.views.stats import StoreSum
    from sluice.store.redis.store import RedisStore

log = logging.getLogger(__name__)

OUR_ROOMS = re.compile(r"sluice/(broker|queues|store|cluster)/")
LEAST_CACHE = 4 << 20  # bytes of bodies that a cell may keep at hand, however many cells there are
SETTLE_SECONDS = 0.005  # what acknowledgements of work may wait for a frame to ride in


@dataclass(frozen=True)
class Place:
    """Where the store of one cell of a cluster lies. `seize`: its owner is known to be dead, and is not waited for."""

    cell: int
    seize: bool = False


class House:
    """`on_failure` hears once that the store has failed: what was acknowledged is in it, and nothing more will be.
    With a `place` it is the house of a cell: other houses are at work in the same loop, and are not kept waiting.
    `keep` is the store of a house in a test. `watermark` is the memory limit of the process."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        on_failure: Callable[[], object],
        place: Place | None = None,
        keep: Store | None = None,
        watermark: Watermark | None = None,
    ) -> None:
        self._settings = settings
        self._broker = broker
        self._on_failure = on_failure
        self._place = place
        self._keep = keep
        self._restoring: asyncio.Future[list[Kept]] | None = None
        self._alerts = AlertSender(allowed=settings.webhooks.allow)
        self._is_elsewhere = settings.store not in ("embedded", "memory")
        self._partitions = settings.redis.partitions if self._is_elsewhere else PARTITIONS
        self._runner: Runner | None = None
        self._admin: AdminService | None = None
        self._watermark = watermark
        self._unavailable = ""  # why the store takes nothing
        self._no_room = False  # and whether that is for want of room on the disk
        self._no_memory = ""  # why nothing is accepted though the store would take it
        self._on_opened: Callable[[], None] | None = None
        self._polling: asyncio.TimerHandle | None = None
        self._redis: RedisStore | None = None
        self.failure: Exception | None = None
        self.furnish: Callable[[], None] | None = (
            None  # called when the doors are there and nobody has come yet
        )

    async def open(self) -> None:
        """Bring back what the store holds, before any client can come in."""
        check_templates(self._settings, self._alerts.guard.fault_of_url)
        loop = asyncio.get_running_loop()
        broker = self._broker
        turn = broker.turn
        cache = self._settings.queues.cache_bytes
        if self._place is not None:
            cache = max(cache // self._settings.cluster.cells, LEAST_CACHE)
        engine = Engine(self._rules_for, random.random, cache, ZstdCodec())
        engine.max_partitions = self._settings.queues.max_partitions
        engine.exclusive.rules = exclusive_rules(self._settings)
        runner = Runner(
            engine,
            self._make_store(engine),
            steady_time,
            loop.call_later,
            turn.send,
            self._report,
            SETTLE_SECONDS,
            loop.call_soon,
        )
        if self._place is None:
            recovery = runner.load(_rules_from)
        else:
            recovery = await loop.run_in_executor(None, runner.load, _rules_from)
        runner.begin()
        runner.on_broken = self._failed
        if self._on_opened is not None:
            self._on_opened()
        self._runner = runner
        log.info(
            "store opened",
            extra={
                "store": hide_secrets(self._settings.store),
                "segments": recovery.segments,
                "messages": recovery.messages,
                "torn_bytes": recovery.torn_bytes,
            },
        )
        for note in recovery.notes:
            log.warning(note)
        restoring: asyncio.Future[list[Kept]] = loop.create_future()
        self._restoring = restoring
        runner.restore(partial(_restored, restoring))
        router = broker.router
        router.keeper = Keeper(engine.keeping, turn)
        turn.before_flush = runner.end_turn
        runner.frame_taken = router.frame_taken
        service = QueueService(
            engine, fault_of_schema, self._alerts.guard.fault_of_url, partitions=self._partitions
        )
        door = QueueDoor(engine, turn, router.subscriptions, service, validator_of)
        if self._settings.queues.enabled:
            router.door = door
            runner.on_made = router.door.appeared
            router.door.admin = AdminTopics(router, router.door, broker.scheduler)
            router.door.responses = Responses(router, broker.scheduler)
            if self.furnish is not None:
                self.furnish()
            router.door.bindings_changed()
            self._check_owners(router.door.ecq)
        found = await restoring
        try:
            router.keeper.restore(found, router, broker.registry)
        except (StoreError, MemoryError):
            raise
        except Exception as error:
            raise unusable("what is kept of sessions and retained messages", error) from error
        if self._settings.salvage:
            runner.leave_damage_behind()
        router.retained.forgotten = router.keeper.drop_retained
        store = hide_secrets(self._settings.store)
        direct = self._settings.store == "embedded"
        redis = self._redis
        losses = None
        if redis is not None:
            losses = LossDesk(self._cell, redis.losses, self._confirm_loss)
        told = StoreDesk(
            store, runner.segment_sizes, self.fault, self._ask_redis if redis is not None else None, losses
        )
        if self._watermark is not None:
            self._watermark.register(self._short_of_memory, self._refused_for_memory)
        self._admin = AdminService(
            engine, runner, door, broker, store, how_built(), direct=direct, store=told
        )

    def _check_owners(self, door: EcqDoor) -> None:
        """From time to time, whether every owner that is subscribed is also served."""
        registry = self._broker.registry
        seconds = self._settings.ecq.check_interval
        check = Repeated(seconds, lambda: door.heal(list(registry.sessions.values())))
        self._broker.scheduler.wake_at(self._broker.turn.now + seconds, check)

    @property
    def service(self) -> AdminService:
        """What the admin doors ask, once the house is open."""
        assert self._admin is not None
        return self._admin

    def desk(self) -> Desk:
        """Where the admin doors put their questions, once the house is open."""
        assert self._admin is not None
        return Desk(self._admin, asyncio.get_running_loop())

    def fault(self) -> str:
        """What is wrong with the store, or nothing."""
        return self._unavailable if self.failure is None else str(self.failure)

    def refusal(self) -> SluiceError | None:
        """The error with which the store refuses what would have to be kept, or None. A store that
        has failed needs a
        restart; one on a disk that is nearly full, or away for a while, does not."""
        if self.failure is not None:
            failed = self.failure
            return failed if isinstance(failed, StoreError) else StoreFailed(str(failed))
        if not self._unavailable:
            return None
        return NoRoom(self._unavailable) if self._no_room else StoreUnavailable(self._unavailable)

    def _make_store(self, engine: Engine) -> Store:
        loop = asyncio.get_running_loop()
        if self._keep is not None:
            return self._keep
        if self._settings.store == "memory":
            return MemoryStore(loop.call_soon)
        if self._settings.store == "embedded":
            return EmbeddedStore(
                str(self._settings.data),
                loop.call_soon_threadsafe,
                self._failed,
                salvage=self._settings.salvage,
                min_free_bytes=self._settings.disk.min_free,
                on_short=self._short_of_room,
            )
        try:
            from sluice.queues.log.note_decoder import QueueMeaning
            from sluice.store.redis.options import Options
            from sluice.store.redis.store import RedisStore
        except ImportError as missing:
            raise ConfigError(
                f"the store in Redis needs packages that are not here: {missing.name}",
                "Install sluice[redis]",
            ) from missing
        redis = self._settings.redis
        engine.max_length = redis.max_length
        place = self._place
        meaning = QueueMeaning(engine)
        store = RedisStore(
            self._settings.store,
            loop.call_soon_threadsafe,
            self._failed,
            on_stall=self._stalled,
            meaning=meaning,
            options=Options(
                prefix=self._prefix,
                tag=self._tag,
                seize=place is not None and place.seize,
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
        self._redis = store
        self._on_opened = partial(self._show, store, meaning, redis.poll)
        return store

    @property
    def _prefix(self) -> str:
        prefix = self._settings.redis.prefix
        return prefix if self._place is None else f"{prefix}:c{self._place.cell}"

    @property
    def _tag(self) -> str:
        return "log" if self._place is None else f"log:c{self._place.cell}"

    async def _ask_redis(self) -> StoreSum:
        """What Redis shows of the queues, to anybody who asks."""
        from sluice.store.redis.views.stats import ask_redis

        seconds = self._settings.redis.answer_timeout
        return await asyncio.to_thread(ask_redis, self._settings.store, self._prefix, seconds, self._tag)

    async def _confirm_loss(self, last: int) -> bool:
        from sluice.store.redis.log.frame_losses import confirm_loss

        seconds = self._settings.redis.answer_timeout
        return await asyncio.to_thread(
            confirm_loss, self._settings.store, self._prefix, seconds, self._tag, last
        )

    @property
    def _cell(self) -> int:
        return 0 if self._place is None else self._place.cell

    def _show(self, store: RedisStore, meaning: QueueMeaning, poll: float) -> None:
        """The queues are back: show them to those who look into Redis, from now on."""
        meaning.learn()
        store.begin_showing()
        self._follow(store, poll)

    def _follow(self, store: RedisStore, poll: float) -> None:
        store.look(steady_time())
        self._polling = asyncio.get_running_loop().call_later(poll, self._follow, store, poll)

    def _rules_for(self, name: str) -> tuple[Rules, str]:
        """What a queue that comes into being is like: the first template whose pattern matches its name."""
        for template in self._settings.queues.templates:
            if matches(template.match.encode(), name.encode()):
                config = read_config(template.config, name, partitions=self._partitions)
                return config.rules(), config.text()
        config = read_config({}, name, partitions=self._partitions)
        return config.rules(), config.text()

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        for alert in alerts:
            self._alerts.send(alert)
        for warning in warnings:
            log.warning(warning)

    def _stalled(self, reason: str) -> None:
        """The store takes no writes, or takes them again. What was acknowledged is safe; what is new is refused."""
        if reason:
            log.error(
                "the store takes no writes: publishers are refused", extra={"reason": hide_secrets(reason)}
            )
        else:
            log.warning("the store takes writes again")
        self._unavailable = hide_secrets(reason)
        self._refuse_or_accept()

    def _short_of_room(self, reason: str) -> None:
        """The disk is nearly full, or has room again. Whatever would have to be kept is refused; what is kept goes on
        being delivered and settled, which makes room."""
        if reason:
            log.error("the disk is nearly full: publishers are refused", extra={"reason": reason})
        else:
            log.warning("the disk has room again")
        self._unavailable = reason
        self._no_room = bool(reason)
        assert self._runner is not None
        self._runner.short_of_room(bool(reason))
        self._refuse_or_accept()

    def _short_of_memory(self, reason: str) -> None:
        """The process uses too much memory, or has enough again (see `watermark`)."""
        self._no_memory = reason
        self._refuse_or_accept()

    def _refused_for_memory(self) -> int:
        assert self._runner is not None
        return self._runner.engine.refused_for_memory + self._broker.router.refused_for_memory

    def _refuse_or_accept(self) -> None:
        """Tell the engine and the router why new messages are refused. What the store says comes first."""
        assert self._runner is not None
        engine, router = self._runner.engine, self._broker.router
        no_memory = bool(self._no_memory) and not self._unavailable
        engine.no_memory = router.no_memory = no_memory
        engine.no_room = router.no_room = self._no_room or no_memory
        engine.unavailable = self._unavailable or self._no_memory
        router.stalled(engine.unavailable)

    def broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody has caught. One in a callback of ours has ended a turn in the middle: frames that
        nobody commits, answers that nobody sends. So has a lack of memory, wherever it was felt. Nobody knows what is
        half done then, so the process ends as if it had been killed, and a restart goes by what the store has. All
        others cost a connection or a task, and a line in the log."""
        broken = breakage_in(context)
        if broken is not None:
            self._failed(broken)
        with suppress(MemoryError):
            loop.default_exception_handler(context)

    def _failed(self, fault: Exception) -> None:
        """The disk has failed us, or we have: nothing more is acknowledged, and a restart recovers what was."""
        if self.failure is not None:
            return
        self.failure = fault
        self._on_failure()
        if self._runner is not None:
            self._runner.freeze()
        with suppress(MemoryError):
            if isinstance(fault, FramesLost):
                log.critical(
                    "Redis has lost confirmed frames",
                    extra={
                        "cell": self._cell,
                        "first_frame": fault.first,
                        "last_frame": fault.last,
                        "queues": " ".join(f"{name}={count}" for name, count in fault.queues.items()),
                    },
                )
            log.critical("the broker cannot go on", extra={"fault": str(fault)})
        if self._restoring is not None and not self._restoring.done():
            self._restoring.set_exception(fault)

    async def flush(self) -> None:
        """Until all that was asked of the store so far is kept, and whoever waits to hear so has been told."""
        runner = self._runner
        if runner is not None and self.failure is None:
            kept = asyncio.Event()
            runner.when_kept(kept.set)
            with suppress(TimeoutError):  # nobody was told that the rest is kept
                async with asyncio.timeout(self._settings.redis.wait if self._is_elsewhere else None):
                    await kept.wait()

    async def close(self, keep: bool = True) -> None:
        """Without `keep`: the store is not ours any more, and what is not in it yet was promised to nobody."""
        await self._alerts.close()
        if self._watermark is not None:
            self._watermark.remove(self._short_of_memory)
        runner = self._runner
        if self._polling is not None:
            self._polling.cancel()
        if runner is not None:
            if keep:
                await self.flush()
                if self._redis is not None and self.failure is None:
                    self._redis.look(steady_time())  # what has happened since the last look
            if self._place is None:
                runner.close()
            else:
                close_store = runner.finish(keep)
                if close_store is not None:
                    await asyncio.get_running_loop().run_in_executor(None, close_store)


def breakage_in(context: dict[str, Any]) -> BrokerBroken | None:
    """Whether an exception that the loop reports leaves nobody knowing what is half done."""
    error = context.get("exception")
    if isinstance(error, MemoryError) or ("handle" in context and is_ours(error)):
        assert isinstance(error, Exception)
        return BrokerBroken(error)
    return None


def is_ours(error: BaseException | None) -> bool:
    """Whether a room on the path of a message was at work when this was raised, and not only a library."""
    trace = error.__traceback__ if isinstance(error, Exception) else None
    while trace is not None:
        if OUR_ROOMS.search(trace.tb_frame.f_code.co_filename):
            return True
        trace = trace.tb_next
    return False


def _restored(restoring: asyncio.Future[list[Kept]], found: list[Kept]) -> None:
    """The store may have failed between question and answer: another node has taken it over, say."""
    if not restoring.done():
        restoring.set_result(found)


def _rules_from(name: str, text: str) -> Rules:
    return read_config(json.loads(text), name).rules()


def check_templates(settings: Settings, fault_of_webhook: Callable[[str], str]) -> None:
    """A template that cannot be used is told at the start, not to the first publisher whose queue it is for."""
    for template in settings.queues.templates:
        try:
            config = read_config(template.config, "any")
            check_new_bindings(config, None)
            rules = config.rules()
            fault = fault_of_schema(rules.schema) if rules.schema else ""
            if not fault and rules.alert_webhook:
                fault = fault_of_webhook(rules.alert_webhook)
            if not fault and settings.cluster.coordinator != "off":
                fault = _misplaced(template.match, rules, settings.cluster.cells)
        except InvalidQueueConfig as error:
            fault = str(error)
        if fault:
            raise ConfigError(
                f"queues.templates: the one for {template.match!r} cannot be used: {fault}",
                "Mend the template",
            )


def _misplaced(match: str, rules: Rules, cells: int) -> str:
    """A message moves to its dead letters in one step of one store: in a cluster they must lie with its queue. `rules`
    are those of a queue that is called `any`."""
    is_for_one = not has_wildcard(match.encode())
    for name in (rules.dlq_name if rules.dlq_enabled else "", rules.invalid_name):
        if not name or name == "dlq/any":
            continue
        if not is_for_one or cell_of_queue(name, cells) != cell_of_queue(match, cells):
            return (
                f"dlq_config names {name!r}, which does not lie in the cell of every queue that the template is for. "
                "Leave the name out: dead letters then go to dlq/<queue>, which lies with its queue"
            )
    return ""


def exclusive_rules(settings: Settings) -> ExclusiveRules:
    """How exclusive compacted queues behave. Of the room for bodies they have a quarter."""
    told = settings.ecq
    rules = ExclusiveRules()
    rules.retention = told.retention
    rules.sweep_interval = told.sweep_interval
    rules.max_message_size = told.max_message_size
    rules.max_keys = told.max_keys
    rules.sync = told.durability == "sync"
    rules.cache_bytes = settings.queues.cache_bytes // 4
    return rules


def how_built() -> str:
    """`compiled` when the rooms on the path of a message are native code, else `interpreted`."""
    return "interpreted" if (wire_decode.__file__ or "").endswith(".py") else "compiled"
