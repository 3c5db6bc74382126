"""What all routes share: check the caller's role, call the service, render the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute

from sluice.access.identity import Identity, Role, require_role
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.rest.errors import Busy, InvalidRequest, QueuesDisabled
from sluice.admin.rest.schemas.json_models import to_json
from sluice.admin.service import AdminService

T = TypeVar("T")

# A call that the broker has not answered by then is cancelled.
ANSWER_TIMEOUT_SECONDS: Final = 30.0
IDENTITY_KEY: Final = "sluice.identity"  # scope key of the authenticated caller
REAUTHENTICATE_KEY: Final = "sluice.again"  # scope key of a function that checks the caller again


async def call_service(
    request: Request,
    operation: Callable[[AdminService], Coroutine[Any, Any, T]],
    timeout_seconds: float = ANSWER_TIMEOUT_SECONDS,
) -> T:
    bridge: LoopBridge = request.app.state.bridge
    return await call_bridge(bridge, operation, timeout_seconds)


async def call_bridge(
    bridge: LoopBridge,
    operation: Callable[[AdminService], Coroutine[Any, Any, T]],
    timeout_seconds: float = ANSWER_TIMEOUT_SECONDS,
) -> T:
    try:
        async with asyncio.timeout(timeout_seconds):
            return await bridge.call(operation)
    except TimeoutError:
        raise Busy(
            f"the broker has not answered within {timeout_seconds:.0f} seconds",
            "Try again. If it persists, find what loads the broker: /metrics and its log",
        ) from None


def caller(request: Request) -> Identity:
    identity: Identity = request.scope[IDENTITY_KEY]
    return identity


def requires_role(role: Role, what: str) -> dict[str, Any]:
    """Return the arguments of a route that requires this role."""

    async def check(request: Request) -> None:
        require_role(caller(request), role, what)
        await _refuse_unread_body(request)

    return {"dependencies": [Depends(check)], "openapi_extra": {"x-role": role.label}}


async def _refuse_unread_body(request: Request) -> None:
    """Refuse a body that the route does not read.

    Otherwise a purge whose limits are in the body, and not in the query, would delete everything.
    """
    route = request.scope.get("route")
    if (
        isinstance(route, APIRoute)
        and route.body_field is None
        and "requestBody" not in (route.openapi_extra or {})
        and (await request.body()).strip() not in (b"", b"{}", b"null")
    ):
        raise InvalidRequest(
            "this path reads no body, and the request has one",
            "Give parameters in the query, as in ?name=value; /docs lists them",
        )


async def require_queues_enabled(request: Request) -> None:
    if not request.app.state.queues_enabled:
        raise QueuesDisabled


async def respond(
    request: Request,
    kind: Any,
    operation: Callable[[AdminService], Coroutine[Any, Any, object]],
    status: int = 200,
) -> Response:
    """Call the service and render its result, a resource or a list of resources of `kind`."""
    return render(kind, await call_service(request, operation), status)


def render(kind: Any, value: object, status: int = 200) -> Response:
    """Render a value of `kind`, once: FastAPI would validate and copy each response again."""
    return Response(to_json(kind, value), status, media_type="application/json")
