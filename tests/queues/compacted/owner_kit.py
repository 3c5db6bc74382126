"""Helpers for tests of exclusive queues: subscribers, writes and stored values."""

from __future__ import annotations

from sluice.message import Message
from sluice.queues.compacted.owner import Owner
from sluice.queues.compacted.owner_subscriber import OwnerSubscriber
from tests.queues.kit import EngineUnderTest


class OwnerReader(OwnerSubscriber):
    """A subscribed owner that keeps its values until the test acknowledges them."""

    def __init__(self, under_test: EngineUnderTest, window: int) -> None:
        super().__init__()
        self.under_test = under_test
        self.window = window
        # Sequence, key and value of unacknowledged values.
        self.inbox: list[tuple[int, bytes, bytes]] = []
        self.got: list[bytes] = []
        self.sequences: list[int] = []  # all that were ever delivered

    def capacity(self) -> int:
        return self.window - len(self.inbox)

    def deliver(self, seq: int, message: Message) -> None:
        self.inbox.append((int(seq), message.key, message.payload))
        self.got.append(message.payload)
        self.sequences.append(int(seq))

    def take(self) -> list[bytes]:
        """Acknowledge until no more values arrive; return them in order."""
        taken: list[bytes] = []
        self.under_test.run_until_idle()
        while self.inbox:
            taken.append(self.ack())
        return taken

    def ack(self, nth: int = 0) -> bytes:
        seq, _, value = self.inbox.pop(nth)
        self.under_test.engine.exclusive.ack(self, seq, self.epoch, self.under_test.loop.now)
        self.under_test.run_until_idle()
        return value

    def values(self) -> list[bytes]:
        self.under_test.run_until_idle()
        return [value for _, _, value in self.inbox]


def write(
    under_test: EngineUnderTest,
    client: str,
    key: bytes,
    value: bytes,
    ttl: float = 0.0,
    at_once: bool = True,
) -> Owner:
    """Write a value, and commit the frame unless `at_once` is False."""
    message = Message(value, b"", key)
    if ttl:
        message.expires = int(under_test.loop.now + ttl)
    under_test.engine.now = under_test.loop.now
    owner = under_test.engine.exclusive.publish(client, message, under_test.loop.now)
    if at_once:
        under_test.run_until_idle()
    return owner


def subscribe(under_test: EngineUnderTest, client: str, window: int = 100) -> OwnerReader:
    subscriber = OwnerReader(under_test, window)
    under_test.engine.now = under_test.loop.now
    under_test.engine.exclusive.subscribe(subscriber, client, under_test.loop.now)
    under_test.run_until_idle()
    return subscriber


def leave(under_test: EngineUnderTest, subscriber: OwnerReader) -> None:
    under_test.engine.exclusive.unsubscribe(subscriber)
    under_test.run_until_idle()


def seek(under_test: EngineUnderTest, client: str, after_seq: int) -> None:
    owner = under_test.engine.exclusive.owners[client]
    if owner.subscriber is not None and isinstance(owner.subscriber, OwnerReader):
        owner.subscriber.inbox.clear()
    under_test.engine.exclusive.seek(owner, after_seq, under_test.loop.now)
    under_test.run_until_idle()


def stored_values(under_test: EngineUnderTest, client: str) -> dict[bytes, bytes]:
    """Return the stored values of an owner by key, read from the store."""
    owner = under_test.engine.exclusive.owners[client]
    addresses: list[int] = []
    slot = owner.slot_after(0)
    while slot >= 0:
        addresses.append(int(owner.address(slot)))
        slot = owner.slot_after(owner.seq(slot))
    found: list[bytes | None] = []
    under_test.commit_loop.read(addresses, found.extend)
    under_test.run_until_idle()
    values: dict[bytes, bytes] = {}
    for data in found:
        assert data is not None
        message = under_test.engine.decode_message(data)
        assert message is not None and message.key not in values
        values[message.key] = message.payload
    return values
