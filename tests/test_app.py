"""What becomes of an exception that nobody has caught, on the loop that `sluice serve` runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sluice.access.gate import Gate
from sluice.app import access_of, limits_from
from sluice.broker.broker import Broker
from sluice.config import Settings
from sluice.errors import BrokerBroken
from sluice.house import House


@pytest.fixture
def stop() -> asyncio.Event:
    return asyncio.Event()


@pytest.fixture
async def house(stop: asyncio.Event) -> House:
    settings = Settings(store="memory")
    loop = asyncio.get_running_loop()
    gate: Gate = access_of(settings)[0]
    broker = Broker(loop, limits_from(settings), gate, lambda event, facts: None)
    one = House(settings, broker, stop.set)
    loop.set_exception_handler(one.broke)
    return one


def fail() -> None:
    raise RuntimeError("in the middle")


def fail_for_memory() -> None:
    raise MemoryError


async def turn() -> None:
    """All that was to be called is called."""
    done = asyncio.Event()
    asyncio.get_running_loop().call_soon(done.set)
    await done.wait()


@pytest.mark.parametrize("what", [fail, fail_for_memory])
async def test_a_turn_that_breaks_off_ends_the_broker(
    house: House, stop: asyncio.Event, what: Callable[[], None]
) -> None:
    broker = house._broker
    broker.turn.before_flush = what
    broker.turn.schedule()
    await turn()
    assert stop.is_set()
    assert isinstance(house.failure, BrokerBroken)
    assert "start again" in str(house.failure)


async def test_a_library_that_fails_in_a_callback_does_not(house: House, stop: asyncio.Event) -> None:
    asyncio.get_running_loop().call_soon(fail)
    await turn()
    assert not stop.is_set() and house.failure is None


async def test_a_task_that_fails_unheard_does_not(house: House, stop: asyncio.Event) -> None:
    async def failing() -> None:
        fail()

    asyncio.create_task(failing())  # noqa: RUF006
    await turn()
    await turn()
    assert not stop.is_set() and house.failure is None
