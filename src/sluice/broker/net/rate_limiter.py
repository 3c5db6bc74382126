"""How fast one client may publish: messages and bytes per second, with one second's worth in hand.

Who is faster is not read from until it has kept to its rate again. Nothing is dropped: the client's own socket fills,
and it waits. What one read brings is worked off first, so a rate is kept on average and not to the message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import i64

from sluice.clock import Deadline

if TYPE_CHECKING:
    from sluice.broker.broker import Broker
    from sluice.broker.net.connection import Connection


class RateLimiter(Deadline):
    def __init__(self, broker: Broker, connection: Connection) -> None:
        limits = broker.limits
        self._broker: Broker = broker
        self._connection: Connection = connection
        self._rate: float = limits.max_publish_rate
        self._byte_rate: float = limits.max_publish_byte_rate
        self._tokens: float = self._rate  # messages in hand; below zero: owed
        self._byte_tokens: float = self._byte_rate
        self._refilled_at: float = broker.turn.now
        self._count_before: i64 = 0
        self._bytes_before: i64 = 0
        self.is_waiting: bool = False  # it owes time: nothing else makes it heard meanwhile

    def begin_read(self) -> None:
        """A read is going to be worked off."""
        counters = self._broker.counters
        self._count_before = counters.publishes_received
        self._bytes_before = counters.publish_bytes_received

    def end_read(self) -> None:
        """It has been: charge for what it brought, and let the client wait for what it owes."""
        counters = self._broker.counters
        count: i64 = counters.publishes_received - self._count_before
        if count == 0:
            return
        now = self._broker.turn.now
        self._refill(now)
        self._tokens -= float(count)
        self._byte_tokens -= float(counters.publish_bytes_received - self._bytes_before)
        wait = self._wait_seconds()
        if wait > 0.0 and not self.is_waiting and not self._connection.closing:
            self.is_waiting = True
            self._connection.throttle()
            self._broker.wake_at(now + wait, self)

    def _refill(self, now: float) -> None:
        elapsed = now - self._refilled_at
        self._refilled_at = now
        self._tokens = min(self._rate, self._tokens + elapsed * self._rate)
        self._byte_tokens = min(self._byte_rate, self._byte_tokens + elapsed * self._byte_rate)

    def _wait_seconds(self) -> float:
        """Seconds until the client has kept to its rates again."""
        wait = -self._tokens / self._rate if self._rate else 0.0
        return max(wait, -self._byte_tokens / self._byte_rate) if self._byte_rate else wait

    def fire(self, now: float) -> float:
        self._refill(now)
        wait = self._wait_seconds()
        if wait > 0.001:  # more of what had been read already was worked off meanwhile
            return now + wait
        self.is_waiting = False
        self._connection.unthrottle()
        return 0.0

    def is_obsolete(self) -> bool:
        return self._connection.closing
