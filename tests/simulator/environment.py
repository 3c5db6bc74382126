"""The stage: one engine on one store under one clock, and what is remembered of all that happens on it."""

from __future__ import annotations

import json
import random
from typing import Any

from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.flow.dead_letters import Alert
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.queue_rules import (
    ANY_ORDER,
    DEAD_LETTER,
    DROP_OLDEST,
    PER_KEY,
    REJECT,
    STRICT,
    QueueRules,
)
from sluice.queues.names import format_message_id
from sluice.store.memory import MemoryStore
from tests.queues.kit import Loop, rules_of
from tests.simulator.oracle import Number, Oracle, Pair, Sent, Violation
from tests.simulator.participants import (
    HeldDelivery,
    LoggedStore,
    SimulatedConsumer,
    SimulatedPublisher,
)
from tests.simulator.schedule import Retention, Schedule
from tests.simulator.unauthorized_clients import UnauthorizedClients


class Environment:
    def __init__(self, seed: int, **fixed: Any) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.entropy = random.Random(
            seed
        )  # for delivery tokens: a seed means the same without them
        self.loop = Loop()
        self.oracle = Oracle()
        self.schedule = Schedule(self.loop.clock)
        self.retention = Retention(self.loop.clock)
        self.unauthorized = UnauthorizedClients(seed, self.oracle)
        self.is_armed = True  # a turn has ended since the last command: the engine's timers are set
        self.is_ending_groups = False  # deliveries are taken away because their group or queue goes
        self.author = SimulatedPublisher(self)
        self.serial = 0
        self.steps = 0
        self.log: list[str] = []
        self.by_tag: dict[int, Sent] = {}
        self.ids: dict[tuple[str, bytes], Sent] = {}  # ids that were used, by queue
        self.consumers: list[SimulatedConsumer] = []
        self.previous_run: list[
            tuple[HeldDelivery, Sent]
        ] = []  # what somebody had in an earlier life
        self.old: list[HeldDelivery] = []  # what somebody once had, and may try to settle late
        self.acked_now: set[tuple[int, int, int]] = set()
        self.dead_lettered_now: set[tuple[str, str, str, str]] = (
            set()
        )  # queue, partition, sequence, group
        self.uncommitted_now: set[tuple[str, str]] = (
            set()
        )  # dead without a dead-letter queue: queue, message id
        self.purged_now: set[str] = set()  # queues that were emptied, sought in or that overflowed
        self.gone_groups: set[int] = set()
        self.group_frames: dict[
            int, tuple[int, str]
        ] = {}  # gid: the frame in which it was made or dropped
        self.places: dict[int, dict[int, Sent]] = {}  # messages by pid and seq
        self.gids_of: dict[tuple[str, str], set[int]] = {}  # all groups that ever had a name
        self.clients = 0
        self.touched_dead_letters = False  # somebody purged the dead letters, or put some back
        self.epoch = 0
        self.counts: dict[str, int] = {}
        self.doing = ""
        self.fixed = fixed
        self.settings: dict[str, dict[str, Any]] = {}
        self.changes_order = False  # whether the order of queue one is changed now and then
        self._choose_settings()
        self.store = self._make_store()
        self._open()

    # ---- the stage

    def _make_store(self) -> Any:
        return MemoryStore(
            self.loop.call_soon,
            segment_bytes=self.chance.choice((1500, 4000, 20_000)),
            snapshot_bytes=self.chance.choice((3000, 10_000)),
        )

    def _choose_settings(self) -> None:
        """What kind of world this is: small numbers, so that everything happens often."""
        chance = self.chance
        for name in ("one", "two"):
            ordering = chance.choice((PER_KEY, PER_KEY, PER_KEY, STRICT, ANY_ORDER))
            self.settings[name] = {
                "partitions": chance.choice((1, 2, 3, 5)),
                "ordering": ordering,
                "batch_size": chance.choice((1, 1, 1, 3)),
                "max_retries": chance.choice((0, 1, 3, 10)),
                "initial_backoff": chance.choice((0.5, 5.0)),
                "total_timeout": chance.choice((20.0, 300.0, 10_800.0)),
                "jitter": chance.choice((0.0, 0.5)),
                "delivery_timeout": chance.choice((5.0, 30.0)),
                "max_depth": chance.choice((20, 60, 100_000)),
                "overflow": chance.choice((REJECT, DROP_OLDEST, DEAD_LETTER)),
                "message_ttl": chance.choice((0.0, 0.0, 60.0, 604_800.0)),
                "expired_to_dlq": chance.random() < 0.5,
                "retention": chance.choice((0.0, 0.0, 0.0, 40.0)),
                "dlq_enabled": chance.random() < 0.8,
                "dedup_window": chance.choice((10.0, 120.0)),
                "compress": chance.random() < 0.3,
                "sync": chance.random() < 0.8,
                "rebalance_after": chance.choice((0.0, 1.0, 1.0, 3.0)),
                **self.fixed,
            }
        one = self.settings["one"]
        self.changes_order = (
            one["ordering"] != STRICT and one["batch_size"] > 1 and chance.random() < 0.5
        )

    def _open(self) -> None:
        cache = self.chance.choice((0, 2000, 1 << 20))
        self.engine = Engine(self._rules_for, self.chance.random, cache, ZstdCodec())
        self.runner = CommitLoop(
            self.engine,
            LoggedStore(self.store, self.oracle),
            self.loop.clock,
            self.loop.call_later,
            self._flushed,
            self._report,
            self.chance.choice((0.0, 0.0, 0.01)),
            random_bytes=self.entropy.randbytes,
        )
        self.runner.open(self._parse)

    def _rules_for(self, name: str) -> tuple[QueueRules, str]:
        settings = self.settings.get(name, {"partitions": 1, "message_ttl": 0.0})
        return rules_of(name, settings), json.dumps(settings)

    def _parse(self, name: str, config: str) -> QueueRules:
        return rules_of(name, json.loads(config))

    def _flushed(self) -> None:
        pass

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        for alert in alerts:
            story = alert.headers
            self.dead_lettered_now.add(
                (
                    alert.queue,
                    story.get("original-partition", ""),
                    story.get("original-sequence", ""),
                    alert.group,
                )
            )
            self._check_dead_letter_alert(alert)
            self._count("dead letters")
        for warning in warnings:
            if "is dead" in warning:
                words = warning.split()
                self.uncommitted_now.add((words[4], words[1]))
            else:
                raise Violation(warning)

    def _check_dead_letter_alert(self, alert: Alert) -> None:
        queue = self.engine.queues.get(alert.queue)
        group = queue.groups.get(alert.group) if queue is not None else None
        if queue is None or group is None:
            return
        partition = queue.partitions[int(alert.headers["original-partition"])]
        number = (int(group.gid), int(partition.pid), int(alert.headers["original-sequence"]))
        pair = self.oracle.pairs.get(number)
        if pair is not None:
            self.schedule.died(pair, alert.reason, queue.rules)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _log_step(self, what: str) -> None:
        self.log.append(f"{self.steps} {self.loop.now - 1.8e9:.3f} {what}")
        if len(self.log) > 200:
            del self.log[:100]

    # ---- what the engine tells

    def receipt(self, tag: int) -> None:
        sent = self.by_tag.pop(tag)
        if sent.frame > self.oracle.answered:
            raise Violation(
                f"the publisher of {sent.serial} is told that it is kept, and it is not"
            )
        sent.receipt = True

    def delivered(self, consumer: SimulatedConsumer, lease: Lease) -> None:
        cursor = lease.cursor
        message = lease.message
        if message is None:
            raise Violation("a delivery without a message")
        number = (int(cursor.group.gid), int(cursor.partition.pid), int(lease.seq))
        rules = cursor.group.queue.rules
        in_order = rules.ordering != ANY_ORDER and rules.batch_size == 1
        self.oracle.delivered(number, consumer, in_order, self._waits)
        pair = self.oracle.pairs[number]
        if serial_of(message.payload) != pair.sent.serial:
            raise Violation(f"{pair} is delivered with the payload {message.payload[:20]!r}")
        if message.expires and float(message.expires) <= self.loop.now:
            raise Violation(
                f"{pair} is delivered {self.loop.now - float(message.expires)} s after it expired"
            )
        self.schedule.delivered(pair, int(lease.attempt), rules, self.oracle.frame)
        if not self.changes_order:
            self._check_batch(pair, lease)
        name = message.id or format_message_id(cursor.partition.pid, lease.seq)
        held = HeldDelivery(lease, name, number, consumer.client)
        consumer.holds[number] = held
        self.old.append(held)
        if len(self.old) > 50:
            del self.old[:25]
        self._count("deliveries")
        self._log_step(f"{consumer} gets {pair.sent.serial} {number}")

    def _check_batch(self, pair: Pair, lease: Lease) -> None:
        """No more of one key are in people's hands than may be."""
        queue = lease.cursor.group.queue
        if queue.rules.ordering == ANY_ORDER or not pair.sent.key:
            return
        out = 0
        for gid, pid, seq in self.oracle.in_flight:
            if gid == pair.gid and pid == pair.place[0]:
                other = self.oracle.pairs.get((gid, pid, seq))
                out += other is not None and other.sent.key == pair.sent.key
        if out > queue.rules.batch_size:
            raise Violation(f"{pair} is number {out} of its key to be out")

    def taken_away(self, consumer: SimulatedConsumer, lease: Lease) -> None:
        cursor = lease.cursor
        number = (int(cursor.group.gid), int(cursor.partition.pid), int(lease.seq))
        if consumer.holds.pop(number, None) is None:
            raise Violation(f"{number} is taken from {consumer}, who does not have it")
        if self.is_ending_groups:
            self.returned(number)
        else:
            self.schedule.taken_back(number, cursor.group.queue.rules)
            self.returned(number)
            self.failed(number, -1.0)
            self._count("deadlines passed")
        self._log_step(f"{consumer} loses {number}")

    def returned(self, number: Number) -> None:
        self.oracle.returned(number)
        self.schedule.returned(number)

    def failed(self, number: Number, delay: float, was_delivered: bool = True) -> None:
        """A delivery has failed; `delay` is negative when its backoff decides about the retry."""
        pair = self.oracle.pairs.get(number)
        group = self.engine.groups.get(number[0])
        if pair is not None and group is not None:
            self.schedule.failed(pair, delay, group.queue.rules, self.oracle.frame, was_delivered)

    # ---- running

    def _run_some(self) -> None:
        for _ in range(self.chance.choice((0, 1, 1, 2, 50))):
            if not self.loop.run_one():
                return

    def _run_all(self) -> None:
        while self.loop.run_one():
            pass

    def _waits(self, pair: Pair) -> bool:
        """Whether the engine has still to settle it."""
        pid, seq = pair.place
        group = self.engine.groups.get(pair.gid)
        partition = self.engine.partitions.get(pid)
        if group is None or partition is None:
            return False
        return partition.holds(seq) and not group.cursors[partition.number].is_settled(seq)


def serial_of(payload: bytes) -> int:
    return int(payload.split(b":")[0])
