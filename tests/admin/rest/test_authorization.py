"""Authorization of the REST API, and its protection against foreign web pages."""

from __future__ import annotations

import asyncio
import base64

import httpx
import pytest

from sluice.access.identity import AdminAuthenticator
from tests.admin.rest.conftest import OpenRestApi, RestApi

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
    "/queues/tasks/dlq-errors",
    "/samples",
    "/queues/tasks/samples",
    "/queues/tasks/diagnosis",
    "/verify",
    "/clients",
    "/listeners",
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


async def status(rest_api: RestApi, role: str, method: str, path: str, body: object = None) -> int:
    headers = {"Authorization": f"Bearer {role}"}
    answer = await rest_api.api.request(method, path, headers=headers, json=body)
    if answer.status_code == 403:
        assert answer.json()["error"] == "not_allowed"
        assert role in answer.json()["message"]
    return answer.status_code


@pytest.fixture
async def secured_api(open_rest_api: OpenRestApi, keyring: AdminAuthenticator) -> RestApi:
    rest_api = await open_rest_api(keyring)
    assert await status(rest_api, "admin", "POST", "/queues", {"name": "tasks"}) == 201
    assert await status(rest_api, "admin", "POST", "/queues/tasks/groups", {"name": "w"}) == 201
    return rest_api


async def test_request_without_credentials_is_refused(secured_api: RestApi) -> None:
    for path in READS:
        reported = await secured_api.refused(401, "GET", path)
        assert reported["error"] == "not_authenticated"
    for method, path, body in OPERATIONS + ADMINISTRATION:
        await secured_api.refused(401, method, path, **({} if body is None else {"json": body}))
    answer = await secured_api.web.get("/metrics")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    # and the queue is unchanged
    assert await status(secured_api, "viewer", "GET", "/queues/tasks") == 200


async def test_wrong_credentials_are_refused_before_the_body_is_read(secured_api: RestApi) -> None:
    for authorization in ("Bearer nonsense", "Basic nonsense", "Nonsense"):
        headers = {"Authorization": authorization, "Content-Type": "application/json"}
        await secured_api.refused(401, "POST", "/queues", content=b"{", headers=headers)


async def test_viewer_reads_everything_and_changes_nothing(secured_api: RestApi) -> None:
    for path in READS:
        assert await status(secured_api, "viewer", "GET", path) == 200
    for method, path, body in OPERATIONS + ADMINISTRATION:
        assert await status(secured_api, "viewer", method, path, body) == 403


async def test_operator_handles_messages_but_not_queues(secured_api: RestApi) -> None:
    for method, path, body in ADMINISTRATION:
        assert await status(secured_api, "operator", method, path, body) == 403
    for method, path, body in OPERATIONS:
        assert await status(secured_api, "operator", method, path, body) in (200, 201, 404)


async def test_administrator_may_do_everything(secured_api: RestApi) -> None:
    for method, path, body in OPERATIONS:
        assert await status(secured_api, "admin", method, path, body) in (200, 201, 404)
    for method, path, body in ADMINISTRATION:
        assert await status(secured_api, "admin", method, path, body) in (200, 201, 204)


async def test_caller_can_ask_for_its_identity(
    secured_api: RestApi, open_rest_api: OpenRestApi
) -> None:
    answer = await secured_api.api.get("/whoami", headers={"Authorization": "Bearer operator"})
    assert answer.json() == {"name": "the operator", "role": "operator", "anonymous": False}
    basic = base64.b64encode(b"ada:correct horse").decode()
    answer = await secured_api.api.get("/whoami", headers={"Authorization": f"Basic {basic}"})
    assert answer.json() == {"name": "ada", "role": "admin", "anonymous": False}
    anonymous = await (await open_rest_api()).ok("GET", "/whoami")
    assert anonymous == {"name": "anonymous", "role": "admin", "anonymous": True}


async def test_health_and_pages_need_no_credentials(secured_api: RestApi) -> None:
    for path in ("/healthz", "/readyz", "/", "/docs", "/openapi.json"):
        assert (await secured_api.web.get(path)).status_code == 200, path


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "nonsense", "http://["]
)
async def test_cross_site_page_cannot_change_anything(rest_api: RestApi, origin: str) -> None:
    reported = await rest_api.refused(
        403, "POST", "/queues", json={"name": "tasks"}, headers={"Origin": origin}
    )
    assert reported["error"] == "foreign_origin"
    assert await rest_api.ok("GET", "/queues") == []


async def test_cross_site_request_is_recognized_by_browser_headers(rest_api: RestApi) -> None:
    await rest_api.refused(
        403, "POST", "/queues/tasks/purge", headers={"Sec-Fetch-Site": "cross-site"}
    )


async def test_same_origin_page_may_change_things(rest_api: RestApi) -> None:
    origin = {"Origin": f"http://{rest_api.address}", "Sec-Fetch-Site": "same-origin"}
    assert (
        await rest_api.api.post("/queues", json={"name": "tasks"}, headers=origin)
    ).status_code == 201


async def test_anonymous_request_with_foreign_host_header_is_refused(rest_api: RestApi) -> None:
    """DNS rebinding: the name of evil.example resolves to 127.0.0.1, so its page could read all."""
    reported = await rest_api.refused(403, "GET", "/queues", headers={"Host": "evil.example"})
    assert reported["error"] == "foreign_host"
    assert (
        await rest_api.web.get("/metrics", headers={"Host": "evil.example:8080"})
    ).status_code == 403
    for name in ("localhost", "127.0.0.1:8080", "[::1]:8080", "10.1.2.3"):
        assert (await rest_api.api.get("/queues", headers={"Host": name})).status_code == 200, name


async def test_request_with_token_may_use_any_host_header(secured_api: RestApi) -> None:
    headers = {"Host": "sluice.example", "Authorization": "Bearer viewer"}
    assert (await secured_api.api.get("/queues", headers=headers)).status_code == 200


@pytest.mark.parametrize("dots", [".", ".."])
async def test_path_with_dots_is_refused_and_encoded_dots_are_a_name(
    rest_api: RestApi, dots: str
) -> None:
    await rest_api.ok("POST", "/queues", {"name": "tasks"})
    head = f"DELETE /api/v1/queues/tasks/groups/{dots} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    reader, writer = await asyncio.open_connection(rest_api.address.host, rest_api.address.port)
    writer.write(head.encode())
    assert b" 400 " in await reader.readline()
    writer.close()
    encoded = dots.replace(".", "%2E")
    reported = await rest_api.refused(404, "DELETE", f"/queues/tasks/groups/{encoded}")
    assert reported["error"] == "unknown_group" and f"'{dots}'" in reported["message"]
    assert await rest_api.ok("GET", "/queues/tasks")


async def test_every_response_has_security_headers(rest_api: RestApi) -> None:
    for path in ("/", "/docs", "/api/v1/queues", "/api/v1/nix", "/healthz"):
        headers = (await rest_api.web.get(path)).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
    assert (await rest_api.api.get("/queues")).headers["cache-control"] == "no-store"


async def test_oversized_body_is_refused(open_rest_api: OpenRestApi) -> None:
    rest_api = await open_rest_api(max_body=1000)
    reported = await rest_api.refused(
        413, "POST", "/queues/tasks/messages", json={"payload": "x" * 1000}
    )
    assert reported["error"] == "body_too_large"

    async def pieces() -> object:
        for _ in range(20):
            yield b" " * 100

    as_json = {"Content-Type": "application/json"}
    await rest_api.refused(413, "POST", "/queues/tasks/messages", content=pieces(), headers=as_json)
    await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "x" * 900})


async def test_non_json_body_is_refused(rest_api: RestApi) -> None:
    reported = await rest_api.refused(415, "POST", "/queues", data={"name": "tasks"})
    assert "application/json" in reported["do"]


async def test_requests_above_concurrency_limit_are_refused_and_others_answered(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.rest.middleware.MAX_CONCURRENT_REQUESTS", 2)
    held = asyncio.Event()
    purge = rest_api.harness.service.purge

    async def slow(name: str, older_than: float, keep_newest: int) -> int:
        await held.wait()
        return await purge(name, older_than, keep_newest)

    monkeypatch.setattr(rest_api.harness.service, "purge", slow)
    await rest_api.ok("POST", "/queues", {"name": "tasks"})
    waiting = [asyncio.create_task(rest_api.api.post("/queues/tasks/purge")) for _ in range(2)]
    refused: httpx.Response | None = None
    async with asyncio.timeout(30):
        while refused is None or refused.status_code != 503:
            await asyncio.sleep(0)
            refused = await rest_api.api.post("/queues/tasks/groups", json={"name": "x"})
    assert refused.json()["error"] == "busy"
    held.set()
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
