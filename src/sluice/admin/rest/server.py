"""The HTTP server of the REST API: uvicorn on sockets that listen already."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import uvicorn

from sluice.admin.rest.app import RestApi
from sluice.admin.rest.http_protocol import CONNECTION_KEY, KEEP_ALIVE_SECONDS, HttpConnection

MAX_CONNECTIONS: Final = 1024


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
        backlog: int,
        grace_seconds: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._rest_api = rest_api
        self._on_failure = on_failure
        self._sockets = sockets
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
            backlog=backlog,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=grace_seconds,
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
            self._close_listeners()
            task.result()
        task.add_done_callback(self._on_server_exit)

    def _on_server_exit(self, task: asyncio.Task[None]) -> None:
        fault = None if task.cancelled() else task.exception()
        if fault is not None or not self._server.should_exit:
            self._close_listeners()
            self._on_failure(fault or RuntimeError("the server has ended unexpectedly"))

    def _close_listeners(self) -> None:
        for one in self._server.servers:
            one.close()  # otherwise clients connect and get no response

    async def stop(self, grace: float) -> None:
        self._rest_api.stop()
        self._server.request_stop()
        if self._task is not None:
            await asyncio.wait([self._task])
        self._rest_api.close()
        if self._rest_api.forwarder is not None:
            await self._rest_api.forwarder.close()
