"""The route that shows the cluster: nodes, cells, their owners and their targets."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.models import Time
from sluice.admin.rest.params import parse_queue_name
from sluice.cluster.directory import Directory

router = APIRouter(prefix="/api/v1", tags=["node"])


class ClusterNode(BaseModel):
    id: str = Field(description="Of this incarnation: it changes with a restart")
    name: str
    started_at: Time
    link: str = Field(description="The address for other nodes")
    mqtt: str
    http: str
    grpc: str
    cells: int = Field(description="Number of cells that it owns")
    suspected_by: list[str] = Field(description="Nodes that do not reach it")


class ClusterCell(BaseModel):
    cell: int
    node: str = Field(description="The owner; empty: no live node")
    wanted: str = Field(description="The planned owner: another node while the cell moves")


class QueuePlace(BaseModel):
    queue: str
    cell: int
    node: str


class Cluster(BaseModel):
    """Without a cluster: `enabled` false, and nothing else."""

    enabled: bool
    name: str = ""
    me: str = Field(
        default="",
        description="Name of the node that answers; empty while it is not in the cluster",
    )
    nodes: list[ClusterNode] = []
    cells: list[ClusterCell] = []
    moving: int = Field(default=0, description="Cells that are not yet at their planned owner")
    place: QueuePlace | None = Field(default=None, description="Of the requested queue")


class ClusterQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queue: str = Field(
        default="", description="Show which node owns this queue, even if it does not exist"
    )


@router.get("/cluster", response_model=Cluster, responses=error_responses())
async def show_cluster(request: Request, query: Annotated[ClusterQuery, Query()]) -> Cluster:
    """The nodes, the cells of queues and sessions, and the current and planned owner of each."""
    directory: Directory | None = request.app.state.directory
    if directory is None:
        return Cluster(enabled=False)
    nodes, cells = directory.node_states(), directory.cell_states()
    place = None
    if query.queue:
        name = parse_queue_name(query.queue)
        cell = directory.cell_of_queue(name)
        place = QueuePlace(queue=name, cell=cell, node=cells[cell].node)
    return Cluster(
        enabled=True,
        name=directory.name,
        me=directory.node_name,
        nodes=[
            ClusterNode(
                id=one.node.id,
                name=one.node.name,
                started_at=one.node.started_at,  # type: ignore[arg-type]
                link=one.node.link,
                mqtt=one.node.mqtt,
                http=one.node.http,
                grpc=one.node.grpc,
                cells=one.cells,
                suspected_by=one.suspected_by,
            )
            for one in nodes
        ],
        cells=[ClusterCell(cell=one.cell, node=one.node, wanted=one.planned_node) for one in cells],
        moving=sum(one.is_moving for one in cells),
        place=place,
    )
