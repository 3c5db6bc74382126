"""Claims a client id at its home cell for a session that lives where its client is connected.

A session that ends with its connection needs nothing of the cell of its client id but the id. So
it lives in a cell of the node that the client has chosen, and claims the id with the CONNECT of a
session proxy: with clean start, which ends every earlier session of the client, and with a token.
The claim is held by the stream: when another connection gets the id, a DISCONNECT arrives on it.
After a broken stream the proxy claims the id again, and loses it if another session has it by now.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from sluice.broker.routing import CLIENT_CLAIM, ClientClaim
from sluice.cluster.transport import PROXY_GREETING, StreamProtocol, StreamTransport
from sluice.errors import ProtocolViolation
from sluice.wire.decode import decode
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connack, Connect
from sluice.wire.reader import PacketReader
from sluice.wire.reasons import SERVER_BUSY, SERVER_UNAVAILABLE

if TYPE_CHECKING:
    from sluice.broker.ports import ConnectionPort

CLAIM_SECONDS: Final = 8.0  # how long a client waits for the owner of its client id
RETRY_SECONDS: Final = 0.05
NOT_AVAILABLE: Final = (
    "the part of the cluster that has this client id is not available: connect again"
)


class ClaimNode(Protocol):
    """What a claim needs of its node."""

    def now(self) -> float: ...
    def warn(self, text: str) -> None: ...
    def dial(self, cell: int, greeting: bytes, protocol: StreamProtocol) -> None: ...


class ClaimHolder(Protocol):
    """The session proxy that takes a claim over."""

    def adopt(self, claim: str, receive_maximum: int, transport: StreamTransport) -> None: ...
    def data_received(self, data: bytes) -> None: ...


class RemoteClientClaim(ClientClaim):
    """A claim, until a session proxy takes it over; then the proxy has its stream."""

    def __init__(
        self,
        node: ClaimNode,
        cell: int,
        connection: ConnectionPort,
        connect: Connect,
        is_named: bool,
        on_done: Callable[[int, str], None],
    ) -> None:
        self.cell = cell
        self.value = secrets.token_hex(8) + (" named" if is_named else "")
        connect.properties.user.append((CLIENT_CLAIM, self.value))
        self.receive_maximum = 0  # of that cell; 0: not stated
        self._node = node
        self._connection = connection  # of the client
        self._connect = connect
        self._on_done = on_done
        self._is_done = False
        self._transport: StreamTransport | None = None
        self._reader = PacketReader()
        self._proxy: ClaimHolder | None = None
        self._deadline = node.now() + CLAIM_SECONDS
        self._dial()

    def _dial(self) -> None:
        if not self._has_ended():
            self._node.dial(self.cell, PROXY_GREETING, self)

    def _has_ended(self) -> bool:
        """Return whether the claim is decided, or must not be made because the client is gone.

        A late CONNECT would take over the session of the client's next connection.
        """
        return self._is_done or self._connection.closing or self._connection.lost

    def hand_over(self, proxy: ClaimHolder) -> None:
        """Give the stream that holds the claim to the proxy of the session."""
        transport, self._transport = self._transport, None
        self._proxy = proxy
        if transport is not None:
            proxy.adopt(self.value, self.receive_maximum, transport)

    def release(self) -> None:
        self._is_done = True
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()

    def _finish(self, reason: int, reason_string: str) -> None:
        if not self._is_done:
            self._is_done = True
            self._on_done(reason, reason_string)

    # ---- the stream

    def connection_made(self, transport: StreamTransport) -> None:
        if self._has_ended():
            transport.close()
            return
        self._transport = transport
        self._reader = PacketReader()
        transport.write(encode(self._connect, V5))

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if self._is_done or not reader.begin(data):
            return
        try:
            if not reader.advance():
                return
            data = reader.data
            packet = decode(data, reader.head, reader.body, reader.end, V5)
        except ProtocolViolation as fault:
            self._node.warn(f"malformed answer to a claim from cell {self.cell}: {fault}")
            self._close()
            return
        if not isinstance(packet, Connack):
            self._close()  # DISCONNECT: that cell moves
        elif packet.reason not in (SERVER_BUSY, SERVER_UNAVAILABLE):
            properties = packet.properties
            text = properties.reason_string if properties is not None else None
            self.receive_maximum = int(properties.receive_maximum or 0) if properties else 0
            self._finish(packet.reason, text or "")
            proxy, rest = self._proxy, data[reader.end :]
            if proxy is not None and rest:
                proxy.data_received(rest)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        self._transport = None
        if self._has_ended():
            return
        if self._node.now() < self._deadline:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._dial)
        else:
            self._finish(SERVER_BUSY, NOT_AVAILABLE)

    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...
