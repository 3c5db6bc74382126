"""Clients over REST."""

from __future__ import annotations

import asyncio

from sluice.access.identity import AdminAuthenticator
from tests.admin.rest.conftest import OpenRestApi, RestApi, until


async def test_client_is_listed_shown_and_kicked(rest_api: RestApi) -> None:
    async with rest_api.harness.client("a client/1") as client:
        await client.subscribe("news/#", qos=1)
        (row,) = await rest_api.ok("GET", "/clients")
        assert (row["client"], row["connected"], row["subscriptions"]) == ("a client/1", True, 1)
        assert row["connected_at"].endswith("Z") and row["disconnected_at"] is None
        detail = await rest_api.ok("GET", "/clients/a%20client%2F1")
        assert detail["client"] == row
        assert detail["subscriptions"] == [{"filter": "news/#", "qos": 1}]
        assert await rest_api.ok("GET", "/clients?state=disconnected") == []
        await rest_api.refused(400, "GET", "/clients?state=sleeping")
        sessions = rest_api.harness.broker.registry.sessions
        session = sessions["a client/1"]
        done = await rest_api.ok("DELETE", "/clients/a%20client%2F1?end_session=true")
        assert done == {"disconnected": True, "session_ended": True}
        await until(lambda: sessions.get("a client/1") is not session)
        await asyncio.sleep(0)
    refused = await rest_api.refused(404, "DELETE", "/clients/nobody")  # words: allowed
    assert "there is no client" in refused["message"]


async def test_viewer_may_list_clients_but_not_kick(
    open_rest_api: OpenRestApi, keyring: AdminAuthenticator
) -> None:
    rest_api = await open_rest_api(keyring)
    rest_api.api.headers["Authorization"] = "Bearer viewer"
    assert await rest_api.ok("GET", "/clients") == []
    await rest_api.refused(403, "DELETE", "/clients/w-1")
