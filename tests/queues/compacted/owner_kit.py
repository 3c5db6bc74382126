"""Owners of exclusive queues and those who write to them: the words in which their tests speak."""

from __future__ import annotations

from sluice.message import Message
from sluice.queues.compacted.owner import Owner
from sluice.queues.ports import OwnerSubscriber
from tests.queues.kit import EngineUnderTest


class OwnerReader(OwnerSubscriber):
    """An owner that is subscribed, and keeps what it is given until the test acknowledges it."""

    def __init__(self, under_test: EngineUnderTest, window: int) -> None:
        super().__init__()
        self.bench = under_test
        self.window = window
        self.inbox: list[
            tuple[int, bytes, bytes]
        ] = []  # sequence, key and value of what is not acknowledged
        self.got: list[bytes] = []
        self.sequences: list[int] = []  # everything it was ever given

    def capacity(self) -> int:
        return self.window - len(self.inbox)

    def deliver(self, seq: int, message: Message) -> None:
        self.inbox.append((int(seq), message.key, message.payload))
        self.got.append(message.payload)
        self.sequences.append(int(seq))

    def take(self) -> list[bytes]:
        """Acknowledge until nothing more comes; the values in order."""
        taken: list[bytes] = []
        self.bench.run_until_idle()
        while self.inbox:
            taken.append(self.ack())
        return taken

    def ack(self, nth: int = 0) -> bytes:
        seq, _, value = self.inbox.pop(nth)
        self.bench.engine.exclusive.ack(self, seq, self.epoch, self.bench.loop.now)
        self.bench.run_until_idle()
        return value

    def values(self) -> list[bytes]:
        self.bench.run_until_idle()
        return [value for _, _, value in self.inbox]


def write(
    under_test: EngineUnderTest,
    client: str,
    key: bytes,
    value: bytes,
    ttl: float = 0.0,
    at_once: bool = True,
) -> Owner:
    """Write a value, and let the frame be kept."""
    message = Message(value, b"", key)
    if ttl:
        message.expires = int(under_test.loop.now + ttl)
    under_test.engine.now = under_test.loop.now
    owner = under_test.engine.exclusive.publish(client, message, under_test.loop.now)
    if at_once:
        under_test.run_until_idle()
    return owner


def subscribe(under_test: EngineUnderTest, client: str, window: int = 100) -> OwnerReader:
    taker = OwnerReader(under_test, window)
    under_test.engine.now = under_test.loop.now
    under_test.engine.exclusive.subscribe(taker, client, under_test.loop.now)
    under_test.run_until_idle()
    return taker


def leave(under_test: EngineUnderTest, taker: OwnerReader) -> None:
    under_test.engine.exclusive.unsubscribe(taker)
    under_test.run_until_idle()


def seek(under_test: EngineUnderTest, client: str, behind: int) -> None:
    owner = under_test.engine.exclusive.owners[client]
    if owner.subscriber is not None and isinstance(owner.subscriber, OwnerReader):
        owner.subscriber.inbox.clear()
    under_test.engine.exclusive.seek(owner, behind, under_test.loop.now)
    under_test.run_until_idle()


def stored_values(under_test: EngineUnderTest, client: str) -> dict[bytes, bytes]:
    """What is kept of an owner, by key, read from the store."""
    owner = under_test.engine.exclusive.owners[client]
    addresses: list[int] = []
    slot = owner.slot_after(0)
    while slot >= 0:
        addresses.append(int(owner.address(slot)))
        slot = owner.slot_after(owner.seq(slot))
    found: list[bytes | None] = []
    under_test.runner.read(addresses, found.extend)
    under_test.run_until_idle()
    values: dict[bytes, bytes] = {}
    for data in found:
        assert data is not None
        message = under_test.engine.decode_message(data)
        assert message is not None and message.key not in values
        values[message.key] = message.payload
    return values
