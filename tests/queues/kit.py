"""Test kit of the queues: engine, commit loop, store and clock in one object.

    engine = EngineUnderTest(MemoryBackend())
    engine.publish(b"poison")
    worker = engine.worker()
    worker.nack(worker.lease())
    engine.advance(minutes=10)
    engine.crash_and_restart()

Nothing sleeps. The event loop is a list of callbacks with a clock that the test advances; the
commit loop, the engine and the store are the real ones.
"""

from __future__ import annotations

import heapq
import json
import queue as threads
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from sluice.message import Message, decode_headers
from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.bulk.start_position import resolve_start
from sluice.queues.commit_loop import CommitListener, CommitLoop, read_messages
from sluice.queues.engine import Engine
from sluice.queues.flow.delivery.delivery_tokens import DeliveryToken
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.effects import Alert
from sluice.queues.model.group import Consumer, Group
from sluice.queues.model.ledger import Ledger, build_ledger, verify
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.names import format_message_id
from sluice.queues.ports import Publisher
from sluice.queues.service.partition_strategies import find_partition_strategy
from sluice.store.embedded import EmbeddedStore
from sluice.store.memory import MemoryStore
from sluice.store.protocol import RecoveryReport, Store

START = 1_800_000_000.0
# Only a broken store takes so long to answer.
STORE_TIMEOUT_SECONDS = 30.0


# ---- time


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def fire(self) -> None:
        if self._call is not None:
            self._call()

    def is_set(self) -> bool:
        return self._call is not None


class Loop:
    """The functions of an event loop that commit loop and stores use, driven by the test."""

    def __init__(self, now: float = START) -> None:
        self.now = now
        self._calls: threads.SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = (
            threads.SimpleQueue()
        )
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def call_soon(self, call: Callable[..., object], *args: object) -> None:
        self._calls.put((call, args))

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        self._count += 1
        heapq.heappush(self._timers, (self.now + seconds, self._count, timer))
        return timer

    def turn(self, is_busy: Callable[[], bool]) -> None:
        """Run all callbacks; with threads in the store, also wait for their outstanding results."""
        while True:
            while not self._calls.empty():
                call, args = self._calls.get()
                call(*args)
            if not is_busy():
                return
            call, args = self._calls.get(timeout=STORE_TIMEOUT_SECONDS)
            call(*args)

    def run_one(self) -> bool:
        """Run the first callback; return whether there was one."""
        if self._calls.empty():
            return False
        call, args = self._calls.get()
        call(*args)
        return True

    def next_timer(self) -> float:
        while self._timers and not self._timers[0][2].is_set():
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else 0.0

    def fire_timers(self) -> None:
        _, _, timer = heapq.heappop(self._timers)
        timer.fire()

    def clear(self) -> None:
        """Drop all timers and callbacks, as the end of the process does."""
        self._timers = []
        while not self._calls.empty():
            self._calls.get()


# ---- stores


class StoreBackend(Protocol):
    """A store of some kind, and how it crashes."""

    def open(self, loop: Loop, engine: Engine) -> RecordingStore: ...

    def opened(self) -> None:
        """Called when the queues are recovered."""

    def check(self) -> None:
        """Check that the store shows the queues as they are, if it shows them at all."""

    def crash(self) -> None:
        """End the process that held the store; its written data stays."""

    def is_busy(self) -> bool:
        """Return whether the store will answer a request by itself."""


class RecordingStore:
    """Wraps a store; records reads and counts outstanding results of its threads."""

    def __init__(self, store: Store) -> None:
        self.reads: list[list[int]] = []
        self.pending = 0
        self._store = store
        self.open = store.open
        self.next_frame_address = store.next_frame_address
        self.is_snapshot_due = store.is_snapshot_due
        self.segment_sizes = store.segment_sizes
        self.seal_segment = store.seal_segment
        self.close = store.close

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        return self._store.commit(frame, count, sync, _CountedCallback(self, done))

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        self.reads.append(list(addresses))
        self._store.read(addresses, _CountedCallback(self, done))

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self._store.scan_segment(segment, _CountedCallback(self, done))

    def begin_snapshot(self) -> None:
        self._store.begin_snapshot()

    def snapshot(
        self, state: list[bytes], freed_segments: Sequence[int], done: Callable[[], None]
    ) -> None:
        self._store.snapshot(state, freed_segments, _CountedCallback(self, done))


class _CountedCallback:
    def __init__(self, store: RecordingStore, done: Callable[..., None]) -> None:
        self._store = store
        self._done = done
        store.pending += 1

    def __call__(self, *args: Any) -> None:
        self._store.pending -= 1
        self._done(*args)


class PlainBackend:
    """A store that shows no views of the queues."""

    def opened(self) -> None: ...

    def check(self) -> None: ...


class MemoryBackend(PlainBackend):
    def __init__(self, segment_bytes: int = 1 << 20, snapshot_bytes: int = 1 << 20) -> None:
        self._sizes = (segment_bytes, snapshot_bytes)
        self.store: MemoryStore | None = None

    def open(self, loop: Loop, engine: Engine) -> RecordingStore:
        if self.store is None:
            self.store = MemoryStore(
                loop.call_soon, segment_bytes=self._sizes[0], snapshot_bytes=self._sizes[1]
            )
        return RecordingStore(self.store)

    def crash(self) -> None:
        assert self.store is not None
        self.store = self.store.crash(self.store.count_unsynced())

    def cut_power(self, keep_unsynced: int = 0) -> None:
        """Lose unsynced frames, except the first `keep_unsynced`."""
        assert self.store is not None
        self.store = self.store.crash(keep_unsynced)

    def is_busy(self) -> bool:
        return False  # it answers through the loop, and held results wait for the test


class EmbeddedBackend(PlainBackend):
    """The store on disk. A crash here ends the process while no operation is in progress.

    The store's own tests and the simulator's memory store cover power cuts at any time.
    """

    def __init__(
        self, directory: Path, segment_bytes: int = 1 << 20, snapshot_bytes: int = 1 << 20
    ) -> None:
        self.directory = directory
        self.salvage = False
        self._sizes = (segment_bytes, snapshot_bytes)
        self._store: RecordingStore | None = None
        self._failures: list[Exception] = []

    def open(self, loop: Loop, engine: Engine) -> RecordingStore:
        self._store = RecordingStore(
            EmbeddedStore(
                str(self.directory),
                loop.call_soon,
                self._failures.append,
                segment_bytes=self._sizes[0],
                snapshot_bytes=self._sizes[1],
                salvage=self.salvage,
            )
        )
        return self._store

    def crash(self) -> None:
        assert self._store is not None
        self._store.close()

    def is_busy(self) -> bool:
        assert self._store is not None and not self._failures, self._failures
        return self._store.pending > 0


# ---- clients


class RecordingPublisher(Publisher):
    """A publisher that records its acknowledgements."""

    def __init__(self) -> None:
        super().__init__()
        self.receipts: list[int] = []

    def on_committed(self, tag: int) -> None:
        self.receipts.append(int(tag))


class Worker(Consumer):
    """A consumer that keeps its deliveries in a list until the test settles them."""

    def __init__(
        self,
        under_test: EngineUnderTest,
        client: str,
        prefetch: int = 100,
        priority: int = 0,
        is_exclusive: bool = False,
    ) -> None:
        super().__init__(client, prefetch, priority, is_exclusive)
        self.under_test = under_test
        self.inbox: list[Delivery] = []
        self.got: list[bytes] = []  # every payload ever delivered, in order
        self.revoked: list[int] = []  # sequences of revoked leases
        self.is_open = True

    def has_capacity(self) -> bool:
        return self.is_open and self.in_flight < self.prefetch

    def deliver(self, lease: Lease) -> None:
        delivery = Delivery(lease)
        self.inbox.append(delivery)
        self.got.append(delivery.payload)

    def on_lease_revoked(self, lease: Lease) -> None:
        self.revoked.append(int(lease.seq))
        self.inbox = [one for one in self.inbox if one.lease is not lease]

    def lease(self) -> Delivery:
        """Return the next delivery, which must exist."""
        delivery = self.lease_or_none()
        assert delivery is not None, f"{self.client} got no delivery"
        return delivery

    def lease_or_none(self) -> Delivery | None:
        self.under_test.run_until_idle()
        return self.inbox.pop(0) if self.inbox else None

    def lease_all(self) -> list[Delivery]:
        self.under_test.run_until_idle()
        taken, self.inbox = self.inbox, []
        return taken

    def payloads(self) -> list[bytes]:
        """Return the payloads in the inbox."""
        self.under_test.run_until_idle()
        return [one.payload for one in self.inbox]

    def partitions(self) -> list[int]:
        return [int(cursor.partition.number) for cursor in self.cursors]

    # Settlements go by message id and token, as those of clients do.

    def _find(self, delivery: Delivery) -> Lease:
        assert self.group is not None
        return self.under_test.engine.lease_lookup.find_lease(
            self.group, delivery.name, delivery.token, self.client
        )

    def ack(self, delivery: Delivery) -> None:
        self.under_test.engine.settlement.ack(self._find(delivery))
        self.under_test.run_until_idle()

    def nack(self, delivery: Delivery, delay: float = -1.0, description: str = "") -> None:
        self.under_test.engine.settlement.nack(self._find(delivery), delay, description)
        self.under_test.run_until_idle()

    def reject(self, delivery: Delivery, reason: str = "rejected", description: str = "") -> None:
        self.under_test.engine.settlement.dead_letter(
            self._find(delivery), reason, description, True
        )
        self.under_test.run_until_idle()

    def release(self, delivery: Delivery) -> None:
        self.under_test.engine.settlement.release(self._find(delivery))
        self.under_test.run_until_idle()

    def extend(self, delivery: Delivery) -> None:
        self.under_test.engine.settlement.extend(self._find(delivery))
        self.under_test.run_until_idle()

    def ack_all(self) -> list[bytes]:
        """Ack deliveries until no more arrive; return their payloads in order."""
        done: list[bytes] = []
        while True:
            deliveries = self.lease_all()
            if not deliveries:
                return done
            for delivery in deliveries:
                done.append(delivery.payload)
                self.under_test.engine.settlement.ack(self._find(delivery))

    def leave(self) -> None:
        self.under_test.engine.dispatch.leave(self)
        self.under_test.run_until_idle()


NO_TOKEN: Final = DeliveryToken()


def token_of(lease: Lease) -> DeliveryToken:
    """Return the token that is sent with a delivery; its consumer knows the run."""
    assert lease.consumer is not None
    return DeliveryToken(
        lease.token_counter, int(lease.consumer.token_run_text[1:], 16), lease.token_tag
    )


class Delivery:
    """A delivery as a client knows it."""

    def __init__(self, lease: Lease) -> None:
        message = lease.message
        assert message is not None
        self.lease = lease
        self.payload = message.payload
        self.message = message
        self.token = token_of(lease)
        self.attempt = int(lease.attempt)
        self.seq = int(lease.seq)
        self.partition = int(lease.cursor.partition.number)
        self.name = message.id or format_message_id(lease.cursor.partition.pid, lease.seq)


class DeadLetter:
    """A stored dead letter."""

    def __init__(self, partition: Partition, seq: int, message: Message) -> None:
        self.partition = partition
        self.seq = seq
        self.message = message
        self.payload = message.payload
        self.history = dict(decode_headers(message.headers))


# ---- the engine under test


def rules_of(name: str, settings: dict[str, Any]) -> QueueRules:
    rules = QueueRules(name)
    if name.startswith("dlq/"):
        rules.dlq_enabled = False
    for key, value in settings.items():
        if key == "partition_strategy":
            rules.choose_partition = find_partition_strategy(value)
            continue
        assert hasattr(rules, key), key
        setattr(rules, key, value)
    return rules


def parse_rules(name: str, config: str) -> QueueRules:
    return rules_of(name, json.loads(config))


class CreatedQueues(CommitListener):
    def __init__(self, names: list[str]) -> None:
        self._names = names

    def on_queue_created(self, queue: Queue) -> None:
        self._names.append(queue.name)


class EngineUnderTest:
    """One engine on one store. `settings` apply to every created queue; default: one partition."""

    def __init__(
        self,
        backend: StoreBackend,
        cache_bytes: int = 1 << 20,
        draw: Callable[[], float] | None = None,
        **settings: Any,
    ) -> None:
        self.backend = backend
        self.loop = Loop()
        self.settings: dict[str, Any] = {"partitions": 1, **settings}
        self.settings_of: dict[str, dict[str, Any]] = {}
        self.cache_bytes = cache_bytes
        self.draw = draw if draw is not None else random.Random(1).random
        self.publisher = RecordingPublisher()
        self.alerts: list[Alert] = []
        self.warnings: list[str] = []
        self.created_queues: list[str] = []
        self._tag = 0
        self._workers = 0
        self.recovery = self._open()

    def _open(self) -> RecoveryReport:
        self.engine = Engine(self._rules_for, self.draw, self.cache_bytes, ZstdCodec())
        self.store = self.backend.open(self.loop, self.engine)
        self.commit_loop = CommitLoop(
            self.engine,
            self.store,
            self.loop.clock,
            self.loop.call_later,
            self._flushed,
            self._report,
        )
        self.commit_loop.add_listener(CreatedQueues(self.created_queues))
        recovery = self.commit_loop.open(parse_rules)
        self.backend.opened()
        self.run_until_idle()
        return recovery

    def _rules_for(self, name: str) -> tuple[QueueRules, str]:
        settings = {**self.settings, **self.settings_of.get(name, {})}
        return rules_of(name, settings), json.dumps(settings)

    def _flushed(self) -> None:
        pass

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        self.alerts += alerts
        self.warnings += warnings

    # ---- time

    def run_until_idle(self) -> None:
        """End the turn, and run until nothing more happens by itself."""
        self.engine.now = self.loop.now
        self.commit_loop.end_turn()
        self.loop.turn(self.backend.is_busy)

    def advance(
        self, seconds: float = 0.0, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0
    ) -> None:
        """Let time pass; timers fire in order when they are due."""
        until = self.loop.now + seconds + 60.0 * minutes + 3600.0 * hours + 86400.0 * days
        self.run_until_idle()
        while True:
            due = self.loop.next_timer()
            if due == 0.0 or due > until:
                break
            self.loop.now = max(self.loop.now, due)
            self.loop.fire_timers()
            self.run_until_idle()
        self.loop.now = until
        self.run_until_idle()

    # ---- queues

    def queue(self, name: str = "tasks", **settings: Any) -> Queue:
        if settings:
            self.settings_of[name] = settings
        queue = self.engine.lifecycle.get_or_create_queue(name)
        self.run_until_idle()
        return queue

    def reconfigure(self, name: str = "tasks", **settings: Any) -> None:
        queue = self.engine.lifecycle.get_queue(name)
        config = {**json.loads(queue.config_json), **settings}
        self.engine.now = self.loop.now
        self.engine.lifecycle.reconfigure_queue(queue, rules_of(name, config), json.dumps(config))
        self.run_until_idle()

    def group(self, name: str = "workers", queue: str = "tasks", start: str = "earliest") -> Group:
        target = self.engine.lifecycle.get_or_create_queue(queue)
        self.engine.now = self.loop.now
        group = target.groups.get(name)
        if group is None:
            group = self.engine.lifecycle.get_or_create_group(
                target, name, resolve_start(target, start)
            )
        self.run_until_idle()
        return group

    def seek(self, start: str, name: str = "workers", queue: str = "tasks") -> None:
        target = self.engine.lifecycle.get_queue(queue)
        self.engine.lifecycle.seek_group(target.groups[name], resolve_start(target, start))
        self.run_until_idle()

    # ---- publishing

    def publish(
        self,
        payload: bytes,
        queue: str = "tasks",
        key: bytes = b"",
        message_id: bytes = b"",
        priority: int = 0,
        delay: float = 0.0,
        ttl: float = 0.0,
        props: bytes = b"",
    ) -> int:
        """Publish and commit; return the tag that the publisher's acknowledgement has."""
        tag = self.send(payload, queue, key, message_id, priority, delay, ttl, props)
        self.run_until_idle()
        return tag

    def send(
        self,
        payload: bytes,
        queue: str = "tasks",
        key: bytes = b"",
        message_id: bytes = b"",
        priority: int = 0,
        delay: float = 0.0,
        ttl: float = 0.0,
        props: bytes = b"",
    ) -> int:
        """Publish within the current turn, which does not end yet."""
        self.engine.now = self.loop.now
        message = Message(payload, props, key, message_id)
        message.priority = priority
        if delay:
            message.deliver_at_ms = int((self.loop.now + delay) * 1000.0)
        if ttl:
            message.expires = int(self.loop.now + ttl)
        self._tag += 1
        self.engine.publishing.publish(
            self.engine.lifecycle.get_or_create_queue(queue), message, self.publisher, self._tag
        )
        return self._tag

    # ---- consumers

    def worker(
        self,
        client: str = "",
        group: str = "workers",
        queue: str = "tasks",
        prefetch: int = 100,
        priority: int = 0,
        exclusive: bool = False,
        start: str = "earliest",
    ) -> Worker:
        """Add a consumer to a group."""
        self._workers += 1
        worker = Worker(self, client or f"worker-{self._workers}", prefetch, priority, exclusive)
        target = self.group(group, queue, start)
        self.engine.now = self.loop.now
        self.engine.dispatch.join(target, worker)
        self.run_until_idle()
        return worker

    # ---- inspection

    def depth(self, queue: str = "tasks") -> int:
        return int(self.engine.queues[queue].depth)

    def ledger(self, group: str = "workers", queue: str = "tasks") -> Ledger:
        target = self.engine.queues[queue]
        return build_ledger(target, target.groups[group])

    def verify(self) -> None:
        """Check that the ledger balances."""
        assert verify(self.engine.queues) == []

    def read(self, partition: Partition, seq: int) -> Message:
        found: list[Message | None] = []
        read_messages(self.commit_loop, [(partition, seq)], found.extend)
        self.run_until_idle()
        message = found[0]
        assert message is not None
        return message

    def dead_letter_records(self, queue: str = "tasks", channel: str = "") -> list[DeadLetter]:
        """Return the dead letters of a queue, oldest first, or the messages of another queue."""
        self.run_until_idle()
        target = self.engine.queues.get(channel or f"dlq/{queue}")
        found: list[DeadLetter] = []
        for partition in target.partitions if target is not None else []:
            seq = int(partition.first_live(0))
            while seq < partition.next_seq:
                found.append(DeadLetter(partition, seq, self.read(partition, seq)))
                seq = int(partition.first_live(seq + 1))
        return sorted(found, key=lambda dead_letter: dead_letter.message.enqueued_at_ms)

    def dead_letters(self, queue: str = "tasks") -> list[bytes]:
        return [dead_letter.payload for dead_letter in self.dead_letter_records(queue)]

    def redrive(self, dead_letter: DeadLetter, to_all: bool = False) -> bool:
        self.engine.now = self.loop.now
        done = self.engine.redrive.redrive(
            dead_letter.partition, dead_letter.seq, dead_letter.message, to_all
        )
        self.run_until_idle()
        return done

    # ---- restarts

    def restart(self) -> None:
        """Shut down cleanly, and start again."""
        self.commit_loop.close()
        self.loop.clear()
        self.recovery = self._open()

    def take_snapshot(self) -> None:
        """Write a snapshot of the current state."""
        self.run_until_idle()
        self.engine.now = self.loop.now
        self.commit_loop.housekeeping._start_snapshot()
        self.run_until_idle()

    def crash_and_restart(self) -> None:
        """Kill the process and start another one on its data."""
        self.backend.crash()
        self.reopen()

    def reopen(self) -> None:
        self.loop.clear()
        self.recovery = self._open()
