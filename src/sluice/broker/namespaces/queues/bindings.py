"""Queues with bindings: they store copies of the messages of plain topics and other queues."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.namespace import BindingTarget
from sluice.broker.namespaces.queues.message_builder import MessageBuilder
from sluice.broker.namespaces.queues.schema_checks import SchemaChecks
from sluice.broker.queue_topics import QUEUE_PREFIX
from sluice.broker.sessions import TopicBinding
from sluice.errors import ProtocolViolation
from sluice.message import Message
from sluice.queues.engine import Engine
from sluice.queues.model import Queue
from sluice.queues.service import MAX_BINDING_LEVELS
from sluice.wire.packets import Publish
from sluice.wire.properties import PUBLISH, read_properties
from sluice.wire.topics import starts_with

if TYPE_CHECKING:
    from sluice.broker.routing import Router


class BoundQueues(BindingTarget):
    def __init__(
        self, engine: Engine, router: Router, builder: MessageBuilder, schemas: SchemaChecks
    ) -> None:
        self._engine: Engine = engine
        self._router: Router = router
        self._builder: MessageBuilder = builder
        self._schemas: SchemaChecks = schemas
        self._ignored_bindings: set[bytes] = set()  # bindings that were logged
        # Bindings to a queue, by its name; empty for most brokers.
        self.queue_bindings: dict[str, list[TopicBinding]] = {}

    def publish_to_bindings(self, packet: Publish, bindings: list[TopicBinding]) -> i64:
        """Store copies of a plain publish and return the number of queues that got one."""
        turn = self._router.turn
        self._engine.now = turn.now
        turn.schedule_flush()
        copies: i64 = 0
        for binding in bindings:
            queue = self._engine.queues.get(binding.queue)
            if queue is None or (
                binding.headers and not _fits(binding, packet.decode_properties().user)
            ):
                continue
            message = self._builder.build_bound_copy(packet, queue)
            self.copy_to_bound_queues(queue, message)
            if not queue.rules.schema or self._schemas.check_payload(queue, message):
                self._engine.publishing.publish(queue, message, None, 0)
            copies += 1
        return copies

    def copy_to_bound_queues(self, source: Queue, message: Message) -> None:
        """Store copies of a message in the queues that are bound to its queue, in the same frame.

        Call it before the message itself is published: if a queue refuses its copy, the publish is
        refused. Dead letters, redriven messages and batches are not copied.
        """
        for queue, copy in self.copies_of(source, message):
            if not queue.rules.schema or self._schemas.check_payload(queue, copy):
                self._engine.publishing.publish(queue, copy, None, 0)

    def copies_of(self, source: Queue, message: Message) -> list[tuple[Queue, Message]]:
        """Return the copies of a message for the queues that are bound to its queue."""
        copies: list[tuple[Queue, Message]] = []
        if source.name in self.queue_bindings:
            self._copy(source, message, {source.name}, copies)
        return copies

    def _copy(
        self,
        source: Queue,
        message: Message,
        visited: set[str],
        copies: list[tuple[Queue, Message]],
    ) -> None:
        for binding in self.queue_bindings.get(source.name, ()):
            queue = self._engine.queues.get(binding.queue)
            # A template can bind queues in a circle.
            if queue is None or queue.name in visited:
                continue
            if binding.headers and not _fits(binding, read_user_properties(message.props)):
                continue
            copy = Message(message.payload, message.props, message.key, message.id)
            copy.topic = message.topic or b"$queue/" + source.name.encode()
            copy.priority = message.priority
            copy.deliver_at_ms = message.deliver_at_ms
            copy.expires = message.expires
            self._copy(queue, copy, visited | {queue.name}, copies)
            copies.append((queue, copy))

    def warn(self, text: str) -> None:
        self._engine.state.warn(text)

    def rebuild(self) -> None:
        """Recompute which plain topics are bound, after a queue was created, changed or deleted."""
        bindings: list[TopicBinding] = []
        self.queue_bindings = {}
        cluster = self._router.cluster
        for queue in self._engine.queues.values():
            if queue.rules.bindings:
                for binding in json.loads(queue.config_json)["bindings"]:
                    topic_filter: bytes = binding["topic"].encode()
                    if cluster.has_other_cells and self._is_too_deep(queue, topic_filter):
                        continue
                    headers = [(name, value) for name, value in binding["headers"].items()]
                    matches_any = binding.get("match") == "any"
                    bound = TopicBinding(queue.name, topic_filter, headers, matches_any)
                    if starts_with(topic_filter, QUEUE_PREFIX):
                        source = topic_filter[len(QUEUE_PREFIX) :].decode()
                        self.queue_bindings.setdefault(source, []).append(bound)
                    else:
                        bindings.append(bound)
        self._router.subscriptions.set_bindings(bindings)
        cluster.on_bindings_changed(bindings)

    def _is_too_deep(self, queue: Queue, topic_filter: bytes) -> bool:
        """Return whether a cluster cannot route by a stored binding, and warn once.

        Older versions accepted such bindings.
        """
        levels = topic_filter.count(b"/") + 1
        if levels <= MAX_BINDING_LEVELS:
            return False
        if topic_filter not in self._ignored_bindings:
            self._ignored_bindings.add(topic_filter)
            self._engine.state.warn(
                f"queue {queue.name!r} ignores a binding of {levels} levels: "
                f"a cluster routes by at most {MAX_BINDING_LEVELS}. "
                "Change the bindings of the queue"
            )
        return True


def _fits(binding: TopicBinding, user: list[tuple[str, str]]) -> bool:
    """Return whether a message with these user properties has the headers of a binding."""
    if binding.matches_any:
        return any(pair in user for pair in binding.headers)
    return all(pair in user for pair in binding.headers)


def read_user_properties(raw_properties: bytes) -> list[tuple[str, str]]:
    """Return the user properties among the stored properties of a message."""
    try:
        return read_properties(raw_properties, 0, len(raw_properties), PUBLISH).user
    except ProtocolViolation:
        return []
