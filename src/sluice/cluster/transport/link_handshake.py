"""The messages that open a link, before its first frame.

A message is a u16 size and a body. The caller begins with

      "sluice link"   u16 version   u8 purpose
      u16 size, text  three times, if the purpose is LINK: cluster, caller, acceptor

and every message of the acceptor begins with a status: CONTINUE and the content of the message, or
the kind of a refusal and its reason. All versions share the beginning of the caller's message and
the refusals, so that two of them can tell each other why they do not connect. After the proofs of
`link_authentication` an empty message of the acceptor opens the link. The purpose PING gets this
message at once: it only shows that the port is served.

Invariant: a peer that has not authenticated costs at most MAX_UNREAD_BYTES and one read.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sluice.cluster.membership import LINK_PROTOCOL_VERSION
from sluice.cluster.transport.link_authentication import LinkAuthenticationError, LinkCall
from sluice.cluster.transport.link_connection import LinkConnection
from sluice.errors import SluiceError

MAGIC: Final = b"sluice link"
LINK: Final = 1
PING: Final = 2

CONTINUE: Final = 0
REFUSED: Final = 1  # until an operator changes something
NOT_NOW: Final = 2  # the caller should try again
OTHER_INCARNATION: Final = 3  # the node that the caller means is gone

MAX_MESSAGE_BYTES: Final = 4096
MAX_UNREAD_BYTES: Final = 65_536
SAME_VERSION: Final = "Stop every node, then start all of them with the same version of Sluice"


class LinkRefused(SluiceError):
    """A call was refused. The text goes to the caller and into the log."""

    def __init__(self, reason: str, kind: int = REFUSED, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.kind = kind
        self.is_expected = is_expected  # happens whenever a node starts or stops


class HandshakeChannel(asyncio.Protocol):
    """Reads and writes messages on a new connection until a link takes it over."""

    def __init__(self) -> None:
        self.transport: Any = None
        self._received = bytearray()
        self._reader: asyncio.Future[None] | None = None
        self._is_read_paused = False
        self._is_lost = False
        self._fault: Exception | None = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > MAX_UNREAD_BYTES:
            self._is_read_paused = True
            self.transport.pause_reading()
        self._wake_reader()

    def connection_lost(self, fault: Exception | None) -> None:
        self._is_lost = True
        self._fault = fault
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def read(self) -> bytes:
        """Return the next message; raise an OSError if the connection ends before it."""
        while True:
            received = self._received
            size = int.from_bytes(received[:2], "big")
            if len(received) >= 2 and not 0 < size <= MAX_MESSAGE_BYTES:
                raise LinkAuthenticationError(
                    "the peer does not follow the handshake of the link",
                    "Let only nodes of this cluster use this port, all with the same version",
                )
            if len(received) >= 2 + size > 2:
                message = bytes(received[2 : 2 + size])
                del received[: 2 + size]
                return message
            if self._is_lost:
                raise self._fault or ConnectionResetError("the peer has disconnected")
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def write(self, message: bytes) -> None:
        self.transport.write(len(message).to_bytes(2, "big") + message)

    async def read_reply(self) -> bytes:
        """Return the content of the acceptor's next message; raise LinkRefused if it refuses."""
        message = await self.read()
        if message[0] != CONTINUE:
            raise LinkRefused(message[1:].decode(errors="replace"), message[0])
        return message[1:]

    async def write_reply(self, content: bytes) -> None:
        await self.write(bytes([CONTINUE]) + content)

    async def refuse(self, refusal: LinkRefused) -> None:
        """Send a refusal and close."""
        await self.write(bytes([refusal.kind]) + str(refusal).encode()[: MAX_MESSAGE_BYTES - 1])
        self.close()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def hand_over(self, link: LinkConnection) -> None:
        """Give the authenticated connection, with what it has received, to a link."""
        received = bytes(self._received)
        self._received.clear()
        if self._is_lost:
            link.connection_lost(self._fault)
            return
        self.transport.set_protocol(link)
        link.start(self.transport, received)
        if self._is_read_paused and not self.transport.is_closing():
            self.transport.resume_reading()


def encode_greeting(purpose: int, call: LinkCall | None = None) -> bytes:
    """Return the first message of a caller."""
    greeting = MAGIC + LINK_PROTOCOL_VERSION.to_bytes(2, "big") + bytes([purpose])
    for name in (call.cluster, call.caller, call.acceptor) if call is not None else ():
        text = name.encode()
        greeting += len(text).to_bytes(2, "big") + text
    return greeting


def decode_greeting(message: bytes) -> LinkCall | None:
    """Return what a caller asks for, None for a ping; raise LinkRefused."""
    at = len(MAGIC)
    if message[:at] != MAGIC or len(message) < at + 3:
        raise LinkRefused("the caller is not a node of Sluice")
    version = int.from_bytes(message[at : at + 2], "big")
    if version != LINK_PROTOCOL_VERSION:
        raise LinkRefused(
            f"the caller uses version {version} of the protocol between nodes, and this node uses "
            f"version {LINK_PROTOCOL_VERSION}. {SAME_VERSION}"
        )
    purpose = message[at + 2]
    if purpose == PING:
        return None
    if purpose != LINK:
        raise LinkRefused(f"the caller asks for something unknown ({purpose})")
    names = []
    at += 3
    for _ in range(3):
        end = at + 2 + int.from_bytes(message[at : at + 2], "big")
        if at + 2 > len(message) or end > len(message):
            raise LinkRefused("the greeting of the caller is cut off")
        try:
            names.append(message[at + 2 : end].decode())
        except UnicodeDecodeError:
            raise LinkRefused("the greeting of the caller is not UTF-8") from None
        at = end
    if at != len(message):
        raise LinkRefused("the greeting of the caller is too long")
    return LinkCall(*names)
