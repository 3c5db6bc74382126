"""MQTT over WebSocket from a client's view: a real listener with a connection that only echoes."""

import asyncio
import base64
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
import trustme
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from sluice.broker.net import websocket
from sluice.broker.net.origins import ANY_ORIGIN, AllowedOrigins
from sluice.broker.net.websocket import serve_websocket

MAX_FRAME = 64 * 1024
BINARY, TEXT, CONTINUATION, CLOSE, PING, PONG = 0x2, 0x1, 0x0, 0x8, 0x9, 0xA
T = TypeVar("T")


async def within(awaitable: Awaitable[T], seconds: float = 5.0) -> T:
    return await asyncio.wait_for(awaitable, seconds)


class Echo:
    """A connection that answers each read with the same bytes and records its events."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.received_data = asyncio.Event()
        self.ended = False
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.paused = asyncio.Event()
        self.resumed = asyncio.Event()
        self.on_data: Callable[[bytes], None] | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert type(data) is bytes and data
        self.reads.append(data)
        self.received_data.set()
        (self.on_data or self.transport.write)(data)

    def eof_received(self) -> bool:
        self.ended = True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)

    def pause_writing(self) -> None:
        self.paused.set()

    def resume_writing(self) -> None:
        self.resumed.set()


class Listener:
    """A WebSocket listener on a free port, and the connections it has made so far."""

    def __init__(self) -> None:
        self.connections: asyncio.Queue[Echo] = asyncio.Queue()
        self.made = 0
        self.port = 0

    def make(self) -> Echo:
        echo = Echo()
        self.made += 1
        self.connections.put_nowait(echo)
        return echo

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/mqtt"


@asynccontextmanager
async def listening(
    tls: ssl.SSLContext | None = None,
    handshake_timeout: float = 5.0,
    origins: AllowedOrigins = ANY_ORIGIN,
) -> AsyncIterator[Listener]:
    listener = Listener()
    server = await serve_websocket(
        listener.make,
        "127.0.0.1",
        0,
        ssl=tls,
        max_frame=MAX_FRAME,
        handshake_timeout=handshake_timeout,
        origins=origins,
    )
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield listener
    finally:
        server.close()
        await within(server.wait_closed())


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    async with listening() as listener:
        yield listener


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True
) -> bytes:
    size = len(payload)
    first = (0x80 if fin else 0) | rsv << 4 | opcode
    if size < 126:
        header = struct.pack("!BB", first, size | (0x80 if masked else 0))
    elif size < 65536:
        header = struct.pack("!BBH", first, 126 | (0x80 if masked else 0), size)
    else:
        header = struct.pack("!BBQ", first, 127 | (0x80 if masked else 0), size)
    if not masked:
        return header + payload
    mask = b"\xa1\x02\xf3\x44"
    return header + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


class Raw:
    """A client that sends exactly the bytes it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def request(
        self, path: str = "/mqtt", **changed: str | None
    ) -> tuple[int, dict[str, str], str]:
        """Request the upgrade; a header given as None is left out.

        Return status, headers and body.
        """
        headers: dict[str, str | None] = {
            "Host": "localhost",
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec_WebSocket_Key": base64.b64encode(os.urandom(16)).decode(),
            "Sec_WebSocket_Version": "13",
            "Sec_WebSocket_Protocol": "mqtt",
        }
        headers.update(changed)
        lines = [
            f"{name.replace('_', '-')}: {value}"
            for name, value in headers.items()
            if value is not None
        ]
        self.send("\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode())
        return await self.response()

    async def response(self) -> tuple[int, dict[str, str], str]:
        head = (await within(self.reader.readuntil(b"\r\n\r\n"))).decode().split("\r\n")
        headers = {
            name.lower(): value
            for name, value in (line.split(": ", 1) for line in head[1:] if line)
        }
        body = await within(self.reader.readexactly(int(headers.get("content-length", "0"))))
        return int(head[0].split()[1]), headers, body.decode()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def receive(self) -> tuple[int, bytes]:
        """Return the next frame of the server, which must be complete and unmasked."""
        first, size = await within(self.reader.readexactly(2))
        assert first & 0xF0 == 0x80 and size < 0x80
        if size == 126:
            (size,) = struct.unpack("!H", await within(self.reader.readexactly(2)))
        elif size == 127:
            (size,) = struct.unpack("!Q", await within(self.reader.readexactly(8)))
        return first & 0x0F, await within(self.reader.readexactly(size))

    async def refusal(self) -> int:
        """Return the code of the next frame, a close frame; the server then disconnects."""
        opcode, payload = await self.receive()
        assert opcode == CLOSE, (opcode, payload)
        self.send(frame(CLOSE, payload[:2]))
        assert await within(self.reader.read()) == b""
        return int(struct.unpack("!H", payload[:2])[0])


@asynccontextmanager
async def connect_raw(listener: Listener) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@asynccontextmanager
async def upgraded(listener: Listener) -> AsyncIterator[tuple[Raw, Echo]]:
    async with connect_raw(listener) as raw:
        assert (await raw.request())[0] == 101
        yield raw, await within(listener.connections.get())


# ---- the handshake


async def test_client_that_offers_mqtt_gets_mqtt_and_is_echoed(listener: Listener) -> None:
    async with connect(listener.url, subprotocols=[Subprotocol("mqtt")]) as client:
        assert client.subprotocol == "mqtt"
        await client.send(b"\x10\x00")
        assert await within(client.recv()) == b"\x10\x00"


@pytest.mark.parametrize(
    ("offered", "answered"),
    [
        ("mqtt", "mqtt"),
        ("mqttv3.1", "mqttv3.1"),
        ("mqttv3.1, mqtt", "mqtt"),
        ("soap,mqtt", "mqtt"),
        (None, None),
    ],
)
async def test_best_offered_subprotocol_is_selected(
    listener: Listener, offered: str | None, answered: str | None
) -> None:
    async with connect_raw(listener) as raw:
        status, headers, _ = await raw.request(Sec_WebSocket_Protocol=offered)
        assert (status, headers.get("sec-websocket-protocol")) == (101, answered)


async def test_client_that_offers_only_other_subprotocols_is_refused(listener: Listener) -> None:
    async with connect_raw(listener) as raw:
        status, _, body = await raw.request(Sec_WebSocket_Protocol="soap, wamp")
        assert status == 400 and "'mqtt'" in body
    assert listener.made == 0


async def test_permessage_deflate_is_not_negotiated(listener: Listener) -> None:
    async with connect(
        listener.url, compression="deflate", subprotocols=[Subprotocol("mqtt")]
    ) as client:
        assert client.protocol.extensions == []


async def test_connection_header_of_firefox_is_accepted(listener: Listener) -> None:
    async with connect_raw(listener) as raw:
        assert (await raw.request(Connection="keep-alive, Upgrade"))[0] == 101


@pytest.mark.parametrize("path", ["/mqtt", "/", "/mqtt?tenant=a"])
async def test_a_known_path_is_accepted(listener: Listener, path: str) -> None:
    async with connect_raw(listener) as raw:
        assert (await raw.request(path))[0] == 101


async def test_unknown_path_is_refused_with_the_right_one(listener: Listener) -> None:
    async with connect_raw(listener) as raw:
        status, _, body = await raw.request("/chat")
        assert status == 404 and "/mqtt" in body


PAGE = "https://app.example.org"


@pytest.mark.parametrize(
    ("named", "ambient", "origin", "host", "status"),
    [
        # Clients need no credentials: programs and pages of this machine are admitted.
        ([], True, None, "evil.example", 101),
        ([], True, "http://localhost:3000", "127.0.0.1:9001", 101),
        ([], True, "http://127.0.0.1:8080", "localhost:9001", 101),
        ([], True, "http://[::1]:8080", "[::1]:9001", 101),
        ([], True, f"http://{socket.gethostname()}", "127.0.0.1", 101),
        ([], True, "http://10.1.2.3:8080", "10.1.2.3:9001", 101),
        ([], True, "https://evil.example", "127.0.0.1:9001", 403),
        ([], True, "https://evil.example", "evil.example", 403),  # DNS rebinding
        ([], True, "http://localhost", "evil.example", 403),
        ([], True, "http://10.1.2.4", "10.1.2.3:9001", 403),
        ([], True, "https://localhost.evil.example", "localhost", 403),
        ([], True, "null", "localhost", 403),
        ([], True, "http://[", "localhost", 403),
        ([], True, "", "localhost", 403),
        # Pages that the operator lists.
        ([PAGE], True, PAGE, "broker.example.org", 101),
        ([PAGE], True, PAGE.upper(), "broker.example.org", 101),
        ([PAGE], True, "http://app.example.org", "localhost", 403),
        ([PAGE], True, PAGE + ":8443", "localhost", 403),
        ([PAGE], True, "http://localhost", "localhost", 101),
        (["*"], True, "https://evil.example", "evil.example", 101),
        # Clients send credentials: a page has none of its own.
        ([], False, "https://any.example", "broker.example.org", 101),
        ([PAGE], False, "https://any.example", "broker.example.org", 403),
        ([PAGE], False, PAGE, "broker.example.org", 101),
    ],
)
async def test_cross_site_page_is_admitted_only_where_safe_or_configured(
    named: list[str], ambient: bool, origin: str | None, host: str, status: int
) -> None:
    async with (
        listening(origins=AllowedOrigins(named, ambient, "127.0.0.1")) as listener,
        connect_raw(listener) as raw,
    ):
        answered, _, body = await raw.request(Origin=origin, Host=host)
        assert answered == status
        if status == 403:
            assert "mqtt.ws_origins" in body
            assert listener.made == 0


async def test_plain_get_is_asked_to_upgrade(listener: Listener) -> None:
    async with connect_raw(listener) as raw:
        status, headers, body = await raw.request(Connection=None, Upgrade=None)
        assert status == 426 and headers["upgrade"] == "websocket" and "ws://" in body
    assert listener.made == 0


async def test_other_websocket_version_gets_the_supported_one(listener: Listener) -> None:
    async with connect_raw(listener) as raw:
        status, headers, _ = await raw.request(Sec_WebSocket_Version="8")
        assert status == 426 and headers["sec-websocket-version"] == "13"


@pytest.mark.parametrize(
    "request_line", [b"POST /mqtt HTTP/1.1", b"GET /mqtt HTTP/1.0", b"\x10\x0e\x00\x04MQTT"]
)
async def test_anything_but_an_http_1_1_get_is_a_bad_request(
    listener: Listener, request_line: bytes
) -> None:
    async with connect_raw(listener) as raw:
        raw.send(request_line + b"\r\nHost: localhost\r\n\r\n")
        assert (await raw.response())[0] == 400
        assert await within(raw.reader.read()) == b""


async def test_unfinished_handshake_is_closed() -> None:
    async with listening(handshake_timeout=0.1) as listener, connect_raw(listener) as raw:
        raw.send(b"GET /mqtt HTTP/1.1\r\nHost: loc")
        assert await within(raw.reader.read()) == b""
        assert listener.made == 0


async def test_endless_headers_are_closed(listener: Listener) -> None:
    async with connect_raw(listener) as raw:
        raw.send(b"GET /mqtt HTTP/1.1\r\n" + b"X: y\r\n" * 5_000)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await raw.response()
    assert listener.made == 0


async def test_frames_sent_with_the_handshake_are_not_lost(listener: Listener) -> None:
    async with connect_raw(listener) as raw:
        answer = asyncio.create_task(raw.request())
        await asyncio.sleep(0)  # the request is written, the response not yet read
        raw.send(frame(BINARY, b"early"))
        assert (await answer)[0] == 101
        assert await raw.receive() == (BINARY, b"early")


# ---- frames in and out


async def test_frames_of_one_read_reach_the_connection_together(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        raw.send(b"".join(frame(BINARY, b"%03d" % n) for n in range(100)))
        together = b"".join(b"%03d" % n for n in range(100))
        answered = b""
        while len(answered) < len(together):
            answered += (await raw.receive())[1]
        assert answered == together
        assert len(echo.reads) < 20


async def test_packet_may_span_fragments_with_a_ping_between(listener: Listener) -> None:
    async with upgraded(listener) as (raw, _):
        raw.send(
            frame(BINARY, b"one ", fin=False)
            + frame(PING, b"still there?")
            + frame(CONTINUATION, b"two")
        )
        assert await raw.receive() == (PONG, b"still there?")
        assert await raw.receive() == (BINARY, b"one two")


async def test_read_that_ends_with_a_ping_is_forwarded(listener: Listener) -> None:
    async with upgraded(listener) as (raw, _):
        raw.send(frame(BINARY, b"data") + frame(PING, b"last"))
        assert {await raw.receive(), await raw.receive()} == {(PONG, b"last"), (BINARY, b"data")}


async def test_frame_that_arrives_byte_by_byte_is_assembled(listener: Listener) -> None:
    async with upgraded(listener) as (raw, _):
        raw.writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in frame(BINARY, b"slow"):
            raw.send(bytes([byte]))
            await raw.writer.drain()
        assert await raw.receive() == (BINARY, b"slow")


async def test_empty_frame_and_pong_are_ignored(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        raw.send(frame(BINARY) + frame(PONG, b"unasked") + frame(PING))
        assert await raw.receive() == (PONG, b"")
        raw.send(frame(BINARY, b"x"))
        assert await raw.receive() == (BINARY, b"x")
        assert echo.reads == [b"x"]


@pytest.mark.parametrize("size", [1, 125, 126, 8192, 8193, 65535, 65536, 1_000_000])
async def test_each_write_is_one_binary_frame(listener: Listener, size: int) -> None:
    async with upgraded(listener) as (raw, echo):
        echo.transport.write(b"w" * size)
        assert await raw.receive() == (BINARY, b"w" * size)


async def test_large_frames_stay_whole_while_the_peer_reads_slowly(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        for n in range(400):  # more than the sockets hold: most of it waits in the transport
            echo.transport.write(b"%05d" % n * 4_000)
            echo.transport.write(b"%05d" % n)
        assert echo.transport.get_write_buffer_size() > 0
        for n in range(400):
            assert await raw.receive() == (BINARY, b"%05d" % n * 4_000)
            assert await raw.receive() == (BINARY, b"%05d" % n)


async def test_a_slow_reader_pauses_writing_and_resumes_it(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        echo.transport.set_write_buffer_limits(10_000, 1_000)
        written = 0
        while not echo.paused.is_set():
            echo.transport.write(b"w" * 8_000)
            written += 1
            assert written < 10_000
            await asyncio.sleep(0)
        for _ in range(written):
            await raw.receive()
        await within(echo.resumed.wait())


async def test_pings_of_a_peer_that_never_reads_are_not_queued(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        raw.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not echo.paused.is_set():
            echo.transport.write(b"w" * 100_000)
            await asyncio.sleep(0)
        held = echo.transport.get_write_buffer_size()
        raw.send(frame(PING, b"p" * 125) * 2_000 + frame(BINARY, b"after the pings"))
        await within(echo.received_data.wait())
        assert echo.transport.get_write_buffer_size() <= held + 1_000


async def test_reading_can_be_paused_and_resumed(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        echo.transport.pause_reading()
        echo.transport.pause_reading()
        raw.send(frame(PING, b"unanswered") + frame(BINARY, b"later"))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(raw.reader.readexactly(1), 0.1)
        assert echo.reads == []
        echo.transport.resume_reading()
        assert await raw.receive() == (PONG, b"unanswered")
        assert await raw.receive() == (BINARY, b"later")


async def test_flood_does_not_block_the_event_loop(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        finished = asyncio.Event()
        sizes: list[int] = []

        def count(data: bytes) -> None:
            sizes.append(len(data))
            if sum(sizes) == 240_000 * 100:
                finished.set()

        echo.on_data = count
        raw.send(frame(BINARY, b"f" * 100) * 240_000)
        await within(finished.wait(), 20)
        assert max(sizes) < 1_000_000


async def test_peer_address_is_available(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        assert echo.transport.get_extra_info("peername") == raw.writer.get_extra_info("sockname")
        assert echo.transport.get_extra_info("no such thing", "none") == "none"


# ---- refused frames


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (frame(TEXT, b"hello"), 1003),  # [MQTT-6.0.0-1]
        (frame(CONTINUATION, b"of nothing"), 1002),
        (frame(BINARY, b"a", fin=False) + frame(BINARY, b"b"), 1002),
        (frame(BINARY, b"compressed?", rsv=4), 1002),
        (frame(BINARY, b"bare", masked=False), 1002),
        (frame(0x3, b"reserved"), 1002),
        (frame(PING, b"p", fin=False), 1002),
        (frame(CLOSE, b"\x03"), 1002),
        (struct.pack("!BBQ", 0x82, 0xFF, MAX_FRAME + 1), 1009),  # the header is enough
    ],
    ids=["text", "stray-continuation", "no-continuation", "rsv", "unmasked", "opcode",
         "fragmented-ping", "short-close", "too-large"],
)  # fmt: skip
async def test_invalid_frame_closes_the_connection(
    listener: Listener, bad: bytes, code: int
) -> None:
    async with upgraded(listener) as (raw, echo):
        raw.send(bad)
        raw.send(frame(BINARY, b"too late"))
        while (received := await raw.receive())[0] == BINARY:
            assert received[1] == b"a"  # the valid part of a message that failed
        assert received[0] == CLOSE and struct.unpack("!H", received[1][:2])[0] == code
        raw.send(frame(CLOSE, received[1][:2]))
        await within(echo.lost)
        assert b"too late" not in b"".join(echo.reads)


async def test_data_before_an_invalid_frame_is_forwarded(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        raw.send(frame(BINARY, b"good") + frame(TEXT, b"bad"))
        assert await raw.receive() == (BINARY, b"good")
        assert await raw.refusal() == 1003
        assert await within(echo.lost) is None


async def test_frame_of_maximum_size_is_accepted(listener: Listener) -> None:
    async with upgraded(listener) as (raw, _):
        raw.send(frame(BINARY, b"m" * MAX_FRAME))
        assert await raw.receive() == (BINARY, b"m" * MAX_FRAME)


async def test_exception_in_the_connection_closes_it_with_internal_error(
    listener: Listener,
) -> None:
    async with upgraded(listener) as (raw, echo):
        echo.on_data = lambda data: {b"": None}[data]
        raw.send(frame(BINARY, b"boom"))
        assert await raw.refusal() == 1011
        await within(echo.lost)


# ---- closing


async def test_close_frame_is_answered_with_its_code(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        raw.send(frame(BINARY, b"last words") + frame(CLOSE, struct.pack("!H", 4001) + b"bye"))
        assert await raw.receive() == (BINARY, b"last words")
        assert await raw.refusal() == 4001
        assert await within(echo.lost) is None and echo.ended


async def test_close_frame_without_a_code_is_answered_as_normal(listener: Listener) -> None:
    async with upgraded(listener) as (raw, _):
        raw.send(frame(CLOSE))
        assert await raw.refusal() == 1000


async def test_a_client_library_closes_cleanly(listener: Listener) -> None:
    async with connect(listener.url) as client:
        echo = await within(listener.connections.get())
    assert client.close_code == 1000
    assert await within(echo.lost) is None


async def test_close_sends_buffered_data_and_waits_for_the_peer(listener: Listener) -> None:
    async with connect(listener.url) as client:
        echo = await within(listener.connections.get())
        echo.transport.pause_reading()
        echo.transport.write(b"goodbye")
        echo.transport.close()
        echo.transport.close()
        echo.transport.write(b"unsaid")
        assert echo.transport.is_closing()
        assert await within(client.recv()) == b"goodbye"
        with pytest.raises(ConnectionClosed):
            await within(client.recv())
        assert client.close_code == 1000
    assert await within(echo.lost) is None


async def test_nothing_is_received_after_close(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        echo.on_data = lambda data: echo.transport.close()
        raw.send(frame(BINARY, b"first"))
        assert (await raw.receive())[0] == CLOSE
        raw.send(frame(BINARY, b"second") + frame(TEXT, b"third") + frame(CLOSE, b"\x03\xe8"))
        assert await within(echo.lost) is None
        assert echo.reads == [b"first"]


async def test_peer_that_never_answers_the_close_is_aborted(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "CLOSE_TIMEOUT_SECONDS", 0.1)
    async with upgraded(listener) as (_, echo):
        echo.transport.close()
        assert await within(echo.lost) is None


async def test_abort_ends_at_once(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        echo.transport.abort()
        assert await within(echo.lost) is None
        echo.transport.write(b"unread")
        echo.transport.close()
        echo.transport.pause_reading()
        assert await within(raw.reader.read()) == b""


async def test_connection_lost_has_a_reason_when_the_peer_vanishes(listener: Listener) -> None:
    async with upgraded(listener) as (raw, echo):
        raw.writer.transport.abort()
        assert isinstance(await within(echo.lost), ConnectionResetError)


# ---- TLS


async def test_secure_websocket_works_the_same() -> None:
    authority = trustme.CA()
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(serving)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)
    async with listening(tls=serving) as listener:
        url = f"wss://127.0.0.1:{listener.port}/mqtt"
        async with connect(
            url, ssl=trusting, subprotocols=[Subprotocol("mqtt")], max_size=None
        ) as client:
            echo = await within(listener.connections.get())
            assert echo.transport.get_extra_info("ssl_object") is not None
            for size in (10, 60_000):
                await client.send(b"s" * size)
                received = b""
                while len(received) < size:
                    part = await within(client.recv())
                    assert isinstance(part, bytes)
                    received += part
                assert received == b"s" * size
        assert await within(echo.lost) is None


async def test_unfinished_tls_handshake_is_closed() -> None:
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(serving)
    async with (
        listening(tls=serving, handshake_timeout=0.1) as listener,
        connect_raw(listener) as raw,
    ):
        assert await within(raw.reader.read()) == b""
