"""SUBSCRIBE and UNSUBSCRIBE: which filters are granted, and how overlapping ones are merged."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V5, V311, Suback, Subscribe, SubscriptionRequest
from tests.broker.kit import BrokerHarness


def test_each_filter_has_its_own_reason_code_in_order(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.send(
        Subscribe(
            7,
            [
                SubscriptionRequest(b"a", 2),
                SubscriptionRequest(b"b/#/c", 1),
                SubscriptionRequest(b"c", 0),
                SubscriptionRequest(b"d", 1),
            ],
        )
    )
    suback = client.first(Suback)
    assert (suback.packet_id, suback.reasons) == (7, [2, 0x8F, 0, 1])
    assert suback.properties is not None and suback.properties.reason_string


@pytest.mark.parametrize("bad", ["#/a", "a/#/b", "a#", "+a", "a/b+", "a/+b/c", "/#a"])
def test_malformed_filter_is_refused(harness: BrokerHarness, version: int, bad: str) -> None:
    client = harness.connect("a", version)
    assert client.subscribe("ok", bad) == [0, 0x8F if version == V5 else 0x80]
    client.ping()


def test_filter_with_too_many_levels_is_refused() -> None:
    client = BrokerHarness(max_topic_levels=4).connect("a")
    assert client.subscribe("a/b/c/d", "a/b/c/d/e", "$share/g/a/b/c/d") == [0, 0x8F, 0]


def test_filter_refused_by_configuration_gets_0x80(version: int) -> None:
    client = BrokerHarness(refused_filters=[b"test/nosubscribe"]).connect("a", version)
    assert client.subscribe("test/nosubscribe", "test/other", qos=1) == [0x80, 1]


def test_wildcards_can_be_disabled() -> None:
    client = BrokerHarness(wildcard_subscriptions=False).connect("a")
    assert client.subscribe("a/+", "#", "$share/g/#", "a") == [0xA2, 0xA2, 0xA2, 0]


def test_subscriptions_per_client_are_limited() -> None:
    client = BrokerHarness(max_subscriptions=2).connect("a")
    assert client.subscribe("a", "b", "c") == [0, 0, 0x97]
    assert client.subscribe("a", qos=1) == [1]
    client.unsubscribe("a")
    assert client.subscribe("c") == [0]


def test_same_filter_replaces_the_old_subscription(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("a", version)
    client.subscribe("t", qos=2)
    client.subscribe("t", qos=0)
    harness.connect("w").publish("t", b"x", 2)
    [message] = client.messages()
    assert message.qos == 0
    assert harness.broker.router.subscriptions.count == 1


def test_overlapping_subscriptions_get_one_message_with_the_highest_qos(
    harness: BrokerHarness, version: int
) -> None:
    client = harness.connect("a", version)
    client.subscribe("t/#", qos=2)
    client.subscribe("t/+", qos=1)
    client.subscribe("t/x", qos=0)
    harness.connect("w").publish("t/x", b"x", 2)
    [message] = client.messages()
    assert message.qos == 2


def test_message_carries_the_ids_of_all_matching_subscriptions(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.subscribe("t/#", identifier=1)
    client.subscribe("t/x", identifier=268_435_455, qos=1)
    client.subscribe("+/x")
    client.subscribe("other", identifier=3)
    harness.connect("w").publish("t/x", b"x", 1)
    [message] = client.messages()
    assert message.qos == 1
    assert sorted(message.subscription_ids or []) == [1, 268_435_455]


def test_subscription_id_is_replaced_with_its_subscription(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.subscribe("t", identifier=1)
    client.subscribe("t", identifier=2)
    writer = harness.connect("w")
    writer.publish("t")
    client.subscribe("t")
    writer.publish("t")
    assert [message.subscription_ids for message in client.messages()] == [[2], None]


def test_subscription_id_0_is_a_protocol_error(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.feed(b"\x82\x09\x00\x01\x02\x0b\x00\x00\x01t\x00")
    assert client.fault()[0] == 0x82


def test_no_local_excludes_a_clients_own_messages(harness: BrokerHarness) -> None:
    one, other = harness.connect("a"), harness.connect("b")
    one.subscribe("t", no_local=True)
    other.subscribe("t", no_local=True)
    one.publish("t", b"x")
    assert other.payloads() == [b"x"]
    assert one.take() == []


def test_no_local_applies_to_its_own_subscription_only(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.subscribe("t/#", no_local=True, identifier=1, qos=2)
    client.subscribe("t/x", identifier=2)
    client.publish("t/x", b"own", 0)
    harness.connect("w").publish("t/x", b"other", 0)
    own, other = client.messages()
    assert (own.payload, own.subscription_ids) == (b"own", [2])
    assert sorted(other.subscription_ids or []) == [1, 2]


def test_unsubscribed_filter_gets_no_more_messages(harness: BrokerHarness, version: int) -> None:
    client = harness.connect("a", version)
    client.subscribe("t", "t/#", "u")
    assert client.unsubscribe("t", "nothing", "u") == ([0, 0x11, 0] if version == V5 else [])
    writer = harness.connect("w")
    for topic in ("t", "u", "t/x"):
        writer.publish(topic, topic.encode())
    assert client.payloads() == [b"t", b"t/x"]


def test_messages_in_flight_before_an_unsubscribe_are_completed(harness: BrokerHarness) -> None:
    client = harness.connect_persistent("a", receive_maximum=1)
    client.subscribe("t", qos=1)
    writer = harness.connect("w")
    writer.publish("t", b"1", 1)
    writer.publish("t", b"2", 1)
    [first] = client.messages()
    client.unsubscribe("t")
    client.ack(first)
    assert client.payloads() == [b"2"]


def test_3_1_1_suback_reports_failure_as_0x80(harness: BrokerHarness) -> None:
    client = harness.connect("a", V311)
    client.feed(b"\x82\x06\x00\x01\x00\x01+\x02")
    assert bytes(client.transport.sent) == b"\x90\x03\x00\x01\x02"
    client.take()
    client.feed(b"\x82\x07\x00\x01\x00\x02+x\x02")
    assert bytes(client.transport.sent) == b"\x90\x03\x00\x01\x80"


@pytest.mark.parametrize(
    ("topic_filter", "topic", "arrives"),
    [
        ("sport/#", "sport", True),
        ("sport/+", "sport/", True),
        ("sport/+", "sport", False),
        ("+/+", "/finance", True),
        ("/+", "/finance", True),
        ("+", "/finance", False),
        ("#", "$DATA/x", False),
        ("+/x", "$DATA/x", False),
        ("$DATA/#", "$DATA/x", True),
        ("$DATA/+", "$DATA/x", True),
        ("ACCOUNTS", "Accounts", False),
        ("a", "a ", False),
        ("a/\u00e4/+", "a/\u00e4/b", True),
    ],
)
def test_filters_match_as_the_specification_says(
    harness: BrokerHarness, version: int, topic_filter: str, topic: str, arrives: bool
) -> None:
    client = harness.connect("a", version)
    client.subscribe(topic_filter)
    harness.connect("w", version).publish(topic, b"x")
    assert client.payloads() == ([b"x"] if arrives else [])


def test_subscription_made_after_a_topic_was_routed_is_found(harness: BrokerHarness) -> None:
    writer, client = harness.connect("w"), harness.connect("a")
    writer.publish("t/x", b"0")
    for nth, topic_filter in enumerate(("t/x", "t/+", "#")):
        client.subscribe(topic_filter)
        writer.publish("t/x", b"%d" % nth)
        client.unsubscribe(topic_filter)
        writer.publish("t/x", b"no")
    assert client.payloads() == [b"0", b"1", b"2"]
