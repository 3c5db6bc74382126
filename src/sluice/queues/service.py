"""What people do with queues: make, change, look at, empty and delete them. Every door onto the queues calls this.

It takes configurations as they are written (JSON values) and answers with plain values. It decides what may be changed
in a living queue, and refuses the rest in words.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from sluice.errors import InvalidQueueConfig
from sluice.queues.config import QueueConfig, read_config
from sluice.queues.engine import Engine
from sluice.queues.group import Group
from sluice.queues.journal import ACKED, DEAD, EXPIRED, PURGED
from sluice.queues.queue import Queue
from sluice.queues.rules import Rules


class QueueService:
    """`fault_of_schema` says what is wrong with a JSON Schema, or nothing; without it, none is looked at."""

    def __init__(self, engine: Engine, fault_of_schema: Callable[[str], str] | None = None) -> None:
        self._engine = engine
        self._fault_of_schema = fault_of_schema
        self._samples: dict[int, tuple[float, int, int]] = {}  # by queue: time, enqueued, acked

    def create(self, given: object) -> Queue:
        """A queue from its configuration, which names it."""
        config = read_config(given)
        rules = config.rules()
        self._check_schema(rules)
        return self._engine.create(rules, config.text())

    def _check_schema(self, rules: Rules) -> None:
        if rules.schema and self._fault_of_schema is not None:
            fault = self._fault_of_schema(rules.schema)
            if fault:
                raise InvalidQueueConfig(f"schema is not a JSON Schema: {fault}", "Mend the schema")

    def configure(self, name: str, given: object) -> Queue:
        """Change what is given, keep the rest, at once."""
        queue = self._engine.find(name)
        before = self.config(queue)
        after = read_config(given, name, before)
        fault = _forbidden(before, after)
        if fault:
            raise InvalidQueueConfig(f"queue {name!r} cannot be changed so: {fault}")
        rules = after.rules()
        self._check_schema(rules)
        self._engine.reconfigure(queue, rules, after.text())
        return queue

    def config(self, queue: Queue) -> QueueConfig:
        return read_config(json.loads(queue.config), queue.name)

    def stats(self, queue: Queue) -> dict[str, object]:
        """The figures of a queue, and of each of its groups."""
        groups = [self.group_stats(group) for group in queue.groups.values()]
        acked = sum(cursor.counts[ACKED] for group in queue.groups.values() for cursor in group.cursors)
        enqueue_rate, ack_rate = self._rates(queue, int(queue.enqueued), acked)
        dlq = self._engine.queues.get(queue.rules.dlq_name)
        return {
            "name": queue.name,
            "depth": int(queue.depth),
            "bytes": int(queue.bytes),
            "inflight": sum(int(group.out()) for group in queue.groups.values()),
            "retrying": sum(
                int(cursor.retrying()) for group in queue.groups.values() for cursor in group.cursors
            ),
            "dlq_depth": 0 if dlq is None else int(dlq.depth),
            "enqueued": int(queue.enqueued),
            "duplicates": int(queue.duplicates),
            "refused": int(queue.refused),
            "retried": int(queue.retried),
            "acked": acked,
            "dead": dict(queue.dead),
            "enqueue_rate": enqueue_rate,
            "ack_rate": ack_rate,
            "active_consumers": int(queue.consumers),
            "partitions": len(queue.partitions),
            "groups": groups,
        }

    def group_stats(self, group: Group) -> dict[str, object]:
        counts = [
            sum(cursor.counts[how] for cursor in group.cursors) for how in (ACKED, DEAD, EXPIRED, PURGED)
        ]
        return {
            "name": group.name,
            "waiting": sum(int(cursor.waiting()) for cursor in group.cursors),
            "delivered": int(group.out()),
            "retrying": sum(int(cursor.retrying()) for cursor in group.cursors),
            "acked": counts[0],
            "dead": counts[1],
            "expired": counts[2],
            "purged": counts[3],
            "consumers": [
                {
                    "client": consumer.client,
                    "partitions": [int(cursor.partition.number) for cursor in consumer.cursors],
                    "inflight": int(consumer.held),
                    "stalled": consumer.stalled,
                }
                for consumer in group.consumers
            ],
        }

    def _rates(self, queue: Queue, enqueued: int, acked: int) -> tuple[float, float]:
        """Per second, since somebody last looked; looks within the same second give the same answer."""
        now = self._engine.now
        qid = int(queue.qid)
        before = self._samples.get(qid)
        if before is None:
            self._samples[qid] = (now, enqueued, acked)
            return 0.0, 0.0
        passed = now - before[0]
        if passed <= 0.0:
            return 0.0, 0.0
        if passed >= 1.0:
            self._samples[qid] = (now, enqueued, acked)
        return round((enqueued - before[1]) / passed, 1), round((acked - before[2]) / passed, 1)


def _forbidden(before: QueueConfig, after: QueueConfig) -> str:
    """Why a living queue cannot become what is asked; the empty string when it can."""
    if after.type != before.type:
        return "its type is for life; make another queue, and move the messages"
    if "strict" in (before.ordering, after.ordering) and after.ordering != before.ordering:
        return "strict order is for life; make another queue, and move the messages"
    if after.partitions < before.partitions:
        return f"it has {before.partitions} partitions, and they can only become more"
    return ""
