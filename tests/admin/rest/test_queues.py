"""Queues and groups over REST."""

from __future__ import annotations

import pytest

from tests.admin.live_broker import Worker, publish
from tests.admin.rest.conftest import Door


async def test_a_queue_is_made_looked_at_changed_and_deleted(door: Door) -> None:
    made = await door.api.post("/queues", json={"name": "tasks/image", "partitions": 2})
    assert made.status_code == 201
    assert made.headers["location"] == "/api/v1/queues/tasks$image"
    assert made.json()["config"]["partitions"] == 2
    detail = await door.ok("GET", "/queues/tasks$image")
    assert detail["stats"]["name"] == "tasks/image"
    assert [one["number"] for one in detail["partitions"]] == [0, 1]
    assert detail["stats"]["created_at"].endswith("Z")
    changed = await door.ok("PUT", "/queues/tasks$image/config", {"retry_policy": {"max_retries": 3}})
    assert changed["retry_policy"]["max_retries"] == 3
    assert await door.ok("GET", "/queues/tasks$image/config") == changed
    gone = await door.api.delete("/queues/tasks$image")
    assert (gone.status_code, gone.content) == (204, b"")
    assert await door.ok("GET", "/queues") == []


@pytest.mark.parametrize(
    "written",
    ["tasks$image", "tasks%2Fimage", "tasks%2fimage", "$queue$tasks$image", "%24queue%2Ftasks%2Fimage"],
)
async def test_a_name_in_a_path_is_percent_encoded_or_has_dollars_for_slashes(
    door: Door, written: str
) -> None:
    await door.ok("POST", "/queues", {"name": "tasks/image"})
    assert (await door.ok("GET", f"/queues/{written}/stats"))["name"] == "tasks/image"


async def test_names_may_have_any_letters(door: Door) -> None:
    await door.ok("POST", "/queues", {"name": "größe/50% off"})
    assert (await door.ok("GET", "/queues/gr%C3%B6%C3%9Fe%2F50%25%20off/stats"))["name"] == "größe/50% off"


async def test_queues_are_listed_by_name_in_pages(door: Door) -> None:
    for name in ("b/2", "a", "b/1", "c"):
        await door.ok("POST", "/queues", {"name": name})
    assert [one["name"] for one in await door.ok("GET", "/queues")] == ["a", "b/1", "b/2", "c"]
    assert [one["name"] for one in await door.ok("GET", "/queues?prefix=b/")] == ["b/1", "b/2"]
    assert [one["name"] for one in await door.ok("GET", "/queues?after=b$1&limit=1")] == ["b/2"]


async def test_figures_count_what_was_published_and_purged(door: Door) -> None:
    await door.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    await door.ok("POST", "/queues/tasks/groups", {"name": "w"})
    stats = await door.ok("GET", "/queues/tasks/stats")
    assert (stats["depth"], stats["enqueued"], stats["groups"]) == (1, 1, 1)
    assert await door.ok("POST", "/queues/tasks/purge") == {"purged": 1}
    assert (await door.ok("GET", "/queues/tasks/stats"))["depth"] == 0


async def test_groups_are_made_moved_and_deleted(door: Door) -> None:
    await door.ok("POST", "/queues", {"name": "tasks", "limits": {"retention": "1h"}})
    made = await door.api.post("/queues/tasks/groups", json={"name": "audit", "start": "latest"})
    assert made.status_code == 201
    await door.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    assert (await door.ok("GET", "/queues/tasks/groups/audit"))["lag"] == 1
    assert (await door.ok("POST", "/queues/tasks/groups/audit/seek", {"to": "latest"}))["lag"] == 0
    assert (await door.ok("POST", "/queues/tasks/groups/audit/seek", {"to": "@0"}))["lag"] == 1
    assert [one["name"] for one in await door.ok("GET", "/queues/tasks/groups")] == ["audit"]
    assert (await door.api.delete("/queues/tasks/groups/audit")).status_code == 204
    assert await door.ok("GET", "/queues/tasks/groups") == []


async def test_consumers_are_shown_with_what_they_hold(door: Door) -> None:
    async with door.house.client("w-1") as client:
        await Worker(client, "tasks").join(consumer_group="w")
        await publish(client, "tasks")
        [consumer] = await door.ok("GET", "/queues/tasks/consumers")
        assert (consumer["client"], consumer["group"], consumer["connected"]) == ("w-1", "w", True)
        assert consumer["inflight"] == 1
        told = await door.no(409, "DELETE", "/queues/tasks/groups/w")
        assert told["error"] == "in_use"


async def test_a_diagnosis_names_the_first_reason(door: Door) -> None:
    await door.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    found = await door.ok("GET", "/queues/tasks/diagnosis")
    assert found["queue"] == "tasks"
    assert found["findings"][0]["do"]


async def test_the_books_are_counted_again(door: Door) -> None:
    await door.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    assert await door.ok("GET", "/verify") == []


async def test_a_wrong_method_is_told_the_right_ones(door: Door) -> None:
    answer = await door.api.patch("/queues", json={})
    assert answer.headers["allow"] == "GET, POST"
