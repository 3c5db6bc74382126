"""Checking passwords: slow by design, so it is done aside, remembered for a while, and slower for those who guess.

Nothing here says which part of a wrong answer was wrong, nor takes less time for a user that is not there.
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

from sluice.access.watched_file import Watched
from sluice.access.users import User, hash_of_nobody, verify

REMEMBER_SECONDS: Final = 60.0  # a client that comes back is let in without hashing again
MAX_REMEMBERED: Final = 10_000
MAX_PENDING: Final = 256  # checks that wait for a thread
FREE_FAILURES: Final = 5  # of one user from one address, before the next attempt has to wait
FREE_OF_ADDRESS: Final = 100  # of one address, whatever the users: clients behind a proxy share theirs
FORGIVE_SECONDS: Final = 30.0  # for each failure
FIRST_PAUSE: Final = 1.0  # between two looks at passwords from an address that guesses; doubles up to
LONGEST_PAUSE: Final = 60.0
MAX_KNOWN: Final = 10_000
MAX_NAME: Final = 256  # characters of a user name that count

Clock = Callable[[], float]


class Attempts:
    """How often each user was tried with a wrong password lately, by address. Any thread may ask.

    Counted by user and address, so that nobody behind the same proxy has to wait for another one's guesses; and by
    address alone from many more failures on, so that one address cannot try all users. An IPv6 network of one customer
    (/64) is one address: whoever has one, has 2^64.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[
            str, tuple[float, float]
        ] = {}  # by user and address, and by address: the end of its last pause, when all is forgiven

    def wait(self, user: str, address: str, longest: float) -> float:
        """Seconds until the next attempt is looked at, which is then its own; -1.0 when that is more than `longest`."""
        with self._lock:
            now = self._clock()
            wait = 0.0
            pauses: dict[str, tuple[float, float]] = {}
            for key, free in _keys_of(user, address):
                free_at, forgiven_at = self._known.get(key, (0.0, 0.0))
                excess = (forgiven_at - now) / FORGIVE_SECONDS - free
                if excess <= 0:
                    continue
                at = max(now, free_at)
                if at - now > longest:
                    return -1.0
                pause = min(FIRST_PAUSE * 2.0 ** min(excess, 10.0), LONGEST_PAUSE)
                pauses[key] = (at + pause, forgiven_at)
                wait = max(wait, at - now)
            self._known |= pauses
            return wait

    def failed(self, user: str, address: str) -> None:
        with self._lock:
            now = self._clock()
            for key, free in _keys_of(user, address):
                free_at, forgiven_at = self._known.pop(key, (0.0, 0.0))
                if len(self._known) >= MAX_KNOWN:
                    self._known.pop(next(iter(self._known)))  # the one that has been quiet for longest
                worst = now + FORGIVE_SECONDS * (free + 10)
                self._known[key] = (free_at, min(max(forgiven_at, now) + FORGIVE_SECONDS, worst))

    def __len__(self) -> int:
        return len(self._known)


class Passwords:
    def __init__(self, users: Watched[dict[str, User]], clock: Clock = time.monotonic) -> None:
        self.users = users
        self._clock = clock
        self._nobody = hash_of_nobody()
        self._key = secrets.token_bytes(32)
        self._remembered: dict[bytes, float] = {}
        self._lock = threading.Lock()
        # Half of the cores at most: the other half belongs to the broker.
        workers = min(max((os.cpu_count() or 1) // 2, 1), 4)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="passwords")
        self.turns = threading.BoundedSemaphore(workers)  # for those who check in threads of their own
        self._pending: dict[bytes, list[Callable[[User | None], None]]] = {}

    def known(self, name: str, password: bytes) -> User | None:
        """The user, where this very password was right a short while ago and still is the one in the file."""
        user = self.users.current().get(name)
        if user is None or user.disabled:
            return None
        mark = self._mark(user, password)
        with self._lock:
            until = self._remembered.get(mark, 0.0)
        return user if until > self._clock() else None

    def check(self, name: str, password: bytes) -> User | None:
        """The user whose password this is. It takes the time of one hash, whoever it is."""
        user = self.users.current().get(name)
        right = verify(user.hash if user is not None else self._nobody, password)
        if user is None or user.disabled or not right:
            return None
        mark = self._mark(user, password)
        with self._lock:
            self._remembered.pop(mark, None)
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[mark] = self._clock() + REMEMBER_SECONDS
        return user

    def check_aside(self, name: str, password: bytes, done: Callable[[User | None], None]) -> bool:
        """The same in a thread, from which `done` is called. False: too many wait already. Those who ask the same at
        the same time share one answer."""
        mark = self._mark(User(name, ""), password)
        with self._lock:
            waiting = self._pending.get(mark)
            if waiting is not None:
                waiting.append(done)
                return True
            if len(self._pending) >= MAX_PENDING:
                return False
            self._pending[mark] = [done]

        def finish(future: Future[User | None]) -> None:
            with self._lock:
                waiting = self._pending.pop(mark)
            found = None if future.cancelled() or future.exception() is not None else future.result()
            for one in waiting:
                one(found)

        self._pool.submit(self.check, name, password).add_done_callback(finish)
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _mark(self, user: User, password: bytes) -> bytes:
        """What is remembered instead of a password: without our key nothing can be told from it, and a changed hash in
        the file makes another."""
        text = b"\0".join((user.name.encode("utf-8", "surrogateescape"), user.hash.encode(), password))
        return hashlib.blake2b(text, key=self._key, digest_size=32).digest()


def host_of(peer: str) -> str:
    """The address of `address:port`, `[address]:port`, or an address alone."""
    if peer.startswith("["):
        return peer[1:].partition("]")[0]
    return peer.partition(":")[0] if peer.count(":") == 1 else peer


def _keys_of(user: str, address: str) -> tuple[tuple[str, int], tuple[str, int]]:
    """What an attempt is counted under, and how many failures of each are free."""
    network = _network_of(address)
    return (f"{network} {user[:MAX_NAME]}", FREE_FAILURES), (network, FREE_OF_ADDRESS)


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
