"""The namespace `$admin/queue/...`: create, configure, pause and watch queues with MQTT alone.

$admin/queue/create          publish a configuration (JSON, with its name)
$admin/queue/<q>/config      publish the changed settings (JSON)
$admin/queue/<q>/pause       publish nothing, or JSON with `group` and `reason`, both optional
$admin/queue/<q>/resume      publish nothing, or JSON with `group`
$admin/queue/<q>/stats       subscribe: statistics of the queue as JSON, once a second
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from sluice.broker.namespaces.plain_topics import PlainTopics
from sluice.broker.namespaces.queues.handler import QueueHandler
from sluice.broker.namespaces.reason_mapping import get_reason_code
from sluice.broker.namespaces.remote_requests import (
    forward_publish,
    restore_remote,
    unsubscribe_remote,
)
from sluice.broker.namespaces.responses import refuse_reserved_name
from sluice.broker.ports import ConnectionPort
from sluice.broker.sessions import SubscribeOptions, Subscription
from sluice.broker.turn import Scheduler
from sluice.clock import Deadline
from sluice.errors import (
    InvalidQueueConfig,
    InvalidQueueName,
    QueueError,
    UnknownGroup,
    UnknownQueue,
)
from sluice.queues.service import MAX_CONFIG_BYTES
from sluice.wire.packets import Publish

if TYPE_CHECKING:
    from sluice.broker.routing import Router
    from sluice.broker.sessions import Session

ADMIN_PREFIX: Final = b"$admin/"
STATS_INTERVAL_SECONDS: Final = 1.0
MAX_PAUSE_REASON: Final = 1000  # characters, as over REST


class AdminTopics(PlainTopics):
    """Serves `$admin/`. Statistics are published like messages of plain topics."""

    def __init__(self, router: Router, handler: QueueHandler, scheduler: Scheduler) -> None:
        super().__init__(router)
        self._handler: QueueHandler = handler
        self._scheduler: Scheduler = scheduler
        self._statistics: QueueStatistics = QueueStatistics(router, handler)

    def publish(self, packet: Publish, session: Session, connection: ConnectionPort) -> None:
        if forward_publish(self._router, packet, session, connection):
            return
        turn = self._router.turn
        self._handler.engine.now = turn.now
        turn.schedule_flush()
        try:
            self._execute(packet.topic, packet.payload, session.user or session.client_id)
        except QueueError as error:
            session.inbound.refuse(packet, connection, get_reason_code(error), str(error))
            return
        if packet.qos > 0:
            self._router.ack_after_commit(session, packet)

    def _execute(self, topic: bytes, payload: bytes, by: str) -> None:
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
        elif len(levels) > 3 and levels[1] == "queue" and levels[-1] in ("pause", "resume"):
            self._pause_or_resume("/".join(levels[2:-1]), levels[-1] == "pause", payload, by)
        else:
            raise InvalidQueueName(
                topic.decode(),
                "publish to $admin/queue/create, or to config, pause or resume below"
                " $admin/queue/<queue>",
            )

    def _pause_or_resume(self, name: str, pauses: bool, payload: bytes, by: str) -> None:
        """Pause or resume a queue, or the group that the payload names."""
        engine = self._handler.engine
        group_name, reason = _parse_pause(payload)
        queue = engine.queues.get(name)
        if queue is None:
            raise UnknownQueue(name)
        if not group_name:
            if pauses:
                engine.delivery_control.pause_queue(queue, by, reason)
            else:
                engine.delivery_control.resume_queue(queue)
            return
        group = queue.groups.get(group_name)
        if group is None:
            raise UnknownGroup(name, group_name)
        if pauses:
            engine.delivery_control.pause_group(group, by, reason)
        else:
            engine.delivery_control.resume_group(group)

    def on_subscribed(self, subscription: Subscription) -> None:
        """Start publishing statistics after a subscription below `$admin/`."""
        if not self._statistics.has_watchers:
            self._statistics.has_watchers = True
            self._scheduler.wake_at(
                self._router.turn.now + STATS_INTERVAL_SECONDS, self._statistics
            )

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        return unsubscribe_remote(self._router, session, topic_filter)

    def restore_subscription(
        self, session: Session, topic_filter: bytes, options: SubscribeOptions
    ) -> None:
        restore_remote(self._router, session, topic_filter, options)


class QueueStatistics(Deadline):
    """Publishes the statistics of each watched queue, until no queue is watched."""

    def __init__(self, router: Router, handler: QueueHandler) -> None:
        self._router: Router = router
        self._handler: QueueHandler = handler
        self.has_watchers: bool = False

    def fire(self, now: float) -> float:
        self._handler.engine.now = now
        for queue in self._handler.service.inspector.queues():
            topic = f"$admin/queue/{queue.name}/stats".encode()
            route = self._router.subscriptions.find_route(topic)
            if route.recipients or route.shares:
                payload = json.dumps(queue.statistics()).encode()
                self._router.publish(Publish(topic, payload, 0), None)
        self.has_watchers = self._router.subscriptions.has_filters_below(b"$admin")
        return now + STATS_INTERVAL_SECONDS if self.has_watchers else 0.0


def _parse_pause(payload: bytes) -> tuple[str, str]:
    """Return group and reason of a pause; an empty payload has neither."""
    values = _parse_json(payload) if payload else {}
    if not isinstance(values, dict) or not values.keys() <= {"group", "reason"}:
        raise InvalidQueueConfig(
            "the payload of a pause must be empty, or a JSON object with group and reason",
            'Publish {"group": "billing", "reason": "repair"}',
        )
    group, reason = values.get("group", ""), values.get("reason", "")
    if not isinstance(group, str) or not isinstance(reason, str):
        raise InvalidQueueConfig("group and reason must be texts", "Put them in quotes")
    if len(reason) > MAX_PAUSE_REASON:
        raise InvalidQueueConfig(
            f"the reason has {len(reason)} characters", f"Give at most {MAX_PAUSE_REASON}"
        )
    return group, reason


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
