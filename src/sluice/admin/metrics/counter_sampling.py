"""Copies of the counters that charts need, taken on the broker's loop in slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.admin.broker_facade import BATCH_SIZE, BrokerFacade
from sluice.queues.service import GroupInspector, QueueInspector

CountAcked = Callable[[GroupInspector, float], int]


@dataclass(slots=True)
class CounterSample:
    """Counters at one moment: of each queue (depth, enqueued, delivered, acked), and of clients."""

    at: float = 0.0
    publishes_received: int = 0
    publishes_sent: int = 0
    queues: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)


async def sample_counters(
    facade: BrokerFacade, count_acked: CountAcked, max_queues: int
) -> CounterSample:
    """Return the counters of at most `max_queues` queues, those that were created first.

    `count_acked` returns what a group has acknowledged; it is also told the time.
    """
    counters = facade.broker.counters
    sample = CounterSample(
        facade.sync_clock(), int(counters.publishes_received), int(counters.publishes_sent)
    )
    for nth, queue in enumerate(facade.inspector.queues(max_queues)):
        if nth % BATCH_SIZE == BATCH_SIZE - 1:
            await facade.yield_to_loop()
        sample.queues[queue.name] = _counters_of(queue, count_acked, sample.at)
    return sample


def _counters_of(
    queue: QueueInspector, count_acked: CountAcked, now: float
) -> tuple[int, int, int, int]:
    delivered = acked = 0
    for group in queue.groups():
        delivered += group.delivered()
        acked += count_acked(group, now)
    return queue.depth(), queue.enqueued(), delivered, acked
