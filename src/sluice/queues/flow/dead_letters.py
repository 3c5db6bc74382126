"""Messages that will not be delivered again: where they go, and what is written on them.

A dead letter is an ordinary message of an ordinary queue, with headers that tell its story. It enters that queue in the
same frame in which it leaves its own, so a crash finds it in exactly one of the two.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.errors import QueueError
from sluice.message import Message, decode_headers, encode_header
from sluice.queues.flow import history
from sluice.queues.log import frame_builder as notes
from sluice.queues.log.frame_builder import ACKED, NoteWriter
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.model.partition import Partition
from sluice.queues.names import format_message_id

if TYPE_CHECKING:
    from sluice.queues.engine import Engine
    from sluice.queues.model.delivery_lease import Lease
    from sluice.queues.model.group import Group
    from sluice.queues.model.queue import Queue

# Why a consumer rejects a message. The first is a `rejected` one whatever channel it goes to.
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
    """A message has died in a queue that wants somebody to hear of it."""

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
    """Write the dead letter of a delivery; its end in its own queue is the engine's, in the same frame."""
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
    """Write the dead letter of a message that nobody took in time: for one group, or for all of them."""
    queue = partition.queue
    headers = _build_headers(engine, queue, partition, seq, message, "expired", "")
    group_name = ""
    if group is not None:
        group_name = group.name
        headers["original-group"] = group_name
    if lease is not None:
        _add_attempt_headers(headers, lease)
    _add_history_header(
        engine, headers, message, lease, group_name, history.EXPIRED, "nobody took it in time"
    )
    _enqueue_dead_letter(engine, queue, message, group_name, "expired", headers)


def write_rejected_dead_letter(
    engine: Engine, queue: Queue, message: Message, reason: str, description: str = ""
) -> bool:
    """Write the dead letter of a message that its queue does not take; False when there is no place for it either."""
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
    """All that is known of it, from its first life on."""
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
            f"message {headers['original-message-id']} of queue {queue.name} is dead ({dead_reason}) and there is no "
            "dead-letter queue to keep it: settled"
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
    """The queue that takes the dead, made if it is not there; None when it cannot be."""
    queue = engine.queues.get(name)
    if queue is None:
        try:
            queue = engine.get_or_create_queue(
                name, is_limited=False
            )  # a refusal would lose the message
        except QueueError as error:
            engine.warnings.append(f"no dead letters can be kept: {error}")
            return None
        engine.auto_created_queues.append(queue)
    return queue


def strip_dead_letter_headers(headers: bytes) -> bytes:
    """The headers of a message without those that an earlier death has written."""
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
    """Put a dead letter back: to the group that failed it, on its old partition, or to all groups. One frame holds its
    end here and its new beginning there. False when the queue it came from is gone, or somebody works on the letter."""
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
    """Put back a message that somebody has repaired, in the place of its letter, and end that in the same frame. In
    another queue than its own it is for every group, and with another key it goes where that belongs. False when the
    letter is gone, or somebody works on it."""
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
    """`message` has payload, key and properties already; the rest is the letter's."""
    message.id = headers.get("original-message-id", "").encode() or message.id
    message.topic = dead_letter.topic
    message.headers = strip_dead_letter_headers(dead_letter.headers)
    if dead_letter.topic:  # of a captured one: consumers see it as they did before
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
        engine.enqueue_unchecked(queue, message)  # it is the last of its key again, for all
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
    """Its history; that of a letter which brings none is what its other headers tell."""
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
    """Headers of letters may have been written by anybody."""
    try:
        return int(headers.get(name, default))
    except ValueError:
        return default


def is_unleased(partition: Partition, seq: i64) -> bool:
    """Whether nobody is working on a message."""
    for cursor in partition.cursors:
        lease = cursor.leases.get(int(seq))
        if lease is not None and lease.state == LEASED:
            return False
    return True


def format_iso_time(seconds: float) -> str:
    """UTC, ISO 8601, to the millisecond."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
