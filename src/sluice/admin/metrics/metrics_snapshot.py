"""The figures behind /metrics: the counters of the broker and of every queue, copied on the broker's loop.

Counting is done by the engine as messages pass; this only copies, a few queues at a time, and gives the loop back in
between: ten thousand queues must not hold up a publisher. It knows nothing of Prometheus.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

from sluice.admin.broker_facade import Hands
from sluice.queues.model.group import Group
from sluice.queues.model.ledger import ledger
from sluice.queues.model.queue import Queue

SLICE_SECONDS: Final = 0.001  # what a scrape may take of the loop before MQTT gets its turn
REASONS: Final = ("max_retries", "timeout", "rejected", "expired", "overflow")


@dataclass(slots=True)
class GroupFigures:
    name: str
    consumers: int
    lag: int
    oldest: float  # when the oldest message that it has not settled was enqueued; 0.0 when there is none
    enqueued: int
    waiting: int
    delivered: int
    retrying: int
    acked: int
    dead: int
    expired: int
    purged: int


@dataclass(slots=True)
class QueueFigures:
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
    delivery_counts: list[int]  # by bound of the histogram; empty when nothing was counted
    delivery_seconds: float
    process_counts: list[int]
    process_seconds: float
    groups: list[GroupFigures] = field(default_factory=list)


@dataclass(slots=True)
class Figures:
    broker: dict[str, int]
    queues: list[QueueFigures]
    segments: dict[int, int]  # bytes on disk, by number
    uptime: float
    now: float
    seconds: float = 0.0  # of the broker's loop that this copy took
    longest: float = 0.0  # the longest of its slices
    cluster: dict[str, int] = field(
        default_factory=dict
    )  # nodes, cells here, cells on their way; empty: no cluster


@dataclass(slots=True)
class _Past:
    """Of one queue: what its groups had counted when they were last seen, and what those had that are gone."""

    gone: tuple[int, int, int] = (0, 0, 0)
    seen: dict[int, tuple[int, int, int]] = field(default_factory=dict)


class Tally:
    """Deliveries are counted by group, and a group can be deleted: its counts stay in the queue's sums, because a
    counter that falls looks like a restart. What it counted after the last look is not known."""

    def __init__(self) -> None:
        self._queues: dict[int, _Past] = {}

    def sums(self, queue: Queue) -> tuple[int, int, int]:
        """Deliveries, failures told by nack, and deliveries that were not the first."""
        past = self._queues.get(int(queue.qid))
        if past is None:
            past = self._queues[int(queue.qid)] = _Past()
        now = {
            int(group.gid): (int(group.delivered), int(group.nacked), int(group.redelivered))
            for group in queue.groups.values()
        }
        for gid, counts in past.seen.items():
            if gid not in now:
                past.gone = _plus(past.gone, counts)
        past.seen = now
        total = past.gone
        for counts in now.values():
            total = _plus(total, counts)
        return total

    def forget_gone(self, queues: Collection[Queue]) -> None:
        """Of all queues but these. None ever gets the number of another one."""
        if len(self._queues) > len(queues):
            for qid in self._queues.keys() - {int(queue.qid) for queue in queues}:
                del self._queues[qid]


def _plus(one: tuple[int, int, int], other: tuple[int, int, int]) -> tuple[int, int, int]:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2])


class _Slices:
    """Watches the time that is taken of the loop."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self._began = perf_counter()
        self.total = 0.0
        self.longest = 0.0

    async def pause(self) -> None:
        """Give the loop back if it was held long enough."""
        if perf_counter() - self._began >= SLICE_SECONDS:
            self.end()
            await asyncio.sleep(0)
            self._began = perf_counter()
            self._hands.look()

    def end(self) -> None:
        held = perf_counter() - self._began
        self.total += held
        self.longest = max(self.longest, held)


async def gather(hands: Hands, tally: Tally) -> Figures:
    """Runs on the broker's loop. Each group is one moment; all of them together are not."""
    slices = _Slices(hands)
    now = hands.look()
    figures = Figures(_broker_figures(hands), [], _segments(hands), now - float(hands.broker.started_at), now)
    for queue in list(hands.engine.queues.values()):
        await slices.pause()
        if not hands.lives(queue):
            continue
        found = _queue_figures(queue, tally)
        for group in list(queue.groups.values()):
            await slices.pause()
            if queue.groups.get(group.name) is group:
                found.groups.append(_group_figures(queue, group))
        figures.queues.append(found)
    tally.forget_gone(hands.engine.queues.values())
    slices.end()
    figures.seconds = slices.total
    figures.longest = slices.longest
    return figures


def _segments(hands: Hands) -> dict[int, int]:
    """A handful of numbers, whatever the store holds."""
    return dict(hands.runner.segment_sizes())


def _queue_figures(queue: Queue, tally: Tally) -> QueueFigures:
    delivered, nacked, redelivered = tally.sums(queue)
    dead = dict.fromkeys(REASONS, 0) if queue.rules.dlq_enabled else {}
    dead.update(queue.dead)
    process = queue.process_latency.counts()
    return QueueFigures(
        name=queue.name,
        depth=int(queue.depth),
        max_depth=int(queue.rules.max_depth),
        bytes=int(queue.bytes),
        enqueued=int(queue.enqueued),
        dequeued=delivered,
        acked=sum(
            process
        ),  # each ack ends one measured piece of work; unlike a group's count, it never goes away
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


def _group_figures(queue: Queue, group: Group) -> GroupFigures:
    account = ledger(queue, group)
    oldest = 0
    for cursor in group.cursors:
        if cursor.floor < cursor.partition.next:
            came = int(cursor.partition.time(cursor.floor))
            if came and (oldest == 0 or came < oldest):
                oldest = came
    return GroupFigures(
        name=group.name,
        consumers=len(group.consumers),
        lag=account.waiting + account.delivered + account.retrying,
        oldest=oldest / 1000.0,
        enqueued=account.enqueued,
        waiting=account.waiting,
        delivered=account.delivered,
        retrying=account.retrying,
        acked=account.acked,
        dead=account.dead,
        expired=account.expired,
        purged=account.purged,
    )


def _broker_figures(hands: Hands) -> dict[str, int]:
    broker = hands.broker
    counters = broker.counters
    router = broker.router
    exclusive = hands.engine.exclusive
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
        "retained_bytes": int(router.retained.bytes),
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
        "ecq_values": int(exclusive.values),
        "ecq_writes": int(exclusive.written),
        "ecq_replaced": int(exclusive.replaced),
        "ecq_deliveries": int(exclusive.delivered),
        "ecq_acks": int(exclusive.acked),
        "ecq_aged": int(exclusive.aged),
    }
