"""Keeps a client connected: opens one connection after the other for the same session.

Each client has one task, which this module owns and `close` ends: it waits until the connection is
lost and opens the next one, until that is pointless. The state that must survive a reconnect is in
the protocol; this module knows sockets, delays and final errors.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import TypeVar

from sluice.client.errors import (
    FINAL_REASONS,
    ClientClosed,
    ClientError,
    ConnectFailed,
    ConnectionLost,
    ConnectRefused,
    SubscribeRefused,
)
from sluice.client.message import Message
from sluice.client.net.connection import Connection
from sluice.client.net.dispatcher import TopicDispatcher
from sluice.client.net.receive_buffer import ReceiveBuffer
from sluice.client.options import Options
from sluice.client.protocol import ClientProtocol, Connected, State

log = logging.getLogger(__name__)

DISCONNECT_SECONDS = 2.0  # for the server to read our DISCONNECT before the socket is aborted

T = TypeVar("T")


class Reconnector:
    """Opens connections. `on_progress` is called once per read.

    `on_final_loss` is called once, when no connection will follow.
    """

    def __init__(
        self,
        options: Options,
        protocol: ClientProtocol,
        buffer: ReceiveBuffer[Message],
        dispatcher: TopicDispatcher,
        on_progress: Callable[[], None],
        on_final_loss: Callable[[ClientError], None],
        on_connect: Callable[[Connected], None] | None,
        on_disconnect: Callable[[ClientError], None] | None,
        draw: Callable[[], float],
    ) -> None:
        self.connection: Connection | None = None
        self.last_loss: ClientError | None = None
        self.session_present = False
        self._options = options
        self._protocol = protocol
        self._buffer = buffer
        self._dispatcher = dispatcher
        self._on_progress = on_progress
        self._on_final_loss = on_final_loss
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._draw = draw
        self._task: asyncio.Task[None] | None = None
        self._has_started = False

    async def connect(self) -> Connected:
        """Open the first connection. Make one attempt and raise its error."""
        if self._has_started:
            raise ClientClosed("a client connects once", "Make a new Client")
        self._has_started = True
        try:
            connection, event = await self._open()
        except BaseException:
            self._has_started = False
            raise
        self._task = asyncio.create_task(self._run(connection), name="sluice-client")
        return event

    async def close(self, reason: int, session_expiry: int | None) -> None:
        """Send DISCONNECT and end the task, even if this call is cancelled."""
        self._has_started = True
        task = self._task
        if task is not None and not task.done():
            task.cancel()
        connection = self.connection
        try:
            if connection is not None and not connection.closed.done():
                if self._protocol.state is State.CONNECTED:
                    self._protocol.disconnect(reason, session_expiry)
                connection.close_gracefully()
                await asyncio.wait([connection.closed], timeout=DISCONNECT_SECONDS)
        finally:
            if connection is not None:
                connection.abort()
            if task is not None and not task.done():
                await asyncio.wait([task])

    async def _open(self) -> tuple[Connection, Connected]:
        """Make one attempt: socket, TLS, CONNECT and CONNACK within the connect timeout."""
        options = self._options
        context = ssl.create_default_context() if options.tls is True else options.tls or None
        connection = Connection(self._protocol, self._buffer, self._dispatcher, self._on_progress)
        self.connection = connection
        address = f"{options.host}:{options.port}"
        opened = False
        try:
            async with asyncio.timeout(options.connect_timeout):
                if options.dial is not None:
                    await options.dial(connection)
                else:
                    await asyncio.get_running_loop().create_connection(
                        lambda: connection,
                        options.host,
                        options.port,
                        ssl=context,
                        server_hostname=(options.server_hostname or options.host)
                        if context
                        else None,
                    )
                outcome = await connection.opened
            if isinstance(outcome, Exception):
                raise outcome
            opened = True
        except TimeoutError as cause:
            raise ConnectFailed(
                f"{address} did not answer within {options.connect_timeout:g} s",
                "Check host and port, or raise connect_timeout",
            ) from cause
        except ssl.SSLError as cause:
            raise ConnectFailed(
                f"no TLS with {address}: {cause}", "Check the certificates and the port"
            ) from cause
        except OSError as cause:
            raise ConnectFailed(
                f"cannot reach {address}: {cause}", "Check that a server runs there"
            ) from cause
        finally:
            if not opened:
                connection.abort()
        self.session_present = outcome.session_present
        _call(self._on_connect, outcome)
        self._on_progress()
        return connection, outcome

    async def _run(self, connection: Connection) -> None:
        """Wait for the loss of each connection and open the next one."""
        loop = asyncio.get_running_loop()
        policy = self._options.backoff
        attempt = 0
        while True:
            since = loop.time()
            # Not awaited directly: cancelling this task would cancel the future.
            await asyncio.wait([connection.closed])
            loss: ClientError = connection.closed.result()
            if loop.time() - since >= policy.stable_seconds:
                attempt = 0
            next_connection: Connection | None = None
            while next_connection is None:
                self.last_loss = loss
                _call(self._on_disconnect, loss)
                if not self._options.reconnect or _is_final(loss):
                    self._on_final_loss(loss)
                    return
                delay = policy.delay(attempt, self._draw())
                log.info("%s; next attempt in %.2f s", loss, delay)
                attempt += 1
                await asyncio.sleep(delay)
                try:
                    next_connection, event = await self._open()
                except ClientError as failure:
                    loss = failure
                else:
                    log.info(
                        "reconnected, session %s", "resumed" if event.session_present else "lost"
                    )
            connection = next_connection


def _is_final(loss: ClientError) -> bool:
    """Return whether another attempt would fail in the same way."""
    if isinstance(loss, ConnectionLost):
        return loss.final
    if isinstance(loss, ConnectRefused):
        return loss.reason in FINAL_REASONS
    return isinstance(loss, SubscribeRefused)


def _call(callback: Callable[[T], None] | None, value: T) -> None:
    if callback is not None:
        try:
            callback(value)
        except Exception:  # an error of the application must not end the connection
            log.exception("a connection callback failed")
