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
from contextlib import suppress

import uvloop

from sluice import __version__
from sluice.alerts import AlertSender
from sluice.broker.access import Anonymous
from sluice.broker.admin_topics import AdminTopics
from sluice.broker.broker import Broker
from sluice.broker.keeper import Keeper
from sluice.broker.limits import Limits
from sluice.broker.listener import Door, open_door
from sluice.broker.queue_door import QueueDoor
from sluice.broker.responses import Responses
from sluice.broker.sys_topics import SysTopics
from sluice.clock import steady_time
from sluice.config import Settings
from sluice.errors import ConfigError, InvalidQueueConfig, StoreFailed
from sluice.logs import hide_secrets
from sluice.queues.compression import ZstdCodec
from sluice.queues.config import read_config
from sluice.queues.dead_letters import Alert
from sluice.queues.engine import Engine
from sluice.queues.keeping import Kept
from sluice.queues.rules import Rules
from sluice.queues.runner import Runner
from sluice.queues.service import QueueService
from sluice.schema import fault_of_schema, validator_of
from sluice.store.embedded.store import EmbeddedStore
from sluice.store.memory import MemoryStore
from sluice.store.protocol import Store
from sluice.wire.topics import matches

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005  # how long the log writer waits for the loop to let it run, at most
SETTLE_SECONDS = 0.005  # what acknowledgements of work may wait for a frame to ride in
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
    broker = Broker(loop, limits_from(settings), Anonymous(anonymous_allowed(settings)), log_event)
    house = House(settings, broker, stop)
    doors: list[Door] = []
    try:
        await house.open()
        await open_doors(settings, broker, doors)
        SysTopics(broker, __version__).start()
        quiet_collector()
        print(ready_line(doors, settings.store), flush=True)
        log.info("ready", extra={door.name: door.address for door in doors})
        await stop.wait()
        log.info("stopping", extra={"connections": len(broker.connections)})
    finally:
        await shut(broker, doors)
        await house.close()
    if house.failure is not None:
        raise StoreFailed(str(house.failure))
    log.info("stopped")


class House:
    """The queues and what they stand on: the store, the engine that it brings back to life, and their door."""

    def __init__(self, settings: Settings, broker: Broker, stop: asyncio.Event) -> None:
        self._settings = settings
        self._broker = broker
        self._stop = stop
        self._alerts = AlertSender()
        self._runner: Runner | None = None
        self.failure: Exception | None = None

    async def open(self) -> None:
        """Bring back what the store holds, before any client can come in."""
        check_templates(self._settings)
        loop = asyncio.get_running_loop()
        broker = self._broker
        turn = broker.turn
        engine = Engine(self._rules_for, random.random, self._settings.queues.cache_bytes, ZstdCodec())
        runner = Runner(
            engine,
            self._make_store(),
            steady_time,
            loop.call_later,
            turn.send,
            self._report,
            SETTLE_SECONDS,
            loop.call_soon,
        )
        recovery = runner.open(lambda name, text: read_config(json.loads(text), name).rules())
        self._runner = runner
        log.info(
            "store opened",
            extra={
                "store": self._settings.store,
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
        if self._settings.queues.enabled:
            router.door = QueueDoor(
                engine, turn, router.subscriptions, QueueService(engine, fault_of_schema), validator_of
            )
            runner.on_made = router.door.appeared
            router.door.admin = AdminTopics(router, router.door, broker.scheduler)
            router.door.responses = Responses(router, broker.scheduler)
            router.door.bindings_changed()
        router.keeper.restore(await kept, router, broker.registry)
        router.retained.forgotten = router.keeper.drop_retained

    def _make_store(self) -> Store:
        loop = asyncio.get_running_loop()
        if self._settings.store == "memory":
            return MemoryStore(loop.call_soon)
        if self._settings.store == "embedded":
            return EmbeddedStore(str(self._settings.data), loop.call_soon_threadsafe, self._failed)
        raise ConfigError(f"store {self._settings.store} is not built yet", "Use embedded or memory")

    def _rules_for(self, name: str) -> tuple[Rules, str]:
        """What a queue that comes into being is like: the first template whose pattern matches its name."""
        for template in self._settings.queues.templates:
            if matches(template.match.encode(), name.encode()):
                config = read_config(template.config, name)
                return config.rules(), config.text()
        config = read_config({}, name)
        return config.rules(), config.text()

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        for alert in alerts:
            self._alerts.send(alert)
        for warning in warnings:
            log.warning(warning)

    def _failed(self, fault: Exception) -> None:
        """The disk has failed us: nothing more is acknowledged, and a restart recovers what was."""
        log.critical("the store has failed", extra={"fault": str(fault)})
        self.failure = fault
        self._stop.set()

    async def close(self) -> None:
        await self._alerts.close()
        runner = self._runner
        if runner is not None:
            if self.failure is None:
                kept = asyncio.Event()
                runner.when_kept(kept.set)
                await kept.wait()
            runner.close()


def check_templates(settings: Settings) -> None:
    """A template that cannot be used is told at the start, not to the first publisher whose queue it is for."""
    for template in settings.queues.templates:
        try:
            rules = read_config(template.config, "any").rules()
            fault = fault_of_schema(rules.schema) if rules.schema else ""
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


def anonymous_allowed(settings: Settings) -> bool:
    """Nobody has to say who they are on loopback; beyond it, only when the operator has said so."""
    if settings.auth.allow_anonymous is not None:
        return settings.auth.allow_anonymous
    listen = settings.listen
    public = [
        str(address)
        for address in (listen.mqtt, listen.mqtts, listen.ws, listen.wss)
        if address is not None and not address.is_loopback
    ]
    if public:
        raise ConfigError(
            f"{', '.join(public)} can be reached from other machines, and no users are set up",
            "Listen on 127.0.0.1, or let everybody in on purpose with auth.allow_anonymous = true",
        )
    return True


def tls_context(settings: Settings) -> ssl.SSLContext:
    """TLS 1.2 or later; with a client CA, clients must show a certificate that it signed."""
    tls = settings.tls
    assert tls.cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as fault:
        raise ConfigError(
            f"the TLS files cannot be used: {fault.reason or fault}",
            "Give PEM files: a certificate chain, its private key without a pass phrase, and CA certificates",
        ) from fault
    return context


def ready_line(doors: list[Door], store: str) -> str:
    parts = [f"sluice {__version__} ready", *(f"{door.name}={door.address}" for door in doors)]
    return " ".join([*parts, f"store={hide_secrets(store)}", f"pid={os.getpid()}"])


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
