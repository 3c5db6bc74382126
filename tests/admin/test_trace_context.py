"""The W3C trace of a message survives what the admin doors do with it: publish, redrive, and looking at it."""

from __future__ import annotations

import aiomqtt
import pytest

from sluice.admin.views import LetterFilter, Outgoing
from tests.admin.live_broker import Living, Worker, facts, living, publish

TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "rojo=00f067aa0ba902b7",
}


def trace_of(message: aiomqtt.Message) -> dict[str, str]:
    return {name: value for name, value in facts(message).items() if name in TRACE}


async def redrive_one(house: Living, to_all: bool) -> None:
    (letter,) = await house.service.dead_letters("jobs", LetterFilter())
    await house.service.retry_dead_letter("jobs", letter.message_id, to_all)


async def redrive_many(house: Living, to_all: bool) -> None:
    await house.service.retry_dead_letters("jobs", LetterFilter(), 10, to_all)


@pytest.mark.parametrize("redrive", [redrive_one, redrive_many])
@pytest.mark.parametrize("to_all", [False, True])
async def test_a_dead_letter_that_is_put_back_has_its_trace(redrive: object, to_all: bool) -> None:
    assert callable(redrive)
    async with living() as house, house.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join(consumer_group="team")
        await publish(client, "jobs", b"x", **TRACE)
        first = await worker.next()
        assert trace_of(first) == TRACE
        await worker.settle("reject", first)
        (letter,) = await house.service.dead_letters("jobs", LetterFilter())
        assert {name: value for name, value in letter.properties if name in TRACE} == TRACE
        await redrive(house, to_all)
        again = await worker.next()
        assert (again.payload, trace_of(again)) == (b"x", TRACE)


async def test_what_an_admin_door_publishes_carries_the_trace_it_was_given() -> None:
    async with living() as house, house.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join()
        await house.service.publish("jobs", Outgoing(b"x", properties=list(TRACE.items())))
        assert trace_of(await worker.next()) == TRACE
