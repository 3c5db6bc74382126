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
from sluice.queues.service import views

MAX_SLICE_SECONDS: Final = 0.001  # a scrape holds the loop for at most this long


@dataclass(slots=True)
class MetricsSnapshot:
    broker: dict[str, int]
    queues: list[views.QueueMetrics]
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
    for queue in facade.inspector.queues():
        await timer.yield_if_due()
        if not queue.is_current():
            continue
        found = queue.metrics()
        for group in queue.groups():
            await timer.yield_if_due()
            if group.is_current():
                found.groups.append(group.metrics())
        snapshot.queues.append(found)
    timer.stop()
    snapshot.loop_seconds = timer.total
    snapshot.max_slice_seconds = timer.longest
    return snapshot


def _segments(facade: BrokerFacade) -> dict[int, int]:
    """Return the segment sizes; few numbers, even for a large store."""
    return dict(facade.commit_loop.segment_sizes())


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
        "retained_messages": router.retained.count_of_clients(),
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
