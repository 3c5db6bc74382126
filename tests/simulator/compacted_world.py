"""Compacted queues, exclusive and shared, while everything else happens; and a model that knows what must come of it.

The model is a dict: the last value of each key, and which of them its owner has acknowledged, or each group has still
to get. It is copied with every frame that goes to the store, so after a crash the engine must be in the state of one of
them, and not of one from before what was promised. From time to time all is left to come to rest: then whoever is there
must have got all there is for it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, Final

from sluice.message import Message
from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.ledger import verify
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.ports import Consumer, OwnerSubscriber, Publisher
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
MAX_CALLS: Final = 20_000  # until all is quiet, or it never will be


class Values:
    """What is kept for one owner, or in the shared queue: by key its sequence, value and time."""

    def __init__(self) -> None:
        self.next = 1
        self.last: dict[bytes, tuple[int, bytes, float]] = {}
        self.acked: set[int] = set()
        self.groups: dict[
            str, set[int]
        ] = {}  # what each group has not acknowledged; tombstones are not told

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
        """How what is kept differs from this; the empty string when it does not. Tombstones that were heard of are
        nothing, and what is old enough may be gone; what has been so since the last sweep must be, if there was one."""
        mine = {
            seq: value for seq, value, _ in self.last.values() if value or seq not in self.acked
        }
        theirs = {seq: value for seq, value in live.items() if value or seq not in done}
        old = {seq for seq, _, at in self.last.values() if retention and at + retention < now + 1.0}
        if {seq: value for seq, value in theirs.items() if seq in mine} != theirs:
            return f"kept {theirs}, and should be {mine}"
        kept_on = {
            seq
            for seq, _, at in self.last.values()
            if retention and swept and seq in live and at + retention + SWEEP + 2.0 < now
        }
        if kept_on:
            return f"{sorted(kept_on)} are older than the retention, and are kept"
        missing = mine.keys() - theirs.keys() - old
        if missing:
            return f"{missing} are missing: kept {theirs}, and should be {mine}"
        wrong = {seq for seq in theirs if (seq in done) != (seq in self.acked)}
        return f"acknowledged {sorted(done)}, and should be {sorted(self.acked)}" if wrong else ""


class SimulatedReader(OwnerSubscriber):
    def __init__(self, world: CompactedWorld, client: str, window: int) -> None:
        super().__init__()
        self.world = world
        self.client = client
        self.window = window
        self.holds: list[
            tuple[int, int, int]
        ] = []  # sequence, epoch, and how often the owner was rewound before
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
    """Tells the world when a frame leaves, so that it remembers how things stood."""

    def __init__(self, store: MemoryStore, oracle: Oracle, leaves: Callable[[], None]) -> None:
        super().__init__(store, oracle)
        self.leaves = leaves

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> None:
        super().commit(frame, count, sync, done)
        self.leaves()


class CompactedWorld:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.loop = Loop()
        self.oracle = Oracle()
        self.author = ValuePublisher(self)
        self.steps = 0
        self.serial = 0
        self.counts: dict[str, int] = {}
        self.log: list[str] = []
        self.model: dict[str, Values] = {name: Values() for name in (*OWNERS, SHARED)}
        self.frames: dict[int, dict[str, Values]] = {0: self._copies()}
        self.writes: dict[tuple[str, int], tuple[bytes, bytes, int]] = {}  # key, value and frame
        self.unanswered: dict[int, int] = {}  # frame by tag
        self.accepted: dict[
            str, int
        ] = {}  # the highest sequence of each owner that its writer was told of
        self.tags: dict[int, tuple[str, int]] = {}
        self.readers: dict[str, SimulatedReader] = {}
        self.left: list[SimulatedReader] = []  # who have unsubscribed, and may still acknowledge
        self.rewinds: dict[str, int] = dict.fromkeys(OWNERS, 0)
        self.consumers: list[SharedConsumer] = []
        self.retention = self.chance.choice((0.0, RETENTION))
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
            segment_bytes=self.chance.choice((1500, 4000, 20_000)),
            snapshot_bytes=self.chance.choice((3000, 10_000)),
        )

    def _open(self) -> None:
        self.engine = Engine(self._rules_for, self.chance.random, self.chance.choice((0, 1 << 20)))
        rules = self.engine.exclusive.rules
        rules.retention = self.retention
        rules.sweep_interval = SWEEP
        self.opened_at = self.loop.now
        rules.cache_bytes = self.chance.choice((0, 300, 1 << 20))
        self.runner = CommitLoop(
            self.engine,
            SnapshotCopier(self.store, self.oracle, self._leaves),
            self.loop.clock,
            self.loop.call_later,
            lambda: None,
            lambda alerts, warnings: self._on_warnings(warnings),
            self.chance.choice((0.0, 0.01)),
        )
        self.runner.snapshot_batch_size = self.chance.choice((1, 20, 100_000))
        self.runner.open(lambda name, text: rules_of(name, json.loads(text)))

    def _rules_for(self, name: str) -> tuple[QueueRules, str]:
        return rules_of(name, self.settings), json.dumps(self.settings)

    def _on_warnings(self, warnings: list[str]) -> None:
        if warnings:
            raise Violation(warnings[0])

    def _copies(self) -> dict[str, Values]:
        return {name: values.copy() for name, values in self.model.items()}

    def _leaves(self) -> None:
        self.frames[self.oracle.frames] = self._copies()
        for number in [number for number in self.frames if number < self.oracle.durable]:
            del self.frames[number]

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _log_step(self, what: str) -> None:
        self.log.append(f"{self.steps} {self.loop.now - 1.8e9:.3f} {what}")

    # ---- what people do

    def _value(self) -> bytes:
        self.serial += 1
        return (
            b""
            if self.chance.random() < 0.1
            else b"%d:" % self.serial + b"x" * self.chance.choice((0, 200))
        )

    def _tag(self, name: str, seq: int) -> None:
        self.engine.frame_builder.add_commit_waiter(self.author, self.serial)
        self.unanswered[self.serial] = self.oracle.frame
        self.tags[self.serial] = (name, seq)

    def write(self) -> None:
        client = self.chance.choice(OWNERS)
        key = self.chance.choice(KEYS)
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
        client = self.chance.choice(OWNERS)
        taker = SimulatedReader(self, client, self.chance.choice((1, 2, 20)))
        if client in self.readers:
            self.left.append(self.readers[client])
        self.readers[client] = taker
        self.engine.exclusive.subscribe(taker, client, self.loop.now)
        self._log_step(f"{client} subscribes")
        self._count("subscribes")

    def unsubscribe(self) -> None:
        if self.readers:
            client = self.chance.choice(list(self.readers))
            taker = self.readers.pop(client)
            self.left.append(taker)
            self.engine.exclusive.unsubscribe(taker)
            self._log_step(f"{client} leaves")

    def ack(self) -> None:
        takers = [taker for taker in self.readers.values() if taker.holds]
        if takers:
            taker = self.chance.choice(takers)
            self._ack(
                taker, 0 if self.chance.random() < 0.8 else self.chance.randrange(len(taker.holds))
            )

    def ack_late(self) -> None:
        """Of who has unsubscribed, or subscribed again: what was on its way then is acknowledged all the same."""
        self.left = [taker for taker in self.left if taker.holds]
        if self.left:
            taker = self.chance.choice(self.left)
            self._ack(taker, self.chance.randrange(len(taker.holds)))
            self._count("late acknowledgements")

    def _ack(self, taker: SimulatedReader, nth: int) -> None:
        seq, epoch, rewinds = taker.holds.pop(nth)
        owner = self.engine.exclusive.owners.get(taker.client)
        same = (
            owner is not None
            and taker.last_owner is owner
            and rewinds == self.rewinds[taker.client]
        )
        before = (0, 0) if owner is None else (int(owner.acked), int(owner.acked_at))
        self.engine.exclusive.ack(taker, seq, epoch, self.loop.now)
        if same and seq in self.model[taker.client].waits():
            self.model[taker.client].acked.add(seq)
        if owner is not None:
            after = (int(owner.acked), int(owner.acked_at))
            if after[0] < before[0] or after[1] != (
                int(self.loop.now * 1000.0) if same else before[1]
            ):
                raise Violation(
                    f"{taker.client} acks {seq}, and its state goes from {before} to {after}"
                )
        self._log_step(f"{taker.client} acks {seq}")
        self._count("acknowledgements")

    def seek(self) -> None:
        owner = self.engine.exclusive.owners.get(self.chance.choice(OWNERS))
        if owner is None:
            return
        behind = self.chance.randrange(int(owner.next_seq) + 1)
        model = self.model[owner.client]
        for key, (seq, value, _) in list(model.last.items()):
            if not value and seq in model.acked and owner.slot_of_sequence(seq) < 0:
                del model.last[key]  # a tombstone that was heard of does not come back
        self.engine.exclusive.seek(owner, behind, self.loop.now)
        self.rewinds[owner.client] += 1
        model.acked = {seq for seq, _, _ in model.last.values() if seq <= behind}
        self._log_step(f"{owner.client} goes behind {behind}")
        self._count("rewinds")

    def purge(self) -> None:
        owner = self.engine.exclusive.owners.get(self.chance.choice(OWNERS))
        if owner is not None:
            self.engine.exclusive.purge(owner, self.loop.now)
            self.model[owner.client].last = {}
            self.model[owner.client].acked = set()
            self._log_step(f"{owner.client} is purged")
            self._count("purges")

    def publish(self) -> None:
        queue = self.engine.get_or_create_queue(SHARED)
        key = self.chance.choice(KEYS)
        value = self._value()
        partition = queue.partitions[0]
        before = int(partition.next_seq)
        self.engine.publish(queue, Message(value, b"", key), None, 0)
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
            self._join(consumer, self.chance.choice(GROUPS))
            self._log_step(f"{consumer.client} joins")

    def _join(self, consumer: SharedConsumer, group: str) -> None:
        """A group that is new has all there is before it."""
        queue = self.engine.get_or_create_queue(SHARED)
        model = self.model[SHARED]
        model.groups.setdefault(group, {seq for seq, _, _ in model.last.values()})
        self.engine.join(queue, self.engine.get_or_create_group(queue, group), consumer)

    def part(self) -> None:
        if self.consumers:
            consumer = self.consumers.pop(self.chance.randrange(len(self.consumers)))
            self.engine.leave(consumer)
            self._log_step(f"{consumer.client} parts")

    def seek_group(self) -> None:
        queue = self.engine.queues.get(SHARED)
        if queue is not None and queue.groups:
            group = self.chance.choice(list(queue.groups.values()))
            floor = self.chance.randrange(int(queue.partitions[0].next_seq) + 2)
            self._log_step(f"{group.name} goes to {floor}")
            self.engine.seek_group(group, [floor])
            model = self.model[SHARED]
            model.groups[group.name] = {seq for seq, _, _ in model.last.values() if seq >= floor}
            self._count("seeks")

    def drop_group(self) -> None:
        queue = self.engine.queues.get(SHARED)
        if queue is not None and queue.groups:
            group = self.chance.choice(list(queue.groups.values()))
            self._log_step(f"group {group.name} is dropped")
            self.engine.delete_group(group)
            del self.model[SHARED].groups[group.name]
            self.consumers = [hand for hand in self.consumers if hand.group is not None]
            self._count("groups dropped")

    def settle(self) -> None:
        consumers = [consumer for consumer in self.consumers if consumer.holds]
        if not consumers:
            return
        consumer = self.chance.choice(consumers)
        lease = consumer.holds.pop(self.chance.randrange(len(consumer.holds)))
        what = self.chance.choice(("ack", "ack", "ack", "nack", "release"))
        self._log_step(f"{consumer.client} {what} {lease.seq}")
        if what == "ack":
            self._settle(lease)
        elif what == "nack":
            self.engine.nack(lease, 1.0, "")
        else:
            self.engine.release(lease)
        self._count("settled")

    def _settle(self, lease: Lease) -> None:
        self.model[SHARED].groups[lease.cursor.group.name].discard(int(lease.seq))
        self.engine.ack(lease)

    def pass_time(self) -> None:
        self._pass(self.chance.choice((0.01, 0.1, 1.0, 5.0, 60.0, 700.0)))

    def _pass(self, seconds: float) -> None:
        if seconds >= SWEEP:
            self.runner.end_turn()  # no turn takes so long
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
        self.store.release(self.chance.choice((1, 2, -1)))

    def crash(self) -> None:
        keep = self.chance.randrange(self.store.unsynced() + 1)
        self._log_step(f"CRASH, keeps {keep} of {self.store.unsynced()}")
        self._count("crashes")
        self.store = self.store.crash(keep)
        self._start_again()

    def restart(self) -> None:
        self._log_step("restart")
        self._count("restarts")
        self.runner.close()
        self.oracle.durable = self.oracle.frames
        self.frames[self.oracle.frames] = self._copies()
        self._start_again()

    def _start_again(self) -> None:
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
                fault = self._differs()
                if not fault:
                    break
                faults.append(f"{number}: {fault}")
        else:
            raise Violation(f"no frame since {self.oracle.durable} was as things are now: {faults}")
        for name, seq in self.accepted.items():
            owner = self.engine.exclusive.owners.get(name)
            if owner is not None and owner.next_seq <= seq:
                raise Violation(f"{name} has lost {seq}, which was accepted")
        self.oracle.frames = self.oracle.answered = self.oracle.durable = max(self.frames)
        self.frames = {self.oracle.frames: self._copies()}

    # ---- what the engine tells

    def receipt(self, tag: int) -> None:
        if self.unanswered.pop(tag) > self.oracle.answered:
            raise Violation(f"the writer of {tag} is told that it is kept, and it is not")
        name, seq = self.tags.pop(tag)
        self.accepted[name] = max(seq, self.accepted.get(name, 0))

    def on_delivery(self, taker: SimulatedReader, seq: int, message: Message) -> None:
        if taker.epoch != taker.seen_epoch:
            taker.seen_epoch = int(taker.epoch)
            taker.highest = 0
        if seq <= taker.highest:
            raise Violation(f"{taker.client} is given {seq} behind {taker.highest}")
        taker.highest = seq
        key, value, frame = self.writes[(taker.client, seq)]
        if (message.key, message.payload) != (key, value):
            raise Violation(f"{taker.client} is given {message.payload[:20]!r} as {seq}")
        if frame > self.oracle.answered:
            raise Violation(f"{taker.client} is given {seq} before it is kept")
        model = self.model[taker.client]
        if model.last.get(key, (0, b"", 0.0))[0] != seq:
            raise Violation(f"{taker.client} is given {seq}, which was replaced")
        if seq in model.acked:
            raise Violation(f"{taker.client} is given {seq} again, which it has acknowledged")
        taker.holds.append((seq, int(taker.epoch), self.rewinds[taker.client]))
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

    # ---- judging

    def check(self) -> None:
        fault = self._differs()
        if fault:
            raise Violation(fault)
        ledger = verify(self.engine)
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
                    return f"{client} has {seq}, which nobody wrote"
                live[seq] = self.writes[(client, seq)][1]
                if seq <= owner.acked or seq in owner.acked_out_of_order:
                    done.add(seq)
                slot = owner.slot_after(seq)
            following = int(
                owner.next_seq if owner is not None else self.engine.exclusive.first_seq
            )
            if following < self.model[client].next:
                return f"{client} goes on with {following}, behind {self.model[client].next}"
            if (
                owner is not None
                and not {int(seq) for seq in owner.acked_out_of_order} <= live.keys()
            ):
                return f"{client} has acknowledged {sorted(owner.acked_out_of_order)} out of turn, of which some are gone"
            if owner is not None and any(seq <= owner.acked for seq in owner.acked_out_of_order):
                return f"{client} has {sorted(owner.acked_out_of_order)} out of turn, up to {owner.acked} all is done"
            taker = self.readers.get(client)
            if taker is not None and not taker.in_flight.keys() <= live.keys():
                return (
                    f"{client} has {sorted(taker.in_flight)} on their way, of which some are gone"
                )
            swept = self.opened_at + SWEEP + 2.0 < self.loop.now
            fault = self.model[client].matches(live, done, self.loop.now, self.retention, swept)
            if fault:
                return f"{client}: {fault}"
        return self._shared_differs()

    def _shared_differs(self) -> str:
        queue = self.engine.queues.get(SHARED)
        live: dict[int, bytes] = {}
        if queue is not None:
            partition = queue.partitions[0]
            seq = int(partition.first_live(0))
            while seq < partition.next_seq:
                value = self.writes[(SHARED, seq)][1]
                if value:  # a tombstone is on its way to a group
                    live[seq] = value
                seq = int(partition.first_live(seq + 1))
        model = self.model[SHARED]
        expected = {seq: value for seq, value, _ in model.last.values()}
        if live != expected:
            return f"shared: kept {live}, and should be {expected}"
        groups = {} if queue is None else queue.groups
        waits = {
            name: {seq for seq in live if not group.cursors[0].is_settled(seq)}
            for name, group in groups.items()
        }
        return (
            ""
            if waits == model.groups
            else f"groups wait for {waits}, and should for {model.groups}"
        )

    def step(self) -> None:
        self.steps += 1
        self.engine.now = self.loop.now
        what = self.chance.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        getattr(self, what)()
        self.engine.now = self.loop.now
        if self.chance.random() < 0.8:
            self.runner.end_turn()
            for _ in range(self.chance.choice((0, 1, 2, 50))):
                if not self.loop.run_one():
                    break
        self.check()

    def drain(self) -> None:
        """Everybody is there and takes what there is: exactly the last value of each key that was not acknowledged."""
        self.wait_idle()
        for client in OWNERS:
            waits = self.model[client].waits()
            taker = self.readers[client] = SimulatedReader(self, client, 1000)
            self.engine.exclusive.subscribe(taker, client, self.loop.now)
            self._quiet()
            given = {seq for seq, _, _ in taker.holds}
            missing = {seq for seq in waits if seq not in given and self._is_kept(client, seq)}
            if missing or given - waits.keys():
                raise Violation(
                    f"{client} waits for {sorted(waits)}, and was given {sorted(given)}"
                )
            while taker.holds:
                self._ack(taker, 0)
            self._quiet()
            owner = self.engine.exclusive.owners[client]
            if owner.count_unacked():
                raise Violation(f"{client} has acknowledged all, and {owner.count_unacked()} wait")
        late = SharedConsumer(self, "late")
        late.prefetch = 1000
        self._join(late, f"late-{self.steps}")
        self._quiet()
        got = {int(lease.seq) for lease in late.holds}
        wanted = {seq for seq, _, _ in self.model[SHARED].last.values()}
        if got != wanted:
            raise Violation(f"a late group gets {sorted(got)}, and there are {sorted(wanted)}")
        self._count("rests")
        self.check()

    def wait_idle(self) -> None:
        """Nobody comes, and nothing is written: who is there gets all there is for it, as fast as it takes it."""
        self.store.release(-1)
        self._rest_a_while()
        while any(taker.holds for taker in self.readers.values()):
            for taker in self.readers.values():
                while taker.holds:
                    self._ack(taker, 0)
            self._rest_a_while()
        for client in self.readers:
            waits = [seq for seq in self.model[client].waits() if self._is_kept(client, seq)]
            if waits:
                raise Violation(f"{client} is there and has room, and {sorted(waits)} wait for it")
        while any(consumer.holds for consumer in self.consumers):
            for consumer in self.consumers:
                while consumer.holds:
                    self._settle(consumer.holds.pop(0))
            self._rest_a_while()
        for consumer in self.consumers:
            if consumer.group is not None:
                waits_on = (
                    self.model[SHARED].groups[consumer.group.name]
                    - consumer.group.cursors[0].leases.keys()
                )
                if waits_on:  # and not for a retry
                    raise Violation(
                        f"{consumer.client} is there and has room, and {sorted(waits_on)} wait"
                    )
        self._log_step("rest")
        self._count("rests of those present")

    def _rest_a_while(self) -> None:
        """Until what was given back has come again."""
        self._quiet()
        self._pass(2.0)
        self._quiet()

    def _is_kept(self, client: str, seq: int) -> bool:
        owner = self.engine.exclusive.owners.get(client)
        return owner is not None and owner.slot_of_sequence(seq) >= 0

    def _quiet(self) -> None:
        self.engine.now = self.loop.now
        self.runner.end_turn()
        calls = 0
        while self.loop.run_one():
            calls += 1
            if calls > MAX_CALLS:
                raise Violation("it does not come to rest")


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
    "part": 2,
    "settle": 20,
    "seek_group": 1,
    "drop_group": 0.5,
    "pass_time": 12,
    "hold": 3,
    "release": 6,
    "crash": 2,
    "restart": 0.4,
    "rest": 0.5,
}


def run(seed: int, steps: int) -> CompactedWorld:
    """One world; a violation is raised with the seed and the last things that happened."""
    world = CompactedWorld(seed)
    try:
        for _ in range(steps):
            world.step()
        world.drain()
    except Exception as fault:
        tail = "\n".join(world.log[-60:])
        raise Violation(f"compacted, seed {seed}, step {world.steps}: {fault}\n{tail}") from fault
    return world
