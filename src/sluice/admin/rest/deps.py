"""What every route does: see that the caller may, put the question on the desk, show the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from fastapi import Depends, Request, Response
from pydantic import BaseModel, TypeAdapter

from sluice.access.identity import Identity, Role, require
from sluice.admin.loop_bridge import Desk
from sluice.admin.rest.errors import Busy, QueuesDisabled
from sluice.admin.service import AdminService

T = TypeVar("T")

ANSWER_SECONDS: Final = 30.0  # a question that the broker has not answered by then is taken back
IDENTITY: Final = "sluice.identity"  # where the gate leaves who is asking
AGAIN: Final = "sluice.again"  # and how to ask that once more, for answers that last


async def ask(
    request: Request,
    question: Callable[[AdminService], Coroutine[Any, Any, T]],
    seconds: float = ANSWER_SECONDS,
) -> T:
    desk: Desk = request.app.state.desk
    return await ask_desk(desk, question, seconds)


async def ask_desk(
    desk: Desk, question: Callable[[AdminService], Coroutine[Any, Any, T]], seconds: float = ANSWER_SECONDS
) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await desk.ask(question)
    except TimeoutError:
        raise Busy(
            f"the broker has not answered within {seconds:.0f} seconds",
            "Try again. If it stays so, see what loads it: /metrics, and its log",
        ) from None


def caller(request: Request) -> Identity:
    identity: Identity = request.scope[IDENTITY]
    return identity


def needs(role: Role, what: str) -> dict[str, Any]:
    """The arguments of a route that only callers of this role may use."""

    async def check(request: Request) -> None:
        require(caller(request), role, what)

    return {"dependencies": [Depends(check)], "openapi_extra": {"x-role": role.word}}


async def queues_are_on(request: Request) -> None:
    if not request.app.state.queues_enabled:
        raise QueuesDisabled


def show(model: type[BaseModel], view: object, status: int = 200) -> Response:
    """A view as its model, written once: FastAPI would check and copy it again, on every answer."""
    return Response(model.model_validate(view).model_dump_json(), status, media_type="application/json")


def show_all(model: TypeAdapter[Any], views: object) -> Response:
    return Response(
        model.dump_json(model.validate_python(views, from_attributes=True)), media_type="application/json"
    )
