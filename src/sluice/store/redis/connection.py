"""Lines to Redis: commands out in one write, answers back in order.

redis-py knows how to get onto a server (URL, TLS, password, database) and how a Cluster is laid out; a command is
packed and its answer parsed by hiredis. A line belongs to one thread. Nothing is said again here: whoever asked knows
whether that would be harmless.
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
from sluice.store.redis.errors import passes
from sluice.store.redis.scripts import ALL, Script

Word = str | bytes | int
Command = Sequence[Word]
OLDEST = (6, 2)
_Answer = TypeVar("_Answer")
_PACK: Callable[[Any], bytes] = hiredis.pack_command  # its types know of commands of one word


class Link(Protocol):
    """The way to all keys of a store, for one thread."""

    def ask(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        """Send commands, each with a key that says where to, and return their answers; one that Redis refused is
        raised when all have come back."""

    def close(self) -> None: ...


def new_connection(pool: redis.ConnectionPool) -> Any:
    """Return a new connection to the server of `pool`, without taking it from the pool.

    A pool counts every connection that it makes until that connection is released to it, and
    redis-py 8 allows 100 by default. A `Line` replaces its connection after every fault and never
    shares one, so the count would only grow: after 100 failed attempts no line could connect again.
    """
    return pool.connection_class(**pool.connection_kwargs)


class Line:
    """One connection. `pool` describes the server and is never drawn from."""

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self._connection: Any = None  # redis-py's, which carries few types

    def send(self, commands: Sequence[Command]) -> None:
        connection = self._connection
        if connection is None:
            connection = new_connection(self._pool)
            connection.connect()
            self._connection = connection
            for script in ALL:
                connection.send_command("SCRIPT", "LOAD", script.source)
                connection.read_response()
        connection.send_packed_command([b"".join([_PACK(tuple(one)) for one in commands])])

    def receive(self, count: int) -> list[Any]:
        """The answers to the last `count` commands; a refusal is an exception in its place."""
        connection = self._connection
        assert connection is not None
        answers: list[Any] = []
        for _ in range(count):
            try:
                answers.append(connection.read_response(disable_decoding=True))
            except ResponseError as refusal:
                answers.append(refusal)
        return answers

    def close(self) -> None:
        if self._connection is not None:
            self._connection.disconnect()
            self._connection = None


def raise_refusals(answers: list[Any]) -> list[Any]:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


class SingleLink:
    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._line = Line(pool)

    def ask(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        try:
            self._line.send([command for _, command in commands])
            return raise_refusals(self._line.receive(len(commands)))
        except NoScriptError:
            self._line.close()  # a new line brings the scripts along
            raise
        except ResponseError:
            raise
        except BaseException:
            self._line.close()  # answers of this question must not be taken for those of the next
            raise

    def close(self) -> None:
        self._line.close()


class ClusterLink:
    """Finds the node of each key by the map that redis-py keeps, and has the map drawn anew when a node says it is
    wrong. All nodes are written to before any is read from."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._lines: dict[str, Line] = {}

    def ask(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        try:
            return raise_refusals(self._ask(commands))
        except ResponseError as refusal:
            if passes(refusal):
                self._start_over()
            raise
        except BaseException:
            self._start_over()
            raise

    def _ask(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        shares: dict[str, list[int]] = {}
        for nth, (key, _) in enumerate(commands):
            shares.setdefault(self._line_of(key), []).append(nth)
        for name, share in shares.items():
            self._lines[name].send([commands[nth][1] for nth in share])
        answers: list[Any] = [None] * len(commands)
        for name, share in shares.items():
            for nth, answer in zip(share, self._lines[name].receive(len(share))):
                answers[nth] = answer
        return answers

    def _line_of(self, key: str) -> str:
        node = self._cluster.get_node_from_key(key)
        name = str(node.name)
        if name not in self._lines:
            self._lines[name] = Line(self._cluster.get_redis_connection(node).connection_pool)
        return name

    def _start_over(self) -> None:
        self._close_lines()
        self._cluster.nodes_manager.initialize()

    def _close_lines(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines = {}

    def close(self) -> None:
        self._close_lines()
        self._cluster.close()


class PatientLink:
    """For a start, which asks much and must not be begun anew: a line that is lost is made again, for so many seconds.
    Whatever is asked on it may be asked twice."""

    def __init__(self, link: Link, seconds: float) -> None:
        self._link = link
        self._seconds = seconds

    def ask(self, commands: Sequence[tuple[str, Command]]) -> list[Any]:
        return patiently(partial(self._link.ask, commands), self._seconds)

    def close(self) -> None:
        self._link.close()


def patiently(ask: Callable[[], _Answer], seconds: float) -> _Answer:
    until = time.monotonic() + seconds
    while True:
        try:
            return ask()
        except (ConnectionError, TimeoutError) as fault:
            if "connecting to" in str(fault) or isinstance(fault, AuthenticationError):
                raise  # nobody is there, or nobody who knows us: that does not pass so soon
            if time.monotonic() > until:
                raise
        time.sleep(0.05)


class Server:
    """What the URL leads to: one Redis, or a Cluster."""

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

    def look(self) -> dict[str, str]:
        """Find out what is there; what Redis says of itself."""
        client = redis.Redis(connection_pool=self._pool)
        info: dict[str, Any] = client.info()
        major, minor, *_ = (int(part) for part in str(info["redis_version"]).split("."))
        self.version = (major, minor)
        if self.version < OLDEST:
            raise StoreError(
                f"Redis {info['redis_version']} is too old: it knows no XAUTOCLAIM",
                "Use Redis 6.2 or later",
            )
        self.is_cluster = bool(info.get("cluster_enabled"))
        self._pool.disconnect()
        return {str(name): str(value) for name, value in info.items()}

    def link(self) -> Link:
        """A new one, for one thread."""
        if self.is_cluster:
            return ClusterLink(RedisCluster.from_url(self._url, **self._options))
        return SingleLink(self._pool)

    def settings(self) -> dict[str, str]:
        """What Redis is configured to do, as far as it tells us: a hosted one may not."""
        client = redis.Redis(connection_pool=self._pool)
        try:
            found: dict[str, Any] = client.config_get("*")  # type: ignore[assignment]
        except ResponseError:
            return {}
        return {str(name): str(value) for name, value in found.items()}

    def close(self) -> None:
        self._pool.disconnect()


def call(script: Script, keys: Sequence[str], *words: Word) -> list[Word]:
    """A script as a command."""
    return ["EVALSHA", script.sha, len(keys), *keys, *words]
