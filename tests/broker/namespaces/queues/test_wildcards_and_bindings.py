"""Which queues a subscription reaches, and what reaches a queue: wildcards, bindings, templates, `$admin`, `$SYS`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.broker.namespaces.sys_topics import SysTopics
from sluice.wire.properties import PUBACK, PUBREC
from tests.broker.kit import Client, will
from tests.broker.namespaces.kit import QueueHouse, facts, join, payloads, put, settle, take

# ---- wildcards


def test_a_wildcard_joins_every_queue_that_matches_now_and_later(house: QueueHouse) -> None:
    maker, worker = house.connect("maker"), house.connect("worker-1")
    put(maker, "$queue/tasks/a", b"before")
    put(maker, "$queue/others/a", b"other")
    assert join(worker, "$queue/tasks/#") == (1, "")
    put(maker, "$queue/tasks/b/c", b"after")
    messages = take(worker)
    assert {(message.topic, message.payload) for message in messages} == {
        (b"$queue/tasks/a", b"before"),
        (b"$queue/tasks/b/c", b"after"),
    }
    for message in messages:
        assert settle(worker, "ack", message) == (0, "")


def test_a_plus_stands_for_one_level(house: QueueHouse) -> None:
    maker, worker = house.connect("maker"), house.connect("worker-1")
    join(worker, "$queue/+/image")
    for name in ("a/image", "b/image", "a/b/image", "a/text"):
        put(maker, f"$queue/{name}", name.encode())
    assert sorted(payloads(take(worker))) == [b"a/image", b"b/image"]


def test_a_wildcard_works_with_a_group_in_the_topic(house: QueueHouse) -> None:
    maker, worker = house.connect("maker"), house.connect("old", 4)
    join(worker, "$queue/+/image/$group/g")
    put(maker, "$queue/a/image", b"x")
    (message,) = take(worker)
    assert message.topic.startswith(b"$queue/a/image/$msg/")
    assert house.depth("a/image") == 0


@pytest.mark.parametrize("topic_filter", ["$queue/#", "$queue/+/jobs", "$queue/+/#"])
def test_dead_letters_are_not_meant_by_a_wildcard_that_does_not_name_them(
    house: QueueHouse, topic_filter: str
) -> None:
    worker = house.connect("worker-1")
    join(worker, topic_filter)
    put(worker, "$queue/dlq/jobs", b"dead")
    assert worker.take() == []


def test_dead_letters_are_reached_by_a_wildcard_that_names_them(house: QueueHouse) -> None:
    worker, reader = house.connect("worker-1"), house.connect("reader-1")
    join(reader, "$queue/dlq/#")
    join(worker, "$queue/a/b")
    put(worker, "$queue/a/b", b"x")
    settle(worker, "reject", take(worker)[0])
    assert payloads(take(reader)) == [b"x"]


def test_unsubscribing_from_a_wildcard_leaves_its_queues_and_those_to_come(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/tasks/#")
    put(worker, "$queue/tasks/a", b"1")
    take(worker)
    assert worker.unsubscribe("$queue/tasks/#") == [0]
    put(worker, "$queue/tasks/a", b"2")
    put(worker, "$queue/tasks/b", b"3")
    assert worker.take() == []
    assert worker.unsubscribe("$queue/tasks/#") == [0x11]


@pytest.mark.parametrize("wild_first", [True, False])
def test_a_name_and_a_wildcard_side_by_side_deliver_once_and_each_can_go(
    house: QueueHouse, wild_first: bool
) -> None:
    worker = house.connect("worker-1")
    filters = ["$queue/tasks/#", "$queue/tasks/a"]
    for topic_filter in filters if wild_first else reversed(filters):
        join(worker, topic_filter)
    put(worker, "$queue/tasks/a", b"1")
    (message,) = take(worker)
    worker.unsubscribe("$queue/tasks/a")
    assert settle(worker, "ack", message) == (0, "")
    put(worker, "$queue/tasks/a", b"2")
    assert payloads(take(worker)) == [b"2"]
    join(worker, "$queue/tasks/a")
    worker.unsubscribe("$queue/tasks/#")
    put(worker, "$queue/tasks/a", b"3")
    assert payloads(take(worker)) == [b"3"]
    worker.unsubscribe("$queue/tasks/a")
    put(worker, "$queue/tasks/a", b"4")
    assert worker.take() == []


def test_a_wildcard_in_another_group_takes_over_when_the_name_is_unsubscribed(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/tasks/a/$group/own")
    join(worker, "$queue/tasks/#", consumer_group="wild")
    put(worker, "$queue/tasks/a", b"1")
    (message,) = take(worker)
    assert facts(message)["consumer-group"] == "own"
    worker.unsubscribe("$queue/tasks/a/$group/own")
    put(worker, "$queue/tasks/a", b"2")
    assert {facts(one)["consumer-group"] for one in take(worker)} == {"wild"}


def test_a_subscription_that_is_repeated_has_its_new_identifier(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    for identifier in (7, 9):
        join(worker, "$queue/jobs", identifier=identifier)
        put(worker, "$queue/jobs", b"x")
        (message,) = take(worker)
        assert message.subscription_ids == [identifier]


def test_a_client_is_in_one_group_of_a_queue_and_is_told_when_it_changes(house: QueueHouse) -> None:
    worker = house.connect_lasting("worker-1")
    assert join(worker, "$queue/jobs") == (1, "")
    reason, why = join(worker, "$queue/jobs/$group/other")
    assert reason == 1
    assert "takes the place of $queue/jobs:" in why and "'worker'" in why and "one client id" in why
    house.crash()  # and the later one is what is kept
    worker = house.connect_lasting("worker-1")
    put(house.connect("maker"), "$queue/jobs", b"x")
    (message,) = take(worker)
    assert facts(message)["consumer-group"] == "other"
    assert worker.unsubscribe("$queue/jobs", "$queue/jobs/$group/other") == [0x11, 0]


def test_a_queue_is_not_shared_by_a_shared_subscription_but_by_its_groups(house: QueueHouse) -> None:
    reason, why = join(house.connect("worker-1"), "$share/g/$queue/jobs")
    assert (reason, "$group" in why) == (0x8F, True)


def test_subscriptions_to_queues_count_against_the_limit_of_a_client() -> None:
    house = QueueHouse(max_subscriptions=2)
    client = house.connect("worker-1")
    join(client, "$queue/a")
    client.subscribe("b")
    assert join(client, "$queue/c")[0] == 0x97
    assert join(client, "$queue/a") == (1, "")
    assert "c" not in house.engine.queues


# ---- bindings


def capturing(*bindings: object, **limits: object) -> QueueHouse:
    house = QueueHouse()
    admin = house.connect("admin")
    config = {"name": "temps", "bindings": list(bindings), "limits": limits}
    assert put(admin, "$admin/queue/create", json.dumps(config).encode()) == (0, "")
    return house


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_queue_keeps_a_copy_of_what_plain_topics_carry(qos: int) -> None:
    house = capturing("sensors/+/temp")
    device, listener, worker = house.connect("device"), house.connect("listener"), house.connect("worker-1")
    listener.subscribe("sensors/#")
    device.publish_fully("sensors/7/temp", b"21", qos)
    device.publish_fully("sensors/7/light", b"on", qos)
    assert listener.payloads() == [b"21", b"on"]
    join(worker, "$queue/temps")
    (message,) = take(worker)
    assert message.payload == b"21"
    assert facts(message)["original-topic"] == "sensors/7/temp"
    assert facts(message)["queue"] == "temps"


def test_a_captured_message_is_acknowledged_when_the_store_has_it() -> None:
    house = capturing("sensors/#")
    device = house.connect("device")
    house.store.hold()
    for qos in (1, 2):
        packet_id = device.publish("sensors/1", b"x", qos)
        assert device.take() == []
        house.store.release(1)
        house.loop.settle()
        device.first_ack(PUBACK if qos == 1 else PUBREC, packet_id, 0)


def test_only_what_has_the_headers_is_captured() -> None:
    house = capturing({"topic": "events/#", "headers": {"kind": "order", "eu": "yes"}})
    device = house.connect("device")
    put(device, "events/1", b"both", user=[("eu", "yes"), ("kind", "order"), ("x", "y")])
    put(device, "events/1", b"one", user=[("kind", "order")])
    put(device, "events/1", b"other", user=[("kind", "order"), ("eu", "no")])
    put(device, "events/1", b"none")
    worker = house.connect("worker-1")
    join(worker, "$queue/temps")
    assert payloads(take(worker)) == [b"both"]


def test_a_capturing_queue_that_is_full_refuses_the_publish() -> None:
    house = capturing("sensors/#", max_queue_depth=1)
    device = house.connect("device")
    assert put(device, "sensors/1", b"x")[0] == 0
    for qos in (1, 2):
        reason, why = put(device, "sensors/1", b"x", qos)
        assert (reason, "full at 1" in why) == (0x97, True)
    old = house.connect("old", 4)
    old.publish("sensors/1", b"x", 1)
    assert old.closed and old.take() == []


def test_a_retained_message_that_its_queue_refuses_is_not_retained_either() -> None:
    house = capturing("sensors/#", max_queue_depth=1)
    device = house.connect("device")
    put(device, "sensors/1", b"1", retain=True)
    assert put(device, "sensors/1", b"2", retain=True)[0] == 0x97
    device.subscribe("sensors/1")
    assert device.payloads() == [b"1"]


def test_captures_come_back_after_a_restart() -> None:
    house = capturing("sensors/#")
    house.restart()
    put(house.connect("device"), "sensors/1", b"x")
    assert house.depth("temps") == 1


def test_a_captured_message_keeps_its_own_properties() -> None:
    house = capturing("sensors/#")
    put(house.connect("device"), "sensors/1", b"x", user=[("a", "1"), ("message-id", "own")])
    worker = house.connect("worker-1")
    join(worker, "$queue/temps")
    (message,) = take(worker)
    assert (facts(message)["a"], facts(message)["message-id"]) == ("1", "own")


def test_ids_of_plain_publishes_are_those_of_their_topic() -> None:
    house = capturing("sensors/#")
    for _ in range(2):
        device = house.connect("device")
        for topic in ("sensors/1", "sensors/2"):
            put(device, topic, b"x", wishes={"message-id": "1"})
        assert (
            house.depth("temps") == 2
        )  # one of each: neither is taken for the other, and both are known again
        house.crash()


@pytest.mark.parametrize("type_", ["work", "compacted"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", "high"), ("delay", "5"), ("deliver-at", "soon"), ("message-id", "x" * 1025)],
)
def test_a_plain_publish_is_not_refused_for_properties_that_mean_something_else(
    type_: str, name: str, value: str
) -> None:
    house = QueueHouse()
    config = {"name": "temps", "type": type_, "bindings": ["sensors/#"]}
    put(house.connect("admin"), "$admin/queue/create", json.dumps(config).encode())
    listener, worker = house.connect("listener"), house.connect("worker-1")
    listener.subscribe("sensors/#")
    join(worker, "$queue/temps")
    assert put(house.connect("device"), "sensors/1", b"x", user=[(name, value), ("a", "1")]) == (0, "")
    assert listener.payloads() == [b"x"]
    (message,) = take(worker)
    assert facts(message)["a"] == "1"
    settle(worker, "ack", message)


def test_a_tombstone_for_a_key_that_a_full_queue_does_not_have_is_a_success() -> None:
    house = QueueHouse()
    config = {"name": "prices", "type": "compacted", "limits": {"max_queue_depth": 1}}
    admin = house.connect("admin")
    put(admin, "$admin/queue/create", json.dumps(config).encode())
    join(house.connect("shop-1"), "$queue/prices")
    assert put(admin, "$queue/prices", b"7", wishes={"partition-key": "pears"}) == (0, "")
    assert put(admin, "$queue/prices", b"", wishes={"partition-key": "apples"}) == (0, "")
    assert put(admin, "$queue/prices", b"1", wishes={"partition-key": "apples"})[0] == 0x97
    assert put(admin, "$queue/prices", b"", wishes={"partition-key": "pears"}) == (0, "")


def test_a_will_can_be_captured_and_go_into_a_queue() -> None:
    house = capturing("gone/#", max_queue_depth=1)
    house.connect("one", will=will("gone/one", b"1")).drop()
    house.connect("two", will=will("gone/two", b"2")).drop()  # no room: told in the log, and nothing breaks
    house.connect("three", will=will("$queue/wills", b"3")).drop()
    house.connect("four", will=will("$queue/wills/$ack", b"4")).drop()
    assert (house.depth("temps"), house.depth("wills")) == (1, 1)
    assert len(house.warnings) == 2


# ---- templates and $admin


def test_a_queue_that_comes_into_being_is_made_from_the_first_template_that_matches() -> None:
    house = QueueHouse([("tasks/#", {"partitions": 3}), ("#", {"partitions": 7})])
    client = house.connect("maker")
    put(client, "$queue/tasks/a", b"x")
    join(client, "$queue/others")
    assert [len(house.queue(name).partitions) for name in ("tasks/a", "others")] == [3, 7]


def admin(client: Client, topic: str, **config: Any) -> tuple[int, str]:
    return put(client, f"$admin/queue/{topic}", json.dumps(config).encode())


def test_a_queue_is_made_over_mqtt(house: QueueHouse) -> None:
    client = house.connect("admin")
    assert admin(client, "create", name="tasks/a", partitions=4, ordering="none") == (0, "")
    assert len(house.queue("tasks/a").partitions) == 4
    assert admin(client, "create", name="$queue/tasks/b") == (0, "")
    assert "tasks/b" in house.engine.queues
    house.crash()
    assert set(house.engine.queues) == {"tasks/a", "tasks/b"}


def test_a_queue_that_is_there_is_not_made_again(house: QueueHouse) -> None:
    client = house.connect("admin")
    admin(client, "create", name="a")
    reason, why = admin(client, "create", name="a")
    assert reason == 0x83
    assert "there already" in why


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "not JSON"),
        (b"[1]", "JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "name is missing"),
        (b'{"name": "a//b"}', "none of them empty"),
        (b'{"name": "a", "partitons": 3}', "partitons is not a key"),
        (b'{"name": "a", "partitions": 0}', "partitions must be from 1 to 4096"),
        (b'{"name": "a", "partitions": true}', "partitions must be a number, from 1 to 4096"),
        (b'{"name": "a", "limits": {"message_ttl": 5}}', "limits.message_ttl"),
        (b'{"name": "a", "limits": {"overflow": "burn"}}', "limits.overflow"),
        (b'{"name": "a", "bindings": ["a/#/b"]}', "bindings"),
        (b'{"name": "a", "bindings": ["$queue/b"]}', "bindings"),
        (b'{"name": "a", "bindings": [""]}', "bindings"),
        (b'{"name": "a", "dlq_config": {"alert_webhook": "ftp://x"}}', "alert_webhook"),
        (b'{"name": "a", "schema": {"type": 7}}', "schema"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_by_the_name_of_its_key(
    house: QueueHouse, payload: bytes, words: str
) -> None:
    client = house.connect("admin")
    reason, why = put(client, "$admin/queue/create", payload)
    assert reason == 0x99
    assert words in why
    assert not house.engine.queues


def test_a_topic_of_the_administration_that_means_nothing_is_refused(house: QueueHouse) -> None:
    client = house.connect("admin")
    for topic in ("$admin/queue", "$admin/queue/a/frob", "$admin/", "$admin/queue/none/config"):
        reason, why = put(client, topic, b"{}")
        assert reason == 0x90
        assert why


def test_a_change_of_configuration_applies_at_once_and_to_nothing_else(house: QueueHouse) -> None:
    client = house.connect("admin")
    admin(client, "create", name="a/b", partitions=2, limits={"max_queue_depth": 1})
    put(client, "$queue/a/b", b"x")
    assert put(client, "$queue/a/b", b"x")[0] == 0x97
    assert admin(client, "a/b/config", limits={"max_queue_depth": 2}) == (0, "")
    assert put(client, "$queue/a/b", b"x")[0] == 0
    rules = house.queue("a/b").rules
    assert (rules.partitions, rules.max_depth) == (2, 2)
    house.crash()
    assert house.queue("a/b").rules.max_depth == 2


def test_a_delivery_timeout_that_is_changed_goes_for_the_next_delivery(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    admin(
        worker, "jobs/config", performance={"delivery_timeout": "2s"}, retry_policy={"initial_backoff": "1s"}
    )
    put(worker, "$queue/jobs", b"x")
    take(worker)
    house.advance(3.1)
    assert facts(take(worker)[0])["attempt"] == "2"


def test_partitions_are_added_to_a_living_queue(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    admin(worker, "create", name="jobs", partitions=1)
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"old", wishes={"partition-key": "k"})
    assert admin(worker, "jobs/config", partitions=8) == (0, "")
    put(worker, "$queue/jobs", b"new", wishes={"partition-key": "k"})
    (message,) = take(worker)
    assert message.payload == b"old"  # the key's older message first, on whatever partition
    settle(worker, "ack", message)
    assert payloads(take(worker)) == [b"new"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partitions": 5}, "only become more"),
        ({"type": "compacted"}, "for life"),
        ({"ordering": "strict"}, "for life"),
        ({"name": "other"}, "Leave name out"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_change_in_a_living_queue_is_refused(
    house: QueueHouse, change: dict[str, object], words: str
) -> None:
    client = house.connect("admin")
    put(client, "$queue/jobs", b"x")
    reason, why = admin(client, "jobs/config", **change)
    assert (reason, words in why) == (0x99, True)
    assert len(house.queue("jobs").partitions) == 10


def test_bindings_change_live(house: QueueHouse) -> None:
    client = house.connect("admin")
    admin(client, "create", name="temps")
    put(client, "sensors/1", b"1")
    admin(client, "temps/config", bindings=["sensors/#"])
    put(client, "sensors/1", b"2")
    admin(client, "temps/config", bindings=[])
    put(client, "sensors/1", b"3")
    join(client, "$queue/temps")
    assert payloads(take(client)) == [b"2"]


def test_a_statistics_topic_speaks_each_second_while_somebody_listens(house: QueueHouse) -> None:
    client, bystander = house.connect("admin"), house.connect("bystander")
    bystander.subscribe("news")
    put(client, "$queue/a/b", b"x")
    client.subscribe("$admin/queue/a/b/stats")
    house.advance(1.5)
    (first,) = client.messages()
    told = json.loads(first.payload)
    assert (told["name"], told["depth"], told["enqueued"]) == ("a/b", 1, 1)
    put(client, "$queue/a/b", b"x")
    house.advance(3)
    later = [json.loads(message.payload) for message in client.messages()]
    assert [one["depth"] for one in later] == [2, 2, 2]
    assert later[0]["enqueue_rate"] == 1.0
    client.unsubscribe("$admin/queue/a/b/stats")
    timers = len(house.broker.scheduler)
    house.advance(2)
    assert len(house.broker.scheduler) == timers - 1  # nobody listens: nothing is counted for them
    house.advance(100)
    assert client.take() == []
    client.subscribe("$admin/queue/+/+/stats")
    house.advance(1.5)
    assert len(client.messages()) == 1


def test_statistics_are_told_of_a_queue_that_comes_later(house: QueueHouse) -> None:
    client = house.connect("admin")
    client.subscribe("$admin/queue/later/stats")
    house.advance(5)
    assert client.take() == []
    put(client, "$queue/later", b"x")
    house.advance(1)
    assert len(client.messages()) == 1


# ---- a queue that goes and comes again


def test_who_consumed_a_queue_that_was_deleted_consumes_it_again_when_it_comes_back(
    house: QueueHouse,
) -> None:
    named, wild, gone = house.connect("a-1"), house.connect("b-1"), house.connect("c-1")
    join(named, "$queue/jobs")
    join(wild, "$queue/#")
    join(gone, "$queue/jobs")
    put(named, "$queue/jobs", b"old")
    before = take(named)
    door = house.broker.router.door
    assert door is not None
    door.delete(house.queue("jobs"))
    house.loop.settle()
    gone.disconnect()
    take(wild)
    assert settle(named, "ack", before[0])[0] == 0x10
    put(named, "$queue/jobs", b"new")
    assert payloads(take(named)) == payloads(take(wild)) == [b"new"]
    assert set(house.queue("jobs").groups) == {"a", "b"}


def test_a_queue_that_comes_back_gives_nothing_to_a_consumer_that_is_away(house: QueueHouse) -> None:
    away = house.connect_lasting("worker-1")
    join(away, "$queue/jobs")
    put(away, "$queue/jobs", b"0")
    away.transport.abort()
    house.loop.settle()
    door = house.broker.router.door
    assert door is not None
    door.delete(house.queue("jobs"))
    other = house.connect("worker-2")
    join(other, "$queue/jobs")
    for number in range(20):
        put(other, "$queue/jobs", b"%d" % number)
    assert len(take(other)) == 20


def test_a_wildcard_of_a_session_that_has_ended_joins_no_queue(house: QueueHouse) -> None:
    gone = house.connect("worker-1")
    join(gone, "$queue/tasks/#")
    gone.disconnect()
    house.loop.settle()
    put(house.connect("maker"), "$queue/tasks/a", b"x")
    assert house.queue("tasks/a").groups == {}


def test_a_puback_for_a_message_of_a_deleted_queue_is_harmless(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(worker, "$queue/jobs", b"old")
    (message,) = worker.messages()
    door = house.broker.router.door
    assert door is not None
    door.delete(house.queue("jobs"))
    worker.ack(message)
    worker.ping()
    put(worker, "$queue/jobs", b"new")
    (message,) = worker.messages()
    worker.ack(message)
    assert house.depth("jobs") == 0


# ---- $SYS, and no queues at all


def test_the_system_topics_count_queues(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=2)
    for _ in range(5):
        put(worker, "$queue/jobs", b"x")
    held = take(worker)
    settle(worker, "reject", held[0])
    SysTopics(house.broker, "1").start()
    worker.subscribe("$SYS/broker/queues/#")
    told = {
        message.topic.decode(): message.payload.decode() for message in worker.messages() if message.retain
    }
    assert told == {
        "$SYS/broker/queues/count": "2",
        "$SYS/broker/queues/messages/waiting": "5",
        "$SYS/broker/queues/messages/inflight": "2",
        "$SYS/broker/queues/messages/dead": "1",
    }


def test_without_queues_their_topics_are_ordinary_ones() -> None:
    house = QueueHouse(queues=False)
    first, second = house.connect("first"), house.connect("second")
    for client in (first, second):
        assert client.subscribe("$queue/jobs", "$queue/+/$ack", "$admin/#", qos=1) == [1, 1, 1]
    assert put(first, "$queue/jobs", b"x") == (0, "")
    assert put(first, "$queue/jobs/$ack", b"y")[0] == 0
    assert put(first, "$admin/queue/create", b"z")[0] == 0
    assert payloads(take(second)) == [b"x", b"y", b"z"]
    assert not house.engine.queues
    assert put(first, "$queue/a//b", b"x")[0] == 0x10


# ---- limits


def test_partitions_of_all_queues_together_are_limited_however_a_queue_is_made() -> None:
    house = QueueHouse([("wide/#", {"partitions": 4096})])
    house.engine.max_partitions = 10_000
    client = house.connect("maker")
    for name in ("a", "b"):
        assert (
            put(client, "$admin/queue/create", json.dumps({"name": name, "partitions": 4096}).encode())[0]
            == 0
        )
    reason, why = put(client, "$admin/queue/create", b'{"name": "c", "partitions": 4096}')
    assert reason == 0x97 and "queues.max_partitions" in why
    reason, why = put(client, "$queue/wide/d", b"x")
    assert reason == 0x97 and "queues.max_partitions" in why
    reason, why = join(client, "$queue/wide/d")
    assert reason == 0x97 and "queues.max_partitions" in why
    assert sorted(house.engine.queues) == ["a", "b"]
    assert put(client, "$queue/small", b"x") == (0, "")
    reason, why = put(client, "$admin/queue/small/config", b'{"partitions": 4096}')
    assert reason == 0x97 and len(house.queue("small").partitions) == 10


def test_partitions_that_all_groups_follow_are_limited() -> None:
    house = QueueHouse([("wide", {"partitions": 400})])
    house.engine.max_partitions = 400
    for nth in range(5):
        assert join(house.connect(f"worker-{nth}"), f"$queue/wide/$group/g{nth}") == (1, "")
    late = house.connect("late")
    for topic_filter in ("$queue/wide/$group/g5", "$queue/+/$group/g5"):
        reason, why = join(late, topic_filter)
        assert reason == 0x97 and "queues.max_partitions" in why
    assert join(late, "$queue/wide/$group/g4") == (1, "")
    assert len(house.engine.groups) == 5


def test_a_lower_limit_of_partitions_keeps_no_queue_and_no_dead_letter_away() -> None:
    house = QueueHouse([("jobs", {"retry_policy": {"max_retries": 0}})])
    worker = house.connect("worker")
    join(worker, "$queue/jobs")
    house.engine.max_partitions = 1
    put(worker, "$queue/jobs", b"poison")
    (message,) = take(worker)
    settle(worker, "reject", message)
    assert house.depth("dlq/jobs") == 1


def test_the_size_of_a_message_is_judged_before_its_schema() -> None:
    checked: list[int] = []

    def check(payload: bytes) -> str:
        checked.append(len(payload))
        return ""

    config = {"schema": {"type": "object"}, "limits": {"max_message_size": 100}}
    house = QueueHouse([("small", config)])
    client = house.connect("maker")
    put(client, "$queue/small", b"{}")
    door = house.broker.router.door
    assert door is not None
    door._validators[house.queue("small").rules.schema] = check
    assert put(client, "$queue/small", b"[" * 101)[0] == 0x95
    assert checked == []
    assert put(client, "$queue/small", b"{ }") == (0, "")
    assert checked == [3]
