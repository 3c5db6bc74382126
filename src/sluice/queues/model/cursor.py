"""One group on one partition: what it may have next, in which order, and what it has settled.

    floor ───────────────▶ fresh ───────────────▶ committed
      all below: settled     leased, waiting for a retry,      not offered to this group yet
                             parked, or settled

The rule of order: of the messages with one key at most `batch_size` are out at a time, and a message counts as out from
the moment it is chosen until it is settled, retries included. Those behind it are parked under its key; messages of
other keys go on. What is parked is bounded: when it is too much, the cursor looks no further until some of it has gone.

A message is out in one of two ways, never in both: it is in `_chosen`, or it has a lease that is not READY.

Messages with a key go to the consumer of the partition. Those without a key, and every message of a queue without an
order, are shared: any consumer of the group may take them, so they have a heap of their own.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import DELAYED, PRIORITY_MASK, Message
from sluice.queues.log.frame_builder import (
    ACKED,
    DEAD,
    EXPIRED,
    PURGED,
    SETTLED,
    FrameBuilder,
    NoteWriter,
)
from sluice.queues.model.delivery_lease import READY, Lease
from sluice.queues.model.message_columns import NO_ADDRESS
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue_rules import STRICT
from sluice.queues.model.seq_fifo import SeqFifo

if TYPE_CHECKING:
    from sluice.queues.bulk.lost_ranges import LostRanges
    from sluice.queues.flow.history import HistoryEvent
    from sluice.queues.model.group import Group
    from sluice.queues.ports import Consumer

MAX_OUT_OF_ORDER_SCAN: Final = 65_536  # how many may lie before one that is taken out of its turn
MAX_PARKED: Final = (
    4096  # how many messages may be parked before the cursor stops looking for other keys
)
SEQUENCE_BITS: Final = 48
SEQUENCE_MASK: Final = (1 << 48) - 1
NO_GATE: Final = 0x7FFF_FFFF_FFFF_FFFF

# What a cursor has before it has any: most of a node's cursors are idle, and fifteen empty containers each would cost
# more than all the rest of it. Nothing is ever put into these; whoever puts makes its own first.
_NO_ACTIVE: Final[dict[object, int]] = {}
_NO_READY_KEYS: Final[dict[int, int]] = {}
_NO_FIFOS: Final[dict[object, SeqFifo]] = {}
_NO_HEAPS: Final[dict[object, list[int]]] = {}
_NO_GATED: Final[dict[int, list[int]]] = {}
_NO_RANKS: Final[list[int]] = []
_NO_SEQUENCES: Final[set[int]] = set()
_NO_BODIES: Final[dict[object, Message]] = {}
_NO_HELPERS: Final[list[Consumer]] = []
_NO_UNLOGGED: Final[list[list[int]]] = []


class Cursor:
    def __init__(self, group: Group, partition: Partition, low_watermark: i64) -> None:
        self.group: Group = group
        self.partition: Partition = partition
        self.consumer: Consumer | None = None
        self.low_watermark: i64 = low_watermark
        self.scan_position: i64 = low_watermark
        self.leases: dict[int, Lease] = {}  # whatever was delivered once and is not settled
        self.settled_seqs: set[int] = (
            _NO_SEQUENCES  # settled, above the floor, and kept for others or for its retention
        )
        self.is_waiting_for_body: bool = False  # cannot go on before a body has come
        self.is_prefetching: bool = False  # bodies are on their way that it will need
        self.prefetched_to: i64 = 0  # bodies before this sequence were asked for, if they had to be
        self.prefetched_bodies: dict[object, Message] = (
            _NO_BODIES  # bodies that were read for it, by sequence
        )
        self.is_in_body_cache: bool = False  # is known to the cache, for those
        self.awaited_body: Message | None = (
            None  # the body that was waited for, whatever the cache makes of it
        )
        self.awaited_seq: i64 = -1
        self.in_flight: i64 = 0  # leased right now
        self.delivered: i64 = 0  # since the start
        self.enqueued: i64 = 0  # messages that this group had to settle, up to `entered_to`
        self.enqueued_counted_to: i64 = partition.next_seq
        self.outcome_counts: list[int] = [0, 0, 0, 0]  # acked, dead, expired, purged
        self.gate_watermark: i64 = NO_GATE  # when the floor comes here, a gate opens for others
        self.released_history: dict[int, list[HistoryEvent]] | None = (
            None  # given back without a failure: see `history`
        )
        self.lost_ranges: LostRanges | None = None  # of a group that is read in bulk
        self.helpers: list[Consumer] = (
            _NO_HELPERS  # members without a partition, who share what has no key
        )
        self.next_helper: i64 = 0  # which of the consumer and its helpers is next
        self.is_listed_blocked: bool = (
            False  # is in its group's list of cursors with work that nobody has taken
        )
        self.blocked_since: float = (
            0.0  # since when messages wait because the consumer has no room; 0.0: none do
        )
        # Chosen, to be leased before anything fresh, by priority and sequence: with a key, and without.
        self._ready: list[int] = _NO_RANKS
        self._ready_shared: list[int] = _NO_RANKS
        self._ready_key_hashes: dict[int, int] = (
            _NO_READY_KEYS  # those, and the key that each keeps busy
        )
        # By key, which is a number; as an object it is made once for all that is asked of it.
        self._active_by_key: dict[object, int] = _NO_ACTIVE  # messages out
        self._parked: dict[object, SeqFifo] = (
            _NO_FIFOS  # in order, no more than LOOK_AHEAD and a few
        )
        self._parked_out_of_order: dict[object, list[int]] = (
            _NO_HEAPS  # the same for what goes by its priority
        )
        self._parked_count: i64 = 0
        self._gated: dict[int, list[int]] = (
            _NO_GATED  # keys behind an older partition that is not drained: see Gate
        )
        self._recheck_below: i64 = 0  # below this, what is fresh may have been leased already
        self._unlogged_settlements: list[list[int]] = (
            _NO_UNLOGGED  # settled since the last frame, by how
        )
        self._is_dirty: bool = False

    # ---- choosing

    def has_more(self) -> bool:
        """Whether `choose` is worth a call."""
        return (
            len(self._ready) > 0
            or len(self._ready_shared) > 0
            or (
                self.scan_position < self.partition.committed_end
                and self._parked_count < MAX_PARKED
            )
        )

    def has_shared(self) -> bool:
        """Return whether `choose_shared` is worth a call."""
        if self._ready_shared:
            return True
        partition = self.partition
        if (
            self.scan_position >= partition.committed_end
            or self._parked_count + len(self._ready) >= MAX_PARKED
        ):
            return False
        return (
            partition.queue.rules.ordering == 0 or self.scan_position <= partition.last_keyless_seq
        )

    def next_ready(self) -> i64:
        """The next message that may go out, now counted as out; -1 when there is none."""
        while self._ready or self._ready_shared:
            if not self._ready_shared or (
                len(self._ready) > 0 and self._ready[0] < self._ready_shared[0]
            ):
                seq: i64 = i64(heapq.heappop(self._ready)) & SEQUENCE_MASK
            else:
                seq = i64(heapq.heappop(self._ready_shared)) & SEQUENCE_MASK
            if self._ready_key_hashes.pop(int(seq), -1) >= 0:  # else it was settled meanwhile
                return seq
        return self._scan_next(self.partition.committed_end, False)

    def next_ready_shared(self) -> i64:
        """Return the next message that any consumer of the group may take, counted as out; -1 if there is none.

        Messages with a key that stand before it are admitted or parked on the way: they wait for the
        consumer of the partition.
        """
        while self._ready_shared:
            seq: i64 = i64(heapq.heappop(self._ready_shared)) & SEQUENCE_MASK
            if self._ready_key_hashes.pop(int(seq), -1) >= 0:
                return seq
        if not self.has_shared():
            return -1
        return self._scan_next(self.partition.committed_end, True)

    def has_deliverable(self) -> bool:
        """Return whether a message could go out now; unlike `has_more`, it looks for one."""
        seq = self.next_ready()
        if seq < 0:
            return False
        self.requeue(seq, self.partition.priority(seq), self.key_hash_of(seq))
        return True

    def _scan_next(self, end: i64, shared_only: bool) -> i64:
        """The same among those before `end` that were not looked at yet; `shared`: only those without a key."""
        partition = self.partition
        ordering = partition.queue.rules.ordering
        while self.scan_position < end and self._parked_count < MAX_PARKED:
            seq = self.scan_position
            self.scan_position = seq + 1
            block = partition.find_block(seq)
            if block is None:
                self.scan_position = min(partition.first_live(seq), end)
                continue
            at = block.index_of(seq)
            if block.address[at] == NO_ADDRESS:
                continue
            if self.settled_seqs and int(seq) in self.settled_seqs:
                continue
            if seq < self._recheck_below and (
                int(seq) in self.leases or int(seq) in self._ready_key_hashes
            ):
                continue
            if i64(block.flags[at]) & (DELAYED | PRIORITY_MASK):
                continue  # comes by its own way: when it is due, or before the others
            if ordering == 0:
                return seq
            key_hash: i64 = 1 if ordering == STRICT else i64(block.key_hash[at]) & 0xFFFF_FFFF
            if key_hash == 0:
                return seq
            if self._admit(seq, key_hash, -1):
                if not shared_only:
                    return seq
                self.requeue(seq, 0, key_hash)
                if self._parked_count + len(self._ready) >= MAX_PARKED:
                    return -1
        return -1

    def _admit(self, seq: i64, key_hash: i64, priority: i64) -> bool:
        """Count `seq` as out, or park it behind the messages of its key that are out. A `priority` that is not
        negative means that it comes out of turn."""
        boxed_key: object = int(key_hash)
        queue = self.partition.queue
        if queue.partition_gates and self.group.is_behind_gate(self.partition, seq, key_hash):
            if self._gated is _NO_GATED:
                self._gated = {}
            self._gated.setdefault(int(key_hash), []).append(int(seq))
            self._parked_count += 1
            return False
        active = self._active_by_key.get(boxed_key, 0)
        if active >= queue.rules.batch_size:
            self._parked_count += 1
            if priority >= 0:
                parked_heap = self._parked_out_of_order.get(boxed_key)
                if parked_heap is None:
                    if self._parked_out_of_order is _NO_HEAPS:
                        self._parked_out_of_order = {}
                    parked_heap = self._parked_out_of_order[boxed_key] = []
                heapq.heappush(parked_heap, _rank(seq, priority))
            else:
                parked_fifo = self._parked.get(boxed_key)
                if parked_fifo is None:
                    if self._parked is _NO_FIFOS:
                        self._parked = {}
                    parked_fifo = self._parked[boxed_key] = SeqFifo()
                parked_fifo.push(seq)
            return False
        if self._active_by_key is _NO_ACTIVE:
            self._active_by_key = {}
        self._active_by_key[boxed_key] = active + 1
        return True

    def key_hash_of(self, seq: i64) -> i64:
        """The key by which this group keeps `seq` in order; 0 for none."""
        ordering = self.partition.queue.rules.ordering
        if ordering == 0:
            return 0
        if ordering == STRICT:
            return 1
        block = self.partition.find_block(seq)
        return 0 if block is None else i64(block.key_hash[block.index_of(seq)]) & 0xFFFF_FFFF

    def admit_out_of_order(self, seq: i64, priority: i64) -> None:
        """A message that does not wait for its turn among the fresh ones: it has a priority, or its delay is over."""
        key_hash = self.key_hash_of(seq)
        if key_hash == 0 or self._admit(seq, key_hash, priority):
            self.requeue(seq, priority, key_hash)

    def requeue(self, seq: i64, priority: i64, key_hash: i64) -> None:
        """A chosen message that was not leased, or is to be leased again: it counts as out."""
        self._push_ready(seq, key_hash, _rank(seq, priority))

    def _push_ready(self, seq: i64, key_hash: i64, rank: int) -> None:
        if self._ready_key_hashes is _NO_READY_KEYS:
            self._ready_key_hashes = {}
        self._ready_key_hashes[int(seq)] = int(key_hash)
        if key_hash:
            if self._ready is _NO_RANKS:
                self._ready = []
            heapq.heappush(self._ready, rank)
        else:
            if self._ready_shared is _NO_RANKS:
                self._ready_shared = []
            heapq.heappush(self._ready_shared, rank)

    def suspend(self, seq: i64) -> None:
        """Not to be leased for now, and still out: its body is being read for its dead letter."""
        self._ready_key_hashes.pop(int(seq), None)

    def select_out_of_order(self, seq: i64) -> bool:
        """Choose `seq` before those that would be leased first; whether its place among those of its key allows it. It
        was out in an earlier life, so what lies before it is no more than was looked at then."""
        remaining: i64 = MAX_OUT_OF_ORDER_SCAN
        while self.scan_position <= seq and remaining > 0:
            earlier_seq = self._scan_next(seq + 1, False)
            if earlier_seq < 0:
                break
            self.requeue(
                earlier_seq, self.partition.priority(earlier_seq), self.key_hash_of(earlier_seq)
            )
            remaining -= 1
        return self._ready_key_hashes.pop(int(seq), -1) >= 0

    def open_gates(self) -> None:
        """An older partition has come far enough: what stood behind it may go, in order."""
        gated = self._gated
        self._gated = _NO_GATED
        for sequences in gated.values():
            self._parked_count -= len(sequences)
            live_seqs = [
                seq for seq in sequences if self.partition.holds(seq) and not self.is_settled(seq)
            ]
            for rank in sorted([_rank(seq, self.partition.priority(seq)) for seq in live_seqs]):
                seq: i64 = i64(rank) & SEQUENCE_MASK
                self.admit_out_of_order(seq, self.partition.priority(seq))

    def update_gate_watermark(self) -> None:
        """Look which gate this cursor's floor comes to next."""
        self.gate_watermark = NO_GATE
        number = self.partition.number
        for gate in self.partition.queue.partition_gates:
            if number < len(gate.boundary_seqs):
                boundary_seq: i64 = gate.boundary_seqs[number]
                if self.low_watermark < boundary_seq and boundary_seq < self.gate_watermark:
                    self.gate_watermark = boundary_seq

    def end_active(self, lease: Lease) -> None:
        """A delivery is over, whatever its state: it counts as out no more."""
        if lease.state == READY:
            self.withdraw(lease.seq)
        elif lease.key_hash:
            self._release_key(lease.key_hash)

    def withdraw(self, seq: i64) -> None:
        """It will not be leased after all; nothing happens if it was not chosen."""
        key_hash: i64 = self._ready_key_hashes.pop(int(seq), 0)
        if key_hash:
            self._release_key(key_hash)

    def _release_key(self, key_hash: i64) -> None:
        """One message less of this key is out: the next one of it is chosen."""
        boxed_key: object = int(key_hash)
        active = self._active_by_key.get(boxed_key, 0) - 1
        if self._parked_count and (
            boxed_key in self._parked
            or (len(self._parked_out_of_order) > 0 and boxed_key in self._parked_out_of_order)
        ):
            max_active = self.partition.queue.rules.batch_size
            while active < max_active:
                rank: i64 = self._pop_parked(boxed_key)
                if rank < 0:
                    break
                seq: i64 = rank & SEQUENCE_MASK
                if self.partition.holds(seq) and not self.is_settled(seq):
                    self._push_ready(seq, key_hash, int(rank))
                    active += 1
        if active > 0:
            self._active_by_key[boxed_key] = active
        elif active == 0:
            del self._active_by_key[boxed_key]

    def _pop_parked(self, boxed_key: object) -> i64:
        """Take the first of a key out of those that are parked; -1 when there is none."""
        parked_fifo = self._parked.get(boxed_key)
        parked_heap = (
            self._parked_out_of_order.get(boxed_key) if self._parked_out_of_order else None
        )
        rank: i64 = -1
        if parked_fifo is not None:
            rank = _rank(parked_fifo.peek(), 0)
        if parked_heap is not None and (rank < 0 or parked_heap[0] < rank):
            rank = heapq.heappop(parked_heap)
            if not parked_heap:
                del self._parked_out_of_order[boxed_key]
        elif parked_fifo is not None:
            parked_fifo.pop()
            if parked_fifo.peek() < 0:
                del self._parked[boxed_key]
        if rank >= 0:
            self._parked_count -= 1
        return rank

    def untouched_from(self) -> i64:
        """From here on nothing was leased or settled by itself."""
        if self.settled_seqs:
            return self.partition.next_seq
        return (
            self.scan_position if self.scan_position > self._recheck_below else self._recheck_below
        )

    # ---- settling

    def log_settlement(self, seq: i64, outcome: i64, journal: FrameBuilder) -> None:
        """For the frame that is being made."""
        if not self._is_dirty:
            self._is_dirty = True
            journal.add_dirty_cursor(self)
            if self._unlogged_settlements is _NO_UNLOGGED:
                self._unlogged_settlements = [[], [], [], []]
        self._unlogged_settlements[outcome].append(int(seq))

    def mark_settled(self, seq: i64, is_stored: bool) -> None:
        """`seq` needs no more of this group; `kept`: others still need it."""
        if seq == self.low_watermark:
            self.advance_watermark(seq + 1)
        elif is_stored and seq > self.low_watermark:
            if self.settled_seqs is _NO_SEQUENCES:
                self.settled_seqs = set()
            self.settled_seqs.add(int(seq))

    def advance_watermark(self, low_watermark: i64) -> None:
        """Move the floor to `floor`, and on over all that is settled or gone behind it."""
        settled_seqs = self.settled_seqs
        partition = self.partition
        end = partition.next_seq
        while low_watermark < end:
            if settled_seqs and int(low_watermark) in settled_seqs:
                settled_seqs.discard(int(low_watermark))
                low_watermark += 1
                continue
            block = partition.find_block(low_watermark)
            if block is None:
                low_watermark = partition.first_live(low_watermark)
            elif block.address[block.index_of(low_watermark)] == NO_ADDRESS:
                low_watermark += 1
            else:
                break
        if low_watermark > end:
            low_watermark = end
        self.low_watermark = low_watermark
        if self.scan_position < low_watermark:
            self.scan_position = low_watermark

    def is_settled(self, seq: i64) -> bool:
        """Whether a message that is kept needs no more of this group."""
        return seq < self.low_watermark or (
            len(self.settled_seqs) > 0 and int(seq) in self.settled_seqs
        )

    def write_settlements(self, journal: FrameBuilder, now_ms: i64) -> None:
        """What was settled since the last frame, as notes of this one."""
        self._is_dirty = False
        outcome: i64 = ACKED
        while outcome <= PURGED:
            sequences = self._unlogged_settlements[outcome]
            if sequences:
                note = NoteWriter(SETTLED)
                note.write_int(self.group.gid)
                note.write_int(self.partition.pid)
                note.write_int(outcome)
                note.write_ranges(sequences)
                self._unlogged_settlements[outcome] = []
                journal.add_note(note.to_bytes(), now_ms, False)
            outcome += 1

    # ---- counting

    def count_enqueued(self) -> i64:
        """Messages that this group had to settle, so far."""
        self.enqueued += self.partition.next_seq - self.enqueued_counted_to
        self.enqueued_counted_to = self.partition.next_seq
        return self.enqueued

    def count_settled(self) -> i64:
        counts = self.outcome_counts
        return i64(counts[ACKED]) + i64(counts[DEAD]) + i64(counts[EXPIRED]) + i64(counts[PURGED])

    def count_retrying(self) -> i64:
        return len(self.leases) - self.in_flight

    def count_waiting(self) -> i64:
        return self.count_enqueued() - self.count_settled() - len(self.leases)

    def recount_unsettled(self) -> i64:
        """Everything that this group has still to settle, counted one by one."""
        count: i64 = 0
        partition = self.partition
        gid = self.group.gid
        seq = partition.first_live(self.low_watermark)
        while seq < partition.next_seq:
            if not self.is_settled(seq) and partition.is_for_group(seq, gid):
                count += 1
            seq = partition.first_live(seq + 1)
        return count

    def active_by_key(self) -> dict[object, int]:
        """Messages out by key, as they are counted on the way."""
        return dict(self._active_by_key)

    def recount_active_by_key(self) -> dict[object, int]:
        """The same, counted one by one."""
        found: dict[object, int] = {}
        for key in self._ready_key_hashes.values():
            if key:
                found[key] = found.get(key, 0) + 1
        for lease in self.leases.values():
            if lease.state != READY and lease.key_hash:
                found[int(lease.key_hash)] = found.get(int(lease.key_hash), 0) + 1
        return found

    def count_parked(self) -> i64:
        """Messages that wait behind others of their key, or behind a gate."""
        return self._parked_count

    def gated_seqs(self) -> list[int]:
        """Messages that wait behind a gate."""
        return [seq for sequences in self._gated.values() for seq in sequences]

    # ---- starting over

    def rebuild(self) -> None:
        """After recovery, a seek or a change of the order: choose anew from the floor, as the rules are now. What is
        leased stays out."""
        partition = self.partition
        self.scan_position = self.low_watermark
        self.prefetched_to = 0
        self._recheck_below = partition.next_seq
        self._ready = _NO_RANKS
        self._ready_shared = _NO_RANKS
        self._ready_key_hashes = _NO_READY_KEYS
        self._active_by_key = _NO_ACTIVE
        self._parked = _NO_FIFOS
        self._parked_out_of_order = _NO_HEAPS
        self._parked_count = 0
        self._gated = _NO_GATED
        for lease in self.leases.values():
            lease.key_hash = self.key_hash_of(lease.seq)
            if lease.key_hash:
                if self._active_by_key is _NO_ACTIVE:
                    self._active_by_key = {}
                self._active_by_key[int(lease.key_hash)] = (
                    self._active_by_key.get(int(lease.key_hash), 0) + 1
                )
            if lease.state == READY:
                self.requeue(lease.seq, partition.priority(lease.seq), lease.key_hash)
        seq = partition.first_live(self.low_watermark)
        while seq < partition.committed_end:
            self.admit_if_out_of_order(seq)
            seq = partition.first_live(seq + 1)
        self.update_gate_watermark()

    def admit_if_out_of_order(self, seq: i64) -> None:
        """What is not found among the fresh: it has a priority, or had a delay."""
        partition = self.partition
        flags = partition.flags(seq)
        if (
            flags & (DELAYED | PRIORITY_MASK)
            and seq < partition.committed_end
            and int(seq) not in partition.delayed_seqs
            and int(seq) not in self.leases
            and not self.is_settled(seq)
        ):
            self.admit_out_of_order(seq, flags & PRIORITY_MASK)


def _rank(seq: i64, priority: i64) -> int:
    """Its place among those that are ready: the higher priority first, then the older."""
    return int(((9 - priority) << SEQUENCE_BITS) | seq)
