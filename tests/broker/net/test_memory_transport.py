"""Connections within one process behave as sockets do: order, pauses, orderly and sudden ends."""

from __future__ import annotations

import asyncio

from sluice.broker.net.memory_transport import MemoryTransport, connect_in_memory


class End:
    """A protocol that records what happens to it."""

    def __init__(self) -> None:
        self.reads: list[bytes] = []
        self.events: list[str] = []
        self.transport: MemoryTransport

    def connection_made(self, transport: MemoryTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.reads.append(data)

    def connection_lost(self, fault: Exception | None) -> None:
        self.events.append(f"lost {type(fault).__name__}" if fault else "lost")

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")


def connect() -> tuple[End, End]:
    dialer, acceptor = End(), End()
    call_soon = asyncio.get_running_loop().call_soon
    connect_in_memory(dialer, acceptor, call_soon, {"peername": ("10.0.0.1", 7)})
    return dialer, acceptor


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_bytes_of_one_turn_are_read_in_one_piece_in_the_next() -> None:
    dialer, acceptor = connect()
    dialer.transport.write(b"one")
    dialer.transport.write(b"")
    dialer.transport.write(b"two")
    assert acceptor.reads == []
    await turn()
    dialer.transport.write(b"three")
    await turn()
    assert acceptor.reads == [b"onetwo", b"three"]
    assert dialer.reads == []


async def test_acceptor_sees_the_address_of_the_dialer() -> None:
    dialer, acceptor = connect()
    assert acceptor.transport.get_extra_info("peername") == ("10.0.0.1", 7)
    assert acceptor.transport.get_extra_info("socket", "none") == "none"
    assert dialer.transport.get_extra_info("peername") is None


async def test_paused_reader_pauses_the_writer() -> None:
    dialer, acceptor = connect()
    dialer.transport.set_write_buffer_limits(high=10)
    acceptor.transport.pause_reading()
    dialer.transport.write(bytes(10))
    assert dialer.events == []
    dialer.transport.write(b"x")
    await turn()
    assert dialer.events == ["pause"]
    assert acceptor.reads == []
    assert dialer.transport.get_write_buffer_size() == 11
    acceptor.transport.resume_reading()
    await turn()
    assert dialer.events == ["pause", "resume"]
    assert acceptor.reads == [bytes(10) + b"x"]
    assert dialer.transport.get_write_buffer_size() == 0


async def test_closed_connection_delivers_everything_written_before() -> None:
    dialer, acceptor = connect()
    acceptor.transport.pause_reading()
    dialer.transport.write(b"last")
    dialer.transport.close()
    dialer.transport.write(b"too late")
    await turn()
    assert dialer.events == ["lost"]
    assert acceptor.events == []
    acceptor.transport.resume_reading()
    await turn()
    assert (acceptor.reads, acceptor.events) == ([b"last"], ["lost"])
    assert acceptor.transport.is_closing()


async def test_aborted_connection_loses_unread_bytes() -> None:
    dialer, acceptor = connect()
    dialer.transport.write(b"lost")
    dialer.transport.abort()
    await turn()
    assert dialer.events == ["lost"]
    assert (acceptor.reads, acceptor.events) == ([], ["lost ConnectionResetError"])
