"""The grammar of `$queue/...`: which queue a topic means, and what is to be done with it.

$queue/<q>                       publish, consume
$queue/<q>/$group/<g>            consume as a member of <g>, for clients without user properties
$queue/<q>/$ack[/<id>]           settle; also $nack, $reject, $extend, $release
$queue/<q>/$msg/<id>             what such a client's deliveries arrive on
$queue/responses/<id>            a reply: kept in memory until somebody takes it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

if TYPE_CHECKING:
    from sluice.queues.model.queue import Queue

QUEUE_PREFIX: Final = b"$queue/"
MAX_IDS: Final = 1000  # message ids in one packet

PUBLISH: Final = 0
GROUP: Final = 1
ACK: Final = 2
NACK: Final = 3
REJECT: Final = 4
EXTEND: Final = 5
RELEASE: Final = 6
RESPONSE: Final = 7
INVALID: Final = 8
ADMIN: Final = 9  # not under $queue/ at all

_VERBS: Final[dict[bytes, int]] = {
    b"$group": GROUP,
    b"$ack": ACK,
    b"$nack": NACK,
    b"$reject": REJECT,
    b"$extend": EXTEND,
    b"$release": RELEASE,
}


class QueueTopic:
    """A topic taken apart. `rest` is the group or the message id behind the verb, or why the topic is `WRONG`."""

    def __init__(self, verb: i64, queue: str, argument: bytes = b"") -> None:
        self.verb: i64 = verb
        self.queue: str = queue
        self.argument: bytes = argument
        self.cell: i64 = -1  # of a queue that lies in another cell of a cluster: which
        self.cached_queue: Queue | None = (
            None  # the queue by that name, when it was last looked for
        )


def parse_queue_topic(topic: bytes) -> QueueTopic:
    """Take a topic that begins with `$queue/` apart."""
    name = topic[len(QUEUE_PREFIX) :]
    cut = name.find(b"/$")
    if cut < 0:
        if name.startswith(b"responses/"):
            return QueueTopic(RESPONSE, name[len(b"responses/") :].decode())
        return QueueTopic(PUBLISH, name.decode())
    queue = name[:cut].decode()
    verb, _, rest = name[cut + 1 :].partition(b"/")
    action = _VERBS.get(verb)
    if action is None:
        return QueueTopic(
            INVALID, queue, b"nothing can be done with a queue by the name of " + verb
        )
    if action == GROUP and (not rest or b"/" in rest):
        return QueueTopic(INVALID, queue, b"a group is written $queue/<queue>/$group/<group>")
    return QueueTopic(action, queue, rest)


class PublishOptions:
    """What the user properties of a packet ask of a queue. One object is used again and again."""

    def __init__(self) -> None:
        self.id: bytes = b""  # the first message id, or the only one
        self.id_begin: i64 = -1  # where its property stands; -1: nowhere
        self.id_end: i64 = 0
        self.all_ids: list[bytes] | None = None  # all of them, when there are several,
        self.id_spans: list[
            int
        ] = []  # and where they stand: begin and end of each property in turn
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
            return  # one more than there may be is enough to know that
        self.all_ids.append(message_id)
        self.id_spans.append(int(begin))
        self.id_spans.append(int(end))


def read_publish_options(raw: bytes, options: PublishOptions) -> None:
    """Find the user properties that queues know in the encoded properties of a PUBLISH; they are well formed."""
    options.clear()
    at: i64 = 0
    end: i64 = len(raw)
    while at < end:
        identifier: i64 = raw[at]
        at += 1
        if identifier == 0x26:
            size: i64 = (i64(raw[at]) << 8) | i64(raw[at + 1])
            start: i64 = at + 2
            at = start + size
            length: i64 = (i64(raw[at]) << 8) | i64(raw[at + 1])
            at += 2
            # Names are told apart by length first: a property that is not ours costs no copy.
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
    """Encoded properties less the message ids in them. A message carries its id apart from them: each queue it passes
    through, its dead letters included, puts the id on a delivery by which it can be settled there."""
    if options.all_ids is None:
        return raw[: options.id_begin] + raw[options.id_end :]
    spans = options.id_spans
    remaining = raw[: spans[0]]
    for nth in range(1, len(spans), 2):
        end = spans[nth + 1] if nth + 1 < len(spans) else len(raw)
        remaining += raw[spans[nth] : end]
    return remaining
