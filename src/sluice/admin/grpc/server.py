"""The gRPC server: `QueueAdmin`, health and reflection on one port of the admin thread's loop.

The port listens before this module and its large library are imported; see `relay`.

Unlike REST it needs no protection against foreign web pages: a browser cannot speak HTTP/2 without
TLS, and with TLS it asks for permission (CORS) before it sends `application/grpc`, which this
server never grants.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sluice.access.identity import AdminAuthenticator
from sluice.admin.grpc.forwarding import GrpcForwarder
from sluice.admin.grpc.interceptor import SERVICE, GrpcAuthInterceptor
from sluice.admin.grpc.queue_admin_pb2_grpc import add_QueueAdminServicer_to_server
from sluice.admin.grpc.relay import Relay
from sluice.admin.grpc.servicer import QueueAdmin
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.server import GrpcTls
from sluice.cluster.membership import Directory
from sluice.errors import ConfigError

# A publish with its properties; the queue itself has the limit of a message.
MAX_REQUEST_BYTES: Final = 16 << 20
MAX_RESPONSE_BYTES: Final = 64 << 20
MAX_CONCURRENT_CALLS: Final = 1000  # beyond this, callers get RESOURCE_EXHAUSTED

SERVER_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_RESPONSE_BYTES),
    # A client may send keepalive pings this often before it is disconnected.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)


class GrpcServer:
    """An open server."""

    def __init__(
        self,
        server: grpc.aio.Server,
        relay: Relay,
        health: health.aio.HealthServicer,
        closing: asyncio.Event,
        forwarder: GrpcForwarder | None = None,
    ) -> None:
        self._forwarder = forwarder
        self._server = server
        self._relay = relay
        self._health = health
        self._closing = closing

    async def stop(self, grace: float) -> None:
        """Accept no new calls; calls in progress have `grace` seconds, streams end at once."""
        self._relay.close()
        await self._health.enter_graceful_shutdown()
        self._closing.set()
        await self._server.stop(grace)
        if self._forwarder is not None:
            await self._forwarder.close()
        await self._relay.end()


async def serve_grpc(
    bridge: LoopBridge,
    keyring: AdminAuthenticator,
    sockets: Sequence[socket.socket],
    tls: GrpcTls | None = None,
    *,
    max_request_bytes: int = MAX_REQUEST_BYTES,
    queues_enabled: bool = True,
    directory: Directory | None = None,
    peer_ca: bytes | None = None,
) -> GrpcServer:
    """Start the server on the running loop, for connections to `sockets`, which listen."""
    relay = Relay()
    forwarder = GrpcForwarder(directory, peer_ca) if directory is not None else None
    server = grpc.aio.server(
        interceptors=(GrpcAuthInterceptor(keyring, relay, queues_enabled, forwarder),),
        options=(*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_request_bytes)),
        maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
    )
    closing = asyncio.Event()
    add_QueueAdminServicer_to_server(QueueAdmin(bridge, closing, directory), server)  # type: ignore[no-untyped-call]
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    _bind(server, relay.target, tls)
    await server.start()
    for service in ("", SERVICE):
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    await relay.open(sockets)
    return GrpcServer(server, relay, checks, closing, forwarder)


def _bind(server: grpc.aio.Server, target: str, tls: GrpcTls | None) -> None:
    try:
        if tls is None:
            server.add_insecure_port(target)
        else:
            server.add_secure_port(target, _credentials(tls))
    except RuntimeError as fault:
        if tls is None:
            raise
        raise ConfigError(
            "the grpc listener cannot use the TLS files",
            "Give PEM files: a certificate chain, its private key without a passphrase,"
            " and CA certificates",
        ) from fault


def _credentials(tls: GrpcTls) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)], tls.client_ca, require_client_auth=tls.client_ca is not None
    )
