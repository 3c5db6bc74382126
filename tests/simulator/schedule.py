"""Expected times: deadlines, retries, the last attempt, and the end of retention.

The world reports the actions of clients and their times. Every time is computed here, from the
settings of the queue; the engine is never asked for one. This module does not know how the engine
stores its lists and timers.

A crash may undo failures that were not on disk. `Attempts` therefore holds every possible state of
a message, and the next delivery tells which one it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from sluice.queues.model.queue_rules import QueueRules
from tests.simulator.oracle import Attempts, Failure, Moment, Number, Pair, Sent, Violation

ROUNDING_SECONDS: Final = 0.002  # timers and message times are rounded
EXPIRY_STEP_SECONDS: Final = 1.0  # expiry is counted in whole seconds


def backoff(rules: QueueRules, failures: int) -> tuple[float, float]:
    """Return the shortest and the longest backoff that may follow the n-th failure."""
    longest = min(
        rules.initial_backoff * rules.backoff_multiplier ** (failures - 1), rules.max_backoff
    )
    return longest * (1.0 - rules.jitter), longest


def check_expiry(expires: int, wanted: int, due: float, ttl: float) -> None:
    """Raise unless `expires` is the earlier of the publisher's and the queue's time to live."""
    if ttl <= 0.0 or (wanted and wanted < due + ttl):
        if expires != wanted:
            raise Violation(f"a message expires at {expires}, and its publisher wanted {wanted}")
    elif not due + ttl - ROUNDING_SECONDS <= expires <= due + ttl + EXPIRY_STEP_SECONDS:
        raise Violation(f"a message with {ttl} s to live from {due} on expires at {expires}")


class Schedule:
    """Deliveries and failures by number (group, partition, sequence)."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.running: dict[Number, float] = {}  # start of the deadline of each delivery
        self.reclaimed: set[Number] = set()  # held under a token of a previous run, by no consumer
        self.exact_from = 0.0  # every timer has fired at its time since then; 0.0: some may be late
        self.exhausted: set[Number] = set()  # failed for the last time, and not yet checked
        self.rejected: set[Number] = set()  # rejected by a client: its body may be read first

    # ---- events

    def delivered(self, pair: Pair, attempt: int, rules: QueueRules, frame: int) -> None:
        now = self._clock()
        number = pair.number
        self.reclaimed.discard(number)
        self.running[number] = now
        if pair.sent.due > now + ROUNDING_SECONDS:
            raise Violation(
                f"{pair} is delivered {pair.sent.due - now:.3f} s before its delay is over"
            )
        attempts = pair.attempts
        error = f"{pair} may have failed {attempts.counts()} times, and this is attempt {attempt}"
        for failure in reversed(attempts.possible):
            if failure.count not in (attempt - 1, Failure.UNKNOWN):
                continue
            gives_up_at = failure.first.latest + rules.total_timeout
            if failure.is_last:
                error = f"{pair} is delivered again after {failure.count} failures, its last"
            elif now < failure.due_from - ROUNDING_SECONDS:
                error = f"{pair} is retried {failure.due_from - now:.3f} s before its time"
            elif failure.first.is_known and now >= gives_up_at + ROUNDING_SECONDS:
                error = f"{pair} is retried {now - gives_up_at:.3f} s after its total timeout"
            else:
                attempts.found(failure, attempt - 1, frame)
                was_tried = attempt > 1 or failure.count == Failure.UNKNOWN
                attempts.first = failure.first if was_tried else Moment(now, now)
                return
        raise Violation(error)

    def extended(self, number: Number) -> None:
        self.running[number] = self._clock()

    def returned(self, number: Number) -> None:
        """Record that a client no longer holds the message."""
        self.running.pop(number, None)

    def reclaim(self, pair: Pair, frame: int) -> None:
        """Record that a token of a previous run holds the message, without a consumer."""
        self.reclaimed.add(pair.number)
        pair.attempts.forget(frame)

    def failed(
        self, pair: Pair, delay: float, rules: QueueRules, frame: int, was_delivered: bool = True
    ) -> None:
        """Add a failure. `delay` is the client's, negative for the backoff.

        A message that was not delivered in this run was reclaimed with an earlier token.
        """
        now = self._clock()
        attempts = pair.attempts
        last = attempts.possible[-1]
        if len(attempts.possible) > 1 or last.count == Failure.UNKNOWN:
            attempts.forget(frame)
            return
        if was_delivered:
            first = attempts.first
        else:
            first = last.first if last.count else Moment(now, now)
        count = last.count + 1
        soonest, latest = (delay, delay) if delay >= 0.0 else backoff(rules, count)
        due_from, due_until = now + soonest, now + latest
        is_last = count > rules.max_retries
        if first.is_known:
            due_from = min(due_from, first.earliest + rules.total_timeout)
            due_until = min(due_until, first.latest + rules.total_timeout)
            is_last = is_last or now >= first.latest + rules.total_timeout
        else:
            due_from = now
        if is_last:
            self.exhausted.add(pair.number)
        attempts.add(Failure(count, first, due_from, due_until, is_last, now), frame)

    def expired(self, number: Number, rules: QueueRules) -> None:
        """Check that the engine ends a delivery at its deadline, neither before nor after."""
        now = self._clock()
        deadline = self.running[number] + rules.delivery_timeout
        if now < deadline - ROUNDING_SECONDS:
            raise Violation(f"{number} is revoked {deadline - now:.3f} s before its deadline")
        if self.exact_from and now > max(deadline, self.exact_from) + ROUNDING_SECONDS:
            raise Violation(f"{number} is revoked {now - deadline:.3f} s after its deadline")

    def dead_lettered(self, pair: Pair, reason: str, rules: QueueRules) -> None:
        """Check the reason of a dead letter."""
        now = self._clock()
        possible = pair.attempts.possible
        if any(failure.count == Failure.UNKNOWN for failure in possible):
            return
        if reason == "max_retries":
            is_right = any(failure.is_last for failure in possible)
        elif reason == "timeout":
            is_right = any(
                failure.count
                and now >= failure.first.earliest + rules.total_timeout - ROUNDING_SECONDS
                for failure in possible
            )
        elif reason == "expired":
            is_right = 0 < pair.sent.expires <= now
        else:
            is_right = pair.number in self.rejected
        if not is_right:
            raise Violation(
                f"{pair} is dead ({reason!r}) after {pair.attempts.counts()} failures, "
                f"with max_retries {rules.max_retries} and total_timeout {rules.total_timeout}"
            )

    def restarted(self) -> None:
        """Forget all deliveries: after a restart no client holds a message."""
        self.running = {}
        self.reclaimed = set()
        self.exhausted = set()
        self.rejected = set()

    # ---- overdue events

    def check_deadlines(self, rules_of: Callable[[int], QueueRules | None]) -> None:
        """Raise if a delivery is past its deadline. `rules_of` finds the rules by group."""
        now = self._clock()
        for number, since in self.running.items():
            rules = rules_of(number[0])
            if rules is None:
                continue
            deadline = since + rules.delivery_timeout
            if now > deadline + ROUNDING_SECONDS:
                late = now - deadline
                raise Violation(
                    f"{number} is still with its client {late:.3f} s after its deadline"
                )

    def is_free(self, number: Number) -> bool:
        """Return whether no client holds the message, so that only time decides about it."""
        return number not in self.running and number not in self.reclaimed

    def must_be_ready(self, attempts: Attempts) -> bool:
        """Return whether the wait for a retry is over."""
        now = self._clock()
        return all(now > failure.due_until + ROUNDING_SECONDS for failure in attempts.possible)

    def must_be_given_up(self, attempts: Attempts, rules: QueueRules) -> bool:
        """Return whether the total timeout of a failed message is over."""
        limit = self._clock() - rules.total_timeout - ROUNDING_SECONDS
        return all(
            failure.count > 0 and 0.0 < failure.first.latest < limit
            for failure in attempts.possible
        )

    def must_be_expired(self, pair: Pair) -> bool:
        """Return whether a message that no client holds must be deleted by now."""
        expires = pair.sent.latest_expires
        return 0 < expires < self._clock() - EXPIRY_STEP_SECONDS - ROUNDING_SECONDS


class Retention:
    """Settled messages are stored for their retention, counted from the publish, then deleted.

    The engine searches for such messages in steps.
    """

    # Searches per retention.
    STEPS: Final = 60
    # Minimum seconds between two searches.
    SHORTEST_STEP: Final = 1.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._settled: dict[tuple[int, int], float] = {}  # when the message was first seen settled
        # Serial, and the frame of the removal.
        self._removed: dict[tuple[int, int], tuple[int, int]] = {}
        self.changed: set[str] = set()  # queues that were purged or changed since the last check

    def check_retained(self, location: tuple[int, int], sent: Sent, rules: QueueRules) -> None:
        """Check a stored message that no group has to settle."""
        now = self._clock()
        since = self._settled.setdefault(location, now)
        step = max(self.SHORTEST_STEP, rules.retention / self.STEPS)
        late = now - max(since, sent.sent_at + rules.retention) - step
        if late > ROUNDING_SECONDS:
            raise Violation(
                f"message {sent.serial} at {location} is stored {late:.3f} s after its retention"
            )

    def wanted(self, location: tuple[int, int]) -> None:
        """Record that a stored message is unsettled in some group."""
        self._settled.pop(location, None)

    def missed(self) -> None:
        """Forget settlement times: time has passed without a check."""
        self._settled = {}

    def is_removed(self, location: tuple[int, int]) -> bool:
        return location in self._removed

    def removed(self, location: tuple[int, int], sent: Sent, rules: QueueRules, frame: int) -> None:
        """Check the removal of a message."""
        self._removed[location] = (sent.serial, frame)
        self._settled.pop(location, None)
        now = self._clock()
        is_due = now >= sent.sent_at + rules.retention - ROUNDING_SECONDS
        if is_due or 0 < sent.expires <= now or sent.queue in self.changed:
            return
        early = sent.sent_at + rules.retention - now
        raise Violation(
            f"message {sent.serial} at {location} is removed {early:.3f} s before the end of its "
            "retention"
        )

    def end_check(self) -> None:
        self.changed = set()

    def rules_changed(self, queue: str) -> None:
        self.changed.add(queue)
        self._settled = {}

    def restarted(self, stored: dict[tuple[int, int], int], durable: int) -> None:
        """Check that no removed message is back; `stored` has the serials after the restart."""
        for location, (serial, frame) in self._removed.items():
            if frame <= durable and stored.get(location) == serial:
                raise Violation(f"message {serial} at {location} was removed durably, and is back")
        self._removed = {}
        self._settled = {}
        self.changed = set()


def is_settled_by_all(
    location: tuple[int, int], gids: Iterable[int], pairs: dict[Number, Pair]
) -> bool:
    """Return whether every group has settled the message at `location`."""
    return all((gid, *location) not in pairs for gid in gids)
