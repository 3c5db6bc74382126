"""The live stream."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from sluice.access.identity import AdminAuthenticator
from tests.admin.rest.conftest import OpenRestApi, RestApi, Tokens, until


class Stream:
    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.aiter_lines()

    async def next(self) -> tuple[str, Any]:
        """Return the next event; a comment has the name ':'."""
        name = ""
        async with asyncio.timeout(30):
            async for line in self._lines:
                if line.startswith(":"):
                    return ":", line
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    return name, json.loads(line.removeprefix("data: "))
        raise EOFError

    async def find(self, wanted: str) -> Any:
        while True:
            name, data = await self.next()
            if name == wanted:
                return data


@asynccontextmanager
async def listening(rest_api: RestApi, query: str = "", **how: Any) -> AsyncIterator[Stream]:
    async with rest_api.api.stream("GET", f"/live{query}", **how) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Stream(answer)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.live_routes.SAMPLE_SECONDS", 0.1)


async def test_listener_sees_queues_created_and_filled(rest_api: RestApi) -> None:
    async with listening(rest_api) as stream:
        sample = await stream.find("queues")
        assert sample["queues"] == []
        assert sample["node"]["name"] == "local"
        await rest_api.ok("POST", "/queues/tasks/messages", {"payload": "x"})
        while not sample["queues"]:
            sample = await stream.find("queues")
        assert (sample["queues"][0]["name"], sample["queues"][0]["enqueued"]) == ("tasks", 1)


async def test_listener_gets_detail_of_the_requested_queue(rest_api: RestApi) -> None:
    await rest_api.ok("POST", "/queues", {"name": "tasks/image"})
    async with listening(rest_api, "?queue=tasks$image") as stream:
        assert (await stream.find("queue"))["stats"]["name"] == "tasks/image"
        await rest_api.ok("POST", "/queues/tasks$image/groups", {"name": "w"})
        groups: list[Any] = []
        while not groups:
            groups = (await stream.find("queue"))["groups"]
        await rest_api.ok("DELETE", "/queues/tasks$image")
        sample = await stream.find("queues")
        while sample["queues"]:  # the stream continues after its queue was deleted
            sample = await stream.find("queues")


async def test_detail_of_missing_queue_is_refused(rest_api: RestApi) -> None:
    assert (await rest_api.refused(404, "GET", "/live?queue=nix"))["error"] == "unknown_queue"


async def test_live_stream_requires_viewer_role(
    open_rest_api: OpenRestApi, keyring: AdminAuthenticator
) -> None:
    rest_api = await open_rest_api(keyring)
    await rest_api.refused(401, "GET", "/live")
    async with listening(rest_api, headers={"Authorization": "Bearer viewer"}) as stream:
        assert await stream.find("queues")


async def test_listener_that_loses_permission_gets_nothing_more(
    open_rest_api: OpenRestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.live_routes.REAUTHENTICATE_SECONDS", 0.0)
    tokens = Tokens()
    rest_api = await open_rest_api(AdminAuthenticator(tokens))
    headers = {"Authorization": "Bearer viewer"}
    async with listening(rest_api, headers=headers) as stream:
        for _ in range(3):
            await stream.find("queues")
        monkeypatch.setattr(tokens, "verify_bearer", lambda text: None)
        with pytest.raises(EOFError):
            await stream.find("never")
    await rest_api.refused(401, "GET", "/live", headers=headers)


async def test_cost_does_not_grow_with_listeners_and_is_zero_without(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    node = rest_api.harness.service.node

    async def counted() -> Any:
        nonlocal asked
        asked += 1
        return await node()

    monkeypatch.setattr(rest_api.harness.service, "node", counted)
    async with (
        listening(rest_api) as one,
        listening(rest_api) as two,
        listening(rest_api) as three,
    ):
        began, before = time.monotonic(), asked
        for _ in range(10):
            for stream in (one, two, three):
                await stream.find("queues")
        assert asked - before <= (time.monotonic() - began) / 0.1 + 2
    feed = rest_api.thread.feed
    assert feed is not None
    await until(lambda: not feed.client_count and not feed.is_sampling)
    before = asked
    await asyncio.sleep(0.3)  # the time of three samples
    assert asked == before


async def test_heartbeats_are_sent_while_nothing_changes(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.live_routes.HEARTBEAT_SECONDS", 0.05)
    held = asyncio.Event()
    node = rest_api.harness.service.node

    async def slow() -> Any:
        await held.wait()
        return await node()

    monkeypatch.setattr(rest_api.harness.service, "node", slow)
    async with listening(rest_api) as stream:
        assert await stream.find(":") == ": welcome"
        assert await stream.find(":") == ": still here"
        held.set()
        assert await stream.find("queues")


async def test_head_request_for_stream_is_refused(rest_api: RestApi) -> None:
    """Otherwise a client would be counted that never gets a sample."""
    assert (await rest_api.api.head("/live")).status_code == 405


async def test_too_many_listeners_are_refused(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.live_routes.MAX_LIVE_CLIENTS", 1)
    async with listening(rest_api) as stream:
        await stream.find("queues")
        assert (await rest_api.refused(503, "GET", "/live"))["error"] == "busy"


async def test_stream_ends_cleanly_when_the_server_stops(rest_api: RestApi) -> None:
    async with listening(rest_api) as stream:
        await stream.find("queues")
        stopping = asyncio.create_task(rest_api.thread.stop())
        with pytest.raises(EOFError):
            await stream.find("the end")
        await stopping
    assert rest_api.thread.failure is None


async def test_failed_snapshot_does_not_end_the_stream(
    rest_api: RestApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(rest_api) as stream:
        await stream.find("queues")
        look = rest_api.harness.service.node

        async def fail() -> Any:
            monkeypatch.setattr(rest_api.harness.service, "node", look)
            raise RuntimeError("once")

        monkeypatch.setattr(rest_api.harness.service, "node", fail)
        await until(lambda: "live sample failed" in caplog.text)
        await stream.find("queues")
        await rest_api.ok("POST", "/queues", {"name": "tasks"})
        while not (await stream.find("queues"))["queues"]:
            pass
