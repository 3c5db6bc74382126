"""Searches for messages by the id that their publisher gave them: no index has all of these ids.

A search reads stored messages, first those that arrived when the dedup window saw the id, then the
oldest ones up to a limit. Each read is an effect of its own, so deliveries continue meanwhile.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.queues.bodies import decode_message
from sluice.queues.model import (
    FOR_SEARCH,
    NO_ADDRESS,
    BodyRead,
    Effects,
    IdSearch,
    Partition,
)
from sluice.queues.ports import Codec

MAX_READ_MESSAGES: Final = 256  # per read
MAX_READ_BYTES: Final = 1 << 20
CLOCK_TOLERANCE_MS: Final = 2  # stored times are rounded


class IdSearches:
    def __init__(self, effects: Effects, codec: Codec) -> None:
        self._effects: Effects = effects
        self._codec: Codec = codec

    def start(self, search: IdSearch) -> None:
        """Search; `on_done` is called before this returns, or in a later turn."""
        queue = search.queue
        for partition in reversed(queue.partitions):
            search.ranges.append((partition, 0, int(partition.next_seq)))
        for message_id in search.wanted:
            stored_at = queue.id_stored_at(message_id)
            if stored_at > 0.0:
                self._add_moment(search, int(stored_at * 1000.0))
        self._read_next(search)

    def _add_moment(self, search: IdSearch, at_ms: i64) -> None:
        """Search first among the messages that arrived at this time."""
        for partition in search.queue.partitions:
            start = partition.first_arrived_since(at_ms - CLOCK_TOLERANCE_MS)
            end = partition.first_arrived_since(at_ms + CLOCK_TOLERANCE_MS + 1)
            if start < end:
                search.ranges.append((partition, int(start), int(end)))

    def _read_next(self, search: IdSearch) -> None:
        """Request the next read, or end the search."""
        while search.ranges and search.wanted:
            partition, start, end = search.ranges.pop()
            sequences: list[int] = []
            addresses: list[int] = []
            size: i64 = 0
            seq = partition.first_live(start)
            while seq < end and len(sequences) < MAX_READ_MESSAGES and size < MAX_READ_BYTES:
                if search.remaining <= 0:
                    search.is_cut = True
                    search.ranges = []
                    end = int(seq)
                    break
                search.remaining -= 1
                cached = partition.cached_bodies.get(int(seq))
                block = partition.find_block(seq)
                if cached is not None:
                    self._compare(search, partition, seq, cached.id)
                elif block is not None:
                    sequences.append(int(seq))
                    addresses.append(int(block.address[block.index_of(seq)]))
                    size += i64(block.size[block.index_of(seq)])
                seq = partition.first_live(seq + 1)
            if seq < end:
                search.ranges.append((partition, int(seq), end))
            if sequences:
                read = BodyRead(FOR_SEARCH, partition, sequences, addresses)
                read.search = search
                self._effects.reads.append(read)
                return
        search.on_done()

    def on_read_done(self, search: IdSearch, read: BodyRead, records: list[bytes | None]) -> None:
        partition = read.partition
        for seq, address, data in zip(read.sequences, read.addresses, records, strict=True):
            current_address = partition.address(seq)
            message = None if data is None else decode_message(data, self._codec)
            if current_address == NO_ADDRESS:
                continue
            if message is not None:
                self._compare(search, partition, seq, message.id)
            elif current_address != address:  # compaction has moved it meanwhile
                search.ranges.append((partition, seq, seq + 1))
        self._read_next(search)

    def _compare(self, search: IdSearch, partition: Partition, seq: i64, message_id: bytes) -> None:
        if message_id and message_id in search.wanted:
            search.wanted.discard(message_id)
            search.found[message_id] = (partition, int(seq))
