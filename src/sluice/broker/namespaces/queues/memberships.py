"""The queues that one session consumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.broker.namespaces.queues.blocked_consumers import BlockedConsumers
from sluice.broker.ports import NO_CAPACITY_LISTENER, CapacityListener
from sluice.broker.turn import SlicedTask

if TYPE_CHECKING:
    from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer
    from sluice.broker.sessions import Session


class QueueMemberships(CapacityListener):
    """Created with the first consumer, and dropped with the session."""

    def __init__(self) -> None:
        self.consumers: dict[str, QueueConsumer] = {}  # by queue
        # Consumers that found the connection without capacity.
        self.blocked: BlockedConsumers = BlockedConsumers()
        self.presence_task: SlicedTask | None = None  # while consumers are paused or resumed

    def on_capacity(self) -> None:
        """Dispatch to the first blocked consumer; the engine then asks for the next."""
        consumer = self.blocked.pop_next()
        if consumer is not None:
            consumer.schedule_dispatch()


def find_memberships(session: Session) -> QueueMemberships | None:
    """Return what a session consumes, or None if it consumes no queue."""
    listener = session.outbound.queue_listener
    return listener if isinstance(listener, QueueMemberships) else None


def open_memberships(session: Session) -> QueueMemberships:
    """Return what a session consumes; create it if needed."""
    memberships = find_memberships(session)
    if memberships is None:
        memberships = QueueMemberships()
        session.outbound.follow_for_queues(memberships)
    return memberships


def list_consumers(session: Session) -> list[QueueConsumer]:
    memberships = find_memberships(session)
    return list(memberships.consumers.values()) if memberships is not None else []


def find_consumer(session: Session, queue: str) -> QueueConsumer | None:
    memberships = find_memberships(session)
    return memberships.consumers.get(queue) if memberships is not None else None


def close_memberships(session: Session) -> None:
    session.outbound.follow_for_queues(NO_CAPACITY_LISTENER)
