"""Owners of exclusive queues over gRPC."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from sluice.admin.grpc import queue_admin_pb2 as pb
from tests.admin.grpc.conftest import GrpcApi
from tests.admin.rest.routes.test_owners import write


async def test_owners_are_listed_peeked_and_purged(grpc_api: GrpcApi) -> None:
    for key, value in (("speed", b"80"), ("brakes/left", b"open"), ("speed", b"95")):
        write(grpc_api.harness, "car-1", key, value)
    (owner,) = (await grpc_api.admin.ListOwners(pb.ListOwnersRequest(prefix="car"))).owners
    assert (owner.client, owner.depth, owner.keys, owner.last_sequence) == ("car-1", 2, 2, 3)
    assert not owner.HasField("acked_at") and owner.written_at.seconds > 0
    assert await grpc_api.admin.GetOwner(pb.GetOwnerRequest(client="car-1")) == owner
    peeked = await grpc_api.admin.PeekOwner(pb.PeekOwnerRequest(client="car-1", start=3))
    assert [(one.key, one.payload, one.sequence) for one in peeked.messages] == [
        ("speed", b"95", 3)
    ]
    assert (await grpc_api.admin.PurgeOwner(pb.PurgeOwnerRequest(client="car-1"))).purged == 2
    assert not (await grpc_api.admin.PeekOwner(pb.PeekOwnerRequest(client="car-1"))).messages


async def test_unknown_owner_is_not_found(grpc_api: GrpcApi) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="there is no exclusive queue") as refused:
        await grpc_api.admin.GetOwner(pb.GetOwnerRequest(client="x"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
