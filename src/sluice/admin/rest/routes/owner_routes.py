"""Routes about exclusive compacted queues: who owns one, what is kept, and away with it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from sluice.access.identity import Role
from sluice.admin.rest.deps import ask, needs, queues_are_on, show, show_all
from sluice.admin.rest.routes.message_routes import ANSWER_BYTES, share
from sluice.admin.rest.models import MESSAGES, OWNERS, Message, Owner, Purged
from sluice.admin.rest.errors import answers
from sluice.admin.rest.params import Whole, whole_segment

router = APIRouter(prefix="/api/v1/ecq", dependencies=[Depends(queues_are_on)], tags=["exclusive queues"])

ClientId = Annotated[
    str, BeforeValidator(whole_segment), Path(description="Client id of the owner", examples=["car-1"])
]


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prefix: str = Field(default="", description="Only client ids that begin so")
    after: str = Field(default="", description="Only client ids behind this one: the last of the page before")
    limit: Annotated[int, Whole(1, 10_000)] = 1000


class PeekQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    start: Annotated[int, Whole(0, 2**53)] = Field(default=0, description="Sequence to begin at")
    limit: Annotated[int, Whole(1, 1000)] = 50
    payload_bytes: Annotated[int, Whole(0, ANSWER_BYTES)] = Field(
        default=65_536, description="Cut each payload to so much; at most 16 MiB in one answer"
    )


@router.get("", response_model=list[Owner], responses=answers(409))
async def list_owners(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    """Owners of exclusive queues, by client id: how much waits for each, and how far it has come."""
    return show_all(
        OWNERS,
        await ask(request, lambda service: service.owners(query.prefix, query.after, query.limit)),
    )


@router.get("/{client}", response_model=Owner, responses=answers(404, 409))
async def show_owner(request: Request, client: ClientId) -> Response:
    """One owner."""
    return show(Owner, await ask(request, lambda service: service.owner(client)))


@router.get("/{client}/values", response_model=list[Message], responses=answers(404, 409))
async def peek_owner(request: Request, client: ClientId, query: Annotated[PeekQuery, Query()]) -> Response:
    """The last value of each key, oldest first. Nothing is taken; what has expired goes."""
    size = share(query.payload_bytes, query.limit)
    return show_all(
        MESSAGES,
        await ask(request, lambda service: service.peek_owner(client, query.start, query.limit, size)),
    )


@router.post(
    "/{client}/purge",
    response_model=Purged,
    responses=answers(404, 408, 409, 413, 415),
    **needs(Role.OPERATOR, "purge queues"),
)
async def purge_owner(request: Request, client: ClientId) -> Purged:
    """Throw away every value. Sequences go on where they were."""
    return Purged(purged=await ask(request, lambda service: service.purge_owner(client)))
