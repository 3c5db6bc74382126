"""What a module of jobs defines: which functions do the jobs of which queues, and how they are run.

app = Worker(name="thumbnails")

@app.task("images", concurrency=10, reject=(NotAnImage,))
async def resize(job: Resize) -> None: ...

$ sluice worker images:app
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, ParamSpec, TypeVar

import uvloop

from sluice.client import Backoff, Client, ConnectFailed
from sluice.client.options import reconnect_delay
from sluice.errors import ConfigError
from sluice.worker.adaptive_prefetch import CallLater
from sluice.worker.idempotency import DoneLog
from sluice.worker.running_worker import Running
from sluice.worker.task import DEFAULT_CONCURRENCY, Task, TaskOptions

log = logging.getLogger("sluice.worker")

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_URL: Final = "mqtt://127.0.0.1:1883"
# A short break of the line costs nothing: the broker keeps what we hold. A worker that dies gives it back after this.
SESSION_SECONDS: Final = 10


class Worker:
    """`name` begins the client id, and is the group of tasks that name none. `options` are those of `Client`."""

    def __init__(
        self,
        url: str | None = None,
        *,
        name: str = "worker",
        grace_seconds: float = 30.0,
        extend_seconds: float = 10.0,
        **options: Any,
    ) -> None:
        if options.get("version", 5) != 5:
            raise ConfigError(
                "a worker speaks MQTT 5.0",
                "Leave version out; for 3.1.1 there is client.consumer(...)",
            )
        self.url = url
        self.name = name
        self.grace_seconds = grace_seconds
        self.extend_seconds = extend_seconds
        self.tasks: list[Task[..., Any]] = []
        self._options = options
        self._stop: Callable[[], None] | None = None

    def task(
        self,
        queue: str,
        *,
        group: str | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        prefetch: int | None = None,
        reject: type[Exception] | Sequence[type[Exception]] = (),
        timeout: float | None = None,
        done: DoneLog | None = None,
        start: str | None = None,
    ) -> Callable[[Callable[P, R]], Task[P, R]]:
        """The decorated function does the jobs of `queue`, a coroutine on the loop, any other in `concurrency` threads.

        Returning acks the job, and answers it if it asks for an answer. An exception nacks it with its text; those in
        `reject`, and a payload that cannot be read, make it a dead letter at once. A job that takes long is extended
        for as long as it runs, up to `timeout` seconds. `done` skips jobs that are done already.

        A worker takes as many jobs as it runs at once, so that jobs never wait here while another worker
        is idle, and some more while jobs are short. `prefetch` sets a fixed number instead."""
        queue = queue.removeprefix("$queue/")
        if concurrency < 1 or (prefetch is not None and prefetch < 1):
            raise ConfigError(
                f"concurrency is {concurrency} and prefetch {prefetch}", "Each is at least 1"
            )
        if any(task.options.queue == queue for task in self.tasks):
            raise ConfigError(
                f"{queue} has a task already",
                "Use one task per queue, and a second Worker for a second group",
            )
        rules = TaskOptions(
            queue=queue,
            group=group or self.name,
            concurrency=concurrency,
            prefetch=prefetch,
            reject=(reject,) if isinstance(reject, type) else tuple(reject),
            timeout=timeout,
            done=done,
            start=start,
        )

        def register(function: Callable[P, R]) -> Task[P, R]:
            task = Task(function, rules)
            self.tasks.append(task)
            return task

        return register

    # Running

    def run(self) -> None:
        """Work until SIGTERM or SIGINT. A second signal does not wait for jobs that run."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve(signals=True))

    def stop(self) -> None:
        """End `serve`, as SIGTERM does. Call it in the loop of the worker."""
        if self._stop is not None:
            self._stop()

    async def serve(self, *, signals: bool = False) -> None:
        """Connect, however long that takes, and work until `stop`."""
        stopping = asyncio.Event()
        force_stop = asyncio.Event()

        def stop() -> None:
            (force_stop if stopping.is_set() else stopping).set()

        loop = asyncio.get_running_loop()
        self._stop = stop
        if signals:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop)
        try:
            client = await _run_unless(stopping, self._connect())
            if client is None:
                return
            try:
                running = await self.start(client)
                try:
                    await _run_unless(stopping, running.finished())
                    log.info("stopping")
                    await _run_unless(force_stop, running.stop(self.grace_seconds))
                finally:
                    await running.stop(0.0)
                log.info("stopped after %d jobs", running.done_count)
            finally:
                await client.close(session_expiry=0)
                await self._close_done_logs()
        finally:
            self._stop = None
            if signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)

    async def start(self, client: Client, call_later: CallLater | None = None) -> Running:
        """The tasks at work on a connection that somebody else looks after: for programs that do more than this, and
        for tests."""
        if not self.tasks:
            raise ConfigError(
                "the worker has no tasks", "Decorate a function with @app.task(queue)"
            )
        later: CallLater = call_later or asyncio.get_running_loop().call_later
        running = Running(client, self.tasks, self.extend_seconds, later)
        await running.start()
        return running

    def make_client(self, **more: Any) -> Client:
        """A client as this worker wants it."""
        options: dict[str, Any] = {
            "client_id": f"{self.name}-{secrets.token_hex(4)}",
            "session_expiry": SESSION_SECONDS,
        }
        url = self.url or os.environ.get("SLUICE_MQTT") or DEFAULT_URL
        return Client.from_url(url, **{**options, **self._options, **more})

    async def _connect(self) -> Client:
        """A worker may start before its broker: what cannot be reached is tried again, a refusal is not."""
        policy = Backoff()
        attempt = 0
        while True:
            client = self.make_client()
            try:
                await client.connect()
                return client
            except ConnectFailed as failure:
                delay = reconnect_delay(attempt, policy, 0.5)
                attempt += 1
                log.warning("%s; next attempt in %.1f s", failure, delay)
                await asyncio.sleep(delay)

    async def _close_done_logs(self) -> None:
        for done_log in {id(task.options.done): task.options.done for task in self.tasks}.values():
            if done_log is not None:
                await done_log.close()


async def _run_unless(event: asyncio.Event, work_coroutine: Coroutine[Any, Any, R]) -> R | None:
    """What `doing` returns; None if the event comes first, which ends it."""
    work = asyncio.ensure_future(work_coroutine)
    watch = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for one in (work, watch):
            if not one.done():
                one.cancel()
                await asyncio.wait([one])
