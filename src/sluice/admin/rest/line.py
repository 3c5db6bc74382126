"""One HTTP connection as uvicorn has it, with an end to its patience before it knows what is asked.

The gate judges requests, and sees none before its head is whole. A caller who never ends a head, or sends none at all,
must cost neither a place among the connections for ever nor memory without end.
"""

from __future__ import annotations

import asyncio
from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS: Final = 10.0  # from the opening of a connection, or from an answer, to the end of the next head
HEAD_BYTES: Final = 65_536  # that may come at a stretch without being a body: of a head, or of trailers


class Line(HttpToolsProtocol):
    _patience: asyncio.TimerHandle | None = None
    _loose = 0  # bytes since the last whole head or piece of a body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._wait_no_more()

    def data_received(self, data: bytes) -> None:
        self._loose += len(data)
        super().data_received(data)
        if self._loose > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the request is too large.")

    def on_headers_complete(self) -> None:
        self._loose = 0
        self._wait_no_more()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._loose = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        super().on_response_complete()
        if is_last and not self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        self._wait_no_more()
        self._patience = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _wait_no_more(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
