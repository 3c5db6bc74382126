"""The gRPC door of a broker that lives in the test's loop, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import pytest

from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.grpc.server import GrpcServer, serve_grpc
from tests.admin.live_broker import Living, living


@dataclass
class Door:
    house: Living
    server: GrpcServer
    channel: grpc.aio.Channel
    admin: QueueAdminStub


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    """`quick` queues try once more, at once."""
    quick = {"retry_policy": {"max_retries": 1, "initial_backoff": "1ms"}}
    async with living([("quick/#", quick)]) as house:
        server = await serve_grpc(house.desk, house.keyring, "127.0.0.1", 0, None)
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            yield Door(house, server, channel, QueueAdminStub(channel))
        await server.stop(0)
