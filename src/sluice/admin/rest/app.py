"""The REST API as one ASGI application: routes, errors, pages and the middleware before them.

It knows the loop bridge and the authenticator, neither the broker nor the HTTP server.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI

from sluice import __version__
from sluice.access.identity import AdminAuthenticator
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.metrics import SampleHistory
from sluice.admin.rest import errors, pages
from sluice.admin.rest.forwarding.request_forwarding import RestForwarder
from sluice.admin.rest.middleware import RestAuthMiddleware
from sluice.admin.rest.routes import (
    bulk_routes,
    client_routes,
    cluster_routes,
    dead_letter_routes,
    live_routes,
    message_routes,
    node_routes,
    owner_routes,
    queue_routes,
    schedule_routes,
)
from sluice.admin.rest.routes.bulk_routes import BulkResources
from sluice.admin.rest.routes.live_routes import LiveFeed
from sluice.cluster.membership import Directory
from sluice.errors import SluiceError
from sluice.process.memory_watermark import MemoryWatermark

DESCRIPTION: Final = """Administer an MQTT broker with durable queues.

Every error is JSON with a remedy: `{"error": ..., "message": ..., "do": ...}`. Times are ISO 8601
in UTC, `null` for never. A queue's name in a path is percent-encoded, or has `$` for `/`:
`tasks$image` is `tasks/image`. On loopback without users or tokens no authentication is needed;
otherwise send `Authorization: Bearer <token>`.
"""
TAGS: Final = [
    {"name": "queues", "description": "Create, show, configure, purge and delete queues"},
    {"name": "groups", "description": "Consumer groups and their consumers"},
    {
        "name": "messages",
        "description": "Show, publish and trace messages",
    },
    {
        "name": "dead letters",
        "description": "Messages that could not be processed: show, redrive, delete",
    },
    {"name": "exclusive queues", "description": "The last value of each key, for one client"},
    {"name": "clients", "description": "Connected clients and persistent sessions"},
    {
        "name": "bulk",
        "description": "Ranges as Arrow streams, progress, exactly-once batches: for Spark",
    },
    {"name": "node", "description": "The server itself"},
]


class RestApi:
    """The ASGI application, which can be stopped: it accepts nothing new, and streams end."""

    def __init__(
        self, app: FastAPI, middleware: RestAuthMiddleware, forwarder: RestForwarder | None = None
    ) -> None:
        self.app = app
        self.middleware = middleware
        self.forwarder = forwarder

    @property
    def feed(self) -> LiveFeed:
        feed: LiveFeed = self.app.state.live
        return feed

    def stop(self) -> None:
        self.middleware.is_stopping = True
        self.feed.close()
        self.app.state.bulk.stop()

    def close(self) -> None:
        """Release the resources; no request is served afterwards."""
        self.app.state.bulk.close()


def make_app(
    bridge: LoopBridge,
    keyring: AdminAuthenticator,
    samples: SampleHistory,
    *,
    host: str,
    max_body: int,
    queues_enabled: bool = True,
    store_fault: Callable[[], SluiceError | None] = lambda: None,
    watermark: MemoryWatermark | None = None,
    bulk_resources: BulkResources | None = None,
    listeners: Callable[[], Mapping[str, str]] = dict,
    directory: Directory | None = None,
    peer_tls: ssl.SSLContext | None = None,
) -> RestApi:
    """Build the application.

    `samples` are for the charts. `host` is the address of the listener; `store_fault` returns why
    the store refuses writes, or None. In a cluster, `directory` has the owner of every cell, and
    `peer_tls` verifies the other nodes' HTTP listeners, if they use HTTPS.
    """
    app = FastAPI(
        title="Sluice",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=[dict(tag) for tag in TAGS],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.bridge = bridge
    app.state.queues_enabled = queues_enabled
    app.state.store_fault = store_fault
    app.state.watermark = watermark if watermark is not None else MemoryWatermark(0)
    app.state.live = LiveFeed(bridge)
    app.state.listeners = listeners
    app.state.samples = samples
    app.state.directory = directory
    app.state.bulk = bulk_resources if bulk_resources is not None else BulkResources()
    errors.install_error_handlers(app)
    for routes in (
        queue_routes,
        message_routes,
        dead_letter_routes,
        schedule_routes,
        owner_routes,
        client_routes,
        bulk_routes,
        live_routes,
        node_routes,
        cluster_routes,
    ):
        app.include_router(routes.router)
    app.include_router(dead_letter_routes.errors_router)
    pages.install_pages(app)
    app.openapi = _corrected_openapi(app)  # type: ignore[method-assign]
    app.state.forwarder = None
    if directory is None:
        return RestApi(app, RestAuthMiddleware(app, keyring, max_body, host))
    forwarder = RestForwarder(app, directory, peer_tls)
    app.state.live.fetch_remote = forwarder.fetch_all
    app.state.forwarder = forwarder
    return RestApi(app, RestAuthMiddleware(forwarder, keyring, max_body, host), forwarder)


def _corrected_openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Correct FastAPI's description: an unreadable request is answered with 400, never 422."""
    default_openapi = app.openapi

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = default_openapi()
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
                    operation["operationId"] = re.sub(
                        r"_(api_v1|healthz|readyz|metrics)_.*", "", operation["operationId"]
                    )
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            schema["components"]["securitySchemes"] = {
                "token": {"type": "http", "scheme": "bearer"},
                "password": {"type": "http", "scheme": "basic"},
            }
            schema["security"] = [{}, {"token": []}, {"password": []}]
        return app.openapi_schema or schema

    return describe
