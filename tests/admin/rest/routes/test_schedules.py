"""Schedules over REST."""

from __future__ import annotations

import pytest

from tests.admin.rest.conftest import RestApi

NIGHTLY = {"name": "nightly", "cron": "30 2 * * *", "time_zone": "Europe/Berlin", "payload": "go"}


async def test_schedule_is_added_shown_changed_and_removed(rest_api: RestApi) -> None:
    answer = await rest_api.api.post("/queues/reports/schedules", json={**NIGHTLY, "key": "k"})
    assert answer.status_code == 201
    made = answer.json()
    assert (made["name"], made["queue"], made["cron"]) == ("nightly", "reports", "30 2 * * *")
    assert (made["payload"], made["key"], made["missed"], made["pause"]) == (
        "go",
        "k",
        "skip",
        None,
    )
    assert len(made["next_runs"]) == 5 and made["last_runs"] == []
    assert all(time.endswith(":00.000Z") for time in made["next_runs"])
    assert await rest_api.ok("GET", "/schedules") == [made]
    assert await rest_api.ok("GET", "/queues/reports/schedules") == [made]
    assert await rest_api.ok("GET", "/queues/other/schedules") == []
    changed = await rest_api.ok(
        "PUT", "/queues/reports/schedules/nightly", {"every": "15m", "payload": "more"}
    )
    assert (changed["cron"], changed["every"], changed["payload"]) == ("", "15m", "more")
    assert (await rest_api.api.delete("/queues/reports/schedules/nightly")).status_code == 204
    assert await rest_api.ok("GET", "/schedules") == []


async def test_schedule_runs_now_also_while_it_is_paused(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/reports/schedules", NIGHTLY)
    at = "/queues/reports/schedules/nightly"
    paused = await rest_api.ok("POST", f"{at}/pause", {"reason": "holidays"})
    assert paused["pause"]["reason"] == "holidays" and paused["next_runs"] == []
    run = await rest_api.ok("POST", f"{at}/run")
    assert run["outcome"] == "published" and run["message_id"].startswith("nightly@")
    [message] = await rest_api.ok("GET", "/queues/reports/messages")
    assert (message["message_id"], message["payload"]) == (run["message_id"], "go")
    resumed = await rest_api.ok("POST", f"{at}/resume")
    assert resumed["pause"] is None and len(resumed["next_runs"]) == 5
    assert [one["outcome"] for one in resumed["last_runs"]] == ["published"]
    assert resumed["counts"]["published"] == 1


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"name": "x"}, 400, "cron expression or an interval"),
        ({"name": "x", "cron": "61 * * * *"}, 400, "61"),
        ({"name": "x", "every": "1ms"}, 400, "apart"),
        ({"name": "a/b", "every": "1h"}, 400, "not a valid name"),
        ({"name": "x", "every": "1h", "missed": "never"}, 400, "skip, once, all"),
        ({"name": "x", "every": "1h", "delay": "5s"}, 400, "Leave message_id, delay"),
        (NIGHTLY, 409, "exists already"),
    ],
)
async def test_schedule_that_cannot_run_is_refused(
    rest_api: RestApi, body: dict[str, str], status: int, text: str
) -> None:
    await rest_api.ok("POST", "/queues/reports/schedules", NIGHTLY)
    answer = await rest_api.api.post("/queues/reports/schedules", json=body)
    assert answer.status_code == status and text in answer.text


async def test_schedule_of_another_queue_is_not_found(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues/reports/schedules", NIGHTLY)
    for method in ("get", "delete"):
        answer = await getattr(rest_api.api, method)("/queues/other/schedules/nightly")
        assert answer.status_code == 404 and "sluice schedule list" in answer.text
