"""Carries connections from the public gRPC port to the gRPC server, which has a private socket.

gRPC cannot take over a socket that listens already, and the port must listen before the large
library is loaded. The server sees the name of our end of the private socket; `host_of` returns the
client behind it. TLS stays between the client and gRPC: here are only bytes.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Final, cast
from urllib.parse import unquote

# Names of the private sockets: abstract, so that no file remains and none must be writable.
SCHEME: Final = "unix-abstract:"


class Relay:
    """The connections in progress. `target` is the address for the gRPC server."""

    def __init__(self) -> None:
        self._name = f"sluice-grpc-{os.getpid()}-{secrets.token_hex(8)}"
        self._hosts: dict[str, str] = {}  # name of our end -> host of the client
        self._servers: list[asyncio.Server] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._ends: set[_End] = set()
        self._all_ended = asyncio.Event()
        self._count = 0

    @property
    def target(self) -> str:
        return SCHEME + self._name

    def host_of(self, peer: str) -> str:
        """Return the client's host, for the peer that gRPC reports; others stay as they are."""
        return self._hosts.get(unquote(peer).removeprefix(SCHEME), peer)

    async def open(self, sockets: Sequence[socket.socket]) -> None:
        """Accept connections; the server must listen on `target`."""
        loop = asyncio.get_running_loop()
        for one in sockets:
            server = await loop.create_server(lambda: _ClientEnd(self), sock=one)
            self._servers.append(server)

    def close(self) -> None:
        """Accept no more connections; those in progress go on."""
        for server in self._servers:
            server.close()
        self._servers = []

    async def end(self) -> None:
        """End the connections in progress; return when nothing of them is left in the loop."""
        for task in list(self._opening):
            task.cancel()
        for end in list(self._ends):
            end.abort()
        await asyncio.gather(*self._opening, return_exceptions=True)
        while self._ends:
            self._all_ended.clear()
            await self._all_ended.wait()

    def add(self, end: _End) -> None:
        self._ends.add(end)

    def remove(self, end: _End) -> None:
        self._ends.discard(end)
        if not self._ends:
            self._all_ended.set()

    def connect(self, client: _ClientEnd, host: str) -> None:
        self._count += 1
        task = asyncio.create_task(self._connect(client, f"{self._name}/{self._count}", host))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, client: _ClientEnd, name: str, host: str) -> None:
        loop = asyncio.get_running_loop()
        private = socket.socket(socket.AF_UNIX)
        private.setblocking(False)
        self._hosts[name] = host
        try:
            private.bind(b"\0" + name.encode())
            await loop.sock_connect(private, b"\0" + self._name.encode())
            await loop.create_unix_connection(lambda: _ServerEnd(self, client, name), sock=private)
        except (OSError, asyncio.CancelledError) as error:  # the server is stopping
            private.close()
            self.forget(name)
            client.abort()
            if isinstance(error, asyncio.CancelledError):
                raise

    def forget(self, name: str) -> None:
        self._hosts.pop(name, None)


class _End(asyncio.Protocol):
    """One end: what it receives goes to the other, no faster than that one sends it."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._relay.add(self)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._relay.remove(self)
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()


class _ClientEnd(_End):
    """The client's connection."""

    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        self.early = bytearray()  # received before the gRPC server was connected: one read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer: Any = transport.get_extra_info("peername")
        self._relay.connect(self, str(peer[0]) if peer else "")

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early += data
            if self.transport is not None:
                self.transport.pause_reading()
        else:
            super().data_received(data)


class _ServerEnd(_End):
    """Our connection to the gRPC server."""

    def __init__(self, relay: Relay, client: _ClientEnd, name: str) -> None:
        super().__init__(relay)
        self.other = self._client = client
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        client = self._client
        if client.transport is None:  # gone meanwhile
            self.transport.close()
            return
        client.other = self
        if client.early:
            self.transport.write(bytes(client.early))
            client.early.clear()
            client.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.forget(self._name)
        super().connection_lost(exc)
