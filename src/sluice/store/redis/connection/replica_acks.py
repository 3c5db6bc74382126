"""Acknowledgements by replicas: WAIT or WAITAOF in the pipeline of a write.

Redis answers a write before its replicas have it. With `redis.min_replicas` a write counts only
when that many replicas have acknowledged it. Both commands wait for everything that this connection
has written, so the write must be in the same pipeline: after a new connection alone they would
wait for nothing. A repeated write therefore changes a key even if it was done before (`scripts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sluice.store.redis.errors import TooFewReplicas

WAITAOF_VERSION = (7, 2)


@dataclass(frozen=True, slots=True)
class ReplicaAcks:
    """What a write waits for: `count` replicas, in memory or on disk (there the master too)."""

    count: int
    on_disk: bool = False
    timeout_seconds: float = 2.0

    def command(self) -> list[str | bytes | int]:
        milliseconds = max(1, round(self.timeout_seconds * 1000))  # 0 would wait forever
        if self.on_disk:
            return ["WAITAOF", 1, self.count, milliseconds]
        return ["WAIT", self.count, milliseconds]

    def count_in(self, response: Any) -> int:
        """Return how many replicas have acknowledged; none if the master's own disk has not."""
        if not self.on_disk:
            return int(response)
        return int(response[1]) if int(response[0]) else 0

    def check(self, response: Any) -> None:
        """Raise `TooFewReplicas` if the response of `command` does not reach the count."""
        found = self.count_in(response)
        if found < self.count:
            raise TooFewReplicas(self.shortage(found))

    def shortage(self, found: int) -> str:
        """Return the reason why writes are not acknowledged."""
        place = " on disk" if self.on_disk else ""
        return (
            f"{found} of {self.count} replicas of Redis have acknowledged the last write{place} "
            f"within {self.timeout_seconds:g} s (redis.min_replicas = {self.count})"
        )
