"""Appender: write new messages into their partitions, and make them visible after their commit.

It checks no limits and no duplicates (`publishing`), and knows nothing about keys of compacted
queues (`key_compaction`).
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.message import (
    COMPRESSED,
    DELAYED,
    MAX_EXPIRES,
    PRIORITY_MASK,
    TARGETED,
    Message,
    encoded_fields_size,
)
from sluice.queues.bodies import BodyCache
from sluice.queues.flow.timers import Timers
from sluice.queues.log import Frame, NoteWriter, notes
from sluice.queues.model import EngineState, Partition, Queue
from sluice.queues.ports import Codec
from sluice.store.protocol import HEADER_BYTES

MIN_COMPRESS_BYTES: Final = 256  # smaller payloads do not shrink
# A group with a smaller backlog gets new messages from memory.
MAX_CACHED_BACKLOG: Final = 4096
STRATEGY_REPORT_SECONDS: Final = 60.0  # between two warnings about the strategy of a queue


class Appender:
    def __init__(
        self, state: EngineState, timers: Timers, body_cache: BodyCache, codec: Codec
    ) -> None:
        self._state: EngineState = state
        self._timers: Timers = timers
        self._body_cache: BodyCache = body_cache
        self._codec: Codec = codec
        # Messages with a priority (due 0.0) or a delay, of the open frame and of the frame in
        # commit.
        self._out_of_order: list[tuple[Partition, int, float]] = []
        self._out_of_order_committing: list[tuple[Partition, int, float]] = []

    def append(self, queue: Queue, message: Message, target_gid: i64) -> None:
        """Append a message to its partition, for one group (`target_gid`) or for all (0)."""
        key_hash = queue.key_hash(message.key)
        partition = queue.choose_partition(message.key, key_hash)
        self.append_to_partition(partition, message, key_hash, 0, target_gid)

    def append_to_partition(
        self, partition: Partition, message: Message, key_hash: i64, flags: i64, target_gid: i64
    ) -> i64:
        """Append a message to a partition; return its sequence."""
        state = self._state
        queue = partition.queue
        rules = queue.rules
        if queue.strategy_fault:
            self._report_strategy_fault(queue)
        now_ms: i64 = int(state.now * 1000.0)
        message.enqueued_at_ms = now_ms
        flags |= message.priority & PRIORITY_MASK
        record_time_ms = now_ms
        due_at = state.now
        if message.deliver_at_ms > now_ms:
            flags |= DELAYED
            partition.has_delayed = True
            if message.id:
                queue.index_delayed(message.id, partition, partition.next_seq)
            record_time_ms = message.deliver_at_ms
            due_at = float(record_time_ms) / 1000.0
        elif flags & DELAYED:
            partition.has_delayed = True  # due now: delivered outside of the order of the scan
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
            compressed = self._codec.compress(payload)
            if len(compressed) < len(payload):
                payload = compressed
                flags |= COMPRESSED
        size: i64 = HEADER_BYTES + encoded_fields_size(message) + len(payload)
        address = state.frame_builder.add_message(
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
        if rules.is_compacted:
            state.segment_usage.add_last_value(address, size)
        else:
            state.segment_usage.add(address, size)
        if target_gid:
            partition.skip_for_other_groups(seq, target_gid)
        if queue.consumer_count and partition.has_cursor_near_end(MAX_CACHED_BACKLOG):
            self._body_cache.put(partition, seq, message)
        if flags & (DELAYED | PRIORITY_MASK):
            self._out_of_order.append(
                (partition, int(seq), float(record_time_ms) / 1000.0 if flags & DELAYED else 0.0)
            )
        if expires:
            self._timers.schedule_expiry(partition, expires)
        return seq

    def _report_strategy_fault(self, queue: Queue) -> None:
        if self._state.now - queue.strategy_reported_at >= STRATEGY_REPORT_SECONDS:
            queue.strategy_reported_at = self._state.now
            self._state.warn(
                f"the partition strategy of queue {queue.name!r} failed, and the hash of the key "
                f"chose the partition: {queue.strategy_fault}"
            )
        queue.strategy_fault = ""

    def _write_target_note(self, partition: Partition, seq: i64, target_gid: i64) -> None:
        partition.set_target_group(seq, target_gid)
        note = NoteWriter(notes.TARGET_GROUP)
        note.write_int(partition.pid)
        note.write_int(seq)
        note.write_int(target_gid)
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)

    # ---- frames

    def offer_after_commit(self, partition: Partition, seq: i64) -> None:
        """Let the groups choose a message after its commit.

        A command has rescheduled it before then.
        """
        if partition.address(seq) < self._state.frame_builder.base_address():
            self._out_of_order_committing.append((partition, int(seq), 0.0))
        else:
            self._out_of_order.append((partition, int(seq), 0.0))

    def on_frame_closed(self) -> None:
        self._out_of_order_committing = self._out_of_order
        self._out_of_order = []

    def on_frame_committed(self, frame: Frame) -> None:
        """Make the messages of a frame visible to consumers."""
        frame.mark_committed()
        if self._out_of_order_committing:
            committed = self._out_of_order_committing
            self._out_of_order_committing = []
            for partition, seq, due_at in committed:
                self._offer_out_of_order(partition, seq, due_at)

    def _offer_out_of_order(self, partition: Partition, seq: i64, due_at: float) -> None:
        """Let the groups choose a message that their scan skips: it has a delay or a priority."""
        if not partition.holds(seq):
            return
        if partition.rescheduled:
            due_at = float(partition.rescheduled.get(seq, int(due_at * 1000.0))) / 1000.0
        if due_at > self._state.now:
            self._timers.schedule_delayed(partition, seq, due_at)
        else:
            partition.choose_if_out_of_order(seq)
