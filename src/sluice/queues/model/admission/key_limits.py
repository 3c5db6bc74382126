"""Limits of concurrency and rate for each partition key of a group.

A message that is chosen while its key is at a limit is held: it stays chosen, so it keeps its place
in the order of its key, and waits here instead of in the cursor's heap of ready messages. Of each
key at most one held message is pending, that is, ready again and not leased yet. The next one
becomes pending when that one is leased or withdrawn, when a delivery of the key ends, or when the
rate admits one. So each key with held messages has a delivery in flight, a pending message or a
timer, and no wake-up is lost.

This module knows no cursors. A location is the number of a partition and a sequence;
`take_released` returns what the group has to make ready. Two keys with the same hash are one key.
A key that has nothing in flight, nothing held and a full bucket is forgotten. Nothing is stored:
after a restart all buckets are full.
"""

from __future__ import annotations

import heapq
from typing import Final

from mypy_extensions import i64

from sluice.queues.model.admission.rate_limit import RateLimit
from sluice.queues.model.queue_rules import QueueRules

SEQUENCE_BITS: Final = 48
SEQUENCE_MASK: Final = (1 << 48) - 1
NONE_PENDING: Final = -1
MIN_CHECKED_KEYS: Final = 1024  # fewer keys are not worth a search for idle ones


class LimitedKey:
    """One key: its deliveries in flight, its bucket, and the messages that wait for them."""

    def __init__(self, key_hash: i64) -> None:
        self.key_hash: i64 = key_hash
        self.in_flight: i64 = 0
        self.rate: RateLimit = RateLimit()
        # Heap of rank and partition; some messages may have been withdrawn since.
        self.held: list[tuple[int, int]] = []
        self.pending: i64 = NONE_PENDING  # the location of the pending message
        self.due_at: float = 0.0  # when the rate admits the next one; 0.0: not scheduled


class KeyLimits:
    def __init__(self) -> None:
        self.is_active: bool = False  # read for each delivery
        self.now: float = 0.0  # set by dispatch before it chooses
        self._max_in_flight: i64 = 0
        self._max_rate: float = 0.0
        self._burst: float = 0.0
        self._keys: dict[object, LimitedKey] = {}
        self._keys_checked: int = 0  # how many were left after the last search for idle ones
        self._pending: dict[int, LimitedKey] = {}  # by location of the pending message
        self._due: list[tuple[float, int]] = []  # heap of time and key
        self._released: list[tuple[int, int]] = []  # rank and partition

    # ---- rules

    def differs(self, rules: QueueRules) -> bool:
        return (
            self._max_in_flight != rules.max_in_flight_per_key
            or self._max_rate != rules.max_rate_per_key
            or self._burst != rules.key_rate_burst()
        )

    def change(self, rules: QueueRules, now: float) -> None:
        """Set other limits and release all held messages; `count` all deliveries next."""
        self._max_in_flight = rules.max_in_flight_per_key
        self._max_rate = rules.max_rate_per_key
        self._burst = rules.key_rate_burst()
        self.is_active = self._max_in_flight > 0 or self._max_rate > 0.0
        for key in self._keys.values():
            self._released.extend(key.held)
            key.held = []
            key.pending = NONE_PENDING
            key.in_flight = 0
            if self._max_rate == 0.0:
                key.rate.lift()
            else:
                # The tokens until now are those of the rate before.
                key.rate.available(self._max_rate, self._burst, now)
        self._pending = {}
        if not self.is_active:
            self._keys = {}
            self._due = []

    def count(self, key_hash: i64) -> None:
        """Count a delivery that is in flight; `key_hash` is 0 if the message has no key."""
        if key_hash:
            self._find_or_add(key_hash).in_flight += 1

    # ---- deliveries

    def admits(self, key_hash: i64, location: i64) -> bool:
        """Return whether a chosen message may be leased now; otherwise it must be held."""
        key = self._keys.get(int(key_hash))
        # None: the message has no key, or nothing was delivered of it for a while.
        return key is None or (
            (not key.held or key.pending == location) and self._admits_one_more(key)
        )

    def hold(self, key_hash: i64, location: i64, rank: int) -> None:
        """Hold a message that is not admitted."""
        key = self._find_or_add(key_hash)
        if key.pending == location:
            self._end_pending(key)
        heapq.heappush(key.held, (rank, int(location >> SEQUENCE_BITS)))
        self._advance(key)

    def on_leased(self, key_hash: i64, location: i64, now: float, is_new: bool) -> None:
        """Count a delivery. `is_new`: it was dispatched now, not resumed after a restart."""
        self.now = now
        key = self._find_or_add(key_hash)
        key.in_flight += 1
        if is_new and self._max_rate > 0.0:
            key.rate.take(self._max_rate, self._burst, now)
        if key.pending == location:
            self._end_pending(key)
        if key.held:
            self._advance(key)

    def on_ended(self, key_hash: i64) -> None:
        """End the count of a delivery, and let the next message of its key go on."""
        key = self._keys.get(int(key_hash))
        if key is None:
            return
        key.in_flight -= 1
        if key.held:
            self._advance(key)
        elif key.in_flight == 0 and self._max_rate == 0.0 and key.pending == NONE_PENDING:
            del self._keys[int(key.key_hash)]

    def on_withdrawn(self, location: i64) -> None:
        """Let the next message of a key go on if its pending one was withdrawn."""
        if self._pending:
            key = self._pending.get(int(location))
            if key is not None:
                self._end_pending(key)
                self._advance(key)

    def forget_partition(self, number: i64) -> None:
        """Drop all held messages of a partition whose cursor chooses again."""
        self._released = [held for held in self._released if held[1] != number]
        for key in self._keys.values():
            key.held = [held for held in key.held if held[1] != number]
            heapq.heapify(key.held)
            if key.pending >= 0 and key.pending >> SEQUENCE_BITS == number:
                self._end_pending(key)
            self._advance(key)

    # ---- time

    def open_due(self, now: float) -> None:
        """Let messages go on whose key the rate admits again."""
        self.now = now
        while self._due and self._due[0][0] <= now:
            due_at, key_hash = heapq.heappop(self._due)
            key = self._keys.get(key_hash)
            if key is not None and key.due_at == due_at:
                key.due_at = 0.0
                self._advance(key)

    def next_due(self) -> float:
        """Return when to call `open_due`; 0.0: nothing waits for a rate."""
        return self._due[0][0] if self._due else 0.0

    def take_released(self) -> list[tuple[int, int]]:
        """Return rank and partition of messages that are no longer held.

        The caller makes them ready, or calls `on_withdrawn` for those that are not chosen anymore.
        """
        released = self._released
        if released:
            self._released = []
        return released

    # ---- what the limits hold

    def limits_reached(self) -> list[str]:
        """Return which limits hold messages, by name."""
        reached: list[str] = []
        for key in self._keys.values():
            if key.held:
                name = "max_inflight_per_key" if self._is_full(key) else "max_rate_per_key"
                if name not in reached:
                    reached.append(name)
                if len(reached) == 2:
                    break
        return sorted(reached)

    def holding_limit(self, key_hash: i64, location: i64) -> str:
        """Return the limit that holds a message, by name; empty if none does."""
        key = self._keys.get(int(key_hash))
        if key is None:
            return ""
        for rank, number in key.held:
            if i64(number) << SEQUENCE_BITS | (i64(rank) & SEQUENCE_MASK) == location:
                return "max_inflight_per_key" if self._is_full(key) else "max_rate_per_key"
        return ""

    def count_keys(self) -> int:
        """Return how many keys are in memory."""
        return len(self._keys)

    def count_held_keys(self) -> int:
        """Return how many keys have messages that wait for a limit."""
        return sum(1 for key in self._keys.values() if key.held)

    # ---- one key

    def _is_full(self, key: LimitedKey) -> bool:
        return self._max_in_flight > 0 and key.in_flight >= self._max_in_flight

    def _admits_one_more(self, key: LimitedKey) -> bool:
        return not self._is_full(key) and (
            self._max_rate == 0.0
            or key.rate.available(self._max_rate, self._burst, self.now) >= 1.0
        )

    def _advance(self, key: LimitedKey) -> None:
        """Make the first held message pending if the limits admit it, else wait for the rate."""
        if not key.held or key.pending != NONE_PENDING:
            return
        if self._admits_one_more(key):
            rank, number = heapq.heappop(key.held)
            key.pending = i64(number) << SEQUENCE_BITS | (i64(rank) & SEQUENCE_MASK)
            self._pending[int(key.pending)] = key
            self._released.append((rank, number))
        elif not self._is_full(key):
            self._watch_rate(key)

    def _watch_rate(self, key: LimitedKey) -> None:
        due_at = key.rate.next_at()
        if key.due_at == 0.0 or due_at < key.due_at:
            key.due_at = due_at
            heapq.heappush(self._due, (due_at, int(key.key_hash)))

    def _end_pending(self, key: LimitedKey) -> None:
        del self._pending[int(key.pending)]
        key.pending = NONE_PENDING

    def _find_or_add(self, key_hash: i64) -> LimitedKey:
        key = self._keys.get(int(key_hash))
        if key is None:
            if len(self._keys) > 2 * self._keys_checked + MIN_CHECKED_KEYS:
                self._forget_idle_keys()
            key = self._keys[int(key_hash)] = LimitedKey(key_hash)
        return key

    def _forget_idle_keys(self) -> None:
        self._keys = {
            key_hash: key for key_hash, key in self._keys.items() if not self._is_idle(key)
        }
        self._keys_checked = len(self._keys)

    def _is_idle(self, key: LimitedKey) -> bool:
        return (
            key.in_flight == 0
            and not key.held
            and key.pending == NONE_PENDING
            and (
                self._max_rate == 0.0
                or key.rate.available(self._max_rate, self._burst, self.now) >= self._burst
            )
        )
