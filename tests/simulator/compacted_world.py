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
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.engine import Engine
from sluice.queues.model.ledger import verify
from sluice.queues.ports import Consumer, Publisher, Reader
from sluice.queues.model.queue_rules import Rules
from sluice.queues.commit_loop import Runner
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
MOST_CALLS: Final = 20_000  # until all is quiet, or it never will be


class Values:
    """What is kept for one owner, or in the shared queue: by key its sequence, value and time."""

    def __init__(self) -> None:
        self.next = 1
        self.last: dict[bytes, tuple[int, bytes, float]] = {}
        self.acked: set[int] = set()
        self.groups: dict[str, set[int]] = {}  # what each group has not acknowledged; tombstones are not told

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
        mine = {seq: value for seq, value, _ in self.last.values() if value or seq not in self.acked}
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


class Taker(Reader):
    def __init__(self, world: LastValues, client: str, window: int) -> None:
        super().__init__()
        self.world = world
        self.client = client
        self.window = window
        self.holds: list[
            tuple[int, int, int]
        ] = []  # sequence, epoch, and how often the owner was rewound before
        self.highest = 0
        self.seen_epoch = 0

    def room(self) -> int:
        return self.window - len(self.holds)

    def deliver(self, seq: int, message: Message) -> None:
        self.world.given(self, int(seq), message)


class Hand(Consumer):
    def __init__(self, world: LastValues, client: str) -> None:
        super().__init__(client, 5, 0, False)
        self.world = world
        self.holds: list[Lease] = []

    def deliver(self, lease: Lease) -> None:
        message = lease.message
        assert message is not None
        self.world.shared_given(self, int(lease.seq), message)
        self.holds.append(lease)

    def taken_away(self, lease: Lease) -> None:
        self.holds.remove(lease)


class Author(Publisher):
    def __init__(self, world: LastValues) -> None:
        super().__init__()
        self.world = world

    def stored(self, tag: int) -> None:
        self.world.receipt(int(tag))


class Copier(LoggedStore):
    """Tells the world when a frame leaves, so that it remembers how things stood."""

    def __init__(self, store: MemoryStore, oracle: Oracle, leaves: Callable[[], None]) -> None:
        super().__init__(store, oracle)
        self.leaves = leaves

    def commit(self, frame: bytes, count: int, sync: bool, done: Callable[[], None]) -> None:
        super().commit(frame, count, sync, done)
        self.leaves()


class LastValues:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.seed = seed
        self.loop = Loop()
        self.oracle = Oracle()
        self.author = Author(self)
        self.steps = 0
        self.serial = 0
        self.counts: dict[str, int] = {}
        self.log: list[str] = []
        self.model: dict[str, Values] = {name: Values() for name in (*OWNERS, SHARED)}
        self.frames: dict[int, dict[str, Values]] = {0: self._copies()}
        self.writes: dict[tuple[str, int], tuple[bytes, bytes, int]] = {}  # key, value and frame
        self.unanswered: dict[int, int] = {}  # frame by tag
        self.accepted: dict[str, int] = {}  # the highest sequence of each owner that its writer was told of
        self.tags: dict[int, tuple[str, int]] = {}
        self.takers: dict[str, Taker] = {}
        self.left: list[Taker] = []  # who have unsubscribed, and may still acknowledge
        self.rewinds: dict[str, int] = dict.fromkeys(OWNERS, 0)
        self.hands: list[Hand] = []
        self.retention = self.chance.choice((0.0, RETENTION))
        self.settings: dict[str, Any] = {
            "partitions": 1,
            "compacted": True,
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
        self.runner = Runner(
            self.engine,
            Copier(self.store, self.oracle, self._leaves),
            self.loop.clock,
            self.loop.call_later,
            lambda: None,
            lambda alerts, warnings: self._heard(warnings),
            self.chance.choice((0.0, 0.01)),
        )
        self.runner.save_at_once = self.chance.choice((1, 20, 100_000))
        self.runner.open(lambda name, text: rules_of(name, json.loads(text)))

    def _rules_for(self, name: str) -> tuple[Rules, str]:
        return rules_of(name, self.settings), json.dumps(self.settings)

    def _heard(self, warnings: list[str]) -> None:
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

    def _say(self, what: str) -> None:
        self.log.append(f"{self.steps} {self.loop.now - 1.8e9:.3f} {what}")

    # ---- what people do

    def _value(self) -> bytes:
        self.serial += 1
        return (
            b"" if self.chance.random() < 0.1 else b"%d:" % self.serial + b"x" * self.chance.choice((0, 200))
        )

    def _tag(self, name: str, seq: int) -> None:
        self.engine.journal.add_receipt(self.author, self.serial)
        self.unanswered[self.serial] = self.oracle.frame
        self.tags[self.serial] = (name, seq)

    def write(self) -> None:
        client = self.chance.choice(OWNERS)
        key = self.chance.choice(KEYS)
        value = self._value()
        owner = self.engine.exclusive.publish(client, Message(value, b"", key), self.loop.now)
        seq = int(owner.next) - 1
        model = self.model[client]
        if seq < model.next:
            raise Violation(f"sequence {seq} of {client} is used twice")
        model.put(key, seq, value, self.loop.now)
        self.writes[(client, seq)] = (key, value, self.oracle.frame)
        self._tag(client, seq)
        self._count("values written")
        self._say(f"{client} {key!r} is {value[:8]!r}, {seq}")

    def subscribe(self) -> None:
        client = self.chance.choice(OWNERS)
        taker = Taker(self, client, self.chance.choice((1, 2, 20)))
        if client in self.takers:
            self.left.append(self.takers[client])
        self.takers[client] = taker
        self.engine.exclusive.join(taker, client, self.loop.now)
        self._say(f"{client} subscribes")
        self._count("subscribes")

    def unsubscribe(self) -> None:
        if self.takers:
            client = self.chance.choice(list(self.takers))
            taker = self.takers.pop(client)
            self.left.append(taker)
            self.engine.exclusive.leave(taker)
            self._say(f"{client} leaves")

    def ack(self) -> None:
        takers = [taker for taker in self.takers.values() if taker.holds]
        if takers:
            taker = self.chance.choice(takers)
            self._ack(taker, 0 if self.chance.random() < 0.8 else self.chance.randrange(len(taker.holds)))

    def ack_late(self) -> None:
        """Of who has unsubscribed, or subscribed again: what was on its way then is acknowledged all the same."""
        self.left = [taker for taker in self.left if taker.holds]
        if self.left:
            taker = self.chance.choice(self.left)
            self._ack(taker, self.chance.randrange(len(taker.holds)))
            self._count("late acknowledgements")

    def _ack(self, taker: Taker, nth: int) -> None:
        seq, epoch, rewinds = taker.holds.pop(nth)
        owner = self.engine.exclusive.owners.get(taker.client)
        same = owner is not None and taker.served is owner and rewinds == self.rewinds[taker.client]
        before = (0, 0) if owner is None else (int(owner.acked), int(owner.acked_at))
        self.engine.exclusive.ack(taker, seq, epoch, self.loop.now)
        if same and seq in self.model[taker.client].waits():
            self.model[taker.client].acked.add(seq)
        if owner is not None:
            after = (int(owner.acked), int(owner.acked_at))
            if after[0] < before[0] or after[1] != (int(self.loop.now * 1000.0) if same else before[1]):
                raise Violation(f"{taker.client} acks {seq}, and its state goes from {before} to {after}")
        self._say(f"{taker.client} acks {seq}")
        self._count("acknowledgements")

    def seek(self) -> None:
        owner = self.engine.exclusive.owners.get(self.chance.choice(OWNERS))
        if owner is None:
            return
        behind = self.chance.randrange(int(owner.next) + 1)
        model = self.model[owner.client]
        for key, (seq, value, _) in list(model.last.items()):
            if not value and seq in model.acked and owner.slot_of(seq) < 0:
                del model.last[key]  # a tombstone that was heard of does not come back
        self.engine.exclusive.seek(owner, behind, self.loop.now)
        self.rewinds[owner.client] += 1
        model.acked = {seq for seq, _, _ in model.last.values() if seq <= behind}
        self._say(f"{owner.client} goes behind {behind}")
        self._count("rewinds")

    def purge(self) -> None:
        owner = self.engine.exclusive.owners.get(self.chance.choice(OWNERS))
        if owner is not None:
            self.engine.exclusive.purge(owner, self.loop.now)
            self.model[owner.client].last = {}
            self.model[owner.client].acked = set()
            self._say(f"{owner.client} is purged")
            self._count("purges")

    def publish(self) -> None:
        queue = self.engine.ensure(SHARED)
        key = self.chance.choice(KEYS)
        value = self._value()
        partition = queue.partitions[0]
        before = int(partition.next)
        self.engine.publish(queue, Message(value, b"", key), None, 0)
        model = self.model[SHARED]
        if value:
            model.put(key, before, value, self.loop.now)
            self._tag(SHARED, before)
        else:
            model.drop(key)
        self.writes[(SHARED, before)] = (key, value, self.oracle.frame)
        self._say(f"shared {key!r} is {value[:8]!r}, {before}")
        self._count("messages published")

    def join(self) -> None:
        if len(self.hands) < 4:
            hand = Hand(self, f"h{self.steps}")
            self.hands.append(hand)
            self._join(hand, self.chance.choice(GROUPS))
            self._say(f"{hand.client} joins")

    def _join(self, hand: Hand, group: str) -> None:
        """A group that is new has all there is before it."""
        queue = self.engine.ensure(SHARED)
        model = self.model[SHARED]
        model.groups.setdefault(group, {seq for seq, _, _ in model.last.values()})
        self.engine.join(queue, self.engine.group(queue, group), hand)

    def part(self) -> None:
        if self.hands:
            hand = self.hands.pop(self.chance.randrange(len(self.hands)))
            self.engine.leave(hand)
            self._say(f"{hand.client} parts")

    def seek_group(self) -> None:
        queue = self.engine.queues.get(SHARED)
        if queue is not None and queue.groups:
            group = self.chance.choice(list(queue.groups.values()))
            floor = self.chance.randrange(int(queue.partitions[0].next) + 2)
            self._say(f"{group.name} goes to {floor}")
            self.engine.seek(group, [floor])
            model = self.model[SHARED]
            model.groups[group.name] = {seq for seq, _, _ in model.last.values() if seq >= floor}
            self._count("seeks")

    def drop_group(self) -> None:
        queue = self.engine.queues.get(SHARED)
        if queue is not None and queue.groups:
            group = self.chance.choice(list(queue.groups.values()))
            self._say(f"group {group.name} is dropped")
            self.engine.drop_group(group)
            del self.model[SHARED].groups[group.name]
            self.hands = [hand for hand in self.hands if hand.group is not None]
            self._count("groups dropped")

    def settle(self) -> None:
        hands = [hand for hand in self.hands if hand.holds]
        if not hands:
            return
        hand = self.chance.choice(hands)
        lease = hand.holds.pop(self.chance.randrange(len(hand.holds)))
        what = self.chance.choice(("ack", "ack", "ack", "nack", "release"))
        self._say(f"{hand.client} {what} {lease.seq}")
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
            self.loop.ring()
        self.loop.now = until

    def hold(self) -> None:
        self.store.hold()

    def release(self) -> None:
        self.store.release(self.chance.choice((1, 2, -1)))

    def crash(self) -> None:
        keep = self.chance.randrange(self.store.unsynced() + 1)
        self._say(f"CRASH, keeps {keep} of {self.store.unsynced()}")
        self._count("crashes")
        self.store = self.store.crash(keep)
        self._start_again()

    def restart(self) -> None:
        self._say("restart")
        self._count("restarts")
        self.runner.close()
        self.oracle.durable = self.oracle.frames
        self.frames[self.oracle.frames] = self._copies()
        self._start_again()

    def _start_again(self) -> None:
        self.loop.forget_all()
        self.takers = {}
        self.left = []
        self.hands = []
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
            if owner is not None and owner.next <= seq:
                raise Violation(f"{name} has lost {seq}, which was accepted")
        self.oracle.frames = self.oracle.answered = self.oracle.durable = max(self.frames)
        self.frames = {self.oracle.frames: self._copies()}

    # ---- what the engine tells

    def receipt(self, tag: int) -> None:
        if self.unanswered.pop(tag) > self.oracle.answered:
            raise Violation(f"the writer of {tag} is told that it is kept, and it is not")
        name, seq = self.tags.pop(tag)
        self.accepted[name] = max(seq, self.accepted.get(name, 0))

    def given(self, taker: Taker, seq: int, message: Message) -> None:
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

    def shared_given(self, hand: Hand, seq: int, message: Message) -> None:
        key, value, frame = self.writes[(SHARED, seq)]
        if (message.key, message.payload) != (key, value) or frame > self.oracle.answered:
            raise Violation(f"{seq} is delivered as {message.payload[:20]!r}")
        if value and self.model[SHARED].last.get(key, (-1, b"", 0.0))[0] != seq:
            raise Violation(f"{seq} is delivered, and was replaced")
        group = hand.group
        if value and (group is None or seq not in self.model[SHARED].groups[group.name]):
            raise Violation(f"{seq} is delivered to {hand.client}, whose group has settled it")
        self._count("messages delivered")

    # ---- judging

    def check(self) -> None:
        fault = self._differs()
        if fault:
            raise Violation(fault)
        books = verify(self.engine)
        if books:
            raise Violation(books[0])

    def _differs(self) -> str:
        for client in OWNERS:
            owner = self.engine.exclusive.owners.get(client)
            live: dict[int, bytes] = {}
            done: set[int] = set()
            slot = owner.after(0) if owner is not None else -1
            while owner is not None and slot >= 0:
                seq = int(owner.seq(slot))
                if (client, seq) not in self.writes:
                    return f"{client} has {seq}, which nobody wrote"
                live[seq] = self.writes[(client, seq)][1]
                if seq <= owner.acked or seq in owner.done:
                    done.add(seq)
                slot = owner.after(seq)
            following = int(owner.next if owner is not None else self.engine.exclusive.first)
            if following < self.model[client].next:
                return f"{client} goes on with {following}, behind {self.model[client].next}"
            if owner is not None and not {int(seq) for seq in owner.done} <= live.keys():
                return f"{client} has acknowledged {sorted(owner.done)} out of turn, of which some are gone"
            if owner is not None and any(seq <= owner.acked for seq in owner.done):
                return f"{client} has {sorted(owner.done)} out of turn, up to {owner.acked} all is done"
            taker = self.takers.get(client)
            if taker is not None and not taker.out.keys() <= live.keys():
                return f"{client} has {sorted(taker.out)} on their way, of which some are gone"
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
            while seq < partition.next:
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
            name: {seq for seq in live if not group.cursors[0].settled(seq)} for name, group in groups.items()
        }
        return "" if waits == model.groups else f"groups wait for {waits}, and should for {model.groups}"

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

    def come_to_rest(self) -> None:
        """Everybody is there and takes what there is: exactly the last value of each key that was not acknowledged."""
        self.rest()
        for client in OWNERS:
            waits = self.model[client].waits()
            taker = self.takers[client] = Taker(self, client, 1000)
            self.engine.exclusive.join(taker, client, self.loop.now)
            self._quiet()
            given = {seq for seq, _, _ in taker.holds}
            missing = {seq for seq in waits if seq not in given and self._is_kept(client, seq)}
            if missing or given - waits.keys():
                raise Violation(f"{client} waits for {sorted(waits)}, and was given {sorted(given)}")
            while taker.holds:
                self._ack(taker, 0)
            self._quiet()
            owner = self.engine.exclusive.owners[client]
            if owner.depth():
                raise Violation(f"{client} has acknowledged all, and {owner.depth()} wait")
        late = Hand(self, "late")
        late.prefetch = 1000
        self._join(late, f"late-{self.steps}")
        self._quiet()
        got = {int(lease.seq) for lease in late.holds}
        wanted = {seq for seq, _, _ in self.model[SHARED].last.values()}
        if got != wanted:
            raise Violation(f"a late group gets {sorted(got)}, and there are {sorted(wanted)}")
        self._count("rests")
        self.check()

    def rest(self) -> None:
        """Nobody comes, and nothing is written: who is there gets all there is for it, as fast as it takes it."""
        self.store.release(-1)
        self._rest_a_while()
        while any(taker.holds for taker in self.takers.values()):
            for taker in self.takers.values():
                while taker.holds:
                    self._ack(taker, 0)
            self._rest_a_while()
        for client in self.takers:
            waits = [seq for seq in self.model[client].waits() if self._is_kept(client, seq)]
            if waits:
                raise Violation(f"{client} is there and has room, and {sorted(waits)} wait for it")
        while any(hand.holds for hand in self.hands):
            for hand in self.hands:
                while hand.holds:
                    self._settle(hand.holds.pop(0))
            self._rest_a_while()
        for hand in self.hands:
            if hand.group is not None:
                waits_on = self.model[SHARED].groups[hand.group.name] - hand.group.cursors[0].leases.keys()
                if waits_on:  # and not for a retry
                    raise Violation(f"{hand.client} is there and has room, and {sorted(waits_on)} wait")
        self._say("rest")
        self._count("rests of those present")

    def _rest_a_while(self) -> None:
        """Until what was given back has come again."""
        self._quiet()
        self._pass(2.0)
        self._quiet()

    def _is_kept(self, client: str, seq: int) -> bool:
        owner = self.engine.exclusive.owners.get(client)
        return owner is not None and owner.slot_of(seq) >= 0

    def _quiet(self) -> None:
        self.engine.now = self.loop.now
        self.runner.end_turn()
        calls = 0
        while self.loop.run_one():
            calls += 1
            if calls > MOST_CALLS:
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


def run(seed: int, steps: int) -> LastValues:
    """One world; a violation is raised with the seed and the last things that happened."""
    world = LastValues(seed)
    try:
        for _ in range(steps):
            world.step()
        world.come_to_rest()
    except Exception as fault:
        tail = "\n".join(world.log[-60:])
        raise Violation(f"compacted, seed {seed}, step {world.steps}: {fault}\n{tail}") from fault
    return world
