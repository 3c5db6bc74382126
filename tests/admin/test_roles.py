"""Every REST route and every gRPC method, called with every kind of credentials.

The tables say which role each one needs. They are written by hand and not derived from the code
under test, so that a role that changes by mistake fails here. A route or method that is in no table
fails as well: decide its role first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from sluice.access.identity import AdminAuthenticator, Identity, Role
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.server import AdminServer, AdminServerConfig
from sluice.units import Address
from tests.admin.grpc.conftest import serve_on_any_port
from tests.admin.live_broker import live_broker

V, O, A = Role.VIEWER, Role.OPERATOR, Role.ADMIN  # noqa: E741

GRPC_METHODS = {
    "CreateQueue": A,
    "ListQueues": V,
    "GetQueue": V,
    "GetQueueStats": V,
    "DeleteQueue": A,
    "GetConfig": V,
    "UpdateConfig": A,
    "CancelMessage": O,
    "CancelMessages": O,
    "RescheduleMessage": O,
    "RescheduleMessages": O,
    "PauseQueue": O,
    "ResumeQueue": O,
    "PauseGroup": O,
    "ResumeGroup": O,
    "PurgeQueue": O,
    "Watch": V,
    "Publish": O,
    "PeekMessages": V,
    "GetMessage": V,
    "Explain": V,
    "FindMessage": V,
    "ListGroups": V,
    "GetGroup": V,
    "CreateGroup": A,
    "DeleteGroup": A,
    "SeekGroup": O,
    "ListConsumers": V,
    "ListOwners": V,
    "GetOwner": V,
    "PeekOwner": V,
    "PurgeOwner": O,
    "ListClients": V,
    "GetClient": V,
    "KickClient": O,
    "ListDeadLetters": V,
    "ListDeadLetterErrors": V,
    "GetDeadLetter": V,
    "RetryDeadLetter": O,
    "RetryDeadLetters": O,
    "PurgeDeadLetters": O,
    "DeleteDeadLetter": O,
    "Diagnose": V,
    "Verify": V,
    "GetNode": V,
    "ListNodes": V,
    "GetCluster": V,
    "GetStore": V,
    "ListLosses": V,
    "ConfirmLoss": O,
    "WhoAmI": V,
}
REST_ROUTES = {
    "GET /api/v1/queues": V,
    "POST /api/v1/queues": A,
    "GET /api/v1/queues/{name}": V,
    "DELETE /api/v1/queues/{name}": A,
    "GET /api/v1/queues/{name}/config": V,
    "PUT /api/v1/queues/{name}/config": A,
    "GET /api/v1/queues/{name}/stats": V,
    "GET /api/v1/queues/{name}/diagnosis": V,
    "POST /api/v1/queues/{name}/pause": O,
    "POST /api/v1/queues/{name}/resume": O,
    "POST /api/v1/queues/{name}/groups/{group}/pause": O,
    "POST /api/v1/queues/{name}/groups/{group}/resume": O,
    "POST /api/v1/queues/{name}/purge": O,
    "GET /api/v1/queues/{name}/consumers": V,
    "GET /api/v1/queues/{name}/groups": V,
    "POST /api/v1/queues/{name}/groups": A,
    "GET /api/v1/queues/{name}/groups/{group}": V,
    "DELETE /api/v1/queues/{name}/groups/{group}": A,
    "POST /api/v1/queues/{name}/groups/{group}/seek": O,
    "GET /api/v1/queues/{name}/messages": V,
    "POST /api/v1/queues/{name}/messages": O,
    "GET /api/v1/queues/{name}/messages/{message_id}": V,
    "DELETE /api/v1/queues/{name}/messages/{message_id}": O,
    "POST /api/v1/queues/{name}/messages/{message_id}/reschedule": O,
    "POST /api/v1/queues/{name}/messages/cancel": O,
    "GET /api/v1/schedules": V,
    "GET /api/v1/queues/{name}/schedules": V,
    "POST /api/v1/queues/{name}/schedules": O,
    "GET /api/v1/queues/{name}/schedules/{schedule}": V,
    "PUT /api/v1/queues/{name}/schedules/{schedule}": O,
    "DELETE /api/v1/queues/{name}/schedules/{schedule}": O,
    "POST /api/v1/queues/{name}/schedules/{schedule}/pause": O,
    "POST /api/v1/queues/{name}/schedules/{schedule}/resume": O,
    "POST /api/v1/queues/{name}/schedules/{schedule}/run": O,
    "POST /api/v1/queues/{name}/messages/reschedule": O,
    "GET /api/v1/messages/{message_id}": V,
    "GET /api/v1/queues/{name}/dlq": V,
    "GET /api/v1/queues/{name}/dlq/{message_id}": V,
    "GET /api/v1/queues/{name}/dlq-errors": V,
    "DELETE /api/v1/queues/{name}/dlq/{message_id}": O,
    "POST /api/v1/queues/{name}/dlq/{message_id}/retry": O,
    "POST /api/v1/queues/{name}/dlq/retry": O,
    "POST /api/v1/queues/{name}/dlq/purge": O,
    "GET /api/v1/ecq": V,
    "GET /api/v1/ecq/{client}": V,
    "GET /api/v1/ecq/{client}/values": V,
    "POST /api/v1/ecq/{client}/purge": O,
    "GET /api/v1/bulk/queues/{name}/offsets": V,
    "GET /api/v1/bulk/queues/{name}/offsets/at": V,
    "GET /api/v1/bulk/queues/{name}/partitions/{partition}/rows": V,
    "GET /api/v1/bulk/queues/{name}/rows": V,
    "GET /api/v1/bulk/queues/{name}/rows/count": V,
    "GET /api/v1/bulk/queues/{name}/groups/{group}/progress": V,
    "PUT /api/v1/bulk/queues/{name}/groups/{group}/progress": O,
    "POST /api/v1/bulk/stages/{app}/{batch}": O,
    "DELETE /api/v1/bulk/stages/{app}/{batch}": O,
    "POST /api/v1/bulk/stages/{app}/{batch}/commit": O,
    "GET /api/v1/bulk/stages/{app}": V,
    "GET /api/v1/samples": V,
    "GET /api/v1/queues/{name}/samples": V,
    "GET /api/v1/live": V,
    "GET /api/v1/node": V,
    "GET /api/v1/nodes": V,
    "GET /api/v1/store": V,
    "GET /api/v1/losses": V,
    "POST /api/v1/losses/{cell}/confirm": O,
    "GET /api/v1/clients": V,
    "GET /api/v1/clients/{client}": V,
    "DELETE /api/v1/clients/{client}": O,
    "GET /api/v1/listeners": V,
    "GET /api/v1/whoami": V,
    "GET /api/v1/verify": V,
    "GET /api/v1/cluster": V,
    "GET /metrics": V,
}
OPEN_ROUTES = {"GET /healthz", "GET /readyz"}  # no credentials: load balancers ask

# Credentials and the role that they give. None: refused.
CALLERS: list[tuple[str, Role | None]] = [
    ("", None),
    ("Bearer wrong", None),
    ("Bearer viewer", V),
    ("Bearer operator", O),
    ("Bearer admin", A),
]


class Tokens:
    """Credentials in which the token is the name of its role."""

    def verify_bearer(self, text: str) -> Identity | None:
        return (
            Identity(f"the {text}", Role.parse(text))
            if text in ("viewer", "operator", "admin")
            else None
        )

    def verify_password(self, name: str, password: str, peer: str) -> Identity | None:
        return None


# ---- gRPC

METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["QueueAdmin"].methods}


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with live_broker() as harness:
        server = await serve_on_any_port(harness.loop_bridge, AdminAuthenticator(Tokens()))
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            yield channel
        await server.stop(0)


async def grpc_code(channel: grpc.aio.Channel, method: str, authorization: str) -> grpc.StatusCode:
    """Call a method with an empty request; only an authorized caller learns what it lacks."""
    request = getattr(pb, METHODS[method].input_type.name)()
    metadata = (("authorization", authorization),) if authorization else ()
    called: Any = getattr(QueueAdminStub(channel), method)(request, metadata=metadata)
    try:
        await (called.read() if METHODS[method].server_streaming else called)
    except grpc.aio.AioRpcError as fault:
        return fault.code()
    return grpc.StatusCode.OK


def test_every_grpc_method_is_in_the_role_table() -> None:
    assert GRPC_METHODS.keys() == METHODS.keys()


@pytest.mark.parametrize(("authorization", "role"), CALLERS)
async def test_every_grpc_method_is_open_only_to_its_role_and_higher_ones(
    channel: grpc.aio.Channel, authorization: str, role: Role | None
) -> None:
    for method, needed in GRPC_METHODS.items():
        code = await grpc_code(channel, method, authorization)
        if role is None:
            assert code == grpc.StatusCode.UNAUTHENTICATED, method
        elif role < needed:
            assert code == grpc.StatusCode.PERMISSION_DENIED, method
        else:
            admitted = (
                grpc.StatusCode.OK,
                grpc.StatusCode.NOT_FOUND,
                grpc.StatusCode.INVALID_ARGUMENT,
            )
            assert code in admitted, method


# ---- REST


@pytest.fixture
async def web() -> AsyncIterator[httpx.AsyncClient]:
    async with live_broker() as harness:
        config = AdminServerConfig(Address("127.0.0.1", 0), None)
        thread = AdminServer(harness.loop_bridge, AdminAuthenticator(Tokens()), config)
        [listener] = await thread.start()
        async with httpx.AsyncClient(base_url=f"http://{listener.address}", timeout=30) as client:
            yield client
        await thread.stop()


async def rest_status(web: httpx.AsyncClient, route: str, authorization: str) -> int:
    """Call a route with unknown names and with a body that fits no route."""
    method, _, path = route.partition(" ")
    for field in ("name", "group", "message_id", "client", "app"):
        path = path.replace(f"{{{field}}}", "none")
    path = path.replace("{partition}", "0").replace("{batch}", "1")
    headers = {"Authorization": authorization} if authorization else {}
    if "/stages/" in path and path.endswith("/1") and method == "POST":
        headers["Content-Type"] = "application/vnd.apache.arrow.stream"
    async with web.stream(method, path, headers=headers) as answer:  # the live stream never ends
        return answer.status_code


async def test_every_rest_route_is_in_the_role_table(web: httpx.AsyncClient) -> None:
    paths = (await web.get("/openapi.json")).json()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert served == REST_ROUTES.keys() | OPEN_ROUTES


@pytest.mark.parametrize(("authorization", "role"), CALLERS)
async def test_every_rest_route_is_open_only_to_its_role_and_higher_ones(
    web: httpx.AsyncClient, authorization: str, role: Role | None
) -> None:
    for route, needed in REST_ROUTES.items():
        status = await rest_status(web, route, authorization)
        if role is None:
            assert status == 401, route
        elif role < needed:
            assert status == 403, route
        else:
            assert status not in (401, 403, 405) and status < 502, (route, status)
    for route in OPEN_ROUTES:
        assert await rest_status(web, route, authorization) == 200, route
