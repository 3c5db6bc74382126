"""One partition of a queue: which messages it holds, and their addresses in the store.

The metadata of a message takes 27 bytes in columns of native integers (`message_columns.py`), so a
million messages cost some 30 MB; bodies are on disk, and in a cache while they are new. Sequences
are never reused: `(pid, seq)` identifies a message forever.

Dense blocks cover the newest sequences without a gap, and their number is bounded by the number of
live messages. Old live messages (a stuck one, or last values of keys that are no longer written)
are in sparse blocks. So memory depends on the number of live messages, however far apart they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.vecs import append
from mypy_extensions import i16, i32, i64, u8

from sluice.message import DELAYED, PRIORITY_MASK, TOMBSTONE, Message
from sluice.queues.log import LoggedPartition
from sluice.queues.model.containers.held_key import NO_HELD_KEYS, HeldKey
from sluice.queues.model.containers.message_columns import (
    BLOCK_BITS,
    BLOCK_SIZE,
    NO_ADDRESS,
    Block,
    make_sparse_block,
)
from sluice.queues.model.delivery_lease import LEASED

if TYPE_CHECKING:
    from sluice.queues.log import NoteWriter
    from sluice.queues.model.cursor import Cursor
    from sluice.queues.model.queue import Queue

MIN_DENSE_BLOCKS: Final = 8  # a partition may always have so many

# Shared empty containers of idle partitions: see `cursor.py`.
NO_TARGETS: Final[dict[int, int]] = {}
NO_DELAYED: Final[set[int]] = set()
NO_DUE_TIMES: Final[dict[int, int]] = {}
_NO_BODIES: Final[dict[object, Message]] = {}
_NO_BLOCKS: Final[list[Block]] = []

# Represents each block without live messages.
_EMPTY_BLOCK: Final = Block(0)


class Partition(LoggedPartition):
    def __init__(self, queue: Queue, pid: i64, number: i64) -> None:
        super().__init__(pid)  # its number among the partitions of all queues; never reused
        self.queue: Queue = queue
        self.number: i64 = number  # within its queue
        self.restored_end: i64 = 0  # lower sequences were there when the store was opened
        # Of delayed messages below this sequence, only the body tells the arrival.
        self.undated_end: i64 = 0
        self.live_count: i64 = 0
        self.last_delivery_at: float = 0.0  # 0.0: none since the start
        # The last message without a key.
        self.last_keyless_seq: i64 = -1
        self.cursors: list[Cursor] = []
        # Bodies that need no read, by sequence.
        self.cached_bodies: dict[object, Message] = _NO_BODIES
        self.is_in_body_cache: bool = False  # the cache tracks `cached_bodies`
        # Keys that are held because of a message here: a dead letter, or one that was redriven.
        self.held_keys: dict[int, HeldKey] = NO_HELD_KEYS
        # Messages for a single group: sequence to gid.
        self.target_groups: dict[int, int] = NO_TARGETS
        self.delayed_seqs: set[int] = NO_DELAYED  # messages that are not due yet
        # When stored messages with a delay were due, in milliseconds since 1970.
        self.due_times_ms: dict[int, int] = NO_DUE_TIMES
        # When messages are due after a command moved them, in milliseconds since 1970. Entries of
        # deleted messages stay until the next snapshot.
        self.rescheduled: dict[int, int] = NO_DUE_TIMES
        # A message with a delay may be stored, even if its delay is over.
        self.has_delayed: bool = False
        # When the next search for expired messages is due, in seconds; 0: not scheduled.
        self.expiry_check_at: i64 = 0
        # the same for settled messages whose retention is over
        self.retention_check_at: float = 0.0
        self._blocks: list[Block] = _NO_BLOCKS
        self._first_block: i64 = 0  # number of the first block
        self._sparse_blocks: list[Block] = _NO_BLOCKS  # older messages

    # ---- metadata of a message

    def find_block(self, seq: i64) -> Block | None:
        """Return the block with the metadata of `seq`, or None if the message is not stored."""
        nth: i64 = (seq >> BLOCK_BITS) - self._first_block
        if nth < 0:
            return self._find_sparse_block(seq) if self._sparse_blocks else None
        if nth >= len(self._blocks):
            return None
        block = self._blocks[nth]
        return block if (seq & (BLOCK_SIZE - 1)) < len(block.address) else None

    def _find_sparse_block(self, seq: i64) -> Block | None:
        nth = self._sparse_block_index(seq)
        if nth < len(self._sparse_blocks):
            sparse = self._sparse_blocks[nth]
            if sparse.search(seq):
                return sparse
        return None

    def _sparse_block_index(self, seq: i64) -> i64:
        """Return the index of the first sparse block that ends at or after `seq`."""
        low: i64 = 0
        high: i64 = len(self._sparse_blocks)
        while low < high:
            middle: i64 = (low + high) >> 1
            sparse = self._sparse_blocks[middle]
            if sparse.seqs[i64(len(sparse.seqs)) - 1] < seq:
                low = middle + 1
            else:
                high = middle
        return low

    def address(self, seq: i64) -> i64:
        """Return the address in the store, or NO_ADDRESS."""
        block = self.find_block(seq)
        return NO_ADDRESS if block is None else block.address[block.index_of(seq)]

    def holds(self, seq: i64) -> bool:
        """Return whether the message `seq` is stored."""
        return self.address(seq) != NO_ADDRESS

    def priority(self, seq: i64) -> i64:
        block = self.find_block(seq)
        return 0 if block is None else i64(block.flags[block.index_of(seq)]) & PRIORITY_MASK

    def flags(self, seq: i64) -> i64:
        block = self.find_block(seq)
        return 0 if block is None else i64(block.flags[block.index_of(seq)])

    def key_hash(self, seq: i64) -> i64:
        """Return the hash of the partition key; 0 for none."""
        block = self.find_block(seq)
        return 0 if block is None else i64(block.key_hash[block.index_of(seq)]) & 0xFFFF_FFFF

    def expires(self, seq: i64) -> i64:
        """Return the expiry in seconds since 1970; 0: never."""
        block = self.find_block(seq)
        return 0 if block is None else i64(block.expires[block.index_of(seq)]) & 0xFFFF_FFFF

    def has_expired(self, seq: i64, now: float) -> bool:
        expires = self.expires(seq)
        return expires != 0 and float(expires) <= now

    def arrival_ms(self, seq: i64) -> i64:
        """Return the arrival in milliseconds since 1970."""
        block = self.find_block(seq)
        return (
            0
            if block is None
            else block.base_time_ms + i64(block.arrival_offset_ms[block.index_of(seq)])
        )

    def is_for_group(self, seq: i64, gid: i64) -> bool:
        """Return whether `seq` is for the group: a redriven message may be for one only."""
        return not self.target_groups or self.target_groups.get(int(seq), int(gid)) == gid

    def set_target_group(self, seq: i64, gid: i64) -> None:
        """Restrict the message `seq` to one group."""
        if self.target_groups is NO_TARGETS:
            self.target_groups = {}
        self.target_groups[int(seq)] = int(gid)

    def skip_for_other_groups(self, seq: i64, target_gid: i64) -> None:
        """Settle a new message for all groups except its target."""
        for cursor in self.cursors:
            if cursor.group.gid != target_gid:
                cursor.skip(seq)

    def has_cursor_near_end(self, max_backlog: i64) -> bool:
        """Return whether a group will need the next message soon.

        For groups with a larger backlog, the cache would drop the body before they need it.
        """
        for cursor in self.cursors:
            if self.next_seq - cursor.scan_position < max_backlog:
                return True
        return False

    def is_unleased(self, seq: i64) -> bool:
        """Return whether no consumer holds a lease of the message."""
        for cursor in self.cursors:
            lease = cursor.leases.get(int(seq))
            if lease is not None and lease.state == LEASED:
                return False
        return True

    def choose_if_out_of_order(self, seq: i64) -> None:
        """Let all groups deliver a message with a priority or a delay that is over."""
        for cursor in self.cursors:
            cursor.choose_if_out_of_order(seq)

    def due_ms(self, seq: i64) -> i64:
        """Return when a message was due: the end of its delay, else its arrival."""
        due: i64 = self.due_times_ms.get(int(seq), 0)
        return due or self.arrival_ms(seq)

    def end_delay(self, seq: i64, now: float) -> None:
        """Record that the delay of a stored message is over."""
        if self.due_times_ms is NO_DUE_TIMES:
            self.due_times_ms = {}
        self.due_times_ms[int(seq)] = int(now * 1000.0)

    def add_delayed(self, seq: i64) -> None:
        """Mark the message `seq` as not due yet."""
        if self.delayed_seqs is NO_DELAYED:
            self.delayed_seqs = set()
        self.delayed_seqs.add(int(seq))

    def reschedule(self, seq: i64, due_ms: i64, expires: i64) -> None:
        """Set another due time and expiry (in seconds; 0: never). The record keeps its own."""
        if self.rescheduled is NO_DUE_TIMES:
            self.rescheduled = {}
        self.rescheduled[int(seq)] = int(due_ms)
        block = self.find_block(seq)
        if block is not None:
            at = block.index_of(seq)
            block.expires[at] = i32(expires if expires < 0x8000_0000 else expires - 0x1_0000_0000)
            if expires and (block.min_expiry == 0 or expires < block.min_expiry):
                block.min_expiry = expires

    def add_held_key(self, seq: i64, held: HeldKey) -> None:
        """Remember that the end of the message `seq` may release a key."""
        if not self.held_keys:
            self.held_keys = {}
        self.held_keys[int(seq)] = held

    def mark_delayed(self, seq: i64) -> None:
        """Let the scan skip a message: it is delivered when it is due."""
        self.has_delayed = True
        block = self.find_block(seq)
        if block is not None:
            at = block.index_of(seq)
            block.flags[at] = u8(i64(block.flags[at]) | DELAYED)

    # ---- adding and removing

    def append(
        self,
        address: i64,
        size: i64,
        key_hash: i64,
        expires: i64,
        flags: i64,
        pending_groups: i64,
        arrival_ms: i64,
    ) -> i64:
        """Add a new message and count it; return its sequence."""
        seq = self.next_seq
        self.insert(seq, address, size, key_hash, expires, flags, pending_groups, arrival_ms)
        self.queue.depth += 1
        self.queue.enqueued += 1
        return seq

    def insert(
        self,
        seq: i64,
        address: i64,
        size: i64,
        key_hash: i64,
        expires: i64,
        flags: i64,
        pending_groups: i64,
        arrival_ms: i64,
    ) -> None:
        """Add the message `seq`, in any order: compaction moves records after newer ones.

        `arrival_ms` is 0 if the arrival is unknown; then that of the neighbors is used. The depth
        of the queue is counted by `append` and `restore_pending_groups`.
        """
        self.queue.bytes += size
        if key_hash == 0 and seq > self.last_keyless_seq:
            self.last_keyless_seq = seq
        block_number: i64 = seq >> BLOCK_BITS
        if not self._blocks and block_number > self._last_sparse_seq() >> BLOCK_BITS:
            self._first_block = block_number
        if block_number < self._first_block:
            self._insert_sparse(
                seq, address, size, key_hash, expires, flags, pending_groups, arrival_ms
            )
            return
        if block_number - self._first_block - len(self._blocks) > MIN_DENSE_BLOCKS + (
            self.live_count >> (BLOCK_BITS - 1)
        ):
            self._make_all_sparse(block_number)
        if not self._blocks:
            self._blocks = []  # replace the shared empty list
        while self._first_block + len(self._blocks) <= block_number:
            self._blocks.append(_EMPTY_BLOCK)
            if len(self._blocks) > MIN_DENSE_BLOCKS:
                self._make_oldest_sparse(block_number)
        block = self._blocks[block_number - self._first_block]
        if block is _EMPTY_BLOCK:
            block = Block(block_number << BLOCK_BITS)
            self._blocks[block_number - self._first_block] = block
        if block.address_snapshot is not None:
            block.address_snapshot.preserve()
        index: i64 = seq & (BLOCK_SIZE - 1)
        while len(block.address) < index:
            block.add(NO_ADDRESS, 0, 0, 0, 0, 0, 0)
        if arrival_ms == 0:
            arrival_ms = block.max_arrival_ms
        offset_ms = block.record_arrival(arrival_ms, expires)
        if len(block.address) == index:
            block.add(address, size, key_hash, expires, offset_ms, flags, pending_groups)
        else:
            block.set_at(index, address, size, key_hash, expires, offset_ms, flags, pending_groups)
        block.live_count += 1
        self.live_count += 1
        if seq >= self.next_seq:
            self.next_seq = seq + 1

    def _insert_sparse(
        self,
        seq: i64,
        address: i64,
        size: i64,
        key_hash: i64,
        expires: i64,
        flags: i64,
        pending_groups: i64,
        arrival_ms: i64,
    ) -> None:
        """Add a message that is older than every dense block."""
        nth = self._sparse_block_index(seq)
        single = Block(-1)
        if arrival_ms == 0 and nth < len(self._sparse_blocks):
            arrival_ms = self._sparse_blocks[nth].max_arrival_ms
        single.seqs = append(single.seqs, seq)
        single.add(
            address,
            size,
            key_hash,
            expires,
            single.record_arrival(arrival_ms, expires),
            flags,
            pending_groups,
        )
        single.live_count = 1
        self.live_count += 1
        if nth == len(self._sparse_blocks):
            self._append_sparse(single)
            return
        sparse = self._sparse_blocks[nth]
        sparse.search(seq)
        at = sparse.search_index
        before = Block(-1)
        before.append_live_from(sparse, 0, at)
        before.append_live_from(single, 0, 1)
        self._sparse_blocks[nth] = before
        if sparse.live_count < BLOCK_SIZE:
            before.append_live_from(sparse, at, len(sparse.seqs))
        else:
            following = Block(-1)
            following.append_live_from(sparse, at, len(sparse.seqs))
            self._sparse_blocks.insert(nth + 1, following)

    def _last_sparse_seq(self) -> i64:
        if not self._sparse_blocks:
            return -1
        seqs = self._sparse_blocks[-1].seqs
        return seqs[i64(len(seqs)) - 1]

    def _make_oldest_sparse(self, block_number: i64) -> None:
        """Limit dense blocks to twice the live messages; `block_number` is still needed."""
        while (
            len(self._blocks) > MIN_DENSE_BLOCKS + (self.live_count >> (BLOCK_BITS - 1))
            and self._first_block < block_number
        ):
            block = self._blocks.pop(0)
            self._first_block += 1
            if block.live_count:
                self._append_sparse(block)

    def _make_all_sparse(self, block_number: i64) -> None:
        """Convert all dense blocks: the next block is so far ahead that none of them would stay."""
        while self._blocks:
            block = self._blocks.pop(0)
            if block.live_count:
                self._append_sparse(block)
        self._first_block = block_number

    def _append_sparse(self, block: Block) -> None:
        last: i64 = i64(len(self._sparse_blocks)) - 1
        if last >= 0 and self._sparse_blocks[last].live_count + block.live_count <= BLOCK_SIZE:
            sparse = self._sparse_blocks[last]
            if len(sparse.seqs) > sparse.live_count:
                self._sparse_blocks[last] = make_sparse_block(sparse, block)
            else:
                if sparse.address_snapshot is not None:
                    sparse.address_snapshot.preserve()
                sparse.append_live_from(block, 0, len(block.address))
        elif last >= 0:
            self._sparse_blocks.append(make_sparse_block(block))
        else:
            self._sparse_blocks = [make_sparse_block(block)]

    def set_address(self, seq: i64, address: i64) -> None:
        """Set the new address of a record that was moved."""
        block = self.find_block(seq)
        if block is not None:
            block.address[block.index_of(seq)] = address

    def remove(self, seq: i64) -> i64:
        """Remove a message; return the address it had, or NO_ADDRESS."""
        block = self.find_block(seq)
        if block is None:
            return NO_ADDRESS
        at = block.index_of(seq)
        address = block.address[at]
        if address == NO_ADDRESS:
            return NO_ADDRESS
        queue = self.queue
        queue.bytes -= i64(block.size[at])
        if self.due_times_ms:
            self.due_times_ms.pop(int(seq), None)
        if i64(block.pending_groups[at]) > 0 or self.counts_without_groups():
            queue.depth -= 1
        if block.address_snapshot is not None:
            block.address_snapshot.preserve()
        block.address[at] = NO_ADDRESS
        block.live_count -= 1
        self.live_count -= 1
        if self.target_groups:
            self.target_groups.pop(int(seq), None)
        if block.base < 0:
            self._shrink_sparse(seq, block)
        elif block.live_count == 0 and (seq >> BLOCK_BITS) < (self.next_seq >> BLOCK_BITS):
            self._blocks[(seq >> BLOCK_BITS) - self._first_block] = _EMPTY_BLOCK
            self._drop_empty_blocks()
        return address

    def _drop_empty_blocks(self) -> None:
        """Drop the oldest dense blocks that have no live messages."""
        while self._blocks and self._blocks[0] is _EMPTY_BLOCK:
            self._blocks.pop(0)
            self._first_block += 1

    def _shrink_sparse(self, seq: i64, sparse: Block) -> None:
        """Compact a sparse block when half of it is deleted.

        It is merged with a neighbor if one block can hold both.
        """
        if len(sparse.seqs) <= 2 * sparse.live_count:
            return
        nth = self._sparse_block_index(seq)
        if sparse.live_count == 0:
            self._sparse_blocks.pop(nth)
            return
        if nth > 0 and self._sparse_blocks[nth - 1].live_count + sparse.live_count <= BLOCK_SIZE:
            self._sparse_blocks[nth - 1] = make_sparse_block(self._sparse_blocks[nth - 1], sparse)
            self._sparse_blocks.pop(nth)
        elif (
            nth + 1 < len(self._sparse_blocks)
            and self._sparse_blocks[nth + 1].live_count + sparse.live_count <= BLOCK_SIZE
        ):
            self._sparse_blocks[nth] = make_sparse_block(sparse, self._sparse_blocks[nth + 1])
            self._sparse_blocks.pop(nth + 1)
        else:
            self._sparse_blocks[nth] = make_sparse_block(sparse)

    # ---- groups that have to settle a message, and the depth of the queue

    def counts_without_groups(self) -> bool:
        """Return whether messages that no group has to settle count in the depth.

        They count while they wait for a first group, or for a group that starts before them, and in
        a compacted queue. They do not count if they are stored for the retention alone.
        """
        if not self.cursors:
            return True
        rules = self.queue.rules
        return rules.retention <= 0.0 or rules.is_compacted

    def stays_when_settled(self, seq: i64) -> bool:
        """Return whether a message stays stored when every group has settled it.

        A compacted queue keeps the last value of a key, but no tombstone.
        """
        rules = self.queue.rules
        if rules.is_compacted:
            return self.flags(seq) & TOMBSTONE == 0
        return rules.retention > 0.0

    def pending_groups(self, seq: i64) -> i64:
        block = self.find_block(seq)
        return 0 if block is None else i64(block.pending_groups[block.index_of(seq)])

    def is_in_depth(self, seq: i64) -> bool:
        """Return whether a stored message counts in the depth of the queue."""
        return self.pending_groups(seq) > 0 or self.counts_without_groups()

    def add_pending_group(self, seq: i64) -> None:
        """Count one more group that has to settle a message."""
        block = self.find_block(seq)
        if block is None:
            return
        at = block.index_of(seq)
        pending_groups: i64 = i64(block.pending_groups[at])
        if pending_groups <= 0 and not self.counts_without_groups():
            self.queue.depth += 1
        block.pending_groups[at] = i16(pending_groups + 1)

    def remove_pending_group(self, seq: i64) -> bool:
        """Count one pending group less; return whether it was the last one of a stored message."""
        block = self.find_block(seq)
        if block is None:
            return False
        at = block.index_of(seq)
        remaining: i64 = i64(block.pending_groups[at]) - 1
        block.pending_groups[at] = i16(remaining)
        if remaining > 0 or block.address[at] == NO_ADDRESS:
            return False
        if not self.counts_without_groups():
            self.queue.depth -= 1
        return True

    def remove_all_pending_groups(self, seq: i64) -> None:
        """Let a message wait for the next group: the last group is deleted."""
        if not self.is_in_depth(seq):
            self.queue.depth += 1
        block = self.find_block(seq)
        if block is not None:
            block.pending_groups[block.index_of(seq)] = i16(0)

    def restore_pending_groups(self, seq: i64, pending_groups: i64) -> None:
        """Set the groups that have to settle a message, and count it in the depth, at recovery."""
        block = self.find_block(seq)
        if block is not None:
            block.pending_groups[block.index_of(seq)] = i16(pending_groups)
            if pending_groups > 0 or self.counts_without_groups():
                self.queue.depth += 1

    def uncount_without_groups(self, end: i64) -> None:
        """Take messages before `end` that no group has to settle out of the depth.

        Called when their meaning changes: the first group starts after them, or settled messages
        have a retention from now on.
        """
        if self.counts_without_groups():
            return
        seq = self.first_live(0)
        while seq < end:
            if self.pending_groups(seq) <= 0:
                self.queue.depth -= 1
            seq = self.first_live(seq + 1)

    # ---- iteration

    def all_blocks(self) -> list[Block]:
        """Return all blocks, oldest first: sparse blocks, then dense ones."""
        return self._sparse_blocks + self._blocks

    def first_live(self, start: i64) -> i64:
        """Return the first stored message at or after `start`; `next_seq` if there is none."""
        seq = start
        lowest: i64 = self._first_block << BLOCK_BITS
        if seq < lowest:
            if self._sparse_blocks:
                found = self._first_live_sparse(seq)
                if found >= 0:
                    return found
            seq = lowest
        while seq < self.next_seq:
            nth: i64 = (seq >> BLOCK_BITS) - self._first_block
            if nth >= len(self._blocks):
                return self.next_seq
            block = self._blocks[nth]
            at: i64 = seq & (BLOCK_SIZE - 1)
            if block.live_count == 0 or at >= len(block.address):
                seq = ((seq >> BLOCK_BITS) + 1) << BLOCK_BITS
            elif block.address[at] != NO_ADDRESS:
                return seq
            else:
                seq += 1
        return self.next_seq

    def _first_live_sparse(self, seq: i64) -> i64:
        nth = self._sparse_block_index(seq)
        while nth < len(self._sparse_blocks):
            sparse = self._sparse_blocks[nth]
            sparse.search(seq)
            at = sparse.search_index
            while at < len(sparse.seqs):
                if sparse.address[at] != NO_ADDRESS:
                    return sparse.seqs[at]
                at += 1
            nth += 1
        return -1

    def first_missing(self, start: i64, end: i64) -> i64:
        """Return the first deleted sequence from `start` to before `end`; -1 if all are stored."""
        seq = start
        while seq < end:
            block = self.find_block(seq)
            if block is None or block.address[block.index_of(seq)] == NO_ADDRESS:
                return seq
            if block.live_count == BLOCK_SIZE and block.base >= 0:
                seq = block.base + BLOCK_SIZE
            else:
                seq += 1
        return -1

    def deleted_ranges(self, start: i64) -> list[tuple[int, int]]:
        """Return (start, count) of the deleted ranges at or after `start`."""
        found: list[tuple[int, int]] = []
        at = start
        while at < self.next_seq:
            live = self.first_live(at)
            if live > at:
                found.append((int(at), int(live - at)))
            at = live + 1
        return found

    def write_delayed_arrivals(self, out: NoteWriter) -> None:
        """Write sequence and arrival (in milliseconds) of each stored message with a delay.

        Messages whose delay is over are included. Their number comes first. A separate pass counts
        them, because a list of them would take many times the memory of the written data.
        """
        count: i64 = 0
        if self.has_delayed:
            for block in self.all_blocks():
                at: i64 = 0
                while block.live_count and at < len(block.address):
                    if block.address[at] != NO_ADDRESS and i64(block.flags[at]) & DELAYED:
                        count += 1
                    at += 1
        self.has_delayed = count > 0
        out.write_int(count)
        if not count:
            return
        for block in self.all_blocks():
            at = 0
            while block.live_count and at < len(block.address):
                if block.address[at] != NO_ADDRESS and i64(block.flags[at]) & DELAYED:
                    out.write_int(block.seq_at(at))
                    out.write_int(block.base_time_ms + i64(block.arrival_offset_ms[at]))
                at += 1

    def first_arrived_since(self, since_ms: i64) -> i64:
        """Return the first message that may have arrived at `since_ms` or later, else `next_seq`.

        Messages arrive in the order of their sequences, so a message with an unknown arrival
        arrived between its neighbors.
        """
        found = self.first_known_arrival_since(since_ms)
        blocks = self.all_blocks()
        nth: i64 = i64(len(blocks)) - 1
        while nth >= 0:
            block = blocks[nth]
            nth -= 1
            at: i64 = i64(len(block.address)) - 1 if block.live_count and block.base < found else -1
            while at >= 0:
                if block.address[at] != NO_ADDRESS and block.seq_at(at) < found:
                    if self._is_arrival_known(block, at):
                        return found
                    found = block.seq_at(at)
                at -= 1
        return found

    def first_known_arrival_since(self, since_ms: i64) -> i64:
        """Return the first message whose known arrival is `since_ms` or later, else `next_seq`."""
        for blocks in (self._sparse_blocks, self._blocks):
            for block in blocks:
                if block.live_count and block.max_arrival_ms >= since_ms:
                    at: i64 = 0
                    while at < len(block.address):
                        if (
                            block.address[at] != NO_ADDRESS
                            and block.base_time_ms + i64(block.arrival_offset_ms[at]) >= since_ms
                            and self._is_arrival_known(block, at)
                        ):
                            return block.seq_at(at)
                        at += 1
        return self.next_seq

    def _is_arrival_known(self, block: Block, index: i64) -> bool:
        """Return whether the arrival is known: recovery restores the due time of delayed ones."""
        return i64(block.flags[index]) & DELAYED == 0 or block.seq_at(index) >= self.undated_end

    # ---- expiry and retention

    def find_expired(self, now: i64) -> list[int]:
        """Return the messages that have expired by `now` (in seconds)."""
        found: list[int] = []
        for blocks in (self._sparse_blocks, self._blocks):
            for block in blocks:
                if block.live_count and block.min_expiry and block.min_expiry <= now:
                    self._find_expired_in(block, now, found)
        return found

    def _find_expired_in(self, block: Block, now: i64, found: list[int]) -> None:
        soonest: i64 = 0
        at: i64 = 0
        while at < len(block.address):
            expires: i64 = i64(block.expires[at]) & 0xFFFF_FFFF
            if expires and block.address[at] != NO_ADDRESS:
                if expires <= now:
                    found.append(int(block.seq_at(at)))
                elif soonest == 0 or expires < soonest:
                    soonest = expires
            at += 1
        block.min_expiry = soonest

    def watch_expiry(self, seq: i64) -> None:
        """Include `seq` in the next search for expired messages.

        A search finds each message once. A message that was leased at that time stays, so the
        search must include it again if the message is to be delivered again.
        """
        block = self.find_block(seq)
        if block is None:
            return
        expires: i64 = i64(block.expires[block.index_of(seq)]) & 0xFFFF_FFFF
        if expires and (block.min_expiry == 0 or expires < block.min_expiry):
            block.min_expiry = expires

    def next_expiry(self) -> i64:
        """Return a lower bound of the next expiry, in seconds since 1970; 0: none."""
        soonest: i64 = 0
        for blocks in (self._sparse_blocks, self._blocks):
            for block in blocks:
                if (
                    block.live_count
                    and block.min_expiry
                    and (soonest == 0 or block.min_expiry < soonest)
                ):
                    soonest = block.min_expiry
        return soonest

    def find_settled_before(self, before_ms: i64) -> list[int]:
        """Return the messages that arrived before `before_ms` and have no pending groups."""
        found: list[int] = []
        for blocks in (self._sparse_blocks, self._blocks):
            for block in blocks:
                if block.live_count and block.min_arrival_ms <= before_ms:
                    at: i64 = 0
                    while at < len(block.address):
                        if (
                            block.address[at] != NO_ADDRESS
                            and i64(block.pending_groups[at]) <= 0
                            and block.base_time_ms + i64(block.arrival_offset_ms[at]) <= before_ms
                        ):
                            found.append(int(block.seq_at(at)))
                        at += 1
        return found
