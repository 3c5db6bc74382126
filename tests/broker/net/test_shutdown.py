"""The end of a server: everybody is told, and nobody can hold it up."""

from __future__ import annotations

from sluice.wire.packets import V311
from tests.broker.kit import House, will


def test_every_client_is_told_that_the_server_shuts_down(house: House) -> None:
    new, old, unknown = house.connect("a"), house.connect("b", V311), house.open()
    ended: list[bool] = []
    house.broker.stop(lambda: ended.append(True))
    house.loop.settle()
    assert new.fault()[0] == 0x8B
    assert old.closed and unknown.closed
    assert old.take() == unknown.take() == []
    assert ended
    assert house.broker.connections == set()


def test_an_empty_server_stops_at_once(house: House) -> None:
    ended: list[bool] = []
    house.broker.stop(lambda: ended.append(True))
    assert ended == [True]


def test_a_client_that_does_not_read_is_cut_off_at_the_end(house: House) -> None:
    client = house.connect("a")
    client.transport.jammed = True
    ended: list[bool] = []
    house.broker.stop(lambda: ended.append(True))
    house.loop.settle()
    assert not ended
    house.broker.close()
    house.loop.settle()
    assert client.closed and ended


def test_lasting_sessions_are_kept_to_the_end(house: House) -> None:
    house.connect_lasting("a")
    house.connect("b")
    house.broker.stop(lambda: None)
    house.loop.settle()
    assert house.sessions() == {"a"}


def test_a_will_reaches_a_session_that_waits(house: House) -> None:
    heir = house.connect_lasting("heir")
    heir.subscribe("will", qos=1)
    house.connect("a", will=will("will", qos=1))
    house.broker.stop(lambda: None)
    house.loop.settle()
    session = house.broker.registry.sessions["heir"]
    assert len(session.inflight) + len(session.waiting or ()) == 1


def test_nothing_waits_after_the_end(house: House) -> None:
    house.connect("a", keep_alive=10)
    house.broker.stop(lambda: None)
    house.broker.close()
    house.advance(100)
    assert house.counters.clients_connected == 0
