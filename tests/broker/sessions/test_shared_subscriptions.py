"""Shared subscriptions: each message goes to one of the members."""

from __future__ import annotations

from itertools import chain

import pytest

from sluice.wire.packets import Ack
from sluice.wire.properties import PUBREC
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client


def members(
    harness: BrokerHarness, count: int, qos: int = 1, topic_filter: str = "$share/g/t/#"
) -> list[Client]:
    clients = [harness.connect_persistent(f"m{nth}") for nth in range(count)]
    for client in clients:
        assert client.subscribe(topic_filter, qos=qos) == [qos]
    return clients


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_are_distributed_round_robin(harness: BrokerHarness, qos: int) -> None:
    clients = members(harness, 3, qos)
    writer = harness.connect("w")
    for nth in range(9):
        writer.publish("t/x", b"%d" % nth, qos)
    reported = [client.payloads() for client in clients]
    assert [len(one) for one in reported] == [3, 3, 3]
    assert sorted(chain(*reported)) == [b"%d" % nth for nth in range(9)]


def test_member_that_subscribes_again_counts_once(harness: BrokerHarness) -> None:
    clients = members(harness, 2, 0)
    for _ in range(4):
        clients[0].subscribe("$share/g/t/#", qos=0)
    assert harness.broker.router.subscriptions.shared_count == 2
    writer = harness.connect("w")
    for nth in range(12):
        writer.publish("t/x", b"%d" % nth, 0)
    assert [len(client.payloads()) for client in clients] == [6, 6]


def test_shares_are_independent_of_each_other_and_of_ordinary_subscriptions(
    harness: BrokerHarness,
) -> None:
    one, other, plain = harness.connect("a"), harness.connect("b"), harness.connect("c")
    one.subscribe("$share/g/t")
    other.subscribe("$share/h/t")
    plain.subscribe("t")
    harness.connect("w").publish("t", b"x")
    assert one.payloads() == other.payloads() == plain.payloads() == [b"x"]


def test_client_may_have_an_ordinary_and_a_shared_subscription(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.subscribe("t", identifier=1)
    client.subscribe("$share/g/t", identifier=2)
    harness.connect("w").publish("t", b"x")
    assert sorted(message.subscription_ids or [] for message in client.messages()) == [[1], [2]]


def test_member_that_unsubscribes_gets_no_more(harness: BrokerHarness) -> None:
    first, second = members(harness, 2)
    assert first.unsubscribe("$share/g/t/#") == [0]
    assert first.unsubscribe("$share/g/t/#") == [0x11]
    writer = harness.connect("w")
    for _ in range(4):
        writer.publish("t/x", b"", 1)
    assert (len(first.messages()), len(second.messages())) == (0, 4)
    second.unsubscribe("$share/g/t/#")
    assert harness.broker.router.subscriptions.shared_count == 0
    writer.take()
    writer.publish("t/x", b"", 1, packet_id=9)
    writer.first_ack(4, 9, 0x10)


def test_online_members_are_preferred_to_offline_ones(harness: BrokerHarness) -> None:
    first, second = members(harness, 2)
    first.drop()
    writer = harness.connect("w")
    for _ in range(4):
        writer.publish("t/x", b"", 1)
    assert len(second.messages()) == 4
    assert harness.connect_persistent("m0").take() == []


def test_messages_are_queued_for_a_member_when_all_are_offline(harness: BrokerHarness) -> None:
    first, second = members(harness, 2)
    first.drop()
    second.drop()
    writer = harness.connect("w")
    for nth in range(4):
        writer.publish("t/x", b"%d" % nth, 1)
    writer.publish("t/x", b"lost", 0)
    reported = [harness.connect_persistent(name).payloads() for name in ("m0", "m1")]
    assert sorted(chain(*reported)) == [b"0", b"1", b"2", b"3"]


def test_message_is_not_queued_for_a_member_that_would_not_get_it(harness: BrokerHarness) -> None:
    casual, careful = harness.connect_persistent("m0"), harness.connect_persistent("m1")
    casual.subscribe("$share/g/t", qos=0)
    careful.subscribe("$share/g/t", qos=1)
    casual.drop()
    careful.drop()
    writer = harness.connect("w")
    for _ in range(4):
        writer.publish("t", b"x", 1)
    assert len(harness.connect_persistent("m1").messages()) == 4


def test_member_with_a_full_queue_is_skipped(harness: BrokerHarness) -> None:
    narrow = harness.connect("n", receive_maximum=1)
    wide = harness.connect("w")
    narrow.subscribe("$share/g/t", qos=1)
    wide.subscribe("$share/g/t", qos=1)
    writer = harness.connect("p")
    for _ in range(6):
        writer.publish("t", b"", 1)
    assert (len(narrow.messages()), len(wide.messages())) == (1, 5)


def test_unfinished_messages_go_to_another_member_when_the_session_ends(
    harness: BrokerHarness,
) -> None:
    first, second = members(harness, 2)
    writer = harness.connect("w")
    for nth in range(6):
        writer.publish("t/x", b"%d" % nth, 1)
    stored = second.payloads()
    [done, *_] = first.messages()
    first.ack(done)
    first.disconnect(session_expiry=0)
    given = second.messages()
    assert sorted([done.payload, *stored, *(one.payload for one in given)]) == [
        b"%d" % nth for nth in range(6)
    ]
    assert not any(message.dup for message in given)


def test_queued_message_goes_to_another_member_when_the_session_expires(
    harness: BrokerHarness,
) -> None:
    first, second = members(harness, 2)
    first.drop()
    second.disconnect(session_expiry=7200)
    writer = harness.connect("w")
    for nth in range(4):
        writer.publish("t/x", b"%d" % nth, 1)
    harness.advance(3601)
    assert sorted(harness.connect_persistent("m1").payloads()) == [b"0", b"1", b"2", b"3"]


def test_qos_2_message_in_flight_never_moves_to_another_member(harness: BrokerHarness) -> None:
    first, second = members(harness, 2, qos=2)
    harness.connect("w").publish("t/x", b"x", 2)
    holder, idle = (first, second) if first.transport.sent else (second, first)
    [message] = holder.messages()
    holder.send(Ack(PUBREC, message.packet_id))
    holder.disconnect(session_expiry=0)
    assert idle.take() == []


def test_message_refused_by_a_member_is_not_sent_to_another(harness: BrokerHarness) -> None:
    first, second = members(harness, 2)
    harness.connect("w").publish("t/x", b"x", 1)
    holder, idle = (first, second) if first.transport.sent else (second, first)
    [message] = holder.messages()
    holder.ack(message, 0x80)
    holder.disconnect(session_expiry=0)
    assert idle.take() == []


def test_expired_message_is_not_moved_to_another_member(harness: BrokerHarness) -> None:
    [first] = members(harness, 1)
    writer = harness.connect("w")
    writer.publish("t/x", b"short", 1, message_expiry=5)
    writer.publish("t/x", b"long", 1, message_expiry=50)
    assert first.payloads() == [b"short", b"long"]
    harness.advance(6)
    second = harness.connect("late")
    second.subscribe("$share/g/t/#", qos=1)
    first.disconnect(session_expiry=0)
    assert [(one.payload, one.expiry_seconds) for one in second.messages()] == [(b"long", 44)]


def test_no_local_is_a_protocol_error_on_a_shared_subscription(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.feed(b"\x82\x10\x00\x01\x00\x00\x0a$share/g/t\x04")
    assert client.fault()[0] == 0x82


@pytest.mark.parametrize("bad", ["$share", "$share/g/a#", "$share/g/$share/h/t"])
def test_malformed_share_is_refused(harness: BrokerHarness, bad: str) -> None:
    assert harness.connect("a").subscribe(bad, "ok") == [0x8F, 0]


def test_server_without_shared_subscriptions_refuses_them() -> None:
    assert BrokerHarness(shared_subscriptions=False).connect("a").subscribe("$share/g/t", "t") == [
        0x9E,
        0,
    ]


def test_shared_wildcard_does_not_match_dollar_topics(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    client.subscribe("$share/g/#", "$share/g/$own/#")
    writer = harness.connect("w")
    writer.publish("$own/x", b"1")
    writer.publish("plain", b"2")
    assert client.payloads() == [b"1", b"2"]
