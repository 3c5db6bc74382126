"""Routes about exclusive queues: list, inspect and purge them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sluice.access.identity import Role
from sluice.admin import model
from sluice.admin.rest.deps import (
    call_service,
    require_queues_enabled,
    requires_role,
    respond,
)
from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.params import IntegerRange, decode_segment
from sluice.admin.rest.routes.message_routes import MAX_RESPONSE_PAYLOAD_BYTES, payload_bytes_each
from sluice.admin.rest.schemas.json_models import Purged, json_type

router = APIRouter(
    prefix="/api/v1/ecq", dependencies=[Depends(require_queues_enabled)], tags=["exclusive queues"]
)

ClientId = Annotated[
    str,
    BeforeValidator(decode_segment),
    Path(description="Client id of the owner", examples=["car-1"]),
]


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prefix: str = Field(default="", description="Only client ids with this prefix")
    after: str = Field(
        default="", description="Only client ids after this one: the last of the previous page"
    )
    limit: Annotated[int, IntegerRange(1, 10_000)] = 1000


class PeekQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    start: Annotated[int, IntegerRange(0, 2**53)] = Field(
        default=0, description="Sequence to begin at"
    )
    limit: Annotated[int, IntegerRange(1, 1000)] = 50
    payload_bytes: Annotated[int, IntegerRange(0, MAX_RESPONSE_PAYLOAD_BYTES)] = Field(
        default=65_536, description="Cut each payload to this size; at most 16 MiB per response"
    )


@router.get("", response_model=json_type(list[model.Owner]), responses=error_responses(409))
async def list_owners(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    """Owners of exclusive queues, by client id, with depth and acknowledged sequence."""
    return await respond(
        request,
        list[model.Owner],
        lambda service: service.owners(query.prefix, query.after, query.limit),
    )


@router.get("/{client}", response_model=json_type(model.Owner), responses=error_responses(404, 409))
async def show_owner(request: Request, client: ClientId) -> Response:
    """One owner."""
    return await respond(request, model.Owner, lambda service: service.owner(client))


@router.get(
    "/{client}/values",
    response_model=json_type(list[model.Message]),
    responses=error_responses(404, 409),
)
async def peek_owner(
    request: Request, client: ClientId, query: Annotated[PeekQuery, Query()]
) -> Response:
    """The last value of each key, oldest first. Takes nothing; removes expired values."""
    size = payload_bytes_each(query.payload_bytes, query.limit)
    return await respond(
        request,
        list[model.Message],
        lambda service: service.peek_owner(client, query.start, query.limit, size),
    )


@router.post(
    "/{client}/purge",
    response_model=Purged,
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "purge queues"),
)
async def purge_owner(request: Request, client: ClientId) -> Purged:
    """Delete every value. The sequence continues."""
    return Purged(purged=await call_service(request, lambda service: service.purge_owner(client)))
