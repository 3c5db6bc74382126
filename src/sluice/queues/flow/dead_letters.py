"""Dead letters: which queue they go to, their headers, and the way back (redrive).

A dead letter is an ordinary message of an ordinary queue, with headers that describe its history.
It enters the dead-letter queue in the same frame in which it leaves its own queue, so after a crash
it is in exactly one of the two.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.errors import QueueError
from sluice.message import Message, decode_headers, encode_header
from sluice.queues.flow import history
from sluice.queues.log import notes
from sluice.queues.log.notes import ACKED, NoteWriter
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.model.partition import Partition
from sluice.queues.names import format_message_id

if TYPE_CHECKING:
    from sluice.queues.engine import Engine
    from sluice.queues.model.delivery_lease import Lease
    from sluice.queues.model.group import Group
    from sluice.queues.model.queue import Queue

# Why a consumer rejects a message. UNACCEPTABLE is reported as `rejected` in either queue.
UNACCEPTABLE: Final = "unacceptable"
DELIVERY_ERROR: Final = "delivery-error"
REJECTED: Final = "rejected"

_DEAD_LETTER_HEADERS: Final = frozenset(
    (
        "original-queue",
        "original-topic",
        "original-partition",
        "original-sequence",
        "original-message-id",
        "original-group",
        "original-enqueued-at",
        "original-priority",
        "dead-reason",
        "dead-description",
        "dead-at",
        "attempts",
        "first-attempt-at",
        "last-attempt-at",
        "originalTopic",
        "originalMessageType",
        "rejectionReason",
        "rejectionTimestamp",
        "rejectionMessage",
        history.HEADER,
    )
)


class Alert:
    """A dead letter of a queue that has an alert configured."""

    def __init__(
        self,
        url: str,
        queue: str,
        dlq: str,
        message_id: str,
        group: str,
        reason: str,
        headers: dict[str, str],
    ) -> None:
        self.url = url
        self.queue = queue
        self.dlq = dlq
        self.message_id = message_id
        self.group = group
        self.reason = reason
        self.headers = headers


def write_dead_letter(
    engine: Engine, lease: Lease, message: Message, reason: str, description: str
) -> None:
    """Write the dead letter of a delivery; the caller settles the message in the same frame."""
    cursor = lease.cursor
    queue = cursor.group.queue
    headers = _build_headers(
        engine, queue, cursor.partition, lease.seq, message, reason, description
    )
    _add_attempt_headers(headers, lease)
    detail = f"{headers['dead-reason']}: {description}" if description else headers["dead-reason"]
    _add_history_header(engine, headers, message, lease, cursor.group.name, history.DEAD, detail)
    _enqueue_dead_letter(engine, queue, message, cursor.group.name, reason, headers)


def write_expired_dead_letter(
    engine: Engine,
    partition: Partition,
    seq: i64,
    message: Message,
    group: Group | None,
    lease: Lease | None,
) -> None:
    """Write the dead letter of an expired message, for one group or for all groups."""
    queue = partition.queue
    headers = _build_headers(engine, queue, partition, seq, message, "expired", "")
    group_name = ""
    if group is not None:
        group_name = group.name
        headers["original-group"] = group_name
    if lease is not None:
        _add_attempt_headers(headers, lease)
    _add_history_header(
        engine, headers, message, lease, group_name, history.EXPIRED, "no consumer took it in time"
    )
    _enqueue_dead_letter(engine, queue, message, group_name, "expired", headers)


def write_rejected_dead_letter(
    engine: Engine, queue: Queue, message: Message, reason: str, description: str = ""
) -> bool:
    """Write the dead letter of a refused message; return False if no queue can store it."""
    if not queue.rules.dlq_enabled and not (
        reason == UNACCEPTABLE and queue.rules.invalid_queue_name
    ):
        return False
    message.enqueued_at = int(engine.now * 1000.0)
    _enqueue_dead_letter(
        engine,
        queue,
        message,
        "",
        reason,
        _build_headers(engine, queue, None, 0, message, reason, description),
    )
    return True


def _add_attempt_headers(headers: dict[str, str], lease: Lease) -> None:
    headers["original-group"] = lease.cursor.group.name
    headers["attempts"] = str(lease.attempt)
    headers["first-attempt-at"] = format_iso_time(lease.first_delivered_at)
    headers["last-attempt-at"] = format_iso_time(lease.last_delivered_at)


def _add_history_header(
    engine: Engine,
    headers: dict[str, str],
    message: Message,
    lease: Lease | None,
    group: str,
    event_kind: str,
    detail: str,
) -> None:
    """Add the complete history of the message, across redrives."""
    events = history.events_from_headers(message)
    if not events:
        events.append(
            history.HistoryEvent(
                float(message.enqueued_at) / 1000.0, history.ENQUEUED, "", "", 0, ""
            )
        )
    attempt: i64 = 0
    if lease is not None:
        attempt = lease.attempt
        if lease.history is not None:
            events.extend(lease.history)
    events.append(
        history.HistoryEvent(
            engine.now, event_kind, group, "", attempt, detail[: history.MAX_DETAIL_LENGTH]
        )
    )
    headers[history.HEADER] = history.encode_events(events)


def _build_headers(
    engine: Engine,
    queue: Queue,
    partition: Partition | None,
    seq: i64,
    message: Message,
    reason: str,
    description: str,
) -> dict[str, str]:
    message_id = message.id
    if not message_id and partition is not None:
        message_id = format_message_id(partition.pid, seq)
    topic = message.topic.decode() if message.topic else f"$queue/{queue.name}"
    now = format_iso_time(engine.now)
    headers = {
        "original-queue": queue.name,
        "original-topic": topic,
        "original-message-id": message_id.decode("utf-8", "replace"),
        "original-enqueued-at": format_iso_time(float(message.enqueued_at) / 1000.0),
        "dead-reason": REJECTED if reason == UNACCEPTABLE else reason,
        "dead-description": description,
        "dead-at": now,
        "originalTopic": topic,
        "originalMessageType": "bytes",
        "rejectionReason": reason if reason == UNACCEPTABLE else DELIVERY_ERROR,
        "rejectionTimestamp": now,
        "rejectionMessage": description,
    }
    if partition is not None:
        headers["original-partition"] = str(partition.number)
        headers["original-sequence"] = str(seq)
    if message.priority:
        headers["original-priority"] = str(message.priority)
    return headers


def _enqueue_dead_letter(
    engine: Engine, queue: Queue, message: Message, group: str, reason: str, headers: dict[str, str]
) -> None:
    rules = queue.rules
    dead_reason = headers["dead-reason"]
    count_dead(queue, dead_reason)
    note = NoteWriter(notes.DEAD_LETTERED)
    note.write_int(queue.qid)
    note.write_text(dead_reason)
    engine.add_note(note, False)
    dlq_name = ""
    if reason == UNACCEPTABLE and rules.invalid_queue_name:
        dlq_name = rules.invalid_queue_name
    elif rules.dlq_enabled:
        dlq_name = rules.dlq_name
    dlq = _get_or_create_dlq(engine, dlq_name) if dlq_name else None
    if dlq is None:
        engine.warnings.append(
            f"message dropped: queue {queue.name} has no dead-letter queue "
            f"(message {headers['original-message-id']}, reason {dead_reason})"
        )
        return
    dead_letter = Message(message.payload, message.props, message.key)
    dead_letter.topic = message.topic
    dead_letter.headers = strip_dead_letter_headers(message.headers) + b"".join(
        encode_header(name, value) for name, value in headers.items() if value
    )
    engine.enqueue_unchecked(dlq, dead_letter)
    if reason != "overflow" or rules.alert_webhook:
        name = headers["original-message-id"]
        engine.alerts.append(
            Alert(rules.alert_webhook, queue.name, dlq_name, name, group, dead_reason, headers)
        )


def count_dead(queue: Queue, reason: str) -> None:
    queue.dead_by_reason[reason] = queue.dead_by_reason.get(reason, 0) + 1


def _get_or_create_dlq(engine: Engine, name: str) -> Queue | None:
    """Return the dead-letter queue; create it if needed; None if it cannot be created."""
    queue = engine.queues.get(name)
    if queue is None:
        try:
            # A refusal would lose the message.
            queue = engine.get_or_create_queue(name, is_limited=False)
        except QueueError as error:
            engine.warnings.append(f"dead letter cannot be stored: {error}")
            return None
        engine.auto_created_queues.append(queue)
    return queue


def strip_dead_letter_headers(headers: bytes) -> bytes:
    """Return the headers without those of an earlier dead letter."""
    if not headers:
        return headers
    return b"".join(
        encode_header(name, value)
        for name, value in decode_headers(headers)
        if name not in _DEAD_LETTER_HEADERS
    )


def redrive(
    engine: Engine, partition: Partition, seq: i64, dead_letter: Message, to_all_groups: bool
) -> bool:
    """Move a dead letter back: to the group that failed it, in its old partition, or to all groups.

    One frame contains the removal here and the new message there. Return False if the original
    queue is deleted or a consumer holds a lease of the dead letter.
    """
    headers = dict(decode_headers(dead_letter.headers))
    queue = engine.queues.get(headers.get("original-queue", ""))
    if queue is None or not partition.holds(seq) or not is_unleased(partition, seq):
        return False
    message = Message(dead_letter.payload, dead_letter.props, dead_letter.key)
    _redrive_message(engine, partition, seq, dead_letter, headers, queue, message, to_all_groups)
    return True


def redrive_repaired(
    engine: Engine,
    partition: Partition,
    seq: i64,
    dead_letter: Message,
    queue: Queue,
    message: Message,
    to_all_groups: bool,
) -> bool:
    """Replace a dead letter by a repaired message, in one frame.

    In another queue than the original one it goes to all groups, and with another key to the
    partition of that key. Return False if the dead letter is deleted or a consumer holds a lease of
    it.
    """
    if not partition.holds(seq) or not is_unleased(partition, seq):
        return False
    headers = dict(decode_headers(dead_letter.headers))
    _redrive_message(engine, partition, seq, dead_letter, headers, queue, message, to_all_groups)
    return True


def _redrive_message(
    engine: Engine,
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
    group = (
        queue.groups.get(headers.get("original-group", ""))
        if is_original_queue and not to_all_groups
        else None
    )
    target_gid: i64 = 0 if group is None else group.gid
    group_name = "" if group is None else group.name
    events = _history_of_dead_letter(dead_letter, headers)
    events.append(
        history.HistoryEvent(
            engine.now, history.REDRIVEN, group_name, "", 0, f"from {partition.queue.name}"
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
        engine.enqueue_unchecked(queue, message)
    elif partition_number >= 0 and partition_number < len(queue.partitions):
        target_partition = queue.partitions[partition_number]
        engine.append_to_partition(
            target_partition, message, engine.partition_key_hash(queue, message.key), target_gid
        )
    else:
        engine.append(queue, message, target_gid)
    engine.remove_for_all_groups(partition, seq, ACKED)


def _history_of_dead_letter(
    dead_letter: Message, headers: dict[str, str]
) -> list[history.HistoryEvent]:
    """Return the history of a dead letter, from its history header or from others."""
    events = history.events_from_headers(dead_letter)
    if not events:
        died_at = float(dead_letter.enqueued_at) / 1000.0
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


def is_unleased(partition: Partition, seq: i64) -> bool:
    """Return whether no consumer holds a lease of the message."""
    for cursor in partition.cursors:
        lease = cursor.leases.get(int(seq))
        if lease is not None and lease.state == LEASED:
            return False
    return True


def format_iso_time(seconds: float) -> str:
    """Format as UTC, ISO 8601, with milliseconds."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
