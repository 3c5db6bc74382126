"""Who is dead though its lease still runs.

Two signs. A host that refuses a call has nobody who listens: the process is gone, and any node that notices puts it
out at once. Silence may be the fault of either side, so it is only a suspicion: it is told to all, and a node that more
than half of the others do not hear is put out. What keeps that safe when a sign was wrong is not here: a node that is
put out stops owning, and the fences of the stores hold off one that has not noticed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from sluice.cluster.membership.coordinator import Coordinator, CoordinatorError, NodeInfo
from sluice.cluster.transport.peer_links import PeerLinks

log = logging.getLogger(__name__)

PAUSED_HEARTBEATS: Final = (
    3.0  # beats between two looks, from which on it was us who did not listen
)
CHECKS_PER_HEARTBEAT: Final = 5  # per beat: what is seen late is put right late


def nodes_to_evict(nodes: dict[str, NodeInfo], suspicions: dict[str, set[str]]) -> set[str]:
    """Whom more than half of the others do not hear. Of two who do not hear each other, the younger goes: one must, and
    never both."""
    condemned_ids = set()
    for suspect in suspicions.keys() & nodes.keys():
        others = nodes.keys() - {suspect}
        accusers = suspicions[suspect] & others
        if 2 * len(accusers) > len(others):
            condemned_ids.add(suspect)
    if len(condemned_ids) == len(nodes) == 2:
        condemned_ids.remove(
            min(condemned_ids, key=lambda node_id: (nodes[node_id].started_at, node_id))
        )
    return condemned_ids


class FailureDetector:
    """Looks at the links, tells suspicions, and puts out whom it must."""

    def __init__(
        self, peer_links: PeerLinks, coordinator: Coordinator, heartbeat: float, silence: float
    ) -> None:
        self._peer_links = peer_links
        self._coordinator = coordinator
        self._heartbeat = heartbeat
        self._silence = silence
        self._suspected: set[str] = set()
        self._evictions: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        peer_links.on_peer_gone = self._on_peer_gone

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        tasks = [*self._evictions.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        while True:
            await asyncio.sleep(self._heartbeat / CHECKS_PER_HEARTBEAT)
            now = loop.time()
            if now - checked_at > PAUSED_HEARTBEATS * self._heartbeat:
                self._peer_links.reset_silence()  # whoever slept cannot say who was silent
            checked_at = now
            try:
                await self._check()
            except CoordinatorError as fault:
                log.warning("a suspicion could not be told", extra={"fault": str(fault)})

    async def _check(self) -> None:
        coordinator = self._coordinator
        if not coordinator.may_own:
            self._suspected.clear()  # they are gone with our registration
            return
        for node_id in list(coordinator.nodes):
            is_silent = self._peer_links.silence_seconds(node_id) > self._silence
            if is_silent != (node_id in self._suspected):
                await self._report_suspicion(node_id, is_silent)
        for node_id in self._suspected - coordinator.nodes.keys():
            await self._report_suspicion(node_id, False)
        for node_id in nodes_to_evict(coordinator.nodes, coordinator.suspicions):
            self._start_eviction(node_id, "most of the others do not hear it")

    async def _report_suspicion(self, node_id: str, is_silent: bool) -> None:
        if is_silent:
            log.warning("a node is silent", extra={"node": node_id})
            self._suspected.add(node_id)
        else:
            self._suspected.discard(node_id)
        await self._coordinator.suspect(node_id, is_silent)

    def _on_peer_gone(self, node_id: str) -> None:
        if self._coordinator.may_own:
            self._start_eviction(node_id, "nobody listens at its address")

    def _start_eviction(self, node_id: str, reason: str) -> None:
        if node_id in self._coordinator.nodes and node_id not in self._evictions:
            task = asyncio.get_running_loop().create_task(self._evict(node_id, reason))
            self._evictions[node_id] = task
            task.add_done_callback(lambda _: self._evictions.pop(node_id, None))

    async def _evict(self, node_id: str, reason: str) -> None:
        log.warning("a node is put out", extra={"node": node_id, "why": reason})
        try:
            await self._coordinator.evict(node_id)
        except CoordinatorError as fault:
            log.warning("a node could not be put out", extra={"node": node_id, "fault": str(fault)})
