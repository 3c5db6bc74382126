"""Routes about dead letters. `{name}` is the queue that failed, not its dead-letter queue."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator

from sluice.access.identity import Role
from sluice.admin import model
from sluice.admin.queries import MAX_EXAMINED
from sluice.admin.rest.deps import (
    call_service,
    require_queues_enabled,
    requires_role,
    respond,
)
from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.params import IntegerRange, MessageId, QueueName, Timestamp, UnicodeText
from sluice.admin.rest.routes.message_routes import (
    BASE64_SCHEMA,
    MAX_RESPONSE_PAYLOAD_BYTES,
    Bytes,
    payload_bytes_each,
)
from sluice.admin.rest.schemas.json_models import Purged, json_type

router = APIRouter(
    prefix="/api/v1/queues/{name}/dlq",
    dependencies=[Depends(require_queues_enabled)],
    tags=["dead letters"],
)
# Not below `dlq/`: there, every name is the id of a dead letter.
errors_router = APIRouter(
    prefix="/api/v1/queues/{name}/dlq-errors",
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
    error: UnicodeText = Field(
        default="", description="An error as `GET .../dlq-errors` reports it, with its placeholders"
    )

    def to_filter(self) -> model.DeadLetterFilter:
        return model.DeadLetterFilter(
            self.reason, self.group, self.since, self.until, self.contains, self.error
        )


class ErrorsQuery(Filter):
    limit: Annotated[int, IntegerRange(1, MAX_EXAMINED)] = Field(
        default=10_000, description="Count at most this many dead letters, the oldest first"
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
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"not": {"required": ["payload", "payload_base64"]}},
    )

    to_all: StrictBool = Field(
        default=False, description="To every group, not only to the one that failed"
    )
    payload: UnicodeText = Field(
        default="", description="Replaces the payload, as text; not given: unchanged"
    )
    payload_base64: Bytes = Field(
        default=b"", description="The same as base64", json_schema_extra=BASE64_SCHEMA
    )

    @model_validator(mode="after")
    def _one_payload(self) -> RetryOne:
        if {"payload", "payload_base64"} <= self.model_fields_set:
            raise ValueError("has both payload and payload_base64; give one")
        return self

    def edited_payload(self) -> bytes | None:
        if "payload_base64" in self.model_fields_set:
            return self.payload_base64
        return self.payload.encode() if "payload" in self.model_fields_set else None


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
    """Redrive one dead letter to its queue, for the group that failed it; an edited payload
    replaces that of the message, in one step with the removal of the dead letter."""
    chosen = options or RetryOne()
    return await respond(
        request,
        model.Redriven,
        lambda service: service.retry_dead_letter(
            name, message_id, chosen.to_all, chosen.edited_payload()
        ),
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


@errors_router.get(
    "", response_model=json_type(model.DeadLetterErrors), responses=error_responses(404, 409)
)
async def list_errors(
    request: Request, name: QueueName, query: Annotated[ErrorsQuery, Query()]
) -> Response:
    """The dead letters of a queue grouped by error: how many, since when, in which groups."""
    return await respond(
        request,
        model.DeadLetterErrors,
        lambda service: service.dead_letter_errors(name, query.to_filter(), query.limit),
    )
