"""Who reads which queues: the subscriptions of clients under `$queue/`, as members of groups.

A subscription by name is one consumer, a filter with wildcards one for each queue that matches, now and later. A client
is in one group of a queue, whatever filters lead there. What a member is given is the engine's decision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.queue_consumer import QueueConsumer
from sluice.broker.queue_topics import GROUP, PREFIX, PUBLISH, WRONG, parse_queue_topic
from sluice.broker.queue_wishes import Options
from sluice.errors import InvalidQueueConfig
from sluice.queues.engine import Engine
from sluice.queues.names import fault_of_name, fault_of_new_group, is_dots
from sluice.queues.queue import Queue
from sluice.queues.start import start_floors
from sluice.wire.reasons import TOPIC_FILTER_INVALID
from sluice.wire.topics import has_wildcard, matches

if TYPE_CHECKING:
    from sluice.broker.session import Session


class WildSubscription:
    """A filter with wildcards: it joins every queue that matches, now and later."""

    def __init__(
        self, session: Session, topic_filter: bytes, pattern: bytes, qos: i64, options: Options
    ) -> None:
        self.session: Session = session
        self.topic_filter: bytes = topic_filter
        self.pattern: bytes = pattern  # the filter less its group
        self.qos: i64 = qos
        self.options: Options = options


class QueueMembers:
    """`open_queue` makes a queue that is not there yet, with everybody who has subscribed to its like."""

    def __init__(self, engine: Engine, open_queue: Callable[[str], Queue]) -> None:
        self._engine: Engine = engine
        self._open_queue = open_queue
        self._wild: list[WildSubscription] = []
        self._left_behind: dict[str, list[QueueConsumer]] = {}  # by queue: whose queue was deleted

    # ---- subscribing

    def subscribe(
        self, session: Session, topic_filter: bytes, qos: i64, wishes: list[str]
    ) -> tuple[int, str]:
        """Join a queue, or all that match: the granted QoS, or a reason and why."""
        options = Options(session, wishes)
        told = ""
        known = parse_queue_topic(topic_filter)
        if known.verb == GROUP:
            options.set_group(known.rest.decode())
            options.id_in_topic = True
        elif known.verb != PUBLISH:
            why = known.rest.decode() if known.verb == WRONG else ""
            return TOPIC_FILTER_INVALID, why or "only queues and groups can be subscribed to"
        pattern = PREFIX + known.queue.encode()
        if is_dots(options.group) and not self._has_group(options.group):
            raise InvalidQueueConfig(
                f"{options.group!r} cannot be a group", fault_of_new_group(options.group)
            )
        if has_wildcard(pattern):
            fault = fault_of_name(known.queue.replace("+", "any").replace("#", "any"))
            if fault:
                return TOPIC_FILTER_INVALID, fault
            new: i64 = 0  # partitions that the group does not follow yet
            for queue in self._engine.queues.values():
                if options.group not in queue.groups and self._covers(pattern, queue.name):
                    new += len(queue.partitions)
            self._engine.check_group(options.group, int(new))
            self._drop_wild(session, topic_filter)
            self._wild.append(WildSubscription(session, topic_filter, pattern, qos, options))
            for queue in list(self._engine.queues.values()):
                if self._covers(pattern, queue.name):
                    before = session.by_queue.get(queue.name)
                    if before is None or before.topic_filter == topic_filter:
                        self._join(session, topic_filter, queue, qos, options)
        else:
            fault = fault_of_name(known.queue)
            if fault:
                return TOPIC_FILTER_INVALID, fault
            named = self._engine.queues.get(known.queue)
            if named is not None and options.group not in named.groups:
                self._engine.check_group(options.group, len(named.partitions))
            told = _supersede(session, topic_filter, known.queue, options.group)
            self._join(session, topic_filter, named or self._open_queue(known.queue), qos, options)
        session.queue_requests[topic_filter] = (int(qos), wishes)
        return int(qos), told

    def _has_group(self, name: str) -> bool:
        """Whether any queue has such a group: an earlier version created groups of names that are refused now."""
        return any(name in queue.groups for queue in self._engine.queues.values())

    def _covers(self, topic_filter: bytes, name: str) -> bool:
        """Whether a wildcard means this queue. Dead letters are meant only by a filter that names them."""
        if name.startswith("dlq/") and not topic_filter.startswith(b"$queue/dlq/"):
            return False
        return matches(topic_filter, PREFIX + name.encode())

    def _join(self, session: Session, topic_filter: bytes, queue: Queue, qos: i64, options: Options) -> None:
        engine = self._engine
        before = session.by_queue.get(queue.name)
        prefetch: i64 = options.prefetch if options.prefetch >= 0 else queue.rules.prefetch
        if before is not None:
            if before.group_name == options.group and before.id_in_topic == options.id_in_topic:
                # The same again, as clients do on each connect: what it holds stays with it.
                before.qos = qos
                before.by_puback = options.by_puback
                before.extra = options.extra
                before.topic_filter = topic_filter
                if before.priority != options.priority or before.exclusive != options.exclusive:
                    before.priority = options.priority
                    before.exclusive = options.exclusive
                    engine.resume(before)
                engine.set_prefetch(before, prefetch)
                return
            self._leave(before)
        group = queue.groups.get(options.group)
        if group is None:
            group = engine.group(queue, options.group, start_floors(queue, options.start))
        consumer = QueueConsumer(
            session,
            topic_filter,
            queue.name,
            options.group,
            qos,
            prefetch,
            options.priority,
            options.exclusive,
            options.by_puback,
            options.id_in_topic,
            options.extra,
        )
        session.by_queue[queue.name] = consumer
        engine.join(queue, group, consumer)

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Whether there was such a subscription."""
        found = session.queue_requests.pop(topic_filter, None) is not None
        self._drop_wild(session, topic_filter)
        for name, consumer in list(session.by_queue.items()):
            if consumer.topic_filter == topic_filter:
                other = self._wild_for(session, name)
                if other is not None and other.options.group == consumer.group_name:
                    consumer.topic_filter = other.topic_filter  # it goes on under its other name
                    continue
                del session.by_queue[name]
                self._leave(consumer)
                if other is not None:
                    queue = self._engine.queues.get(name)
                    if queue is not None:
                        self._join(session, other.topic_filter, queue, other.qos, other.options)
        return found

    def _leave(self, consumer: QueueConsumer) -> None:
        if consumer.session.starving is not None:
            consumer.session.starving.remove(consumer)
        self._engine.leave(consumer)

    def _drop_wild(self, session: Session, topic_filter: bytes) -> None:
        for wild in self._wild:
            if wild.session is session and wild.topic_filter == topic_filter:
                self._wild.remove(wild)
                return

    def _wild_for(self, session: Session, name: str) -> WildSubscription | None:
        for wild in self._wild:
            if wild.session is session and self._covers(wild.pattern, name):
                return wild
        return None

    # ---- queues come and go

    def leave_behind(self, queue: Queue) -> None:
        """A queue is about to go: its members stay subscribed to its name."""
        left: list[QueueConsumer] = []
        for group in queue.groups.values():
            left.extend(consumer for consumer in group.consumers if isinstance(consumer, QueueConsumer))
        if left:
            self._left_behind[queue.name] = left

    def come_back(self, queue: Queue) -> None:
        """A queue of that name is here again."""
        for consumer in self._left_behind.pop(queue.name, []):
            if consumer.session.by_queue.get(queue.name) is consumer:
                consumer.held = 0
                self._engine.join(queue, self._engine.group(queue, consumer.group_name), consumer)
                if consumer.session.connection is None:
                    self._engine.pause(consumer)

    def join_wild(self, queue: Queue) -> None:
        for wild in self._wild:
            if self._covers(wild.pattern, queue.name) and queue.name not in wild.session.by_queue:
                self._join(wild.session, wild.topic_filter, queue, wild.qos, wild.options)

    # ---- a session comes and goes

    def has_wild(self) -> bool:
        return len(self._wild) > 0

    def pause(self, session: Session) -> None:
        for consumer in session.by_queue.values():
            self._engine.pause(consumer)

    def resume(self, session: Session) -> None:
        for consumer in session.by_queue.values():
            if consumer.identity != session.identity:
                self._engine.set_identity(consumer, session.identity)
            self._engine.resume(consumer)

    def end(self, session: Session) -> None:
        self._wild = [wild for wild in self._wild if wild.session is not session]
        for consumer in list(session.by_queue.values()):
            self._engine.leave(consumer)
        session.by_queue = {}
        session.starving = None


def _supersede(session: Session, topic_filter: bytes, queue: str, group: str) -> str:
    """Another subscription to the same queue, by name, ends with this one; what to tell of it. Kept beside the new one
    it would be a subscription that is there and gets nothing."""
    before = session.by_queue.get(queue)
    if before is None or before.topic_filter == topic_filter or has_wildcard(before.topic_filter):
        return ""
    session.queue_requests.pop(before.topic_filter, None)
    if before.group_name == group:
        return ""
    return (
        f"this takes the place of {before.topic_filter.decode()}: a client is in one group of a queue, and has left "
        f"{before.group_name!r}. Use one client id for each group"
    )
