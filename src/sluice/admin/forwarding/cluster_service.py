"""The admin service of a node of a cluster: one face for all the cells that are open here.

A question about a queue goes to the service of its cell; lists are put together. What lies with other nodes is not
known here: the doors pass such questions on before they come this far, so a cell that is missing has just moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import fields, replace
from heapq import merge
from itertools import islice
from typing import Any, Final
from weakref import WeakKeyDictionary

from sluice import __version__
from sluice.admin.bulk.bulk_service import BulkDesk
from sluice.admin.bulk.bulk_views import Batch, Committed, Repair, Target
from sluice.admin.metrics.metrics_snapshot import Figures, Tally
from sluice.admin.broker_facade import plain
from sluice.admin.service import AdminService
from sluice.admin.views import LossView, NodeView, OwnerView, QueueDetail, QueueView, StoreView
from sluice.cluster.directory import Directory
from sluice.errors import StoreError, UnknownLoss
from sluice.message import Message

# Methods whose first argument is a queue, and those whose first is a client.
BY_QUEUE: Final = (
    "queue",
    "stats",
    "delete_queue",
    "config",
    "configure",
    "purge",
    "groups",
    "group",
    "create_group",
    "delete_group",
    "consumers",
    "seek",
    "peek",
    "message",
    "publish",
    "dead_letters",
    "dead_letter",
    "retry_dead_letter",
    "retry_dead_letters",
    "purge_dead_letters",
    "delete_dead_letter",
    "biography",
    "diagnose",
)
BY_CLIENT: Final = ("owner", "peek_owner", "purge_owner")
BULK_BY_QUEUE: Final = ("offsets", "offsets_at", "slice", "progress", "advance")
SUMMED: Final = frozenset(one.name for one in fields(NodeView) if one.type == "int")


class CellMoved(StoreError):
    """Asked too early or too late: the cell is on its way to another node."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is moving between nodes", "Try again in a moment")


class CellsService(AdminService):
    """`services` gives those of the cells that are open here now, by the number of the cell."""

    def __init__(
        self,
        directory: Directory,
        services: Callable[[], dict[int, AdminService]],
        name: str,
        store_name: str,
        build: str,
    ) -> None:
        self._directory = directory
        self._services = services
        self._started_at = time.time()
        self._tallies: WeakKeyDictionary[AdminService, Tally] = WeakKeyDictionary()
        self._store_name = store_name
        self._build = build
        self._node = name
        self.bulk = CellsBulk(self)

    def at(self, cell: int, what: str) -> AdminService:
        found = self._services().get(cell)
        if found is None:
            raise CellMoved(what)
        return found

    def of_queue(self, name: str) -> AdminService:
        name = plain(name)
        return self.at(self._directory.cell_of_queue(name), f"queue {name!r}")

    def of_client(self, client: str) -> AdminService:
        return self.at(self._directory.cell_of_client(client), f"client {client!r}")

    async def node(self) -> NodeView:
        now = time.time()
        zero = dict.fromkeys(SUMMED, 0)
        whole = NodeView(
            **{
                **zero,
                "name": self._node,
                "version": __version__,
                "build": self._build,
                "store": self._store_name,
                "started_at": self._started_at,
                "now": now,
                "stopping": False,
            }  # type: ignore[arg-type]
        )
        for service in list(self._services().values()):
            part = await service.node()
            sums = {name: getattr(whole, name) + getattr(part, name) for name in SUMMED}
            whole = replace(whole, **sums, stopping=whole.stopping or part.stopping)
        return whole

    async def store(self) -> StoreView:
        return self._added([await one.store() for one in list(self._services().values())])

    async def losses(self) -> list[LossView]:
        services = list(self._services().values())
        return sorted(
            [loss for one in services for loss in await one.losses()],
            key=lambda loss: loss.cell,
        )

    async def confirm_loss(self, cell: int) -> LossView:
        if not 0 <= cell < self._directory.cells:
            raise UnknownLoss(cell)
        return await self.at(cell, f"cell {cell}").confirm_loss(cell)

    async def recent_store(self) -> StoreView:
        return self._added([await one.recent_store() for one in list(self._services().values())])

    def _added(self, parts: list[StoreView]) -> StoreView:
        """The parts of the store that this node has, as one."""
        if not parts:
            raise CellMoved("every cell of this node")
        faults = [part.fault for part in parts if part.fault]
        return replace(
            parts[0],
            healthy=all(part.healthy for part in parts),
            fault=faults[0] if faults else "",
            warnings=list(dict.fromkeys(warning for part in parts for warning in part.warnings)),
            segments=sum(part.segments for part in parts),
            bytes=sum(part.bytes for part in parts),
            owner=self._node,
            frame=sum(part.frame for part in parts),
            frames_lost=sum(part.frames_lost for part in parts),
            queues=sorted((queue for part in parts for queue in part.queues), key=lambda queue: queue.name),
        )

    async def list_queues(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[QueueView]:
        pages = [await one.list_queues(prefix, after, limit) for one in list(self._services().values())]
        return list(islice(merge(*pages, key=lambda view: view.name), limit))

    async def create_queue(self, config: object) -> QueueDetail:
        name = config.get("name") if isinstance(config, dict) else None
        if isinstance(name, str):
            return await self.of_queue(name).create_queue(config)
        return await self.any().create_queue(config)  # which says what is wrong with it

    def any(self) -> AdminService:
        for service in self._services().values():
            return service
        raise CellMoved("every cell of this node")

    async def owners(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[OwnerView]:
        pages = [await one.owners(prefix, after, limit) for one in list(self._services().values())]
        return list(islice(merge(*pages, key=lambda view: view.client), limit))

    async def find(self, message_id: str) -> list[str]:
        return [name for one in list(self._services().values()) for name in await one.find(message_id)]

    async def verify(self) -> list[str]:
        return [fault for one in list(self._services().values()) for fault in await one.verify()]

    async def figures(self, tally: Tally) -> Figures:
        whole: Figures | None = None
        for service in list(self._services().values()):
            part = await service.figures(self._tallies.setdefault(service, Tally()))
            if whole is None:
                whole = part
                continue
            for key, value in part.broker.items():
                whole.broker[key] += value
            whole.queues += part.queues
            whole.segments.update({len(whole.segments) + nth: size for nth, size in part.segments.items()})
            whole.seconds += part.seconds
            whole.longest = max(whole.longest, part.longest)
        if whole is None:
            raise CellMoved("every cell of this node")
        whole.cluster = {
            "nodes": len(self._directory.nodes()),
            "cells": len(self._services()),
            "moving": sum(one.is_moving for one in self._directory.cell_states()),
        }
        return whole


class CellsBulk(BulkDesk):
    """Programs that read and write in bulk: a range is in one cell, a batch may be for queues of several."""

    def __init__(self, cells: CellsService) -> None:
        self._cells = cells
        self.direct = False

    async def last_batch(self, app: str) -> int | None:
        return await self._cells.of_client(app).bulk.last_batch(app)

    async def targets(self, names: list[str]) -> dict[str, Target]:
        found: dict[str, Target] = {}
        for name in names:
            found.update(await self._cells.of_queue(name).bulk.targets([name]))
        return found

    async def commit(self, batch: Batch) -> Committed:
        """Cell by cell, each with a fence of its own, that of the application last: a batch that was broken off is
        committed again where it is missing, and counts as done when the last one has it."""
        directory = self._cells._directory
        shares: dict[int, tuple[list[tuple[str, list[Message]]], list[Repair]]] = {}
        for name, messages in batch.runs:
            shares.setdefault(directory.cell_of_queue(name), ([], []))[0].append((name, messages))
        for repair in batch.repairs:
            shares.setdefault(directory.cell_of_queue(repair.queue), ([], []))[1].append(repair)
        home = directory.cell_of_client(batch.app)
        last = ([], []) if batch.is_share else shares.pop(home, ([], []))
        skipped = 0
        for cell, (runs, repairs) in shares.items():
            rows = sum(len(messages) for _, messages in runs) + len(repairs)
            service = self._cells.at(cell, f"queue {(runs[0][0] if runs else repairs[0].queue)!r}")
            share = Batch(batch.app, batch.number, rows, runs, repairs, batch.to_all)
            skipped += (await service.bulk.commit(share)).skipped
        if batch.is_share:
            return Committed(batch.rows, False, skipped)
        service = self._cells.at(home, f"application {batch.app!r}")
        whole = Batch(batch.app, batch.number, batch.rows, *last, batch.to_all)
        done = await service.bulk.commit(whole)
        return replace(done, skipped=done.skipped + skipped)


def _passed_on(method: str, find: Callable[[Any, str], Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def ask(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
        return await getattr(find(self, name), method)(name, *arguments, **named)

    return ask


for _method in BY_QUEUE:
    setattr(CellsService, _method, _passed_on(_method, CellsService.of_queue))
for _method in BY_CLIENT:
    setattr(CellsService, _method, _passed_on(_method, CellsService.of_client))
for _method in BULK_BY_QUEUE:
    setattr(CellsBulk, _method, _passed_on(_method, lambda bulk, name: bulk._cells.of_queue(name).bulk))
