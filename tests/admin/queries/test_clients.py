"""Clients and persistent sessions in the admin service, on every store."""

from __future__ import annotations

import asyncio

import pytest

from sluice.admin.queries import client_operations
from sluice.errors import ClientNotConnected, UnknownClient
from sluice.wire.packets import Disconnect
from sluice.wire.reasons import ADMINISTRATIVE_ACTION
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join


async def test_clients_are_listed_with_subscriptions_and_queued_messages(
    harness: BrokerHarness,
) -> None:
    away = harness.connect("away-1", session_expiry=3600)
    away.subscribe("news/#", qos=1)
    join(away, "$queue/tasks", consumer_group="w")
    away.disconnect()
    reader = harness.connect("reader-1")
    reader.subscribe("news/#")
    harness.advance(5)
    reader.publish("news/today", b"rain", qos=1)
    found = await harness.call(harness.admin.clients())
    assert [one.client for one in found] == ["away-1", "reader-1"]
    gone, here = found
    assert (gone.connected, gone.subscriptions, gone.queued, gone.session_expiry) == (
        False,
        2,
        1,
        3600,
    )
    assert gone.connected_at == 0.0 and gone.disconnected_at > 0.0 and gone.queued_bytes > 0
    assert here.connected and here.protocol == "MQTT 5.0" and here.connected_at > 0.0
    detail = await harness.call(harness.admin.client("away-1"))
    assert [(one.filter, one.qos) for one in detail.subscriptions] == [
        ("$queue/tasks", 1),
        ("news/#", 1),
    ]
    assert [(one.queue, one.group) for one in detail.consumers] == [("tasks", "w")]
    with pytest.raises(UnknownClient, match="there is no client 'x'"):
        await harness.call(harness.admin.client("x"))


async def test_clients_are_paginated_and_filtered(harness: BrokerHarness) -> None:
    for nth in range(5):
        harness.connect(f"w-{nth}", session_expiry=60)
    harness.connect("x-1", session_expiry=60).disconnect()
    admin = harness.admin
    assert [one.client for one in await harness.call(admin.clients("w-", "w-1", 2))] == [
        "w-2",
        "w-3",
    ]
    away = await harness.call(admin.clients(connected=False))
    assert [one.client for one in away] == ["x-1"]
    assert len(await harness.call(admin.clients(connected=True))) == 5
    assert await harness.call(admin.clients(user="ann")) == []


async def test_kick_ends_the_connection_and_only_on_request_the_session(
    harness: BrokerHarness,
) -> None:
    client = harness.connect("w-1", session_expiry=60)
    client.subscribe("news/#", qos=1)
    done = await harness.call(harness.admin.kick_client("w-1"))
    assert (done.disconnected, done.session_ended) == (True, False)
    (farewell,) = [one for one in client.take() if isinstance(one, Disconnect)]
    assert farewell.reason == ADMINISTRATIVE_ACTION
    with pytest.raises(ClientNotConnected, match="only its session exists"):
        await harness.call(harness.admin.kick_client("w-1"))
    done = await harness.call(harness.admin.kick_client("w-1", end_session=True))
    assert (done.disconnected, done.session_ended) == (False, True)
    with pytest.raises(UnknownClient):
        await harness.call(harness.admin.kick_client("w-1"))
    harness.connect("w-2")
    done = await harness.call(harness.admin.kick_client("w-2"))
    assert (done.disconnected, done.session_ended) == (True, True)


async def test_list_of_many_sessions_lets_the_broker_work_meanwhile(
    harness: BrokerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_operations, "NAMES_PER_TURN", 10)
    for nth in range(95):
        harness.connect(f"w-{nth:03}", session_expiry=60)
    listing = asyncio.ensure_future(harness.admin.clients("", "", 3))
    turns = 0
    while not listing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 10
    assert [one.client for one in listing.result()] == ["w-000", "w-001", "w-002"]
