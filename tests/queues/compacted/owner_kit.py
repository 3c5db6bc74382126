"""Owners of exclusive queues and those who write to them: the words in which their tests speak."""

from __future__ import annotations

from sluice.message import Message
from sluice.queues.compacted.owner import Owner
from sluice.queues.ports import Reader
from tests.queues.kit import EngineUnderTest


class Taker(Reader):
    """An owner that is subscribed, and keeps what it is given until the test acknowledges it."""

    def __init__(self, bench: EngineUnderTest, window: int) -> None:
        super().__init__()
        self.bench = bench
        self.window = window
        self.inbox: list[tuple[int, bytes, bytes]] = []  # sequence, key and value of what is not acknowledged
        self.got: list[bytes] = []
        self.sequences: list[int] = []  # everything it was ever given

    def room(self) -> int:
        return self.window - len(self.inbox)

    def deliver(self, seq: int, message: Message) -> None:
        self.inbox.append((int(seq), message.key, message.payload))
        self.got.append(message.payload)
        self.sequences.append(int(seq))

    def take(self) -> list[bytes]:
        """Acknowledge until nothing more comes; the values in order."""
        taken: list[bytes] = []
        self.bench.settle_down()
        while self.inbox:
            taken.append(self.ack())
        return taken

    def ack(self, nth: int = 0) -> bytes:
        seq, _, value = self.inbox.pop(nth)
        self.bench.engine.exclusive.ack(self, seq, self.epoch, self.bench.loop.now)
        self.bench.settle_down()
        return value

    def values(self) -> list[bytes]:
        self.bench.settle_down()
        return [value for _, _, value in self.inbox]


def write(
    bench: EngineUnderTest, client: str, key: bytes, value: bytes, ttl: float = 0.0, at_once: bool = True
) -> Owner:
    """Write a value, and let the frame be kept."""
    message = Message(value, b"", key)
    if ttl:
        message.expires = int(bench.loop.now + ttl)
    bench.engine.now = bench.loop.now
    owner = bench.engine.exclusive.publish(client, message, bench.loop.now)
    if at_once:
        bench.settle_down()
    return owner


def subscribe(bench: EngineUnderTest, client: str, window: int = 100) -> Taker:
    taker = Taker(bench, window)
    bench.engine.now = bench.loop.now
    bench.engine.exclusive.join(taker, client, bench.loop.now)
    bench.settle_down()
    return taker


def leave(bench: EngineUnderTest, taker: Taker) -> None:
    bench.engine.exclusive.leave(taker)
    bench.settle_down()


def seek(bench: EngineUnderTest, client: str, behind: int) -> None:
    owner = bench.engine.exclusive.owners[client]
    if owner.reader is not None and isinstance(owner.reader, Taker):
        owner.reader.inbox.clear()
    bench.engine.exclusive.seek(owner, behind, bench.loop.now)
    bench.settle_down()


def kept(bench: EngineUnderTest, client: str) -> dict[bytes, bytes]:
    """What is kept of an owner, by key, read from the store."""
    owner = bench.engine.exclusive.owners[client]
    addresses: list[int] = []
    slot = owner.after(0)
    while slot >= 0:
        addresses.append(int(owner.address(slot)))
        slot = owner.after(owner.seq(slot))
    found: list[bytes | None] = []
    bench.runner.read(addresses, found.extend)
    bench.settle_down()
    values: dict[bytes, bytes] = {}
    for data in found:
        assert data is not None
        message = bench.engine.message_of(data)
        assert message is not None and message.key not in values
        values[message.key] = message.payload
    return values
