"""Silence: how long a connection may say nothing, before and after its CONNECT."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Disconnect, Pingreq
from tests.broker.kit import House


def test_a_client_is_dropped_after_one_and_a_half_times_its_keep_alive(house: House) -> None:
    client = house.connect("a", keep_alive=10)
    house.advance(14.9)
    assert not client.closed
    house.advance(0.2)
    reason, why = client.fault()
    assert reason == 0x8D
    assert "15 seconds" in why


def test_a_silent_3_1_1_client_is_dropped_without_a_packet(house: House) -> None:
    client = house.connect("a", V311, keep_alive=10)
    house.advance(15.1)
    assert client.closed
    assert client.take() == []


def test_each_packet_starts_the_keep_alive_anew(house: House, version: int) -> None:
    client = house.connect("a", version, keep_alive=10)
    for _ in range(10):
        house.advance(14)
        client.ping()
    client.publish("t")
    house.advance(14)
    assert not client.closed
    house.advance(1.1)
    assert client.closed


def test_what_is_sent_to_a_client_does_not_keep_it_alive(house: House) -> None:
    client, other = house.connect("a", keep_alive=10), house.connect("b")
    client.subscribe("t")
    for _ in range(3):
        house.advance(5.1)
        other.publish("t")
    assert client.closed


def test_keep_alive_0_allows_any_silence(house: House) -> None:
    client = house.connect("a", keep_alive=0)
    house.advance(365 * 86_400)
    client.ping()


def test_the_keep_alive_that_the_server_set_is_the_one_that_counts() -> None:
    house = House(max_keep_alive=10)
    client = house.connect("a", keep_alive=0)
    house.advance(15.1)
    assert client.fault()[0] == 0x8D


def test_a_socket_without_a_connect_is_closed_in_time() -> None:
    house = House(connect_timeout=3.0)
    silent, dripping = house.open(), house.open()
    for byte in b"\x10\x0e\x00\x04MQ":
        house.advance(0.4)
        dripping.feed(bytes([byte]))
    assert not silent.closed and not dripping.closed
    house.advance(0.7)
    assert silent.closed and dripping.closed
    assert silent.take() == []


def test_a_connected_client_outlives_the_connect_timeout(house: House) -> None:
    client = house.connect("a")
    house.advance(house.limits.connect_timeout * 2)
    client.ping()


def test_a_client_that_does_not_read_our_last_words_is_cut_off(house: House) -> None:
    client = house.connect("a", keep_alive=10)
    client.transport.jammed = True
    house.advance(15.1)
    assert client.transport.closing and not client.closed
    house.advance(5)
    assert client.closed and client.transport.aborted


def test_last_words_are_not_cut_short_by_the_connect_timeout(house: House) -> None:
    client = house.connect("a")
    house.advance(house.limits.connect_timeout - 0.1)
    client.transport.jammed = True
    client.feed(b"\x00\x00")
    house.advance(4)
    assert not client.closed
    client.transport.drain()
    house.loop.settle()
    assert client.only(Disconnect).reason == 0x81


def test_nothing_waits_any_more_when_everybody_has_left(house: House) -> None:
    for nth in range(50):
        house.connect(f"c{nth}", keep_alive=10).disconnect()
    house.advance(60)
    assert len(house.broker.scheduler) == 0
    assert house.broker.connections == set()


def test_a_client_that_comes_and_goes_leaves_nothing_waiting_for_its_old_sessions(house: House) -> None:
    for _ in range(20_000):
        house.connect("a", clean=False, session_expiry=365 * 86_400, keep_alive=60).disconnect()
        house.advance(1)
    assert len(house.broker.scheduler) < 5_000


@pytest.mark.parametrize("pings", [1, 3])
def test_a_keep_alive_is_counted_from_the_last_packet_and_not_from_the_timer(
    house: House, pings: int
) -> None:
    client = house.connect("a", keep_alive=2)
    for _ in range(pings):
        house.advance(2.9)
        client.send(Pingreq())
    client.take()
    house.advance(2.9)
    assert not client.closed
    house.advance(0.2)
    assert client.closed
