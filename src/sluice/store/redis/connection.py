"""Connections to Redis: commands are sent in one write, replies come back in order.

redis-py connects to a server (URL, TLS, password, database) and knows the layout of a Cluster;
hiredis packs commands and parses replies. A connection belongs to one thread. Nothing is retried
here: only the caller knows whether a repetition is harmless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import hiredis
import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoScriptError,
    ResponseError,
    TimeoutError,
)
from redis.retry import Retry

from sluice.errors import StoreError
from sluice.store.redis.errors import is_transient
from sluice.store.redis.scripts import ALL_SCRIPTS, Script

Argument = str | bytes | int
Command = Sequence[Argument]
MIN_VERSION = (6, 2)
_Answer = TypeVar("_Answer")
# The type stubs allow only commands of one word.
_pack_command: Callable[[Any], bytes] = hiredis.pack_command


class RedisChannel(Protocol):
    """Access to all keys of a store, for one thread."""

    def execute(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        """Send commands, each with a key that selects the node, and return their replies.

        If Redis refuses one, raise its error after all replies have arrived.
        """

    def close(self) -> None: ...


def new_connection(pool: redis.ConnectionPool) -> Any:
    """Return a new connection to the server of `pool`, without taking it from the pool.

    A pool counts every connection that it makes until that connection is released to it, and
    redis-py 8 allows 100 by default. A `RedisConnection` replaces its connection after every fault
    and never shares one, so the count would only grow: after 100 failed attempts none could
    connect.
    """
    return pool.connection_class(**pool.connection_kwargs)


class RedisConnection:
    """One connection. `pool` describes the server; no connection is taken from it."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self._connection: Any = None  # redis-py has few types

    def send(self, commands: Sequence[Command]) -> None:
        connection = self._connection
        if connection is None:
            connection = new_connection(self._pool)
            connection.connect()
            self._connection = connection
            for script in ALL_SCRIPTS:
                connection.send_command("SCRIPT", "LOAD", script.source)
                connection.read_response()
        connection.send_packed_command(
            [b"".join([_pack_command(tuple(command)) for command in commands])]
        )

    def receive(self, count: int) -> list[Any]:
        """Return the replies to the last `count` commands; an error is returned in its place."""
        connection = self._connection
        assert connection is not None
        responses: list[Any] = []
        for _ in range(count):
            try:
                responses.append(connection.read_response(disable_decoding=True))
            except ResponseError as refusal:
                responses.append(refusal)
        return responses

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None


def raise_errors(responses: list[Any]) -> list[Any]:
    for response in responses:
        if isinstance(response, Exception):
            raise response
    return responses


class SingleChannel:
    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._connection = RedisConnection(pool)

    def execute(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        try:
            self._connection.send([command for _, command in commands])
            return raise_errors(self._connection.receive(len(commands)))
        except NoScriptError:
            self._connection.close()  # a new connection loads the scripts
            raise
        except ResponseError:
            raise
        except BaseException:
            # A later request must not receive the replies of this one.
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()


class ClusterChannel:
    """Sends each command to the node of its key, by the slot map of redis-py.

    When a node reports a wrong slot, the map is loaded again. All requests are sent before any
    reply is read.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._connections: dict[str, RedisConnection] = {}

    def execute(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        try:
            return raise_errors(self._execute_all(commands))
        except ResponseError as refusal:
            if is_transient(refusal):
                self._reset()
            raise
        except BaseException:
            self._reset()
            raise

    def _execute_all(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        indexes_by_node: dict[str, list[int]] = {}
        for nth, (key, _) in enumerate(commands):
            indexes_by_node.setdefault(self._node_of_key(key), []).append(nth)
        for name, indexes in indexes_by_node.items():
            self._connections[name].send([commands[nth][1] for nth in indexes])
        responses: list[Any] = [None] * len(commands)
        for name, indexes in indexes_by_node.items():
            for nth, response in zip(indexes, self._connections[name].receive(len(indexes))):
                responses[nth] = response
        return responses

    def _node_of_key(self, key: str) -> str:
        node = self._cluster.get_node_from_key(key)
        name = str(node.name)
        if name not in self._connections:
            self._connections[name] = RedisConnection(
                self._cluster.get_redis_connection(node).connection_pool
            )
        return name

    def _reset(self) -> None:
        self._close_connections()
        self._cluster.nodes_manager.initialize()

    def _close_connections(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def close(self) -> None:
        self._close_connections()
        self._cluster.close()


class RetryingChannel:
    """Reconnects for a limited time, for a start, which reads much and should not begin again.

    All requests on it must be safe to repeat.
    """

    def __init__(self, channel: RedisChannel, retry_seconds: float) -> None:
        self._channel = channel
        self._retry_seconds = retry_seconds

    def execute(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        return retry_while_disconnected(
            partial(self._channel.execute, commands), self._retry_seconds
        )

    def close(self) -> None:
        self._channel.close()


def retry_while_disconnected(request: Callable[[], _Answer], seconds: float) -> _Answer:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return request()
        except (ConnectionError, TimeoutError) as fault:
            if "connecting to" in str(fault) or isinstance(fault, AuthenticationError):
                raise  # no server, or a wrong password: waiting does not help
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


class RedisServer:
    """The server behind the URL: a single Redis or a Cluster."""

    def __init__(self, url: str, answer_seconds: float) -> None:
        self._url = url
        self._options: dict[str, Any] = {
            "socket_timeout": answer_seconds,
            "socket_connect_timeout": answer_seconds,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        self._pool = redis.ConnectionPool.from_url(url, **self._options)
        self.is_cluster = False
        self.version: tuple[int, int] = (0, 0)

    def detect(self) -> dict[str, str]:
        """Find out the kind of server and return its INFO."""
        client = redis.Redis(connection_pool=self._pool)
        info: dict[str, Any] = client.info()
        major, minor, *_ = (int(part) for part in str(info["redis_version"]).split("."))
        self.version = (major, minor)
        if self.version < MIN_VERSION:
            raise StoreError(
                f"Redis {info['redis_version']} is too old: it does not support XAUTOCLAIM",
                "Use Redis 6.2 or later",
            )
        self.is_cluster = bool(info.get("cluster_enabled"))
        self._pool.disconnect()
        return {str(name): str(value) for name, value in info.items()}

    def open_channel(self) -> RedisChannel:
        """Return a new channel, for one thread."""
        if self.is_cluster:
            return ClusterChannel(RedisCluster.from_url(self._url, **self._options))
        return SingleChannel(self._pool)

    def read_config(self) -> dict[str, str]:
        """Return the configuration of Redis, empty if a hosted Redis does not show it."""
        client = redis.Redis(connection_pool=self._pool)
        try:
            found: dict[str, Any] = client.config_get("*")  # type: ignore[assignment]
        except ResponseError:
            return {}
        return {str(name): str(value) for name, value in found.items()}

    def close(self) -> None:
        self._pool.disconnect()


def script_command(script: Script, keys: Sequence[str], *arguments: Argument) -> list[Argument]:
    """Return the command that runs a script."""
    return ["EVALSHA", script.sha, len(keys), *keys, *arguments]


def durability_warnings(server_info: dict[str, str], settings: dict[str, str]) -> list[str]:
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
    if replicas and settings.get("min-replicas-to-write", "") == "0":
        warnings.append(
            f"Redis has replicas ({replicas}) and does not wait for them "
            "(min-replicas-to-write 0): a failover to a replica that is behind loses "
            "acknowledged messages. "
            "Set min-replicas-to-write and min-replicas-max-lag"
        )
    if server_info.get("role") == "slave":
        warnings.append(
            "This Redis is a replica and accepts no writes. Use the address of its master"
        )
    return warnings
