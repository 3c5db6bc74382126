"""The route that shows the cluster: nodes, cells, their owners and their targets."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from sluice.admin import model
from sluice.admin.queries import build_cluster
from sluice.admin.rest.deps import render
from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.params import parse_queue_name
from sluice.admin.rest.schemas.json_models import json_type

router = APIRouter(prefix="/api/v1", tags=["node"])


class ClusterQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queue: str = Field(
        default="", description="Show which node owns this queue, even if it does not exist"
    )


@router.get("/cluster", response_model=json_type(model.Cluster), responses=error_responses())
async def show_cluster(request: Request, query: Annotated[ClusterQuery, Query()]) -> Response:
    """The nodes, the cells of queues and sessions, and the current and planned owner of each."""
    queue = parse_queue_name(query.queue) if query.queue else ""
    return render(model.Cluster, build_cluster(request.app.state.directory, queue))
