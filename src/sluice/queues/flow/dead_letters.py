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
from sluice.queues.model.delivery_lease import LEASED
from sluice.queues.log.frame_builder import ACKED, NoteWriter
from sluice.queues.names import message_id
from sluice.queues.model.partition import Partition

if TYPE_CHECKING:
    from sluice.queues.model.delivery_lease import Lease
    from sluice.queues.engine import Engine
    from sluice.queues.model.group import Group
    from sluice.queues.model.queue import Queue

# Why a consumer rejects a message. The first is a `rejected` one whatever channel it goes to.
UNACCEPTABLE: Final = "unacceptable"
DELIVERY_ERROR: Final = "delivery-error"
REJECTED: Final = "rejected"

_OWN_NAMES: Final = frozenset(
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
        self, url: str, queue: str, dlq: str, name: str, group: str, reason: str, story: dict[str, str]
    ) -> None:
        self.url = url
        self.queue = queue
        self.dlq = dlq
        self.message_id = name
        self.group = group
        self.reason = reason
        self.story = story


def bury(engine: Engine, lease: Lease, message: Message, reason: str, description: str) -> None:
    """Write the dead letter of a delivery; its end in its own queue is the engine's, in the same frame."""
    cursor = lease.cursor
    queue = cursor.group.queue
    story = _story(engine, queue, cursor.partition, lease.seq, message, reason, description)
    _tell_attempts(story, lease)
    detail = f"{story['dead-reason']}: {description}" if description else story["dead-reason"]
    _tell_history(engine, story, message, lease, cursor.group.name, history.DEAD, detail)
    _write(engine, queue, message, cursor.group.name, reason, story)


def bury_expired(
    engine: Engine, partition: Partition, seq: i64, message: Message, group: Group | None, lease: Lease | None
) -> None:
    """Write the dead letter of a message that nobody took in time: for one group, or for all of them."""
    queue = partition.queue
    story = _story(engine, queue, partition, seq, message, "expired", "")
    name = ""
    if group is not None:
        name = group.name
        story["original-group"] = name
    if lease is not None:
        _tell_attempts(story, lease)
    _tell_history(engine, story, message, lease, name, history.EXPIRED, "nobody took it in time")
    _write(engine, queue, message, name, "expired", story)


def bury_unborn(engine: Engine, queue: Queue, message: Message, reason: str, description: str = "") -> bool:
    """Write the dead letter of a message that its queue does not take; False when there is no place for it either."""
    if not queue.rules.dlq_enabled and not (reason == UNACCEPTABLE and queue.rules.invalid_name):
        return False
    message.enqueued_at = int(engine.now * 1000.0)
    _write(engine, queue, message, "", reason, _story(engine, queue, None, 0, message, reason, description))
    return True


def _tell_attempts(story: dict[str, str], lease: Lease) -> None:
    story["original-group"] = lease.cursor.group.name
    story["attempts"] = str(lease.attempt)
    story["first-attempt-at"] = iso_time(lease.first_at)
    story["last-attempt-at"] = iso_time(lease.last_at)


def _tell_history(
    engine: Engine,
    story: dict[str, str],
    message: Message,
    lease: Lease | None,
    group: str,
    what: str,
    detail: str,
) -> None:
    """All that is known of it, from its first life on."""
    steps = history.earlier_steps(message)
    if not steps:
        steps.append(history.Step(float(message.enqueued_at) / 1000.0, history.ENQUEUED, "", "", 0, ""))
    attempt: i64 = 0
    if lease is not None:
        attempt = lease.attempt
        if lease.history is not None:
            steps.extend(lease.history)
    steps.append(history.Step(engine.now, what, group, "", attempt, detail[: history.LONGEST_DETAIL]))
    story[history.HEADER] = history.text_of(steps)


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
        story["original-partition"] = str(partition.number)
        story["original-sequence"] = str(seq)
    if message.priority:
        story["original-priority"] = str(message.priority)
    return story


def _write(
    engine: Engine, queue: Queue, message: Message, group: str, reason: str, story: dict[str, str]
) -> None:
    rules = queue.rules
    dead_reason = story["dead-reason"]
    count(queue, dead_reason)
    note = NoteWriter(notes.DIED)
    note.number(queue.qid)
    note.text(dead_reason)
    engine.note(note, False)
    target = ""
    if reason == UNACCEPTABLE and rules.invalid_name:
        target = rules.invalid_name
    elif rules.dlq_enabled:
        target = rules.dlq_name
    home = _channel(engine, target) if target else None
    if home is None:
        engine.warnings.append(
            f"message {story['original-message-id']} of queue {queue.name} is dead ({dead_reason}) and there is no "
            "dead-letter queue to keep it: settled"
        )
        return
    letter = Message(message.payload, message.props, message.key)
    letter.topic = message.topic
    letter.headers = strip_story(message.headers) + b"".join(
        encode_header(name, value) for name, value in story.items() if value
    )
    engine.put(home, letter)
    if reason != "overflow" or rules.alert_webhook:
        name = story["original-message-id"]
        engine.alerts.append(Alert(rules.alert_webhook, queue.name, target, name, group, dead_reason, story))


def count(queue: Queue, reason: str) -> None:
    queue.dead[reason] = queue.dead.get(reason, 0) + 1


def _channel(engine: Engine, name: str) -> Queue | None:
    """The queue that takes the dead, made if it is not there; None when it cannot be."""
    queue = engine.queues.get(name)
    if queue is None:
        try:
            queue = engine.ensure(name, is_limited=False)  # a refusal would lose the message
        except QueueError as fault:
            engine.warnings.append(f"no dead letters can be kept: {fault}")
            return None
        engine.made.append(queue)
    return queue


def strip_story(headers: bytes) -> bytes:
    """The headers of a message without those that an earlier death has written."""
    if not headers:
        return headers
    return b"".join(
        encode_header(name, value) for name, value in decode_headers(headers) if name not in _OWN_NAMES
    )


def redrive(engine: Engine, partition: Partition, seq: i64, letter: Message, to_all: bool) -> bool:
    """Put a dead letter back: to the group that failed it, on its old partition, or to all groups. One frame holds its
    end here and its new beginning there. False when the queue it came from is gone, or somebody works on the letter."""
    story = dict(decode_headers(letter.headers))
    queue = engine.queues.get(story.get("original-queue", ""))
    if queue is None or not partition.holds(seq) or not is_idle(partition, seq):
        return False
    message = Message(letter.payload, letter.props, letter.key)
    _put_back(engine, partition, seq, letter, story, queue, message, to_all)
    return True


def replace(
    engine: Engine,
    partition: Partition,
    seq: i64,
    letter: Message,
    queue: Queue,
    message: Message,
    to_all: bool,
) -> bool:
    """Put back a message that somebody has repaired, in the place of its letter, and end that in the same frame. In
    another queue than its own it is for every group, and with another key it goes where that belongs. False when the
    letter is gone, or somebody works on it."""
    if not partition.holds(seq) or not is_idle(partition, seq):
        return False
    story = dict(decode_headers(letter.headers))
    _put_back(engine, partition, seq, letter, story, queue, message, to_all)
    return True


def _put_back(
    engine: Engine,
    partition: Partition,
    seq: i64,
    letter: Message,
    story: dict[str, str],
    queue: Queue,
    message: Message,
    to_all: bool,
) -> None:
    """`message` has payload, key and properties already; the rest is the letter's."""
    message.id = story.get("original-message-id", "").encode() or message.id
    message.topic = letter.topic
    message.headers = strip_story(letter.headers)
    if letter.topic:  # of a captured one: consumers see it as they did before
        message.headers += encode_header("original-topic", letter.topic.decode())
    if message.priority == 0:
        message.priority = _number(story, "original-priority", 0)
    is_home = queue.name == story.get("original-queue", "")
    group = queue.groups.get(story.get("original-group", "")) if is_home and not to_all else None
    target: i64 = 0 if group is None else group.gid
    aim = "" if group is None else group.name
    steps = _steps_of_letter(letter, story)
    steps.append(history.Step(engine.now, history.REDRIVEN, aim, "", 0, f"from {partition.queue.name}"))
    message.headers += encode_header(history.HEADER, history.text_of(steps))
    number: i64 = _number(story, "original-partition", -1) if is_home and message.key == letter.key else -1
    if queue.rules.compacted:
        engine.put(queue, message)  # it is the last of its key again, for all
    elif number >= 0 and number < len(queue.partitions):
        home = queue.partitions[number]
        engine.append_to(home, message, engine.key_hash(queue, message.key), target)
    else:
        engine.append(queue, message, target)
    engine.remove_for_all(partition, seq, ACKED)


def _steps_of_letter(letter: Message, story: dict[str, str]) -> list[history.Step]:
    """Its history; that of a letter which brings none is what its other headers tell."""
    steps = history.earlier_steps(letter)
    if not steps:
        died_at = float(letter.enqueued_at) / 1000.0
        group = story.get("original-group", "")
        steps.append(history.Step(died_at, history.DEAD, group, "", 0, story.get("dead-reason", "")))
    return steps


def _number(story: dict[str, str], name: str, default: int) -> i64:
    """Headers of letters may have been written by anybody."""
    try:
        return int(story.get(name, default))
    except ValueError:
        return default


def is_idle(partition: Partition, seq: i64) -> bool:
    """Whether nobody is working on a message."""
    for cursor in partition.cursors:
        lease = cursor.leases.get(int(seq))
        if lease is not None and lease.state == LEASED:
            return False
    return True


def iso_time(seconds: float) -> str:
    """UTC, ISO 8601, to the millisecond."""
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z"
