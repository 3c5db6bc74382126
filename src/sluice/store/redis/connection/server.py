"""The server behind the address of a store, and what its settings promise."""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import ConnectionError, ResponseError, TimeoutError
from redis.retry import Retry

from sluice.errors import StoreError
from sluice.store.redis.connection.address import RedisAddress
from sluice.store.redis.connection.channels import (
    ClusterChannel,
    FixedServer,
    RedisChannel,
    SingleChannel,
)
from sluice.store.redis.connection.replica_acks import WAITAOF_VERSION, ReplicaAcks
from sluice.store.redis.connection.sentinel import SentinelMaster

MIN_VERSION = (6, 2)


class RedisServer:
    """A single Redis, the master that Sentinels name, or a Redis Cluster."""

    def __init__(self, url: str, answer_seconds: float) -> None:
        self._address = RedisAddress.parse(url)
        self._options: dict[str, Any] = {
            "socket_timeout": answer_seconds,
            "socket_connect_timeout": answer_seconds,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        self._sentinels: SentinelMaster | None = None
        if self._address.master:
            self._sentinels = SentinelMaster(self._address, self._options)
        self._pools = [
            redis.ConnectionPool.from_url(self._address.server_url(host), **self._options)
            for host in (() if self._address.master else self._address.hosts)
        ]
        self._reachable = 0  # index of the pool that answered
        self.is_cluster = False
        self.version: tuple[int, int] = (0, 0)

    def detect(self) -> dict[str, str]:
        """Find out the kind of server and return its INFO."""
        info = self._read_info()
        major, minor, *_ = (int(part) for part in str(info["redis_version"]).split("."))
        self.version = (major, minor)
        if self.version < MIN_VERSION:
            raise StoreError(
                f"Redis {info['redis_version']} is too old: it does not support XAUTOCLAIM",
                "Use Redis 6.2 or later",
            )
        self.is_cluster = bool(info.get("cluster_enabled"))
        if len(self._pools) > 1 and not self.is_cluster:
            raise StoreError(
                "the address of the store has several hosts, and Redis is not a Redis Cluster",
                "Give one host, or Sentinels: redis+sentinel://HOST:PORT,HOST:PORT/MASTER",
            )
        return {str(name): str(value) for name, value in info.items()}

    def _read_info(self) -> dict[str, Any]:
        """Return the INFO of the master, or of the first node of a Cluster that answers."""
        if self._sentinels is not None:
            return self._info_of(self._sentinels.pool())
        for nth, pool in enumerate(self._pools):
            try:
                info = self._info_of(pool)
            except (ConnectionError, TimeoutError):
                if nth + 1 == len(self._pools):
                    raise
                continue
            self._reachable = nth
            return info
        raise AssertionError("an address has at least one host")

    def _info_of(self, pool: redis.ConnectionPool) -> dict[str, Any]:
        try:
            info: dict[str, Any] = redis.Redis(connection_pool=pool).info()
            return info
        finally:
            pool.disconnect()

    def refresh(self) -> None:
        """Let channels follow a promotion although the old master still answers."""
        if self._sentinels is not None:
            self._sentinels.refresh()

    def open_channel(self) -> RedisChannel:
        """Return a new channel, for one thread."""
        if self._sentinels is not None:
            return SingleChannel(self._sentinels)
        if not self.is_cluster:
            return SingleChannel(FixedServer(self._pools[self._reachable]))
        nodes: list[Any] = []
        for host in self._address.hosts:
            name, _, port = host.rpartition(":")
            nodes.append(ClusterNode(name.strip("[]"), int(port)))  # type: ignore[no-untyped-call]
        url = self._address.server_url(self._address.hosts[self._reachable])
        return ClusterChannel(RedisCluster.from_url(url, startup_nodes=nodes, **self._options))

    def read_config(self) -> dict[str, str]:
        """Return the configuration of Redis, empty if a hosted Redis does not show it."""
        pool = self._pools[self._reachable] if self._sentinels is None else self._sentinels.pool()
        try:
            client = redis.Redis(connection_pool=pool)
            found: dict[str, Any] = client.config_get("*")  # type: ignore[assignment]
        except ResponseError:
            return {}
        finally:
            pool.disconnect()
        return {str(name): str(value) for name, value in found.items()}

    def close(self) -> None:
        for pool in self._pools:
            pool.disconnect()
        if self._sentinels is not None:
            self._sentinels.close()


def check_acks(acks: ReplicaAcks, version: tuple[int, int], settings: dict[str, str]) -> None:
    """Raise a `StoreError` if Redis cannot wait for what `acks` asks for."""
    if not acks.on_disk:
        return
    if version < WAITAOF_VERSION:
        raise StoreError(
            f"redis.replica_ack is disk, and Redis {version[0]}.{version[1]} has no WAITAOF",
            "Use Redis 7.2 or later, or Valkey, or set redis.replica_ack = memory",
        )
    if settings.get("appendonly", "yes") == "no":
        raise StoreError(
            "redis.replica_ack is disk, and Redis keeps no append-only file (appendonly no)",
            "Set appendonly yes on the master and its replicas",
        )


def durability_warnings(
    server_info: dict[str, str], settings: dict[str, str], min_replicas: int
) -> list[str]:
    """Return one sentence for each setting that can lose acknowledged messages."""
    warnings: list[str] = []
    if not settings:
        warnings.append(
            "Redis does not show its configuration (CONFIG is not allowed): "
            "make sure that appendonly is yes and maxmemory-policy is noeviction"
        )
    if settings.get("appendonly", "yes") == "no":
        warnings.append(
            "Redis keeps no append-only file (appendonly no): "
            "a restart of Redis loses acknowledged messages. "
            "Set appendonly yes, and appendfsync always to lose nothing in a power cut"
        )
    elif settings.get("appendfsync", "always") != "always":
        warnings.append(
            f"Redis writes its append-only file with appendfsync {settings['appendfsync']}: "
            "a power cut may lose messages acknowledged in the last second. "
            "Set appendfsync always to lose nothing"
        )
    policy = settings.get("maxmemory-policy", "noeviction")
    if policy != "noeviction" and settings.get("maxmemory", "0") != "0":
        warnings.append(
            f"Redis evicts keys when its memory is full (maxmemory-policy {policy}): "
            "messages may be lost. Set maxmemory-policy noeviction"
        )
    replicas = int(server_info.get("connected_slaves", "0"))
    if replicas and not min_replicas and settings.get("min-replicas-to-write", "") == "0":
        warnings.append(
            f"Redis has replicas ({replicas}) and does not wait for them "
            "(redis.min_replicas 0, min-replicas-to-write 0): a failover to a replica that is "
            "behind loses acknowledged messages. "
            "Set redis.min_replicas to lose none, or bound the loss by min-replicas-to-write and "
            "min-replicas-max-lag"
        )
    if replicas < min_replicas:
        warnings.append(
            f"Redis has fewer replicas ({replicas}) than redis.min_replicas ({min_replicas}): "
            "nothing is acknowledged until more of them are connected. "
            "Start them, or lower redis.min_replicas"
        )
    if server_info.get("role") == "slave":
        warnings.append(
            "This Redis is a replica and accepts no writes. Use the address of its master"
        )
    return warnings
