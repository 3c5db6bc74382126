"""The REST door: routes, refusals, pages and the gate before them, as one ASGI application.

It knows the desk and the keyring, nothing of the broker behind them nor of the server that runs it.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from typing import Any, Final

from fastapi import FastAPI

from sluice import __version__
from sluice.access.identity import AdminAuthenticator
from sluice.admin.forwarding.rest_forwarding import RestForwarder
from sluice.admin.loop_bridge import LoopBridge
from sluice.admin.rest import errors, pages
from sluice.admin.rest.middleware import RestAuthMiddleware
from sluice.admin.rest.routes import (
    bulk_routes,
    cluster_routes,
    dead_letter_routes,
    live_routes,
    message_routes,
    node_routes,
    owner_routes,
    queue_routes,
)
from sluice.admin.rest.routes.bulk_routes import BulkResources
from sluice.admin.rest.routes.live_routes import LiveFeed
from sluice.cluster.directory import Directory
from sluice.errors import SluiceError
from sluice.process.memory_watermark import MemoryWatermark

MAX_BODY_BYTES: Final = 2_862_000  # a packet of the usual largest size as base64, and its frame

DESCRIPTION: Final = """Look after an MQTT broker with durable queues.

Every refusal is JSON that says what to do: `{"error": ..., "message": ..., "do": ...}`. Times are ISO 8601 in UTC,
`null` for never. A queue's name in a path is percent-encoded, or has `$` for `/`: `tasks$image` is `tasks/image`.
On loopback without users or tokens nobody needs to say who they are; else send `Authorization: Bearer <token>`.
"""
TAGS: Final = [
    {"name": "queues", "description": "Make, look at, change, empty and delete queues"},
    {"name": "groups", "description": "Consumer groups, and who is in them"},
    {
        "name": "messages",
        "description": "Look at messages, publish, and follow one through its life",
    },
    {
        "name": "dead letters",
        "description": "What could not be processed: look, put back, throw away",
    },
    {"name": "exclusive queues", "description": "The last value of each key, for one client"},
    {
        "name": "bulk",
        "description": "Ranges as Arrow streams, progress, batches that count once: for Spark",
    },
    {"name": "node", "description": "The server itself"},
]


class RestApi:
    """An ASGI application that can be told to stop: nobody new comes in, and streams end."""

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
        """Nobody is served any more."""
        self.app.state.bulk.close()


def make_app(
    bridge: LoopBridge,
    keyring: AdminAuthenticator,
    *,
    host: str = "127.0.0.1",
    max_body: int = MAX_BODY_BYTES,
    queues_enabled: bool = True,
    store_fault: Callable[[], SluiceError | None] = lambda: None,
    watermark: MemoryWatermark | None = None,
    bulk_resources: BulkResources | None = None,
    directory: Directory | None = None,
    peer_tls: ssl.SSLContext | None = None,
) -> RestApi:
    """`host` is what the door listens on; `store_fault` returns why the store takes nothing, or
    None. In a cluster
    `directory` says where everything is, and `far_tls` how the doors of other nodes are known, if by HTTPS."""
    app = FastAPI(
        title="Sluice",
        version=__version__,
        description=DESCRIPTION,
        openapi_tags=[dict(tag) for tag in TAGS],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.desk = bridge
    app.state.queues_enabled = queues_enabled
    app.state.store_fault = store_fault
    app.state.watermark = watermark if watermark is not None else MemoryWatermark(0)
    app.state.live = LiveFeed(bridge)
    app.state.directory = directory
    app.state.bulk = bulk_resources if bulk_resources is not None else BulkResources()
    errors.install_error_handlers(app)
    for routes in (
        queue_routes,
        message_routes,
        dead_letter_routes,
        owner_routes,
        bulk_routes,
        live_routes,
        node_routes,
        cluster_routes,
    ):
        app.include_router(routes.router)
    pages.install_pages(app)
    app.openapi = _corrected_openapi(app)  # type: ignore[method-assign]
    app.state.relay = None
    if directory is None:
        return RestApi(app, RestAuthMiddleware(app, keyring, max_body, host))
    forwarder = RestForwarder(app, directory, peer_tls)
    app.state.live.far = forwarder.fetch_all
    app.state.relay = forwarder
    return RestApi(app, RestAuthMiddleware(forwarder, keyring, max_body, host), forwarder)


def _corrected_openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """FastAPI's own description, made true: a request that cannot be read is answered 400 here and never 422."""
    made = app.openapi

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made()
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
