"""The store's status: its kind, its health, and what it reports of the queues by itself.

A store with its own API (Redis) is queried as any client would query it, off the broker's loop: its
figures are independent of the broker's own. This module knows no store by name: the composition
passes in the query.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol, cast

from sluice.admin import model
from sluice.errors import StoreError, UnknownLoss

MAX_AGE_SECONDS: Final = 5.0  # maximum age of the answer to a scrape


class StoreGroupTotals(Protocol):
    @property
    def pending(self) -> int: ...
    @property
    def consumers(self) -> int: ...
    @property
    def lag(self) -> int: ...
    @property
    def retrying(self) -> int: ...


class StoreQueueTotals(Protocol):
    @property
    def partitions(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def counters(self) -> dict[str, int]: ...
    @property
    def groups(self) -> Mapping[str, StoreGroupTotals]: ...


class StoreTotals(Protocol):
    @property
    def owner(self) -> str: ...
    @property
    def frame(self) -> int: ...
    @property
    def version(self) -> str: ...
    @property
    def is_cluster(self) -> bool: ...
    @property
    def replicas(self) -> int: ...
    @property
    def replica_timeouts(self) -> int: ...
    @property
    def warnings(self) -> Sequence[str]: ...
    @property
    def queues(self) -> Mapping[str, StoreQueueTotals]: ...


class RecordedLoss(Protocol):
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...
    @property
    def frames(self) -> int: ...
    @property
    def times(self) -> int: ...
    @property
    def at(self) -> float: ...
    @property
    def queues(self) -> dict[str, int]: ...


class LossRecord(Protocol):
    """The record of committed frames that a store has lost."""

    @property
    def total(self) -> int: ...
    @property
    def unconfirmed(self) -> RecordedLoss | None: ...
    def forget(self) -> None: ...


class LossTracker:
    """The losses of the store of one cell.

    `confirm` records that the loss up to a frame is known; it returns False if the store has
    recorded another loss since.
    """

    def __init__(
        self, cell: int, record: LossRecord, confirm: Callable[[int], Awaitable[bool]]
    ) -> None:
        self.cell = cell
        self._record = record
        self._confirm = confirm

    @property
    def frames_lost(self) -> int:
        return self._record.total

    def view(self) -> model.Loss | None:
        loss = self._record.unconfirmed
        if loss is None:
            return None
        queues = dict(loss.queues)
        return model.Loss(
            self.cell, loss.first, loss.last, loss.frames, loss.times, loss.at, queues
        )

    async def confirm(self) -> model.Loss:
        view = self.view()
        if view is None:
            raise UnknownLoss(self.cell)
        try:
            is_confirmed = await self._confirm(view.last)
        except Exception as error:  # the client library of the store may raise anything
            raise StoreError(
                f"the store does not answer: {error}", "Try again in a moment"
            ) from error
        if not is_confirmed:
            raise StoreError("another loss was recorded since", "Look at it, and confirm again")
        self._record.forget()
        return view


class StoreStatus:
    """Status of one store.

    `get_fault` returns what is wrong with the store, or "". `fetch_totals` queries its sums; a
    store without an API has none. What it raises is reported as a fault of the store.
    """

    def __init__(
        self,
        address: str,
        segment_sizes: Callable[[], dict[int, int]],
        get_fault: Callable[[], str] | None = None,
        fetch_totals: Callable[[], Awaitable[StoreTotals]] | None = None,
        losses: LossTracker | None = None,
    ) -> None:
        self._address = address
        self._segment_sizes = segment_sizes
        self._get_fault = get_fault
        self._fetch_totals = fetch_totals
        self._losses = losses
        self._last_view: model.Store | None = None
        self._fetched_at = 0.0

    async def view(self) -> model.Store:
        totals: StoreTotals | None = None
        fault = self._get_fault() if self._get_fault is not None else ""
        if self._fetch_totals is not None:
            try:
                totals = await self._fetch_totals()
            except Exception as error:  # the client library of the store may raise anything
                fault = fault or f"it does not answer: {error}"
        sizes = self._segment_sizes()
        self._fetched_at = asyncio.get_running_loop().time()
        self._last_view = model.Store(
            kind=_kind_of(self._address),
            address=self._address,
            healthy=not fault,
            fault=fault,
            warnings=list(totals.warnings) if totals is not None else [],
            segments=len(sizes),
            bytes=sum(sizes.values()),
            version=totals.version if totals is not None else "",
            cluster=totals is not None and totals.is_cluster,
            owner=totals.owner if totals is not None else "",
            frame=totals.frame if totals is not None else 0,
            queues=_build_queue_views(totals) if totals is not None else [],
            frames_lost=self._losses.frames_lost if self._losses is not None else 0,
            replicas=totals.replicas if totals is not None else 0,
            replica_timeouts=totals.replica_timeouts if totals is not None else 0,
        )
        return self._last_view

    def losses(self) -> list[model.Loss]:
        """Return the unconfirmed loss, if there is one."""
        view = self._losses.view() if self._losses is not None else None
        return [] if view is None else [view]

    async def confirm_loss(self, cell: int) -> model.Loss:
        if self._losses is None or self._losses.cell != cell:
            raise UnknownLoss(cell)
        return await self._losses.confirm()

    async def recent_view(self) -> model.Store:
        """Return a view at most MAX_AGE_SECONDS old, for frequent callers."""
        now = asyncio.get_running_loop().time()
        if self._last_view is not None and now - self._fetched_at < MAX_AGE_SECONDS:
            return self._last_view
        return await self.view()


def _kind_of(address: str) -> model.StoreKind:
    kind = address.partition(":")[0]
    return cast(model.StoreKind, "redis" if kind.startswith("redis") else kind)


def _build_queue_views(totals: StoreTotals) -> list[model.StoreQueue]:
    found: list[model.StoreQueue] = []
    for name, queue in sorted(totals.queues.items()):
        groups = [
            model.StoreGroup(group_name, group.pending, group.consumers, group.lag, group.retrying)
            for group_name, group in sorted(queue.groups.items())
        ]
        found.append(
            model.StoreQueue(name, queue.partitions, queue.length, dict(queue.counters), groups)
        )
    return found
