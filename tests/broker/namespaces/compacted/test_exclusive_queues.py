"""`$ECQ/...` over MQTT: who may write and read what, what arrives, and what an acknowledgement is worth."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Ack, Publish, Subscribe, SubscriptionRequest
from tests.broker.kit import Client, props, will
from tests.broker.namespaces.kit import QueueHouse, facts, join, payloads, put, take


def write(house: QueueHouse, key: str, value: bytes, client: str = "car-1") -> None:
    writer = house.connect("writer")
    assert put(writer, f"$ECQ/w/{client}/{key}", value) == (0, "")
    writer.disconnect()


def own(client: Client, name: str = "car-1", identifier: int = 0, **wishes: str) -> tuple[int, str]:
    return join(client, f"$ECQ/{name}/#", 1, identifier, **wishes)


def topics(messages: list[Publish]) -> list[str]:
    return [message.topic.decode() for message in messages]


def test_an_owner_gets_values_on_their_keys_with_their_sequences(house: QueueHouse) -> None:
    write(house, "speed", b"1")
    write(house, "doors/left/front", b"open")
    write(house, "speed", b"2")
    owner = house.connect("car-1")
    assert own(owner) == (1, "")
    messages = take(owner)
    assert topics(messages) == ["$ECQ/car-1/doors/left/front", "$ECQ/car-1/speed"]
    assert [facts(message)["sequence"] for message in messages] == ["2", "3"]
    assert facts(messages[0])["enqueued-at"].endswith("Z")
    write(house, "speed", b"3")
    assert payloads(take(owner)) == [b"3"]


def test_what_a_writer_attached_arrives_with_the_value(house: QueueHouse) -> None:
    owner, writer = house.connect("car-1"), house.connect("writer")
    own(owner, identifier=7)
    put(writer, "$ECQ/w/car-1/a", b"x", content_type="text/plain", user=[("colour", "red")])
    (message,) = take(owner)
    assert message.properties().content_type == "text/plain"
    assert facts(message)["colour"] == "red"
    assert message.properties().subscription_ids == [7]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_value_may_be_written_at_any_qos_and_arrives_at_qos_1(house: QueueHouse, qos: int) -> None:
    owner, writer = house.connect("car-1"), house.connect("writer")
    own(owner)
    if qos == 2:
        writer.publish_fully("$ECQ/w/car-1/a", b"x", 2)
    else:
        writer.publish("$ECQ/w/car-1/a", b"x", qos)
    (message,) = take(owner)
    assert (message.payload, message.qos) == (b"x", 1)


def test_the_writer_hears_of_its_value_when_the_store_has_it(house: QueueHouse) -> None:
    owner, writer = house.connect("car-1"), house.connect("writer")
    own(owner)
    house.store.hold()
    writer.publish("$ECQ/w/car-1/a", b"x", 1)
    assert writer.take() == [] and owner.messages() == []
    house.store.release()
    house.loop.settle()
    assert len(writer.take()) == 1
    assert payloads(take(owner)) == [b"x"]


def said(client: Client, topic: str, payload: bytes, qos: int = 1) -> Publish:
    return Publish(topic.encode(), payload, qos, packet_id=client.next_id() if qos else 0)


def test_many_values_in_one_read_are_taken_in_their_order(house: QueueHouse) -> None:
    writer = house.connect("writer")
    publishes = [said(writer, f"$ECQ/w/car-{nth % 7}/k{nth % 11}", b"%d" % nth) for nth in range(400)]
    writer.send(*publishes)
    assert [ack.packet_id for ack in writer.take() if isinstance(ack, Ack)] == [
        packet.packet_id for packet in publishes
    ]
    owner = house.connect("car-3")
    own(owner, "car-3")
    last = {nth % 11: nth for nth in range(400) if nth % 7 == 3}
    assert payloads(take(owner)) == [b"%d" % nth for nth in sorted(last.values())]


def test_answers_come_in_the_order_of_publishes_whatever_they_went_to(house: QueueHouse) -> None:
    writer = house.connect("writer")
    house.connect_lasting("phone", session_expiry=3600).subscribe("news", qos=1)
    topics = ["$ECQ/w/car-1/a", "$queue/jobs", "$ECQ/w/car-1/b", "news", "$ECQ/w/car-1/a", "$queue/jobs"]
    publishes = [said(writer, topic, b"x") for topic in topics]
    writer.send(*publishes)
    acks = [packet for packet in writer.take() if isinstance(packet, Ack)]
    assert [(ack.packet_id, ack.reason) for ack in acks] == [(packet.packet_id, 0) for packet in publishes]


def test_a_value_that_is_refused_does_not_hold_up_those_around_it(house: QueueHouse) -> None:
    house.engine.exclusive.rules.max_message_size = 10
    house.limits.receive_maximum = 3
    writer = house.connect("writer")
    for _ in range(100):  # an answer that was owed for ever would end the connection after some of them
        publishes = [said(writer, "$ECQ/w/car-1/a", value) for value in (b"1", b"x" * 11, b"2")]
        writer.send(*publishes, said(writer, "$ECQ/w/car-1/a", b"x" * 11, 0))
        reasons = {ack.packet_id: ack.reason for ack in writer.take() if isinstance(ack, Ack)}
        assert reasons == dict(zip([int(one.packet_id) for one in publishes], (0, 0x95, 0), strict=True))
    owner = house.connect("car-1")
    own(owner)
    assert [facts(message)["sequence"] for message in take(owner)] == ["200"]


def test_what_a_client_of_3_1_1_wrote_before_a_refused_value_is_kept(house: QueueHouse) -> None:
    house.engine.exclusive.rules.max_message_size = 10
    writer = house.connect("writer", version=V311)
    writer.send(said(writer, "$ECQ/w/car-1/a", b"1"), said(writer, "$ECQ/w/car-1/a", b"x" * 11))
    assert writer.closed
    owner = house.connect("car-1")
    own(owner)
    assert payloads(take(owner)) == [b"1"]


def test_what_stands_before_a_subscribe_in_one_read_is_written_before_it(house: QueueHouse) -> None:
    owner = house.connect("car-1")
    wishes = props(user=[("start", "latest")])
    subscribe = Subscribe(owner.next_id(), [SubscriptionRequest(b"$ECQ/car-1/#", 1)], wishes)
    owner.send(said(owner, "$ECQ/w/car-1/a", b"before"), subscribe, said(owner, "$ECQ/w/car-1/b", b"behind"))
    assert [one.payload for one in owner.take() if isinstance(one, Publish)] == [b"behind"]


@pytest.mark.parametrize(
    ("topic", "reason"),
    [
        ("$ECQ/w/car-1", 0x90),
        ("$ECQ/w/car-1/", 0x90),
        ("$ECQ/w//speed", 0x90),
        ("$ECQ/w/", 0x90),
        ("$ECQ/car-1/speed", 0x90),
        ("$ECQ/", 0x90),
    ],
)
def test_a_topic_that_is_no_key_of_a_client_cannot_be_written(
    house: QueueHouse, topic: str, reason: int
) -> None:
    writer = house.connect("writer")
    assert put(writer, topic, b"x") == (reason, "write to $ECQ/w/<client>/<key>, neither of them empty")
    assert house.engine.exclusive.owners == {}
    writer.ping()


def test_a_wildcard_in_a_write_topic_ends_the_connection(house: QueueHouse) -> None:
    writer = house.connect("writer")
    writer.publish("$ECQ/w/car-1/+", b"x", 1)
    assert writer.fault()[0] == 0x90
    assert house.engine.exclusive.owners == {}


def test_a_value_that_is_too_large_or_one_key_too_many_is_refused(house: QueueHouse) -> None:
    rules = house.engine.exclusive.rules
    rules.max_message_size = 10
    rules.max_keys = 1
    writer = house.connect("writer")
    reason, why = put(writer, "$ECQ/w/car-1/a", b"x" * 11)
    assert reason == 0x95 and "11 bytes is larger than the 10" in why and "ecq.max_message_size" in why
    assert house.engine.exclusive.owners == {}
    assert put(writer, "$ECQ/w/car-1/a", b"x") == (0, "")
    reason, why = put(writer, "$ECQ/w/car-1/b", b"x")
    assert reason == 0x97 and "raise ecq.max_keys" in why
    assert house.engine.exclusive.owners["car-1"].live == 1


def test_a_client_of_3_1_1_whose_value_is_refused_is_cut_off(house: QueueHouse) -> None:
    writer = house.connect("writer", version=V311)
    writer.publish("$ECQ/w/car-1", b"x", 1)
    assert writer.closed


@pytest.mark.parametrize(
    ("topic_filter", "qos", "reason"),
    [
        ("$ECQ/car-1/#", 0, 0x83),
        ("$ECQ/car-1/#", 2, 0x83),
        ("$ECQ/car-2/#", 1, 0x87),
        ("$ECQ/w/#", 1, 0x87),
        ("$ECQ/+/#", 1, 0x8F),
        ("$ECQ/#", 1, 0x8F),
        ("$ECQ/car-1/speed", 1, 0x8F),
        ("$ECQ/w/car-1/#", 1, 0x8F),
        ("$share/g/$ECQ/car-1/#", 1, 0x8F),
    ],
)
def test_only_the_owner_reads_its_queue_and_only_at_qos_1(
    house: QueueHouse, topic_filter: str, qos: int, reason: int
) -> None:
    client = house.connect("car-1")
    refused, why = join(client, topic_filter, qos=qos)
    assert refused == reason and why
    write(house, "speed", b"1")
    assert client.messages() == []


@pytest.mark.parametrize("client_id", ["car/1", "+", "#"])
def test_a_client_whose_id_is_no_level_of_a_topic_has_no_queue(house: QueueHouse, client_id: str) -> None:
    assert own(house.connect(client_id), client_id)[0] >= 0x80


def test_a_wildcard_subscription_sees_nothing_of_exclusive_queues(house: QueueHouse) -> None:
    listener = house.connect("listener")
    listener.subscribe("#", "+/w/#")
    write(house, "speed", b"1")
    assert listener.messages() == []


def test_what_is_not_acknowledged_counts_against_the_receive_maximum(house: QueueHouse) -> None:
    for number in range(5):
        write(house, f"key-{number}", b"%d" % number)
    owner = house.connect("car-1", receive_maximum=2)
    own(owner)
    first = owner.messages()
    assert payloads(first) == [b"0", b"1"]
    owner.ack(first[0])
    assert payloads(owner.messages()) == [b"2"]


@pytest.mark.parametrize("end", ["disconnect", "restart", "kill"])
def test_nothing_that_was_acknowledged_comes_again(house: QueueHouse, end: str) -> None:
    for number in range(4):
        write(house, f"key-{number}", b"%d" % number)
    owner = house.connect("car-1", receive_maximum=2)
    own(owner)
    for message in owner.messages():
        owner.ack(message)
    owner.messages()
    put(house.connect("other"), "$queue/tasks", b"a frame, and the acknowledgements in it")
    if end == "disconnect":
        owner.disconnect()
    else:
        getattr(house, end)()
    again = house.connect("car-1")
    assert own(again) == (1, "")
    assert payloads(take(again)) == [b"2", b"3"]
    again.unsubscribe("$ECQ/car-1/#")
    own(again)
    assert again.messages() == []


def test_a_lasting_session_goes_on_without_subscribing_again(house: QueueHouse) -> None:
    owner = house.connect_lasting("car-1")
    own(owner)
    write(house, "a", b"1")
    assert payloads(take(owner)) == [b"1"]
    owner.drop()
    write(house, "a", b"2")
    write(house, "b", b"3")
    owner = house.connect_lasting("car-1")
    assert payloads(take(owner)) == [b"2", b"3"]
    house.restart()
    write(house, "a", b"4")
    owner = house.connect_lasting("car-1")
    assert payloads(take(owner)) == [b"4"]


def test_an_unacknowledged_value_is_said_again_unless_it_was_replaced(house: QueueHouse) -> None:
    owner = house.connect_lasting("car-1")
    own(owner)
    write(house, "a", b"1")
    write(house, "b", b"2")
    assert payloads(owner.messages()) == [b"1", b"2"]
    owner.drop()
    write(house, "a", b"3")
    owner = house.connect_lasting("car-1")
    messages = take(owner)
    assert [(message.payload, message.dup) for message in messages] == [(b"2", True), (b"3", False)]
    assert house.engine.exclusive.owners["car-1"].depth() == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_puback_behind_an_unsubscribe_counts(house: QueueHouse, again: bool) -> None:
    write(house, "a", b"1")
    write(house, "b", b"2")
    owner = house.connect("car-1")
    own(owner)
    messages = owner.messages()
    owner.unsubscribe("$ECQ/car-1/#")
    if again:
        own(owner)
        assert payloads(owner.messages()) == [b"1", b"2"]
    for message in messages:
        owner.ack(message)
    owner.disconnect()
    owner = house.connect("car-1")
    own(owner)
    assert owner.messages() == []


def test_a_puback_from_before_a_rewind_by_another_subscribe_does_not_count(house: QueueHouse) -> None:
    write(house, "a", b"1")
    owner = house.connect("car-1")
    own(owner)
    (message,) = owner.messages()
    owner.unsubscribe("$ECQ/car-1/#")
    own(owner, start="earliest")
    assert payloads(owner.messages()) == [b"1"]
    owner.ack(message)
    assert house.engine.exclusive.owners["car-1"].depth() == 1


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("earliest", [b"0", b"1", b"2", b"3"]),
        ("latest", []),
        ("3", [b"2", b"3"]),
        ("900", []),
        ("@1800000120", [b"2", b"3"]),
        ("2027-01-15T08:03:00Z", [b"3"]),
    ],
)
def test_an_owner_starts_where_it_asks_to(house: QueueHouse, start: str, expected: list[bytes]) -> None:
    for number in range(4):
        write(house, f"key-{number}", b"%d" % number)
        house.advance(60)
    owner = house.connect("car-1")
    own(owner)
    assert len(take(owner)) == 4
    assert own(owner, start=start) == (1, "")
    assert payloads(take(owner)) == expected
    write(house, "key-1", b"new")
    assert payloads(take(owner)) == [b"new"]


def test_a_start_that_is_none_is_refused_and_changes_nothing(house: QueueHouse) -> None:
    write(house, "a", b"1")
    owner = house.connect("car-1")
    reason, why = own(owner, start="yesterday")
    assert reason == 0x83 and "start is 'yesterday'" in why
    assert owner.messages() == []


@pytest.mark.parametrize("start", ["yesterday", "@", "@1e30", "@nan", "-1", "9" * 30])
def test_who_is_refused_for_its_start_becomes_no_owner(house: QueueHouse, start: str) -> None:
    client = house.connect("car-1")
    reason, why = own(client, start=start)
    assert reason == 0x83 and "start is" in why
    assert house.engine.exclusive.owners == {}
    assert own(client, start="latest") == (1, "")
    write(house, "a", b"1")
    assert payloads(take(client)) == [b"1"]


def test_a_value_larger_than_its_owner_takes_is_passed_over(house: QueueHouse) -> None:
    owner = house.connect("car-1", maximum_packet_size=100)
    own(owner)
    write(house, "large", b"x" * 200)
    write(house, "small", b"y")
    assert payloads(take(owner)) == [b"y"]
    assert house.engine.exclusive.owners["car-1"].depth() == 0


def test_a_value_that_became_too_large_for_its_owner_is_passed_over_too(house: QueueHouse) -> None:
    owner = house.connect_lasting("car-1")
    own(owner)
    write(house, "large", b"x" * 200)
    assert len(owner.messages()) == 1  # and no PUBACK
    owner.drop()
    owner = house.connect_lasting("car-1", maximum_packet_size=100)
    write(house, "small", b"y")
    assert payloads(take(owner)) == [b"y"]
    assert house.engine.exclusive.owners["car-1"].depth() == 0


def test_a_value_ends_when_its_writer_says(house: QueueHouse) -> None:
    writer = house.connect("writer")
    put(writer, "$ECQ/w/car-1/a", b"short", message_expiry=10)
    put(writer, "$ECQ/w/car-1/b", b"long", message_expiry=100)
    house.advance(20)
    owner = house.connect("car-1")
    own(owner)
    (message,) = take(owner)
    assert message.payload == b"long" and message.expiry == 80


def test_a_value_that_ends_while_its_owner_is_away_is_not_given_when_it_is_back(house: QueueHouse) -> None:
    owner = house.connect_lasting("car-1")
    own(owner)
    owner.drop()
    writer = house.connect("writer")
    put(writer, "$ECQ/w/car-1/a", b"short", message_expiry=10)
    put(writer, "$ECQ/w/car-1/b", b"long", message_expiry=100)
    house.advance(20)
    owner = house.connect_lasting("car-1")
    assert payloads(take(owner)) == [b"long"]
    assert house.engine.exclusive.owners["car-1"].live == 1


def test_what_is_at_hand_for_a_client_is_put_down_when_it_goes(house: QueueHouse) -> None:
    owner = house.connect_lasting("car-1", receive_maximum=2)
    own(owner)
    house.runner.hold()
    writer = house.connect("writer")
    for number in range(2):
        writer.publish(f"$ECQ/w/car-1/{number}", b"x" * 100, qos=1)
    assert house.engine.exclusive.cached > 0
    owner.drop()
    assert house.engine.exclusive.cached == 0
    house.runner.release()
    assert payloads(take(house.connect_lasting("car-1"))) == [b"x" * 100] * 2


def test_an_empty_payload_is_the_end_of_its_key(house: QueueHouse) -> None:
    write(house, "a", b"1")
    write(house, "a", b"")
    owner = house.connect("car-1")
    own(owner)
    assert payloads(take(owner)) == [b""]
    own(owner, start="earliest")
    assert owner.messages() == []


def test_a_client_of_3_1_1_can_own_a_queue(house: QueueHouse) -> None:
    owner = house.connect("car-1", version=V311)
    assert join(owner, "$ECQ/car-1/#")[0] == 1
    write(house, "speed", b"1")
    (message,) = take(owner)
    assert (message.topic, message.payload) == (b"$ECQ/car-1/speed", b"1")
    assert house.engine.exclusive.owners["car-1"].acked == 1


def test_a_will_can_be_a_value(house: QueueHouse) -> None:
    owner = house.connect("car-1")
    own(owner)
    house.connect("sensor", will=will("$ECQ/w/car-1/sensor", b"gone", 1)).drop()
    assert payloads(take(owner)) == [b"gone"]
    house.connect("sensor", will=will("$ECQ/w/car-1", b"gone", 1)).drop()
    assert "was not kept" in house.warnings[-1]


def test_a_subscribe_that_was_missed_is_found_by_the_check(house: QueueHouse) -> None:
    owner = house.connect("car-1")
    own(owner)
    session = house.broker.registry.sessions["car-1"]
    assert session.reader is not None
    house.engine.exclusive.leave(session.reader)
    write(house, "speed", b"1")
    assert owner.messages() == []
    door = house.broker.router.door
    assert door is not None
    door.ecq.heal(list(house.broker.registry.sessions.values()))
    house.loop.settle()
    assert payloads(take(owner)) == [b"1"]
    assert house.warnings == ["car-1 was subscribed to its queue, and was not served"]


def test_without_queues_it_is_an_ordinary_topic() -> None:
    house = QueueHouse(queues=False)
    listener, writer = house.connect("listener"), house.connect("writer")
    listener.subscribe("$ECQ/w/car-1/speed")
    put(writer, "$ECQ/w/car-1/speed", b"1")
    assert payloads(take(listener)) == [b"1"]
