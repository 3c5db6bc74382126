"""The simulated environment: one engine on one store with one clock, and a record of all events."""

from __future__ import annotations

import json
import random
import re
from typing import Any, Final

from sluice.queues.bodies.codec import ZstdCodec
from sluice.queues.commit_loop import CommitLoop
from sluice.queues.engine import Engine
from sluice.queues.model.delivery_lease import Lease
from sluice.queues.model.effects import Alert
from sluice.queues.model.queue_rules import (
    ANY_ORDER,
    DEAD_LETTER,
    DROP_OLDEST,
    PER_KEY,
    REJECT_NEW,
    STRICT,
    QueueRules,
)
from sluice.queues.names import format_message_id
from sluice.store.memory import MemoryStore
from tests.queues.kit import Loop, rules_of
from tests.simulator.delivery_policies import DeliveryPolicies
from tests.simulator.key_holds import KeyHolds
from tests.simulator.oracle import Number, Oracle, Pair, Sent, Violation
from tests.simulator.participants import (
    HeldDelivery,
    LoggedStore,
    SimulatedConsumer,
    SimulatedPublisher,
)
from tests.simulator.schedule import Retention, Schedule
from tests.simulator.unauthorized_clients import UnauthorizedClients
from tests.simulator.waiting_commands import WaitingCommands

EXPECTED_WARNINGS: Final = re.compile(
    r"the breaker of group .* opened|group .* delivers again$|was held for repair"
)
# The engine's warning about a dead letter without a dead-letter queue.
DROPPED: Final = re.compile(
    r"message dropped: queue (?P<queue>\S+) has no .* \(message (?P<id>[^,]+), "
)


class Environment:
    def __init__(self, seed: int, **fixed: Any) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        # For delivery tokens, so that a seed means the same without them.
        self.token_rng = random.Random(seed)
        self.loop = Loop()
        self.oracle = Oracle()
        self.schedule = Schedule(self.loop.clock)
        self.retention = Retention(self.loop.clock)
        self.unauthorized = UnauthorizedClients(seed, self.oracle)
        self.policies = DeliveryPolicies(seed, self.oracle, self.loop.clock)
        self.commands = WaitingCommands(self)
        self.key_holds = KeyHolds(self.oracle)
        self.is_armed = True  # a turn has ended since the last command: the engine's timers are set
        self.is_ending_groups = False  # leases are revoked because their group or queue is deleted
        self.publisher = SimulatedPublisher(self)
        self.serial = 0
        self.steps = 0
        self.log: list[str] = []
        self.by_tag: dict[int, Sent] = {}
        self.ids: dict[tuple[str, bytes], Sent] = {}  # used ids, by queue
        self.consumers: list[SimulatedConsumer] = []
        # Deliveries of a previous run.
        self.previous_run: list[tuple[HeldDelivery, Sent]] = []
        self.old: list[HeldDelivery] = []  # earlier deliveries, which a client may settle late
        self.acked_now: set[tuple[int, int, int]] = set()
        # queue, partition, sequence, group
        self.dead_lettered_now: set[tuple[str, str, str, str]] = set()
        # Dropped without a dead-letter queue: queue, message id.
        self.uncommitted_now: set[tuple[str, str]] = set()
        self.purged_now: set[str] = set()  # queues that were purged, sought in, or that overflowed
        self.deleted_groups: set[int] = set()
        # By gid: the frame in which the group was created or deleted.
        self.group_frames: dict[int, tuple[int, str]] = {}
        self.locations: dict[int, dict[int, Sent]] = {}  # messages by pid and seq
        self.gids_of: dict[tuple[str, str], set[int]] = {}  # all gids that a name ever had
        self.clients = 0
        self.has_touched_dead_letters = False  # dead letters were purged or redriven
        self.epoch = 0
        self.counts: dict[str, int] = {}
        self.doing = ""
        self.fixed = fixed
        self.settings: dict[str, dict[str, Any]] = {}
        self.changes_order = False  # whether the ordering of queue one is changed at random
        self._choose_settings()
        self.store = self._make_store()
        self._open()

    # ---- setup

    def _make_store(self) -> Any:
        return MemoryStore(
            self.loop.call_soon,
            segment_bytes=self.rng.choice((1500, 4000, 20_000)),
            snapshot_bytes=self.rng.choice((3000, 10_000)),
        )

    def _choose_settings(self) -> None:
        """Choose the settings: small numbers, so that everything happens often."""
        rng = self.rng
        for name in ("one", "two"):
            ordering = rng.choice((PER_KEY, PER_KEY, PER_KEY, STRICT, ANY_ORDER))
            self.settings[name] = {
                "partitions": rng.choice((1, 2, 3, 5)),
                "ordering": ordering,
                "batch_size": rng.choice((1, 1, 1, 3)),
                "max_retries": rng.choice((0, 1, 3, 10)),
                "initial_backoff": rng.choice((0.5, 5.0)),
                "total_timeout": rng.choice((20.0, 300.0, 10_800.0)),
                "jitter": rng.choice((0.0, 0.5)),
                "delivery_timeout": rng.choice((5.0, 30.0)),
                "max_depth": rng.choice((20, 60, 100_000)),
                "overflow": rng.choice((REJECT_NEW, DROP_OLDEST, DEAD_LETTER)),
                "message_ttl": rng.choice((0.0, 0.0, 60.0, 604_800.0)),
                "expired_to_dlq": rng.random() < 0.5,
                "retention": rng.choice((0.0, 0.0, 0.0, 40.0)),
                "dlq_enabled": rng.random() < 0.8,
                "dedup_window": rng.choice((10.0, 120.0)),
                "compress": rng.random() < 0.3,
                "sync": rng.random() < 0.8,
                "rebalance_after": rng.choice((0.0, 1.0, 1.0, 3.0)),
                "holds_keys": self.token_rng.random() < 0.4,
                "hold_timeout": self.token_rng.choice((0.0, 10.0, 200.0)),
                **self.fixed,
            }
        one = self.settings["one"]
        self.changes_order = (
            one["ordering"] != STRICT and one["batch_size"] > 1 and rng.random() < 0.5
        )

    def _open(self) -> None:
        cache = self.rng.choice((0, 2000, 1 << 20))
        self.engine = Engine(self._rules_for, self.rng.random, cache, ZstdCodec())
        self.commit_loop = CommitLoop(
            self.engine,
            LoggedStore(self.store, self.oracle),
            self.loop.clock,
            self.loop.call_later,
            self._flushed,
            self._report,
            self.rng.choice((0.0, 0.0, 0.01)),
            random_bytes=self.token_rng.randbytes,
        )
        self.commit_loop.open(self._parse)

    def _rules_for(self, name: str) -> tuple[QueueRules, str]:
        settings = self.settings.get(name, {"partitions": 1, "message_ttl": 0.0})
        return rules_of(name, settings), json.dumps(settings)

    def _parse(self, name: str, config: str) -> QueueRules:
        return rules_of(name, json.loads(config))

    def _flushed(self) -> None:
        pass

    def _report(self, alerts: list[Alert], warnings: list[str]) -> None:
        self.key_holds.see(self.engine, alerts)
        self.key_holds.end_turn(self.engine.state.effects.alerts)
        for alert in alerts:
            headers = alert.headers
            self.dead_lettered_now.add(
                (
                    alert.queue,
                    headers.get("original-partition", ""),
                    headers.get("original-sequence", ""),
                    alert.group,
                )
            )
            self._check_dead_letter_alert(alert)
            self._count("dead letters")
        for warning in warnings:
            if EXPECTED_WARNINGS.search(warning):
                continue
            dropped = DROPPED.match(warning)
            if dropped is None:
                raise Violation(warning)
            self.uncommitted_now.add((dropped["queue"], dropped["id"]))

    def _check_dead_letter_alert(self, alert: Alert) -> None:
        queue = self.engine.queues.get(alert.queue)
        group = queue.groups.get(alert.group) if queue is not None else None
        if queue is None or group is None:
            return
        partition = queue.partitions[int(alert.headers["original-partition"])]
        number = (int(group.gid), int(partition.pid), int(alert.headers["original-sequence"]))
        pair = self.oracle.pairs.get(number)
        self.policies.breakers.dead_lettered(number, alert.reason, group)
        if pair is not None:
            self.schedule.dead_lettered(pair, alert.reason, queue.rules)

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def _log_step(self, what: str) -> None:
        self.log.append(f"{self.steps} {self.loop.now - 1.8e9:.3f} {what}")
        if len(self.log) > 200:
            del self.log[:100]

    # ---- events of the engine

    def receipt(self, tag: int) -> None:
        sent = self.by_tag.pop(tag)
        if sent.frame > self.oracle.answered:
            raise Violation(f"the publish of {sent.serial} is acknowledged before its commit")
        sent.receipt = True

    def delivered(self, consumer: SimulatedConsumer, lease: Lease) -> None:
        cursor = lease.cursor
        message = lease.message
        if message is None:
            raise Violation("a delivery without a message")
        number = (int(cursor.group.gid), int(cursor.partition.pid), int(lease.seq))
        rules = cursor.group.queue.rules
        in_order = rules.ordering != ANY_ORDER and rules.batch_size == 1
        self.oracle.delivered(number, consumer, in_order, self._is_unsettled)
        pair = self.oracle.pairs[number]
        if serial_of(message.payload) != pair.sent.serial:
            raise Violation(f"{pair} is delivered with the payload {message.payload[:20]!r}")
        if message.expires and float(message.expires) <= self.loop.now:
            raise Violation(
                f"{pair} is delivered {self.loop.now - float(message.expires)} s after it expired"
            )
        # Without reclaimed deliveries: no client is notified of the end of their deadline.
        self.commands.delivered(number[1:])
        busy = self.schedule.running.keys() - {number}
        self.policies.delivered(cursor.group, number, int(lease.attempt), busy)
        self.key_holds.see(self.engine, self.engine.state.effects.alerts)
        self.key_holds.delivered(
            self.engine, cursor.group, number, self.loop.now, self._is_unsettled
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
        """Check that no more than `batch_size` messages of one key are in flight."""
        queue = lease.cursor.group.queue
        if queue.rules.ordering == ANY_ORDER or not pair.sent.key:
            return
        in_flight = 0
        for gid, pid, seq in self.oracle.in_flight:
            if gid == pair.gid and pid == pair.location[0]:
                other = self.oracle.pairs.get((gid, pid, seq))
                in_flight += other is not None and other.sent.key == pair.sent.key
        if in_flight > queue.rules.batch_size:
            raise Violation(f"{pair} is number {in_flight} of its key in flight")

    def revoked(self, consumer: SimulatedConsumer, lease: Lease) -> None:
        cursor = lease.cursor
        number = (int(cursor.group.gid), int(cursor.partition.pid), int(lease.seq))
        if consumer.holds.pop(number, None) is None:
            raise Violation(f"{number} is revoked from {consumer}, which does not hold it")
        if self.is_ending_groups:
            self.returned(number)
        else:
            self.schedule.expired(number, cursor.group.queue.rules)
            self.failed(number, -1.0, int(lease.attempt))
            self.returned(number)
            self._count("deadlines passed")
        self._log_step(f"{consumer} loses {number}")

    def acked(self, number: Number) -> None:
        self.acked_now.add(number)
        self.policies.breakers.acked(self.engine.groups.get(number[0]), number)

    def returned(self, number: Number) -> None:
        self.policies.breakers.ended(number)
        self.oracle.returned(number)
        self.schedule.returned(number)

    def failed(
        self,
        number: Number,
        delay: float,
        attempt: int,
        was_delivered: bool = True,
        is_by_consumer: bool = True,
    ) -> None:
        """Record a failed delivery; a negative `delay` means the backoff."""
        pair = self.oracle.pairs.get(number)
        group = self.engine.groups.get(number[0])
        if pair is not None and group is not None:
            if not self.policies.breakers.failed(group, number, attempt, is_by_consumer):
                pair.attempts.forget(self.oracle.frame)
                return
            self.schedule.failed(pair, delay, group.queue.rules, self.oracle.frame, was_delivered)

    # ---- running

    def _run_some(self) -> None:
        for _ in range(self.rng.choice((0, 1, 1, 2, 50))):
            if not self.loop.run_one():
                return

    def _run_all(self) -> None:
        while self.loop.run_one():
            pass

    def _is_unsettled(self, pair: Pair) -> bool:
        """Return whether the engine has still to settle the message."""
        pid, seq = pair.location
        group = self.engine.groups.get(pair.gid)
        partition = self.engine.partitions.get(pid)
        if group is None or partition is None:
            return False
        return partition.holds(seq) and not group.cursors[partition.number].is_settled(seq)


def serial_of(payload: bytes) -> int:
    return int(payload.split(b":")[0])
