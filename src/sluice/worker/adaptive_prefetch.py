"""Adapt the number of jobs that a worker holds beyond those that it runs.

A buffered job is kept from idle workers elsewhere, so a worker normally takes no more jobs than it
can run. Only if jobs are so short that the round trip to the broker would leave it idle, it takes
`AHEAD_FACTOR` times as many. When a buffered job has waited for `MAX_WAIT_SECONDS`, because the
jobs before it are long, the worker releases it for another worker and returns to the normal number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

from sluice.client import Delivery
from sluice.client.errors import ClientError
from sluice.client.queues import Consumer

AHEAD_FACTOR: Final = 4
SHORT_SECONDS: Final = 0.02  # average duration of short jobs; a busy broker answers in some ms
MAX_WAIT_SECONDS: Final = 0.1
MIN_INCREASE_INTERVAL_SECONDS: Final = 5.0  # between two increases: each change is a SUBSCRIBE

CallLater = Callable[[float, Callable[[], None]], Any]


class AdaptivePrefetch:
    """Changes the prefetch of one consumer.

    `call_later` is that of the loop or of a virtual clock; `is_idle` returns whether no job runs or
    is buffered.
    """

    def __init__(
        self,
        consumer: Consumer,
        concurrency: int,
        call_later: CallLater,
        is_idle: Callable[[], bool],
    ) -> None:
        self._consumer = consumer
        self._concurrency = concurrency
        self._call_later = call_later
        self._is_idle = is_idle
        self._is_ahead = False
        self._jobs = 0  # since `_since`
        self._since = time.monotonic()
        self._not_before = 0.0
        self._oldest: Delivery | None = None  # the first buffered delivery at the last check
        self._timer: Any = None
        self._change_task: asyncio.Task[None] | None = None

    def job_ended(self) -> None:
        """Count a job, and increase the prefetch if the last jobs were short."""
        self._jobs += 1
        if self._jobs < AHEAD_FACTOR * self._concurrency:
            return
        now = time.monotonic()
        average = (now - self._since) * self._concurrency / self._jobs
        self._jobs = 0
        self._since = now
        if not self._is_ahead and average < SHORT_SECONDS and now >= self._not_before:
            self._is_ahead = True
            self._not_before = now + MIN_INCREASE_INTERVAL_SECONDS
            self._change(AHEAD_FACTOR * self._concurrency)
            self._timer = self._call_later(MAX_WAIT_SECONDS, self._check)

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._change_task is not None:
            self._change_task.cancel()
            await asyncio.wait([self._change_task])

    def _check(self) -> None:
        """Reset the prefetch if a job has waited since the last check, or if there is no work."""
        self._timer = None
        oldest = self._consumer.first_waiting()
        if self._is_idle() or (oldest is not None and oldest is self._oldest):
            self._oldest = None
            self._is_ahead = False
            self._change(self._concurrency)
            return
        self._oldest = oldest
        self._timer = self._call_later(MAX_WAIT_SECONDS, self._check)

    def _change(self, prefetch: int) -> None:
        if self._change_task is None or self._change_task.done():
            self._change_task = asyncio.create_task(self._set_prefetch(prefetch))

    async def _set_prefetch(self, prefetch: int) -> None:
        """Change the prefetch at the broker first, so that it does not redeliver released jobs."""
        request = asyncio.create_task(self._consumer.set_prefetch(prefetch))
        await asyncio.sleep(0)
        if prefetch == self._concurrency:
            self._consumer.release_all(self._consumer.take_waiting())
        try:
            await request
        except ClientError:
            pass  # the next subscription has the new prefetch
        finally:
            request.cancel()
