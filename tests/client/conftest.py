"""The servers that the client is tested against."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

from sluice.client import Backoff, Client
from tests.client.servers import Mosquitto, Proxy, Server
from tests.support.broker_process import StartBroker
from tests.support.external_programs import need_program

# Every test of the client runs on each of these.
TARGETS = ["mosquitto", "sluice"]

StartMosquitto = Callable[[str], Mosquitto]
MakeClient = Callable[..., Awaitable[Client]]


class Address:
    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port


@pytest.fixture
def start_mosquitto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartMosquitto]:
    """Start mosquitto with additional configuration lines."""
    program = need_program("mosquitto")
    with ExitStack() as running:

        def start(settings: str = "") -> Mosquitto:
            server = Mosquitto(program, tmp_path_factory.mktemp("mosquitto"), settings)
            running.callback(server.stop)
            return server

        yield start


@pytest.fixture(params=TARGETS)
def server(request: pytest.FixtureRequest) -> Server:
    """A server in its default configuration."""
    if request.param == "sluice":
        start_broker: StartBroker = request.getfixturevalue("start_broker")
        address = start_broker().mqtt
        return Address(address.host, address.port)
    start: StartMosquitto = request.getfixturevalue("start_mosquitto")
    return start("max_queued_messages 0\nset_tcp_nodelay true")


@pytest.fixture(params=[4, 5], ids=["3.1.1", "5.0"])
def version(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[Proxy]:
    """A connection to the server that can be cut."""
    pair = Proxy(server)
    await pair.start()
    yield pair
    await pair.stop()


@pytest.fixture
async def connect() -> AsyncIterator[MakeClient]:
    """Connected clients, closed when the test ends: `await connect(server, client_id="x")`."""
    async with AsyncExitStack() as open_clients:

        async def make(server: Server, **options: object) -> Client:
            options.setdefault("backoff", Backoff(initial_seconds=0.02, max_seconds=0.2))
            client = Client(server.host, server.port, **options)  # type: ignore[arg-type]
            await client.connect()
            open_clients.push_async_callback(client.close, drain_seconds=0)
            return client

        yield make
