"""The ownership of a store: a key that expires unless it is renewed, and a token that grows.

The lease keeps two brokers from using one store at the same time. The token, checked in every
script that writes, guarantees it where time alone cannot. The owner renews the lease in a thread,
so that waiting brokers see that it is alive. A standby broker opens no listener and holds no
resources: it reads the owner periodically, and takes the store when the owner has released it or
the lease has expired.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sluice.errors import StoreLocked
from sluice.store.redis.connection import (
    Argument,
    Command,
    RedisChannel,
    RedisServer,
    ReplicaAcks,
    retry_while_disconnected,
    script_command,
)
from sluice.store.redis.errors import error_text, is_transient
from sluice.store.redis.keys import RedisKeys
from sluice.store.redis.log import LossDetector
from sluice.store.redis.ownership.process_identity import ProcessIdentity, owner_name
from sluice.store.redis.scripts import ACQUIRE, FORCE_ACQUIRE, RELEASE, RENEW, Script

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.25  # interval of checks while waiting for the lease
_RELEASE_SECONDS = 1.0  # time limit for releasing the store when the broker stops


class StoreLease:
    def __init__(self, keys: RedisKeys, seconds: float) -> None:
        self._keys = [keys.lease, keys.fence]
        self._log = keys.log
        self._milliseconds = int(seconds * 1000)
        self._process = ProcessIdentity.of_this_process()
        self._owner = str(self._process)
        self.token = 0

    def acquire(self, channel: RedisChannel, location: str) -> None:
        """Take the store.

        If the owner was killed on this host, its process is gone, and the store is taken at once.
        If it was killed elsewhere, its lease expires, so wait for that time. An owner that renews
        its lease meanwhile is alive, and the store stays locked.
        """
        last_ttl = -1
        while True:
            response = self._run(channel, ACQUIRE)
            if int(response[0]) > 0:
                self.token = int(response[0])
                return
            owner = bytes(response[1]).decode(errors="replace")
            if self._take_over_from_ended(channel, owner):
                return
            ttl = int(response[2])
            if last_ttl >= 0 and ttl > last_ttl:
                raise StoreLocked(location, owner_name(owner))
            if last_ttl < 0:
                log.warning(
                    "store has an owner, waiting for its lease to expire",
                    extra={"owner": owner_name(owner), "ms": ttl},
                )
            last_ttl = ttl
            time.sleep(min(_POLL_SECONDS, max(ttl, 1) / 1000))

    def _take_over_from_ended(self, channel: RedisChannel, owner: str) -> bool:
        """Take the store from an owner whose process has provably ended, unless it has another.

        A write of the ended process may still be on its way; Redis refuses it by its token.
        """
        process = ProcessIdentity.parse(owner)
        if process is None or not process.has_provably_ended(self._process):
            return False
        token = int(self._run(channel, FORCE_ACQUIRE, owner)[0])
        if token > 0:
            self.token = token
            log.info("store taken from an ended process", extra={"owner": owner_name(owner)})
        return token > 0

    def force_acquire(self, channel: RedisChannel) -> None:
        """Take the store from an owner that is known to be dead.

        If the owner is alive after all, the token prevents its writes.
        """
        self.token = int(self._run(channel, FORCE_ACQUIRE, "")[0])

    def _run(self, channel: RedisChannel, script: Script, *arguments: Argument) -> list[Any]:
        command = script_command(script, self._keys, self._owner, self._milliseconds, *arguments)
        response: list[Any] = channel.execute([(self._keys[0], command)])[0]
        return response

    def renew(self, channel: RedisChannel, acks: ReplicaAcks | None) -> tuple[int, int]:
        """Renew the lease; return the last frame in Redis, and how many replicas have the lease.

        Without `acks` the latter is 0.
        """
        renewal = script_command(RENEW, self._keys, self.token, self._owner, self._milliseconds)
        commands: list[tuple[str, Command]] = [
            (self._keys[0], renewal),
            (self._log, ["HGET", self._log, "frame"]),
        ]
        if acks is not None:
            commands.append((self._log, acks.command()))
        responses = channel.execute(commands)
        return int(responses[1] or 0), 0 if acks is None else acks.count_in(responses[2])

    def release(self, channel: RedisChannel) -> None:
        channel.execute([(self._keys[0], script_command(RELEASE, self._keys, self.token))])


class LeaseRenewer:
    """The thread that renews the lease.

    It also follows a promotion by Sentinels, and reports in time when Redis has too few replicas:
    `on_shortage` is called with the reason after `wait_seconds`, and with an empty string when
    there are enough again.
    """

    def __init__(
        self,
        server: RedisServer,
        lease: StoreLease,
        renew_seconds: float,
        wait_seconds: float,
        acks: ReplicaAcks | None,
        loss_detector: LossDetector,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
        on_shortage: Callable[[str], None],
    ) -> None:
        self._server = server
        self._channel = server.open_channel()
        self._lease = lease
        self._renew_seconds = renew_seconds
        self._wait_seconds = wait_seconds
        self._acks = acks
        self._loss_detector = loss_detector
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._on_shortage = on_shortage
        self._enough_at = time.monotonic()  # last time with enough replicas
        self._is_short = False
        self._stopping = threading.Event()
        self._worker = threading.Thread(target=self._run, name="sluice-redis-keeper", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """Release the store. If Redis does not answer, the lease expires."""
        self._stopping.set()
        self._worker.join()
        try:
            retry_while_disconnected(partial(self._lease.release, self._channel), _RELEASE_SECONDS)
        except Exception as fault:
            if not is_transient(fault):
                raise
        self._channel.close()

    def _run(self) -> None:
        while not self._stopping.wait(self._renew_seconds):
            try:
                # Read first: Redis must have this frame or a later one.
                confirmed = self._loss_detector.confirmed_frame
                self._server.refresh()
                frame_in_redis, replicas = self._lease.renew(self._channel, self._acks)
                if frame_in_redis < confirmed:
                    loss = self._loss_detector.record_loss(frame_in_redis, self._channel)
                    self._notify(self._on_failure, loss)
                    return
                self._check_replicas(replicas)
            except Exception as fault:
                if not is_transient(fault):
                    error = self._loss_detector.to_store_error(fault, self._channel)
                    self._notify(self._on_failure, error)
                    return

    def _check_replicas(self, replicas: int) -> None:
        acks = self._acks
        if acks is None:
            return
        now = time.monotonic()
        if replicas >= acks.count:
            self._enough_at = now
            if self._is_short:
                self._is_short = False
                self._notify(self._on_shortage, "")
        elif now - self._enough_at >= self._wait_seconds and not self._is_short:
            self._is_short = True
            self._notify(self._on_shortage, acks.shortage(replicas))

    def _notify(self, callback: Callable[..., object], argument: object) -> None:
        try:
            self._call_soon_threadsafe(callback, argument)
        except RuntimeError:
            pass  # the loop is closed


def read_owner(url: str, prefix: str, answer_seconds: float) -> str:
    """Return the owner of the store, empty for none and for a process that has ended.

    A Redis that does not answer may have an owner: its error is returned instead.
    """
    keys = RedisKeys(prefix)
    server = RedisServer(url, answer_seconds)
    try:
        server.detect()
        channel = server.open_channel()
        try:
            owner = channel.execute([(keys.lease, ["GET", keys.lease])])[0]
        finally:
            channel.close()
    except Exception as fault:
        if not is_transient(fault):
            raise
        return f"unknown ({error_text(fault)})"
    finally:
        server.close()
    found = bytes(owner or b"").decode(errors="replace")
    process = ProcessIdentity.parse(found)
    if process is not None and process.has_provably_ended(ProcessIdentity.of_this_process()):
        return ""
    return owner_name(found)
