"""Keep-alive and connect timeouts: the silence allowed before and after CONNECT."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Disconnect, Pingreq
from tests.broker.kit import BrokerHarness


def test_a_client_is_dropped_after_one_and_a_half_times_its_keep_alive(
    harness: BrokerHarness,
) -> None:
    client = harness.connect("a", keep_alive=10)
    harness.advance(14.9)
    assert not client.closed
    harness.advance(0.2)
    reason, why = client.fault()
    assert reason == 0x8D
    assert "15 seconds" in why


def test_a_silent_3_1_1_client_is_dropped_without_a_packet(harness: BrokerHarness) -> None:
    client = harness.connect("a", V311, keep_alive=10)
    harness.advance(15.1)
    assert client.closed
    assert client.take() == []


def test_each_packet_restarts_the_keep_alive(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("a", version, keep_alive=10)
    for _ in range(10):
        harness.advance(14)
        client.ping()
    client.publish("t")
    harness.advance(14)
    assert not client.closed
    harness.advance(1.1)
    assert client.closed


def test_packets_sent_to_a_client_do_not_extend_its_keep_alive(harness: BrokerHarness) -> None:
    client, other = harness.connect("a", keep_alive=10), harness.connect("b")
    client.subscribe("t")
    for _ in range(3):
        harness.advance(5.1)
        other.publish("t")
    assert client.closed


def test_keep_alive_0_disables_the_timeout(harness: BrokerHarness) -> None:
    client = harness.connect("a", keep_alive=0)
    harness.advance(365 * 86_400)
    client.ping()


def test_server_keep_alive_is_the_one_enforced() -> None:
    harness = BrokerHarness(max_keep_alive=10)
    client = harness.connect("a", keep_alive=0)
    harness.advance(15.1)
    assert client.fault()[0] == 0x8D


def test_socket_without_a_connect_is_closed_in_time() -> None:
    harness = BrokerHarness(connect_timeout=3.0)
    silent, slow = harness.open(), harness.open()
    for byte in b"\x10\x0e\x00\x04MQ":
        harness.advance(0.4)
        slow.feed(bytes([byte]))
    assert not silent.closed and not slow.closed
    harness.advance(0.7)
    assert silent.closed and slow.closed
    assert silent.take() == []


def test_a_connected_client_outlives_the_connect_timeout(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    harness.advance(harness.limits.connect_timeout * 2)
    client.ping()


def test_client_that_does_not_read_the_disconnect_is_aborted(harness: BrokerHarness) -> None:
    client = harness.connect("a", keep_alive=10)
    client.transport.is_blocked = True
    harness.advance(15.1)
    assert client.transport.closing and not client.closed
    harness.advance(5)
    assert client.closed and client.transport.aborted


def test_connect_timeout_does_not_cut_short_the_last_packets(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    harness.advance(harness.limits.connect_timeout - 0.1)
    client.transport.is_blocked = True
    client.feed(b"\x00\x00")
    harness.advance(4)
    assert not client.closed
    client.transport.drain()
    harness.loop.settle()
    assert client.only(Disconnect).reason == 0x81


def test_no_timer_remains_when_all_clients_have_left(harness: BrokerHarness) -> None:
    for nth in range(50):
        harness.connect(f"c{nth}", keep_alive=10).disconnect()
    harness.advance(60)
    assert len(harness.broker.scheduler) == 0
    assert harness.broker.connections == set()


def test_reconnecting_client_leaves_no_timer_of_its_old_sessions(harness: BrokerHarness) -> None:
    for _ in range(20_000):
        harness.connect("a", clean=False, session_expiry=365 * 86_400, keep_alive=60).disconnect()
        harness.advance(1)
    assert len(harness.broker.scheduler) < 5_000


@pytest.mark.parametrize("pings", [1, 3])
def test_keep_alive_counts_from_the_last_packet_and_not_from_the_timer(
    harness: BrokerHarness, pings: int
) -> None:
    client = harness.connect("a", keep_alive=2)
    for _ in range(pings):
        harness.advance(2.9)
        client.send(Pingreq())
    client.take()
    harness.advance(2.9)
    assert not client.closed
    harness.advance(0.2)
    assert client.closed
