"""Which cell a name lies in, and which node a cell should be with. Two pure functions that every node computes alike.

A name never changes its cell; cells change their node when nodes come and go. So there are two kinds of evenness: of
names over cells (`cell_of`) and of cells over nodes (`place`), and few moves are a matter of the second alone.
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
_CELL_CACHE: Final[dict[tuple[bytes, int], int]] = {}  # names that were asked for lately


def cell_of(name: str | bytes, cells: int) -> int:
    """The cell of a session (by client id), of a retained message (by topic), or of anything else that has a name."""
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
    """The cell of a queue. Its dead letters lie with it, so that moving a message there is one step of one store."""
    text = name.encode() if isinstance(name, str) else name
    while text.startswith(DEAD_LETTER_PREFIX):
        text = text[len(DEAD_LETTER_PREFIX) :]
    return cell_of(text, cells)


def _compute_cell(text: bytes, cells: int) -> int:
    """Names that people give are numbered: `orders-17`, `site-3/line-42/temp`. A thousand such names, thrown at random,
    would lie 10 % apart; so the last number of a name is counted, not thrown: names in a row lie in cells in a row.
    Where a row begins is thrown anew for each round of `cells` numbers, so that names which go up in steps
    spread too."""
    number = _LAST_NUMBER.fullmatch(text)
    if number is None:
        return _hash_name(text) % cells
    rounds, step = divmod(int(number[2]), cells)
    return (_hash_name(b"%b\0%d\0%b" % (number[1], rounds, number[3])) + step) % cells


def _hash_name(text: bytes) -> int:
    """Folded, because the low bits of FNV-1a see only the low bits of each byte."""
    value = int(fnv1a32(text))
    return value ^ value >> 16


def place_cells(cells: int, nodes: Sequence[str]) -> list[str]:
    """For each cell the node that should have it; the order of `nodes` does not matter.

    Every pair of a node and a cell has a mark, drawn from their names. The best pairs find each other first, until a
    node has its share: so shares differ by at most one, a node that comes takes its share mostly from nowhere but the
    full ones, and what a node leaves behind is mostly all that moves. Give names that outlive a restart, and a node
    that comes back gets what it had."""
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
    """How many cells each node has. Who gets one more where they cannot be equal is drawn too."""
    names = sorted(set(nodes), key=_weight)
    share, more = divmod(cells, len(names))
    return {name: share + (nth < more) for nth, name in enumerate(names)}


def _weight(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
