"""One group on one partition: what it may have next, in which order, and what it has settled.

    floor ───────────────▶ fresh ───────────────▶ committed
      all below: settled     leased, waiting for a retry,      not offered to this group yet
                             parked, or settled (`done`)

The rule of order: of the messages with one key at most `batch_size` are out at a time, and a message counts as out from
the moment it is chosen until it is settled, retries included. Those behind it are parked under its key; messages of
other keys go on. What is parked is bounded: when it is too much, the cursor looks no further until some of it has gone.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import DELAYED, PRIORITY_BITS
from sluice.queues.delivery import Lease
from sluice.queues.journal import ACKED, DEAD, EXPIRED, PURGED, SETTLED, Journal, NoteWriter
from sluice.queues.partition import BLOCK, GONE, Partition

if TYPE_CHECKING:
    from sluice.queues.group import Group
    from sluice.queues.ports import Consumer

LOOK_AHEAD: Final = 4096  # how many messages may be parked before the cursor stops looking for other keys
SEQUENCE_BITS: Final = 48
SEQUENCE_MASK: Final = (1 << 48) - 1


class Cursor:
    def __init__(self, group: Group, partition: Partition, floor: i64) -> None:
        self.group: Group = group
        self.partition: Partition = partition
        self.consumer: Consumer | None = None
        self.floor: i64 = floor
        self.fresh: i64 = floor
        self.leases: dict[int, Lease] = {}  # whatever was delivered once and is not settled
        self.done: set[int] = set()  # settled, above the floor
        self.fetching: bool = False
        self.out: i64 = 0  # leased right now
        self.entered: i64 = 0  # messages that this group had to settle, up to `entered_to`
        self.entered_to: i64 = partition.next
        self.counts: list[int] = [0, 0, 0, 0]  # acked, dead, expired, purged
        self._ready: list[
            int
        ] = []  # chosen, to be leased before anything fresh: a heap by priority and sequence
        self._chosen: dict[int, int] = {}  # those, and the key that each keeps busy
        self._busy: dict[int, int] = {}  # messages out, by key
        self._parked: dict[int, deque[int]] = {}
        self._parked_count: i64 = 0
        self._gated: dict[
            int, list[int]
        ] = {}  # keys behind an older partition that is not drained: see Queue.gate
        self._look_twice: i64 = 0  # below this, what is fresh may have been settled or leased already
        self._unlogged: list[list[int]] = [[], [], [], []]
        self._dirty: bool = False

    # ---- choosing

    def has_more(self) -> bool:
        """Whether `choose` is worth a call."""
        return len(self._ready) > 0 or (
            self.fresh < self.partition.committed and self._parked_count < LOOK_AHEAD
        )

    def choose(self) -> i64:
        """The next message that may go out, now counted as out; -1 when there is none."""
        partition = self.partition
        while self._ready:
            seq: i64 = i64(heapq.heappop(self._ready)) & SEQUENCE_MASK
            key: i64 = self._chosen.pop(int(seq))
            if partition.holds(seq) and int(seq) not in self.done and seq >= self.floor:
                return seq
            if key:
                self._free_key(key)
        queue = partition.queue
        ordering = queue.rules.ordering
        while self.fresh < partition.committed and self._parked_count < LOOK_AHEAD:
            seq = self.fresh
            self.fresh = seq + 1
            block = partition.block(seq)
            at: i64 = seq & (BLOCK - 1)
            if block is None or block.address[at] == GONE:
                continue
            if self.done and int(seq) in self.done:
                continue
            if seq < self._look_twice and int(seq) in self.leases:
                continue
            if i64(block.flags[at]) & (DELAYED | PRIORITY_BITS):
                continue  # comes by its own way: when it is due, or before the others
            if ordering == 0:
                return seq
            key = i64(block.key[at])
            if key == 0:
                return seq
            if self._admit(seq, key):
                return seq
        return -1

    def _admit(self, seq: i64, key: i64) -> bool:
        """Count `seq` as out, or park it behind the messages of its key that are out."""
        number = int(key)
        queue = self.partition.queue
        if queue.gate_size and self.group.behind_gate(self.partition, key):
            self._gated.setdefault(number, []).append(int(seq))
            self._parked_count += 1
            return False
        waiting = self._parked.get(number)
        busy = self._busy.get(number, 0)
        if waiting is not None or busy >= queue.rules.batch_size:
            if waiting is None:
                waiting = self._parked[number] = deque()
            waiting.append(int(seq))
            self._parked_count += 1
            return False
        self._busy[number] = busy + 1
        return True

    def key_of(self, seq: i64) -> i64:
        """The key by which this group keeps `seq` in order; 0 for none."""
        if self.partition.queue.rules.ordering == 0:
            return 0
        block = self.partition.block(seq)
        return 0 if block is None else i64(block.key[seq & (BLOCK - 1)])

    def come_early(self, seq: i64, priority: i64) -> None:
        """A message that does not wait for its turn among the fresh ones: it has a priority, or its delay is over."""
        key = self.key_of(seq)
        if key == 0 or self._admit(seq, key):
            self.put_back(seq, priority, key)

    def put_back(self, seq: i64, priority: i64, key: i64) -> None:
        """A chosen message that was not leased, or is to be leased again."""
        self._chosen[int(seq)] = int(key)
        heapq.heappush(self._ready, int(((9 - priority) << SEQUENCE_BITS) | seq))

    def open_gate(self) -> None:
        """The older partitions are drained: what stood behind them may go, in order."""
        gated = self._gated
        self._gated = {}
        for sequences in gated.values():
            self._parked_count -= len(sequences)
            for seq in sequences:
                self.come_early(seq, self.partition.priority(seq))

    def _free_key(self, key: i64) -> None:
        """One message less of this key is out: the next one of it may be chosen."""
        number = int(key)
        waiting = self._parked.get(number)
        if waiting is not None:
            while waiting:
                seq: i64 = waiting.popleft()
                self._parked_count -= 1
                if not waiting:
                    del self._parked[number]
                if self.partition.holds(seq) and int(seq) not in self.done:
                    self.put_back(seq, self.partition.priority(seq), key)
                    return
        busy = self._busy.get(number, 0) - 1
        if busy > 0:
            self._busy[number] = busy
        else:
            self._busy.pop(number, None)

    # ---- settling

    def settle(self, seq: i64, how: i64, key: i64, chosen: bool, journal: Journal) -> None:
        """This group is done with `seq`. `chosen`: it was counted as out, so its key is freed."""
        self.note_settled(seq, how)
        self._unlogged[how].append(int(seq))
        if not self._dirty:
            self._dirty = True
            journal.add_dirty(self)
        if chosen and key:
            self._free_key(key)

    def note_settled(self, seq: i64, how: i64) -> None:
        self.counts[how] += 1
        self.pass_over(seq)

    def pass_over(self, seq: i64) -> None:
        """`seq` needs no more of this group; not counted, since it may never have been this group's."""
        if seq != self.floor:
            self.done.add(int(seq))
            return
        floor: i64 = seq + 1
        done = self.done
        while done and int(floor) in done:
            done.discard(int(floor))
            floor += 1
        self.floor = floor
        if self.fresh < floor:
            self.fresh = floor

    def settled(self, seq: i64) -> bool:
        return seq < self.floor or int(seq) in self.done

    def write_settled(self, journal: Journal, now_ms: i64) -> None:
        """What was settled since the last frame, as notes of this one."""
        self._dirty = False
        for how in (ACKED, DEAD, EXPIRED, PURGED):
            sequences = self._unlogged[how]
            if sequences:
                note = NoteWriter(SETTLED)
                note.number(self.group.gid)
                note.number(self.partition.pid)
                note.number(how)
                note.ranges(sequences)
                self._unlogged[how] = []
                journal.add_note(note.value(), now_ms, False)

    # ---- counting

    def count_entered(self) -> i64:
        """Messages that this group had to settle, so far."""
        self.entered += self.partition.next - self.entered_to
        self.entered_to = self.partition.next
        return self.entered

    def retrying(self) -> i64:
        return len(self.leases) - self.out

    def waiting(self) -> i64:
        settled = self.counts[ACKED] + self.counts[DEAD] + self.counts[EXPIRED] + self.counts[PURGED]
        return self.count_entered() - settled - len(self.leases)

    def count_waiting(self) -> i64:
        """The same, counted one by one: what the ledger is verified against."""
        waiting: i64 = 0
        seq = self.partition.first_live(self.floor)
        while seq < self.partition.next:
            number = int(seq)
            if (
                number not in self.done
                and number not in self.leases
                and self.partition.is_for(seq, self.group.gid)
            ):
                waiting += 1
            seq = self.partition.first_live(seq + 1)
        return waiting

    # ---- starting over

    def restart(self, floor: i64) -> None:
        """After recovery or a seek: everything from `floor` on that is not settled is offered again."""
        self.floor = floor
        self.fresh = floor
        self._look_twice = self.partition.next
        self._ready = []
        self._chosen = {}
        self._busy = {}
        self._parked = {}
        self._parked_count = 0
        self._gated = {}
        self.pass_over_known()

    def sought(self, floor: i64, entered: i64) -> None:
        """Recovery replays a seek."""
        self.floor = floor
        self.fresh = floor
        self.done = set()
        self.leases = {}
        self.entered = entered
        self.entered_to = self.partition.next

    def pass_over_known(self) -> None:
        while self.done and int(self.floor) in self.done:
            self.done.discard(int(self.floor))
            self.floor += 1
        if self.fresh < self.floor:
            self.fresh = self.floor

    def hold_lease(self, lease: Lease) -> None:
        """A lease that recovery brought back: it is out, so its key is."""
        self.leases[int(lease.seq)] = lease
        if lease.key:
            self._busy[int(lease.key)] = self._busy.get(int(lease.key), 0) + 1
