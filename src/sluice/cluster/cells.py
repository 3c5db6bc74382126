"""Which cells this node has: opened and closed as the coordinator and the placement say.

    wanted here, nobody's         claimed, opened
    wanted here, of a dead node   claimed from it, its store seized, opened
    wanted here, of a living one  waited for: it sees what we see, and gives it up
    open here, wanted elsewhere   closed in good order, then released
    I may own no longer           all dropped at once, without a word to the store

What is wanted where is computed by every node alike (`placement.place`); what is so, the coordinator decides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from sluice.broker.broker import Broker
from sluice.cluster.cell import Cell
from sluice.cluster.membership.coordinator import Coordinator, CoordinatorError, NodeInfo
from sluice.cluster.membership.placement import place_cells
from sluice.cluster.node import Node
from sluice.errors import SluiceError
from sluice.wire.reasons import SERVER_SHUTTING_DOWN

log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 0.5  # what clients have to read that their session moves
RETRY_SECONDS: Final = 0.5  # after a cell could not be opened


def owner_of(coordinator: Coordinator, cell: int) -> NodeInfo | None:
    """The node that holds a cell, if it lives."""
    return coordinator.nodes.get(coordinator.claims.get(cell, ""))


class CellInstance(Protocol):
    """What a cell stands on."""

    async def flush(self) -> None: ...

    async def close(self, keep: bool = True) -> None: ...


class OpenCellInstance(Protocol):
    """Builds the house of a cell round its broker, and brings back what its store holds."""

    def __call__(
        self, number: int, cell: Cell, seize: bool, failed: Callable[[], None]
    ) -> Awaitable[CellInstance]: ...


@dataclass
class OpenCell:
    """A cell that is open here."""

    cell: Cell
    instance: CellInstance


class Cells:
    def __init__(
        self,
        node: Node,
        coordinator: Coordinator,
        make_broker: Callable[[], Broker],
        open_instance: OpenCellInstance,
    ) -> None:
        self.this_node: NodeInfo | None = None  # None: not in the cluster
        self.open_cells: dict[int, OpenCell] = {}
        self._node = node
        self._coordinator = coordinator
        self._make_broker = make_broker
        self._open_instance = open_instance
        self._transitions: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_leaving = False
        self._reconciled = asyncio.Event()
        self._placement: list[str] = []
        self._placement_names: tuple[str, ...] = ()

    # ---- following

    def reconcile(self) -> None:
        """Something has changed: begin what follows from it."""
        this_node, coordinator = self.this_node, self._coordinator
        if this_node is None or self._is_leaving:
            return
        self._node.set_peers([one for one in coordinator.nodes if one != this_node.id])
        placement = self._current_placement()
        for number, name in enumerate(placement):
            if number in self._transitions:
                continue
            claimant = coordinator.claims.get(number)
            if number in self.open_cells:
                if name != this_node.name:
                    self._start_transition(number, self._hand_over(number))
            elif name == this_node.name and (
                claimant is None or claimant not in coordinator.nodes or claimant == this_node.id
            ):
                self._start_transition(number, self._claim_and_open(number, claimant))
            elif claimant == this_node.id and name != this_node.name:
                self._start_transition(
                    number, coordinator.release(number)
                )  # its store was lost to us before it could move
        self._node.retry_parked()
        self._reconciled.set()

    def _current_placement(self) -> list[str]:
        names = tuple(sorted({node.name for node in self._coordinator.nodes.values()}))
        if names != self._placement_names:
            self._placement_names = names
            self._placement = place_cells(self._node.cells, names)
        return self._placement

    def _start_transition(self, number: int, work: Awaitable[None]) -> None:
        self._transitions[number] = asyncio.get_running_loop().create_task(
            self._run_transition(number, work)
        )

    async def _run_transition(self, number: int, work: Awaitable[None]) -> None:
        """One thing at a time happens to a cell; then it is looked at again."""
        try:
            await work
        except SluiceError as fault:
            log.warning("a cell could not be moved", extra={"cell": number, "fault": str(fault)})
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._transitions.pop(number, None)
        self.reconcile()

    async def _claim_and_open(self, number: int, claimant: str | None) -> None:
        this_node = self.this_node
        assert this_node is not None
        # Asked even for what we think is ours: one that slept may have lost it, and must not seize it from its owner.
        if not await self._coordinator.claim(number, claimant):
            return
        cell = Cell(self._node, number, self._make_broker())
        try:
            instance = await self._open_instance(
                number, cell, claimant is not None, lambda: self._on_store_failed(number, cell)
            )
        except BaseException:
            cell.broker.close()
            raise
        if self.this_node is not this_node or not self._coordinator.may_own:
            cell.broker.close()
            await instance.close(keep=False)
            return
        self.open_cells[number] = OpenCell(cell, instance)
        self._node.on_cell_opened(cell)
        log.info("cell opened", extra={"cell": number, "from": claimant or "nobody"})

    async def _hand_over(self, number: int) -> None:
        await self._close(number)
        await self._coordinator.release(number)

    async def _close(self, number: int) -> None:
        """In good order: no new work, a word to the clients, all that was begun is kept."""
        found = self.open_cells.pop(number, None)
        if found is None:
            return
        self._node.on_cell_closed(number)
        broker = found.cell.broker
        for connection in list(broker.connections):
            connection.throttle()  # nothing more is read, and what was read is answered: nobody has to say it twice
        try:
            await found.cell.wait_answered(DRAIN_SECONDS)
            await found.instance.flush()
        finally:
            found.cell.mark_lost()
        clients_gone = asyncio.Event()
        # Not "use another server": the same address leads to the new owner too, and clients take that word as final.
        broker.stop(
            clients_gone.set,
            SERVER_SHUTTING_DOWN,
            "this session moves to another node: connect again",
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await clients_gone.wait()
        broker.close()
        await found.instance.close()
        log.info("cell closed", extra={"cell": number})

    def _on_store_failed(self, number: int, cell: Cell) -> None:
        """Its store has failed, or belongs to another node by now."""
        found = self.open_cells.get(number)
        if found is not None and found.cell is cell:
            log.error("the store of a cell has failed", extra={"cell": number})
            self._drop(number)
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.reconcile)

    def _drop(self, number: int) -> None:
        """At once: it may be another node's."""
        found = self.open_cells.pop(number)
        self._node.on_cell_closed(number)
        found.cell.mark_lost()
        found.cell.broker.close()
        task = asyncio.get_running_loop().create_task(found.instance.close(keep=False))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def wait_settled(self) -> None:
        """Wait until every cell has an owner, and all that are wanted here are open."""
        while not self._is_settled():
            self._reconciled.clear()
            await self._reconciled.wait()

    def _is_settled(self) -> bool:
        this_node, coordinator = self.this_node, self._coordinator
        if this_node is None or self._transitions:
            return False
        placement = self._current_placement()
        return all(
            number in self.open_cells
            if placement[number] == this_node.name
            else owner_of(coordinator, number) is not None
            for number in range(self._node.cells)
        )

    # ---- coming and going

    def drop_all(self) -> None:
        """This node may own nothing from this moment on."""
        self.this_node = None
        for number in list(self.open_cells):
            self._drop(number)
        self._node.set_peers([])

    async def leave(self) -> None:
        """A planned leave: every cell is handed over in good order."""
        self._is_leaving = True
        while self._transitions:
            await asyncio.wait(self._transitions.values())
        await asyncio.gather(*(self._try_hand_over(number) for number in list(self.open_cells)))
        while self._closing:
            await asyncio.wait(self._closing)
        self._node.set_peers([])

    async def _try_hand_over(self, number: int) -> None:
        try:
            await self._hand_over(number)
        except CoordinatorError as fault:
            log.warning(
                "a cell was not given up in good order", extra={"cell": number, "fault": str(fault)}
            )
