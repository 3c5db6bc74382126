"""The grammar of `$queue/...`: the queue that a topic names, and the verb.

$queue/<q>                       publish, consume
$queue/<q>/$group/<g>            consume as a member of <g>, for clients without user properties
$queue/<q>/$group/<g>/$explicit  the same, and a PUBACK does not settle
$queue/<q>/$ack[/<id>]           settle; also $nack, $reject, $extend, $release
$queue/<q>/$cancel[/<id>]        remove a message that is not delivered yet
$queue/<q>/$reschedule[/<id>]    deliver such a message at another time
$queue/<q>/$msg/<id>             topic of deliveries to such a client
$queue/responses/<id>            reply queue: in memory, until its consumer takes the response
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

if TYPE_CHECKING:
    from sluice.queues.model import Queue

QUEUE_PREFIX: Final = b"$queue/"
EXPLICIT_SUFFIX: Final = b"/$explicit"  # after a group
MAX_IDS: Final = 1000  # message ids in one packet
_USER_PROPERTY: Final = 0x26

PUBLISH: Final = 0
GROUP: Final = 1
ACK: Final = 2
NACK: Final = 3
REJECT: Final = 4
EXTEND: Final = 5
RELEASE: Final = 6
CANCEL: Final = 7
RESCHEDULE: Final = 8
RESPONSE: Final = 9
INVALID: Final = 10
ADMIN: Final = 11  # not below $queue/

GROUP_FORM: Final = (
    b"a group is written $queue/<queue>/$group/<group> or $queue/<queue>/$group/<group>/$explicit"
)

_VERBS: Final[dict[bytes, int]] = {
    b"$group": GROUP,
    b"$ack": ACK,
    b"$nack": NACK,
    b"$reject": REJECT,
    b"$extend": EXTEND,
    b"$release": RELEASE,
    b"$cancel": CANCEL,
    b"$reschedule": RESCHEDULE,
}


class QueueTopic:
    """A parsed topic.

    `argument` is the group or the message id after the verb, or the error text of an `INVALID`
    topic.
    """

    def __init__(self, verb: i64, queue: str, argument: bytes = b"") -> None:
        self.verb: i64 = verb
        self.queue: str = queue
        self.argument: bytes = argument
        self.is_explicit: bool = False  # of a group: a PUBACK does not settle
        self.cell: i64 = -1  # of a queue in another cell of a cluster
        # The queue of that name at the last lookup.
        self.cached_queue: Queue | None = None


def parse_queue_topic(topic: bytes) -> QueueTopic:
    """Parse a topic that begins with `$queue/`."""
    name = topic[len(QUEUE_PREFIX) :]
    cut = name.find(b"/$")
    if cut < 0:
        if name.startswith(b"responses/"):
            return QueueTopic(RESPONSE, name[len(b"responses/") :].decode())
        return QueueTopic(PUBLISH, name.decode())
    queue = name[:cut].decode()
    verb_name, _, rest = name[cut + 1 :].partition(b"/")
    verb = _VERBS.get(verb_name)
    if verb is None:
        return QueueTopic(INVALID, queue, b"unknown verb " + verb_name)
    if verb == GROUP:
        group = rest.removesuffix(EXPLICIT_SUFFIX)
        if not group or b"/" in group:
            return QueueTopic(INVALID, queue, GROUP_FORM)
        found = QueueTopic(verb, queue, group)
        found.is_explicit = len(group) < len(rest)
        return found
    return QueueTopic(verb, queue, rest)


class PublishOptions:
    """The options for a queue in the user properties of a packet. One object is reused."""

    def __init__(self) -> None:
        self.id: bytes = b""  # the first message id, or the only one
        self.id_begin: i64 = -1  # where its property begins; -1: absent
        self.id_end: i64 = 0
        # All ids if there are several, and the begin and end of each of their properties in turn.
        self.all_ids: list[bytes] | None = None
        self.id_spans: list[int] = []
        self.key: bytes = b""
        self.group: str = ""
        self.priority: bytes = b""
        self.delay: bytes = b""
        self.deliver_at: bytes = b""
        self.token: bytes = b""
        self.reason: bytes = b""
        self.description: bytes = b""

    def clear(self) -> None:
        self.id = b""
        self.id_begin = -1
        self.all_ids = None
        self.key = b""
        self.group = ""
        self.priority = b""
        self.delay = b""
        self.deliver_at = b""
        self.token = b""
        self.reason = b""
        self.description = b""

    def add_id(self, message_id: bytes, begin: i64, end: i64) -> None:
        if self.id_begin < 0:
            self.id = message_id
            self.id_begin = begin
            self.id_end = end
            return
        if self.all_ids is None:
            self.all_ids = [self.id]
            self.id_spans = [int(self.id_begin), int(self.id_end)]
        elif len(self.all_ids) > MAX_IDS:
            return  # one more than the limit is enough to refuse the packet
        self.all_ids.append(message_id)
        self.id_spans.append(int(begin))
        self.id_spans.append(int(end))


def read_publish_options(raw: bytes, options: PublishOptions) -> None:
    """Read the user properties that concern queues from well-formed properties of a PUBLISH."""
    options.clear()
    at: i64 = 0
    end: i64 = len(raw)
    while at < end:
        identifier: i64 = raw[at]
        at += 1
        if identifier == _USER_PROPERTY:
            size: i64 = (i64(raw[at]) << 8) | i64(raw[at + 1])
            start: i64 = at + 2
            at = start + size
            length: i64 = (i64(raw[at]) << 8) | i64(raw[at + 1])
            at += 2
            # Compare lengths first: a property of another name costs no copy.
            if size == 10:
                name = raw[start : start + size]
                if name == b"message-id":
                    options.add_id(raw[at : at + length], start - 3, at + length)
                elif name == b"deliver-at":
                    options.deliver_at = raw[at : at + length]
            elif size == 13:
                if raw[start : start + size] == b"partition-key":
                    options.key = raw[at : at + length]
            elif size == 14:
                name = raw[start : start + size]
                if name == b"delivery-token":
                    options.token = raw[at : at + length]
                elif name == b"consumer-group":
                    options.group = raw[at : at + length].decode()
            elif size == 5:
                if raw[start : start + size] == b"delay":
                    options.delay = raw[at : at + length]
            elif size == 8:
                if raw[start : start + size] == b"priority":
                    options.priority = raw[at : at + length]
            elif size == 6:
                if raw[start : start + size] == b"reason":
                    options.reason = raw[at : at + length]
            elif size == 11 and raw[start : start + size] == b"description":
                options.description = raw[at : at + length]
            at += length
        elif identifier == 0x01:
            at += 1
        else:  # content type, response topic, correlation data
            at += 2 + ((i64(raw[at]) << 8) | i64(raw[at + 1]))


def strip_message_ids(raw: bytes, options: PublishOptions) -> bytes:
    """Return encoded properties without the message ids.

    A message carries its id separately: each queue that it passes through, dead-letter queues
    included, adds the id by which a delivery can be settled there.
    """
    if options.all_ids is None:
        return raw[: options.id_begin] + raw[options.id_end :]
    spans = options.id_spans
    remaining = raw[: spans[0]]
    for nth in range(1, len(spans), 2):
        end = spans[nth + 1] if nth + 1 < len(spans) else len(raw)
        remaining += raw[spans[nth] : end]
    return remaining
