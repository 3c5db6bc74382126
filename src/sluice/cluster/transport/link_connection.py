"""One established link: a mux on a socket, in either direction, after both ends are authenticated.

An asyncio protocol on the broker's loop: no thread and no task passes a message on. Everything that
the streams write in one turn leaves in one write. Heartbeats keep the link alive and reveal a peer
that vanished without closing the connection. Memory is bounded: the mux limits what is read and
what streams write, and a peer that makes us answer without reading the answers is disconnected.

It knows neither nodes nor the handshake; `peer_links` starts a link and ends it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from sluice.cluster.transport.mux import (
    GOODBYE,
    HEARTBEAT,
    MAX_PENDING_BYTES,
    MAX_REASON_BYTES,
    LinkEndedByPeer,
    Mux,
    MuxProtocolError,
)
from sluice.cluster.transport.streams import AcceptStream, StreamLost

log = logging.getLogger(__name__)

SOCKET_BUFFER_BYTES: Final = 1 << 20  # written and not yet sent, from which on the mux collects
# Only frames that answer the peer's own can exceed MAX_PENDING_BYTES, for streams stop there.
MAX_UNSENT_BYTES: Final = 4 * MAX_PENDING_BYTES
CLOSE_SECONDS: Final = 5.0  # for the peer to read what was written before the end
# A link that received nothing for this many times `silence` is broken.
STALE_SILENCES: Final = 3.0


class LinkConnection:
    """A link with the node `peer`. The mux collects output before the link has started."""

    def __init__(
        self,
        peer: str,
        accept: AcceptStream | None,
        heartbeat: float,
        silence: float,
        on_received: Callable[[str], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.peer = peer
        self.mux = Mux(self._on_output, accept, loop.call_soon, peer)
        # Done when the link has ended; its owner then calls `fail_streams`.
        self.ended: Any = loop.create_future()
        self._loop: Any = loop
        self._transport: Any = None
        self._on_received = on_received
        self._heartbeat = heartbeat
        # Counted in heartbeats and not by the clock: while this process itself is suspended, its
        # timers do not run, and unread data is no silence.
        self._max_silent_ticks = max(2, int(STALE_SILENCES * silence / heartbeat))
        self._silent_ticks = 0
        self._timer: Any = None
        self._is_flush_scheduled = False
        self._is_write_paused = False
        self._is_ended = False
        self._end_reason = ""

    def start(self, transport: Any, received: bytes) -> None:
        """Begin to use an authenticated connection; `received` are its first bytes."""
        if self._is_ended:
            transport.abort()
            return
        self._transport = transport
        transport.set_write_buffer_limits(SOCKET_BUFFER_BYTES)
        self._tick()
        self._flush()
        if received:
            self.data_received(received)

    def end(self, reason: str) -> None:
        """End the link: send what is written, tell the peer the reason, and close."""
        if self._is_ended:
            return
        self._set_ended(reason)
        transport = self._transport
        if transport is not None:
            if not self._is_write_paused:
                self.mux.send(GOODBYE, 0, reason.encode()[:MAX_REASON_BYTES])
                transport.write(self.mux.take_output())
            self._close(transport)

    def _close(self, transport: Any) -> None:
        self._transport = None
        transport.close()
        self._loop.call_later(CLOSE_SECONDS, transport.abort)

    def fail_streams(self) -> None:
        """End the streams with the link."""
        self._set_ended("")
        self.mux.fail(StreamLost(self._end_reason or f"the link to node {self.peer} is broken"))

    def _set_ended(self, reason: str) -> None:
        self._is_ended = True
        self._end_reason = self._end_reason or reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.ended.done():
            self.ended.set_result(None)

    # ---- the asyncio protocol

    def connection_made(self, transport: Any) -> None:
        """Do nothing: the handshake had the connection before."""

    def data_received(self, data: bytes) -> None:
        if self._is_ended:
            return
        self._silent_ticks = 0
        self._on_received(self.peer)
        try:
            self.mux.receive(data)
        except LinkEndedByPeer as goodbye:
            log.info("link ended", extra={"node": self.peer, "reason": str(goodbye)})
            self._set_ended(f"node {self.peer} has ended the link: {goodbye}")
            self._close(self._transport)
        except MuxProtocolError as fault:
            log.error("link failed", extra={"node": self.peer, "reason": str(fault)})
            self.end(str(fault))
        except Exception:
            log.exception("link failed", extra={"node": self.peer})
            self.end("an internal error")
        else:
            if self.mux.pending_bytes > MAX_UNSENT_BYTES:
                log.error("link failed", extra={"node": self.peer, "reason": "reads too slowly"})
                self.end("the peer does not read the answers to its frames")

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._is_write_paused = True

    def resume_writing(self) -> None:
        self._is_write_paused = False
        self._flush()

    def connection_lost(self, fault: Exception | None) -> None:
        self._transport = None
        self._set_ended("")

    # ---- output

    def _on_output(self) -> None:
        if self._transport is not None and not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        transport = self._transport
        if transport is not None and not self._is_write_paused:
            output = self.mux.take_output()
            if output:
                transport.write(output)

    def _tick(self) -> None:
        """Send a heartbeat, and end a link without any for long: a new one may get through."""
        self._timer = None
        if self._is_ended:
            return
        self._silent_ticks += 1
        if self._silent_ticks > self._max_silent_ticks:
            self.end(f"node {self.peer} is silent")
            return
        self.mux.send(HEARTBEAT, 0)
        self._timer = self._loop.call_later(self._heartbeat, self._tick)
