"""Puts the rooms together and runs them: the only module that names concrete stores and servers.

serve ─▶ run: build the broker ─▶ open the doors ─▶ ready line ─▶ wait for a signal ─▶ stop
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
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
from sluice.access.authenticator import Gate
from sluice.access.identity import Keyring
from sluice.access.factory import access_for
from sluice.broker.broker import Broker
from sluice.broker.limits import Limits
from sluice.broker.net.listener import Door, open_door
from sluice.broker.net.origins import Origins
from sluice.broker.scheduler import Repeated
from sluice.broker.namespaces.sys_topics import SysTopics
from sluice.config.settings import Settings
from sluice.errors import ConfigError, SluiceError, StoreFailed, StoreLocked, StoreUnavailable
from sluice.broker_core import House
from sluice.process.logs import hide_secrets
from sluice.units import Address
from sluice.process.systemd import Supervisor, stop_on_signals
from sluice.process.memory_watermark import LOOK_SECONDS, Watermark, available_bytes, memory_limit

if TYPE_CHECKING:
    from sluice.admin.loop_bridge import Desk
    from sluice.admin.grpc.server import GrpcTls
    from sluice.admin.server import AdminThread, OpenDoor
    from sluice.cluster.directory import Directory

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005  # how long the log writer waits for the loop to let it run, at most
BODY_FRAME_BYTES = 65_536  # of a publish over HTTP: everything that is not its payload
RESERVED_DESCRIPTORS = 256
TLS_1_2_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # none with CBC; those of TLS 1.3 are all of this kind
LAST_WORDS_SECONDS = 2.0  # what a stop waits for clients to read our DISCONNECT


def serve(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT."""
    sys.setswitchinterval(SWITCH_SECONDS)
    if settings.cluster.coordinator == "off":
        uvloop.run(run(settings))
    else:
        # gRPC reads this when it is imported. With event engines each message wakes two threads more at both ends,
        # which costs nearly as much again; without them the thread that waits for gRPC looks at the sockets itself.
        os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
        from sluice import cluster_app

        uvloop.run(cluster_app.run(settings))


async def run(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    stop_on_signals(loop, stop)
    supervisor = Supervisor(os.environ)
    gate, keyring = access_of(settings)
    limits = limits_from(settings)
    limits.last_descriptor = allow_many_connections()
    broker = Broker(loop, limits, gate, log_event)
    gate.attach(broker, loop)
    loop.add_signal_handler(signal.SIGHUP, gate.look)
    watermark = watermark_of(settings)
    house = House(settings, broker, stop.set, watermark=watermark)
    loop.set_exception_handler(house.broke)
    doors: list[Door] = []
    doors_open = asyncio.Event()
    admin: AdminThread | None = None
    try:
        if not await take_store(settings, house, stop):
            return
        # HTTP first: `/readyz` says that the broker is not ready until every listener answers.
        admin = admin_thread(settings, house.desk(), lambda: _refusal(house, doors_open), keyring, watermark)
        admin_doors = await admin.start() if admin is not None else []
        await open_listeners(settings, broker.connect, doors, gate.ambient)
        watch_memory(watermark, broker)
        doors_open.set()
        opened: list[Door | OpenDoor] = [*doors, *admin_doors]
        SysTopics(broker, __version__).start()
        quiet_collector()
        line = ready_line(opened, settings.store)
        print(line, flush=True)
        log.info("ready", extra={door.name: door.address for door in opened})
        supervisor.ready(line)
        await stop.wait()
        supervisor.stopping()
        log.info("stopping", extra={"connections": len(broker.connections)})
    finally:
        if admin is not None:
            await admin.stop()  # first, while everything that it asks is still there
        await shut(broker, doors)
        await house.close()
        gate.close()
        supervisor.silence()
    if house.failure is not None:
        raise house.failure if isinstance(house.failure, SluiceError) else StoreFailed(str(house.failure))
    log.info("stopped")


def _refusal(house: House, doors_open: asyncio.Event) -> SluiceError | None:
    """Why the broker is not ready, or None."""
    if not doors_open.is_set():
        return StoreUnavailable("the MQTT listeners are not open yet")
    return house.refusal()


async def take_store(settings: Settings, house: House, stop: asyncio.Event) -> bool:
    """Open the store. One that another broker has may be waited for (`redis.standby`); False when we were asked to
    stop meanwhile."""
    if settings.store in ("embedded", "memory") or not settings.redis.standby:
        await house.open()
        return True
    while await _stand_by(settings, stop):
        try:
            await house.open()
            return True
        except StoreLocked:
            log.info("another broker was faster")
    return False


async def _stand_by(settings: Settings, stop: asyncio.Event) -> bool:
    """Look until nobody has the store; False when we were asked to stop."""
    from sluice.store.redis.ownership.standby import owner_of

    redis = settings.redis
    last = ""
    while not stop.is_set():
        ask = partial(owner_of, settings.store, redis.prefix, redis.answer_timeout)
        owner = await asyncio.to_thread(ask)
        if not owner:
            return True
        if owner != last:
            last = owner
            log.warning("standing by: the store has an owner", extra={"owner": hide_secrets(owner)})
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), redis.rebalance)
    return False


async def open_listeners(
    settings: Settings, connect: Callable[[], object], doors: list[Door], ambient: bool
) -> None:
    """Open every listener that has an address, adding it to `doors` at once: what is open is closed, come what may.
    `ambient`: a client may get in without a secret that it sends."""
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
                connect,
                context,
                settings.mqtt.max_packet_size,
                settings.mqtt.connect_timeout,
                Origins(settings.mqtt.ws_origins, ambient, address.host),
            )
            doors.append(door)


def admin_thread(
    settings: Settings,
    desk: Desk,
    store_fault: Callable[[], SluiceError | None],
    keyring: Keyring,
    watermark: Watermark,
    directory: Directory | None = None,
) -> AdminThread | None:
    """The doors for people and programs that look after the broker; None when they are all off. In a cluster,
    `directory` says which node has what."""
    if settings.http is None and settings.grpc is None:
        return None
    from sluice.admin.rest.routes.bulk_routes import BulkDoor
    from sluice.admin.server import AdminDoors, AdminThread  # HTTP and all that, for those who open a door

    # A message of the largest size comes as base64, which is a third more, in a frame of JSON.
    max_body = settings.mqtt.max_packet_size * 4 // 3 + BODY_FRAME_BYTES
    doors = AdminDoors(
        http=settings.http,
        grpc=settings.grpc,
        tls=tls_context(settings, clients=False) if settings.tls.http else None,
        grpc_tls=grpc_tls(settings) if settings.tls.grpc else None,
        max_body=max_body,
        queues_enabled=settings.queues.enabled,
        store_fault=store_fault,
        watermark=watermark,
        bulk_door=lambda: BulkDoor(
            settings.data if settings.store == "embedded" else None,
            settings.bulk.max_batch_bytes,
            settings.bulk.max_stage_bytes,
            settings.bulk.stage_ttl,
            settings.bulk.max_batch_rows,
        ),
        directory=directory,
        far_tls=far_tls(settings) if settings.tls.http else None,
        far_grpc_authority=far_authority(settings) if settings.tls.grpc else None,
    )
    return AdminThread(desk, keyring, doors)


def far_tls(settings: Settings) -> ssl.SSLContext:
    """How the HTTPS doors of other nodes are known: by who signs for nodes, or whom the system trusts."""
    authority = settings.cluster.tls_ca
    return ssl.create_default_context(cafile=None if authority is None else str(authority))


def far_authority(settings: Settings) -> bytes:
    """The same for gRPC, where our own certificate stands for an authority that nobody has named."""
    assert settings.tls.cert is not None
    return (settings.cluster.tls_ca or settings.tls.cert).read_bytes()


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


def watermark_of(settings: Settings) -> Watermark:
    """The memory limit of this process, as it was configured."""
    watermark = Watermark(memory_limit(settings.limits.memory, available_bytes))
    watermark.look()
    return watermark


def watch_memory(watermark: Watermark, broker: Broker) -> None:
    """Measure from now on, by the timer of this broker."""
    repeated = Repeated(LOOK_SECONDS, watermark.look)
    broker.scheduler.wake_at(broker.turn.now + LOOK_SECONDS, repeated)


def limits_from(settings: Settings) -> Limits:
    """The limits of the path of a message: the configuration's numbers without the configuration."""
    limits = Limits()
    for name, value in settings.mqtt:
        if name == "ws_origins":
            continue  # for the listeners
        setattr(limits, name, [one.encode() for one in value] if isinstance(value, list) else value)
    return limits


def access_of(settings: Settings) -> tuple[Gate, Keyring]:
    """Who may come in by which door. Nobody has to say who they are on loopback; beyond it, a door for which nobody
    could is not opened."""
    listen = settings.listen
    mqtt = [listen.mqtt, listen.mqtts, listen.ws, listen.wss]
    return access_for(settings.auth, _beyond_loopback(mqtt), _beyond_loopback([settings.http, settings.grpc]))


def _beyond_loopback(addresses: Sequence[Address | None]) -> list[str]:
    return [str(address) for address in addresses if address is not None and not address.is_loopback]


def tls_context(settings: Settings, clients: bool = True) -> ssl.SSLContext:
    """TLS 1.3, or 1.2 with forward secrecy and authenticated encryption.

    With a client CA, MQTT clients (`clients`) must show a certificate that it signed.
    """
    tls = settings.tls
    assert tls.cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(TLS_1_2_CIPHERS)
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


def log_event(event: str, facts: dict[str, object]) -> None:
    log.warning(event, extra=facts)


def allow_many_connections() -> int:
    """Raise the limit of open files to what the system lets us have; the highest that a client may take of them. The
    rest is for the log, for those who look after the broker, and for the processes it starts."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 0 if hard == resource.RLIM_INFINITY else hard - min(hard // 4, RESERVED_DESCRIPTORS)


def quiet_collector() -> None:
    """What was made at the start lives until the end: the cycle collector need not look at it, nor so often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
