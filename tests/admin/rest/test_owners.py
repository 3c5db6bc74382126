"""Owners of exclusive queues over REST."""

from __future__ import annotations

from sluice.access.identity import Keyring
from sluice.message import Message
from tests.admin.live_broker import Living
from tests.admin.rest.conftest import Door, OpenDoor


def write(house: Living, client: str, key: str, value: bytes) -> None:
    house.engine.exclusive.publish(client, Message(value, b"", key.encode()), house.broker.turn.begin())
    house.runner.end_turn()


async def test_owners_are_listed_looked_at_and_purged(door: Door) -> None:
    for key, value in (("speed", b"80"), ("doors/left", b"open"), ("speed", b"95")):
        write(door.house, "a car", key, value)
    (owner,) = await door.ok("GET", "/ecq")
    assert (owner["client"], owner["depth"], owner["last_sequence"], owner["acked_sequence"]) == (
        "a car",
        2,
        3,
        0,
    )
    assert owner["acked_at"] is None and owner["written_at"].endswith("Z")
    assert await door.ok("GET", "/ecq/a%20car") == owner
    values = await door.ok("GET", "/ecq/a%20car/values?start=3")
    assert [(one["key"], one["payload"], one["sequence"]) for one in values] == [("speed", "95", 3)]
    assert await door.ok("POST", "/ecq/a%20car/purge") == {"purged": 2}
    assert await door.ok("GET", "/ecq/a%20car/values") == []
    assert await door.ok("GET", "/ecq?prefix=b") == []


async def test_an_owner_that_has_only_subscribed_was_never_written_to(door: Door) -> None:
    house = door.house
    house.engine.exclusive.make("car-1", house.broker.turn.begin())
    house.runner.end_turn()
    owner = await door.ok("GET", "/ecq/car-1")
    assert (owner["written_at"], owner["last_sequence"], owner["acked_at"]) == (None, 0, None)
    write(house, "car-1", "speed", b"80")
    assert (await door.ok("GET", "/ecq/car-1"))["written_at"].endswith("Z")


async def test_an_owner_that_is_none_is_not_found(door: Door) -> None:
    for method, path in (("GET", "/ecq/x"), ("GET", "/ecq/x/values"), ("POST", "/ecq/x/purge")):
        assert "nothing was ever written" in (await door.no(404, method, path))["message"]
    await door.no(400, "GET", "/ecq?limit=0")


async def test_a_viewer_looks_and_does_not_purge(open_door: OpenDoor, keyring: Keyring) -> None:
    door = await open_door(keyring)
    write(door.house, "car-1", "speed", b"80")
    door.api.headers["Authorization"] = "Bearer viewer"
    assert len(await door.ok("GET", "/ecq")) == 1
    await door.no(403, "POST", "/ecq/car-1/purge")
