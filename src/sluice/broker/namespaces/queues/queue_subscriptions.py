"""Who reads which queues: the subscriptions of clients under `$queue/`, as members of groups.

A subscription by name is one consumer, a filter with wildcards one for each queue that matches, now and later. A client
is in one group of a queue, whatever filters lead there. What a member is given is the engine's decision.

A client may read thousands of queues. Joining, pausing, resuming and leaving many of them is done in slices
over several turns (`sliced.py`). A SUBSCRIBE is answered when all queues are joined. A consumer that is still to
leave its group gets nothing more (prefetch 0), and is no longer in `Session.by_queue`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
from sluice.broker.namespaces.queues.queue_topics import GROUP, PREFIX, PUBLISH, WRONG, parse_queue_topic
from sluice.broker.namespaces.queues.queue_options import Options
from sluice.broker.sliced_task import Sliced
from sluice.broker.turn import Turn
from sluice.errors import InvalidQueueConfig
from sluice.queues.engine import Engine
from sluice.queues.names import fault_of_name, fault_of_new_group, is_dots
from sluice.queues.model.queue import Queue
from sluice.queues.bulk.start_position import start_floors
from sluice.wire.reasons import TOPIC_FILTER_INVALID
from sluice.wire.topics import has_wildcard, matches

if TYPE_CHECKING:
    from sluice.broker.sessions.session import Session


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


class Joining(Sliced):
    """The consumers of a filter with wildcards join the queues called `names`, one in each step."""

    def __init__(
        self,
        members: QueueMembers,
        wild: WildSubscription,
        names: list[str],
        turn: Turn,
        begin: Callable[[], None],
    ) -> None:
        super().__init__(turn, begin)
        self.wild: WildSubscription = wild
        self._members: QueueMembers = members
        self._names: list[str] = names
        self._next: int = 0

    def step(self) -> bool:
        if self._next < len(self._names):
            name = self._names[self._next]
            self._next += 1
            self._members.join_by_wildcard(self.wild, name)
        if self._next < len(self._names):
            return True
        self._members.joined_all(self)
        return False


class Leaving(Sliced):
    """Consumers leave their groups, one in each step."""

    def __init__(
        self, members: QueueMembers, consumers: list[QueueConsumer], turn: Turn, begin: Callable[[], None]
    ) -> None:
        super().__init__(turn, begin)
        self._members: QueueMembers = members
        self._consumers: list[QueueConsumer] = consumers
        for consumer in consumers:
            consumer.prefetch = 0

    def step(self) -> bool:
        if self._consumers:
            self._members.leave(self._consumers.pop())
        return len(self._consumers) > 0


class Presence(Sliced):
    """The consumers of a session are paused or resumed because its client went away or came back."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        consumers: list[QueueConsumer],
        away: bool,
        turn: Turn,
        begin: Callable[[], None],
    ) -> None:
        super().__init__(turn, begin)
        self._engine: Engine = engine
        self._session: Session = session
        self._consumers: list[QueueConsumer] = consumers
        self._away: bool = away

    def step(self) -> bool:
        if self._consumers:
            consumer = self._consumers.pop()
            if self._session.by_queue.get(consumer.queue) is consumer:  # else it has left meanwhile
                if self._away:
                    self._engine.pause(consumer)
                else:
                    self._engine.resume(consumer)
        if not self._consumers:
            if self._session.presence is self:
                self._session.presence = None
            return False
        return True


class QueueMembers:
    """`open_queue` makes a queue that is not there yet, with everybody who has subscribed to its like.
    `begin` prepares the engine for work in the present turn."""

    def __init__(
        self, engine: Engine, open_queue: Callable[[str], Queue], turn: Turn, begin: Callable[[], None]
    ) -> None:
        self._engine: Engine = engine
        self._open_queue = open_queue
        self._turn: Turn = turn
        self._begin = begin
        self._wild: list[WildSubscription] = []
        self._joining: list[Joining] = []  # by wildcard, and not all queues are joined yet
        self._left_behind: dict[str, list[QueueConsumer]] = {}  # by queue: whose queue was deleted

    # ---- subscribing

    def subscribe(
        self, session: Session, topic_filter: bytes, qos: i64, wishes: list[str], at_once: bool = False
    ) -> tuple[int, str]:
        """Join a queue, or all that match: the granted QoS, or a reason and why.

        Unless `at_once`, many queues are joined over several turns: `is_joining` tells whether all are.
        """
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
            names: list[str] = []
            new: i64 = 0  # partitions that the group does not follow yet
            for queue in self._engine.queues.values():
                if self._covers(pattern, queue.name):
                    names.append(queue.name)
                    if options.group not in queue.groups:
                        if new == 0:
                            start_floors(
                                queue, options.start
                            )  # refuse a wrong start before any queue is joined
                        new += len(queue.partitions)
            self._engine.check_group(options.group, int(new))
            self._drop_wild(session, topic_filter)
            wild = WildSubscription(session, topic_filter, pattern, qos, options)
            self._wild.append(wild)
            if at_once:
                for name in names:
                    self.join_by_wildcard(wild, name)
            else:
                self._start_joining(wild, names)
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

    def is_joining(self, session: Session) -> bool:
        """Return whether queues that match a filter of this session are still being joined."""
        for joining in self._joining:
            if joining.wild.session is session:
                return True
        return False

    def _start_joining(self, wild: WildSubscription, names: list[str]) -> None:
        joining = Joining(self, wild, names, self._turn, self._begin)
        self._joining.append(joining)
        joining.start()

    def join_by_wildcard(self, wild: WildSubscription, name: str) -> None:
        """Join one queue that matches, unless the client reads it by another filter or it was deleted."""
        queue = self._engine.queues.get(name)
        before = wild.session.by_queue.get(name)
        if queue is not None and (before is None or before.topic_filter == wild.topic_filter):
            self._join(wild.session, wild.topic_filter, queue, wild.qos, wild.options)

    def joined_all(self, joining: Joining) -> None:
        self._joining.remove(joining)

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
            self.leave(before)
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
        if session.connection is None:
            engine.pause(consumer)

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Whether there was such a subscription."""
        found = session.queue_requests.pop(topic_filter, None) is not None
        self._drop_wild(session, topic_filter)
        others = [wild for wild in self._wild if wild.session is session]
        leaving: list[QueueConsumer] = []
        joining: dict[bytes, list[str]] = {}  # by filter: the queues that it leads to from now on
        for name, consumer in list(session.by_queue.items()):
            if consumer.topic_filter == topic_filter:
                other = self._first_that_covers(others, name)
                if other is not None and other.options.group == consumer.group_name:
                    consumer.topic_filter = other.topic_filter  # it goes on under its other name
                    continue
                del session.by_queue[name]
                leaving.append(consumer)
                if other is not None:
                    joining.setdefault(other.topic_filter, []).append(name)
        if leaving:
            Leaving(self, leaving, self._turn, self._begin).start()
        for wild in others:
            if wild.topic_filter in joining:
                self._start_joining(wild, joining[wild.topic_filter])
        return found

    def leave(self, consumer: QueueConsumer) -> None:
        if consumer.session.starving is not None:
            consumer.session.starving.remove(consumer)
        self._engine.leave(consumer)

    def _drop_wild(self, session: Session, topic_filter: bytes) -> None:
        for wild in self._wild:
            if wild.session is session and wild.topic_filter == topic_filter:
                self._wild.remove(wild)
                self._stop_joining(session, topic_filter)
                return

    def _stop_joining(self, session: Session, topic_filter: bytes | None) -> None:
        """Join no more queues by this filter, or by any filter of the session."""
        for joining in list(self._joining):
            wild = joining.wild
            if wild.session is session and (topic_filter is None or wild.topic_filter == topic_filter):
                joining.cancelled = True
                self._joining.remove(joining)

    def _first_that_covers(self, wilds: list[WildSubscription], name: str) -> WildSubscription | None:
        for wild in wilds:
            if self._covers(wild.pattern, name):
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
        self._set_presence(session, True)

    def resume(self, session: Session) -> None:
        for consumer in session.by_queue.values():
            if consumer.identity != session.identity:
                self._engine.set_identity(consumer, session.identity)
        self._set_presence(session, False)

    def _set_presence(self, session: Session, away: bool) -> None:
        if session.presence is not None:
            session.presence.cancelled = True  # the client was away, or here, for a moment only
        consumers = list(session.by_queue.values())
        consumers.reverse()
        presence = Presence(self._engine, session, consumers, away, self._turn, self._begin)
        session.presence = presence
        presence.start()

    def end(self, session: Session) -> None:
        self._wild = [wild for wild in self._wild if wild.session is not session]
        self._stop_joining(session, None)
        if session.presence is not None:
            session.presence.cancelled = True
            session.presence = None
        consumers = list(session.by_queue.values())
        session.by_queue = {}
        session.starving = None
        if consumers:
            consumers.reverse()
            Leaving(self, consumers, self._turn, self._begin).start()


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
