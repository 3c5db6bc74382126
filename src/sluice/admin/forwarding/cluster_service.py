"""The admin service of a cluster node: one service for all cells that are open on this node.

A request about a queue goes to the service of its cell; lists are merged. This module knows nothing
of other nodes: the APIs forward such requests before they reach it, so a missing cell has just
moved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import Any, Final, get_type_hints

from sluice import __version__
from sluice.admin import model
from sluice.admin.broker_facade import strip_queue_prefix
from sluice.admin.bulk import Batch, BulkService, CommitResult, DeadLetterRepair, QueueTarget
from sluice.admin.metrics import CounterSample, MetricsSnapshot
from sluice.admin.model import QueueDetail
from sluice.admin.service import AdminService
from sluice.cluster.membership import Directory
from sluice.errors import StoreError, UnknownLoss
from sluice.message import Message

# Methods whose first argument is a queue name; below, those whose first argument is a client id.
QUEUE_METHODS: Final = (
    "queue",
    "stats",
    "delete_queue",
    "config",
    "configure",
    "purge",
    "pause_queue",
    "resume_queue",
    "groups",
    "group",
    "create_group",
    "delete_group",
    "pause_group",
    "resume_group",
    "consumers",
    "seek",
    "peek",
    "message",
    "publish",
    "cancel_message",
    "cancel_messages",
    "reschedule_message",
    "reschedule_messages",
    "schedule",
    "store_schedule",
    "remove_schedule",
    "pause_schedule",
    "resume_schedule",
    "run_schedule",
    "dead_letters",
    "dead_letter",
    "dead_letter_errors",
    "retry_dead_letter",
    "retry_dead_letters",
    "purge_dead_letters",
    "delete_dead_letter",
    "trace_message",
    "diagnose",
)
CLIENT_METHODS: Final = ("owner", "peek_owner", "purge_owner")
SESSION_METHODS: Final = ("client", "kick_client")
BULK_QUEUE_METHODS: Final = ("offsets", "offsets_at", "slice", "count", "progress", "advance")
SUMMED_FIELDS: Final = frozenset(
    name for name, kind in get_type_hints(model.Node).items() if kind is int
)


class CellMoved(StoreError):
    """The cell of a resource is moving to another node."""

    def __init__(self, resource: str) -> None:
        super().__init__(f"{resource} is moving between nodes", "Try again in a moment")


class ClusterAdminService(AdminService):
    """Admin service over the cells of a node; `services` returns the open ones by cell number."""

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
        self._store_name = store_name
        self._build = build
        self._node = name
        self.bulk = ClusterBulkService(self)

    def service_of_cell(self, cell: int, what: str) -> AdminService:
        found = self._services().get(cell)
        if found is None:
            raise CellMoved(what)
        return found

    def service_of_queue(self, name: str) -> AdminService:
        name = strip_queue_prefix(name)
        return self.service_of_cell(self._directory.cell_of_queue(name), f"queue {name!r}")

    def service_of_client(self, client: str) -> AdminService:
        return self.service_of_cell(self._directory.cell_of_client(client), f"client {client!r}")

    def service_of_session(self, client: str) -> AdminService:
        """Return the service of the cell with the session, or else of the client's own cell."""
        for service in self._services().values():
            if service.has_session(client):
                return service
        return self.service_of_client(client)

    async def node(self) -> model.Node:
        now = time.time()
        zero = dict.fromkeys(SUMMED_FIELDS, 0)
        combined = model.Node(
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
            sums = {name: getattr(combined, name) + getattr(part, name) for name in SUMMED_FIELDS}
            combined = replace(combined, **sums, stopping=combined.stopping or part.stopping)
        return combined

    async def store(self) -> model.Store:
        return self._combine_stores([await one.store() for one in list(self._services().values())])

    async def losses(self) -> list[model.Loss]:
        services = list(self._services().values())
        return sorted(
            [loss for one in services for loss in await one.losses()],
            key=lambda loss: loss.cell,
        )

    async def confirm_loss(self, cell: int) -> model.Loss:
        if not 0 <= cell < self._directory.cells:
            raise UnknownLoss(cell)
        return await self.service_of_cell(cell, f"cell {cell}").confirm_loss(cell)

    async def recent_store(self) -> model.Store:
        return self._combine_stores(
            [await one.recent_store() for one in list(self._services().values())]
        )

    def _combine_stores(self, parts: list[model.Store]) -> model.Store:
        """Combine the store views of the cells into one."""
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
            replica_timeouts=sum(part.replica_timeouts for part in parts),
            queues=sorted(
                (queue for part in parts for queue in part.queues), key=lambda queue: queue.name
            ),
        )

    async def list_queues(
        self, prefix: str = "", after: str = "", limit: int = 1000
    ) -> list[model.Queue]:
        pages = [
            await one.list_queues(prefix, after, limit) for one in list(self._services().values())
        ]
        return list(islice(merge(*pages, key=lambda view: view.name), limit))

    async def schedules(self, name: str = "") -> list[model.Schedule]:
        if name:
            return await self.service_of_queue(name).schedules(name)
        found = [one for part in list(self._services().values()) for one in await part.schedules()]
        return sorted(found, key=lambda one: (one.queue, one.name))

    async def create_queue(self, config: object) -> QueueDetail:
        name = config.get("name") if isinstance(config, dict) else None
        if isinstance(name, str):
            return await self.service_of_queue(name).create_queue(config)
        return await self.any_service().create_queue(config)  # raises the validation error

    def any_service(self) -> AdminService:
        for service in self._services().values():
            return service
        raise CellMoved("every cell of this node")

    async def owners(
        self, prefix: str = "", after: str = "", limit: int = 1000
    ) -> list[model.Owner]:
        pages = [await one.owners(prefix, after, limit) for one in list(self._services().values())]
        return list(islice(merge(*pages, key=lambda view: view.client), limit))

    async def sample_counters(self, max_queues: int) -> CounterSample:
        combined = CounterSample(time.time())
        for service in list(self._services().values()):
            part = await service.sample_counters(max_queues - len(combined.queues))
            combined.publishes_received += part.publishes_received
            combined.publishes_sent += part.publishes_sent
            combined.queues.update(part.queues)
        return combined

    async def clients(
        self,
        prefix: str = "",
        after: str = "",
        limit: int = 1000,
        connected: bool | None = None,
        user: str = "",
    ) -> list[model.Client]:
        pages = [
            await one.clients(prefix, after, limit, connected, user)
            for one in list(self._services().values())
        ]
        return list(islice(merge(*pages, key=lambda view: view.client), limit))

    async def find(self, message_id: str) -> list[str]:
        return [
            name for one in list(self._services().values()) for name in await one.find(message_id)
        ]

    async def verify(self) -> list[str]:
        return [fault for one in list(self._services().values()) for fault in await one.verify()]

    async def collect_metrics(self) -> MetricsSnapshot:
        combined: MetricsSnapshot | None = None
        for service in list(self._services().values()):
            part = await service.collect_metrics()
            if combined is None:
                combined = part
                continue
            for key, value in part.broker.items():
                combined.broker[key] += value
            combined.queues += part.queues
            combined.segments.update(
                {len(combined.segments) + nth: size for nth, size in part.segments.items()}
            )
            combined.loop_seconds += part.loop_seconds
            combined.max_slice_seconds = max(combined.max_slice_seconds, part.max_slice_seconds)
        if combined is None:
            raise CellMoved("every cell of this node")
        combined.cluster = {
            "nodes": len(self._directory.nodes()),
            "cells": len(self._services()),
            "moving": sum(one.is_moving for one in self._directory.cell_states()),
            "load_timeouts": self._directory.load_timeouts(),
        }
        return combined


class ClusterBulkService(BulkService):
    """Bulk service over cells: a range is in one cell, a batch may be for queues of several."""

    def __init__(self, cells: ClusterAdminService) -> None:
        self._cells = cells
        self.has_segment_files = False

    async def last_batch(self, app: str) -> int | None:
        return await self._cells.service_of_client(app).bulk.last_batch(app)

    async def targets(self, names: list[str]) -> dict[str, QueueTarget]:
        found: dict[str, QueueTarget] = {}
        for name in names:
            found.update(await self._cells.service_of_queue(name).bulk.targets([name]))
        return found

    async def commit(self, batch: Batch) -> CommitResult:
        """Commit cell by cell, each with its own fence, the application's home cell last.

        An interrupted batch is committed again in the cells that miss it. It counts as committed
        when the home cell has it.
        """
        directory = self._cells._directory
        parts_by_cell: dict[
            int, tuple[list[tuple[str, list[Message]]], list[DeadLetterRepair]]
        ] = {}
        for name, messages in batch.runs:
            parts_by_cell.setdefault(directory.cell_of_queue(name), ([], []))[0].append(
                (name, messages)
            )
        for repair in batch.repairs:
            parts_by_cell.setdefault(directory.cell_of_queue(repair.queue), ([], []))[1].append(
                repair
            )
        home_cell = directory.cell_of_client(batch.app)
        home_part = ([], []) if batch.is_forwarded_part else parts_by_cell.pop(home_cell, ([], []))
        skipped = 0
        for cell, (runs, repairs) in parts_by_cell.items():
            rows = sum(len(messages) for _, messages in runs) + len(repairs)
            service = self._cells.service_of_cell(
                cell, f"queue {(runs[0][0] if runs else repairs[0].queue)!r}"
            )
            part = Batch(batch.app, batch.number, rows, runs, repairs, batch.to_all)
            skipped += (await service.bulk.commit(part)).skipped
        if batch.is_forwarded_part:
            return CommitResult(batch.rows, False, skipped)
        service = self._cells.service_of_cell(home_cell, f"application {batch.app!r}")
        home_batch = Batch(batch.app, batch.number, batch.rows, *home_part, batch.to_all)
        done = await service.bulk.commit(home_batch)
        return replace(done, skipped=done.skipped + skipped)


def _forward_to(
    method: str, find_service: Callable[[Any, str], Any]
) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def ask(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
        return await getattr(find_service(self, name), method)(name, *arguments, **named)

    return ask


for _method in QUEUE_METHODS:
    setattr(
        ClusterAdminService, _method, _forward_to(_method, ClusterAdminService.service_of_queue)
    )
for _method in CLIENT_METHODS:
    setattr(
        ClusterAdminService, _method, _forward_to(_method, ClusterAdminService.service_of_client)
    )
for _method in SESSION_METHODS:
    setattr(
        ClusterAdminService, _method, _forward_to(_method, ClusterAdminService.service_of_session)
    )
for _method in BULK_QUEUE_METHODS:
    setattr(
        ClusterBulkService,
        _method,
        _forward_to(_method, lambda bulk, name: bulk._cells.service_of_queue(name).bulk),
    )
