"""Engine, store and clock in one hand: the words in which the tests of the queues speak.

    engine = EngineUnderTest(MemoryKeeper())
    engine.publish(b"poison")
    worker = engine.worker()
    worker.nack(worker.lease())
    engine.advance(minutes=10)
    engine.crash_and_restart()

Nothing sleeps. The loop is a list of callbacks under a clock that moves when it is told to; the runner, the engine and
the store are the real ones.
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
from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.flow import dead_letters
from sluice.queues.flow.dead_letters import Alert
from sluice.queues.flow.delivery_tokens import DeliveryToken
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Group
from sluice.queues.model.ledger import Ledger, build_ledger, verify
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.names import format_message_id
from sluice.queues.ports import Consumer, Publisher
from sluice.store.embedded import EmbeddedStore
from sluice.store.memory import MemoryStore
from sluice.store.protocol import RecoveryReport, Store

START = 1_800_000_000.0
PATIENCE_SECONDS = 30.0  # only a broken store makes anybody wait so long


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
    """The two things that the runner and a store ask of an event loop, turned by hand."""

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

    def turn(self, is_waited_for: Callable[[], bool]) -> None:
        """Run what is there; with threads behind, also what is still to come of what was asked for."""
        while True:
            while not self._calls.empty():
                call, args = self._calls.get()
                call(*args)
            if not is_waited_for():
                return
            call, args = self._calls.get(timeout=PATIENCE_SECONDS)
            call(*args)

    def run_one(self) -> bool:
        """Run the first of what is there; whether there was one."""
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
        """The process is gone, and with it whatever it waited for."""
        self._timers = []
        while not self._calls.empty():
            self._calls.get()


# ---- stores


class StoreBackend(Protocol):
    """A store of some kind, and how it dies."""

    def open(self, loop: Loop, engine: Engine) -> RecordingStore: ...

    def opened(self) -> None:
        """The queues are back."""

    def check(self) -> None:
        """See that the store shows the queues as they are, if it shows them at all."""

    def crash(self) -> None:
        """The process that held the store is dead; what it had written is there."""

    def is_busy(self) -> bool:
        """Whether something was asked of the store that it will answer by itself."""


class RecordingStore:
    """A store with an ear on it: what was read, and how many answers its threads still owe."""

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

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> None:
        self._store.commit(frame, count, sync, _Answer(self, done))

    def read(self, addresses: Sequence[int], done: Callable[[list[bytes | None]], None]) -> None:
        self.reads.append(list(addresses))
        self._store.read(addresses, _Answer(self, done))

    def scan_segment(self, segment: int, done: Callable[[list[bytes]], None]) -> None:
        self._store.scan_segment(segment, _Answer(self, done))

    def begin_snapshot(self) -> None:
        self._store.begin_snapshot()

    def snapshot(self, state: list[bytes], free: Sequence[int], done: Callable[[], None]) -> None:
        self._store.snapshot(state, free, _Answer(self, done))


class _Answer:
    def __init__(self, store: RecordingStore, done: Callable[..., None]) -> None:
        self._store = store
        self._done = done
        store.pending += 1

    def __call__(self, *args: Any) -> None:
        self._store.pending -= 1
        self._done(*args)


class PlainBackend:
    """A store into which nobody looks."""

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
        """What was not synced is lost, but for the first so many frames."""
        assert self.store is not None
        self.store = self.store.crash(keep_unsynced)

    def is_busy(self) -> bool:
        return False  # it answers by the loop, and what is held waits for the test


class EmbeddedBackend(PlainBackend):
    """The store on disk. A crash here is the death of the process, at a moment when nothing is under way; power cuts
    in the midst of everything are the business of the store's own tests, and of the simulator's memory store."""

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


# ---- people


class RecordingPublisher(Publisher):
    """A publisher that remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.receipts: list[int] = []

    def on_committed(self, tag: int) -> None:
        self.receipts.append(int(tag))


class Worker(Consumer):
    """A consumer that keeps its deliveries in a list until the test does something with them."""

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
        self.taken: list[int] = []  # sequences that were taken away
        self.is_open = True

    def has_capacity(self) -> bool:
        return self.is_open and self.in_flight < self.prefetch

    def deliver(self, lease: Lease) -> None:
        delivery = Delivery(lease)
        self.inbox.append(delivery)
        self.got.append(delivery.payload)

    def on_lease_revoked(self, lease: Lease) -> None:
        self.taken.append(int(lease.seq))
        self.inbox = [one for one in self.inbox if one.lease is not lease]

    def lease(self) -> Delivery:
        """The next delivery, which must be there."""
        delivery = self.lease_or_none()
        assert delivery is not None, f"{self.client} was given nothing"
        return delivery

    def lease_or_none(self) -> Delivery | None:
        self.under_test.run_until_idle()
        return self.inbox.pop(0) if self.inbox else None

    def lease_all(self) -> list[Delivery]:
        self.under_test.run_until_idle()
        taken, self.inbox = self.inbox, []
        return taken

    def payloads(self) -> list[bytes]:
        """What lies in the inbox."""
        self.under_test.run_until_idle()
        return [one.payload for one in self.inbox]

    def partitions(self) -> list[int]:
        return [int(cursor.partition.number) for cursor in self.cursors]

    # What a client can say. Each goes by name and token, as a client's words do.

    def _find(self, delivery: Delivery) -> Lease:
        assert self.group is not None
        return self.under_test.engine.find_lease(
            self.group, delivery.name, delivery.token, self.client
        )

    def ack(self, delivery: Delivery) -> None:
        self.under_test.engine.ack(self._find(delivery))
        self.under_test.run_until_idle()

    def nack(self, delivery: Delivery, delay: float = -1.0, description: str = "") -> None:
        self.under_test.engine.nack(self._find(delivery), delay, description)
        self.under_test.run_until_idle()

    def reject(self, delivery: Delivery, reason: str = "rejected", description: str = "") -> None:
        self.under_test.engine.dead_letter(self._find(delivery), reason, description)
        self.under_test.run_until_idle()

    def release(self, delivery: Delivery) -> None:
        self.under_test.engine.release(self._find(delivery))
        self.under_test.run_until_idle()

    def extend(self, delivery: Delivery) -> None:
        self.under_test.engine.extend(self._find(delivery))
        self.under_test.run_until_idle()

    def ack_all(self) -> list[bytes]:
        """Take and settle until nothing more comes; the payloads in order."""
        done: list[bytes] = []
        while True:
            some = self.lease_all()
            if not some:
                return done
            for delivery in some:
                done.append(delivery.payload)
                self.under_test.engine.ack(self._find(delivery))

    def leave(self) -> None:
        self.under_test.engine.leave(self)
        self.under_test.run_until_idle()


NO_TOKEN: Final = DeliveryToken()


def token_of(lease: Lease) -> DeliveryToken:
    """The token that goes out with a delivery; its consumer has been told the run."""
    assert lease.consumer is not None
    return DeliveryToken(
        lease.token_counter, int(lease.consumer.token_run_text[1:], 16), lease.token_tag
    )


class Delivery:
    """What a client knows of a delivery."""

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
    """A dead letter where it lies."""

    def __init__(self, partition: Partition, seq: int, message: Message) -> None:
        self.partition = partition
        self.seq = seq
        self.message = message
        self.payload = message.payload
        self.history = dict(decode_headers(message.headers))


# ---- the whole of it


def rules_of(name: str, settings: dict[str, Any]) -> QueueRules:
    rules = QueueRules(name)
    if name.startswith("dlq/"):
        rules.dlq_enabled = False
    for key, value in settings.items():
        assert hasattr(rules, key), key
        setattr(rules, key, value)
    return rules


def parse_rules(name: str, config: str) -> QueueRules:
    return rules_of(name, json.loads(config))


class EngineUnderTest:
    """One engine on one store; `settings` are those of every queue that comes into being, one partition unless told."""

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
        self.made: list[str] = []
        self._tag = 0
        self._workers = 0
        self.recovery = self._open()

    def _open(self) -> RecoveryReport:
        self.engine = Engine(self._rules_for, self.draw, self.cache_bytes, ZstdCodec())
        self.store = self.backend.open(self.loop, self.engine)
        self.runner = CommitLoop(
            self.engine,
            self.store,
            self.loop.clock,
            self.loop.call_later,
            self._flushed,
            self._report,
        )
        self.runner.on_queue_created = self._on_made
        recovery = self.runner.open(parse_rules)
        self.backend.opened()
        self.run_until_idle()
        return recovery

    def _rules_for(self, name: str) -> tuple[QueueRules, str]:
        settings = {**self.settings, **self.settings_of.get(name, {})}
        return rules_of(name, settings), json.dumps(settings)

    def _on_made(self, queue: Queue) -> None:
        self.made.append(queue.name)

    def _flushed(self) -> None:
        pass

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        self.alerts += alerts
        self.warnings += warnings

    # ---- time

    def run_until_idle(self) -> None:
        """Let the turn end, and run until nothing more happens by itself."""
        self.engine.now = self.loop.now
        self.runner.end_turn()
        self.loop.turn(self.backend.is_busy)

    def advance(
        self, seconds: float = 0.0, minutes: float = 0.0, hours: float = 0.0, days: float = 0.0
    ) -> None:
        """Let time pass; timers ring when they are due, in order."""
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
        queue = self.engine.get_or_create_queue(name)
        self.run_until_idle()
        return queue

    def reconfigure(self, name: str = "tasks", **settings: Any) -> None:
        queue = self.engine.get_queue(name)
        reported = {**json.loads(queue.config_json), **settings}
        self.engine.now = self.loop.now
        self.engine.reconfigure_queue(queue, rules_of(name, reported), json.dumps(reported))
        self.run_until_idle()

    def group(self, name: str = "workers", queue: str = "tasks", start: str = "earliest") -> Group:
        home = self.engine.get_or_create_queue(queue)
        self.engine.now = self.loop.now
        group = home.groups.get(name)
        if group is None:
            group = self.engine.get_or_create_group(home, name, resolve_start(home, start))
        self.run_until_idle()
        return group

    def seek(self, start: str, name: str = "workers", queue: str = "tasks") -> None:
        home = self.engine.get_queue(queue)
        self.engine.seek_group(home.groups[name], resolve_start(home, start))
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
        """Publish and let the frame be kept; the tag under which the author gets its receipt."""
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
        """Publish within the turn, which does not end yet."""
        self.engine.now = self.loop.now
        message = Message(payload, props, key, message_id)
        message.priority = priority
        if delay:
            message.deliver_at = int((self.loop.now + delay) * 1000.0)
        if ttl:
            message.expires = int(self.loop.now + ttl)
        self._tag += 1
        self.engine.publish(
            self.engine.get_or_create_queue(queue), message, self.publisher, self._tag
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
        """A consumer that has joined."""
        self._workers += 1
        worker = Worker(self, client or f"worker-{self._workers}", prefetch, priority, exclusive)
        home = self.group(group, queue, start)
        self.engine.now = self.loop.now
        self.engine.join(home.queue, home, worker)
        self.run_until_idle()
        return worker

    # ---- looking

    def depth(self, queue: str = "tasks") -> int:
        return int(self.engine.queues[queue].depth)

    def ledger(self, group: str = "workers", queue: str = "tasks") -> Ledger:
        home = self.engine.queues[queue]
        return build_ledger(home, home.groups[group])

    def verify(self) -> None:
        """Nothing is unaccounted for."""
        assert verify(self.engine) == []

    def read(self, partition: Partition, seq: int) -> Message:
        found: list[Message | None] = []
        self.runner.read_messages([(partition, seq)], found.extend)
        self.run_until_idle()
        message = found[0]
        assert message is not None
        return message

    def dead_letter_records(self, queue: str = "tasks", channel: str = "") -> list[DeadLetter]:
        """The dead letters of a queue, oldest first; or what lies in another channel."""
        self.run_until_idle()
        home = self.engine.queues.get(channel or f"dlq/{queue}")
        found: list[DeadLetter] = []
        for partition in home.partitions if home is not None else []:
            seq = int(partition.first_live(0))
            while seq < partition.next_seq:
                found.append(DeadLetter(partition, seq, self.read(partition, seq)))
                seq = int(partition.first_live(seq + 1))
        return sorted(found, key=lambda letter: letter.message.enqueued_at)

    def dead_letters(self, queue: str = "tasks") -> list[bytes]:
        return [letter.payload for letter in self.dead_letter_records(queue)]

    def redrive(self, dead_letter: DeadLetter, to_all: bool = False) -> bool:
        self.engine.now = self.loop.now
        done = dead_letters.redrive(
            self.engine, dead_letter.partition, dead_letter.seq, dead_letter.message, to_all
        )
        self.run_until_idle()
        return done

    # ---- ends

    def restart(self) -> None:
        """Stop in order, and start again."""
        self.runner.close()
        self.loop.clear()
        self.recovery = self._open()

    def take_snapshot(self) -> None:
        """Let the store have a snapshot of what is there now."""
        self.run_until_idle()
        self.engine.now = self.loop.now
        self.runner._start_snapshot()
        self.run_until_idle()

    def crash_and_restart(self) -> None:
        """The process dies here and now; another one opens what it left."""
        self.backend.crash()
        self.reopen()

    def reopen(self) -> None:
        self.loop.clear()
        self.recovery = self._open()
