"""One HTTP connection as uvicorn has it, with an end to its patience before it knows what is asked.

The gate judges requests, and sees none before its head is whole. A caller who never ends a head, or sends none at all,
must cost neither a place among the connections for ever nor memory without end.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTION: Final = "sluice.connection"  # where the scope of a request has its connection
HEAD_SECONDS: Final = (
    10.0  # from the opening of a connection, or from the first byte behind an answer, to a whole head
)
# A connection that rests between two requests. Clients keep one for 5 to 60 seconds: with less patience than theirs, a
# request would now and then meet a door that is just closing, and fail.
IDLE_SECONDS: Final = 65
HEAD_BYTES: Final = 65_536  # that may come at a stretch without being a body: of a head, or of trailers


class Line(HttpToolsProtocol):
    _patience: asyncio.TimerHandle | None = None
    _loose = 0  # bytes since the last whole head or piece of a body
    _rests = False  # all that was asked is answered
    _begun = False  # part of a head is there

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def data_received(self, data: bytes) -> None:
        self._loose += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._loose > HEAD_BYTES:
            self.send_400_response("The head of the request is too large.")
        elif self._rests and self._patience is None:
            self._wait()

    def on_message_begin(self) -> None:
        self._begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._loose = 0
        self._rests = self._begun = False
        self._wait_no_more()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._loose = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._rests = not self.pipeline
        super().on_response_complete()
        if self._rests and self._begun and not self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        self._wait_no_more()
        self._patience = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


async def cut_off(connection: Any) -> None:
    """End an answer that has begun and cannot be finished, so that nobody takes a part for the whole."""
    if connection is not None:
        connection.transport.abort()
        while not connection.cycle.disconnected:  # noqa: ASYNC110 the server would call it our fault
            await asyncio.sleep(0.001)
