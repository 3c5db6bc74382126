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
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, ParamSpec, Self, TypeVar, overload

import uvloop

from sluice.backoff import Backoff
from sluice.client import Client, ConnectFailed, Delivery
from sluice.errors import ConfigError
from sluice.worker.adaptive_prefetch import CallLater
from sluice.worker.idempotency import DeduplicationStore
from sluice.worker.middleware import Hook, Middleware
from sluice.worker.retry_policy import RetryPolicy
from sluice.worker.running_worker import Running
from sluice.worker.sending import JobSender
from sluice.worker.supervisor import stop_with_supervisor
from sluice.worker.task import (
    DEFAULT_CONCURRENCY,
    AnyTask,
    Task,
    TaskDecorator,
    TaskOptions,
)

log = logging.getLogger("sluice.worker")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
F = TypeVar("F", bound=Hook)
M = TypeVar("M", bound=Middleware)

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
        self.tasks: list[AnyTask] = []
        self.startup: list[Hook] = []
        self.shutdown: list[Hook] = []
        self.middlewares: list[Middleware] = []
        self._sender = JobSender(name, self.make_client)
        self._options = options
        self._stop: Callable[[], None] | None = None

    @overload
    def task(self, function: Callable[[Delivery], R], /) -> Task[[Delivery], R, [bytes]]: ...

    @overload
    def task(  # type: ignore[overload-overlap]  # of two deliveries
        self, function: Callable[[T, Delivery], R], /
    ) -> Task[[T, Delivery], R, [T]]: ...

    @overload
    def task(self, function: Callable[[Delivery, T], R], /) -> Task[[Delivery, T], R, [T]]: ...

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R, P]: ...

    @overload
    def task(
        self,
        queue: str = "",
        *,
        group: str | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        prefetch: int | None = None,
        retry: RetryPolicy | int | None = None,
        reject: type[Exception] | Sequence[type[Exception]] = (),
        timeout: float | None = None,
        deduplicate: DeduplicationStore | None = None,
        start: str | None = None,
    ) -> TaskDecorator: ...

    def task(
        self,
        queue: str | Callable[..., Any] = "",
        *,
        group: str | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        prefetch: int | None = None,
        retry: RetryPolicy | int | None = None,
        reject: type[Exception] | Sequence[type[Exception]] = (),
        timeout: float | None = None,
        deduplicate: DeduplicationStore | None = None,
        start: str | None = None,
    ) -> Any:
        """Return a decorator for the function that processes the jobs of `queue`.

        Without a queue (also as `@app.task`), the queue has the name of the function. A coroutine
        runs on the loop, any other function in `concurrency` threads. A return acks the job, and
        replies if the job has a response topic. An exception nacks it with its text; exceptions in
        `reject` and an unreadable payload make it a dead letter at once. The lease of a long job is
        extended as long as it runs, up to `timeout` seconds. `deduplicate` skips jobs that have
        succeeded before. `retry`, a `RetryPolicy` or a number of retries, becomes the policy of the
        queue when the worker starts.

        A worker takes as many jobs as it runs at once, so that no job is buffered here while
        another worker is idle, and some more while jobs are short. `prefetch` sets a fixed number.
        """
        if concurrency < 1 or (prefetch is not None and prefetch < 1):
            raise ConfigError(
                f"concurrency is {concurrency} and prefetch {prefetch}", "Each is at least 1"
            )

        def register(function: Callable[..., Any]) -> AnyTask:
            given = queue if isinstance(queue, str) else ""
            name = given.removeprefix("$queue/") or getattr(function, "__name__", "")
            if not name:
                raise ConfigError(
                    f"{function!r} has no name for its queue", 'Name the queue: @app.task("jobs")'
                )
            if retry is not None and ("+" in name or "#" in name):
                raise ConfigError(
                    f"{name!r} is a filter, and a retry policy belongs to one queue",
                    "Leave retry out, and set the policy in a template of the server",
                )
            if any(task.options.queue == name for task in self.tasks):
                raise ConfigError(
                    f"{name} has a task already",
                    "Use one task per queue, and a second Worker for a second group",
                )
            options = TaskOptions(
                queue=name,
                group=group or self.name,
                concurrency=concurrency,
                prefetch=prefetch,
                reject=(reject,) if isinstance(reject, type) else tuple(reject),
                timeout=timeout,
                deduplicate=deduplicate,
                start=start,
                retry=RetryPolicy(max_retries=retry) if isinstance(retry, int) else retry,
            )
            task: AnyTask = Task(function, options, self._sender)
            self.tasks.append(task)
            return task

        return register if isinstance(queue, str) else register(queue)

    def on_startup(self, function: F) -> F:
        """Decorate a function that runs once connected, before the first job: open resources."""
        self.startup.append(function)
        return function

    def on_shutdown(self, function: F) -> F:
        """Decorate a function that runs after the last job, before the connection is closed."""
        self.shutdown.append(function)
        return function

    def middleware(self, function: M) -> M:
        """Decorate `async def around(delivery, task, call_next)`, which runs around each job.

        `await call_next()` decodes the payload, calls the handler and returns its result. An
        exception that it lets through, or raises, decides about the job as one of the handler does.
        The first middleware is the outermost.
        """
        self.middlewares.append(function)
        return function

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
            stop_with_supervisor(loop, stop)
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
                await self._sender.close()
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
        for task in self.tasks:
            if task.options.retry is not None:
                await client.declare_queue(
                    task.options.queue, retry_policy=task.options.retry.as_config()
                )
        running = Running(
            client,
            self.tasks,
            self.extend_seconds,
            later,
            self.startup,
            self.shutdown,
            self.middlewares,
            self._sender,
        )
        await running.start()
        return running

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Work in the background of a larger program, such as a web server.

        An error that ends the worker is logged, and raised at the end of the block.
        """
        work = asyncio.create_task(self.serve(), name=f"sluice-{self.name}")
        work.add_done_callback(self._log_failure)
        try:
            await asyncio.sleep(0)  # `stop` works from here on
            yield
        finally:
            self.stop()
            await work

    def _log_failure(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            log.error("worker %s ended: %s", self.name, error)

    async def close(self) -> None:
        """Close the connection that `send` has opened, if the worker does not run here."""
        await self._sender.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self.close()

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
