"""From one publish to everybody who gets it: retained message, subscribers, shared subscriptions.

It knows sessions and subscriptions, and nothing of sockets or packets' bytes. `publish` is called once per message and
does no more than one look-up and one call per receiver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.broker.commit_forwarder import Forwarder, StoredPublish
from sluice.broker.sessions.inflight import Deliveries
from sluice.broker.limits import Limits
from sluice.broker.sessions.retained import Retained
from sluice.broker.sessions.retained_sender import RetainedSender
from sluice.broker.sessions.subscriptions import (
    Share,
    Subscription,
    Subscriptions,
    Target,
    cost_of_filter,
)
from sluice.broker.turn import Turn
from sluice.errors import ResponsesFull
from sluice.metrics import Counters
from sluice.wire.packets import Publish
from sluice.wire.topics import SHARE_PREFIX, has_wildcard

if TYPE_CHECKING:
    from sluice.broker.cluster_port import Abroad
    from sluice.broker.net.connection import Connection
    from sluice.broker.namespaces.compacted.exclusive_subscriber import OwnedDelivery
    from sluice.broker.sessions.inflight import Delivery
    from sluice.broker.sessions.session_store import Keeper
    from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
    from sluice.broker.namespaces.queues.handler import QueueDoor
    from sluice.broker.sessions.session import Session
    from sluice.queues.model.delivery_lease import Lease


class Router:
    def __init__(self, limits: Limits, turn: Turn, counters: Counters) -> None:
        self.limits = limits
        self.turn = turn
        self.counters = counters
        self.subscriptions = Subscriptions()
        self.retained = Retained(limits.max_retained, limits.max_retained_bytes)
        self.deliveries = Deliveries()
        self.forwarder = Forwarder(self)
        self.keeper: Keeper | None = None  # None: sessions and retained messages end with the server
        self.kept: i64 = (
            0  # counts what was given to the store: a publish that raises it is answered by the store
        )
        self.unavailable: str = ""  # why the store takes nothing: what must be kept is refused meanwhile
        self.no_room: bool = False  # and whether that is for want of room
        self.no_memory: bool = False  # of memory, not of disk; then no_room holds as well
        self.refused_for_memory: int = 0
        self.held: list[Connection] = []  # not read until the store has taken what they published
        self.abroad: Abroad | None = None  # None: there are no other cells
        self.door: QueueDoor | None = None  # None: there are no queues, and $queue/... is an ordinary topic

    def publish(self, message: Publish, origin: Session | None) -> i64:
        """How many receivers it was handed to; -1 when it was to be retained and there is no more room."""
        route = self.subscriptions.route(message.topic)
        taken: i64 = 0
        if route.captures and self.door is not None:  # first of all: a queue may refuse it
            taken = self.door.capture(message, route.captures)
            self.kept += taken
        if message.retain and (self.abroad is None or self.abroad.keeps(message.topic)):
            if not self.retained.put(message, message.topic.startswith(b"$SYS/")):
                return -1
            if self.keeper is not None and not message.topic.startswith(b"$SYS/"):
                self.keeper.keep_retained(message)
                self.kept += 1
        qos = message.qos
        lasting: list[Delivery] | None = None  # for sessions that outlive the server
        for target in route.targets:
            receiver = target.session
            if receiver is origin and target.no_local:
                own = target.own
                if own is None:
                    continue
                target = own
            delivery = receiver.deliver(
                message,
                qos if qos < target.qos else target.qos,
                target.retain_as_published and message.retain,
                target.extra,
                None,
            )
            taken += 1
            if receiver.sid and delivery is not None:
                if lasting is None:
                    lasting = []
                lasting.append(delivery)
        if route.shares and (
            self.abroad is None or message.topic[0] == 0x24
        ):  # else one cell of all is chosen
            for share in route.shares:
                if self.hand_out(message, share, None):
                    taken += 1
        if lasting is not None:
            self._keep(message, lasting)
        return taken

    def publish_stored(self, message: Publish, origin: Session | None) -> i64:
        """The same for a QoS 2 message that must come once, also when the broker is killed.

        It is written into the open frame, beside the packet id or mark by which a repeat is recognized.
        Nobody sees it before the store has that frame; see `forward`."""
        route = self.subscriptions.route(message.topic)
        taken: i64 = 0
        if route.captures and self.door is not None:  # first of all: a queue may refuse it
            taken = self.door.capture(message, route.captures)
        keeper = self.keeper
        if message.retain and (self.abroad is None or self.abroad.keeps(message.topic)):
            if not self.retained.promise(message):
                return -1
            if keeper is not None:
                keeper.keep_retained(message)
        lasting: list[Delivery] = []
        for target in route.targets:
            got = _target_of(target, origin)
            if got is None:
                continue
            taken += 1
            if got.session.sid and got.qos > 0:
                delivery = got.session.hold(
                    message, got.qos, got.retain_as_published and message.retain, got.extra, None
                )
                if delivery is not None:
                    lasting.append(delivery)
        if self.abroad is None or message.topic[0] == 0x24:  # else one cell of all is chosen
            for share in route.shares:
                if self.hand_out_stored(message, share):
                    taken += 1
        if lasting:
            self._keep(message, lasting)
        self.forwarder.hold_publish(StoredPublish(message, origin, route))
        self.kept += 1
        return taken

    def forward(self, publish: StoredPublish) -> None:
        """Forward a publish that the store has to the receivers for whom no copy was stored."""
        message = publish.message
        if message.retain:
            self.retained.redeem(message)
        route = self.subscriptions.route(message.topic)
        for target in route.targets:
            got = _target_of(target, publish.origin)
            if got is None:
                continue
            receiver = got.session
            if receiver.sid:
                if got.qos > 0 if route is publish.route else _is_stored_for(publish, receiver):
                    continue
            qos = message.qos
            delivery = receiver.deliver(
                message,
                qos if qos < got.qos else got.qos,
                got.retain_as_published and message.retain,
                got.extra,
                None,
            )
            if delivery is not None and delivery.sid:  # it has subscribed since
                self._keep(message, [delivery])

    def forward_response(self, message: Publish) -> None:
        """Give a response that the store knows of to the client that waits for it."""
        if self.door is not None and self.door.responses is not None:
            try:
                self.door.responses.publish(message)
            except ResponsesFull:
                self.counters.publishes_dropped += 1  # there was room when it came

    def _keep(self, message: Publish, deliveries: list[Delivery]) -> None:
        if self.keeper is not None:
            self.keeper.post(message, deliveries)
            self.kept += 1

    def keep_numbered(self, message: Publish, delivery: Delivery | None) -> None:
        """Store a QoS 2 delivery to a persistent session whose message is not stored otherwise.

        Its packet id must outlive a crash, and so must the message that was sent under it."""
        if delivery is not None and delivery.sid and delivery.qos == 2:
            self._keep(message, [delivery])

    def hand_out(self, message: Publish, share: Share, past: Session | None) -> bool:
        """Give `message` to one member of a shared subscription."""
        target = share.pick(message.qos, past)
        if target is None:
            return False
        qos = message.qos
        delivery = target.session.deliver(
            message,
            qos if qos < target.qos else target.qos,
            target.retain_as_published and message.retain,
            target.extra,
            share,
        )
        if delivery is not None and delivery.sid:
            self._keep(message, [delivery])
        return True

    def hand_out_stored(self, message: Publish, share: Share) -> bool:
        """The same for `publish_stored`: the member gets it when the store has the open frame."""
        target = share.pick(message.qos, None)
        if target is None:
            return False
        qos = message.qos
        delivery = target.session.hold(
            message,
            qos if qos < target.qos else target.qos,
            target.retain_as_published and message.retain,
            target.extra,
            share,
        )
        if delivery is not None and delivery.sid:
            self._keep(message, [delivery])
        self.kept += 1
        return True

    def subscribe(self, subscription: Subscription) -> bool:
        """Whether the subscription is a new one."""
        session = subscription.session
        if subscription.topic_filter not in session.subscriptions:
            session.subscription_bytes += cost_of_filter(subscription.topic_filter)
        session.subscriptions[subscription.topic_filter] = subscription
        new = self.subscriptions.add(subscription)
        if new and self.abroad is not None:
            self.abroad.interest(subscription.topic_filter, 1)
        return new

    def unsubscribe(self, session: Session, topic_filter: bytes) -> bool:
        """Whether there was such a subscription."""
        if session.subscriptions.pop(topic_filter, None) is None:
            return False
        session.subscription_bytes -= cost_of_filter(topic_filter)
        if session.retained_sender is not None:
            session.retained_sender.cancel(topic_filter)
        if self.abroad is not None:
            self.abroad.interest(topic_filter, -1)
        return self.subscriptions.remove(session, topic_filter)

    def send_retained(self, subscription: Subscription, new: bool) -> None:
        """Send what a subscription gets besides what comes from now on (MQTT 5.0 section 3.3.1.3).

        A filter without wildcards is answered at once; `RetainedSender` does the rest in slices."""
        if subscription.retain_handling == 2 or (subscription.retain_handling == 1 and not new):
            return
        topic_filter = subscription.topic_filter
        if topic_filter.startswith(SHARE_PREFIX):
            return
        if self.abroad is not None:
            self.abroad.send_retained(subscription)
            return
        session = subscription.session
        sender = session.retained_sender
        if sender is None:
            if session.takes_now() and not has_wildcard(topic_filter):
                message = self.retained.find(topic_filter, self.turn.now)
                # A QoS 2 publish that is being stored is queued for the subscriptions of before already.
                if message is not None and (new or not self.retained.is_promised(topic_filter)):
                    self.deliver_retained(subscription, [message])
                return
            sender = session.retained_sender = RetainedSender(session, self.retained, self.turn)
        sender.add(topic_filter)

    def resume_retained(self, session: Session, owed: list[bytes]) -> None:
        """Look up again, after a restart, the filters whose retained messages a session is still owed."""
        sender = RetainedSender(session, self.retained, self.turn)
        sender.is_stored = True
        for topic_filter in owed:
            sender.add(topic_filter)
        session.retained_sender = sender
        sender.resume()

    def deliver_retained(self, subscription: Subscription, messages: list[Publish]) -> None:
        extra = subscription.extra()
        for message in messages:
            qos = message.qos
            delivery = subscription.session.deliver(
                message, qos if qos < subscription.qos else subscription.qos, True, extra, None
            )
            if delivery is not None and delivery.sid:
                self._keep(message, [delivery])

    def forget(self, session: Session) -> None:
        """A session has ended: its subscriptions go, and its share of shared messages goes to the other members."""
        if session.sid and self.keeper is not None:
            self.keeper.drop_session(session)
        session.retained_sender = None
        for topic_filter in list(session.subscriptions):
            self.unsubscribe(session, topic_filter)
        if self.door is not None:
            self.door.ended(session)
        given: list[Delivery] = session.take_back()
        for delivery in given:
            self.pass_to_another(delivery, session)
        if session.legs is not None:
            session.legs.ended()

    def pass_to_another(self, delivery: Delivery, past: Session) -> None:
        """Give a delivery of a session that has ended (`past`) to another member of its share."""
        share = delivery.share
        expires_at = delivery.message.expires_at
        if share is not None and (expires_at == 0.0 or expires_at > self.turn.now):
            handed = self.hand_out(delivery.message, share, past)
            if not handed and self.abroad is not None:
                self.abroad.hand_on(delivery.message, share)

    def answer_when_kept(self, session: Session, packet: Publish) -> None:
        """The publisher hears of it when the store has what this publish left behind."""
        if self.door is not None:
            self.door.ecq.catch_up()
        if self.keeper is not None:
            self.keeper.answer_when_kept(session, session.tag(packet))
            session.answer_later(packet)

    def must_keep(self, message: Publish, origin: Session) -> bool:
        """Whether a publish could not be answered, or not be done justice, without the store. For the time that it
        takes nothing; queues that capture it judge for themselves. Where there is only no room, a retained message
        may be taken back, and a packet id noted."""
        if self.keeper is None:
            return False
        if message.retain and (message.payload or not self.no_room):
            return True
        if message.qos == 2 and origin.sid and not self.no_room:
            return True
        if message.qos == 0:
            return False
        route = self.subscriptions.route(message.topic)
        for target in route.targets:
            if target.session.sid and target.qos > 0:
                return True
        for share in route.shares:
            for member in share.members:
                if member.session.sid and member.qos > 0:
                    return True
        return False

    def is_swamped(self) -> bool:
        """Whether the store takes nothing, and as much waits for it as may."""
        return self.unavailable != "" and self.keeper is not None and self.keeper.is_full()

    def stalled(self, reason: str) -> None:
        """The store takes nothing, and why; or takes things again. Those who were held back hear a refusal now."""
        self.unavailable = reason
        if reason:
            self.frame_taken()

    def hold_back(self, connection: Connection) -> None:
        """A publish has left something for the store: its publisher must not be faster than that for long."""
        if self.keeper is not None and self.keeper.is_full() and connection.hold():
            self.held.append(connection)

    def frame_taken(self) -> None:
        """The store has taken what waited: publishers are heard again."""
        if self.held:
            held = self.held
            self.held = []
            for connection in held:
                connection.unhold()

    def keep_session(self, session: Session, tag: i64) -> None:
        """A lasting session has changed; with a tag, it hears when that is kept."""
        if self.keeper is not None:
            self.keeper.keep_session(session)
            if tag:
                self.keeper.answer_when_kept(session, tag)

    def note_received(self, session: Session, packet_id: int, released: bool) -> None:
        if self.keeper is not None:
            self.keeper.note_received(session, packet_id, released)

    def unkeep(self, delivery: Delivery) -> None:
        if self.keeper is not None:
            self.keeper.done(delivery)

    def answer_when_noted(self, session: Session, tag: i64) -> None:
        """Call `session.stored(tag)` when the store has everything that was noted so far."""
        if self.keeper is not None:
            self.keeper.answer_when_kept(session, tag)

    def note_sent(self, delivery: Delivery) -> None:
        if self.keeper is not None:
            self.keeper.note_sent(delivery)

    def note_there(self, delivery: Delivery) -> None:
        if self.keeper is not None:
            self.keeper.note_there(delivery)

    def note_completed(self, delivery: Delivery) -> None:
        if self.keeper is not None:
            self.keeper.note_completed(delivery)

    def take_ack(self, lease: Lease, reason: i64) -> None:
        """A PUBACK settles a delivery from a queue."""
        if self.door is not None:
            self.door.acknowledged(lease, reason)

    def take_owned(self, delivery: OwnedDelivery) -> None:
        """A PUBACK acknowledges a value of an exclusive queue."""
        if self.door is not None:
            self.door.ecq.acknowledged(delivery)

    def hand_back(self, lease: Lease) -> None:
        """A delivery from a queue that its consumer can never take: it is larger than the client allows."""
        if self.door is not None:
            self.door.too_large(lease)

    def feed(self, consumer: QueueConsumer) -> None:
        """A consumer of a queue has room on its line again."""
        if self.door is not None:
            self.door.feed(consumer)


def _target_of(target: Target, origin: Session | None) -> Target | None:
    """Return what a receiver gets of a message of `origin`; None if it wants nothing of its own."""
    return target.own if target.session is origin and target.no_local else target


def _is_stored_for(publish: StoredPublish, receiver: Session) -> bool:
    """Return whether a copy for `receiver` was stored: its subscriptions may have changed since."""
    for target in publish.route.targets:
        if target.session is receiver:
            got = _target_of(target, publish.origin)
            return got is not None and got.qos > 0
    return False
