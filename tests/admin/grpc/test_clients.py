"""Clients over gRPC."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from sluice.admin.grpc import queue_admin_pb2 as pb
from tests.admin.grpc.conftest import GrpcApi
from tests.admin.live_broker import Worker


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
