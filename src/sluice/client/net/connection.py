"""One socket of the client. It moves bytes and runs timers; the protocol makes every decision.

There is no task here: the transport calls in, output leaves by one `call_soon` per turn, and one
timer checks the keep-alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from sluice.client.errors import ConnectFailed, ConnectionLost, SubscribeRefused
from sluice.client.message import Message
from sluice.client.net.dispatcher import TopicDispatcher
from sluice.client.net.receive_buffer import ReceiveBuffer
from sluice.client.protocol import (
    ClientProtocol,
    ConnectDenied,
    Connected,
    KeepAlive,
    KeepAliveAction,
    ignore_wake,
)

WRITE_BUFFER_BYTES = 256 * 1024


class Connection(asyncio.Protocol):
    """A connection. `opened` is set by the CONNACK, `closed` when the socket is closed.

    Both futures hold an outcome and never an exception.
    """

    def __init__(
        self,
        protocol: ClientProtocol,
        buffer: ReceiveBuffer[Message],
        dispatcher: TopicDispatcher,
        on_progress: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[Connected | Exception] = loop.create_future()
        self.closed: asyncio.Future[ConnectionLost | SubscribeRefused] = loop.create_future()
        self._loop = loop
        self._protocol = protocol
        self._buffer = buffer
        self._dispatcher = dispatcher
        self._on_progress = on_progress
        self._transport: asyncio.Transport | None = None
        self._fault: ConnectionLost | SubscribeRefused | None = None
        self._keep_alive: KeepAlive | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_reading = True
        self._is_ending = False
        self._is_attached = False

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        if self._is_ending:
            self._transport.abort()  # closed while the socket was being opened
            return
        self._is_attached = True
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self._protocol.write_buffer.wake = self._schedule_flush
        self._protocol.open()

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        if self._keep_alive is not None:
            self._keep_alive.on_received(self._loop.time())
        buffer = self._buffer
        dispatcher = self._dispatcher
        overflowing = buffer.is_overflowing
        for event in self._protocol.receive(data):
            if isinstance(event, Message):
                receiver = dispatcher.find(event.topic) if dispatcher else None
                if receiver is not None:
                    receiver.receive(event)
                elif overflowing and event.qos == 0:
                    buffer.dropped += 1
                else:
                    buffer.put(event)
            elif isinstance(event, Connected):
                self._on_connected(event)
            elif isinstance(event, ConnectDenied):
                self._set_opened(event.error)
                self.close()
            else:
                self._fault = event.error
                self.close()
        self._on_progress()
        if buffer.is_full and not self._protocol.is_awaiting_answers:
            self.pause_reading()

    def pause_writing(self) -> None:
        self._protocol.outbound.is_paused = True

    def resume_writing(self) -> None:
        self._protocol.outbound.is_paused = False
        self._protocol.outbound.send_waiting()
        self._on_progress()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, cause: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._is_ending = True
        self._detach()
        fault = self._fault
        if fault is None:
            fault = ConnectionLost(
                f"the connection broke: {cause}" if cause else "the server closed the connection"
            )
            fault.__cause__ = cause
        if not self.opened.done():
            self.opened.set_result(self._connect_failure(fault))
        if not self.closed.done():
            self.closed.set_result(fault)

    # Called by the client

    def close(self) -> None:
        """Write pending output, then close the socket; `closed` is set afterwards."""
        if self._transport is None or self._transport.is_closing():
            return
        self._flush()
        self._is_ending = True
        self._transport.close()

    def close_gracefully(self) -> None:
        """Write pending output and let the server close; `closed` is set afterwards.

        A socket that is closed with unread bytes is reset, and a reset can overtake the DISCONNECT,
        so that the server would publish the will.
        """
        if self._transport is None or self._transport.is_closing():
            return
        self._flush()
        self.resume_reading()
        self._is_ending = True
        if self._transport.can_write_eof():
            self._transport.write_eof()

    def abort(self) -> None:
        """Close the socket at once and drop pending output."""
        self._is_ending = True
        self._detach()
        if self._transport is not None:
            self._transport.abort()

    def pause_reading(self) -> None:
        if self._is_reading and not self._is_ending and self._transport is not None:
            self._is_reading = False
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self._is_reading and not self._is_ending and self._transport is not None:
            self._is_reading = True
            self._transport.resume_reading()

    @property
    def is_reading(self) -> bool:
        return self._is_reading

    # Internals

    def _detach(self) -> None:
        """Report the loss to the protocol, once.

        When the transport reports it later, the protocol may serve the next connection already.
        """
        if self._is_attached:
            self._is_attached = False
            self._protocol.write_buffer.wake = ignore_wake
            self._protocol.connection_lost()

    def _on_connected(self, event: Connected) -> None:
        for receiver in self._dispatcher.receivers():
            receiver.on_reconnected()
            if not event.session_present:
                receiver.on_session_lost()
        seconds = event.server.keep_alive
        if seconds is None:
            seconds = self._protocol.options.keep_alive
        if seconds:
            self._keep_alive = KeepAlive(seconds, self._loop.time())
            self._timer = self._loop.call_at(
                self._keep_alive.next_check_at(), self._check_keep_alive
            )
        self._set_opened(event)

    def _set_opened(self, outcome: Connected | Exception) -> None:
        if not self.opened.done():
            self.opened.set_result(outcome)

    def _connect_failure(self, fault: ConnectionLost | SubscribeRefused) -> Exception:
        if isinstance(fault, ConnectionLost) and fault.reason is None:
            failed = ConnectFailed(
                f"{fault.what} before it accepted the client",
                "Check that an MQTT server listens on this port",
            )
            failed.__cause__ = fault
            return failed
        return fault

    def _check_keep_alive(self) -> None:
        """Send a ping or end the connection, as the keep-alive requires."""
        assert self._keep_alive is not None
        now = self._loop.time()
        if not self._is_reading:
            self._keep_alive.reset_silence(now)
        action = self._keep_alive.check(now)
        if action is KeepAliveAction.TIMED_OUT:
            self._fault = ConnectionLost(
                f"the server was silent for {now - self._keep_alive.received_at:.1f} seconds"
            )
            self.abort()
            return
        if action is KeepAliveAction.PING:
            self._protocol.ping()
            self._keep_alive.sent_at = now
        self._timer = self._loop.call_at(self._keep_alive.next_check_at(), self._check_keep_alive)

    def _schedule_flush(self) -> None:
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Write all output of this turn at once; output that did not fit follows in the next."""
        if self._is_ending or self._transport is None:
            return
        data = self._protocol.write_buffer.take_bytes()
        if not data:
            return
        if self._keep_alive is not None:
            self._keep_alive.sent_at = self._loop.time()
        self._transport.write(data)
        if self._protocol.outbound.waiting:
            self._protocol.outbound.send_waiting()
            self._on_progress()
