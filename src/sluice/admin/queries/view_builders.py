"""Build the views of queues, groups, consumers and the node from the engine's counters.

Read-only. `build_queue_view` runs for each queue of a list and leaves out what is expensive.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import cast

from sluice import __version__
from sluice.access.identity import Identity
from sluice.admin import model
from sluice.admin.broker_facade import BrokerFacade
from sluice.admin.model import QueueDetail
from sluice.broker.namespaces import QueueConsumer
from sluice.cluster.membership import Directory
from sluice.queues.model import BREAKER_NAMES, Consumer, Group, Pause, Queue, build_ledger
from sluice.queues.service import QueueService

ORDERINGS = ("none", "partition", "strict")


class QueueIndex:
    """The queue names in order; rebuilt only when queues were created, deleted or changed."""

    def __init__(self, facade: BrokerFacade, service: QueueService) -> None:
        self._facade = facade
        self._queue_service = service
        self._version: tuple[int, int, int] = (-1, -1, -1)
        self._names: list[str] = []
        self._dead_letter_queue_names: set[str] = set()

    def _refresh(self) -> None:
        engine = self._facade.engine
        version = (
            int(engine.state.next_qid),
            len(engine.queues),
            self._queue_service.config_changes,
        )
        if version != self._version:
            self._version = version
            self._names = sorted(engine.queues)
            self._dead_letter_queue_names = set()
            for queue in engine.queues.values():
                if queue.rules.dlq_enabled:
                    self._dead_letter_queue_names.add(queue.rules.dlq_name)
                if queue.rules.invalid_queue_name:
                    self._dead_letter_queue_names.add(queue.rules.invalid_queue_name)

    def list_names(self, prefix: str, after: str, limit: int) -> list[str]:
        self._refresh()
        names = self._names
        index = max(bisect_right(names, after) if after else 0, bisect_left(names, prefix))
        found: list[str] = []
        while index < len(names) and len(found) < limit and names[index].startswith(prefix):
            found.append(names[index])
            index += 1
        return found

    def all_names(self) -> list[str]:
        self._refresh()
        return self._names

    def is_dead_letter_queue(self, name: str) -> bool:
        """Return whether some queue sends its dead letters or invalid messages here."""
        self._refresh()
        return name in self._dead_letter_queue_names or name.startswith("dlq/")


def build_queue_view(queue: Queue, service: QueueService, queue_index: QueueIndex) -> model.Queue:
    figures = service.collect_counters(queue)
    rules = queue.rules
    return model.Queue(
        name=queue.name,
        type="compacted" if rules.is_compacted else "work",
        ordering=ORDERINGS[int(rules.ordering)],
        partitions=len(queue.partitions),
        total_messages=int(queue.depth),
        max_depth=int(rules.max_depth),
        bytes=int(queue.bytes),
        inflight_messages=figures.inflight,
        retrying=figures.retrying,
        dlq=rules.dlq_name if rules.dlq_enabled else "",
        dlq_messages=figures.dlq_depth,
        enqueue_rate=figures.rates.enqueued,
        dequeue_rate=figures.rates.delivered,
        ack_rate=figures.rates.acked,
        nack_rate=figures.rates.nacked,
        avg_delivery_latency=figures.rates.delivery_seconds,
        avg_process_latency=figures.rates.process_seconds,
        enqueued=int(queue.enqueued),
        acked=figures.acked,
        duplicates=int(queue.duplicates),
        refused=int(queue.refused),
        retry_count=int(queue.retried),
        dead=dict(queue.dead_by_reason),
        active_consumers=int(queue.consumer_count),
        partitions_assigned=figures.partitions_assigned,
        groups=len(queue.groups),
        pause=build_pause_view(queue.pause),
        is_dead_letters=queue_index.is_dead_letter_queue(queue.name),
        created_at=queue.created_at,
    )


def build_queue_detail(queue: Queue, service: QueueService, queue_index: QueueIndex) -> QueueDetail:
    return QueueDetail(
        stats=build_queue_view(queue, service, queue_index),
        config=service.config_of(queue).as_dict(),
        groups=[build_group_view(queue.groups[name]) for name in sorted(queue.groups)],
        partitions=[
            model.Partition(
                number=int(partition.number),
                first=int(partition.first_live(0)),
                next=int(partition.next_seq),
                messages=int(partition.live_count),
                last_delivery=partition.last_delivery_at,
            )
            for partition in queue.partitions
        ],
    )


def build_ledger_view(group: Group) -> model.Ledger:
    account = build_ledger(group.queue, group)
    return model.Ledger(
        enqueued=account.enqueued,
        waiting=account.waiting,
        delivered=account.delivered,
        retrying=account.retrying,
        acked=account.acked,
        dead=account.dead,
        expired=account.expired,
        purged=account.purged,
        cancelled=account.cancelled,
    )


def build_group_view(group: Group) -> model.Group:
    account = build_ledger_view(group)
    oldest = 0
    for cursor in group.cursors:
        partition = cursor.partition
        seq = partition.first_live(cursor.low_watermark)
        if seq < partition.next_seq:
            time = int(partition.arrival_ms(seq))
            if oldest == 0 or time < oldest:
                oldest = time
    return model.Group(
        name=group.name,
        lag=account.waiting + account.delivered + account.retrying,
        ledger=account,
        floors=[int(cursor.low_watermark) for cursor in group.cursors],
        oldest_at=oldest / 1000.0,
        redelivered=int(group.redelivered),
        nacked=int(group.nacked),
        pause=build_pause_view(group.admission.pause),
        breaker=BREAKER_NAMES[group.admission.breaker.state],
        held_by=group.admission.closed_reasons(group.queue.rules, group.in_flight),
        consumers=[build_consumer_view(consumer, group) for consumer in group.consumers],
    )


def build_pause_view(pause: Pause) -> model.Pause | None:
    if not pause.is_active():
        return None
    return model.Pause(at=pause.paused_at, by=pause.by, reason=pause.reason)


def build_consumer_view(consumer: Consumer, group: Group) -> model.Consumer:
    slow = False
    last_heartbeat = consumer.active_at
    if isinstance(consumer, QueueConsumer):
        connection = consumer.session.connection
        if connection is not None:
            slow = connection.is_write_paused
            last_heartbeat = max(last_heartbeat, connection.last_read_at)
    return model.Consumer(
        client=consumer.client,
        group=group.name,
        partitions=[int(cursor.partition.number) for cursor in consumer.cursors],
        inflight=int(consumer.in_flight),
        prefetch=int(consumer.prefetch),
        priority=int(consumer.priority),
        exclusive=consumer.is_exclusive,
        connected=not consumer.is_paused,
        stalled=consumer.is_stalled,
        slow=slow,
        settled_at=consumer.settled_at,
        last_heartbeat=max(last_heartbeat, consumer.settled_at),
    )


def build_node_view(facade: BrokerFacade, name: str, store: str, build: str) -> model.Node:
    broker = facade.broker
    counters = broker.counters
    queues = facade.engine.queues
    return model.Node(
        name=name,
        version=__version__,
        build=build,
        store=store,
        started_at=broker.started_at,
        now=facade.engine.now,
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


def build_caller(identity: Identity) -> model.Caller:
    role = cast(model.RoleName, identity.role.label)
    return model.Caller(identity.name, role, identity.is_anonymous)


def build_cluster(directory: Directory | None, queue: str) -> model.Cluster:
    """Describe the cluster, and the place of a queue if one is named."""
    if directory is None:
        return model.Cluster(enabled=False)
    states = directory.cell_states()
    cells = [model.ClusterCell(one.cell, one.node, one.planned_node) for one in states]
    place = None
    if queue:
        cell = directory.cell_of_queue(queue)
        place = model.QueuePlace(queue, cell, cells[cell].node)
    return model.Cluster(
        enabled=True,
        name=directory.name,
        me=directory.node_name,
        nodes=[
            model.ClusterNode(
                id=one.node.id,
                name=one.node.name,
                started_at=one.node.started_at,
                link=one.node.link,
                mqtt=one.node.mqtt,
                http=one.node.http,
                grpc=one.node.grpc,
                cells=one.cells,
                suspected_by=one.suspected_by,
            )
            for one in directory.node_states()
        ],
        cells=cells,
        moving=sum(one.is_moving for one in states),
        place=place,
    )
