"""What can be chosen about the store in Redis, and what it is when nobody chooses."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RedisOptions:
    prefix: str = "sluice"  # of all keys: stores of several brokers may share one Redis
    tag: str = "log"  # the hash tag of what belongs to the whole store
    force_takeover: bool = (
        False  # take the store although its lease has not lapsed: its owner is known to be dead
    )
    lease_seconds: float = 15.0  # after so long without renewal another broker may take the store
    renew_seconds: float = 3.0
    answer_seconds: float = 5.0  # a Redis that is silent for so long is connected to anew
    wait_seconds: float = (
        10.0  # what a publisher waits for a Redis that takes no writes, before it is refused
    )
    poll_seconds: float = 0.5  # how far pending lists may lag behind deliveries
    batch: int = 32  # deliveries claimed by one command
    pending_scan_seconds: float = 30.0  # between looks for pending deliveries that nobody has
    claim_idle_seconds: float = 300.0  # which of those count
    claim_batch: int = 100  # how many are taken back by one command
    mover_batch: int = 100  # retries that one script moves
    mover_seconds: float = 1.0  # and how often it looks
    max_length: int = (
        0  # a stream that the engine keeps at so many is trimmed by its length; 0: none is
    )
