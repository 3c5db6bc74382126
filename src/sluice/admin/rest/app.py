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
from sluice.access.identity import Keyring
from sluice.admin.loop_bridge import Desk
from sluice.admin.rest import pages
from sluice.admin.rest.routes import bulk_routes
from sluice.admin.rest.routes import cluster_routes
from sluice.admin.rest.routes import dead_letter_routes
from sluice.admin.rest.routes import live_routes
from sluice.admin.rest.routes import message_routes
from sluice.admin.rest.routes import node_routes
from sluice.admin.rest.routes import owner_routes
from sluice.admin.rest.routes import queue_routes
from sluice.admin.rest import errors
from sluice.admin.rest.routes.bulk_routes import BulkDoor
from sluice.admin.rest.middleware import Gate
from sluice.admin.rest.routes.live_routes import LiveFeed
from sluice.admin.forwarding.rest_forwarding import Relay
from sluice.cluster.directory import Directory
from sluice.errors import SluiceError
from sluice.process.memory_watermark import Watermark

MAX_BODY: Final = 2_862_000  # a packet of the usual largest size as base64, and its frame

ABOUT: Final = """Look after an MQTT broker with durable queues.

Every refusal is JSON that says what to do: `{"error": ..., "message": ..., "do": ...}`. Times are ISO 8601 in UTC,
`null` for never. A queue's name in a path is percent-encoded, or has `$` for `/`: `tasks$image` is `tasks/image`.
On loopback without users or tokens nobody needs to say who they are; else send `Authorization: Bearer <token>`.
"""
TAGS: Final = [
    {"name": "queues", "description": "Make, look at, change, empty and delete queues"},
    {"name": "groups", "description": "Consumer groups, and who is in them"},
    {"name": "messages", "description": "Look at messages, publish, and follow one through its life"},
    {"name": "dead letters", "description": "What could not be processed: look, put back, throw away"},
    {"name": "exclusive queues", "description": "The last value of each key, for one client"},
    {"name": "bulk", "description": "Ranges as Arrow streams, progress, batches that count once: for Spark"},
    {"name": "node", "description": "The server itself"},
]


class RestDoor:
    """An ASGI application that can be told to stop: nobody new comes in, and streams end."""

    def __init__(self, app: FastAPI, gate: Gate, relay: Relay | None = None) -> None:
        self.app = app
        self.gate = gate
        self.relay = relay

    @property
    def feed(self) -> LiveFeed:
        feed: LiveFeed = self.app.state.live
        return feed

    def stop(self) -> None:
        self.gate.stopping = True
        self.feed.close()
        self.app.state.bulk.stop()

    def close(self) -> None:
        """Nobody is served any more."""
        self.app.state.bulk.close()


def make_app(
    desk: Desk,
    keyring: Keyring,
    *,
    host: str = "127.0.0.1",
    max_body: int = MAX_BODY,
    queues_enabled: bool = True,
    store_fault: Callable[[], SluiceError | None] = lambda: None,
    watermark: Watermark | None = None,
    bulk_door: BulkDoor | None = None,
    directory: Directory | None = None,
    far_tls: ssl.SSLContext | None = None,
) -> RestDoor:
    """`host` is what the door listens on; `store_fault` returns why the store takes nothing, or
    None. In a cluster
    `directory` says where everything is, and `far_tls` how the doors of other nodes are known, if by HTTPS."""
    app = FastAPI(
        title="Sluice",
        version=__version__,
        description=ABOUT,
        openapi_tags=[dict(tag) for tag in TAGS],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.desk = desk
    app.state.queues_enabled = queues_enabled
    app.state.store_fault = store_fault
    app.state.watermark = watermark if watermark is not None else Watermark(0)
    app.state.live = LiveFeed(desk)
    app.state.directory = directory
    app.state.bulk = bulk_door if bulk_door is not None else BulkDoor()
    errors.install(app)
    for routes in (queue_routes, message_routes, dead_letter_routes, owner_routes, bulk_routes, live_routes, node_routes, cluster_routes):
        app.include_router(routes.router)
    pages.install(app)
    app.openapi = _documented(app)  # type: ignore[method-assign]
    app.state.relay = None
    if directory is None:
        return RestDoor(app, Gate(app, keyring, max_body, host))
    relay = Relay(app, directory, far_tls)
    app.state.live.far = relay.fetch_all
    app.state.relay = relay
    return RestDoor(app, Gate(relay, keyring, max_body, host), relay)


def _documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
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
