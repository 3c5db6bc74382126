"""Commands on messages that are not delivered: find a message by its id, and cancel it.

A command concerns all groups of the queue. It is refused, and changes nothing, while a consumer of
any group holds the message: its work may be done already. The note of a command is synced, as the
acknowledgement of the command promises its effect.
"""

from __future__ import annotations

from mypy_extensions import i64

from sluice.errors import AlreadyDelivered, InvalidQueueConfig, UnknownMessage
from sluice.queues.flow.delivery import RecentHistory
from sluice.queues.flow.removal import Removal
from sluice.queues.log import CANCELLED
from sluice.queues.model import (
    LEASED,
    SEQUENCE_BITS,
    SEQUENCE_MASK,
    EngineState,
    Partition,
    Queue,
    history,
)
from sluice.queues.names import format_message_id, parse_message_id


class MessageCommands:
    def __init__(self, state: EngineState, removal: Removal, recent_history: RecentHistory) -> None:
        self._state: EngineState = state
        self._removal: Removal = removal
        self._recent_history: RecentHistory = recent_history

    # ---- finding

    def find(self, queue: Queue, message_id: bytes) -> tuple[Partition, int] | None:
        """Return where the message is, without reading any; None: not known, but perhaps stored.

        A generated id has the location. An id of the publisher is known while the message has a
        delay or a failed delivery.
        """
        pid, seq = parse_message_id(message_id)
        partition = self._state.partitions.get(int(pid))
        if partition is not None and partition.queue is queue and partition.holds(seq):
            return partition, int(seq)
        for group in queue.groups.values():
            lease = group.leases_by_message_id.get(message_id)
            if lease is not None:
                return lease.cursor.partition, int(lease.seq)
        location = queue.delayed_ids.get(message_id, -1)
        partition = self._state.partitions.get(location >> SEQUENCE_BITS)
        if location < 0 or partition is None or not partition.holds(location & SEQUENCE_MASK):
            return None
        return partition, location & SEQUENCE_MASK

    # ---- cancelling

    def cancel(self, partition: Partition, seq: i64, message_id: bytes, by: str) -> None:
        """Remove a message that waits, is delayed or waits for a retry, for all groups.

        It is never delivered afterward.
        """
        self._check_unheld(partition, seq, message_id)
        shown_id = message_id.decode("utf-8", "replace")
        event = history.HistoryEvent(self._state.now, history.CANCELLED, "", by, 0, "")
        self._recent_history.record(partition.queue.name, shown_id, [event])
        self._state.frame_builder.request_sync()
        self._removal.remove_for_all_groups(partition, seq, CANCELLED)

    def _check_unheld(self, partition: Partition, seq: i64, message_id: bytes) -> None:
        """Refuse a message that a consumer holds, or that no group has to settle."""
        queue = partition.queue
        shown_id = (message_id or format_message_id(partition.pid, seq)).decode("utf-8", "replace")
        if queue.rules.is_compacted:
            raise InvalidQueueConfig(
                f"queue {queue.name!r} is compacted: a message is the value of its key",
                "Publish an empty payload to delete the key, or another value to replace it",
            )
        if not partition.holds(seq) or not partition.is_in_depth(seq):
            raise UnknownMessage(queue.name, shown_id)
        for cursor in partition.cursors:
            lease = cursor.leases.get(int(seq))
            if lease is not None and lease.state == LEASED:
                raise AlreadyDelivered(shown_id, cursor.group.name, lease.holder_client_id())
