"""One partition of a queue: which messages it holds, and where the store keeps them.

What is known of each message in memory is 27 bytes in columns of native integers (`block.py`), so that a million
waiting messages cost some 30 MB; bodies are on disk, and in a cache while they are young. Sequences are never reused: a
message is `(pid, seq)` for ever.

Blocks stand for the young end of the sequences, without a gap, and there are never many more of them than what lives
would fill. What is left at the old end, a stuck message or the last values of keys that nobody writes any more, is in
packs: so memory goes by what lives, however far apart that is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.vecs import append
from mypy_extensions import i16, i64

from sluice.message import DELAYED, PRIORITY_BITS, Message
from sluice.queues.model.message_columns import BLOCK, BLOCK_BITS, GONE, Block, pack_of

if TYPE_CHECKING:
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.log.frame_builder import NoteWriter
    from sluice.queues.model.queue import Queue

FEW_BLOCKS: Final = 8  # that there may always be

# What a partition has before it has any: see the cursor's.
NO_TARGETS: Final[dict[int, int]] = {}
NOT_DELAYED: Final[set[int]] = set()
_NONE_REMOVED: Final[list[int]] = []
_NO_BODIES: Final[dict[object, Message]] = {}
_NO_BLOCKS: Final[list[Block]] = []

_DEAD: Final = Block(0)  # stands for every block in which nothing lives nor will live


class Partition:
    def __init__(self, queue: Queue, pid: i64, number: i64) -> None:
        self.queue: Queue = queue
        self.pid: i64 = pid
        self.number: i64 = number
        self.next: i64 = 0  # the sequence of the next message
        self.committed: i64 = 0  # messages below this are durable, and may be delivered
        self.restored: i64 = 0  # those below this were there when the store was opened
        self.undated: i64 = 0  # of those below this that have a delay, only the body tells when they came
        self.live: i64 = 0
        self.last_shared: i64 = -1  # the last message without a key; none of those behind it lacks one
        self.cursors: list[Cursor] = []
        self.young: dict[object, Message] = _NO_BODIES  # bodies that need no read, by sequence
        self.is_holder: bool = False  # is known to the cache
        self.targets: dict[int, int] = NO_TARGETS  # messages for one group alone, and its number
        self.delayed: set[int] = NOT_DELAYED  # messages whose time has not come
        self.has_delays: bool = False  # a message with a delay may be stored, also if its delay is over
        # Removed for every group since the last frame, on no group's request.
        self.removed: list[int] = _NONE_REMOVED
        self.touched: bool = False  # has messages in the frame that is being made
        self.expiry_set: i64 = 0  # when the next look for expired messages is due, in seconds; 0: none is set
        self.retention_set: float = 0.0  # the same for settled ones that were kept long enough
        self._blocks: list[Block] = _NO_BLOCKS
        self._first: i64 = 0  # number of the first block
        self._packs: list[Block] = _NO_BLOCKS  # what is older than that

    # ---- what is known of a message

    def block(self, seq: i64) -> Block | None:
        """The block with the columns of `seq`; None when nothing is known of it any more."""
        nth: i64 = (seq >> BLOCK_BITS) - self._first
        if nth < 0:
            return self._pack(seq) if self._packs else None
        if nth >= len(self._blocks):
            return None
        block = self._blocks[nth]
        return block if (seq & (BLOCK - 1)) < len(block.address) else None

    def _pack(self, seq: i64) -> Block | None:
        nth = self._nth_pack(seq)
        if nth < len(self._packs):
            pack = self._packs[nth]
            if pack.search(seq):
                return pack
        return None

    def _nth_pack(self, seq: i64) -> i64:
        """Of the first pack that ends at or behind `seq`."""
        low: i64 = 0
        high: i64 = len(self._packs)
        while low < high:
            middle: i64 = (low + high) >> 1
            pack = self._packs[middle]
            if pack.seqs[i64(len(pack.seqs)) - 1] < seq:
                low = middle + 1
            else:
                high = middle
        return low

    def address(self, seq: i64) -> i64:
        """Where the store keeps it; GONE when it does not."""
        block = self.block(seq)
        return GONE if block is None else block.address[block.at(seq)]

    def holds(self, seq: i64) -> bool:
        return self.address(seq) != GONE

    def priority(self, seq: i64) -> i64:
        block = self.block(seq)
        return 0 if block is None else i64(block.flags[block.at(seq)]) & PRIORITY_BITS

    def flags(self, seq: i64) -> i64:
        block = self.block(seq)
        return 0 if block is None else i64(block.flags[block.at(seq)])

    def expires(self, seq: i64) -> i64:
        """Seconds since 1970; 0: never."""
        block = self.block(seq)
        return 0 if block is None else i64(block.expires[block.at(seq)]) & 0xFFFF_FFFF

    def time(self, seq: i64) -> i64:
        """When it came, in milliseconds since 1970."""
        block = self.block(seq)
        return 0 if block is None else block.time + i64(block.age[block.at(seq)])

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
        if key == 0 and seq > self.last_shared:
            self.last_shared = seq
        number: i64 = seq >> BLOCK_BITS
        if not self._blocks and number > self._last_packed() >> BLOCK_BITS:
            self._first = number
        if number < self._first:
            self._insert_old(seq, address, size, key, expires, flags, left, time)
            return
        if number - self._first - len(self._blocks) > FEW_BLOCKS + (self.live >> (BLOCK_BITS - 1)):
            self._pack_all(number)
        if not self._blocks:
            self._blocks = []  # no longer the one that all share
        while self._first + len(self._blocks) <= number:
            self._blocks.append(_DEAD)
            if len(self._blocks) > FEW_BLOCKS:
                self._pack_oldest(number)
        block = self._blocks[number - self._first]
        if block is _DEAD:
            block = Block(number << BLOCK_BITS)
            self._blocks[number - self._first] = block
        if block.outline is not None:
            block.outline.keep()
        at: i64 = seq & (BLOCK - 1)
        while len(block.address) < at:
            block.add(GONE, 0, 0, 0, 0, 0, 0)
        if time == 0:
            time = block.latest
        age = block.hear(time, expires)
        if len(block.address) == at:
            block.add(address, size, key, expires, age, flags, left)
        else:
            block.put(at, address, size, key, expires, age, flags, left)
        block.live += 1
        self.live += 1
        if seq >= self.next:
            self.next = seq + 1

    def _insert_old(
        self, seq: i64, address: i64, size: i64, key: i64, expires: i64, flags: i64, left: i64, time: i64
    ) -> None:
        """The same for one that is older than every block."""
        nth = self._nth_pack(seq)
        one = Block(-1)
        if time == 0 and nth < len(self._packs):
            time = self._packs[nth].latest
        one.seqs = append(one.seqs, seq)
        one.add(address, size, key, expires, one.hear(time, expires), flags, left)
        one.live = 1
        self.live += 1
        if nth == len(self._packs):
            self._add_pack(one)
            return
        pack = self._packs[nth]
        pack.search(seq)
        at = pack.hit
        before = Block(-1)
        before.take_over(pack, 0, at)
        before.take_over(one, 0, 1)
        self._packs[nth] = before
        if pack.live < BLOCK:
            before.take_over(pack, at, len(pack.seqs))
        else:
            behind = Block(-1)
            behind.take_over(pack, at, len(pack.seqs))
            self._packs.insert(nth + 1, behind)

    def _last_packed(self) -> i64:
        if not self._packs:
            return -1
        seqs = self._packs[-1].seqs
        return seqs[i64(len(seqs)) - 1]

    def _pack_oldest(self, number: i64) -> None:
        """Let there be no more blocks than would hold twice what lives; `number` is needed yet."""
        while len(self._blocks) > FEW_BLOCKS + (self.live >> (BLOCK_BITS - 1)) and self._first < number:
            block = self._blocks.pop(0)
            self._first += 1
            if block.live:
                self._add_pack(block)

    def _pack_all(self, number: i64) -> None:
        """The next block is so far ahead that none of those before it would stay."""
        while self._blocks:
            block = self._blocks.pop(0)
            if block.live:
                self._add_pack(block)
        self._first = number

    def _add_pack(self, block: Block) -> None:
        last: i64 = i64(len(self._packs)) - 1
        if last >= 0 and self._packs[last].live + block.live <= BLOCK:
            pack = self._packs[last]
            if len(pack.seqs) > pack.live:
                self._packs[last] = pack_of(pack, block)
            else:
                if pack.outline is not None:
                    pack.outline.keep()
                pack.take_over(block, 0, len(block.address))
        elif last >= 0:
            self._packs.append(pack_of(block))
        else:
            self._packs = [pack_of(block)]

    def move(self, seq: i64, address: i64) -> None:
        """Its record stands elsewhere now."""
        block = self.block(seq)
        if block is not None:
            block.address[block.at(seq)] = address

    def remove(self, seq: i64) -> i64:
        """Forget a message; the address it had, or GONE."""
        block = self.block(seq)
        if block is None:
            return GONE
        at = block.at(seq)
        address = block.address[at]
        if address == GONE:
            return GONE
        if block.outline is not None:
            block.outline.keep()
        block.address[at] = GONE
        block.live -= 1
        self.live -= 1
        if self.targets:
            self.targets.pop(int(seq), None)
        if block.base < 0:
            self._thin_packs(seq, block)
        elif block.live == 0 and (seq >> BLOCK_BITS) < (self.next >> BLOCK_BITS):
            self._blocks[(seq >> BLOCK_BITS) - self._first] = _DEAD
            self._trim()
        return address

    def _trim(self) -> None:
        """Let go of the blocks at the front in which nothing lives any more."""
        while self._blocks and self._blocks[0] is _DEAD:
            self._blocks.pop(0)
            self._first += 1

    def _thin_packs(self, seq: i64, pack: Block) -> None:
        """Something has gone from a pack. When half of it has, the rest moves together, with that of a neighbour if
        one pack can hold both."""
        if len(pack.seqs) <= 2 * pack.live:
            return
        nth = self._nth_pack(seq)
        if pack.live == 0:
            self._packs.pop(nth)
            return
        if nth > 0 and self._packs[nth - 1].live + pack.live <= BLOCK:
            self._packs[nth - 1] = pack_of(self._packs[nth - 1], pack)
            self._packs.pop(nth)
        elif nth + 1 < len(self._packs) and self._packs[nth + 1].live + pack.live <= BLOCK:
            self._packs[nth] = pack_of(pack, self._packs[nth + 1])
            self._packs.pop(nth + 1)
        else:
            self._packs[nth] = pack_of(pack)

    def settle_one(self, seq: i64) -> bool:
        """One group less has to settle `seq`; whether it was the last one."""
        block = self.block(seq)
        if block is None:
            return False
        at = block.at(seq)
        left: i64 = i64(block.left[at]) - 1
        block.left[at] = i16(left)
        return left <= 0 and block.address[at] != GONE

    def set_left(self, seq: i64, left: i64) -> None:
        block = self.block(seq)
        if block is not None:
            block.left[block.at(seq)] = i16(left)

    def left(self, seq: i64) -> i64:
        block = self.block(seq)
        return 0 if block is None else i64(block.left[block.at(seq)])

    # ---- walking

    def all_blocks(self) -> list[Block]:
        """Oldest first, packs before the others."""
        return self._packs + self._blocks

    def first_live(self, start: i64) -> i64:
        """The first message that is here at or behind `start`; `next` when there is none."""
        seq = start
        lowest: i64 = self._first << BLOCK_BITS
        if seq < lowest:
            if self._packs:
                found = self._first_packed(seq)
                if found >= 0:
                    return found
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

    def _first_packed(self, seq: i64) -> i64:
        nth = self._nth_pack(seq)
        while nth < len(self._packs):
            pack = self._packs[nth]
            pack.search(seq)
            at = pack.hit
            while at < len(pack.seqs):
                if pack.address[at] != GONE:
                    return pack.seqs[at]
                at += 1
            nth += 1
        return -1

    def first_gone(self, start: i64, end: i64) -> i64:
        """The first sequence from `start` on, before `end`, that is not here any more; -1 when all are."""
        seq = start
        while seq < end:
            block = self.block(seq)
            if block is None or block.address[block.at(seq)] == GONE:
                return seq
            if block.live == BLOCK and block.base >= 0:
                seq = block.base + BLOCK
            else:
                seq += 1
        return -1

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

    def write_delayed_arrivals(self, out: NoteWriter) -> None:
        """Write sequence and arrival (in milliseconds) of each stored message that has or had a delay.

        Their number comes first. They are counted in a pass of its own, because a list of them would take many times
        the memory of what is written.
        """
        count: i64 = 0
        if self.has_delays:
            for block in self.all_blocks():
                at: i64 = 0
                while block.live and at < len(block.address):
                    if block.address[at] != GONE and i64(block.flags[at]) & DELAYED:
                        count += 1
                    at += 1
        self.has_delays = count > 0
        out.number(count)
        if not count:
            return
        for block in self.all_blocks():
            at = 0
            while block.live and at < len(block.address):
                if block.address[at] != GONE and i64(block.flags[at]) & DELAYED:
                    out.number(block.seq(at))
                    out.number(block.time + i64(block.age[at]))
                at += 1

    def first_since(self, time: i64) -> i64:
        """The first message that may have come at `time` (in milliseconds) or later; `next` when there is none. They
        came in the order of their sequences, so those of which it is not known came between their neighbours."""
        found = self.first_dated_since(time)
        blocks = self.all_blocks()
        nth: i64 = i64(len(blocks)) - 1
        while nth >= 0:
            block = blocks[nth]
            nth -= 1
            at: i64 = i64(len(block.address)) - 1 if block.live and block.base < found else -1
            while at >= 0:
                if block.address[at] != GONE and block.seq(at) < found:
                    if self._is_dated(block, at):
                        return found
                    found = block.seq(at)
                at -= 1
        return found

    def first_dated_since(self, time: i64) -> i64:
        """The first one that is known to have."""
        for blocks in (self._packs, self._blocks):
            for block in blocks:
                if block.live and block.latest >= time:
                    at: i64 = 0
                    while at < len(block.address):
                        if (
                            block.address[at] != GONE
                            and block.time + i64(block.age[at]) >= time
                            and self._is_dated(block, at)
                        ):
                            return block.seq(at)
                        at += 1
        return self.next

    def _is_dated(self, block: Block, at: i64) -> bool:
        """Whether it is known when a message came: an index says of a delayed one when it is due instead."""
        return i64(block.flags[at]) & DELAYED == 0 or block.seq(at) >= self.undated

    # ---- blocks in which something is due

    def expired(self, now: i64) -> list[int]:
        """What has expired by `now` (in seconds)."""
        found: list[int] = []
        for blocks in (self._packs, self._blocks):
            for block in blocks:
                if block.live and block.soonest and block.soonest <= now:
                    self._expired_in(block, now, found)
        return found

    def _expired_in(self, block: Block, now: i64, found: list[int]) -> None:
        soonest: i64 = 0
        at: i64 = 0
        while at < len(block.address):
            expires: i64 = i64(block.expires[at]) & 0xFFFF_FFFF
            if expires and block.address[at] != GONE:
                if expires <= now:
                    found.append(int(block.seq(at)))
                elif soonest == 0 or expires < soonest:
                    soonest = expires
            at += 1
        block.soonest = soonest

    def watch_expiry(self, seq: i64) -> None:
        """Include `seq` in the next search for expired messages.

        A search finds each message once. One that a client held at that time stays, so it must be
        searched for again if it is to be delivered again.
        """
        block = self.block(seq)
        if block is None:
            return
        expires: i64 = i64(block.expires[block.at(seq)]) & 0xFFFF_FFFF
        if expires and (block.soonest == 0 or expires < block.soonest):
            block.soonest = expires

    def next_expiry(self) -> i64:
        """When the next message may expire, in seconds since 1970; 0: none does."""
        soonest: i64 = 0
        for blocks in (self._packs, self._blocks):
            for block in blocks:
                if block.live and block.soonest and (soonest == 0 or block.soonest < soonest):
                    soonest = block.soonest
        return soonest

    def settled_before(self, time: i64) -> list[int]:
        """What came before `time` (in milliseconds) and no group waits for."""
        found: list[int] = []
        for blocks in (self._packs, self._blocks):
            for block in blocks:
                if block.live and block.earliest <= time:
                    at: i64 = 0
                    while at < len(block.address):
                        if (
                            block.address[at] != GONE
                            and i64(block.left[at]) <= 0
                            and block.time + i64(block.age[at]) <= time
                        ):
                            found.append(int(block.seq(at)))
                        at += 1
        return found
