"""Shared compacted queues: the last message of each key is stored, for all present and new groups.

Compaction is a property of the queue: partitions, groups, deliveries and retries are those of work
queues. Three things differ. A message replaces the older one of its key in the same frame, even if
a consumer holds a lease: the delivery ends, and its settlement finds nothing. A message that every
group has settled stays. A tombstone (an empty payload) removes its key: existing groups receive it,
and then it is deleted. A tombstone for an unknown key changes nothing.

The record of a message contains all that recovery needs: replaying it replaces what it replaced. So
the depth of a compacted queue is the number of its keys, and replaced messages count as purged in
the ledger of a group.

A key is identified by its hash, which leads to the location of its last message (`LastValues`).
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.errors import InvalidQueueConfig, MissingKey
from sluice.message import TOMBSTONE, Message
from sluice.queues.flow.appender import Appender
from sluice.queues.flow.dispatch_schedule import DispatchSchedule
from sluice.queues.flow.removal import Removal
from sluice.queues.log import PURGED
from sluice.queues.model import (
    LEASED,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    Cursor,
    EngineState,
    LastValues,
    Partition,
    Queue,
    hash_key,
)


def check_message(queue: Queue, message: Message) -> None:
    """Use the topic of a bound message as key; refuse other messages without a key.

    Delays and priorities are refused too.
    """
    if not message.key:
        if not message.topic:
            raise MissingKey(queue.name)
        message.key = message.topic
    if message.deliver_at_ms or message.priority:
        raise InvalidQueueConfig(
            f"queue {queue.name!r} is compacted, and has neither delays nor priorities",
            "Leave delay, deliver-at and priority out, or use a work queue",
        )


class KeyCompaction:
    def __init__(
        self,
        state: EngineState,
        dispatch_schedule: DispatchSchedule,
        removal: Removal,
        appender: Appender,
    ) -> None:
        self._state: EngineState = state
        self._dispatch_schedule: DispatchSchedule = dispatch_schedule
        self._removal: Removal = removal
        self._appender: Appender = appender

    # ---- storing

    def store(self, queue: Queue, message: Message, may_delete: bool = True) -> None:
        """Replace the older message of the key. A dead letter without a key replaces none.

        `may_delete`: an empty payload deletes the key.
        """
        key_hash = queue.key_hash(message.key)
        partition = queue.choose_partition(message.key, key_hash)
        old = self.find_last_message(queue, message.key)
        flags: i64 = 0
        if may_delete and not message.payload and message.key:
            if old is None:
                return  # unknown key
            if not partition.cursors:
                self._removal.remove_for_all_groups(old[0], old[1], PURGED)
                return
            flags = TOMBSTONE
        if old is not None:
            self._replace_older(old[0], old[1])
        message.priority = 0  # of a message that is redriven from another queue
        seq = self._appender.append_to_partition(partition, message, key_hash, flags, 0)
        self._set_last_message(queue, partition, seq, message.key)

    def adds_key(self, queue: Queue, message: Message) -> bool:
        """Return whether a message adds a key to its queue."""
        return bool(message.payload) and self.find_last_message(queue, message.key) is None

    def _replace_older(self, partition: Partition, seq: i64) -> None:
        """Remove a replaced message from all groups; revoke its leases."""
        for cursor in partition.cursors:
            if not cursor.is_settled(seq) and partition.is_for_group(seq, cursor.group.gid):
                lease = cursor.leases.get(int(seq))
                if lease is not None and lease.state == LEASED:
                    self._dispatch_schedule.revoke(lease)
                self._removal.withdraw(cursor, seq, lease)
                _settle_replaced(cursor, seq)
                self._dispatch_schedule.on_settled(cursor)
        self._removal.delete_message(partition, seq)

    # ---- the last message of each key

    def find_last_message(self, queue: Queue, key: bytes) -> tuple[Partition, int] | None:
        """Return partition and sequence of a key's last message, or None.

        After a change of the partition count it may be in any partition.
        """
        location = queue.last_values.get(int(hash_key(key))) if key else -1
        if location < 0:
            return None
        partition = self._state.partitions.get(location >> SEQUENCE_BITS)
        seq = location & SEQUENCE_MASK
        return (partition, seq) if partition is not None and partition.holds(seq) else None

    def _set_last_message(self, queue: Queue, partition: Partition, seq: i64, key: bytes) -> None:
        """Record this message as the last one of its key."""
        if not key:
            return
        last_values = queue.last_values
        key_hash = int(hash_key(key))
        nth = last_values.shard_index(key_hash)
        if len(last_values.shards[nth]) > 2 * queue.depth // len(last_values.shards) + 64:
            self._drop_deleted_keys(last_values, nth)
        last_values.put(key_hash, (int(partition.pid) << SEQUENCE_BITS) | int(seq))

    def _drop_deleted_keys(self, last_values: LastValues, nth: int) -> None:
        """Drop keys whose last message has expired or was purged: removals leave them."""
        live: dict[int, int] = {}
        for key_hash, location in last_values.shards[nth].items():
            partition = self._state.partitions.get(location >> SEQUENCE_BITS)
            if partition is not None and partition.holds(location & SEQUENCE_MASK):
                live[key_hash] = location
        last_values.replace_shard(nth, live)

    # ---- recovery

    def replay_message(self, queue: Queue, partition: Partition, seq: i64, key: bytes) -> None:
        """Replay a message from after the snapshot: it replaces what it replaced then."""
        old = self.find_last_message(queue, key)
        if old is not None:
            old_partition, old_seq = old
            for cursor in old_partition.cursors:
                if not cursor.is_settled(old_seq) and old_partition.is_for_group(
                    old_seq, cursor.group.gid
                ):
                    cursor.leases.pop(old_seq, None)
                    _settle_replaced(cursor, old_seq)
            self._removal.delete_message(old_partition, old_seq)
        self._set_last_message(queue, partition, seq, key)


def _settle_replaced(cursor: Cursor, seq: i64) -> None:
    cursor.count_outcome(seq, PURGED, True)
    cursor.partition.remove_pending_group(seq)
    cursor.mark_settled(seq, False)
