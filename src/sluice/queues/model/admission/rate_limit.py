"""A token bucket: how many deliveries are allowed now."""

from __future__ import annotations

from typing import Final

# A rate limit wakes up at most this often, and then delivers what has accumulated.
MIN_RATE_WAIT_SECONDS: Final = 0.001


class RateLimit:
    """A token bucket: `rate` deliveries per second on average, at most `burst` at once."""

    def __init__(self) -> None:
        self._rate: float = 0.0  # 0.0: there was no limit, so the bucket is full
        self._burst: float = 0.0
        self._tokens: float = 0.0
        self._counted_at: float = 0.0

    def available(self, rate: float, burst: float, now: float) -> float:
        """Return how many deliveries are allowed now."""
        if self._rate == 0.0:
            self._tokens = burst
        elif now > self._counted_at:
            self._tokens += (now - self._counted_at) * self._rate
            if self._tokens > self._burst:
                self._tokens = self._burst
        if self._tokens > burst:
            self._tokens = burst
        self._rate = rate  # a new rate and burst count from now on
        self._burst = burst
        self._counted_at = now
        return self._tokens

    def take(self, rate: float, burst: float, now: float) -> None:
        """Count a delivery, after the tokens that have accumulated until now."""
        self.available(rate, burst, now)
        self._tokens -= 1.0

    def next_at(self) -> float:
        """Return when the next delivery is allowed, after `available` was less than one."""
        wait = (1.0 - self._tokens) / self._rate
        return self._counted_at + (wait if wait > MIN_RATE_WAIT_SECONDS else MIN_RATE_WAIT_SECONDS)

    def lift(self) -> None:
        """Forget the limit: the next one begins with a full bucket."""
        self._rate = 0.0
