"""A task at work: as many lanes as it may do jobs at once, each doing one after the other.

A lane is one asyncio task for the whole life of the worker. A handler that never waits is called and acked within it,
without a task, a future or a turn of the loop of its own: that is why small jobs are cheap.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from sluice.client import Client, Delivery, UnreadablePayload
from sluice.client.errors import ClientError
from sluice.client.queues.consumer import Consumer
from sluice.client.queues.replies import response_topic_of
from sluice.worker.adaptive_prefetch import AdaptivePrefetch, CallLater
from sluice.worker.exceptions import Reject, Retry, describe
from sluice.worker.task import Task
from sluice.worker.thread_pool import HandlerThreadPool

log = logging.getLogger("sluice.worker")

YIELD_EVERY: Final = 32  # jobs that a lane does before the loop gets its turn


class TaskExecutor:
    """`call_later` is the loop's, or that of a virtual clock."""

    def __init__(
        self, client: Client, task: Task[..., Any], extend_seconds: float, call_later: CallLater
    ) -> None:
        rules = task.options
        self.task = task
        self._client = client
        self.consumer: Consumer = client.consumer(
            rules.queue,
            group=rules.group,
            prefetch=rules.prefetch or rules.concurrency,
            start=rules.start,
        )
        self.consumer.settler.adopts_redelivery = True
        self.active: dict[asyncio.Task[None], Delivery] = {}
        self.done_count = 0
        self._extend_seconds = extend_seconds
        self._call_later = call_later
        self._timer: Any = None
        self._seen: set[int] = set()
        self._is_stopping = False
        self._thread_pool: HandlerThreadPool | None = None
        self._adaptive_prefetch: AdaptivePrefetch | None = None
        self._runners: list[asyncio.Task[None]] = []

    async def start(self) -> list[asyncio.Task[None]]:
        """Join the group and begin; the lanes, which end by an error if the connection is lost for good."""
        rules = self.task.options
        await self.consumer.open()
        if not self.task.is_async:
            self._thread_pool = HandlerThreadPool(rules.concurrency, self.task.name)
        self._runners = [
            asyncio.create_task(self._run_jobs(), name=f"{self.task.name}-{number}")
            for number in range(rules.concurrency)
        ]
        self._timer = self._call_later(self._extend_seconds, self._extend)
        if rules.prefetch is None:
            self._adaptive_prefetch = AdaptivePrefetch(
                self.consumer, rules.concurrency, self._call_later, lambda: self.is_idle
            )
        log.info(
            "%s takes jobs of %s in group %s, %d at once",
            self.task.name, rules.queue, rules.group, rules.concurrency,
        )  # fmt: skip
        return self._runners

    @property
    def is_idle(self) -> bool:
        return not self.active and not self.consumer.buffered

    async def stop(self, grace_seconds: float) -> None:
        """No new jobs; those that run may end within `grace_seconds`, then they are given back."""
        self._is_stopping = True
        if self._adaptive_prefetch is not None:
            await self._adaptive_prefetch.stop()
        draining = asyncio.create_task(self._drain(grace_seconds))
        await asyncio.sleep(
            0
        )  # its SUBSCRIBE leaves before what is given back, or that would come again
        self.consumer.release_all(self.consumer.take_waiting())
        for runner in self._runners:
            if runner not in self.active:
                runner.cancel()
        if self.active:
            await asyncio.wait(list(self.active), timeout=grace_seconds)
        draining.cancel()
        await asyncio.wait([draining])
        for runner in list(self.active):
            log.warning(
                "%s was still at %s and gives it back", self.task.name, self.active[runner].id
            )
            runner.cancel()
        if self._runners:
            await asyncio.wait(self._runners)
            for runner in self._runners:
                if not runner.cancelled():
                    runner.exception()  # all of them hear of a lost connection; one of them has told
        if self._timer is not None:
            self._timer.cancel()
        if self._thread_pool is not None:
            self._thread_pool.stop()
        await self.consumer.close()

    async def _drain(self, grace_seconds: float) -> None:
        """Take no new jobs, so that others get the partitions at once. It runs beside the wait for the jobs: without a
        connection it takes until there is one."""
        if self.active and grace_seconds > 0:
            try:
                await self.consumer.set_prefetch(0)
            except ClientError:
                pass  # without a connection nothing new comes either

    # One lane

    async def _run_jobs(self) -> None:
        this = asyncio.current_task()
        assert this is not None
        consumer = self.consumer
        active = self.active
        count = 0
        while not self._is_stopping:
            delivery = await consumer.take()
            if delivery is None:
                return
            active[this] = delivery
            try:
                await self._handle(delivery)
            finally:
                del active[this]
            if self._adaptive_prefetch is not None:
                self._adaptive_prefetch.job_ended()
            count += 1
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _handle(self, delivery: Delivery) -> None:
        task = self.task
        done = task.options.done
        try:
            if done is not None and await done.has(_job_key(delivery)):
                log.info("%s skips %s: it is done already", task.name, delivery.id)
            else:
                arguments = task.arguments(delivery)
                if task.options.timeout is None:
                    value = await self._call(arguments)
                else:
                    async with asyncio.timeout(task.options.timeout):
                        value = await self._call(arguments)
                if done is not None:
                    await done.add(_job_key(delivery))
                if value is not None and response_topic_of(delivery.properties) is not None:
                    await delivery.reply(value)
        except Exception as error:
            await self._on_failed(delivery, error)
        except asyncio.CancelledError as error:
            runner = asyncio.current_task()
            if runner is not None and not runner.cancelling():
                await self._on_failed(
                    delivery, error
                )  # something inside the handler was cancelled, and not the lane
                return
            await delivery.release()
            raise
        else:
            self.done_count += 1
            if not delivery.settled:  # the handler may have settled it itself
                self.consumer.settler.ack_soon(delivery)

    async def _call(self, arguments: tuple[Any, ...]) -> Any:
        if self._thread_pool is None:
            return await self.task.function(*arguments)
        return await self._thread_pool.run(self.task.function, arguments)

    async def _on_failed(self, delivery: Delivery, error: BaseException) -> None:
        """Retries are visible: one line for each failure, with the trace if it was not foreseen."""
        name = self.task.name
        what = describe(error)
        if isinstance(error, UnreadablePayload):
            log.error(
                "%s cannot read %s, attempt %d: %s", name, delivery.id, delivery.attempt, what
            )
            await delivery.reject("unacceptable", what)
        elif isinstance(error, (Reject, *self.task.options.reject)):
            log.error("%s rejects %s, attempt %d: %s", name, delivery.id, delivery.attempt, what)
            await delivery.reject(
                error.reason if isinstance(error, Reject) else "delivery-error", what
            )
        elif isinstance(error, Retry):
            log.warning(
                "%s wants %s again, attempt %d: %s", name, delivery.id, delivery.attempt, what
            )
            await delivery.nack(error.delay, what)
        else:
            log.warning(
                "%s failed at %s, attempt %d: %s; it is tried again unless that was the last time",
                name, delivery.id, delivery.attempt, what, exc_info=error,
            )  # fmt: skip
            await delivery.nack(description=what)

    # Deadlines

    def _extend(self) -> None:
        """Restart the deadlines of what was here at the last look already: jobs that take long, and those behind."""
        self._timer = self._call_later(self._extend_seconds, self._extend)
        if not self._client.is_connected:
            return  # what is said now would be said when it is too late
        unsettled = self.consumer.settler.unsettled()
        self.consumer.extend([one for one in unsettled if id(one) in self._seen])
        self._seen = {id(one) for one in unsettled}


def _job_key(delivery: Delivery) -> str:
    return f"{delivery.queue}/{delivery.group}/{delivery.id}"
