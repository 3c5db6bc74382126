"""Map cells to nodes: a pure function that every node computes alike.

A name never changes its cell (`sluice.placement`); cells change their node when nodes join or
leave. So there are two balances: names over cells and cells over nodes (`place_cells`). Only the
second one decides how many cells move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b


def place_cells(
    cells: int, nodes: Sequence[str], avoided: Mapping[int, Collection[str]] | None = None
) -> list[str]:
    """Return the node that should own each cell; the order of `nodes` does not matter.

    `avoided` has, by cell, the nodes that could not load it in time: another node gets the cell,
    unless no other is left.

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
    if avoided:
        for cell, avoiding in avoided.items():
            others = [node for node in nodes if node not in avoiding]
            if cell < cells and owners[cell] in avoiding and others:
                # Beyond the share of that node: no other cell moves because of this one.
                owners[cell] = min((_weight(f"{node}\0{cell}"), node) for node in others)[1]
    return owners


def _cells_per_node(cells: int, nodes: Sequence[str]) -> dict[str, int]:
    """Return the number of cells of each node. The remainder goes to nodes chosen by hash."""
    names = sorted(set(nodes), key=_weight)
    share, remainder = divmod(cells, len(names))
    return {name: share + (nth < remainder) for nth, name in enumerate(names)}


def _weight(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
