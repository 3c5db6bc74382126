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


class Meter(Deadline):
    def __init__(self, broker: Broker, connection: Connection) -> None:
        limits = broker.limits
        self._broker: Broker = broker
        self._connection: Connection = connection
        self._rate: float = limits.max_publish_rate
        self._byte_rate: float = limits.max_publish_byte_rate
        self._left: float = self._rate  # messages in hand; below zero: owed
        self._bytes_left: float = self._byte_rate
        self._at: float = broker.turn.now
        self._count: i64 = 0
        self._bytes: i64 = 0
        self.waiting: bool = False  # it owes time: nothing else makes it heard meanwhile

    def begin(self) -> None:
        """A read is going to be worked off."""
        counters = self._broker.counters
        self._count = counters.publishes_received
        self._bytes = counters.publish_bytes_received

    def end(self) -> None:
        """It has been: charge for what it brought, and let the client wait for what it owes."""
        counters = self._broker.counters
        count: i64 = counters.publishes_received - self._count
        if count == 0:
            return
        now = self._broker.turn.now
        self._refill(now)
        self._left -= float(count)
        self._bytes_left -= float(counters.publish_bytes_received - self._bytes)
        wait = self._owed()
        if wait > 0.0 and not self.waiting and not self._connection.closing:
            self.waiting = True
            self._connection.hold()
            self._broker.wake_at(now + wait, self)

    def _refill(self, now: float) -> None:
        passed = now - self._at
        self._at = now
        self._left = min(self._rate, self._left + passed * self._rate)
        self._bytes_left = min(self._byte_rate, self._bytes_left + passed * self._byte_rate)

    def _owed(self) -> float:
        """Seconds until the client has kept to its rates again."""
        wait = -self._left / self._rate if self._rate else 0.0
        return max(wait, -self._bytes_left / self._byte_rate) if self._byte_rate else wait

    def due(self, now: float) -> float:
        self._refill(now)
        wait = self._owed()
        if wait > 0.001:  # more of what had been read already was worked off meanwhile
            return now + wait
        self.waiting = False
        self._connection.unhold()
        return 0.0

    def lapsed(self) -> bool:
        return self._connection.closing
