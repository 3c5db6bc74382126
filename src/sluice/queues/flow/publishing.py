"""Publishing: accept messages for their queue, or refuse them.

It checks size, duplicates and limits, makes space by the overflow policy of a full queue, and
notifies publishers of the commit.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.errors import MessageTooLarge, PartitionFull, QueueFull, make_store_refusal
from sluice.message import Message
from sluice.queues.flow.appender import Appender
from sluice.queues.flow.dead_letters import DeadLetters
from sluice.queues.flow.key_compaction import KeyCompaction, check_message
from sluice.queues.flow.removal import Removal
from sluice.queues.log import PURGED, Frame
from sluice.queues.model import DEAD_LETTER, DROP_OLDEST, EngineState, Partition, Queue
from sluice.queues.ports import Publisher


class Publishing:
    def __init__(
        self,
        state: EngineState,
        appender: Appender,
        key_compaction: KeyCompaction,
        removal: Removal,
        dead_letters: DeadLetters,
    ) -> None:
        self._state: EngineState = state
        self._appender: Appender = appender
        self._key_compaction: KeyCompaction = key_compaction
        self._removal: Removal = removal
        self._dead_letters: DeadLetters = dead_letters
        # Limit of one partition's length, from its oldest message on; 0: no limit.
        self.max_partition_length: i64 = 0
        # Why the store accepts nothing; publishers are refused meanwhile.
        self.unavailable_reason: str = ""
        self.is_out_of_space: bool = False  # the reason is a lack of space, on disk or in memory
        # The lack is in memory; then `is_out_of_space` is set too.
        self.is_out_of_memory: bool = False
        self.refused_out_of_memory: int = 0

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
        """Add a message to the open frame; the publisher is notified of its commit, with `tag`."""
        state = self._state
        rules = queue.rules
        size: i64 = len(message.payload)
        if self.unavailable_reason:
            queue.refused += 1
            self.check_store_available()
        if size > rules.max_message_size:
            queue.refused += 1
            raise MessageTooLarge(queue.name, int(size), int(rules.max_message_size))
        dedup_key = message.dedup_key() if message.id else b""
        if dedup_key and queue.is_duplicate(dedup_key, state.now):
            queue.duplicates += 1
        else:
            if rules.is_compacted:
                self._publish_compacted(queue, message)
            elif queue.depth < rules.max_depth or self._apply_overflow_policy(queue, message):
                if self.max_partition_length:
                    self.append_within_limit(queue, message)
                else:
                    self._appender.append(queue, message, 0)
            if dedup_key:
                queue.remember_id(dedup_key, state.now)
        if publisher is not None:
            state.frame_builder.add_commit_waiter(publisher, tag)

    def _publish_compacted(self, queue: Queue, message: Message) -> None:
        """Store the value of a key. A tombstone adds no key and needs no space."""
        check_message(queue, message)
        if (
            not message.payload
            or queue.depth < queue.rules.max_depth
            or self._apply_overflow_policy(queue, message)
        ):
            self._key_compaction.store(queue, message)

    def on_frame_committed(self, frame: Frame) -> None:
        """Notify the publishers of the messages of a frame."""
        starts = frame.tag_starts
        last: i64 = len(frame.publishers) - 1
        nth: i64 = 0
        while nth <= last:
            end: i64 = starts[nth + 1] if nth < last else i64(len(frame.tags))
            frame.publishers[nth].on_committed_many(frame.tags, starts[nth], end)
            nth += 1

    # ---- overflow

    def _apply_overflow_policy(self, queue: Queue, message: Message) -> bool:
        """Make space in a full queue by its policy.

        Return whether the message can be stored; False: it was dead-lettered.
        """
        if queue.rules.is_compacted and not self._key_compaction.adds_key(queue, message):
            return True
        policy = queue.rules.overflow
        if policy == DROP_OLDEST:
            if self.drop_oldest(queue):
                return True
        elif policy == DEAD_LETTER and self._dead_letters.write_refused(queue, message, "overflow"):
            return False
        queue.refused += 1
        raise QueueFull(queue.name, int(queue.depth), queue.rules.is_compacted)

    def append_within_limit(
        self, queue: Queue, message: Message, is_batch_started: bool = False
    ) -> bool:
        """Append a message while partitions are limited to `max_partition_length`.

        Return False if the message was dead-lettered. `is_batch_started`: the message belongs to a
        batch that can no longer be refused; if no space can be made, the partition exceeds its
        limit.
        """
        key_hash = queue.key_hash(message.key)
        partition = queue.choose_partition(message.key, key_hash)
        if not self._shorten_partition(partition):
            if queue.rules.overflow == DEAD_LETTER and self._dead_letters.write_refused(
                queue, message, "overflow"
            ):
                return False
            if not is_batch_started:
                queue.refused += 1
                raise PartitionFull(
                    queue.name, int(partition.number), int(self.max_partition_length)
                )
        self._appender.append_to_partition(partition, message, key_hash, 0, 0)
        return True

    def _shorten_partition(self, partition: Partition) -> bool:
        """Shorten a partition below its limit; return whether that succeeded.

        The length includes settled messages between live ones. Messages that are stored for the
        retention alone are deleted first; for messages that a group has still to settle, the
        overflow policy of the queue decides.
        """
        seq = partition.first_live(0)
        while partition.next_seq - seq >= self.max_partition_length:
            if not partition.is_in_depth(seq):
                self._removal.remove_without_groups(partition, seq)
            elif partition.queue.rules.overflow == DROP_OLDEST and partition.is_unleased(seq):
                self._removal.remove_for_all_groups(partition, seq, PURGED)
            else:
                return False
            seq = partition.first_live(seq + 1)
        return True

    def drop_oldest(self, queue: Queue) -> bool:
        """Remove the oldest message that is not leased; return False if there is none."""
        oldest: Partition | None = None
        found: i64 = 0
        found_time: i64 = 0
        for partition in queue.partitions:
            seq = _oldest_unleased(partition)
            if seq < 0:
                continue
            time = partition.arrival_ms(seq)
            if oldest is None or time < found_time:
                oldest = partition
                found = seq
                found_time = time
        return oldest is not None and self._removal.remove_for_all_groups(oldest, found, PURGED)


def free_length(partition: Partition, max_length: i64, wanted: i64) -> i64:
    """Return for how many messages a partition has space or can make some, up to about `wanted`."""
    if partition.queue.rules.overflow == DROP_OLDEST:
        return max_length
    seq = partition.first_live(0)
    while max_length - (partition.next_seq - seq) < wanted and seq < partition.next_seq:
        if partition.is_in_depth(seq):
            break
        seq = partition.first_live(seq + 1)
    return max(0, max_length - (partition.next_seq - seq))


def _oldest_unleased(partition: Partition) -> i64:
    """Return the first message that counts in the depth and is not leased; -1 if there is none."""
    seq = partition.first_live(0)
    while seq < partition.next_seq:
        if partition.is_in_depth(seq) and partition.is_unleased(seq):
            return seq
        seq = partition.first_live(seq + 1)
    return -1
