"""Pauses and limits in the simulation: random changes, and what must hold at each delivery.

A model of its own: it counts deliveries and time by the events that clients see, and knows of the
engine only what the operators commanded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection

from sluice.queues.engine import Engine
from sluice.queues.model.group import Group
from sluice.queues.model.queue import Queue
from tests.queues.kit import rules_of
from tests.simulator.breaker_model import Breakers
from tests.simulator.oracle import Number, Oracle, Violation

TOLERANCE = 1e-6


NO_POLICIES = {
    "max_in_flight": 0,
    "max_rate": 0.0,
    "max_in_flight_per_key": 0,
    "max_rate_per_key": 0.0,
    "breaker_failures": 0,
    "holds_keys": False,
}


class Bucket:
    """Tokens of a rate limit since the limit was set or the broker started."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self.rate, self.burst, self.tokens, self.at = rate, burst, burst, now

    def refill(self, now: float) -> float:
        self.tokens = min(self.burst, self.tokens + (now - self.at) * self.rate)
        self.at = now
        return self.tokens


class DeliveryPolicies:
    def __init__(self, seed: int, oracle: Oracle, clock: Callable[[], float]) -> None:
        self._rng = random.Random(seed)
        self._oracle = oracle
        self._clock = clock
        self._is_active = seed % 2 == 0
        # What operators commanded: the frame of the command, and whether it is a pause.
        self._groups: dict[int, tuple[int, bool]] = {}
        self._queues: dict[int, tuple[int, bool]] = {}
        self._buckets: dict[int, Bucket] = {}
        self._key_buckets: dict[tuple[int, bytes], Bucket] = {}
        self.breakers = Breakers(oracle, clock)

    # ---- actions

    def act(self, engine: Engine) -> str:
        """Sometimes pause, resume or limit something; return what was done."""
        if not self._is_active or self._rng.random() > 0.03 or not engine.queues:
            return ""
        queue = engine.queues.get(self._rng.choice(("one", "two")))
        if queue is None:
            return ""
        what = self._rng.choice(
            ("queue", "group", "group", "resume", "resume", "limit", "limit", "keys", "breaker")
        )
        frame = self._oracle.frame
        if what == "limit":
            self._limit(engine, queue)
        elif what == "keys":
            self._limit_keys(engine, queue)
        elif what == "breaker":
            self._set_breaker(engine, queue)
        elif what == "queue":
            engine.delivery_control.pause_queue(queue, "ann", "maintenance")
            self._queues[int(queue.qid)] = (frame, True)
        elif what == "group" and queue.groups:
            group = self._rng.choice(list(queue.groups.values()))
            engine.delivery_control.pause_group(group, "ann", "")
            self._groups[int(group.gid)] = (frame, True)
        elif what == "resume":
            self._resume(engine, queue)
        return f"{what} of {queue.name}: policies"

    def _resume(self, engine: Engine, queue: Queue) -> None:
        engine.delivery_control.resume_queue(queue)
        self._queues[int(queue.qid)] = (self._oracle.frame, False)
        for group in queue.groups.values():
            engine.delivery_control.resume_group(group)
            self._groups[int(group.gid)] = (self._oracle.frame, False)

    def _limit(self, engine: Engine, queue: Queue) -> None:
        config = json.loads(queue.config_json)
        config["max_in_flight"] = self._rng.choice((0, 0, 1, 3, 20))
        config["max_rate"] = self._rng.choice((0.0, 0.0, 0.2, 2.0, 50.0))
        self._reconfigure(engine, queue, config)

    def _limit_keys(self, engine: Engine, queue: Queue) -> None:
        config = json.loads(queue.config_json)
        config["max_in_flight_per_key"] = self._rng.choice((0, 0, 1, 2))
        config["max_rate_per_key"] = self._rng.choice((0.0, 0.0, 0.2, 5.0))
        self._reconfigure(engine, queue, config)

    def _set_breaker(self, engine: Engine, queue: Queue) -> None:
        config = json.loads(queue.config_json)
        config["breaker_failures"] = self._rng.choice((0, 1, 2, 4))
        config["breaker_window"] = self._rng.choice((5.0, 60.0))
        config["breaker_open_for"] = self._rng.choice((0.5, 20.0))
        self._reconfigure(engine, queue, config)

    def _reconfigure(self, engine: Engine, queue: Queue, config: dict[str, object]) -> None:
        engine.lifecycle.reconfigure_queue(queue, rules_of(queue.name, config), json.dumps(config))
        for group in queue.groups.values():
            self._bucket(group)
            for gid, key in list(self._key_buckets):
                if gid == group.gid:
                    self._key_bucket(group, key)

    def lift(self, engine: Engine) -> None:
        """End all pauses and limits."""
        for queue in list(engine.queues.values()):
            if queue.rules.has_delivery_policies() or queue.rules.holds_keys:
                config = {**json.loads(queue.config_json), **NO_POLICIES}
                self._reconfigure(engine, queue, config)
            self._resume(engine, queue)

    # ---- checks

    def _bucket(self, group: Group) -> Bucket | None:
        rules = group.queue.rules
        if rules.max_rate == 0.0:
            self._buckets.pop(int(group.gid), None)
            return None
        bucket = self._buckets.setdefault(
            int(group.gid), Bucket(rules.max_rate, rules.rate_burst(), self._clock())
        )
        self._adopt(bucket, rules.max_rate, rules.rate_burst())
        return bucket

    def _key_bucket(self, group: Group, key: bytes) -> Bucket | None:
        rules = group.queue.rules
        rate, burst = rules.max_rate_per_key, rules.key_rate_burst()
        if rate == 0.0:
            self._key_buckets.pop((int(group.gid), key), None)
            return None
        bucket = self._key_buckets.setdefault(
            (int(group.gid), key), Bucket(rate, burst, self._clock())
        )
        self._adopt(bucket, rate, burst)
        return bucket

    def _adopt(self, bucket: Bucket, rate: float, burst: float) -> None:
        """Apply a changed rate from now on."""
        if bucket.rate != rate:
            bucket.refill(self._clock())
            bucket.rate, bucket.burst = rate, burst
            bucket.refill(self._clock())

    def is_paused(self, group: Group) -> bool:
        return (
            self._groups.get(int(group.gid), (0, False))[1]
            or self._queues.get(int(group.queue.qid), (0, False))[1]
        )

    def closes(self, group: Group, busy: Collection[Number]) -> bool:
        """Return whether a policy forbids a delivery to the group now."""
        rules = group.queue.rules
        in_flight = sum(number[0] == group.gid for number in busy)
        bucket = self._bucket(group)
        return (
            self.is_paused(group)
            or self.breakers.forbids(group)
            or 0 < rules.max_in_flight <= in_flight
            or (bucket is not None and bucket.refill(self._clock()) < 1.0 + TOLERANCE)
        )

    def closes_key(self, group: Group, number: Number, busy: Collection[Number]) -> bool:
        """Return whether a limit of its key forbids a delivery of a message now."""
        key = self._oracle.pairs[number].sent.key
        bucket = self._key_bucket(group, key) if key else None
        return bool(key) and (
            0 < group.queue.rules.max_in_flight_per_key <= self._count_of_key(group, key, busy)
            or (bucket is not None and bucket.refill(self._clock()) < 1.0 + TOLERANCE)
        )

    def _count_of_key(self, group: Group, key: bytes, busy: Collection[Number]) -> int:
        pairs = [self._oracle.pairs.get(number) for number in busy if number[0] == group.gid]
        return sum(pair is not None and pair.sent.key == key for pair in pairs)

    def _delivered_of_key(self, group: Group, key: bytes, busy: Collection[Number]) -> None:
        in_flight = self._count_of_key(group, key, busy)
        limit = group.queue.rules.max_in_flight_per_key
        if 0 < limit <= in_flight:
            raise Violation(
                f"{in_flight} of key {key!r} are in flight in group {group.name}, limit {limit}"
            )
        bucket = self._key_bucket(group, key)
        if bucket is not None:
            if bucket.refill(self._clock()) < 1.0 - TOLERANCE:
                raise Violation(
                    f"group {group.name} gets more than {bucket.rate} of {key!r} per second"
                )
            bucket.tokens -= 1.0

    def delivered(
        self, group: Group, number: Number, attempt: int, busy: Collection[Number]
    ) -> None:
        """Check a delivery; `busy` are the messages that clients held before."""
        self.breakers.delivered(group, number, attempt)
        key = self._oracle.pairs[number].sent.key
        if key:
            self._delivered_of_key(group, key, busy)
        if self.is_paused(group):
            raise Violation(f"group {group.name} is paused, and gets a message")
        in_flight = sum(number[0] == group.gid for number in busy)
        limit = group.queue.rules.max_in_flight
        if 0 < limit <= in_flight:
            raise Violation(f"{in_flight} are in flight in group {group.name}, limit {limit}")
        bucket = self._bucket(group)
        if bucket is not None:
            if bucket.refill(self._clock()) < 1.0 - TOLERANCE:
                raise Violation(f"group {group.name} gets more than {bucket.rate} per second")
            bucket.tokens -= 1.0

    def restarted(self, engine: Engine) -> None:
        """Check that durable pauses and resumptions are as commanded."""
        self._buckets = {}
        self._key_buckets = {}
        self.breakers.restarted(engine.groups)
        for gid, group in engine.groups.items():
            self._check(self._groups, gid, group.admission.pause.is_active(), group.name)
            self._bucket(group)
        for queue in engine.queues.values():
            self._check(self._queues, int(queue.qid), queue.pause.is_active(), queue.name)
        # A number may be used again if its creation was not durable.
        self._groups = {gid: self._groups[gid] for gid in engine.groups}
        queue_numbers = {int(queue.qid) for queue in engine.queues.values()}
        self._queues = {qid: self._queues[qid] for qid in queue_numbers}

    def _check(self, known: dict[int, tuple[int, bool]], at: int, actual: bool, name: str) -> None:
        frame, commanded = known.get(at, (0, False))
        if actual != commanded and self._oracle.is_durable(frame):
            raise Violation(f"{name} was durably paused: {commanded}, and is: {actual}")
        known[at] = (0, actual)
