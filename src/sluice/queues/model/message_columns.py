"""What is known of the messages of a partition, in columns of native integers: 27 bytes for each.

A block has a place for each of 512 consecutive sequences: a sequence says where in it its message stands. That is what
a stream of messages wants that come and go in order. Of what is left of an old block, when most of it is gone, the
places would be far larger than the messages: such remains are put together in packs, 512 messages of any sequences in
order, each with its sequence in one more column.
"""

from __future__ import annotations

from typing import Final

from librt.vecs import append, vec
from mypy_extensions import i16, i32, i64, u8

BLOCK_BITS: Final = 9
BLOCK_SIZE: Final = 512
NO_ADDRESS: Final = -1  # the address of a message that is not kept any more
MAX_OFFSET_MS: Final = 0x7FFF_FFFF


class AddressSnapshot:
    """Which places of a block were taken when a snapshot was begun: those that are, until it changes."""

    def __init__(self, block: Block) -> None:
        self.base: i64 = block.base
        self.seqs: vec[i64] = block.seqs
        self._block: Block | None = block
        self._address: vec[i64] = vec[i64]()
        block.address_snapshot = self

    def preserve(self) -> None:
        """The block is about to change."""
        block = self._block
        if block is not None:
            self._address = block.address[:]
            self._block = None
            block.address_snapshot = None

    def take_addresses(self) -> vec[i64]:
        """The addresses as they were, GONE where no message was. Asked once."""
        block = self._block
        if block is None:
            return self._address
        block.address_snapshot = None
        return block.address


class Block:
    def __init__(self, base: i64) -> None:
        self.base: i64 = base  # the sequence of its first place; -1: a pack
        self.address: vec[i64] = vec[i64]()
        self.size: vec[i32] = vec[i32]()
        self.key_hash: vec[i32] = vec[i32]()
        self.expires: vec[i32] = vec[i32]()
        self.arrival_offset_ms: vec[i32] = vec[i32]()  # when it came, in milliseconds after `time`
        self.flags: vec[u8] = vec[u8]()
        self.pending_groups: vec[i16] = vec[i16]()  # groups that have not settled it yet
        self.live_count: i64 = 0
        self.base_time_ms: i64 = 0  # milliseconds since 1970
        self.min_arrival_ms: i64 = (
            0  # none of them came earlier; below `time` if recovery found them later
        )
        self.max_arrival_ms: i64 = 0  # when the youngest of them came
        self.min_expiry: i64 = 0  # none of them expires earlier; 0: none expires
        self.seqs: vec[i64] = vec[i64]()  # of a pack
        self.search_index: i64 = 0  # where in a pack the last search has ended
        self.address_snapshot: AddressSnapshot | None = (
            None  # for a snapshot that does not have it yet
        )

    # ---- places

    def index_of(self, seq: i64) -> i64:
        """Where the message stands that `Partition.block` was just asked for."""
        return seq & (BLOCK_SIZE - 1) if self.base >= 0 else self.search_index

    def seq_at(self, index: i64) -> i64:
        return self.base + index if self.base >= 0 else self.seqs[index]

    def search(self, seq: i64) -> bool:
        """Go to the first place of a pack whose sequence is not below `seq`; whether it is that one."""
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

    # ---- coming and going

    def record_arrival(self, arrival_ms: i64, expires: i64) -> i64:
        """A message of that time comes: how that is put down, as its age."""
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
        """The same for a place that was passed over before."""
        self.address[index] = address
        self.size[index] = i32(size)
        self.key_hash[index] = i32(key_hash if key_hash < 0x8000_0000 else key_hash - 0x1_0000_0000)
        self.expires[index] = i32(expires if expires < 0x8000_0000 else expires - 0x1_0000_0000)
        self.arrival_offset_ms[index] = i32(arrival_offset_ms)
        self.flags[index] = u8(flags)
        self.pending_groups[index] = i16(pending_groups)

    def append_live_from(self, other: Block, start: i64, end: i64) -> None:
        """Append to this pack what lives in the places from `at` to `end` of another block, all of it younger."""
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
    """What lives in these blocks, oldest first, as one pack."""
    sparse = Block(-1)
    for block in blocks:
        sparse.append_live_from(block, 0, len(block.address))
    return sparse
