"""What a failed question to Redis means: try again, the store is somebody else's now, or there is no going on.

Nothing is acknowledged until Redis has answered, so waiting is always safe; going on without an answer never is.
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

# What passes: Redis is away, loads, fails over, has no memory or no disk just now, has lost our script, or an operator
# is about to mend its list of users.
_TRANSIENT_ERRORS = (
    ConnectionError,  # of which "loading" is one
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
# The same, where redis-py has no name for it.
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
)


def error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def is_transient(error: BaseException) -> bool:
    """Whether to wait and say it again."""
    if isinstance(error, _TRANSIENT_ERRORS):
        return True
    text = error_text(error)  # Redis 6 puts its own words before those of a command in a script
    return any(text.startswith(code) or f"-{code}" in text for code in _TRANSIENT_CODES)


def permanent_error(error: BaseException) -> StoreError:
    """What to tell when there is no going on."""
    text = error_text(error)
    if text.startswith("FENCED"):
        return StoreFenced()
    if isinstance(error, RedisError):
        return StoreFailed(
            f"Redis refused a write: {text}", "See what Redis means by that, and start again"
        )
    return StoreFailed(f"{type(error).__name__}: {text}")


class StoreFenced(StoreFailed):
    """Another process has taken the store while this one was away."""

    def __init__(self) -> None:
        super().__init__(
            "another broker has taken it over, and Redis refuses this one's writes",
            "What this one acknowledged is kept. Start it again when the other one is to go",
        )
