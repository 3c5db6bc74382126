"""Dead letters: which queue they go to, and their headers. The way back is in `redrive`.

A dead letter is an ordinary message of an ordinary queue, with headers that describe its history.
It enters the dead-letter queue in the same frame in which it leaves its own queue, so after a crash
it is in exactly one of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from mypy_extensions import i64

from sluice.errors import QueueError
from sluice.message import Message, decode_headers, encode_header
from sluice.queues.flow.appender import Appender
from sluice.queues.flow.key_compaction import KeyCompaction
from sluice.queues.flow.lifecycle import Lifecycle
from sluice.queues.log import NoteWriter, notes
from sluice.queues.model import Alert, EngineState, Group, Lease, Partition, Queue, history
from sluice.queues.names import format_message_id

# Why a consumer rejects a message. UNACCEPTABLE goes to the invalid-message queue if the queue has
# one; `dead-reason` is `rejected` there too.
UNACCEPTABLE: Final = "unacceptable"
DELIVERY_ERROR: Final = "delivery-error"
REJECTED: Final = "rejected"
# The spelling of the header `rejectionReason`.
_REJECTION_REASONS: Final = {UNACCEPTABLE: "Unacceptable", DELIVERY_ERROR: "DeliveryError"}

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


class DeadLetters:
    """Writes dead letters. `read_content_type` returns the content type among the properties."""

    def __init__(
        self,
        state: EngineState,
        lifecycle: Lifecycle,
        key_compaction: KeyCompaction,
        appender: Appender,
        read_content_type: Callable[[bytes], str],
    ) -> None:
        self._state: EngineState = state
        self._lifecycle: Lifecycle = lifecycle
        self._key_compaction: KeyCompaction = key_compaction
        self._appender: Appender = appender
        self._read_content_type = read_content_type

    def write_failed(
        self, lease: Lease, message: Message, reason: str, description: str
    ) -> tuple[Partition, int] | None:
        """Write the dead letter of a delivery; the caller settles the message in the same frame.

        Return where it is; None: there is no queue for it.
        """
        cursor = lease.cursor
        queue = cursor.group.queue
        headers = self._build_headers(
            queue, cursor.partition, lease.seq, message, reason, description
        )
        _add_attempt_headers(headers, lease)
        detail = (
            f"{headers['dead-reason']}: {description}" if description else headers["dead-reason"]
        )
        self._add_history_header(headers, message, lease, cursor.group.name, history.DEAD, detail)
        return self._enqueue_dead_letter(queue, message, cursor.group.name, reason, headers, lease)

    def write_expired(
        self,
        partition: Partition,
        seq: i64,
        message: Message,
        group: Group | None,
        lease: Lease | None,
    ) -> None:
        """Write the dead letter of an expired message, for one group or for all groups."""
        queue = partition.queue
        headers = self._build_headers(queue, partition, seq, message, "expired", "")
        group_name = ""
        if group is not None:
            group_name = group.name
            headers["original-group"] = group_name
        if lease is not None:
            _add_attempt_headers(headers, lease)
        self._add_history_header(
            headers, message, lease, group_name, history.EXPIRED, "no consumer took it in time"
        )
        self._enqueue_dead_letter(queue, message, group_name, "expired", headers)

    def write_refused(
        self, queue: Queue, message: Message, reason: str, description: str = ""
    ) -> bool:
        """Write the dead letter of a message that `queue` cannot store.

        Return False if no other queue can store it either: its publisher must be refused.
        """
        if not _dlq_name(queue, reason):
            return False
        try:
            dlq = self._get_or_create_dlq(queue, reason)
        except QueueError as error:
            self._state.warn(f"message refused: {_explain_missing_dlq(queue, reason, error)}")
            return False
        message.enqueued_at_ms = int(self._state.now * 1000.0)
        headers = self._build_headers(queue, None, 0, message, reason, description)
        self._count_dead(queue, headers["dead-reason"], None)
        self._store_dead_letter(queue, dlq, message, "", reason, headers)
        return True

    def _add_history_header(
        self,
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
                    float(message.enqueued_at_ms) / 1000.0, history.ENQUEUED, "", "", 0, ""
                )
            )
        attempt: i64 = 0
        if lease is not None:
            attempt = lease.attempt
            if lease.history is not None:
                events.extend(lease.history)
        events.append(
            history.HistoryEvent(
                self._state.now, event_kind, group, "", attempt, detail[: history.MAX_DETAIL_LENGTH]
            )
        )
        headers[history.HEADER] = history.encode_events(events)

    def _build_headers(
        self,
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
        now = format_iso_time(self._state.now)
        headers = {
            "original-queue": queue.name,
            "original-topic": topic,
            "original-message-id": message_id.decode("utf-8", "replace"),
            "original-enqueued-at": format_iso_time(float(message.enqueued_at_ms) / 1000.0),
            "dead-reason": REJECTED if reason == UNACCEPTABLE else reason,
            "dead-description": description,
            "dead-at": now,
            "originalTopic": topic,
            "originalMessageType": self._read_content_type(message.props) or "bytes",
            "rejectionReason": _REJECTION_REASONS[
                UNACCEPTABLE if reason == UNACCEPTABLE else DELIVERY_ERROR
            ],
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
        self,
        queue: Queue,
        message: Message,
        group: str,
        reason: str,
        headers: dict[str, str],
        lease: Lease | None = None,
    ) -> tuple[Partition, int] | None:
        """Count a message as dead, and store its dead letter if there is a queue for it."""
        dead_reason = headers["dead-reason"]
        self._count_dead(queue, dead_reason, lease)
        cause = f"queue {queue.name} has no dead-letter queue"
        if _dlq_name(queue, reason):
            try:
                dlq = self._get_or_create_dlq(queue, reason)
            except QueueError as error:
                cause = _explain_missing_dlq(queue, reason, error)
            else:
                return self._store_dead_letter(queue, dlq, message, group, reason, headers)
        self._state.warn(
            f"message dropped: {cause} "
            f"(message {headers['original-message-id']}, reason {dead_reason})"
        )
        return None

    def _count_dead(self, queue: Queue, dead_reason: str, lease: Lease | None) -> None:
        queue.count_dead(dead_reason)
        note = NoteWriter(notes.DEAD_LETTERED)
        note.write_int(queue.qid)
        note.write_text(dead_reason)
        if lease is not None and lease.ended_by_dead_letter:
            note.write_int(lease.cursor.group.gid)
            note.write_int(1 if lease.dead_after_nack else 0)
            note.write_int(1 if lease.attempt > 1 else 0)
        self._state.frame_builder.add_note(note, self._state.now_ms(), False)

    def _store_dead_letter(
        self,
        queue: Queue,
        dlq: Queue,
        message: Message,
        group: str,
        reason: str,
        headers: dict[str, str],
    ) -> tuple[Partition, int] | None:
        dead_letter = Message(message.payload, message.props, message.key)
        dead_letter.topic = message.topic
        dead_letter.headers = strip_dead_letter_headers(message.headers) + b"".join(
            encode_header(name, value) for name, value in headers.items() if value
        )
        location: tuple[Partition, int] | None
        if dlq.rules.is_compacted:
            self._key_compaction.store(dlq, dead_letter, may_delete=False)
            location = self._key_compaction.find_last_message(dlq, dead_letter.key)
        else:
            key_hash = dlq.key_hash(dead_letter.key)
            partition = dlq.choose_partition(dead_letter.key, key_hash)
            seq = self._appender.append_to_partition(partition, dead_letter, key_hash, 0, 0)
            location = partition, int(seq)
        webhook = queue.rules.alert_webhook
        if reason != "overflow" or webhook:
            name = headers["original-message-id"]
            self._state.effects.alerts.append(
                Alert(webhook, queue.name, dlq.name, name, group, headers["dead-reason"], headers)
            )
        return location

    def _get_or_create_dlq(self, queue: Queue, reason: str) -> Queue:
        """Return the queue for dead letters of this reason; create it if needed."""
        name = _dlq_name(queue, reason)
        dlq = self._state.queues.get(name)
        if dlq is None:
            # The limit of partitions would lose the message.
            dlq = self._lifecycle.get_or_create_queue(name, is_limited=False)
            self._state.effects.created_queues.append(dlq)
        return dlq


def _dlq_name(queue: Queue, reason: str) -> str:
    """Return the queue for dead letters of this reason; empty: there is none."""
    rules = queue.rules
    if reason == UNACCEPTABLE and rules.invalid_queue_name:
        return rules.invalid_queue_name
    return rules.dlq_name if rules.dlq_enabled else ""


def _explain_missing_dlq(queue: Queue, reason: str, error: QueueError) -> str:
    kind = "dead-letter queue"
    if reason == UNACCEPTABLE and queue.rules.invalid_queue_name:
        kind = "invalid-message queue"
    return f"{kind} {_dlq_name(queue, reason)} of queue {queue.name} cannot be created: {error}"


def _add_attempt_headers(headers: dict[str, str], lease: Lease) -> None:
    headers["original-group"] = lease.cursor.group.name
    headers["attempts"] = str(lease.attempt)
    headers["first-attempt-at"] = format_iso_time(lease.first_delivered_at)
    headers["last-attempt-at"] = format_iso_time(lease.last_delivered_at)


REASONS: Final = ("max_retries", "timeout", REJECTED, "expired", "overflow")


def is_reason(text: str) -> bool:
    """Return whether dead letters can have this reason, in any spelling."""
    return text in REASONS or any(text in pair for pair in _REJECTION_REASONS.items())


def same_reason(wanted: str, headers: dict[str, str]) -> bool:
    """Return whether a dead letter has this reason, in any spelling that Sluice has used."""
    rejection = headers.get("rejectionReason", "")
    spellings = [headers.get("dead-reason", ""), rejection]
    for name, spelling in _REJECTION_REASONS.items():
        if rejection == spelling or rejection == name:
            spellings.append(name)
            spellings.append(spelling)
    return wanted in spellings


def strip_dead_letter_headers(headers: bytes) -> bytes:
    """Return the headers without those of an earlier dead letter."""
    if not headers:
        return headers
    return b"".join(
        encode_header(name, value)
        for name, value in decode_headers(headers)
        if name not in _DEAD_LETTER_HEADERS
    )


def format_iso_time(seconds: float) -> str:
    """Format as UTC, ISO 8601, with milliseconds."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
