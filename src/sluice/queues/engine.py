"""The queue engine: commands and the time go in; records, deliveries and answers come out.

It is deterministic and does no I/O. It knows no socket, no file and no word of MQTT. Whoever drives it (`runner.py`, a
test, the simulator) does four things: calls its commands with `now` set, takes closed frames to the store and reports
their commit, carries out its reads, and wakes it when it asks for it.

    publish ─▶ journal ─▶ take_frame … store … frame_done ─▶ receipts, and offer ─▶ Consumer.deliver
    settle  ─▶ cursor  ─▶ journal (a note), and the consumer is offered more at the end of the turn
    fail    ─▶ a retry (a note, and a place in the heap), or dead_letters.bury

This class is the state and the face; publishing and frames are here, the rest stands in the modules beside it:
lifecycle, dispatch, reading, settling, removal, timers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.errors import MessageTooLarge, UnknownQueue, refusal_to_store
from sluice.message import (
    COMPRESSED,
    DELAYED,
    LAST_SECOND,
    PRIORITY_BITS,
    TARGETED,
    Message,
    fnv1a32,
    size_of_start,
)
from sluice.queues.compacted import key_compaction
from sluice.queues.flow import dead_letters
from sluice.queues.flow import dispatch
from sluice.queues.flow import late_settlement
from sluice.queues.flow import lifecycle
from sluice.queues.bodies import body_reads
from sluice.queues.flow import removal
from sluice.queues.flow import settlement
from sluice.queues.log import frame_builder as notes
from sluice.queues.bulk.bulk_ops import Batches
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, SETTLED, Lease
from sluice.queues.compacted.exclusive import Exclusive, OwnedRead
from sluice.queues.model.group import Group
from sluice.queues.flow.history import Past
from sluice.queues.log.frame_builder import ACKED, Frame, Journal, NoteWriter
from sluice.queues.log.broker_state import Keeping
from sluice.queues.model.partition import Partition
from sluice.queues.ports import Codec, Consumer, Publisher
from sluice.queues.model.queue import Queue
from sluice.queues.bodies.body_reads import Read
from sluice.queues.model.queue_rules import STRICT, Rules
from sluice.queues.log.segment_usage import Segments
from sluice.queues.flow.timers import RETENTION_STEPS, Timers
from sluice.queues.flow.delivery_tokens import DeliveryTokens, Token
from sluice.queues.bodies.body_cache import Young
from sluice.store.protocol import HEADER_BYTES

COMPRESS_FROM: Final = 256  # smaller payloads do not get smaller
NEAR: Final = 4096  # a consumer that is not further behind gets new messages from memory


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
        # What has left compacted queues, by partition, for a store that shows them; None where nobody asks.
        self.gone: dict[int, list[int]] | None = None
        self.max_partitions: i64 = 0  # of all queues together, for new ones; 0: any
        self.max_length: i64 = 0  # of one partition, from its oldest message on; 0: any
        self.started_at: float = 0.0  # when the queues were brought back; what was delivered before is older
        self.unavailable: str = ""  # why the store takes nothing: publishers are refused meanwhile
        self.no_room: bool = False  # and whether that is for want of room
        self.no_memory: bool = False  # of memory, not of disk; then no_room holds as well
        self.refused_for_memory: int = 0
        self.alerts: list[dead_letters.Alert] = []
        self.warnings: list[str] = []  # for the log of whoever drives the engine
        self.made: list[Queue] = []  # queues that came into being by themselves, for dead letters
        self.queues: dict[str, Queue] = {}
        self.partitions: dict[int, Partition] = {}
        self.groups: dict[int, Group] = {}
        self.journal: Journal = Journal()
        self.segments: Segments = Segments()
        self.keeping: Keeping = Keeping(self.journal, self.segments)
        self.exclusive: Exclusive = Exclusive(self.journal, self.segments)
        self.young: Young = Young(cache_bytes)
        self.codec: Codec = codec if codec is not None else Codec()
        self.reads: list[Read] = []
        self.timers: Timers = Timers()
        self.batches: Batches = Batches()
        self.past: Past = Past()
        self.next_qid: i64 = 1
        self.next_pid: i64 = 1
        self.next_gid: i64 = 1
        self.tokens: DeliveryTokens = DeliveryTokens()
        self.closing: bool = False  # consumers leave because the server does
        self.joined: i64 = 0
        self.draw: Callable[[], float] = draw
        self._rules_for = rules_for
        self._hungry: list[Consumer] = []
        self._sharing: list[Group] = []  # groups with messages that members with room may take from others
        # Messages with a priority (due 0.0) or a delay, of the open frame and of the one under way.
        self._special: list[tuple[Partition, int, float]] = []
        self._special_sent: list[tuple[Partition, int, float]] = []

    # ---- queues and groups

    def create(self, rules: Rules, config: str) -> Queue:
        lifecycle.check_partitions(self, rules, 0)
        return lifecycle.create(self, rules, config)

    def reconfigure(self, queue: Queue, rules: Rules, config: str) -> None:
        lifecycle.check_partitions(self, rules, len(queue.partitions))
        lifecycle.check_growth(self, queue, rules)
        lifecycle.reconfigure(self, queue, rules, config)

    def delete(self, queue: Queue) -> None:
        lifecycle.delete(self, queue)

    def ensure(self, name: str, is_limited: bool = True) -> Queue:
        """The queue called `name`, made from its template if it is not there. Unless `is_limited`,
        it may exceed `max_partitions`."""
        queue = self.queues.get(name)
        if queue is None:
            rules, config = self._rules_for(name)
            if is_limited:
                lifecycle.check_partitions(self, rules, 0)
            queue = lifecycle.create(self, rules, config)
        return queue

    def find(self, name: str) -> Queue:
        queue = self.queues.get(name)
        if queue is None:
            raise UnknownQueue(name)
        return queue

    def group(self, queue: Queue, name: str, floors: list[int] | None = None) -> Group:
        """The group called `name`; a new one begins at `floors`, or with the oldest message that is kept."""
        group = queue.groups.get(name)
        return group if group is not None else lifecycle.make_group(self, queue, name, floors)

    def check_group(self, name: str, partitions: int) -> None:
        """Refuse a new group that would follow so many partitions, if all groups follow too many."""
        lifecycle.check_group(self, name, partitions)

    def drop_group(self, group: Group) -> None:
        lifecycle.drop_group(self, group)

    def seek(self, group: Group, floors: list[int]) -> None:
        lifecycle.seek(self, group, floors)

    def note(self, note: NoteWriter, sync: bool) -> None:
        self.journal.add_note(note.value(), int(self.now * 1000.0), sync)

    # ---- publishing

    def check_available(self) -> None:
        """Refuse what would have to be kept, while the store takes nothing new."""
        if self.unavailable:
            if self.no_memory:
                self.refused_for_memory += 1
            raise refusal_to_store(self.unavailable, self.no_room, self.no_memory)

    def publish(self, queue: Queue, message: Message, publisher: Publisher | None, tag: i64) -> None:
        """Take a message into the open frame. The publisher hears of it when the frame is kept."""
        rules = queue.rules
        size: i64 = len(message.payload)
        if self.unavailable:
            queue.refused += 1
            self.check_available()
        if size > rules.max_message_size:
            queue.refused += 1
            raise MessageTooLarge(queue.name, int(size), int(rules.max_message_size))
        name = message.known_by() if message.id else b""
        if name and queue.seen(name, self.now):
            queue.duplicates += 1
        else:
            if rules.compacted:
                key_compaction.publish(self, queue, message)
            elif queue.depth < rules.max_depth or removal.make_room(self, queue, message):
                if self.max_length:
                    removal.append_within(self, queue, message)
                else:
                    self.append(queue, message, 0)
            if name:
                queue.remember(name, self.now)
        if publisher is not None:
            self.journal.add_receipt(publisher, tag)

    def put(self, queue: Queue, message: Message) -> None:
        """Take a message that nothing can be said against, by the kind of its queue."""
        if queue.rules.compacted:
            key_compaction.append(self, queue, message)
        else:
            self.append(queue, message, 0)

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
        flags: i64 = message.priority & PRIORITY_BITS
        time = now_ms
        due = self.now
        if message.deliver_at > now_ms:
            flags |= DELAYED
            partition.has_delays = True
            time = message.deliver_at
            due = float(time) / 1000.0
        expires = message.expires
        if rules.message_ttl > 0.0:
            # Counted from when it is due: else a delay longer than that would be acknowledged and never delivered.
            latest: i64 = min(int(due + rules.message_ttl + 0.999), LAST_SECOND)
            if expires == 0 or expires > latest:
                expires = latest
        message.expires = expires
        left: i64 = len(partition.cursors)
        seq = partition.next
        if target:
            flags |= TARGETED
            left = 1
            self._note_target(partition, seq, target)
        payload = message.payload
        if rules.compress and len(payload) >= COMPRESS_FROM:
            packed = self.codec.compress(payload)
            if len(packed) < len(payload):
                payload = packed
                flags |= COMPRESSED
        size: i64 = HEADER_BYTES + size_of_start(message) + len(payload)
        address = self.journal.add_message(
            partition, flags, seq, key, expires, time, size, message, payload, rules.sync
        )
        partition.append(address, size, key, expires, flags, left, now_ms)
        self.segments.add(address, size)
        queue.depth += 1
        queue.bytes += size
        queue.enqueued += 1
        if target:
            pass_by_others(partition, seq, target)
        if queue.consumers and is_near(partition):
            self.young.put(partition, seq, message)
        if flags & (DELAYED | PRIORITY_BITS):
            self._special.append((partition, int(seq), float(time) / 1000.0 if flags & DELAYED else 0.0))
        if expires:
            self.timers.expect_expiry(partition, expires)
        return seq

    def _note_target(self, partition: Partition, seq: i64, target: i64) -> None:
        partition.aim(seq, target)
        note = NoteWriter(notes.TARGET)
        note.number(partition.pid)
        note.number(seq)
        note.number(target)
        self.note(note, False)

    # ---- frames

    def take_frame(self) -> Frame:
        """Close the open frame. Before anything else is done, `journal.begin` must say where the next one stands."""
        frame = self.journal.close(int(self.now * 1000.0))
        self._special_sent = self._special
        self._special = []
        self.exclusive.frame_taken()
        return frame

    def frame_done(self, frame: Frame) -> None:
        """The store has the frame: only now do publishers hear of it, and consumers see its messages."""
        runs = frame.runs
        last: i64 = len(frame.publishers) - 1
        run: i64 = 0
        while run <= last:
            end: i64 = runs[run + 1] if run < last else i64(len(frame.tags))
            frame.publishers[run].all_stored(frame.tags, runs[run], end)
            run += 1
        for nth, partition in enumerate(frame.partitions):
            if partition.committed < frame.reached[nth]:
                partition.committed = frame.reached[nth]
        if self._special_sent:
            sent = self._special_sent
            self._special_sent = []
            for partition, seq, due in sent:
                self.announce_special(partition, seq, due)
        for partition in frame.partitions:
            for cursor in partition.cursors:
                dispatch.offer(self, cursor)
        self.exclusive.frame_done(self.now)

    def announce_special(self, partition: Partition, seq: i64, due: float) -> None:
        """A message that does not wait for its turn among the others: it has a delay (`due`) or a priority."""
        if not partition.holds(seq):
            return
        if due > self.now:
            self.timers.wait_for_delay(partition, seq, due)
            return
        for cursor in partition.cursors:
            cursor.come_early_if_special(seq)

    def rewrite(self, data: bytes, address: i64) -> bool:
        return body_reads.rewrite(self, data, address)

    # ---- delivering

    def offer(self, cursor: Cursor) -> None:
        dispatch.offer(self, cursor)

    def refill(self, consumer: Consumer) -> None:
        dispatch.refill(self, consumer)

    def feed(self, consumer: Consumer) -> None:
        """A consumer may have room again: offer it more at the end of the turn."""
        if not consumer.is_hungry:
            consumer.is_hungry = True
            self._hungry.append(consumer)

    def share_later(self, group: Group) -> None:
        """Members of `group` may take messages that others have no room for: see to it when the turn ends."""
        if not group.is_sharing:
            group.is_sharing = True
            self._sharing.append(group)

    def end_turn(self) -> None:
        """Offer more to everybody who has settled something in this turn, and share what is left."""
        while self._hungry or self._sharing:
            hungry = self._hungry
            self._hungry = []
            for consumer in hungry:
                consumer.is_hungry = False
                dispatch.refill(self, consumer)
                other = consumer.next_in_line()
                if other is not None:
                    self.feed(other)
            if self._sharing:
                groups = self._sharing
                self._sharing = []
                for group in groups:
                    group.is_sharing = False
                    dispatch.share_out(self, group)
        if self.exclusive.hungry:
            self.exclusive.feed_all(self.now)

    def fetched(self, read: Read, records: list[bytes | None]) -> None:
        dispatch.fetched(self, read, records)

    def owned_fetched(self, read: OwnedRead, records: list[bytes | None]) -> None:
        self.warnings += self.exclusive.fetched(read, records, self.now, self.codec)

    def message_of(self, data: bytes) -> Message | None:
        return body_reads.message_of(data, self.codec)

    def damaged(self, partition: Partition, seq: i64) -> None:
        dispatch.damaged(self, partition, seq)

    # ---- consumers

    def join(self, queue: Queue, group: Group, consumer: Consumer) -> None:
        dispatch.join(self, group, consumer)

    def leave(self, consumer: Consumer) -> None:
        dispatch.leave(self, consumer)

    def pause(self, consumer: Consumer) -> None:
        dispatch.pause(self, consumer, True)

    def resume(self, consumer: Consumer) -> None:
        dispatch.pause(self, consumer, False)

    def set_identity(self, consumer: Consumer, identity: str) -> None:
        dispatch.set_identity(self, consumer, identity)

    def set_prefetch(self, consumer: Consumer, prefetch: i64) -> None:
        dispatch.set_prefetch(self, consumer, prefetch)

    def rebalance(self, group: Group) -> None:
        dispatch.rebalance(self, group)

    # ---- settling

    def begin_tokens(self, secret: bytes, run: i64) -> None:
        """Start the delivery tokens of this run. `secret` is new if the store has none yet, and is stored then.

        The counters begin with the time and grow by one for each delivery, so they are behind those of every run
        before, unless the clock was set back: for that case runs have numbers, which are random.
        """
        lot = self.draw()  # two starts may be in the same millisecond
        first: i64 = (i64(int(self.now * 1000.0)) << 20) + i64(int(lot * 1_048_576.0))
        if self.tokens.secret:
            secret = self.tokens.secret
        else:
            note = NoteWriter(notes.TOKEN_SECRET)
            note.data(secret)
            self.note(note, True)  # without the secret, tokens that clients hold cannot be checked
        self.tokens.begin(secret, run, first)

    def lease_of(self, group: Group, name: bytes, token: Token, identity: str) -> Lease:
        """The delivery that a settling client means, if it may still settle it."""
        return settlement.lease_of(self, group, name, token, identity)

    def ack(self, lease: Lease) -> None:
        """Done. Also from the last holder of one that waits for its retry: the work was done, if late."""
        if lease.state == SETTLED:
            return
        lease.cursor.group.queue.process_latency.add(self.now - lease.last_at)
        settlement.finish(self, lease, ACKED)

    def finish_late(self, group: Group, name: bytes, token: Token, identity: str) -> bool:
        """Done, and nothing is known of the delivery: whether it counts all the same."""
        return late_settlement.finish(self, group, name, token, identity)

    def retake(self, group: Group, name: bytes, token: Token, identity: str) -> Lease | None:
        """A delivery of which nothing is known, taken up again so that what is said of it counts."""
        return late_settlement.retake(self, group, name, token, identity)

    def is_from_before(self, group: Group, name: bytes) -> bool:
        """Return whether the message is unsettled and an earlier run may have delivered it."""
        return late_settlement.cursor_of(self, group, name) is not None

    def is_forged(self, group: Group, name: bytes, token: Token, identity: str, known: bool) -> bool:
        """Return whether `token` was never issued to `identity` for the unsettled message called `name`."""
        return late_settlement.is_forged(self, group, name, token, identity, known)

    def nack(self, lease: Lease, delay: float, description: str) -> None:
        """Failed: again after its backoff, or after `delay` seconds when that is not negative."""
        if lease.state != LEASED and 0 < lease.token < self.tokens.first:
            return  # it failed in an earlier life, and was counted then
        settlement.check_held(lease)
        lease.cursor.group.nacked += 1
        lease.description = description
        settlement.fail(self, lease, delay, True)

    def release(self, lease: Lease) -> None:
        """Given back unused: not a failure."""
        settlement.check_held(lease)
        settlement.release(self, lease)

    def extend(self, lease: Lease) -> None:
        """Still working: the deadline starts anew."""
        settlement.check_held(lease)
        queue = lease.cursor.group.queue
        queue.deadlines.remove(lease)
        lease.since = self.now
        lease.deadline = self.now + queue.rules.delivery_timeout
        queue.deadlines.add(lease)
        consumer = lease.consumer
        if consumer is not None:
            consumer.active_at = self.now
            if consumer.stalled:
                settlement.sign_of_life(self, lease.cursor.group, consumer.identity)

    def bury(self, lease: Lease, reason: str, description: str) -> None:
        """Never again: to the dead letters, in one frame with its end here."""
        settlement.bury(self, lease, reason, description, True)

    def name_of(self, lease: Lease) -> bytes:
        return settlement.name_of(lease)

    def after_settle(self, cursor: Cursor) -> None:
        """Something may go now that could not before: the next of its key, or what stood behind a gate."""
        if cursor.floor >= cursor.gate_mark:
            settlement.look_at_gates(self, cursor)
        consumer = cursor.consumer
        if consumer is not None and not consumer.is_hungry and cursor.has_more():
            consumer.is_hungry = True
            self._hungry.append(consumer)

    def remove_for_all(self, partition: Partition, seq: i64, how: i64) -> bool:
        """Take a message out of every group that is not working on it; whether it is gone."""
        return removal.remove_for_all(self, partition, seq, how)

    def purge(self, queue: Queue) -> int:
        """Remove everything that nobody is working on; how many messages that were."""
        return removal.purge(self, queue)

    # ---- time

    def tick(self, now: float) -> float:
        """Do what is due; when to be called next, 0.0 for not at all."""
        self.now = now
        self.timers.run(self)
        if self.exclusive.due and self.exclusive.due <= now:
            self.exclusive.tick(now)
        self.end_turn()
        return self.next_wake()

    def next_wake(self) -> float:
        """When to be woken; 0.0 for not at all."""
        first = self.timers.first()
        due = self.exclusive.due
        return due if due and (first == 0.0 or due < first) else first

    def expect_retention(self, partition: Partition) -> None:
        """Something settled is kept in `partition`: look for what was kept long enough from time to time."""
        retention = partition.queue.rules.retention
        if partition.retention_set == 0.0 and retention > 0.0:
            self.timers.expect_retention(partition, self.now + max(1.0, retention / RETENTION_STEPS))


def pass_by_others(partition: Partition, seq: i64, target: i64) -> None:
    """A message for one group: the others are done with it from the start."""
    for cursor in partition.cursors:
        if cursor.group.gid != target:
            cursor.entered -= 1
            cursor.pass_over(seq, True)


def is_near(partition: Partition) -> bool:
    """Whether somebody will want the next message soon: for those far behind it would be read again anyway."""
    for cursor in partition.cursors:
        if partition.next - cursor.fresh < NEAR:
            return True
    return False
