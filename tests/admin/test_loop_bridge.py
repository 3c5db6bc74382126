"""Calls from one loop to another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.service import AdminService
from sluice.errors import UnknownQueue


class EchoService:
    """A service double that records on which thread it was called."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()

    async def where(self) -> int:
        return threading.get_ident()

    async def refuse(self) -> None:
        raise UnknownQueue("tasks")

    async def wait(self) -> None:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@pytest.fixture
def broker_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def bridge_to(answers: EchoService, loop: asyncio.AbstractEventLoop) -> LoopBridge:
    return LoopBridge(cast(AdminService, answers), loop)


async def test_call_runs_on_the_brokers_loop(broker_loop: asyncio.AbstractEventLoop) -> None:
    def where(service: Any) -> Any:
        made.append(threading.get_ident())
        return service.where()

    made: list[int] = []
    answered = await bridge_to(EchoService(), broker_loop).call(where)
    assert answered == made[0] != threading.get_ident()


async def test_exception_is_raised_to_the_caller_unchanged(
    broker_loop: asyncio.AbstractEventLoop,
) -> None:
    with pytest.raises(UnknownQueue) as refused:
        await bridge_to(EchoService(), broker_loop).call(
            lambda service: cast(Any, service).refuse()
        )
    assert refused.value.remedy


async def test_cancelled_caller_cancels_the_call(
    broker_loop: asyncio.AbstractEventLoop,
) -> None:
    answers = EchoService()
    asking = asyncio.ensure_future(
        bridge_to(answers, broker_loop).call(lambda service: cast(Any, service).wait())
    )
    await asyncio.to_thread(answers.began.wait, 30)
    asking.cancel()
    assert await asyncio.to_thread(answers.ended.wait, 30)
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_call_on_the_brokers_own_loop_is_direct() -> None:
    loop_bridge = bridge_to(EchoService(), asyncio.get_running_loop())
    assert (
        await loop_bridge.call(lambda service: cast(Any, service).where()) == threading.get_ident()
    )
