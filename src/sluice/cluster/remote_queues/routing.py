"""Map topics and filters below `$queue/`, `$ECQ/` and `$admin/` to the cells that own them.

$queue/<q>...                 the cell of the queue; `dlq/<q>` is in the cell of `<q>`
$queue/responses/<name>/...   the cell of <name>; the client library uses the client's own cell
$ECQ/<client>/#               the cell of the client
$ECQ/w/<client>/<key>         the cell of the client
$admin/queue/<q>/...          the cell of the queue; `create` names it in its payload
"""

from __future__ import annotations

import json
from typing import Final

from sluice.broker.queue_topics import INVALID, QUEUE_PREFIX, parse_queue_topic
from sluice.placement import cell_of, cell_of_queue, queue_in_topic
from sluice.wire.topics import has_wildcard

ADMIN_QUEUE_PREFIX: Final = b"$admin/queue/"
ECQ_PREFIX: Final = b"$ECQ/"
ECQ_WRITE_PREFIX: Final = b"$ECQ/w/"
RESPONSES_PREFIX: Final = b"$queue/responses/"
ALL_CELLS: Final = -2
NO_CELL: Final = -1  # no particular cell: every cell refuses such a topic


def cell_of_topic(topic: bytes, payload: bytes, cells: int) -> int:
    """Return the cell that a publish is for, or NO_CELL if the topic does not accept publishes."""
    if topic.startswith(RESPONSES_PREFIX):
        return _cell_of_name(topic[len(RESPONSES_PREFIX) :].split(b"/", 1)[0], cells)
    if topic.startswith(QUEUE_PREFIX):
        return cell_of_queue(queue_in_topic(topic), cells)
    if topic.startswith(ECQ_WRITE_PREFIX):
        return _cell_of_name(topic[len(ECQ_WRITE_PREFIX) :].split(b"/", 1)[0], cells)
    if topic == ADMIN_QUEUE_PREFIX + b"create":
        return _cell_of_created(payload, cells)
    if topic.startswith(ADMIN_QUEUE_PREFIX):
        return _cell_of_queue_name(topic[len(ADMIN_QUEUE_PREFIX) :].rpartition(b"/")[0], cells)
    return NO_CELL


def cell_of_filter(topic_filter: bytes, cells: int) -> int:
    """Return the cell that a subscription is for.

    The result is ALL_CELLS if the name has a wildcard and NO_CELL for other filters.
    """
    if topic_filter.startswith(RESPONSES_PREFIX):
        name = topic_filter[len(RESPONSES_PREFIX) :].split(b"/", 1)[0]
    elif topic_filter.startswith(QUEUE_PREFIX):
        parsed = parse_queue_topic(topic_filter)
        name = b"" if parsed.verb == INVALID else parsed.queue.encode()
        return ALL_CELLS if has_wildcard(name) else _cell_of_queue_name(name, cells)
    elif topic_filter.startswith(ADMIN_QUEUE_PREFIX):
        name = topic_filter[len(ADMIN_QUEUE_PREFIX) :]
        if not has_wildcard(name):
            return _cell_of_queue_name(name.rpartition(b"/")[0], cells)
    elif topic_filter.startswith(ECQ_PREFIX):
        # Of a session outside the cell of its client id; wildcards are refused in every cell.
        name = topic_filter[len(ECQ_PREFIX) :].split(b"/", 1)[0]
        return NO_CELL if has_wildcard(name) or name == b"w" else _cell_of_name(name, cells)
    elif topic_filter.startswith(b"$admin/"):
        name = b"#"
    else:
        return NO_CELL
    return ALL_CELLS if has_wildcard(name) else _cell_of_name(name, cells)


def _cell_of_name(name: bytes, cells: int) -> int:
    return cell_of(name, cells) if name else NO_CELL


def _cell_of_queue_name(name: bytes, cells: int) -> int:
    return cell_of_queue(name, cells) if name else NO_CELL


def _cell_of_created(payload: bytes, cells: int) -> int:
    try:
        config = json.loads(payload)
    except (ValueError, RecursionError):
        return NO_CELL
    name = config.get("name") if isinstance(config, dict) else None
    return (
        _cell_of_queue_name(name.removeprefix("$queue/").encode(), cells)
        if isinstance(name, str)
        else NO_CELL
    )
