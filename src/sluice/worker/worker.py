"""The definition of a worker: which functions process the jobs of which queues, and how they run.

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

from sluice.backoff import Backoff
from sluice.client import Client, ConnectFailed
from sluice.errors import ConfigError
from sluice.worker.adaptive_prefetch import CallLater
from sluice.worker.idempotency import DeduplicationStore
from sluice.worker.running_worker import Running
from sluice.worker.task import DEFAULT_CONCURRENCY, Task, TaskOptions

log = logging.getLogger("sluice.worker")

P = ParamSpec("P")
R = TypeVar("R")

DEFAULT_URL: Final = "mqtt://127.0.0.1:1883"
# The broker keeps our leases during a short loss of the connection. After this time it releases the
# deliveries of a dead worker.
SESSION_SECONDS: Final = 10


class Worker:
    """A set of tasks. `options` are those of `Client`.

    `name` is the prefix of the client id and the default group of the tasks.
    """

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
                "a worker speaks MQTT 5.0 only",
                "Leave version out; for 3.1.1 use client.consumer(...)",
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
        deduplicate: DeduplicationStore | None = None,
        start: str | None = None,
    ) -> Callable[[Callable[P, R]], Task[P, R]]:
        """Return a decorator for the function that processes the jobs of `queue`.

        A coroutine runs on the loop, any other function in `concurrency` threads. A return acks the
        job, and replies if the job has a response topic. An exception nacks it with its text;
        exceptions in `reject` and an unreadable payload make it a dead letter at once. The lease of
        a long job is extended as long as it runs, up to `timeout` seconds. `deduplicate` skips
        jobs that have succeeded before.

        A worker takes as many jobs as it runs at once, so that no job is buffered here while
        another worker is idle, and some more while jobs are short. `prefetch` sets a fixed number.
        """
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
        task_options = TaskOptions(
            queue=queue,
            group=group or self.name,
            concurrency=concurrency,
            prefetch=prefetch,
            reject=(reject,) if isinstance(reject, type) else tuple(reject),
            timeout=timeout,
            deduplicate=deduplicate,
            start=start,
        )

        def register(function: Callable[P, R]) -> Task[P, R]:
            task = Task(function, task_options)
            self.tasks.append(task)
            return task

        return register

    # Running

    def run(self) -> None:
        """Work until SIGTERM or SIGINT. A second signal does not wait for running jobs."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve(signals=True))

    def stop(self) -> None:
        """End `serve`, as SIGTERM does. Call it in the loop of the worker."""
        if self._stop is not None:
            self._stop()

    async def serve(self, *, signals: bool = False) -> None:
        """Connect, with retries, and work until `stop`."""
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
                count = running.done_count
                log.info("stopped after %d job%s", count, "" if count == 1 else "s")
            finally:
                await client.close(session_expiry=0)
                await self._close_deduplication_stores()
        finally:
            self._stop = None
            if signals:
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.remove_signal_handler(number)

    async def start(self, client: Client, call_later: CallLater | None = None) -> Running:
        """Start the tasks on a connection of the caller: for larger programs and for tests."""
        if not self.tasks:
            raise ConfigError(
                "the worker has no tasks", "Decorate a function with @app.task(queue)"
            )
        later: CallLater = call_later or asyncio.get_running_loop().call_later
        running = Running(client, self.tasks, self.extend_seconds, later)
        await running.start()
        return running

    def make_client(self, **more: Any) -> Client:
        """Return a client with the options of this worker."""
        options: dict[str, Any] = {
            "client_id": f"{self.name}-{secrets.token_hex(4)}",
            "session_expiry": SESSION_SECONDS,
        }
        url = self.url or os.environ.get("SLUICE_MQTT") or DEFAULT_URL
        return Client.from_url(url, **{**options, **self._options, **more})

    async def _connect(self) -> Client:
        """Connect, with retries: a worker may start before its broker. A refusal is not retried."""
        policy = Backoff()
        attempt = 0
        while True:
            client = self.make_client()
            try:
                await client.connect()
                return client
            except ConnectFailed as failure:
                delay = policy.delay(attempt, 0.5)
                attempt += 1
                log.warning("%s; next attempt in %.1f s", failure, delay)
                await asyncio.sleep(delay)

    async def _close_deduplication_stores(self) -> None:
        stores = {id(task.options.deduplicate): task.options.deduplicate for task in self.tasks}
        for store in stores.values():
            if store is not None:
                await store.close()


async def _run_unless(event: asyncio.Event, work_coroutine: Coroutine[Any, Any, R]) -> R | None:
    """Return the result of a coroutine; if the event is set first, cancel it and return None."""
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
