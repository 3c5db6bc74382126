"""`$ECQ/...` over MQTT: who may write and read, what arrives, and what an acknowledgement means."""

from __future__ import annotations

import pytest

from sluice.wire.packets import V311, Ack, Publish, Subscribe, SubscriptionRequest
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, take
from tests.broker.peers import Client, props, will


def write(harness: BrokerHarness, key: str, value: bytes, client: str = "car-1") -> None:
    writer = harness.connect("writer")
    assert put(writer, f"$ECQ/w/{client}/{key}", value) == (0, "")
    writer.disconnect()


def subscribe_own(
    client: Client, name: str = "car-1", identifier: int = 0, **options: str
) -> tuple[int, str]:
    return join(client, f"$ECQ/{name}/#", 1, identifier, **options)


def topics(messages: list[Publish]) -> list[str]:
    return [message.topic.decode() for message in messages]


def test_owner_gets_values_on_their_keys_with_their_sequences(harness: BrokerHarness) -> None:
    write(harness, "speed", b"1")
    write(harness, "lamps/left/front", b"open")
    write(harness, "speed", b"2")
    owner = harness.connect("car-1")
    assert subscribe_own(owner) == (1, "")
    messages = take(owner)
    assert topics(messages) == ["$ECQ/car-1/lamps/left/front", "$ECQ/car-1/speed"]
    assert [delivery_properties(message)["sequence"] for message in messages] == ["2", "3"]
    assert delivery_properties(messages[0])["enqueued-at"].endswith("Z")
    write(harness, "speed", b"3")
    assert payloads(take(owner)) == [b"3"]


def test_properties_of_the_writer_arrive_with_the_value(harness: BrokerHarness) -> None:
    owner, writer = harness.connect("car-1"), harness.connect("writer")
    subscribe_own(owner, identifier=7)
    put(writer, "$ECQ/w/car-1/a", b"x", content_type="text/plain", user=[("colour", "red")])
    (message,) = take(owner)
    assert message.decode_properties().content_type == "text/plain"
    assert delivery_properties(message)["colour"] == "red"
    assert message.decode_properties().subscription_ids == [7]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_value_may_be_written_at_any_qos_and_arrives_at_qos_1(
    harness: BrokerHarness, qos: int
) -> None:
    owner, writer = harness.connect("car-1"), harness.connect("writer")
    subscribe_own(owner)
    if qos == 2:
        writer.publish_fully("$ECQ/w/car-1/a", b"x", 2)
    else:
        writer.publish("$ECQ/w/car-1/a", b"x", qos)
    (message,) = take(owner)
    assert (message.payload, message.qos) == (b"x", 1)


def test_write_is_acknowledged_after_commit(harness: BrokerHarness) -> None:
    owner, writer = harness.connect("car-1"), harness.connect("writer")
    subscribe_own(owner)
    harness.store.hold()
    writer.publish("$ECQ/w/car-1/a", b"x", 1)
    assert writer.take() == [] and owner.messages() == []
    harness.store.release()
    harness.loop.settle()
    assert len(writer.take()) == 1
    assert payloads(take(owner)) == [b"x"]


def publish_reason(client: Client, topic: str, payload: bytes, qos: int = 1) -> Publish:
    return Publish(topic.encode(), payload, qos, packet_id=client.next_id() if qos else 0)


def test_many_values_in_one_read_are_stored_in_order(harness: BrokerHarness) -> None:
    writer = harness.connect("writer")
    publishes = [
        publish_reason(writer, f"$ECQ/w/car-{nth % 7}/k{nth % 11}", b"%d" % nth)
        for nth in range(400)
    ]
    writer.send(*publishes)
    assert [ack.packet_id for ack in writer.take() if isinstance(ack, Ack)] == [
        packet.packet_id for packet in publishes
    ]
    owner = harness.connect("car-3")
    subscribe_own(owner, "car-3")
    last = {nth % 11: nth for nth in range(400) if nth % 7 == 3}
    assert payloads(take(owner)) == [b"%d" % nth for nth in sorted(last.values())]


def test_acknowledgements_come_in_publish_order_whatever_their_destination(
    harness: BrokerHarness,
) -> None:
    writer = harness.connect("writer")
    harness.connect_persistent("phone", session_expiry=3600).subscribe("news", qos=1)
    topics = [
        "$ECQ/w/car-1/a",
        "$queue/jobs",
        "$ECQ/w/car-1/b",
        "news",
        "$ECQ/w/car-1/a",
        "$queue/jobs",
    ]
    publishes = [publish_reason(writer, topic, b"x") for topic in topics]
    writer.send(*publishes)
    acks = [packet for packet in writer.take() if isinstance(packet, Ack)]
    assert [(ack.packet_id, ack.reason) for ack in acks] == [
        (packet.packet_id, 0) for packet in publishes
    ]


def test_refused_value_does_not_block_those_around_it(harness: BrokerHarness) -> None:
    harness.engine.exclusive.rules.max_message_size = 10
    harness.limits.receive_maximum = 3
    writer = harness.connect("writer")
    # A missing acknowledgement would end the connection after some of them.
    for _ in range(100):
        publishes = [
            publish_reason(writer, "$ECQ/w/car-1/a", value) for value in (b"1", b"x" * 11, b"2")
        ]
        writer.send(*publishes, publish_reason(writer, "$ECQ/w/car-1/a", b"x" * 11, 0))
        reasons = {ack.packet_id: ack.reason for ack in writer.take() if isinstance(ack, Ack)}
        assert reasons == dict(
            zip([int(one.packet_id) for one in publishes], (0, 0x97, 0), strict=True)
        )
    owner = harness.connect("car-1")
    subscribe_own(owner)
    assert [delivery_properties(message)["sequence"] for message in take(owner)] == ["200"]


def test_values_written_by_a_3_1_1_client_before_a_refused_one_are_stored(
    harness: BrokerHarness,
) -> None:
    harness.engine.exclusive.rules.max_message_size = 10
    writer = harness.connect("writer", version=V311)
    writer.send(
        publish_reason(writer, "$ECQ/w/car-1/a", b"1"),
        publish_reason(writer, "$ECQ/w/car-1/a", b"x" * 11),
    )
    assert writer.closed
    owner = harness.connect("car-1")
    subscribe_own(owner)
    assert payloads(take(owner)) == [b"1"]


def test_writes_before_a_subscribe_in_one_read_are_applied_first(harness: BrokerHarness) -> None:
    owner = harness.connect("car-1")
    options = props(user=[("start", "latest")])
    subscribe = Subscribe(owner.next_id(), [SubscriptionRequest(b"$ECQ/car-1/#", 1)], options)
    owner.send(
        publish_reason(owner, "$ECQ/w/car-1/a", b"before"),
        subscribe,
        publish_reason(owner, "$ECQ/w/car-1/b", b"behind"),
    )
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
def test_topic_without_client_and_key_cannot_be_written(
    harness: BrokerHarness, topic: str, reason: int
) -> None:
    writer = harness.connect("writer")
    assert put(writer, topic, b"x") == (
        reason,
        "write to $ECQ/w/<client>/<key>, neither of them empty",
    )
    assert harness.engine.exclusive.owners == {}
    writer.ping()


def test_wildcard_in_a_write_topic_ends_the_connection(harness: BrokerHarness) -> None:
    writer = harness.connect("writer")
    writer.publish("$ECQ/w/car-1/+", b"x", 1)
    assert writer.fault()[0] == 0x90
    assert harness.engine.exclusive.owners == {}


def test_oversized_value_or_one_key_too_many_is_refused(harness: BrokerHarness) -> None:
    rules = harness.engine.exclusive.rules
    rules.max_message_size = 10
    rules.max_keys = 1
    writer = harness.connect("writer")
    reason, why = put(writer, "$ECQ/w/car-1/a", b"x" * 11)
    assert (
        reason == 0x97 and "11 bytes is larger than the 10" in why and "ecq.max_message_size" in why
    )
    assert harness.engine.exclusive.owners == {}
    assert put(writer, "$ECQ/w/car-1/a", b"x") == (0, "")
    reason, why = put(writer, "$ECQ/w/car-1/b", b"x")
    assert reason == 0x97 and "raise ecq.max_keys" in why
    assert harness.engine.exclusive.owners["car-1"].live_values == 1


def test_3_1_1_client_is_disconnected_when_its_value_is_refused(harness: BrokerHarness) -> None:
    writer = harness.connect("writer", version=V311)
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
    harness: BrokerHarness, topic_filter: str, qos: int, reason: int
) -> None:
    client = harness.connect("car-1")
    refused, why = join(client, topic_filter, qos=qos)
    assert refused == reason and why
    write(harness, "speed", b"1")
    assert client.messages() == []


@pytest.mark.parametrize("client_id", ["car/1", "+", "#"])
def test_client_whose_id_is_no_topic_level_has_no_queue(
    harness: BrokerHarness, client_id: str
) -> None:
    assert subscribe_own(harness.connect(client_id), client_id)[0] >= 0x80


def test_wildcard_subscription_gets_nothing_of_exclusive_queues(harness: BrokerHarness) -> None:
    listener = harness.connect("listener")
    listener.subscribe("#", "+/w/#")
    write(harness, "speed", b"1")
    assert listener.messages() == []


def test_unacknowledged_values_count_against_receive_maximum(harness: BrokerHarness) -> None:
    for number in range(5):
        write(harness, f"key-{number}", b"%d" % number)
    owner = harness.connect("car-1", receive_maximum=2)
    subscribe_own(owner)
    first = owner.messages()
    assert payloads(first) == [b"0", b"1"]
    owner.ack(first[0])
    assert payloads(owner.messages()) == [b"2"]


@pytest.mark.parametrize("end", ["disconnect", "restart", "kill"])
def test_acknowledged_values_are_not_redelivered(harness: BrokerHarness, end: str) -> None:
    for number in range(4):
        write(harness, f"key-{number}", b"%d" % number)
    owner = harness.connect("car-1", receive_maximum=2)
    subscribe_own(owner)
    for message in owner.messages():
        owner.ack(message)
    owner.messages()
    put(harness.connect("other"), "$queue/tasks", b"a frame, and the acknowledgements in it")
    if end == "disconnect":
        owner.disconnect()
    else:
        getattr(harness, end)()
    again = harness.connect("car-1")
    assert subscribe_own(again) == (1, "")
    assert payloads(take(again)) == [b"2", b"3"]
    again.unsubscribe("$ECQ/car-1/#")
    subscribe_own(again)
    assert again.messages() == []


def test_persistent_session_continues_without_subscribing_again(harness: BrokerHarness) -> None:
    owner = harness.connect_persistent("car-1")
    subscribe_own(owner)
    write(harness, "a", b"1")
    assert payloads(take(owner)) == [b"1"]
    owner.drop()
    write(harness, "a", b"2")
    write(harness, "b", b"3")
    owner = harness.connect_persistent("car-1")
    assert payloads(take(owner)) == [b"2", b"3"]
    harness.restart()
    write(harness, "a", b"4")
    owner = harness.connect_persistent("car-1")
    assert payloads(take(owner)) == [b"4"]


def test_unacknowledged_value_is_resent_unless_it_was_replaced(harness: BrokerHarness) -> None:
    owner = harness.connect_persistent("car-1")
    subscribe_own(owner)
    write(harness, "a", b"1")
    write(harness, "b", b"2")
    assert payloads(owner.messages()) == [b"1", b"2"]
    owner.drop()
    write(harness, "a", b"3")
    owner = harness.connect_persistent("car-1")
    messages = take(owner)
    assert [(message.payload, message.dup) for message in messages] == [(b"2", True), (b"3", False)]
    assert harness.engine.exclusive.owners["car-1"].count_unacked() == 0


@pytest.mark.parametrize("again", [False, True])
def test_puback_after_an_unsubscribe_counts(harness: BrokerHarness, again: bool) -> None:
    write(harness, "a", b"1")
    write(harness, "b", b"2")
    owner = harness.connect("car-1")
    subscribe_own(owner)
    messages = owner.messages()
    owner.unsubscribe("$ECQ/car-1/#")
    if again:
        subscribe_own(owner)
        assert payloads(owner.messages()) == [b"1", b"2"]
    for message in messages:
        owner.ack(message)
    owner.disconnect()
    owner = harness.connect("car-1")
    subscribe_own(owner)
    assert owner.messages() == []


def test_puback_from_before_a_rewind_by_resubscribing_does_not_count(
    harness: BrokerHarness,
) -> None:
    write(harness, "a", b"1")
    owner = harness.connect("car-1")
    subscribe_own(owner)
    (message,) = owner.messages()
    owner.unsubscribe("$ECQ/car-1/#")
    subscribe_own(owner, start="earliest")
    assert payloads(owner.messages()) == [b"1"]
    owner.ack(message)
    assert harness.engine.exclusive.owners["car-1"].count_unacked() == 1


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
def test_owner_starts_at_the_requested_position(
    harness: BrokerHarness, start: str, expected: list[bytes]
) -> None:
    for number in range(4):
        write(harness, f"key-{number}", b"%d" % number)
        harness.advance(60)
    owner = harness.connect("car-1")
    subscribe_own(owner)
    assert len(take(owner)) == 4
    assert subscribe_own(owner, start=start) == (1, "")
    assert payloads(take(owner)) == expected
    write(harness, "key-1", b"new")
    assert payloads(take(owner)) == [b"new"]


def test_invalid_start_is_refused_and_changes_nothing(harness: BrokerHarness) -> None:
    write(harness, "a", b"1")
    owner = harness.connect("car-1")
    reason, why = subscribe_own(owner, start="yesterday")
    assert reason == 0x83 and "start is 'yesterday'" in why
    assert owner.messages() == []


@pytest.mark.parametrize("start", ["yesterday", "@", "@1e30", "@nan", "-1", "9" * 30])
def test_client_refused_for_its_start_becomes_no_owner(harness: BrokerHarness, start: str) -> None:
    client = harness.connect("car-1")
    reason, why = subscribe_own(client, start=start)
    assert reason == 0x83 and "start is" in why
    assert harness.engine.exclusive.owners == {}
    assert subscribe_own(client, start="latest") == (1, "")
    write(harness, "a", b"1")
    assert payloads(take(client)) == [b"1"]


def test_value_too_large_for_its_owner_is_skipped(harness: BrokerHarness) -> None:
    owner = harness.connect("car-1", maximum_packet_size=100)
    subscribe_own(owner)
    write(harness, "large", b"x" * 200)
    write(harness, "small", b"y")
    assert payloads(take(owner)) == [b"y"]
    assert harness.engine.exclusive.owners["car-1"].count_unacked() == 0


def test_value_that_became_too_large_for_its_owner_is_skipped_too(harness: BrokerHarness) -> None:
    owner = harness.connect_persistent("car-1")
    subscribe_own(owner)
    write(harness, "large", b"x" * 200)
    assert len(owner.messages()) == 1  # and no PUBACK
    owner.drop()
    owner = harness.connect_persistent("car-1", maximum_packet_size=100)
    write(harness, "small", b"y")
    assert payloads(take(owner)) == [b"y"]
    assert harness.engine.exclusive.owners["car-1"].count_unacked() == 0


def test_value_expires_as_requested_by_its_writer(harness: BrokerHarness) -> None:
    writer = harness.connect("writer")
    put(writer, "$ECQ/w/car-1/a", b"short", message_expiry=10)
    put(writer, "$ECQ/w/car-1/b", b"long", message_expiry=100)
    harness.advance(20)
    owner = harness.connect("car-1")
    subscribe_own(owner)
    (message,) = take(owner)
    assert message.payload == b"long" and message.expiry_seconds == 80


def test_value_that_expires_while_its_owner_is_offline_is_not_delivered(
    harness: BrokerHarness,
) -> None:
    owner = harness.connect_persistent("car-1")
    subscribe_own(owner)
    owner.drop()
    writer = harness.connect("writer")
    put(writer, "$ECQ/w/car-1/a", b"short", message_expiry=10)
    put(writer, "$ECQ/w/car-1/b", b"long", message_expiry=100)
    harness.advance(20)
    owner = harness.connect_persistent("car-1")
    assert payloads(take(owner)) == [b"long"]
    assert harness.engine.exclusive.owners["car-1"].live_values == 1


def test_prefetched_values_are_dropped_when_the_client_disconnects(harness: BrokerHarness) -> None:
    owner = harness.connect_persistent("car-1", receive_maximum=2)
    subscribe_own(owner)
    harness.commit_loop.hold_frame()
    writer = harness.connect("writer")
    for number in range(2):
        writer.publish(f"$ECQ/w/car-1/{number}", b"x" * 100, qos=1)
    assert harness.engine.exclusive.cached_bytes > 0
    owner.drop()
    assert harness.engine.exclusive.cached_bytes == 0
    harness.commit_loop.release_frame()
    assert payloads(take(harness.connect_persistent("car-1"))) == [b"x" * 100] * 2


def test_empty_payload_deletes_its_key(harness: BrokerHarness) -> None:
    write(harness, "a", b"1")
    write(harness, "a", b"")
    owner = harness.connect("car-1")
    subscribe_own(owner)
    assert payloads(take(owner)) == [b""]
    subscribe_own(owner, start="earliest")
    assert owner.messages() == []


def test_3_1_1_client_can_own_a_queue(harness: BrokerHarness) -> None:
    owner = harness.connect("car-1", version=V311)
    assert join(owner, "$ECQ/car-1/#")[0] == 1
    write(harness, "speed", b"1")
    (message,) = take(owner)
    assert (message.topic, message.payload) == (b"$ECQ/car-1/speed", b"1")
    assert harness.engine.exclusive.owners["car-1"].acked == 1


def test_will_can_be_a_value(harness: BrokerHarness) -> None:
    owner = harness.connect("car-1")
    subscribe_own(owner)
    harness.connect("sensor", will=will("$ECQ/w/car-1/sensor", b"gone", 1)).drop()
    assert payloads(take(owner)) == [b"gone"]
    harness.connect("sensor", will=will("$ECQ/w/car-1", b"gone", 1)).drop()
    assert "was not stored" in harness.warnings[-1]


def test_missed_subscribe_is_repaired_by_the_periodic_check(harness: BrokerHarness) -> None:
    owner = harness.connect("car-1")
    subscribe_own(owner)
    session = harness.broker.registry.sessions["car-1"]
    assert session.exclusive_subscriber is not None
    harness.engine.exclusive.unsubscribe(session.exclusive_subscriber)
    write(harness, "speed", b"1")
    assert owner.messages() == []
    harness.core.exclusive_handler.repair_subscribers(
        list(harness.broker.registry.sessions.values())
    )
    harness.loop.settle()
    assert payloads(take(owner)) == [b"1"]
    assert harness.warnings == ["car-1 was subscribed to its queue, but was not served"]


def test_with_queues_disabled_ecq_is_an_ordinary_topic() -> None:
    harness = BrokerHarness(queues=False)
    listener, writer = harness.connect("listener"), harness.connect("writer")
    listener.subscribe("$ECQ/w/car-1/speed")
    put(writer, "$ECQ/w/car-1/speed", b"1")
    assert payloads(take(listener)) == [b"1"]
