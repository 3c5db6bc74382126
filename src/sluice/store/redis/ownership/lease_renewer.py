"""The thread that renews the lease, so that waiting brokers see that the owner is alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from sluice.store.redis.connection import RedisChannel, retry_while_disconnected
from sluice.store.redis.errors import is_transient
from sluice.store.redis.log.frame_losses import LossDetector
from sluice.store.redis.ownership.lease import StoreLease

_RELEASE_SECONDS = 1.0  # time limit for releasing the store when the broker stops


class LeaseRenewer:
    def __init__(
        self,
        channel: RedisChannel,
        lease: StoreLease,
        renew_seconds: float,
        loss_detector: LossDetector,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._channel = channel
        self._lease = lease
        self._renew_seconds = renew_seconds
        self._loss_detector = loss_detector
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
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
                frame_in_redis = self._lease.renew(self._channel)
                if frame_in_redis < confirmed:
                    self._notify_failure(
                        self._loss_detector.record_loss(frame_in_redis, self._channel)
                    )
                    return
            except Exception as fault:
                if not is_transient(fault):
                    self._notify_failure(self._loss_detector.to_store_error(fault, self._channel))
                    return

    def _notify_failure(self, error: Exception) -> None:
        try:
            self._call_soon_threadsafe(self._on_failure, error)
        except RuntimeError:
            pass  # the loop is closed
