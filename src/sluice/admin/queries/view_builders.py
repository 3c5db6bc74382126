"""Queues, groups, consumers and the node as they are now: the engine's counters made into views.

It only looks. What is expensive to know is left out of `queue_view`, which is made for each queue of a list.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from sluice import __version__
from sluice.admin.broker_facade import Hands
from sluice.admin.views import (
    ConsumerView,
    GroupView,
    LedgerView,
    NodeView,
    PartitionView,
    QueueDetail,
    QueueView,
)
from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
from sluice.queues.model.group import Group
from sluice.queues.model.ledger import ledger
from sluice.queues.ports import Consumer
from sluice.queues.model.queue import Queue
from sluice.queues.service import QueueService

ORDERINGS = ("none", "partition", "strict")


class Register:
    """The queues by name, in order; looked through anew only when some have come, gone or changed."""

    def __init__(self, hands: Hands, service: QueueService) -> None:
        self._hands = hands
        self._service = service
        self._state: tuple[int, int, int] = (-1, -1, -1)
        self._names: list[str] = []
        self._channels: set[str] = set()

    def _look(self) -> None:
        engine = self._hands.engine
        state = (int(engine.next_qid), len(engine.queues), self._service.changes)
        if state != self._state:
            self._state = state
            self._names = sorted(engine.queues)
            self._channels = set()
            for queue in engine.queues.values():
                if queue.rules.dlq_enabled:
                    self._channels.add(queue.rules.dlq_name)
                if queue.rules.invalid_name:
                    self._channels.add(queue.rules.invalid_name)

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        self._look()
        names = self._names
        at = max(bisect_right(names, after) if after else 0, bisect_left(names, prefix))
        found: list[str] = []
        while at < len(names) and len(found) < limit and names[at].startswith(prefix):
            found.append(names[at])
            at += 1
        return found

    def all_names(self) -> list[str]:
        self._look()
        return self._names

    def takes_the_dead(self, name: str) -> bool:
        """Whether some queue sends its dead letters or its invalid messages here."""
        self._look()
        return name in self._channels or name.startswith("dlq/")


def queue_view(queue: Queue, service: QueueService, register: Register) -> QueueView:
    figures = service.figures(queue)
    rules = queue.rules
    return QueueView(
        name=queue.name,
        type="compacted" if rules.compacted else "work",
        ordering=ORDERINGS[int(rules.ordering)],
        partitions=len(queue.partitions),
        depth=int(queue.depth),
        max_depth=int(rules.max_depth),
        bytes=int(queue.bytes),
        inflight=figures.inflight,
        retrying=figures.retrying,
        dlq=rules.dlq_name if rules.dlq_enabled else "",
        dlq_depth=figures.dlq_depth,
        enqueue_rate=figures.rates.enqueued,
        deliver_rate=figures.rates.delivered,
        ack_rate=figures.rates.acked,
        enqueued=int(queue.enqueued),
        acked=figures.acked,
        duplicates=int(queue.duplicates),
        refused=int(queue.refused),
        retried=int(queue.retried),
        dead=dict(queue.dead),
        active_consumers=int(queue.consumers),
        partitions_assigned=figures.partitions_assigned,
        groups=len(queue.groups),
        is_dead_letters=register.takes_the_dead(queue.name),
        created_at=queue.created_at,
    )


def queue_detail(queue: Queue, service: QueueService, register: Register) -> QueueDetail:
    return QueueDetail(
        stats=queue_view(queue, service, register),
        config=service.config(queue).shown(),
        groups=[group_view(queue.groups[name]) for name in sorted(queue.groups)],
        partitions=[
            PartitionView(
                number=int(partition.number),
                first=int(partition.first_live(0)),
                next=int(partition.next),
                messages=int(partition.live),
            )
            for partition in queue.partitions
        ],
    )


def ledger_view(group: Group) -> LedgerView:
    account = ledger(group.queue, group)
    return LedgerView(
        enqueued=account.enqueued,
        waiting=account.waiting,
        delivered=account.delivered,
        retrying=account.retrying,
        acked=account.acked,
        dead=account.dead,
        expired=account.expired,
        purged=account.purged,
    )


def group_view(group: Group) -> GroupView:
    account = ledger_view(group)
    oldest = 0
    for cursor in group.cursors:
        partition = cursor.partition
        seq = partition.first_live(cursor.floor)
        if seq < partition.next:
            time = int(partition.time(seq))
            if oldest == 0 or time < oldest:
                oldest = time
    return GroupView(
        name=group.name,
        lag=account.waiting + account.delivered + account.retrying,
        ledger=account,
        floors=[int(cursor.floor) for cursor in group.cursors],
        oldest_at=oldest / 1000.0,
        redelivered=int(group.redelivered),
        nacked=int(group.nacked),
        consumers=[consumer_view(consumer, group) for consumer in group.consumers],
    )


def consumer_view(consumer: Consumer, group: Group) -> ConsumerView:
    slow = False
    if isinstance(consumer, QueueConsumer):
        connection = consumer.session.connection
        slow = connection is not None and connection.choked
    return ConsumerView(
        client=consumer.client,
        group=group.name,
        partitions=[int(cursor.partition.number) for cursor in consumer.cursors],
        inflight=int(consumer.held),
        prefetch=int(consumer.prefetch),
        priority=int(consumer.priority),
        exclusive=consumer.exclusive,
        connected=not consumer.paused,
        stalled=consumer.stalled,
        slow=slow,
        settled_at=consumer.settled_at,
    )


def node_view(hands: Hands, name: str, store: str, build: str) -> NodeView:
    broker = hands.broker
    counters = broker.counters
    queues = hands.engine.queues
    return NodeView(
        name=name,
        version=__version__,
        build=build,
        store=store,
        started_at=broker.started_at,
        now=hands.engine.now,
        connections=int(counters.connections_open),
        sessions=len(broker.registry.sessions),
        subscriptions=broker.router.subscriptions.count,
        retained=broker.router.retained.count,
        queues=len(queues),
        messages=sum(int(queue.depth) for queue in queues.values()),
        bytes_received=int(counters.bytes_received),
        bytes_sent=int(counters.bytes_sent),
        packets_received=int(counters.packets_received),
        packets_sent=int(counters.packets_sent),
        publishes_received=int(counters.publishes_received),
        publishes_sent=int(counters.publishes_sent),
        publishes_dropped=int(counters.publishes_dropped),
        stopping=broker.stopping,
    )
