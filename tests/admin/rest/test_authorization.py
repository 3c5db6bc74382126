"""Who may do what at the REST door, and what browsers are kept from."""

from __future__ import annotations

import asyncio
import base64

import httpx
import pytest

from sluice.access.identity import Keyring
from tests.admin.rest.conftest import Door, OpenDoor

READS = [
    "/node",
    "/nodes",
    "/queues",
    "/queues/tasks",
    "/queues/tasks/config",
    "/queues/tasks/stats",
    "/queues/tasks/groups",
    "/queues/tasks/consumers",
    "/queues/tasks/messages",
    "/queues/tasks/dlq",
    "/queues/tasks/diagnosis",
    "/verify",
    "/whoami",
]
OPERATIONS: list[tuple[str, str, object]] = [
    ("POST", "/queues/tasks/messages", {"payload": "x"}),
    ("POST", "/queues/tasks/purge", None),
    ("POST", "/queues/tasks/groups/w/seek", {"to": "latest"}),
    ("POST", "/queues/tasks/dlq/retry", None),
    ("POST", "/queues/tasks/dlq/purge", None),
    ("POST", "/queues/tasks/dlq/1-1/retry", None),
    ("DELETE", "/queues/tasks/dlq/1-1", None),
]
ADMINISTRATION: list[tuple[str, str, object]] = [
    ("POST", "/queues", {"name": "more"}),
    ("PUT", "/queues/tasks/config", {"limits": {"max_queue_depth": 5}}),
    ("POST", "/queues/tasks/groups", {"name": "more"}),
    ("DELETE", "/queues/tasks/groups/w", None),
    ("DELETE", "/queues/tasks", None),
]


async def status(door: Door, role: str, method: str, path: str, body: object = None) -> int:
    headers = {"Authorization": f"Bearer {role}"}
    answer = await door.api.request(method, path, headers=headers, json=body)
    if answer.status_code == 403:
        assert answer.json()["error"] == "not_allowed"
        assert role in answer.json()["message"]
    return answer.status_code


@pytest.fixture
async def guarded(open_door: OpenDoor, keyring: Keyring) -> Door:
    door = await open_door(keyring)
    assert await status(door, "admin", "POST", "/queues", {"name": "tasks"}) == 201
    assert await status(door, "admin", "POST", "/queues/tasks/groups", {"name": "w"}) == 201
    return door


async def test_nobody_comes_in_without_credentials(guarded: Door) -> None:
    for path in READS:
        told = await guarded.no(401, "GET", path)
        assert told["error"] == "not_authenticated"
    for method, path, body in OPERATIONS + ADMINISTRATION:
        await guarded.no(401, method, path, **({} if body is None else {"json": body}))
    answer = await guarded.web.get("/metrics")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert await status(guarded, "viewer", "GET", "/queues/tasks") == 200  # and nothing has happened to it


async def test_wrong_credentials_are_refused_before_the_body_is_looked_at(guarded: Door) -> None:
    for authorization in ("Bearer nonsense", "Basic nonsense", "Nonsense"):
        headers = {"Authorization": authorization, "Content-Type": "application/json"}
        await guarded.no(401, "POST", "/queues", content=b"{", headers=headers)


async def test_a_viewer_sees_everything_and_changes_nothing(guarded: Door) -> None:
    for path in READS:
        assert await status(guarded, "viewer", "GET", path) == 200
    for method, path, body in OPERATIONS + ADMINISTRATION:
        assert await status(guarded, "viewer", method, path, body) == 403


async def test_an_operator_works_with_messages_and_leaves_queues_as_they_are(guarded: Door) -> None:
    for method, path, body in ADMINISTRATION:
        assert await status(guarded, "operator", method, path, body) == 403
    for method, path, body in OPERATIONS:
        assert await status(guarded, "operator", method, path, body) in (200, 201, 404)


async def test_an_administrator_does_it_all(guarded: Door) -> None:
    for method, path, body in OPERATIONS:
        assert await status(guarded, "admin", method, path, body) in (200, 201, 404)
    for method, path, body in ADMINISTRATION:
        assert await status(guarded, "admin", method, path, body) in (200, 201, 204)


async def test_a_caller_is_told_who_it_is_taken_for(guarded: Door, open_door: OpenDoor) -> None:
    answer = await guarded.api.get("/whoami", headers={"Authorization": "Bearer operator"})
    assert answer.json() == {"name": "the operator", "role": "operator", "anonymous": False}
    basic = base64.b64encode(b"ada:correct horse").decode()
    answer = await guarded.api.get("/whoami", headers={"Authorization": f"Basic {basic}"})
    assert answer.json() == {"name": "ada", "role": "admin", "anonymous": False}
    anonymous = await (await open_door()).ok("GET", "/whoami")
    assert anonymous == {"name": "anonymous", "role": "admin", "anonymous": True}


async def test_health_and_pages_need_no_credentials(guarded: Door) -> None:
    for path in ("/healthz", "/readyz", "/", "/docs", "/openapi.json"):
        assert (await guarded.web.get(path)).status_code == 200, path


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "nonsense", "http://["]
)
async def test_a_page_of_another_site_changes_nothing(door: Door, origin: str) -> None:
    told = await door.no(403, "POST", "/queues", json={"name": "tasks"}, headers={"Origin": origin})
    assert told["error"] == "foreign_origin"
    assert await door.ok("GET", "/queues") == []


async def test_a_page_of_another_site_is_known_by_what_its_browser_says_of_it(door: Door) -> None:
    await door.no(403, "POST", "/queues/tasks/purge", headers={"Sec-Fetch-Site": "cross-site"})


async def test_a_page_of_this_very_host_may_change_things(door: Door) -> None:
    origin = {"Origin": f"http://{door.address}", "Sec-Fetch-Site": "same-origin"}
    assert (await door.api.post("/queues", json={"name": "tasks"}, headers=origin)).status_code == 201


async def test_a_foreign_name_for_this_machine_is_not_answered_to_nobody_in_particular(door: Door) -> None:
    """DNS rebinding: a page of evil.example whose name resolves to 127.0.0.1 reads what it likes."""
    told = await door.no(403, "GET", "/queues", headers={"Host": "evil.example"})
    assert told["error"] == "foreign_host"
    assert (await door.web.get("/metrics", headers={"Host": "evil.example:8080"})).status_code == 403
    for name in ("localhost", "127.0.0.1:8080", "[::1]:8080", "10.1.2.3"):
        assert (await door.api.get("/queues", headers={"Host": name})).status_code == 200, name


async def test_whoever_shows_a_token_may_use_any_name(guarded: Door) -> None:
    headers = {"Host": "sluice.example", "Authorization": "Bearer viewer"}
    assert (await guarded.api.get("/queues", headers=headers)).status_code == 200


@pytest.mark.parametrize("dots", [".", ".."])
async def test_a_path_with_dots_is_refused_and_encoded_dots_are_a_name(door: Door, dots: str) -> None:
    await door.ok("POST", "/queues", {"name": "tasks"})
    head = f"DELETE /api/v1/queues/tasks/groups/{dots} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    reader, writer = await asyncio.open_connection(door.address.host, door.address.port)
    writer.write(head.encode())
    assert b" 400 " in await reader.readline()
    writer.close()
    encoded = dots.replace(".", "%2E")
    told = await door.no(404, "DELETE", f"/queues/tasks/groups/{encoded}")
    assert told["error"] == "unknown_group" and f"'{dots}'" in told["message"]
    assert await door.ok("GET", "/queues/tasks")


async def test_every_answer_forbids_what_browsers_would_do_with_it(door: Door) -> None:
    for path in ("/", "/docs", "/api/v1/queues", "/api/v1/nix", "/healthz"):
        headers = (await door.web.get(path)).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
    assert (await door.api.get("/queues")).headers["cache-control"] == "no-store"


async def test_a_body_that_is_too_large_is_refused(open_door: OpenDoor) -> None:
    door = await open_door(max_body=1000)
    told = await door.no(413, "POST", "/queues/tasks/messages", json={"payload": "x" * 1000})
    assert told["error"] == "body_too_large"

    async def pieces() -> object:
        for _ in range(20):
            yield b" " * 100

    as_json = {"Content-Type": "application/json"}
    await door.no(413, "POST", "/queues/tasks/messages", content=pieces(), headers=as_json)
    await door.ok("POST", "/queues/tasks/messages", {"payload": "x" * 900})


async def test_a_body_that_is_not_json_is_refused(door: Door) -> None:
    told = await door.no(415, "POST", "/queues", data={"name": "tasks"})
    assert "application/json" in told["do"]


async def test_what_comes_at_once_beyond_measure_is_refused_and_the_rest_answered(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.rest.middleware.MOST_AT_ONCE", 2)
    held = asyncio.Event()
    purge = door.house.service.purge

    async def slow(name: str) -> int:
        await held.wait()
        return await purge(name)

    monkeypatch.setattr(door.house.service, "purge", slow)
    await door.ok("POST", "/queues", {"name": "tasks"})
    waiting = [asyncio.create_task(door.api.post("/queues/tasks/purge")) for _ in range(2)]
    refused: httpx.Response | None = None
    async with asyncio.timeout(30):
        while refused is None or refused.status_code != 503:
            await asyncio.sleep(0)
            refused = await door.api.post("/queues/tasks/groups", json={"name": "x"})
    assert refused.json()["error"] == "busy"
    held.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
