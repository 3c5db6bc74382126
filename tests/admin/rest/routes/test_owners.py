"""Owners of exclusive queues over REST."""

from __future__ import annotations

from sluice.access.identity import AdminAuthenticator
from sluice.message import Message
from tests.admin.live_broker import LiveBroker
from tests.admin.rest.conftest import OpenRestApi, RestApi


def write(harness: LiveBroker, client: str, key: str, value: bytes) -> None:
    harness.engine.exclusive.publish(
        client, Message(value, b"", key.encode()), harness.broker.turn.begin()
    )
    harness.commit_loop.end_turn()


async def test_owners_are_listed_peeked_and_purged(rest_api: RestApi) -> None:
    for key, value in (("speed", b"80"), ("brakes/left", b"open"), ("speed", b"95")):
        write(rest_api.harness, "a car", key, value)
    (owner,) = await rest_api.ok("GET", "/ecq")
    assert (owner["client"], owner["depth"], owner["last_sequence"], owner["acked_sequence"]) == (
        "a car",
        2,
        3,
        0,
    )
    assert owner["acked_at"] is None and owner["written_at"].endswith("Z")
    assert await rest_api.ok("GET", "/ecq/a%20car") == owner
    values = await rest_api.ok("GET", "/ecq/a%20car/values?start=3")
    assert [(one["key"], one["payload"], one["sequence"]) for one in values] == [("speed", "95", 3)]
    assert await rest_api.ok("POST", "/ecq/a%20car/purge") == {"purged": 2}
    assert await rest_api.ok("GET", "/ecq/a%20car/values") == []
    assert await rest_api.ok("GET", "/ecq?prefix=b") == []


async def test_owner_that_only_subscribed_was_never_written_to(rest_api: RestApi) -> None:
    harness = rest_api.harness
    harness.engine.exclusive.create_owner("car-1", harness.broker.turn.begin())
    harness.commit_loop.end_turn()
    owner = await rest_api.ok("GET", "/ecq/car-1")
    assert (owner["written_at"], owner["last_sequence"], owner["acked_at"]) == (None, 0, None)
    write(harness, "car-1", "speed", b"80")
    assert (await rest_api.ok("GET", "/ecq/car-1"))["written_at"].endswith("Z")


async def test_unknown_owner_is_not_found(rest_api: RestApi) -> None:
    for method, path in (("GET", "/ecq/x"), ("GET", "/ecq/x/values"), ("POST", "/ecq/x/purge")):
        assert (
            "there is no exclusive queue" in (await rest_api.refused(404, method, path))["message"]
        )
    await rest_api.refused(400, "GET", "/ecq?limit=0")


async def test_viewer_may_peek_but_not_purge(
    open_rest_api: OpenRestApi, keyring: AdminAuthenticator
) -> None:
    rest_api = await open_rest_api(keyring)
    write(rest_api.harness, "car-1", "speed", b"80")
    rest_api.api.headers["Authorization"] = "Bearer viewer"
    assert len(await rest_api.ok("GET", "/ecq")) == 1
    await rest_api.refused(403, "POST", "/ecq/car-1/purge")
