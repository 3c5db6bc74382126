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
from sluice.cluster.transport.peer_links import RemoteLines

log = logging.getLogger(__name__)

ASLEEP: Final = 3.0  # beats between two looks, from which on it was us who did not listen
LOOKS: Final = 5  # per beat: what is seen late is put right late


def condemned(nodes: dict[str, NodeInfo], suspicions: dict[str, set[str]]) -> set[str]:
    """Whom more than half of the others do not hear. Of two who do not hear each other, the younger goes: one must, and
    never both."""
    out = set()
    for suspect in suspicions.keys() & nodes.keys():
        others = nodes.keys() - {suspect}
        accusers = suspicions[suspect] & others
        if 2 * len(accusers) > len(others):
            out.add(suspect)
    if len(out) == len(nodes) == 2:
        out.remove(min(out, key=lambda node_id: (nodes[node_id].started_at, node_id)))
    return out


class Watch:
    """Looks at the links, tells suspicions, and puts out whom it must."""

    def __init__(
        self, lines: RemoteLines, coordinator: Coordinator, heartbeat: float, silence: float
    ) -> None:
        self._lines = lines
        self._coordinator = coordinator
        self._heartbeat = heartbeat
        self._silence = silence
        self._suspected: set[str] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        lines.on_gone = self._gone

    def start(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._look_on())

    async def stop(self) -> None:
        tasks = [*self._leaving.values(), *([self._looking] if self._looking is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_on(self) -> None:
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            await asyncio.sleep(self._heartbeat / LOOKS)
            now = loop.time()
            if now - looked_at > ASLEEP * self._heartbeat:
                self._lines.hear_anew()  # whoever slept cannot say who was silent
            looked_at = now
            try:
                await self._look()
            except CoordinatorError as fault:
                log.warning("a suspicion could not be told", extra={"fault": str(fault)})

    async def _look(self) -> None:
        coordinator = self._coordinator
        if not coordinator.may_own:
            self._suspected.clear()  # they are gone with our registration
            return
        for node_id in list(coordinator.nodes):
            silent = self._lines.silent_for(node_id) > self._silence
            if silent != (node_id in self._suspected):
                await self._suspect(node_id, silent)
        for node_id in self._suspected - coordinator.nodes.keys():
            await self._suspect(node_id, False)
        for node_id in condemned(coordinator.nodes, coordinator.suspicions):
            self._put_out(node_id, "most of the others do not hear it")

    async def _suspect(self, node_id: str, silent: bool) -> None:
        if silent:
            log.warning("a node is silent", extra={"node": node_id})
            self._suspected.add(node_id)
        else:
            self._suspected.discard(node_id)
        await self._coordinator.suspect(node_id, silent)

    def _gone(self, node_id: str) -> None:
        if self._coordinator.may_own:
            self._put_out(node_id, "nobody listens at its address")

    def _put_out(self, node_id: str, why: str) -> None:
        if node_id in self._coordinator.nodes and node_id not in self._leaving:
            task = asyncio.get_running_loop().create_task(self._end(node_id, why))
            self._leaving[node_id] = task
            task.add_done_callback(lambda _: self._leaving.pop(node_id, None))

    async def _end(self, node_id: str, why: str) -> None:
        log.warning("a node is put out", extra={"node": node_id, "why": why})
        try:
            await self._coordinator.put_out(node_id)
        except CoordinatorError as fault:
            log.warning("a node could not be put out", extra={"node": node_id, "fault": str(fault)})
