"""The cluster as one who looks at it sees it: nodes, cells, who holds what, and what is on its way elsewhere.

It may be asked from any thread: the coordinator's dictionaries are copied in one step, and never changed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.cluster.membership.coordinator import Coordinator, NodeInfo
from sluice.cluster.membership.placement import cell_of, cell_of_queue, place_cells


@dataclass(frozen=True, slots=True)
class NodeState:
    node: NodeInfo
    cells: int  # that it holds
    suspected_by: list[str]  # names of nodes that do not hear it


@dataclass(frozen=True, slots=True)
class CellState:
    cell: int
    node: str  # name of the node that holds it; empty: nobody who lives
    planned_node: str  # name of the node that should hold it

    @property
    def is_moving(self) -> bool:
        return self.node != self.planned_node


class Directory:
    """`me` is the id of this node now, empty while it is not in the cluster; `opened` the cells that are open here: of
    those that it holds, some may still be on their way."""

    def __init__(
        self,
        name: str,
        cells: int,
        coordinator: Coordinator,
        node_id: Callable[[], str],
        open_cells: Callable[[], list[int]],
    ) -> None:
        self.name = name
        self.cells = cells
        self._coordinator = coordinator
        self._node_id = node_id
        self._open_cells = open_cells

    @property
    def node_id(self) -> str:
        return self._node_id()

    @property
    def node_name(self) -> str:
        """Empty while this node is not in the cluster."""
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
        placement = (
            place_cells(self.cells, [node.name for node in nodes.values()]) or [""] * self.cells
        )
        holders = [nodes.get(claims.get(cell, "")) for cell in range(self.cells)]
        return [
            CellState(cell, holder.name if holder is not None else "", placement[cell])
            for cell, holder in enumerate(holders)
        ]
