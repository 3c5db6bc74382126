"""The W3C trace context of a message survives publish, redrive and peek by the admin API."""

from __future__ import annotations

import aiomqtt
import pytest

from sluice.admin.model import DeadLetterFilter, OutgoingMessage
from tests.admin.live_broker import LiveBroker, Worker, live_broker, properties_of, publish

TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "rojo=00f067aa0ba902b7",
}


def trace_of(message: aiomqtt.Message) -> dict[str, str]:
    return {name: value for name, value in properties_of(message).items() if name in TRACE}


async def redrive_one(harness: LiveBroker, to_all: bool) -> None:
    (dead_letter,) = await harness.service.dead_letters("jobs", DeadLetterFilter())
    await harness.service.retry_dead_letter("jobs", dead_letter.message_id, to_all)


async def redrive_many(harness: LiveBroker, to_all: bool) -> None:
    await harness.service.retry_dead_letters("jobs", DeadLetterFilter(), 10, to_all)


@pytest.mark.parametrize("redrive", [redrive_one, redrive_many])
@pytest.mark.parametrize("to_all", [False, True])
async def test_redriven_dead_letter_has_its_trace_context(redrive: object, to_all: bool) -> None:
    assert callable(redrive)
    async with live_broker() as harness, harness.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join(consumer_group="team")
        await publish(client, "jobs", b"x", **TRACE)
        first = await worker.next()
        assert trace_of(first) == TRACE
        await worker.settle("reject", first)
        (dead_letter,) = await harness.service.dead_letters("jobs", DeadLetterFilter())
        assert {name: value for name, value in dead_letter.properties if name in TRACE} == TRACE
        await redrive(harness, to_all)
        again = await worker.next()
        assert (again.payload, trace_of(again)) == (b"x", TRACE)


async def test_message_published_by_admin_api_carries_the_given_trace_context() -> None:
    async with live_broker() as harness, harness.client("worker-1") as client:
        worker = Worker(client, "jobs")
        await worker.join()
        await harness.service.publish("jobs", OutgoingMessage(b"x", properties=list(TRACE.items())))
        assert trace_of(await worker.next()) == TRACE
