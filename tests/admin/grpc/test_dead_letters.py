"""Dead letters, traces and diagnoses over gRPC."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.admin.grpc import queue_admin_pb2 as pb
from tests.admin.grpc.conftest import GrpcApi
from tests.admin.live_broker import Worker, publish

Filter = pb.LetterFilter  # words: allowed


async def make_dead_letter(grpc_api: GrpcApi, *payloads: bytes, group: str = "team") -> None:
    """Let a worker of `group` reject messages, with their payloads as description."""
    async with grpc_api.harness.client("worker-1") as client:
        worker = Worker(client, "quick/a")
        await worker.join(consumer_group=group)
        for nth, payload in enumerate(payloads):
            await publish(client, "quick/a", payload, message_id=f"order-{nth}")
            await worker.settle("reject", await worker.next(), description=payload.decode())


async def list_dead_letters(grpc_api: GrpcApi, **wanted: Any) -> list[pb.Message]:
    found = await grpc_api.admin.ListDeadLetters(
        pb.ListDeadLettersRequest(queue="quick/a", **wanted)
    )
    return list(found.letters)  # words: allowed


async def test_dead_letters_are_listed_with_their_history(grpc_api: GrpcApi) -> None:
    await make_dead_letter(grpc_api, b"bad one")
    (dead_letter,) = await list_dead_letters(grpc_api)
    assert (dead_letter.payload, dead_letter.queue) == (b"bad one", "dlq/quick/a")
    assert dead_letter.headers["original-message-id"] == "order-0"
    assert dead_letter.headers["dead-reason"] == "rejected"
    assert dead_letter.headers["dead-description"] == "bad one"
    assert dead_letter.headers["original-group"] == "team"
    request = pb.GetDeadLetterRequest(queue="quick/a", message_id=dead_letter.message_id)
    assert await grpc_api.admin.GetDeadLetter(request) == dead_letter
    by_name = pb.GetDeadLetterRequest(queue="quick/a", message_id="order-0", payload_bytes=3)
    cut = await grpc_api.admin.GetDeadLetter(by_name)
    assert (cut.message_id, cut.payload, cut.size) == (dead_letter.message_id, b"bad", 7)


async def test_dead_letters_are_paginated(grpc_api: GrpcApi) -> None:
    await make_dead_letter(grpc_api, b"0", b"1", b"2")
    page = await grpc_api.admin.ListDeadLetters(pb.ListDeadLettersRequest(queue="quick/a", limit=2))
    assert [one.payload for one in page.letters] == [b"0", b"1"]  # words: allowed
    assert page.next
    page = await grpc_api.admin.ListDeadLetters(
        pb.ListDeadLettersRequest(queue="quick/a", limit=2, after=page.next)
    )
    assert ([one.payload for one in page.letters], page.next) == ([b"2"], "")  # words: allowed


async def test_filter_selects_dead_letters(grpc_api: GrpcApi) -> None:
    await make_dead_letter(grpc_api, b"red apple", b"green apple", b"green pear")

    async def found(**wanted: Any) -> list[bytes]:
        return [one.payload for one in await list_dead_letters(grpc_api, filter=Filter(**wanted))]

    assert await found(contains="apple") == [b"red apple", b"green apple"]
    assert await found(reason="rejected", contains="green") == [b"green apple", b"green pear"]
    assert await found(reason="expired") == []
    assert await found(group="team") == [b"red apple", b"green apple", b"green pear"]
    assert await found(group="others") == []
    (first, *_) = await list_dead_letters(grpc_api)
    assert len(await found(since=first.enqueued_at)) == 3
    assert await found(until=first.enqueued_at) == []


async def test_dead_letter_is_redriven_and_delivered_again(grpc_api: GrpcApi) -> None:
    await make_dead_letter(grpc_api, b"one", b"two")
    request = pb.RetryDeadLetterRequest(queue="quick/a", message_id="order-1")
    done = await grpc_api.admin.RetryDeadLetter(request)
    assert (done.retried, done.skipped) == (1, 0)
    assert [one.payload for one in await list_dead_letters(grpc_api)] == [b"one"]
    async with grpc_api.harness.client("worker-2") as client:
        worker = Worker(client, "quick/a")
        await worker.join(consumer_group="team")
        assert (await worker.next()).payload == b"two"


async def test_dead_letters_are_grouped_by_error_and_retried_with_another_payload(
    grpc_api: GrpcApi,
) -> None:
    await make_dead_letter(grpc_api, b"no width in 1", b"no width in 2", b"no paper")
    found = await grpc_api.admin.ListDeadLetterErrors(
        pb.ListDeadLetterErrorsRequest(queue="quick/a")
    )
    assert [(one.error, one.count, list(one.groups)) for one in found.errors] == [
        ("no width in <n>", 2, ["team"]),
        ("no paper", 1, ["team"]),
    ]
    assert found.errors[0].first_at.seconds and (found.examined, found.complete) == (3, True)
    (chosen,) = await list_dead_letters(grpc_api, filter=Filter(error="no paper"))
    request = pb.RetryDeadLetterRequest(
        queue="quick/a", message_id=chosen.message_id, payload=b"with paper"
    )
    assert (await grpc_api.admin.RetryDeadLetter(request)).retried == 1
    async with grpc_api.harness.client("worker-2") as client:
        worker = Worker(client, "quick/a")
        await worker.join(consumer_group="team")
        assert (await worker.next()).payload == b"with paper"


async def test_redrive_of_many_dead_letters_obeys_the_limit(grpc_api: GrpcApi) -> None:
    await make_dead_letter(grpc_api, b"a 1", b"a 2", b"b", b"a 3")
    wanted = Filter(contains="a ")
    done = await grpc_api.admin.RetryDeadLetters(
        pb.RetryDeadLettersRequest(queue="quick/a", filter=wanted, limit=2)
    )
    assert (done.retried, done.skipped, done.left) == (2, 0, 1)
    assert [one.payload for one in await list_dead_letters(grpc_api)] == [b"b", b"a 3"]


async def test_dead_letters_are_deleted_by_id_or_filter(grpc_api: GrpcApi) -> None:
    await make_dead_letter(grpc_api, b"a 1", b"b", b"a 2")
    await grpc_api.admin.DeleteDeadLetter(
        pb.DeleteDeadLetterRequest(queue="quick/a", message_id="order-0")
    )
    assert [one.payload for one in await list_dead_letters(grpc_api)] == [b"b", b"a 2"]
    request = pb.PurgeDeadLettersRequest(queue="quick/a", filter=Filter(contains="a "))
    assert (await grpc_api.admin.PurgeDeadLetters(request)).purged == 1
    assert [one.payload for one in await list_dead_letters(grpc_api)] == [b"b"]


async def test_explain_returns_the_history_of_a_message(grpc_api: GrpcApi) -> None:
    async with grpc_api.harness.client("worker-1") as client:
        worker = Worker(client, "quick/a")
        await worker.join(consumer_group="team")
        await publish(client, "quick/a", b"x", message_id="order-7")
        await worker.settle("nack", await worker.next(), description="disk full", delay="1h")
    reported = await grpc_api.admin.Explain(
        pb.ExplainRequest(queue="quick/a", message_id="order-7")
    )
    assert (reported.message_id, reported.queue, reported.message.payload) == (
        "order-7",
        "quick/a",
        b"x",
    )
    (state,) = reported.states
    assert (state.group, state.state, state.failures) == ("team", "retrying", 1)
    assert state.due.seconds > reported.message.enqueued_at.seconds + 3500
    assert not state.HasField("deadline")
    what = [event.what for event in reported.events]
    assert what[:3] == ["enqueued", "delivered", "nacked"]
    assert "disk full" in reported.events[2].detail
    assert reported.summary
    found = await grpc_api.admin.FindMessage(pb.FindMessageRequest(message_id="order-7"))
    assert list(found.queues) == ["quick/a"]


@pytest.mark.parametrize("group", ["", "team"])
async def test_diagnosis_returns_findings_with_remedies(grpc_api: GrpcApi, group: str) -> None:
    await grpc_api.admin.Publish(pb.PublishRequest(queue="quick/a", payload=b"x"))
    await grpc_api.admin.CreateGroup(pb.CreateGroupRequest(queue="quick/a", group="team"))
    reported = await grpc_api.admin.Diagnose(pb.DiagnoseRequest(queue="quick/a", group=group))
    assert (reported.queue, reported.healthy) == ("quick/a", False)
    assert reported.findings[0].code == "no-consumer"
    assert reported.findings[0].what and reported.findings[0].do and reported.findings[0].is_fault
