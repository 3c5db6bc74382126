"""Operations on queues: create, configure, inspect. All APIs call this.

It takes configurations as JSON values and returns plain values. It decides which changes of an
existing queue are allowed, and refuses others with an error that says why. It does not know which
API calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from mypy_extensions import i64

from sluice.errors import InvalidQueueConfig, InvalidQueueName
from sluice.queues.engine import Engine
from sluice.queues.log import ACKED
from sluice.queues.model import (
    Group,
    Queue,
    QueueRules,
    build_ledger,
)
from sluice.queues.names import new_queue_name_error
from sluice.queues.service.queue_config import QueueConfig, check_new_bindings, read_config
from sluice.queues.service.rates import LatencySum, Rates, Sample, Sampler
from sluice.queues.service.templates import QueueTemplates


class QueueCounters:
    """Counters of a queue, summed over its groups."""

    def __init__(self, queue: Queue, dlq_depth: int) -> None:
        self.dlq_depth: int = dlq_depth
        in_flight: i64 = 0
        leases: i64 = 0
        acked: i64 = 0
        delivered: i64 = 0
        nacked: i64 = 0
        self.partitions_assigned: dict[str, int] = {}  # by client
        for group in queue.groups.values():
            delivered += group.delivered
            nacked += group.nacked
            for consumer in group.consumers:
                served = len(consumer.cursors)
                self.partitions_assigned[consumer.client] = (
                    self.partitions_assigned.get(consumer.client, 0) + served
                )
            for cursor in group.cursors:
                in_flight += cursor.in_flight
                leases += len(cursor.leases)
                acked += i64(cursor.outcome_counts[ACKED])
        self.inflight: int = int(in_flight)
        self.retrying: int = int(leases - in_flight)
        self.acked: int = int(acked)
        self.delivered: int = int(delivered)
        self.nacked: int = int(nacked)
        self.rates: Rates = Rates()


class QueueService:
    """Creates and configures queues, and reports their statistics.

    `schema_error` returns what is wrong with a JSON Schema, or the empty string; `webhook_error`
    does the same for the address of an alert webhook. Without them, these settings are not checked.
    """

    def __init__(
        self,
        engine: Engine,
        templates: QueueTemplates,
        schema_error: Callable[[str], str] | None = None,
        webhook_error: Callable[[str], str] | None = None,
        is_in_same_cell: Callable[[str, str], bool] | None = None,
    ) -> None:
        self._engine = engine
        self._templates: QueueTemplates = templates
        self._schema_error = schema_error
        self._webhook_error = webhook_error
        # In a cluster: whether two queues are in the same cell.
        self._is_in_same_cell = is_in_same_cell
        self._samplers: dict[int, Sampler] = {}  # by qid
        self.config_changes: int = 0  # number of changes

    def create(self, given: object) -> Queue:
        """Create a queue from its template and a configuration that contains its name."""
        config = self._templates.read(given)
        error = new_queue_name_error(config.name)
        if error:
            raise InvalidQueueName(config.name, error)
        _check_dlq_names(config, self._templates.read({"name": config.name}))
        check_new_bindings(config, None)
        rules = config.rules()
        self._check_schema(rules)
        self._check_webhook(rules)
        self._check_same_cell(rules)
        self._check_dead_letter_cycle(rules)
        self._check_binding_cycle(rules)
        return self._engine.create_queue(rules, config.as_json())

    def creates_on_use(self, name: str) -> bool:
        """Return whether a publish or a subscription may create this queue."""
        return self._templates.creates_on_use(name)

    def _check_schema(self, rules: QueueRules) -> None:
        if rules.schema and self._schema_error is not None:
            error = self._schema_error(rules.schema)
            if error:
                raise InvalidQueueConfig(f"schema cannot be used: {error}", "Change the schema")

    def _check_webhook(self, rules: QueueRules) -> None:
        if rules.alert_webhook and self._webhook_error is not None:
            error = self._webhook_error(rules.alert_webhook)
            if error:
                raise InvalidQueueConfig(f"dlq_config.alert_webhook cannot be used: {error}")

    def _check_same_cell(self, rules: QueueRules) -> None:
        """Refuse queues in another cell: messages move and are copied within one store."""
        if self._is_in_same_cell is None:
            return
        for name in rules.bound_queues():
            if not self._is_in_same_cell(rules.name, name):
                raise InvalidQueueConfig(
                    f"a binding names {name!r}, which is in another cell of the cluster than "
                    f"{rules.name!r}",
                    "Bind both queues to a plain topic, or publish to both",
                )
        for name in (rules.dlq_name if rules.dlq_enabled else "", rules.invalid_queue_name):
            if name and not self._is_in_same_cell(rules.name, name):
                raise InvalidQueueConfig(
                    f"dlq_config names {name!r}, which is in another cell of the cluster "
                    f"than {rules.name!r}",
                    f"Use dlq/{rules.name}, or dlq/dlq/{rules.name} for a second one: "
                    "they are in the cell of the queue",
                )

    def _check_dead_letter_cycle(self, rules: QueueRules) -> None:
        """Refuse dead-letter cycles: messages would circulate forever."""
        path = [rules.name]
        current: QueueRules | None = rules
        while current is not None and current.dlq_enabled:
            path.append(current.dlq_name)
            if current.dlq_name in path[:-1]:
                if current.dlq_name == rules.name:
                    raise InvalidQueueConfig(
                        f"dead letters would circulate forever: {' to '.join(path)}",
                        "Name a dead-letter queue that has none of its own, "
                        "or disable dlq_config in one of them",
                    )
                # the cycle existed before and does not include this queue
                return
            queue = self._engine.queues.get(current.dlq_name)
            current = queue.rules if queue is not None else None

    def _check_binding_cycle(self, rules: QueueRules) -> None:
        """Refuse bindings of queues to each other in a circle: copies would have no end."""
        pending = [(name, [name, rules.name]) for name in rules.bound_queues()]
        seen: set[str] = set()
        while pending:
            name, path = pending.pop()
            if name == rules.name:
                raise InvalidQueueConfig(
                    f"the bindings of queue {rules.name!r} lead back to it: {' to '.join(path)}",
                    "Remove one of these bindings",
                )
            queue = self._engine.queues.get(name)
            if queue is not None and name not in seen:
                seen.add(name)
                pending += [(source, [source, *path]) for source in queue.rules.bound_queues()]

    def configure(self, name: str, given: object) -> Queue:
        """Change the given keys of a queue's configuration; the change takes effect immediately."""
        queue = self._engine.get_queue(name)
        before = self.config_of(queue)
        after = read_config(given, name, before)
        error = _forbidden_change(before, after)
        if error:
            raise InvalidQueueConfig(f"queue {name!r} cannot be changed this way: {error}")
        _check_dlq_names(after, before)
        check_new_bindings(after, before)
        rules = after.rules()
        self._check_schema(rules)
        self._check_webhook(rules)
        self._check_same_cell(rules)
        if after.dlq_config != before.dlq_config:
            self._check_dead_letter_cycle(rules)
        if after.bindings != before.bindings:
            self._check_binding_cycle(rules)
        self._engine.reconfigure_queue(queue, rules, after.as_json())
        self.config_changes += 1
        return queue

    def config_of(self, queue: Queue) -> QueueConfig:
        return read_config(json.loads(queue.config_json), queue.name)

    # ---- statistics

    def collect_counters(self, queue: Queue) -> QueueCounters:
        """Return the counters as of `engine.now`."""
        dlq = self._engine.queues.get(queue.rules.dlq_name) if queue.rules.dlq_enabled else None
        counters = QueueCounters(queue, 0 if dlq is None else int(dlq.depth))
        sampler = self._samplers.get(int(queue.qid))
        if sampler is None:
            if len(self._samplers) > 2 * len(self._engine.queues):
                self._drop_deleted_samplers()
            sampler = self._samplers[int(queue.qid)] = Sampler()
        delivery, process = queue.delivery_latency, queue.process_latency
        counters.rates = sampler.rates(
            Sample(
                self._engine.now,
                int(queue.enqueued),
                counters.delivered,
                counters.acked,
                counters.nacked,
                LatencySum(int(delivery.count()), delivery.total),
                LatencySum(int(process.count()), process.total),
            )
        )
        return counters

    def _drop_deleted_samplers(self) -> None:
        live_qids = {int(queue.qid) for queue in self._engine.queues.values()}
        self._samplers = {
            qid: sampler for qid, sampler in self._samplers.items() if qid in live_qids
        }

    def stats(self, queue: Queue) -> dict[str, object]:
        """Return the statistics of a queue and of each of its groups, as JSON values."""
        counters = self.collect_counters(queue)
        return {
            "name": queue.name,
            "total_messages": int(queue.depth),
            "bytes": int(queue.bytes),
            "inflight_messages": counters.inflight,
            "retrying": counters.retrying,
            "dlq_messages": counters.dlq_depth,
            "enqueued": int(queue.enqueued),
            "duplicates": int(queue.duplicates),
            "refused": int(queue.refused),
            "retry_count": int(queue.retried),
            "acked": counters.acked,
            "dead": dict(queue.dead_by_reason),
            "enqueue_rate": counters.rates.enqueued,
            "dequeue_rate": counters.rates.delivered,
            "ack_rate": counters.rates.acked,
            "nack_rate": counters.rates.nacked,
            "avg_delivery_latency": counters.rates.delivery_seconds,
            "avg_process_latency": counters.rates.process_seconds,
            "active_consumers": int(queue.consumer_count),
            "partitions_assigned": counters.partitions_assigned,
            "partitions": len(queue.partitions),
            "groups": [self.group_stats(group) for group in queue.groups.values()],
        }

    def group_stats(self, group: Group) -> dict[str, object]:
        counters = build_ledger(group.queue, group)
        return {
            "name": group.name,
            "waiting": counters.waiting,
            "delivered": counters.delivered,
            "retrying": counters.retrying,
            "acked": counters.acked,
            "dead": counters.dead,
            "expired": counters.expired,
            "purged": counters.purged,
            "cancelled": counters.cancelled,
            "consumers": [
                {
                    "client": consumer.client,
                    "partitions": [int(cursor.partition.number) for cursor in consumer.cursors],
                    "inflight": int(consumer.in_flight),
                    "stalled": consumer.is_stalled,
                }
                for consumer in group.consumers
            ],
        }


def _check_dlq_names(config: QueueConfig, before: QueueConfig) -> None:
    """Refuse a queue as its own dead-letter queue: messages would circulate forever.

    `before` is the configuration that the call changes: that of the queue or of its template.
    """
    after = (config.dlq_config.topic, config.dlq_config.invalid_topic)
    previous = (before.dlq_config.topic, before.dlq_config.invalid_topic)
    for key, name, previous_name in zip(("topic", "invalid_topic"), after, previous, strict=True):
        if name and name != previous_name and new_queue_name_error(name):
            raise InvalidQueueConfig(f"dlq_config.{key} is {name!r}: {new_queue_name_error(name)}")
        # A template may name the queue itself: see `QueueConfig.rules`.
        if name == config.name and name != previous_name:
            raise InvalidQueueConfig(
                f"dlq_config.{key} names the queue itself", "Name another queue, or leave it out"
            )


def _forbidden_change(before: QueueConfig, after: QueueConfig) -> str:
    """Return why an existing queue cannot change this way, or the empty string if it can."""
    if after.type != before.type:
        return "its type cannot change; create another queue and move the messages"
    if "strict" in (before.ordering, after.ordering) and after.ordering != before.ordering:
        return "strict ordering cannot change; create another queue and move the messages"
    if after.partition_strategy != before.partition_strategy:
        return "its partition_strategy cannot change; create another queue and move the messages"
    if after.partitions < before.partitions:
        return f"it has {before.partitions} partitions, and the number can only grow"
    return ""
