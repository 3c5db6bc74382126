"""Finds the master through Sentinels, and notices when they have promoted another one.

All Sentinels are asked, and the answer with the highest configuration epoch counts: a Sentinel that
is cut off, with the old master or without, still names the old one. An epoch below the highest that
this process has seen is never followed.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any, Final

import redis
from redis.exceptions import ConnectionError, RedisError

from sluice.store.redis.connection.address import RedisAddress
from sluice.store.redis.connection.channels import NoMaster, new_connection

_SENTINEL_SECONDS: Final = 1.0  # time limit for the answer of one Sentinel


class SentinelMaster:
    """The source of connections to the master."""

    def __init__(self, address: RedisAddress, options: dict[str, Any]) -> None:
        self._address = address
        self._options = options
        seconds = min(float(options["socket_timeout"]), _SENTINEL_SECONDS)
        timeouts = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
        self._sentinels = [
            redis.Redis.from_url(address.sentinel_url(host), **{**options, **timeouts})
            for host in address.hosts
        ]
        self._lock = threading.Lock()  # channels of several threads use this
        self._highest_epoch = -1
        self._master = ""  # host and port
        self._pool: redis.ConnectionPool | None = None
        self.epoch = 0

    def connect(self) -> tuple[Any, int]:
        """Return a new connection to the master, and the epoch of that master."""
        with self._lock:
            pool, epoch, master = self._find_pool(), self.epoch, self._master
        connection = new_connection(pool)
        try:
            connection.connect()
            connection.send_command("ROLE")
            role = connection.read_response()[0]
        except (RedisError, OSError) as fault:
            connection.disconnect()
            raise ConnectionError(
                f"the master {master}, which the Sentinels name, does not answer"
            ) from fault
        if bytes(role) != b"master":
            connection.disconnect()
            raise ConnectionError(f"{master}, which the Sentinels name, is not a master yet")
        return connection, epoch

    def pool(self) -> redis.ConnectionPool:
        """Return the pool that describes the master."""
        with self._lock:
            return self._find_pool()

    def refresh(self) -> None:
        """Notice a promotion although the old master still answers, cut off from its replicas."""
        with suppress(RedisError, OSError), self._lock:
            self._find_pool()

    def close(self) -> None:
        for sentinel in self._sentinels:
            sentinel.close()

    def _find_pool(self) -> redis.ConnectionPool:
        epoch, master = self._ask_sentinels()
        self._highest_epoch = epoch
        if self._pool is None or master != self._master:
            url = self._address.server_url(master)
            self._pool = redis.ConnectionPool.from_url(url, **self._options)
            self._master = master
            self.epoch += 1
        return self._pool

    def _ask_sentinels(self) -> tuple[int, str]:
        """Return the highest configuration epoch and the master of that epoch."""
        found: list[tuple[int, str]] = []
        last_fault: Exception | None = None
        for sentinel in self._sentinels:
            try:
                state: Any = sentinel.sentinel_master(self._address.master, return_responses=True)
            except (RedisError, OSError) as fault:
                last_fault = fault
                continue
            host = f"[{state['ip']}]" if ":" in state["ip"] else state["ip"]
            found.append((int(state["config-epoch"]), f"{host}:{state['port']}"))
        if not found:
            raise NoMaster(
                f"no Sentinel names the master {self._address.master}: {last_fault}"
            ) from last_fault
        epoch, master = max(found)
        if epoch < self._highest_epoch:
            raise ConnectionError(
                "the Sentinels that answer know an older master than the others did; "
                "start those that are down"
            )
        return epoch, master
