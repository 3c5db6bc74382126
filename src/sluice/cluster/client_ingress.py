"""Entry point of clients: reads CONNECT to choose the cell of the session, then passes the socket.

A session that outlives its connection, or has a will, is in the cell of its client id. Any other
may be in any cell, so it is in one of this node; the cell claims the client id. A cell
of this node gets the socket itself and serves the client as a single broker does. For a cell of
another node, the ingress forwards the bytes, including CONNECT, over a stream, in both directions
and at the speed of the slower end.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Final, cast

from sluice.cluster.transport import StreamTransport, make_greeting
from sluice.errors import ProtocolViolation
from sluice.placement import cell_of
from sluice.wire.decode import decode
from sluice.wire.encode import encode
from sluice.wire.packets import V5, V311, Connack, Connect, Packet
from sluice.wire.properties import CONNECT, Properties
from sluice.wire.reader import PacketReader
from sluice.wire.reasons import SERVER_BUSY

if TYPE_CHECKING:
    from sluice.cluster.cell import Cell
    from sluice.cluster.node import Node

OWNER_WAIT_SECONDS: Final = 8.0  # how long a client waits for an owner of its cell
RETRY_SECONDS: Final = 0.05  # between two attempts to find an owner


class ClientIngress:
    """The protocol of a new socket.

    `connect_timeout` is the time in seconds until the whole CONNECT must have arrived.
    """

    def __init__(self, node: Node, max_packet_size: int, connect_timeout: float) -> None:
        self._node = node
        self._max_packet_size = max_packet_size
        self._connect_timeout = connect_timeout
        self._transport: Any = None
        self._buffer = b""
        self._version = V5
        self._cell = -1  # the cell of the client, once it is known
        self._tunnel: Tunnel | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = 0.0

    # ---- the socket

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._timer = asyncio.get_running_loop().call_later(self._connect_timeout, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._tunnel is not None:
            self._tunnel.send(data)
            return
        self._buffer += data
        if self._cell < 0 and self._find_cell():
            if self._timer is not None:
                self._timer.cancel()
            self._deadline = asyncio.get_running_loop().time() + OWNER_WAIT_SECONDS
            self._transport.pause_reading()
            self._route()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport = None
        if self._tunnel is not None:
            self._tunnel.end(fault)

    def pause_writing(self) -> None:
        if self._tunnel is not None:
            self._tunnel.set_reading(False)

    def resume_writing(self) -> None:
        if self._tunnel is not None:
            self._tunnel.set_reading(True)

    # ---- routing

    def _find_cell(self) -> bool:
        """Choose the cell of the session; return False if CONNECT is still incomplete.

        A client without a valid CONNECT or client id may use any local cell.
        """
        packet: Packet | None = None
        reader = PacketReader(self._max_packet_size)
        try:
            reader.begin(self._buffer)
            if reader.advance():
                packet = decode(reader.data, reader.head, reader.body, reader.end, V5)
            elif self._buffer[0] >> 4 == CONNECT:
                return False
        except ProtocolViolation:
            pass
        client_id = ""
        if isinstance(packet, Connect):
            self._version = packet.version
            client_id = packet.client_id
        local = sorted(self._node.local_cells)
        if client_id:
            self._cell = cell_of(client_id, self._node.cells)
            if local and self._cell not in self._node.local_cells and _ends_with_connection(packet):
                self._cell = local[cell_of(client_id, len(local))]
        elif local:
            self._cell = random.choice(local)
        else:
            self._cell = random.randrange(self._node.cells)
        return True

    def _route(self) -> None:
        if self._transport is None:
            return
        here = self._node.local_cells.get(self._cell)
        if here is not None:
            self._hand_over(here)
        elif self._node.owner_of(self._cell) is None:
            self.retry()
        else:
            self._tunnel = Tunnel(self, self._buffer)
            self._node.dial(self._cell, make_greeting(self._transport), self._tunnel)

    def _hand_over(self, cell: Cell) -> None:
        connection = cell.broker.connect()
        transport, self._transport = self._transport, None
        transport.set_protocol(cast(Any, connection))
        connection.connection_made(transport)
        transport.resume_reading()
        connection.data_received(self._buffer)

    def retry(self) -> None:
        """Route again later, or refuse the client when the deadline has passed."""
        self._tunnel = None
        loop = asyncio.get_running_loop()
        if loop.time() < self._deadline:
            self._timer = loop.call_later(RETRY_SECONDS, self._route)
        elif self._transport is not None:
            properties = Properties()
            properties.reason_string = (
                "the part of the cluster that serves this client is not available: connect again"
            )
            version = V5 if self._version == V5 else V311
            self._transport.write(encode(Connack(False, SERVER_BUSY, properties), version))
            self._transport.close()

    # ---- the tunnel

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _ends_with_connection(packet: Packet | None) -> bool:
    """Return whether a CONNECT opens a session that nothing of is left after its connection.

    A will is left. In the cell of the client id it survives the node that the client is connected
    to, unless this is the same node.
    """
    return (
        isinstance(packet, Connect)
        and packet.clean_start
        and not packet.properties.session_expiry
        and packet.will is None
    )


class Tunnel:
    """The local end of the stream that carries a client's bytes to another node."""

    def __init__(self, ingress: ClientIngress, buffer: bytes) -> None:
        self._ingress = ingress
        self._buffer = buffer
        self._transport: StreamTransport | None = None
        self._is_ended = False

    def connection_made(self, transport: StreamTransport) -> None:
        if self._is_ended:
            # A late CONNECT would take over the session from the client's next connection.
            transport.abort()
            return
        self._transport = transport
        transport.write(self._buffer)
        self._buffer = b""
        self._ingress.resume_reading()

    def data_received(self, data: bytes) -> None:
        self._ingress.write(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, fault: BaseException | None) -> None:
        if self._transport is None:
            self._ingress.retry()
        else:
            self._transport = None
            self._ingress.close()

    def pause_writing(self) -> None:
        self._ingress.pause_reading()

    def resume_writing(self) -> None:
        self._ingress.resume_reading()

    def send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
        else:
            self._buffer += data

    def set_reading(self, is_reading: bool) -> None:
        if self._transport is not None:
            if is_reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def end(self, fault: BaseException | None) -> None:
        """End the tunnel, because the client has disconnected."""
        self._is_ended = True
        if self._transport is not None:
            if fault is None:
                self._transport.close()
            else:
                self._transport.abort()
