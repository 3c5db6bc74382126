"""Tasks: sending jobs, retry policies, hooks, middleware, and the job in log lines."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import pytest

from sluice.client import Delivery, QueueConfigRefused
from sluice.errors import ConfigError
from sluice.testing import VirtualBroker
from sluice.worker import JobLogFilter, RetryPolicy, Worker, current_delivery
from sluice.worker.middleware import CallNext
from sluice.worker.task import AnyTask
from tests.support.broker_process import Broker


@dataclass
class Image:
    name: str
    width: int = 200


# Sending


async def test_task_sends_jobs_for_itself(sluice_broker: VirtualBroker) -> None:
    app = Worker(name="w")
    done: list[tuple[object, str | None]] = []

    @app.task("images")
    async def resize(image: Image, delivery: Delivery) -> None:
        done.append((image, delivery.key))
        if image.name == "album":
            await cover.send("cat")  # from within a job

    @app.task("covers")
    async def cover(name: str) -> None:
        done.append((name, None))

    async with sluice_broker.working(app):
        await resize.send(Image("album"))
        await resize.with_options(key="k", id="mine", delay="1m").send(Image("cat"))
        await sluice_broker.settle()
        assert done == [(Image("album"), None), ("cat", None)]
        await sluice_broker.advance("1m")
    assert done[2:] == [(Image("cat"), "k")]


async def test_task_without_payload_is_sent_without_one(sluice_broker: VirtualBroker) -> None:
    app, done = Worker(name="w"), []

    @app.task("ticks")
    async def tick() -> None:
        done.append("tick")

    @app.task("raw")
    async def raw(delivery: Delivery) -> None:
        done.append(delivery.text)

    async with sluice_broker.working(app):
        await tick.send()
        await raw.send(b"bytes")
        await sluice_broker.settle()
        with pytest.raises(TypeError, match="takes one argument, payload"):
            await raw.send(b"one", b"two")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="takes one argument"):
            await raw.with_options().send(wrong=b"one")  # type: ignore[call-arg]
    assert sorted(done) == ["bytes", "tick"]


async def test_job_is_sent_without_a_running_worker(broker: Broker) -> None:
    app = Worker(f"mqtt://{broker.mqtt}", name="sender")

    @app.task("sent/alone")
    async def job(text: str) -> None: ...

    async with app:
        ids = await asyncio.gather(*(job.send(text) for text in ("a", "b")))
        consumer = app.make_client()
        async with consumer:
            found = [await anext(consumer.consumer("sent/alone")) for _ in range(1)]
            assert found[0].id in ids
    assert await job.send("after close") not in ids
    await app.close()


def test_job_is_sent_without_an_event_loop(broker: Broker) -> None:
    from sluice.client import sync

    app = Worker(f"mqtt://{broker.mqtt}", name="sender")

    @app.task("sent/sync")
    def job(text: str) -> None: ...

    job_id = job.with_options(priority=9).send_sync("a")
    assert job.send_sync(text="b") != job_id
    with sync.Client(broker.mqtt.host, broker.mqtt.port) as client:
        delivery = client.consumer("sent/sync").take(30)
        assert delivery is not None
        assert (delivery.id, delivery.text) == (job_id, "a")
        delivery.ack()
    asyncio.run(app.close())


async def test_background_worker_logs_the_error_that_ends_it_and_raises_it_at_the_end(
    broker: Broker,
) -> None:
    app, ended = Worker(f"mqtt://{broker.mqtt}", name="background"), asyncio.Event()

    @app.task("background", retry=RetryPolicy(jitter=7))
    async def job() -> None: ...

    class Watcher(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "worker background ended" in record.getMessage():
                ended.set()

    async def run() -> None:
        async with app.serving(), asyncio.timeout(30):
            await ended.wait()

    watcher = Watcher()
    logging.getLogger("sluice.worker").addHandler(watcher)
    try:
        with pytest.raises(QueueConfigRefused):
            await run()
    finally:
        logging.getLogger("sluice.worker").removeHandler(watcher)


# Decorators


async def test_task_without_brackets_has_the_queue_of_its_name(
    sluice_broker: VirtualBroker,
) -> None:
    app, done = Worker(name="w"), []

    @app.task
    async def bare(text: str) -> None:
        done.append(text)

    @app.task()
    async def brackets(text: str) -> None:
        done.append(text)

    async with sluice_broker.working(app):
        await bare.send("one")
        await sluice_broker.publish("brackets", "two")
        await sluice_broker.settle()
    assert sorted(done) == ["one", "two"]
    with pytest.raises(ConfigError, match="bare has a task already"):
        app.task(bare.function)


async def test_retry_policy_of_a_task_is_declared_when_the_worker_starts(
    sluice_broker: VirtualBroker,
) -> None:
    app, attempts = Worker(name="w"), []

    @app.task("jobs", retry=RetryPolicy(max_retries=2, initial_backoff=1, backoff_multiplier=3.0))
    async def job() -> None:
        attempts.append(sluice_broker.time.now)
        raise ValueError("no")

    @app.task("once", retry=0)
    async def once() -> None:
        raise ValueError("no")

    async with sluice_broker.working(app):
        await job.send()
        await once.send()
        await sluice_broker.advance("1h")
    assert [round(later - attempts[0]) for later in attempts] == [0, 1, 4]
    [dead_letter] = sluice_broker.dead_letters("once")
    assert (dead_letter.reason, dead_letter.attempts) == ("max_retries", 1)


async def test_unusable_retry_policy_stops_the_start(sluice_broker: VirtualBroker) -> None:
    app = Worker(name="w")

    @app.task("jobs", retry=RetryPolicy(jitter=7))
    async def job() -> None: ...

    with pytest.raises(QueueConfigRefused, match=r"configuration of queue 'jobs'.*jitter"):
        async with sluice_broker.working(app):
            raise AssertionError
    with pytest.raises(ConfigError, match="'jobs/#' is a filter"):
        app.task("jobs/#", retry=1)(lambda: None)


# Hooks and middleware


async def test_hooks_run_around_all_jobs(sluice_broker: VirtualBroker) -> None:
    app, order = Worker(name="w"), []

    @app.on_startup
    async def connect() -> None:
        order.append("connect")

    @app.on_startup
    def warm_up() -> None:
        order.append("warm up")

    @app.on_shutdown
    async def disconnect() -> None:
        order.append("disconnect")

    @app.task("jobs")
    async def job() -> None:
        order.append("job")

    await sluice_broker.publish("jobs", b"")
    async with sluice_broker.working(app) as running:
        await sluice_broker.settle()
        await running.stop(1.0)
    assert order == ["connect", "warm up", "job", "disconnect"]


async def test_failed_startup_starts_nothing(sluice_broker: VirtualBroker) -> None:
    app, order = Worker(name="w"), []

    @app.on_startup
    def fail() -> None:
        raise RuntimeError("no database")

    app.on_shutdown(lambda: order.append("shutdown"))

    @app.task("jobs")
    async def job() -> None:
        order.append("job")

    await sluice_broker.publish("jobs", b"")
    with pytest.raises(RuntimeError, match="no database"):
        async with sluice_broker.working(app):
            raise AssertionError
    assert order == []


async def test_middleware_runs_around_each_job(sluice_broker: VirtualBroker) -> None:
    app, order = Worker(name="w"), []

    @app.middleware
    async def outer(delivery: Delivery, task: AnyTask, call_next: CallNext) -> Any:
        order.append(f"outer {task.name} {delivery.text}")
        try:
            return await call_next()
        except ZeroDivisionError:
            order.append("caught")

    @app.middleware
    async def inner(delivery: Delivery, task: AnyTask, call_next: CallNext) -> Any:
        return f"<{await call_next()}>"

    @app.task("jobs")
    def job(number: int) -> float:
        return 1 / number

    async with sluice_broker.working(app), sluice_broker.client() as client:
        assert (await client.request("$queue/jobs", 2)).payload == b"<0.5>"
        await job.send(0)
        await sluice_broker.settle()
    assert order == ["outer job 2", "outer job 0", "caught"]
    assert sluice_broker.ledger("jobs", "w").acked == 2  # a caught exception is a success


@pytest.mark.parametrize("in_thread", [False, True], ids=["coroutine", "thread"])
async def test_log_lines_of_a_handler_have_its_message_id(
    sluice_broker: VirtualBroker, in_thread: bool
) -> None:
    app, records = Worker(name="w"), []
    log = logging.getLogger("tests.worker.jobs")

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(vars(record))

    collector = Collector()
    collector.addFilter(JobLogFilter())
    log.addHandler(collector)
    log.setLevel(logging.INFO)

    def write() -> None:
        delivery = current_delivery()
        assert delivery is not None and delivery.id == "mine"
        log.info("working")

    async def write_later() -> None:
        await asyncio.sleep(0)
        write()

    app.task("jobs")(write if in_thread else write_later)
    try:
        async with sluice_broker.working(app):
            await sluice_broker.publish("jobs", b"", id="mine")
            await sluice_broker.settle()
        log.info("afterward")
    finally:
        log.removeHandler(collector)
    first, second = records
    assert (first["message_id"], first["queue"], first["attempt"]) == ("mine", "jobs", 1)
    assert first["task"] == ("write" if in_thread else "write_later")
    assert "message_id" not in second and current_delivery() is None
    assert sluice_broker.ledger("jobs", "w").acked == 1
