"""`$queue/responses/<id>`: an answer on its way to whoever asked.

An answer goes to one consumer. When that one is not there yet (the answer was faster than its subscription), it waits
in memory, for a while and up to a limit; then nobody wants it any more. Nothing here is kept over a restart: the one
who asked has lost its connection too, and asks again.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from mypy_extensions import i64

from sluice.broker.router import Router
from sluice.broker.scheduler import Scheduler
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.subscriptions import Subscription
from sluice.clock import Deadline
from sluice.errors import InvalidQueueConfig, ResponsesFull
from sluice.queues.names import RESPONSES
from sluice.wire.packets import Publish
from sluice.wire.topics import matches

PREFIX: Final = b"$queue/responses/"
WAIT_SECONDS: Final = 30.0
MAX_WAITING: Final = 10_000
MAX_BYTES: Final = 67_108_864


class _Waiting:
    def __init__(self, message: Publish, until: float) -> None:
        self.message: Publish = message
        self.until: float = until
        self.taken: bool = False


class Responses(Deadline):
    def __init__(self, router: Router, scheduler: Scheduler) -> None:
        self._router = router
        self._scheduler = scheduler
        self._line: deque[_Waiting] = deque()  # in order of arrival, which is that of their ends
        self._by_topic: dict[bytes, list[_Waiting]] = {}
        self._bytes: i64 = 0
        self._armed: bool = False
        self.count: i64 = 0

    def publish(self, message: Publish) -> None:
        """Give an answer to the one who waits for it, or keep it for a while. With too many waiting it is refused."""
        route = self._router.subscriptions.route(message.topic)
        if route.targets:
            target = route.targets[0]
            qos = message.qos
            delivery = target.session.deliver(
                message, qos if qos < target.qos else target.qos, False, target.extra, None
            )
            self._router.keep_numbered(message, delivery)
            return
        self.check_room(message)
        size = _size(message)
        now = self._router.turn.now
        waiting = _Waiting(message, now + WAIT_SECONDS)
        self._line.append(waiting)
        self._by_topic.setdefault(message.topic, []).append(waiting)
        self.count += 1
        self._bytes += size
        if not self._armed:
            self._armed = True
            self._scheduler.wake_at(waiting.until, self)

    def check_room(self, message: Publish) -> None:
        """Raise ResponsesFull if `message` would have to wait and there is no room for it."""
        if self._router.subscriptions.route(message.topic).targets:
            return
        if self.count >= MAX_WAITING or self._bytes + _size(message) > MAX_BYTES:
            raise ResponsesFull(int(self.count))

    def may_subscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Answers have one consumer: the first that asks for them."""
        targets = self._router.subscriptions.route(topic_filter).targets
        return all(target.session is session for target in targets)

    def subscribed(self, subscription: Subscription) -> None:
        """Somebody waits from now on: what has come before goes out."""
        topic_filter = subscription.topic_filter
        exact = self._by_topic.get(topic_filter)
        topics = [topic_filter] if exact is not None else []
        if exact is None and self._by_topic:
            topics = [topic for topic in self._by_topic if matches(topic_filter, topic)]
        extra = subscription.extra()
        for topic in topics:
            for waiting in self._by_topic.pop(topic):
                self._let_go(waiting)
                qos = min(waiting.message.qos, subscription.qos)
                delivery = subscription.session.deliver(waiting.message, qos, False, extra, None)
                self._router.keep_numbered(waiting.message, delivery)

    def _let_go(self, waiting: _Waiting) -> None:
        waiting.taken = True
        self.count -= 1
        self._bytes -= _size(waiting.message)

    def due(self, now: float) -> float:
        """Whoever asked has given up by now."""
        line = self._line
        while line and (line[0].taken or line[0].until <= now):
            waiting = line.popleft()
            if not waiting.taken:
                self._let_go(waiting)
                left = self._by_topic.get(waiting.message.topic)
                if left is not None:
                    left.remove(waiting)
                    if not left:
                        del self._by_topic[waiting.message.topic]
        self._armed = len(line) > 0
        return line[0].until if line else 0.0


def refuse_queue(config: object) -> None:
    """Somebody wants to make a queue among the answers: nothing that is published there would ever come to it."""
    name = config.get("name") if isinstance(config, dict) else None
    if isinstance(name, str) and name.removeprefix("$queue/").startswith(RESPONSES):
        raise InvalidQueueConfig(
            f"name {name!r} cannot be a queue: responses is reserved for answers, which are no queues",
            "Choose a name such as tasks/image",
        )


def _size(message: Publish) -> i64:
    return len(message.payload) + len(message.raw) + len(message.topic)
