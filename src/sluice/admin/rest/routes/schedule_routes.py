"""Routes about schedules: recurring publishes to a queue."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi import Path as PathParam
from pydantic import BeforeValidator, Field

from sluice.access.identity import Role
from sluice.admin import model
from sluice.admin.rest.deps import (
    call_service,
    caller,
    require_queues_enabled,
    requires_role,
    respond,
)
from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.params import QueueName, UnicodeText, decode_segment
from sluice.admin.rest.routes.message_routes import Publish
from sluice.admin.rest.routes.queue_routes import PauseReason
from sluice.admin.rest.schemas.json_models import json_type

router = APIRouter(
    prefix="/api/v1", dependencies=[Depends(require_queues_enabled)], tags=["schedules"]
)

ScheduleName = Annotated[
    str,
    BeforeValidator(decode_segment),
    PathParam(description="Name of the schedule", examples=["nightly"]),
]


class ScheduleChange(Publish):
    """When a schedule ticks, and the message that each tick publishes."""

    cron: UnicodeText = Field(
        default="", description="Five fields; or give `every`", examples=["30 2 * * *"]
    )
    every: UnicodeText = Field(default="", description="Interval, such as 15m; or give `cron`")
    time_zone: UnicodeText = Field(default="", description="Of `cron`, such as Europe/Berlin; UTC")
    jitter: UnicodeText = Field(default="", description="Largest delay of a tick, such as 30s")
    missed: UnicodeText = Field(
        default="skip",
        description="What happens to ticks while the broker is down: skip, once, all",
    )

    def to_schedule(self, name: str) -> model.NewSchedule:
        return model.NewSchedule(
            name,
            self.to_outgoing_message(),
            self.cron,
            self.every,
            self.time_zone,
            self.jitter,
            self.missed,
        )


class ScheduleBody(ScheduleChange):
    """A new schedule."""

    name: UnicodeText = Field(description="Its name", examples=["nightly"])


@router.get(
    "/schedules", response_model=json_type(list[model.Schedule]), responses=error_responses()
)
async def list_all(request: Request) -> Response:
    """All schedules, with the next and the last five runs of each."""
    return await respond(request, list[model.Schedule], lambda service: service.schedules())


@router.get(
    "/queues/{name}/schedules",
    response_model=json_type(list[model.Schedule]),
    responses=error_responses(),
)
async def list_schedules(request: Request, name: QueueName) -> Response:
    """The schedules of a queue."""
    return await respond(request, list[model.Schedule], lambda service: service.schedules(name))


@router.post(
    "/queues/{name}/schedules",
    status_code=201,
    response_model=json_type(model.Schedule),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "add schedules"),
)
async def add_schedule(request: Request, name: QueueName, body: ScheduleBody) -> Response:
    """Add a schedule. Its first tick is after now; the queue is created by it if necessary."""
    by = caller(request).name
    given = body.to_schedule(body.name)
    return await respond(
        request,
        model.Schedule,
        lambda service: service.store_schedule(name, given, by, False),
        201,
    )


@router.get(
    "/queues/{name}/schedules/{schedule}",
    response_model=json_type(model.Schedule),
    responses=error_responses(404),
)
async def show_schedule(request: Request, name: QueueName, schedule: ScheduleName) -> Response:
    """One schedule."""
    return await respond(request, model.Schedule, lambda service: service.schedule(name, schedule))


@router.put(
    "/queues/{name}/schedules/{schedule}",
    response_model=json_type(model.Schedule),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "change schedules"),
)
async def replace_schedule(
    request: Request, name: QueueName, schedule: ScheduleName, body: ScheduleChange
) -> Response:
    """Give a schedule other times and another message; its pause and its last runs stay."""
    by = caller(request).name
    given = body.to_schedule(schedule)
    return await respond(
        request, model.Schedule, lambda service: service.store_schedule(name, given, by, True)
    )


@router.delete(
    "/queues/{name}/schedules/{schedule}",
    status_code=204,
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "remove schedules"),
)
async def remove_schedule(request: Request, name: QueueName, schedule: ScheduleName) -> Response:
    """Remove a schedule. Messages that it has published stay."""
    await call_service(request, lambda service: service.remove_schedule(name, schedule))
    return Response(status_code=204)


@router.post(
    "/queues/{name}/schedules/{schedule}/pause",
    response_model=json_type(model.Schedule),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "pause schedules"),
)
async def pause_schedule(
    request: Request, name: QueueName, schedule: ScheduleName, pause: PauseReason
) -> Response:
    """Let a schedule tick no more, until it is resumed."""
    by = caller(request).name
    return await respond(
        request,
        model.Schedule,
        lambda service: service.pause_schedule(name, schedule, by, pause.reason),
    )


@router.post(
    "/queues/{name}/schedules/{schedule}/resume",
    response_model=json_type(model.Schedule),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "resume schedules"),
)
async def resume_schedule(request: Request, name: QueueName, schedule: ScheduleName) -> Response:
    """End the pause of a schedule. Ticks of the pause were not missed: there were none."""
    return await respond(
        request, model.Schedule, lambda service: service.resume_schedule(name, schedule)
    )


@router.post(
    "/queues/{name}/schedules/{schedule}/run",
    response_model=json_type(model.ScheduleRun),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "run schedules"),
)
async def run_schedule(request: Request, name: QueueName, schedule: ScheduleName) -> Response:
    """Publish the message of a schedule now, also while it is paused. Its ticks do not change."""
    return await respond(
        request, model.ScheduleRun, lambda service: service.run_schedule(name, schedule)
    )
