"""Subscriptions of clients under `$queue/`, as members of groups.

A subscription by name is one consumer. A filter with wildcards is one consumer for each matching
queue, now and later. A client is in one group of a queue, regardless of the filters that match it.
The engine decides which messages a member gets.

A client may consume thousands of queues. Joining, pausing, resuming and leaving many of them runs
in slices over several turns (`SlicedTask`). The SUBACK is sent after all queues are joined. A
consumer that has yet to leave its group gets nothing more (prefetch 0) and is no longer in
`QueueMemberships.consumers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.namespaces.queues.memberships import (
    close_memberships,
    find_consumer,
    find_memberships,
    list_consumers,
    open_memberships,
)
from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
from sluice.broker.namespaces.queues.queue_options import (
    ConsumerOptions,
    default_group,
)
from sluice.broker.queue_topics import (
    GROUP,
    INVALID,
    PUBLISH,
    QUEUE_PREFIX,
    parse_queue_topic,
)
from sluice.broker.sessions import SubscribeOptions
from sluice.broker.turn import SlicedTask, Turn
from sluice.errors import InvalidQueueConfig
from sluice.queues.bulk import resolve_start
from sluice.queues.engine import Engine
from sluice.queues.model import Queue
from sluice.queues.names import (
    is_dot_segment,
    looks_generated,
    new_group_name_error,
    queue_name_error,
)
from sluice.wire.reasons import TOPIC_FILTER_INVALID
from sluice.wire.topics import has_wildcard, matches

if TYPE_CHECKING:
    from sluice.broker.sessions import Session


class WildcardSubscription:
    """A filter with wildcards: it joins every queue that matches, now and later."""

    def __init__(
        self,
        session: Session,
        topic_filter: bytes,
        pattern: bytes,
        qos: i64,
        options: ConsumerOptions,
    ) -> None:
        self.session: Session = session
        self.topic_filter: bytes = topic_filter
        self.pattern: bytes = pattern  # the filter without its group
        self.qos: i64 = qos
        self.options: ConsumerOptions = options


class JoinTask(SlicedTask):
    """Join the queues in `names` by a filter with wildcards, one in each step."""

    def __init__(
        self,
        subscriptions: QueueSubscriptions,
        wildcard: WildcardSubscription,
        names: list[str],
        turn: Turn,
        begin: Callable[[], None],
    ) -> None:
        super().__init__(turn, begin)
        self.wildcard: WildcardSubscription = wildcard
        self._subscriptions: QueueSubscriptions = subscriptions
        self._names: list[str] = names
        self._next: int = 0

    def step(self) -> bool:
        if self._next < len(self._names):
            name = self._names[self._next]
            self._next += 1
            self._subscriptions.join_by_wildcard(self.wildcard, name)
        if self._next < len(self._names):
            return True
        self._subscriptions.on_join_done(self)
        return False


class LeaveTask(SlicedTask):
    """Remove consumers from their groups, one in each step."""

    def __init__(
        self,
        subscriptions: QueueSubscriptions,
        consumers: list[QueueConsumer],
        turn: Turn,
        begin: Callable[[], None],
    ) -> None:
        super().__init__(turn, begin)
        self._subscriptions: QueueSubscriptions = subscriptions
        self._consumers: list[QueueConsumer] = consumers
        for consumer in consumers:
            consumer.prefetch = 0

    def step(self) -> bool:
        if self._consumers:
            self._subscriptions.leave(self._consumers.pop())
        return len(self._consumers) > 0


class PresenceTask(SlicedTask):
    """Pause or resume the consumers of a session whose client disconnected or connected."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        consumers: list[QueueConsumer],
        is_away: bool,
        turn: Turn,
        begin: Callable[[], None],
    ) -> None:
        super().__init__(turn, begin)
        self._engine: Engine = engine
        self._session: Session = session
        self._consumers: list[QueueConsumer] = consumers
        self._is_away: bool = is_away

    def step(self) -> bool:
        if self._consumers:
            consumer = self._consumers.pop()
            # Otherwise it has left the queue meanwhile.
            if find_consumer(self._session, consumer.queue) is consumer:
                if self._is_away:
                    self._engine.dispatch.set_paused(consumer, True)
                else:
                    self._engine.dispatch.set_paused(consumer, False)
        if not self._consumers:
            memberships = find_memberships(self._session)
            if memberships is not None and memberships.presence_task is self:
                memberships.presence_task = None
            return False
        return True


class QueueSubscriptions:
    """The queue subscriptions of all sessions.

    `open_queue` creates a missing queue and joins the matching wildcard subscriptions. `begin`
    prepares the engine for work in the current turn.
    """

    def __init__(
        self,
        engine: Engine,
        open_queue: Callable[[str, Session], Queue],
        turn: Turn,
        begin: Callable[[], None],
    ) -> None:
        self._engine: Engine = engine
        self._open_queue = open_queue
        self._turn: Turn = turn
        self._begin = begin
        self._wildcards: list[WildcardSubscription] = []
        self._join_tasks: list[JoinTask] = []  # wildcard joins that are still running
        # By queue name: consumers whose queue was deleted.
        self._orphaned_consumers: dict[str, list[QueueConsumer]] = {}

    # ---- subscribing

    def subscribe(
        self,
        session: Session,
        topic_filter: bytes,
        requested: SubscribeOptions,
        immediately: bool = False,
    ) -> tuple[int, str]:
        """Join a queue, or all that match; return the granted QoS, or a reason code and text.

        Unless `immediately`, many queues are joined over several turns; see `is_joining`.
        """
        options = ConsumerOptions(session, requested)
        qos: i64 = requested.qos
        notice = ""
        parsed = parse_queue_topic(topic_filter)
        if parsed.verb == GROUP:
            options.set_group(parsed.argument.decode())
            options.id_in_topic = True
            if parsed.is_explicit:
                options.acks_by_puback = False
        elif parsed.verb != PUBLISH:
            why = parsed.argument.decode() if parsed.verb == INVALID else ""
            return TOPIC_FILTER_INVALID, why or "only queues and groups can be subscribed to"
        pattern = QUEUE_PREFIX + parsed.queue.encode()
        if is_dot_segment(options.group) and not self._has_group(options.group):
            raise InvalidQueueConfig(
                f"{options.group!r} cannot be a group", new_group_name_error(options.group)
            )
        if has_wildcard(pattern):
            error_text = queue_name_error(parsed.queue.replace("+", "any").replace("#", "any"))
            if error_text:
                return TOPIC_FILTER_INVALID, error_text
            names: list[str] = []
            new_partitions: i64 = 0  # partitions that the group does not follow yet
            for queue in self._engine.queues.values():
                if self._matches_queue(pattern, queue.name):
                    names.append(queue.name)
                    if options.group not in queue.groups:
                        if new_partitions == 0:
                            # Refuse an invalid start before any queue is joined.
                            resolve_start(queue, options.start)
                        new_partitions += len(queue.partitions)
            self._engine.lifecycle.check_group_limit(options.group, int(new_partitions))
            self._remove_wildcard(session, topic_filter)
            wildcard = WildcardSubscription(session, topic_filter, pattern, qos, options)
            self._wildcards.append(wildcard)
            if immediately:
                for name in names:
                    self.join_by_wildcard(wildcard, name)
            else:
                self._start_joining(wildcard, names)
        else:
            error_text = queue_name_error(parsed.queue)
            if error_text:
                return TOPIC_FILTER_INVALID, error_text
            named = self._engine.queues.get(parsed.queue)
            if named is not None and options.group not in named.groups:
                self._engine.lifecycle.check_group_limit(options.group, len(named.partitions))
            is_new = named is None or options.group not in named.groups
            target = self._open_queue(parsed.queue, session) if named is None else named
            notice = _replace_earlier(session, topic_filter, parsed.queue, options.group)
            if is_new and options.group == default_group(session.client_id):
                notice = notice or self._warn_of_generated_id(session.client_id, options.group)
            self._join(session, topic_filter, target, qos, options)
        session.queue_requests[topic_filter] = requested
        return requested.qos, notice

    def _warn_of_generated_id(self, client_id: str, group: str) -> str:
        """Return a warning if a new group is named by an id that the client will not have again."""
        if not looks_generated(client_id):
            return ""
        warning = (
            f"new group {group!r} has its name from the generated client id {client_id!r}: "
            "it keeps messages when the client is gone. Set consumer-group, or a client id"
        )
        self._engine.state.warn(warning)
        return warning

    def is_joining(self, session: Session) -> bool:
        """Return whether matching queues of a filter of this session are still being joined."""
        for joining in self._join_tasks:
            if joining.wildcard.session is session:
                return True
        return False

    def _start_joining(self, wildcard: WildcardSubscription, names: list[str]) -> None:
        joining = JoinTask(self, wildcard, names, self._turn, self._begin)
        self._join_tasks.append(joining)
        joining.start()

    def join_by_wildcard(self, wildcard: WildcardSubscription, name: str) -> None:
        """Join one matching queue, unless another filter covers it or it was deleted."""
        queue = self._engine.queues.get(name)
        existing = find_consumer(wildcard.session, name)
        if queue is not None and (
            existing is None or existing.topic_filter == wildcard.topic_filter
        ):
            self._join(
                wildcard.session, wildcard.topic_filter, queue, wildcard.qos, wildcard.options
            )

    def on_join_done(self, joining: JoinTask) -> None:
        self._join_tasks.remove(joining)

    def _has_group(self, name: str) -> bool:
        """Return whether any queue has this group; earlier versions accepted names refused now."""
        return any(name in queue.groups for queue in self._engine.queues.values())

    def _matches_queue(self, topic_filter: bytes, name: str) -> bool:
        """Return whether a wildcard matches this queue.

        Only `dlq/...` filters match dead-letter queues.
        """
        if name.startswith("dlq/") and not topic_filter.startswith(b"$queue/dlq/"):
            return False
        return matches(topic_filter, QUEUE_PREFIX + name.encode())

    def _join(
        self,
        session: Session,
        topic_filter: bytes,
        queue: Queue,
        qos: i64,
        options: ConsumerOptions,
    ) -> None:
        engine = self._engine
        existing = find_consumer(session, queue.name)
        prefetch: i64 = options.prefetch if options.prefetch >= 0 else queue.rules.prefetch
        if existing is not None:
            if existing.group_name == options.group and existing.id_in_topic == options.id_in_topic:
                # Repeated, as clients do on each connect: the consumer keeps its deliveries.
                existing.qos = qos
                existing.acks_by_puback = options.acks_by_puback
                existing.extra_properties = options.extra_properties
                existing.topic_filter = topic_filter
                if (
                    existing.priority != options.priority
                    or existing.is_exclusive != options.exclusive
                ):
                    existing.priority = options.priority
                    existing.is_exclusive = options.exclusive
                    engine.dispatch.set_paused(existing, False)
                engine.dispatch.set_prefetch(existing, prefetch)
                return
            self.leave(existing)
        group = queue.groups.get(options.group)
        if group is None:
            group = engine.lifecycle.get_or_create_group(
                queue, options.group, resolve_start(queue, options.start)
            )
        consumer = QueueConsumer(
            engine,
            self._turn,
            session,
            topic_filter,
            queue.name,
            options.group,
            qos,
            prefetch,
            options.priority,
            options.exclusive,
            options.acks_by_puback,
            options.id_in_topic,
            options.extra_properties,
        )
        open_memberships(session).consumers[queue.name] = consumer
        engine.dispatch.join(group, consumer)
        if session.connection is None:
            engine.dispatch.set_paused(consumer, True)

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Unsubscribe and return whether the subscription existed."""
        found = session.queue_requests.pop(topic_filter, None) is not None
        self._remove_wildcard(session, topic_filter)
        others = [wild for wild in self._wildcards if wild.session is session]
        leaving: list[QueueConsumer] = []
        joining: dict[bytes, list[str]] = {}  # by filter: the queues that it joins instead
        for consumer in list_consumers(session):
            name = consumer.queue
            if consumer.topic_filter == topic_filter:
                other = self._find_wildcard(others, name)
                if other is not None and other.options.group == consumer.group_name:
                    consumer.topic_filter = other.topic_filter  # it continues by the other filter
                    continue
                del open_memberships(session).consumers[name]
                leaving.append(consumer)
                if other is not None:
                    joining.setdefault(other.topic_filter, []).append(name)
        if leaving:
            LeaveTask(self, leaving, self._turn, self._begin).start()
        for wild in others:
            if wild.topic_filter in joining:
                self._start_joining(wild, joining[wild.topic_filter])
        return found

    def leave(self, consumer: QueueConsumer) -> None:
        memberships = find_memberships(consumer.session)
        if memberships is not None:  # None: the session has ended, and its list with it
            memberships.blocked.remove(consumer)
        self._engine.dispatch.leave(consumer)

    def _remove_wildcard(self, session: Session, topic_filter: bytes) -> None:
        for wild in self._wildcards:
            if wild.session is session and wild.topic_filter == topic_filter:
                self._wildcards.remove(wild)
                self._cancel_joins(session, topic_filter)
                return

    def _cancel_joins(self, session: Session, topic_filter: bytes | None) -> None:
        """Cancel running joins by this filter, or by all filters of the session."""
        for joining in list(self._join_tasks):
            wild = joining.wildcard
            if wild.session is session and (
                topic_filter is None or wild.topic_filter == topic_filter
            ):
                joining.is_cancelled = True
                self._join_tasks.remove(joining)

    def _find_wildcard(
        self, wildcards: list[WildcardSubscription], name: str
    ) -> WildcardSubscription | None:
        for wildcard in wildcards:
            if self._matches_queue(wildcard.pattern, name):
                return wildcard
        return None

    # ---- queues are created and deleted

    def on_queue_deleting(self, queue: Queue) -> None:
        """Remember the members of a queue being deleted; they stay subscribed to its name."""
        orphans: list[QueueConsumer] = []
        for group in queue.groups.values():
            orphans.extend(
                consumer for consumer in group.consumers if isinstance(consumer, QueueConsumer)
            )
        if orphans:
            self._orphaned_consumers[queue.name] = orphans

    def rejoin_orphans(self, queue: Queue) -> None:
        """Join the consumers of a deleted queue to a new one of the same name."""
        for consumer in self._orphaned_consumers.pop(queue.name, []):
            if find_consumer(consumer.session, queue.name) is consumer:
                consumer.in_flight = 0
                self._engine.dispatch.join(
                    self._engine.lifecycle.get_or_create_group(queue, consumer.group_name), consumer
                )
                if consumer.session.connection is None:
                    self._engine.dispatch.set_paused(consumer, True)

    def join_wildcards(self, queue: Queue) -> None:
        for wild in self._wildcards:
            if (
                self._matches_queue(wild.pattern, queue.name)
                and find_consumer(wild.session, queue.name) is None
            ):
                self._join(wild.session, wild.topic_filter, queue, wild.qos, wild.options)

    # ---- sessions connect, disconnect and end

    def has_wildcards(self) -> bool:
        return len(self._wildcards) > 0

    def pause(self, session: Session) -> None:
        self._set_presence(session, True)

    def resume(self, session: Session) -> None:
        for consumer in list_consumers(session):
            if consumer.identity != session.identity:
                self._engine.dispatch.set_identity(consumer, session.identity)
        self._set_presence(session, False)

    def _set_presence(self, session: Session, is_away: bool) -> None:
        memberships = open_memberships(session)
        if memberships.presence_task is not None:
            # The client was away, or connected, for a moment only.
            memberships.presence_task.is_cancelled = True
        consumers = list_consumers(session)
        consumers.reverse()
        presence = PresenceTask(self._engine, session, consumers, is_away, self._turn, self._begin)
        memberships.presence_task = presence
        presence.start()

    def end_session(self, session: Session) -> None:
        self._wildcards = [wild for wild in self._wildcards if wild.session is not session]
        self._cancel_joins(session, None)
        memberships = find_memberships(session)
        if memberships is None:
            return
        if memberships.presence_task is not None:
            memberships.presence_task.is_cancelled = True
        consumers = list_consumers(session)
        close_memberships(session)
        if consumers:
            consumers.reverse()
            LeaveTask(self, consumers, self._turn, self._begin).start()


def _replace_earlier(session: Session, topic_filter: bytes, queue: str, group: str) -> str:
    """End another subscription to the same queue by name; return a notice for the client.

    Otherwise the older subscription would exist and receive nothing.
    """
    earlier = find_consumer(session, queue)
    if (
        earlier is None
        or earlier.topic_filter == topic_filter
        or has_wildcard(earlier.topic_filter)
    ):
        return ""
    session.queue_requests.pop(earlier.topic_filter, None)
    if earlier.group_name == group:
        return ""
    return (
        f"this replaces {earlier.topic_filter.decode()}: a client is in one group of a queue, "
        f"and has left {earlier.group_name!r}. Use one client id for each group"
    )
