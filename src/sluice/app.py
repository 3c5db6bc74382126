"""Composes a single broker and runs it; `cluster_app` does so for a node of a cluster.

serve ─▶ run: build the broker ─▶ open listeners ─▶ ready line ─▶ wait for a signal ─▶ stop
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from sluice import __version__
from sluice.access.authenticator import Authenticator
from sluice.access.factory import build_access
from sluice.access.identity import AdminAuthenticator
from sluice.admin.server import AdminServer, AdminServerConfig, GrpcTls, OpenListener
from sluice.alerts import SsrfGuard
from sluice.broker.broker import Broker
from sluice.broker.limits import Limits
from sluice.broker.net import AllowedOrigins, Listener, open_listener
from sluice.broker.sys_topics import SysTopics
from sluice.broker.turn import PeriodicTask
from sluice.broker_host import BrokerHost
from sluice.bulk.staging import discard_stages
from sluice.config.queue_settings import check_templates, make_templates, reload_templates
from sluice.config.settings import Settings
from sluice.errors import ConfigError, SluiceError, StoreFailed, StoreLocked, StoreUnavailable
from sluice.process.logs import hide_secrets
from sluice.process.memory_watermark import (
    CHECK_SECONDS,
    MemoryWatermark,
    parse_memory_limit,
    read_available_bytes,
)
from sluice.process.systemd import SystemdNotifier, stop_on_signals
from sluice.processes.cell_directory import cell_store_path, read_cells
from sluice.queues.service import QueueTemplates
from sluice.units import Address

if TYPE_CHECKING:
    from sluice.admin.loop_bridge import LoopBridge
    from sluice.admin.rest import BulkResources
    from sluice.cluster.bootstrap import ProcessSlot
    from sluice.cluster.membership import Directory

log = logging.getLogger(__name__)

# maximum time that the log writer waits for the loop to release the GIL
GIL_SWITCH_SECONDS = 0.0005
JSON_OVERHEAD_BYTES = 65_536  # of a publish over HTTP: everything but the payload
RESERVED_DESCRIPTORS = 256
# No CBC ciphers; TLS 1.3 has none.
TLS_1_2_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
DISCONNECT_SECONDS = 2.0  # time for clients to read DISCONNECT when the broker stops


def serve(settings: Settings, read_settings: Callable[[], Settings]) -> None:
    """Run the broker until SIGTERM or SIGINT. `read_settings` reads them again, on SIGHUP."""
    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    if settings.cluster.coordinator != "off":
        from sluice import cluster_app

        uvloop.run(cluster_app.run(settings, read_settings))
    elif settings.store == "embedded" and (
        settings.processes.count != 1 or read_cells(settings.data)
    ):
        from sluice.processes import start

        start.serve(settings, read_settings)
    else:
        uvloop.run(run(settings, read_settings))


async def run(settings: Settings, read_settings: Callable[[], Settings]) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    stop_on_signals(loop, stop)
    notifier = SystemdNotifier(os.environ)
    authenticator, admin_authenticator = make_authenticators(settings)
    limits = make_limits(settings)
    limits.max_descriptor = raise_descriptor_limit()
    templates = make_templates(settings)
    watermark = make_watermark(settings)
    host = BrokerHost(
        settings, limits, authenticator, stop.set, watermark=watermark, templates=templates
    )
    broker = host.broker
    authenticator.attach(broker, loop)
    loop.add_signal_handler(
        signal.SIGHUP, partial(reload_files, authenticator, templates, read_settings)
    )
    loop.set_exception_handler(host.on_loop_error)
    listeners: list[Listener] = []
    are_listeners_open = asyncio.Event()
    admin_server: AdminServer | None = None
    try:
        if not await open_store(settings, host, stop):
            return
        # HTTP first: `/readyz` reports "not ready" until every listener is open.
        admin_server = make_admin_server(
            settings,
            host.make_loop_bridge(),
            lambda: _readiness_error(host, are_listeners_open),
            admin_authenticator,
            watermark,
            listeners,
        )
        admin_listeners = await admin_server.start() if admin_server is not None else []
        await open_listeners(
            settings, broker.connect, listeners, authenticator.has_ambient_credentials
        )
        watch_memory(watermark, broker)
        are_listeners_open.set()
        opened = addresses_by_name([*listeners, *admin_listeners])
        SysTopics(broker, __version__).start()
        tune_garbage_collector()
        ready_text = format_ready_line(opened, settings.store)
        print(ready_text, flush=True)
        log.info("ready", extra=opened)
        notifier.notify_ready(ready_text)
        notifier.start_watchdog()
        await stop.wait()
        notifier.notify_stopping()
        log.info("stopping", extra={"connections": len(broker.connections)})
    finally:
        if admin_server is not None:
            await admin_server.stop()  # first, while everything that it uses still exists
        await shut_down(broker, listeners)
        await host.close()
        authenticator.close()
        notifier.stop_watchdog()
    if host.failure is not None:
        raise (
            host.failure
            if isinstance(host.failure, SluiceError)
            else StoreFailed(str(host.failure))
        )
    log.info("stopped")


def check_settings(settings: Settings) -> list[SluiceError]:
    """Return what a start would refuse before it opens a store: access, TLS, templates."""
    problems: list[SluiceError] = []
    checks: list[Callable[[], object]] = [
        lambda: make_authenticators(settings)[0].close(),
        lambda: check_templates(settings, SsrfGuard(settings.webhooks.allow).fault_of_url),
    ]
    if settings.tls.cert is not None:
        checks.append(lambda: make_tls_context(settings))
    for check in checks:
        try:
            check()
        except SluiceError as fault:
            problems.append(fault)
        except OSError as fault:
            what = f"{fault.filename or 'a file'} cannot be read: {fault.strerror or fault}"
            problems.append(ConfigError(what))
    return problems


def reload_files(
    authenticator: Authenticator,
    templates: QueueTemplates,
    read_settings: Callable[[], Settings],
) -> None:
    """Apply changed users, rules and queue templates: what SIGHUP asks for."""
    authenticator.reload_files()
    reload_templates(templates, read_settings)


def _readiness_error(host: BrokerHost, are_listeners_open: asyncio.Event) -> SluiceError | None:
    """Return why the broker is not ready, or None."""
    if not are_listeners_open.is_set():
        return StoreUnavailable("the MQTT listeners are not open yet")
    return host.write_refusal()


async def open_store(settings: Settings, host: BrokerHost, stop: asyncio.Event) -> bool:
    """Open the store; with `redis.standby` wait while another broker owns it.

    Return False if the broker is asked to stop meanwhile.
    """
    if settings.store in ("embedded", "memory") or not settings.redis.standby:
        await host.open()
        return True
    while await _wait_for_store(settings, stop):
        try:
            await host.open()
            return True
        except StoreLocked:
            log.info("another broker took the store first")
    return False


async def _wait_for_store(settings: Settings, stop: asyncio.Event) -> bool:
    """Poll until the store has no owner; return False if the broker is asked to stop."""
    from sluice.store.redis import read_owner

    redis = settings.redis
    last = ""
    while not stop.is_set():
        read = partial(read_owner, settings.store, redis.prefix, redis.answer_timeout)
        owner = await asyncio.to_thread(read)
        if not owner:
            return True
        if owner != last:
            last = owner
            log.warning("standby: store has an owner", extra={"owner": hide_secrets(owner)})
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), redis.rebalance)
    return False


async def open_listeners(
    settings: Settings,
    connect: Callable[[], object],
    listeners: list[Listener],
    has_ambient_credentials: bool,
    is_port_shared: bool = False,
) -> None:
    """Open every configured listener and add it to `listeners` at once, so that it gets closed.

    `has_ambient_credentials`: a client may be admitted without sending a secret.
    `is_port_shared`: other processes of this node listen at the same ports.
    """
    listen = settings.listen
    tls = make_tls_context(settings) if listen.mqtts or listen.wss else None
    for name, address, context in (
        ("mqtt", listen.mqtt, None),
        ("mqtts", listen.mqtts, tls),
        ("ws", listen.ws, None),
        ("wss", listen.wss, tls),
    ):
        if address is not None:
            listener = await open_listener(
                name,
                address.host,
                address.port,
                connect,
                context,
                settings.mqtt.max_packet_size,
                settings.mqtt.connect_timeout,
                AllowedOrigins(settings.mqtt.ws_origins, has_ambient_credentials, address.host),
                is_port_shared,
            )
            listeners.append(listener)


def make_admin_server(
    settings: Settings,
    loop_bridge: LoopBridge,
    store_fault: Callable[[], SluiceError | None],
    admin_authenticator: AdminAuthenticator,
    watermark: MemoryWatermark,
    listeners: Sequence[Listener],
    directory: Directory | None = None,
    slot: ProcessSlot | None = None,
) -> AdminServer | None:
    """Return the server of the admin APIs, or None if all of them are off.

    `listeners` will hold the open MQTT listeners. In a cluster, `directory` tells which node owns
    which cell. With a `slot` the other nodes are processes of this machine, without TLS.
    """
    if settings.http is None and settings.grpc is None:
        return None
    if (upload_path := find_upload_path(settings, slot)) is not None:
        discard_stages(upload_path)
    # A message of maximum size arrives as base64, a third larger, inside JSON.
    max_body = settings.mqtt.max_packet_size * 4 // 3 + JSON_OVERHEAD_BYTES
    options = AdminServerConfig(
        http=settings.http,
        grpc=settings.grpc,
        tls=make_tls_context(settings, verify_clients=False) if settings.tls.http else None,
        grpc_tls=make_grpc_tls(settings) if settings.tls.grpc else None,
        max_body=max_body,
        queues_enabled=settings.queues.enabled,
        store_fault=store_fault,
        watermark=watermark,
        make_bulk_resources=partial(make_bulk_resources, settings, directory, slot),
        listeners=lambda: {one.name: one.address for one in list(listeners)},
        directory=directory,
        peer_tls=make_node_tls(settings) if settings.tls.http and slot is None else None,
        peer_grpc_ca=(read_node_ca(settings) if settings.tls.grpc and slot is None else None),
        starts_at_once=slot is not None and slot.number > 1,  # the first process asks them
    )
    return AdminServer(loop_bridge, admin_authenticator, options)


def make_bulk_resources(
    settings: Settings, directory: Directory | None, slot: ProcessSlot | None
) -> BulkResources:
    from sluice.admin.rest import BulkResources  # with the HTTP libraries, on first use

    return BulkResources(
        find_upload_path(settings, slot),
        partial(_store_directory, settings, directory) if settings.store == "embedded" else None,
        settings.bulk.max_batch_bytes,
        settings.bulk.max_stage_bytes,
        settings.bulk.stage_ttl,
        settings.bulk.max_batch_rows,
    )


def find_upload_path(settings: Settings, slot: ProcessSlot | None) -> Path | None:
    """Return the directory for the stages of this process; None keeps them in memory."""
    if slot is not None:
        return slot.upload_path
    return settings.data if settings.store == "embedded" else None


def _store_directory(settings: Settings, directory: Directory | None, queue: str) -> str:
    """Return the directory of the embedded store that has a queue."""
    if directory is None:
        return str(settings.data)
    return str(cell_store_path(settings.data, directory.cell_of_queue(queue)))


def make_node_tls(settings: Settings) -> ssl.SSLContext:
    """Return the TLS context for HTTPS to other nodes: trusts the CA of nodes, or the system's."""
    authority = settings.cluster.tls_ca
    return ssl.create_default_context(cafile=None if authority is None else str(authority))


def read_node_ca(settings: Settings) -> bytes:
    """Return the CA for gRPC to other nodes; without a configured CA, our own certificate."""
    assert settings.tls.cert is not None
    return (settings.cluster.tls_ca or settings.tls.cert).read_bytes()


async def shut_down(broker: Broker, listeners: list[Listener]) -> None:
    """Stop accepting work, send DISCONNECT to every client, and close the remaining connections."""
    for listener in listeners:
        listener.server.close()
    all_closed = asyncio.Event()
    broker.stop(all_closed.set)
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCONNECT_SECONDS):
            await all_closed.wait()
    broker.close()


def make_watermark(settings: Settings) -> MemoryWatermark:
    """Return the configured memory limit of this process."""
    watermark = MemoryWatermark(parse_memory_limit(settings.limits.memory, read_available_bytes))
    watermark.check()
    return watermark


def watch_memory(watermark: MemoryWatermark, broker: Broker) -> None:
    """Start measuring, with the timer of this broker."""
    repeated = PeriodicTask(CHECK_SECONDS, watermark.check)
    broker.scheduler.wake_at(broker.turn.now + CHECK_SECONDS, repeated)


def make_limits(settings: Settings) -> Limits:
    """Return the limits for the message path, copied from the settings."""
    limits = Limits()
    for name, value in settings.mqtt:
        if name == "ws_origins":
            continue  # used by the listeners
        setattr(limits, name, [one.encode() for one in value] if isinstance(value, list) else value)
    return limits


def make_authenticators(settings: Settings) -> tuple[Authenticator, AdminAuthenticator]:
    """Return the authenticators of MQTT and of the admin APIs.

    Loopback listeners need no authentication. A public listener without any way to authenticate is
    refused.
    """
    listen = settings.listen
    mqtt = [listen.mqtt, listen.mqtts, listen.ws, listen.wss]
    return build_access(
        settings.auth, _public_addresses(mqtt), _public_addresses([settings.http, settings.grpc])
    )


def _public_addresses(addresses: Sequence[Address | None]) -> list[str]:
    return [
        str(address) for address in addresses if address is not None and not address.is_loopback
    ]


def make_tls_context(settings: Settings, verify_clients: bool = True) -> ssl.SSLContext:
    """Return a context for TLS 1.3, or 1.2 with forward secrecy and authenticated encryption.

    With a client CA and `verify_clients`, clients must present a certificate that it signed.
    """
    tls = settings.tls
    assert tls.cert is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(TLS_1_2_CIPHERS)
    try:
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca is not None and verify_clients:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except ssl.SSLError as fault:
        raise ConfigError(
            f"the TLS files cannot be used: {fault.reason or fault}",
            "Use PEM files: a certificate chain, its private key without a passphrase, and CA "
            "certificates",
        ) from fault
    return context


def make_grpc_tls(settings: Settings) -> GrpcTls:
    """Return the certificate for gRPC.

    gRPC reads the files without reporting errors, so they are checked first.
    """
    make_tls_context(settings, verify_clients=False)
    assert settings.tls.cert is not None and settings.tls.key is not None
    return GrpcTls(settings.tls.cert.read_bytes(), settings.tls.key.read_bytes())


def addresses_by_name(listeners: Sequence[Listener | OpenListener]) -> dict[str, str]:
    return {listener.name: listener.address for listener in listeners}


def format_ready_line(listeners: Mapping[str, str], store: str) -> str:
    """Return the ready line with the addresses of the listeners, by name."""
    parts = [
        f"sluice {__version__} ready",
        *(f"{name}={address}" for name, address in listeners.items()),
    ]
    return " ".join([*parts, f"store={hide_secrets(store)}", f"pid={os.getpid()}"])


def raise_descriptor_limit() -> int:
    """Raise the limit of open files as far as allowed, and return the maximum for clients.

    The rest is for the log, the admin APIs and child processes.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 0 if hard == resource.RLIM_INFINITY else hard - min(hard // 4, RESERVED_DESCRIPTORS)


def tune_garbage_collector() -> None:
    """Exclude objects created at start from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
