"""The queue engine: commands and the time go in; records, deliveries and acknowledgements come out.

The engine is deterministic and does no I/O. It knows no socket, no file and no MQTT. Its caller
(`commit_loop`, a test, the simulator) does four things: call commands with `now` set, commit
closed frames to the store and report their commit, carry out reads, and call `tick` when a timer is
due.

    publish ─▶ frame_builder ─▶ take_frame … store … on_frame_committed ─▶ PUBACKs, and
               dispatch ─▶ Consumer.deliver
    settle  ─▶ cursor ─▶ frame_builder (a note); dispatch to the consumer at the end of the turn
    fail    ─▶ a retry (a note, and an entry in the timer heap), or dead_letters

This class holds the state and the public interface. Publishing and frames are here, the rest is in
`flow` (lifecycle, dispatch, settlement, removal, timers) and `bodies`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.errors import MessageTooLarge, UnknownQueue, make_store_refusal
from sluice.message import (
    COMPRESSED,
    DELAYED,
    MAX_EXPIRES,
    PRIORITY_MASK,
    TARGETED,
    Message,
    encoded_fields_size,
    fnv1a32,
)
from sluice.queues.bodies import body_reads
from sluice.queues.bodies.body_cache import BodyCache
from sluice.queues.bodies.body_reads import BodyRead
from sluice.queues.bulk.bulk_ops import BatchFences
from sluice.queues.compacted import key_compaction
from sluice.queues.compacted.exclusive import ExclusiveQueues, OwnerRead
from sluice.queues.flow import (
    dead_letters,
    dispatch,
    late_settlement,
    lifecycle,
    removal,
    settlement,
)
from sluice.queues.flow.delivery_tokens import DeliveryToken, DeliveryTokens
from sluice.queues.flow.history import RecentHistory
from sluice.queues.flow.timers import SWEEPS_PER_RETENTION, Timers
from sluice.queues.log import notes
from sluice.queues.log.broker_state import BrokerState
from sluice.queues.log.frame_builder import Frame, FrameBuilder
from sluice.queues.log.notes import ACKED, NoteWriter
from sluice.queues.log.segment_usage import SegmentUsage
from sluice.queues.model.cursor import Cursor
from sluice.queues.model.delivery_lease import LEASED, SETTLED, Lease
from sluice.queues.model.group import Group
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.model.queue_rules import STRICT, QueueRules
from sluice.queues.ports import Codec, Consumer, Publisher
from sluice.store.protocol import HEADER_BYTES

MIN_COMPRESS_BYTES: Final = 256  # smaller payloads do not shrink
# A consumer with a smaller lag gets new messages from memory.
MAX_CACHED_LAG: Final = 4096


class Engine:
    """State and commands of all queues of one store.

    `rules_for` returns the rules and the configuration of a queue that is created from a template.
    `draw` returns a random number in [0, 1).
    """

    def __init__(
        self,
        rules_for: Callable[[str], tuple[QueueRules, str]],
        draw: Callable[[], float],
        cache_bytes: int = 16_777_216,
        codec: Codec | None = None,
    ) -> None:
        self.now: float = 0.0
        # Sequences removed from compacted queues, by partition, for a store that shows them; None
        # if the store does not.
        self.removed_from_compacted: dict[int, list[int]] | None = None
        # Limit of partitions of all queues together, for new queues; 0: no limit.
        self.max_partitions: i64 = 0
        # Limit of one partition's length, from its oldest message on; 0: no limit.
        self.max_partition_length: i64 = 0
        # When recovery finished; older deliveries are from a previous run.
        self.started_at: float = 0.0
        # Why the store accepts nothing; publishers are refused meanwhile.
        self.unavailable_reason: str = ""
        self.is_out_of_space: bool = False  # the reason is a lack of space
        self.is_out_of_memory: bool = False  # of memory, not of disk; `is_out_of_space` is set too
        self.refused_out_of_memory: int = 0
        self.alerts: list[dead_letters.Alert] = []
        self.warnings: list[str] = []  # for the log of the caller
        # Queues that were created automatically, for dead letters.
        self.auto_created_queues: list[Queue] = []
        self.queues: dict[str, Queue] = {}
        self.partitions: dict[int, Partition] = {}
        self.groups: dict[int, Group] = {}
        self.frame_builder: FrameBuilder = FrameBuilder()
        self.segment_usage: SegmentUsage = SegmentUsage()
        self.broker_state: BrokerState = BrokerState(self.frame_builder, self.segment_usage)
        self.exclusive: ExclusiveQueues = ExclusiveQueues(self.frame_builder, self.segment_usage)
        self.body_cache: BodyCache = BodyCache(cache_bytes)
        self.codec: Codec = codec if codec is not None else Codec()
        self.reads: list[BodyRead] = []
        self.timers: Timers = Timers()
        self.batch_fences: BatchFences = BatchFences()
        self.recent_history: RecentHistory = RecentHistory()
        self.next_qid: i64 = 1
        self.next_pid: i64 = 1
        self.next_gid: i64 = 1
        self.tokens: DeliveryTokens = DeliveryTokens()
        self.is_closing: bool = False  # consumers leave because the server shuts down
        self.join_count: i64 = 0
        self.draw: Callable[[], float] = draw
        self._rules_for = rules_for
        self._scheduled_consumers: list[Consumer] = []
        # Groups with messages that members with capacity may take over from other members.
        self._scheduled_groups: list[Group] = []
        # Messages with a priority (due 0.0) or a delay, of the open frame and of the frame in
        # commit.
        self._out_of_order: list[tuple[Partition, int, float]] = []
        self._out_of_order_committing: list[tuple[Partition, int, float]] = []

    # ---- queues and groups

    def create_queue(self, rules: QueueRules, config: str) -> Queue:
        lifecycle.check_partition_limit(self, rules, 0)
        return lifecycle.create_queue(self, rules, config)

    def reconfigure_queue(self, queue: Queue, rules: QueueRules, config: str) -> None:
        lifecycle.check_partition_limit(self, rules, len(queue.partitions))
        lifecycle.check_growth_limit(self, queue, rules)
        lifecycle.reconfigure_queue(self, queue, rules, config)

    def delete_queue(self, queue: Queue) -> None:
        lifecycle.delete_queue(self, queue)

    def get_or_create_queue(self, name: str, is_limited: bool = True) -> Queue:
        """Return the queue called `name`; create it from its template if it does not exist.

        Unless `is_limited`, the queue may exceed `max_partitions`.
        """
        queue = self.queues.get(name)
        if queue is None:
            rules, config = self._rules_for(name)
            if is_limited:
                lifecycle.check_partition_limit(self, rules, 0)
            queue = lifecycle.create_queue(self, rules, config)
        return queue

    def get_queue(self, name: str) -> Queue:
        queue = self.queues.get(name)
        if queue is None:
            raise UnknownQueue(name)
        return queue

    def get_or_create_group(
        self, queue: Queue, name: str, start_sequences: list[int] | None = None
    ) -> Group:
        """Return the group `name`, or create it.

        A new group starts at `start_sequences`, or at the oldest message.
        """
        group = queue.groups.get(name)
        return (
            group
            if group is not None
            else lifecycle.create_group(self, queue, name, start_sequences)
        )

    def check_group_limit(self, group_name: str, partition_count: int) -> None:
        """Refuse a new group with so many partitions if all groups together have too many."""
        lifecycle.check_group_limit(self, group_name, partition_count)

    def delete_group(self, group: Group) -> None:
        lifecycle.delete_group(self, group)

    def seek_group(self, group: Group, start_sequences: list[int]) -> None:
        lifecycle.seek_group(self, group, start_sequences)

    def add_note(self, note: NoteWriter, sync: bool) -> None:
        self.frame_builder.add_note(note.to_bytes(), int(self.now * 1000.0), sync)

    # ---- publishing

    def check_store_available(self) -> None:
        """Raise an error while the store accepts no new records."""
        if self.unavailable_reason:
            if self.is_out_of_memory:
                self.refused_out_of_memory += 1
            raise make_store_refusal(
                self.unavailable_reason, self.is_out_of_space, self.is_out_of_memory
            )

    def publish(
        self, queue: Queue, message: Message, publisher: Publisher | None, tag: i64
    ) -> None:
        """Add a message to the open frame; the publisher is notified of its commit."""
        rules = queue.rules
        size: i64 = len(message.payload)
        if self.unavailable_reason:
            queue.refused += 1
            self.check_store_available()
        if size > rules.max_message_size:
            queue.refused += 1
            raise MessageTooLarge(queue.name, int(size), int(rules.max_message_size))
        dedup_id = message.dedup_key() if message.id else b""
        if dedup_id and queue.is_duplicate(dedup_id, self.now):
            queue.duplicates += 1
        else:
            if rules.is_compacted:
                key_compaction.publish(self, queue, message)
            elif queue.depth < rules.max_depth or removal.apply_overflow_policy(
                self, queue, message
            ):
                if self.max_partition_length:
                    removal.append_within_limit(self, queue, message)
                else:
                    self.append(queue, message, 0)
            if dedup_id:
                queue.remember_id(dedup_id, self.now)
        if publisher is not None:
            self.frame_builder.add_commit_waiter(publisher, tag)

    def enqueue_unchecked(self, queue: Queue, message: Message) -> None:
        """Store a message without checking limits and duplicates."""
        if queue.rules.is_compacted:
            key_compaction.append_message(self, queue, message)
        else:
            self.append(queue, message, 0)

    def append(self, queue: Queue, message: Message, target_gid: i64) -> Partition:
        """Append a message to its partition, for one group (`target_gid`) or for all (0)."""
        key_hash = self.partition_key_hash(queue, message.key)
        partition = queue.choose_partition(key_hash)
        self.append_to_partition(partition, message, key_hash, target_gid)
        return partition

    def partition_key_hash(self, queue: Queue, key: bytes) -> i64:
        """Return the hash that decides partition and order, or 0. Strict queues have one key."""
        if queue.rules.ordering == STRICT:
            return 1
        if not key:
            return 0
        return fnv1a32(key) or 1

    def append_to_partition(
        self, partition: Partition, message: Message, key_hash: i64, target_gid: i64
    ) -> i64:
        queue = partition.queue
        rules = queue.rules
        now_ms: i64 = int(self.now * 1000.0)
        message.enqueued_at = now_ms
        flags: i64 = message.priority & PRIORITY_MASK
        record_time_ms = now_ms
        due_at = self.now
        if message.deliver_at > now_ms:
            flags |= DELAYED
            partition.has_delayed = True
            record_time_ms = message.deliver_at
            due_at = float(record_time_ms) / 1000.0
        expires = message.expires
        if rules.message_ttl > 0.0:
            # Count from the time the message is due: a delay longer than the time to live would
            # otherwise mean that the message is acknowledged and never delivered.
            latest_expiry: i64 = min(int(due_at + rules.message_ttl + 0.999), MAX_EXPIRES)
            if expires == 0 or expires > latest_expiry:
                expires = latest_expiry
        message.expires = expires
        pending_groups: i64 = len(partition.cursors)
        seq = partition.next_seq
        if target_gid:
            flags |= TARGETED
            pending_groups = 1
            self._write_target_note(partition, seq, target_gid)
        payload = message.payload
        if rules.compress and len(payload) >= MIN_COMPRESS_BYTES:
            compressed = self.codec.compress(payload)
            if len(compressed) < len(payload):
                payload = compressed
                flags |= COMPRESSED
        size: i64 = HEADER_BYTES + encoded_fields_size(message) + len(payload)
        address = self.frame_builder.add_message(
            partition,
            flags,
            seq,
            key_hash,
            expires,
            record_time_ms,
            size,
            message,
            payload,
            rules.sync,
        )
        partition.append(address, size, key_hash, expires, flags, pending_groups, now_ms)
        self.segment_usage.add(address, size)
        queue.depth += 1
        queue.bytes += size
        queue.enqueued += 1
        if target_gid:
            skip_for_other_groups(partition, seq, target_gid)
        if queue.consumer_count and has_cursor_near_end(partition):
            self.body_cache.put(partition, seq, message)
        if flags & (DELAYED | PRIORITY_MASK):
            self._out_of_order.append(
                (partition, int(seq), float(record_time_ms) / 1000.0 if flags & DELAYED else 0.0)
            )
        if expires:
            self.timers.schedule_expiry(partition, expires)
        return seq

    def _write_target_note(self, partition: Partition, seq: i64, target_gid: i64) -> None:
        partition.set_target_group(seq, target_gid)
        note = NoteWriter(notes.TARGET_GROUP)
        note.write_int(partition.pid)
        note.write_int(seq)
        note.write_int(target_gid)
        self.add_note(note, False)

    # ---- frames

    def take_frame(self) -> Frame:
        """Close the open frame. Call `frame_builder.begin_frame` next, before any other command."""
        frame = self.frame_builder.close(int(self.now * 1000.0))
        self._out_of_order_committing = self._out_of_order
        self._out_of_order = []
        self.exclusive.on_frame_closed()
        return frame

    def on_frame_committed(self, frame: Frame) -> None:
        """Acknowledge the frame's messages to publishers and make them visible to consumers."""
        runs = frame.tag_starts
        last: i64 = len(frame.publishers) - 1
        nth_run: i64 = 0
        while nth_run <= last:
            end: i64 = runs[nth_run + 1] if nth_run < last else i64(len(frame.tags))
            frame.publishers[nth_run].on_committed_many(frame.tags, runs[nth_run], end)
            nth_run += 1
        frame.mark_committed()
        if self._out_of_order_committing:
            committed = self._out_of_order_committing
            self._out_of_order_committing = []
            for partition, seq, due_at in committed:
                self.admit_out_of_order(partition, seq, due_at)
        for logged in frame.partitions:
            assert isinstance(logged, Partition)
            for cursor in logged.cursors:
                dispatch.dispatch_cursor(self, cursor)
        self.exclusive.on_frame_committed(self.now)

    def admit_out_of_order(self, partition: Partition, seq: i64, due_at: float) -> None:
        """Admit a message to out-of-order delivery: it has a delay (`due_at`) or a priority."""
        if not partition.holds(seq):
            return
        if due_at > self.now:
            self.timers.schedule_delayed(partition, seq, due_at)
            return
        for cursor in partition.cursors:
            cursor.admit_if_out_of_order(seq)

    def rewrite_record(self, data: bytes, address: i64) -> bool:
        return body_reads.rewrite_record(self, data, address)

    # ---- delivering

    def dispatch_cursor(self, cursor: Cursor) -> None:
        dispatch.dispatch_cursor(self, cursor)

    def dispatch_consumer(self, consumer: Consumer) -> None:
        dispatch.dispatch_consumer(self, consumer)

    def schedule_dispatch(self, consumer: Consumer) -> None:
        """Dispatch to a consumer that may have capacity again, at the end of the turn."""
        if not consumer.is_scheduled:
            consumer.is_scheduled = True
            self._scheduled_consumers.append(consumer)

    def schedule_sharing(self, group: Group) -> None:
        """Share messages of members without capacity within `group` when the turn ends."""
        if not group.is_sharing_scheduled:
            group.is_sharing_scheduled = True
            self._scheduled_groups.append(group)

    def end_turn(self) -> None:
        """Dispatch to consumers that settled something, and share blocked messages."""
        while self._scheduled_consumers or self._scheduled_groups:
            consumers = self._scheduled_consumers
            self._scheduled_consumers = []
            for consumer in consumers:
                consumer.is_scheduled = False
                dispatch.dispatch_consumer(self, consumer)
                blocked_consumer = consumer.next_blocked_consumer()
                if blocked_consumer is not None:
                    self.schedule_dispatch(blocked_consumer)
            if self._scheduled_groups:
                groups = self._scheduled_groups
                self._scheduled_groups = []
                for group in groups:
                    group.is_sharing_scheduled = False
                    dispatch.share_blocked(self, group)
        if self.exclusive.scheduled_subscribers:
            self.exclusive.dispatch_scheduled(self.now)

    def on_read_done(self, read: BodyRead, records: list[bytes | None]) -> None:
        dispatch.on_read_done(self, read, records)

    def on_owner_read_done(self, read: OwnerRead, records: list[bytes | None]) -> None:
        self.warnings += self.exclusive.on_read_done(read, records, self.now, self.codec)

    def decode_message(self, data: bytes) -> Message | None:
        return body_reads.decode_message(data, self.codec)

    def drop_damaged(self, partition: Partition, seq: i64) -> None:
        dispatch.drop_damaged(self, partition, seq)

    # ---- consumers

    def join(self, queue: Queue, group: Group, consumer: Consumer) -> None:
        dispatch.join(self, group, consumer)

    def leave(self, consumer: Consumer) -> None:
        dispatch.leave(self, consumer)

    def pause(self, consumer: Consumer) -> None:
        dispatch.set_paused(self, consumer, True)

    def resume(self, consumer: Consumer) -> None:
        dispatch.set_paused(self, consumer, False)

    def set_identity(self, consumer: Consumer, identity: str) -> None:
        dispatch.set_identity(self, consumer, identity)

    def set_prefetch(self, consumer: Consumer, prefetch: i64) -> None:
        dispatch.set_prefetch(self, consumer, prefetch)

    def rebalance(self, group: Group) -> None:
        dispatch.rebalance(self, group)

    # ---- settling

    def begin_tokens(self, secret: bytes, run: i64) -> None:
        """Start the delivery tokens of this run. `secret` is stored if the store has none yet.

        The counters start with the time and grow by one for each delivery, so they are above those
        of every earlier run, unless the clock was set back. For that case, runs have random
        numbers.
        """
        random_fraction = self.draw()  # two starts may happen in the same millisecond
        first: i64 = (i64(int(self.now * 1000.0)) << 20) + i64(int(random_fraction * 1_048_576.0))
        if self.tokens.secret:
            secret = self.tokens.secret
        else:
            note = NoteWriter(notes.TOKEN_SECRET)
            note.write_bytes(secret)
            # Without the secret, tokens that clients hold cannot be verified.
            self.add_note(note, True)
        self.tokens.start_run(secret, run, first)

    def find_lease(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> Lease:
        """Return the lease that a client wants to settle, if the client may still settle it."""
        return settlement.find_lease(self, group, message_id, token, identity)

    def ack(self, lease: Lease) -> None:
        """Settle a delivery as done.

        The last holder may also acknowledge a message that waits for its retry: the work was done,
        late.
        """
        if lease.state == SETTLED:
            return
        lease.cursor.group.queue.process_latency.add(self.now - lease.last_delivered_at)
        settlement.finish_delivery(self, lease, ACKED)

    def ack_late(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> bool:
        """Acknowledge a delivery whose lease is unknown; return whether that counts."""
        return late_settlement.ack_late(self, group, message_id, token, identity)

    def reclaim_lease(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str
    ) -> Lease | None:
        """Recreate the lease of a delivery that is no longer known, so that it can be settled."""
        return late_settlement.reclaim_lease(self, group, message_id, token, identity)

    def is_from_previous_run(self, group: Group, message_id: bytes) -> bool:
        """Return whether the message is unsettled and a previous run may have delivered it."""
        return late_settlement.find_restored_cursor(self, group, message_id) is not None

    def is_token_forged(
        self, group: Group, message_id: bytes, token: DeliveryToken, identity: str, is_known: bool
    ) -> bool:
        """Return whether `token` was never issued to `identity` for this unsettled message."""
        return late_settlement.is_token_forged(self, group, message_id, token, identity, is_known)

    def nack(self, lease: Lease, delay: float, description: str) -> None:
        """Record a failure: retry after `delay` seconds, or after the backoff if negative."""
        if lease.state != LEASED and 0 < lease.token_counter < self.tokens.first_counter:
            return  # the failure was counted in a previous run
        settlement.check_leased(lease)
        lease.cursor.group.nacked += 1
        lease.description = description
        settlement.fail_delivery(self, lease, delay, True)

    def release(self, lease: Lease) -> None:
        """Return a delivery unused: not a failure."""
        settlement.check_leased(lease)
        settlement.release_delivery(self, lease)

    def extend(self, lease: Lease) -> None:
        """Restart the deadline of a delivery that is still being processed."""
        settlement.check_leased(lease)
        queue = lease.cursor.group.queue
        queue.deadlines.remove(lease)
        lease.lease_started_at = self.now
        lease.deadline = self.now + queue.rules.delivery_timeout
        queue.deadlines.add(lease)
        consumer = lease.consumer
        if consumer is not None:
            consumer.active_at = self.now
            if consumer.is_stalled:
                settlement.clear_stalled(self, lease.cursor.group, consumer.identity)

    def dead_letter(self, lease: Lease, reason: str, description: str) -> None:
        """Move a message to the dead-letter queue, in the same frame as its settlement here."""
        settlement.dead_letter(self, lease, reason, description, True)

    def message_id_of(self, lease: Lease) -> bytes:
        return settlement.message_id_of(lease)

    def after_settle(self, cursor: Cursor) -> None:
        """Dispatch messages that this settlement unblocked: the next of its key, or gated ones."""
        if cursor.low_watermark >= cursor.gate_watermark:
            settlement.check_gates(self, cursor)
        consumer = cursor.consumer
        if consumer is not None and not consumer.is_scheduled and cursor.has_more():
            consumer.is_scheduled = True
            self._scheduled_consumers.append(consumer)

    def remove_for_all_groups(self, partition: Partition, seq: i64, outcome: i64) -> bool:
        """Settle a message for groups without a lease of it; return whether it is deleted."""
        return removal.remove_for_all_groups(self, partition, seq, outcome)

    def purge_queue(self, queue: Queue) -> int:
        """Remove all messages without a lease; return their number."""
        return removal.purge_queue(self, queue)

    # ---- time

    def tick(self, now: float) -> float:
        """Run the timers that are due. Return the time of the next call, 0.0 for none."""
        self.now = now
        self.timers.run_due(self)
        if self.exclusive.sweep_due_at and self.exclusive.sweep_due_at <= now:
            self.exclusive.apply_retention(now)
        self.end_turn()
        return self.next_wakeup_at()

    def next_wakeup_at(self) -> float:
        """Return the time of the next wake-up, 0.0 for none."""
        first = self.timers.next_due()
        due = self.exclusive.sweep_due_at
        return due if due and (first == 0.0 or due < first) else first

    def schedule_retention(self, partition: Partition) -> None:
        """Schedule periodic checks for settled messages whose retention is over."""
        retention = partition.queue.rules.retention
        if partition.retention_check_at == 0.0 and retention > 0.0:
            self.timers.schedule_retention(
                partition, self.now + max(1.0, retention / SWEEPS_PER_RETENTION)
            )


def skip_for_other_groups(partition: Partition, seq: i64, target_gid: i64) -> None:
    """Settle a message for all groups except its target."""
    for cursor in partition.cursors:
        if cursor.group.gid != target_gid:
            cursor.enqueued -= 1
            cursor.mark_settled(seq, True)


def has_cursor_near_end(partition: Partition) -> bool:
    """Return whether a consumer will need the next message soon.

    For consumers with more lag, the cache would drop the body before they need it.
    """
    for cursor in partition.cursors:
        if partition.next_seq - cursor.scan_position < MAX_CACHED_LAG:
            return True
    return False
