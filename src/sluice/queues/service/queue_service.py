"""Operations on queues: create and configure them. All APIs call this.

It takes configurations as JSON values. It decides which changes of an
existing queue are allowed, and refuses others with an error that says why. It does not know which
API calls it.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from sluice.errors import InvalidQueueConfig, InvalidQueueName
from sluice.queues.engine import Engine
from sluice.queues.model import Queue, QueueRules
from sluice.queues.names import new_queue_name_error
from sluice.queues.service.inspector import EngineInspector
from sluice.queues.service.queue_config import QueueConfig, check_new_bindings, read_config
from sluice.queues.service.templates import QueueTemplates


class QueueService:
    """Creates and configures queues; `inspector` shows them.

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
        self.inspector: EngineInspector = EngineInspector(engine)

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
        self.check_same_cell(rules)
        self._check_dead_letter_cycle(rules)
        self._check_binding_cycle(rules)
        return self._engine.lifecycle.create_queue(rules, config.as_json())

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

    def check_same_cell(self, rules: QueueRules) -> None:
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
        queue = self._engine.lifecycle.get_queue(name)
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
        self.check_same_cell(rules)
        if after.dlq_config != before.dlq_config:
            self._check_dead_letter_cycle(rules)
        if after.bindings != before.bindings:
            self._check_binding_cycle(rules)
        self._engine.lifecycle.reconfigure_queue(queue, rules, after.as_json())
        self.inspector.on_config_changed()
        return queue

    def config_of(self, queue: Queue) -> QueueConfig:
        return read_config(json.loads(queue.config_json), queue.name)


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
