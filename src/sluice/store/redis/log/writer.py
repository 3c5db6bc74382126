"""The writer thread: frames and snapshots, in the order in which the loop gave them, until Redis has each of them.

A write whose answer did not come is said again, for as long as it takes: Redis knows a frame by its number and does not
keep it twice. Meanwhile nobody is answered, and after a while the loop is told, so that publishers hear a refusal
instead of waiting. What cannot be mended by waiting (the store has a new owner, Redis has lost what it had confirmed)
ends the thread, and with it the process.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from sluice.errors import StoreFailed
from sluice.store.redis.errors import passes, text_of
from sluice.store.redis.connection import Link
from sluice.store.redis.log.frame_losses import LossDetector
from sluice.store.redis.log.write_plan import Plan, Scribe
from sluice.store.redis.ownership.takeover import FIRST_TURN

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 1.0


class Job:
    """Something for the writer to do, as often as it takes. `done` gets what `run` has answered."""

    number = 0  # of the frame that it writes; 0: none

    def run(self, link: Link, token: int, turn: int) -> object:
        raise NotImplementedError

    def done(self, answer: object) -> None: ...


class WriteJob(Job):
    """`make` puts together what is said, in the thread: it costs the loop nothing."""

    def __init__(self, scribe: Scribe, make: Callable[[], Plan], done: Callable[[], None]) -> None:
        self._scribe = scribe
        self._make = make
        self._plan: Plan | None = None
        self._done = done

    def run(self, link: Link, token: int, turn: int) -> object:
        if self._plan is None:
            self._plan = self._make()
            self.number = self._plan.number
        self._scribe.write(link, self._plan, token, turn)
        return None

    def done(self, answer: object) -> None:
        self._done()


class AskJob(Job):
    def __init__(self, ask: Callable[[Link, int], object], done: Callable[[Any], None]) -> None:
        self._ask = ask
        self._done = done

    def run(self, link: Link, token: int, turn: int) -> object:
        return self._ask(link, token)

    def done(self, answer: object) -> None:
        self._done(answer)


class Writer:
    def __init__(
        self,
        link: Link,
        token: int,
        detector: LossDetector,
        wait_seconds: float,
        call_soon_threadsafe: Callable[..., object],
        on_failure: Callable[[Exception], None],
        on_stall: Callable[[str], None],
    ) -> None:
        self._link = link
        self._token = token
        self._detector = detector
        self._wait_seconds = wait_seconds
        self._call_soon_threadsafe = call_soon_threadsafe
        self._on_failure = on_failure
        self._on_stall = on_stall
        self._stalled = False
        self._turn = FIRST_TURN  # how many writes there were: Redis knows by it which it has done
        self._stopping = threading.Event()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name="sluice-redis-writer", daemon=True)

    def start(self) -> None:
        self._worker.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def stop(self) -> bool:
        """Finish what was given, as long as Redis answers; whether all of it was."""
        self._stopping.set()
        self._jobs.put(None)
        self._worker.join()
        self._link.close()
        return self._jobs.empty()

    # -- in the thread

    def _run(self) -> None:
        try:
            while True:
                job = self._jobs.get()
                if job is None:
                    return
                self._tell(job.done, self._do(job))
        except Exception as error:
            fault = error if isinstance(error, StoreFailed) else self._detector.explain(error, self._link)
            if fault is not error:
                fault.__cause__ = error
            self._tell(self._on_failure, fault)

    def _do(self, job: Job) -> object:
        self._turn += 1
        pause = _FIRST_PAUSE
        since = time.monotonic()
        while True:
            try:
                answer = job.run(self._link, self._token, self._turn)
                break
            except Exception as fault:
                if not passes(fault):
                    raise
                now = time.monotonic()
                if self._stopping.is_set() and now - since > self._wait_seconds:
                    raise StoreFailed(
                        f"Redis does not answer, and we were asked to stop: {text_of(fault)}"
                    ) from fault
                if not self._stalled and now - since >= self._wait_seconds:
                    self._stalled = True
                    self._tell(self._on_stall, text_of(fault))
            time.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        if job.number:
            self._detector.confirmed = job.number
        if self._stalled:
            self._stalled = False
            self._tell(self._on_stall, "")
        return answer

    def _tell(self, callback: Callable[..., object], *facts: object) -> None:
        try:
            self._call_soon_threadsafe(callback, *facts)
        except RuntimeError:
            pass  # the loop is closed
