"""The writer thread: writes frames and snapshots to Redis in the order of submission.

A write without a reply is retried without limit: Redis knows a frame by its number and does not
store it twice. The same holds for a frame that too few replicas have acknowledged
(`redis.min_replicas`). Meanwhile nothing is acknowledged, and after a while the loop is notified,
so that publishers get an error instead of waiting. A permanent error (the store has a new owner,
Redis has lost confirmed frames) ends the thread, and with it the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from sluice.errors import StoreFailed
from sluice.store.redis.connection import RedisChannel
from sluice.store.redis.errors import TooFewReplicas, error_text, is_transient
from sluice.store.redis.log.frame_losses import LossDetector
from sluice.store.redis.log.write_plan import PlanWriter, WritePlan

_MIN_BACKOFF_SECONDS = 0.02
_MAX_BACKOFF_SECONDS = 1.0
_FIRST_WRITE_NUMBER = 1_000_000  # `takeover` uses the numbers below


class Job:
    """A job for the writer, repeated until it succeeds. `finish` gets the result of `run`."""

    frame_number = 0  # number of the frame that it writes; 0 for none

    def run(self, channel: RedisChannel, token: int, write_number: int) -> object:
        raise NotImplementedError

    def finish(self, result: object) -> None: ...


class WriteJob(Job):
    """A write whose plan is built in the writer's thread, so that it costs the loop nothing."""

    def __init__(
        self, plan_writer: PlanWriter, build_plan: Callable[[], WritePlan], done: Callable[[], None]
    ) -> None:
        self._plan_writer = plan_writer
        self._build_plan = build_plan
        self._plan: WritePlan | None = None
        self._done = done

    def run(self, channel: RedisChannel, token: int, write_number: int) -> object:
        if self._plan is None:
            self._plan = self._build_plan()
            self.frame_number = self._plan.frame_number
        self._plan_writer.write(channel, self._plan, token, write_number)
        return None

    def finish(self, result: object) -> None:
        self._done()


class CommandJob(Job):
    def __init__(
        self, command: Callable[[RedisChannel, int], object], done: Callable[[Any], None]
    ) -> None:
        self._command = command
        self._done = done

    def run(self, channel: RedisChannel, token: int, write_number: int) -> object:
        return self._command(channel, token)

    def finish(self, result: object) -> None:
        self._done(result)


class LogWriter:
    def __init__(
        self,
        channel: RedisChannel,
        token: int,
        loss_detector: LossDetector,
        wait_seconds: float,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
        on_stall: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._token = token
        self._loss_detector = loss_detector
        self._wait_seconds = wait_seconds
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._on_stall = on_stall
        self._is_stalled = False
        self.replica_timeouts = 0  # writes that replicas did not acknowledge in time
        # Number of the last write. It tells Redis which writes are done.
        self._write_number = _FIRST_WRITE_NUMBER
        self._stopping = threading.Event()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="sluice-redis-writer", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> bool:
        """Finish all jobs as long as Redis answers; return whether all are finished."""
        self._stopping.set()
        self._jobs.put(None)
        self._worker.join()
        self._channel.close()
        return self._jobs.empty()

    # -- in the writer thread

    def _run(self) -> None:
        try:
            while True:
                job = self._jobs.get()
                if job is None:
                    return
                self._notify(job.finish, self._run_job(job))
        except Exception as error:
            failure = (
                error
                if isinstance(error, StoreFailed)
                else self._loss_detector.to_store_error(error, self._channel)
            )
            if failure is not error:
                failure.__cause__ = error
            self._notify(self._on_failure, failure)

    def _run_job(self, job: Job) -> object:
        self._write_number += 1
        backoff = _MIN_BACKOFF_SECONDS
        started_at = time.monotonic()
        while True:
            try:
                result = job.run(self._channel, self._token, self._write_number)
                break
            except Exception as fault:
                if not is_transient(fault):
                    raise
                if isinstance(fault, TooFewReplicas):
                    self.replica_timeouts += 1
                now = time.monotonic()
                if self._stopping.is_set() and now - started_at > self._wait_seconds:
                    raise StoreFailed(
                        f"Redis does not answer, and the broker is stopping: {error_text(fault)}"
                    ) from fault
                if not self._is_stalled and now - started_at >= self._wait_seconds:
                    self._is_stalled = True
                    self._notify(self._on_stall, error_text(fault))
            time.sleep(backoff)
            backoff = min(backoff * 2, _MAX_BACKOFF_SECONDS)
        if job.frame_number:
            self._loss_detector.confirmed_frame = job.frame_number
        if self._is_stalled:
            self._is_stalled = False
            self._notify(self._on_stall, "")
        return result

    def _notify(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            pass  # the loop is closed
