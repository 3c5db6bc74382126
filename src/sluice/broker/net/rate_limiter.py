"""Publish rate limits of one client: messages and bytes per second, with a burst of one second.

The broker stops reading from a client that exceeds its rate until the client is within the rate
again. Nothing is dropped: the client's socket fills and the client waits. The broker processes each
read completely before it charges for it, so the rate holds on average and not for each message.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.broker.limits import Limits
from sluice.broker.ports import ConnectionPort
from sluice.broker.turn import Scheduler, Turn
from sluice.clock import Deadline
from sluice.metrics import Counters


class RateLimiter(Deadline):
    def __init__(
        self,
        limits: Limits,
        counters: Counters,
        turn: Turn,
        scheduler: Scheduler,
        connection: ConnectionPort,
    ) -> None:
        self._counters: Counters = counters
        self._turn: Turn = turn
        self._scheduler: Scheduler = scheduler
        self._connection: ConnectionPort = connection
        self._rate: float = limits.max_publish_rate
        self._byte_rate: float = limits.max_publish_byte_rate
        self._tokens: float = self._rate  # available messages; negative: debt
        self._byte_tokens: float = self._byte_rate
        self._refilled_at: float = turn.now
        self._count_before: i64 = 0
        self._bytes_before: i64 = 0
        self.is_waiting: bool = False  # in debt: nothing else may resume reading meanwhile

    def begin_read(self) -> None:
        """Remember the counters before a read is processed."""
        counters = self._counters
        self._count_before = counters.publishes_received
        self._bytes_before = counters.publish_bytes_received

    def end_read(self) -> None:
        """Charge for the messages of this read and pause the client if it is in debt."""
        counters = self._counters
        count: i64 = counters.publishes_received - self._count_before
        if count == 0:
            return
        now = self._turn.now
        self._refill(now)
        self._tokens -= float(count)
        self._byte_tokens -= float(counters.publish_bytes_received - self._bytes_before)
        wait = self._wait_seconds()
        if wait > 0.0 and not self.is_waiting and not self._connection.closing:
            self.is_waiting = True
            self._connection.throttle()
            self._scheduler.wake_at(now + wait, self)

    def _refill(self, now: float) -> None:
        elapsed = now - self._refilled_at
        self._refilled_at = now
        self._tokens = min(self._rate, self._tokens + elapsed * self._rate)
        self._byte_tokens = min(self._byte_rate, self._byte_tokens + elapsed * self._byte_rate)

    def _wait_seconds(self) -> float:
        """Return the seconds until the client is within its rates again."""
        wait = -self._tokens / self._rate if self._rate else 0.0
        return max(wait, -self._byte_tokens / self._byte_rate) if self._byte_rate else wait

    def fire(self, now: float) -> float:
        self._refill(now)
        wait = self._wait_seconds()
        if wait > 0.001:  # input that was read earlier has been processed meanwhile
            return now + wait
        self.is_waiting = False
        self._connection.unthrottle()
        return 0.0

    def is_obsolete(self) -> bool:
        return self._connection.closing
