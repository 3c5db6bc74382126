"""Routes about dead letters. `{name}` is the queue that failed, not its dead-letter queue."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from sluice.access.identity import Role
from sluice.admin import model
from sluice.admin.rest.deps import (
    call_service,
    require_queues_enabled,
    requires_role,
    respond,
)
from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.json_models import Purged, json_type
from sluice.admin.rest.params import IntegerRange, MessageId, QueueName, Timestamp, UnicodeText
from sluice.admin.rest.routes.message_routes import MAX_RESPONSE_PAYLOAD_BYTES, payload_bytes_each

router = APIRouter(
    prefix="/api/v1/queues/{name}/dlq",
    dependencies=[Depends(require_queues_enabled)],
    tags=["dead letters"],
)
OPERATOR = Role.OPERATOR


class Filter(BaseModel):
    """A selection of dead letters; fields that are not given match all."""

    model_config = ConfigDict(extra="forbid")

    reason: UnicodeText = Field(
        default="", description="max_retries, timeout, rejected, expired or overflow"
    )
    group: UnicodeText = Field(default="", description="The group that failed")
    since: Annotated[float, Timestamp()] = Field(
        default="", validate_default=True, description="Dead-lettered at or after this time"
    )
    until: Annotated[float, Timestamp()] = Field(
        default="", validate_default=True, description="Dead-lettered before this time"
    )
    contains: UnicodeText = Field(default="", description="Text in the payload")

    def to_filter(self) -> model.DeadLetterFilter:
        return model.DeadLetterFilter(
            self.reason, self.group, self.since, self.until, self.contains
        )


class ListQuery(Filter):
    after: str = Field(
        default="", description="After this dead letter: the last id of the previous page"
    )
    limit: Annotated[int, IntegerRange(1, 1000)] = 50
    payload_bytes: Annotated[int, IntegerRange(0, MAX_RESPONSE_PAYLOAD_BYTES)] = Field(
        default=65_536, description="Cut each payload to this size; at most 16 MiB per response"
    )


class RetryOne(BaseModel):
    model_config = ConfigDict(extra="forbid")

    to_all: StrictBool = Field(
        default=False, description="To every group, not only to the one that failed"
    )


class RetryMany(Filter):
    limit: Annotated[int, IntegerRange(1, 100_000)] = 1000
    to_all: StrictBool = Field(
        default=False, description="To every group, not only to the one that failed"
    )


@router.get("", response_model=json_type(list[model.Message]), responses=error_responses(404, 409))
async def list_dead_letters(
    request: Request, name: QueueName, query: Annotated[ListQuery, Query()]
) -> Response:
    """The dead letters of a queue, oldest first."""
    return await respond(
        request,
        list[model.Message],
        lambda service: service.dead_letters(
            name,
            query.to_filter(),
            query.after,
            query.limit,
            payload_bytes_each(query.payload_bytes, query.limit),
        ),
    )


@router.get(
    "/{message_id}", response_model=json_type(model.Message), responses=error_responses(404, 409)
)
async def show_dead_letter(request: Request, name: QueueName, message_id: MessageId) -> Response:
    """One dead letter, by its own id or by the id of the original message."""
    return await respond(
        request, model.Message, lambda service: service.dead_letter(name, message_id)
    )


@router.delete(
    "/{message_id}",
    status_code=204,
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(OPERATOR, "delete dead letters"),
)
async def delete_dead_letter(request: Request, name: QueueName, message_id: MessageId) -> Response:
    """Delete one dead letter."""
    await call_service(request, lambda service: service.delete_dead_letter(name, message_id))
    return Response(status_code=204)


@router.post(
    "/{message_id}/retry",
    response_model=json_type(model.Redriven),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(OPERATOR, "retry dead letters"),
)
async def retry_dead_letter(
    request: Request, name: QueueName, message_id: MessageId, options: RetryOne | None = None
) -> Response:
    """Redrive one dead letter to its queue, for the group that failed it."""
    to_all = options is not None and options.to_all
    return await respond(
        request, model.Redriven, lambda service: service.retry_dead_letter(name, message_id, to_all)
    )


@router.post(
    "/retry",
    response_model=json_type(model.Redriven),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(OPERATOR, "retry dead letters"),
)
async def retry_dead_letters(
    request: Request, name: QueueName, selection: RetryMany | None = None
) -> Response:
    """Redrive the matching dead letters, oldest first."""
    body = selection or RetryMany()
    return await respond(
        request,
        model.Redriven,
        lambda service: service.retry_dead_letters(name, body.to_filter(), body.limit, body.to_all),
    )


@router.post(
    "/purge",
    response_model=Purged,
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(OPERATOR, "purge dead letters"),
)
async def purge_dead_letters(
    request: Request, name: QueueName, selection: Filter | None = None
) -> Purged:
    """Delete the matching dead letters."""
    criteria = (selection or Filter()).to_filter()
    return Purged(
        purged=await call_service(
            request, lambda service: service.purge_dead_letters(name, criteria)
        )
    )
