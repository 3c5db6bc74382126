"""A store that takes nothing for a while: what must be kept is refused, what waits is bounded, the rest goes on."""

from __future__ import annotations

import json

import pytest

from sluice.wire.properties import PUBACK
from tests.broker.namespaces.kit import QueueHouse, join, put, settle, take

WHY = "Redis has no memory"


def stalled() -> QueueHouse:
    house = QueueHouse()
    house.store.hold()
    house.broker.router.stalled(WHY)
    house.engine.unavailable = WHY
    return house


@pytest.mark.parametrize("qos", [1, 2])
def test_a_publish_for_a_lasting_session_is_refused_with_the_reason(qos: int) -> None:
    house = QueueHouse()
    lasting = house.connect_lasting("lasting")
    lasting.subscribe("mail", qos=2)
    device = house.connect("device")
    house.store.hold()
    house.broker.router.stalled(WHY)
    reason, why = put(device, "mail", b"x", qos)
    assert (reason, WHY in why) == (0x83, True)
    assert put(device, "elsewhere", b"x", qos)[0] == 0x10
    house.broker.router.stalled("")
    house.store.release()
    assert put(device, "mail", b"y", qos)[0] == 0
    assert lasting.payloads() == [b"y"]


def test_a_member_of_a_shared_subscription_counts_too() -> None:
    house = QueueHouse()
    house.connect_lasting("lasting").subscribe("$share/g/mail", qos=1)
    device = house.connect("device")
    house.broker.router.stalled(WHY)
    assert put(device, "mail", b"x")[0] == 0x83


def test_a_lasting_publisher_hears_at_once_that_exactly_once_cannot_be_promised() -> None:
    house = QueueHouse()
    device = house.connect_lasting("device")
    house.broker.router.stalled(WHY)
    assert put(device, "anything", b"x", 2)[0] == 0x83
    assert put(device, "anything", b"x", 1)[0] == 0x10


def test_a_retained_message_without_an_answer_reaches_those_who_listen_and_is_not_kept() -> None:
    house = stalled()
    listener = house.connect("listener")
    listener.subscribe("state", qos=1)
    device = house.connect("device")
    device.publish("state", b"1", 0, retain=True)
    assert listener.payloads() == [b"1"]
    assert house.broker.router.retained.count == 0
    assert house.counters.publishes_dropped == 1


def test_who_was_held_back_is_refused_instead() -> None:
    house = QueueHouse()
    device = house.connect("device")
    house.store.hold()
    device.publish("state/first", b"x", 1, retain=True)  # this frame is under way
    for nth in range(9):
        device.publish(f"state/{nth}", bytes(1_000_000), 1, retain=True)
    assert house.broker.router.held, "more waits for the store than should"
    house.broker.router.stalled(WHY)
    assert not house.broker.router.held
    late = device.publish("state/late", b"x", 1, retain=True)
    device.first_ack(PUBACK, late, 0x83)
    assert house.broker.router.is_swamped()
    refused = house.connect_lasting("newcomer")
    assert refused.connack.reason == 0x88
    assert house.connect_lasting("older", 4).connack.reason == 3
    assert house.connect("fleeting").connack.reason == 0
    house.broker.router.stalled("")
    house.store.release()
    house.loop.settle()
    assert house.connect_lasting("newcomer").connack.reason == 0
    assert house.broker.router.retained.count == 10


def short_of_room() -> QueueHouse:
    house = QueueHouse()
    config = json.dumps({"name": "copies", "bindings": ["sensors/#"]}).encode()
    assert put(house.connect("admin"), "$admin/queue/create", config)[0] == 0
    house.broker.router.no_room = True
    house.broker.router.stalled("the disk is nearly full")
    house.engine.no_room = True
    house.engine.unavailable = "the disk is nearly full"
    return house


def test_what_there_is_no_room_for_is_refused_as_too_much() -> None:
    house = short_of_room()
    house.connect_lasting("lasting").subscribe("mail", qos=1)
    device = house.connect("device")
    for topic in ("mail", "sensors/1", "$queue/jobs"):
        reason, why = put(device, topic, b"x")
        assert (reason, "nearly full" in why) == (0x97, True), topic
    assert put(device, "elsewhere", b"x")[0] == 0x10


MEMORY = "the broker uses 2 GiB of memory, and limits.memory is 1 GiB"


def short_of_memory(house: QueueHouse) -> None:
    router, engine = house.broker.router, house.engine
    router.no_room = router.no_memory = engine.no_room = engine.no_memory = True
    engine.unavailable = MEMORY
    router.stalled(MEMORY)


def test_above_the_memory_limit_whatever_would_be_stored_is_refused_with_the_remedy() -> None:
    house = QueueHouse()
    config = json.dumps({"name": "copies", "bindings": ["sensors/#"]}).encode()
    assert put(house.connect("admin"), "$admin/queue/create", config)[0] == 0
    house.connect_lasting("lasting").subscribe("mail", qos=1)
    device = house.connect("device")
    short_of_memory(house)
    for topic, more in (
        ("mail", {}),
        ("sensors/1", {}),
        ("$queue/jobs", {}),
        ("$ECQ/w/owner/key", {}),
        ("state", {"retain": True}),
    ):
        reason, why = put(device, topic, b"x", **more)
        assert (reason, MEMORY in why, "raise limits.memory" in why) == (0x97, True, True), topic
    assert put(device, "elsewhere", b"x")[0] == 0x10
    assert house.engine.refused_for_memory + house.broker.router.refused_for_memory == 5


def test_above_the_memory_limit_deliveries_settlements_and_administration_go_on() -> None:
    house = QueueHouse()
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=1)
    device = house.connect("device")
    for nth in range(3):
        assert put(device, "$queue/jobs", b"%d" % nth)[0] == 0
    assert put(device, "state", b"x", retain=True)[0] in (0, 0x10)
    short_of_memory(house)
    for nth in range(3):
        [message] = take(worker)
        assert message.payload == b"%d" % nth
        assert settle(worker, "ack", message)[0] == 0
    assert house.depth("jobs") == 0
    assert put(device, "state", b"", retain=True)[0] in (0, 0x10)
    assert house.broker.router.retained.count == 0
    assert put(device, "$admin/queue/create", b'{"name": "more"}')[0] == 0


def test_above_the_memory_limit_an_mqtt_3_client_is_disconnected_as_for_other_refusals() -> None:
    """It has no reason code: an acknowledgement would be a promise."""
    house = QueueHouse()
    device = house.connect("device", 4)
    short_of_memory(house)
    device.publish("$queue/jobs", b"x", 1)
    assert device.closed
