"""`$SYS/broker/...`: what the broker says about itself."""

from __future__ import annotations

from sluice.broker.namespaces.sys_topics import SysTopics
from tests.broker.kit import Client, House


def told(client: Client) -> dict[str, str]:
    return {one.topic.decode(): one.payload.decode() for one in client.messages()}


def watch(house: House) -> Client:
    client = house.connect("watcher")
    client.subscribe("$SYS/#")
    return client


def test_a_newcomer_is_told_everything_at_once(house: House) -> None:
    SysTopics(house.broker, "1.2.3").start()
    values = told(watch(house))
    assert values["$SYS/broker/version"] == "sluice 1.2.3"
    assert values["$SYS/broker/uptime"] == "0 seconds"
    assert values["$SYS/broker/clients/connected"] == "0"
    assert len(values) >= 20


def test_what_has_changed_is_told_each_interval(house: House) -> None:
    SysTopics(house.broker, "1").start()
    watcher = watch(house)
    watcher.take()
    house.connect_lasting("away").drop()
    writer = house.connect("w")
    writer.publish("t", b"12345", retain=True)
    writer.publish("t", b"12345", 1)
    house.advance(10)
    values = told(watcher)
    assert values["$SYS/broker/uptime"] == "10 seconds"
    assert values["$SYS/broker/clients/connected"] == "2"
    assert values["$SYS/broker/clients/disconnected"] == "1"
    assert values["$SYS/broker/clients/total"] == "3"
    assert values["$SYS/broker/publish/messages/received"] == "2"
    assert values["$SYS/broker/publish/bytes/received"] == "10"
    assert values["$SYS/broker/subscriptions/count"] == "1"
    assert values["$SYS/broker/load/publish/received/1min"] == "12.00"
    assert "$SYS/broker/version" not in values
    house.advance(10)
    assert "$SYS/broker/clients/connected" not in told(watcher)


def test_they_are_not_for_wildcards_at_the_top(house: House) -> None:
    SysTopics(house.broker, "1").start()
    client = house.connect("a")
    client.subscribe("#", "+/broker/#")
    house.advance(30)
    assert client.take() == []


def test_they_take_no_room_from_the_retained_messages_of_clients() -> None:
    house = House(max_retained=1)
    SysTopics(house.broker, "1").start()
    client = house.connect("a")
    assert client.publish("mine", b"x", 1, retain=True)
    client.first_ack(4, 1, 0x10)
    client.first_ack(4, client.publish("too", b"x", 1, retain=True), 0x97)
    house.advance(10)
    assert "$SYS/broker/uptime" in told(watch(house))
    client.publish("mine", b"", retain=True)
    client.first_ack(4, client.publish("other", b"x", 1, retain=True), 0x10)


def test_they_can_be_switched_off() -> None:
    house = House(sys_interval=0.0)
    SysTopics(house.broker, "1").start()
    watcher = watch(house)
    house.advance(100)
    assert watcher.take() == []


def test_the_counters_agree_with_what_went_over_the_line(house: House) -> None:
    client = house.connect("a")
    before = house.counters.bytes_sent, house.counters.packets_sent
    client.subscribe("t", qos=1)
    for _ in range(10):
        client.publish("t", b"x", 1)
    client.ping()
    sent = len(client.take())
    assert house.counters.packets_sent - before[1] == sent + 2  # SUBACK and PINGRESP were taken before
    assert house.counters.publishes_received == house.counters.publishes_sent == 10
    assert house.counters.packets_received == 1 + 1 + 10 + 1
