"""Lasting sessions survive a restart: subscriptions, what waits, what is in flight, and nothing that is done with."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Ack, Publish, Suback, Subscribe, SubscriptionRequest
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import Client
from tests.broker.namespaces.kit import QueueHouse, join, payloads, put


def back(house: QueueHouse, client_id: str = "sleeper", version: int = 5) -> Client:
    client = house.connect_lasting(client_id, version)
    assert client.connack.session_present
    return client


def asleep(house: QueueHouse, qos: int = 2, version: int = 5) -> None:
    """A session that has subscribed and whose client is away."""
    client = house.connect_lasting("sleeper", version)
    client.subscribe("news/#", qos=qos)
    client.drop()


# ---- sessions and subscriptions


@pytest.mark.parametrize("version", [4, 5])
def test_a_lasting_session_is_there_after_a_restart(house: QueueHouse, end: str, version: int) -> None:
    house.connect_lasting("sleeper", version).drop()
    house.connect("passing")
    getattr(house, end)()
    assert house.sessions() == {"sleeper"}
    back(house, version=version)


def test_subscriptions_survive_with_their_options(house: QueueHouse, end: str) -> None:
    client = house.connect_lasting("sleeper")
    client.subscribe("a", qos=2, no_local=True, identifier=7)
    client.subscribe("b", qos=0, as_published=True, identifier=8)
    client.subscribe("c", qos=1)
    client.subscribe("$share/g/d", qos=1, identifier=9)
    client.unsubscribe("c")
    getattr(house, end)()
    client = back(house)
    other = house.connect("other")
    for topic in ("a", "b", "c", "d"):
        other.publish(topic, topic.encode(), 2, retain=topic == "b")
    client.publish("a", b"own", 1)
    got = {
        message.topic: (int(message.qos), message.retain, message.subscription_ids)
        for message in client.take()
        if isinstance(message, Publish)
    }
    assert got == {b"a": (2, False, [7]), b"b": (0, True, [8]), b"d": (1, False, [9])}


def test_suback_and_unsuback_of_a_lasting_session_wait_for_the_store(house: QueueHouse) -> None:
    client = house.connect_lasting("sleeper")
    house.store.hold()
    client.send(Subscribe(9, [SubscriptionRequest(b"a", 1), SubscriptionRequest(b"$queue/q", 1)]))
    assert client.take() == []
    house.store.release()
    house.loop.settle()
    assert client.only(Suback).reasons == [1, 1]
    passing = house.connect("passing")
    house.store.hold()
    assert passing.subscribe("a") == [0]  # nothing of it is kept


def test_a_suback_is_not_given_to_the_wrong_connection(house: QueueHouse) -> None:
    client = house.connect_lasting("sleeper")
    house.store.hold()
    client.send(Subscribe(9, [SubscriptionRequest(b"a", 1)]))
    client.drop()
    client = house.connect_lasting("sleeper")
    house.store.release()
    house.loop.settle()
    assert client.take() == []
    assert client.subscribe("a", qos=1) == [1]


def test_a_session_that_was_ended_does_not_come_back(house: QueueHouse, end: str) -> None:
    client = house.connect_lasting("cleaned")
    client.subscribe("a")
    client.drop()
    house.connect("cleaned").disconnect()
    house.connect_lasting("goodbye").disconnect(session_expiry=0)
    short = house.connect_lasting("short", session_expiry=10)
    short.drop()
    house.advance(11)
    getattr(house, end)()
    assert house.sessions() == set()


def test_a_session_expires_after_a_restart_counted_from_there(house: QueueHouse, end: str) -> None:
    house.connect_lasting("short", session_expiry=100).drop()
    house.connect_lasting("long", session_expiry=0xFFFF_FFFF).drop()
    house.advance(50)
    getattr(house, end)()
    house.advance(99)
    assert house.sessions() == {"short", "long"}
    house.advance(2)
    assert house.sessions() == {"long"}
    getattr(house, end)()
    assert house.sessions() == {"long"}


def test_an_expiry_that_is_changed_on_disconnect_survives(house: QueueHouse, end: str) -> None:
    house.connect_lasting("sleeper", session_expiry=1000).disconnect(session_expiry=10)
    getattr(house, end)()
    house.advance(11)
    assert house.sessions() == set()


# ---- what waits


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_waiting_messages_survive_in_their_order(house: QueueHouse, end: str, qos: int, version: int) -> None:
    asleep(house, qos, version)
    maker = house.connect("maker")
    for nth in range(20):
        maker.publish_fully(f"news/{nth}", b"%d" % nth, qos)
    maker.publish_fully("news/none", b"quality 0", 0)
    getattr(house, end)()
    client = back(house, version=version)
    messages = client.messages()
    assert payloads(messages) == [b"%d" % nth for nth in range(20)]
    assert {int(message.qos) for message in messages} == {qos}


def test_all_of_a_waiting_message_survives(house: QueueHouse, end: str) -> None:
    client = house.connect_lasting("sleeper")
    client.subscribe("news/#", qos=1, identifier=5, as_published=True)
    client.drop()
    house.connect("maker").publish(
        "news/1", b"x", 1, True, user=[("k", "v")], response_topic="r", message_expiry=100
    )
    getattr(house, end)()
    house.advance(30)
    (message,) = back(house).messages()
    assert (message.topic, message.retain, message.expiry) == (b"news/1", True, 70)
    assert message.properties().response_topic == "r"
    assert message.properties().user == [("k", "v")]
    assert message.subscription_ids == [5]


def test_the_publisher_of_a_waiting_message_hears_when_the_store_has_it(house: QueueHouse) -> None:
    asleep(house)
    maker = house.connect("maker")
    house.store.hold()
    first = maker.publish("news/1", b"x", 1)
    second = maker.publish("news/1", b"x", 2)
    assert maker.take() == []
    house.store.release()
    house.loop.settle()
    maker.first_ack(PUBACK, first, 0)
    maker.first_ack(PUBREC, second, 0)


def test_messages_that_were_acknowledged_do_not_come_back(house: QueueHouse) -> None:
    asleep(house)
    maker = house.connect("maker")
    for nth in range(6):
        maker.publish_fully("news/1", b"%d" % nth, 1 + nth % 2)
    client = back(house)
    for message in client.messages():
        if message.payload < b"4":
            client.ack(message)
    for _ in range(2):
        house.kill()
        messages = back(house).messages()
        assert sorted(payloads(messages)) == [b"4", b"5"]  # order is kept within each quality


def test_messages_in_flight_come_again_after_a_restart(house: QueueHouse, end: str) -> None:
    client = house.connect_lasting("sleeper", receive_maximum=2)
    client.subscribe("news/#", qos=1)
    maker = house.connect("maker")
    for nth in range(5):
        maker.publish_fully("news/1", b"%d" % nth, 1)
    assert len(client.messages()) == 2
    getattr(house, end)()
    assert payloads(back(house).messages()) == [b"%d" % nth for nth in range(5)]


def test_messages_that_expired_meanwhile_are_not_delivered(house: QueueHouse, end: str) -> None:
    asleep(house)
    maker = house.connect("maker")
    maker.publish("news/1", b"short", 1, message_expiry=10)
    maker.publish("news/1", b"long", 1)
    getattr(house, end)()
    house.advance(11)
    assert payloads(back(house).messages()) == [b"long"]


def test_retained_messages_that_were_on_their_way_survive(house: QueueHouse, end: str) -> None:
    house.connect("maker").publish_fully("news/1", b"old", 1, retain=True)
    client = house.connect_lasting("sleeper")
    client.subscribe("news/#", qos=1)
    client.drop()
    getattr(house, end)()
    (message,) = back(house).messages()
    assert (message.payload, message.retain) == (b"old", True)


def test_messages_of_a_shared_subscription_that_wait_for_a_member_survive(
    house: QueueHouse, end: str
) -> None:
    client = house.connect_lasting("sleeper")
    client.subscribe("$share/g/news", qos=1)
    client.drop()
    house.connect("maker").publish_fully("news", b"x", 1)
    getattr(house, end)()
    assert payloads(back(house).messages()) == [b"x"]


def test_a_new_session_never_gets_what_an_old_one_left(house: QueueHouse) -> None:
    asleep(house)
    house.connect("maker").publish_fully("news/1", b"for the old one", 2)
    old = house.connect_lasting("old")
    old.publish("news/1", b"half", 2, packet_id=5)
    house.connect("sleeper").disconnect()
    house.connect("old").disconnect()
    house.kill()
    for name in ("sleeper", "old"):
        client = house.connect_lasting(name)
        assert not client.connack.session_present
        assert client.take() == []
        client.subscribe("a", qos=1)
        client.publish("a", b"new", 2, packet_id=5)
        assert [type(packet).__name__ for packet in client.take()] == ["Publish", "Ack"]
        client.drop()


def test_numbers_of_sessions_are_not_used_twice(house: QueueHouse) -> None:
    for _ in range(3):
        house.kill()
        for nth in range(3):
            house.connect_lasting(f"client-{nth}").drop()
    numbers = [session.sid for session in house.broker.registry.sessions.values()]
    assert len(set(numbers)) == 3


# ---- QoS 2, both ways


def test_an_incoming_message_of_quality_2_is_passed_on_once_across_a_restart(
    house: QueueHouse, end: str
) -> None:
    maker = house.connect_lasting("maker")
    asleep(house)
    maker.publish("news/1", b"once", 2, packet_id=5)
    put(maker, "$queue/jobs", b"once", 2, packet_id=6)
    maker.first_ack(PUBREC, 5)
    getattr(house, end)()
    maker = back(house, "maker")
    maker.publish("news/1", b"once", 2, packet_id=5, dup=True)
    maker.publish("$queue/jobs", b"once", 2, packet_id=6, dup=True)
    for packet_id in (5, 6):
        maker.first_ack(PUBREC, packet_id, 0)
        maker.send(Ack(PUBREL, packet_id))
        maker.first_ack(PUBCOMP, packet_id, 0)
    assert payloads(back(house).messages()) == [b"once"]
    assert house.depth("jobs") == 1


def test_an_incoming_id_that_was_released_is_free_after_a_restart(house: QueueHouse) -> None:
    maker = house.connect_lasting("maker")
    asleep(house)
    for nth in range(2):
        maker.publish_fully("news/1", b"%d" % nth, 2)
    house.kill()
    maker = back(house, "maker")
    maker.publish("news/1", b"2", 2, packet_id=1)
    assert payloads(back(house).messages()) == [b"0", b"1", b"2"]


def test_an_incoming_id_whose_release_was_lost_with_the_power_is_free_for_another_message(
    house: QueueHouse,
) -> None:
    maker = house.connect_lasting("maker")
    asleep(house)
    maker.publish_fully("news/1", b"first", 2)
    house.crash()
    maker = back(house, "maker")
    maker.publish("news/1", b"second", 2, packet_id=1)
    maker.publish("news/1", b"second", 2, packet_id=1, dup=True)
    assert payloads(back(house).messages()) == [b"first", b"second"]


def test_an_outgoing_message_of_quality_2_is_said_again_under_its_own_id(house: QueueHouse, end: str) -> None:
    client = house.connect_lasting("sleeper")
    client.subscribe("news/#", qos=2)
    maker = house.connect("maker")
    for nth in range(3):
        maker.publish_fully("news/1", b"%d" % nth, 2)
    first, second, third = client.messages()
    client.ack(first)
    client.send(Ack(PUBREC, int(second.packet_id)))
    client.first_ack(PUBREL, int(second.packet_id))
    maker.publish_fully("news/1", b"3", 2)
    house.advance(1)
    getattr(house, end)() if end != "crash" else house.kill()
    client = back(house)
    client.first_ack(PUBREL, int(second.packet_id), 0)
    messages = client.messages()
    assert payloads(messages) == [b"2", b"3"]
    assert (messages[0].packet_id, messages[0].dup) == (third.packet_id, True)
    client.send(Ack(PUBCOMP, int(second.packet_id)))
    for message in messages:
        client.ack(message)
    house.kill()
    assert back(house).take() == []


def test_an_outgoing_id_is_not_given_to_another_message_while_the_client_may_remember_it(
    house: QueueHouse,
) -> None:
    client = house.connect_lasting("sleeper")
    client.subscribe("news/#", qos=2)
    maker = house.connect("maker")
    maker.publish_fully("news/1", b"0", 2)
    (first,) = client.messages()
    client.send(Ack(PUBREC, int(first.packet_id)))
    house.kill()
    house.connect("maker").publish_fully("news/1", b"1", 2)
    client = back(house)
    packets = client.take()
    ids = [int(packet.packet_id) for packet in packets if isinstance(packet, Publish | Ack)]
    assert len(set(ids)) == 2


# ---- room


def test_a_message_for_many_sessions_is_kept_once() -> None:
    house = QueueHouse(segment_bytes=1 << 24)
    for nth in range(200):
        client = house.connect_lasting(f"sleeper-{nth}")
        client.subscribe("news", qos=1)
        client.drop()
    before = sum(house.store.segment_sizes().values())
    house.connect("maker").publish_fully("news", b"x" * 100_000, 1)
    after = sum(house.store.segment_sizes().values())
    assert after - before < 120_000
    house.crash()
    for nth in range(200):
        (message,) = back(house, f"sleeper-{nth}").messages()
        assert len(message.payload) == 100_000


@pytest.mark.parametrize("qos", [1, 2])
def test_room_is_given_back_when_all_is_acknowledged(qos: int) -> None:
    house = QueueHouse(segment_bytes=64 * 1024)
    for name in ("a", "b"):
        client = house.connect_lasting(name)
        client.subscribe("news", qos=qos)
        client.drop()
    maker = house.connect("maker")
    for _ in range(200):
        maker.publish_fully("news", b"x" * 2000, qos)
    assert sum(house.store.segment_sizes().values()) > 400_000
    for name in ("a", "b"):
        client = back(house, name)
        while messages := client.messages():
            for message in messages:
                client.ack(message)
    for _ in range(100):  # what comes later lets the store look back
        maker.publish_fully("other", b"y" * 2000, qos, retain=True)
    assert sum(house.store.segment_sizes().values()) < 300_000
    house.kill()
    for name in ("a", "b"):
        assert back(house, name).take() == []


def test_a_few_old_messages_do_not_hold_on_to_much_room() -> None:
    house = QueueHouse(segment_bytes=64 * 1024)
    asleep(house)
    maker = house.connect("maker")
    quick = house.connect_lasting("quick")
    quick.subscribe("fast", qos=1)
    for nth in range(1000):
        maker.publish_fully("fast", b"x" * 1000, 1)
        for message in quick.messages():
            quick.ack(message)
        if nth % 100 == 0:
            maker.publish_fully("news/1", b"%d" % nth, 1)
    assert sum(house.store.segment_sizes().values()) < 400_000
    house.kill()
    assert payloads(back(house).messages()) == [b"%d" % (100 * nth) for nth in range(10)]


# ---- queues switched off and on


def test_queue_subscriptions_wait_while_queues_are_switched_off(house: QueueHouse) -> None:
    client = house.connect_lasting("worker-1")
    join(client, "$queue/jobs")
    house._queues = False
    house.restart()
    client = back(house, "worker-1")
    client.subscribe("a")
    house._queues = True
    house.restart()
    client = back(house, "worker-1")
    put(client, "$queue/jobs", b"x")
    assert payloads(client.messages()) == [b"x"]


def test_an_old_client_keeps_its_protocol_across_a_restart(house: QueueHouse, end: str) -> None:
    asleep(house, 1, V311)
    house.connect("maker").publish("news/1", b"x", 1, user=[("k", "v")])
    getattr(house, end)()
    (message,) = back(house, version=V311).messages()
    assert message.payload == b"x"
