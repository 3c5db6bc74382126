"""What people do with queues: make, change, look at, empty and delete them. Every door onto the queues calls this.

It takes configurations as they are written (JSON values) and answers with plain values. It decides what may be changed
in a living queue, and refuses the rest in words.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from mypy_extensions import i64

from sluice.errors import InvalidQueueConfig, InvalidQueueName
from sluice.queues.config import PARTITIONS, QueueConfig, check_new_bindings, read_config
from sluice.queues.engine import Engine
from sluice.queues.model.group import Group
from sluice.queues.log.frame_builder import ACKED
from sluice.queues.model.ledger import ledger
from sluice.queues.names import fault_of_new_name
from sluice.queues.model.queue import Queue
from sluice.queues.model.rates import Rates, Sampler
from sluice.queues.model.queue_rules import Rules


class Figures:
    """What is counted of a queue, over all its groups."""

    def __init__(self, queue: Queue, dlq_depth: int) -> None:
        self.dlq_depth: int = dlq_depth
        out: i64 = 0
        leases: i64 = 0
        acked: i64 = 0
        delivered: i64 = 0
        for group in queue.groups.values():
            delivered += group.delivered
            for cursor in group.cursors:
                out += cursor.out
                leases += len(cursor.leases)
                acked += i64(cursor.counts[ACKED])
        served: i64 = 0
        if queue.consumers:
            for partition in queue.partitions:
                for cursor in partition.cursors:
                    if cursor.consumer is not None:
                        served += 1
                        break
        self.inflight: int = int(out)
        self.retrying: int = int(leases - out)
        self.acked: int = int(acked)
        self.delivered: int = int(delivered)
        self.partitions_assigned: int = int(served)
        self.rates: Rates = Rates(0.0, 0.0, 0.0)


class QueueService:
    """`fault_of_schema` says what is wrong with a JSON Schema, or nothing, and `fault_of_webhook` with an address for
    alerts; without them, none is looked at."""

    def __init__(
        self,
        engine: Engine,
        fault_of_schema: Callable[[str], str] | None = None,
        fault_of_webhook: Callable[[str], str] | None = None,
        partitions: int = PARTITIONS,
    ) -> None:
        self._engine = engine
        self._fault_of_schema = fault_of_schema
        self._fault_of_webhook = fault_of_webhook
        self._partitions: int = partitions  # of a queue that does not say how many
        self.lies_with: Callable[[str, str], bool] | None = (
            None  # in a cluster: whether two queues are in one cell
        )
        self._samplers: dict[int, Sampler] = {}  # by number of the queue
        self.changes: int = 0  # grows with each configuration that was changed

    def create(self, given: object) -> Queue:
        """A queue from its configuration, which names it."""
        config = read_config(given, partitions=self._partitions)
        _check_channels(config, None)
        check_new_bindings(config, None)
        rules = config.rules()
        self._check_schema(rules)
        self._check_webhook(rules)
        self._check_place(rules)
        self._check_round(rules)
        return self._engine.create(rules, config.text())

    def _check_schema(self, rules: Rules) -> None:
        if rules.schema and self._fault_of_schema is not None:
            fault = self._fault_of_schema(rules.schema)
            if fault:
                raise InvalidQueueConfig(f"schema cannot be used: {fault}", "Change the schema")

    def _check_webhook(self, rules: Rules) -> None:
        if rules.alert_webhook and self._fault_of_webhook is not None:
            fault = self._fault_of_webhook(rules.alert_webhook)
            if fault:
                raise InvalidQueueConfig(f"dlq_config.alert_webhook cannot be used: {fault}")

    def _check_place(self, rules: Rules) -> None:
        """A message moves to its dead letters in one step of one store, so they must lie in the same cell."""
        if self.lies_with is None:
            return
        for name in (rules.dlq_name if rules.dlq_enabled else "", rules.invalid_name):
            if name and not self.lies_with(rules.name, name):
                raise InvalidQueueConfig(
                    f"dlq_config names {name!r}, which lies in another cell of the cluster than {rules.name!r}",
                    f"Use dlq/{rules.name}, or dlq/dlq/{rules.name} for a second one: they lie with the queue",
                )

    def _check_round(self, rules: Rules) -> None:
        """The dead of the dead must not come back to where they died first: they would go round for ever."""
        way = [rules.name]
        here: Rules | None = rules
        while here is not None and here.dlq_enabled:
            way.append(here.dlq_name)
            if here.dlq_name in way[:-1]:
                if here.dlq_name == rules.name:
                    raise InvalidQueueConfig(
                        f"dead letters would go round for ever: {' to '.join(way)}",
                        "Name a dead-letter queue that has none of its own, or disable dlq_config in one of them",
                    )
                return  # a round that is there already, and not this queue's doing
            queue = self._engine.queues.get(here.dlq_name)
            here = queue.rules if queue is not None else None

    def configure(self, name: str, given: object) -> Queue:
        """Change what is given, keep the rest, at once."""
        queue = self._engine.find(name)
        before = self.config(queue)
        after = read_config(given, name, before)
        fault = _forbidden(before, after)
        if fault:
            raise InvalidQueueConfig(f"queue {name!r} cannot be changed so: {fault}")
        _check_channels(after, before)
        check_new_bindings(after, before)
        rules = after.rules()
        self._check_schema(rules)
        self._check_webhook(rules)
        self._check_place(rules)
        if after.dlq_config != before.dlq_config:
            self._check_round(rules)
        self._engine.reconfigure(queue, rules, after.text())
        self.changes += 1
        return queue

    def config(self, queue: Queue) -> QueueConfig:
        return read_config(json.loads(queue.config), queue.name)

    # ---- figures

    def figures(self, queue: Queue) -> Figures:
        """Counted now, as of `engine.now`."""
        dlq = self._engine.queues.get(queue.rules.dlq_name) if queue.rules.dlq_enabled else None
        figures = Figures(queue, 0 if dlq is None else int(dlq.depth))
        sampler = self._samplers.get(int(queue.qid))
        if sampler is None:
            if len(self._samplers) > 2 * len(self._engine.queues):
                self._forget_deleted()
            sampler = self._samplers[int(queue.qid)] = Sampler()
        figures.rates = sampler.rates(self._engine.now, int(queue.enqueued), figures.delivered, figures.acked)
        return figures

    def _forget_deleted(self) -> None:
        living = {int(queue.qid) for queue in self._engine.queues.values()}
        self._samplers = {qid: sampler for qid, sampler in self._samplers.items() if qid in living}

    def stats(self, queue: Queue) -> dict[str, object]:
        """The figures of a queue and of each of its groups, as JSON values."""
        figures = self.figures(queue)
        return {
            "name": queue.name,
            "depth": int(queue.depth),
            "bytes": int(queue.bytes),
            "inflight": figures.inflight,
            "retrying": figures.retrying,
            "dlq_depth": figures.dlq_depth,
            "enqueued": int(queue.enqueued),
            "duplicates": int(queue.duplicates),
            "refused": int(queue.refused),
            "retried": int(queue.retried),
            "acked": figures.acked,
            "dead": dict(queue.dead),
            "enqueue_rate": figures.rates.enqueued,
            "deliver_rate": figures.rates.delivered,
            "ack_rate": figures.rates.acked,
            "active_consumers": int(queue.consumers),
            "partitions_assigned": figures.partitions_assigned,
            "partitions": len(queue.partitions),
            "groups": [self.group_stats(group) for group in queue.groups.values()],
        }

    def group_stats(self, group: Group) -> dict[str, object]:
        account = ledger(group.queue, group)
        return {
            "name": group.name,
            "waiting": account.waiting,
            "delivered": account.delivered,
            "retrying": account.retrying,
            "acked": account.acked,
            "dead": account.dead,
            "expired": account.expired,
            "purged": account.purged,
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


def _check_channels(config: QueueConfig, before: QueueConfig | None) -> None:
    """A queue is no place for its own dead: they would come round again, as new messages, for ever."""
    after = (config.dlq_config.topic, config.dlq_config.invalid_topic)
    kept = (before.dlq_config.topic, before.dlq_config.invalid_topic) if before is not None else (None, None)
    if before is None:
        fault = fault_of_new_name(config.name)
        if fault:
            raise InvalidQueueName(config.name, fault)
    for key, name, was in zip(("topic", "invalid_topic"), after, kept, strict=True):
        if name and name != was and fault_of_new_name(name):
            raise InvalidQueueConfig(f"dlq_config.{key} is {name!r}: {fault_of_new_name(name)}")
        if name == config.name and name != was:  # a template may have said so: see `QueueConfig.rules`
            raise InvalidQueueConfig(
                f"dlq_config.{key} names the queue itself", "Name another queue, or leave it out"
            )


def _forbidden(before: QueueConfig, after: QueueConfig) -> str:
    """Why a living queue cannot become what is asked; the empty string when it can."""
    if after.type != before.type:
        return "its type is for life; make another queue, and move the messages"
    if "strict" in (before.ordering, after.ordering) and after.ordering != before.ordering:
        return "strict order is for life; make another queue, and move the messages"
    if after.partitions < before.partitions:
        return f"it has {before.partitions} partitions, and they can only become more"
    return ""
