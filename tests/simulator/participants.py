"""Participants of the simulation: publishers, consumers, and a store that reports durability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Consumer
from sluice.queues.ports import Publisher
from tests.queues.kit import token_of
from tests.simulator.oracle import Oracle


class DeliveryObserver(Protocol):
    """Receives the events of the engine."""

    def receipt(self, tag: int) -> None: ...

    def delivered(self, consumer: SimulatedConsumer, lease: Lease) -> None: ...

    def revoked(self, consumer: SimulatedConsumer, lease: Lease) -> None: ...


class SimulatedPublisher(Publisher):
    def __init__(self, world: DeliveryObserver) -> None:
        super().__init__()
        self.world = world

    def on_committed(self, tag: int) -> None:
        self.world.receipt(int(tag))


class SimulatedConsumer(Consumer):
    """A consumer that does nothing by itself."""

    def __init__(self, world: DeliveryObserver, client: str, prefetch: int, priority: int) -> None:
        super().__init__(client, prefetch, priority, False)
        self.world = world
        self.is_connected = True
        self.holds: dict[tuple[int, int, int], HeldDelivery] = {}

    def has_capacity(self) -> bool:
        return self.is_connected and self.in_flight < self.prefetch

    def deliver(self, lease: Lease) -> None:
        self.world.delivered(self, lease)

    def on_lease_revoked(self, lease: Lease) -> None:
        self.world.revoked(self, lease)

    def __repr__(self) -> str:
        return self.client


class HeldDelivery:
    """A delivery as a client remembers it, for as long as it likes."""

    def __init__(
        self, lease: Lease, name: bytes, number: tuple[int, int, int], client: str
    ) -> None:
        self.lease = lease
        self.name = name
        self.number = number
        self.token = token_of(lease)
        self.client = client
        self.group_name = lease.cursor.group.name
        self.queue_name = lease.cursor.group.queue.name


class LoggedStore:
    """A store that reports to the oracle what is on disk."""

    def __init__(self, store: Any, oracle: Oracle) -> None:
        self.inner = store
        self.oracle = oracle
        self.open = store.open
        self.next_frame_address = store.next_frame_address
        self.read = store.read
        self.scan_segment = store.scan_segment
        self.begin_snapshot = store.begin_snapshot
        self.snapshot = store.snapshot
        self.is_snapshot_due = store.is_snapshot_due
        self.segment_sizes = store.segment_sizes
        self.seal_segment = store.seal_segment
        self.close = store.close

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        self.oracle.frames += 1
        return self.inner.commit(
            frame, count, sync, _Committed(self.oracle, self.oracle.frames, sync, done)
        )


class _Committed:
    def __init__(self, oracle: Oracle, number: int, sync: bool, done: Callable[[], None]) -> None:
        self.oracle, self.number, self.sync, self.done = oracle, number, sync, done

    def __call__(self) -> None:
        self.oracle.answered = self.number
        if self.sync:
            self.oracle.durable = max(self.oracle.durable, self.number)
        self.done()
