"""Shutdown: every client is notified, and no client can delay it."""

from __future__ import annotations

from sluice.wire.packets import V311
from tests.broker.kit import BrokerHarness
from tests.broker.peers import will


def test_every_client_gets_a_disconnect_at_shutdown(harness: BrokerHarness) -> None:
    new, old, unknown = harness.connect("a"), harness.connect("b", V311), harness.open()
    ended: list[bool] = []
    harness.broker.stop(lambda: ended.append(True))
    harness.loop.settle()
    assert new.fault()[0] == 0x8B
    assert old.closed and unknown.closed
    assert old.take() == unknown.take() == []
    assert ended
    assert harness.broker.connections == set()


def test_server_without_clients_stops_at_once(harness: BrokerHarness) -> None:
    ended: list[bool] = []
    harness.broker.stop(lambda: ended.append(True))
    assert ended == [True]


def test_client_that_does_not_read_is_aborted_at_shutdown(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.transport.is_blocked = True
    ended: list[bool] = []
    harness.broker.stop(lambda: ended.append(True))
    harness.loop.settle()
    assert not ended
    harness.broker.close()
    harness.loop.settle()
    assert client.closed and ended


def test_persistent_sessions_exist_until_the_end(harness: BrokerHarness) -> None:
    harness.connect_persistent("a")
    harness.connect("b")
    harness.broker.stop(lambda: None)
    harness.loop.settle()
    assert harness.sessions() == {"a"}


def test_will_at_shutdown_reaches_an_offline_session(harness: BrokerHarness) -> None:
    will_subscriber = harness.connect_persistent("subscriber")
    will_subscriber.subscribe("will", qos=1)
    harness.connect("a", will=will("will", qos=1))
    harness.broker.stop(lambda: None)
    harness.loop.settle()
    session = harness.broker.registry.sessions["subscriber"]
    assert len(session.outbound.inflight) + len(session.outbound.queued or ()) == 1


def test_no_timer_remains_after_shutdown(harness: BrokerHarness) -> None:
    harness.connect("a", keep_alive=10)
    harness.broker.stop(lambda: None)
    harness.broker.close()
    harness.advance(100)
    assert harness.counters.clients_connected == 0
