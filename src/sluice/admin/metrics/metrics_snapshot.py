"""Snapshot of all counters for /metrics, copied on the broker's loop.

The engine counts as messages pass. This module only copies, a few queues at a time, and yields the
loop in between: ten thousand queues must not delay a publisher. It knows nothing of Prometheus.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from sluice.admin.broker_facade import BrokerFacade
from sluice.queues.model import ANY_ORDER, Group, Queue, build_ledger
from sluice.queues.names import DLQ_PREFIX

MAX_SLICE_SECONDS: Final = 0.001  # a scrape holds the loop for at most this long
DEAD_LETTER_REASONS: Final = ("max_retries", "timeout", "rejected", "expired", "overflow")


@dataclass(slots=True)
class GroupMetrics:
    name: str
    consumers: int
    lag: int
    workers_wanted: int
    oldest_at: float  # when the oldest unsettled message was due; 0.0 when there is none
    enqueued: int
    waiting: int
    delayed: int
    delivered: int
    retrying: int
    acked: int
    dead: int
    expired: int
    purged: int
    cancelled: int
    is_paused: bool  # by itself or with its queue
    breaker: int  # its state, as in `model.admission`
    is_limited: bool  # a limit allows no delivery now


@dataclass(slots=True)
class QueueMetrics:
    name: str
    depth: int
    max_depth: int
    max_in_flight: int  # of each group; 0: no limit
    max_rate: float  # per second
    delivery_timeout: float  # seconds
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
    is_dead_letter_queue: bool
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


async def take_snapshot(facade: BrokerFacade) -> MetricsSnapshot:
    """Copy all counters, on the broker's loop. Each group is consistent; the whole is not."""
    timer = _LoopTimer(facade)
    now = facade.sync_clock()
    snapshot = MetricsSnapshot(
        _broker_counters(facade), [], _segments(facade), now - float(facade.broker.started_at), now
    )
    dead_letter_queues = _dead_letter_queues(facade)
    for queue in list(facade.engine.queues.values()):
        await timer.yield_if_due()
        if not facade.is_current(queue):
            continue
        found = _queue_metrics(queue, queue.name in dead_letter_queues)
        for group in list(queue.groups.values()):
            await timer.yield_if_due()
            if queue.groups.get(group.name) is group:
                found.groups.append(_group_metrics(queue, group))
        snapshot.queues.append(found)
    timer.stop()
    snapshot.loop_seconds = timer.total
    snapshot.max_slice_seconds = timer.longest
    return snapshot


def _segments(facade: BrokerFacade) -> dict[int, int]:
    """Return the segment sizes; few numbers, even for a large store."""
    return dict(facade.commit_loop.segment_sizes())


def _dead_letter_queues(facade: BrokerFacade) -> set[str]:
    """Return the queues to which other queues send dead letters or invalid messages."""
    names: set[str] = set()
    for queue in facade.engine.queues.values():
        if queue.rules.dlq_enabled:
            names.add(queue.rules.dlq_name)
        if queue.rules.invalid_queue_name:
            names.add(queue.rules.invalid_queue_name)
    return names


def _queue_metrics(queue: Queue, is_dead_letter_queue: bool) -> QueueMetrics:
    groups = list(queue.groups.values())
    dead = dict.fromkeys(DEAD_LETTER_REASONS, 0) if queue.rules.dlq_enabled else {}
    dead.update(queue.dead_by_reason)
    process = queue.process_latency.counts()
    return QueueMetrics(
        name=queue.name,
        depth=int(queue.depth),
        max_depth=int(queue.rules.max_depth),
        max_in_flight=int(queue.rules.max_in_flight),
        max_rate=queue.rules.max_rate,
        delivery_timeout=queue.rules.delivery_timeout,
        bytes=int(queue.bytes),
        enqueued=int(queue.enqueued),
        # With the deliveries of deleted groups, so that the sums never fall.
        dequeued=int(queue.past_delivered) + sum(int(one.delivered) for one in groups),
        acked=int(queue.past_acked) + sum(int(one.count_acked()) for one in groups),
        nacked=int(queue.past_nacked) + sum(int(one.nacked) for one in groups),
        redelivered=int(queue.past_redelivered) + sum(int(one.redelivered) for one in groups),
        retried=int(queue.retried),
        duplicates=int(queue.duplicates),
        refused=int(queue.refused),
        dead=dead,
        delivery_counts=queue.delivery_latency.counts(),
        delivery_seconds=queue.delivery_latency.total,
        process_counts=process,
        process_seconds=queue.process_latency.total,
        is_dead_letter_queue=is_dead_letter_queue or queue.name.startswith(DLQ_PREFIX),
    )


def _group_metrics(queue: Queue, group: Group) -> GroupMetrics:
    account = build_ledger(queue, group)
    delayed = int(group.count_delayed())
    admission = group.admission
    return GroupMetrics(
        name=group.name,
        consumers=len(group.consumers),
        lag=account.waiting + account.delivered + account.retrying,
        workers_wanted=_count_workers_wanted(queue, account.waiting - delayed + account.delivered),
        oldest_at=int(group.oldest_due_ms()) / 1000.0,
        enqueued=account.enqueued,
        waiting=account.waiting - delayed,
        delayed=delayed,
        delivered=account.delivered,
        retrying=account.retrying,
        acked=account.acked,
        dead=account.dead,
        expired=account.expired,
        purged=account.purged,
        cancelled=account.cancelled,
        is_paused=admission.pause.is_active() or queue.pause.is_active(),
        breaker=int(admission.breaker.state),
        is_limited=admission.is_limited(queue.rules, group.in_flight),
    )


def _count_workers_wanted(queue: Queue, deliverable: int) -> int:
    """Return how many consumers could hold all deliverable messages, at most one per partition."""
    wanted = -(-deliverable // max(1, int(queue.rules.prefetch)))
    return wanted if queue.rules.ordering == ANY_ORDER else min(wanted, len(queue.partitions))


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
