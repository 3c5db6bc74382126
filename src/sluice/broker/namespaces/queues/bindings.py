"""Queues with bindings: they store copies of the messages of plain topics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.namespace import BindingTarget
from sluice.broker.namespaces.queues.message_builder import MessageBuilder
from sluice.broker.namespaces.queues.schema_checks import SchemaChecks
from sluice.broker.sessions.subscriptions import TopicBinding
from sluice.queues.config import MAX_BINDING_LEVELS
from sluice.queues.engine import Engine
from sluice.queues.model import Queue
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.router import Router


class BoundQueues(BindingTarget):
    def __init__(
        self, engine: Engine, router: Router, builder: MessageBuilder, schemas: SchemaChecks
    ) -> None:
        self._engine: Engine = engine
        self._router: Router = router
        self._builder: MessageBuilder = builder
        self._schemas: SchemaChecks = schemas
        self._ignored_bindings: set[bytes] = set()  # bindings that were logged

    def publish_to_bindings(self, packet: Publish, bindings: list[TopicBinding]) -> i64:
        """Store copies of a plain publish and return the number of queues that got one."""
        turn = self._router.turn
        self._engine.now = turn.now
        turn.schedule_flush()
        copies: i64 = 0
        for binding in bindings:
            queue = self._engine.queues.get(binding.queue)
            if queue is None or not _has_headers(packet, binding.headers):
                continue
            message = self._builder.build_bound_copy(packet, queue)
            if not queue.rules.schema or self._schemas.fits_schema(queue, message):
                self._engine.publish(queue, message, None, 0)
            copies += 1
        return copies

    def warn(self, text: str) -> None:
        self._engine.warn(text)

    def rebuild(self) -> None:
        """Recompute which plain topics are bound, after a queue was created, changed or deleted."""
        bindings: list[TopicBinding] = []
        cluster = self._router.cluster
        for queue in self._engine.queues.values():
            if queue.rules.bindings:
                for binding in json.loads(queue.config_json)["bindings"]:
                    topic_filter: bytes = binding["topic"].encode()
                    if cluster.has_other_cells and self._is_too_deep(queue, topic_filter):
                        continue
                    headers = [(name, value) for name, value in binding["headers"].items()]
                    bindings.append(TopicBinding(queue.name, topic_filter, headers))
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
            self._engine.warn(
                f"queue {queue.name!r} ignores a binding of {levels} levels: "
                f"a cluster routes by at most {MAX_BINDING_LEVELS}. "
                "Change the bindings of the queue"
            )
        return True


def _has_headers(packet: Publish, headers: list[tuple[str, str]]) -> bool:
    """Return whether a packet has all these user properties."""
    return not headers or all(pair in packet.decode_properties().user for pair in headers)
