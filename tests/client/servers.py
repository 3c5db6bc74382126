"""Servers for the client tests: real ones, a proxy that can be cut, and a scripted one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from sluice.wire.encode import encode
from sluice.wire.packets import Connack, Connect, Packet
from sluice.wire.properties import Properties
from sluice.wire.reader import PacketReader

START_SECONDS = 10.0


class Server(Protocol):
    """The address of a real server."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Mosquitto:
    """A mosquitto of one test. `settings` are lines of its configuration for its only listener."""

    def __init__(self, program: str, folder: Path, settings: str = "") -> None:
        self.host = "127.0.0.1"
        for _ in range(3):  # a free port can be taken before we listen on it
            self.port = free_port()
            config = folder / "mosquitto.conf"
            config.write_text(
                f"listener {self.port} 127.0.0.1\nallow_anonymous true\nuser root\n{settings}\n"
            )
            self._log = (folder / "mosquitto.log").open("ab")
            self.process = subprocess.Popen(
                [program, "-c", str(config)], cwd=folder, stdout=self._log, stderr=subprocess.STDOUT
            )
            if self._is_listening():
                return
            self.stop()
        raise AssertionError((folder / "mosquitto.log").read_text())

    def _is_listening(self) -> bool:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                socket.create_connection((self.host, self.port), 1).close()
            except OSError:
                time.sleep(0.01)  # mosquitto does not report when it listens
            else:
                return True
        return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self._log.close()


class Proxy:
    """A connection between client and server that can be cut, held and restored."""

    def __init__(self, server: Server) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.connections = 0
        self.holding = False  # drops the bytes of the server: a half-open connection
        self.refusing = False
        self._server = server
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._accept, self.host, self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    def redirect_to(self, server: Server) -> None:
        """Connect new clients to another server: the first one was restarted on another port."""
        self._server = server

    def disconnect(self) -> None:
        """Break every connection at once, without a DISCONNECT."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def stop(self) -> None:
        assert self._listener is not None
        self._listener.close()
        self.disconnect()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            if not self.refusing:
                server_reader, server_writer = await asyncio.open_connection(
                    self._server.host, self._server.port
                )
                self._writers.add(server_writer)
                try:
                    await asyncio.gather(
                        self._pump(reader, server_writer, False),
                        self._pump(server_reader, writer, True),
                    )
                finally:
                    self._writers.discard(server_writer)
                    server_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # the proxy was stopped
        finally:
            self._writers.discard(writer)
            self._tasks.discard(task)
            writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool
    ) -> None:
        try:
            while data := await reader.read(65_536):
                if not (answers and self.holding):
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()


class ServerConnection:
    """One client of the scripted server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.version = 5
        self._reader = reader
        self._writer = writer
        self._packets = PacketReader(1 << 20)
        self._received: list[Packet] = []

    async def receive(self) -> Packet:
        """Return the next packet; raise EOFError when the client has disconnected."""
        while not self._received:
            data = await self._reader.read(65_536)
            if not data:
                raise EOFError
            self._received = self._packets.feed(data, self.version)
        return self._received.pop(0)

    async def send(self, *packets: Packet) -> None:
        self._writer.write(b"".join(encode(packet, self.version) for packet in packets))
        await self._writer.drain()

    async def accept_connect(
        self, session_present: bool = False, properties: Properties | None = None
    ) -> Connect:
        packet = await self.receive()
        assert isinstance(packet, Connect)
        self.version = packet.version
        await self.send(Connack(session_present, 0, properties or Properties()))
        return packet

    async def wait_closed(self) -> None:
        try:
            while True:
                await self.receive()
        except (EOFError, OSError):
            pass


Script = Callable[[ServerConnection], Awaitable[None]]


class ScriptedServer:
    """Runs one script per connection, and the last script for every further connection.

    A script that fails also fails the test when the server stops.
    """

    def __init__(self, *scripts: Script) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self.connections = 0
        self._scripts = scripts
        self._faults: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> ScriptedServer:
        self._listener = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.wait_closed()
        for fault in self._faults:
            raise fault

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = self._scripts[min(self.connections, len(self._scripts) - 1)]
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await script(ServerConnection(reader, writer))
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass  # the client has disconnected, or the test is over
        except Exception as fault:
            self._faults.append(fault)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()
