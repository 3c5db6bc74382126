"""Persistent sessions survive a restart: subscriptions, pending messages and messages in flight.

Settled messages do not return.
"""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Ack, Publish, Suback, Subscribe, SubscriptionRequest
from sluice.wire.properties import PUBACK, PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, payloads, put
from tests.broker.peers import Client


def reconnect(harness: BrokerHarness, client_id: str = "sleeper", version: int = 5) -> Client:
    client = harness.connect_persistent(client_id, version)
    assert client.connack.session_present
    return client


def offline_session(harness: BrokerHarness, qos: int = 2, version: int = 5) -> None:
    """Create a session with a subscription whose client is disconnected."""
    client = harness.connect_persistent("sleeper", version)
    client.subscribe("news/#", qos=qos)
    client.drop()


# ---- sessions and subscriptions


@pytest.mark.parametrize("version", [4, 5])
def test_persistent_session_exists_after_a_restart(
    harness: BrokerHarness, end: str, version: int
) -> None:
    harness.connect_persistent("sleeper", version).drop()
    harness.connect("passing")
    getattr(harness, end)()
    assert harness.sessions() == {"sleeper"}
    reconnect(harness, version=version)


def test_subscriptions_survive_with_their_options(harness: BrokerHarness, end: str) -> None:
    client = harness.connect_persistent("sleeper")
    client.subscribe("a", qos=2, no_local=True, identifier=7)
    client.subscribe("b", qos=0, as_published=True, identifier=8)
    client.subscribe("c", qos=1)
    client.subscribe("$share/g/d", qos=1, identifier=9)
    client.unsubscribe("c")
    getattr(harness, end)()
    client = reconnect(harness)
    other = harness.connect("other")
    for topic in ("a", "b", "c", "d"):
        other.publish(topic, topic.encode(), 2, retain=topic == "b")
    client.publish("a", b"own", 1)
    got = {
        message.topic: (int(message.qos), message.retain, message.subscription_ids)
        for message in client.take()
        if isinstance(message, Publish)
    }
    assert got == {b"a": (2, False, [7]), b"b": (0, True, [8]), b"d": (1, False, [9])}


def test_suback_and_unsuback_of_a_persistent_session_wait_for_commit(
    harness: BrokerHarness,
) -> None:
    client = harness.connect_persistent("sleeper")
    harness.store.hold()
    client.send(Subscribe(9, [SubscriptionRequest(b"a", 1), SubscriptionRequest(b"$queue/q", 1)]))
    assert client.take() == []
    harness.store.release()
    harness.loop.settle()
    assert client.only(Suback).reasons == [1, 1]
    passing = harness.connect("passing")
    harness.store.hold()
    assert passing.subscribe("a") == [0]  # nothing of it is stored


def test_suback_is_not_sent_to_the_wrong_connection(harness: BrokerHarness) -> None:
    client = harness.connect_persistent("sleeper")
    harness.store.hold()
    client.send(Subscribe(9, [SubscriptionRequest(b"a", 1)]))
    client.drop()
    client = harness.connect_persistent("sleeper")
    harness.store.release()
    harness.loop.settle()
    assert client.take() == []
    assert client.subscribe("a", qos=1) == [1]


def test_ended_session_does_not_return(harness: BrokerHarness, end: str) -> None:
    client = harness.connect_persistent("cleaned")
    client.subscribe("a")
    client.drop()
    harness.connect("cleaned").disconnect()
    harness.connect_persistent("goodbye").disconnect(session_expiry=0)
    short = harness.connect_persistent("short", session_expiry=10)
    short.drop()
    harness.advance(11)
    getattr(harness, end)()
    assert harness.sessions() == set()


def test_session_expiry_counts_from_the_restart(harness: BrokerHarness, end: str) -> None:
    harness.connect_persistent("short", session_expiry=100).drop()
    harness.connect_persistent("long", session_expiry=0xFFFF_FFFF).drop()
    harness.advance(50)
    getattr(harness, end)()
    harness.advance(99)
    assert harness.sessions() == {"short", "long"}
    harness.advance(2)
    assert harness.sessions() == {"long"}
    getattr(harness, end)()
    assert harness.sessions() == {"long"}


def test_expiry_changed_on_disconnect_survives(harness: BrokerHarness, end: str) -> None:
    harness.connect_persistent("sleeper", session_expiry=1000).disconnect(session_expiry=10)
    getattr(harness, end)()
    harness.advance(11)
    assert harness.sessions() == set()


# ---- pending messages


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [1, 2])
def test_pending_messages_survive_in_order(
    harness: BrokerHarness, end: str, qos: int, version: int
) -> None:
    offline_session(harness, qos, version)
    maker = harness.connect("maker")
    for nth in range(20):
        maker.publish_fully(f"news/{nth}", b"%d" % nth, qos)
    maker.publish_fully("news/none", b"quality 0", 0)
    getattr(harness, end)()
    client = reconnect(harness, version=version)
    messages = client.messages()
    assert payloads(messages) == [b"%d" % nth for nth in range(20)]
    assert {int(message.qos) for message in messages} == {qos}


def test_pending_message_survives_with_all_its_properties(harness: BrokerHarness, end: str) -> None:
    client = harness.connect_persistent("sleeper")
    client.subscribe("news/#", qos=1, identifier=5, as_published=True)
    client.drop()
    harness.connect("maker").publish(
        "news/1", b"x", 1, True, user=[("k", "v")], response_topic="r", message_expiry=100
    )
    getattr(harness, end)()
    harness.advance(30)
    (message,) = reconnect(harness).messages()
    assert (message.topic, message.retain, message.expiry_seconds) == (b"news/1", True, 70)
    assert message.decode_properties().response_topic == "r"
    assert message.decode_properties().user == [("k", "v")]
    assert message.subscription_ids == [5]


def test_publish_of_a_pending_message_is_acknowledged_after_commit(harness: BrokerHarness) -> None:
    offline_session(harness)
    maker = harness.connect("maker")
    harness.store.hold()
    first = maker.publish("news/1", b"x", 1)
    second = maker.publish("news/1", b"x", 2)
    assert maker.take() == []
    harness.store.release()
    harness.loop.settle()
    maker.first_ack(PUBACK, first, 0)
    maker.first_ack(PUBREC, second, 0)


def test_acknowledged_messages_do_not_return(harness: BrokerHarness) -> None:
    offline_session(harness)
    maker = harness.connect("maker")
    for nth in range(6):
        maker.publish_fully("news/1", b"%d" % nth, 1 + nth % 2)
    client = reconnect(harness)
    for message in client.messages():
        if message.payload < b"4":
            client.ack(message)
    for _ in range(2):
        harness.kill()
        messages = reconnect(harness).messages()
        assert sorted(payloads(messages)) == [b"4", b"5"]  # the order holds within each QoS


def test_messages_in_flight_are_resent_after_a_restart(harness: BrokerHarness, end: str) -> None:
    client = harness.connect_persistent("sleeper", receive_maximum=2)
    client.subscribe("news/#", qos=1)
    maker = harness.connect("maker")
    for nth in range(5):
        maker.publish_fully("news/1", b"%d" % nth, 1)
    assert len(client.messages()) == 2
    getattr(harness, end)()
    assert payloads(reconnect(harness).messages()) == [b"%d" % nth for nth in range(5)]


def test_messages_expired_meanwhile_are_not_delivered(harness: BrokerHarness, end: str) -> None:
    offline_session(harness)
    maker = harness.connect("maker")
    maker.publish("news/1", b"short", 1, message_expiry=10)
    maker.publish("news/1", b"long", 1)
    getattr(harness, end)()
    harness.advance(11)
    assert payloads(reconnect(harness).messages()) == [b"long"]


def test_retained_messages_in_flight_survive(harness: BrokerHarness, end: str) -> None:
    harness.connect("maker").publish_fully("news/1", b"old", 1, retain=True)
    client = harness.connect_persistent("sleeper")
    client.subscribe("news/#", qos=1)
    client.drop()
    getattr(harness, end)()
    (message,) = reconnect(harness).messages()
    assert (message.payload, message.retain) == (b"old", True)


def test_messages_pending_for_a_shared_subscription_survive(
    harness: BrokerHarness, end: str
) -> None:
    client = harness.connect_persistent("sleeper")
    client.subscribe("$share/g/news", qos=1)
    client.drop()
    harness.connect("maker").publish_fully("news", b"x", 1)
    getattr(harness, end)()
    assert payloads(reconnect(harness).messages()) == [b"x"]


def test_new_session_never_gets_messages_of_an_old_one(harness: BrokerHarness) -> None:
    offline_session(harness)
    harness.connect("maker").publish_fully("news/1", b"for the old one", 2)
    old = harness.connect_persistent("old")
    old.publish("news/1", b"half", 2, packet_id=5)
    harness.connect("sleeper").disconnect()
    harness.connect("old").disconnect()
    harness.kill()
    for name in ("sleeper", "old"):
        client = harness.connect_persistent(name)
        assert not client.connack.session_present
        assert client.take() == []
        client.subscribe("a", qos=1)
        client.publish("a", b"new", 2, packet_id=5)
        assert [type(packet).__name__ for packet in client.take()] == ["Publish", "Ack"]
        client.drop()


def test_session_numbers_are_not_reused(harness: BrokerHarness) -> None:
    for _ in range(3):
        harness.kill()
        for nth in range(3):
            harness.connect_persistent(f"client-{nth}").drop()
    numbers = [session.persistent_id for session in harness.broker.registry.sessions.values()]
    assert len(set(numbers)) == 3


# ---- QoS 2, both directions


def test_incoming_qos_2_message_is_forwarded_once_across_a_restart(
    harness: BrokerHarness, end: str
) -> None:
    maker = harness.connect_persistent("maker")
    offline_session(harness)
    maker.publish("news/1", b"once", 2, packet_id=5)
    put(maker, "$queue/jobs", b"once", 2, packet_id=6)
    maker.first_ack(PUBREC, 5)
    getattr(harness, end)()
    maker = reconnect(harness, "maker")
    maker.publish("news/1", b"once", 2, packet_id=5, dup=True)
    maker.publish("$queue/jobs", b"once", 2, packet_id=6, dup=True)
    for packet_id in (5, 6):
        maker.first_ack(PUBREC, packet_id, 0)
        maker.send(Ack(PUBREL, packet_id))
        maker.first_ack(PUBCOMP, packet_id, 0)
    assert payloads(reconnect(harness).messages()) == [b"once"]
    assert harness.depth("jobs") == 1


def test_released_incoming_packet_id_is_free_after_a_restart(harness: BrokerHarness) -> None:
    maker = harness.connect_persistent("maker")
    offline_session(harness)
    for nth in range(2):
        maker.publish_fully("news/1", b"%d" % nth, 2)
    harness.kill()
    maker = reconnect(harness, "maker")
    maker.publish("news/1", b"2", 2, packet_id=1)
    assert payloads(reconnect(harness).messages()) == [b"0", b"1", b"2"]


def test_incoming_packet_id_whose_release_was_lost_is_free_for_another_message(
    harness: BrokerHarness,
) -> None:
    maker = harness.connect_persistent("maker")
    offline_session(harness)
    maker.publish_fully("news/1", b"first", 2)
    harness.crash()
    maker = reconnect(harness, "maker")
    maker.publish("news/1", b"second", 2, packet_id=1)
    maker.publish("news/1", b"second", 2, packet_id=1, dup=True)
    assert payloads(reconnect(harness).messages()) == [b"first", b"second"]


def test_outgoing_qos_2_message_is_resent_under_its_packet_id(
    harness: BrokerHarness, end: str
) -> None:
    client = harness.connect_persistent("sleeper")
    client.subscribe("news/#", qos=2)
    maker = harness.connect("maker")
    for nth in range(3):
        maker.publish_fully("news/1", b"%d" % nth, 2)
    first, second, third = client.messages()
    client.ack(first)
    client.send(Ack(PUBREC, int(second.packet_id)))
    client.first_ack(PUBREL, int(second.packet_id))
    maker.publish_fully("news/1", b"3", 2)
    harness.advance(1)
    getattr(harness, end)() if end != "crash" else harness.kill()
    client = reconnect(harness)
    client.first_ack(PUBREL, int(second.packet_id), 0)
    messages = client.messages()
    assert payloads(messages) == [b"2", b"3"]
    assert (messages[0].packet_id, messages[0].dup) == (third.packet_id, True)
    client.send(Ack(PUBCOMP, int(second.packet_id)))
    for message in messages:
        client.ack(message)
    harness.kill()
    assert reconnect(harness).take() == []


def test_outgoing_packet_id_is_not_reused_while_the_client_may_remember_it(
    harness: BrokerHarness,
) -> None:
    client = harness.connect_persistent("sleeper")
    client.subscribe("news/#", qos=2)
    maker = harness.connect("maker")
    maker.publish_fully("news/1", b"0", 2)
    (first,) = client.messages()
    client.send(Ack(PUBREC, int(first.packet_id)))
    harness.kill()
    harness.connect("maker").publish_fully("news/1", b"1", 2)
    client = reconnect(harness)
    packets = client.take()
    ids = [int(packet.packet_id) for packet in packets if isinstance(packet, Publish | Ack)]
    assert len(set(ids)) == 2


# ---- disk space


def test_message_for_many_sessions_is_stored_once() -> None:
    harness = BrokerHarness(segment_bytes=1 << 24)
    for nth in range(200):
        client = harness.connect_persistent(f"sleeper-{nth}")
        client.subscribe("news", qos=1)
        client.drop()
    before = sum(harness.store.segment_sizes().values())
    harness.connect("maker").publish_fully("news", b"x" * 100_000, 1)
    after = sum(harness.store.segment_sizes().values())
    assert after - before < 120_000
    harness.crash()
    for nth in range(200):
        (message,) = reconnect(harness, f"sleeper-{nth}").messages()
        assert len(message.payload) == 100_000


@pytest.mark.parametrize("qos", [1, 2])
def test_space_is_freed_when_all_is_acknowledged(qos: int) -> None:
    harness = BrokerHarness(segment_bytes=64 * 1024)
    for name in ("a", "b"):
        client = harness.connect_persistent(name)
        client.subscribe("news", qos=qos)
        client.drop()
    maker = harness.connect("maker")
    for _ in range(200):
        maker.publish_fully("news", b"x" * 2000, qos)
    assert sum(harness.store.segment_sizes().values()) > 400_000
    for name in ("a", "b"):
        client = reconnect(harness, name)
        while messages := client.messages():
            for message in messages:
                client.ack(message)
    for _ in range(100):  # later writes let the store compact
        maker.publish_fully("other", b"y" * 2000, qos, retain=True)
    assert sum(harness.store.segment_sizes().values()) < 300_000
    harness.kill()
    for name in ("a", "b"):
        assert reconnect(harness, name).take() == []


def test_few_old_messages_do_not_occupy_much_space() -> None:
    harness = BrokerHarness(segment_bytes=64 * 1024)
    offline_session(harness)
    maker = harness.connect("maker")
    quick = harness.connect_persistent("quick")
    quick.subscribe("fast", qos=1)
    for nth in range(1000):
        maker.publish_fully("fast", b"x" * 1000, 1)
        for message in quick.messages():
            quick.ack(message)
        if nth % 100 == 0:
            maker.publish_fully("news/1", b"%d" % nth, 1)
    assert sum(harness.store.segment_sizes().values()) < 400_000
    harness.kill()
    assert payloads(reconnect(harness).messages()) == [b"%d" % (100 * nth) for nth in range(10)]


# ---- queues disabled and enabled


def test_queue_subscriptions_wait_while_queues_are_disabled(harness: BrokerHarness) -> None:
    client = harness.connect_persistent("worker-1")
    join(client, "$queue/jobs")
    harness.queues_enabled = False
    harness.restart()
    client = reconnect(harness, "worker-1")
    client.subscribe("a")
    harness.queues_enabled = True
    harness.restart()
    client = reconnect(harness, "worker-1")
    put(client, "$queue/jobs", b"x")
    assert payloads(client.messages()) == [b"x"]


def test_3_1_1_client_keeps_its_protocol_version_across_a_restart(
    harness: BrokerHarness, end: str
) -> None:
    offline_session(harness, 1, V311)
    harness.connect("maker").publish("news/1", b"x", 1, user=[("k", "v")])
    getattr(harness, end)()
    (message,) = reconnect(harness, version=V311).messages()
    assert message.payload == b"x"
