"""Password checks: slow by design, so they run in threads, are cached, and slow down guessing.

Invariant: nothing here reveals which part of a credential was wrong, or takes less time for an
unknown user.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from sluice.access.users import User, make_dummy_hash, verify
from sluice.access.watched_file import WatchedFile

CACHE_SECONDS: Final = 60.0  # a client that reconnects is admitted without hashing again
MAX_CACHED: Final = 10_000
MAX_PENDING: Final = 256  # checks that wait for a thread
MAX_FREE_FAILURES: Final = 5  # of one user from one address, before attempts are delayed
# Of one address, for all users: clients behind a proxy share an address.
MAX_FREE_FAILURES_OF_ADDRESS: Final = 100
FAILURE_DECAY_SECONDS: Final = 30.0  # for each failure
# Pause between two checks from an address that guesses; it doubles up to the maximum.
MIN_PAUSE_SECONDS: Final = 1.0
MAX_PAUSE_SECONDS: Final = 60.0
MAX_TRACKED: Final = 10_000
MAX_NAME_LENGTH: Final = 256  # significant characters of a user name

Clock = Callable[[], float]


class FailedAttempts:
    """Recent failed password attempts of each user, by address. Thread-safe.

    Failures are counted by user and address, so that no client behind the same proxy waits because
    of another one's guesses. They are also counted by address alone, with a much higher limit, so
    that one address cannot try all users. An IPv6 network of one customer (/64) counts as one
    address, because the customer has 2^64 of them.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # By user and address, and by address: when the next attempt is allowed, and when all
        # failures have decayed.
        self._penalties: dict[str, tuple[float, float]] = {}

    def reserve_attempt(self, user: str, address: str, max_wait: float) -> float:
        """Reserve the next attempt; return the seconds until it, or -1.0 if above `max_wait`."""
        with self._lock:
            now = self._clock()
            wait = 0.0
            pauses: dict[str, tuple[float, float]] = {}
            for key, free_failures in _penalty_keys(user, address):
                next_attempt_at, decayed_at = self._penalties.get(key, (0.0, 0.0))
                excess = (decayed_at - now) / FAILURE_DECAY_SECONDS - free_failures
                if excess <= 0:
                    continue
                at = max(now, next_attempt_at)
                if at - now > max_wait:
                    return -1.0
                pause = min(MIN_PAUSE_SECONDS * 2.0 ** min(excess, 10.0), MAX_PAUSE_SECONDS)
                pauses[key] = (at + pause, decayed_at)
                wait = max(wait, at - now)
            self._penalties |= pauses
            return wait

    def record_failure(self, user: str, address: str) -> None:
        with self._lock:
            now = self._clock()
            for key, free_failures in _penalty_keys(user, address):
                next_attempt_at, decayed_at = self._penalties.pop(key, (0.0, 0.0))
                if len(self._penalties) >= MAX_TRACKED:
                    # The key without failures for longest.
                    self._penalties.pop(next(iter(self._penalties)))
                max_decayed_at = now + FAILURE_DECAY_SECONDS * (free_failures + 10)
                self._penalties[key] = (
                    next_attempt_at,
                    min(max(decayed_at, now) + FAILURE_DECAY_SECONDS, max_decayed_at),
                )

    def __len__(self) -> int:
        return len(self._penalties)


class PasswordVerifier:
    def __init__(self, users: WatchedFile[dict[str, User]], clock: Clock = time.monotonic) -> None:
        self.users = users
        self._clock = clock
        self._dummy_hash = make_dummy_hash()
        self._key = secrets.token_bytes(32)
        self._verified_until: dict[bytes, float] = {}
        self._lock = threading.Lock()
        # At most half of the cores: the other half belongs to the broker.
        workers = min(max((os.cpu_count() or 1) // 2, 1), 4)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="passwords")
        # For callers that check in threads of their own.
        self.check_slots = threading.BoundedSemaphore(workers)
        self._pending: dict[bytes, list[Callable[[User | None], None]]] = {}

    def find_cached(self, name: str, password: bytes) -> User | None:
        """Return the user if this password was verified recently and the hash has not changed."""
        user = self.users.current().get(name)
        if user is None or user.disabled:
            return None
        cache_key = self._cache_key(user, password)
        with self._lock:
            valid_until = self._verified_until.get(cache_key, 0.0)
        return user if valid_until > self._clock() else None

    def check(self, name: str, password: bytes) -> User | None:
        """Return the user with this password, or None. Takes the time of one hash in any case."""
        user = self.users.current().get(name)
        is_correct = verify(user.hash if user is not None else self._dummy_hash, password)
        if user is None or user.disabled or not is_correct:
            return None
        cache_key = self._cache_key(user, password)
        with self._lock:
            self._verified_until.pop(cache_key, None)
            if len(self._verified_until) >= MAX_CACHED:
                self._verified_until.pop(next(iter(self._verified_until)))
            self._verified_until[cache_key] = self._clock() + CACHE_SECONDS
        return user

    def check_in_thread(
        self, name: str, password: bytes, done: Callable[[User | None], None]
    ) -> bool:
        """Check in a thread and call `done` from it; return False if too many checks are waiting.

        Simultaneous checks of the same credentials share one result.
        """
        cache_key = self._cache_key(User(name, ""), password)
        with self._lock:
            callbacks = self._pending.get(cache_key)
            if callbacks is not None:
                callbacks.append(done)
                return True
            if len(self._pending) >= MAX_PENDING:
                return False
            self._pending[cache_key] = [done]

        def finish(future: Future[User | None]) -> None:
            with self._lock:
                callbacks = self._pending.pop(cache_key)
            user = None if future.cancelled() or future.exception() is not None else future.result()
            for callback in callbacks:
                callback(user)

        self._pool.submit(self.check, name, password).add_done_callback(finish)
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _cache_key(self, user: User, password: bytes) -> bytes:
        """Return a keyed hash to cache instead of the password; it depends on the user's hash."""
        text = b"\0".join(
            (user.name.encode("utf-8", "surrogateescape"), user.hash.encode(), password)
        )
        return hashlib.blake2b(text, key=self._key, digest_size=32).digest()


def host_of(peer: str) -> str:
    """Return the address of `address:port`, `[address]:port`, or an address alone."""
    if peer.startswith("["):
        return peer[1:].partition("]")[0]
    return peer.partition(":")[0] if peer.count(":") == 1 else peer


def _penalty_keys(user: str, address: str) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the keys under which an attempt is counted, each with its number of free failures."""
    network = _network_of(address)
    return (f"{network} {user[:MAX_NAME_LENGTH]}", MAX_FREE_FAILURES), (
        network,
        MAX_FREE_FAILURES_OF_ADDRESS,
    )


def _network_of(address: str) -> str:
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))
