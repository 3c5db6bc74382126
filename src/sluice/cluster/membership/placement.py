"""Map names to cells and cells to nodes: two pure functions that every node computes alike.

A name never changes its cell; cells change their node when nodes join or leave. So there are two
balances: names over cells (`cell_of`) and cells over nodes (`place_cells`). Only the second one
decides how many cells move.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from sluice.message import fnv1a32

DEAD_LETTER_PREFIX: Final = b"dlq/"
MAX_CACHED_NAMES: Final = 16_384
MAX_CACHED_NAME_LEN: Final = 128

_LAST_NUMBER: Final = re.compile(rb"(.*?)([0-9]{1,9})([^0-9]*)", re.DOTALL)
_CELL_CACHE: Final[dict[tuple[bytes, int], int]] = {}  # recently used names


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


def place_cells(cells: int, nodes: Sequence[str]) -> list[str]:
    """Return the node that should own each cell; the order of `nodes` does not matter.

    Every pair of node and cell has a weight, hashed from their names. Pairs are matched in order
    of weight until each node has its share. So shares differ by at most one, a joining node takes
    its share mostly from nodes that are over theirs, and mostly only the cells of a leaving node
    move. With names that survive a restart, a node gets its cells back.
    """
    if not nodes:
        return []
    capacity = _cells_per_node(cells, nodes)
    owners = [""] * cells
    pairs = sorted(
        (_weight(f"{node}\0{cell}"), cell, node) for node in set(nodes) for cell in range(cells)
    )
    for _, cell, node in pairs:
        if not owners[cell] and capacity[node]:
            owners[cell] = node
            capacity[node] -= 1
    return owners


def _cells_per_node(cells: int, nodes: Sequence[str]) -> dict[str, int]:
    """Return the number of cells of each node. The remainder goes to nodes chosen by hash."""
    names = sorted(set(nodes), key=_weight)
    share, remainder = divmod(cells, len(names))
    return {name: share + (nth < remainder) for nth, name in enumerate(names)}


def _weight(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
