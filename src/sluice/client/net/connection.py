"""One socket and the protocol behind it. It moves bytes and keeps time; every decision is the protocol's.

Nothing here is a task: the transport calls in, output leaves by one `call_soon` per turn, and one timer looks after
the keep-alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from sluice.client.errors import ConnectFailed, ConnectionLost, SubscribeRefused
from sluice.client.net.receive_buffer import Inbox
from sluice.client.protocol.keepalive import KeepAlive, Verdict
from sluice.client.message import Message
from sluice.client.protocol.write_buffer import nobody
from sluice.client.protocol.client_protocol import ClientProtocol, Connected, Refused
from sluice.client.net.dispatcher import Switch

WRITE_BUFFER = 256 * 1024


class Connection(asyncio.Protocol):
    """`opened` is answered by the CONNACK, `closed` when the socket is gone; both hold an outcome, not an exception."""

    def __init__(
        self,
        protocol: ClientProtocol,
        inbox: Inbox[Message],
        switch: Switch,
        when_answered: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Connected | Exception] = loop.create_future()
        self.closed: asyncio.Future[ConnectionLost | SubscribeRefused] = loop.create_future()
        self._loop = loop
        self._protocol = protocol
        self._inbox = inbox
        self._switch = switch
        self._when_answered = when_answered
        self._transport: asyncio.Transport | None = None
        self._fault: ConnectionLost | SubscribeRefused | None = None
        self._keep_alive: KeepAlive | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reading = True
        self._ending = False
        self._attached = False

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no asyncio.Transport
        if self._ending:
            self._transport.abort()  # given up while the socket was being made
            return
        self._attached = True
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER)
        self._protocol.output.wake = self._schedule_flush
        self._protocol.open()

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        if self._keep_alive is not None:
            self._keep_alive.heard(self._loop.time())
        inbox = self._inbox
        switch = self._switch
        overflowing = inbox.overflowing
        for event in self._protocol.receive(data):
            if isinstance(event, Message):
                receiver = switch.find(event.topic) if switch else None
                if receiver is not None:
                    receiver.receive(event)
                elif overflowing and event.qos == 0:
                    inbox.dropped += 1
                else:
                    inbox.put(event)
            elif isinstance(event, Connected):
                self._begin(event)
            elif isinstance(event, Refused):
                self._settle_opened(event.error)
                self.close()
            else:
                self._fault = event.error
                self.close()
        self._when_answered()
        if inbox.full and not self._protocol.awaiting:
            self.pause_reading()

    def pause_writing(self) -> None:
        self._protocol.outbox.paused = True

    def resume_writing(self) -> None:
        self._protocol.outbox.paused = False
        self._protocol.outbox.pump()
        self._when_answered()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, cause: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ending = True
        self._detach()
        fault = self._fault
        if fault is None:
            fault = ConnectionLost(
                f"the line went dead: {cause}" if cause else "the server closed the connection"
            )
            fault.__cause__ = cause
        if not self.opened.done():
            self.opened.set_result(self._failed(fault))
        if not self.closed.done():
            self.closed.set_result(fault)

    # Called by the client

    def close(self) -> None:
        """Write what is left to say, then close the socket; `closed` tells when."""
        if self._transport is None or self._transport.is_closing():
            return
        self._flush()
        self._ending = True
        self._transport.close()

    def finish(self) -> None:
        """Say the last words and let the server close: a socket closed on unread bytes is reset, and a reset can
        overtake the DISCONNECT, so that the server would publish our will. `closed` tells when."""
        if self._transport is None or self._transport.is_closing():
            return
        self._flush()
        self.resume_reading()
        self._ending = True
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        """Close the socket now, whatever is left to say."""
        self._ending = True
        self._detach()
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self._reading and not self._ending and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._reading and not self._ending and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()

    @property
    def reading(self) -> bool:
        return self._reading

    # Its own

    def _detach(self) -> None:
        """Tell the protocol that this connection is lost: once, for by the time the transport says so the protocol
        may serve the next connection."""
        if self._attached:
            self._attached = False
            self._protocol.output.wake = nobody
            self._protocol.lost()

    def _begin(self, event: Connected) -> None:
        for receiver in self._switch.receivers():
            receiver.line_is_new()
            if not event.session_present:
                receiver.session_lost()
        seconds = event.server.keep_alive
        if seconds is None:
            seconds = self._protocol.options.keep_alive
        if seconds:
            self._keep_alive = KeepAlive(seconds, self._loop.time())
            self._timer = self._loop.call_at(self._keep_alive.next_look(), self._look)
        self._settle_opened(event)

    def _settle_opened(self, outcome: Connected | Exception) -> None:
        if not self.opened.done():
            self.opened.set_result(outcome)

    def _failed(self, fault: ConnectionLost | SubscribeRefused) -> Exception:
        if isinstance(fault, ConnectionLost) and fault.reason is None:
            failed = ConnectFailed(
                f"{fault.what} before it accepted the client",
                "Check that an MQTT server listens on this port",
            )
            failed.__cause__ = fault
            return failed
        return fault

    def _look(self) -> None:
        """Judge the keep-alive."""
        assert self._keep_alive is not None
        now = self._loop.time()
        if not self._reading:
            self._keep_alive.excuse(now)
        verdict = self._keep_alive.judge(now)
        if verdict is Verdict.DEAD:
            self._fault = ConnectionLost(
                f"the server was silent for {now - self._keep_alive.heard_at:.1f} seconds"
            )
            self.abort()
            return
        if verdict is Verdict.PING:
            self._protocol.ping()
            self._keep_alive.sent_at = now
        self._timer = self._loop.call_at(self._keep_alive.next_look(), self._look)

    def _schedule_flush(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """One write for everything said in this turn; what did not fit in it follows in the next."""
        if self._ending or self._transport is None:
            return
        data = self._protocol.output.take()
        if not data:
            return
        if self._keep_alive is not None:
            self._keep_alive.sent_at = self._loop.time()
        self._transport.write(data)
        if self._protocol.outbox.waiting:
            self._protocol.outbox.pump()
            self._when_answered()
