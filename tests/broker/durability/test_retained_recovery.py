"""Retained messages survive a restart, as they were and no longer than they should."""

from __future__ import annotations

from sluice.broker.sessions.retained import LEVEL_BYTES
from sluice.wire.properties import PUBACK
from tests.broker.kit import Client, will
from tests.broker.namespaces.kit import QueueHouse


def retained(house: QueueHouse, topic_filter: str = "#") -> dict[str, bytes]:
    client = house.connect("looker")
    client.subscribe(topic_filter)
    found = client.messages()
    client.disconnect()
    assert all(message.retain for message in found)
    return {message.topic.decode(): message.payload for message in found}


def keep(client: Client, topic: str, payload: bytes, qos: int = 1) -> None:
    client.publish_fully(topic, payload, qos, retain=True)


def test_retained_messages_survive(house: QueueHouse, end: str) -> None:
    client = house.connect("maker")
    for qos in (0, 1, 2):
        keep(client, f"a/{qos}", b"%d" % qos, qos)
    getattr(house, end)()
    assert retained(house) == {"a/0": b"0", "a/1": b"1", "a/2": b"2"}


def test_all_of_a_retained_message_survives(house: QueueHouse, end: str) -> None:
    house.connect("maker").publish(
        "a", b"x", 1, True, user=[("k", "v")], content_type="text/plain", message_expiry=100
    )
    getattr(house, end)()
    house.advance(40)
    client = house.connect("looker")
    client.subscribe("a", qos=1)
    (message,) = client.messages()
    assert (message.payload, message.qos, message.retain, message.expiry) == (b"x", 1, True, 60)
    assert message.properties().user == [("k", "v")]
    assert message.properties().content_type == "text/plain"


def test_the_bytes_of_retained_messages_are_counted_over_a_restart(house: QueueHouse, end: str) -> None:
    client = house.connect("maker")
    for topic, payload in (("a", bytes(100)), ("b", bytes(50)), ("a", bytes(70)), ("c", b"x"), ("c", b"")):
        keep(client, topic, payload)
    before = house.broker.router.retained.held_bytes
    getattr(house, end)()
    assert before == house.broker.router.retained.held_bytes == 122 + 2 * LEVEL_BYTES


def test_a_lower_limit_takes_nothing_away_that_was_retained(house: QueueHouse, end: str) -> None:
    keep(house.connect("maker"), "a", bytes(500))
    keep(house.connect("maker"), "b", bytes(500))
    house.limits.max_retained_bytes = 600
    getattr(house, end)()
    assert set(retained(house)) == {"a", "b"}
    client = house.connect("maker")
    client.first_ack(PUBACK, client.publish("a", bytes(501), 1, retain=True), 0x97)
    keep(client, "a", bytes(400))
    assert retained(house)["a"] == bytes(400)


def test_the_last_message_of_a_topic_counts(house: QueueHouse, end: str) -> None:
    client = house.connect("maker")
    for nth in range(5):
        keep(client, "a", b"%d" % nth)
    getattr(house, end)()
    assert retained(house) == {"a": b"4"}
    keep(house.connect("maker"), "a", b"5")
    getattr(house, end)()
    assert retained(house) == {"a": b"5"}


def test_what_was_cleared_does_not_come_back_in_any_older_form(house: QueueHouse, end: str) -> None:
    client = house.connect("maker")
    for payload in (b"1", b"2", b"3", b""):
        keep(client, "a", payload)
    getattr(house, end)()
    assert retained(house) == {}
    keep(house.connect("maker"), "a", b"4")
    getattr(house, end)()
    keep(house.connect("maker"), "a", b"5")
    keep(house.connect("maker"), "a", b"")
    getattr(house, end)()
    assert retained(house) == {}


def test_what_has_expired_meanwhile_does_not_come_back(house: QueueHouse, end: str) -> None:
    house.connect("maker").publish("a", b"x", 1, True, message_expiry=10)
    house.advance(5)
    getattr(house, end)()
    assert retained(house) == {"a": b"x"}
    house.advance(6)
    assert retained(house) == {}
    getattr(house, end)()
    assert retained(house) == {}


def test_a_retained_publish_is_acknowledged_when_the_store_has_it(house: QueueHouse) -> None:
    client = house.connect("maker")
    house.store.hold()
    packet_id = client.publish("a", b"x", 1, True)
    assert client.take() == []
    house.store.release()
    house.loop.settle()
    client.first_ack(PUBACK, packet_id)


def test_a_will_that_is_retained_survives(house: QueueHouse, end: str) -> None:
    house.connect("dying", will=will("a", b"gone", retain=True)).drop()
    getattr(house, end)()
    assert retained(house) == {"a": b"gone"}


def test_the_systems_own_topics_are_not_kept(house: QueueHouse) -> None:
    house.broker.router.publish(will("$SYS/broker/x", b"1", retain=True), None)
    house.restart()
    assert retained(house, "$SYS/#") == {}


def test_room_is_given_back_when_a_topic_changes_often() -> None:
    house = QueueHouse(segment_bytes=64 * 1024)
    client = house.connect("maker")
    keep(client, "still", b"here")
    for nth in range(2000):
        client.publish("a", b"%d" % nth * 100, 0, True)
    house.advance(1)
    assert sum(house.store.segment_sizes().values()) < 400_000
    house.crash()
    assert retained(house) == {"still": b"here", "a": b"1999" * 100}
