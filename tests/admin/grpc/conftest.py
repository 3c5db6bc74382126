"""The gRPC API of a broker on the test's loop, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc.aio
import pytest

from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.grpc.server import GrpcServer, serve_grpc
from tests.admin.live_broker import LiveBroker, live_broker


@dataclass
class GrpcApi:
    harness: LiveBroker
    server: GrpcServer
    channel: grpc.aio.Channel
    admin: QueueAdminStub


@pytest.fixture
async def grpc_api() -> AsyncIterator[GrpcApi]:
    """Open the API; `quick` queues retry once, at once."""
    quick = {"retry_policy": {"max_retries": 1, "initial_backoff": "1ms"}}
    async with live_broker([("quick/#", quick)]) as harness:
        server = await serve_grpc(harness.loop_bridge, harness.keyring, "127.0.0.1", 0, None)
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            yield GrpcApi(harness, server, channel, QueueAdminStub(channel))
        await server.stop(0)
