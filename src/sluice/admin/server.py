"""The admin APIs (HTTP and gRPC) on a loop and a thread of their own.

JSON, HTTP and protobuf are slow compared with MQTT: on the broker's loop, one page of the console
would delay every message. In their own thread they hold the interpreter's lock only for moments,
and every call crosses the loop bridge. The thread opens the listeners, reports their addresses and
closes them on request; it handles no signals and decides nothing.

FastAPI and gRPC take 40 MB. A listener loads its library with its first connection, which waits
meanwhile, so a broker with unused APIs does without.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import uvloop

from sluice.access.identity import AdminAuthenticator
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.metrics import MAX_QUEUES, CounterSample, SampleHistory
from sluice.broker.net import ListenerError
from sluice.cluster.membership import Directory
from sluice.errors import SluiceError
from sluice.process.memory_watermark import MemoryWatermark
from sluice.units import Address

if TYPE_CHECKING:
    from sluice.admin.rest import BulkResources, LiveFeed

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 3  # a stop waits this long for responses in progress
STOP_SECONDS: Final = GRACE_SECONDS + 3.0  # and this long for everything
BACKLOG: Final = 256
# A packet of the default maximum size as base64, and its JSON.
MAX_BODY_BYTES: Final = 2_862_000


@dataclass(frozen=True)
class GrpcTls:
    """PEM, as read from files. With `client_ca`, a client must present a certificate of that CA."""

    certificate: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None


@dataclass(frozen=True)
class AdminServerConfig:
    """Which listeners to open, and what they need to know. None keeps a listener closed."""

    http: Address | None
    grpc: Address | None
    tls: ssl.SSLContext | None = None  # of the HTTP listener
    grpc_tls: GrpcTls | None = None
    max_body: int = MAX_BODY_BYTES
    queues_enabled: bool = True
    store_fault: Callable[[], SluiceError | None] = lambda: None
    watermark: MemoryWatermark | None = None  # the memory limit of the process
    # Called on the admin loop; None: the defaults.
    make_bulk_resources: Callable[[], BulkResources] | None = None
    # Addresses of the open MQTT listeners by name; called on the admin loop.
    listeners: Callable[[], Mapping[str, str]] = dict
    directory: Directory | None = None  # of the cluster, if there is one
    peer_tls: ssl.SSLContext | None = None  # verifies the HTTP listeners of other nodes
    # CA of the certificates of the other nodes' gRPC listeners; None: no TLS.
    peer_grpc_ca: bytes | None = None
    starts_at_once: bool = False  # start the servers without waiting for a connection


@dataclass(frozen=True)
class OpenListener:
    """One open listener, under the name that flags and the startup message use."""

    name: str
    address: str


class _Server(Protocol):
    """A server that runs on the admin loop."""

    async def stop(self, grace: float) -> None:
        """Accept no new connections; requests in progress have `grace` seconds."""


class _Listener:
    """Sockets that listen at once, and a server that starts with the first connection."""

    def __init__(
        self,
        name: str,
        address: Address,
        start: Callable[[list[socket.socket]], Awaitable[_Server]],
        on_failure: Callable[[str, BaseException], None],
    ) -> None:
        self.name = name
        self._start = start
        self._on_failure = on_failure
        self._sockets = bind_sockets(name, address)
        self._starting: asyncio.Task[_Server | None] | None = None
        loop = asyncio.get_running_loop()
        for one in self._sockets:
            loop.add_reader(one, self.start)

    @property
    def address(self) -> str:
        return str(Address(*self._sockets[0].getsockname()[:2]))

    def start(self) -> None:
        """Start the server, at its first connection or earlier."""
        self._stop_waiting()
        self._starting = asyncio.create_task(self._start_server())

    def _stop_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        for one in self._sockets:
            loop.remove_reader(one)

    async def _start_server(self) -> _Server | None:
        try:
            return await self._start(self._sockets)
        except Exception as fault:
            self._close_sockets()  # otherwise clients connect and get no response
            self._on_failure(self.name, fault)
            return None

    def _close_sockets(self) -> None:
        for one in self._sockets:
            one.close()

    async def stop(self, grace: float) -> None:
        if self._starting is None:
            self._stop_waiting()
            self._close_sockets()
        elif (server := await self._starting) is not None:
            await server.stop(grace)


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
        self._samples = SampleHistory(self._take_sample)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop_requested: asyncio.Event | None = None
        self._finished: asyncio.Future[None] | None = None
        self.feed: LiveFeed | None = None  # of the console, once HTTP is used
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
        config = self._config
        listeners: list[_Listener] = []
        try:
            if config.http is not None:
                self._samples.start()
                listeners.append(_Listener("http", config.http, self._start_http, self._on_failure))
            if config.grpc is not None:
                listeners.append(_Listener("grpc", config.grpc, self._start_grpc, self._on_failure))
            on_open([OpenListener(one.name, one.address) for one in listeners])
            if config.starts_at_once:
                for one in listeners:
                    one.start()
            await self._stop_requested.wait()
        finally:
            self._samples.stop()
            await asyncio.gather(*(one.stop(GRACE_SECONDS) for one in listeners))

    async def _take_sample(self) -> CounterSample:
        return await self._bridge.call(lambda service: service.sample_counters(MAX_QUEUES))

    def _on_failure(self, name: str, fault: BaseException) -> None:
        """Keep MQTT and the other listener running: a broker without admin API is still useful."""
        log.critical("%s listener failed; restart the broker to open it", name, exc_info=fault)
        self.failure = fault

    async def _start_http(self, sockets: list[socket.socket]) -> _Server:
        from sluice.admin.rest import HttpServer, make_app

        config = self._config
        assert config.http is not None
        app = make_app(
            self._bridge,
            self._keyring,
            self._samples,
            host=config.http.host,
            max_body=config.max_body,
            queues_enabled=config.queues_enabled,
            store_fault=config.store_fault,
            watermark=config.watermark,
            bulk_resources=config.make_bulk_resources() if config.make_bulk_resources else None,
            listeners=config.listeners,
            directory=config.directory,
            peer_tls=config.peer_tls,
        )
        self.feed = app.feed
        server = HttpServer(
            app, sockets, config.tls, BACKLOG, GRACE_SECONDS, partial(self._on_failure, "http")
        )
        await server.start()
        return server

    async def _start_grpc(self, sockets: list[socket.socket]) -> _Server:
        from sluice.admin.grpc import server as grpc_server

        config = self._config
        return await grpc_server.serve_grpc(
            self._bridge,
            self._keyring,
            sockets,
            config.grpc_tls,
            queues_enabled=config.queues_enabled,
            directory=config.directory,
            peer_ca=config.peer_grpc_ca,
        )


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
