"""/metrics: the counters of the broker in the Prometheus text format 0.0.4.

The snapshot is copied on the broker's loop (`metrics_snapshot.py`); everything else runs on the
caller's loop. This module writes the lines itself: prometheus_client takes twenty times as long for
ten thousand queues and would hold the interpreter's lock meanwhile. That library provides the
metrics of the process, and its parser checks ours in the tests.

A queue's histograms appear with its first delivery and its first ack. Metric names are stable:
dashboards use them. The label `queue` is the topic of the queue, `$queue/<name>`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import accumulate, chain
from typing import Final

from sluice.admin import model
from sluice.admin.metrics.metrics_snapshot import MetricsSnapshot
from sluice.metrics import LATENCY_BOUNDS
from sluice.process.memory_watermark import MemoryWatermark
from sluice.queues.service import views

LINES_PER_TURN: Final = 2000  # written before the loop is yielded

# Name, type, help text, key of the counter.
BROKER_METRICS: Final[tuple[tuple[str, str, str, str], ...]] = (
    ("mqtt_broker_connections", "gauge", "Open connections.", "connections"),
    (
        "mqtt_broker_connections_opened_total",
        "counter",
        "Connections that were opened.",
        "connections_opened",
    ),
    (
        "mqtt_broker_connections_refused_total",
        "counter",
        "CONNECTs that were refused.",
        "connections_refused",
    ),
    (
        "mqtt_broker_clients_connected",
        "gauge",
        "Clients with an accepted CONNECT.",
        "clients_connected",
    ),
    (
        "mqtt_broker_sessions",
        "gauge",
        "Sessions of connected and disconnected clients.",
        "sessions",
    ),
    (
        "mqtt_broker_sessions_expired_total",
        "counter",
        "Sessions that expired before their client reconnected.",
        "sessions_expired",
    ),
    ("mqtt_broker_subscriptions", "gauge", "Subscriptions to plain topics.", "subscriptions"),
    (
        "mqtt_broker_shared_subscriptions",
        "gauge",
        "Shared subscriptions among them.",
        "shared_subscriptions",
    ),
    (
        "mqtt_broker_retained_messages",
        "gauge",
        "Retained messages, without $SYS.",
        "retained_messages",
    ),
    ("mqtt_broker_retained_bytes", "gauge", "Bytes of retained messages.", "retained_bytes"),
    (
        "mqtt_broker_packets_received_total",
        "counter",
        "MQTT packets from clients.",
        "packets_received",
    ),
    ("mqtt_broker_packets_sent_total", "counter", "MQTT packets to clients.", "packets_sent"),
    ("mqtt_broker_bytes_received_total", "counter", "Bytes from clients.", "bytes_received"),
    ("mqtt_broker_bytes_sent_total", "counter", "Bytes to clients.", "bytes_sent"),
    (
        "mqtt_broker_publishes_received_total",
        "counter",
        "PUBLISH packets from clients.",
        "publishes_received",
    ),
    (
        "mqtt_broker_publishes_sent_total",
        "counter",
        "PUBLISH packets to clients.",
        "publishes_sent",
    ),
    (
        "mqtt_broker_publishes_dropped_total",
        "counter",
        "Messages dropped for a receiver: too slow, over its limits, or expired.",
        "publishes_dropped",
    ),
    (
        "mqtt_broker_publish_bytes_received_total",
        "counter",
        "Payload bytes from clients.",
        "publish_bytes_received",
    ),
    (
        "mqtt_broker_publish_bytes_sent_total",
        "counter",
        "Payload bytes to clients.",
        "publish_bytes_sent",
    ),
    (
        "mqtt_broker_protocol_violations_total",
        "counter",
        "Connections that violated the MQTT protocol.",
        "protocol_violations",
    ),
    (
        "mqtt_broker_wrong_tokens_total",
        "counter",
        "Settlements with a delivery token that the client does not hold.",
        "wrong_tokens",
    ),
    ("mqtt_ecq_owners", "gauge", "Owners of exclusive queues.", "ecq_owners"),
    ("mqtt_ecq_values", "gauge", "Values stored for them: one for each key.", "ecq_values"),
    ("mqtt_ecq_writes_total", "counter", "Values written to exclusive queues.", "ecq_writes"),
    (
        "mqtt_ecq_replaced_total",
        "counter",
        "Values that a newer one of their key replaced.",
        "ecq_replaced",
    ),
    (
        "mqtt_ecq_deliveries_total",
        "counter",
        "Values that were sent to their owners.",
        "ecq_deliveries",
    ),
    ("mqtt_ecq_acks_total", "counter", "Values that their owners acknowledged.", "ecq_acks"),
    ("mqtt_ecq_aged_total", "counter", "Values that were removed as too old.", "ecq_aged"),
)

QUEUE_METRICS: Final[tuple[tuple[str, str, str, Callable[[views.QueueMetrics], float]], ...]] = (
    (
        "mqtt_queue_depth",
        "gauge",
        "Messages that some group has not settled yet.",
        lambda one: one.depth,
    ),
    (
        "mqtt_queue_max_depth",
        "gauge",
        "Depth at which the queue is full.",
        lambda one: one.max_depth,
    ),
    (
        "mqtt_queue_max_inflight",
        "gauge",
        "Deliveries in flight that each group may have; 0: no limit.",
        lambda one: one.max_in_flight,
    ),
    (
        "mqtt_queue_max_rate",
        "gauge",
        "Deliveries per second that each group may have; 0: no limit.",
        lambda one: one.max_rate,
    ),
    (
        "mqtt_queue_max_inflight_per_key",
        "gauge",
        "Deliveries in flight that each key of a group may have; 0: no limit.",
        lambda one: one.max_in_flight_per_key,
    ),
    (
        "mqtt_queue_max_rate_per_key",
        "gauge",
        "Deliveries per second that each key of a group may have; 0: no limit.",
        lambda one: one.max_rate_per_key,
    ),
    (
        "mqtt_queue_delivery_timeout_seconds",
        "gauge",
        "Time to settle a delivery.",
        lambda one: one.delivery_timeout,
    ),
    (
        "mqtt_queue_bytes",
        "gauge",
        "Bytes of the queue's messages in the store.",
        lambda one: one.bytes,
    ),
    (
        "mqtt_queue_enqueue_total",
        "counter",
        "Messages that were enqueued.",
        lambda one: one.enqueued,
    ),
    (
        "mqtt_queue_dequeue_total",
        "counter",
        "Deliveries to consumers, including retries.",
        lambda one: one.dequeued,
    ),
    ("mqtt_queue_ack_total", "counter", "Deliveries that were acked.", lambda one: one.acked),
    ("mqtt_queue_nack_total", "counter", "Deliveries that were nacked.", lambda one: one.nacked),
    (
        "mqtt_queue_retry_total",
        "counter",
        "Failures after which a message is retried.",
        lambda one: one.retried,
    ),
    (
        "mqtt_queue_redelivery_total",
        "counter",
        "Deliveries that were not the first.",
        lambda one: one.redelivered,
    ),
    (
        "mqtt_queue_duplicate_total",
        "counter",
        "Publishes with a known message-id.",
        lambda one: one.duplicates,
    ),
    (
        "mqtt_queue_refused_total",
        "counter",
        "Publishes that were refused.",
        lambda one: one.refused,
    ),
)

GROUP_METRICS: Final[tuple[tuple[str, str, str, Callable[[views.GroupMetrics], int]], ...]] = (
    ("mqtt_queue_active_consumers", "gauge", "Members of a group.", lambda one: one.consumers),
    (
        "mqtt_queue_lag",
        "gauge",
        "Messages that a group has not settled yet.",
        lambda one: one.ledger.lag(),
    ),
    (
        "mqtt_queue_workers_wanted",
        "gauge",
        "Consumers that could hold all messages of a group that can be delivered now.",
        lambda one: one.workers_wanted,
    ),
    (
        "mqtt_queue_group_enqueued_total",
        "counter",
        "Messages that a group had to settle.",
        lambda one: one.ledger.enqueued,
    ),
    (
        "mqtt_queue_paused",
        "gauge",
        "1: an operator paused the group or its queue.",
        lambda one: int(one.is_paused),
    ),
    (
        "mqtt_queue_breaker_open",
        "gauge",
        "1: the breaker of the group is open or waits for its probe.",
        lambda one: int(one.is_breaker_open),
    ),
    (
        "mqtt_queue_limited",
        "gauge",
        "1: the group delivers as much as its limits allow.",
        lambda one: int(one.is_limited),
    ),
    (
        "mqtt_queue_held_keys",
        "gauge",
        "Keys of which nothing is delivered until a dead letter is repaired.",
        lambda one: one.held_keys,
    ),
    (
        "mqtt_queue_limited_keys",
        "gauge",
        "Keys of a group whose messages wait for a limit of their key.",
        lambda one: one.limited_keys,
    ),
)

CLUSTER_METRICS: Final = (
    ("sluice_cluster_nodes", "gauge", "Nodes that this one sees.", "nodes"),
    ("sluice_cluster_cells", "gauge", "Cells that are open here.", "cells"),
    (
        "sluice_cluster_cells_moving",
        "gauge",
        "Cells of the cluster that are not at their planned owner.",
        "moving",
    ),
    (
        "sluice_cluster_load_timeouts_total",
        "counter",
        "Cells of dead nodes that this node gave back, because loading them took too long.",
        "load_timeouts",
    ),
)

GROUP_STATES: Final[tuple[tuple[str, Callable[[views.GroupMetrics], int]], ...]] = (
    ("waiting", lambda one: one.ledger.waiting - one.delayed),
    ("delayed", lambda one: one.delayed),
    ("delivered", lambda one: one.ledger.delivered),
    ("retrying", lambda one: one.ledger.retrying),
)
GROUP_OUTCOMES: Final[tuple[tuple[str, Callable[[views.GroupMetrics], int]], ...]] = (
    ("acked", lambda one: one.ledger.acked),
    ("dead", lambda one: one.ledger.dead),
    ("expired", lambda one: one.ledger.expired),
    ("purged", lambda one: one.ledger.purged),
    ("cancelled", lambda one: one.ledger.cancelled),
)

QUANTILES: Final = (0.5, 0.9, 0.99)
_BUCKET_LABELS: Final = tuple(f',le="{bound}"}} ' for bound in (*LATENCY_BOUNDS, "+Inf"))


async def render_exposition(
    node: model.Node, snapshot: MetricsSnapshot, store: model.Store, watermark: MemoryWatermark
) -> bytes:
    """Render the whole page."""
    lines: list[str] = []
    written: list[bytes] = []
    for line in chain(_lines(node, snapshot), _memory_lines(watermark), _store_lines(store)):
        lines.append(line)
        if len(lines) >= LINES_PER_TURN:
            written.append("".join(lines).encode())
            lines.clear()
            await asyncio.sleep(0)
    written.append("".join(lines).encode())
    written.append(_process_metrics())
    return b"".join(written)


def _process_metrics() -> bytes:
    # Imported here: 2 MB that a broker without scrapes does not need.
    from prometheus_client import (
        CollectorRegistry,
        PlatformCollector,
        ProcessCollector,
        generate_latest,
    )

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return generate_latest(registry)


def _lines(node: model.Node, snapshot: MetricsSnapshot) -> Iterator[str]:
    yield from _info_lines(node, snapshot)
    yield from _cluster_lines(snapshot.cluster)
    for name, kind, help_text, key in BROKER_METRICS:
        yield _metric_header(name, kind, help_text)
        yield f"{name} {snapshot.broker[key]}\n"
    queues = [(_queue_label(queue.name), queue) for queue in snapshot.queues]
    for name, kind, help_text, value_of in QUEUE_METRICS:
        yield _metric_header(name, kind, help_text)
        for label, queue in queues:
            yield f"{name}{label}}} {value_of(queue)}\n"
    yield _metric_header("mqtt_queue_dlq_total", "counter", "Dead letters, by reason.")
    for label, queue in queues:
        for reason, count in queue.dead.items():
            yield f'mqtt_queue_dlq_total{label},reason="{escape_label(reason)}"}} {count}\n'
    yield from _group_lines(queues, snapshot.now)
    name = "mqtt_queue_delivery_latency_seconds"
    yield _metric_header(name, "histogram", "From enqueueing to the first delivery.")
    for label, queue in queues:
        yield from _histogram(name, label, queue.delivery_counts, queue.delivery_seconds)
    name = "mqtt_queue_process_latency_seconds"
    yield _metric_header(name, "histogram", "From a delivery to its ack.")
    for label, queue in queues:
        yield from _histogram(name, label, queue.process_counts, queue.process_seconds)
    name = "mqtt_queue_delivery_latency_quantile_seconds"
    yield _metric_header(name, "gauge", "Quantiles of the delivery latency since the start.")
    for label, queue in queues:
        yield from _quantile_lines(name, label, queue.delivery_counts)
    name = "mqtt_queue_process_latency_quantile_seconds"
    yield _metric_header(name, "gauge", "Quantiles of the process latency since the start.")
    for label, queue in queues:
        yield from _quantile_lines(name, label, queue.process_counts)


def _info_lines(node: model.Node, snapshot: MetricsSnapshot) -> Iterator[str]:
    yield _metric_header("sluice_info", "gauge", "1, with version and build as labels.")
    facts = (
        ("version", node.version),
        ("build", node.build),
        ("store", node.store),
        ("node", node.name),
    )
    yield (
        "sluice_info{"
        + ",".join(f'{name}="{escape_label(value)}"' for name, value in facts)
        + "} 1\n"
    )
    for name, help_text, value in (
        ("sluice_uptime_seconds", "Time since the broker started.", snapshot.uptime),
        ("sluice_queues", "Queues, including dead-letter queues.", len(snapshot.queues)),
        (
            "sluice_messages",
            "Messages of all queues that some group has not settled, without dead letters.",
            sum(one.depth for one in snapshot.queues if not one.is_dead_letter_queue),
        ),
        (
            "sluice_dead_letters",
            "Messages in all dead-letter queues.",
            sum(one.depth for one in snapshot.queues if one.is_dead_letter_queue),
        ),
        (
            "sluice_messages_inflight",
            "Deliveries of all groups that are not settled.",
            _sum_of_groups(snapshot, lambda one: one.ledger.delivered),
        ),
        (
            "sluice_messages_retrying",
            "Messages of all groups that wait for a retry.",
            _sum_of_groups(snapshot, lambda one: one.ledger.retrying),
        ),
        (
            "sluice_consumers",
            "Members of all groups.",
            _sum_of_groups(snapshot, lambda one: one.consumers),
        ),
        (
            "sluice_store_segments",
            "Segments of the log in the store.",
            len(snapshot.segments),
        ),
        ("sluice_store_bytes", "Bytes of those segments.", sum(snapshot.segments.values())),
        (
            "sluice_store_losses_unconfirmed",
            "Stores (one for each cell) with lost frames that no operator has confirmed.",
            node.losses,
        ),
        (
            "sluice_scrape_seconds",
            "Time that the snapshot of these metrics took on the broker's loop.",
            snapshot.loop_seconds,
        ),
        (
            "sluice_scrape_longest_slice_seconds",
            "Longest time that MQTT waited for that snapshot.",
            snapshot.max_slice_seconds,
        ),
    ):
        yield _metric_header(name, "gauge", help_text)
        yield f"{name} {value}\n"


def _memory_lines(watermark: MemoryWatermark) -> Iterator[str]:
    for name, kind, help_text, value in (
        (
            "sluice_memory_bytes",
            "gauge",
            "Memory of the process, without pages of files.",
            watermark.used,
        ),
        (
            "sluice_memory_limit_bytes",
            "gauge",
            "Limit above which messages are refused; 0: no limit.",
            watermark.limit,
        ),
        (
            "sluice_memory_refused_total",
            "counter",
            "Messages and uploads that were refused because memory was above its limit.",
            watermark.refused,
        ),
    ):
        yield _metric_header(name, kind, help_text)
        yield f"{name} {value}\n"


STORE_GROUP_METRICS: Final[tuple[tuple[str, str, Callable[[model.StoreGroup], int]], ...]] = (
    (
        "sluice_redis_pending",
        "Deliveries in flight, as the store reports them.",
        lambda group: group.pending,
    ),
    ("sluice_redis_consumers", "Consumers that the store knows of.", lambda group: group.consumers),
    (
        "sluice_redis_lag",
        "Messages not delivered yet, as the store reports them.",
        lambda group: group.lag,
    ),
    (
        "sluice_redis_retrying",
        "Deliveries that wait for their retry.",
        lambda group: group.retrying,
    ),
)


def _store_lines(store: model.Store) -> Iterator[str]:
    """Yield the lines of a store that reports its own figures."""
    yield _metric_header("sluice_store_up", "gauge", "1: the store accepts writes and answers.")
    yield f"sluice_store_up {int(store.healthy)}\n"
    yield _metric_header(
        "sluice_store_frames_lost_total",
        "counter",
        "Committed frames that the store has lost.",
    )
    yield f"sluice_store_frames_lost_total {store.frames_lost}\n"
    yield _metric_header("sluice_store_replicas", "gauge", "Connected replicas of Redis.")
    yield f"sluice_store_replicas {store.replicas}\n"
    yield _metric_header(
        "sluice_store_replica_timeouts_total",
        "counter",
        "Commits that replicas did not acknowledge in time.",
    )
    yield f"sluice_store_replica_timeouts_total {store.replica_timeouts}\n"
    if not store.queues:
        return
    labelled = [(_queue_label(queue.name), queue) for queue in store.queues]
    yield _metric_header("sluice_redis_stream_length", "gauge", "Entries of a queue's streams.")
    for label, queue in labelled:
        yield f"sluice_redis_stream_length{label}}} {queue.length}\n"
    yield _metric_header(
        "sluice_redis_messages_total", "counter", "Messages by outcome, as the store counts them."
    )
    for label, queue in labelled:
        for what, count in queue.counters.items():
            yield f'sluice_redis_messages_total{label},what="{what}"}} {count}\n'
    for name, help_text, value_of in STORE_GROUP_METRICS:
        yield _metric_header(name, "gauge", help_text)
        for label, queue in labelled:
            for group in queue.groups:
                yield f'{name}{label},group="{escape_label(group.name)}"}} {value_of(group)}\n'


def _sum_of_groups(snapshot: MetricsSnapshot, value_of: Callable[[views.GroupMetrics], int]) -> int:
    return sum(value_of(group) for queue in snapshot.queues for group in queue.groups)


def _cluster_lines(cluster: dict[str, int]) -> Iterator[str]:
    """Yield the cluster lines; none without a cluster."""
    for name, kind, help_text, key in CLUSTER_METRICS:
        if key in cluster:
            yield _metric_header(name, kind, help_text)
            yield f"{name} {cluster[key]}\n"


def _group_lines(queues: list[tuple[str, views.QueueMetrics]], now: float) -> Iterator[str]:
    groups = [
        (f'{label},group="{escape_label(group.name)}"', group)
        for label, queue in queues
        for group in queue.groups
    ]
    # The empty group has the messages of queues without groups, which have no consumer.
    unclaimed = {
        "mqtt_queue_lag": [
            (f'{label},group=""', queue.depth)
            for label, queue in queues
            if not queue.groups and not queue.is_dead_letter_queue
        ]
    }
    unclaimed["mqtt_queue_active_consumers"] = [(one, 0) for one, _ in unclaimed["mqtt_queue_lag"]]
    for name, kind, help_text, value_of in GROUP_METRICS:
        yield _metric_header(name, kind, help_text)
        for label, group in groups:
            yield f"{name}{label}}} {value_of(group)}\n"
        for label, value in unclaimed.get(name, ()):
            yield f"{name}{label}}} {value}\n"
    name = "mqtt_queue_oldest_seconds"
    yield _metric_header(
        name,
        "gauge",
        "Time since the oldest message that a group has not settled was due; 0 for none.",
    )
    for label, group in groups:
        yield f"{name}{label}}} {max(0.0, now - group.oldest_at) if group.oldest_at else 0.0:.3f}\n"
    name = "mqtt_queue_group_messages"
    yield _metric_header(name, "gauge", "Unsettled messages of a group, by state.")
    for label, group in groups:
        for word, value_of in GROUP_STATES:
            yield f'{name}{label},state="{word}"}} {value_of(group)}\n'
    name = "mqtt_queue_group_settled_total"
    yield _metric_header(name, "counter", "Settled messages of a group, by outcome.")
    for label, group in groups:
        for word, value_of in GROUP_OUTCOMES:
            yield f'{name}{label},outcome="{word}"}} {value_of(group)}\n'


def _histogram(name: str, label: str, counts: list[int], total: float) -> Iterator[str]:
    """Yield cumulative counts by bound; nothing when nothing was measured."""
    if not counts:
        return
    start = f"{name}_bucket{label}"
    reached = 0
    for le, reached in zip(_BUCKET_LABELS, accumulate(counts), strict=True):
        yield f"{start}{le}{reached}\n"
    yield f"{name}_count{label}}} {reached}\n"
    yield f"{name}_sum{label}}} {total}\n"


def _quantile_lines(name: str, label: str, counts: list[int]) -> Iterator[str]:
    """Yield the quantiles, interpolated within their bucket; nothing without measurements."""
    total = sum(counts)
    for quantile in QUANTILES if total else ():
        reached = 0
        lower = 0.0
        for bound, count in zip((*LATENCY_BOUNDS, LATENCY_BOUNDS[-1]), counts, strict=True):
            if count and reached + count >= quantile * total:
                value = lower + (bound - lower) * (quantile * total - reached) / count
                yield f'{name}{label},quantile="{quantile}"}} {value:.6f}\n'
                break
            reached += count
            lower = bound


def _queue_label(name: str) -> str:
    """Return the open label set of a queue: its topic."""
    return f'{{queue="$queue/{escape_label(name)}"'


def _metric_header(name: str, kind: str, help_text: str) -> str:
    return f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n"


def escape_label(text: str) -> str:
    """Escape the value of a label; most need nothing."""
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return text
