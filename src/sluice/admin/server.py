"""The admin doors on a loop and a thread of their own.

JSON, HTTP and protobuf are slow beside MQTT: on the broker's loop one page of the console would hold up every message.
Here they only ever take the interpreter's lock for moments, and every question goes over the desk. The thread opens the
doors, says where they are, and closes them when told; it handles no signals and decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import uvicorn
import uvloop

from sluice.access.identity import Keyring
from sluice.admin.loop_bridge import Desk
from sluice.admin.rest.app import MAX_BODY, RestDoor, make_app
from sluice.admin.rest.routes.bulk_routes import BulkDoor
from sluice.admin.rest.http_protocol import CONNECTION, IDLE_SECONDS, Line
from sluice.admin.rest.routes.live_routes import LiveFeed
from sluice.broker.net.listener import ListenerError
from sluice.cluster.directory import Directory
from sluice.errors import SluiceError
from sluice.units import Address
from sluice.process.memory_watermark import Watermark

if TYPE_CHECKING:
    from sluice.admin.grpc.server import GrpcTls

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 3  # what a stop waits for answers under way
STOP_SECONDS: Final = GRACE_SECONDS + 3.0  # and for all of it
BACKLOG: Final = 256
MOST_CONNECTIONS: Final = 1024


@dataclass(frozen=True)
class AdminDoors:
    """What to open, and what the doors need to know. None is a door that stays closed."""

    http: Address | None
    grpc: Address | None
    tls: ssl.SSLContext | None = None  # of http
    grpc_tls: GrpcTls | None = None
    max_body: int = MAX_BODY
    queues_enabled: bool = True
    store_fault: Callable[[], SluiceError | None] = lambda: None
    watermark: Watermark | None = None  # the memory limit of the process
    bulk_door: Callable[[], BulkDoor] = BulkDoor  # made on the door's own loop
    directory: Directory | None = None  # of the cluster, if there is one
    far_tls: ssl.SSLContext | None = None  # how the HTTP doors of other nodes are known
    far_grpc_authority: bytes | None = (
        None  # and who signed the certificates of their gRPC doors; None: no TLS
    )


@dataclass(frozen=True)
class OpenDoor:
    """One open listener, under the name that flags and the ready line use."""

    name: str
    address: str


class _Open(Protocol):
    """A door that is open on the admin loop."""

    @property
    def address(self) -> Address: ...

    async def stop(self, grace: float) -> None:
        """Nobody new; those under way have `grace` seconds."""


class SecondLoop(uvloop.Loop):
    """A loop beside that of a node. gRPC has one queue of events in a process, and wakes every loop for each of them:
    who is first takes it, and hands it on if it is another's. Nearly all are of the link between the nodes, so this
    loop does not listen, and the node's own hands on what is for the admin doors."""

    def add_reader(self, fd: Any, callback: Any, *arguments: Any) -> None:  # type: ignore[override]
        listener = getattr(getattr(callback, "func", callback), "__self__", None)
        if type(listener).__name__ != "PollerCompletionQueue":
            super().add_reader(fd, callback, *arguments)


class AdminThread:
    """Started and stopped from the broker's loop, which must go on running until `stop` has returned: requests under
    way still ask it."""

    def __init__(self, desk: Desk, keyring: Keyring, doors: AdminDoors) -> None:
        self._desk = desk
        self._keyring = keyring
        self._doors = doors
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told: asyncio.Event | None = None
        self._ended: asyncio.Future[None] | None = None
        self.feed: LiveFeed | None = None
        self.failure: BaseException | None = None

    async def start(self) -> list[OpenDoor]:
        """Open the doors. A port that is taken is refused with a `ListenerError`, and nothing stays open."""
        home = asyncio.get_running_loop()
        opened: asyncio.Future[list[OpenDoor]] = home.create_future()
        self._ended = home.create_future()
        ended = self._ended

        def tell(doors: list[OpenDoor]) -> None:
            home.call_soon_threadsafe(_settle, opened, doors, None)

        def finish(fault: BaseException | None) -> None:
            # Both in one callback: a caller that sees the refused start also sees that the thread has ended.
            _settle(ended, None, None)
            _settle(opened, [], fault)

        new_loop = uvloop.new_event_loop if self._doors.directory is None else SecondLoop

        def live() -> None:
            fault: BaseException | None = None
            try:
                with asyncio.Runner(loop_factory=new_loop) as runner:
                    runner.run(self._run(tell))
            except BaseException as error:
                fault = error
            self.failure = fault or self.failure
            home.call_soon_threadsafe(finish, fault)

        self._thread = threading.Thread(target=live, name="sluice-admin", daemon=True)
        self._thread.start()
        return await opened

    async def stop(self) -> None:
        """Let nobody new in, wait a while for the answers under way, and close. Safe to call at any time."""
        loop, told, ended = self._loop, self._told, self._ended
        if ended is None or ended.done():
            return
        if loop is not None and told is not None:
            with suppress(RuntimeError):  # the thread's loop may close on its own at any moment
                loop.call_soon_threadsafe(told.set)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await ended
        except TimeoutError:
            log.error("the admin doors did not close in time", extra={"seconds": STOP_SECONDS})

    async def _run(self, tell: Callable[[list[OpenDoor]], None]) -> None:
        self._told = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        open_doors: list[tuple[str, _Open]] = []
        try:
            if self._doors.http is not None:
                open_doors.append(("http", await self._open_http(self._doors.http)))
            if self._doors.grpc is not None:
                open_doors.append(("grpc", await self._open_grpc(self._doors.grpc)))
            tell([OpenDoor(name, str(door.address)) for name, door in open_doors])
            await self._told.wait()
        finally:
            await asyncio.gather(*(door.stop(GRACE_SECONDS) for _, door in open_doors))

    async def _open_http(self, address: Address) -> HttpServer:
        doors = self._doors
        app = make_app(
            self._desk,
            self._keyring,
            host=address.host,
            max_body=doors.max_body,
            queues_enabled=doors.queues_enabled,
            store_fault=doors.store_fault,
            watermark=doors.watermark,
            bulk_door=doors.bulk_door(),
            directory=doors.directory,
            far_tls=doors.far_tls,
        )
        self.feed = app.feed
        server = HttpServer(app, bind("http", address), doors.tls, self._door_failed)
        await server.start()
        return server

    def _door_failed(self, fault: BaseException) -> None:
        """MQTT goes on, and so does the other door: a broker that works is worth more than one that can be watched."""
        log.critical("the http door has failed; restart to open it again", exc_info=fault)
        self.failure = fault

    async def _open_grpc(self, address: Address) -> _Open:
        from sluice.admin.grpc.server import (
            serve_grpc,
        )  # a library of some weight, for those who open the door

        doors = self._doors
        return await serve_grpc(
            self._desk,
            self._keyring,
            address.host,
            address.port,
            doors.grpc_tls,
            queues_enabled=doors.queues_enabled,
            directory=doors.directory,
            far_authority=doors.far_grpc_authority,
        )


class _Protocol(Line):
    """Leaves the connection where a route finds it that hands it on to the process that reads in bulk."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]


class _Uvicorn(uvicorn.Server):
    """uvicorn that says when it is open and hears at once when it is to end: by itself it looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.opened = asyncio.Event()
        self.told = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.opened.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # brings the Date header up to date
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.told.wait()

    def end(self) -> None:
        self.should_exit = True
        self.told.set()


class HttpServer:
    """uvicorn on sockets that are bound already, without its signal handlers and its own log format."""

    def __init__(
        self,
        door: RestDoor,
        sockets: list[socket.socket],
        tls: ssl.SSLContext | None,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._door = door
        self._failed = failed
        self._sockets = sockets
        host, port = sockets[0].getsockname()[:2]
        self.address = Address(host, port)
        config = uvicorn.Config(
            door.gate,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
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
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        fault = None if task.cancelled() else task.exception()
        if fault is not None or not self._server.should_exit:
            for one in self._server.servers:
                one.close()  # nobody would answer behind them
            self._failed(fault or RuntimeError("the server has ended by itself"))

    async def stop(self, grace: float) -> None:
        self._door.stop()
        self._server.end()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._door.close()
        if self._door.relay is not None:
            await self._door.relay.close()


def bind(name: str, address: Address) -> list[socket.socket]:
    """Sockets for every address that a host name stands for, on one port, or a refusal."""
    opened: list[socket.socket] = []
    port = address.port
    try:
        found = socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            opened.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((where[0], port, *where[2:]))
            one.listen(BACKLOG)
            one.setblocking(False)
            port = one.getsockname()[1]
    except OSError as fault:
        for one in opened:
            one.close()
        raise ListenerError(name, address.host, address.port, fault) from fault
    return opened


def _settle(future: asyncio.Future[Any], value: Any, fault: BaseException | None) -> None:
    if future.done():
        if fault is not None:
            log.critical("the admin doors have failed", exc_info=fault)
    elif fault is not None:
        future.set_exception(fault)
    else:
        future.set_result(value)
