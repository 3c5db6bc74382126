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

from sluice.message import DELAYED, PRIORITY_BITS, Message
from sluice.queues.model.message_columns import GONE
from sluice.queues.model.delivery_lease import READY, Lease
from sluice.queues.log.frame_builder import ACKED, DEAD, EXPIRED, PURGED, SETTLED, Journal, NoteWriter
from sluice.queues.model.partition import Partition
from sluice.queues.model.seq_fifo import Row
from sluice.queues.model.queue_rules import STRICT

if TYPE_CHECKING:
    from sluice.queues.model.group import Group
    from sluice.queues.flow.history import Step
    from sluice.queues.bulk.lost_ranges import Losses
    from sluice.queues.ports import Consumer

MOST_BEFORE: Final = 65_536  # how many may lie before one that is taken out of its turn
LOOK_AHEAD: Final = 4096  # how many messages may be parked before the cursor stops looking for other keys
SEQUENCE_BITS: Final = 48
SEQUENCE_MASK: Final = (1 << 48) - 1
NO_GATE: Final = 0x7FFF_FFFF_FFFF_FFFF

# What a cursor has before it has any: most of a node's cursors are idle, and fifteen empty containers each would cost
# more than all the rest of it. Nothing is ever put into these; whoever puts makes its own first.
_NO_COUNTS: Final[dict[object, int]] = {}
_NO_KEYS: Final[dict[int, int]] = {}
_NO_ROWS: Final[dict[object, Row]] = {}
_NO_HEAPS: Final[dict[object, list[int]]] = {}
_NO_GATED: Final[dict[int, list[int]]] = {}
_NO_RANKS: Final[list[int]] = []
_NO_SEQUENCES: Final[set[int]] = set()
_NO_BODIES: Final[dict[object, Message]] = {}
_NO_HELPERS: Final[list[Consumer]] = []
_NOTHING_UNLOGGED: Final[list[list[int]]] = []


class Cursor:
    def __init__(self, group: Group, partition: Partition, floor: i64) -> None:
        self.group: Group = group
        self.partition: Partition = partition
        self.consumer: Consumer | None = None
        self.floor: i64 = floor
        self.fresh: i64 = floor
        self.leases: dict[int, Lease] = {}  # whatever was delivered once and is not settled
        self.done: set[int] = (
            _NO_SEQUENCES  # settled, above the floor, and kept for others or for its retention
        )
        self.fetching: bool = False  # cannot go on before a body has come
        self.reading: bool = False  # bodies are on their way that it will need
        self.read_to: i64 = 0  # bodies before this sequence were asked for, if they had to be
        self.ahead: dict[object, Message] = _NO_BODIES  # bodies that were read for it, by sequence
        self.is_reader: bool = False  # is known to the cache, for those
        self.awaited: Message | None = None  # the body that was waited for, whatever the cache makes of it
        self.awaited_seq: i64 = -1
        self.out: i64 = 0  # leased right now
        self.delivered: i64 = 0  # since the start
        self.entered: i64 = 0  # messages that this group had to settle, up to `entered_to`
        self.entered_to: i64 = partition.next
        self.counts: list[int] = [0, 0, 0, 0]  # acked, dead, expired, purged
        self.gate_mark: i64 = NO_GATE  # when the floor comes here, a gate opens for others
        self.returned: dict[int, list[Step]] | None = None  # given back without a failure: see `history`
        self.losses: Losses | None = None  # of a group that is read in bulk
        self.helpers: list[Consumer] = _NO_HELPERS  # members without a partition, who share what has no key
        self.turn: i64 = 0  # which of the consumer and its helpers is next
        self.is_unserved: bool = False  # is in its group's list of cursors with work that nobody has taken
        self.blocked_since: float = (
            0.0  # since when messages wait because the consumer has no room; 0.0: none do
        )
        # Chosen, to be leased before anything fresh, by priority and sequence: with a key, and without.
        self._ready: list[int] = _NO_RANKS
        self._shared: list[int] = _NO_RANKS
        self._chosen: dict[int, int] = _NO_KEYS  # those, and the key that each keeps busy
        # By key, which is a number; as an object it is made once for all that is asked of it.
        self._busy: dict[object, int] = _NO_COUNTS  # messages out
        self._parked: dict[object, Row] = _NO_ROWS  # in order, no more than LOOK_AHEAD and a few
        self._parked_early: dict[object, list[int]] = _NO_HEAPS  # the same for what goes by its priority
        self._parked_count: i64 = 0
        self._gated: dict[int, list[int]] = (
            _NO_GATED  # keys behind an older partition that is not drained: see Gate
        )
        self._look_twice: i64 = 0  # below this, what is fresh may have been leased already
        self._unlogged: list[list[int]] = _NOTHING_UNLOGGED  # settled since the last frame, by how
        self._dirty: bool = False

    # ---- choosing

    def has_more(self) -> bool:
        """Whether `choose` is worth a call."""
        return (
            len(self._ready) > 0
            or len(self._shared) > 0
            or (self.fresh < self.partition.committed and self._parked_count < LOOK_AHEAD)
        )

    def has_shared(self) -> bool:
        """Return whether `choose_shared` is worth a call."""
        if self._shared:
            return True
        partition = self.partition
        if self.fresh >= partition.committed or self._parked_count + len(self._ready) >= LOOK_AHEAD:
            return False
        return partition.queue.rules.ordering == 0 or self.fresh <= partition.last_shared

    def choose(self) -> i64:
        """The next message that may go out, now counted as out; -1 when there is none."""
        while self._ready or self._shared:
            if not self._shared or (len(self._ready) > 0 and self._ready[0] < self._shared[0]):
                seq: i64 = i64(heapq.heappop(self._ready)) & SEQUENCE_MASK
            else:
                seq = i64(heapq.heappop(self._shared)) & SEQUENCE_MASK
            if self._chosen.pop(int(seq), -1) >= 0:  # else it was settled meanwhile
                return seq
        return self._choose_fresh(self.partition.committed, False)

    def choose_shared(self) -> i64:
        """Return the next message that any consumer of the group may take, counted as out; -1 if there is none.

        Messages with a key that stand before it are admitted or parked on the way: they wait for the
        consumer of the partition.
        """
        while self._shared:
            seq: i64 = i64(heapq.heappop(self._shared)) & SEQUENCE_MASK
            if self._chosen.pop(int(seq), -1) >= 0:
                return seq
        if not self.has_shared():
            return -1
        return self._choose_fresh(self.partition.committed, True)

    def has_deliverable(self) -> bool:
        """Return whether a message could go out now; unlike `has_more`, it looks for one."""
        seq = self.choose()
        if seq < 0:
            return False
        self.put_back(seq, self.partition.priority(seq), self.key_of(seq))
        return True

    def _choose_fresh(self, end: i64, shared: bool) -> i64:
        """The same among those before `end` that were not looked at yet; `shared`: only those without a key."""
        partition = self.partition
        ordering = partition.queue.rules.ordering
        while self.fresh < end and self._parked_count < LOOK_AHEAD:
            seq = self.fresh
            self.fresh = seq + 1
            block = partition.block(seq)
            if block is None:
                self.fresh = min(partition.first_live(seq), end)
                continue
            at = block.at(seq)
            if block.address[at] == GONE:
                continue
            if self.done and int(seq) in self.done:
                continue
            if seq < self._look_twice and (int(seq) in self.leases or int(seq) in self._chosen):
                continue
            if i64(block.flags[at]) & (DELAYED | PRIORITY_BITS):
                continue  # comes by its own way: when it is due, or before the others
            if ordering == 0:
                return seq
            key: i64 = 1 if ordering == STRICT else i64(block.key[at]) & 0xFFFF_FFFF
            if key == 0:
                return seq
            if self._admit(seq, key, -1):
                if not shared:
                    return seq
                self.put_back(seq, 0, key)
                if self._parked_count + len(self._ready) >= LOOK_AHEAD:
                    return -1
        return -1

    def _admit(self, seq: i64, key: i64, priority: i64) -> bool:
        """Count `seq` as out, or park it behind the messages of its key that are out. A `priority` that is not
        negative means that it comes out of turn."""
        number: object = int(key)
        queue = self.partition.queue
        if queue.gates and self.group.is_behind_gate(self.partition, seq, key):
            if self._gated is _NO_GATED:
                self._gated = {}
            self._gated.setdefault(int(key), []).append(int(seq))
            self._parked_count += 1
            return False
        busy = self._busy.get(number, 0)
        if busy >= queue.rules.batch_size:
            self._parked_count += 1
            if priority >= 0:
                early = self._parked_early.get(number)
                if early is None:
                    if self._parked_early is _NO_HEAPS:
                        self._parked_early = {}
                    early = self._parked_early[number] = []
                heapq.heappush(early, _rank(seq, priority))
            else:
                waiting = self._parked.get(number)
                if waiting is None:
                    if self._parked is _NO_ROWS:
                        self._parked = {}
                    waiting = self._parked[number] = Row()
                waiting.put(seq)
            return False
        if self._busy is _NO_COUNTS:
            self._busy = {}
        self._busy[number] = busy + 1
        return True

    def key_of(self, seq: i64) -> i64:
        """The key by which this group keeps `seq` in order; 0 for none."""
        ordering = self.partition.queue.rules.ordering
        if ordering == 0:
            return 0
        if ordering == STRICT:
            return 1
        block = self.partition.block(seq)
        return 0 if block is None else i64(block.key[block.at(seq)]) & 0xFFFF_FFFF

    def come_early(self, seq: i64, priority: i64) -> None:
        """A message that does not wait for its turn among the fresh ones: it has a priority, or its delay is over."""
        key = self.key_of(seq)
        if key == 0 or self._admit(seq, key, priority):
            self.put_back(seq, priority, key)

    def put_back(self, seq: i64, priority: i64, key: i64) -> None:
        """A chosen message that was not leased, or is to be leased again: it counts as out."""
        self._choose(seq, key, _rank(seq, priority))

    def _choose(self, seq: i64, key: i64, rank: int) -> None:
        if self._chosen is _NO_KEYS:
            self._chosen = {}
        self._chosen[int(seq)] = int(key)
        if key:
            if self._ready is _NO_RANKS:
                self._ready = []
            heapq.heappush(self._ready, rank)
        else:
            if self._shared is _NO_RANKS:
                self._shared = []
            heapq.heappush(self._shared, rank)

    def hold_back(self, seq: i64) -> None:
        """Not to be leased for now, and still out: its body is being read for its dead letter."""
        self._chosen.pop(int(seq), None)

    def take_out_of_turn(self, seq: i64) -> bool:
        """Choose `seq` before those that would be leased first; whether its place among those of its key allows it. It
        was out in an earlier life, so what lies before it is no more than was looked at then."""
        most: i64 = MOST_BEFORE
        while self.fresh <= seq and most > 0:
            before = self._choose_fresh(seq + 1, False)
            if before < 0:
                break
            self.put_back(before, self.partition.priority(before), self.key_of(before))
            most -= 1
        return self._chosen.pop(int(seq), -1) >= 0

    def open_gates(self) -> None:
        """An older partition has come far enough: what stood behind it may go, in order."""
        gated = self._gated
        self._gated = _NO_GATED
        for sequences in gated.values():
            self._parked_count -= len(sequences)
            living = [seq for seq in sequences if self.partition.holds(seq) and not self.settled(seq)]
            for rank in sorted([_rank(seq, self.partition.priority(seq)) for seq in living]):
                seq: i64 = i64(rank) & SEQUENCE_MASK
                self.come_early(seq, self.partition.priority(seq))

    def set_gate_mark(self) -> None:
        """Look which gate this cursor's floor comes to next."""
        self.gate_mark = NO_GATE
        number = self.partition.number
        for gate in self.partition.queue.gates:
            if number < len(gate.floors):
                mark: i64 = gate.floors[number]
                if self.floor < mark and mark < self.gate_mark:
                    self.gate_mark = mark

    def end_out(self, lease: Lease) -> None:
        """A delivery is over, whatever its state: it counts as out no more."""
        if lease.state == READY:
            self.withdraw(lease.seq)
        elif lease.key:
            self._free_key(lease.key)

    def withdraw(self, seq: i64) -> None:
        """It will not be leased after all; nothing happens if it was not chosen."""
        key: i64 = self._chosen.pop(int(seq), 0)
        if key:
            self._free_key(key)

    def _free_key(self, key: i64) -> None:
        """One message less of this key is out: the next one of it is chosen."""
        number: object = int(key)
        busy = self._busy.get(number, 0) - 1
        if self._parked_count and (
            number in self._parked or (len(self._parked_early) > 0 and number in self._parked_early)
        ):
            most = self.partition.queue.rules.batch_size
            while busy < most:
                rank: i64 = self._next_parked(number)
                if rank < 0:
                    break
                seq: i64 = rank & SEQUENCE_MASK
                if self.partition.holds(seq) and not self.settled(seq):
                    self._choose(seq, key, int(rank))
                    busy += 1
        if busy > 0:
            self._busy[number] = busy
        elif busy == 0:
            del self._busy[number]

    def _next_parked(self, number: object) -> i64:
        """Take the first of a key out of those that are parked; -1 when there is none."""
        waiting = self._parked.get(number)
        early = self._parked_early.get(number) if self._parked_early else None
        rank: i64 = -1
        if waiting is not None:
            rank = _rank(waiting.first(), 0)
        if early is not None and (rank < 0 or early[0] < rank):
            rank = heapq.heappop(early)
            if not early:
                del self._parked_early[number]
        elif waiting is not None:
            waiting.take()
            if waiting.first() < 0:
                del self._parked[number]
        if rank >= 0:
            self._parked_count -= 1
        return rank

    def untouched(self) -> i64:
        """From here on nothing was leased or settled by itself."""
        if self.done:
            return self.partition.next
        return self.fresh if self.fresh > self._look_twice else self._look_twice

    # ---- settling

    def log_settled(self, seq: i64, how: i64, journal: Journal) -> None:
        """For the frame that is being made."""
        if not self._dirty:
            self._dirty = True
            journal.add_dirty(self)
            if self._unlogged is _NOTHING_UNLOGGED:
                self._unlogged = [[], [], [], []]
        self._unlogged[how].append(int(seq))

    def pass_over(self, seq: i64, kept: bool) -> None:
        """`seq` needs no more of this group; `kept`: others still need it."""
        if seq == self.floor:
            self.advance(seq + 1)
        elif kept and seq > self.floor:
            if self.done is _NO_SEQUENCES:
                self.done = set()
            self.done.add(int(seq))

    def advance(self, floor: i64) -> None:
        """Move the floor to `floor`, and on over all that is settled or gone behind it."""
        done = self.done
        partition = self.partition
        end = partition.next
        while floor < end:
            if done and int(floor) in done:
                done.discard(int(floor))
                floor += 1
                continue
            block = partition.block(floor)
            if block is None:
                floor = partition.first_live(floor)
            elif block.address[block.at(floor)] == GONE:
                floor += 1
            else:
                break
        if floor > end:
            floor = end
        self.floor = floor
        if self.fresh < floor:
            self.fresh = floor

    def settled(self, seq: i64) -> bool:
        """Whether a message that is kept needs no more of this group."""
        return seq < self.floor or (len(self.done) > 0 and int(seq) in self.done)

    def write_settled(self, journal: Journal, now_ms: i64) -> None:
        """What was settled since the last frame, as notes of this one."""
        self._dirty = False
        how: i64 = ACKED
        while how <= PURGED:
            sequences = self._unlogged[how]
            if sequences:
                note = NoteWriter(SETTLED)
                note.number(self.group.gid)
                note.number(self.partition.pid)
                note.number(how)
                note.ranges(sequences)
                self._unlogged[how] = []
                journal.add_note(note.value(), now_ms, False)
            how += 1

    # ---- counting

    def count_entered(self) -> i64:
        """Messages that this group had to settle, so far."""
        self.entered += self.partition.next - self.entered_to
        self.entered_to = self.partition.next
        return self.entered

    def count_settled(self) -> i64:
        counts = self.counts
        return i64(counts[ACKED]) + i64(counts[DEAD]) + i64(counts[EXPIRED]) + i64(counts[PURGED])

    def retrying(self) -> i64:
        return len(self.leases) - self.out

    def waiting(self) -> i64:
        return self.count_entered() - self.count_settled() - len(self.leases)

    def count_unsettled(self) -> i64:
        """Everything that this group has still to settle, counted one by one."""
        count: i64 = 0
        partition = self.partition
        gid = self.group.gid
        seq = partition.first_live(self.floor)
        while seq < partition.next:
            if not self.settled(seq) and partition.is_for(seq, gid):
                count += 1
            seq = partition.first_live(seq + 1)
        return count

    def slots(self) -> dict[object, int]:
        """Messages out by key, as they are counted on the way."""
        return dict(self._busy)

    def count_slots(self) -> dict[object, int]:
        """The same, counted one by one."""
        found: dict[object, int] = {}
        for key in self._chosen.values():
            if key:
                found[key] = found.get(key, 0) + 1
        for lease in self.leases.values():
            if lease.state != READY and lease.key:
                found[int(lease.key)] = found.get(int(lease.key), 0) + 1
        return found

    def parked(self) -> i64:
        """Messages that wait behind others of their key, or behind a gate."""
        return self._parked_count

    def gated(self) -> list[int]:
        """Messages that wait behind a gate."""
        return [seq for sequences in self._gated.values() for seq in sequences]

    # ---- starting over

    def rebuild(self) -> None:
        """After recovery, a seek or a change of the order: choose anew from the floor, as the rules are now. What is
        leased stays out."""
        partition = self.partition
        self.fresh = self.floor
        self.read_to = 0
        self._look_twice = partition.next
        self._ready = _NO_RANKS
        self._shared = _NO_RANKS
        self._chosen = _NO_KEYS
        self._busy = _NO_COUNTS
        self._parked = _NO_ROWS
        self._parked_early = _NO_HEAPS
        self._parked_count = 0
        self._gated = _NO_GATED
        for lease in self.leases.values():
            lease.key = self.key_of(lease.seq)
            if lease.key:
                if self._busy is _NO_COUNTS:
                    self._busy = {}
                self._busy[int(lease.key)] = self._busy.get(int(lease.key), 0) + 1
            if lease.state == READY:
                self.put_back(lease.seq, partition.priority(lease.seq), lease.key)
        seq = partition.first_live(self.floor)
        while seq < partition.committed:
            self.come_early_if_special(seq)
            seq = partition.first_live(seq + 1)
        self.set_gate_mark()

    def come_early_if_special(self, seq: i64) -> None:
        """What is not found among the fresh: it has a priority, or had a delay."""
        partition = self.partition
        flags = partition.flags(seq)
        if (
            flags & (DELAYED | PRIORITY_BITS)
            and seq < partition.committed
            and int(seq) not in partition.delayed
            and int(seq) not in self.leases
            and not self.settled(seq)
        ):
            self.come_early(seq, flags & PRIORITY_BITS)


def _rank(seq: i64, priority: i64) -> int:
    """Its place among those that are ready: the higher priority first, then the older."""
    return int(((9 - priority) << SEQUENCE_BITS) | seq)
