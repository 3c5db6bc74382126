"""The REST door of a broker that lives in the test's loop: the real thread, the real server, a client over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import pytest

from sluice.access.identity import Identity, Keyring, Role
from sluice.admin.server import AdminDoors, AdminThread
from sluice.units import Address, parse_address
from tests.admin.live_broker import Living, Worker, living, publish

QUICK = {"retry_policy": {"max_retries": 0, "initial_backoff": "1ms"}}
ANY_PORT = Address("127.0.0.1", 0)


class Tokens:
    """The word of a token is the role it has."""

    def of_bearer(self, text: str) -> Identity | None:
        return Identity(f"the {text}", Role.of(text)) if text in ("viewer", "operator", "admin") else None

    def of_password(self, name: str, password: str, peer: str) -> Identity | None:
        return Identity(name, Role.ADMIN) if password == "correct horse" else None


@dataclass
class Door:
    house: Living
    thread: AdminThread
    address: Address
    api: httpx.AsyncClient  # below /api/v1
    web: httpx.AsyncClient  # from the root on

    async def ok(self, method: str, path: str, json: Any = None) -> Any:
        """The JSON of an answer that must be a good one."""
        answer = await self.api.request(method, path, **({} if json is None else {"json": json}))
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    async def no(self, status: int, method: str, path: str, **how: Any) -> dict[str, str]:
        """The refusal, which must have this status and the shape that all refusals have."""
        answer = await self.api.request(method, path, **how)
        assert answer.status_code == status, answer.text
        told: dict[str, str] = answer.json()
        assert list(told) == ["error", "message", "do"]
        assert all(told.values()), told
        return told

    async def bury(self, queue: str, *payloads: bytes) -> None:
        """Publish and let a worker of group w reject each."""
        async with self.house.client("w-1") as client:
            worker = Worker(client, queue)
            await worker.join(consumer_group="w")
            for payload in payloads:
                await publish(client, queue, payload)
                await worker.settle("reject", await worker.next(), description="no good")


class OpenDoor(Protocol):
    async def __call__(self, keyring: Keyring | None = None, **doors: Any) -> Door: ...


@asynccontextmanager
async def opened(keyring: Keyring | None = None, **doors: Any) -> AsyncIterator[Door]:
    async with living([("quick/#", QUICK)]) as house:
        thread = AdminThread(house.desk, keyring or house.keyring, AdminDoors(ANY_PORT, None, **doors))
        [door] = await thread.start()
        address = parse_address(door.address)
        root = f"http://{address}"
        async with (
            httpx.AsyncClient(base_url=f"{root}/api/v1", timeout=30) as api,
            httpx.AsyncClient(base_url=root, timeout=30) as web,
        ):
            yield Door(house, thread, address, api, web)
        await thread.stop()
        assert thread.failure is None


@pytest.fixture
async def open_door() -> AsyncIterator[OpenDoor]:
    """A door with settings of the test's own."""
    async with AsyncExitStack() as doors:

        async def build(keyring: Keyring | None = None, **settings: Any) -> Door:
            return await doors.enter_async_context(opened(keyring, **settings))

        yield build


@pytest.fixture
async def door(open_door: OpenDoor) -> Door:
    return await open_door()


@pytest.fixture
def keyring() -> Keyring:
    return Keyring(Tokens())


async def until(true: Callable[[], bool]) -> None:
    """Something on another thread comes to pass; half a minute is for ever."""
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 there is nothing of that thread to wait for
            await asyncio.sleep(0.005)
