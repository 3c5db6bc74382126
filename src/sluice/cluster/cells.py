"""Open and close the cells of this node as coordinator and placement require.

    planned here, unclaimed              claim it, open it
    planned here, claim of a dead node   claim it, take over its store, open it; if that takes too
                                         long, give it back, so that another node does so
    planned here, claim of a live node   wait: that node computes the same placement and releases it
    open here, planned elsewhere         close it in order, then release it
    this node may no longer own          drop all cells at once, without writing to the stores

Every node computes the same plan (`placement.place_cells`); the coordinator decides who owns a
cell. Invariant: at most one transition per cell runs at a time.
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
from sluice.cluster.membership import (
    Coordinator,
    CoordinatorError,
    NodeInfo,
    names_avoiding,
    names_with_cells,
    place_cells,
)
from sluice.cluster.node import Node
from sluice.errors import SluiceError
from sluice.wire.reasons import SERVER_SHUTTING_DOWN

log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 0.5  # time for clients to read that their session moves
RETRY_SECONDS: Final = 0.5  # after a cell failed to open


def owner_of(coordinator: Coordinator, cell: int) -> NodeInfo | None:
    """Return the live node that owns a cell, or None."""
    return coordinator.nodes.get(coordinator.claims.get(cell, ""))


class CellInstance(Protocol):
    """The broker instance behind a cell, with its commit loop and store."""

    @property
    def broker(self) -> Broker: ...

    async def open(self, on_load: Callable[[], None] | None = None) -> None:
        """Recover the content of the store. `on_load` is called when the store begins to load."""

    async def flush(self) -> None: ...

    async def close(self, keep: bool = True) -> None: ...


class MakeCellInstance(Protocol):
    """Builds the broker instance of a cell, which is not open yet."""

    def __call__(
        self, number: int, take_over: bool, failed: Callable[[], None], /
    ) -> CellInstance: ...


@dataclass
class OpenCell:
    """A cell that is open here."""

    cell: Cell
    instance: CellInstance


class Cells:
    """Cells that are open on this node, and the transitions in progress."""

    def __init__(
        self,
        node: Node,
        coordinator: Coordinator,
        make_instance: MakeCellInstance,
        load_seconds: float,
    ) -> None:
        self.this_node: NodeInfo | None = None  # None: this node is not in the cluster
        self.open_cells: dict[int, OpenCell] = {}
        self._node = node
        self._coordinator = coordinator
        self._make_instance = make_instance
        self._load_seconds = load_seconds
        self.load_timeouts = 0
        self._transitions: dict[int, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_leaving = False
        self._reconciled = asyncio.Event()
        self._placement: list[str] = []
        self._placed_for: tuple[tuple[str, ...], dict[int, list[str]]] = ((), {})

    # ---- reconciliation

    def reconcile(self) -> None:
        """Start the transitions that the current membership and placement require."""
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
                # The store failed before the cell could be handed over.
                self._start_transition(number, coordinator.release(number))
        self._node.retry_parked()
        self._reconciled.set()

    def _current_placement(self) -> list[str]:
        nodes = self._coordinator.nodes
        names = names_with_cells(self._coordinator)
        avoided = names_avoiding(nodes, self._coordinator.avoided)
        if (names, avoided) != self._placed_for:
            self._placed_for = (names, avoided)
            self._placement = place_cells(self._node.cells, names, avoided)
        return self._placement

    def _start_transition(self, number: int, work: Awaitable[None]) -> None:
        self._transitions[number] = asyncio.get_running_loop().create_task(
            self._run_transition(number, work)
        )

    async def _run_transition(self, number: int, work: Awaitable[None]) -> None:
        """Run one transition of a cell, then reconcile again."""
        try:
            await work
        except SluiceError as fault:
            log.warning("cell transition failed", extra={"cell": number, "fault": str(fault)})
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._transitions.pop(number, None)
        self.reconcile()

    async def _claim_and_open(self, number: int, claimant: str | None) -> None:
        this_node = self.this_node
        assert this_node is not None
        # Claim even a cell that seems to be ours: a suspended process may have lost it meanwhile
        # and must not take the store from the new owner.
        if not await self._coordinator.claim(number, claimant):
            return
        # A node that avoids the cell may still hold its store: it was too slow to load it.
        take_over = claimant is not None or number in self._coordinator.avoided
        instance = self._make_instance(
            number, take_over, lambda: self._on_store_failed(number, cell)
        )
        cell = Cell(self._node, number, instance.broker)
        try:
            if not take_over:
                await instance.open()
            elif not await self._open_in_time(number, cell, instance):
                return
        except BaseException:
            cell.broker.close()
            raise
        if self.this_node is not this_node or not self._coordinator.may_own:
            cell.broker.close()
            await instance.close(keep=False)
            return
        self.open_cells[number] = OpenCell(cell, instance)
        self._node.on_cell_opened(cell)
        log.info("cell opened", extra={"cell": number, "from": claimant or "none"})

    async def _open_in_time(self, number: int, cell: Cell, instance: CellInstance) -> bool:
        """Open a cell of a dead node, or give it back if another node may be quicker.

        A load runs in a thread and cannot be interrupted. It continues without effect: its store
        gets a new owner, whose fence refuses every write of this one.
        """
        loop = asyncio.get_running_loop()
        has_begun = asyncio.Event()
        opening = loop.create_task(instance.open(has_begun.set))
        beginning = loop.create_task(has_begun.wait())
        try:
            await asyncio.wait((opening, beginning), return_when=asyncio.FIRST_COMPLETED)
            while not opening.done():
                await asyncio.wait((opening,), timeout=self._load_seconds)
                if not opening.done() and self._may_be_quicker(number):
                    self.load_timeouts += 1
                    log.error(
                        "cell not loaded in time, another node takes it",
                        extra={"cell": number, "partition_sync_timeout": self._load_seconds},
                    )
                    self._discard_when_open(number, cell, instance, opening)
                    await self._coordinator.avoid(number)
                    await self._coordinator.release(number)
                    return False
        except asyncio.CancelledError:
            opening.cancel()
            raise
        finally:
            beginning.cancel()
        await opening
        return True

    def _may_be_quicker(self, number: int) -> bool:
        """Return whether there is another live node that has not been too slow for this cell."""
        if self._coordinator.expected_names:
            return False
        nodes = self._coordinator.nodes
        avoiding = names_avoiding(nodes, self._coordinator.avoided).get(number, [])
        this_node = self.this_node
        return this_node is not None and any(
            one.name != this_node.name and one.name not in avoiding for one in nodes.values()
        )

    def _discard_when_open(
        self, number: int, cell: Cell, instance: CellInstance, opening: asyncio.Task[None]
    ) -> None:
        task = asyncio.get_running_loop().create_task(
            _discard_after(number, cell, instance, opening)
        )
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _hand_over(self, number: int) -> None:
        await self._close(number)
        await self._coordinator.release(number)

    async def _close(self, number: int) -> None:
        """Close a cell in order: stop reading, commit and answer what was read, then disconnect."""
        found = self.open_cells.pop(number, None)
        if found is None:
            return
        self._node.on_cell_closed(number)
        broker = found.cell.broker
        for connection in list(broker.connections):
            # Read nothing more and answer what was read, so that no client has to resend.
            connection.throttle()
        try:
            await found.cell.wait_answered(DRAIN_SECONDS)
            await found.instance.flush()
        finally:
            found.cell.mark_lost()
        clients_gone = asyncio.Event()
        # Not "use another server": the same address reaches the new owner too, and clients treat
        # that reason code as final.
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
        """Drop a cell whose store failed or belongs to another node by now."""
        found = self.open_cells.get(number)
        if found is not None and found.cell is cell:
            log.error("cell store failed", extra={"cell": number})
            self._drop(number)
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.reconcile)

    def _drop(self, number: int) -> None:
        """Close a cell at once, without writing: another node may own it already."""
        found = self.open_cells.pop(number)
        self._node.on_cell_closed(number)
        found.cell.mark_lost()
        found.cell.broker.close()
        task = asyncio.get_running_loop().create_task(found.instance.close(keep=False))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def wait_settled(self) -> None:
        """Wait until every cell has an owner and all cells planned for this node are open."""
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

    # ---- leaving

    def drop_all(self) -> None:
        """Drop every cell: from this moment on this node may own nothing."""
        self.this_node = None
        for number in list(self.open_cells):
            self._drop(number)
        self._node.set_peers([])

    async def leave(self) -> None:
        """Hand over every cell in order, for a planned stop."""
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
            log.warning("cell handover failed", extra={"cell": number, "fault": str(fault)})


async def _discard_after(
    number: int, cell: Cell, instance: CellInstance, opening: asyncio.Task[None]
) -> None:
    """Close an instance that was given back, when its load has ended."""
    try:
        await opening
    except Exception as fault:  # of a store that has another owner now
        log.info("late load of a cell failed", extra={"cell": number, "fault": str(fault)})
    cell.broker.close()
    await instance.close(keep=False)
