"""Routes about the server itself: node, health, metrics, and the caller's identity."""

from __future__ import annotations

import logging
import time
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Depends, Path, Request, Response
from pydantic import BaseModel, Field

from sluice.access.identity import Role, require_role
from sluice.admin import model
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.metrics import render_exposition
from sluice.admin.queries import build_caller
from sluice.admin.rest.deps import (
    call_service,
    caller,
    render,
    require_queues_enabled,
    requires_role,
    respond,
)
from sluice.admin.rest.errors import STATUS_MEANINGS, Refusal, Stopping, error_responses
from sluice.admin.rest.schemas.json_models import Listeners, json_type
from sluice.admin.service import AdminService
from sluice.errors import MemoryFull, SluiceError
from sluice.process.memory_watermark import MemoryWatermark

log = logging.getLogger(__name__)

router = APIRouter(tags=["node"])

HEALTH_TIMEOUT_SECONDS: Final = 2.0  # a loop that has not answered by then is not healthy
VERIFY_TIMEOUT_SECONDS: Final = 300.0
LOSS_WARNING: Final = (
    "the store has lost frames that it had confirmed: see `sluice losses list`, "
    "then run `sluice losses confirm`"
)
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Health(BaseModel):
    status: Literal["ok"]
    loop_ms: float = Field(description="How long the broker's loop took to answer")


class Readiness(BaseModel):
    status: Literal["ready"]
    store: str
    queues: int = Field(description="number of queues, including dead-letter queues")
    warnings: list[str] = Field(
        default=[], description="what an operator must attend to; the server is ready anyway"
    )


@router.get("/api/v1/node", response_model=json_type(model.Node), responses=error_responses())
async def show_node(request: Request) -> Response:
    """This server: version, store, connections, packets."""
    return await respond(request, model.Node, lambda service: service.node())


@router.get(
    "/api/v1/nodes", response_model=json_type(list[model.Node]), responses=error_responses()
)
async def list_nodes(request: Request) -> Response:
    """Every node of the cluster that this one knows."""
    return await respond(request, list[model.Node], lambda service: service.nodes())


@router.get("/api/v1/store", response_model=json_type(model.Store), responses=error_responses())
async def show_store(request: Request) -> Response:
    """The store: health, size, and for Redis the queues as Redis itself reports them."""
    return await respond(request, model.Store, lambda service: service.store())


@router.get(
    "/api/v1/losses", response_model=json_type(list[model.Loss]), responses=error_responses()
)
async def list_losses(request: Request) -> Response:
    """Committed frames that the store has lost, by cell, until an operator confirms the loss."""
    return await respond(request, list[model.Loss], lambda service: service.losses())


@router.post(
    "/api/v1/losses/{cell}/confirm",
    response_model=json_type(model.Loss),
    responses=error_responses(404),
    **requires_role(Role.OPERATOR, "confirm a loss"),
)
async def confirm_loss(request: Request, cell: Annotated[int, Path(ge=0, le=65535)]) -> Response:
    """Confirm to know of a loss, which ends its report. Returns the confirmed loss."""
    view = await call_service(request, lambda service: service.confirm_loss(cell))
    log.warning(
        "loss confirmed",
        extra={
            "cell": cell,
            "first_frame": view.first,
            "last_frame": view.last,
            "by": caller(request).name,
        },
    )
    return render(model.Loss, view)


@router.get("/api/v1/listeners", response_model=Listeners, responses=error_responses())
async def list_listeners(request: Request) -> Listeners:
    """The addresses where this server accepts MQTT clients."""
    return Listeners(**request.app.state.listeners())


@router.get("/api/v1/whoami", response_model=json_type(model.Caller), responses=error_responses())
async def whoami(request: Request) -> Response:
    """The caller's identity and role, as the server sees them."""
    return render(model.Caller, build_caller(caller(request)))


@router.get(
    "/api/v1/verify",
    response_model=list[str],
    responses=error_responses(409),
    dependencies=[Depends(require_queues_enabled)],
)
async def verify(request: Request) -> list[str]:
    """Check the ledgers of every queue, message by message; returns the inconsistencies."""
    return await call_service(request, lambda service: service.verify(), VERIFY_TIMEOUT_SECONDS)


@router.get(
    "/healthz",
    response_model=Health,
    responses={503: {"model": Refusal, "description": STATUS_MEANINGS[503]}},
)
async def health(request: Request) -> Health:
    """Liveness: the broker's loop answers within 2 seconds. Needs no token."""
    began = time.monotonic()
    await call_service(request, _no_operation, HEALTH_TIMEOUT_SECONDS)
    return Health(status="ok", loop_ms=round((time.monotonic() - began) * 1000.0, 3))


@router.get(
    "/readyz",
    response_model=Readiness,
    responses={503: {"model": Refusal, "description": STATUS_MEANINGS[503]}},
)
async def readiness(request: Request) -> Readiness:
    """Readiness: the store accepts writes, memory is below limits.memory, and the server is not
    stopping. Needs no token."""
    refusal: SluiceError | None = request.app.state.store_fault()
    if refusal is not None:
        raise refusal.with_traceback(None)  # raised repeatedly, its traceback would grow
    watermark: MemoryWatermark = request.app.state.watermark
    if watermark.reason:
        raise MemoryFull(watermark.reason)
    node = await call_service(request, lambda service: service.node(), HEALTH_TIMEOUT_SECONDS)
    if node.stopping:
        raise Stopping
    warnings = [LOSS_WARNING] if node.losses else []
    return Readiness(status="ready", store=node.store, queues=node.queues, warnings=warnings)


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {}}, "description": "Prometheus text format"},
        **error_responses(),
    },
)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus, collected on request."""
    require_role(caller(request), Role.VIEWER, "read metrics")
    page = await render_metrics(request.app.state.bridge, request.app.state.watermark)
    return Response(page, media_type=METRICS_TYPE)


async def render_metrics(bridge: LoopBridge, watermark: MemoryWatermark) -> bytes:
    node = await bridge.call(lambda service: service.node())
    snapshot = await bridge.call(lambda service: service.collect_metrics())
    store = await bridge.call(lambda service: service.recent_store())
    return await render_exposition(node, snapshot, store, watermark)


async def _no_operation(service: AdminService) -> None:
    """Do nothing: the answer itself shows that the loop runs."""
