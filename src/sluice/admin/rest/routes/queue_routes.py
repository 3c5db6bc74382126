"""Routes about queues and their groups: create, show, configure, purge, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from sluice.access.identity import Role
from sluice.admin import model
from sluice.admin.rest.deps import (
    call_service,
    caller,
    render,
    require_queues_enabled,
    requires_role,
    respond,
)
from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.params import (
    TIME_PATTERN,
    DurationRange,
    GroupName,
    IntegerRange,
    QueueName,
    parse_queue_name,
)
from sluice.admin.rest.schemas.config_schema import CHANGES_SCHEMA, CONFIG_SCHEMA
from sluice.admin.rest.schemas.json_models import Purged, json_type
from sluice.units import quote_path_segment

router = APIRouter(prefix="/api/v1/queues", dependencies=[Depends(require_queues_enabled)])

MAX_AGE_SECONDS = 100 * 31_536_000.0
POSITION_PATTERN = rf"^(earliest|latest|[0-9]{{1,18}}|{TIME_PATTERN})$"
ADMIN = Role.ADMIN


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prefix: str = Field(default="", description="Only names with this prefix")
    after: str = Field(
        default="", description="Only names after this one: the last of the previous page"
    )
    limit: Annotated[int, IntegerRange(1, 10_000)] = 1000


class GroupQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    group: str = Field(default="", description="Only findings about this group")


class PurgeQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    older_than: Annotated[float, DurationRange(0, MAX_AGE_SECONDS)] = 0.0
    keep_newest: Annotated[int, IntegerRange(0, 2**53)] = Field(
        default=0, description="Keep this many of the newest messages of the queue"
    )


class NewGroup(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        examples=["workers"],
        json_schema_extra={"minLength": 1, "maxLength": 256, "pattern": "^[^/+#$]+$"},
    )
    start: str = Field(
        default="earliest",
        description="earliest, latest, a sequence, a time (ISO 8601) or @seconds",
        json_schema_extra={"pattern": POSITION_PATTERN.replace("(", "(|", 1)},
    )


class PauseReason(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reason: str = Field(default="", description="Shown wherever the pause is", max_length=1000)


class SeekPosition(BaseModel):
    model_config = ConfigDict(extra="forbid")

    to: str = Field(
        description="earliest, latest, a sequence, a time (ISO 8601) or @seconds",
        examples=["earliest"],
        json_schema_extra={"pattern": POSITION_PATTERN},
    )


@router.get(
    "", tags=["queues"], response_model=json_type(list[model.Queue]), responses=error_responses(409)
)
async def list_queues(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    """All queues, by name."""
    prefix, after = parse_queue_name(query.prefix), parse_queue_name(query.after)
    return await respond(
        request, list[model.Queue], lambda service: service.list_queues(prefix, after, query.limit)
    )


@router.post(
    "",
    tags=["queues"],
    status_code=201,
    response_model=json_type(model.QueueDetail),
    responses=error_responses(408, 409, 413, 415),
    **requires_role(ADMIN, "create queues"),
)
async def create_queue(
    request: Request, config: Annotated[dict[str, Any], Body(), CONFIG_SCHEMA]
) -> Response:
    """Create a queue. Settings that are not given come from its template, or have defaults."""
    detail = await call_service(request, lambda service: service.create_queue(config))
    answer = render(model.QueueDetail, detail, 201)
    answer.headers["Location"] = (
        f"/api/v1/queues/{quote_path_segment(detail.stats.name.replace('/', '$'), '$')}"
    )
    return answer


@router.get(
    "/{name}",
    tags=["queues"],
    response_model=json_type(model.QueueDetail),
    responses=error_responses(404, 409),
)
async def show_queue(request: Request, name: QueueName) -> Response:
    """Counters, configuration, groups and partitions of one queue."""
    return await respond(request, model.QueueDetail, lambda service: service.queue(name))


@router.delete(
    "/{name}",
    tags=["queues"],
    status_code=204,
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(ADMIN, "delete queues"),
)
async def delete_queue(request: Request, name: QueueName) -> Response:
    """Delete a queue and its messages. Its dead letters stay, in their own queue."""
    await call_service(request, lambda service: service.delete_queue(name))
    return Response(status_code=204)


@router.get(
    "/{name}/config",
    tags=["queues"],
    response_model=dict[str, Any],
    responses=error_responses(404, 409),
)
async def show_config(request: Request, name: QueueName) -> dict[str, object]:
    """The complete configuration, with defaults, durations as text."""
    return await call_service(request, lambda service: service.config(name))


@router.put(
    "/{name}/config",
    tags=["queues"],
    response_model=dict[str, Any],
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(ADMIN, "configure queues"),
)
async def configure(
    request: Request, name: QueueName, changes: Annotated[dict[str, Any], Body(), CHANGES_SCHEMA]
) -> dict[str, object]:
    """Change the given settings, atomically. Returns the complete configuration."""
    return await call_service(request, lambda service: service.configure(name, changes))


@router.get(
    "/{name}/stats",
    tags=["queues"],
    response_model=json_type(model.Queue),
    responses=error_responses(404, 409),
)
async def show_stats(request: Request, name: QueueName) -> Response:
    """The counters of one queue."""
    return await respond(request, model.Queue, lambda service: service.stats(name))


@router.get(
    "/{name}/diagnosis",
    tags=["queues"],
    response_model=json_type(model.Diagnosis),
    responses=error_responses(404, 409),
)
async def diagnose(
    request: Request, name: QueueName, query: Annotated[GroupQuery, Query()]
) -> Response:
    """Why nothing arrives: the cause, and what helps."""
    return await respond(
        request, model.Diagnosis, lambda service: service.diagnose(name, query.group)
    )


@router.post(
    "/{name}/purge",
    tags=["queues"],
    response_model=Purged,
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "purge queues"),
)
async def purge_queue(
    request: Request, name: QueueName, query: Annotated[PurgeQuery, Query()]
) -> Purged:
    """Delete messages that no consumer holds: all, or those that are old enough."""
    older_than, keep_newest = query.older_than, query.keep_newest
    return Purged(
        purged=await call_service(
            request, lambda service: service.purge(name, older_than, keep_newest)
        )
    )


@router.post(
    "/{name}/pause",
    tags=["queues"],
    response_model=json_type(model.Queue),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "pause queues"),
)
async def pause_queue(request: Request, name: QueueName, pause: PauseReason) -> Response:
    """Deliver nothing more to any group. Publishes and settlements go on."""
    by = caller(request).name
    return await respond(
        request, model.Queue, lambda service: service.pause_queue(name, by, pause.reason)
    )


@router.post(
    "/{name}/resume",
    tags=["queues"],
    response_model=json_type(model.Queue),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "resume queues"),
)
async def resume_queue(request: Request, name: QueueName) -> Response:
    """End the pause of a queue. A group that was paused by itself stays paused."""
    return await respond(request, model.Queue, lambda service: service.resume_queue(name))


@router.get(
    "/{name}/consumers",
    tags=["groups"],
    response_model=json_type(list[model.Consumer]),
    responses=error_responses(404, 409),
)
async def list_consumers(request: Request, name: QueueName) -> Response:
    """The consumers of all groups."""
    return await respond(request, list[model.Consumer], lambda service: service.consumers(name))


@router.get(
    "/{name}/groups",
    tags=["groups"],
    response_model=json_type(list[model.Group]),
    responses=error_responses(404, 409),
)
async def list_groups(request: Request, name: QueueName) -> Response:
    """The consumer groups, by name."""
    return await respond(request, list[model.Group], lambda service: service.groups(name))


@router.post(
    "/{name}/groups",
    tags=["groups"],
    status_code=201,
    response_model=json_type(model.Group),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(ADMIN, "create groups"),
)
async def create_group(request: Request, name: QueueName, group: NewGroup) -> Response:
    """Create a group before its first consumer: messages are stored for it from `start` on."""
    return await respond(
        request,
        model.Group,
        lambda service: service.create_group(name, group.name, group.start),
        201,
    )


@router.get(
    "/{name}/groups/{group}",
    tags=["groups"],
    response_model=json_type(model.Group),
    responses=error_responses(404, 409),
)
async def show_group(request: Request, name: QueueName, group: GroupName) -> Response:
    """One group: its lag, its ledger, its consumers."""
    return await respond(request, model.Group, lambda service: service.group(name, group))


@router.delete(
    "/{name}/groups/{group}",
    tags=["groups"],
    status_code=204,
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(ADMIN, "delete groups"),
)
async def delete_group(request: Request, name: QueueName, group: GroupName) -> Response:
    """Delete a group that has no consumers. Its unsettled messages are no longer stored for it."""
    await call_service(request, lambda service: service.delete_group(name, group))
    return Response(status_code=204)


@router.post(
    "/{name}/groups/{group}/seek",
    tags=["groups"],
    response_model=json_type(model.Group),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "move groups"),
)
async def seek(
    request: Request, name: QueueName, group: GroupName, position: SeekPosition
) -> Response:
    """Move a group: back to deliver stored messages again, forward to skip."""
    return await respond(
        request, model.Group, lambda service: service.seek(name, group, position.to)
    )


@router.post(
    "/{name}/groups/{group}/pause",
    tags=["groups"],
    response_model=json_type(model.Group),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "pause groups"),
)
async def pause_group(
    request: Request, name: QueueName, group: GroupName, pause: PauseReason
) -> Response:
    """Deliver nothing more to one group. Its deliveries in flight can be settled."""
    by = caller(request).name
    return await respond(
        request, model.Group, lambda service: service.pause_group(name, group, by, pause.reason)
    )


@router.post(
    "/{name}/groups/{group}/resume",
    tags=["groups"],
    response_model=json_type(model.Group),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "resume groups"),
)
async def resume_group(request: Request, name: QueueName, group: GroupName) -> Response:
    """End the pause of a group."""
    return await respond(request, model.Group, lambda service: service.resume_group(name, group))
