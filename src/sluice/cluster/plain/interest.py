"""Topic filters of all cells, as last announced: decides which cells get a publish.

Each cell announces its filters and the number of subscriptions of each. A cell without a live
owner keeps its last announced filters; a cell that has announced none may match every topic.
Invariant: a message that such a cell must store waits for its next owner and is not lost.

    sensors/+/temp            subscriptions
    $share/<group>/<filter>   members of a shared subscription: each message goes to one cell
    \\0<filter>                bindings of queues
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

from sluice.wire.topics import split_share

MAX_CACHED_ROUTES: Final = 65_536
MAX_CACHED_TOPIC_LEN: Final = 256
BINDING_PREFIX: Final = b"\0"


class InterestMatch:
    """The receivers of a message: all of `cells`, and for each share one of the cells listed."""

    def __init__(self) -> None:
        self.cells: set[int] = set()
        self.shares: dict[bytes, dict[int, int]] = {}

    def choose_cells(self, seed: int = 0) -> list[tuple[bytes, int]]:
        """Choose one cell for each share at random, weighted by members.

        With a seed, the choice is repeatable: a resent message goes to the same cells.
        """
        return [(name, pick_cell(members, seed)) for name, members in self.shares.items()]


def pick_cell(members: dict[int, int], seed: int = 0) -> int:
    if seed:
        cells = sorted(members)
        return random.Random(seed).choices(cells, [members[cell] for cell in cells])[0]
    cells = list(members)
    return cells[0] if len(cells) == 1 else random.choices(cells, list(members.values()))[0]


class _TopicLevel:
    def __init__(self) -> None:
        self.children: dict[bytes, _TopicLevel] = {}
        # By cell, a bit set: 1 subscriptions, 2 bindings.
        self.cells: dict[int, int] = {}
        self.shares: dict[bytes, dict[int, int]] = {}

    def is_empty(self) -> bool:
        return not self.children and not self.cells and not self.shares


class Interest:
    """The filters of all cells, in one tree of topic levels."""

    def __init__(self, cells: int) -> None:
        self._tables: list[dict[bytes, int] | None] = [None] * cells
        self.unknown_cells: set[int] = set(range(cells))
        self._root = _TopicLevel()
        self._routes: dict[bytes, InterestMatch] = {}

    def replace_table(self, cell: int, table: Mapping[bytes, int]) -> None:
        """Replace all filters of a cell."""
        for name in self._tables[cell] or {}:
            self._update_tree(cell, name, 0)
        self._tables[cell] = {}
        self.unknown_cells.discard(cell)
        self.apply_changes(cell, table)

    def apply_changes(self, cell: int, changes: Mapping[bytes, int]) -> None:
        """Set the number of subscriptions of some filters; 0 removes a filter."""
        table = self._tables[cell]
        if table is None:
            return  # the cell's full table is still to come
        for name, count in changes.items():
            if count:
                table[name] = count
            elif table.pop(name, None) is None:
                continue
            self._update_tree(cell, name, count)
        self._routes.clear()

    def _update_tree(self, cell: int, name: bytes, count: int) -> None:
        group, topic_filter = split_share(name.removeprefix(BINDING_PREFIX))
        levels = topic_filter.split(b"/")
        path = [self._root]
        for level in levels:
            child = path[-1].children.get(level)
            if child is None:
                if count == 0:
                    return
                child = path[-1].children[level] = _TopicLevel()
            path.append(child)
        node = path[-1]
        if group:
            members = node.shares.setdefault(name, {})
            if count:
                members[cell] = count
            else:
                members.pop(cell, None)
                if not members:
                    del node.shares[name]
        else:
            bit = 2 if name.startswith(BINDING_PREFIX) else 1
            flags = node.cells.get(cell, 0) & ~bit | (bit if count else 0)
            if flags:
                node.cells[cell] = flags
            else:
                node.cells.pop(cell, None)
        if count == 0:
            for depth in range(len(levels), 0, -1):
                if not path[depth].is_empty():
                    break
                del path[depth - 1].children[levels[depth - 1]]

    def match(self, topic: bytes) -> InterestMatch:
        found = self._routes.get(topic)
        if found is None:
            found = InterestMatch()
            _collect(self._root, topic.split(b"/"), 0, topic[:1] == b"$", found)
            if len(topic) <= MAX_CACHED_TOPIC_LEN:
                if len(self._routes) >= MAX_CACHED_ROUTES:
                    self._routes.clear()
                self._routes[topic] = found
        return found


def _collect(
    node: _TopicLevel, levels: list[bytes], depth: int, hidden: bool, found: InterestMatch
) -> None:
    wild = not (hidden and depth == 0)  # [MQTT-4.7.2-1]
    if wild and b"#" in node.children:
        _add(node.children[b"#"], found)
    if depth == len(levels):
        _add(node, found)
        return
    child = node.children.get(levels[depth])
    if child is not None:
        _collect(child, levels, depth + 1, hidden, found)
    if wild and b"+" in node.children:
        _collect(node.children[b"+"], levels, depth + 1, hidden, found)


def _add(node: _TopicLevel, found: InterestMatch) -> None:
    found.cells.update(node.cells)
    found.shares.update(node.shares)
