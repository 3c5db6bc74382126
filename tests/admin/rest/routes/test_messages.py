"""Messages and dead letters over REST."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.admin.live_broker import Worker, properties_of
from tests.admin.rest.conftest import RestApi


async def test_message_published_over_rest_arrives_over_mqtt(rest_api: RestApi) -> None:
    sent = {
        "json": {"file": "cat.png"},
        "message_id": "order/7",
        "key": "k",
        "priority": 3,
        "expiry": "1h",
        "properties": {"tenant": "north"},
    }
    answer = await rest_api.api.post("/queues/tasks/messages", json=sent)
    assert answer.status_code == 201
    assert answer.json() == {
        "message_id": "order/7",
        "queue": "tasks",
        "duplicate": False,
        "dead_letter": False,
    }
    again = await rest_api.ok("POST", "/queues/tasks/messages", sent)
    assert again["duplicate"] is True
    async with rest_api.harness.client("w-1") as client:
        worker = Worker(client, "tasks")
        await worker.join(consumer_group="w")
        message = await worker.next()
        assert message.payload == b'{"file":"cat.png"}'
        assert properties_of(message)["message-id"] == "order/7"
        assert properties_of(message)["tenant"] == "north"
        assert getattr(message.properties, "ContentType", "") == "application/json"


@pytest.mark.parametrize(
    ("body", "payload"),
    [
        ({"payload": "größe"}, "größe".encode()),
        ({"payload_base64": base64.b64encode(b"\xff\x00").decode()}, b"\xff\x00"),
        ({"json": None}, b"null"),
        ({"json": [1, "ö"]}, '[1,"ö"]'.encode()),
        ({}, b""),
    ],
)
async def test_payload_is_text_base64_or_json(
    rest_api: RestApi, body: dict[str, Any], payload: bytes
) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", body)
    [seen] = await rest_api.ok("GET", "/queues/tasks/messages")
    assert base64.b64decode(seen["payload_base64"]) == payload
    assert seen["payload"] == (None if payload == b"\xff\x00" else payload.decode())
    assert seen["size"] == len(payload)


async def test_peek_does_not_consume_messages(rest_api: RestApi) -> None:
    for number in range(5):
        await rest_api.ok("POST", "/queues/tasks/messages", {"payload": f"number {number}"})
    seen = await rest_api.ok("GET", "/queues/tasks/messages?limit=2")
    assert [one["payload"] for one in seen] == ["number 0", "number 1"]
    assert await rest_api.ok("GET", "/queues/tasks/messages?limit=2") == seen
    [cut] = await rest_api.ok("GET", "/queues/tasks/messages?limit=1&payload_bytes=3")
    assert (cut["payload"], cut["size"]) == ("num", 8)
    only = await rest_api.ok("GET", f"/queues/tasks/messages?partition={seen[0]['partition']}")
    assert {one["partition"] for one in only} == {seen[0]["partition"]}


async def test_text_cut_within_a_character_is_still_text(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "aöb"})
    [seen] = await rest_api.ok("GET", "/queues/tasks/messages?payload_bytes=2")
    assert seen["payload"] == "a"


async def test_explain_returns_the_history_of_a_message(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "x", "message_id": "a/b $ 1"})
    trace = await rest_api.ok("GET", "/queues/tasks/messages/a%2Fb%20%24%201")
    assert trace["message_id"] == "a/b $ 1"
    assert trace["message"]["payload"] == "x"
    assert trace["summary"]
    assert await rest_api.ok("GET", "/messages/a%2Fb%20%24%201") == {"queues": ["tasks"]}
    assert await rest_api.ok("GET", "/messages/unknown") == {"queues": []}


async def test_dead_letters_are_listed_and_filtered(rest_api: RestApi) -> None:
    await rest_api.make_dead_letter("tasks", b"one", b"two")
    dead_letters = await rest_api.ok("GET", "/queues/tasks/dlq")
    assert [one["payload"] for one in dead_letters] == ["one", "two"]
    assert dead_letters[0]["headers"]["rejectionReason"]
    assert [
        one["payload"] for one in await rest_api.ok("GET", "/queues/tasks/dlq?contains=tw")
    ] == ["two"]
    assert await rest_api.ok("GET", "/queues/tasks/dlq?reason=timeout") == []
    assert await rest_api.ok("GET", "/queues/tasks/dlq?until=2001-01-01T00:00:00Z") == []
    behind = await rest_api.ok("GET", f"/queues/tasks/dlq?after={dead_letters[0]['message_id']}")
    assert [one["payload"] for one in behind] == ["two"]
    one = await rest_api.ok("GET", f"/queues/tasks/dlq/{dead_letters[1]['message_id']}")
    assert one["payload"] == "two"


async def test_dead_letter_is_redriven_and_delivered_again(rest_api: RestApi) -> None:
    await rest_api.make_dead_letter("tasks", b"one")
    [dead_letter] = await rest_api.ok("GET", "/queues/tasks/dlq")
    done = await rest_api.ok("POST", f"/queues/tasks/dlq/{dead_letter['message_id']}/retry")
    assert done == {"retried": 1, "skipped": 0, "left": 0}
    assert await rest_api.ok("GET", "/queues/tasks/dlq") == []
    async with rest_api.harness.client("w-1") as client:
        worker = Worker(client, "tasks")
        await worker.join(consumer_group="w")
        assert (await worker.next()).payload == b"one"


async def test_many_dead_letters_are_redriven_by_filter(rest_api: RestApi) -> None:
    await rest_api.make_dead_letter("tasks", b"a1", b"a2", b"b1")
    done = await rest_api.ok("POST", "/queues/tasks/dlq/retry", {"contains": "a", "limit": 1})
    assert (done["retried"], done["left"]) == (1, 1)
    assert len(await rest_api.ok("GET", "/queues/tasks/dlq")) == 2


async def test_dead_letters_are_deleted(rest_api: RestApi) -> None:
    await rest_api.make_dead_letter("tasks", b"a1", b"a2", b"b1")
    dead_letters = await rest_api.ok("GET", "/queues/tasks/dlq")
    gone = await rest_api.api.delete(f"/queues/tasks/dlq/{dead_letters[0]['message_id']}")
    assert gone.status_code == 204
    assert await rest_api.ok("POST", "/queues/tasks/dlq/purge", {"contains": "a"}) == {"purged": 1}
    assert await rest_api.ok("POST", "/queues/tasks/dlq/purge") == {"purged": 1}
    assert await rest_api.ok("GET", "/queues/tasks/dlq") == []


async def test_invalid_json_is_refused(rest_api: RestApi) -> None:
    as_json = {"Content-Type": "application/json"}
    for content in (b'{"json": NaN}', b'{"json": "\\ud800"}', b"{", b"[" * 100_000, b"\xff\xfe"):
        reported = await rest_api.refused(
            400, "POST", "/queues/tasks/messages", content=content, headers=as_json
        )
        assert reported["error"] == "invalid_request"


async def test_full_queue_and_oversized_message_are_refused(rest_api: RestApi) -> None:
    limits = {"max_queue_depth": 1, "max_message_size": 3}
    await rest_api.ok("POST", "/queues", {"name": "small", "limits": limits})
    reported = await rest_api.refused(
        413, "POST", "/queues/small/messages", json={"payload": "four"}
    )
    assert reported["error"] == "message_too_large"
    await rest_api.ok("POST", "/queues/small/messages", {"payload": "one"})
    reported = await rest_api.refused(
        409, "POST", "/queues/small/messages", json={"payload": "two"}
    )
    assert reported["error"] == "queue_full"


async def test_payload_that_violates_the_schema_is_refused(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues", {"name": "strict", "schema": {"type": "object"}})
    reported = await rest_api.refused(400, "POST", "/queues/strict/messages", json={"json": 1})
    assert reported["error"] == "invalid_payload"


async def put(rest_api: RestApi, message_id: str, **options: Any) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", {"message_id": message_id, **options})


async def test_waiting_message_is_cancelled_unless_a_consumer_has_it(rest_api: RestApi) -> None:
    await put(rest_api, "order-1", payload="a")
    answer = await rest_api.api.request("DELETE", "/queues/tasks/messages/order-1")
    assert answer.status_code == 204
    answer = await rest_api.api.request("DELETE", "/queues/tasks/messages/order-1")
    assert (answer.status_code, answer.json()["error"]) == (404, "unknown_message")
    async with rest_api.harness.client("w-1") as client:
        worker = Worker(client, "tasks")
        await worker.join(consumer_group="w")
        await put(rest_api, "order-2", payload="b")
        assert (await worker.next()).payload == b"b"
        answer = await rest_api.api.request("DELETE", "/queues/tasks/messages/order-2")
        assert (answer.status_code, answer.json()["error"]) == (409, "already_delivered")
    group = await rest_api.ok("GET", "/queues/tasks/groups/w")
    assert group["ledger"]["cancelled"] == 0


async def test_delayed_message_is_moved_over_rest(rest_api: RestApi) -> None:
    await put(rest_api, "note", delay="1h")
    path = "/queues/tasks/messages/note/reschedule"
    moved = await rest_api.ok("POST", path, {"deliver_at": "2035-01-01T00:00:00Z"})
    assert (moved["state"], moved["deliver_at"][:10]) == ("delayed", "2035-01-01")
    moved = await rest_api.ok("POST", path, {"delay": "0s"})
    assert moved["state"] == "waiting"
    for body in (
        {},
        {"delay": "1h", "deliver_at": "2035-01-01T00:00:00Z"},
        {"delay": "0", "deliver_at": ""},
        {"delay": "soon"},
    ):
        assert (await rest_api.api.post(path, json=body)).status_code == 400


async def test_many_messages_are_cancelled_and_moved_by_a_filter(rest_api: RestApi) -> None:
    for number in range(6):
        await put(
            rest_api,
            f"n-{number}",
            payload="newsletter" if number < 4 else "order",
            key="k",
            delay="1h" if number % 2 else "0s",
        )
    path = "/queues/tasks/messages"
    chosen = {"contains": "newsletter", "state": "delayed"}
    tried = await rest_api.ok("POST", f"{path}/cancel", {**chosen, "dry_run": True})
    assert tried == {"changed": 2, "in_delivery": 0, "left": 0, "dry_run": True}
    done = await rest_api.ok("POST", f"{path}/cancel", {**chosen, "limit": 1})
    assert done == {"changed": 1, "in_delivery": 0, "left": 1, "dry_run": False}
    assert (await rest_api.ok("POST", f"{path}/cancel", chosen))["changed"] == 1
    moved = await rest_api.ok("POST", f"{path}/reschedule", {"key": "k", "delay": "2h"})
    assert moved["changed"] == 4
    seen = await rest_api.ok("GET", path)
    assert [one["message_id"] for one in seen] == ["n-0", "n-2", "n-4", "n-5"]
    assert {one["state"] for one in seen} == {"delayed"}
    assert (await rest_api.api.post(f"{path}/cancel", json={"state": "x"})).status_code == 400
