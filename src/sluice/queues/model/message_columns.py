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
BLOCK: Final = 512
GONE: Final = -1  # the address of a message that is not kept any more
LONGEST: Final = 0x7FFF_FFFF


class Outline:
    """Which places of a block were taken when a snapshot was begun: those that are, until it changes."""

    def __init__(self, block: Block) -> None:
        self.base: i64 = block.base
        self.seqs: vec[i64] = block.seqs
        self._block: Block | None = block
        self._address: vec[i64] = vec[i64]()
        block.outline = self

    def keep(self) -> None:
        """The block is about to change."""
        block = self._block
        if block is not None:
            self._address = block.address[:]
            self._block = None
            block.outline = None

    def take(self) -> vec[i64]:
        """The addresses as they were, GONE where no message was. Asked once."""
        block = self._block
        if block is None:
            return self._address
        block.outline = None
        return block.address


class Block:
    def __init__(self, base: i64) -> None:
        self.base: i64 = base  # the sequence of its first place; -1: a pack
        self.address: vec[i64] = vec[i64]()
        self.size: vec[i32] = vec[i32]()
        self.key: vec[i32] = vec[i32]()
        self.expires: vec[i32] = vec[i32]()
        self.age: vec[i32] = vec[i32]()  # when it came, in milliseconds after `time`
        self.flags: vec[u8] = vec[u8]()
        self.left: vec[i16] = vec[i16]()  # groups that have not settled it yet
        self.live: i64 = 0
        self.time: i64 = 0  # milliseconds since 1970
        self.earliest: i64 = 0  # none of them came earlier; below `time` if recovery found them later
        self.latest: i64 = 0  # when the youngest of them came
        self.soonest: i64 = 0  # none of them expires earlier; 0: none expires
        self.seqs: vec[i64] = vec[i64]()  # of a pack
        self.hit: i64 = 0  # where in a pack the last search has ended
        self.outline: Outline | None = None  # for a snapshot that does not have it yet

    # ---- places

    def at(self, seq: i64) -> i64:
        """Where the message stands that `Partition.block` was just asked for."""
        return seq & (BLOCK - 1) if self.base >= 0 else self.hit

    def seq(self, at: i64) -> i64:
        return self.base + at if self.base >= 0 else self.seqs[at]

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
        self.hit = low
        return low < len(self.seqs) and self.seqs[low] == seq

    # ---- coming and going

    def hear(self, time: i64, expires: i64) -> i64:
        """A message of that time comes: how that is put down, as its age."""
        if self.time == 0:
            self.time = time
            self.earliest = time
        if time > self.latest:
            self.latest = time
        if expires and (self.soonest == 0 or expires < self.soonest):
            self.soonest = expires
        age: i64 = time - self.time
        if age >= 0:
            return age if age <= LONGEST else LONGEST
        if time < self.earliest:
            self.earliest = time
        return age if age >= -LONGEST else -LONGEST

    def add(self, address: i64, size: i64, key: i64, expires: i64, age: i64, flags: i64, left: i64) -> None:
        self.address = append(self.address, address)
        self.size = append(self.size, i32(size))
        self.key = append(self.key, i32(key if key < 0x8000_0000 else key - 0x1_0000_0000))
        self.expires = append(
            self.expires, i32(expires if expires < 0x8000_0000 else expires - 0x1_0000_0000)
        )
        self.age = append(self.age, i32(age))
        self.flags = append(self.flags, u8(flags))
        self.left = append(self.left, i16(left))

    def put(
        self, at: i64, address: i64, size: i64, key: i64, expires: i64, age: i64, flags: i64, left: i64
    ) -> None:
        """The same for a place that was passed over before."""
        self.address[at] = address
        self.size[at] = i32(size)
        self.key[at] = i32(key if key < 0x8000_0000 else key - 0x1_0000_0000)
        self.expires[at] = i32(expires if expires < 0x8000_0000 else expires - 0x1_0000_0000)
        self.age[at] = i32(age)
        self.flags[at] = u8(flags)
        self.left[at] = i16(left)

    def take_over(self, other: Block, at: i64, end: i64) -> None:
        """Append to this pack what lives in the places from `at` to `end` of another block, all of it younger."""
        while at < end:
            if other.address[at] != GONE:
                expires: i64 = i64(other.expires[at]) & 0xFFFF_FFFF
                age = self.hear(other.time + i64(other.age[at]), expires)
                self.seqs = append(self.seqs, other.seq(at))
                self.add(
                    other.address[at],
                    i64(other.size[at]),
                    i64(other.key[at]) & 0xFFFF_FFFF,
                    expires,
                    age,
                    i64(other.flags[at]),
                    i64(other.left[at]),
                )
                self.live += 1
            at += 1


def pack_of(*blocks: Block) -> Block:
    """What lives in these blocks, oldest first, as one pack."""
    pack = Block(-1)
    for block in blocks:
        pack.take_over(block, 0, len(block.address))
    return pack
