"""Map names to cells and keys to hashes: pure functions that nodes and clients compute alike.

A cell is a part of a cluster with its own queues, sessions and retained messages. A name never
changes its cell; which node owns a cell is in `cluster.membership`. `HASH_NAME` identifies the
function: a client that does not know the function of its server must not use its own.
"""

from __future__ import annotations

import re
from typing import Final

from mypy_extensions import i64

# The name of `cell_of` in the placement that nodes publish. Change it with the function.
HASH_NAME: Final = "fnv1a32-counted"
QUEUE_PREFIX: Final = b"$queue/"
DEAD_LETTER_PREFIX: Final = b"dlq/"
MAX_CACHED_NAMES: Final = 16_384
MAX_CACHED_NAME_LEN: Final = 128

_LAST_NUMBER: Final = re.compile(rb"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)
_CELL_CACHE: Final[dict[tuple[bytes, int], int]] = {}  # recently used names


def fnv1a32(key: bytes) -> i64:
    """Return the FNV-1a hash of a key, 32 bits, which decides its partition."""
    value: i64 = 0x811C9DC5
    at: i64 = 0
    size: i64 = len(key)
    while at < size:
        value = ((value ^ i64(key[at])) * 0x01000193) & 0xFFFF_FFFF
        at += 1
    return value


def cell_of(name: str | bytes, cells: int) -> int:
    """Return the cell of a session (client id), a retained message (topic) or another name."""
    text = name.encode() if isinstance(name, str) else name
    cached = _CELL_CACHE.get((text, cells))
    if cached is not None:
        return cached
    cell = _compute_cell(text, cells)
    if len(text) <= MAX_CACHED_NAME_LEN:
        if len(_CELL_CACHE) >= MAX_CACHED_NAMES:
            _CELL_CACHE.clear()
        _CELL_CACHE[text, cells] = cell
    return cell


def cell_of_queue(name: str | bytes, cells: int) -> int:
    """Return the cell of a queue.

    A dead-letter queue is in the cell of its queue, so that moving a message there is one commit
    of one store.
    """
    text = name.encode() if isinstance(name, str) else name
    while text.startswith(DEAD_LETTER_PREFIX):
        text = text[len(DEAD_LETTER_PREFIX) :]
    return cell_of(text, cells)


def _compute_cell(text: bytes, cells: int) -> int:
    """Hash a name to a cell, and spread numbered names evenly.

    People number names: `orders-17`, `site-3/line-42/temp`. A thousand such names, hashed at
    random, load the cells with a deviation of 10 %. So the last number of a name is not hashed but
    added: consecutive names go to consecutive cells. The first cell is hashed again for each
    round of `cells` numbers, so that names with a larger step spread too.
    """
    number = _LAST_NUMBER.fullmatch(text)
    if number is None:
        return _hash_name(text) % cells
    rounds, step = divmod(int(number[2]), cells)
    return (_hash_name(b"%b\0%d\0%b" % (number[1], rounds, number[3])) + step) % cells


def _hash_name(text: bytes) -> int:
    """Hash a name and fold the result: the low bits of FNV-1a depend on low input bits only."""
    value = int(fnv1a32(text))
    return value ^ value >> 16


def queue_in_topic(topic: bytes) -> bytes:
    """Return the queue that a topic below `$queue/` names, without verb, group or id."""
    name = topic[len(QUEUE_PREFIX) :]
    cut = name.find(b"/$")
    return name if cut < 0 else name[:cut]
