"""The options of the Redis store and their defaults."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RedisOptions:
    prefix: str = "sluice"  # of all keys: several brokers can share one Redis
    tag: str = "log"  # hash tag of the keys of the whole store
    # Take the store before its lease expires: its owner is known to be dead.
    force_takeover: bool = False
    lease_seconds: float = 15.0  # another broker may take the store after this time without renewal
    renew_seconds: float = 3.0
    answer_seconds: float = 5.0  # reconnect if Redis is silent for this long
    # Refuse publishers when Redis has accepted no write for this long.
    wait_seconds: float = 10.0
    # A frame counts as stored when this many replicas have acknowledged it.
    min_replicas: int = 0
    replicas_on_disk: bool = False  # acknowledged when it is on their disks
    replica_timeout_seconds: float = 2.0
    poll_seconds: float = 0.5  # maximum lag of pending lists behind deliveries
    batch: int = 32  # deliveries claimed by one command
    # interval of scans for pending deliveries without a consumer
    pending_scan_seconds: float = 30.0
    claim_idle_seconds: float = 300.0  # pending deliveries idle for this long are claimed
    claim_batch: int = 100  # deliveries claimed back by one command
    mover_batch: int = 100  # retries moved by one script
    mover_seconds: float = 1.0  # interval of moves
    # Trim streams that the engine limits to this length by their length; 0: off.
    max_length: int = 0
