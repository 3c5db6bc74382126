"""Connections to Redis: commands are sent in one write, replies come back in order.

redis-py connects to a server and knows the layout of a Cluster; hiredis packs commands and parses
replies. A connection belongs to one thread. Nothing is retried here: only the caller knows whether
a repetition is harmless. A connection that meets a replica is closed, so that the next attempt asks
again which server is the master.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import hiredis
import redis
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoScriptError,
    ResponseError,
    TimeoutError,
)

from sluice.store.redis.connection.replica_acks import ReplicaAcks
from sluice.store.redis.errors import is_replica, is_transient
from sluice.store.redis.scripts import ALL_SCRIPTS, Script

Argument = str | bytes | int
Command = Sequence[Argument]
_Answer = TypeVar("_Answer")
# The type stubs allow only commands of one word.
_pack_command: Callable[[Any], bytes] = hiredis.pack_command


class RedisChannel(Protocol):
    """Access to all keys of a store, for one thread."""

    def execute(
        self, commands: Sequence[tuple[str, Command]], acks: ReplicaAcks | None = None
    ) -> list[Any]:
        """Send commands, each with a key that selects the node, and return their replies.

        If Redis refuses one, raise its error after all replies have arrived. With `acks`, also wait
        until replicas of each of the nodes have the writes, or raise `TooFewReplicas`.
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


class NoMaster(ConnectionError):
    """No Sentinel names the master. A start fails at once, a running broker waits."""


class ConnectionSource(Protocol):
    """Knows which server to connect to."""

    @property
    def epoch(self) -> int:
        """A number that grows when another server is the master: older connections are closed."""

    def connect(self) -> tuple[Any, int]:
        """Return a new connection to the server, and the epoch of that server."""


class FixedServer:
    """The source of connections to one server. No connection is taken from `pool`."""

    epoch = 0

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool

    def connect(self) -> tuple[Any, int]:
        connection = new_connection(self._pool)
        connection.connect()
        return connection, self.epoch


class RedisConnection:
    def __init__(self, source: ConnectionSource) -> None:
        self._source = source
        self._epoch = 0  # of the source, when the connection was made
        self._connection: Any = None  # redis-py has few types

    def send(self, commands: Sequence[Command]) -> None:
        if self._connection is not None and self._epoch != self._source.epoch:
            self.close()
        connection = self._connection
        if connection is None:
            connection, self._epoch = self._source.connect()
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
    def __init__(self, source: ConnectionSource) -> None:
        self._connection = RedisConnection(source)

    def execute(
        self, commands: Sequence[tuple[str, Command]], acks: ReplicaAcks | None = None
    ) -> list[Any]:
        packed = [command for _, command in commands]
        if acks is not None:
            packed.append(acks.command())
        try:
            self._connection.send(packed)
            responses = raise_errors(self._connection.receive(len(packed)))
        except NoScriptError:
            self._connection.close()  # a new connection loads the scripts
            raise
        except ResponseError as refusal:
            if is_replica(refusal):
                self._connection.close()
            raise
        except BaseException:
            # A later request must not receive the replies of this one.
            self._connection.close()
            raise
        if acks is not None:
            acks.check(responses.pop())
        return responses

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

    def execute(
        self, commands: Sequence[tuple[str, Command]], acks: ReplicaAcks | None = None
    ) -> list[Any]:
        try:
            responses = raise_errors(self._execute_all(commands, acks))
        except ResponseError as refusal:
            if is_transient(refusal):
                self._reset()
            raise
        except BaseException:
            self._reset()
            raise
        for response in responses[len(commands) :]:
            assert acks is not None
            acks.check(response)
        return responses[: len(commands)]

    def _execute_all(
        self, commands: Sequence[tuple[str, Command]], acks: ReplicaAcks | None
    ) -> list[Any]:
        """Return the replies to `commands`, then of each node the reply to `acks`."""
        indexes_by_node: dict[str, list[int]] = {}
        for nth, (key, _) in enumerate(commands):
            indexes_by_node.setdefault(self._node_of_key(key), []).append(nth)
        waits = [] if acks is None else [acks.command()]
        for name, indexes in indexes_by_node.items():
            self._connections[name].send([*(commands[nth][1] for nth in indexes), *waits])
        responses: list[Any] = [None] * len(commands)
        for name, indexes in indexes_by_node.items():
            received = self._connections[name].receive(len(indexes) + len(waits))
            for nth, response in zip(indexes, received):
                responses[nth] = response
            responses += received[len(indexes) :]
        return responses

    def _node_of_key(self, key: str) -> str:
        node = self._cluster.get_node_from_key(key)
        name = str(node.name)
        if name not in self._connections:
            self._connections[name] = RedisConnection(
                FixedServer(self._cluster.get_redis_connection(node).connection_pool)
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

    def execute(
        self, commands: Sequence[tuple[str, Command]], acks: ReplicaAcks | None = None
    ) -> list[Any]:
        return retry_while_disconnected(
            partial(self._channel.execute, commands, acks), self._retry_seconds
        )

    def close(self) -> None:
        self._channel.close()


def retry_while_disconnected(request: Callable[[], _Answer], seconds: float) -> _Answer:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return request()
        except (ConnectionError, TimeoutError) as fault:
            if "connecting to" in str(fault) or isinstance(fault, (AuthenticationError, NoMaster)):
                raise  # no server, or a wrong password: waiting does not help
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def script_command(script: Script, keys: Sequence[str], *arguments: Argument) -> list[Argument]:
    """Return the command that runs a script."""
    return ["EVALSHA", script.sha, len(keys), *keys, *arguments]
