"""The queue engine: commands and the time go in; records, deliveries and answers come out.

It is deterministic and does no I/O. It knows no socket, no file and no word of MQTT. Whoever drives it (`runner.py`, a
test, the simulator) does four things: calls its commands with `now` set, takes closed frames to the store and reports
their commit, carries out its reads, and wakes it when it asks for it.

    publish ─▶ journal ─▶ take_frame … store … frame_done ─▶ receipts, and offer ─▶ Consumer.deliver
    settle  ─▶ cursor  ─▶ journal (a note), and the consumer is offered more at the end of the turn
    fail    ─▶ a retry (a note, and a place in the heap), or dead_letters.bury
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.errors import (
    InvalidQueueName,
    MessageTooLarge,
    QueueExists,
    QueueFull,
    StaleDelivery,
    UnknownDelivery,
    UnknownQueue,
)
from sluice.message import (
    COMPRESSED,
    DELAYED,
    PRIORITY_BITS,
    TARGETED,
    Message,
    decode_body,
    encode_body,
    fnv1a32,
)
from sluice.queues import dead_letters
from sluice.queues import journal as notes
from sluice.queues.cursor import Cursor
from sluice.queues.delivery import LEASED, READY, SETTLED, WAITING, Lease
from sluice.queues.group import Group
from sluice.queues.journal import ACKED, DEAD, EXPIRED, PURGED, Frame, Journal, NoteWriter
from sluice.queues.keeping import FIRST_PID, Keeping
from sluice.queues.names import fault_of_name, message_id, parse_message_id
from sluice.queues.partition import BLOCK, GONE, Partition
from sluice.queues.ports import Consumer, Publisher
from sluice.queues.queue import Queue
from sluice.queues.rules import DEAD_LETTER, DROP_OLDEST, STRICT, Rules
from sluice.queues.segments import Segments
from sluice.queues.young import Young
from sluice.store.protocol import read_record

READ_AHEAD: Final = 128  # messages that one read brings, at most
READ_BYTES: Final = 262_144  # and how many bytes of them
COMPRESS_FROM: Final = 256  # smaller payloads do not get smaller


class Read:
    """Bodies that a cursor needs before it can go on; without a cursor, of expired messages that become dead letters."""

    def __init__(
        self, partition: Partition, cursor: Cursor | None, sequences: list[int], addresses: list[int]
    ) -> None:
        self.partition = partition
        self.cursor = cursor
        self.sequences = sequences
        self.addresses = addresses


class Codec:
    """How payloads are made smaller: handed in, so that the engine needs no library for what most queues do not use."""

    def compress(self, data: bytes) -> bytes:
        return data

    def decompress(self, data: bytes) -> bytes:
        return data


class Engine:
    """`rules_for` gives the rules of a queue that comes into being, and the configuration they stand for; `draw` is
    the source of chance, a number in [0, 1) each time."""

    def __init__(
        self,
        rules_for: Callable[[str], tuple[Rules, str]],
        draw: Callable[[], float],
        cache_bytes: int = 16_777_216,
        codec: Codec | None = None,
    ) -> None:
        self.now: float = 0.0
        self.alerts: list[dead_letters.Alert] = []
        self.warnings: list[str] = []  # for the log of whoever drives the engine
        self.queues: dict[str, Queue] = {}
        self.partitions: dict[int, Partition] = {}
        self.groups: dict[int, Group] = {}
        self.journal = Journal()
        self.segments = Segments()
        self.keeping = Keeping(self.journal, self.segments)
        self.young = Young(cache_bytes)
        self.codec: Codec = codec or Codec()
        self.reads: list[Read] = []
        self.next_qid: i64 = 1
        self.next_pid: i64 = 1
        self.next_gid: i64 = 1
        self.next_token: i64 = 1
        self._rules_for = rules_for
        self._draw = draw
        self._joined: i64 = 0
        self._hungry: list[Consumer] = []
        # Messages with a priority (due 0.0) or a delay: of the open frame, and of the one under way to the store.
        self._special: list[tuple[Partition, int, float]] = []
        self._special_sent: list[tuple[Partition, int, float]] = []
        self._ticket: int = 0
        self._deadlines: list[tuple[float, int, Queue]] = []
        self._retries: list[tuple[float, int, Lease]] = []
        self._delayed: list[tuple[float, int, Partition, int]] = []
        self._expiries: list[tuple[float, int, Partition]] = []

    # ---- queues and groups

    def create(self, rules: Rules, config: str) -> Queue:
        """A new queue, kept with the next frame."""
        fault = fault_of_name(rules.name)
        if fault:
            raise InvalidQueueName(rules.name, fault)
        if rules.name in self.queues:
            raise QueueExists(rules.name)
        queue = Queue(self.next_qid, rules)
        queue.config = config
        queue.created_at = self.now
        self.next_qid += 1
        self.queues[rules.name] = queue
        count: i64 = 1 if rules.ordering == STRICT else rules.partitions
        self._note_queue(queue, count)
        self.add_partitions(queue, self.next_pid, count)
        return queue

    def _note_queue(self, queue: Queue, added: i64) -> None:
        note = NoteWriter(notes.QUEUE_MADE)
        note.number(queue.qid)
        note.number(self.next_pid)
        note.number(added)
        note.text(queue.name)
        note.text(queue.config)
        note.real(queue.created_at)
        note.number(queue.gate_size)
        for floor in queue.gate_floors:
            note.number(floor)
        self.journal.add_note(note.value(), int(self.now * 1000.0), True)

    def add_partitions(self, queue: Queue, first_pid: i64, count: i64) -> None:
        for step in range(count):
            partition = Partition(queue, first_pid + step, len(queue.partitions))
            queue.partitions.append(partition)
            self.partitions[int(partition.pid)] = partition
            for group in queue.groups.values():
                cursor = Cursor(group, partition, 0)
                group.cursors.append(cursor)
                partition.cursors.append(cursor)
        self.next_pid = max(self.next_pid, first_pid + count)

    def reconfigure(self, queue: Queue, rules: Rules, config: str) -> None:
        """New rules for a living queue. The number of partitions may only grow; see `Queue.gate_size`."""
        added: i64 = 0
        if rules.ordering != STRICT and rules.partitions > len(queue.partitions):
            added = rules.partitions - len(queue.partitions)
            queue.gate_size = len(queue.partitions)
            queue.gate_floors = [int(partition.next) for partition in queue.partitions]
        queue.rules = rules
        queue.config = config
        self._note_queue(queue, added)
        if added:
            self.add_partitions(queue, self.next_pid, added)
            for group in queue.groups.values():
                self._rebalance(group)
        for group in queue.groups.values():
            for cursor in group.cursors:
                self.offer(cursor)

    def delete(self, queue: Queue) -> None:
        """The queue and all in it. Its consumers stay subscribed to a name that is free again."""
        note = NoteWriter(notes.QUEUE_GONE)
        note.number(queue.qid)
        self.journal.add_note(note.value(), int(self.now * 1000.0), True)
        self.forget_queue(queue)

    def forget_queue(self, queue: Queue) -> None:
        for group in list(queue.groups.values()):
            for consumer in list(group.consumers):
                consumer.group = None
                consumer.cursors = []
            self.groups.pop(int(group.gid), None)
        for partition in queue.partitions:
            seq = partition.first_live(0)
            while seq < partition.next:
                self.let_go_of(partition, seq)
                seq = partition.first_live(seq + 1)
            self.partitions.pop(int(partition.pid), None)
            partition.cursors = []
        self.queues.pop(queue.name, None)

    def ensure(self, name: str) -> Queue:
        """The queue called `name`, made from its template if it is not there."""
        queue = self.queues.get(name)
        if queue is None:
            rules, config = self._rules_for(name)
            queue = self.create(rules, config)
        return queue

    def find(self, name: str) -> Queue:
        queue = self.queues.get(name)
        if queue is None:
            raise UnknownQueue(name)
        return queue

    def group(self, queue: Queue, name: str, floors: list[int] | None = None) -> Group:
        """The group called `name`; a new one begins at `floors`, or with the oldest message that is kept."""
        group = queue.groups.get(name)
        if group is not None:
            return group
        if floors is None:
            floors = [int(partition.first_live(0)) for partition in queue.partitions]
        group = self.add_group(queue, self.next_gid, name, floors)
        note = NoteWriter(notes.GROUP_MADE)
        note.number(queue.qid)
        note.number(group.gid)
        note.text(name)
        for floor in floors:
            note.number(floor)
        self.journal.add_note(note.value(), int(self.now * 1000.0), True)
        return group

    def add_group(self, queue: Queue, gid: i64, name: str, floors: list[int]) -> Group:
        group = Group(queue, gid, name)
        self.next_gid = max(self.next_gid, gid + 1)
        queue.groups[name] = group
        self.groups[int(gid)] = group
        for partition, floor in zip(queue.partitions, floors, strict=True):
            cursor = Cursor(group, partition, floor)
            group.cursors.append(cursor)
            partition.cursors.append(cursor)
            self._take_on(cursor, floor)
        return group

    def _take_on(self, cursor: Cursor, start: i64) -> None:
        """A cursor becomes responsible for every message from `start` on that it has not settled."""
        partition = cursor.partition
        cursor.entered_to = partition.next
        seq = partition.first_live(start)
        while seq < partition.next:
            if not partition.is_for(seq, cursor.group.gid):
                cursor.pass_over(seq)
            elif not cursor.settled(seq):
                if partition.left(seq) <= 0 and len(partition.cursors) > 1:
                    self._revive(partition)
                partition.add_left(seq, 1)
                cursor.entered += 1
                self._come_early_if_special(cursor, seq)
            seq = partition.first_live(seq + 1)

    def _revive(self, partition: Partition) -> None:
        """A message that was kept only for its retention is waited for again."""
        partition.queue.depth += 1

    def _come_early_if_special(self, cursor: Cursor, seq: i64) -> None:
        """What a cursor that starts over would not find among the fresh: it has a priority, or had a delay."""
        partition = cursor.partition
        block = partition.block(seq)
        if block is None or seq >= partition.committed or cursor.settled(seq):
            return
        flags: i64 = i64(block.flags[seq & (BLOCK - 1)])
        if flags & DELAYED:
            if int(seq) not in partition.delayed:
                cursor.come_early(seq, flags & PRIORITY_BITS)
        elif flags & PRIORITY_BITS:
            cursor.come_early(seq, flags & PRIORITY_BITS)

    def drop_group(self, group: Group) -> None:
        """Nobody reads for this group any more: what only it waited for is let go."""
        note = NoteWriter(notes.GROUP_GONE)
        note.number(group.gid)
        self.journal.add_note(note.value(), int(self.now * 1000.0), True)
        self.forget_group(group)

    def forget_group(self, group: Group) -> None:
        queue = group.queue
        for consumer in list(group.consumers):
            self.leave(consumer)
        last = len(queue.groups) == 1
        for cursor in group.cursors:
            partition = cursor.partition
            partition.cursors.remove(cursor)
            seq = partition.first_live(cursor.floor)
            while seq < partition.next:
                if partition.is_for(seq, group.gid) and not cursor.settled(seq):
                    if last:
                        partition.add_left(seq, -1)  # it waits for the next group, whoever that is
                    else:
                        self._settled(partition, seq)
                seq = partition.first_live(seq + 1)
        queue.groups.pop(group.name, None)
        self.groups.pop(int(group.gid), None)

    def seek(self, group: Group, floors: list[int]) -> None:
        """Go back to messages that are still kept, or forward past some that are not done: those count as purged."""
        note = NoteWriter(notes.SOUGHT)
        note.number(group.gid)
        for cursor, floor in zip(group.cursors, floors, strict=True):
            self._seek_one(cursor, floor)
            cursor.write_settled(self.journal, int(self.now * 1000.0))
            note.number(floor)
            note.number(cursor.count_entered())
        self.journal.add_note(note.value(), int(self.now * 1000.0), True)
        for cursor in group.cursors:
            if cursor.consumer is not None:
                self._make_hungry(cursor.consumer)

    def _seek_one(self, cursor: Cursor, floor: i64) -> None:
        partition = cursor.partition
        for lease in list(cursor.leases.values()):
            if lease.consumer is not None:
                lease.consumer.taken_away(lease)
            self._let_go(lease)
            self._drop_lease(lease)
        seq = partition.first_live(min(cursor.floor, floor))
        while seq < partition.next:
            if partition.is_for(seq, cursor.group.gid):
                settled = cursor.settled(seq)
                if seq < floor and not settled:
                    cursor.settle(seq, PURGED, 0, False, self.journal)
                    self._settled(partition, seq)
                elif seq >= floor and settled:
                    if partition.left(seq) <= 0:
                        partition.queue.depth += 1
                    partition.add_left(seq, 1)
                    cursor.entered += 1
            seq = partition.first_live(seq + 1)
        cursor.done = set()
        cursor.restart(floor)
        for number in list(partition.targets):
            if number >= floor and not partition.is_for(number, cursor.group.gid):
                cursor.pass_over(number)
        seq = partition.first_live(floor)
        while seq < partition.committed:
            self._come_early_if_special(cursor, seq)
            seq = partition.first_live(seq + 1)

    # ---- publishing

    def publish(self, queue: Queue, message: Message, publisher: Publisher | None, tag: i64) -> None:
        """Take a message into the open frame. The publisher hears of it when the frame is kept."""
        rules = queue.rules
        size: i64 = len(message.payload)
        if size > rules.max_message_size:
            queue.refused += 1
            raise MessageTooLarge(queue.name, int(size), int(rules.max_message_size))
        if message.id and queue.seen(message.id, self.now):
            queue.duplicates += 1
        elif queue.depth >= rules.max_depth and not self._make_room(queue, message):
            pass  # it went to the dead letters instead
        else:
            self.append(queue, message, 0)
            if message.id:
                queue.remember(message.id, self.now)
        if publisher is not None:
            self.journal.add_receipt(publisher, tag)

    def _make_room(self, queue: Queue, message: Message) -> bool:
        """A full queue: whether there is room now, by its own policy."""
        if queue.rules.overflow == DROP_OLDEST:
            for partition in sorted(queue.partitions, key=_oldest_first):
                seq = partition.first_live(0)
                while seq < partition.next:
                    if self.remove_for_all(partition, seq, PURGED):
                        return True
                    seq = partition.first_live(seq + 1)
        elif queue.rules.overflow == DEAD_LETTER and dead_letters.bury_unborn(
            self, queue, message, "overflow"
        ):
            return False
        queue.refused += 1
        raise QueueFull(queue.name, int(queue.depth))

    def append(self, queue: Queue, message: Message, target: i64) -> Partition:
        """Put a message at the end of its partition; `target` is the one group it is for, 0 for all."""
        key = self.key_hash(queue, message.key)
        partition = queue.place(key)
        self.append_to(partition, message, key, target)
        return partition

    def key_hash(self, queue: Queue, key: bytes) -> i64:
        """What places a message and keeps it in order; 0 for neither. A strict queue is one single key."""
        if queue.rules.ordering == STRICT:
            return 1
        if not key:
            return 0
        return fnv1a32(key) or 1

    def append_to(self, partition: Partition, message: Message, key: i64, target: i64) -> i64:
        queue = partition.queue
        rules = queue.rules
        now_ms: i64 = int(self.now * 1000.0)
        message.enqueued_at = now_ms
        expires = message.expires
        if rules.message_ttl > 0.0:
            latest: i64 = int(self.now + rules.message_ttl)
            if expires == 0 or expires > latest:
                expires = latest
        message.expires = expires
        flags: i64 = message.priority & PRIORITY_BITS
        time = now_ms
        if message.deliver_at > now_ms:
            flags |= DELAYED
            time = message.deliver_at
        left: i64 = len(partition.cursors)
        if target:
            flags |= TARGETED
            left = 1
        payload = message.payload
        if rules.compress and len(payload) >= COMPRESS_FROM:
            payload = self.codec.compress(payload)
            flags |= COMPRESSED
        body = encode_body(message, payload)
        seq = partition.next
        address = self.journal.add_message(partition, flags, seq, key, expires, time, body, rules.sync)
        size: i64 = 40 + len(body)
        partition.append(address, size, key, expires, flags, left, time)
        self.segments.add(address, size)
        queue.depth += 1
        queue.bytes += size
        queue.enqueued += 1
        if target:
            partition.targets[int(seq)] = int(target)
            self.pass_by_others(partition, seq, target)
        if queue.consumers:
            self.young.put(partition, seq, message)
        if flags & (DELAYED | PRIORITY_BITS):
            self._special.append((partition, int(seq), float(time) / 1000.0 if flags & DELAYED else 0.0))
        if expires:
            self.expect_expiry(partition, expires)
        return seq

    def pass_by_others(self, partition: Partition, seq: i64, target: i64) -> None:
        for cursor in partition.cursors:
            if cursor.group.gid != target:
                cursor.entered -= 1
                cursor.pass_over(seq)

    # ---- frames

    def take_frame(self) -> Frame:
        """Close the open frame. Before anything else is done, `journal.begin` must say where the next one stands."""
        frame = self.journal.close(int(self.now * 1000.0))
        self._special_sent = self._special
        self._special = []
        return frame

    def frame_done(self, frame: Frame) -> None:
        """The store has the frame: only now do publishers hear of it, and consumers see its messages."""
        for nth, publisher in enumerate(frame.publishers):
            publisher.stored(frame.tags[nth])
        for nth, partition in enumerate(frame.partitions):
            partition.committed = max(partition.committed, frame.reached[nth])
        for partition, seq, due in self._special_sent:
            self.announce_special(partition, seq, due)
        self._special_sent = []
        for partition in frame.partitions:
            for cursor in partition.cursors:
                self.offer(cursor)

    def announce_special(self, partition: Partition, seq: i64, due: float) -> None:
        """A message that does not wait for its turn among the others: it has a delay (`due`) or a priority."""
        if not partition.holds(seq):
            return
        if due > 0.0:
            self._ticket += 1
            partition.delayed.add(int(seq))
            heapq.heappush(self._delayed, (due, self._ticket, partition, int(seq)))
            return
        for cursor in partition.cursors:
            if not cursor.settled(seq) and int(seq) not in cursor.leases:
                cursor.come_early(seq, partition.priority(seq))

    # ---- delivering

    def offer(self, cursor: Cursor) -> None:
        """Lease what the cursor has to its consumer, as long as that one has room."""
        consumer = cursor.consumer
        if consumer is None or cursor.fetching:
            return
        partition = cursor.partition
        while consumer.has_room():
            seq = cursor.choose()
            if seq < 0:
                return
            message = partition.young.get(int(seq))
            if message is None:
                cursor.put_back(seq, partition.priority(seq), cursor.key_of(seq))
                self._fetch(cursor, seq)
                return
            if message.expires and float(message.expires) <= self.now:
                cursor.put_back(seq, partition.priority(seq), cursor.key_of(seq))
                self.expire(partition, seq, message)
                continue
            self._lease(cursor, seq, message, consumer)

    def _lease(self, cursor: Cursor, seq: i64, message: Message, consumer: Consumer) -> None:
        number = int(seq)
        lease = cursor.leases.get(number)
        group = cursor.group
        queue = group.queue
        now = self.now
        if lease is None:
            lease = Lease(cursor, seq, cursor.key_of(seq))
            lease.first_at = now
            cursor.leases[number] = lease
            queue.delivery_latency.add(now - float(message.enqueued_at) / 1000.0)
        else:
            group.redelivered += 1
            if lease.failures and now - lease.first_at >= queue.rules.total_timeout:
                lease.message = message
                self.bury(lease, "timeout", lease.description)
                return
        lease.message = message
        lease.consumer = consumer
        lease.holder = consumer.client
        lease.state = LEASED
        lease.token = self.next_token
        self.next_token += 1
        lease.last_at = now
        lease.deadline = now + queue.rules.delivery_timeout
        cursor.out += 1
        consumer.held += 1
        group.delivered += 1
        queue.deadlines.add(lease)
        if not queue.watched:
            self._watch(queue, lease.deadline)
        if message.id:
            group.own_ids[message.id] = lease
        if len(cursor.partition.cursors) == 1:
            self.young.drop(cursor.partition, seq)
        consumer.deliver(lease)

    def _fetch(self, cursor: Cursor, first: i64) -> None:
        """Ask for the body of `first`, and of those that come behind it."""
        partition = cursor.partition
        sequences: list[int] = []
        addresses: list[int] = []
        size: i64 = 0
        seq = first
        while seq < partition.committed and len(sequences) < READ_AHEAD and size < READ_BYTES:
            block = partition.block(seq)
            if block is None:
                break
            at: i64 = seq & (BLOCK - 1)
            number = int(seq)
            if (
                block.address[at] != GONE
                and number not in partition.young
                and (seq == first or (not cursor.settled(seq) and number not in cursor.leases))
            ):
                sequences.append(number)
                addresses.append(int(block.address[at]))
                size += i64(block.size[at])
            seq = partition.first_live(seq + 1)
        cursor.fetching = True
        self.reads.append(Read(partition, cursor, sequences, addresses))

    def fetched(self, read: Read, records: list[bytes | None]) -> None:
        """The answer to a read. A record that is damaged can never be delivered: its message is given up, loudly."""
        cursor = read.cursor
        partition = read.partition
        if cursor is not None:
            cursor.fetching = False
        for seq, address, data in zip(read.sequences, read.addresses, records, strict=True):
            if partition.address(seq) == GONE or int(seq) in partition.young:
                continue
            message = None if data is None else self.message_of(data)
            if message is not None:
                if cursor is None:
                    self.expire(partition, seq, message)
                else:
                    self.young.put(partition, seq, message)
            elif partition.address(seq) == address:
                self.damaged(partition, seq)
        if cursor is not None:
            self.offer(cursor)

    def message_of(self, data: bytes) -> Message | None:
        record = read_record(data, 0, len(data), 0)
        if record is None:
            return None
        message = decode_body(record.body)
        message.expires = record.expires
        message.priority = record.flags & PRIORITY_BITS
        if record.flags & DELAYED:
            message.deliver_at = record.time
        if record.flags & COMPRESSED:
            message.payload = self.codec.decompress(message.payload)
        return message

    def damaged(self, partition: Partition, seq: i64) -> None:
        """The store cannot give a message back any more."""
        self.warnings.append(
            f"message {seq} of partition {partition.number} of queue {partition.queue.name} is damaged on disk: lost"
        )
        self.remove_for_all(partition, seq, PURGED)

    def end_turn(self) -> None:
        """Offer more to everybody who has settled something in this turn."""
        while self._hungry:
            hungry = self._hungry
            self._hungry = []
            for consumer in hungry:
                consumer.is_hungry = False
                self.refill(consumer)

    def refill(self, consumer: Consumer) -> None:
        """Give a consumer with room what its partitions have, each partition in turn."""
        cursors = consumer.cursors
        count: i64 = len(cursors)
        step: i64 = 0
        while step < count and consumer.has_room():
            at: i64 = (consumer.turn + step) % count
            step += 1
            cursor = cursors[at]
            if cursor.has_more():
                self.offer(cursor)
        if count:
            consumer.turn = (consumer.turn + step) % count

    # ---- settling

    def lease_of(self, group: Group, name: bytes, token: i64, client: str) -> Lease:
        """The delivery that a settling client means, if it may still settle it."""
        lease = group.own_ids.get(name) if group.own_ids else None
        if lease is None:
            pid, seq = parse_message_id(name)
            partition = self.partitions.get(int(pid))
            if partition is not None and partition.queue is group.queue:
                lease = group.cursors[partition.number].leases.get(int(seq))
        if lease is None:
            raise UnknownDelivery(name.decode("utf-8", "replace"))
        if token:
            if lease.token != token:
                raise StaleDelivery(name.decode("utf-8", "replace"))
        elif client and lease.holder != client:
            raise StaleDelivery(name.decode("utf-8", "replace"))
        return lease

    def ack(self, lease: Lease) -> None:
        """Done. Also from the last holder of one that waits for its retry: the work was done, if late."""
        queue = lease.cursor.group.queue
        queue.process_latency.add(self.now - lease.last_at)
        self._finish(lease, ACKED)

    def _finish(self, lease: Lease, how: i64) -> None:
        cursor = lease.cursor
        self._let_go(lease)
        self._drop_lease(lease)
        cursor.settle(lease.seq, how, lease.key, True, self.journal)
        self._settled(cursor.partition, lease.seq)
        self._after_settle(cursor)

    def _drop_lease(self, lease: Lease) -> None:
        lease.state = SETTLED
        del lease.cursor.leases[int(lease.seq)]
        group = lease.cursor.group
        if group.own_ids:
            message = lease.message
            if message is not None:
                if message.id:
                    group.own_ids.pop(message.id, None)
            else:
                for name, other in list(group.own_ids.items()):
                    if other is lease:
                        del group.own_ids[name]
        lease.message = None

    def _after_settle(self, cursor: Cursor) -> None:
        """Something may go now that could not before: the next of its key, or what stood behind a gate."""
        queue = cursor.group.queue
        if queue.gate_size:
            self._look_at_gate(queue, cursor)
        consumer = cursor.consumer
        if consumer is not None:
            self._make_hungry(consumer)

    def _look_at_gate(self, queue: Queue, cursor: Cursor) -> None:
        number = cursor.partition.number
        if number < queue.gate_size and cursor.floor >= queue.gate_floors[number]:
            for other in cursor.group.cursors:
                other.open_gate()
                self.offer(other)
            if all(self._drained(group, queue) for group in queue.groups.values()):
                queue.gate_size = 0
                queue.gate_floors = []

    def _drained(self, group: Group, queue: Queue) -> bool:
        return all(
            cursor.floor >= floor for cursor, floor in zip(group.cursors, queue.gate_floors, strict=False)
        )

    def _let_go(self, lease: Lease) -> None:
        """A lease ends: its consumer has room for another."""
        if lease.state != LEASED:
            return
        consumer = lease.consumer
        lease.consumer = None
        lease.cursor.out -= 1
        lease.cursor.group.queue.deadlines.remove(lease)
        if consumer is not None:
            consumer.held -= 1
            consumer.settled_at = self.now
            if consumer.stalled:
                consumer.stalled = False
                if consumer.group is not None:
                    self._rebalance(consumer.group)
            self._make_hungry(consumer)

    def _make_hungry(self, consumer: Consumer) -> None:
        if not consumer.is_hungry:
            consumer.is_hungry = True
            self._hungry.append(consumer)

    def _settled(self, partition: Partition, seq: i64) -> None:
        """One group less waits for `seq`; the last one lets it go."""
        if partition.settle_one(seq):
            partition.queue.depth -= 1
            if partition.queue.rules.retention <= 0.0:
                self.let_go_of(partition, seq)

    def let_go_of(self, partition: Partition, seq: i64) -> None:
        """Nobody needs the message any more: its place in the store is free."""
        block = partition.block(seq)
        if block is None:
            return
        size: i64 = i64(block.size[seq & (BLOCK - 1)])
        if partition.young:
            self.young.drop(partition, seq)
        address = partition.remove(seq)
        if address != GONE:
            self.segments.drop(address, size)
            partition.queue.bytes -= size

    def nack(self, lease: Lease, delay: float, description: str) -> None:
        """Failed: again after its backoff, or after `delay` seconds when that is not negative."""
        lease.cursor.group.nacked += 1
        lease.description = description
        self._fail(lease, delay)

    def release(self, lease: Lease) -> None:
        """Given back unused: not a failure."""
        self._let_go(lease)
        lease.state = READY
        lease.message = None
        self._again(lease)

    def extend(self, lease: Lease) -> None:
        """Still working: the deadline starts anew."""
        if lease.state != LEASED:
            raise StaleDelivery(self.name_of(lease).decode("utf-8", "replace"))
        queue = lease.cursor.group.queue
        queue.deadlines.remove(lease)
        lease.deadline = self.now + queue.rules.delivery_timeout
        queue.deadlines.add(lease)
        consumer = lease.consumer
        if consumer is not None:
            consumer.settled_at = self.now

    def name_of(self, lease: Lease) -> bytes:
        message = lease.message
        if message is not None and message.id:
            return message.id
        return message_id(lease.cursor.partition.pid, lease.seq)

    def _fail(self, lease: Lease, delay: float) -> None:
        """One failure more: a retry, or the end."""
        queue = lease.cursor.group.queue
        rules = queue.rules
        lease.failures += 1
        if lease.failures > rules.max_retries:
            self.bury(lease, "max_retries", lease.description)
            return
        if self.now - lease.first_at >= rules.total_timeout:
            self.bury(lease, "timeout", lease.description)
            return
        self._let_go(lease)
        if delay < 0.0:
            delay = rules.backoff(lease.failures, self._draw())
        lease.message = None
        queue.retried += 1
        lease.due = self.now + delay
        self._note_retry(lease)
        if delay > 0.0:
            lease.state = WAITING
            self.wait_for_retry(lease)
        else:
            lease.state = READY
            self._again(lease)

    def _note_retry(self, lease: Lease) -> None:
        note = NoteWriter(notes.RETRY)
        note.number(lease.cursor.group.gid)
        note.number(lease.cursor.partition.pid)
        note.number(lease.seq)
        note.number(lease.failures)
        note.real(lease.due)
        note.real(lease.first_at)
        note.text(lease.description)
        self.journal.add_note(note.value(), int(self.now * 1000.0), False)

    def wait_for_retry(self, lease: Lease) -> None:
        self._ticket += 1
        heapq.heappush(self._retries, (lease.due, self._ticket, lease))

    def _again(self, lease: Lease) -> None:
        """A message that failed or was given back may be leased again."""
        cursor = lease.cursor
        cursor.put_back(lease.seq, cursor.partition.priority(lease.seq), lease.key)
        if cursor.consumer is not None:
            self._make_hungry(cursor.consumer)

    def bury(self, lease: Lease, reason: str, description: str) -> None:
        """Never again: to the dead letters, in one frame with its end here."""
        dead_letters.bury(self, lease, reason, description)
        self._finish(lease, DEAD)

    # ---- what happens by itself

    def expire(self, partition: Partition, seq: i64, message: Message | None) -> None:
        """Nobody has taken it in time: dropped, or a dead letter where the queue says so (then `message` is given)."""
        queue = partition.queue
        if message is not None and queue.rules.expired_to_dlq and self._idle(partition, seq):
            dead_letters.bury_expired(self, partition, seq, message)
            self.remove_for_all(partition, seq, DEAD)
        else:
            self.remove_for_all(partition, seq, EXPIRED)

    def _idle(self, partition: Partition, seq: i64) -> bool:
        """Whether nobody is working on a message."""
        for cursor in partition.cursors:
            lease = cursor.leases.get(int(seq))
            if lease is not None and lease.state == LEASED:
                return False
        return True

    def remove_for_all(self, partition: Partition, seq: i64, how: i64) -> bool:
        """Take a message out of every group that is not working on it; whether it is gone."""
        left = False
        for cursor in partition.cursors:
            if cursor.settled(seq) or not partition.is_for(seq, cursor.group.gid):
                continue
            lease = cursor.leases.get(int(seq))
            if lease is not None:
                if lease.state == LEASED:
                    left = True
                    continue
                self._drop_lease(lease)
            cursor.settle(seq, how, 0 if lease is None else lease.key, lease is not None, self.journal)
            partition.settle_one(seq)
        if left:
            return False
        if not partition.cursors:
            self._note_removed(partition, seq, how)
        if partition.holds(seq):
            partition.queue.depth -= 1
            self.let_go_of(partition, seq)
        return True

    def _note_removed(self, partition: Partition, seq: i64, how: i64) -> None:
        note = NoteWriter(notes.REMOVED)
        note.number(partition.pid)
        note.number(how)
        note.ranges([int(seq)])
        self.journal.add_note(note.value(), int(self.now * 1000.0), False)

    def purge(self, queue: Queue) -> int:
        """Remove everything that nobody is working on; how many messages that were."""
        count = 0
        for partition in queue.partitions:
            seq = partition.first_live(0)
            while seq < partition.next:
                if self.remove_for_all(partition, seq, PURGED):
                    count += 1
                seq = partition.first_live(seq + 1)
        return count

    def tick(self, now: float) -> float:
        """Do what is due; when to be called next, 0.0 for not at all."""
        self.now = now
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, queue = heapq.heappop(self._deadlines)
            self._pass_deadlines(queue)
        while self._retries and self._retries[0][0] <= now:
            due, _, lease = heapq.heappop(self._retries)
            if lease.state == WAITING and lease.due == due:
                lease.state = READY
                self._again(lease)
        while self._delayed and self._delayed[0][0] <= now:
            _, _, partition, number = heapq.heappop(self._delayed)
            self._delay_over(partition, number)
        while self._expiries and self._expiries[0][0] <= now:
            _, _, partition = heapq.heappop(self._expiries)
            self._sweep(partition)
        self.end_turn()
        return self.next_wake()

    def next_wake(self) -> float:
        first = 0.0
        for heap_top in (
            self._deadlines[0][0] if self._deadlines else 0.0,
            self._retries[0][0] if self._retries else 0.0,
            self._delayed[0][0] if self._delayed else 0.0,
            self._expiries[0][0] if self._expiries else 0.0,
        ):
            if heap_top and (first == 0.0 or heap_top < first):
                first = heap_top
        return first

    def _watch(self, queue: Queue, when: float) -> None:
        """One entry per queue with leases: when it comes up, the list of deadlines says whether it was the time."""
        queue.watched = True
        self._ticket += 1
        heapq.heappush(self._deadlines, (when, self._ticket, queue))

    def _pass_deadlines(self, queue: Queue) -> None:
        queue.watched = False
        lease = queue.deadlines.first
        while lease is not None and lease.deadline <= self.now:
            consumer = lease.consumer
            if consumer is not None:
                consumer.taken_away(lease)
                stalls = consumer.settled_at < lease.last_at
                lease.description = f"no answer within {queue.rules.delivery_timeout:g} s"
                self._fail(lease, -1.0)
                if stalls and not consumer.stalled and consumer.group is not None:
                    consumer.stalled = True
                    self._rebalance(consumer.group)
            lease = queue.deadlines.first
        if lease is not None:
            self._watch(queue, lease.deadline)

    def _delay_over(self, partition: Partition, seq: i64) -> None:
        partition.delayed.discard(int(seq))
        if not partition.holds(seq):
            return
        for cursor in partition.cursors:
            if not cursor.settled(seq) and int(seq) not in cursor.leases:
                cursor.come_early(seq, partition.priority(seq))
                if cursor.consumer is not None:
                    self._make_hungry(cursor.consumer)

    def expect_expiry(self, partition: Partition, when: i64) -> None:
        """Look for expired messages at `when`, unless that is done earlier anyway."""
        if partition.expiry_set == 0 or when < partition.expiry_set:
            partition.expiry_set = when
            self._ticket += 1
            heapq.heappush(self._expiries, (float(when), self._ticket, partition))

    def _sweep(self, partition: Partition) -> None:
        """Take out what has expired, and look again when the next one does."""
        if partition.expiry_set == 0 or float(partition.expiry_set) > self.now:
            return
        soonest: i64 = 0
        seq = partition.first_live(0)
        while seq < partition.next:
            block = partition.block(seq)
            if block is None:
                break
            expires: i64 = i64(block.expires[seq & (BLOCK - 1)]) & 0xFFFF_FFFF
            if expires:
                if float(expires) <= self.now:
                    self._sweep_out(partition, seq)
                elif soonest == 0 or expires < soonest:
                    soonest = expires
            seq = partition.first_live(seq + 1)
        partition.expiry_set = 0
        if soonest:
            self.expect_expiry(partition, max(soonest, int(self.now) + 1))

    def _sweep_out(self, partition: Partition, seq: i64) -> None:
        message = partition.young.get(int(seq))
        if message is None and partition.queue.rules.expired_to_dlq:
            self.reads.append(Read(partition, None, [int(seq)], [int(partition.address(seq))]))
        else:
            self.expire(partition, seq, message)

    def rewrite(self, data: bytes, address: i64) -> bool:
        """Compaction: write a message that still lives at `address` anew, so that its old segment can go."""
        record = read_record(data, 0, len(data), address)
        if record is None:
            return False
        if record.pid >= FIRST_PID:
            return self.keeping.rewrite(record)
        partition = self.partitions.get(int(record.pid))
        if partition is None or partition.address(record.seq) != address:
            return False
        moved = self.journal.add_message(
            partition, record.flags, record.seq, record.key, record.expires, record.time, record.body, False
        )
        partition.move(record.seq, moved)
        self.segments.drop(address, record.size)
        self.segments.add(moved, record.size)
        return True

    # ---- consumers

    def join(self, queue: Queue, group: Group, consumer: Consumer) -> None:
        self._joined += 1
        consumer.joined = self._joined
        consumer.group = group
        consumer.settled_at = self.now
        group.consumers.append(consumer)
        queue.consumers += 1
        self._rebalance(group)

    def pause(self, consumer: Consumer) -> None:
        """A consumer cannot take anything for now, but lives: others serve its partitions, it keeps what it holds."""
        consumer.stalled = True
        if consumer.group is not None:
            self._rebalance(consumer.group)

    def resume(self, consumer: Consumer) -> None:
        """It is back."""
        consumer.stalled = False
        if consumer.group is not None:
            self._rebalance(consumer.group)
            self._make_hungry(consumer)

    def feed(self, consumer: Consumer) -> None:
        """A consumer may have room again: offer it more at the end of the turn."""
        if not consumer.is_hungry:
            consumer.is_hungry = True
            self._hungry.append(consumer)

    def leave(self, consumer: Consumer) -> None:
        """A consumer is gone for good: what it held goes to the others at once, as one failure without a backoff."""
        group = consumer.group
        if group is None:
            return
        consumer.group = None
        group.consumers.remove(consumer)
        group.queue.consumers -= 1
        for cursor in group.cursors:
            for lease in [one for one in cursor.leases.values() if one.consumer is consumer]:
                lease.description = "its consumer went away"
                self._fail(lease, 0.0)
        self._rebalance(group)

    def _rebalance(self, group: Group) -> None:
        for cursor in group.rebalance():
            if cursor.consumer is not None:
                self._make_hungry(cursor.consumer)


def _oldest_first(partition: Partition) -> i64:
    return partition.oldest_time()
