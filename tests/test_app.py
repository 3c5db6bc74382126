"""Tests of uncaught exceptions on the event loop of `sluice serve`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from sluice.access.authenticator import Authenticator
from sluice.app import make_authenticators, make_limits, run
from sluice.broker_host import BrokerHost
from sluice.config.settings import DiskSettings, Settings
from sluice.errors import BrokerBroken, NoRoom, SluiceError
from sluice.queues.ports import Committer
from sluice.units import Address
from tests.support.redis_process import free_port


@pytest.fixture
def stop() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def core(stop: asyncio.Event) -> BrokerHost:
    settings = Settings(store="memory")
    gate: Authenticator = make_authenticators(settings)[0]
    one = BrokerHost(settings, make_limits(settings), gate, stop.set)
    asyncio.get_running_loop().set_exception_handler(one.on_loop_error)
    return one


def fail() -> None:
    raise RuntimeError("in the middle")


def fail_for_memory() -> None:
    raise MemoryError


async def turn() -> None:
    """Wait until all scheduled callbacks have run."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


class FailingCommitter(Committer):
    def __init__(self, what: Callable[[], None]) -> None:
        self._what = what

    def end_turn(self) -> None:
        self._what()


@pytest.mark.parametrize("what", [fail, fail_for_memory])
async def test_exception_in_a_turn_ends_the_broker(
    core: BrokerHost, stop: asyncio.Event, what: Callable[[], None]
) -> None:
    broker = core.broker
    broker.turn.commit_with(FailingCommitter(what))
    broker.turn.schedule_flush()
    await turn()
    assert stop.is_set()
    assert isinstance(core.failure, BrokerBroken)
    assert "start again" in str(core.failure)


async def test_exception_of_a_library_in_a_callback_does_not_end_the_broker(
    core: BrokerHost, stop: asyncio.Event
) -> None:
    asyncio.get_running_loop().call_soon(fail)
    await turn()
    assert not stop.is_set() and core.failure is None


async def test_unhandled_exception_of_a_task_does_not_end_the_broker(
    core: BrokerHost, stop: asyncio.Event
) -> None:
    async def failing() -> None:
        fail()

    asyncio.create_task(failing())  # noqa: RUF006
    await turn()
    await turn()
    assert not stop.is_set() and core.failure is None


async def test_broker_on_a_nearly_full_disk_is_not_ready_and_needs_no_restart(
    tmp_path: Path,
) -> None:
    settings = Settings(
        store="embedded", data=tmp_path / "data", disk=DiskSettings(min_free=1 << 60)
    )
    host = BrokerHost(
        settings, make_limits(settings), make_authenticators(settings)[0], lambda: None
    )
    await host.open()
    while host.write_refusal() is None:
        await turn()
    refusal = host.write_refusal()
    assert isinstance(refusal, NoRoom) and "disk.min_free" in str(refusal)
    await host.close()


async def test_http_answers_before_mqtt_and_reports_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Enough(SluiceError):
        pass

    port = free_port()
    answers: list[httpx.Response] = []

    async def look(*arguments: object) -> None:
        async with httpx.AsyncClient() as web:
            answers.append(await web.get(f"http://127.0.0.1:{port}/readyz"))
        raise Enough("that was all")

    monkeypatch.setattr("sluice.app.open_listeners", look)
    with pytest.raises(Enough):
        await run(Settings(store="memory", http=Address("127.0.0.1", port), grpc=None), Settings)
    assert answers[0].status_code == 503
    assert "not open yet" in answers[0].json()["message"]
