"""Owners of exclusive queues in the admin service, on every store."""

from __future__ import annotations

import asyncio

import pytest

from sluice.admin.queries import owner_operations
from sluice.errors import UnknownOwner
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, put, take


async def test_owners_are_listed_with_backlog_and_position(harness: BrokerHarness) -> None:
    writer = harness.connect("writer")
    for key in ("a", "b", "c", "a"):
        assert put(writer, f"$ECQ/w/car-1/{key}", b"x" * 10)[0] == 0
    put(writer, "$ECQ/w/bus-1/a", b"y")
    owner = harness.connect("car-1", receive_maximum=2)
    join(owner, "$ECQ/car-1/#")
    first = owner.messages()
    owner.ack(first[0])
    bus, car = await harness.call(harness.admin.owners())
    assert (
        bus.client,
        bus.depth,
        bus.keys,
        bus.last_sequence,
        bus.acked_sequence,
        bus.acked_at,
    ) == (
        *("bus-1", 1, 1, 1, 0),
        0.0,
    )
    assert not bus.connected and not bus.subscribed
    assert (car.client, car.depth, car.keys, car.last_sequence, car.acked_sequence) == (
        "car-1",
        2,
        3,
        4,
        2,
    )
    assert car.acked_at == harness.loop.now and car.connected and car.subscribed
    assert [one.client for one in await harness.call(harness.admin.owners(prefix="car"))] == [
        "car-1"
    ]
    assert [one.client for one in await harness.call(harness.admin.owners(after="bus-1"))] == [
        "car-1"
    ]
    assert [one.client for one in await harness.call(harness.admin.owners(limit=1))] == ["bus-1"]
    assert await harness.call(harness.admin.owner("car-1")) == car


async def test_expired_value_is_not_listed_and_not_counted(harness: BrokerHarness) -> None:
    writer = harness.connect("writer")
    put(writer, "$ECQ/w/car-1/a", b"short", message_expiry=10)
    put(writer, "$ECQ/w/car-1/b", b"long")
    harness.advance(60)
    assert [one.key for one in await harness.call(harness.admin.peek_owner("car-1"))] == ["b"]
    owner = await harness.call(harness.admin.owner("car-1"))
    assert (owner.depth, owner.keys) == (1, 1)


async def test_broker_serves_others_while_many_owners_are_listed(
    harness: BrokerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that is deleted during the list is left out."""
    monkeypatch.setattr(owner_operations, "ROWS_PER_TURN", 1)
    writer = harness.connect("writer")
    for number in range(5):
        put(writer, f"$ECQ/w/car-{number}/a", b"x")
    listing = asyncio.ensure_future(harness.admin.owners())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not listing.done()
    exclusive = harness.engine.exclusive
    exclusive.delete_owner(exclusive.owners["car-4"], harness.loop.now)
    found = await listing
    assert [one.client for one in found] == ["car-0", "car-1", "car-2", "car-3"]


async def test_peek_shows_last_values_without_consuming_them(harness: BrokerHarness) -> None:
    writer = harness.connect("writer")
    for key, value in (("a", b"1"), ("b/c", b"2"), ("a", b"3"), ("d", b"4")):
        put(writer, f"$ECQ/w/car-1/{key}", value, content_type="text/plain", message_expiry=60)
    owner = harness.connect("car-1", receive_maximum=2)
    join(owner, "$ECQ/car-1/#")
    owner.ack(owner.messages()[0])
    found = await harness.call(harness.admin.peek_owner("car-1"))
    assert [(one.key, one.payload, one.sequence, one.state) for one in found] == [
        ("b/c", b"2", 2, "settled"),
        ("a", b"3", 3, "delivered"),
        ("d", b"4", 4, "delivered"),
    ]
    assert found[0].content_type == "text/plain" and found[0].expires_at == harness.loop.now + 60
    assert [
        one.sequence
        for one in await harness.call(harness.admin.peek_owner("car-1", start=3, limit=1))
    ] == [3]


async def test_purge_is_answered_after_commit(harness: BrokerHarness) -> None:
    writer, owner = harness.connect("writer"), harness.connect("car-1")
    for key in ("a", "b"):
        put(writer, f"$ECQ/w/car-1/{key}", b"1")
    assert await harness.call(harness.admin.purge_owner("car-1")) == 2
    join(owner, "$ECQ/car-1/#")
    assert take(owner) == []
    view = await harness.call(harness.admin.owner("car-1"))
    assert (view.depth, view.keys, view.bytes, view.last_sequence) == (0, 0, 0, 2)


async def test_unknown_owner_is_refused(harness: BrokerHarness) -> None:
    for question in (
        harness.admin.owner("x"),
        harness.admin.peek_owner("x"),
        harness.admin.purge_owner("x"),
    ):
        with pytest.raises(UnknownOwner, match="there is no exclusive queue of 'x'"):
            await harness.call(question)
