"""The outcome of jobs: by the handler's return, by its exceptions, by a stop."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pydantic
import pytest

from sluice.client import Backoff, ConnectionLost, Delivery, SubscribeRefused
from sluice.errors import ConfigError
from sluice.testing import VirtualBroker
from sluice.worker import Reject, Retry, Worker


class Image(pydantic.BaseModel):
    name: str
    width: int = 100


class Sound(msgspec.Struct):
    name: str


@dataclass
class Point:
    x: int
    y: int


async def test_job_is_acked_when_its_handler_returns(sluice_broker: VirtualBroker) -> None:
    app, done = Worker(name="w"), []

    @app.task("jobs")
    async def job(payload: bytes) -> None:
        done.append(payload)

    async with sluice_broker.working(app) as running:
        await sluice_broker.publish("jobs", b"x")
        await sluice_broker.settle()
        assert running.done_count == 1
    assert sluice_broker.ledger("jobs", "w").acked == 1
    await job(b"called as it was")
    assert done == [b"x", b"called as it was"]


async def test_handler_that_is_no_coroutine_runs_in_a_thread(sluice_broker: VirtualBroker) -> None:
    app, threads = Worker(name="w"), set()
    together = threading.Barrier(3)

    @app.task("jobs", concurrency=3)
    def job(payload: str) -> None:
        together.wait(30)
        threads.add(threading.current_thread().name)

    async with sluice_broker.working(app):
        for number in range(3):
            await sluice_broker.publish("jobs", str(number))
        await sluice_broker.settle()
    assert threads == {"job-0", "job-1", "job-2"}
    assert sluice_broker.ledger("jobs", "w").acked == 3


@pytest.mark.parametrize("in_thread", [False, True], ids=["coroutine", "thread"])
async def test_failed_job_is_retried_after_its_backoff_until_it_is_a_dead_letter(
    sluice_broker: VirtualBroker, caplog: pytest.LogCaptureFixture, in_thread: bool
) -> None:
    app, times = Worker(name="w"), []

    def fail() -> None:
        times.append(sluice_broker.time.now)
        raise ValueError("no paper")

    async def fail_later() -> None:
        await asyncio.sleep(0)
        fail()

    app.task("jobs")(fail if in_thread else fail_later)
    with caplog.at_level(logging.WARNING, "sluice.worker"):
        async with sluice_broker.working(app):
            await sluice_broker.publish("jobs", b"")
            await sluice_broker.advance("3h")
    steps = [round(later - earlier) for earlier, later in pairwise(times)]
    assert steps == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300]
    [dead_letter] = sluice_broker.dead_letters("jobs")
    assert (dead_letter.reason, dead_letter.attempts) == ("max_retries", 11)
    assert dead_letter.description == "ValueError: no paper"
    assert "attempt 1: ValueError: no paper" in caplog.text and "attempt 11" in caplog.text


async def test_listed_exceptions_reject_the_job_at_once(sluice_broker: VirtualBroker) -> None:
    app, attempts = Worker(name="w"), []

    @app.task("jobs", reject=(KeyError, ValueError))
    async def job(payload: str, delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if payload == "named":
            raise ValueError("never")
        raise Reject("not for us", reason="unacceptable")

    async with sluice_broker.working(app):
        await sluice_broker.publish("jobs", "named")
        await sluice_broker.publish("jobs", "asked")
        await sluice_broker.advance(minutes=10)
    assert attempts == [1, 1]
    dead_letters = {
        one.description: one.headers["rejectionReason"]
        for one in sluice_broker.dead_letters("jobs")
    }
    assert dead_letters == {"ValueError: never": "DeliveryError", "not for us": "Unacceptable"}


async def test_handler_may_choose_the_retry_delay(sluice_broker: VirtualBroker) -> None:
    app, times = Worker(name="w"), []

    @app.task("jobs")
    async def job(payload: bytes) -> None:
        times.append(sluice_broker.time.now)
        if len(times) < 3:
            raise Retry("the shop is closed", delay="1h" if len(times) == 1 else 60)

    async with sluice_broker.working(app):
        await sluice_broker.publish("jobs", b"")
        await sluice_broker.advance("2h")
    assert [round(time - times[0]) for time in times] == [0, 3600, 3660]


@pytest.mark.parametrize(
    ("kind", "payload", "value"),
    [
        (bytes, b"\xff", b"\xff"),
        (str, b"caf\xc3\xa9", "café"),
        (Any, b"[1]", [1]),
        (dict, b'{"a": 1}', {"a": 1}),
        (dict[str, int], b'{"a": 1}', {"a": 1}),
        (Image, b'{"name": "cat"}', Image(name="cat")),
        (Sound, b'{"name": "meow"}', Sound("meow")),
        (Point, b'{"x": 1, "y": 2}', Point(1, 2)),
    ],
    ids=["bytes", "str", "json", "dict", "typed-dict", "pydantic", "msgspec", "dataclass"],
)
async def test_payload_is_decoded_as_the_handler_declares(
    sluice_broker: VirtualBroker, kind: Any, payload: bytes, value: object
) -> None:
    app, got = Worker(name="w"), []

    async def job(given: Any) -> None:
        got.append(given)

    job.__annotations__["given"] = kind
    app.task("jobs")(job)
    async with sluice_broker.working(app):
        await sluice_broker.publish("jobs", payload)
        await sluice_broker.settle()
    assert got == [value]


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        (str, b"\xff", "not UTF-8"),
        (dict, b"{", "not JSON"),
        (dict, b"[]", "not a dict"),
        (Image, b'{"width": "x"}', "name: Field required; width: Input should be a valid integer"),
        (Sound, b"{}", "missing required field `name`"),
    ],
    ids=["str", "json", "dict", "pydantic", "msgspec"],
)
async def test_payload_that_cannot_be_decoded_goes_to_the_invalid_channel(
    kind: Any, payload: bytes, reason: str
) -> None:
    broker = VirtualBroker(queues={"jobs": {"dlq_config": {"invalid_topic": "$queue/broken"}}})
    app = Worker(name="w")

    async def job(given: Any) -> None:
        raise AssertionError("it must not be called")

    job.__annotations__["given"] = kind
    app.task("jobs")(job)
    async with broker.working(app):
        await broker.publish("jobs", payload)
        await broker.settle()
    [dead_letter] = broker.messages("broken")
    assert dead_letter.payload == payload and reason in dead_letter.description
    assert dead_letter.headers["rejectionReason"] == "Unacceptable"


async def test_handler_may_settle_the_job_itself(sluice_broker: VirtualBroker) -> None:
    app = Worker(name="w")

    @app.task("jobs")
    async def job(delivery: Delivery) -> None:
        await delivery.nack("1h", "by hand")

    async with sluice_broker.working(app):
        await sluice_broker.publish("jobs", b"x")
        await sluice_broker.settle()
        assert sluice_broker.ledger("jobs", "w").retrying == 1


async def test_long_jobs_and_those_waiting_behind_them_are_extended(
    sluice_broker: VirtualBroker,
) -> None:
    app, attempts = Worker(name="w"), []
    go = asyncio.Event()

    @app.task("jobs", concurrency=1, prefetch=5)
    async def job(delivery: Delivery) -> None:
        await go.wait()
        attempts.append(delivery.attempt)

    async with sluice_broker.working(app) as running:
        for _ in range(3):
            await sluice_broker.publish("jobs", b"")
        await sluice_broker.advance(minutes=10, handlers=False)
        assert sluice_broker.ledger("jobs", "w").delivered == 3
        go.set()
        await sluice_broker.settle()
        assert running.done_count == 3
    assert attempts == [1, 1, 1]


async def test_jobs_are_extended_again_after_a_reconnect(
    sluice_broker: VirtualBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, attempts_seen = Worker(name="w", extend_seconds=10.0), []
    go, reachable = asyncio.Event(), asyncio.Event()
    dial = sluice_broker.dial

    async def dial_when_reachable(protocol: asyncio.Protocol) -> None:
        await reachable.wait()
        await dial(protocol)

    @app.task("jobs")
    async def job(delivery: Delivery) -> None:
        attempts_seen.append(delivery.attempt)
        await go.wait()

    reachable.set()
    monkeypatch.setattr(sluice_broker, "dial", dial_when_reachable)
    async with sluice_broker.working(app) as running:
        await sluice_broker.publish("jobs", b"")
        await sluice_broker.settle(handlers=False)
        reachable.clear()
        sluice_broker.disconnect_clients()
        await sluice_broker.advance(seconds=11, handlers=False)  # one extension is due in this time
        assert not running.client.is_connected
        reachable.set()
        await running.client.wait_connected()
        await sluice_broker.settle(handlers=False)
        async with sluice_broker.client("w-2") as other:
            waiting = other.consumer("jobs")
            await waiting.open()
            await sluice_broker.advance(minutes=10, handlers=False)
            assert waiting.buffered == 0, "another worker received the job"
            go.set()
            await sluice_broker.settle()
        assert running.done_count == 1
    assert attempts_seen == [1]
    assert sluice_broker.ledger("jobs", "w").acked == 1


async def test_job_that_exceeds_its_timeout_has_failed(sluice_broker: VirtualBroker) -> None:
    app = Worker(name="w")

    @app.task("jobs", timeout=0.01)
    async def job(payload: bytes) -> None:
        await asyncio.Event().wait()

    async with sluice_broker.working(app):
        await sluice_broker.publish("jobs", b"")
        await sluice_broker.settle()
        assert sluice_broker.ledger("jobs", "w").retrying == 1


async def test_concurrent_jobs_are_limited(sluice_broker: VirtualBroker) -> None:
    app = Worker(name="w")
    at_once, most = 0, 0

    @app.task("jobs", concurrency=3)
    async def job(payload: bytes) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        for _ in range(5):
            await asyncio.sleep(0)
        at_once -= 1

    async with sluice_broker.client() as client:
        await client.publisher("jobs").send_many([b""] * 20)
    async with sluice_broker.working(app) as running:
        await sluice_broker.settle()
        assert running.done_count == 20
    assert most == 3


async def test_jobs_of_one_key_stay_in_order_whatever_fails(sluice_broker: VirtualBroker) -> None:
    app, seen = Worker(name="w"), []
    failed: set[str] = set()

    @app.task("events", concurrency=10)
    async def event(delivery: Delivery) -> None:
        if delivery.text.endswith("3") and delivery.text not in failed:
            failed.add(delivery.text)
            raise ValueError("once")
        seen.append(delivery.text)

    async with sluice_broker.working(app):
        async with sluice_broker.client() as client:
            for number in range(10):
                for user in ("ann", "bob"):
                    await client.publisher("events").send(f"{user} {number}", key=user)
        await sluice_broker.advance(minutes=1)
    for user in ("ann", "bob"):
        assert [one for one in seen if one.startswith(user)] == [
            f"{user} {number}" for number in range(10)
        ]


# ---- stopping


async def test_stop_finishes_running_jobs_and_releases_the_rest(
    sluice_broker: VirtualBroker,
) -> None:
    app, done = Worker(name="w"), []
    started, go = asyncio.Event(), asyncio.Event()

    @app.task("jobs", concurrency=1)
    async def job(payload: str) -> None:
        started.set()
        await go.wait()
        done.append(payload)

    client = app.make_client(dial=sluice_broker.dial, keep_alive=0)
    async with client:
        running = await app.start(client)
        async with sluice_broker.client() as publisher:
            await publisher.publisher("jobs").send_many(["a", "b", "c"])
        await started.wait()
        stopping = asyncio.create_task(running.stop(30))
        await sluice_broker.settle(handlers=False)
        assert not stopping.done()
        ledger = sluice_broker.ledger("jobs", "w")
        assert (ledger.delivered, ledger.waiting) == (1, 2)
        go.set()
        await stopping
    assert len(done) == 1
    ledger = sluice_broker.ledger("jobs", "w")
    assert (ledger.acked, ledger.waiting, ledger.retrying) == (1, 2, 0)


async def test_stop_does_not_wait_for_a_broken_connection(sluice_broker: VirtualBroker) -> None:
    app, done = Worker(name="w"), []
    started, go = asyncio.Event(), asyncio.Event()

    @app.task("jobs")
    async def job(payload: str) -> None:
        started.set()
        await go.wait()
        done.append(payload)

    never = Backoff(initial_seconds=3600)
    async with app.make_client(dial=sluice_broker.dial, keep_alive=0, backoff=never) as client:
        running = await app.start(client)
        await sluice_broker.publish("jobs", "x")
        await started.wait()
        sluice_broker.disconnect_clients()
        await sluice_broker.settle(handlers=False)
        stopping = asyncio.create_task(running.stop(3600))
        await asyncio.sleep(0)
        go.set()
        await stopping
        await client.close(drain_seconds=0)
    assert done == ["x"]


async def test_job_that_does_not_end_in_time_is_released_uncounted(
    sluice_broker: VirtualBroker,
) -> None:
    app = Worker(name="w")
    started = asyncio.Event()

    @app.task("jobs")
    async def job(payload: bytes) -> None:
        started.set()
        await asyncio.Event().wait()

    async with sluice_broker.working(app):
        await sluice_broker.publish("jobs", b"x")
        await started.wait()
    assert sluice_broker.ledger("jobs", "w").waiting == 1
    async with sluice_broker.client("w-2") as client:
        assert (await anext(client.consumer("jobs"))).attempt == 1


# ---- errors of an app are raised when it is created


def test_invalid_app_is_refused() -> None:
    app = Worker()

    async def job(payload: bytes) -> None: ...

    async def greedy(one: bytes, other: str) -> None: ...

    app.task("jobs")(job)
    with pytest.raises(ConfigError, match="jobs has a task already"):
        app.task("$queue/jobs")(job)
    with pytest.raises(ConfigError, match="takes more than a payload and a Delivery"):
        app.task("others")(greedy)
    with pytest.raises(ConfigError, match="concurrency is 0"):
        app.task("others", concurrency=0)


async def test_worker_without_tasks_does_not_start(sluice_broker: VirtualBroker) -> None:
    async with sluice_broker.client() as client:
        with pytest.raises(ConfigError, match="has no tasks"):
            await Worker().start(client)


# ---- faults


async def test_job_redelivered_while_running_is_done_once(
    sluice_broker: VirtualBroker,
) -> None:
    """The session is lost with the connection, so the broker redelivers; the handler continues."""
    app, attempts_seen = Worker(name="w", session_expiry=0), []
    go = asyncio.Event()

    @app.task("jobs")
    async def job(delivery: Delivery) -> None:
        attempts_seen.append(delivery.text)
        await go.wait()

    async with sluice_broker.working(app) as running:
        await sluice_broker.publish("jobs", "x")
        sluice_broker.disconnect_clients()
        await sluice_broker.settle(handlers=False)
        await running.client.wait_connected()
        await sluice_broker.settle(handlers=False)
        assert sluice_broker.ledger("jobs", "w").delivered == 1
        go.set()
        await sluice_broker.settle()
    assert attempts_seen == ["x"]
    assert sluice_broker.ledger("jobs", "w").acked == 1


async def test_cancellation_inside_a_handler_is_an_ordinary_failure(
    sluice_broker: VirtualBroker,
) -> None:
    app, attempts = Worker(name="w"), []

    @app.task("jobs", concurrency=1)
    async def job(delivery: Delivery) -> None:
        attempts.append(delivery.attempt)
        if len(attempts) == 1:
            raise asyncio.CancelledError

    async with sluice_broker.working(app) as running:
        await sluice_broker.publish("jobs", "x")
        await sluice_broker.advance(seconds=6)
        assert (attempts, running.done_count) == ([1, 2], 1)


async def test_any_exception_text_can_be_sent(sluice_broker: VirtualBroker) -> None:
    app = Worker(name="w")

    @app.task("jobs", reject=ValueError)
    async def job(payload: bytes) -> None:
        raise ValueError("a\0b\nc\ud800" + "d" * 2000)

    async with sluice_broker.working(app):
        await sluice_broker.publish("jobs", b"")
        await sluice_broker.settle()
    [dead_letter] = sluice_broker.dead_letters("jobs")
    assert (
        dead_letter.description.startswith("ValueError: a b c ddd")
        and len(dead_letter.description) == 1000
    )


async def test_worker_whose_connection_is_lost_for_good_says_why(
    sluice_broker: VirtualBroker,
) -> None:
    app = Worker(name="w", reconnect=False, dial=sluice_broker.dial, keep_alive=0)

    @app.task("jobs")
    async def job(payload: bytes) -> None: ...

    serving = asyncio.create_task(app.serve())
    await sluice_broker.settle()
    sluice_broker.disconnect_clients()
    with pytest.raises(ConnectionLost, match="the connection broke"):
        await serving


async def test_worker_with_one_refused_task_does_not_start(sluice_broker: VirtualBroker) -> None:
    app = Worker(name="w")

    async def job(payload: bytes) -> None: ...

    app.task("jobs")(job)
    app.task("no//queue")(job)
    async with sluice_broker.client() as client:
        with pytest.raises(SubscribeRefused):
            await app.start(client)
        await sluice_broker.publish("jobs", b"x")
        await sluice_broker.settle()
        assert sluice_broker.ledger("jobs", "w").waiting == 1


async def test_worker_waits_for_a_broker_that_is_not_there_yet(
    sluice_broker: VirtualBroker, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    async def dial(protocol: asyncio.Protocol) -> None:
        tries.append(protocol)
        if len(tries) < 3:
            raise ConnectionRefusedError("connection refused by the test")
        await sluice_broker.dial(protocol)

    app, done = Worker(name="w", dial=dial, keep_alive=0), []

    @app.task("jobs")
    async def job(payload: bytes) -> None:
        done.append(payload)
        app.stop()

    await sluice_broker.publish("jobs", b"x")
    await app.serve()
    assert done == [b"x"] and len(tries) == 3
    assert "connection refused by the test" in caplog.text


def test_worker_speaks_mqtt_5() -> None:
    with pytest.raises(ConfigError, match="speaks MQTT 5"):
        Worker(version=4)
