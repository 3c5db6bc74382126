"""Shared subscriptions: each message to one of the members."""

from __future__ import annotations

from itertools import chain

import pytest

from sluice.wire.packets import Ack
from sluice.wire.properties import PUBREC
from tests.broker.kit import Client, House


def members(house: House, count: int, qos: int = 1, topic_filter: str = "$share/g/t/#") -> list[Client]:
    clients = [house.connect_lasting(f"m{nth}") for nth in range(count)]
    for client in clients:
        assert client.subscribe(topic_filter, qos=qos) == [qos]
    return clients


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_goes_to_one_member_in_turn(house: House, qos: int) -> None:
    clients = members(house, 3, qos)
    writer = house.connect("w")
    for nth in range(9):
        writer.publish("t/x", b"%d" % nth, qos)
    told = [client.payloads() for client in clients]
    assert [len(one) for one in told] == [3, 3, 3]
    assert sorted(chain(*told)) == [b"%d" % nth for nth in range(9)]


def test_a_member_that_subscribes_again_is_still_one_member(house: House) -> None:
    clients = members(house, 2, 0)
    for _ in range(4):
        clients[0].subscribe("$share/g/t/#", qos=0)
    assert house.broker.router.subscriptions.shared_count == 2
    writer = house.connect("w")
    for nth in range(12):
        writer.publish("t/x", b"%d" % nth, 0)
    assert [len(client.payloads()) for client in clients] == [6, 6]


def test_groups_are_independent_and_so_are_ordinary_subscriptions(house: House) -> None:
    one, other, plain = house.connect("a"), house.connect("b"), house.connect("c")
    one.subscribe("$share/g/t")
    other.subscribe("$share/h/t")
    plain.subscribe("t")
    house.connect("w").publish("t", b"x")
    assert one.payloads() == other.payloads() == plain.payloads() == [b"x"]


def test_a_client_may_hold_an_ordinary_and_a_shared_subscription(house: House) -> None:
    client = house.connect("a")
    client.subscribe("t", identifier=1)
    client.subscribe("$share/g/t", identifier=2)
    house.connect("w").publish("t", b"x")
    assert sorted(message.subscription_ids or [] for message in client.messages()) == [[1], [2]]


def test_a_member_that_leaves_gets_no_more(house: House) -> None:
    first, second = members(house, 2)
    assert first.unsubscribe("$share/g/t/#") == [0]
    assert first.unsubscribe("$share/g/t/#") == [0x11]
    writer = house.connect("w")
    for _ in range(4):
        writer.publish("t/x", b"", 1)
    assert (len(first.messages()), len(second.messages())) == (0, 4)
    second.unsubscribe("$share/g/t/#")
    assert house.broker.router.subscriptions.shared_count == 0
    writer.take()
    writer.publish("t/x", b"", 1, packet_id=9)
    writer.first_ack(4, 9, 0x10)


def test_members_that_are_there_come_before_members_that_are_away(house: House) -> None:
    first, second = members(house, 2)
    first.drop()
    writer = house.connect("w")
    for _ in range(4):
        writer.publish("t/x", b"", 1)
    assert len(second.messages()) == 4
    assert house.connect_lasting("m0").take() == []


def test_messages_wait_for_a_member_when_all_are_away(house: House) -> None:
    first, second = members(house, 2)
    first.drop()
    second.drop()
    writer = house.connect("w")
    for nth in range(4):
        writer.publish("t/x", b"%d" % nth, 1)
    writer.publish("t/x", b"lost", 0)
    told = [house.connect_lasting(name).payloads() for name in ("m0", "m1")]
    assert sorted(chain(*told)) == [b"0", b"1", b"2", b"3"]


def test_a_message_does_not_wait_for_a_member_that_would_not_get_it(house: House) -> None:
    casual, careful = house.connect_lasting("m0"), house.connect_lasting("m1")
    casual.subscribe("$share/g/t", qos=0)
    careful.subscribe("$share/g/t", qos=1)
    casual.drop()
    careful.drop()
    writer = house.connect("w")
    for _ in range(4):
        writer.publish("t", b"x", 1)
    assert len(house.connect_lasting("m1").messages()) == 4


def test_a_full_member_is_passed_over(house: House) -> None:
    narrow = house.connect("n", receive_maximum=1)
    wide = house.connect("w")
    narrow.subscribe("$share/g/t", qos=1)
    wide.subscribe("$share/g/t", qos=1)
    writer = house.connect("p")
    for _ in range(6):
        writer.publish("t", b"", 1)
    assert (len(narrow.messages()), len(wide.messages())) == (1, 5)


def test_what_a_member_did_not_finish_goes_to_another_when_its_session_ends(house: House) -> None:
    first, second = members(house, 2)
    writer = house.connect("w")
    for nth in range(6):
        writer.publish("t/x", b"%d" % nth, 1)
    kept = second.payloads()
    [done, *_] = first.messages()
    first.ack(done)
    first.disconnect(session_expiry=0)
    given = second.messages()
    assert sorted([done.payload, *kept, *(one.payload for one in given)]) == [b"%d" % nth for nth in range(6)]
    assert not any(message.dup for message in given)


def test_a_message_that_waited_for_a_member_goes_to_another_when_its_session_expires(house: House) -> None:
    first, second = members(house, 2)
    first.drop()
    second.disconnect(session_expiry=7200)
    writer = house.connect("w")
    for nth in range(4):
        writer.publish("t/x", b"%d" % nth, 1)
    house.advance(3601)
    assert sorted(house.connect_lasting("m1").payloads()) == [b"0", b"1", b"2", b"3"]


def test_a_qos_2_message_that_was_sent_never_changes_hands(house: House) -> None:
    first, second = members(house, 2, qos=2)
    house.connect("w").publish("t/x", b"x", 2)
    holder, idle = (first, second) if first.transport.sent else (second, first)
    [message] = holder.messages()
    holder.send(Ack(PUBREC, message.packet_id))
    holder.disconnect(session_expiry=0)
    assert idle.take() == []


def test_a_message_that_a_member_refuses_is_offered_to_nobody_else(house: House) -> None:
    first, second = members(house, 2)
    house.connect("w").publish("t/x", b"x", 1)
    holder, idle = (first, second) if first.transport.sent else (second, first)
    [message] = holder.messages()
    holder.ack(message, 0x80)
    holder.disconnect(session_expiry=0)
    assert idle.take() == []


def test_an_expired_message_is_not_handed_on(house: House) -> None:
    [first] = members(house, 1)
    writer = house.connect("w")
    writer.publish("t/x", b"short", 1, message_expiry=5)
    writer.publish("t/x", b"long", 1, message_expiry=50)
    assert first.payloads() == [b"short", b"long"]
    house.advance(6)
    second = house.connect("late")
    second.subscribe("$share/g/t/#", qos=1)
    first.disconnect(session_expiry=0)
    assert [(one.payload, one.expiry) for one in second.messages()] == [(b"long", 44)]


def test_no_local_is_a_protocol_error_on_a_shared_subscription(house: House) -> None:
    client = house.connect("a")
    client.feed(b"\x82\x10\x00\x01\x00\x00\x0a$share/g/t\x04")
    assert client.fault()[0] == 0x82


@pytest.mark.parametrize("bad", ["$share", "$share/g", "$share//t", "$share/g/", "$share/+/t", "$share/g#/t"])
def test_a_misspelt_share_is_refused(house: House, bad: str) -> None:
    assert house.connect("a").subscribe(bad, "ok") == [0x8F, 0]


def test_a_server_without_shared_subscriptions_refuses_them() -> None:
    assert House(shared_subscriptions=False).connect("a").subscribe("$share/g/t", "t") == [0x9E, 0]


def test_a_share_of_dollar_topics_follows_the_rule_of_its_filter(house: House) -> None:
    client = house.connect("a")
    client.subscribe("$share/g/#", "$share/g/$own/#")
    writer = house.connect("w")
    writer.publish("$own/x", b"1")
    writer.publish("plain", b"2")
    assert client.payloads() == [b"1", b"2"]
