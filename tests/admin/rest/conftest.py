"""The REST API of a broker on the test's loop: real thread and server, a client over a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import pytest

from sluice.access.identity import AdminAuthenticator, Identity, Role
from sluice.admin.server import AdminServer, AdminServerConfig
from sluice.units import Address, parse_address
from tests.admin.live_broker import LiveBroker, Worker, live_broker, publish

QUICK = {"retry_policy": {"max_retries": 0, "initial_backoff": "1ms"}}
ANY_PORT = Address("127.0.0.1", 0)


class Tokens:
    """The token is the name of its role."""

    def verify_bearer(self, text: str) -> Identity | None:
        return (
            Identity(f"the {text}", Role.parse(text))
            if text in ("viewer", "operator", "admin")
            else None
        )

    def verify_password(self, name: str, password: str, peer: str) -> Identity | None:
        return Identity(name, Role.ADMIN) if password == "correct horse" else None


@dataclass
class RestApi:
    harness: LiveBroker
    thread: AdminServer
    address: Address
    api: httpx.AsyncClient  # base URL /api/v1
    web: httpx.AsyncClient  # base URL /

    async def ok(self, method: str, path: str, json: Any = None) -> Any:
        """Return the JSON of a successful response."""
        answer = await self.api.request(method, path, **({} if json is None else {"json": json}))
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    async def refused(self, status: int, method: str, path: str, **how: Any) -> dict[str, str]:
        """Return the refusal, which must have this status and the shape of all refusals."""
        answer = await self.api.request(method, path, **how)
        assert answer.status_code == status, answer.text
        reported: dict[str, str] = answer.json()
        assert list(reported) == ["error", "message", "do"]
        assert all(reported.values()), reported
        return reported

    async def make_dead_letter(self, queue: str, *payloads: bytes) -> None:
        """Publish, and let a worker of group w reject each message."""
        async with self.harness.client("w-1") as client:
            worker = Worker(client, queue)
            await worker.join(consumer_group="w")
            for payload in payloads:
                await publish(client, queue, payload)
                await worker.settle("reject", await worker.next(), description="no good")


class OpenRestApi(Protocol):
    async def __call__(
        self, keyring: AdminAuthenticator | None = None, **settings: Any
    ) -> RestApi: ...


@asynccontextmanager
async def opened_rest_api(
    keyring: AdminAuthenticator | None = None, **settings: Any
) -> AsyncIterator[RestApi]:
    async with live_broker([("quick/#", QUICK)]) as harness:
        thread = AdminServer(
            harness.loop_bridge,
            keyring or harness.keyring,
            AdminServerConfig(ANY_PORT, None, **settings),
        )
        [rest_api] = await thread.start()
        address = parse_address(rest_api.address)
        root = f"http://{address}"
        async with (
            httpx.AsyncClient(base_url=f"{root}/api/v1", timeout=30) as api,
            httpx.AsyncClient(base_url=root, timeout=30) as web,
        ):
            yield RestApi(harness, thread, address, api, web)
        await thread.stop()
        assert thread.failure is None


@pytest.fixture
async def open_rest_api() -> AsyncIterator[OpenRestApi]:
    """Open REST APIs with settings of the test."""
    async with AsyncExitStack() as stack:

        async def build(keyring: AdminAuthenticator | None = None, **settings: Any) -> RestApi:
            return await stack.enter_async_context(opened_rest_api(keyring, **settings))

        yield build


@pytest.fixture
async def rest_api(open_rest_api: OpenRestApi) -> RestApi:
    return await open_rest_api()


@pytest.fixture
def keyring() -> AdminAuthenticator:
    return AdminAuthenticator(Tokens())


async def until(true: Callable[[], bool]) -> None:
    """Wait for a condition that another thread fulfills, at most half a minute."""
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
