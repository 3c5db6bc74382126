"""Find nodes that are dead although their lease still runs, and evict them.

There are two signs. A host that refuses a connection has no process that listens: any node that
notices evicts the peer at once. Silence may be the fault of either side, so it is only a
suspicion: each node reports it, and a node that more than half of the others suspect is evicted.

A wrong verdict does no harm, but the protection is not here: an evicted node stops owning cells,
and the fences of the stores stop one that has not noticed its eviction.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from sluice.cluster.membership import Coordinator, CoordinatorError, NodeInfo
from sluice.cluster.transport import PeerLinks

log = logging.getLogger(__name__)

# Heartbeats between two checks from which on this process itself was suspended.
PAUSED_HEARTBEATS: Final = 3.0
CHECKS_PER_HEARTBEAT: Final = 5  # the delay of a check delays the eviction


def nodes_to_evict(nodes: dict[str, NodeInfo], suspicions: dict[str, set[str]]) -> set[str]:
    """Return the ids of the nodes that more than half of the others suspect.

    If two nodes suspect each other, only the younger one is returned: never both.
    """
    evicted = set()
    for suspect in suspicions.keys() & nodes.keys():
        others = nodes.keys() - {suspect}
        accusers = suspicions[suspect] & others
        if 2 * len(accusers) > len(others):
            evicted.add(suspect)
    if len(evicted) == len(nodes) == 2:
        evicted.remove(min(evicted, key=lambda node_id: (nodes[node_id].started_at, node_id)))
    return evicted


class FailureDetector:
    """Checks the links, reports suspicions, and evicts dead nodes."""

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
                # A suspended process cannot judge which peers were silent.
                self._peer_links.reset_silence()
            checked_at = now
            try:
                await self._check()
            except CoordinatorError as fault:
                log.warning("failed to report suspected node", extra={"fault": str(fault)})

    async def _check(self) -> None:
        coordinator = self._coordinator
        if not coordinator.may_own:
            self._suspected.clear()  # our reports ended with our registration
            return
        for node_id in list(coordinator.nodes):
            is_silent = self._peer_links.silence_seconds(node_id) > self._silence
            if is_silent != (node_id in self._suspected):
                await self._report_suspicion(node_id, is_silent)
        for node_id in self._suspected - coordinator.nodes.keys():
            await self._report_suspicion(node_id, False)
        for node_id in nodes_to_evict(coordinator.nodes, coordinator.suspicions):
            self._start_eviction(node_id, "a majority of nodes receives nothing from it")

    async def _report_suspicion(self, node_id: str, is_silent: bool) -> None:
        if is_silent:
            log.warning("node silent", extra={"node": node_id})
            self._suspected.add(node_id)
        else:
            self._suspected.discard(node_id)
        await self._coordinator.suspect(node_id, is_silent)

    def _on_peer_gone(self, node_id: str) -> None:
        if self._coordinator.may_own:
            self._start_eviction(node_id, "its address refuses connections")

    def _start_eviction(self, node_id: str, reason: str) -> None:
        if node_id in self._coordinator.nodes and node_id not in self._evictions:
            task = asyncio.get_running_loop().create_task(self._evict(node_id, reason))
            self._evictions[node_id] = task
            task.add_done_callback(lambda _: self._evictions.pop(node_id, None))

    async def _evict(self, node_id: str, reason: str) -> None:
        log.warning("evicting node", extra={"node": node_id, "why": reason})
        try:
            await self._coordinator.evict(node_id)
        except CoordinatorError as fault:
            log.warning("failed to evict node", extra={"node": node_id, "fault": str(fault)})
