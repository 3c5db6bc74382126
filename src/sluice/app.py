"""Puts the rooms together and runs them: the only module that names concrete stores and servers.

serve ─▶ run: build the broker ─▶ open the doors ─▶ ready line ─▶ wait for a signal ─▶ stop
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import random
import resource
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import uvloop

from sluice import __version__
from sluice.access.gate import Gate
from sluice.access.identity import Keyring
from sluice.access.start import access_for
from sluice.admin.desk import Desk
from sluice.admin.service import AdminService
from sluice.admin.storing import StoreDesk
from sluice.alerts import AlertSender
from sluice.broker.admin_topics import AdminTopics
from sluice.broker.broker import Broker
from sluice.broker.ecq_door import EcqDoor
from sluice.broker.keeper import Keeper
from sluice.broker.limits import Limits
from sluice.broker.listener import Door, open_door
from sluice.broker.queue_door import QueueDoor
from sluice.broker.responses import Responses
from sluice.broker.scheduler import Repeated
from sluice.broker.sys_topics import SysTopics
from sluice.clock import steady_time
from sluice.config import Settings
from sluice.errors import ConfigError, InvalidQueueConfig, StoreError, StoreFailed, StoreLocked
from sluice.logs import hide_secrets
from sluice.notation import Address
from sluice.queues.compression import ZstdCodec
from sluice.queues.config import PARTITIONS, read_config
from sluice.queues.dead_letters import Alert
from sluice.queues.engine import Engine
from sluice.queues.exclusive import ExclusiveRules
from sluice.queues.keeping import Kept
from sluice.queues.rules import Rules
from sluice.queues.runner import Runner
from sluice.queues.service import QueueService
from sluice.schema import fault_of_schema, validator_of
from sluice.store.embedded.store import EmbeddedStore
from sluice.store.memory import MemoryStore
from sluice.store.protocol import Store
from sluice.wire import decode as wire_decode
from sluice.wire.topics import matches

if TYPE_CHECKING:
    from sluice.admin.grpc.server import GrpcTls
    from sluice.admin.thread import AdminThread, OpenDoor
    from sluice.queues.meaning import QueueMeaning
    from sluice.store.redis.aggregate import StoreSum
    from sluice.store.redis.store import RedisStore

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005  # how long the log writer waits for the loop to let it run, at most
SETTLE_SECONDS = 0.005  # what acknowledgements of work may wait for a frame to ride in
BODY_FRAME_BYTES = 65_536  # of a publish over HTTP: everything that is not its payload
LAST_WORDS_SECONDS = 2.0  # what a stop waits for clients to read our DISCONNECT


def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    sys.setswitchinterval(SWITCH_SECONDS)
    uvloop.run(run(settings))


async def run(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    allow_many_connections()
    gate, keyring = access_of(settings)
    broker = Broker(loop, limits_from(settings), gate, log_event)
    gate.attach(broker, loop)
    loop.add_signal_handler(signal.SIGHUP, gate.look)
    house = House(settings, broker, stop)
    doors: list[Door] = []
    admin: AdminThread | None = None
    try:
        if not await house.take_store():
            return
        await open_doors(settings, broker, doors)
        admin = admin_thread(settings, house, keyring)
        opened: list[Door | OpenDoor] = [*doors, *(await admin.start() if admin is not None else [])]
        SysTopics(broker, __version__).start()
        quiet_collector()
        print(ready_line(opened, settings.store), flush=True)
        log.info("ready", extra={door.name: door.address for door in opened})
        await stop.wait()
        log.info("stopping", extra={"connections": len(broker.connections)})
    finally:
        if admin is not None:
            await admin.stop()  # first, while everything that it asks is still there
        await shut(broker, doors)
        await house.close()
        gate.close()
    if house.failure is not None:
        raise house.failure if isinstance(house.failure, StoreError) else StoreFailed(str(house.failure))
    log.info("stopped")


class House:
    """The queues and what they stand on: the store, the engine that it brings back to life, and their door."""

    def __init__(self, settings: Settings, broker: Broker, stop: asyncio.Event) -> None:
        self._settings = settings
        self._broker = broker
        self._stop = stop
        self._alerts = AlertSender(allowed=settings.webhooks.allow)
        self._is_elsewhere = settings.store not in ("embedded", "memory")
        self._partitions = settings.redis.partitions if self._is_elsewhere else PARTITIONS
        self._runner: Runner | None = None
        self._admin: AdminService | None = None
        self._unavailable = ""
        self._on_opened: Callable[[], None] | None = None
        self._polling: asyncio.TimerHandle | None = None
        self._redis: RedisStore | None = None
        self.failure: Exception | None = None

    async def take_store(self) -> bool:
        """Open the store. One that another broker has may be waited for (`redis.standby`); False when we were asked to
        stop meanwhile."""
        if not (self._is_elsewhere and self._settings.redis.standby):
            await self.open()
            return True
        while await self._stand_by():
            try:
                await self.open()
                return True
            except StoreLocked:
                log.info("another broker was faster")
        return False

    async def _stand_by(self) -> bool:
        """Look until nobody has the store; False when we were asked to stop."""
        from sluice.store.redis.standby import owner_of

        redis = self._settings.redis
        last = ""
        while not self._stop.is_set():
            ask = partial(owner_of, self._settings.store, redis.prefix, redis.answer_timeout)
            owner = await asyncio.to_thread(ask)
            if not owner:
                return True
            if owner != last:
                last = owner
                log.warning("standing by: the store has an owner", extra={"owner": hide_secrets(owner)})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), redis.rebalance)
        return False

    async def open(self) -> None:
        """Bring back what the store holds, before any client can come in."""
        check_templates(self._settings, self._alerts.guard.fault_of_url)
        loop = asyncio.get_running_loop()
        broker = self._broker
        turn = broker.turn
        engine = Engine(self._rules_for, random.random, self._settings.queues.cache_bytes, ZstdCodec())
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
        recovery = runner.open(lambda name, text: read_config(json.loads(text), name).rules())
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
        kept: asyncio.Future[list[Kept]] = loop.create_future()
        runner.restore(kept.set_result)
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
            router.door.bindings_changed()
            self._check_owners(router.door.ecq)
        router.keeper.restore(await kept, router, broker.registry)
        router.retained.forgotten = router.keeper.drop_retained
        store = hide_secrets(self._settings.store)
        direct = self._settings.store == "embedded"
        told = StoreDesk(store, runner.segment_sizes, self.fault, self._ask_redis if self._redis else None)
        self._admin = AdminService(
            engine, runner, door, broker, store, how_built(), direct=direct, store=told
        )

    def _check_owners(self, door: EcqDoor) -> None:
        """From time to time, whether every owner that is subscribed is also served."""
        registry = self._broker.registry
        seconds = self._settings.ecq.check_interval
        check = Repeated(seconds, lambda: door.heal(list(registry.sessions.values())))
        self._broker.scheduler.wake_at(self._broker.turn.now + seconds, check)

    def desk(self) -> Desk:
        """Where the admin doors put their questions, once the house is open."""
        assert self._admin is not None
        return Desk(self._admin, asyncio.get_running_loop())

    def fault(self) -> str:
        """What is wrong with the store, or nothing."""
        return self._unavailable if self.failure is None else str(self.failure)

    def _make_store(self, engine: Engine) -> Store:
        loop = asyncio.get_running_loop()
        if self._settings.store == "memory":
            return MemoryStore(loop.call_soon)
        if self._settings.store == "embedded":
            return EmbeddedStore(str(self._settings.data), loop.call_soon_threadsafe, self._failed)
        try:
            from sluice.queues.meaning import QueueMeaning
            from sluice.store.redis.options import Options
            from sluice.store.redis.store import RedisStore
        except ImportError as missing:
            raise ConfigError(
                f"the store in Redis needs packages that are not here: {missing.name}",
                "Install sluice[redis]",
            ) from missing
        redis = self._settings.redis
        engine.max_length = redis.max_length
        meaning = QueueMeaning(engine)
        store = RedisStore(
            self._settings.store,
            loop.call_soon_threadsafe,
            self._failed,
            on_stall=self._stalled,
            meaning=meaning,
            options=Options(
                prefix=redis.prefix,
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

    async def _ask_redis(self) -> StoreSum:
        """What Redis shows of the queues, to anybody who asks."""
        from sluice.store.redis.aggregate import ask_redis

        redis = self._settings.redis
        return await asyncio.to_thread(ask_redis, self._settings.store, redis.prefix, redis.answer_timeout)

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
        assert self._runner is not None
        self._runner.engine.unavailable = self._unavailable
        self._broker.router.stalled(self._unavailable)

    def _failed(self, fault: Exception) -> None:
        """The disk has failed us: nothing more is acknowledged, and a restart recovers what was."""
        log.critical("the store has failed", extra={"fault": str(fault)})
        self.failure = fault
        self._stop.set()

    async def close(self) -> None:
        await self._alerts.close()
        runner = self._runner
        if self._polling is not None:
            self._polling.cancel()
        if runner is not None:
            if self.failure is None:
                kept = asyncio.Event()
                runner.when_kept(kept.set)
                with suppress(TimeoutError):  # nobody was told that the rest is kept
                    async with asyncio.timeout(self._settings.redis.wait if self._is_elsewhere else None):
                        await kept.wait()
                if self._redis is not None:
                    self._redis.look(steady_time())  # what has happened since the last look
            runner.close()


def check_templates(settings: Settings, fault_of_webhook: Callable[[str], str]) -> None:
    """A template that cannot be used is told at the start, not to the first publisher whose queue it is for."""
    for template in settings.queues.templates:
        try:
            rules = read_config(template.config, "any").rules()
            fault = fault_of_schema(rules.schema) if rules.schema else ""
            if not fault and rules.alert_webhook:
                fault = fault_of_webhook(rules.alert_webhook)
        except InvalidQueueConfig as error:
            fault = str(error)
        if fault:
            raise ConfigError(
                f"queues.templates: the one for {template.match!r} cannot be used: {fault}",
                "Mend the template",
            )


async def open_doors(settings: Settings, broker: Broker, doors: list[Door]) -> None:
    """Open every listener that has an address, adding it to `doors` at once: what is open is closed, come what may."""
    listen = settings.listen
    tls = tls_context(settings) if listen.mqtts or listen.wss else None
    for name, address, context in (
        ("mqtt", listen.mqtt, None),
        ("mqtts", listen.mqtts, tls),
        ("ws", listen.ws, None),
        ("wss", listen.wss, tls),
    ):
        if address is not None:
            door = await open_door(
                name,
                address.host,
                address.port,
                broker.connect,
                context,
                settings.mqtt.max_packet_size,
                settings.mqtt.connect_timeout,
            )
            doors.append(door)


def admin_thread(settings: Settings, house: House, keyring: Keyring) -> AdminThread | None:
    """The doors for people and programs that look after the broker; None when they are all off."""
    if settings.http is None and settings.grpc is None:
        return None
    from sluice.admin.rest.bulk import BulkDoor
    from sluice.admin.thread import AdminDoors, AdminThread  # HTTP and all that, for those who open a door

    # A message of the largest size comes as base64, which is a third more, in a frame of JSON.
    max_body = settings.mqtt.max_packet_size * 4 // 3 + BODY_FRAME_BYTES
    doors = AdminDoors(
        http=settings.http,
        grpc=settings.grpc,
        tls=tls_context(settings, clients=False) if settings.tls.http else None,
        grpc_tls=grpc_tls(settings) if settings.tls.grpc else None,
        max_body=max_body,
        queues_enabled=settings.queues.enabled,
        store_fault=house.fault,
        bulk_door=lambda: BulkDoor(
            settings.data if settings.store == "embedded" else None,
            settings.bulk.max_batch_bytes,
            settings.bulk.max_stage_bytes,
            settings.bulk.stage_ttl,
        ),
    )
    return AdminThread(house.desk(), keyring, doors)


async def shut(broker: Broker, doors: list[Door]) -> None:
    """No new work, then a word to every client, then the end of those who do not read it."""
    for door in doors:
        door.server.close()
    gone = asyncio.Event()
    broker.stop(gone.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_WORDS_SECONDS):
            await gone.wait()
    broker.close()


def limits_from(settings: Settings) -> Limits:
    """The limits of the path of a message: the configuration's numbers without the configuration."""
    limits = Limits()
    for name, value in settings.mqtt:
        setattr(limits, name, [one.encode() for one in value] if isinstance(value, list) else value)
    return limits


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


def access_of(settings: Settings) -> tuple[Gate, Keyring]:
    """Who may come in by which door. Nobody has to say who they are on loopback; beyond it, a door for which nobody
    could is not opened."""
    listen = settings.listen
    mqtt = [listen.mqtt, listen.mqtts, listen.ws, listen.wss]
    return access_for(settings.auth, _beyond_loopback(mqtt), _beyond_loopback([settings.http, settings.grpc]))


def _beyond_loopback(addresses: Sequence[Address | None]) -> list[str]:
    return [str(address) for address in addresses if address is not None and not address.is_loopback]


def tls_context(settings: Settings, clients: bool = True) -> ssl.SSLContext:
    """TLS 1.2 or later; with a client CA, MQTT clients (`clients`) must show a certificate that it signed."""
    tls = settings.tls
    assert tls.cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca is not None and clients:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as fault:
        raise ConfigError(
            f"the TLS files cannot be used: {fault.reason or fault}",
            "Give PEM files: a certificate chain, its private key without a pass phrase, and CA certificates",
        ) from fault
    return context


def grpc_tls(settings: Settings) -> GrpcTls:
    """The same certificate for gRPC, which reads the files for itself and tells no faults: so they are tried first."""
    from sluice.admin.grpc.server import GrpcTls

    tls_context(settings, clients=False)
    assert settings.tls.cert is not None and settings.tls.key is not None
    return GrpcTls(settings.tls.cert.read_bytes(), settings.tls.key.read_bytes())


def ready_line(doors: Sequence[Door | OpenDoor], store: str) -> str:
    parts = [f"sluice {__version__} ready", *(f"{door.name}={door.address}" for door in doors)]
    return " ".join([*parts, f"store={hide_secrets(store)}", f"pid={os.getpid()}"])


def how_built() -> str:
    """`compiled` when the rooms on the path of a message are native code, else `interpreted`."""
    return "interpreted" if (wire_decode.__file__ or "").endswith(".py") else "compiled"


def log_event(event: str, facts: dict[str, object]) -> None:
    log.warning(event, extra=facts)


def allow_many_connections() -> None:
    """Raise the limit of open files to what the system lets us have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def quiet_collector() -> None:
    """What was made at the start lives until the end: the cycle collector need not look at it, nor so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
