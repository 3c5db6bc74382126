"""Which cells a topic or a filter below `$queue/`, `$ECQ/` and `$admin/` means.

$queue/<q>...                 the cell of the queue; `dlq/<q>` lies with `<q>`
$queue/responses/<name>/...   the cell of <name>: with the client library that is the client's own
$ECQ/w/<client>/<key>         the cell of the client
$admin/queue/<q>/...          the cell of the queue; `create` names it in its payload
"""

from __future__ import annotations

import json
from typing import Final

from sluice.broker.namespaces.queues.queue_topics import PREFIX, WRONG, parse_queue_topic
from sluice.cluster.membership.placement import cell_of, cell_of_queue
from sluice.wire.topics import has_wildcard

ADMIN: Final = b"$admin/queue/"
ECQ_WRITE: Final = b"$ECQ/w/"
RESPONSES: Final = b"$queue/responses/"
EVERYWHERE: Final = -2
NOWHERE: Final = -1  # no cell in particular: a topic that is refused wherever it is looked at


def cell_of_topic(topic: bytes, payload: bytes, cells: int) -> int:
    """The cell that a publish is for; NOWHERE when the topic is none that can be published to."""
    if topic.startswith(RESPONSES):
        return _named(topic[len(RESPONSES) :].split(b"/", 1)[0], cells)
    if topic.startswith(PREFIX):
        return cell_of_queue(_queue_of(topic), cells)
    if topic.startswith(ECQ_WRITE):
        return _named(topic[len(ECQ_WRITE) :].split(b"/", 1)[0], cells)
    if topic == ADMIN + b"create":
        return _cell_of_created(payload, cells)
    if topic.startswith(ADMIN):
        return _named_queue(topic[len(ADMIN) :].rpartition(b"/")[0], cells)
    return NOWHERE


def cell_of_filter(topic_filter: bytes, cells: int) -> int:
    """The cell that a subscription is for; EVERYWHERE with a wildcard in the name, NOWHERE for other filters."""
    if topic_filter.startswith(RESPONSES):
        name = topic_filter[len(RESPONSES) :].split(b"/", 1)[0]
    elif topic_filter.startswith(PREFIX):
        known = parse_queue_topic(topic_filter)
        name = b"" if known.verb == WRONG else known.queue.encode()
        return EVERYWHERE if has_wildcard(name) else _named_queue(name, cells)
    elif topic_filter.startswith(ADMIN):
        name = topic_filter[len(ADMIN) :]
        if not has_wildcard(name):
            return _named_queue(name.rpartition(b"/")[0], cells)
    elif topic_filter.startswith(b"$admin/"):
        name = b"#"
    else:
        return NOWHERE
    return EVERYWHERE if has_wildcard(name) else _named(name, cells)


def _queue_of(topic: bytes) -> bytes:
    name = topic[len(PREFIX) :]
    cut = name.find(b"/$")
    return name if cut < 0 else name[:cut]


def _named(name: bytes, cells: int) -> int:
    return cell_of(name, cells) if name else NOWHERE


def _named_queue(name: bytes, cells: int) -> int:
    return cell_of_queue(name, cells) if name else NOWHERE


def _cell_of_created(payload: bytes, cells: int) -> int:
    try:
        told = json.loads(payload)
    except (ValueError, RecursionError):
        return NOWHERE
    name = told.get("name") if isinstance(told, dict) else None
    return _named_queue(name.removeprefix("$queue/").encode(), cells) if isinstance(name, str) else NOWHERE
