"""Dead letters, the life of a message and the diagnosis of a queue over gRPC."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.admin.grpc import queue_admin_pb2 as pb
from tests.admin.grpc.conftest import Door
from tests.admin.live_broker import Worker, publish


async def bury(door: Door, *payloads: bytes, group: str = "team") -> None:
    """Messages that a worker of `group` has rejected, each with its payload as description."""
    async with door.house.client("worker-1") as client:
        worker = Worker(client, "quick/a")
        await worker.join(consumer_group=group)
        for nth, payload in enumerate(payloads):
            await publish(client, "quick/a", payload, message_id=f"order-{nth}")
            await worker.settle("reject", await worker.next(), description=payload.decode())


async def letters(door: Door, **wanted: Any) -> list[pb.Message]:
    found = await door.admin.ListDeadLetters(pb.ListDeadLettersRequest(queue="quick/a", **wanted))
    return list(found.letters)


async def test_dead_letters_are_listed_with_their_story(door: Door) -> None:
    await bury(door, b"bad one")
    (letter,) = await letters(door)
    assert (letter.payload, letter.queue) == (b"bad one", "dlq/quick/a")
    assert letter.headers["original-message-id"] == "order-0"
    assert letter.headers["dead-reason"] == "rejected"
    assert letter.headers["dead-description"] == "bad one"
    assert letter.headers["original-group"] == "team"
    request = pb.GetDeadLetterRequest(queue="quick/a", message_id=letter.message_id)
    assert await door.admin.GetDeadLetter(request) == letter
    by_name = pb.GetDeadLetterRequest(queue="quick/a", message_id="order-0", payload_bytes=3)
    cut = await door.admin.GetDeadLetter(by_name)
    assert (cut.message_id, cut.payload, cut.size) == (letter.message_id, b"bad", 7)


async def test_dead_letters_are_listed_page_by_page(door: Door) -> None:
    await bury(door, b"0", b"1", b"2")
    page = await door.admin.ListDeadLetters(pb.ListDeadLettersRequest(queue="quick/a", limit=2))
    assert ([one.payload for one in page.letters], bool(page.next)) == ([b"0", b"1"], True)
    page = await door.admin.ListDeadLetters(
        pb.ListDeadLettersRequest(queue="quick/a", limit=2, after=page.next)
    )
    assert ([one.payload for one in page.letters], page.next) == ([b"2"], "")


async def test_a_filter_tells_which_dead_letters_are_meant(door: Door) -> None:
    await bury(door, b"red apple", b"green apple", b"green pear")

    async def found(**wanted: Any) -> list[bytes]:
        return [one.payload for one in await letters(door, filter=pb.LetterFilter(**wanted))]

    assert await found(contains="apple") == [b"red apple", b"green apple"]
    assert await found(reason="rejected", contains="green") == [b"green apple", b"green pear"]
    assert await found(reason="expired") == []
    assert await found(group="team") == [b"red apple", b"green apple", b"green pear"]
    assert await found(group="others") == []
    (first, *_) = await letters(door)
    assert len(await found(since=first.enqueued_at)) == 3
    assert await found(until=first.enqueued_at) == []


async def test_one_dead_letter_is_put_back_and_delivered_again(door: Door) -> None:
    await bury(door, b"one", b"two")
    request = pb.RetryDeadLetterRequest(queue="quick/a", message_id="order-1")
    done = await door.admin.RetryDeadLetter(request)
    assert (done.retried, done.skipped) == (1, 0)
    assert [one.payload for one in await letters(door)] == [b"one"]
    async with door.house.client("worker-2") as client:
        worker = Worker(client, "quick/a")
        await worker.join(consumer_group="team")
        assert (await worker.next()).payload == b"two"


async def test_many_dead_letters_are_put_back_as_many_as_were_asked_for(door: Door) -> None:
    await bury(door, b"a 1", b"a 2", b"b", b"a 3")
    wanted = pb.LetterFilter(contains="a ")
    done = await door.admin.RetryDeadLetters(
        pb.RetryDeadLettersRequest(queue="quick/a", filter=wanted, limit=2)
    )
    assert (done.retried, done.skipped, done.left) == (2, 0, 1)
    assert [one.payload for one in await letters(door)] == [b"b", b"a 3"]


async def test_dead_letters_are_deleted_one_by_one_or_by_filter(door: Door) -> None:
    await bury(door, b"a 1", b"b", b"a 2")
    await door.admin.DeleteDeadLetter(pb.DeleteDeadLetterRequest(queue="quick/a", message_id="order-0"))
    assert [one.payload for one in await letters(door)] == [b"b", b"a 2"]
    request = pb.PurgeDeadLettersRequest(queue="quick/a", filter=pb.LetterFilter(contains="a "))
    assert (await door.admin.PurgeDeadLetters(request)).purged == 1
    assert [one.payload for one in await letters(door)] == [b"b"]


async def test_the_life_of_a_message_is_told(door: Door) -> None:
    async with door.house.client("worker-1") as client:
        worker = Worker(client, "quick/a")
        await worker.join(consumer_group="team")
        await publish(client, "quick/a", b"x", message_id="order-7")
        await worker.settle("nack", await worker.next(), description="disk full", delay="1h")
    told = await door.admin.Explain(pb.ExplainRequest(queue="quick/a", message_id="order-7"))
    assert (told.message_id, told.queue, told.message.payload) == ("order-7", "quick/a", b"x")
    (state,) = told.states
    assert (state.group, state.state, state.failures) == ("team", "retrying", 1)
    assert state.due.seconds > told.message.enqueued_at.seconds + 3500
    assert not state.HasField("deadline")
    what = [event.what for event in told.events]
    assert what[:3] == ["enqueued", "delivered", "nacked"]
    assert "disk full" in told.events[2].detail
    assert told.summary
    found = await door.admin.FindMessage(pb.FindMessageRequest(message_id="order-7"))
    assert list(found.queues) == ["quick/a"]


@pytest.mark.parametrize("group", ["", "team"])
async def test_why_nothing_arrives_is_told_with_what_to_do(door: Door, group: str) -> None:
    await door.admin.Publish(pb.PublishRequest(queue="quick/a", payload=b"x"))
    await door.admin.CreateGroup(pb.CreateGroupRequest(queue="quick/a", group="team"))
    told = await door.admin.Diagnose(pb.DiagnoseRequest(queue="quick/a", group=group))
    assert (told.queue, told.healthy) == ("quick/a", False)
    assert told.findings[0].code == "no-consumer"
    assert told.findings[0].what and told.findings[0].do and told.findings[0].is_fault
