"""Measure what one WebSocket frame costs the server, for several libraries.

    python bench/websocket_libraries.py            all libraries, five interleaved rounds, medians
    python bench/websocket_libraries.py -l picows  one library only; -r sets the number of rounds

Needs uvloop, and measures those of wsproto, websockets, picows and aiohttp that are installed. Each
library serves from its own process, on uvloop, pinned to core 1. The generator is this process, on
core 0: a blocking socket, a handwritten handshake and masked frames prepared in advance, so that it
costs little. What counts is the CPU time of the serving process, user and system, per frame. `tcp`
is the baseline: the same bytes without WebSocket framing. `sluice` is broker/net/websocket.py, on
picows, with all its checks.

The application on top of every library is the same (`Application`): it gets the payload of a whole
read as one `bytes`, like Sluice's connection, and answers once per batch or once per loop turn.
"""

import argparse
import asyncio
import importlib.util
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

LIBRARIES = {  # name in the table -> required module
    "tcp": "uvloop",
    "wsproto": "wsproto",
    "websockets": "websockets",
    "picows": "picows",
    "picows+aiofastnet": "picows",
    "aiohttp": "aiohttp",
    "sluice": "sluice",
}
SIZES = (120, 1100)
BATCH = 64
CELL_SECONDS = 0.5
IDLE_CONNECTIONS = 1_000
COMMAND = struct.Struct("!cII")


# ---- the server


class Application:
    """Serves three commands: expect batches of n bytes; send n frames; report the CPU time used."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.write = write
        self.batch_bytes = 0
        self.pending = 0

    def received(self, data: bytes) -> None:
        if (
            self.pending or len(data) != COMMAND.size
        ):  # the generator waits for "k" before its next command
            self.pending += len(data)
            if self.pending == self.batch_bytes:
                self.pending = 0
                self.write(b"k")
            return
        command, first, second = COMMAND.unpack(data)
        if command == b"B":
            self.batch_bytes = first
            self.write(b"k")
        elif command == b"S":
            self.send_one_per_turn(first, b"x" * second)
        else:
            self.write(struct.pack("!d", time.process_time()))

    def send_one_per_turn(self, left: int, frame: bytes) -> None:
        self.write(frame)
        if left > 1:
            asyncio.get_running_loop().call_soon(self.send_one_per_turn, left - 1, frame)


async def serve_tcp(port_ready: Callable[[int], None]) -> None:
    class Plain(asyncio.Protocol):
        application: Application | None = None

        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            if self.application is None:
                self.application = Application(self.transport.write)
                self.transport.write(b"HTTP/1.1 101 no WebSocket at all\r\n\r\n")
            else:
                self.application.received(data)

    await listen(Plain, port_ready)


async def serve_wsproto(port_ready: Callable[[int], None]) -> None:
    from wsproto import ConnectionType, WSConnection
    from wsproto.events import AcceptConnection, BytesMessage, Request

    class OverWsproto(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            self.core = WSConnection(ConnectionType.SERVER)
            self.application = Application(
                lambda data: transport.write(self.core.send(BytesMessage(data=data)))
            )

        def data_received(self, data: bytes) -> None:
            self.core.receive_data(data)
            chunks = []
            for event in self.core.events():
                if isinstance(event, BytesMessage):
                    chunks.append(event.data)
                elif isinstance(event, Request):
                    self.transport.write(self.core.send(AcceptConnection(subprotocol="mqtt")))
            if chunks:
                self.application.received(b"".join(chunks))

    await listen(OverWsproto, port_ready)


async def serve_websockets(port_ready: Callable[[int], None]) -> None:
    from websockets.frames import Frame
    from websockets.http11 import Request
    from websockets.server import ServerProtocol
    from websockets.typing import Subprotocol

    class OverWebsockets(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            self.core = ServerProtocol(subprotocols=[Subprotocol("mqtt")], max_size=1 << 20)
            self.application = Application(self.send)

        def send(self, data: bytes) -> None:
            self.core.send_binary(data)
            self.flush()

        def flush(self) -> None:
            for piece in self.core.data_to_send():
                self.transport.write(piece)

        def data_received(self, data: bytes) -> None:
            self.core.receive_data(data)
            chunks = []
            for event in self.core.events_received():
                if isinstance(event, Frame):
                    chunks.append(event.data)
                elif isinstance(event, Request):
                    self.core.send_response(self.core.accept(event))
            self.flush()
            if chunks:
                self.application.received(b"".join(chunks))

    await listen(OverWebsockets, port_ready)


async def serve_picows(port_ready: Callable[[int], None], aiofastnet: bool) -> None:
    import picows

    class OverPicows(picows.WSListener):
        def on_ws_connected(self, transport: picows.WSTransport) -> None:
            self.chunks: list[bytes] = []
            self.application = Application(
                lambda data: transport.send(picows.WSMsgType.BINARY, data)
            )

        def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
            self.chunks.append(frame.get_payload_as_bytes())
            if frame.last_in_buffer:
                chunks, self.chunks = self.chunks, []
                self.application.received(b"".join(chunks))

    def accept(request: picows.WSUpgradeRequest) -> Any:
        response = picows.WSUpgradeResponse.create_101_response({"Sec-WebSocket-Protocol": "mqtt"})
        return picows.WSUpgradeResponseWithListener(response, OverPicows())

    server = await picows.ws_create_server(
        accept, "127.0.0.1", 0, use_aiofastnet=aiofastnet, read_buffer_init_size=2048, backlog=1024
    )
    port_ready(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def serve_aiohttp(port_ready: Callable[[int], None]) -> None:
    from aiohttp import web

    async def handle(request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse(protocols=["mqtt"], compress=False)
        await response.prepare(request)

        def write(
            data: bytes,
        ) -> None:  # runs the coroutine to its end: it never waits on an empty buffer
            try:
                response.send_bytes(data).send(None)
            except StopIteration:
                pass

        application = Application(write)
        async for (
            message
        ) in response:  # a queue separates the reader from us, so frames arrive one by one
            application.received(message.data)
        return response

    app = web.Application()
    app.router.add_get("/mqtt", handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    port_ready(runner.addresses[0][1])
    await asyncio.Event().wait()


async def serve_sluice(port_ready: Callable[[int], None]) -> None:
    from sluice.broker.net.websocket import serve_websocket

    class OverSluice(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.application = Application(transport.write)
            self.data_received = self.application.received  # type: ignore[method-assign]

    server = await serve_websocket(
        OverSluice, "127.0.0.1", 0, ssl=None, max_frame=1 << 20, handshake_timeout=10.0
    )
    port_ready(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def listen(
    protocol: Callable[[], asyncio.BaseProtocol], port_ready: Callable[[int], None]
) -> None:
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0, backlog=1024)
    port_ready(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


def serve(library: str) -> None:
    import uvloop

    os.sched_setaffinity(0, {1})

    def port_ready(port: int) -> None:
        print(port, flush=True)

    serving = {
        "tcp": lambda: serve_tcp(port_ready),
        "wsproto": lambda: serve_wsproto(port_ready),
        "websockets": lambda: serve_websockets(port_ready),
        "picows": lambda: serve_picows(port_ready, False),
        "picows+aiofastnet": lambda: serve_picows(port_ready, True),
        "aiohttp": lambda: serve_aiohttp(port_ready),
        "sluice": lambda: serve_sluice(port_ready),
    }[library]
    uvloop.run(serving())


# ---- the generator


class Client:
    def __init__(self, port: int, framed: bool) -> None:
        self.framed = framed
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(
            b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\n"
            b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Protocol: mqtt\r\n\r\n"
        )
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self.socket.recv(4096)
        assert b" 101 " in answer, answer

    def frame(self, payload: bytes) -> bytes:
        """Return one masked binary frame; for the `tcp` baseline, the payload as it is."""
        if not self.framed:
            return payload
        mask = b"\x12\x34\x56\x78"
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))
        if len(payload) < 126:
            return struct.pack("!BB", 0x82, 0x80 | len(payload)) + mask + masked
        return struct.pack("!BBH", 0x82, 0x80 | 126, len(payload)) + mask + masked

    def answer(self, size: int) -> bytes:
        """Read one answering frame of `size` payload bytes, or several of that wire size."""
        wanted = self.wire_size(size)
        data = b""
        while len(data) < wanted:
            data += self.socket.recv(wanted - len(data))
        return data[-size:]

    def wire_size(self, size: int) -> int:
        return size + (0 if not self.framed else 2 if size < 126 else 4)

    def command(self, code: bytes, first: int = 0, second: int = 0) -> None:
        self.socket.sendall(self.frame(COMMAND.pack(code, first, second)))

    def server_cpu(self) -> float:
        self.command(b"C")
        return float(struct.unpack("!d", self.answer(8))[0])


def receive_cost(client: Client, size: int, frames_per_read: int) -> float:
    """Return CPU microseconds per received frame, for batches of frames with one answer each."""
    batch = client.frame(b"p" * size) * frames_per_read
    before = client.server_cpu()
    client.command(b"B", size * frames_per_read)
    client.answer(1)
    batches, end = 0, time.monotonic() + CELL_SECONDS
    while time.monotonic() < end:
        client.socket.sendall(batch)
        client.answer(1)
        batches += 1
    return (client.server_cpu() - before) / (batches * frames_per_read) * 1e6


def send_cost(client: Client, size: int) -> float:
    """Return CPU microseconds per sent frame, one frame in each turn of the loop."""
    before = client.server_cpu()
    rounds, end = 0, time.monotonic() + CELL_SECONDS
    while time.monotonic() < end:
        client.command(b"S", BATCH, size)
        left = BATCH * client.wire_size(size)
        while left:
            left -= len(client.socket.recv(left))
        rounds += 1
    return (client.server_cpu() - before) / (rounds * BATCH) * 1e6


def resident_kilobytes(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024


def idle_kilobytes(pid: int, port: int, framed: bool) -> float:
    """Return resident kilobytes per connection after its handshake and one exchange."""
    warm = [Client(port, framed) for _ in range(50)]
    before = resident_kilobytes(pid)
    clients = [Client(port, framed) for _ in range(IDLE_CONNECTIONS)]
    for client in clients:
        client.server_cpu()
    after = resident_kilobytes(pid)
    for client in warm + clients:
        client.socket.close()
    return (after - before) / IDLE_CONNECTIONS


def measure(library: str) -> dict[str, float]:
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", library],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert server.stdout is not None
        port, framed = int(server.stdout.readline()), library != "tcp"
        cells = {"idle KB": idle_kilobytes(server.pid, port, framed)}
        for size in SIZES:
            cells[f"recv {size} x{BATCH}"] = receive_cost(Client(port, framed), size, BATCH)
            cells[f"echo {size}"] = receive_cost(Client(port, framed), size, 1)
            cells[f"send {size}"] = send_cost(Client(port, framed), size)
        return cells
    finally:
        server.kill()
        server.wait()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--serve", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments.add_argument("-l", "--library", choices=LIBRARIES, action="append")
    arguments.add_argument("-r", "--rounds", type=int, default=5)
    chosen = arguments.parse_args()
    if chosen.serve:
        serve(chosen.serve)
        return
    os.sched_setaffinity(0, {0})
    names = [n for n in chosen.library or LIBRARIES if importlib.util.find_spec(LIBRARIES[n])]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(chosen.rounds):  # interleaved: noise affects all libraries alike
        for name in names:
            results[name].append(measure(name))
    columns = list(results[names[0]][0])
    print("| library | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in names:
        medians = [
            statistics.median(cells[column] for cells in results[name]) for column in columns
        ]
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in medians) + " |")


if __name__ == "__main__":
    main()
