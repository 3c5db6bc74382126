"""The answers of the admin service, written as protobuf: a translation of admin/views.py, field by field.

Two names differ, because the gRPC contract has its own: `depth` is `total`, and `dlq_depth` is `dlq`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from sluice.access.identity import Identity
from sluice.admin import views
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.cluster.directory import Directory

PAYLOADS_LIMIT: Final = 3 << 20  # in one answer: gRPC clients take 4 MiB unless they are told otherwise


def time_of(seconds: float) -> Timestamp | None:
    """None for never."""
    if not seconds:
        return None
    milliseconds = round(seconds * 1000.0)
    return Timestamp(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)


def json_of(config: dict[str, object]) -> str:
    return json.dumps(config, ensure_ascii=False)


def stats_of(view: views.QueueView) -> pb.QueueStats:
    return pb.QueueStats(
        name=view.name,
        total=view.depth,
        inflight=view.inflight,
        dlq=view.dlq_depth,
        enqueue_rate=view.enqueue_rate,
        ack_rate=view.ack_rate,
        active_consumers=view.active_consumers,
        partitions_assigned=view.partitions_assigned,
        retrying=view.retrying,
        deliver_rate=view.deliver_rate,
        type=view.type,
        ordering=view.ordering,
        partitions=view.partitions,
        max_depth=view.max_depth,
        bytes=view.bytes,
        dlq_name=view.dlq,
        is_dead_letters=view.is_dead_letters,
        enqueued=view.enqueued,
        acked=view.acked,
        duplicates=view.duplicates,
        refused=view.refused,
        retried=view.retried,
        dead=view.dead,
        groups=view.groups,
        created_at=time_of(view.created_at),
    )


def queue_of(view: views.QueueDetail) -> pb.Queue:
    return pb.Queue(
        stats=stats_of(view.stats),
        config_json=json_of(view.config),
        groups=[group_of(group) for group in view.groups],
        partitions=[
            pb.Partition(number=one.number, first=one.first, next=one.next, messages=one.messages)
            for one in view.partitions
        ],
    )


def group_of(view: views.GroupView) -> pb.Group:
    ledger = view.ledger
    return pb.Group(
        name=view.name,
        lag=view.lag,
        ledger=pb.Ledger(
            enqueued=ledger.enqueued,
            waiting=ledger.waiting,
            delivered=ledger.delivered,
            retrying=ledger.retrying,
            acked=ledger.acked,
            dead=ledger.dead,
            expired=ledger.expired,
            purged=ledger.purged,
        ),
        floors=view.floors,
        oldest_at=time_of(view.oldest_at),
        redelivered=view.redelivered,
        nacked=view.nacked,
        consumers=[consumer_of(consumer) for consumer in view.consumers],
    )


def consumer_of(view: views.ConsumerView) -> pb.Consumer:
    return pb.Consumer(
        client=view.client,
        group=view.group,
        partitions=view.partitions,
        inflight=view.inflight,
        prefetch=view.prefetch,
        priority=view.priority,
        exclusive=view.exclusive,
        connected=view.connected,
        stalled=view.stalled,
        slow=view.slow,
        settled_at=time_of(view.settled_at),
    )


def message_of(view: views.MessageView) -> pb.Message:
    return pb.Message(
        message_id=view.message_id,
        queue=view.queue,
        partition=view.partition,
        sequence=view.sequence,
        key=view.key,
        priority=view.priority,
        payload=view.payload,
        size=view.size,
        enqueued_at=time_of(view.enqueued_at),
        expires_at=time_of(view.expires_at),
        deliver_at=time_of(view.deliver_at),
        topic=view.topic,
        content_type=view.content_type,
        response_topic=view.response_topic,
        correlation_data=view.correlation_data,
        properties=[pb.Property(name=name, value=value) for name, value in view.properties],
        headers=view.headers,
        state=view.state,
        attempt=view.attempt,
        consumer=view.consumer,
    )


def owner_of(view: views.OwnerView) -> pb.Owner:
    return pb.Owner(
        client=view.client,
        depth=view.depth,
        keys=view.keys,
        bytes=view.bytes,
        last_sequence=view.last_sequence,
        acked_sequence=view.acked_sequence,
        acked_at=time_of(view.acked_at),
        written_at=time_of(view.written_at),
        subscribed=view.subscribed,
        connected=view.connected,
    )


def messages_of(found: Iterable[views.MessageView]) -> list[pb.Message]:
    """A list of messages that a client with common limits can take: payloads beyond the limit are cut."""
    left = PAYLOADS_LIMIT
    messages = []
    for view in found:
        messages.append(
            message_of(view if len(view.payload) <= left else replace(view, payload=view.payload[:left]))
        )
        left = max(0, left - len(view.payload))
    return messages


def biography_of(view: views.Biography) -> pb.Biography:
    return pb.Biography(
        message_id=view.message_id,
        queue=view.queue,
        message=None if view.message is None else message_of(view.message),
        states=[
            pb.GroupState(
                group=state.group,
                state=state.state,
                consumer=state.consumer,
                attempt=state.attempt,
                failures=state.failures,
                due=time_of(state.due),
                deadline=time_of(state.deadline),
                why=state.why,
                do=state.do,
            )
            for state in view.states
        ],
        events=[
            pb.Event(
                at=time_of(event.at),
                what=event.what,
                group=event.group,
                consumer=event.consumer,
                attempt=event.attempt,
                detail=event.detail,
            )
            for event in view.events
        ],
        dead_letters=view.dead_letters,
        summary=view.summary,
    )


def diagnosis_of(view: views.Diagnosis) -> pb.Diagnosis:
    return pb.Diagnosis(
        queue=view.queue,
        healthy=view.healthy,
        findings=[
            pb.Finding(code=one.code, what=one.what, do=one.do, is_fault=one.is_fault)
            for one in view.findings
        ],
    )


def redriven_of(view: views.Redriven) -> pb.Redriven:
    return pb.Redriven(retried=view.retried, skipped=view.skipped, left=view.left)


def node_of(view: views.NodeView) -> pb.Node:
    return pb.Node(
        name=view.name,
        version=view.version,
        build=view.build,
        store=view.store,
        started_at=time_of(view.started_at),
        now=time_of(view.now),
        connections=view.connections,
        sessions=view.sessions,
        subscriptions=view.subscriptions,
        retained=view.retained,
        queues=view.queues,
        messages=view.messages,
        bytes_received=view.bytes_received,
        bytes_sent=view.bytes_sent,
        packets_received=view.packets_received,
        packets_sent=view.packets_sent,
        publishes_received=view.publishes_received,
        publishes_sent=view.publishes_sent,
        publishes_dropped=view.publishes_dropped,
        stopping=view.stopping,
        losses=view.losses,
    )


def store_of(view: views.StoreView) -> pb.Store:
    return pb.Store(
        kind=view.kind,
        address=view.address,
        healthy=view.healthy,
        fault=view.fault,
        warnings=view.warnings,
        segments=view.segments,
        bytes=view.bytes,
        version=view.version,
        cluster=view.cluster,
        owner=view.owner,
        frame=view.frame,
        queues=[_store_queue_of(queue) for queue in view.queues],
        frames_lost=view.frames_lost,
    )


def loss_of(view: views.LossView) -> pb.Loss:
    return pb.Loss(
        cell=view.cell,
        first=view.first,
        last=view.last,
        frames=view.frames,
        times=view.times,
        at=time_of(view.at),
        queues=view.queues,
    )


def _store_queue_of(view: views.StoreQueueView) -> pb.StoreQueue:
    return pb.StoreQueue(
        name=view.name,
        partitions=view.partitions,
        length=view.length,
        counters=view.counters,
        groups=[
            pb.StoreGroup(
                name=group.name,
                pending=group.pending,
                consumers=group.consumers,
                lag=group.lag,
                retrying=group.retrying,
            )
            for group in view.groups
        ],
    )


def identity_of(identity: Identity) -> pb.Identity:
    return pb.Identity(name=identity.name, role=identity.role.word, anonymous=identity.anonymous)


def cluster_of(directory: Directory, queue: str) -> pb.Cluster:
    """The cluster, and where a queue lies if one is named."""
    states = directory.cell_states()
    cells = [pb.ClusterCell(cell=one.cell, node=one.node, wanted=one.wanted) for one in states]
    return pb.Cluster(
        enabled=True,
        name=directory.name,
        me=directory.my_name,
        nodes=[
            pb.ClusterNode(
                id=one.node.id,
                name=one.node.name,
                started_at=time_of(one.node.started_at),
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
        place=cells[directory.cell_of_queue(queue)] if queue else None,
    )
