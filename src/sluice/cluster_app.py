"""A node of a cluster: puts the rooms together as `app` does for a broker alone, with many cells in the place of one.

doors ─▶ fronts ─▶ cells of this node, or lines to those of others
coordinator ─▶ cells: which of them are opened and closed here
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sluice import __version__
from sluice.access.watched_file import warn_if_open
from sluice.admin.forwarding.cluster_service import CellsService
from sluice.admin.loop_bridge import Desk
from sluice.admin.service import AdminService
from sluice.admin.server import AdminThread, OpenDoor
from sluice.app import (
    access_of,
    admin_thread,
    allow_many_connections,
    limits_from,
    log_event,
    open_listeners,
    quiet_collector,
    ready_line,
    watch_memory,
    watermark_of,
)
from sluice.broker.broker import Broker
from sluice.broker.net.connection_limits import Crowd
from sluice.broker.net.listener import Door
from sluice.broker.namespaces.sys_topics import SysTopics
from sluice.cluster.cell import Cell
from sluice.cluster.cells import Cells, owner_of
from sluice.cluster.membership.coordinator import CoordinatorError, NodeInfo
from sluice.cluster.membership.failure_detector import Watch
from sluice.cluster.directory import Directory
from sluice.cluster.ingress.client_ingress import Front
from sluice.cluster.bootstrap import make_coordinator, make_lines, make_link_key, node_info
from sluice.cluster.node import Node
from sluice.config.settings import Settings
from sluice.errors import BrokerBroken, SluiceError, StoreUnavailable
from sluice.broker_core import House, Place, breakage_in, how_built
from sluice.process.logs import hide_secrets
from sluice.process.systemd import Supervisor, stop_on_signals

log = logging.getLogger(__name__)

REJOIN_SECONDS = 0.2  # between attempts to come back into the cluster
STEADY_SECONDS = 60.0  # who is put out again within this time waits longer each time,
LONGEST_PAUSE = 30.0  # up to this
READY_SECONDS = 30.0  # what a start waits for every cell of the cluster to have an owner


async def run(settings: Settings) -> None:
    """Until SIGTERM or SIGINT."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else gRPC tells stderr of every node that goes
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    stop_on_signals(loop, stop)
    supervisor = Supervisor(os.environ)
    server = ClusterServer(settings, stop.set)
    loop.set_exception_handler(server.broke)
    loop.add_signal_handler(signal.SIGHUP, server.gate.look)
    try:
        await server.start()
        quiet_collector()
        opened: list[Door | OpenDoor] = [*server.doors, *server.admin_doors]
        line = ready_line(opened, settings.store)
        print(line, flush=True)
        log.info("ready", extra={door.name: door.address for door in opened})
        supervisor.ready(line)
        await stop.wait()
        supervisor.stopping()
        log.info("stopping", extra={"cells": len(server.cells.open)})
    finally:
        await server.stop()
        supervisor.silence()
    if server.failure is not None:
        raise server.failure
    log.info("stopped")


class ClusterServer:
    """One node, from its doors to its place in the cluster."""

    def __init__(self, settings: Settings, on_failure: Callable[[], object]) -> None:
        self._settings = settings
        self._on_failure = on_failure
        self.failure: BrokerBroken | None = None
        self._loop = asyncio.get_running_loop()
        self.doors: list[Door] = []
        self.admin: AdminThread | None = None
        self.admin_doors: list[OpenDoor] = []
        self.gate, self.keyring = access_of(settings)
        self.coordinator = make_coordinator(settings.cluster, settings.store, settings.redis.prefix)
        self.lines = make_lines(settings.cluster, self._owner)
        self.node = Node(settings.cluster.cells, self._owner_id, self.lines, settings.cluster.publish_timeout)
        self.cells = Cells(self.node, self.coordinator, self._make_broker, self._open_house)
        self._limits = limits_from(settings)
        self._limits.last_descriptor = allow_many_connections()
        self._crowd = Crowd(self._limits)  # of all cells: who sets a limit means the node
        self._watermark = watermark_of(settings)
        self._lobby = self._make_broker()  # no client comes in here: it has the node's own timer
        self._watch = Watch(
            self.lines, self.coordinator, settings.cluster.heartbeat, settings.cluster.silence
        )
        self._rejoining: asyncio.Task[None] | None = None
        self._lost_at = -STEADY_SECONDS
        self._pause = 0.0
        self._stopping = False

    @property
    def services(self) -> dict[int, AdminService]:
        """What the admin doors may ask here: by number, the cells that are open."""
        return {
            number: one.house.service
            for number, one in self.cells.open.items()
            if isinstance(one.house, House)
        }

    def _owner(self, cell: int) -> NodeInfo | None:
        return owner_of(self.coordinator, cell)

    def _owner_id(self, cell: int) -> str | None:
        node = owner_of(self.coordinator, cell)
        return node.id if node is not None else None

    # ---- coming

    async def start(self) -> None:
        settings = self._settings
        self._warn_of_risks()
        self.gate.attach_many(self._brokers, self._loop)
        await open_listeners(settings, self._front, self.doors, self.gate.ambient)
        await self.lines.open()
        await self._open_admin()
        self.lines.accept = self.node.accept
        self.coordinator.on_change = self._changed
        self.coordinator.on_lost = self._lost
        await self._join()
        self._watch.start()
        SysTopics(self._lobby, __version__, self._brokers).start()
        watch_memory(self._watermark, self._lobby)
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_SECONDS):
                await self.cells.settled()

    def _warn_of_risks(self) -> None:
        cluster, client_ca = self._settings.cluster, self._settings.tls.client_ca
        if cluster.secret_file is not None:
            warn_if_open(cluster.secret_file)
        if cluster.tls_ca is not None and client_ca is not None:
            if cluster.tls_ca.read_bytes() == client_ca.read_bytes():
                log.warning(
                    "nodes and clients have one CA: sign the certificates of nodes by a CA of their own",
                    extra={"cluster.tls_ca": cluster.tls_ca, "tls.client_ca": client_ca},
                )

    async def _open_admin(self) -> None:
        """Before this node is one: it tells the others where its doors are."""
        cluster = self._settings.cluster
        directory = Directory(
            cluster.name, cluster.cells, self.coordinator, self._id, lambda: list(self.cells.open)
        )
        name = node_info(cluster, self.lines.address).name
        service = CellsService(
            directory, lambda: self.services, name, hide_secrets(self._settings.store), how_built()
        )
        desk = Desk(service, self._loop)
        self.admin = admin_thread(
            self._settings, desk, self._refusal, self.keyring, self._watermark, directory
        )
        if self.admin is not None:
            self.admin_doors = await self.admin.start()

    def _id(self) -> str:
        me = self.cells.me
        return me.id if me is not None else ""

    def _refusal(self) -> SluiceError | None:
        """What keeps this node from taking work, or None."""
        if self.cells.me is None:
            return StoreUnavailable("this node is not in the cluster now")
        houses = (one.house for one in list(self.cells.open.values()) if isinstance(one.house, House))
        refusals = (house.refusal() for house in houses)
        return next((refusal for refusal in refusals if refusal is not None), None)

    async def _join(self) -> None:
        """Become a node, as a new incarnation."""
        doors: list[Door | OpenDoor] = [*self.doors, *self.admin_doors]
        found = {door.name: door.address for door in doors}
        key = await make_link_key(self._settings.cluster, self.coordinator)
        me = node_info(
            self._settings.cluster,
            self.lines.address,
            found.get("mqtt", ""),
            found.get("http", ""),
            found.get("grpc", ""),
            key.fingerprint,
        )
        self.lines.join(me.id, key)
        await self.coordinator.start(me)
        self.cells.me = me
        self._changed()

    # ---- what happens

    def _changed(self) -> None:
        self.lines.meet(self.coordinator.nodes)
        self.cells.look()

    def _lost(self) -> None:
        """Put out, or cut off from the coordinator: nothing is ours any more. We come back as somebody new."""
        self.cells.drop_all()
        self.lines.leave()
        if not self._stopping and (self._rejoining is None or self._rejoining.done()):
            self._rejoining = self._loop.create_task(self._rejoin())

    def broke(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As in a house alone: nobody knows in which cell something is half done, so all of them go as if killed."""
        broken = breakage_in(context)
        if broken is not None and self.failure is None:
            self.failure = broken
            log.critical("the broker cannot go on", extra={"fault": str(broken)})
            self.cells.drop_all()
            self._on_failure()
        with suppress(MemoryError):
            loop.default_exception_handler(context)

    async def _rejoin(self) -> None:
        """At once the first time. A node that is put out again and again is half cut off, and must not flap."""
        now = self._loop.time()
        self._pause = (
            0.0 if now - self._lost_at > STEADY_SECONDS else min(2 * self._pause or 0.5, LONGEST_PAUSE)
        )
        self._lost_at = now
        await asyncio.sleep(self._pause)
        while True:
            try:
                await self._reach_others()
                await self._join()
                return
            except CoordinatorError as fault:
                log.warning("not in the cluster", extra={"fault": str(fault)})
                await asyncio.sleep(REJOIN_SECONDS)

    async def _reach_others(self) -> None:
        """Wait until we are no longer what we were put out for: one whom nobody reaches."""
        me = node_info(self._settings.cluster, self.lines.address)
        patient_until = self._loop.time() + LONGEST_PAUSE
        while self._loop.time() < patient_until:
            others = [node for node in self.coordinator.nodes.values() if node.name != me.name]
            if await self.lines.is_reachable(me.link, others):
                return
            await asyncio.sleep(REJOIN_SECONDS)

    def _front(self) -> Front:
        return Front(self.node, int(self._limits.max_packet_size), self._limits.connect_timeout)

    def _brokers(self) -> list[Broker]:
        return [one.cell.broker for one in self.cells.open.values()]

    def _make_broker(self) -> Broker:
        return Broker(self._loop, self._limits, self.gate, log_event, crowd=self._crowd)

    async def _open_house(self, number: int, cell: Cell, seize: bool, failed: Callable[[], None]) -> House:
        place = Place(number, seize)
        house = House(self._settings, cell.broker, failed, place, watermark=self._watermark)
        house.furnish = cell.furnish
        await house.open()
        return house

    # ---- going

    async def stop(self) -> None:
        """A planned leave: no new clients, every cell handed over, then the rest."""
        self._stopping = True
        if self._rejoining is not None:
            self._rejoining.cancel()
        if self.admin is not None:
            await self.admin.stop()
        for door in self.doors:
            door.server.close()
        await self._watch.stop()
        await self.cells.leave()
        await self.coordinator.stop()
        await self.lines.close()
        self._lobby.close()
        self.gate.close()
