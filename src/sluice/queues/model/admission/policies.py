"""Admission: whether a group may deliver a message now to a consumer with capacity.

Three independent policies decide together: a pause by an operator (of the group or its queue), the
breaker, and the limits of concurrency and rate. Dispatch reads one flag, `is_open`, before each
delivery; the policies change the flag when something happens that concerns them. A group without
any policy pays for that flag alone. Limits of single keys are in `key_limits`.

    closed ──`failures` in a row within `window`──▶ open ──`open_for`──▶ probing
    probing ──probe acknowledged──▶ closed         probing ──probe failed──▶ open

Times are seconds since 1970. This module schedules nothing and writes nothing: `delivery_control`
does.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.queues.model.admission.key_limits import KeyLimits
from sluice.queues.model.admission.rate_limit import RateLimit
from sluice.queues.model.queue_rules import QueueRules

# States of the breaker.
CLOSED: Final = 0
OPEN: Final = 1
PROBING: Final = 2
BREAKER_NAMES: Final = ("closed", "open", "probing")


class Pause:
    """Who paused a queue or a group, when and why."""

    def __init__(self, paused_at: float, by: str, reason: str) -> None:
        self.paused_at: float = paused_at
        self.by: str = by
        self.reason: str = reason

    def is_active(self) -> bool:
        return self.paused_at > 0.0


NOT_PAUSED: Final = Pause(0.0, "", "")


class Breaker:
    """Stops the deliveries of a group that fails again and again."""

    def __init__(self) -> None:
        self.state: i64 = CLOSED
        self.opened_at: float = 0.0
        self._failed_at: list[float] = []  # the last failures in a row
        self._probe: object | None = None  # the delivery that decides whether to close

    def admits(self) -> bool:
        return self.state == CLOSED or (self.state == PROBING and self._probe is None)

    def on_delivered(self, lease: object) -> None:
        if self.state == PROBING:
            self._probe = lease

    def on_success(self, lease: object) -> bool:
        """Return whether the breaker closes. While it is open, only the probe counts."""
        if self.state == CLOSED:
            if self._failed_at:
                self._failed_at = []
            return False
        if self.state == PROBING and lease is self._probe:
            self.close()
            return True
        return False

    def on_failure(self, lease: object, rules: QueueRules, now: float) -> bool:
        """Return whether the breaker opens."""
        if self.state == CLOSED:
            self._failed_at = [
                *[at for at in self._failed_at if now - at <= rules.breaker_window],
                now,
            ]
            if len(self._failed_at) < rules.breaker_failures:
                return False
        elif self.state != PROBING or lease is not self._probe:
            return False
        self.open_at(now)
        return True

    def on_probe_lost(self, lease: object) -> None:
        """Probe with another message: this one ended without saying whether work succeeds."""
        if lease is self._probe:
            self._probe = None

    def open_at(self, now: float) -> None:
        self.state = OPEN
        self.opened_at = now
        self._failed_at = []
        self._probe = None

    def probe(self) -> None:
        self.state = PROBING
        self._probe = None

    def close(self) -> None:
        self.state = CLOSED
        self.opened_at = 0.0
        self._failed_at = []
        self._probe = None


class Admission:
    """The policies of one group."""

    def __init__(self, queue_pause: Pause) -> None:
        self.is_open: bool = True  # read before each delivery; set by `update`
        # Whether deliveries and their ends must be reported: there is a limit or a breaker.
        self.has_policies: bool = False
        self.reopens_at: float = 0.0  # when to call `update` again; 0.0: not by time
        self.pause: Pause = NOT_PAUSED
        self.queue_pause: Pause = queue_pause
        self.breaker: Breaker = Breaker()
        self.keys: KeyLimits = KeyLimits()
        self._rate: RateLimit = RateLimit()

    def update(self, rules: QueueRules, in_flight: i64, now: float) -> None:
        """Decide by all policies whether the group may deliver a message now."""
        self.has_policies = rules.has_delivery_policies()
        self.reopens_at = 0.0
        breaker = self.breaker
        if not rules.breaker_failures and breaker.state != CLOSED:
            breaker.close()
        if breaker.state == OPEN:
            reopens_at = breaker.opened_at + rules.breaker_open_for
            if reopens_at <= now:
                breaker.probe()
            else:
                self.reopens_at = reopens_at
        self.is_open = (
            not self.pause.is_active()
            and not self.queue_pause.is_active()
            and breaker.admits()
            and (rules.max_in_flight == 0 or in_flight < rules.max_in_flight)
        )
        if rules.max_rate == 0.0:
            self._rate.lift()
        elif self._rate.available(rules.max_rate, rules.rate_burst(), now) < 1.0:
            if self.is_open:
                self.reopens_at = self._rate.next_at()
            self.is_open = False

    def refill(self) -> None:
        """Fill the bucket of the rate limit, which is not stored, after recovery."""
        self._rate.lift()

    def on_delivered(self, lease: object, rules: QueueRules, in_flight: i64, now: float) -> None:
        """Count a delivery; `is_open` tells whether there may be another one."""
        if rules.max_rate > 0.0:
            self._rate.take(rules.max_rate, rules.rate_burst(), now)
        self.breaker.on_delivered(lease)
        self.update(rules, in_flight, now)

    def closed_reasons(self, rules: QueueRules, in_flight: i64) -> list[str]:
        """Return which policies keep the group from delivering, by name."""
        reasons: list[str] = []
        if self.queue_pause.is_active():
            reasons.append("queue-paused")
        if self.pause.is_active():
            reasons.append("paused")
        if self.breaker.state != CLOSED:
            reasons.append("breaker")
        if rules.max_in_flight and in_flight >= rules.max_in_flight:
            reasons.append("max_inflight")
        if not reasons and not self.is_open:
            reasons.append("max_rate")
        return reasons

    def is_limited(self, rules: QueueRules, in_flight: i64) -> bool:
        """Return whether a limit, rather than a pause or the breaker, permits no delivery."""
        reasons = self.closed_reasons(rules, in_flight)
        return "max_inflight" in reasons or "max_rate" in reasons
