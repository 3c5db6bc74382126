"""Wills: messages that the broker publishes when a client vanishes without a DISCONNECT."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V5, Publish
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client, will


@pytest.fixture
def will_subscriber(harness: BrokerHarness) -> Client:
    """A client that is subscribed to wills."""
    client = harness.connect("subscriber")
    client.subscribe("will/#", qos=2)
    return client


def test_will_is_published_when_the_connection_breaks(
    harness: BrokerHarness, will_subscriber: Client, version: int
) -> None:
    harness.connect("a", version, will=will("will/a", b"gone", qos=1)).drop()
    [message] = will_subscriber.messages()
    assert (message.topic, message.payload, message.qos, message.retain) == (
        b"will/a",
        b"gone",
        1,
        False,
    )


def test_normal_disconnect_discards_the_will(
    harness: BrokerHarness, will_subscriber: Client, version: int
) -> None:
    harness.connect("a", version, will=will("will/a")).disconnect()
    harness.connect("b", will=will("will/b"), will_delay=5, session_expiry=100).disconnect()
    harness.advance(200)
    assert will_subscriber.take() == []


def test_client_may_request_its_will_on_disconnect(
    harness: BrokerHarness, will_subscriber: Client
) -> None:
    harness.connect("a", will=will("will/a")).disconnect(reason=0x04)
    assert will_subscriber.payloads() == [b"gone"]


@pytest.mark.parametrize("reason", [0x80, 0x81, 0x93, 0x99])
def test_disconnect_with_an_error_publishes_the_will(
    harness: BrokerHarness, will_subscriber: Client, reason: int
) -> None:
    harness.connect("a", will=will("will/a")).disconnect(reason=reason)
    assert will_subscriber.payloads() == [b"gone"]


def test_will_is_published_when_the_keep_alive_expires(
    harness: BrokerHarness, will_subscriber: Client, version: int
) -> None:
    harness.connect("a", version, keep_alive=10, will=will("will/a"))
    harness.advance(15.1)
    assert will_subscriber.payloads() == [b"gone"]


def test_will_is_published_on_a_protocol_error(
    harness: BrokerHarness, will_subscriber: Client, version: int
) -> None:
    harness.connect("a", version, will=will("will/a")).feed(b"\x00\x00")
    assert will_subscriber.payloads() == [b"gone"]


def test_will_is_delayed(harness: BrokerHarness, will_subscriber: Client) -> None:
    harness.connect("a", will=will("will/a"), will_delay=10, session_expiry=100).drop()
    harness.advance(9.9)
    assert will_subscriber.take() == []
    harness.advance(0.2)
    assert will_subscriber.payloads() == [b"gone"]
    harness.advance(200)
    assert will_subscriber.take() == []


def test_will_is_discarded_when_the_client_returns_in_time(
    harness: BrokerHarness, will_subscriber: Client
) -> None:
    harness.connect("a", will=will("will/a"), will_delay=10, session_expiry=100).drop()
    harness.advance(9)
    harness.connect("a", clean=False, session_expiry=100)
    harness.advance(200)
    assert will_subscriber.take() == []


def test_will_is_replaced_when_the_client_returns_with_another(
    harness: BrokerHarness, will_subscriber: Client
) -> None:
    harness.connect("a", will=will("will/a", b"first"), will_delay=10, session_expiry=100).drop()
    harness.advance(5)
    harness.connect(
        "a", clean=False, will=will("will/a", b"second"), will_delay=20, session_expiry=100
    ).drop()
    harness.advance(19)
    assert will_subscriber.take() == []
    harness.advance(2)
    assert will_subscriber.payloads() == [b"second"]


def test_will_delay_ends_with_the_session(harness: BrokerHarness, will_subscriber: Client) -> None:
    harness.connect("a", will=will("will/a"), will_delay=100, session_expiry=10).drop()
    harness.advance(9.9)
    assert will_subscriber.take() == []
    harness.advance(0.2)
    assert will_subscriber.payloads() == [b"gone"]
    harness.advance(200)
    assert will_subscriber.take() == []


def test_will_of_a_session_that_ends_at_once_is_not_delayed(
    harness: BrokerHarness, will_subscriber: Client
) -> None:
    harness.connect("a", will=will("will/a"), will_delay=100, session_expiry=0).drop()
    assert will_subscriber.payloads() == [b"gone"]


def test_disconnect_that_ends_the_session_publishes_a_requested_will_at_once(
    harness: BrokerHarness, will_subscriber: Client
) -> None:
    client = harness.connect("a", will=will("will/a"), will_delay=100, session_expiry=10)
    client.disconnect(reason=0x04, session_expiry=0)
    assert will_subscriber.payloads() == [b"gone"]


def test_takeover_publishes_a_will_without_delay(
    harness: BrokerHarness, will_subscriber: Client
) -> None:
    harness.connect("a", will=will("will/a"), session_expiry=100)
    harness.connect("a", clean=False)
    assert will_subscriber.payloads() == [b"gone"]


def test_takeover_discards_a_delayed_will(harness: BrokerHarness, will_subscriber: Client) -> None:
    harness.connect("a", will=will("will/a"), will_delay=10, session_expiry=100)
    harness.connect("a", clean=False, session_expiry=100)
    harness.advance(200)
    assert will_subscriber.take() == []


def test_clean_start_publishes_a_delayed_will_with_the_end_of_the_session(
    harness: BrokerHarness, will_subscriber: Client
) -> None:
    harness.connect("a", will=will("will/a"), will_delay=10, session_expiry=100).drop()
    harness.connect("a", clean=True)
    assert will_subscriber.payloads() == [b"gone"]


def test_will_may_be_retained(harness: BrokerHarness, version: int) -> None:
    harness.connect("a", version, will=will("will/a", retain=True)).drop()
    late = harness.connect("late")
    late.subscribe("will/#")
    [message] = late.messages()
    assert (message.payload, message.retain) == (b"gone", True)


def test_will_that_cannot_be_retained_still_reaches_subscribers() -> None:
    harness = BrokerHarness(max_retained=0)
    will_subscriber = harness.connect("subscriber")
    will_subscriber.subscribe("will/#")
    harness.connect("a", will=will("will/a", retain=True)).drop()
    assert will_subscriber.payloads() == [b"gone"]


def test_will_carries_its_properties(harness: BrokerHarness, will_subscriber: Client) -> None:
    last_will = will(
        "will/a",
        payload_format=1,
        message_expiry=60,
        content_type="text/plain",
        response_topic="answer",
        correlation_data=b"7",
        user=[("k", "1"), ("k", "2")],
    )
    harness.connect("a", will=last_will).drop()
    [message] = will_subscriber.messages()
    assert message.decode_properties() == last_will.decode_properties()


def test_expiry_of_a_will_counts_from_its_publication(
    harness: BrokerHarness, will_subscriber: Client
) -> None:
    client = harness.connect(
        "a", will=will("will/a", message_expiry=60), will_delay=30, session_expiry=100
    )
    harness.advance(1000)
    client.drop()
    harness.advance(31)
    [message] = will_subscriber.messages()
    assert message.expiry_seconds == 60


def test_will_reaches_offline_sessions(harness: BrokerHarness) -> None:
    away = harness.connect_persistent("away")
    away.subscribe("will/#", qos=1)
    away.disconnect()
    harness.connect("a", V5, will=will("will/a", qos=1)).drop()
    assert harness.connect_persistent("away").first(Publish).payload == b"gone"
