"""In-memory metadata of the messages of a partition: columns of native integers, 27 bytes each.

A block has a slot for each of 512 consecutive sequences; the sequence determines the slot. That
suits a stream of messages that arrive and leave in order. When most of an old block is deleted, its
empty slots would cost far more than the remaining messages. Sparse blocks hold such remains: up to
512 messages of any sequences in order, with the sequence in one more column.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i16, i32, i64, u8

BLOCK_BITS: Final = 9
BLOCK_SIZE: Final = 512
NO_ADDRESS: Final = -1  # the address of a deleted message
MAX_OFFSET_MS: Final = 0x7FFF_FFFF


class AddressSnapshot:
    """The addresses of a block when a snapshot began. Copied only if the block changes."""

    def __init__(self, block: Block) -> None:
        self.base: i64 = block.base
        self.seqs: vec[i64] = block.seqs
        self._block: Block | None = block
        self._address: vec[i64] = vec[i64]()
        block.address_snapshot = self

    def preserve(self) -> None:
        """Copy the addresses, because the block is about to change."""
        block = self._block
        if block is not None:
            self._address = block.address[:]
            self._block = None
            block.address_snapshot = None

    def take_addresses(self) -> vec[i64]:
        """Return the addresses at that time, NO_ADDRESS for empty slots. Call this once."""
        block = self._block
        if block is None:
            return self._address
        block.address_snapshot = None
        return block.address


class Block:
    def __init__(self, base: i64) -> None:
        self.base: i64 = base  # the sequence of the first slot; -1: a sparse block
        self.address: vec[i64] = vec[i64]()
        self.size: vec[i32] = vec[i32]()
        self.key_hash: vec[i32] = vec[i32]()
        self.expires: vec[i32] = vec[i32]()
        self.arrival_offset_ms: vec[i32] = vec[
            i32
        ]()  # arrival, in milliseconds after `base_time_ms`
        self.flags: vec[u8] = vec[u8]()
        self.pending_groups: vec[i16] = vec[i16]()  # groups that have not settled the message
        self.live_count: i64 = 0
        self.base_time_ms: i64 = 0  # milliseconds since 1970
        # Lower bound of the arrivals; below `base_time_ms` if recovery found messages out of order.
        self.min_arrival_ms: i64 = 0
        self.max_arrival_ms: i64 = 0  # arrival of the newest message
        self.min_expiry: i64 = 0  # lower bound of the expiries; 0: none expires
        self.seqs: vec[i64] = vec[i64]()  # of a sparse block
        self.search_index: i64 = 0  # where the last search in a sparse block ended
        # For a running snapshot that has not read this block yet.
        self.address_snapshot: AddressSnapshot | None = None

    # ---- slots

    def index_of(self, seq: i64) -> i64:
        """Return the slot of `seq`. Call `Partition.find_block(seq)` right before."""
        return seq & (BLOCK_SIZE - 1) if self.base >= 0 else self.search_index

    def seq_at(self, index: i64) -> i64:
        return self.base + index if self.base >= 0 else self.seqs[index]

    def search(self, seq: i64) -> bool:
        """Move to the first slot of a sparse block not below `seq`; return whether it is `seq`."""
        low: i64 = 0
        high: i64 = len(self.seqs)
        while low < high:
            middle: i64 = (low + high) >> 1
            if self.seqs[middle] < seq:
                low = middle + 1
            else:
                high = middle
        self.search_index = low
        return low < len(self.seqs) and self.seqs[low] == seq

    # ---- adding messages

    def record_arrival(self, arrival_ms: i64, expires: i64) -> i64:
        """Update the block's bounds for a new message; return its arrival offset."""
        if self.base_time_ms == 0:
            self.base_time_ms = arrival_ms
            self.min_arrival_ms = arrival_ms
        if arrival_ms > self.max_arrival_ms:
            self.max_arrival_ms = arrival_ms
        if expires and (self.min_expiry == 0 or expires < self.min_expiry):
            self.min_expiry = expires
        offset_ms: i64 = arrival_ms - self.base_time_ms
        if offset_ms >= 0:
            return offset_ms if offset_ms <= MAX_OFFSET_MS else MAX_OFFSET_MS
        if arrival_ms < self.min_arrival_ms:
            self.min_arrival_ms = arrival_ms
        return offset_ms if offset_ms >= -MAX_OFFSET_MS else -MAX_OFFSET_MS

    def add(
        self,
        address: i64,
        size: i64,
        key_hash: i64,
        expires: i64,
        arrival_offset_ms: i64,
        flags: i64,
        pending_groups: i64,
    ) -> None:
        self.address = append(self.address, address)
        self.size = append(self.size, i32(size))
        self.key_hash = append(
            self.key_hash, i32(key_hash if key_hash < 0x8000_0000 else key_hash - 0x1_0000_0000)
        )
        self.expires = append(
            self.expires, i32(expires if expires < 0x8000_0000 else expires - 0x1_0000_0000)
        )
        self.arrival_offset_ms = append(self.arrival_offset_ms, i32(arrival_offset_ms))
        self.flags = append(self.flags, u8(flags))
        self.pending_groups = append(self.pending_groups, i16(pending_groups))

    def set_at(
        self,
        index: i64,
        address: i64,
        size: i64,
        key_hash: i64,
        expires: i64,
        arrival_offset_ms: i64,
        flags: i64,
        pending_groups: i64,
    ) -> None:
        """Fill a slot that was skipped before."""
        self.address[index] = address
        self.size[index] = i32(size)
        self.key_hash[index] = i32(key_hash if key_hash < 0x8000_0000 else key_hash - 0x1_0000_0000)
        self.expires[index] = i32(expires if expires < 0x8000_0000 else expires - 0x1_0000_0000)
        self.arrival_offset_ms[index] = i32(arrival_offset_ms)
        self.flags[index] = u8(flags)
        self.pending_groups[index] = i16(pending_groups)

    def append_live_from(self, other: Block, start: i64, end: i64) -> None:
        """Append the live messages in slots `start` to `end` of a block with newer messages."""
        while start < end:
            if other.address[start] != NO_ADDRESS:
                expires: i64 = i64(other.expires[start]) & 0xFFFF_FFFF
                offset_ms = self.record_arrival(
                    other.base_time_ms + i64(other.arrival_offset_ms[start]), expires
                )
                self.seqs = append(self.seqs, other.seq_at(start))
                self.add(
                    other.address[start],
                    i64(other.size[start]),
                    i64(other.key_hash[start]) & 0xFFFF_FFFF,
                    expires,
                    offset_ms,
                    i64(other.flags[start]),
                    i64(other.pending_groups[start]),
                )
                self.live_count += 1
            start += 1


def make_sparse_block(*blocks: Block) -> Block:
    """Merge the live messages of these blocks, oldest first, into one sparse block."""
    sparse = Block(-1)
    for block in blocks:
        sparse.append_live_from(block, 0, len(block.address))
    return sparse
