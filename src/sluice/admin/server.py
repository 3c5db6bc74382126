"""The admin APIs (HTTP and gRPC) on a loop and a thread of their own.

JSON, HTTP and protobuf are slow compared with MQTT: on the broker's loop, one page of the console
would delay every message. In their own thread they hold the interpreter's lock only for moments,
and every call crosses the loop bridge. The thread opens the listeners, reports their addresses and
closes them on request; it handles no signals and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import uvicorn
import uvloop

from sluice.access.identity import AdminAuthenticator
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.rest import (
    CONNECTION_KEY,
    KEEP_ALIVE_SECONDS,
    MAX_BODY_BYTES,
    BulkResources,
    HttpConnection,
    LiveFeed,
    RestApi,
    make_app,
)
from sluice.broker.net import ListenerError
from sluice.cluster.membership import Directory
from sluice.errors import SluiceError
from sluice.process.memory_watermark import MemoryWatermark
from sluice.units import Address

if TYPE_CHECKING:
    from sluice.admin.grpc import server as grpc_server

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 3  # a stop waits this long for responses in progress
STOP_SECONDS: Final = GRACE_SECONDS + 3.0  # and this long for everything
BACKLOG: Final = 256
MAX_CONNECTIONS: Final = 1024


@dataclass(frozen=True)
class AdminServerConfig:
    """Which listeners to open, and what they need to know. None keeps a listener closed."""

    http: Address | None
    grpc: Address | None
    tls: ssl.SSLContext | None = None  # of the HTTP listener
    grpc_tls: grpc_server.GrpcTls | None = None
    max_body: int = MAX_BODY_BYTES
    queues_enabled: bool = True
    store_fault: Callable[[], SluiceError | None] = lambda: None
    watermark: MemoryWatermark | None = None  # the memory limit of the process
    make_bulk_resources: Callable[[], BulkResources] = BulkResources  # called on the admin loop
    # Addresses of the open MQTT listeners by name; called on the admin loop.
    listeners: Callable[[], Mapping[str, str]] = dict
    directory: Directory | None = None  # of the cluster, if there is one
    peer_tls: ssl.SSLContext | None = None  # verifies the HTTP listeners of other nodes
    # CA of the certificates of the other nodes' gRPC listeners; None: no TLS.
    peer_grpc_ca: bytes | None = None


@dataclass(frozen=True)
class OpenListener:
    """One open listener, under the name that flags and the startup message use."""

    name: str
    address: str


class _RunningServer(Protocol):
    """A server that runs on the admin loop."""

    @property
    def address(self) -> Address: ...

    async def stop(self, grace: float) -> None:
        """Accept no new connections; requests in progress have `grace` seconds."""


class AdminServer:
    """Start and stop the admin thread. Called on the broker's loop.

    That loop must run until `stop` has returned: requests in progress still call it.
    """

    def __init__(
        self, bridge: LoopBridge, keyring: AdminAuthenticator, config: AdminServerConfig
    ) -> None:
        self._bridge = bridge
        self._keyring = keyring
        self._config = config
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event | None = None
        self._finished: asyncio.Future[None] | None = None
        self.feed: LiveFeed | None = None
        self.failure: BaseException | None = None

    async def start(self) -> list[OpenListener]:
        """Open the listeners. A port that is taken raises `ListenerError`; nothing stays open."""
        caller_loop = asyncio.get_running_loop()
        opened: asyncio.Future[list[OpenListener]] = caller_loop.create_future()
        self._finished = caller_loop.create_future()
        finished = self._finished

        def announce(listeners: list[OpenListener]) -> None:
            caller_loop.call_soon_threadsafe(_resolve, opened, listeners, None)

        def finish(fault: BaseException | None) -> None:
            # One callback for both: a caller that sees the failed start also sees the thread ended.
            _resolve(finished, None, None)
            _resolve(opened, [], fault)

        def run_thread() -> None:
            fault: BaseException | None = None
            try:
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(self._run(announce))
            except BaseException as error:
                fault = error
            self.failure = fault or self.failure
            caller_loop.call_soon_threadsafe(finish, fault)

        self._thread = threading.Thread(target=run_thread, name="sluice-admin", daemon=True)
        self._thread.start()
        return await opened

    async def stop(self) -> None:
        """Accept nothing new, wait a while for responses in progress, and close. Idempotent."""
        loop, stop_requested, finished = self._loop, self._stop_requested, self._finished
        if finished is None or finished.done():
            return
        if loop is not None and stop_requested is not None:
            with suppress(RuntimeError):  # the thread's loop may close on its own at any moment
                loop.call_soon_threadsafe(stop_requested.set)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await finished
        except TimeoutError:
            log.error("admin listeners did not close in time", extra={"seconds": STOP_SECONDS})

    async def _run(self, on_open: Callable[[list[OpenListener]], None]) -> None:
        self._stop_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        servers: list[tuple[str, _RunningServer]] = []
        try:
            if self._config.http is not None:
                servers.append(("http", await self._open_http(self._config.http)))
            if self._config.grpc is not None:
                servers.append(("grpc", await self._open_grpc(self._config.grpc)))
            on_open([OpenListener(name, str(server.address)) for name, server in servers])
            await self._stop_requested.wait()
        finally:
            await asyncio.gather(*(server.stop(GRACE_SECONDS) for _, server in servers))

    async def _open_http(self, address: Address) -> HttpServer:
        config = self._config
        app = make_app(
            self._bridge,
            self._keyring,
            host=address.host,
            max_body=config.max_body,
            queues_enabled=config.queues_enabled,
            store_fault=config.store_fault,
            watermark=config.watermark,
            bulk_resources=config.make_bulk_resources(),
            listeners=config.listeners,
            directory=config.directory,
            peer_tls=config.peer_tls,
        )
        self.feed = app.feed
        server = HttpServer(app, bind_sockets("http", address), config.tls, self._on_http_failure)
        await server.start()
        return server

    def _on_http_failure(self, fault: BaseException) -> None:
        """Keep MQTT and the other listener running: a broker without admin API is still useful."""
        log.critical("http listener failed; restart the broker to open it", exc_info=fault)
        self.failure = fault

    async def _open_grpc(self, address: Address) -> _RunningServer:
        # Imported here: a large library that only an open gRPC listener needs.
        from sluice.admin.grpc import server as grpc_server

        config = self._config
        return await grpc_server.serve_grpc(
            self._bridge,
            self._keyring,
            address.host,
            address.port,
            config.grpc_tls,
            queues_enabled=config.queues_enabled,
            directory=config.directory,
            peer_ca=config.peer_grpc_ca,
        )


class _HttpConnectionInScope(HttpConnection):
    """Put the connection into the scope, for routes that hand it to a bulk worker process."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION_KEY] = self  # type: ignore[typeddict-unknown-key]


class _Uvicorn(uvicorn.Server):
    """uvicorn that signals its start and stops at once; by itself it polls ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.opened = asyncio.Event()
        self.stop_requested = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.opened.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # updates the Date header
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.stop_requested.wait()

    def request_stop(self) -> None:
        self.should_exit = True
        self.stop_requested.set()


class HttpServer:
    """uvicorn on bound sockets, without its own signal handlers and log format."""

    def __init__(
        self,
        rest_api: RestApi,
        sockets: list[socket.socket],
        tls: ssl.SSLContext | None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._rest_api = rest_api
        self._on_failure = on_failure
        self._sockets = sockets
        host, port = sockets[0].getsockname()[:2]
        self.address = Address(host, port)
        config = uvicorn.Config(
            rest_api.middleware,
            http=_HttpConnectionInScope,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=GRACE_SECONDS,
            ssl_context_factory=None if tls is None else lambda config, usual: tls,
        )
        self._server = _Uvicorn(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        task = self._task = asyncio.create_task(self._server.serve(self._sockets))
        opened = asyncio.create_task(self._server.opened.wait())
        await asyncio.wait([task, opened], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            opened.cancel()
            task.result()
        task.add_done_callback(self._on_server_exit)
        self._rest_api.start()

    def _on_server_exit(self, task: asyncio.Task[None]) -> None:
        fault = None if task.cancelled() else task.exception()
        if fault is not None or not self._server.should_exit:
            for one in self._server.servers:
                one.close()  # otherwise clients connect and get no response
            self._on_failure(fault or RuntimeError("the server has ended unexpectedly"))

    async def stop(self, grace: float) -> None:
        self._rest_api.stop()
        self._server.request_stop()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._rest_api.close()
        if self._rest_api.forwarder is not None:
            await self._rest_api.forwarder.close()


def bind_sockets(name: str, address: Address) -> list[socket.socket]:
    """Bind sockets for every address of a host name, on one port, or raise `ListenerError`."""
    opened: list[socket.socket] = []
    port = address.port
    try:
        found = socket.getaddrinfo(
            address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, kind, protocol, _, socket_address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            opened.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((socket_address[0], port, *socket_address[2:]))
            one.listen(BACKLOG)
            one.setblocking(False)
            port = one.getsockname()[1]
    except OSError as fault:
        for one in opened:
            one.close()
        raise ListenerError(name, address.host, address.port, fault) from fault
    return opened


def _resolve(future: asyncio.Future[Any], value: Any, fault: BaseException | None) -> None:
    if future.done():
        if fault is not None:
            log.critical("admin listeners failed", exc_info=fault)
    elif fault is not None:
        future.set_exception(fault)
    else:
        future.set_result(value)
