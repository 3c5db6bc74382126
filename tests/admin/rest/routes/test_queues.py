"""Queues and groups over REST."""

from __future__ import annotations

import pytest

from tests.admin.live_broker import Worker, publish
from tests.admin.rest.conftest import RestApi


async def test_queue_is_created_read_updated_and_deleted(rest_api: RestApi) -> None:
    created = await rest_api.api.post("/queues", json={"name": "tasks/image", "partitions": 2})
    assert created.status_code == 201
    assert created.headers["location"] == "/api/v1/queues/tasks$image"
    assert created.json()["config"]["partitions"] == 2
    detail = await rest_api.ok("GET", "/queues/tasks$image")
    assert detail["stats"]["name"] == "tasks/image"
    assert [one["number"] for one in detail["partitions"]] == [0, 1]
    assert detail["stats"]["created_at"].endswith("Z")
    changed = await rest_api.ok(
        "PUT", "/queues/tasks$image/config", {"retry_policy": {"max_retries": 3}}
    )
    assert changed["retry_policy"]["max_retries"] == 3
    assert await rest_api.ok("GET", "/queues/tasks$image/config") == changed
    gone = await rest_api.api.delete("/queues/tasks$image")
    assert (gone.status_code, gone.content) == (204, b"")
    assert await rest_api.ok("GET", "/queues") == []


@pytest.mark.parametrize(
    "written",
    [
        "tasks$image",
        "tasks%2Fimage",
        "tasks%2fimage",
        "$queue$tasks$image",
        "%24queue%2Ftasks%2Fimage",
    ],
)
async def test_queue_name_in_path_is_percent_encoded_or_uses_dollars_for_slashes(
    rest_api: RestApi, written: str
) -> None:
    await rest_api.ok("POST", "/queues", {"name": "tasks/image"})
    assert (await rest_api.ok("GET", f"/queues/{written}/stats"))["name"] == "tasks/image"


async def test_queue_names_may_contain_any_characters(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues", {"name": "größe/50% off"})
    assert (await rest_api.ok("GET", "/queues/gr%C3%B6%C3%9Fe%2F50%25%20off/stats"))[
        "name"
    ] == "größe/50% off"


async def test_queues_are_listed_by_name_with_pagination(rest_api: RestApi) -> None:
    for name in ("b/2", "a", "b/1", "c"):
        await rest_api.ok("POST", "/queues", {"name": name})
    assert [one["name"] for one in await rest_api.ok("GET", "/queues")] == ["a", "b/1", "b/2", "c"]
    assert [one["name"] for one in await rest_api.ok("GET", "/queues?prefix=b/")] == ["b/1", "b/2"]
    assert [one["name"] for one in await rest_api.ok("GET", "/queues?after=b$1&limit=1")] == ["b/2"]


async def test_stats_count_published_and_purged_messages(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    await rest_api.ok("POST", "/queues/tasks/groups", {"name": "w"})
    stats = await rest_api.ok("GET", "/queues/tasks/stats")
    assert (stats["total_messages"], stats["enqueued"], stats["groups"]) == (1, 1, 1)
    assert await rest_api.ok("POST", "/queues/tasks/purge") == {"purged": 1}
    assert (await rest_api.ok("GET", "/queues/tasks/stats"))["total_messages"] == 0


async def test_groups_are_created_moved_and_deleted(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues", {"name": "tasks", "limits": {"retention": "1h"}})
    created = await rest_api.api.post(
        "/queues/tasks/groups", json={"name": "audit", "start": "latest"}
    )
    assert created.status_code == 201
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    assert (await rest_api.ok("GET", "/queues/tasks/groups/audit"))["lag"] == 1
    assert (await rest_api.ok("POST", "/queues/tasks/groups/audit/seek", {"to": "latest"}))[
        "lag"
    ] == 0
    assert (await rest_api.ok("POST", "/queues/tasks/groups/audit/seek", {"to": "@0"}))["lag"] == 1
    assert [one["name"] for one in await rest_api.ok("GET", "/queues/tasks/groups")] == ["audit"]
    assert (await rest_api.api.delete("/queues/tasks/groups/audit")).status_code == 204
    assert await rest_api.ok("GET", "/queues/tasks/groups") == []


async def test_consumers_are_listed_with_their_deliveries(rest_api: RestApi) -> None:
    async with rest_api.harness.client("w-1") as client:
        await Worker(client, "tasks").join(consumer_group="w")
        await publish(client, "tasks")
        [consumer] = await rest_api.ok("GET", "/queues/tasks/consumers")
        assert (consumer["client"], consumer["group"], consumer["connected"]) == ("w-1", "w", True)
        assert consumer["inflight"] == 1
        reported = await rest_api.refused(409, "DELETE", "/queues/tasks/groups/w")
        assert reported["error"] == "in_use"


async def test_diagnosis_names_the_first_cause(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    found = await rest_api.ok("GET", "/queues/tasks/diagnosis")
    assert found["queue"] == "tasks"
    assert found["findings"][0]["do"]


async def test_verify_recounts_the_ledger(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    assert await rest_api.ok("GET", "/verify") == []


async def test_wrong_method_gets_the_allowed_ones(rest_api: RestApi) -> None:
    answer = await rest_api.api.patch("/queues", json={})
    assert answer.headers["allow"] == "GET, POST"


async def test_purge_takes_an_age_and_a_number_to_keep(rest_api: RestApi) -> None:
    for _ in range(3):
        await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "x"})
    done = await rest_api.ok("POST", "/queues/tasks/purge?older_than=1h&keep_newest=1")
    assert done == {"purged": 0}
    assert await rest_api.ok("POST", "/queues/tasks/purge?keep_newest=1") == {"purged": 2}
    refusal = await rest_api.refused(400, "POST", "/queues/tasks/purge?older_than=soon")
    assert "older_than" in refusal["message"]


async def test_body_that_a_path_does_not_read_is_refused(rest_api: RestApi) -> None:
    """A purge whose limits are in the body by mistake must not delete everything."""
    for _ in range(3):
        await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "x"})
    refusal = await rest_api.refused(
        400, "POST", "/queues/tasks/purge", json={"older_than": "1h", "keep_newest": 1}
    )
    assert "reads no body" in refusal["message"] and "?name=value" in refusal["do"]
    await rest_api.refused(400, "DELETE", "/queues/tasks", json={"force": False})
    assert (await rest_api.ok("GET", "/queues/tasks/stats"))["total_messages"] == 3
    assert await rest_api.ok("POST", "/queues/tasks/purge", {}) == {"purged": 3}


async def test_queue_and_group_are_paused_and_resumed(rest_api: RestApi) -> None:
    async with rest_api.harness.client("w-1") as client:
        worker = Worker(client, "tasks")
        await worker.join(consumer_group="w")
        paused = await rest_api.ok("POST", "/queues/tasks/pause", {"reason": "maintenance"})
        assert paused["pause"]["reason"] == "maintenance" and paused["pause"]["by"]
        paused = await rest_api.ok("POST", "/queues/tasks/groups/w/pause", {})
        assert paused["held_by"] == ["queue-paused", "paused"]
        await publish(client, "tasks")
        resumed = await rest_api.ok("POST", "/queues/tasks/resume")
        assert resumed["pause"] is None and resumed["inflight_messages"] == 0
        resumed = await rest_api.ok("POST", "/queues/tasks/groups/w/resume")
        assert (resumed["pause"], resumed["held_by"]) == (None, [])
        assert (await rest_api.ok("GET", "/queues/tasks/stats"))["inflight_messages"] == 1


async def test_rate_and_limits_are_validated(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "one"})
    limits = {"max_rate": "90/m burst 5", "max_inflight": 3}
    changed = await rest_api.ok("PUT", "/queues/tasks/config", {"limits": limits})
    assert changed["limits"]["max_rate"] == "90/m burst 5"
    reported = await rest_api.refused(
        400, "PUT", "/queues/tasks/config", json={"limits": {"max_rate": "fast"}}
    )
    assert "'fast' is not a rate" in reported["message"]
    reported = await rest_api.refused(
        400, "PUT", "/queues/tasks/config", json={"limits": {"max_rate_per_keys": "1/s"}}
    )
    assert "did you mean limits.max_rate_per_key" in reported["message"]
    cleared = await rest_api.ok("PUT", "/queues/tasks/config", {"limits": {"max_rate": None}})
    assert cleared["limits"]["max_rate"] is None
