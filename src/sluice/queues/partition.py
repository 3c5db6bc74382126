"""One partition of a queue: which messages it holds, and where the store keeps them.

What is known of each message in memory is 27 bytes in columns of native integers (`Block`), so that a million waiting
messages cost some 30 MB; bodies are on disk, and in a cache while they are young. Sequences are never reused: a message
is `(pid, seq)` for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.vecs import append, vec
from mypy_extensions import i16, i32, i64, u8

from sluice.message import PRIORITY_BITS, Message

if TYPE_CHECKING:
    from sluice.queues.cursor import Cursor
    from sluice.queues.queue import Queue

BLOCK_BITS: Final = 9
BLOCK: Final = 512
GONE: Final = -1  # the address of a message that is not kept any more
LONGEST: Final = 0x7FFF_FFFF


class Block:
    """Up to 512 messages with consecutive sequences, a column for each fact."""

    def __init__(self) -> None:
        self.address: vec[i64] = vec[i64]()
        self.size: vec[i32] = vec[i32]()
        self.key: vec[i32] = vec[i32]()
        self.expires: vec[i32] = vec[i32]()
        self.age: vec[i32] = vec[i32]()  # when it came, in milliseconds after `time`
        self.flags: vec[u8] = vec[u8]()
        self.left: vec[i16] = vec[i16]()  # groups that have not settled it yet
        self.live: i64 = 0
        self.time: i64 = 0  # milliseconds since 1970
        self.latest: i64 = 0  # when the youngest of them came
        self.soonest: i64 = 0  # none of them expires earlier; 0: none expires

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


# What a partition has before it has any: see the cursor's.
NO_TARGETS: Final[dict[int, int]] = {}
NOT_DELAYED: Final[set[int]] = set()

_DEAD: Final = Block()  # stands for every block in which nothing lives nor will live


class Partition:
    def __init__(self, queue: Queue, pid: i64, number: i64) -> None:
        self.queue: Queue = queue
        self.pid: i64 = pid
        self.number: i64 = number
        self.next: i64 = 0  # the sequence of the next message
        self.committed: i64 = 0  # messages below this are durable, and may be delivered
        self.live: i64 = 0
        self.cursors: list[Cursor] = []
        self.young: dict[object, Message] = {}  # bodies that need no read, by sequence
        self.is_holder: bool = False  # is known to the cache
        self.targets: dict[int, int] = NO_TARGETS  # messages for one group alone, and its number
        self.delayed: set[int] = NOT_DELAYED  # messages whose time has not come
        self.removed: list[int] = []  # taken out for everybody since the last frame, by no group's doing
        self.touched: bool = False  # has messages in the frame that is being made
        self.expiry_set: i64 = 0  # when the next look for expired messages is due, in seconds; 0: none is set
        self.retention_set: float = 0.0  # the same for settled ones that were kept long enough
        self._blocks: list[Block] = []
        self._first: i64 = 0  # number of the first block

    # ---- what is known of a message

    def block(self, seq: i64) -> Block | None:
        """The block with the columns of `seq`; None when nothing is known of it any more."""
        nth: i64 = (seq >> BLOCK_BITS) - self._first
        if nth < 0 or nth >= len(self._blocks):
            return None
        block = self._blocks[nth]
        return block if (seq & (BLOCK - 1)) < len(block.address) else None

    def address(self, seq: i64) -> i64:
        """Where the store keeps it; GONE when it does not."""
        block = self.block(seq)
        return GONE if block is None else block.address[seq & (BLOCK - 1)]

    def holds(self, seq: i64) -> bool:
        return self.address(seq) != GONE

    def priority(self, seq: i64) -> i64:
        block = self.block(seq)
        return 0 if block is None else i64(block.flags[seq & (BLOCK - 1)]) & PRIORITY_BITS

    def flags(self, seq: i64) -> i64:
        block = self.block(seq)
        return 0 if block is None else i64(block.flags[seq & (BLOCK - 1)])

    def expires(self, seq: i64) -> i64:
        """Seconds since 1970; 0: never."""
        block = self.block(seq)
        return 0 if block is None else i64(block.expires[seq & (BLOCK - 1)]) & 0xFFFF_FFFF

    def time(self, seq: i64) -> i64:
        """When it came, in milliseconds since 1970."""
        block = self.block(seq)
        return 0 if block is None else block.time + i64(block.age[seq & (BLOCK - 1)])

    def is_for(self, seq: i64, gid: i64) -> bool:
        """Whether the group `gid` is meant: a dead letter that is put back goes to the group that failed it."""
        return not self.targets or self.targets.get(int(seq), int(gid)) == gid

    def aim(self, seq: i64, gid: i64) -> None:
        """The message `seq` is for one group alone."""
        if self.targets is NO_TARGETS:
            self.targets = {}
        self.targets[int(seq)] = int(gid)

    def delay(self, seq: i64) -> None:
        """The time of the message `seq` has not come."""
        if self.delayed is NOT_DELAYED:
            self.delayed = set()
        self.delayed.add(int(seq))

    # ---- coming and going

    def append(
        self, address: i64, size: i64, key: i64, expires: i64, flags: i64, left: i64, time: i64
    ) -> i64:
        """Take in the next message; its sequence."""
        seq = self.next
        self.insert(seq, address, size, key, expires, flags, left, time)
        return seq

    def insert(
        self, seq: i64, address: i64, size: i64, key: i64, expires: i64, flags: i64, left: i64, time: i64
    ) -> None:
        """Take in the message `seq`, in any order: recovery finds what compaction has moved behind what is younger.
        `time` is when it came; 0 when nobody knows any more, then about when its neighbours did."""
        number: i64 = seq >> BLOCK_BITS
        if not self._blocks:
            self._first = number
        while number < self._first:
            self._blocks.insert(0, _DEAD)
            self._first -= 1
        while self._first + len(self._blocks) <= number:
            self._blocks.append(_DEAD)
        block = self._blocks[number - self._first]
        if block is _DEAD:
            block = Block()
            self._blocks[number - self._first] = block
        at: i64 = seq & (BLOCK - 1)
        while len(block.address) < at:
            block.add(GONE, 0, 0, 0, 0, 0, 0)
        if time == 0:
            time = block.latest
        if block.time == 0:
            block.time = time
        if time > block.latest:
            block.latest = time
        if expires and (block.soonest == 0 or expires < block.soonest):
            block.soonest = expires
        age: i64 = time - block.time
        if age > LONGEST:
            age = LONGEST
        elif age < -LONGEST:
            age = -LONGEST
        if len(block.address) == at:
            block.add(address, size, key, expires, age, flags, left)
        else:
            block.put(at, address, size, key, expires, age, flags, left)
        block.live += 1
        self.live += 1
        if seq >= self.next:
            self.next = seq + 1

    def move(self, seq: i64, address: i64) -> None:
        """Its record stands elsewhere now."""
        block = self.block(seq)
        if block is not None:
            block.address[seq & (BLOCK - 1)] = address

    def remove(self, seq: i64) -> i64:
        """Forget a message; the address it had, or GONE."""
        block = self.block(seq)
        if block is None:
            return GONE
        at: i64 = seq & (BLOCK - 1)
        address = block.address[at]
        if address == GONE:
            return GONE
        block.address[at] = GONE
        block.live -= 1
        self.live -= 1
        if self.targets:
            self.targets.pop(int(seq), None)
        if block.live == 0 and (seq >> BLOCK_BITS) < (self.next >> BLOCK_BITS):
            self._blocks[(seq >> BLOCK_BITS) - self._first] = _DEAD
            self._trim()
        return address

    def _trim(self) -> None:
        """Let go of the blocks at the front in which nothing lives any more."""
        while self._blocks and self._blocks[0] is _DEAD:
            self._blocks.pop(0)
            self._first += 1

    def settle_one(self, seq: i64) -> bool:
        """One group less has to settle `seq`; whether it was the last one."""
        block = self.block(seq)
        if block is None:
            return False
        at: i64 = seq & (BLOCK - 1)
        left: i64 = i64(block.left[at]) - 1
        block.left[at] = i16(left)
        return left <= 0 and block.address[at] != GONE

    def set_left(self, seq: i64, left: i64) -> None:
        block = self.block(seq)
        if block is not None:
            block.left[seq & (BLOCK - 1)] = i16(left)

    def left(self, seq: i64) -> i64:
        block = self.block(seq)
        return 0 if block is None else i64(block.left[seq & (BLOCK - 1)])

    # ---- walking

    def first_live(self, start: i64) -> i64:
        """The first message that is here at or behind `start`; `next` when there is none."""
        seq = start
        lowest: i64 = self._first << BLOCK_BITS
        if seq < lowest:
            seq = lowest
        while seq < self.next:
            nth: i64 = (seq >> BLOCK_BITS) - self._first
            if nth >= len(self._blocks):
                return self.next
            block = self._blocks[nth]
            at: i64 = seq & (BLOCK - 1)
            if block.live == 0 or at >= len(block.address):
                seq = ((seq >> BLOCK_BITS) + 1) << BLOCK_BITS
            elif block.address[at] != GONE:
                return seq
            else:
                seq += 1
        return self.next

    def holes(self, first: i64) -> list[tuple[int, int]]:
        """(start, count) of what is gone at or behind `first`."""
        found: list[tuple[int, int]] = []
        at = first
        while at < self.next:
            live = self.first_live(at)
            if live > at:
                found.append((int(at), int(live - at)))
            at = live + 1
        return found

    def oldest_time(self) -> i64:
        """When its oldest message came, in milliseconds."""
        seq = self.first_live(0)
        return self.time(seq) if seq < self.next else 0x7FFF_FFFF_FFFF

    def first_since(self, time: i64) -> i64:
        """The first message of `time` (in milliseconds) or later; `next` when there is none."""
        nth: i64 = 0
        while nth < len(self._blocks):
            block = self._blocks[nth]
            if block.live and block.latest >= time:
                at: i64 = 0
                while at < len(block.address):
                    if block.address[at] != GONE and block.time + i64(block.age[at]) >= time:
                        return ((self._first + nth) << BLOCK_BITS) + at
                    at += 1
            nth += 1
        return self.next

    # ---- blocks in which something is due

    def expired(self, now: i64) -> list[int]:
        """What has expired by `now` (in seconds)."""
        found: list[int] = []
        nth: i64 = 0
        while nth < len(self._blocks):
            block = self._blocks[nth]
            if block.live and block.soonest and block.soonest <= now:
                self._expired_in(block, (self._first + nth) << BLOCK_BITS, now, found)
            nth += 1
        return found

    def _expired_in(self, block: Block, base: i64, now: i64, found: list[int]) -> None:
        soonest: i64 = 0
        at: i64 = 0
        while at < len(block.address):
            expires: i64 = i64(block.expires[at]) & 0xFFFF_FFFF
            if expires and block.address[at] != GONE:
                if expires <= now:
                    found.append(int(base + at))
                elif soonest == 0 or expires < soonest:
                    soonest = expires
            at += 1
        block.soonest = soonest

    def next_expiry(self) -> i64:
        """When the next message may expire, in seconds since 1970; 0: none does."""
        soonest: i64 = 0
        for block in self._blocks:
            if block.live and block.soonest and (soonest == 0 or block.soonest < soonest):
                soonest = block.soonest
        return soonest

    def settled_before(self, time: i64) -> list[int]:
        """What came before `time` (in milliseconds) and no group waits for."""
        found: list[int] = []
        nth: i64 = 0
        while nth < len(self._blocks):
            block = self._blocks[nth]
            if block.live and block.time <= time:
                at: i64 = 0
                while at < len(block.address):
                    if (
                        block.address[at] != GONE
                        and i64(block.left[at]) <= 0
                        and block.time + i64(block.age[at]) <= time
                    ):
                        found.append(int(((self._first + nth) << BLOCK_BITS) + at))
                    at += 1
            nth += 1
        return found
