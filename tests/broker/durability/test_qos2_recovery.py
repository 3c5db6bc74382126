"""QoS 2 is exactly once across a crash: each step is stored before a packet tells of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sluice.queues.engine import Engine
from sluice.queues.log.frame_builder import Frame
from sluice.queues.log.recovery import EngineLoader
from sluice.queues.model.queue_rules import Rules
from sluice.wire.encode import encode
from sluice.wire.packets import V5, Ack, Publish
from sluice.wire.properties import PUBCOMP, PUBREC, PUBREL
from tests.broker.kit import Client
from tests.adversity.crashes.qos2_crash import crash
from tests.broker.namespaces.kit import QueueHouse, join, payloads
from tests.store.embedded.simulated_disk import Disk
from tests.store.kit import StoreUnderTest


def back(house: QueueHouse, client_id: str, version: int = 5) -> Client:
    client = house.connect_lasting(client_id, version)
    assert client.connack.session_present
    return client


def release(house: QueueHouse) -> None:
    """Let the store answer for everything."""
    house.store.release()
    house.loop.settle()


def acks(client: Client) -> list[tuple[int, int]]:
    return [(int(one.kind), int(one.packet_id)) for one in client.take() if isinstance(one, Ack)]


# ---- from a sender


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_is_forwarded_when_it_is_stored_with_its_packet_id(
    house: QueueHouse, qos: int, lasting: bool
) -> None:
    reader = house.connect_lasting("reader") if lasting else house.connect("reader")
    reader.subscribe("news", qos=qos)
    member = house.connect_lasting("member") if lasting else house.connect("member")
    member.subscribe("$share/g/news", qos=qos)
    sender = house.connect_lasting("sender")
    house.store.hold()
    sender.publish("news", b"once", 2, packet_id=5)
    assert reader.take() == member.take() == sender.take() == []
    release(house)
    assert payloads(reader.messages()) == payloads(member.messages()) == [b"once"]
    sender.first_ack(PUBREC, 5, 0)


def test_a_message_that_was_not_stored_has_reached_nobody_and_is_taken_when_it_comes_again(
    house: QueueHouse,
) -> None:
    house.connect_lasting("reader").subscribe("news", qos=2)
    sender = house.connect_lasting("sender")
    house.store.hold()
    sender.publish("news", b"once", 2, packet_id=5)
    house.kill()
    reader, sender = back(house, "reader"), back(house, "sender")
    assert reader.take() == []
    sender.publish("news", b"once", 2, packet_id=5, dup=True)
    sender.first_ack(PUBREC, 5, 0)
    assert payloads(reader.messages()) == [b"once"]


def test_a_message_that_was_stored_and_not_forwarded_comes_once(house: QueueHouse) -> None:
    house.connect_lasting("two").subscribe("news", qos=2)
    house.connect_lasting("one").subscribe("news", qos=1)
    sender = house.connect_lasting("sender")
    house.store.hold()
    sender.publish("news", b"once", 2, packet_id=5)
    house._stand_up_on(house.store.crash(house.store.unsynced()))  # stored, not answered
    sender = back(house, "sender")
    sender.publish("news", b"once", 2, packet_id=5, dup=True)
    sender.first_ack(PUBREC, 5, 0)
    assert payloads(back(house, "two").messages()) == [b"once"]
    assert payloads(back(house, "one").messages()) == [b"once"]


def test_retained_messages_are_seen_when_they_are_stored(house: QueueHouse) -> None:
    sender = house.connect_lasting("sender")
    sender.publish_fully("state", b"old", 2, retain=True)
    house.store.hold()
    sender.publish("state", b"new", 2, retain=True, packet_id=9)
    early = house.connect("early")
    early.subscribe("state", qos=1)
    assert payloads(early.messages()) == [b"old"]
    release(house)
    assert payloads(early.messages()) == [b"new"]  # it has subscribed before the message was there
    late = house.connect("late")
    late.subscribe("state")
    assert payloads(late.messages()) == [b"new"]
    house.kill()
    late = house.connect("late")
    late.subscribe("state")
    assert payloads(late.messages()) == [b"new"]


@pytest.mark.parametrize("newest", [b"newest", b""])
def test_the_last_retained_message_counts_whatever_its_qos(house: QueueHouse, newest: bytes) -> None:
    sender = house.connect_lasting("sender")
    house.store.hold()
    sender.publish("state", b"held", 2, retain=True)
    house.connect("other").publish("state", newest, 1, retain=True)
    release(house)
    for _ in range(2):
        reader = house.connect("reader")
        reader.subscribe("state")
        assert payloads(reader.messages()) == ([newest] if newest else [])
        house.kill()


def test_room_for_retained_messages_is_counted_before_they_are_stored() -> None:
    house = QueueHouse(max_retained=1)
    sender = house.connect_lasting("sender")
    house.store.hold()
    sender.publish("a", b"1", 2, retain=True, packet_id=1)
    sender.publish("b", b"2", 2, retain=True, packet_id=2)
    sender.publish("a", b"3", 2, retain=True, packet_id=3)
    release(house)
    reasons = [int(sender.first_ack(PUBREC, packet_id).reason) for packet_id in (1, 2, 3)]
    assert reasons == [0, 0x97, 0]
    reader = house.connect("reader")
    reader.subscribe("#")
    assert payloads(reader.messages()) == [b"3"]


def test_a_message_for_a_member_that_has_left_meanwhile_goes_to_another(house: QueueHouse) -> None:
    first, second = house.connect("first"), house.connect("second")
    for member in (first, second):
        member.subscribe("$share/g/news", qos=1)
    sender = house.connect_lasting("sender")
    house.store.hold()
    sender.publish("news", b"once", 2)
    first.disconnect()  # whose turn it is
    assert second.take() == []
    release(house)
    assert payloads(second.messages()) == [b"once"]


def test_nothing_is_stored_for_senders_and_receivers_that_end_with_their_connection(
    house: QueueHouse,
) -> None:
    reader = house.connect("reader")
    reader.subscribe("news", qos=2)
    sender, lasting = house.connect("sender"), house.connect_lasting("lasting")
    house.store.hold()
    sender.publish_fully("news", b"two", 2)
    lasting.publish_fully("news", b"one", 1)
    lasting.publish("news", b"none", 0)
    messages = reader.messages()
    assert payloads(messages) == [b"two", b"one", b"none"]
    reader.ack(messages[0])
    assert house.store.waiting() == 0


def test_qos_1_to_persistent_sessions_does_not_wait_for_the_store(house: QueueHouse) -> None:
    reader = house.connect_lasting("reader")
    reader.subscribe("news", qos=1)
    house.store.hold()
    house.connect("sender").publish("news", b"one", 1)
    assert payloads(reader.messages()) == [b"one"]


def test_a_packet_id_is_completed_when_its_release_is_stored(house: QueueHouse) -> None:
    reader = house.connect("reader")
    reader.subscribe("news", qos=0)
    sender = house.connect_lasting("sender")
    sender.publish("news", b"first", 2, packet_id=5)
    sender.first_ack(PUBREC, 5)
    house.store.hold()
    sender.send(Ack(PUBREL, 5))
    assert sender.take() == []
    sender.drop()
    sender = back(house, "sender")
    sender.send(
        Ack(PUBREL, 5)
    )  # again, on a new connection: the broker has released it, the store does not know
    assert sender.take() == []
    release(house)
    assert acks(sender) == [(PUBCOMP, 5)]


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_another_message_under_a_completed_packet_id_is_not_taken_for_a_repeat(
    house: QueueHouse, end: str
) -> None:
    sender = house.connect_lasting("sender")
    sender.publish("news", b"first", 2, packet_id=5)
    sender.first_ack(PUBREC, 5)
    sender.send(Ack(PUBREL, 5))
    sender.first_ack(PUBCOMP, 5)
    getattr(house, end)()  # with the first PUBLISH of the next message under way
    reader = house.connect("reader")
    reader.subscribe("news")
    back(house, "sender").publish("news", b"second", 2, packet_id=5, dup=True)
    assert payloads(reader.messages()) == [b"second"]


def test_a_value_for_an_exclusive_queue_is_in_the_frame_of_its_packet_id(house: QueueHouse) -> None:
    """A commit may come between a PUBLISH and the end of its turn, when values are written."""
    sender = house.connect_lasting("sender")
    packet = Publish(b"$ECQ/w/owner/key", b"value", 2)
    packet.packet_id = 5
    sender.connection.data_received(encode(packet, V5))
    house.runner.end_turn()
    house._stand_up_on(house.store.crash(house.store.unsynced()))
    sender = back(house, "sender")
    sender.publish("$ECQ/w/owner/key", b"value", 2, packet_id=5, dup=True)
    sender.first_ack(PUBREC, 5, 0)
    owner = house.connect("owner")
    join(owner, "$ECQ/owner/#")
    assert payloads(owner.messages()) == [b"value"]


def test_a_response_is_passed_on_when_its_packet_id_is_stored(house: QueueHouse) -> None:
    asker = house.connect_lasting("asker")
    asker.subscribe("$queue/responses/1", qos=2)
    worker = house.connect_lasting("worker")
    house.store.hold()
    worker.publish("$queue/responses/1", b"answer", 2, packet_id=5)
    assert asker.take() == worker.take() == []
    release(house)
    worker.first_ack(PUBREC, 5, 0)
    assert payloads(asker.messages()) == [b"answer"]


# ---- to a receiver


@pytest.mark.parametrize("version", [4, 5])
def test_a_message_leaves_when_its_packet_id_is_stored(house: QueueHouse, version: int) -> None:
    """Also if the sender's session ends with its connection: the receiver's does not."""
    reader = house.connect_lasting("reader", version)
    reader.subscribe("news", qos=2)
    house.store.hold()
    house.connect("sender").publish("news", b"lost", 2)
    assert reader.take() == []
    house.kill()
    reader = back(house, "reader", version)
    house.connect("sender").publish("news", b"next", 2)
    (message,) = reader.messages()
    house.kill()
    (again,) = back(house, "reader", version).messages()
    assert (again.payload, again.packet_id, again.dup) == (b"next", message.packet_id, True)


def test_packet_ids_of_messages_that_wait_for_the_window_are_stored(house: QueueHouse) -> None:
    reader = house.connect_lasting("reader", receive_maximum=1)
    reader.subscribe("news", qos=2)
    sender = house.connect_lasting("sender")
    for payload in (b"1", b"2", b"3"):
        sender.publish_fully("news", payload, 2)
    (first,) = reader.messages()
    reader.send(Ack(PUBREC, int(first.packet_id)))
    reader.first_ack(PUBREL, int(first.packet_id))
    house.store.hold()
    reader.send(Ack(PUBCOMP, int(first.packet_id)))
    assert reader.take() == []
    release(house)
    (second,) = reader.messages()
    house.kill()
    reader = back(house, "reader")
    again, third = reader.messages()
    assert (again.payload, again.packet_id, again.dup) == (b"2", second.packet_id, True)
    assert (third.payload, third.dup) == (b"3", False)


def test_messages_keep_their_order_whatever_the_store_does(house: QueueHouse) -> None:
    reader = house.connect_lasting("reader", receive_maximum=3)
    reader.subscribe("news", qos=2)
    sender = house.connect_lasting("sender")
    draw = random.Random(1)
    got: list[bytes] = []
    unanswered: list[Ack] = []
    sent = 0
    house.store.hold()
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
            house.store.release(1)
            house.loop.settle()
    assert got == [b"%d" % (nth + 1) for nth in range(200)]


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_a_message_is_released_when_its_receipt_is_stored(house: QueueHouse, end: str) -> None:
    reader = house.connect_lasting("reader")
    reader.subscribe("news", qos=2)
    house.connect("sender").publish_fully("news", b"once", 2)
    (message,) = reader.messages()
    house.store.hold()
    reader.send(Ack(PUBREC, int(message.packet_id)))
    reader.send(Ack(PUBREC, int(message.packet_id)))
    assert reader.take() == []
    release(house)
    assert acks(reader) == [(PUBREL, int(message.packet_id))]
    getattr(house, end)()
    assert acks(back(house, "reader")) == [(PUBREL, int(message.packet_id))]


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_after_a_crash_the_release_is_sent_and_not_the_message(house: QueueHouse, end: str) -> None:
    reader = house.connect_lasting("reader")
    reader.subscribe("news", qos=2)
    house.connect("sender").publish_fully("news", b"once", 2)
    (message,) = reader.messages()
    reader.send(Ack(PUBREC, int(message.packet_id)))
    reader.first_ack(PUBREL, int(message.packet_id))
    getattr(house, end)()
    (packet,) = back(house, "reader").take()
    assert isinstance(packet, Ack)
    assert (packet.kind, packet.packet_id) == (PUBREL, message.packet_id)


def test_a_receiver_that_reconnects_is_told_nothing_before_it_is_stored(house: QueueHouse) -> None:
    reader = house.connect_lasting("reader")
    reader.subscribe("news", qos=2)
    sender = house.connect("sender")
    sender.publish_fully("news", b"1", 2)
    (first,) = reader.messages()
    house.store.hold()
    reader.send(Ack(PUBREC, int(first.packet_id)))
    sender.publish("news", b"2", 2)
    reader.drop()
    reader = back(house, "reader")
    assert reader.take() == []
    release(house)
    release_of_first, second = reader.take()
    assert isinstance(release_of_first, Ack) and isinstance(second, Publish)
    assert (release_of_first.kind, release_of_first.packet_id) == (PUBREL, first.packet_id)
    assert second.payload == b"2"


def test_a_message_that_is_too_large_frees_its_packet_id(house: QueueHouse) -> None:
    reader = house.connect_lasting("reader", maximum_packet_size=100, receive_maximum=1)
    reader.subscribe("news", qos=2)
    sender = house.connect("sender")
    sender.publish_fully("news", b"x" * 200, 2)
    sender.publish_fully("news", b"small", 2)
    assert payloads(reader.messages()) == [b"small"]
    house.kill()
    assert payloads(back(house, "reader").messages()) == [b"small"]


# ---- power cuts


def test_a_message_whose_receipt_is_on_its_way_is_not_taken_again_after_a_power_cut(
    house: QueueHouse,
) -> None:
    """No session has a stored copy: that it was received is all that is stored, and is synced."""
    reader = house.connect("reader")
    reader.subscribe("news", qos=1)
    sender = house.connect_lasting("sender")
    sender.publish("news", b"once", 2, packet_id=5)
    assert payloads(reader.messages()) == [b"once"]
    sender.first_ack(PUBREC, 5, 0)
    house.crash()
    reader = house.connect("reader")
    reader.subscribe("news", qos=1)
    sender = back(house, "sender")
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
    """Commit a frame of the engine, and wait for the answer."""
    done: list[int] = []
    store.store.commit(frame.data, int(frame.count), frame.sync, lambda: done.append(1))
    store.hands.turn_until(lambda: bool(done or store.failures))
    assert not store.failures


@pytest.mark.parametrize("step", ["received", "released", "sent", "there"])
def test_each_step_is_synced_before_it_is_answered_for(tmp_path: Path, step: str) -> None:
    """On a disk that forgets what was not synced. Which bytes it forgets depends on the seed."""
    for seed in range(25):
        disk = Disk(random.Random(seed))
        store = StoreUnderTest(tmp_path, files=disk).open()
        for nth in range(2 if step in ("released", "there") else 1):
            engine = Engine(lambda name: (Rules(name), ""), lambda: 0.5)
            keeping = engine.keeping
            if step in ("received", "released"):
                keeping.note_received(7, 5, nth == 1, 0)
            else:
                keeping.note_sent(7, 5, 0 if nth else 3, 0)
            frame = engine.take_frame()
            commit(store, frame)
        disk.cut_after(0)
        store.store.close()
        disk.reboot()
        store = StoreUnderTest(tmp_path, files=disk)
        engine = Engine(lambda name: (Rules(name), ""), lambda: 0.5)
        store.store.open(EngineLoader(engine, lambda name, text: Rules(name)))
        found = engine.keeping.received if step in ("received", "released") else engine.keeping.sent
        assert found == STORED[step], f"seed {seed}"
        store.store.close()


# ---- real processes


@pytest.mark.timeout(240)  # it starts brokers
def test_every_message_arrives_once_when_the_broker_is_killed_in_the_middle_of_handshakes(
    tmp_path: Path,
) -> None:
    """Many more rounds, also on Redis and in a cluster: `scripts/crash-qos2`."""
    report = crash(tmp_path, rounds=3, seed=5, store="embedded")
    assert report.faults == []
    assert len(report.sent) > 10
