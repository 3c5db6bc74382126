"""MQTT over WebSocket: make a WebSocket look like the transport of a TCP connection.

picows does the HTTP handshake, the framing and the masking, in C and on uvloop's transports. This
module admits clients (path, origin, subprotocol), turns frames into the byte stream that a
`Connection` expects and its writes into binary frames, and performs the closing handshake. It knows
no MQTT beyond chapter 6 of the specification. It does not reassemble messages: each fragment is
passed on as it arrives, because packets may span or share frames [MQTT-6.0.0-2].

Invariant: the connection sees what it would have seen over TCP. It gets one `data_received` per
socket read, nothing after `close()`, and exactly one `connection_lost`.

picows trusts its peer more than a public port allows; each guard below names its threat.
docs/decisions/0003-websocket.md explains the choice of picows.
"""

import asyncio
import logging
import socket
import ssl as tls
from collections.abc import Callable, Collection, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

from picows import (
    WSCloseCode,
    WSFrame,
    WSListener,
    WSMsgType,
    WSTransport,
    WSUpgradeRequest,
    WSUpgradeResponse,
    WSUpgradeResponseWithListener,
    ws_create_server,
)

from sluice.broker.net.origins import ANY_ORIGIN, AllowedOrigins

# The registered name, and the name that clients before 3.1.1 use.
SUBPROTOCOLS: Final = (
    "mqtt",
    "mqttv3.1",
)
CLOSE_TIMEOUT_SECONDS: Final = 5.0  # for a peer to read buffered output and answer our close frame
BACKLOG: Final = 1024  # a restart brings every browser back in the same second

# picows doubles its read buffer whenever a read fills it and never shrinks it, so the kernel's
# receive buffer (often 6 to 32 MB with auto-tuning) becomes the size of one turn: a single read
# returned 116,000 frames of 120 B, half a second at 4 us each. With a fixed 128 KiB it returned
# 1,600.
RECEIVE_BUFFER_BYTES: Final = 128 * 1024

# Above 8 KiB `WSTransport.send` gives uvloop a view of its only header buffer. While the socket is
# blocked, the next frame overwrites that header before it is sent, and the stream is corrupt from
# then on. The call that takes a bytearray copies instead; it needs this many free bytes before the
# payload.
MAX_UNCOPIED_BYTES: Final = 8 * 1024
FRAME_HEADER_BYTES: Final = 14

BINARY: Final = WSMsgType.BINARY
CONTINUATION: Final = WSMsgType.CONTINUATION


class ConnectionLike(Protocol):
    """The methods of `asyncio.Protocol` that a served connection has; duck typing."""

    def connection_made(self, transport: asyncio.Transport) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


async def serve_websocket(
    factory: Callable[[], ConnectionLike],
    host: str,
    port: int,
    *,
    ssl: tls.SSLContext | None,
    max_frame: int,
    handshake_timeout: float,
    paths: Collection[str] = ("/mqtt", "/"),
    origins: AllowedOrigins = ANY_ORIGIN,
    is_port_shared: bool = False,
) -> asyncio.Server:
    """Listen, and create one connection per completed handshake.

    A frame that announces more than `max_frame` bytes is refused (1009) on its header. TLS and HTTP
    each have `handshake_timeout` seconds.
    """

    def answer(request: WSUpgradeRequest) -> WSUpgradeResponseWithListener:
        response = check_handshake(request, paths, origins)
        admitted = response.status == HTTPStatus.SWITCHING_PROTOCOLS
        return WSUpgradeResponseWithListener(
            response, WebSocketTransport(factory) if admitted else None
        )

    timeouts: dict[str, Any] = {
        "ssl_handshake_timeout": handshake_timeout,
        "ssl_shutdown_timeout": CLOSE_TIMEOUT_SECONDS,
    }
    return await ws_create_server(
        answer,
        host,
        port,
        websocket_handshake_timeout=handshake_timeout,
        logger_name=_QuietLogger(logging.getLogger(__name__), {}),
        enable_auto_pong=False,  # an automatic pong would hide that the read ended with a ping
        max_frame_size=max_frame,
        read_buffer_init_size=2048,  # the minimum: an idle connection keeps this buffer
        use_aiofastnet=False,  # uvloop's transports and TLS, the same as on the TCP listener
        backlog=BACKLOG,
        reuse_port=is_port_shared,
        ssl=ssl,
        **(timeouts if ssl else {}),
    )


def check_handshake(
    request: WSUpgradeRequest, paths: Collection[str], origins: AllowedOrigins
) -> WSUpgradeResponse:
    """Admit or refuse a client, with a text that the caller can act on.

    A client that offers no subprotocol is admitted, as by other brokers: the CONNECT packet names
    MQTT anyway. A client that offers only other subprotocols is no MQTT client.
    """
    path = request.path.decode("latin-1").partition("?")[0]
    if path not in paths:
        return _refuse(
            HTTPStatus.NOT_FOUND, f"No MQTT at this path. Connect to: {', '.join(paths)}"
        )
    headers = cast(MutableMapping[str, str], request.headers)
    upgrading = "upgrade" in (token.lower() for token in _tokens(request, "Connection"))
    if not upgrading or headers.get("Upgrade", "").lower() != "websocket":
        return _refuse(
            HTTPStatus.UPGRADE_REQUIRED,
            "This port serves MQTT over WebSocket. Point an MQTT client at it with ws:// or "
            "wss://, subprotocol 'mqtt'. A proxy in between must pass on the Upgrade and "
            "Connection headers.",
            {"Upgrade": "websocket"},
        )
    if headers.get("Sec-WebSocket-Version") != "13":
        required_headers = {"Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        return _refuse(
            HTTPStatus.UPGRADE_REQUIRED,
            "Only WebSocket version 13 (RFC 6455) is supported.",
            required_headers,
        )
    error_text = origins.handshake_error(headers.get("Origin"), headers.get("Host", ""))
    if error_text:
        return _refuse(HTTPStatus.FORBIDDEN, error_text)
    offered = _tokens(request, "Sec-WebSocket-Protocol")
    chosen = next((name for name in SUBPROTOCOLS if name in offered), None)  # [MQTT-6.0.0-4]
    if offered and chosen is None:
        return _refuse(
            HTTPStatus.BAD_REQUEST, f"Offer the subprotocol 'mqtt', not {', '.join(offered)!r}."
        )
    # picows knows no other spelling; Firefox sends "keep-alive, Upgrade"
    headers["Connection"] = "Upgrade"
    accepted = {"Sec-WebSocket-Protocol": chosen} if chosen else None
    return cast(WSUpgradeResponse, WSUpgradeResponse.create_101_response(accepted))


def _tokens(request: WSUpgradeRequest, name: str) -> list[str]:
    values = request.headers.getall(name, [])
    return [token.strip() for value in values for token in value.split(",") if token.strip()]


def _refuse(
    status: HTTPStatus, text: str, headers: dict[str, str] | None = None
) -> WSUpgradeResponse:
    body = f"{text}\n".encode()
    return cast(WSUpgradeResponse, WSUpgradeResponse.create_error_response(status, body, headers))


class _QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """Log messages of picows at DEBUG, unless they have a traceback.

    picows logs every connection at INFO and every protocol error of a peer at ERROR. Because this
    is no `Logger`, it also saves one child logger per connection.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        super().log(level if kwargs.get("exc_info") else logging.DEBUG, msg, *args, **kwargs)


class WebSocketTransport(WSListener):
    """A listener for picows, and a transport for the connection."""

    __slots__ = (
        "_chunks",
        "_closing",
        "_connection",
        "_deadline",
        "_factory",
        "_in_message",
        "_socket",
        "_stream",
        "_write_paused",
    )

    def __init__(self, factory: Callable[[], ConnectionLike]) -> None:
        self._factory = factory
        self._chunks: list[bytes] = []  # payloads of the current read, passed on together
        self._in_message = False  # between the first fragment of a message and its last
        self._closing = False
        self._write_paused = False
        self._deadline: asyncio.TimerHandle | None = None

    # From picows.

    def on_ws_connected(self, transport: WSTransport) -> None:
        self._socket = transport
        self._stream = transport.underlying_transport
        raw = self._stream.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        # Already read; otherwise they stay for the life of the connection.
        transport.request.headers.clear()
        self._connection = self._factory()
        self._connection.connection_made(cast(asyncio.Transport, self))

    def on_ws_frame(self, transport: WSTransport, frame: WSFrame) -> None:
        kind = frame.msg_type
        # By us, or by picows after a malformed frame.
        if self._closing or transport.is_close_frame_sent:
            if kind == WSMsgType.CLOSE:
                transport.disconnect()
            return
        if kind == BINARY or kind == CONTINUATION:
            if frame.rsv1 or frame.rsv2 or frame.rsv3:
                self._fail(WSCloseCode.PROTOCOL_ERROR, "no extension was negotiated")
            elif self._in_message is (kind == BINARY):
                self._fail(WSCloseCode.PROTOCOL_ERROR, "fragments out of order")
            else:
                self._in_message = not frame.fin
                self._chunks.append(frame.get_payload_as_bytes())
        elif kind == WSMsgType.PING:
            # Otherwise a peer that pings and never reads would fill our memory with pongs.
            if not self._write_paused:
                transport.send_pong(frame.get_payload_as_bytes())
        elif kind == WSMsgType.CLOSE:
            self._on_peer_close(frame)
        elif kind == WSMsgType.TEXT:
            # [MQTT-6.0.0-1]
            self._fail(WSCloseCode.UNSUPPORTED_DATA, "MQTT requires binary frames")
        if frame.last_in_buffer:
            self._deliver_chunks()

    def on_ws_disconnected(self, transport: WSTransport) -> None:
        agreed = self._closing or transport.is_close_frame_sent
        lost = None if agreed else ConnectionResetError("the peer left without a close frame")
        self._closing = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._connection.connection_lost(lost)

    def pause_writing(self) -> None:
        self._write_paused = True
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._write_paused = False
        self._connection.resume_writing()

    def _deliver_chunks(self) -> None:
        chunks = self._chunks
        if chunks:
            self._chunks = []
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            if data and not self._closing:
                self._connection.data_received(data)

    def _fail(self, code: WSCloseCode, reason: str) -> None:
        self._deliver_chunks()  # earlier packets keep their acknowledgements
        self._begin_close(code, reason)

    def _on_peer_close(self, frame: WSFrame) -> None:
        """Answer a close frame with its own code.

        A WebSocket is never half open. So the connection gets an end of file, may write its last
        packets, and cannot stay open.
        """
        self._deliver_chunks()
        if not self._closing:
            self._connection.eof_received()
        self._begin_close(frame.get_close_code() if frame.payload_size else WSCloseCode.OK, "")
        self._socket.disconnect()

    def _begin_close(self, code: WSCloseCode, reason: str) -> None:
        if self._closing:
            return
        self._closing = True
        self._socket.send_close(code, reason)
        self._stream.resume_reading()  # a paused connection must still see the peer's close frame
        self._deadline = asyncio.get_running_loop().call_later(
            CLOSE_TIMEOUT_SECONDS, self._stream.abort
        )

    # For the connection: the methods of `asyncio.Transport` that it uses.

    def set_protocol(self, connection: ConnectionLike) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Send `data` as one binary frame."""
        if not data or self._closing:
            return
        if len(data) <= MAX_UNCOPIED_BYTES:
            self._socket.send(BINARY, data)
        else:
            self._socket.send_reuse_external_bytearray(
                BINARY, bytearray(FRAME_HEADER_BYTES) + data, FRAME_HEADER_BYTES
            )

    def close(self) -> None:
        """Send buffered output and a close frame; disconnect on the peer's answer or a timeout."""
        if not self.is_closing():
            self._begin_close(WSCloseCode.OK, "")

    def abort(self) -> None:
        self._closing = True
        self._stream.abort()

    def is_closing(self) -> bool:
        return self._closing or self._socket.is_close_frame_sent or self._stream.is_closing()

    def can_write_eof(self) -> bool:
        return False  # the close frame is the end of the stream

    def pause_reading(self) -> None:
        if not self.is_closing():
            self._stream.pause_reading()

    def resume_reading(self) -> None:
        if not self.is_closing():
            self._stream.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> Any:
        return self._stream.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._stream.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._stream.get_write_buffer_size()
