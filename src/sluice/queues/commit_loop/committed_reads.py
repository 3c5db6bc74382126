"""Reads of stored records. A read of a record that is not committed yet waits for its commit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sluice.message import Message
from sluice.queues.engine import Engine
from sluice.queues.model import NO_ADDRESS, Partition
from sluice.store.protocol import Store


class CommittedReads:
    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store
        # Records at or above this address are not in the store yet.
        self._uncommitted_from: int = 0
        self._deferred: list[tuple[list[int], Callable[[list[bytes | None]], None]]] = []

    def read(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        """Read records after their commit: compaction may have moved them into the open frame."""
        if addresses and max(addresses) >= self._uncommitted_from:
            self._deferred.append((addresses, done))
        else:
            self._store.read(addresses, done)

    def on_committed_to(self, address: int) -> None:
        """Start the reads that waited for the commit of the records before `address`."""
        self._uncommitted_from = address
        if self._deferred:
            deferred = self._deferred
            self._deferred = []
            for addresses, done in deferred:
                self.read(addresses, done)

    def read_messages(
        self, locations: list[tuple[Partition, int]], done: Callable[[list[Message | None]], None]
    ) -> None:
        """Read the stored messages at these locations; None for deleted or damaged ones.

        Cached bodies need no read.
        """
        found: list[Message | None] = []
        missing: list[int] = []
        addresses: list[int] = []
        for nth, (partition, seq) in enumerate(locations):
            message = partition.cached_bodies.get(seq)
            found.append(message)
            address = partition.address(seq)
            if message is None and address != NO_ADDRESS:
                missing.append(nth)
                addresses.append(int(address))
        if missing:
            self.read(addresses, partial(self._on_messages_read, found, missing, done))
        else:
            done(found)

    def _on_messages_read(
        self,
        found: list[Message | None],
        missing: list[int],
        done: Callable[[list[Message | None]], None],
        records: list[bytes | None],
    ) -> None:
        for nth, data in zip(missing, records, strict=True):
            found[nth] = None if data is None else self._engine.decode_message(data)
        done(found)
