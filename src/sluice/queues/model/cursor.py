"""Cursor: the position of one group in one partition, and the order of its deliveries.

    low_watermark ────────▶ scan_position ─────────▶ committed_end
      all below: settled      leased, waiting for a      not seen by this group yet
                              retry, parked or settled

Ordering invariant: of the messages with one key at most `batch_size` are active at a time. A
message is active from the moment it is chosen until it is settled, retries included. Later messages
of the key are parked; messages of other keys go on. The number of parked messages is bounded: at
the bound, the cursor scans no further until some have been chosen.

An active message is in exactly one of two places: in `_ready_key_hashes`, or it has a lease whose
state is not READY.

Ordered messages go to the consumer of the partition. Messages without a key (unless the ordering is
`strict`), and all messages of a queue without ordering, are *unordered*: any consumer of the group
may take them, so they have a heap of their own.

Choosing, leasing and settling are in one class, because each of them changes the state of the
others: a settlement chooses the next message of its key.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import DELAYED, PRIORITY_MASK, Message
from sluice.queues.log import (
    ACKED,
    OUTCOMES,
    FrameBuilder,
    NoteSource,
)
from sluice.queues.model.containers.held_key import HOLD
from sluice.queues.model.containers.message_columns import NO_ADDRESS
from sluice.queues.model.containers.seq_fifo import SeqFifo
from sluice.queues.model.delivery_lease import DISPATCH, READY, RECLAIM, Lease
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue_rules import STRICT

if TYPE_CHECKING:
    from sluice.queues.model.containers.lost_ranges import LostRanges
    from sluice.queues.model.group import Consumer, Group
    from sluice.queues.model.history import HistoryEvent

# Messages to scan at most for one that is chosen out of order.
MAX_OUT_OF_ORDER_SCAN: Final = 65_536
# With so many parked messages, the cursor stops scanning for other keys.
MAX_PARKED: Final = 4096
# Messages with a delay to skip at most when the age of the oldest message is determined.
MAX_DELAYED_SCAN: Final = 4096
SEQUENCE_BITS: Final = 48
SEQUENCE_MASK: Final = (1 << 48) - 1
NO_GATE: Final = 0x7FFF_FFFF_FFFF_FFFF

# Shared empty containers of idle cursors. Most cursors of a node are idle, and fifteen empty
# containers each would cost more than the rest of the cursor. They are never modified: code that
# adds an element first creates a container of its own.
_NO_ACTIVE: Final[dict[object, int]] = {}
_NO_READY_KEYS: Final[dict[int, int]] = {}
_NO_FIFOS: Final[dict[object, SeqFifo]] = {}
_NO_HEAPS: Final[dict[object, list[int]]] = {}
_NO_GATED: Final[dict[int, list[int]]] = {}
_NO_STALE: Final[dict[int, int]] = {}
_NO_HELD_BACK: Final[dict[int, list[int]]] = {}
_NO_RANKS: Final[list[int]] = []
_NO_ACKS: Final[list[int]] = []
_NO_SEQUENCES: Final[set[int]] = set()
_NO_BODIES: Final[dict[object, Message]] = {}
_NO_HELPERS: Final[list[Consumer]] = []
_NO_UNLOGGED: Final[list[list[int]]] = []


class Cursor(NoteSource):
    def __init__(self, group: Group, partition: Partition, low_watermark: i64) -> None:
        self.group: Group = group
        self.partition: Partition = partition
        self.consumer: Consumer | None = None
        self.low_watermark: i64 = low_watermark
        self.scan_position: i64 = low_watermark
        self.leases: dict[int, Lease] = {}  # delivered at least once and not settled
        # Settled, above the low watermark, and still stored for other groups or for retention.
        self.settled_seqs: set[int] = _NO_SEQUENCES
        self.is_waiting_for_body: bool = False  # leases nothing until a body is read
        self.is_prefetching: bool = False  # a read-ahead of bodies is in progress
        # Bodies before this sequence were requested, if they were not cached.
        self.prefetched_to: i64 = 0
        # Bodies that were read for this cursor, by sequence.
        self.prefetched_bodies: dict[object, Message] = _NO_BODIES
        self.is_in_body_cache: bool = False  # the cache tracks `prefetched_bodies`
        # The body that the cursor waited for; independent of cache eviction.
        self.awaited_body: Message | None = None
        self.awaited_seq: i64 = -1
        self.in_flight: i64 = 0  # leased right now
        self.delivered: i64 = 0  # since the start
        # messages that this group had to settle, up to `enqueued_counted_to`
        self.enqueued: i64 = 0
        self.enqueued_counted_to: i64 = partition.next_seq
        # acked, dead, expired, purged, cancelled
        self.outcome_counts: list[int] = [0, 0, 0, 0, 0]
        # When the low watermark reaches this sequence, a gate opens for other cursors.
        self.gate_watermark: i64 = NO_GATE
        # History of messages released without a failure: see `history`.
        self.released_history: dict[int, list[HistoryEvent]] | None = None
        self.lost_ranges: LostRanges | None = None  # of a group that is read in bulk
        # Members without a partition, which take unordered messages of this one.
        self.helpers: list[Consumer] = _NO_HELPERS
        self.next_helper: i64 = 0  # which of the consumer and its helpers is next
        # It is in `Group.blocked_cursors`.
        self.is_listed_blocked: bool = False
        # Since when messages wait because the consumer has no capacity; 0.0: none wait.
        self.blocked_since: float = 0.0
        # Heaps of chosen messages by priority and sequence, leased before the scan goes on: one of
        # ordered messages, one of unordered ones.
        self._ready: list[int] = _NO_RANKS
        self._ready_unordered: list[int] = _NO_RANKS
        # Chosen messages, and the key that each keeps active.
        self._ready_key_hashes: dict[int, int] = _NO_READY_KEYS
        # Keyed by the key hash as an object: boxed once for several lookups.
        self._active_by_key: dict[object, int] = _NO_ACTIVE
        # In order; bounded by MAX_PARKED plus a few.
        self._parked: dict[object, SeqFifo] = _NO_FIFOS
        # The same for messages that are ordered by priority.
        self._parked_out_of_order: dict[object, list[int]] = _NO_HEAPS
        self._parked_count: i64 = 0
        # Parked messages that a command has delayed: how many entries of each to skip.
        self._stale_parked: dict[int, int] = _NO_STALE
        # Chosen messages of held keys, by key: not among the ready ones until the key is released.
        self._held_back: dict[int, list[int]] = _NO_HELD_BACK
        # Keys behind an older partition that is not drained: see `PartitionGate`.
        self._gated: dict[int, list[int]] = _NO_GATED
        # Below this sequence, unscanned messages may already be leased.
        self._recheck_below: i64 = 0
        # Settled since the last frame: acknowledged, and by outcome if any other was recorded.
        self._unlogged_acks: list[int] = _NO_ACKS
        self._unlogged_others: list[list[int]] = _NO_UNLOGGED
        self._is_dirty: bool = False

    # ---- choosing

    def has_more(self) -> bool:
        """Return whether there may be a ready message: some are chosen, or not yet scanned."""
        return (
            len(self._ready) > 0
            or len(self._ready_unordered) > 0
            or (
                self.scan_position < self.partition.committed_end
                and self._parked_count < MAX_PARKED
            )
        )

    def has_unordered(self) -> bool:
        """Return whether there may be a ready message that is unordered."""
        if self._ready_unordered:
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
        """Return the next deliverable message and count it as active; -1 if there is none."""
        seq = self._next_chosen()
        if self.group.admission.keys.is_active:
            while seq >= 0 and not self._admit_or_postpone(seq):
                seq = self._next_chosen()
        return seq

    def _next_chosen(self) -> i64:
        while self._ready or self._ready_unordered:
            if not self._ready_unordered or (
                len(self._ready) > 0 and self._ready[0] < self._ready_unordered[0]
            ):
                rank: i64 = i64(heapq.heappop(self._ready))
                if self.group.held_keys and self._hold_back(rank):
                    # Not ready until the repair: another one of its key may be next.
                    keys = self.group.admission.keys
                    keys.on_withdrawn(self.location(rank & SEQUENCE_MASK))
                    continue
            else:
                rank = i64(heapq.heappop(self._ready_unordered))
            seq: i64 = rank & SEQUENCE_MASK
            if self._ready_key_hashes.pop(int(seq), -1) >= 0:  # otherwise settled meanwhile
                return seq
            self.group.admission.keys.on_withdrawn(self.location(seq))
        return self._scan_next(self.partition.committed_end, False)

    def next_ready_unordered(self) -> i64:
        """Return the next message that any consumer of the group may take; -1 if there is none.

        The message counts as active. Ordered messages before it are chosen or parked during the
        scan: they wait for the consumer of the partition.
        """
        seq = self._next_chosen_unordered()
        if self.group.admission.keys.is_active:
            while seq >= 0 and not self._admit_or_postpone(seq):
                seq = self._next_chosen_unordered()
        return seq

    def _next_chosen_unordered(self) -> i64:
        while self._ready_unordered:
            seq: i64 = i64(heapq.heappop(self._ready_unordered)) & SEQUENCE_MASK
            if self._ready_key_hashes.pop(int(seq), -1) >= 0:
                return seq
            self.group.admission.keys.on_withdrawn(self.location(seq))
        if not self.has_unordered():
            return -1
        return self._scan_next(self.partition.committed_end, True)

    def finds_ready(self) -> bool:
        """Return whether a message is ready now; unlike `has_more`, it scans for one."""
        seq = self.next_ready()
        if seq < 0:
            return False
        self.requeue(seq, self.partition.priority(seq), self.key_hash_of(seq))
        return True

    def _scan_next(self, end: i64, unordered_only: bool) -> i64:
        """Scan for the next deliverable message before `end`; `unordered_only`: no ordered one."""
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
                continue  # delivered by its due time or priority
            if ordering == 0:
                return seq
            key_hash: i64 = 1 if ordering == STRICT else i64(block.key_hash[at]) & 0xFFFF_FFFF
            if key_hash == 0:
                return seq
            if self._choose_or_park(seq, key_hash, -1):
                if not unordered_only:
                    return seq
                self.requeue(seq, 0, key_hash)
                if self._parked_count + len(self._ready) >= MAX_PARKED:
                    return -1
        return -1

    def _choose_or_park(self, seq: i64, key_hash: i64, priority: i64) -> bool:
        """Count `seq` as active, or park it behind the active messages of its key.

        A `priority` that is not negative means that the message is out of order.
        """
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
            if active < HOLD:
                self._parked_count += 1
            elif self.group.is_repaired(self.partition, seq, key_hash):
                self._active_by_key[boxed_key] = active + 1
                return True
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
        """Return the key hash by which this group orders `seq`; 0 for none."""
        ordering = self.partition.queue.rules.ordering
        if ordering == 0:
            return 0
        if ordering == STRICT:
            return 1
        block = self.partition.find_block(seq)
        return 0 if block is None else i64(block.key_hash[block.index_of(seq)]) & 0xFFFF_FFFF

    def choose_out_of_order(self, seq: i64, priority: i64) -> None:
        """Choose a message independently of the scan: it has a priority, or its delay is over."""
        key_hash = self.key_hash_of(seq)
        if key_hash == 0 or self._choose_or_park(seq, key_hash, priority):
            self.requeue(seq, priority, key_hash)

    def requeue(self, seq: i64, priority: i64, key_hash: i64) -> None:
        """Put a chosen message back: it was not leased, or its retry is due. It stays active."""
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
            if self._ready_unordered is _NO_RANKS:
                self._ready_unordered = []
            heapq.heappush(self._ready_unordered, rank)

    def location(self, seq: i64) -> i64:
        """Return the location of a message as one number."""
        return self.partition.number << SEQUENCE_BITS | seq

    def _admit_or_postpone(self, seq: i64) -> bool:
        """Return whether the limits of its key admit a chosen message; otherwise it waits for them.

        A postponed message stays active.
        """
        keys = self.group.admission.keys
        key_hash = self.partition.key_hash(seq)
        if keys.admits(key_hash, self.location(seq)):
            return True
        if self._ready_key_hashes is _NO_READY_KEYS:
            self._ready_key_hashes = {}
        self._ready_key_hashes[int(seq)] = int(self.key_hash_of(seq))
        self._parked_count += 1
        keys.hold(key_hash, self.location(seq), _rank(seq, self.partition.priority(seq)))
        return False

    def end_hold(self, rank: int) -> bool:
        """Make a held message ready; return whether it was still chosen."""
        self._parked_count -= 1
        seq: i64 = i64(rank) & SEQUENCE_MASK
        key_hash: i64 = self._ready_key_hashes.get(int(seq), -1)
        if key_hash < 0:
            return False
        self._push_ready(seq, key_hash, rank)
        return True

    def suspend(self, seq: i64) -> None:
        """Do not lease a message while its body is read for a dead letter. It stays active."""
        self._ready_key_hashes.pop(int(seq), None)

    def choose_before_earlier(self, seq: i64) -> bool:
        """Choose `seq` before earlier messages; return whether the order of its key allows it.

        The message was delivered in a previous run, so the scan up to it is no longer than it was
        then.
        """
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

    # ---- keys that are held for repair

    def hold_key(self, key_hash: i64) -> None:
        """Choose no further message of a key. Those that wait do not count as parked.

        Otherwise the bound of parked messages would stop other keys for as long as the repair.
        """
        boxed_key: object = int(key_hash)
        if self._active_by_key is _NO_ACTIVE:
            self._active_by_key = {}
        self._active_by_key[boxed_key] = self._active_by_key.get(boxed_key, 0) + HOLD
        self._parked_count -= self._count_parked_of(boxed_key)

    def release_key(self, key_hash: i64) -> None:
        """Choose messages of a key again: first those that had been chosen before."""
        boxed_key: object = int(key_hash)
        self._parked_count += self._count_parked_of(boxed_key)
        for rank in self._held_back.pop(int(key_hash), []) if self._held_back else []:
            if rank & SEQUENCE_MASK in self._ready_key_hashes:
                heapq.heappush(self._ready, rank)
        # Plus one, which `_deactivate_key` subtracts again: it chooses the parked messages.
        self._active_by_key[boxed_key] = self._active_by_key.get(boxed_key, HOLD) - HOLD + 1
        self._deactivate_key(key_hash)

    def count_held(self, key_hash: i64) -> i64:
        """Return how many messages of a held key have been looked at and wait for its release."""
        held_back = self._held_back.get(int(key_hash), []) if self._held_back else []
        return self._count_parked_of(int(key_hash)) + len(held_back)

    def _count_parked_of(self, boxed_key: object) -> i64:
        fifo = self._parked.get(boxed_key)
        heap = self._parked_out_of_order.get(boxed_key)
        count: i64 = 0 if fifo is None else fifo.count()
        return count if heap is None else count + len(heap)

    def _hold_back(self, rank: i64) -> bool:
        """Set a ready message aside if its key is held; return whether it is.

        The message stays chosen.
        """
        seq: i64 = rank & SEQUENCE_MASK
        key_hash: i64 = self._ready_key_hashes.get(int(seq), 0)
        if int(key_hash) not in self.group.held_keys or self.group.is_repaired(
            self.partition, seq, key_hash
        ):
            return False
        if self._held_back is _NO_HELD_BACK:
            self._held_back = {}
        self._held_back.setdefault(int(key_hash), []).append(int(rank))
        return True

    def open_gates(self) -> None:
        """Choose the gated messages in order: an older partition has drained far enough."""
        gated = self._gated
        self._gated = _NO_GATED
        for sequences in gated.values():
            self._parked_count -= len(sequences)
            live_seqs = [
                seq for seq in sequences if not self._take_stale(seq) and self._is_unsettled(seq)
            ]
            for rank in sorted([_rank(seq, self.partition.priority(seq)) for seq in live_seqs]):
                seq: i64 = i64(rank) & SEQUENCE_MASK
                self.choose_out_of_order(seq, self.partition.priority(seq))

    def update_gate_watermark(self) -> None:
        """Find the next gate boundary that the low watermark of this cursor will reach."""
        self.gate_watermark = NO_GATE
        number = self.partition.number
        for gate in self.partition.queue.partition_gates:
            if number < len(gate.boundary_seqs):
                boundary_seq: i64 = gate.boundary_seqs[number]
                if self.low_watermark < boundary_seq and boundary_seq < self.gate_watermark:
                    self.gate_watermark = boundary_seq

    def deactivate(self, lease: Lease) -> None:
        """Count the message of a lease as no longer active: the next one of its key is chosen."""
        if lease.state == READY:
            self.withdraw(lease.seq)
        elif lease.key_hash:
            self._deactivate_key(lease.key_hash)

    def withdraw(self, seq: i64) -> None:
        """Remove a message from the chosen ones; does nothing if it is not chosen."""
        key_hash: i64 = self._ready_key_hashes.pop(int(seq), 0)
        if key_hash:
            self._deactivate_key(key_hash)

    def withdraw_until_due(self, seq: i64, was_out_of_order: bool) -> None:
        """Remove a message that a command has delayed; it is chosen again when it is due.

        `was_out_of_order`: it was chosen before, independently of the scan.
        """
        if int(seq) in self._ready_key_hashes:
            self.withdraw(seq)
        elif (
            (was_out_of_order or seq < self.scan_position)
            and not self.is_settled(seq)
            and self.key_hash_of(seq)
        ):
            if self._stale_parked is _NO_STALE:
                self._stale_parked = {}
            self._stale_parked[int(seq)] = self._stale_parked.get(int(seq), 0) + 1

    def _take_stale(self, seq: i64) -> bool:
        """Return whether this entry of a parked message is invalid.

        If it is, count one invalid entry less.
        """
        if not self._stale_parked:
            return False
        count: i64 = self._stale_parked.get(int(seq), 0)
        if count == 0:
            return False
        if count == 1:
            del self._stale_parked[int(seq)]
        else:
            self._stale_parked[int(seq)] = int(count) - 1
        return True

    def _deactivate_key(self, key_hash: i64) -> None:
        """Count one active message less for this key, and choose the next parked ones."""
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
                if not self._take_stale(seq) and self._is_unsettled(seq):
                    self._push_ready(seq, key_hash, int(rank))
                    active += 1
        if active > 0:
            self._active_by_key[boxed_key] = active
        elif active == 0:
            del self._active_by_key[boxed_key]

    def _is_unsettled(self, seq: i64) -> bool:
        """Return whether a parked message is still stored and unsettled."""
        return self.partition.holds(seq) and not self.is_settled(seq)

    def _pop_parked(self, boxed_key: object) -> i64:
        """Remove and return the first parked message of a key as a rank; -1 if there is none."""
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
        """Return the sequence from which on no message was individually leased or settled."""
        if self.settled_seqs:
            return self.partition.next_seq
        return (
            self.scan_position if self.scan_position > self._recheck_below else self._recheck_below
        )

    # ---- deliveries

    def add_lease(self, seq: i64, now: float) -> Lease:
        """Create the lease of a message that is delivered for the first time."""
        lease = Lease(self, seq, self.key_hash_of(seq))
        lease.first_delivered_at = now
        self.leases[int(seq)] = lease
        return lease

    def begin_delivery(self, lease: Lease, consumer: Consumer, now: float) -> None:
        """Lease a chosen message to a consumer."""
        lease.consumer = consumer
        self._set_holder(lease, DISPATCH, consumer.identity, now)
        self.delivered += 1
        self.group.delivered += 1
        consumer.in_flight += 1
        consumer.full_since = 0.0

    def resume_delivery(self, lease: Lease, identity: str, now: float) -> None:
        """Lease a message again to a client that received it in a previous run.

        The lease is in no consumer's list, because it was not dispatched: the client settles it, or
        the deadline ends it.
        """
        self._set_holder(lease, RECLAIM, identity, now)

    def _set_holder(self, lease: Lease, event: i64, holder: str, now: float) -> None:
        """Lease a message to `holder`, until the deadline that starts now."""
        queue = self.group.queue
        lease.change(event)
        lease.holder = holder
        lease.attempt = lease.failures + 1
        lease.last_delivered_at = now
        self.partition.last_delivery_at = now
        lease.lease_started_at = now
        lease.deadline = now + queue.rules.delivery_timeout
        self.in_flight += 1
        self.group.in_flight += 1
        queue.deadlines.add(lease)
        keys = self.group.admission.keys
        if keys.is_active:
            lease.limited_key = self.partition.key_hash(lease.seq)
            if lease.limited_key:
                keys.on_leased(lease.limited_key, self.location(lease.seq), now, event == DISPATCH)

    def end_delivery(self, lease: Lease) -> None:
        """Take a lease away from its consumer; the caller changes its state next."""
        self.in_flight -= 1
        self.group.in_flight -= 1
        self.group.queue.deadlines.remove(lease)
        consumer = lease.consumer
        if consumer is not None:
            lease.consumer = None
            consumer.in_flight -= 1
        if lease.limited_key:
            self.group.admission.keys.on_ended(lease.limited_key)
            lease.limited_key = 0

    def remove_lease(self, lease: Lease, event: i64) -> None:
        """Remove a lease object: its message is settled, or as if it had never been delivered."""
        lease.change(event)
        del self.leases[int(lease.seq)]
        if lease.publisher_message_id:
            self.group.unindex_by_message_id(lease)
        lease.message = None

    # ---- settling

    def log_settlement(self, seq: i64, outcome: i64, frame_builder: FrameBuilder) -> None:
        """Record a settlement for the open frame."""
        if not self._is_dirty:
            self._is_dirty = True
            frame_builder.add_settlements(self)
        if outcome == ACKED:
            if self._unlogged_acks is _NO_ACKS:
                self._unlogged_acks = []
            self._unlogged_acks.append(int(seq))
        else:
            if self._unlogged_others is _NO_UNLOGGED:
                self._unlogged_others = [[] for _ in range(OUTCOMES)]
            self._unlogged_others[outcome].append(int(seq))

    def count_outcome(self, seq: i64, outcome: i64, is_readable: bool) -> None:
        """Count a settlement. Unless `is_readable`, a bulk reader has lost the message."""
        self.outcome_counts[outcome] += 1
        if self.lost_ranges is not None and not is_readable:
            self.lost_ranges.add(seq, seq + 1)

    def skip(self, seq: i64) -> None:
        """Leave out a new message that is for another group."""
        self.enqueued -= 1
        self.mark_settled(seq, True)

    def mark_settled(self, seq: i64, is_stored: bool) -> None:
        """Mark `seq` as settled by this group; `is_stored`: other groups still need it."""
        if seq == self.low_watermark:
            self.advance_watermark(seq + 1)
        elif is_stored and seq > self.low_watermark:
            if self.settled_seqs is _NO_SEQUENCES:
                self.settled_seqs = set()
            self.settled_seqs.add(int(seq))

    def advance_watermark(self, low_watermark: i64) -> None:
        """Move the low watermark, and on past all settled or deleted messages after it."""
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

    def move_to(self, seq: i64, settled_seqs: set[int]) -> None:
        """Move to another position, from which `settled_seqs` are settled. Call `rebuild` next."""
        self.settled_seqs = settled_seqs
        self.low_watermark = seq
        self.scan_position = seq
        self.advance_watermark(seq)

    def is_settled(self, seq: i64) -> bool:
        """Return whether a stored message is settled by this group."""
        return seq < self.low_watermark or (
            len(self.settled_seqs) > 0 and int(seq) in self.settled_seqs
        )

    def write_notes(self, frame_builder: FrameBuilder, now_ms: i64) -> None:
        """Write the settlements since the last frame as notes of this frame."""
        self._is_dirty = False
        self._write_note(ACKED, self._unlogged_acks, frame_builder, now_ms)
        if self._unlogged_others:
            for outcome, sequences in enumerate(self._unlogged_others):
                self._write_note(outcome, sequences, frame_builder, now_ms)
            self._unlogged_others = _NO_UNLOGGED

    def _write_note(
        self, outcome: i64, sequences: list[int], frame_builder: FrameBuilder, now_ms: i64
    ) -> None:
        if sequences:
            frame_builder.add_settled_note(
                self.group.gid, self.partition.pid, outcome, sequences, now_ms
            )
            sequences.clear()

    # ---- counting

    def count_enqueued(self) -> i64:
        """Return how many messages this group had to settle so far."""
        self.enqueued += self.partition.next_seq - self.enqueued_counted_to
        self.enqueued_counted_to = self.partition.next_seq
        return self.enqueued

    def oldest_due_ms(self) -> i64:
        """Return when the first unsettled message was due, in milliseconds since 1970, or 0."""
        partition = self.partition
        seq = partition.first_live(self.low_watermark)
        remaining = MAX_DELAYED_SCAN
        while seq < partition.next_seq and remaining > 0:
            if int(seq) not in partition.delayed_seqs and not self.is_settled(seq):
                return partition.due_ms(seq)
            remaining -= 1
            seq = partition.first_live(seq + 1)
        return 0

    def count_settled(self) -> i64:
        settled: i64 = 0
        for count in self.outcome_counts:
            settled += i64(count)
        return settled

    def count_retrying(self) -> i64:
        return len(self.leases) - self.in_flight

    def count_waiting(self) -> i64:
        return self.count_enqueued() - self.count_settled() - len(self.leases)

    def active_by_key(self) -> dict[object, int]:
        """Return the active messages by key, as counted incrementally."""
        counts = {key: count & (HOLD - 1) for key, count in self._active_by_key.items()}
        return {key: count for key, count in counts.items() if count}

    def ready_key_hashes(self) -> list[int]:
        """Return the keys of the chosen messages, 0 for none."""
        return list(self._ready_key_hashes.values())

    def count_parked(self) -> i64:
        """Return how many messages wait for others of their key, or behind a gate."""
        return self._parked_count

    def gated_seqs(self) -> list[int]:
        """Return the messages that wait behind a gate."""
        return [seq for sequences in self._gated.values() for seq in sequences]

    # ---- rebuilding

    def rebuild(self) -> None:
        """Choose again from the low watermark by the current rules; leases stay active.

        Used after recovery, a seek or a change of ordering.
        """
        partition = self.partition
        if self.group.admission.keys.is_active:
            self.group.admission.keys.forget_partition(self.partition.number)
        self.scan_position = self.low_watermark
        self.prefetched_to = 0
        self._recheck_below = partition.next_seq
        self._ready = _NO_RANKS
        self._ready_unordered = _NO_RANKS
        self._ready_key_hashes = _NO_READY_KEYS
        self._active_by_key = _NO_ACTIVE
        self._parked = _NO_FIFOS
        self._parked_out_of_order = _NO_HEAPS
        self._parked_count = 0
        self._stale_parked = _NO_STALE
        self._held_back = _NO_HELD_BACK
        self._gated = _NO_GATED
        for held_hash in self.group.held_keys:
            self.hold_key(held_hash)
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
            self.choose_if_out_of_order(seq)
            seq = partition.first_live(seq + 1)
        self.update_gate_watermark()

    def choose_if_out_of_order(self, seq: i64) -> None:
        """Choose a message that the scan skips: it has a priority, or had a delay."""
        partition = self.partition
        flags = partition.flags(seq)
        if (
            flags & (DELAYED | PRIORITY_MASK)
            and seq < partition.committed_end
            and int(seq) not in partition.delayed_seqs
            and int(seq) not in self.leases
            and not self.is_settled(seq)
        ):
            self.choose_out_of_order(seq, flags & PRIORITY_MASK)


def _rank(seq: i64, priority: i64) -> int:
    """Return the order among ready messages: higher priority first, then the lower sequence."""
    return int(((9 - priority) << SEQUENCE_BITS) | seq)
