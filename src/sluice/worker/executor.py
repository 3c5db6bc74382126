"""Runs the jobs of one task: `concurrency` runners, each processing one job after the other.

A runner is one asyncio task for the lifetime of the worker. It calls a handler that never waits
directly and acks its job, without another task, future or turn of the loop: so small jobs are
cheap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from sluice.client import Client, Delivery, Reject, Retry, UnreadablePayload
from sluice.client.errors import ClientError
from sluice.client.outcomes import describe
from sluice.client.queues import REPLY_QUEUE_PREFIX, Consumer, response_topic_of
from sluice.worker.adaptive_prefetch import AdaptivePrefetch, CallLater
from sluice.worker.job_context import CURRENT_JOB
from sluice.worker.middleware import Middleware, MiddlewareChain
from sluice.worker.task import AnyTask
from sluice.worker.thread_pool import HandlerThreadPool

log = logging.getLogger("sluice.worker")

YIELD_EVERY: Final = 32  # jobs of a runner between two yields to the loop


class TaskExecutor:
    """The runners of one task. `call_later` is that of the loop or of a virtual clock."""

    def __init__(
        self,
        client: Client,
        task: AnyTask,
        extend_seconds: float,
        call_later: CallLater,
        middlewares: Sequence[Middleware],
    ) -> None:
        options = task.options
        self.task = task
        self._client = client
        self._middlewares = middlewares
        self.consumer: Consumer = client.consumer(
            options.queue,
            group=options.group,
            prefetch=options.prefetch or options.concurrency,
            start=options.start,
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
        """Join the group and start; return the runners.

        The runners raise if the connection is lost for good.
        """
        options = self.task.options
        await self.consumer.open()
        if not self.task.is_async:
            self._thread_pool = HandlerThreadPool(options.concurrency, self.task.name)
        self._runners = [
            asyncio.create_task(self._run_jobs(), name=f"{self.task.name}-{number}")
            for number in range(options.concurrency)
        ]
        self._timer = self._call_later(self._extend_seconds, self._extend)
        if options.prefetch is None:
            self._adaptive_prefetch = AdaptivePrefetch(
                self.consumer, options.concurrency, self._call_later, lambda: self.is_idle
            )
        log.info(
            "%s takes jobs of %s in group %s, %d at once",
            self.task.name, options.queue, options.group, options.concurrency,
        )  # fmt: skip
        return self._runners

    @property
    def is_idle(self) -> bool:
        return not self.active and not self.consumer.buffered

    async def stop(self, grace_seconds: float) -> None:
        """Take no new jobs, let running ones end within `grace_seconds`, and release the others."""
        self._is_stopping = True
        if self._adaptive_prefetch is not None:
            await self._adaptive_prefetch.stop()
        draining = asyncio.create_task(self._drain(grace_seconds))
        # Its SUBSCRIBE must leave before the releases; otherwise the broker redelivers them to us.
        await asyncio.sleep(0)
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
                "%s did not finish %s in time: job released",
                self.task.name,
                self.active[runner].id,
            )
            runner.cancel()
        if self._runners:
            await asyncio.wait(self._runners)
            for runner in self._runners:
                if not runner.cancelled():
                    # A lost connection ends all runners; `finished` has raised the error of one.
                    runner.exception()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread_pool is not None:
            self._thread_pool.stop()
        await self.consumer.close()

    async def _drain(self, grace_seconds: float) -> None:
        """Set the prefetch to 0, so that other workers get the partitions at once.

        It runs while `stop` waits for the jobs: without a connection it waits for the next one.
        """
        if self.active and grace_seconds > 0:
            try:
                await self.consumer.set_prefetch(0)
            except ClientError:
                pass  # without a connection no new jobs arrive either

    # Runners

    async def _run_jobs(self) -> None:
        runner = asyncio.current_task()
        assert runner is not None
        consumer = self.consumer
        active = self.active
        count = 0
        while not self._is_stopping:
            delivery = await consumer.take()
            if delivery is None:
                return
            active[runner] = delivery
            try:
                await self._handle(delivery)
            finally:
                del active[runner]
            if self._adaptive_prefetch is not None:
                self._adaptive_prefetch.job_ended()
            count += 1
            if count % YIELD_EVERY == 0:
                await asyncio.sleep(0)

    async def _handle(self, delivery: Delivery) -> None:
        task = self.task
        finished = task.options.deduplicate
        context_token = CURRENT_JOB.set((delivery, task))
        try:
            if finished is not None and await finished.has(_job_key(delivery)):
                log.info("%s skips %s: it is done already", task.name, delivery.id)
            else:
                if self._middlewares:
                    call = partial(self._call, delivery)
                    value = await MiddlewareChain(self._middlewares, delivery, task, call)()
                else:
                    value = await self._call(delivery)
                if finished is not None:
                    await finished.add(_job_key(delivery))
                if value is not None and response_topic_of(delivery.properties) is not None:
                    await delivery.reply(value)
        except Exception as error:
            await self._on_failed(delivery, error)
        except asyncio.CancelledError as error:
            runner = asyncio.current_task()
            if runner is not None and not runner.cancelling():
                # The handler cancelled something of its own; the runner was not cancelled.
                await self._on_failed(delivery, error)
                return
            await delivery.release()
            raise
        else:
            self.done_count += 1
            if not delivery.settled:  # the handler may have settled it itself
                self.consumer.settler.ack_soon(delivery)
        finally:
            CURRENT_JOB.reset(context_token)

    async def _call(self, delivery: Delivery) -> Any:
        """Decode the payload, call the handler and return its result."""
        task = self.task
        arguments = task.arguments(delivery)
        if task.options.timeout is None:
            if self._thread_pool is None:
                return await task.function(*arguments)
            return await self._thread_pool.run(task.function, arguments)
        async with asyncio.timeout(task.options.timeout):
            if self._thread_pool is None:
                return await task.function(*arguments)
            return await self._thread_pool.run(task.function, arguments)

    async def _on_failed(self, delivery: Delivery, error: BaseException) -> None:
        """Settle a failed job and log it, with the trace if the error is unexpected.

        The caller of a request gets the error as its response.
        """
        subject = (self.task.name, delivery.id, delivery.attempt, describe(error))
        description = subject[3]
        if isinstance(error, UnreadablePayload):
            log.error("%s cannot read %s, attempt %d: %s", *subject)
            await self._reply_error(delivery, error)
            await delivery.reject("unacceptable", description)
        elif isinstance(error, (Reject, *self.task.options.reject)):
            log.error("%s rejects %s, attempt %d: %s", *subject)
            await self._reply_error(delivery, error)
            await delivery.reject(
                error.reason if isinstance(error, Reject) else "delivery-error", description
            )
        elif isinstance(error, Retry):
            log.warning("%s requests a retry of %s, attempt %d: %s", *subject)
            await delivery.nack(error.delay, description)
        elif await self._reply_error(delivery, error, is_final=False):
            log.warning(
                "%s failed at %s, attempt %d: %s; the caller has the error as its response",
                *subject, exc_info=error,
            )  # fmt: skip
            await delivery.ack()
        else:
            log.warning(
                "%s failed at %s, attempt %d: %s; it is retried unless this was the last attempt",
                *subject, exc_info=error,
            )  # fmt: skip
            await delivery.nack(description=description)

    async def _reply_error(
        self, delivery: Delivery, error: BaseException, is_final: bool = True
    ) -> bool:
        """Reply to a request with its error; return whether the caller has it.

        A response topic that is a reply queue belongs to a caller that waits, so the error is the
        response and a retry would come too late. Any other response topic gets the result of a job
        that may still succeed: it gets an error only if there is no further attempt.
        """
        topic = response_topic_of(delivery.properties)
        if topic is None or not (is_final or topic.startswith(REPLY_QUEUE_PREFIX)):
            return False
        try:
            await delivery.reply_error(error)
        except ClientError as fault:
            log.warning("the caller of %s does not get its error: %s", delivery.id, fault.what)
            return False
        return True

    # Deadlines

    def _extend(self) -> None:
        """Extend the leases of deliveries that were already here at the last call."""
        self._timer = self._call_later(self._extend_seconds, self._extend)
        if not self._client.is_connected:
            return  # an extension that waits for a connection would be too late
        unsettled = self.consumer.settler.unsettled()
        self.consumer.extend([one for one in unsettled if id(one) in self._seen])
        self._seen = {id(one) for one in unsettled}


def _job_key(delivery: Delivery) -> str:
    return f"{delivery.queue}/{delivery.group}/{delivery.id}"
