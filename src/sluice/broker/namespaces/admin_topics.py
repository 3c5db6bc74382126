"""The namespace `$admin/queue/...`: create, configure and watch queues with MQTT alone.

$admin/queue/create          publish a configuration (JSON, with its name)
$admin/queue/<q>/config      publish the changed settings (JSON)
$admin/queue/<q>/stats       subscribe: statistics of the queue as JSON, once a second
"""

from __future__ import annotations

import json
from typing import Final

from sluice.broker.namespaces.queues.handler import QueueHandler
from sluice.broker.namespaces.responses import refuse_reserved_name
from sluice.broker.router import Router
from sluice.broker.scheduler import Scheduler
from sluice.clock import Deadline
from sluice.errors import InvalidQueueConfig, InvalidQueueName
from sluice.queues.config import MAX_CONFIG_BYTES
from sluice.wire.packets import Publish

ADMIN_PREFIX: Final = b"$admin/"
STATS_INTERVAL_SECONDS: Final = 1.0


class AdminTopics(Deadline):
    def __init__(self, router: Router, handler: QueueHandler, scheduler: Scheduler) -> None:
        self._router = router
        self._handler = handler
        self._scheduler = scheduler
        self._has_watchers: bool = False

    def publish(self, topic: bytes, payload: bytes) -> None:
        """Carry out a publish to `$admin/...`, or raise QueueError."""
        levels = topic.decode().split("/")
        if levels[1:] == ["queue", "create"]:
            config = _parse_json(payload)
            refuse_reserved_name(config)
            queue = self._handler.service.create(config)
            self._handler.on_queue_created(queue)
        elif len(levels) > 3 and levels[1] == "queue" and levels[-1] == "config":
            name = "/".join(levels[2:-1])
            self._handler.service.configure(name, _parse_json(payload))
            self._handler.rebuild_bindings()
        else:
            raise InvalidQueueName(
                topic.decode(), "publish to $admin/queue/create, or to $admin/queue/<queue>/config"
            )

    def on_subscribed(self) -> None:
        """Start publishing statistics after a subscription below `$admin/`."""
        if not self._has_watchers:
            self._has_watchers = True
            self._scheduler.wake_at(self._router.turn.now + STATS_INTERVAL_SECONDS, self)

    def fire(self, now: float) -> float:
        """Publish the statistics of each watched queue; stop when no queue is watched."""
        self._handler.engine.now = now
        for queue in list(self._handler.engine.queues.values()):
            topic = f"$admin/queue/{queue.name}/stats".encode()
            route = self._router.subscriptions.find_route(topic)
            if route.recipients or route.shares:
                payload = json.dumps(self._handler.service.stats(queue)).encode()
                self._router.publish(Publish(topic, payload, 0), None)
        self._has_watchers = self._router.subscriptions.has_filters_below(b"$admin")
        return now + STATS_INTERVAL_SECONDS if self._has_watchers else 0.0


def _parse_json(payload: bytes) -> object:
    if len(payload) > MAX_CONFIG_BYTES:
        raise InvalidQueueConfig(
            f"the configuration has {len(payload)} bytes", f"Give at most {MAX_CONFIG_BYTES}"
        )
    try:
        value: object = json.loads(payload)
    except (ValueError, RecursionError) as fault:
        raise InvalidQueueConfig(
            f"the payload is not JSON: {fault}", 'Publish {"name": "tasks/image"}'
        ) from None
    return value
