"""The keeper thread: renews the lease, so that whoever waits for the store can tell a living owner from a dead one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from sluice.store.redis.errors import passes
from sluice.store.redis.ownership.lease import Lease
from sluice.store.redis.connection import Link, patiently
from sluice.store.redis.log.frame_losses import LossDetector

_RELEASE_SECONDS = 1.0  # what a stop tries to give the store back at once


class LeaseKeeper:
    def __init__(
        self,
        link: Link,
        lease: Lease,
        renew_seconds: float,
        detector: LossDetector,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._link = link
        self._lease = lease
        self._renew_seconds = renew_seconds
        self._detector = detector
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._stopping = threading.Event()
        self._worker = threading.Thread(target=self._run, name="sluice-redis-keeper", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def stop(self) -> None:
        """Give the store back, unless Redis does not answer: then the lease lapses."""
        self._stopping.set()
        self._worker.join()
        try:
            patiently(partial(self._lease.release, self._link), _RELEASE_SECONDS)
        except Exception as fault:
            if not passes(fault):
                raise
        self._link.close()

    def _run(self) -> None:
        while not self._stopping.wait(self._renew_seconds):
            try:
                confirmed = self._detector.confirmed  # before Redis is asked: it has this one or a later one
                has = self._lease.renew(self._link)
                if has < confirmed:
                    self._tell(self._detector.record(has, self._link))
                    return
            except Exception as fault:
                if not passes(fault):
                    self._tell(self._detector.explain(fault, self._link))
                    return

    def _tell(self, fault: Exception) -> None:
        try:
            self._call_soon_threadsafe(self._on_failure, fault)
        except RuntimeError:
            pass  # the loop is closed
