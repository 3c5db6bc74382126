"""Translate the views of admin/views.py to protobuf, field by field.

Two fields have other names in gRPC: `depth` is `total`, and `dlq_depth` is `dlq`.
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

# In one response: gRPC clients accept 4 MiB by default.
MAX_PAYLOADS_BYTES: Final = 3 << 20


def build_timestamp(seconds: float) -> Timestamp | None:
    """Return a timestamp, or None for never."""
    if not seconds:
        return None
    milliseconds = round(seconds * 1000.0)
    return Timestamp(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)


def build_json(config: dict[str, object]) -> str:
    return json.dumps(config, ensure_ascii=False)


def build_queue_stats(view: views.QueueView) -> pb.QueueStats:
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
        created_at=build_timestamp(view.created_at),
    )


def build_queue(view: views.QueueDetail) -> pb.Queue:
    return pb.Queue(
        stats=build_queue_stats(view.stats),
        config_json=build_json(view.config),
        groups=[build_group(group) for group in view.groups],
        partitions=[
            pb.Partition(number=one.number, first=one.first, next=one.next, messages=one.messages)
            for one in view.partitions
        ],
    )


def build_group(view: views.GroupView) -> pb.Group:
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
        oldest_at=build_timestamp(view.oldest_at),
        redelivered=view.redelivered,
        nacked=view.nacked,
        consumers=[build_consumer(consumer) for consumer in view.consumers],
    )


def build_consumer(view: views.ConsumerView) -> pb.Consumer:
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
        settled_at=build_timestamp(view.settled_at),
    )


def build_message(view: views.MessageView) -> pb.Message:
    return pb.Message(
        message_id=view.message_id,
        queue=view.queue,
        partition=view.partition,
        sequence=view.sequence,
        key=view.key,
        priority=view.priority,
        payload=view.payload,
        size=view.size,
        enqueued_at=build_timestamp(view.enqueued_at),
        expires_at=build_timestamp(view.expires_at),
        deliver_at=build_timestamp(view.deliver_at),
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


def build_owner(view: views.OwnerView) -> pb.Owner:
    return pb.Owner(
        client=view.client,
        depth=view.depth,
        keys=view.keys,
        bytes=view.bytes,
        last_sequence=view.last_sequence,
        acked_sequence=view.acked_sequence,
        acked_at=build_timestamp(view.acked_at),
        written_at=build_timestamp(view.written_at),
        subscribed=view.subscribed,
        connected=view.connected,
    )


def build_messages(found: Iterable[views.MessageView]) -> list[pb.Message]:
    """Build messages that fit the default limits of a client: payloads beyond it are cut."""
    left = MAX_PAYLOADS_BYTES
    messages = []
    for view in found:
        messages.append(
            build_message(
                view if len(view.payload) <= left else replace(view, payload=view.payload[:left])
            )
        )
        left = max(0, left - len(view.payload))
    return messages


def build_trace(view: views.MessageTrace) -> pb.Biography:
    return pb.Biography(
        message_id=view.message_id,
        queue=view.queue,
        message=None if view.message is None else build_message(view.message),
        states=[
            pb.GroupState(
                group=state.group,
                state=state.state,
                consumer=state.consumer,
                attempt=state.attempt,
                failures=state.failures,
                due=build_timestamp(state.due),
                deadline=build_timestamp(state.deadline),
                why=state.why,
                do=state.do,
            )
            for state in view.states
        ],
        events=[
            pb.Event(
                at=build_timestamp(event.at),
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


def build_diagnosis(view: views.Diagnosis) -> pb.Diagnosis:
    return pb.Diagnosis(
        queue=view.queue,
        healthy=view.healthy,
        findings=[
            pb.Finding(code=one.code, what=one.what, do=one.do, is_fault=one.is_fault)
            for one in view.findings
        ],
    )


def build_redriven(view: views.Redriven) -> pb.Redriven:
    return pb.Redriven(retried=view.retried, skipped=view.skipped, left=view.left)


def build_node(view: views.NodeView) -> pb.Node:
    return pb.Node(
        name=view.name,
        version=view.version,
        build=view.build,
        store=view.store,
        started_at=build_timestamp(view.started_at),
        now=build_timestamp(view.now),
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


def build_store(view: views.StoreView) -> pb.Store:
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
        queues=[_build_store_queue(queue) for queue in view.queues],
        frames_lost=view.frames_lost,
    )


def build_loss(view: views.LossView) -> pb.Loss:
    return pb.Loss(
        cell=view.cell,
        first=view.first,
        last=view.last,
        frames=view.frames,
        times=view.times,
        at=build_timestamp(view.at),
        queues=view.queues,
    )


def _build_store_queue(view: views.StoreQueueView) -> pb.StoreQueue:
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


def build_identity(identity: Identity) -> pb.Identity:
    return pb.Identity(
        name=identity.name, role=identity.role.label, anonymous=identity.is_anonymous
    )


def build_cluster(directory: Directory, queue: str) -> pb.Cluster:
    """Describe the cluster, and the place of a queue if one is named."""
    states = directory.cell_states()
    cells = [
        pb.ClusterCell(cell=one.cell, node=one.node, wanted=one.planned_node) for one in states
    ]
    return pb.Cluster(
        enabled=True,
        name=directory.name,
        me=directory.node_name,
        nodes=[
            pb.ClusterNode(
                id=one.node.id,
                name=one.node.name,
                started_at=build_timestamp(one.node.started_at),
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
