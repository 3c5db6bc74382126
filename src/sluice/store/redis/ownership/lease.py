"""Whose the store is: a key that lapses unless it is renewed, and a token that grows with every owner.

The lease keeps two brokers from using one store at the same time; the token, checked inside every script that writes,
makes sure of it where time alone cannot.
"""

from __future__ import annotations

import logging
import os
import socket
import time

from sluice.errors import StoreLocked
from sluice.store.redis.keys import Keys
from sluice.store.redis.connection import Link, call
from sluice.store.redis.scripts import ACQUIRE, RELEASE, RENEW, SEIZE

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25  # how often one who waits for the lease looks at it


class Lease:
    def __init__(self, keys: Keys, seconds: float) -> None:
        self._keys = [keys.lease, keys.fence]
        self._log = keys.log
        self._milliseconds = int(seconds * 1000)
        self._who = f"{socket.gethostname()}:{os.getpid()}:{os.urandom(4).hex()}"
        self.token = 0

    def acquire(self, link: Link, where: str) -> None:
        """Take the store. One whose owner was killed is free when its lease has lapsed, so that long we wait; one
        that is renewed meanwhile has an owner that lives."""
        left = -1
        while True:
            answer = link.ask([(self._keys[0], call(ACQUIRE, self._keys, self._who, self._milliseconds))])[0]
            if int(answer[0]) > 0:
                self.token = int(answer[0])
                return
            now = int(answer[2])
            if left >= 0 and now > left:
                raise StoreLocked(where, bytes(answer[1]).decode(errors="replace"))
            if left < 0:
                who = bytes(answer[1]).decode(errors="replace")
                log.warning(
                    "the store has an owner: waiting for its lease to lapse", extra={"owner": who, "ms": now}
                )
            left = now
            time.sleep(min(_LOOK_SECONDS, max(now, 1) / 1000))

    def seize(self, link: Link) -> None:
        """Take the store from an owner that is known to be dead. Should it live after all, the token keeps it from
        writing anything more."""
        answer = link.ask([(self._keys[0], call(SEIZE, self._keys, self._who, self._milliseconds))])[0]
        self.token = int(answer[0])

    def renew(self, link: Link) -> int:
        """Renew the lease, and return the last frame that Redis has."""
        renewal = call(RENEW, self._keys, self.token, self._who, self._milliseconds)
        answers = link.ask(
            [(self._keys[0], renewal), (self._log, ["HGET", self._log, "frame"])],
        )
        return int(answers[1] or 0)

    def release(self, link: Link) -> None:
        link.ask([(self._keys[0], call(RELEASE, self._keys, self.token))])
