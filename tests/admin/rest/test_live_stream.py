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

from sluice.access.identity import Keyring
from tests.admin.rest.conftest import Door, OpenDoor, Tokens, until


class Stream:
    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self._lines = answer.aiter_lines()

    async def next(self) -> tuple[str, Any]:
        """The next event; a comment has the name ':'."""
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
async def listening(door: Door, query: str = "", **how: Any) -> AsyncIterator[Stream]:
    async with door.api.stream("GET", f"/live{query}", **how) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Stream(answer)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.live_routes.EACH_SECONDS", 0.1)


async def test_a_listener_sees_queues_come_and_fill(door: Door) -> None:
    async with listening(door) as stream:
        sample = await stream.find("queues")
        assert sample["queues"] == []
        assert sample["node"]["name"] == "local"
        await door.ok("POST", "/queues/tasks/messages", {"payload": "x"})
        while not sample["queues"]:
            sample = await stream.find("queues")
        assert (sample["queues"][0]["name"], sample["queues"][0]["enqueued"]) == ("tasks", 1)


async def test_a_listener_gets_the_detail_of_the_queue_it_asks_for(door: Door) -> None:
    await door.ok("POST", "/queues", {"name": "tasks/image"})
    async with listening(door, "?queue=tasks$image") as stream:
        assert (await stream.find("queue"))["stats"]["name"] == "tasks/image"
        await door.ok("POST", "/queues/tasks$image/groups", {"name": "w"})
        groups: list[Any] = []
        while not groups:
            groups = (await stream.find("queue"))["groups"]
        await door.ok("DELETE", "/queues/tasks$image")
        sample = await stream.find("queues")
        while sample["queues"]:  # the stream goes on when its queue has gone
            sample = await stream.find("queues")


async def test_the_detail_of_a_queue_that_is_not_there_is_refused(door: Door) -> None:
    assert (await door.no(404, "GET", "/live?queue=nix"))["error"] == "unknown_queue"


async def test_listening_takes_a_viewer(open_door: OpenDoor, keyring: Keyring) -> None:
    door = await open_door(keyring)
    await door.no(401, "GET", "/live")
    async with listening(door, headers={"Authorization": "Bearer viewer"}) as stream:
        assert await stream.find("queues")


async def test_who_may_not_listen_any_more_hears_nothing_more(
    open_door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.live_routes.AGAIN_SECONDS", 0.0)
    tokens = Tokens()
    door = await open_door(Keyring(tokens))
    headers = {"Authorization": "Bearer viewer"}
    async with listening(door, headers=headers) as stream:
        for _ in range(3):
            await stream.find("queues")
        monkeypatch.setattr(tokens, "of_bearer", lambda text: None)
        with pytest.raises(EOFError):
            await stream.find("never")
    await door.no(401, "GET", "/live", headers=headers)


async def test_many_listeners_cost_as_much_as_one_and_none_costs_nothing(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0
    node = door.house.service.node

    async def counted() -> Any:
        nonlocal asked
        asked += 1
        return await node()

    monkeypatch.setattr(door.house.service, "node", counted)
    async with (
        listening(door) as one,
        listening(door) as two,
        listening(door) as three,
    ):
        began, before = time.monotonic(), asked
        for _ in range(10):
            for stream in (one, two, three):
                await stream.find("queues")
        assert asked - before <= (time.monotonic() - began) / 0.1 + 2
    feed = door.thread.feed
    assert feed is not None
    await until(lambda: not feed.listeners and not feed.is_sampling)
    before = asked
    await asyncio.sleep(0.3)  # three samples' time
    assert asked == before


async def test_a_silent_broker_is_bridged_by_heartbeats(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.live_routes.HEARTBEAT_SECONDS", 0.05)
    held = asyncio.Event()
    node = door.house.service.node

    async def slow() -> Any:
        await held.wait()
        return await node()

    monkeypatch.setattr(door.house.service, "node", slow)
    async with listening(door) as stream:
        assert await stream.find(":") == ": welcome"
        assert await stream.find(":") == ": still here"
        held.set()
        assert await stream.find("queues")


async def test_a_stream_cannot_be_asked_for_its_head(door: Door) -> None:
    """It would be a listener that never hears anything."""
    assert (await door.api.head("/live")).status_code == 405


async def test_too_many_listeners_are_refused(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.admin.rest.routes.live_routes.MOST_LISTENERS", 1)
    async with listening(door) as stream:
        await stream.find("queues")
        assert (await door.no(503, "GET", "/live"))["error"] == "busy"


async def test_a_stream_ends_cleanly_when_the_server_stops(door: Door) -> None:
    async with listening(door) as stream:
        await stream.find("queues")
        stopping = asyncio.create_task(door.thread.stop())
        with pytest.raises(EOFError):
            await stream.find("the end")
        await stopping
    assert door.thread.failure is None


async def test_a_look_that_fails_is_followed_by_others(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(door) as stream:
        await stream.find("queues")
        look = door.house.service.node

        async def fail() -> Any:
            monkeypatch.setattr(door.house.service, "node", look)
            raise RuntimeError("once")

        monkeypatch.setattr(door.house.service, "node", fail)
        await until(lambda: "the live stream has no figures" in caplog.text)
        await stream.find("queues")
        await door.ok("POST", "/queues", {"name": "tasks"})
        while not (await stream.find("queues"))["queues"]:
            pass
