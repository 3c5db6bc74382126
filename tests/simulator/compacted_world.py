"""Simulation of compacted queues, exclusive and shared, with a model of the expected state.

The model is a dict: the last value of each key, and which of them its owner has acknowledged, or
each group has not settled. It is copied with every frame that goes to the store, so after a crash
the engine must be in the state of one of these frames, and not of one before an acknowledged frame.
From time to time the world runs until it is idle: then all connected clients must have received
everything.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

from sluice.message import Message
from sluice.queues.commit_loop import CommitLoop
from sluice.queues.compacted.owner_subscriber import OwnerSubscriber
from sluice.queues.engine import Engine
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.group import Consumer
from sluice.queues.model.ledger import verify
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.ports import Publisher
from sluice.store.memory import MemoryStore
from tests.queues.kit import Loop, rules_of
from tests.simulator.oracle import Oracle, Violation
from tests.simulator.participants import LoggedStore

KEYS: Final = (b"a", b"b/c", b"d", b"e/f/g", b"h")
OWNERS: Final = ("car-1", "car-2", "car-3")
GROUPS: Final = ("red", "green")
SHARED: Final = "state"
RETENTION: Final = 500.0
SWEEP: Final = 60.0
# Callbacks until the world must be idle.
MAX_CALLS: Final = 20_000


class Values:
    """Stored values of one owner, or of the shared queue: by key its sequence, value and time."""

    def __init__(self) -> None:
        self.next = 1
        self.last: dict[bytes, tuple[int, bytes, float]] = {}
        self.acked: set[int] = set()
        # Unsettled values of each group; without tombstones.
        self.groups: dict[str, set[int]] = {}

    def copy(self) -> Values:
        other = Values()
        other.next = self.next
        other.last = dict(self.last)
        other.acked = set(self.acked)
        other.groups = {name: set(waits) for name, waits in self.groups.items()}
        return other

    def put(self, key: bytes, seq: int, value: bytes, now: float) -> None:
        self.drop(key)
        self.last[key] = (seq, value, now)
        self.next = seq + 1
        for waits in self.groups.values():
            waits.add(seq)

    def drop(self, key: bytes) -> None:
        before = self.last.pop(key, None)
        if before is not None:
            self.acked.discard(before[0])
            for waits in self.groups.values():
                waits.discard(before[0])

    def waits(self) -> dict[int, bytes]:
        return {seq: value for seq, value, _ in self.last.values() if seq not in self.acked}

    def matches(
        self, live: dict[int, bytes], done: set[int], now: float, retention: float, swept: bool
    ) -> str:
        """Return how the stored values differ from the model; the empty string if they do not.

        Acknowledged tombstones are ignored, and values older than the retention may be deleted. If
        there was a sweep, values that were too old before it must be deleted.
        """
        expected = {
            seq: value for seq, value, _ in self.last.values() if value or seq not in self.acked
        }
        stored = {seq: value for seq, value in live.items() if value or seq not in done}
        old = {seq for seq, _, at in self.last.values() if retention and at + retention < now + 1.0}
        if {seq: value for seq, value in stored.items() if seq in expected} != stored:
            return f"stored {stored}, expected {expected}"
        overdue = {
            seq
            for seq, _, at in self.last.values()
            if retention and swept and seq in live and at + retention + SWEEP + 2.0 < now
        }
        if overdue:
            return f"{sorted(overdue)} are older than the retention, and are stored"
        missing = expected.keys() - stored.keys() - old
        if missing:
            return f"{missing} are missing: stored {stored}, expected {expected}"
        wrong = {seq for seq in stored if (seq in done) != (seq in self.acked)}
        return f"acknowledged {sorted(done)}, expected {sorted(self.acked)}" if wrong else ""


class SimulatedReader(OwnerSubscriber):
    def __init__(self, world: CompactedWorld, client: str, window: int) -> None:
        super().__init__()
        self.world = world
        self.client = client
        self.window = window
        # Sequence, epoch, and the number of rewinds before.
        self.holds: list[tuple[int, int, int]] = []
        self.highest = 0
        self.seen_epoch = 0

    def capacity(self) -> int:
        return self.window - len(self.holds)

    def deliver(self, seq: int, message: Message) -> None:
        self.world.on_delivery(self, int(seq), message)


class SharedConsumer(Consumer):
    def __init__(self, world: CompactedWorld, client: str) -> None:
        super().__init__(client, 5, 0, False)
        self.world = world
        self.holds: list[Lease] = []

    def deliver(self, lease: Lease) -> None:
        message = lease.message
        assert message is not None
        self.world.on_shared_delivery(self, int(lease.seq), message)
        self.holds.append(lease)

    def on_lease_revoked(self, lease: Lease) -> None:
        self.holds.remove(lease)


class ValuePublisher(Publisher):
    def __init__(self, world: CompactedWorld) -> None:
        super().__init__()
        self.world = world

    def on_committed(self, tag: int) -> None:
        self.world.receipt(int(tag))


class SnapshotCopier(LoggedStore):
    """Notifies the world when a frame is sent, so that it copies its model."""

    def __init__(
        self, store: MemoryStore, oracle: Oracle, on_frame_sent: Callable[[], None]
    ) -> None:
        super().__init__(store, oracle)
        self.on_frame_sent = on_frame_sent

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> int:
        next_address = super().commit(frame, count, sync, done)
        self.on_frame_sent()
        return next_address


class CompactedWorld:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.loop = Loop()
        self.oracle = Oracle()
        self.publisher = ValuePublisher(self)
        self.steps = 0
        self.serial = 0
        self.counts: dict[str, int] = {}
        self.log: list[str] = []
        self.model: dict[str, Values] = {name: Values() for name in (*OWNERS, SHARED)}
        self.frames: dict[int, dict[str, Values]] = {0: self._copies()}
        self.writes: dict[tuple[str, int], tuple[bytes, bytes, int]] = {}  # key, value and frame
        self.unanswered: dict[int, int] = {}  # frame by tag
        # The highest acknowledged sequence of each owner.
        self.accepted: dict[str, int] = {}
        self.tags: dict[int, tuple[str, int]] = {}
        self.readers: dict[str, SimulatedReader] = {}
        self.left: list[SimulatedReader] = []  # unsubscribed readers, which may still acknowledge
        self.rewinds: dict[str, int] = dict.fromkeys(OWNERS, 0)
        self.consumers: list[SharedConsumer] = []
        self.retention = self.rng.choice((0.0, RETENTION))
        self.settings: dict[str, Any] = {
            "partitions": 1,
            "is_compacted": True,
            "message_ttl": 0.0,
            "dlq_enabled": False,
            "max_retries": 1_000_000,
            "total_timeout": 1e9,
        }
        self.store = self._make_store()
        self._open()

    def _make_store(self) -> Any:
        return MemoryStore(
            self.loop.call_soon,
            segment_bytes=self.rng.choice((1500, 4000, 20_000)),
            snapshot_bytes=self.rng.choice((3000, 10_000)),
        )

    def _open(self) -> None:
        self.engine = Engine(self._rules_for, self.rng.random, self.rng.choice((0, 1 << 20)))
        rules = self.engine.exclusive.rules
        rules.retention = self.retention
        rules.sweep_interval = SWEEP
        self.opened_at = self.loop.now
        rules.cache_bytes = self.rng.choice((0, 300, 1 << 20))
        self.commit_loop = CommitLoop(
            self.engine,
            SnapshotCopier(self.store, self.oracle, self._on_frame_sent),
            self.loop.clock,
            self.loop.call_later,
            lambda: None,
            lambda alerts, warnings: self._on_warnings(warnings),
            self.rng.choice((0.0, 0.01)),
        )
        self.commit_loop.housekeeping.snapshot_batch_size = self.rng.choice((1, 20, 100_000))
        self.commit_loop.open(lambda name, text: rules_of(name, json.loads(text)))

    def _rules_for(self, name: str) -> tuple[QueueRules, str]:
        return rules_of(name, self.settings), json.dumps(self.settings)

    def _on_warnings(self, warnings: list[str]) -> None:
        if warnings:
            raise Violation(warnings[0])

    def _copies(self) -> dict[str, Values]:
        return {name: values.copy() for name, values in self.model.items()}

    def _on_frame_sent(self) -> None:
        self.frames[self.oracle.frames] = self._copies()
        for number in [number for number in self.frames if number < self.oracle.durable]:
            del self.frames[number]

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _log_step(self, what: str) -> None:
        self.log.append(f"{self.steps} {self.loop.now - 1.8e9:.3f} {what}")

    # ---- actions

    def _value(self) -> bytes:
        self.serial += 1
        return (
            b""
            if self.rng.random() < 0.1
            else b"%d:" % self.serial + b"x" * self.rng.choice((0, 200))
        )

    def _tag(self, name: str, seq: int) -> None:
        self.engine.frame_builder.add_commit_waiter(self.publisher, self.serial)
        self.unanswered[self.serial] = self.oracle.frame
        self.tags[self.serial] = (name, seq)

    def write(self) -> None:
        client = self.rng.choice(OWNERS)
        key = self.rng.choice(KEYS)
        value = self._value()
        owner = self.engine.exclusive.publish(client, Message(value, b"", key), self.loop.now)
        seq = int(owner.next_seq) - 1
        model = self.model[client]
        if seq < model.next:
            raise Violation(f"sequence {seq} of {client} is used twice")
        model.put(key, seq, value, self.loop.now)
        self.writes[(client, seq)] = (key, value, self.oracle.frame)
        self._tag(client, seq)
        self._count("values written")
        self._log_step(f"{client} {key!r} is {value[:8]!r}, {seq}")

    def subscribe(self) -> None:
        client = self.rng.choice(OWNERS)
        reader = SimulatedReader(self, client, self.rng.choice((1, 2, 20)))
        if client in self.readers:
            self.left.append(self.readers[client])
        self.readers[client] = reader
        self.engine.exclusive.subscribe(reader, client, self.loop.now)
        self._log_step(f"{client} subscribes")
        self._count("subscribes")

    def unsubscribe(self) -> None:
        if self.readers:
            client = self.rng.choice(list(self.readers))
            reader = self.readers.pop(client)
            self.left.append(reader)
            self.engine.exclusive.unsubscribe(reader)
            self._log_step(f"{client} leaves")

    def ack(self) -> None:
        readers_with_values = [reader for reader in self.readers.values() if reader.holds]
        if readers_with_values:
            reader = self.rng.choice(readers_with_values)
            self._ack(
                reader, 0 if self.rng.random() < 0.8 else self.rng.randrange(len(reader.holds))
            )

    def ack_late(self) -> None:
        """Acknowledge a value after its reader has unsubscribed or subscribed again."""
        self.left = [reader for reader in self.left if reader.holds]
        if self.left:
            reader = self.rng.choice(self.left)
            self._ack(reader, self.rng.randrange(len(reader.holds)))
            self._count("late acknowledgements")

    def _ack(self, reader: SimulatedReader, nth: int) -> None:
        seq, epoch, rewinds = reader.holds.pop(nth)
        owner = self.engine.exclusive.owners.get(reader.client)
        same = (
            owner is not None
            and reader.last_owner is owner
            and rewinds == self.rewinds[reader.client]
        )
        before = (0, 0) if owner is None else (int(owner.acked), int(owner.acked_at))
        self.engine.exclusive.ack(reader, seq, epoch, self.loop.now)
        if same and seq in self.model[reader.client].waits():
            self.model[reader.client].acked.add(seq)
        if owner is not None:
            after = (int(owner.acked), int(owner.acked_at))
            if after[0] < before[0] or after[1] != (
                int(self.loop.now * 1000.0) if same else before[1]
            ):
                raise Violation(
                    f"{reader.client} acks {seq}, and its state goes from {before} to {after}"
                )
        self._log_step(f"{reader.client} acks {seq}")
        self._count("acknowledgements")

    def seek(self) -> None:
        owner = self.engine.exclusive.owners.get(self.rng.choice(OWNERS))
        if owner is None:
            return
        after_seq = self.rng.randrange(int(owner.next_seq) + 1)
        model = self.model[owner.client]
        for key, (seq, value, _) in list(model.last.items()):
            if not value and seq in model.acked and owner.slot_of_sequence(seq) < 0:
                del model.last[key]  # an acknowledged tombstone does not come back
        self.engine.exclusive.seek(owner, after_seq, self.loop.now)
        self.rewinds[owner.client] += 1
        model.acked = {seq for seq, _, _ in model.last.values() if seq <= after_seq}
        self._log_step(f"{owner.client} seeks after {after_seq}")
        self._count("rewinds")

    def purge(self) -> None:
        owner = self.engine.exclusive.owners.get(self.rng.choice(OWNERS))
        if owner is not None:
            self.engine.exclusive.purge(owner, self.loop.now)
            self.model[owner.client].last = {}
            self.model[owner.client].acked = set()
            self._log_step(f"{owner.client} is purged")
            self._count("purges")

    def publish(self) -> None:
        queue = self.engine.lifecycle.get_or_create_queue(SHARED)
        key = self.rng.choice(KEYS)
        value = self._value()
        partition = queue.partitions[0]
        before = int(partition.next_seq)
        self.engine.publishing.publish(queue, Message(value, b"", key), None, 0)
        model = self.model[SHARED]
        if value:
            model.put(key, before, value, self.loop.now)
            self._tag(SHARED, before)
        else:
            model.drop(key)
        self.writes[(SHARED, before)] = (key, value, self.oracle.frame)
        self._log_step(f"shared {key!r} is {value[:8]!r}, {before}")
        self._count("messages published")

    def join(self) -> None:
        if len(self.consumers) < 4:
            consumer = SharedConsumer(self, f"h{self.steps}")
            self.consumers.append(consumer)
            self._join(consumer, self.rng.choice(GROUPS))
            self._log_step(f"{consumer.client} joins")

    def _join(self, consumer: SharedConsumer, group: str) -> None:
        """Add a consumer; a new group has all stored values before it."""
        queue = self.engine.lifecycle.get_or_create_queue(SHARED)
        model = self.model[SHARED]
        model.groups.setdefault(group, {seq for seq, _, _ in model.last.values()})
        self.engine.dispatch.join(self.engine.lifecycle.get_or_create_group(queue, group), consumer)

    def leave(self) -> None:
        if self.consumers:
            consumer = self.consumers.pop(self.rng.randrange(len(self.consumers)))
            self.engine.dispatch.leave(consumer)
            self._log_step(f"{consumer.client} parts")

    def seek_group(self) -> None:
        queue = self.engine.queues.get(SHARED)
        if queue is not None and queue.groups:
            group = self.rng.choice(list(queue.groups.values()))
            start_sequence = self.rng.randrange(int(queue.partitions[0].next_seq) + 2)
            self._log_step(f"{group.name} seeks to {start_sequence}")
            self.engine.lifecycle.seek_group(group, [start_sequence])
            model = self.model[SHARED]
            model.groups[group.name] = {
                seq for seq, _, _ in model.last.values() if seq >= start_sequence
            }
            self._count("seeks")

    def drop_group(self) -> None:
        queue = self.engine.queues.get(SHARED)
        if queue is not None and queue.groups:
            group = self.rng.choice(list(queue.groups.values()))
            self._log_step(f"group {group.name} is deleted")
            self.engine.lifecycle.delete_group(group)
            del self.model[SHARED].groups[group.name]
            self.consumers = [one for one in self.consumers if one.group is not None]
            self._count("groups dropped")

    def settle(self) -> None:
        consumers = [consumer for consumer in self.consumers if consumer.holds]
        if not consumers:
            return
        consumer = self.rng.choice(consumers)
        lease = consumer.holds.pop(self.rng.randrange(len(consumer.holds)))
        what = self.rng.choice(("ack", "ack", "ack", "nack", "release"))
        self._log_step(f"{consumer.client} {what} {lease.seq}")
        if what == "ack":
            self._settle(lease)
        elif what == "nack":
            self.engine.settlement.nack(lease, 1.0, "")
        else:
            self.engine.settlement.release(lease)
        self._count("settled")

    def _settle(self, lease: Lease) -> None:
        self.model[SHARED].groups[lease.cursor.group.name].discard(int(lease.seq))
        self.engine.settlement.ack(lease)

    def pass_time(self) -> None:
        self._advance(self.rng.choice((0.01, 0.1, 1.0, 5.0, 60.0, 700.0)))

    def _advance(self, seconds: float) -> None:
        if seconds >= SWEEP:
            self.commit_loop.end_turn()  # no turn takes so long
        until = self.loop.now + seconds
        while True:
            due = self.loop.next_timer()
            if due == 0.0 or due > until:
                break
            self.loop.now = max(self.loop.now, due)
            self.loop.fire_timers()
        self.loop.now = until

    def hold(self) -> None:
        self.store.hold()

    def release(self) -> None:
        self.store.release(self.rng.choice((1, 2, -1)))

    def crash(self) -> None:
        keep = self.rng.randrange(self.store.count_unsynced() + 1)
        self._log_step(f"CRASH, keeps {keep} of {self.store.count_unsynced()}")
        self._count("crashes")
        self.store = self.store.crash(keep)
        self._reopen()

    def restart(self) -> None:
        self._log_step("restart")
        self._count("restarts")
        self.commit_loop.close()
        self.oracle.durable = self.oracle.frames
        self.frames[self.oracle.frames] = self._copies()
        self._reopen()

    def _reopen(self) -> None:
        self.loop.clear()
        self.readers = {}
        self.left = []
        self.consumers = []
        self.unanswered = {}
        self._open()
        faults: list[str] = []
        for number in sorted(self.frames, reverse=True):
            if number >= self.oracle.durable:
                self.model = {name: values.copy() for name, values in self.frames[number].items()}
                error = self._differs()
                if not error:
                    break
                faults.append(f"{number}: {error}")
        else:
            raise Violation(
                f"no frame since {self.oracle.durable} has the recovered state: {faults}"
            )
        for name, seq in self.accepted.items():
            owner = self.engine.exclusive.owners.get(name)
            if owner is not None and owner.next_seq <= seq:
                raise Violation(f"{name} has lost {seq}, which was acknowledged")
        self.oracle.frames = self.oracle.answered = self.oracle.durable = max(self.frames)
        self.frames = {self.oracle.frames: self._copies()}

    # ---- events of the engine

    def receipt(self, tag: int) -> None:
        if self.unanswered.pop(tag) > self.oracle.answered:
            raise Violation(f"the publish {tag} is acknowledged before its commit")
        name, seq = self.tags.pop(tag)
        self.accepted[name] = max(seq, self.accepted.get(name, 0))

    def on_delivery(self, reader: SimulatedReader, seq: int, message: Message) -> None:
        if reader.epoch != reader.seen_epoch:
            reader.seen_epoch = int(reader.epoch)
            reader.highest = 0
        if seq <= reader.highest:
            raise Violation(f"{reader.client} gets {seq} after {reader.highest}")
        reader.highest = seq
        key, value, frame = self.writes[(reader.client, seq)]
        if (message.key, message.payload) != (key, value):
            raise Violation(f"{reader.client} gets {message.payload[:20]!r} as {seq}")
        if frame > self.oracle.answered:
            raise Violation(f"{reader.client} gets {seq} before its commit")
        model = self.model[reader.client]
        if model.last.get(key, (0, b"", 0.0))[0] != seq:
            raise Violation(f"{reader.client} gets {seq}, which was replaced")
        if seq in model.acked:
            raise Violation(f"{reader.client} gets {seq} again, which it has acknowledged")
        reader.holds.append((seq, int(reader.epoch), self.rewinds[reader.client]))
        self._count("values delivered")

    def on_shared_delivery(self, consumer: SharedConsumer, seq: int, message: Message) -> None:
        key, value, frame = self.writes[(SHARED, seq)]
        if (message.key, message.payload) != (key, value) or frame > self.oracle.answered:
            raise Violation(f"{seq} is delivered as {message.payload[:20]!r}")
        if value and self.model[SHARED].last.get(key, (-1, b"", 0.0))[0] != seq:
            raise Violation(f"{seq} is delivered, and was replaced")
        group = consumer.group
        if value and (group is None or seq not in self.model[SHARED].groups[group.name]):
            raise Violation(f"{seq} is delivered to {consumer.client}, whose group has settled it")
        self._count("messages delivered")

    # ---- checks

    def check(self) -> None:
        error = self._differs()
        if error:
            raise Violation(error)
        ledger = verify(self.engine.queues)
        if ledger:
            raise Violation(ledger[0])

    def _differs(self) -> str:
        for client in OWNERS:
            owner = self.engine.exclusive.owners.get(client)
            live: dict[int, bytes] = {}
            done: set[int] = set()
            slot = owner.slot_after(0) if owner is not None else -1
            while owner is not None and slot >= 0:
                seq = int(owner.seq(slot))
                if (client, seq) not in self.writes:
                    return f"{client} has {seq}, which was never written"
                live[seq] = self.writes[(client, seq)][1]
                if seq <= owner.acked or seq in owner.acked_out_of_order:
                    done.add(seq)
                slot = owner.slot_after(seq)
            following = int(
                owner.next_seq if owner is not None else self.engine.exclusive.first_seq
            )
            if following < self.model[client].next:
                return f"{client} continues with {following}, before {self.model[client].next}"
            if (
                owner is not None
                and not {int(seq) for seq in owner.acked_out_of_order} <= live.keys()
            ):
                return (
                    f"{client} has acknowledged {sorted(owner.acked_out_of_order)} out of order, "
                    "of which some are deleted"
                )
            if owner is not None and any(seq <= owner.acked for seq in owner.acked_out_of_order):
                return (
                    f"{client} has {sorted(owner.acked_out_of_order)} out of order, "
                    f"up to {owner.acked} all is acknowledged"
                )
            reader = self.readers.get(client)
            if reader is not None and not reader.in_flight.keys() <= live.keys():
                return (
                    f"{client} has {sorted(reader.in_flight)} in flight, of which some are deleted"
                )
            swept = self.opened_at + SWEEP + 2.0 < self.loop.now
            error = self.model[client].matches(live, done, self.loop.now, self.retention, swept)
            if error:
                return f"{client}: {error}"
        return self._shared_differs()

    def _shared_differs(self) -> str:
        queue = self.engine.queues.get(SHARED)
        live: dict[int, bytes] = {}
        if queue is not None:
            partition = queue.partitions[0]
            seq = int(partition.first_live(0))
            while seq < partition.next_seq:
                value = self.writes[(SHARED, seq)][1]
                if value:  # a tombstone is being delivered
                    live[seq] = value
                seq = int(partition.first_live(seq + 1))
        model = self.model[SHARED]
        expected = {seq: value for seq, value, _ in model.last.values()}
        if live != expected:
            return f"shared: stored {live}, expected {expected}"
        groups = {} if queue is None else queue.groups
        waits = {
            name: {seq for seq in live if not group.cursors[0].is_settled(seq)}
            for name, group in groups.items()
        }
        return (
            ""
            if waits == model.groups
            else f"groups have unsettled {waits}, expected {model.groups}"
        )

    def step(self) -> None:
        self.steps += 1
        self.engine.now = self.loop.now
        what = self.rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        getattr(self, what)()
        self.engine.now = self.loop.now
        if self.rng.random() < 0.8:
            self.commit_loop.end_turn()
            for _ in range(self.rng.choice((0, 1, 2, 50))):
                if not self.loop.run_one():
                    break
        self.check()

    def drain(self) -> None:
        """Subscribe all owners: they get exactly the last unacknowledged value of each key."""
        self.wait_idle()
        for client in OWNERS:
            waits = self.model[client].waits()
            reader = self.readers[client] = SimulatedReader(self, client, 1000)
            self.engine.exclusive.subscribe(reader, client, self.loop.now)
            self._run_until_idle()
            given = {seq for seq, _, _ in reader.holds}
            missing = {seq for seq in waits if seq not in given and self._is_kept(client, seq)}
            if missing or given - waits.keys():
                raise Violation(f"{client} should get {sorted(waits)}, and got {sorted(given)}")
            while reader.holds:
                self._ack(reader, 0)
            self._run_until_idle()
            owner = self.engine.exclusive.owners[client]
            if owner.count_unacked():
                raise Violation(
                    f"{client} has acknowledged all, and {owner.count_unacked()} are left"
                )
        late = SharedConsumer(self, "late")
        late.prefetch = 1000
        self._join(late, f"late-{self.steps}")
        self._run_until_idle()
        got = {int(lease.seq) for lease in late.holds}
        wanted = {seq for seq, _, _ in self.model[SHARED].last.values()}
        if got != wanted:
            raise Violation(f"a late group gets {sorted(got)}, expected {sorted(wanted)}")
        self._count("rests")
        self.check()

    def wait_idle(self) -> None:
        """Stop all writes: connected clients get all their values as fast as they acknowledge."""
        self.store.release(-1)
        self._run_for_a_while()
        while any(reader.holds for reader in self.readers.values()):
            for reader in self.readers.values():
                while reader.holds:
                    self._ack(reader, 0)
            self._run_for_a_while()
        for client in self.readers:
            waits = [seq for seq in self.model[client].waits() if self._is_kept(client, seq)]
            if waits:
                raise Violation(
                    f"{client} is online with capacity, and does not get {sorted(waits)}"
                )
        while any(consumer.holds for consumer in self.consumers):
            for consumer in self.consumers:
                while consumer.holds:
                    self._settle(consumer.holds.pop(0))
            self._run_for_a_while()
        for consumer in self.consumers:
            if consumer.group is not None:
                waits_on = (
                    self.model[SHARED].groups[consumer.group.name]
                    - consumer.group.cursors[0].leases.keys()
                )
                if waits_on:  # and does not wait for a retry
                    raise Violation(
                        f"{consumer.client} is online with capacity, "
                        f"and does not get {sorted(waits_on)}"
                    )
        self._log_step("idle")
        self._count("rests of those present")

    def _run_for_a_while(self) -> None:
        """Run until released messages are delivered again."""
        self._run_until_idle()
        self._advance(2.0)
        self._run_until_idle()

    def _is_kept(self, client: str, seq: int) -> bool:
        owner = self.engine.exclusive.owners.get(client)
        return owner is not None and owner.slot_of_sequence(seq) >= 0

    def _run_until_idle(self) -> None:
        self.engine.now = self.loop.now
        self.commit_loop.end_turn()
        calls = 0
        while self.loop.run_one():
            calls += 1
            if calls > MAX_CALLS:
                raise Violation("the world does not become idle")


ACTIONS: Final = {
    "write": 40,
    "subscribe": 6,
    "unsubscribe": 3,
    "ack": 30,
    "ack_late": 2,
    "seek": 1,
    "purge": 0.5,
    "publish": 20,
    "join": 4,
    "leave": 2,
    "settle": 20,
    "seek_group": 1,
    "drop_group": 0.5,
    "pass_time": 12,
    "hold": 3,
    "release": 6,
    "crash": 2,
    "restart": 0.4,
    "wait_idle": 0.5,
}


def run(seed: int, steps: int) -> CompactedWorld:
    """Run one world; a violation is raised with the seed and the last log lines."""
    world = CompactedWorld(seed)
    try:
        for _ in range(steps):
            world.step()
        world.drain()
    except Exception as error:
        tail = "\n".join(world.log[-60:])
        raise Violation(f"compacted, seed {seed}, step {world.steps}: {error}\n{tail}") from error
    return world
