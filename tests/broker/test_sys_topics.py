"""`$SYS/broker/...`: what the broker reports about itself."""

from __future__ import annotations

from sluice.broker.sys_topics import SysTopics
from tests.broker.kit import BrokerHarness
from tests.broker.peers import Client


def received_values(client: Client) -> dict[str, str]:
    return {one.topic.decode(): one.payload.decode() for one in client.messages()}


def watch(harness: BrokerHarness) -> Client:
    client = harness.connect("watcher")
    client.subscribe("$SYS/#")
    return client


def test_new_subscriber_gets_all_values_at_once(harness: BrokerHarness) -> None:
    SysTopics(harness.broker, "1.2.3").start()
    values = received_values(watch(harness))
    assert values["$SYS/broker/version"] == "sluice 1.2.3"
    assert values["$SYS/broker/uptime"] == "0 seconds"
    assert values["$SYS/broker/clients/connected"] == "0"
    assert len(values) >= 20


def test_changed_values_are_published_each_interval(harness: BrokerHarness) -> None:
    SysTopics(harness.broker, "1").start()
    watcher = watch(harness)
    watcher.take()
    harness.connect_persistent("away").drop()
    writer = harness.connect("w")
    writer.publish("t", b"12345", retain=True)
    writer.publish("t", b"12345", 1)
    harness.advance(10)
    values = received_values(watcher)
    assert values["$SYS/broker/uptime"] == "10 seconds"
    assert values["$SYS/broker/clients/connected"] == "2"
    assert values["$SYS/broker/clients/disconnected"] == "1"
    assert values["$SYS/broker/clients/total"] == "3"
    assert values["$SYS/broker/publish/messages/received"] == "2"
    assert values["$SYS/broker/publish/bytes/received"] == "10"
    assert values["$SYS/broker/subscriptions/count"] == "1"
    assert values["$SYS/broker/load/publish/received/1min"] == "12.00"
    assert "$SYS/broker/version" not in values
    harness.advance(10)
    assert "$SYS/broker/clients/connected" not in received_values(watcher)


def test_sys_topics_do_not_match_top_level_wildcards(harness: BrokerHarness) -> None:
    SysTopics(harness.broker, "1").start()
    client = harness.connect("a")
    client.subscribe("#", "+/broker/#")
    harness.advance(30)
    assert client.take() == []


def test_sys_topics_do_not_count_against_retained_limits() -> None:
    harness = BrokerHarness(max_retained=1)
    SysTopics(harness.broker, "1").start()
    client = harness.connect("a")
    assert client.publish("mine", b"x", 1, retain=True)
    client.first_ack(4, 1, 0)
    client.first_ack(4, client.publish("too", b"x", 1, retain=True), 0x97)
    harness.advance(10)
    assert "$SYS/broker/uptime" in received_values(watch(harness))
    client.publish("mine", b"", retain=True)
    client.first_ack(4, client.publish("other", b"x", 1, retain=True), 0)


def test_sys_topics_can_be_disabled() -> None:
    harness = BrokerHarness(sys_interval=0.0)
    SysTopics(harness.broker, "1").start()
    watcher = watch(harness)
    harness.advance(100)
    assert watcher.take() == []


def test_counters_match_the_packets_sent_and_received(harness: BrokerHarness) -> None:
    client = harness.connect("a")
    before = harness.counters.bytes_sent, harness.counters.packets_sent
    client.subscribe("t", qos=1)
    for _ in range(10):
        client.publish("t", b"x", 1)
    client.ping()
    sent = len(client.take())
    # SUBACK and PINGRESP were taken before.
    assert harness.counters.packets_sent - before[1] == sent + 2
    assert harness.counters.publishes_received == harness.counters.publishes_sent == 10
    assert harness.counters.packets_received == 1 + 1 + 10 + 1
