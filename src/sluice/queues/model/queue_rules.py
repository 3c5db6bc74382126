"""The rules of one queue: its configuration as plain numbers, for the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

# ordering
ANY_ORDER: Final = 0
PER_KEY: Final = 1
STRICT: Final = 2

# overflow
REJECT_NEW: Final = 0
DROP_OLDEST: Final = 1
DEAD_LETTER: Final = 2


class QueueRules:
    def __init__(self, name: str) -> None:
        self.name: str = name
        self.partitions: i64 = 10
        self.ordering: i64 = PER_KEY
        self.is_compacted: bool = False
        # The partition strategy of a plug-in: from key and partition count; None: the hash.
        self.choose_partition: Callable[[bytes, int], int] | None = None
        self.bindings: list[str] = []
        self.max_retries: i64 = 10
        self.initial_backoff: float = 5.0
        self.max_backoff: float = 300.0
        self.backoff_multiplier: float = 2.0
        self.total_timeout: float = 10_800.0
        self.jitter: float = 0.0
        self.dlq_enabled: bool = True
        self.dlq_name: str = f"dlq/{name}"
        self.invalid_queue_name: str = ""  # the queue for invalid messages; empty: none
        self.alert_webhook: str = ""
        self.holds_keys: bool = False  # later messages of a key wait for the repair of a dead one
        self.hold_timeout: float = 86_400.0  # 0.0: until the dead letter is handled
        self.max_message_size: i64 = 1_048_576
        self.max_depth: i64 = 100_000
        self.message_ttl: float = 604_800.0  # seconds; 0.0: forever
        self.retention: float = 0.0
        self.overflow: i64 = REJECT_NEW
        self.expired_to_dlq: bool = False
        self.dedup_window: float = 120.0
        self.delivery_timeout: float = 30.0
        self.batch_size: i64 = 1
        self.prefetch: i64 = 100
        self.rebalance_after: float = 1.0
        self.compress: bool = False
        self.sync: bool = True
        self.schema: str = ""  # JSON Schema text; empty: any payload
        # Limits of what a group delivers; 0: none.
        self.max_in_flight: i64 = 0
        self.max_rate: float = 0.0  # deliveries per second
        self.max_rate_burst: float = 0.0  # deliveries at once; 0.0: those of one second
        # The same for each key of a group.
        self.max_in_flight_per_key: i64 = 0
        self.max_rate_per_key: float = 0.0
        self.max_rate_per_key_burst: float = 0.0
        # The breaker opens after this many failures in a row; 0: never.
        self.breaker_failures: i64 = 0
        self.breaker_window: float = 60.0
        self.breaker_open_for: float = 30.0

    def has_delivery_policies(self) -> bool:
        """Return whether a limit or the breaker can stop the deliveries of a group."""
        return (
            self.max_in_flight > 0
            or self.max_rate > 0.0
            or self.max_in_flight_per_key > 0
            or self.max_rate_per_key > 0.0
            or self.breaker_failures > 0
        )

    def rate_burst(self) -> float:
        """Return how many deliveries `max_rate` allows at once."""
        burst = self.max_rate_burst if self.max_rate_burst > 0.0 else self.max_rate
        return burst if burst > 1.0 else 1.0

    def key_rate_burst(self) -> float:
        """Return how many deliveries `max_rate_per_key` allows at once."""
        burst = self.max_rate_per_key_burst
        if burst == 0.0:
            burst = self.max_rate_per_key
        return burst if burst > 1.0 else 1.0

    def bound_queues(self) -> list[str]:
        """Return the queues among the bindings."""
        return [one.removeprefix("$queue/") for one in self.bindings if one.startswith("$queue/")]

    def backoff_seconds(self, failures: i64, draw: float) -> float:
        """Return the seconds before the retry after the n-th failure: 5, 10, 20 ... up to the cap.

        `draw` in [0, 1) removes up to the `jitter` share: a consumer that dies with a thousand
        leases must not get all of them back at the same instant.
        """
        seconds = self.initial_backoff
        step: i64 = 1
        while step < failures and seconds < self.max_backoff:
            seconds *= self.backoff_multiplier
            step += 1
        if seconds > self.max_backoff:
            seconds = self.max_backoff
        return seconds * (1.0 - self.jitter * draw)
