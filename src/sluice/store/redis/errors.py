"""Classifies errors of Redis: retry, the store has a new owner, or a permanent failure.

Nothing is acknowledged before Redis has answered, so waiting is always safe; continuing without an
answer never is.
"""

from __future__ import annotations

from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)

from sluice.errors import StoreError, StoreFailed


class TooFewReplicas(Exception):
    """Redis has a write, and fewer replicas than required have acknowledged it yet."""


# Temporary: Redis is unreachable, loads, fails over, is out of memory or disk space, has lost a
# script, or an operator is about to fix its list of users.
_TRANSIENT_ERRORS = (
    TooFewReplicas,
    ConnectionError,  # includes "loading"
    TimeoutError,
    OSError,
    RedisClusterException,
    OutOfMemoryError,
    ReadOnlyError,
    MasterDownError,
    NoScriptError,
    NoPermissionError,
    AuthenticationError,
    ClusterDownError,
    TryAgainError,
    MovedError,
    AskError,
)
# The same, for errors without a class in redis-py.
_TRANSIENT_CODES = (
    "MISCONF",
    "NOREPLICAS",
    "BUSY",
    "UNBLOCKED",
    "OOM",
    "READONLY",
    "LOADING",
    "NOAUTH",
    "CLUSTERDOWN",
    "WAITAOF cannot",  # its master has no append-only file
)
# The words of a server that is a replica, or has just become one.
_REPLICA_WORDS = ("READONLY", "MASTERDOWN", "UNBLOCKED", "with replica instances")


def error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Return whether to wait and retry."""
    if isinstance(error, _TRANSIENT_ERRORS) or is_replica(error):
        return True
    text = error_text(error)  # Redis 6 prefixes the error of a command in a script
    return any(text.startswith(code) or f"-{code}" in text for code in _TRANSIENT_CODES)


def is_replica(error: BaseException) -> bool:
    """Return whether the server that sent this error is not the master (any more)."""
    text = error_text(error)
    return isinstance(error, (ReadOnlyError, MasterDownError)) or any(
        words in text for words in _REPLICA_WORDS
    )


def permanent_error(error: BaseException) -> StoreError:
    """Return the error that ends the store."""
    text = error_text(error)
    if text.startswith("FENCED"):
        return StoreFenced()
    if isinstance(error, RedisError):
        return StoreFailed(
            f"Redis refused a write: {text}", "Fix the cause in Redis, then start again"
        )
    return StoreFailed(f"{type(error).__name__}: {text}")


class StoreFenced(StoreFailed):
    """Another process took over the store while this one was unreachable."""

    def __init__(self) -> None:
        super().__init__(
            "another broker has taken it over, and Redis refuses writes of this one",
            "Everything that this broker acknowledged is stored. Start it again when the other one "
            "is stopped",
        )
