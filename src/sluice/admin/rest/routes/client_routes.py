"""Routes about clients: list them, show one, end a connection or a session."""

from __future__ import annotations

import logging
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from sluice.access.identity import Role
from sluice.admin import model
from sluice.admin.rest.deps import call_service, caller, render, requires_role, respond
from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.params import IntegerRange
from sluice.admin.rest.routes.owner_routes import ClientId
from sluice.admin.rest.schemas.json_models import json_type

log = logging.getLogger(__name__)

router = APIRouter(prefix="/api/v1/clients", tags=["clients"])

_IS_CONNECTED: Final = {"": None, "connected": True, "disconnected": False}


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prefix: str = Field(default="", description="Only client ids with this prefix")
    state: Literal["", "connected", "disconnected"] = Field(
        default="", description="Only clients in this state"
    )
    user: str = Field(default="", description="Only clients of this user")
    after: str = Field(
        default="", description="Only client ids after this one: the last of the previous page"
    )
    limit: Annotated[int, IntegerRange(1, 10_000)] = 1000


class KickQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    end_session: bool = Field(
        default=False,
        description="Delete its session as well, with subscriptions and pending messages",
    )


@router.get("", response_model=json_type(list[model.Client]), responses=error_responses())
async def list_clients(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    """Connected clients and persistent sessions, by client id."""
    return await respond(
        request,
        list[model.Client],
        lambda service: service.clients(
            query.prefix, query.after, query.limit, _IS_CONNECTED[query.state], query.user
        ),
    )


@router.get(
    "/{client}", response_model=json_type(model.ClientDetail), responses=error_responses(404)
)
async def show_client(request: Request, client: ClientId) -> Response:
    """One client with its subscriptions and the queues that it consumes."""
    return await respond(request, model.ClientDetail, lambda service: service.client(client))


@router.delete(
    "/{client}",
    response_model=json_type(model.Kicked),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "end connections of clients"),
)
async def kick_client(
    request: Request, client: ClientId, query: Annotated[KickQuery, Query()]
) -> Response:
    """End the connection of a client. It may connect again; its session survives as usual."""
    done = await call_service(
        request, lambda service: service.kick_client(client, query.end_session)
    )
    log.info(
        "client kicked",
        extra={
            "client": client,
            "session_ended": done.session_ended,
            "by": caller(request).name,
        },
    )
    return render(model.Kicked, done)
