"""The REST API."""

from sluice.admin.rest.app import MAX_BODY_BYTES, RestApi, make_app
from sluice.admin.rest.http_protocol import CONNECTION_KEY, KEEP_ALIVE_SECONDS, HttpConnection
from sluice.admin.rest.routes.bulk_routes import BulkResources
from sluice.admin.rest.routes.live_routes import LiveFeed

__all__ = [
    "CONNECTION_KEY",
    "KEEP_ALIVE_SECONDS",
    "MAX_BODY_BYTES",
    "BulkResources",
    "HttpConnection",
    "LiveFeed",
    "RestApi",
    "make_app",
]
