"""Clients over gRPC."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from sluice.admin.forwarding import CellMoved
from sluice.admin.grpc import queue_admin_pb2 as pb
from sluice.admin.grpc.forwarding import GrpcForwarder
from sluice.errors import SluiceError, UnknownClient
from tests.admin.grpc.conftest import GrpcApi
from tests.admin.live_broker import Worker


class OtherNode:
    """The directory of a cluster in which the broker of the test is the other node."""

    def __init__(self, grpc_api: GrpcApi) -> None:
        self._node = SimpleNamespace(name="other", grpc=str(grpc_api.server.address))

    def other_nodes(self) -> list[Any]:
        return [self._node]


async def ask_this_node(grpc_api: GrpcApi, client: str, error: SluiceError) -> Any:
    """Ask a node that refuses with `error`, in a cluster with the broker of the test."""

    async def refuse(request: Any, context: Any) -> Any:
        raise error

    forwarder = GrpcForwarder(cast(Any, OtherNode(grpc_api)))
    try:
        return await forwarder.forward(
            "GetClient",
            pb.GetClientRequest(client=client),
            SimpleNamespace(invocation_metadata=lambda: ()),
            refuse,
        )
    finally:
        await forwarder.close()


async def list_clients(grpc_api: GrpcApi, **wanted: object) -> list[str]:
    request = pb.ListClientsRequest(**wanted)  # type: ignore[arg-type]
    return [one.client for one in (await grpc_api.admin.ListClients(request)).clients]


async def test_clients_are_listed_shown_and_disconnected(grpc_api: GrpcApi) -> None:
    async with grpc_api.harness.client("worker-1") as client:
        worker = Worker(client, "quick/a")
        await worker.join(consumer_group="team")
        assert await list_clients(grpc_api, prefix="worker-") == ["worker-1"]
        assert await list_clients(grpc_api, connected=False) == []
        found = await grpc_api.admin.GetClient(pb.GetClientRequest(client="worker-1"))
        assert (found.client.connected, found.client.protocol) == (True, "MQTT 5.0")
        assert found.client.connected_at.seconds and not found.client.HasField("disconnected_at")
        assert [one.filter for one in found.subscriptions] == ["$queue/quick/a"]
        assert [(one.queue, one.group) for one in found.consumers] == [("quick/a", "team")]
        done = await grpc_api.admin.KickClient(pb.KickClientRequest(client="worker-1"))
        assert done.disconnected


async def test_list_of_clients_is_paginated(grpc_api: GrpcApi) -> None:
    async with grpc_api.harness.client("page-1"), grpc_api.harness.client("page-2"):
        request = pb.ListClientsRequest(prefix="page-", limit=1)
        first = await grpc_api.admin.ListClients(request)
        assert ([one.client for one in first.clients], first.next) == (["page-1"], "page-1")
        request.after = first.next
        last = await grpc_api.admin.ListClients(request)
        assert ([one.client for one in last.clients], last.next) == (["page-2"], "")


async def test_unknown_client_is_not_found(grpc_api: GrpcApi) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await grpc_api.admin.GetClient(pb.GetClientRequest(client="who"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("error", [UnknownClient("roaming-1"), CellMoved("client 'roaming-1'")])
async def test_client_is_found_on_another_node_than_that_of_its_cell(
    grpc_api: GrpcApi, error: SluiceError
) -> None:
    async with grpc_api.harness.client("roaming-1"):
        found = await ask_this_node(grpc_api, "roaming-1", error)
        assert found.client.connected


async def test_owner_of_the_cell_says_that_there_is_no_client(grpc_api: GrpcApi) -> None:
    with pytest.raises(UnknownClient):
        await ask_this_node(grpc_api, "who", CellMoved("client 'who'"))
