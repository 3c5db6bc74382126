"""Messages that will not be delivered again: where they go, and what is written on them.

A dead letter is an ordinary message of an ordinary queue, with headers that tell its story. It enters that queue in the
same frame in which it leaves its own, so a crash finds it in exactly one of the two.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from sluice.message import Message, decode_headers, encode_header
from sluice.queues.names import message_id
from sluice.queues.partition import Partition

if TYPE_CHECKING:
    from sluice.queues.delivery import Lease
    from sluice.queues.engine import Engine
    from sluice.queues.queue import Queue

UNACCEPTABLE: Final = "unacceptable"

_OWN_NAMES: Final = frozenset(
    (
        "original-queue",
        "original-topic",
        "original-partition",
        "original-sequence",
        "original-message-id",
        "original-group",
        "original-enqueued-at",
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
    )
)


class Alert:
    """A message has died in a queue that wants somebody to hear of it."""

    def __init__(
        self, url: str, queue: str, dlq: str, name: str, group: str, reason: str, story: dict[str, str]
    ) -> None:
        self.url = url
        self.queue = queue
        self.dlq = dlq
        self.message_id = name
        self.group = group
        self.reason = reason
        self.story = story


def bury(engine: Engine, lease: Lease, reason: str, description: str) -> None:
    """Write the dead letter of a delivery; its end in its own queue is the engine's, in the same frame."""
    message = lease.message
    cursor = lease.cursor
    queue = cursor.group.queue
    if message is None:
        return
    story = _story(engine, queue, cursor.partition, lease.seq, message, reason, description)
    story["original-group"] = cursor.group.name
    story["attempts"] = str(lease.failures if lease.failures else 1)
    story["first-attempt-at"] = iso_time(lease.first_at)
    story["last-attempt-at"] = iso_time(lease.last_at)
    _write(engine, queue, message, cursor.group.name, reason, story)


def bury_expired(engine: Engine, partition: Partition, seq: i64, message: Message) -> None:
    """Write the dead letter of a message that nobody took in time."""
    queue = partition.queue
    _write(
        engine, queue, message, "", "expired", _story(engine, queue, partition, seq, message, "expired", "")
    )


def bury_unborn(engine: Engine, queue: Queue, message: Message, reason: str) -> bool:
    """Write the dead letter of a message that its queue has no room for; False when it has no dead letters either."""
    if not queue.rules.dlq_enabled:
        return False
    message.enqueued_at = int(engine.now * 1000.0)
    _write(engine, queue, message, "", reason, _story(engine, queue, None, 0, message, reason, ""))
    return True


def _story(
    engine: Engine,
    queue: Queue,
    partition: Partition | None,
    seq: i64,
    message: Message,
    reason: str,
    description: str,
) -> dict[str, str]:
    name = message.id
    if not name and partition is not None:
        name = message_id(partition.pid, seq)
    topic = message.topic.decode() if message.topic else f"$queue/{queue.name}"
    now = iso_time(engine.now)
    story = {
        "original-queue": queue.name,
        "original-topic": topic,
        "original-message-id": name.decode("utf-8", "replace"),
        "original-enqueued-at": iso_time(float(message.enqueued_at) / 1000.0),
        "dead-reason": reason,
        "dead-description": description,
        "dead-at": now,
        "originalTopic": topic,
        "originalMessageType": "bytes",
        "rejectionReason": reason,
        "rejectionTimestamp": now,
        "rejectionMessage": description,
    }
    if partition is not None:
        story["original-partition"] = str(partition.number)
        story["original-sequence"] = str(seq)
    return story


def _write(
    engine: Engine, queue: Queue, message: Message, group: str, reason: str, story: dict[str, str]
) -> None:
    rules = queue.rules
    queue.dead[reason] = queue.dead.get(reason, 0) + 1
    if reason == UNACCEPTABLE and rules.invalid_name:
        target = rules.invalid_name
    elif rules.dlq_enabled:
        target = rules.dlq_name
    else:
        engine.warnings.append(
            f"message {story['original-message-id']} of queue {queue.name} is dead ({reason}) and there is no "
            "dead-letter queue to keep it: settled"
        )
        return
    letter = Message(message.payload, message.props, message.key)
    letter.topic = message.topic
    letter.headers = strip_story(message.headers) + b"".join(
        encode_header(name, value) for name, value in story.items() if value
    )
    engine.append(engine.ensure(target), letter, 0)
    if reason != "overflow" or rules.alert_webhook:
        name = story["original-message-id"]
        engine.alerts.append(Alert(rules.alert_webhook, queue.name, target, name, group, reason, story))


def strip_story(headers: bytes) -> bytes:
    """The headers of a message without those that an earlier death has written."""
    if not headers:
        return headers
    return b"".join(
        encode_header(name, value) for name, value in decode_headers(headers) if name not in _OWN_NAMES
    )


def redrive(engine: Engine, partition: Partition, seq: i64, letter: Message, to_all: bool) -> bool:
    """Put a dead letter back: to the group that failed it, on its old partition, or to all groups. One frame holds its
    end here and its new beginning there. False when the queue it came from is gone."""
    story = dict(decode_headers(letter.headers))
    queue = engine.queues.get(story.get("original-queue", ""))
    if queue is None:
        return False
    message = Message(letter.payload, letter.props, letter.key, story["original-message-id"].encode())
    message.topic = letter.topic
    message.headers = strip_story(letter.headers)
    group = queue.groups.get(story.get("original-group", ""))
    target: i64 = 0 if to_all or group is None else group.gid
    number = int(story.get("original-partition", "-1"))
    if 0 <= number < len(queue.partitions) and target:
        home = queue.partitions[number]
        engine.append_to(home, message, engine.key_hash(queue, message.key), target)
    else:
        engine.append(queue, message, target)
    engine.remove_for_all(partition, seq, 0)
    return True


def iso_time(seconds: float) -> str:
    """UTC, ISO 8601, to the millisecond."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
