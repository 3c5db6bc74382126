"""Messages and dead letters over REST."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.admin.live_broker import Worker, facts
from tests.admin.rest.conftest import Door


async def test_what_is_published_over_rest_arrives_over_mqtt(door: Door) -> None:
    sent = {
        "json": {"file": "cat.png"},
        "message_id": "order/7",
        "key": "k",
        "priority": 3,
        "expiry": "1h",
        "properties": {"tenant": "north"},
    }
    answer = await door.api.post("/queues/tasks/messages", json=sent)
    assert answer.status_code == 201
    assert answer.json() == {
        "message_id": "order/7",
        "queue": "tasks",
        "duplicate": False,
        "dead_letter": False,
    }
    again = await door.ok("POST", "/queues/tasks/messages", sent)
    assert again["duplicate"] is True
    async with door.house.client("w-1") as client:
        worker = Worker(client, "tasks")
        await worker.join(consumer_group="w")
        message = await worker.next()
        assert message.payload == b'{"file":"cat.png"}'
        assert facts(message)["message-id"] == "order/7"
        assert facts(message)["tenant"] == "north"
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
async def test_a_payload_is_text_base64_or_json(door: Door, body: dict[str, Any], payload: bytes) -> None:
    await door.ok("POST", "/queues/tasks/messages", body)
    [seen] = await door.ok("GET", "/queues/tasks/messages")
    assert base64.b64decode(seen["payload_base64"]) == payload
    assert seen["payload"] == (None if payload == b"\xff\x00" else payload.decode())
    assert seen["size"] == len(payload)


async def test_messages_are_looked_at_and_not_taken(door: Door) -> None:
    for number in range(5):
        await door.ok("POST", "/queues/tasks/messages", {"payload": f"number {number}"})
    seen = await door.ok("GET", "/queues/tasks/messages?limit=2")
    assert [one["payload"] for one in seen] == ["number 0", "number 1"]
    assert await door.ok("GET", "/queues/tasks/messages?limit=2") == seen
    [cut] = await door.ok("GET", "/queues/tasks/messages?limit=1&payload_bytes=3")
    assert (cut["payload"], cut["size"]) == ("num", 8)
    only = await door.ok("GET", f"/queues/tasks/messages?partition={seen[0]['partition']}")
    assert {one["partition"] for one in only} == {seen[0]["partition"]}


async def test_a_text_that_is_cut_within_a_letter_is_still_text(door: Door) -> None:
    await door.ok("POST", "/queues/tasks/messages", {"payload": "aöb"})
    [seen] = await door.ok("GET", "/queues/tasks/messages?payload_bytes=2")
    assert seen["payload"] == "a"


async def test_a_message_tells_its_life(door: Door) -> None:
    await door.ok("POST", "/queues/tasks/messages", {"payload": "x", "message_id": "a/b $ 1"})
    life = await door.ok("GET", "/queues/tasks/messages/a%2Fb%20%24%201")
    assert life["message_id"] == "a/b $ 1"
    assert life["message"]["payload"] == "x"
    assert life["summary"]
    assert await door.ok("GET", "/messages/a%2Fb%20%24%201") == {"queues": ["tasks"]}
    assert await door.ok("GET", "/messages/nobody-has-it") == {"queues": []}


async def test_dead_letters_are_listed_and_filtered(door: Door) -> None:
    await door.bury("tasks", b"one", b"two")
    letters = await door.ok("GET", "/queues/tasks/dlq")
    assert [one["payload"] for one in letters] == ["one", "two"]
    assert letters[0]["headers"]["rejectionReason"]
    assert [one["payload"] for one in await door.ok("GET", "/queues/tasks/dlq?contains=tw")] == ["two"]
    assert await door.ok("GET", "/queues/tasks/dlq?reason=timeout") == []
    assert await door.ok("GET", "/queues/tasks/dlq?until=2001-01-01T00:00:00Z") == []
    behind = await door.ok("GET", f"/queues/tasks/dlq?after={letters[0]['message_id']}")
    assert [one["payload"] for one in behind] == ["two"]
    one = await door.ok("GET", f"/queues/tasks/dlq/{letters[1]['message_id']}")
    assert one["payload"] == "two"


async def test_a_dead_letter_is_put_back_and_delivered_again(door: Door) -> None:
    await door.bury("tasks", b"one")
    [letter] = await door.ok("GET", "/queues/tasks/dlq")
    done = await door.ok("POST", f"/queues/tasks/dlq/{letter['message_id']}/retry")
    assert done == {"retried": 1, "skipped": 0, "left": 0}
    assert await door.ok("GET", "/queues/tasks/dlq") == []
    async with door.house.client("w-1") as client:
        worker = Worker(client, "tasks")
        await worker.join(consumer_group="w")
        assert (await worker.next()).payload == b"one"


async def test_many_dead_letters_are_put_back_by_filter(door: Door) -> None:
    await door.bury("tasks", b"a1", b"a2", b"b1")
    done = await door.ok("POST", "/queues/tasks/dlq/retry", {"contains": "a", "limit": 1})
    assert (done["retried"], done["left"]) == (1, 1)
    assert len(await door.ok("GET", "/queues/tasks/dlq")) == 2


async def test_dead_letters_are_thrown_away(door: Door) -> None:
    await door.bury("tasks", b"a1", b"a2", b"b1")
    letters = await door.ok("GET", "/queues/tasks/dlq")
    gone = await door.api.delete(f"/queues/tasks/dlq/{letters[0]['message_id']}")
    assert gone.status_code == 204
    assert await door.ok("POST", "/queues/tasks/dlq/purge", {"contains": "a"}) == {"purged": 1}
    assert await door.ok("POST", "/queues/tasks/dlq/purge") == {"purged": 1}
    assert await door.ok("GET", "/queues/tasks/dlq") == []


async def test_json_that_is_none_is_refused(door: Door) -> None:
    as_json = {"Content-Type": "application/json"}
    for content in (b'{"json": NaN}', b'{"json": "\\ud800"}', b"{", b"[" * 100_000, b"\xff\xfe"):
        told = await door.no(400, "POST", "/queues/tasks/messages", content=content, headers=as_json)
        assert told["error"] == "invalid_request"


async def test_a_full_queue_and_a_large_message_are_refused(door: Door) -> None:
    limits = {"max_queue_depth": 1, "max_message_size": 3}
    await door.ok("POST", "/queues", {"name": "small", "limits": limits})
    told = await door.no(413, "POST", "/queues/small/messages", json={"payload": "four"})
    assert told["error"] == "message_too_large"
    await door.ok("POST", "/queues/small/messages", {"payload": "one"})
    told = await door.no(409, "POST", "/queues/small/messages", json={"payload": "two"})
    assert told["error"] == "queue_full"


async def test_a_payload_that_does_not_fit_the_schema_is_refused(door: Door) -> None:
    await door.ok("POST", "/queues", {"name": "strict", "schema": {"type": "object"}})
    told = await door.no(400, "POST", "/queues/strict/messages", json={"json": 1})
    assert told["error"] == "invalid_payload"
