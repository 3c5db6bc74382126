"""Errors of the REST API and their texts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.admin.rest.conftest import RestApi, opened_rest_api

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness() -> AsyncIterator[RestApi]:
    """One queue `tasks` with one group `w`; no test here changes it."""
    async with opened_rest_api() as rest_api:
        await rest_api.ok("POST", "/queues", {"name": "tasks"})
        await rest_api.ok("POST", "/queues/tasks/groups", {"name": "w"})
        yield rest_api


@pytest.mark.parametrize(
    ("status", "method", "path", "body", "error", "word"),
    [
        (404, "GET", "/queues/nix", None, "unknown_queue", "nix"),
        (404, "DELETE", "/queues/nix", None, "unknown_queue", "nix"),
        (404, "GET", "/queues/tasks/groups/unknown", None, "unknown_group", "unknown"),
        (404, "GET", "/queues/tasks/messages/77-77", None, "unknown_message", "77-77"),
        (404, "GET", "/queues/tasks/dlq/77-77", None, "unknown_message", "77-77"),
        (404, "GET", "/nix", None, "no_such_page", "/nix"),
        (405, "PATCH", "/queues/tasks", None, "wrong_method", "PATCH"),
        (409, "POST", "/queues", {"name": "tasks"}, "queue_exists", "tasks"),
        (
            400,
            "POST",
            "/queues",
            {"name": "a", "partitions": 0},
            "invalid_queue_config",
            "from 1 to 4096",
        ),
        (
            400,
            "POST",
            "/queues",
            {"name": "a", "partitoins": 1},
            "invalid_queue_config",
            "partitoins",
        ),
        (400, "POST", "/queues", {"name": "a+b"}, "invalid_queue_config", "no +"),
        (400, "POST", "/queues", ["tasks"], "invalid_request", "the body must be a JSON object"),
        (400, "POST", "/queues/tasks/groups", {"name": 7}, "invalid_request", "name must be text"),
        (
            400,
            "PUT",
            "/queues/tasks/config",
            {"partitions": 1},
            "invalid_queue_config",
            "number can only grow",
        ),
        (400, "POST", "/queues/tasks/groups", {"name": "a/b"}, "invalid_queue_config", "a/b"),
        (400, "POST", "/queues/tasks/groups", {}, "invalid_request", "name is missing"),
        (
            400,
            "POST",
            "/queues/tasks/groups/w/seek",
            {"to": "never"},
            "invalid_queue_config",
            "never",
        ),
        (409, "POST", "/queues/tasks/groups", {"name": "w"}, "group_exists", "w"),
        (
            400,
            "GET",
            "/queues?limit=0",
            None,
            "invalid_request",
            "limit must be a whole number from 1 to 10000",
        ),
        (400, "GET", "/queues?limt=5", None, "invalid_request", "limt is not a parameter here"),
    ],
)
async def test_error_says_what_is_wrong_and_what_to_do(
    harness: RestApi, status: int, method: str, path: str, body: object, error: str, word: str
) -> None:
    how = {} if body is None else {"json": body}
    reported = await harness.refused(status, method, path, **how)
    assert reported["error"] == error
    assert word in reported["message"]


async def test_deeply_nested_body_is_refused_with_an_explanation(harness: RestApi) -> None:
    reported = await harness.refused(
        400, "POST", "/queues", content=b"[" * 100_000, headers={"Content-Type": "application/json"}
    )
    assert reported["message"] == "the body is not readable as JSON"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"payload": "a", "json": 1}, "more than one of payload, payload_base64 and json"),
        ({"payload_base64": "?"}, "payload_base64 must be base64"),
        ({"priority": 10}, "priority must be a whole number from 0 to 9"),
        (
            {"delay": "5"},
            "delay '5' is not a duration; write a number and its unit, such as \"5s\"; from 0s to",
        ),
        ({"deliver_at": "soon"}, "deliver_at must be a time"),
        ({"key": "a\0"}, "key must be text without the zero character"),
        ({"message_id": "x" * 1025}, "message_id must be text of 1024 bytes or less"),
        ({"response_topic": "a/#"}, "response_topic must be text without"),
        ({"properties": [["a"]]}, "properties.0"),
        ({"proprieties": {}}, "proprieties is not a key here"),
    ],
)
async def test_impossible_message_is_refused_with_key_and_allowed_values(
    harness: RestApi, body: dict[str, Any], words: str
) -> None:
    reported = await harness.refused(400, "POST", "/queues/new/messages", json=body)
    assert words in reported["message"]
    assert await harness.ok("GET", "/queues?prefix=new") == []


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/queues", "name"),
        ("/queues/tasks/groups", "name"),
        ("/queues/tasks/messages", "payload"),
        ("/queues/tasks/dlq/purge", "contains"),
        ("/queues/tasks/dlq/retry", "contains"),
        ("/queues/tasks/dlq/retry", "group"),
    ],
)
async def test_text_that_is_not_valid_utf_8_is_refused(
    harness: RestApi, path: str, key: str
) -> None:
    body = f'{{"{key}": "\\ud800"}}'
    reported = await harness.refused(
        400, "POST", path, content=body, headers={"Content-Type": "application/json"}
    )
    assert key in reported["message"] or "group" in reported["message"]
    assert [one["name"] for one in await harness.ok("GET", "/queues/tasks/groups")] == ["w"]
    assert (await harness.web.get("/metrics")).status_code == 200
