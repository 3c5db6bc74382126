"""Answer read-only questions about the cluster: its nodes, its cells, their owners, planned moves.

Safe to call from any thread: each call copies the coordinator's dictionaries in one step and
never changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.cluster.membership.coordinator import (
    Coordinator,
    NodeInfo,
    names_avoiding,
    names_with_cells,
)
from sluice.cluster.membership.placement import place_cells
from sluice.placement import cell_of, cell_of_queue


@dataclass(frozen=True, slots=True)
class NodeState:
    node: NodeInfo
    cells: int  # how many cells it owns
    suspected_by: list[str]  # names of the nodes that receive nothing from it


@dataclass(frozen=True, slots=True)
class CellState:
    cell: int
    node: str  # name of the live node that owns the cell; empty: none
    planned_node: str  # name of the node that should own the cell

    @property
    def is_moving(self) -> bool:
        return self.node != self.planned_node


class Directory:
    """A view of the cluster from this node.

    `node_id` returns the current id of this node, empty while it is not in the cluster.
    `open_cells` returns the cells that are open here; a claimed cell may still be opening.
    `load_timeouts` returns how many cells this node did not load in time.
    """

    def __init__(
        self,
        name: str,
        cells: int,
        coordinator: Coordinator,
        node_id: Callable[[], str],
        open_cells: Callable[[], list[int]],
        load_timeouts: Callable[[], int] = lambda: 0,
    ) -> None:
        self.name = name
        self.cells = cells
        self._coordinator = coordinator
        self._node_id = node_id
        self._open_cells = open_cells
        self.load_timeouts = load_timeouts

    @property
    def process_names(self) -> tuple[str, ...]:
        """Return the names of all processes if the nodes are those of one node, else nothing."""
        return self._coordinator.expected_names

    @property
    def node_id(self) -> str:
        return self._node_id()

    @property
    def node_name(self) -> str:
        """Return the name of this node; empty while it is not in the cluster."""
        found = self._coordinator.nodes.get(self.node_id)
        return found.name if found is not None else ""

    def open_cells(self) -> set[int]:
        return set(self._open_cells())

    def nodes(self) -> dict[str, NodeInfo]:
        return dict(self._coordinator.nodes)

    def other_nodes(self) -> list[NodeInfo]:
        node_id = self.node_id
        return [node for node in self.nodes().values() if node.id != node_id]

    def owner_of(self, cell: int) -> NodeInfo | None:
        return self._coordinator.nodes.get(self._coordinator.claims.get(cell, ""))

    def cell_of_queue(self, name: str) -> int:
        return cell_of_queue(name, self.cells)

    def cell_of_client(self, client: str) -> int:
        return cell_of(client, self.cells)

    def node_states(self) -> list[NodeState]:
        nodes = self.nodes()
        claims = list(dict(self._coordinator.claims).values())
        suspicions = {
            suspect: set(by) for suspect, by in dict(self._coordinator.suspicions).items()
        }
        return [
            NodeState(
                node,
                claims.count(node.id),
                sorted(nodes[one].name for one in suspicions.get(node.id, ()) if one in nodes),
            )
            for node in sorted(nodes.values(), key=lambda one: one.name)
        ]

    def cell_states(self) -> list[CellState]:
        nodes = self.nodes()
        claims = dict(self._coordinator.claims)
        avoided = dict(self._coordinator.avoided)
        placement = (
            place_cells(
                self.cells,
                names_with_cells(self._coordinator),
                names_avoiding(nodes, {key: set(by) for key, by in avoided.items()}),
            )
            or [""] * self.cells
        )
        owners = [nodes.get(claims.get(cell, "")) for cell in range(self.cells)]
        return [
            CellState(cell, owner.name if owner is not None else "", placement[cell])
            for cell, owner in enumerate(owners)
        ]
