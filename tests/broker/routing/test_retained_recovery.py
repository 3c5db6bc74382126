"""Retained messages survive a restart unchanged, and no longer than they should."""

from __future__ import annotations

from sluice.broker.sessions.retained_messages import LEVEL_BYTES
from sluice.wire.properties import PUBACK
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client, will


def retained(harness: BrokerHarness, topic_filter: str = "#") -> dict[str, bytes]:
    client = harness.connect("looker")
    client.subscribe(topic_filter)
    found = client.messages()
    client.disconnect()
    assert all(message.retain for message in found)
    return {message.topic.decode(): message.payload for message in found}


def retain(client: Client, topic: str, payload: bytes, qos: int = 1) -> None:
    client.publish_fully(topic, payload, qos, retain=True)


def test_retained_messages_survive(harness: BrokerHarness, end: str) -> None:
    client = harness.connect("maker")
    for qos in (0, 1, 2):
        retain(client, f"a/{qos}", b"%d" % qos, qos)
    getattr(harness, end)()
    assert retained(harness) == {"a/0": b"0", "a/1": b"1", "a/2": b"2"}


def test_retained_message_survives_with_all_its_properties(
    harness: BrokerHarness, end: str
) -> None:
    harness.connect("maker").publish(
        "a", b"x", 1, True, user=[("k", "v")], content_type="text/plain", message_expiry=100
    )
    getattr(harness, end)()
    harness.advance(40)
    client = harness.connect("looker")
    client.subscribe("a", qos=1)
    (message,) = client.messages()
    assert (message.payload, message.qos, message.retain, message.expiry_seconds) == (
        b"x",
        1,
        True,
        60,
    )
    assert message.decode_properties().user == [("k", "v")]
    assert message.decode_properties().content_type == "text/plain"


def test_bytes_of_retained_messages_are_counted_across_a_restart(
    harness: BrokerHarness, end: str
) -> None:
    client = harness.connect("maker")
    for topic, payload in (
        ("a", bytes(100)),
        ("b", bytes(50)),
        ("a", bytes(70)),
        ("c", b"x"),
        ("c", b""),
    ):
        retain(client, topic, payload)
    before = harness.broker.router.retained.total_bytes
    getattr(harness, end)()
    assert before == harness.broker.router.retained.total_bytes == 122 + 2 * LEVEL_BYTES


def test_lower_limit_deletes_no_retained_message(harness: BrokerHarness, end: str) -> None:
    retain(harness.connect("maker"), "a", bytes(500))
    retain(harness.connect("maker"), "b", bytes(500))
    harness.limits.max_retained_bytes = 600
    getattr(harness, end)()
    assert set(retained(harness)) == {"a", "b"}
    client = harness.connect("maker")
    client.first_ack(PUBACK, client.publish("a", bytes(501), 1, retain=True), 0x97)
    retain(client, "a", bytes(400))
    assert retained(harness)["a"] == bytes(400)


def test_last_message_of_a_topic_wins(harness: BrokerHarness, end: str) -> None:
    client = harness.connect("maker")
    for nth in range(5):
        retain(client, "a", b"%d" % nth)
    getattr(harness, end)()
    assert retained(harness) == {"a": b"4"}
    retain(harness.connect("maker"), "a", b"5")
    getattr(harness, end)()
    assert retained(harness) == {"a": b"5"}


def test_cleared_message_does_not_return_in_an_older_form(harness: BrokerHarness, end: str) -> None:
    client = harness.connect("maker")
    for payload in (b"1", b"2", b"3", b""):
        retain(client, "a", payload)
    getattr(harness, end)()
    assert retained(harness) == {}
    retain(harness.connect("maker"), "a", b"4")
    getattr(harness, end)()
    retain(harness.connect("maker"), "a", b"5")
    retain(harness.connect("maker"), "a", b"")
    getattr(harness, end)()
    assert retained(harness) == {}


def test_message_expired_meanwhile_does_not_return(harness: BrokerHarness, end: str) -> None:
    harness.connect("maker").publish("a", b"x", 1, True, message_expiry=10)
    harness.advance(5)
    getattr(harness, end)()
    assert retained(harness) == {"a": b"x"}
    harness.advance(6)
    assert retained(harness) == {}
    getattr(harness, end)()
    assert retained(harness) == {}


def test_retained_publish_is_acknowledged_after_commit(harness: BrokerHarness) -> None:
    client = harness.connect("maker")
    harness.store.hold()
    packet_id = client.publish("a", b"x", 1, True)
    assert client.take() == []
    harness.store.release()
    harness.loop.settle()
    client.first_ack(PUBACK, packet_id)


def test_retained_will_survives(harness: BrokerHarness, end: str) -> None:
    harness.connect("dying", will=will("a", b"gone", retain=True)).drop()
    getattr(harness, end)()
    assert retained(harness) == {"a": b"gone"}


def test_sys_topics_are_not_stored(harness: BrokerHarness) -> None:
    harness.broker.router.publish(will("$SYS/broker/x", b"1", retain=True), None)
    harness.restart()
    assert retained(harness, "$SYS/#") == {}


def test_space_is_freed_when_a_topic_changes_often() -> None:
    harness = BrokerHarness(segment_bytes=64 * 1024)
    client = harness.connect("maker")
    retain(client, "still", b"here")
    for nth in range(2000):
        client.publish("a", b"%d" % nth * 100, 0, True)
    harness.advance(1)
    assert sum(harness.store.segment_sizes().values()) < 400_000
    harness.crash()
    assert retained(harness) == {"still": b"here", "a": b"1999" * 100}
