"""Routes about queues and their groups: make, look, change, empty, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from sluice.access.identity import Role
from sluice.admin.rest.deps import ask, needs, queues_are_on, show, show_all
from sluice.admin.rest.config_schema import CHANGES, CONFIG
from sluice.admin.rest.models import (
    CONSUMERS,
    GROUPS,
    QUEUES,
    Consumer,
    Diagnosis,
    Group,
    Purged,
    Queue,
    QueueDetail,
)
from sluice.admin.rest.errors import answers
from sluice.admin.rest.params import TIME_PATTERN, GroupName, QueueName, Whole, plain_name
from sluice.units import path_segment

router = APIRouter(prefix="/api/v1/queues", dependencies=[Depends(queues_are_on)])

PLACE = rf"^(earliest|latest|[0-9]{{1,18}}|{TIME_PATTERN})$"
ADMIN = Role.ADMIN


class ListQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prefix: str = Field(default="", description="Only names that begin so")
    after: str = Field(default="", description="Only names behind this one: the last of the page before")
    limit: Annotated[int, Whole(1, 10_000)] = 1000


class GroupQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    group: str = Field(default="", description="Only as far as it concerns this group")


class NewGroup(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        examples=["workers"],
        json_schema_extra={"minLength": 1, "maxLength": 256, "pattern": "^[^/+#$]+$"},
    )
    start: str = Field(
        default="earliest",
        description="earliest, latest, a sequence, a time (ISO 8601) or @seconds",
        json_schema_extra={"pattern": PLACE.replace("(", "(|", 1)},
    )


class Place(BaseModel):
    model_config = ConfigDict(extra="forbid")

    to: str = Field(
        description="earliest, latest, a sequence, a time (ISO 8601) or @seconds",
        examples=["earliest"],
        json_schema_extra={"pattern": PLACE},
    )


@router.get("", tags=["queues"], response_model=list[Queue], responses=answers(409))
async def list_queues(request: Request, query: Annotated[ListQuery, Query()]) -> Response:
    """All queues, by name."""
    prefix, after = plain_name(query.prefix), plain_name(query.after)
    return show_all(
        QUEUES, await ask(request, lambda service: service.list_queues(prefix, after, query.limit))
    )


@router.post(
    "",
    tags=["queues"],
    status_code=201,
    response_model=QueueDetail,
    responses=answers(408, 409, 413, 415),
    **needs(ADMIN, "create queues"),
)
async def create_queue(request: Request, config: Annotated[dict[str, Any], Body(), CONFIG]) -> Response:
    """Make a queue. What is not given has its default."""
    detail = await ask(request, lambda service: service.create_queue(config))
    answer = show(QueueDetail, detail, 201)
    answer.headers["Location"] = f"/api/v1/queues/{path_segment(detail.stats.name.replace('/', '$'), '$')}"
    return answer


@router.get("/{name}", tags=["queues"], response_model=QueueDetail, responses=answers(404, 409))
async def show_queue(request: Request, name: QueueName) -> Response:
    """Figures, configuration, groups and partitions of one queue."""
    return show(QueueDetail, await ask(request, lambda service: service.queue(name)))


@router.delete(
    "/{name}",
    tags=["queues"],
    status_code=204,
    responses=answers(404, 408, 409, 413, 415),
    **needs(ADMIN, "delete queues"),
)
async def delete_queue(request: Request, name: QueueName) -> Response:
    """Delete a queue and everything in it. Its dead letters stay, in their own queue."""
    await ask(request, lambda service: service.delete_queue(name))
    return Response(status_code=204)


@router.get("/{name}/config", tags=["queues"], response_model=dict[str, Any], responses=answers(404, 409))
async def show_config(request: Request, name: QueueName) -> dict[str, object]:
    """The whole configuration, with defaults, durations as text."""
    return await ask(request, lambda service: service.config(name))


@router.put(
    "/{name}/config",
    tags=["queues"],
    response_model=dict[str, Any],
    responses=answers(404, 408, 409, 413, 415),
    **needs(ADMIN, "configure queues"),
)
async def configure(
    request: Request, name: QueueName, changes: Annotated[dict[str, Any], Body(), CHANGES]
) -> dict[str, object]:
    """Change what is given, at once, and keep the rest. Answers the whole configuration after it."""
    return await ask(request, lambda service: service.configure(name, changes))


@router.get("/{name}/stats", tags=["queues"], response_model=Queue, responses=answers(404, 409))
async def show_stats(request: Request, name: QueueName) -> Response:
    """The figures of one queue."""
    return show(Queue, await ask(request, lambda service: service.stats(name)))


@router.get("/{name}/diagnosis", tags=["queues"], response_model=Diagnosis, responses=answers(404, 409))
async def diagnose(request: Request, name: QueueName, query: Annotated[GroupQuery, Query()]) -> Response:
    """Why nothing arrives: the first true reason, and what helps."""
    return show(Diagnosis, await ask(request, lambda service: service.diagnose(name, query.group)))


@router.post(
    "/{name}/purge",
    tags=["queues"],
    response_model=Purged,
    responses=answers(404, 408, 409, 413, 415),
    **needs(Role.OPERATOR, "purge queues"),
)
async def purge_queue(request: Request, name: QueueName) -> Purged:
    """Throw away every message that nobody works on."""
    return Purged(purged=await ask(request, lambda service: service.purge(name)))


@router.get("/{name}/consumers", tags=["groups"], response_model=list[Consumer], responses=answers(404, 409))
async def list_consumers(request: Request, name: QueueName) -> Response:
    """Who consumes, in all groups."""
    return show_all(CONSUMERS, await ask(request, lambda service: service.consumers(name)))


@router.get("/{name}/groups", tags=["groups"], response_model=list[Group], responses=answers(404, 409))
async def list_groups(request: Request, name: QueueName) -> Response:
    """Its consumer groups, by name."""
    return show_all(GROUPS, await ask(request, lambda service: service.groups(name)))


@router.post(
    "/{name}/groups",
    tags=["groups"],
    status_code=201,
    response_model=Group,
    responses=answers(404, 408, 409, 413, 415),
    **needs(ADMIN, "create groups"),
)
async def create_group(request: Request, name: QueueName, group: NewGroup) -> Response:
    """Make a group before its first consumer comes: messages are kept for it from `start` on."""
    made = await ask(request, lambda service: service.create_group(name, group.name, group.start))
    return show(Group, made, 201)


@router.get("/{name}/groups/{group}", tags=["groups"], response_model=Group, responses=answers(404, 409))
async def show_group(request: Request, name: QueueName, group: GroupName) -> Response:
    """One group: its lag, its books, its consumers."""
    return show(Group, await ask(request, lambda service: service.group(name, group)))


@router.delete(
    "/{name}/groups/{group}",
    tags=["groups"],
    status_code=204,
    responses=answers(404, 408, 409, 413, 415),
    **needs(ADMIN, "delete groups"),
)
async def delete_group(request: Request, name: QueueName, group: GroupName) -> Response:
    """Delete a group that has no consumers. What it had not settled is no longer kept for it."""
    await ask(request, lambda service: service.delete_group(name, group))
    return Response(status_code=204)


@router.post(
    "/{name}/groups/{group}/seek",
    tags=["groups"],
    response_model=Group,
    responses=answers(404, 408, 409, 413, 415),
    **needs(Role.OPERATOR, "move groups"),
)
async def seek(request: Request, name: QueueName, group: GroupName, place: Place) -> Response:
    """Send a group to another place: back to deliver again what is kept, forward to skip."""
    return show(Group, await ask(request, lambda service: service.seek(name, group, place.to)))
