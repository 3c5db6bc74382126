"""QoS 2 is exactly once across a crash: each step is stored before a packet reports it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sluice.queues.engine import Engine
from sluice.queues.log.frame_builder import Frame
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.recovery.loader import EngineLoader
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Ack, Publish
from sluice.wire.properties import PUBCOMP, PUBREC, PUBREL
from tests.adversity.crashes.qos2_crash import crash
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import join, payloads
from tests.broker.peers import Client
from tests.store.embedded.simulated_disk import Disk
from tests.store.kit import StoreUnderTest


def reconnect(harness: BrokerHarness, client_id: str, version: int = 5) -> Client:
    client = harness.connect_persistent(client_id, version)
    assert client.connack.session_present
    return client


def release(harness: BrokerHarness) -> None:
    """Let the store commit everything."""
    harness.store.release()
    harness.loop.settle()


def acks(client: Client) -> list[tuple[int, int]]:
    return [(int(one.kind), int(one.packet_id)) for one in client.take() if isinstance(one, Ack)]


# ---- from a sender


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_message_is_forwarded_when_it_is_stored_with_its_packet_id(
    harness: BrokerHarness, qos: int, lasting: bool
) -> None:
    reader = harness.connect_persistent("reader") if lasting else harness.connect("reader")
    reader.subscribe("news", qos=qos)
    member = harness.connect_persistent("member") if lasting else harness.connect("member")
    member.subscribe("$share/g/news", qos=qos)
    sender = harness.connect_persistent("sender")
    harness.store.hold()
    sender.publish("news", b"once", 2, packet_id=5)
    assert reader.take() == member.take() == sender.take() == []
    release(harness)
    assert payloads(reader.messages()) == payloads(member.messages()) == [b"once"]
    sender.first_ack(PUBREC, 5, 0)


def test_unstored_message_reached_no_client_and_is_accepted_when_resent(
    harness: BrokerHarness,
) -> None:
    harness.connect_persistent("reader").subscribe("news", qos=2)
    sender = harness.connect_persistent("sender")
    harness.store.hold()
    sender.publish("news", b"once", 2, packet_id=5)
    harness.kill()
    reader, sender = reconnect(harness, "reader"), reconnect(harness, "sender")
    assert reader.take() == []
    sender.publish("news", b"once", 2, packet_id=5, dup=True)
    sender.first_ack(PUBREC, 5, 0)
    assert payloads(reader.messages()) == [b"once"]


def test_message_stored_but_not_forwarded_arrives_once(harness: BrokerHarness) -> None:
    harness.connect_persistent("two").subscribe("news", qos=2)
    harness.connect_persistent("one").subscribe("news", qos=1)
    sender = harness.connect_persistent("sender")
    harness.store.hold()
    sender.publish("news", b"once", 2, packet_id=5)
    # Stored, not acknowledged.
    harness.kill_after_writes()
    sender = reconnect(harness, "sender")
    sender.publish("news", b"once", 2, packet_id=5, dup=True)
    sender.first_ack(PUBREC, 5, 0)
    assert payloads(reconnect(harness, "two").messages()) == [b"once"]
    assert payloads(reconnect(harness, "one").messages()) == [b"once"]


def test_retained_messages_are_visible_when_stored(harness: BrokerHarness) -> None:
    sender = harness.connect_persistent("sender")
    sender.publish_fully("state", b"old", 2, retain=True)
    harness.store.hold()
    sender.publish("state", b"new", 2, retain=True, packet_id=9)
    early = harness.connect("early")
    early.subscribe("state", qos=1)
    assert payloads(early.messages()) == [b"old"]
    release(harness)
    assert payloads(early.messages()) == [b"new"]  # it subscribed before the message was visible
    late = harness.connect("late")
    late.subscribe("state")
    assert payloads(late.messages()) == [b"new"]
    harness.kill()
    late = harness.connect("late")
    late.subscribe("state")
    assert payloads(late.messages()) == [b"new"]


@pytest.mark.parametrize("newest", [b"newest", b""])
def test_last_retained_message_wins_whatever_its_qos(harness: BrokerHarness, newest: bytes) -> None:
    sender = harness.connect_persistent("sender")
    harness.store.hold()
    sender.publish("state", b"held", 2, retain=True)
    harness.connect("other").publish("state", newest, 1, retain=True)
    release(harness)
    for _ in range(2):
        reader = harness.connect("reader")
        reader.subscribe("state")
        assert payloads(reader.messages()) == ([newest] if newest else [])
        harness.kill()


def test_retained_limits_are_checked_before_commit() -> None:
    harness = BrokerHarness(max_retained=1)
    sender = harness.connect_persistent("sender")
    harness.store.hold()
    sender.publish("a", b"1", 2, retain=True, packet_id=1)
    sender.publish("b", b"2", 2, retain=True, packet_id=2)
    sender.publish("a", b"3", 2, retain=True, packet_id=3)
    release(harness)
    reasons = [int(sender.first_ack(PUBREC, packet_id).reason) for packet_id in (1, 2, 3)]
    assert reasons == [0, 0x97, 0]
    reader = harness.connect("reader")
    reader.subscribe("#")
    assert payloads(reader.messages()) == [b"3"]


def test_message_for_a_member_that_left_meanwhile_goes_to_another(harness: BrokerHarness) -> None:
    first, second = harness.connect("first"), harness.connect("second")
    for member in (first, second):
        member.subscribe("$share/g/news", qos=1)
    sender = harness.connect_persistent("sender")
    harness.store.hold()
    sender.publish("news", b"once", 2)
    first.disconnect()  # the member whose turn it is
    assert second.take() == []
    release(harness)
    assert payloads(second.messages()) == [b"once"]


def test_nothing_is_stored_for_clients_without_persistent_session(
    harness: BrokerHarness,
) -> None:
    reader = harness.connect("reader")
    reader.subscribe("news", qos=2)
    sender, lasting = harness.connect("sender"), harness.connect_persistent("lasting")
    harness.store.hold()
    sender.publish_fully("news", b"two", 2)
    lasting.publish_fully("news", b"one", 1)
    lasting.publish("news", b"none", 0)
    messages = reader.messages()
    assert payloads(messages) == [b"two", b"one", b"none"]
    reader.ack(messages[0])
    assert harness.store.count_pending() == 0


def test_qos_1_to_persistent_sessions_does_not_wait_for_the_store(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("reader")
    reader.subscribe("news", qos=1)
    harness.store.hold()
    harness.connect("sender").publish("news", b"one", 1)
    assert payloads(reader.messages()) == [b"one"]


def test_packet_id_is_completed_when_its_pubrel_is_stored(harness: BrokerHarness) -> None:
    reader = harness.connect("reader")
    reader.subscribe("news", qos=0)
    sender = harness.connect_persistent("sender")
    sender.publish("news", b"first", 2, packet_id=5)
    sender.first_ack(PUBREC, 5)
    harness.store.hold()
    sender.send(Ack(PUBREL, 5))
    assert sender.take() == []
    sender.drop()
    sender = reconnect(harness, "sender")
    # Again, on a new connection: the broker has released it, the store has not stored that.
    sender.send(Ack(PUBREL, 5))
    assert sender.take() == []
    release(harness)
    assert acks(sender) == [(PUBCOMP, 5)]


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_new_message_under_a_completed_packet_id_is_not_a_duplicate(
    harness: BrokerHarness, end: str
) -> None:
    sender = harness.connect_persistent("sender")
    sender.publish("news", b"first", 2, packet_id=5)
    sender.first_ack(PUBREC, 5)
    sender.send(Ack(PUBREL, 5))
    sender.first_ack(PUBCOMP, 5)
    getattr(harness, end)()  # the first PUBLISH of the next message waits for its commit
    reader = harness.connect("reader")
    reader.subscribe("news")
    reconnect(harness, "sender").publish("news", b"second", 2, packet_id=5, dup=True)
    assert payloads(reader.messages()) == [b"second"]


def test_value_for_an_exclusive_queue_is_in_the_frame_of_its_packet_id(
    harness: BrokerHarness,
) -> None:
    """A commit may come between a PUBLISH and the end of its turn, when values are written."""
    sender = harness.connect_persistent("sender")
    packet = Publish(b"$ECQ/w/owner/key", b"value", 2)
    packet.packet_id = 5
    sender.connection.data_received(encode(packet, V5))
    harness.commit_loop.end_turn()
    harness.kill_after_writes()
    sender = reconnect(harness, "sender")
    sender.publish("$ECQ/w/owner/key", b"value", 2, packet_id=5, dup=True)
    sender.first_ack(PUBREC, 5, 0)
    owner = harness.connect("owner")
    join(owner, "$ECQ/owner/#")
    assert payloads(owner.messages()) == [b"value"]


def test_reply_is_forwarded_when_its_packet_id_is_stored(harness: BrokerHarness) -> None:
    requester = harness.connect_persistent("asker")
    requester.subscribe("$queue/responses/1", qos=2)
    worker = harness.connect_persistent("worker")
    harness.store.hold()
    worker.publish("$queue/responses/1", b"answer", 2, packet_id=5)
    assert requester.take() == worker.take() == []
    release(harness)
    worker.first_ack(PUBREC, 5, 0)
    assert payloads(requester.messages()) == [b"answer"]


# ---- to a receiver


@pytest.mark.parametrize("version", [4, 5])
def test_message_is_sent_when_its_packet_id_is_stored(harness: BrokerHarness, version: int) -> None:
    """This also holds if the sender's session ends with its connection: the receiver's does not."""
    reader = harness.connect_persistent("reader", version)
    reader.subscribe("news", qos=2)
    harness.store.hold()
    harness.connect("sender").publish("news", b"lost", 2)
    assert reader.take() == []
    harness.kill()
    reader = reconnect(harness, "reader", version)
    harness.connect("sender").publish("news", b"next", 2)
    (message,) = reader.messages()
    harness.kill()
    (again,) = reconnect(harness, "reader", version).messages()
    assert (again.payload, again.packet_id, again.dup) == (b"next", message.packet_id, True)


def test_packet_ids_of_messages_waiting_for_the_window_are_stored(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("reader", receive_maximum=1)
    reader.subscribe("news", qos=2)
    sender = harness.connect_persistent("sender")
    for payload in (b"1", b"2", b"3"):
        sender.publish_fully("news", payload, 2)
    (first,) = reader.messages()
    reader.send(Ack(PUBREC, int(first.packet_id)))
    reader.first_ack(PUBREL, int(first.packet_id))
    harness.store.hold()
    reader.send(Ack(PUBCOMP, int(first.packet_id)))
    assert reader.take() == []
    release(harness)
    (second,) = reader.messages()
    harness.kill()
    reader = reconnect(harness, "reader")
    again, third = reader.messages()
    assert (again.payload, again.packet_id, again.dup) == (b"2", second.packet_id, True)
    assert (third.payload, third.dup) == (b"3", False)


def test_messages_stay_in_order_whatever_the_store_does(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("reader", receive_maximum=3)
    reader.subscribe("news", qos=2)
    sender = harness.connect_persistent("sender")
    draw = random.Random(1)
    got: list[bytes] = []
    unanswered: list[Ack] = []
    sent = 0
    harness.store.hold()
    while len(got) < 200:
        if sent < 200 and draw.random() < 0.5:
            sent += 1
            sender.publish("news", b"%d" % sent, 2)
        for packet in sender.take():
            if isinstance(packet, Ack) and packet.kind == PUBREC:
                sender.send(Ack(PUBREL, int(packet.packet_id)))
        for packet in reader.take():
            if isinstance(packet, Publish):
                got.append(packet.payload)
                unanswered.append(Ack(PUBREC, int(packet.packet_id)))
            elif isinstance(packet, Ack) and packet.kind == PUBREL:
                unanswered.append(Ack(PUBCOMP, int(packet.packet_id)))
        if unanswered and draw.random() < 0.4:
            reader.send(unanswered.pop(0))
        if draw.random() < 0.4:
            harness.store.release(1)
            harness.loop.settle()
    assert got == [b"%d" % (nth + 1) for nth in range(200)]


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_pubrel_is_sent_when_the_pubrec_is_stored(harness: BrokerHarness, end: str) -> None:
    reader = harness.connect_persistent("reader")
    reader.subscribe("news", qos=2)
    harness.connect("sender").publish_fully("news", b"once", 2)
    (message,) = reader.messages()
    harness.store.hold()
    reader.send(Ack(PUBREC, int(message.packet_id)))
    reader.send(Ack(PUBREC, int(message.packet_id)))
    assert reader.take() == []
    release(harness)
    assert acks(reader) == [(PUBREL, int(message.packet_id))]
    getattr(harness, end)()
    assert acks(reconnect(harness, "reader")) == [(PUBREL, int(message.packet_id))]


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_after_a_crash_the_pubrel_is_sent_and_not_the_message(
    harness: BrokerHarness, end: str
) -> None:
    reader = harness.connect_persistent("reader")
    reader.subscribe("news", qos=2)
    harness.connect("sender").publish_fully("news", b"once", 2)
    (message,) = reader.messages()
    reader.send(Ack(PUBREC, int(message.packet_id)))
    reader.first_ack(PUBREL, int(message.packet_id))
    getattr(harness, end)()
    (packet,) = reconnect(harness, "reader").take()
    assert isinstance(packet, Ack)
    assert (packet.kind, packet.packet_id) == (PUBREL, message.packet_id)


def test_reconnecting_receiver_is_sent_nothing_before_it_is_stored(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("reader")
    reader.subscribe("news", qos=2)
    sender = harness.connect("sender")
    sender.publish_fully("news", b"1", 2)
    (first,) = reader.messages()
    harness.store.hold()
    reader.send(Ack(PUBREC, int(first.packet_id)))
    sender.publish("news", b"2", 2)
    reader.drop()
    reader = reconnect(harness, "reader")
    assert reader.take() == []
    release(harness)
    release_of_first, second = reader.take()
    assert isinstance(release_of_first, Ack) and isinstance(second, Publish)
    assert (release_of_first.kind, release_of_first.packet_id) == (PUBREL, first.packet_id)
    assert second.payload == b"2"


def test_oversized_message_frees_its_packet_id(harness: BrokerHarness) -> None:
    reader = harness.connect_persistent("reader", maximum_packet_size=100, receive_maximum=1)
    reader.subscribe("news", qos=2)
    sender = harness.connect("sender")
    sender.publish_fully("news", b"x" * 200, 2)
    sender.publish_fully("news", b"small", 2)
    assert payloads(reader.messages()) == [b"small"]
    harness.kill()
    assert payloads(reconnect(harness, "reader").messages()) == [b"small"]


# ---- power cuts


def test_message_with_unsent_pubrec_is_not_stored_again_after_a_power_cut(
    harness: BrokerHarness,
) -> None:
    """No session has a stored copy: only the receipt is stored, and it is synced."""
    reader = harness.connect("reader")
    reader.subscribe("news", qos=1)
    sender = harness.connect_persistent("sender")
    sender.publish("news", b"once", 2, packet_id=5)
    assert payloads(reader.messages()) == [b"once"]
    sender.first_ack(PUBREC, 5, 0)
    harness.crash()
    reader = harness.connect("reader")
    reader.subscribe("news", qos=1)
    sender = reconnect(harness, "sender")
    sender.publish("news", b"once", 2, packet_id=5, dup=True)
    sender.first_ack(PUBREC, 5, 0)
    assert reader.messages() == []


STORED: dict[str, object] = {
    "received": {7: {5}},
    "released": {7: set()},
    "sent": {7: {5: 3}},
    "there": {7: {5: 0}},
}


def commit(store: StoreUnderTest, frame: Frame) -> None:
    """Commit a frame of the engine, and wait for the callback."""
    done: list[int] = []
    store.store.commit(frame.data, int(frame.count), frame.sync, lambda: done.append(1))
    store.loop.turn_until(lambda: bool(done or store.failures))
    assert not store.failures


@pytest.mark.parametrize("step", ["received", "released", "sent", "there"])
def test_each_step_is_synced_before_it_is_acknowledged(tmp_path: Path, step: str) -> None:
    """Use a disk that loses unsynced bytes; the seed decides which ones."""
    for seed in range(25):
        disk = Disk(random.Random(seed))
        store = StoreUnderTest(tmp_path, files=disk).open()
        for nth in range(2 if step in ("released", "there") else 1):
            engine = Engine(lambda name: (QueueRules(name), ""), lambda: 0.5)
            broker_state = engine.broker_state
            if step in ("received", "released"):
                broker_state.record_received(7, 5, nth == 1, 0)
            else:
                broker_state.record_sent(7, 5, 0 if nth else 3, 0)
            frame = engine.frame_builder.close(0)
            commit(store, frame)
        disk.cut_after(0)
        store.store.close()
        disk.reboot()
        store = StoreUnderTest(tmp_path, files=disk)
        engine = Engine(lambda name: (QueueRules(name), ""), lambda: 0.5)
        store.store.open(EngineLoader(engine, lambda name, text: QueueRules(name)))
        found = (
            engine.broker_state.received_qos2
            if step in ("received", "released")
            else engine.broker_state.sent_qos2
        )
        assert found == STORED[step], f"seed {seed}"
        store.store.close()


# ---- real processes


@pytest.mark.timeout(240)  # it starts brokers
def test_every_message_arrives_once_when_killed_during_handshakes(
    tmp_path: Path,
) -> None:
    """`scripts/crash-qos2` runs many more rounds, also on Redis and in a cluster."""
    report = crash(tmp_path, rounds=3, seed=5, store="embedded")
    assert report.faults == []
    assert len(report.sent) > 10
