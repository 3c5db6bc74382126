"""Connections to Redis: one server, the master that Sentinels name, or a Redis Cluster."""

from sluice.store.redis.connection.address import RedisAddress
from sluice.store.redis.connection.channels import (
    Argument,
    ClusterChannel,
    Command,
    RedisChannel,
    RetryingChannel,
    SingleChannel,
    retry_while_disconnected,
    script_command,
)
from sluice.store.redis.connection.replica_acks import ReplicaAcks
from sluice.store.redis.connection.server import RedisServer, check_acks, durability_warnings

__all__ = [
    "Argument",
    "ClusterChannel",
    "Command",
    "RedisAddress",
    "RedisChannel",
    "RedisServer",
    "ReplicaAcks",
    "RetryingChannel",
    "SingleChannel",
    "check_acks",
    "durability_warnings",
    "retry_while_disconnected",
    "script_command",
]
