"""Snapshot of all counters for /metrics, copied on the broker's loop.

The engine counts as messages pass. This module only copies, a few queues at a time, and yields the
loop in between: ten thousand queues must not delay a publisher. It knows nothing of Prometheus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from sluice.admin.broker_facade import BrokerFacade
from sluice.queues.model import Group, Queue, build_ledger

MAX_SLICE_SECONDS: Final = 0.001  # a scrape holds the loop for at most this long
DEAD_LETTER_REASONS: Final = ("max_retries", "timeout", "rejected", "expired", "overflow")


@dataclass(slots=True)
class GroupMetrics:
    name: str
    consumers: int
    lag: int
    oldest_at: float  # enqueue time of the oldest unsettled message; 0.0 when there is none
    enqueued: int
    waiting: int
    delivered: int
    retrying: int
    acked: int
    dead: int
    expired: int
    purged: int


@dataclass(slots=True)
class QueueMetrics:
    name: str
    depth: int
    max_depth: int
    bytes: int
    enqueued: int
    dequeued: int
    acked: int
    nacked: int
    redelivered: int
    retried: int
    duplicates: int
    refused: int
    dead: dict[str, int]
    delivery_counts: list[int]  # by histogram bound; empty when nothing was counted
    delivery_seconds: float
    process_counts: list[int]
    process_seconds: float
    groups: list[GroupMetrics] = field(default_factory=list)


@dataclass(slots=True)
class MetricsSnapshot:
    broker: dict[str, int]
    queues: list[QueueMetrics]
    segments: dict[int, int]  # bytes on disk, by segment number
    uptime: float
    now: float
    loop_seconds: float = 0.0  # time that this copy took on the broker's loop
    max_slice_seconds: float = 0.0  # the longest of its slices
    # Nodes, local cells, moving cells; empty without a cluster.
    cluster: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _QueueTotals:
    """Counts of one queue: of its groups at the last scrape, and of its deleted groups."""

    deleted: tuple[int, int, int] = (0, 0, 0)
    last_seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)


class DeliveryTotals:
    """Delivery counts of queues that do not fall when a group is deleted.

    Deliveries are counted by group. The counts of a deleted group stay in the queue's sums,
    because a falling counter looks like a restart. What the group counted after the last scrape is
    not known.
    """

    def __init__(self) -> None:
        self._queues: dict[int, _QueueTotals] = {}

    def sum_deliveries(self, queue: Queue) -> tuple[int, int, int]:
        """Return deliveries, nacks, and redeliveries of a queue."""
        totals = self._queues.get(int(queue.qid))
        if totals is None:
            totals = self._queues[int(queue.qid)] = _QueueTotals()
        now = {
            int(group.gid): (int(group.delivered), int(group.nacked), int(group.redelivered))
            for group in queue.groups.values()
        }
        for gid, counts in totals.last_seen.items():
            if gid not in now:
                totals.deleted = _add(totals.deleted, counts)
        totals.last_seen = now
        total = totals.deleted
        for counts in now.values():
            total = _add(total, counts)
        return total

    def forget_deleted_queues(self, queues: Collection[Queue]) -> None:
        """Drop all queues but these. A queue number is never reused."""
        if len(self._queues) > len(queues):
            for qid in self._queues.keys() - {int(queue.qid) for queue in queues}:
                del self._queues[qid]


def _add(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2])


class _LoopTimer:
    """Measure the time that the loop is held."""

    def __init__(self, facade: BrokerFacade) -> None:
        self._facade = facade
        self._started_at = perf_counter()
        self.total = 0.0
        self.longest = 0.0

    async def yield_if_due(self) -> None:
        """Yield the loop if it was held long enough."""
        if perf_counter() - self._started_at >= MAX_SLICE_SECONDS:
            self.stop()
            await asyncio.sleep(0)
            self._started_at = perf_counter()
            self._facade.sync_clock()

    def stop(self) -> None:
        held = perf_counter() - self._started_at
        self.total += held
        self.longest = max(self.longest, held)


async def take_snapshot(facade: BrokerFacade, totals: DeliveryTotals) -> MetricsSnapshot:
    """Copy all counters, on the broker's loop. Each group is consistent; the whole is not."""
    timer = _LoopTimer(facade)
    now = facade.sync_clock()
    snapshot = MetricsSnapshot(
        _broker_counters(facade), [], _segments(facade), now - float(facade.broker.started_at), now
    )
    for queue in list(facade.engine.queues.values()):
        await timer.yield_if_due()
        if not facade.is_current(queue):
            continue
        found = _queue_metrics(queue, totals)
        for group in list(queue.groups.values()):
            await timer.yield_if_due()
            if queue.groups.get(group.name) is group:
                found.groups.append(_group_metrics(queue, group))
        snapshot.queues.append(found)
    totals.forget_deleted_queues(facade.engine.queues.values())
    timer.stop()
    snapshot.loop_seconds = timer.total
    snapshot.max_slice_seconds = timer.longest
    return snapshot


def _segments(facade: BrokerFacade) -> dict[int, int]:
    """Return the segment sizes; few numbers, even for a large store."""
    return dict(facade.commit_loop.segment_sizes())


def _queue_metrics(queue: Queue, totals: DeliveryTotals) -> QueueMetrics:
    delivered, nacked, redelivered = totals.sum_deliveries(queue)
    dead = dict.fromkeys(DEAD_LETTER_REASONS, 0) if queue.rules.dlq_enabled else {}
    dead.update(queue.dead_by_reason)
    process = queue.process_latency.counts()
    return QueueMetrics(
        name=queue.name,
        depth=int(queue.depth),
        max_depth=int(queue.rules.max_depth),
        bytes=int(queue.bytes),
        enqueued=int(queue.enqueued),
        dequeued=delivered,
        # Each ack ends one measured delivery; unlike the counts of a group, it never disappears.
        acked=sum(process),
        nacked=nacked,
        redelivered=redelivered,
        retried=int(queue.retried),
        duplicates=int(queue.duplicates),
        refused=int(queue.refused),
        dead=dead,
        delivery_counts=queue.delivery_latency.counts(),
        delivery_seconds=queue.delivery_latency.total,
        process_counts=process,
        process_seconds=queue.process_latency.total,
    )


def _group_metrics(queue: Queue, group: Group) -> GroupMetrics:
    account = build_ledger(queue, group)
    oldest = 0
    for cursor in group.cursors:
        if cursor.low_watermark < cursor.partition.next_seq:
            enqueued_at = int(cursor.partition.arrival_ms(cursor.low_watermark))
            if enqueued_at and (oldest == 0 or enqueued_at < oldest):
                oldest = enqueued_at
    return GroupMetrics(
        name=group.name,
        consumers=len(group.consumers),
        lag=account.waiting + account.delivered + account.retrying,
        oldest_at=oldest / 1000.0,
        enqueued=account.enqueued,
        waiting=account.waiting,
        delivered=account.delivered,
        retrying=account.retrying,
        acked=account.acked,
        dead=account.dead,
        expired=account.expired,
        purged=account.purged,
    )


def _broker_counters(facade: BrokerFacade) -> dict[str, int]:
    broker = facade.broker
    counters = broker.counters
    router = broker.router
    exclusive = facade.engine.exclusive
    return {
        "connections": int(counters.connections_open),
        "connections_opened": int(counters.connections_opened),
        "connections_refused": int(counters.connections_refused),
        "clients_connected": int(counters.clients_connected),
        "sessions": len(broker.registry.sessions),
        "sessions_expired": int(counters.sessions_expired),
        "subscriptions": int(router.subscriptions.count),
        "shared_subscriptions": int(router.subscriptions.shared_count),
        "retained_messages": int(router.retained.count),
        "retained_bytes": int(router.retained.payload_bytes),
        "packets_received": int(counters.packets_received),
        "packets_sent": int(counters.packets_sent),
        "bytes_received": int(counters.bytes_received),
        "bytes_sent": int(counters.bytes_sent),
        "publishes_received": int(counters.publishes_received),
        "publishes_sent": int(counters.publishes_sent),
        "publishes_dropped": int(counters.publishes_dropped),
        "publish_bytes_received": int(counters.publish_bytes_received),
        "publish_bytes_sent": int(counters.publish_bytes_sent),
        "protocol_violations": int(counters.protocol_violations),
        "wrong_tokens": int(counters.wrong_tokens),
        "ecq_owners": len(exclusive.owners),
        "ecq_values": int(exclusive.value_count),
        "ecq_writes": int(exclusive.written),
        "ecq_replaced": int(exclusive.replaced),
        "ecq_deliveries": int(exclusive.delivered),
        "ecq_acks": int(exclusive.acked),
        "ecq_aged": int(exclusive.removed_by_age),
    }
