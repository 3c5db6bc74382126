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
from sluice.cluster.node import Node
from sluice.cluster.membership.placement import place
from sluice.errors import SluiceError
from sluice.wire.reasons import SERVER_SHUTTING_DOWN

log = logging.getLogger(__name__)

LAST_WORDS_SECONDS: Final = 0.5  # what clients have to read that their session moves
RETRY_SECONDS: Final = 0.5  # after a cell could not be opened


def owner_of(coordinator: Coordinator, cell: int) -> NodeInfo | None:
    """The node that holds a cell, if it lives."""
    return coordinator.nodes.get(coordinator.claims.get(cell, ""))


class CellHouse(Protocol):
    """What a cell stands on."""

    async def flush(self) -> None: ...

    async def close(self, keep: bool = True) -> None: ...


class OpenHouse(Protocol):
    """Builds the house of a cell round its broker, and brings back what its store holds."""

    def __call__(
        self, number: int, cell: Cell, seize: bool, failed: Callable[[], None]
    ) -> Awaitable[CellHouse]: ...


@dataclass
class Open:
    """A cell that is open here."""

    cell: Cell
    house: CellHouse


class Cells:
    def __init__(
        self,
        node: Node,
        coordinator: Coordinator,
        make_broker: Callable[[], Broker],
        open_house: OpenHouse,
    ) -> None:
        self.me: NodeInfo | None = None  # None: not in the cluster
        self.open: dict[int, Open] = {}
        self._node = node
        self._coordinator = coordinator
        self._make_broker = make_broker
        self._open_house = open_house
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._dropped: set[asyncio.Task[None]] = set()
        self._leaving = False
        self._looked = asyncio.Event()
        self._wanted: list[str] = []
        self._wanted_for: tuple[str, ...] = ()

    # ---- following

    def look(self) -> None:
        """Something has changed: begin what follows from it."""
        me, coordinator = self.me, self._coordinator
        if me is None or self._leaving:
            return
        self._node.peers_changed([one for one in coordinator.nodes if one != me.id])
        wanted = self._place()
        for number, name in enumerate(wanted):
            if number in self._busy:
                continue
            claimant = coordinator.claims.get(number)
            if number in self.open:
                if name != me.name:
                    self._begin(number, self._hand_over(number))
            elif name == me.name and (
                claimant is None or claimant not in coordinator.nodes or claimant == me.id
            ):
                self._begin(number, self._take(number, claimant))
            elif claimant == me.id and name != me.name:
                self._begin(
                    number, coordinator.release(number)
                )  # its store was lost to us before it could move
        self._node.retry()
        self._looked.set()

    def _place(self) -> list[str]:
        names = tuple(sorted({node.name for node in self._coordinator.nodes.values()}))
        if names != self._wanted_for:
            self._wanted_for = names
            self._wanted = place(self._node.cells, names)
        return self._wanted

    def _begin(self, number: int, work: Awaitable[None]) -> None:
        self._busy[number] = asyncio.get_running_loop().create_task(self._do(number, work))

    async def _do(self, number: int, work: Awaitable[None]) -> None:
        """One thing at a time happens to a cell; then it is looked at again."""
        try:
            await work
        except SluiceError as fault:
            log.warning("a cell could not be moved", extra={"cell": number, "fault": str(fault)})
            await asyncio.sleep(RETRY_SECONDS)
        finally:
            self._busy.pop(number, None)
        self.look()

    async def _take(self, number: int, claimant: str | None) -> None:
        me = self.me
        assert me is not None
        # Asked even for what we think is ours: one that slept may have lost it, and must not seize it from its owner.
        if not await self._coordinator.claim(number, claimant):
            return
        cell = Cell(self._node, number, self._make_broker())
        try:
            house = await self._open_house(
                number, cell, claimant is not None, lambda: self._failed(number, cell)
            )
        except BaseException:
            cell.broker.close()
            raise
        if self.me is not me or not self._coordinator.may_own:
            cell.broker.close()
            await house.close(keep=False)
            return
        self.open[number] = Open(cell, house)
        self._node.opened(cell)
        log.info("cell opened", extra={"cell": number, "from": claimant or "nobody"})

    async def _hand_over(self, number: int) -> None:
        await self._close(number)
        await self._coordinator.release(number)

    async def _close(self, number: int) -> None:
        """In good order: no new work, a word to the clients, all that was begun is kept."""
        found = self.open.pop(number, None)
        if found is None:
            return
        self._node.closed(number)
        broker = found.cell.broker
        for connection in list(broker.connections):
            connection.hold()  # nothing more is read, and what was read is answered: nobody has to say it twice
        try:
            await found.cell.answer_all(LAST_WORDS_SECONDS)
            await found.house.flush()
        finally:
            found.cell.lose()
        gone = asyncio.Event()
        # Not "use another server": the same address leads to the new owner too, and clients take that word as final.
        broker.stop(gone.set, SERVER_SHUTTING_DOWN, "this session moves to another node: connect again")
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await gone.wait()
        broker.close()
        await found.house.close()
        log.info("cell closed", extra={"cell": number})

    def _failed(self, number: int, cell: Cell) -> None:
        """Its store has failed, or belongs to another node by now."""
        found = self.open.get(number)
        if found is not None and found.cell is cell:
            log.error("the store of a cell has failed", extra={"cell": number})
            self._drop(number)
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self.look)

    def _drop(self, number: int) -> None:
        """At once: it may be another node's."""
        found = self.open.pop(number)
        self._node.closed(number)
        found.cell.lose()
        found.cell.broker.close()
        task = asyncio.get_running_loop().create_task(found.house.close(keep=False))
        self._dropped.add(task)
        task.add_done_callback(self._dropped.discard)

    async def settled(self) -> None:
        """Wait until every cell has an owner, and all that are wanted here are open."""
        while not self._is_settled():
            self._looked.clear()
            await self._looked.wait()

    def _is_settled(self) -> bool:
        me, coordinator = self.me, self._coordinator
        if me is None or self._busy:
            return False
        wanted = self._place()
        return all(
            number in self.open if wanted[number] == me.name else owner_of(coordinator, number) is not None
            for number in range(self._node.cells)
        )

    # ---- coming and going

    def drop_all(self) -> None:
        """This node may own nothing from this moment on."""
        self.me = None
        for number in list(self.open):
            self._drop(number)
        self._node.peers_changed([])

    async def leave(self) -> None:
        """A planned leave: every cell is handed over in good order."""
        self._leaving = True
        while self._busy:
            await asyncio.wait(self._busy.values())
        await asyncio.gather(*(self._hand_over_quietly(number) for number in list(self.open)))
        while self._dropped:
            await asyncio.wait(self._dropped)
        self._node.peers_changed([])

    async def _hand_over_quietly(self, number: int) -> None:
        try:
            await self._hand_over(number)
        except CoordinatorError as fault:
            log.warning("a cell was not given up in good order", extra={"cell": number, "fault": str(fault)})
