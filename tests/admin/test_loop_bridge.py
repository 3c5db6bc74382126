"""Questions put on one loop and answered on another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sluice.admin.loop_bridge import Desk
from sluice.admin.service import AdminService
from sluice.errors import UnknownQueue


class Answers:
    """Stands for the service: tells where it was asked."""

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


def desk_of(answers: Answers, loop: asyncio.AbstractEventLoop) -> Desk:
    return Desk(cast(AdminService, answers), loop)


async def test_a_question_is_answered_on_the_brokers_loop(broker_loop: asyncio.AbstractEventLoop) -> None:
    def where(service: Any) -> Any:
        made.append(threading.get_ident())
        return service.where()

    made: list[int] = []
    answered = await desk_of(Answers(), broker_loop).ask(where)
    assert answered == made[0] != threading.get_ident()


async def test_a_refusal_comes_back_as_it_was_raised(broker_loop: asyncio.AbstractEventLoop) -> None:
    with pytest.raises(UnknownQueue) as refused:
        await desk_of(Answers(), broker_loop).ask(lambda service: cast(Any, service).refuse())
    assert refused.value.do


async def test_an_asker_who_goes_away_takes_the_question_along(
    broker_loop: asyncio.AbstractEventLoop,
) -> None:
    answers = Answers()
    asking = asyncio.ensure_future(
        desk_of(answers, broker_loop).ask(lambda service: cast(Any, service).wait())
    )
    await asyncio.to_thread(answers.began.wait, 30)
    asking.cancel()
    assert await asyncio.to_thread(answers.ended.wait, 30)
    with pytest.raises(asyncio.CancelledError):
        await asking


async def test_on_the_brokers_own_loop_it_is_a_plain_call() -> None:
    desk = desk_of(Answers(), asyncio.get_running_loop())
    assert await desk.ask(lambda service: cast(Any, service).where()) == threading.get_ident()
