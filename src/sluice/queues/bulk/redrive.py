"""Redrive: put dead letters back into their queue, as they are or repaired."""

from __future__ import annotations

from mypy_extensions import i64

from sluice.message import DELAYED, Message, decode_headers, encode_header
from sluice.queues.flow import (
    Appender,
    KeyCompaction,
    KeyHolds,
    Removal,
    strip_dead_letter_headers,
)
from sluice.queues.log import ACKED
from sluice.queues.model import EngineState, Partition, Queue, history


class Redrive:
    def __init__(
        self,
        state: EngineState,
        removal: Removal,
        appender: Appender,
        key_compaction: KeyCompaction,
        key_holds: KeyHolds,
    ) -> None:
        self._state: EngineState = state
        self._removal: Removal = removal
        self._appender: Appender = appender
        self._key_compaction: KeyCompaction = key_compaction
        self._key_holds: KeyHolds = key_holds

    def redrive(
        self, partition: Partition, seq: i64, dead_letter: Message, to_all_groups: bool
    ) -> bool:
        """Move a dead letter back to the group that failed it, or to all groups.

        One frame contains the removal here and the new message there. Return False if the original
        queue is deleted or a consumer holds a lease of the dead letter.
        """
        headers = dict(decode_headers(dead_letter.headers))
        queue = self._state.queues.get(headers.get("original-queue", ""))
        if queue is None or not partition.holds(seq) or not partition.is_unleased(seq):
            return False
        message = Message(dead_letter.payload, dead_letter.props, dead_letter.key)
        self._redrive_message(partition, seq, dead_letter, headers, queue, message, to_all_groups)
        return True

    def redrive_repaired(
        self,
        partition: Partition,
        seq: i64,
        dead_letter: Message,
        queue: Queue,
        message: Message,
        to_all_groups: bool,
    ) -> bool:
        """Replace a dead letter by a repaired message, in one frame.

        In another queue than the original one it goes to all groups, and with another key to the
        partition of that key. Return False if the dead letter is deleted or a consumer holds a
        lease of it.
        """
        if not partition.holds(seq) or not partition.is_unleased(seq):
            return False
        headers = dict(decode_headers(dead_letter.headers))
        self._redrive_message(partition, seq, dead_letter, headers, queue, message, to_all_groups)
        return True

    def _redrive_message(
        self,
        partition: Partition,
        seq: i64,
        dead_letter: Message,
        headers: dict[str, str],
        queue: Queue,
        message: Message,
        to_all_groups: bool,
    ) -> None:
        """Enqueue `message`, which has payload, key and properties; add the rest.

        The headers, the topic and the history come from `dead_letter`.
        """
        message.id = headers.get("original-message-id", "").encode() or message.id
        message.topic = dead_letter.topic
        message.headers = strip_dead_letter_headers(dead_letter.headers)
        # A message from a binding: consumers see the same topic as before.
        if dead_letter.topic:
            message.headers += encode_header("original-topic", dead_letter.topic.decode())
        if message.priority == 0:
            message.priority = _header_int(headers, "original-priority", 0)
        is_original_queue = queue.name == headers.get("original-queue", "")
        failed_group = (
            queue.groups.get(headers.get("original-group", "")) if is_original_queue else None
        )
        group = None if to_all_groups else failed_group
        target_gid: i64 = 0 if group is None else group.gid
        group_name = "" if group is None else group.name
        events = _history_of_dead_letter(dead_letter, headers)
        events.append(
            history.HistoryEvent(
                self._state.now, history.REDRIVEN, group_name, "", 0, f"from {partition.queue.name}"
            )
        )
        message.headers += encode_header(history.HEADER, history.encode_events(events))
        partition_number: i64 = (
            _header_int(headers, "original-partition", -1)
            if is_original_queue and message.key == dead_letter.key
            else -1
        )
        if queue.rules.is_compacted:
            # It becomes the last value of its key again, for all groups.
            self._key_compaction.store(queue, message)
        elif partition_number >= 0 and partition_number < len(queue.partitions):
            target_partition = queue.partitions[partition_number]
            key_hash = queue.key_hash(message.key)
            held = None
            if failed_group is not None and failed_group.held_keys:
                held = self._key_holds.find(failed_group, partition, seq, key_hash)
            # Its place is before the messages that wait for it, so it is not scanned after them.
            flags: i64 = 0 if held is None else DELAYED
            new_seq = self._appender.append_to_partition(
                target_partition, message, key_hash, flags, target_gid
            )
            if held is not None:
                self._key_holds.put_back(held, target_partition, new_seq)
        else:
            self._appender.append(queue, message, target_gid)
        self._removal.remove_for_all_groups(partition, seq, ACKED)


def _history_of_dead_letter(
    dead_letter: Message, headers: dict[str, str]
) -> list[history.HistoryEvent]:
    """Return the history of a dead letter, from its history header or from others."""
    events = history.events_from_headers(dead_letter)
    if not events:
        died_at = float(dead_letter.enqueued_at_ms) / 1000.0
        group = headers.get("original-group", "")
        events.append(
            history.HistoryEvent(
                died_at, history.DEAD, group, "", 0, headers.get("dead-reason", "")
            )
        )
    return events


def _header_int(headers: dict[str, str], name: str, default: int) -> i64:
    """Parse a header; clients may have written any text."""
    try:
        return int(headers.get(name, default))
    except ValueError:
        return default
