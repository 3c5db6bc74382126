"""The ownership of a store: a key that expires unless it is renewed, and a token that grows.

The lease keeps two brokers from using one store at the same time. The token, checked in every
script that writes, guarantees it where time alone cannot.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from sluice.errors import StoreLocked
from sluice.store.redis.connection import RedisChannel, script_command
from sluice.store.redis.keys import RedisKeys
from sluice.store.redis.scripts import ACQUIRE, FORCE_ACQUIRE, RELEASE, RENEW

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25  # interval of checks while waiting for the lease


class StoreLease:
    def __init__(self, keys: RedisKeys, seconds: float) -> None:
        self._keys = [keys.lease, keys.fence]
        self._log = keys.log
        self._milliseconds = int(seconds * 1000)
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
        self.token = 0

    def acquire(self, channel: RedisChannel, location: str) -> None:
        """Take the store.

        If the owner was killed, its lease expires, so wait for that time. An owner that renews its
        lease meanwhile is alive, and the store stays locked.
        """
        last_ttl = -1
        while True:
            response = channel.execute(
                [
                    (
                        self._keys[0],
                        script_command(ACQUIRE, self._keys, self._owner, self._milliseconds),
                    )
                ]
            )[0]
            if int(response[0]) > 0:
                self.token = int(response[0])
                return
            ttl = int(response[2])
            if last_ttl >= 0 and ttl > last_ttl:
                raise StoreLocked(location, bytes(response[1]).decode(errors="replace"))
            if last_ttl < 0:
                owner = bytes(response[1]).decode(errors="replace")
                log.warning(
                    "store has an owner, waiting for its lease to expire",
                    extra={"owner": owner, "ms": ttl},
                )
            last_ttl = ttl
            time.sleep(min(_POLL_SECONDS, max(ttl, 1) / 1000))

    def force_acquire(self, channel: RedisChannel) -> None:
        """Take the store from an owner that is known to be dead.

        If the owner is alive after all, the token prevents its writes.
        """
        response = channel.execute(
            [
                (
                    self._keys[0],
                    script_command(FORCE_ACQUIRE, self._keys, self._owner, self._milliseconds),
                )
            ]
        )[0]
        self.token = int(response[0])

    def renew(self, channel: RedisChannel) -> int:
        """Renew the lease and return the last frame in Redis."""
        renewal = script_command(RENEW, self._keys, self.token, self._owner, self._milliseconds)
        responses = channel.execute(
            [(self._keys[0], renewal), (self._log, ["HGET", self._log, "frame"])],
        )
        return int(responses[1] or 0)

    def release(self, channel: RedisChannel) -> None:
        channel.execute([(self._keys[0], script_command(RELEASE, self._keys, self.token))])
