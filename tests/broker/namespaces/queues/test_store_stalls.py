"""A store that accepts nothing for a while.

Messages that must be stored are refused, the backlog is bounded, and everything else continues.
"""

from __future__ import annotations

import json

import pytest

from sluice.wire.properties import PUBACK
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, put, settle, take

WHY = "Redis has no memory"


def stalled() -> BrokerHarness:
    harness = BrokerHarness()
    harness.store.hold()
    harness.broker.router.set_unavailable(WHY)
    harness.engine.publishing.unavailable_reason = WHY
    return harness


@pytest.mark.parametrize("qos", [1, 2])
def test_publish_for_a_persistent_session_is_refused_with_the_reason(qos: int) -> None:
    harness = BrokerHarness()
    lasting = harness.connect_persistent("lasting")
    lasting.subscribe("mail", qos=2)
    device = harness.connect("device")
    harness.store.hold()
    harness.broker.router.set_unavailable(WHY)
    reason, why = put(device, "mail", b"x", qos)
    assert (reason, WHY in why) == (0x83, True)
    assert put(device, "elsewhere", b"x", qos)[0] == 0x10
    harness.broker.router.set_unavailable("")
    harness.store.release()
    assert put(device, "mail", b"y", qos)[0] == 0
    assert lasting.payloads() == [b"y"]


def test_member_of_a_shared_subscription_counts_too() -> None:
    harness = BrokerHarness()
    harness.connect_persistent("lasting").subscribe("$share/g/mail", qos=1)
    device = harness.connect("device")
    harness.broker.router.set_unavailable(WHY)
    assert put(device, "mail", b"x")[0] == 0x83


def test_qos_2_publish_of_a_persistent_session_is_refused_at_once() -> None:
    harness = BrokerHarness()
    device = harness.connect_persistent("device")
    harness.broker.router.set_unavailable(WHY)
    assert put(device, "anything", b"x", 2)[0] == 0x83
    assert put(device, "anything", b"x", 1)[0] == 0x10


def test_qos_0_retained_message_reaches_subscribers_and_is_not_stored() -> None:
    harness = stalled()
    listener = harness.connect("listener")
    listener.subscribe("state", qos=1)
    device = harness.connect("device")
    device.publish("state", b"1", 0, retain=True)
    assert listener.payloads() == [b"1"]
    assert harness.broker.router.retained.count == 0
    assert harness.counters.publishes_dropped == 1


def test_paused_publisher_is_refused_instead() -> None:
    harness = BrokerHarness()
    device = harness.connect("device")
    harness.store.hold()
    device.publish("state/first", b"x", 1, retain=True)  # this frame is being committed
    for nth in range(9):
        device.publish(f"state/{nth}", bytes(1_000_000), 1, retain=True)
    assert harness.broker.router.throttled_connections, "more waits for the store than should"
    harness.broker.router.set_unavailable(WHY)
    assert not harness.broker.router.throttled_connections
    late = device.publish("state/late", b"x", 1, retain=True)
    device.first_ack(PUBACK, late, 0x83)
    assert harness.broker.router.is_store_saturated()
    refused = harness.connect_persistent("newcomer")
    assert refused.connack.reason == 0x88
    assert harness.connect_persistent("older", 4).connack.reason == 3
    assert harness.connect("fleeting").connack.reason == 0
    harness.broker.router.set_unavailable("")
    harness.store.release()
    harness.loop.settle()
    assert harness.connect_persistent("newcomer").connack.reason == 0
    assert harness.broker.router.retained.count == 10


def harness_without_space() -> BrokerHarness:
    harness = BrokerHarness()
    config = json.dumps({"name": "copies", "bindings": ["sensors/#"]}).encode()
    assert put(harness.connect("admin"), "$admin/queue/create", config)[0] == 0
    harness.broker.router.is_out_of_space = True
    harness.broker.router.set_unavailable("the disk is nearly full")
    harness.engine.publishing.is_out_of_space = True
    harness.engine.publishing.unavailable_reason = "the disk is nearly full"
    return harness


def test_publish_without_space_is_refused_with_quota_exceeded() -> None:
    harness = harness_without_space()
    harness.connect_persistent("lasting").subscribe("mail", qos=1)
    device = harness.connect("device")
    for topic in ("mail", "sensors/1", "$queue/jobs"):
        reason, why = put(device, topic, b"x")
        assert (reason, "nearly full" in why) == (0x97, True), topic
    assert put(device, "elsewhere", b"x")[0] == 0x10


MEMORY = "the broker uses 2 GiB of memory, and limits.memory is 1 GiB"


def exceed_memory_limit(harness: BrokerHarness) -> None:
    router, engine = harness.broker.router, harness.engine
    router.is_out_of_space = router.is_out_of_memory = engine.publishing.is_out_of_space = (
        engine.publishing.is_out_of_memory
    ) = True
    engine.publishing.unavailable_reason = MEMORY
    router.set_unavailable(MEMORY)


def test_above_memory_limit_whatever_would_be_stored_is_refused_with_a_remedy() -> None:
    harness = BrokerHarness()
    config = json.dumps({"name": "copies", "bindings": ["sensors/#"]}).encode()
    assert put(harness.connect("admin"), "$admin/queue/create", config)[0] == 0
    harness.connect_persistent("lasting").subscribe("mail", qos=1)
    device = harness.connect("device")
    exceed_memory_limit(harness)
    for topic, retain in (
        ("mail", False),
        ("sensors/1", False),
        ("$queue/jobs", False),
        ("$ECQ/w/owner/key", False),
        ("state", True),
    ):
        reason, why = put(device, topic, b"x", retain=retain)
        assert (reason, MEMORY in why, "raise limits.memory" in why) == (0x97, True, True), topic
    assert put(device, "elsewhere", b"x")[0] == 0x10
    assert (
        harness.engine.publishing.refused_out_of_memory
        + harness.broker.router.refused_out_of_memory
        == 5
    )


def test_above_memory_limit_deliveries_settlements_and_administration_continue() -> None:
    harness = BrokerHarness()
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=1)
    device = harness.connect("device")
    for nth in range(3):
        assert put(device, "$queue/jobs", b"%d" % nth)[0] == 0
    assert put(device, "state", b"x", retain=True)[0] in (0, 0x10)
    exceed_memory_limit(harness)
    for nth in range(3):
        [message] = take(worker)
        assert message.payload == b"%d" % nth
        assert settle(worker, "ack", message)[0] == 0
    assert harness.depth("jobs") == 0
    assert put(device, "state", b"", retain=True)[0] in (0, 0x10)
    assert harness.broker.router.retained.count == 0
    assert put(device, "$admin/queue/create", b'{"name": "more"}')[0] == 0


def test_above_memory_limit_an_mqtt_3_client_is_disconnected() -> None:
    """It has no reason code: an acknowledgement would be a promise."""
    harness = BrokerHarness()
    device = harness.connect("device", 4)
    exceed_memory_limit(harness)
    device.publish("$queue/jobs", b"x", 1)
    assert device.closed
