"""The gRPC API of a broker on the test's loop, and a client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest

from sluice.access.identity import AdminAuthenticator
from sluice.admin.grpc.queue_admin_pb2_grpc import QueueAdminStub
from sluice.admin.grpc.server import GrpcServer, serve_grpc
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.server import GrpcTls, bind_sockets
from sluice.units import Address
from tests.admin.live_broker import LiveBroker, live_broker


@dataclass
class OpenServer:
    server: GrpcServer
    address: Address

    async def stop(self, grace: float) -> None:
        await self.server.stop(grace)


async def serve_on_any_port(
    bridge: LoopBridge, keyring: AdminAuthenticator, tls: GrpcTls | None = None, **more: Any
) -> OpenServer:
    sockets = bind_sockets("grpc", Address("127.0.0.1", 0))
    address = Address(*sockets[0].getsockname()[:2])
    try:
        return OpenServer(await serve_grpc(bridge, keyring, sockets, tls, **more), address)
    except BaseException:
        for one in sockets:
            one.close()
        raise


@dataclass
class GrpcApi:
    harness: LiveBroker
    server: OpenServer
    channel: grpc.aio.Channel
    admin: QueueAdminStub


@pytest.fixture
async def grpc_api() -> AsyncIterator[GrpcApi]:
    """Open the API; `quick` queues retry once, at once."""
    quick = {"retry_policy": {"max_retries": 1, "initial_backoff": "1ms"}}
    async with live_broker([("quick/#", quick)]) as harness:
        server = await serve_on_any_port(harness.loop_bridge, harness.keyring)
        async with grpc.aio.insecure_channel(str(server.address)) as channel:
            yield GrpcApi(harness, server, channel, QueueAdminStub(channel))
        await server.stop(0)
