"""Routes about dead letters. `{name}` is the queue that failed, not the queue its dead letters are in."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StrictBool

from sluice.access.identity import Role
from sluice.admin.rest.deps import ask, needs, queues_are_on, show, show_all
from sluice.admin.rest.routes.message_routes import ANSWER_BYTES, share
from sluice.admin.rest.models import MESSAGES, Message, Purged, Redriven
from sluice.admin.rest.errors import answers
from sluice.admin.rest.params import MessageId, Moment, QueueName, Whole, WholeText
from sluice.admin.views import LetterFilter

router = APIRouter(
    prefix="/api/v1/queues/{name}/dlq", dependencies=[Depends(queues_are_on)], tags=["dead letters"]
)
OPERATOR = Role.OPERATOR


class Filter(BaseModel):
    """Which dead letters; what is not given does not matter."""

    model_config = ConfigDict(extra="forbid")

    reason: WholeText = Field(default="", description="max_retries, timeout, rejected, expired or overflow")
    group: WholeText = Field(default="", description="The group that failed")
    since: Annotated[float, Moment()] = Field(
        default="", validate_default=True, description="Dead at or after this time"
    )
    until: Annotated[float, Moment()] = Field(
        default="", validate_default=True, description="Dead before this time"
    )
    contains: WholeText = Field(default="", description="Text in the payload")

    def wanted(self) -> LetterFilter:
        return LetterFilter(self.reason, self.group, self.since, self.until, self.contains)


class ListQuery(Filter):
    after: str = Field(default="", description="Behind this letter: the last id of the page before")
    limit: Annotated[int, Whole(1, 1000)] = 50
    payload_bytes: Annotated[int, Whole(0, ANSWER_BYTES)] = Field(
        default=65_536, description="Cut each payload to so much; at most 16 MiB in one answer"
    )


class RetryOne(BaseModel):
    model_config = ConfigDict(extra="forbid")

    to_all: StrictBool = Field(default=False, description="To every group, not only to the one that failed")


class RetryMany(Filter):
    limit: Annotated[int, Whole(1, 100_000)] = 1000
    to_all: StrictBool = Field(default=False, description="To every group, not only to the one that failed")


@router.get("", response_model=list[Message], responses=answers(404, 409))
async def list_letters(request: Request, name: QueueName, query: Annotated[ListQuery, Query()]) -> Response:
    """The dead letters of a queue, oldest first."""
    found = await ask(
        request,
        lambda service: service.dead_letters(
            name, query.wanted(), query.after, query.limit, share(query.payload_bytes, query.limit)
        ),
    )
    return show_all(MESSAGES, found)


@router.get("/{message_id}", response_model=Message, responses=answers(404, 409))
async def show_letter(request: Request, name: QueueName, message_id: MessageId) -> Response:
    """One dead letter, by its own id or by the id of the message that died."""
    return show(Message, await ask(request, lambda service: service.dead_letter(name, message_id)))


@router.delete(
    "/{message_id}",
    status_code=204,
    responses=answers(404, 408, 409, 413, 415),
    **needs(OPERATOR, "delete dead letters"),
)
async def delete_letter(request: Request, name: QueueName, message_id: MessageId) -> Response:
    """Throw one dead letter away."""
    await ask(request, lambda service: service.delete_dead_letter(name, message_id))
    return Response(status_code=204)


@router.post(
    "/{message_id}/retry",
    response_model=Redriven,
    responses=answers(404, 408, 409, 413, 415),
    **needs(OPERATOR, "retry dead letters"),
)
async def retry_letter(
    request: Request, name: QueueName, message_id: MessageId, how: RetryOne | None = None
) -> Response:
    """Put one dead letter back into its queue, for the group that failed it."""
    to_all = how is not None and how.to_all
    return show(
        Redriven, await ask(request, lambda service: service.retry_dead_letter(name, message_id, to_all))
    )


@router.post(
    "/retry",
    response_model=Redriven,
    responses=answers(404, 408, 409, 413, 415),
    **needs(OPERATOR, "retry dead letters"),
)
async def retry_letters(request: Request, name: QueueName, which: RetryMany | None = None) -> Response:
    """Put back the dead letters that match, the oldest first."""
    told = which or RetryMany()
    return show(
        Redriven,
        await ask(
            request,
            lambda service: service.retry_dead_letters(name, told.wanted(), told.limit, told.to_all),
        ),
    )


@router.post(
    "/purge",
    response_model=Purged,
    responses=answers(404, 408, 409, 413, 415),
    **needs(OPERATOR, "purge dead letters"),
)
async def purge_letters(request: Request, name: QueueName, which: Filter | None = None) -> Purged:
    """Throw away the dead letters that match."""
    wanted = (which or Filter()).wanted()
    return Purged(purged=await ask(request, lambda service: service.purge_dead_letters(name, wanted)))
