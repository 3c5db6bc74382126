"""Wills: the message a client leaves for the case that it goes without saying goodbye."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V5, Publish
from tests.broker.kit import Client, House, will


@pytest.fixture
def heir(house: House) -> Client:
    """Somebody who listens for wills."""
    client = house.connect("heir")
    client.subscribe("will/#", qos=2)
    return client


def test_a_will_is_published_when_the_line_breaks(house: House, heir: Client, version: int) -> None:
    house.connect("a", version, will=will("will/a", b"gone", qos=1)).drop()
    [message] = heir.messages()
    assert (message.topic, message.payload, message.qos, message.retain) == (b"will/a", b"gone", 1, False)


def test_a_client_that_says_goodbye_leaves_no_will(house: House, heir: Client, version: int) -> None:
    house.connect("a", version, will=will("will/a")).disconnect()
    house.connect("b", will=will("will/b"), will_delay=5, session_expiry=100).disconnect()
    house.advance(200)
    assert heir.take() == []


def test_a_client_may_ask_for_its_will_with_its_goodbye(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a")).disconnect(reason=0x04)
    assert heir.payloads() == [b"gone"]


@pytest.mark.parametrize("reason", [0x80, 0x81, 0x93, 0x99])
def test_a_client_that_leaves_over_an_error_leaves_its_will(house: House, heir: Client, reason: int) -> None:
    house.connect("a", will=will("will/a")).disconnect(reason=reason)
    assert heir.payloads() == [b"gone"]


def test_a_will_is_published_when_the_keep_alive_runs_out(house: House, heir: Client, version: int) -> None:
    house.connect("a", version, keep_alive=10, will=will("will/a"))
    house.advance(15.1)
    assert heir.payloads() == [b"gone"]


def test_a_will_is_published_when_its_client_breaks_a_rule(house: House, heir: Client, version: int) -> None:
    house.connect("a", version, will=will("will/a")).feed(b"\x00\x00")
    assert heir.payloads() == [b"gone"]


def test_a_will_waits_for_its_delay(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a"), will_delay=10, session_expiry=100).drop()
    house.advance(9.9)
    assert heir.take() == []
    house.advance(0.2)
    assert heir.payloads() == [b"gone"]
    house.advance(200)
    assert heir.take() == []


def test_a_client_that_comes_back_in_time_leaves_no_will(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a"), will_delay=10, session_expiry=100).drop()
    house.advance(9)
    house.connect("a", clean=False, session_expiry=100)
    house.advance(200)
    assert heir.take() == []


def test_a_client_that_comes_back_with_another_will_leaves_that_one(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a", b"first"), will_delay=10, session_expiry=100).drop()
    house.advance(5)
    house.connect("a", clean=False, will=will("will/a", b"second"), will_delay=20, session_expiry=100).drop()
    house.advance(19)
    assert heir.take() == []
    house.advance(2)
    assert heir.payloads() == [b"second"]


def test_a_will_does_not_wait_longer_than_the_session_lives(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a"), will_delay=100, session_expiry=10).drop()
    house.advance(9.9)
    assert heir.take() == []
    house.advance(0.2)
    assert heir.payloads() == [b"gone"]
    house.advance(200)
    assert heir.take() == []


def test_a_will_of_a_session_that_ends_at_once_does_not_wait(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a"), will_delay=100, session_expiry=0).drop()
    assert heir.payloads() == [b"gone"]


def test_a_disconnect_that_ends_the_session_publishes_a_will_it_asks_for_at_once(
    house: House, heir: Client
) -> None:
    client = house.connect("a", will=will("will/a"), will_delay=100, session_expiry=10)
    client.disconnect(reason=0x04, session_expiry=0)
    assert heir.payloads() == [b"gone"]


def test_a_takeover_publishes_a_will_without_delay(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a"), session_expiry=100)
    house.connect("a", clean=False)
    assert heir.payloads() == [b"gone"]


def test_a_takeover_cancels_a_will_with_delay(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a"), will_delay=10, session_expiry=100)
    house.connect("a", clean=False, session_expiry=100)
    house.advance(200)
    assert heir.take() == []


def test_a_clean_start_ends_the_session_and_so_publishes_a_waiting_will(house: House, heir: Client) -> None:
    house.connect("a", will=will("will/a"), will_delay=10, session_expiry=100).drop()
    house.connect("a", clean=True)
    assert heir.payloads() == [b"gone"]


def test_a_will_may_be_retained(house: House, version: int) -> None:
    house.connect("a", version, will=will("will/a", retain=True)).drop()
    late = house.connect("late")
    late.subscribe("will/#")
    [message] = late.messages()
    assert (message.payload, message.retain) == (b"gone", True)


def test_a_retained_will_that_cannot_be_kept_still_reaches_those_who_listen() -> None:
    house = House(max_retained=0)
    heir = house.connect("heir")
    heir.subscribe("will/#")
    house.connect("a", will=will("will/a", retain=True)).drop()
    assert heir.payloads() == [b"gone"]


def test_a_will_carries_its_properties(house: House, heir: Client) -> None:
    testament = will(
        "will/a",
        payload_format=1,
        message_expiry=60,
        content_type="text/plain",
        response_topic="answer",
        correlation_data=b"7",
        user=[("k", "1"), ("k", "2")],
    )
    house.connect("a", will=testament).drop()
    [message] = heir.messages()
    assert message.properties() == testament.properties()


def test_the_expiry_of_a_will_counts_from_its_publication(house: House, heir: Client) -> None:
    client = house.connect("a", will=will("will/a", message_expiry=60), will_delay=30, session_expiry=100)
    house.advance(1000)
    client.drop()
    house.advance(31)
    [message] = heir.messages()
    assert message.expiry == 60


def test_a_will_reaches_those_who_are_away(house: House) -> None:
    away = house.connect_lasting("away")
    away.subscribe("will/#", qos=1)
    away.disconnect()
    house.connect("a", V5, will=will("will/a", qos=1)).drop()
    assert house.connect_lasting("away").first(Publish).payload == b"gone"
