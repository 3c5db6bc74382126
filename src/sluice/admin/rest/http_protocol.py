"""uvicorn's HTTP protocol with a timeout and a size limit for request headers.

The middleware sees a request only when its headers are complete. A client that never completes the
headers, or sends none, must neither hold a connection forever nor fill memory.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTION_KEY: Final = "sluice.connection"  # scope key of the connection of a request
# From the opening of a connection, or the first byte after a response, to complete headers.
HEADER_TIMEOUT_SECONDS: Final = 10.0
# For an idle connection between two requests. Clients keep one for 5 to 60 seconds: with a shorter
# timeout, a request would now and then meet a connection that is just closing, and fail.
KEEP_ALIVE_SECONDS: Final = 65
# Bytes without a body, of headers or of trailers.
MAX_HEADER_BYTES: Final = 65_536


class HttpConnection(HttpToolsProtocol):
    _header_timer: asyncio.TimerHandle | None = None
    _header_bytes = 0  # bytes since the last complete headers or part of a body
    _is_idle = False  # all requests are answered
    _has_partial_request = False  # part of the headers has arrived

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._cancel_timer()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._header_bytes > MAX_HEADER_BYTES:
            self.send_400_response("The headers of the request are too large.")
        elif self._is_idle and self._header_timer is None:
            self._start_timer()

    def on_message_begin(self) -> None:
        self._has_partial_request = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._header_bytes = 0
        self._is_idle = self._has_partial_request = False
        self._cancel_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._is_idle = not self.pipeline
        super().on_response_complete()
        if self._is_idle and self._has_partial_request and not self.transport.is_closing():
            self._start_timer()

    def _start_timer(self) -> None:
        self._cancel_timer()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


async def abort_response(connection: Any) -> None:
    """Cut an unfinishable response, so that the client does not take a part for the whole."""
    if connection is not None:
        connection.transport.abort()
        while not connection.cycle.disconnected:  # noqa: ASYNC110 (polls another process or thread)
            await asyncio.sleep(0.001)
