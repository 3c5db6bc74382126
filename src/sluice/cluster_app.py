"""Composes and runs a node of a cluster, as `app` does for a single broker, with many cells.

listeners ─▶ ingress ─▶ cells of this node, or links to other nodes
coordinator ─▶ cells: which of them are opened and closed here
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from sluice import __version__
from sluice.access.watched_file import warn_if_readable_by_others
from sluice.admin.forwarding import ClusterAdminService
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.server import AdminServer, OpenListener
from sluice.admin.service import AdminService
from sluice.app import (
    addresses_by_name,
    format_ready_line,
    make_admin_server,
    make_authenticators,
    make_limits,
    make_watermark,
    open_listeners,
    raise_descriptor_limit,
    reload_files,
    tune_garbage_collector,
    watch_memory,
)
from sluice.broker.broker import Broker
from sluice.broker.net import ConnectionLimits, Listener
from sluice.broker.sys_topics import CounterExchange, SysTopics
from sluice.broker_host import BrokerHost, build_mode, find_fatal_error, log_event
from sluice.cluster.bootstrap import (
    ProcessSlot,
    make_coordinator,
    make_link_key,
    make_peer_links,
    make_process_coordinator,
    node_info,
)
from sluice.cluster.cells import Cells, owner_of
from sluice.cluster.client_ingress import ClientIngress
from sluice.cluster.failure_detector import FailureDetector
from sluice.cluster.membership import (
    CoordinatorError,
    Directory,
    Membership,
    NodeInfo,
    ProcessKv,
)
from sluice.cluster.node import Node
from sluice.config.queue_settings import make_templates
from sluice.config.settings import Settings
from sluice.errors import BrokerBroken, SluiceError, StoreUnavailable
from sluice.process.logs import hide_secrets
from sluice.process.systemd import SystemdNotifier, stop_on_signals
from sluice.store_opener import CellStore

log = logging.getLogger(__name__)

REJOIN_RETRY_SECONDS = 0.2  # between attempts to rejoin the cluster
STABLE_SECONDS = 60.0  # a node evicted again within this time waits longer each time,
MAX_REJOIN_DELAY_SECONDS = 30.0  # up to this
READY_TIMEOUT_SECONDS = 30.0  # a start waits this long for every cell to have an owner


async def run(
    settings: Settings,
    read_settings: Callable[[], Settings],
    slot: ProcessSlot | None = None,
) -> None:
    """Run a node until SIGTERM or SIGINT. With a `slot` it is one process of a node."""
    # Without this gRPC writes a line to stderr for every node that leaves.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    if slot is None:
        stop_on_signals(loop, stop)
    else:
        # Both may come twice, from a terminal or from systemd and from the supervisor.
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
    notifier = SystemdNotifier(os.environ if slot is None else {})  # the supervisor notifies
    server = ClusterServer(settings, stop.set, slot)
    loop.set_exception_handler(server.on_loop_error)
    loop.add_signal_handler(
        signal.SIGHUP,
        partial(reload_files, server.authenticator, server.templates, read_settings),
    )
    try:
        await server.start()
        tune_garbage_collector()
        opened = addresses_by_name([*server.listeners, *server.admin_listeners])
        ready_text = format_ready_line(opened, settings.store)
        if server.process_kv is None:
            print(ready_text, flush=True)
        else:
            server.process_kv.report_ready(opened)
        log.info("ready", extra=opened)
        notifier.notify_ready(ready_text)
        notifier.start_watchdog()
        await stop.wait()
        notifier.notify_stopping()
        log.info("stopping", extra={"cells": len(server.cells.open_cells)})
    finally:
        await server.stop()
        notifier.stop_watchdog()
    if server.failure is not None:
        raise server.failure
    log.info("stopped")


class ProcessCounters(CounterExchange):
    """Exchanges the counters of `$SYS` between the processes of a node, at their supervisor."""

    def __init__(self, coordinator: Membership) -> None:
        self._coordinator = coordinator
        self._sharing: asyncio.Task[None] | None = None

    def exchange(self, values: dict[str, int]) -> list[dict[str, int]]:
        self._sharing = asyncio.get_running_loop().create_task(self._share(values))
        this_node = self._coordinator.node_id
        known = self._coordinator.counters.items()
        return [counters for node_id, counters in known if node_id != this_node]

    async def _share(self, values: dict[str, int]) -> None:
        with suppress(CoordinatorError):  # this process is stopping
            await self._coordinator.share_counters(values)


class ClusterServer:
    """One node: its listeners, cells, admin APIs and membership.

    `on_failure` is called when the node must stop: after a failure, or by its supervisor.
    """

    def __init__(
        self,
        settings: Settings,
        on_failure: Callable[[], object],
        slot: ProcessSlot | None = None,
    ) -> None:
        self._settings = settings
        self._slot = slot
        self.process_kv = ProcessKv(slot.channel, on_failure) if slot is not None else None
        self._on_failure = on_failure
        self.failure: BrokerBroken | None = None
        self._loop = asyncio.get_running_loop()
        self.listeners: list[Listener] = []
        self.admin_server: AdminServer | None = None
        self.admin_listeners: list[OpenListener] = []
        self.authenticator, self.admin_authenticator = make_authenticators(settings)
        self.templates = make_templates(settings)
        cluster = settings.cluster
        if slot is not None and self.process_kv is not None:
            self.coordinator = make_process_coordinator(self.process_kv, slot, cluster.cells)
            self.transport = make_peer_links(cluster, self._owner, slot.link_path)
        else:
            self.coordinator = make_coordinator(cluster, settings.store, settings.redis.prefix)
            self.transport = make_peer_links(cluster, self._owner)
        self.node = Node(
            settings.cluster.cells, self._owner_id, self.transport, settings.cluster.publish_timeout
        )
        self.cells = Cells(
            self.node, self.coordinator, self._make_host, settings.cluster.partition_sync_timeout
        )
        self._limits = make_limits(settings)
        self._limits.max_descriptor = raise_descriptor_limit()
        # Shared by all cells: a limit applies to the node.
        self._connection_limits = ConnectionLimits(self._limits)
        self._watermark = make_watermark(settings)
        # No client connects to this broker: it provides the node's timer.
        self._node_broker = Broker(
            self._loop,
            self._limits,
            self.authenticator,
            log_event,
            connection_limits=self._connection_limits,
        )
        self._failure_detector = FailureDetector(
            self.transport, self.coordinator, settings.cluster.heartbeat, settings.cluster.silence
        )
        self._rejoining: asyncio.Task[None] | None = None
        self._lost_at = -STABLE_SECONDS
        self._rejoin_delay = 0.0
        self._is_stopping = False

    @property
    def services(self) -> dict[int, AdminService]:
        """Return the admin services of the open cells, by cell number."""
        return {
            number: one.instance.service
            for number, one in self.cells.open_cells.items()
            if isinstance(one.instance, BrokerHost)
        }

    def _owner(self, cell: int) -> NodeInfo | None:
        return owner_of(self.coordinator, cell)

    def _owner_id(self, cell: int) -> str | None:
        node = owner_of(self.coordinator, cell)
        return node.id if node is not None else None

    # ---- start

    async def start(self) -> None:
        settings = self._settings
        self._warn_of_risks()
        self.authenticator.attach_many(self._brokers, self._loop)
        await open_listeners(
            settings,
            self._make_ingress,
            self.listeners,
            self.authenticator.has_ambient_credentials,
            is_port_shared=self._slot is not None,
        )
        await self.transport.open()
        await self._open_admin()
        self.transport.accept = self.node.accept
        self.coordinator.on_change = self._on_change
        self.coordinator.on_lost = self._on_lost
        await self._join()
        self._failure_detector.start()
        others = ProcessCounters(self.coordinator) if self._slot is not None else None
        SysTopics(self._node_broker, __version__, self._brokers, others).start()
        watch_memory(self._watermark, self._node_broker)
        with suppress(TimeoutError):
            # Cells of another process may be loaded for long, and no other node could take them.
            async with asyncio.timeout(READY_TIMEOUT_SECONDS if self._slot is None else None):
                await self.cells.wait_settled()

    def _warn_of_risks(self) -> None:
        cluster, client_ca = self._settings.cluster, self._settings.tls.client_ca
        if cluster.secret_file is not None:
            warn_if_readable_by_others(cluster.secret_file)
        if cluster.tls_ca is not None and client_ca is not None:
            if cluster.tls_ca.read_bytes() == client_ca.read_bytes():
                log.warning(
                    "nodes and clients share a CA: use a separate CA for the certificates of nodes",
                    extra={"cluster.tls_ca": cluster.tls_ca, "tls.client_ca": client_ca},
                )

    async def _open_admin(self) -> None:
        """Open the admin APIs before joining: the node registers with their addresses."""
        cluster = self._settings.cluster
        directory = Directory(
            cluster.name,
            cluster.cells,
            self.coordinator,
            self._node_id,
            lambda: list(self.cells.open_cells),
            lambda: self.cells.load_timeouts,
        )
        name = node_info(cluster, self.transport.link).name
        service = ClusterAdminService(
            directory, lambda: self.services, name, hide_secrets(self._settings.store), build_mode()
        )
        loop_bridge = LoopBridge(service, self._loop)
        self.admin_server = make_admin_server(
            self._settings,
            loop_bridge,
            self._readiness_error,
            self.admin_authenticator,
            self._watermark,
            self.listeners,
            directory,
            self._slot,
        )
        if self.admin_server is not None:
            self.admin_listeners = await self.admin_server.start()

    def _node_id(self) -> str:
        me = self.cells.this_node
        return me.id if me is not None else ""

    def _readiness_error(self) -> SluiceError | None:
        """Return why this node cannot serve, or None."""
        if self.cells.this_node is None:
            return StoreUnavailable("this node is not in the cluster now")
        hosts = (
            one.instance
            for one in list(self.cells.open_cells.values())
            if isinstance(one.instance, BrokerHost)
        )
        refusals = (host.write_refusal() for host in hosts)
        return next((refusal for refusal in refusals if refusal is not None), None)

    async def _join(self) -> None:
        """Join the cluster as a new incarnation."""
        addresses = addresses_by_name([*self.listeners, *self.admin_listeners])
        key = await make_link_key(self._settings.cluster, self.coordinator)
        me = node_info(
            self._settings.cluster,
            self.transport.link,
            addresses.get("mqtt", ""),
            addresses.get("http", ""),
            addresses.get("grpc", ""),
            key.fingerprint,
        )
        self.transport.join(me.id, key)
        await self.coordinator.start(me)
        self.cells.this_node = me
        self._on_change()

    # ---- events

    def _on_change(self) -> None:
        self.transport.update_nodes(self.coordinator.nodes)
        self.cells.reconcile()

    def _on_lost(self) -> None:
        """Close all cells after an eviction or the loss of the coordinator, then rejoin."""
        self.cells.drop_all()
        self.transport.leave()
        if not self._is_stopping and (self._rejoining is None or self._rejoining.done()):
            self._rejoining = self._loop.create_task(self._rejoin())

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle a fatal error: the affected cell is unknown, so all cells end as if killed."""
        error = find_fatal_error(context)
        if error is not None and self.failure is None:
            self.failure = error
            log.critical("broker failed", extra={"fault": str(error)})
            self.cells.drop_all()
            self._on_failure()
        with suppress(MemoryError):
            loop.default_exception_handler(context)

    async def _rejoin(self) -> None:
        """Rejoin at once the first time.

        A node that is evicted repeatedly is partly disconnected, and must not flap.
        """
        now = self._loop.time()
        self._rejoin_delay = (
            0.0
            if now - self._lost_at > STABLE_SECONDS
            else min(2 * self._rejoin_delay or 0.5, MAX_REJOIN_DELAY_SECONDS)
        )
        self._lost_at = now
        await asyncio.sleep(self._rejoin_delay)
        while True:
            try:
                await self._wait_until_reachable()
                await self._join()
                return
            except CoordinatorError as fault:
                log.warning("failed to rejoin the cluster", extra={"fault": str(fault)})
                await asyncio.sleep(REJOIN_RETRY_SECONDS)

    async def _wait_until_reachable(self) -> None:
        """Wait until other nodes can reach this one, which is why it was evicted."""
        me = node_info(self._settings.cluster, self.transport.link)
        deadline = self._loop.time() + MAX_REJOIN_DELAY_SECONDS
        while self._loop.time() < deadline:
            others = [node for node in self.coordinator.nodes.values() if node.name != me.name]
            if await self.transport.is_reachable(me.link, others):
                return
            await asyncio.sleep(REJOIN_RETRY_SECONDS)

    def _make_ingress(self) -> ClientIngress:
        return ClientIngress(
            self.node, int(self._limits.max_packet_size), self._limits.connect_timeout
        )

    def _brokers(self) -> list[Broker]:
        return [one.cell.broker for one in self.cells.open_cells.values()]

    def _make_host(
        self, number: int, force_takeover: bool, on_failure: Callable[[], None]
    ) -> BrokerHost:
        """Return the host of a cell; it is not open yet."""
        return BrokerHost(
            self._settings,
            self._limits,
            self.authenticator,
            on_failure,
            CellStore(number, force_takeover),
            watermark=self._watermark,
            templates=self.templates,
            connection_limits=self._connection_limits,
        )

    # ---- stop

    async def stop(self) -> None:
        """Leave the cluster: stop accepting clients, hand over every cell, then close the rest."""
        self._is_stopping = True
        if self._rejoining is not None:
            self._rejoining.cancel()
        if self.admin_server is not None:
            await self.admin_server.stop()
        for listener in self.listeners:
            listener.server.close()
        await self._failure_detector.stop()
        await self.cells.leave()
        await self.coordinator.stop()
        await self.transport.close()
        self._node_broker.close()
        self.authenticator.close()
