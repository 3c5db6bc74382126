"""The REST API. Only a broker whose HTTP port was used imports it."""

from sluice.admin.rest.app import RestApi, make_app
from sluice.admin.rest.routes.bulk_routes import BulkResources
from sluice.admin.rest.routes.live_routes import LiveFeed
from sluice.admin.rest.server import HttpServer

__all__ = ["BulkResources", "HttpServer", "LiveFeed", "RestApi", "make_app"]
