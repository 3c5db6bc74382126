"""Sockets to a running broker on which a test sends exact bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from sluice.units import Address
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Connack, Connect, Packet, Publish, Suback, Subscribe
from sluice.wire.packets import SubscriptionRequest as Request
from sluice.wire.reader import PacketReader
from tests.support.reason_codes import check_reasons

SECONDS = 15.0
P = TypeVar("P", bound=Packet)


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._reader = PacketReader(268_435_460)
        self._packets: list[Packet] = []

    async def send(self, *packets: Packet | bytes) -> None:
        self.writer.write(
            b"".join(one if isinstance(one, bytes) else encode(one, V5) for one in packets)
        )
        await asyncio.wait_for(self.writer.drain(), SECONDS)

    async def next(self) -> Packet | None:
        """Return the next packet, or None at the end of the connection."""
        async with asyncio.timeout(SECONDS):
            while not self._packets:
                try:
                    data = await self.reader.read(65_536)
                except ConnectionError:
                    return None
                if not data:
                    return None
                packets = self._reader.feed(data, V5)
                check_reasons(packets, V5)
                self._packets += packets
        return self._packets.pop(0)

    async def expect(self, kind: type[P]) -> P:
        packet = await self.next()
        assert isinstance(packet, kind), packet
        return packet

    async def connect(self, client_id: str, keep_alive: int = 0) -> Connack:
        await self.send(Connect(client_id, V5, True, keep_alive))
        return await self.expect(Connack)

    async def subscribe(self, topic_filter: str, qos: int = 0) -> None:
        await self.send(Subscribe(1, [Request(topic_filter.encode(), qos)]))
        await self.expect(Suback)

    async def publish(self, topic: str, payload: bytes) -> None:
        await self.send(Publish(topic.encode(), payload, 0))

    async def wait_closed(self) -> None:
        """Read until the other side closes."""
        while await self.next() is not None:
            pass


@asynccontextmanager
async def connect_raw(
    address: Address, tls: ssl.SSLContext | None = None
) -> AsyncIterator[RawConnection]:
    reader, writer = await asyncio.wait_for(
        asyncio.open_connection(address.host, address.port, ssl=tls, limit=65_536), SECONDS
    )
    try:
        yield RawConnection(reader, writer)
    finally:
        writer.transport.abort()
