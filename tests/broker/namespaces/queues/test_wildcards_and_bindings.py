"""Wildcards, bindings, templates, `$admin` and `$SYS`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sluice.broker.sys_topics import SysTopics
from sluice.queues.service.templates import Template
from sluice.wire.properties import PUBACK, PUBREC
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, settle, take
from tests.broker.peers import Client, will

# ---- wildcards


def test_wildcard_joins_every_matching_queue_now_and_later(harness: BrokerHarness) -> None:
    maker, worker = harness.connect("maker"), harness.connect("worker-1")
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


def test_plus_matches_one_level(harness: BrokerHarness) -> None:
    maker, worker = harness.connect("maker"), harness.connect("worker-1")
    join(worker, "$queue/+/image")
    for name in ("a/image", "b/image", "a/b/image", "a/text"):
        put(maker, f"$queue/{name}", name.encode())
    assert sorted(payloads(take(worker))) == [b"a/image", b"b/image"]


def test_wildcard_works_with_a_group_in_the_topic(harness: BrokerHarness) -> None:
    maker, worker = harness.connect("maker"), harness.connect("old", 4)
    join(worker, "$queue/+/image/$group/g")
    put(maker, "$queue/a/image", b"x")
    (message,) = take(worker)
    assert message.topic.startswith(b"$queue/a/image/$msg/")
    assert harness.depth("a/image") == 0


@pytest.mark.parametrize("topic_filter", ["$queue/#", "$queue/+/jobs", "$queue/+/#"])
def test_wildcard_does_not_match_dead_letter_queues_implicitly(
    harness: BrokerHarness, topic_filter: str
) -> None:
    worker = harness.connect("worker-1")
    join(worker, topic_filter)
    put(worker, "$queue/dlq/jobs", b"dead")
    assert worker.take() == []


def test_wildcard_that_names_dead_letter_queues_matches_them(harness: BrokerHarness) -> None:
    worker, reader = harness.connect("worker-1"), harness.connect("reader-1")
    join(reader, "$queue/dlq/#")
    join(worker, "$queue/a/b")
    put(worker, "$queue/a/b", b"x")
    settle(worker, "reject", take(worker)[0])
    assert payloads(take(reader)) == [b"x"]


def test_unsubscribing_a_wildcard_leaves_its_queues_and_later_ones(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/tasks/#")
    put(worker, "$queue/tasks/a", b"1")
    take(worker)
    assert worker.unsubscribe("$queue/tasks/#") == [0]
    put(worker, "$queue/tasks/a", b"2")
    put(worker, "$queue/tasks/b", b"3")
    assert worker.take() == []
    assert worker.unsubscribe("$queue/tasks/#") == [0x11]


@pytest.mark.parametrize("wild_first", [True, False])
def test_name_and_wildcard_together_deliver_once_and_can_be_unsubscribed_separately(
    harness: BrokerHarness, wild_first: bool
) -> None:
    worker = harness.connect("worker-1")
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


def test_wildcard_in_another_group_takes_over_when_the_name_is_unsubscribed(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/tasks/a/$group/own")
    join(worker, "$queue/tasks/#", consumer_group="wild")
    put(worker, "$queue/tasks/a", b"1")
    (message,) = take(worker)
    assert delivery_properties(message)["consumer-group"] == "own"
    worker.unsubscribe("$queue/tasks/a/$group/own")
    put(worker, "$queue/tasks/a", b"2")
    assert {delivery_properties(one)["consumer-group"] for one in take(worker)} == {"wild"}


def test_repeated_subscription_has_its_new_identifier(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    for identifier in (7, 9):
        join(worker, "$queue/jobs", identifier=identifier)
        put(worker, "$queue/jobs", b"x")
        (message,) = take(worker)
        assert message.subscription_ids == [identifier]


def test_client_is_in_one_group_of_a_queue_and_is_notified_when_it_changes(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect_persistent("worker-1")
    assert join(worker, "$queue/jobs") == (1, "")
    reason, why = join(worker, "$queue/jobs/$group/other")
    assert reason == 1
    assert "this replaces $queue/jobs:" in why and "'worker'" in why and "one client id" in why
    harness.crash()  # the later subscription is stored
    worker = harness.connect_persistent("worker-1")
    put(harness.connect("maker"), "$queue/jobs", b"x")
    (message,) = take(worker)
    assert delivery_properties(message)["consumer-group"] == "other"
    assert worker.unsubscribe("$queue/jobs", "$queue/jobs/$group/other") == [0x11, 0]


def test_shared_subscription_to_a_queue_is_refused_in_favor_of_groups(
    harness: BrokerHarness,
) -> None:
    reason, why = join(harness.connect("worker-1"), "$share/g/$queue/jobs")
    assert (reason, "$group" in why) == (0x8F, True)


def test_queue_subscriptions_count_against_the_limit_of_a_client() -> None:
    harness = BrokerHarness(max_subscriptions=2)
    client = harness.connect("worker-1")
    join(client, "$queue/a")
    client.subscribe("b")
    assert join(client, "$queue/c")[0] == 0x97
    assert join(client, "$queue/a") == (1, "")
    assert "c" not in harness.engine.queues


# ---- bindings


def broker_with_binding(*bindings: object, **limits: object) -> BrokerHarness:
    harness = BrokerHarness()
    admin = harness.connect("admin")
    config = {"name": "temps", "bindings": list(bindings), "limits": limits}
    assert put(admin, "$admin/queue/create", json.dumps(config).encode()) == (0, "")
    return harness


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_bound_queue_stores_a_copy_of_plain_messages(qos: int) -> None:
    harness = broker_with_binding("sensors/+/temp")
    device, listener, worker = (
        harness.connect("device"),
        harness.connect("listener"),
        harness.connect("worker-1"),
    )
    listener.subscribe("sensors/#")
    device.publish_fully("sensors/7/temp", b"21", qos)
    device.publish_fully("sensors/7/light", b"on", qos)
    assert listener.payloads() == [b"21", b"on"]
    join(worker, "$queue/temps")
    (message,) = take(worker)
    assert message.payload == b"21"
    assert delivery_properties(message)["original-topic"] == "sensors/7/temp"
    assert delivery_properties(message)["queue"] == "temps"


def test_bound_message_is_acknowledged_after_commit() -> None:
    harness = broker_with_binding("sensors/#")
    device = harness.connect("device")
    harness.store.hold()
    for qos in (1, 2):
        packet_id = device.publish("sensors/1", b"x", qos)
        assert device.take() == []
        harness.store.release(1)
        harness.loop.settle()
        device.first_ack(PUBACK if qos == 1 else PUBREC, packet_id, 0)


def test_binding_stores_only_messages_with_its_headers() -> None:
    harness = broker_with_binding({"topic": "events/#", "headers": {"kind": "order", "eu": "yes"}})
    device = harness.connect("device")
    put(device, "events/1", b"both", user=[("eu", "yes"), ("kind", "order"), ("x", "y")])
    put(device, "events/1", b"one", user=[("kind", "order")])
    put(device, "events/1", b"other", user=[("kind", "order"), ("eu", "no")])
    put(device, "events/1", b"none")
    worker = harness.connect("worker-1")
    join(worker, "$queue/temps")
    assert payloads(take(worker)) == [b"both"]


def test_full_bound_queue_refuses_the_publish() -> None:
    harness = broker_with_binding("sensors/#", max_queue_depth=1)
    device = harness.connect("device")
    assert put(device, "sensors/1", b"x")[0] == 0
    for qos in (1, 2):
        reason, why = put(device, "sensors/1", b"x", qos)
        assert (reason, "full at 1" in why) == (0x97, True)
    old = harness.connect("old", 4)
    old.publish("sensors/1", b"x", 1)
    assert old.closed and old.take() == []


def test_retained_message_refused_by_its_bound_queue_is_not_retained_either() -> None:
    harness = broker_with_binding("sensors/#", max_queue_depth=1)
    device = harness.connect("device")
    put(device, "sensors/1", b"1", retain=True)
    assert put(device, "sensors/1", b"2", retain=True)[0] == 0x97
    device.subscribe("sensors/1")
    assert device.payloads() == [b"1"]


def test_bindings_survive_a_restart() -> None:
    harness = broker_with_binding("sensors/#")
    harness.restart()
    put(harness.connect("device"), "sensors/1", b"x")
    assert harness.depth("temps") == 1


def test_bound_message_has_its_own_properties() -> None:
    harness = broker_with_binding("sensors/#")
    put(harness.connect("device"), "sensors/1", b"x", user=[("a", "1"), ("message-id", "own")])
    worker = harness.connect("worker-1")
    join(worker, "$queue/temps")
    (message,) = take(worker)
    assert (delivery_properties(message)["a"], delivery_properties(message)["message-id"]) == (
        "1",
        "own",
    )


def test_ids_of_plain_publishes_are_scoped_by_topic() -> None:
    harness = broker_with_binding("sensors/#")
    for _ in range(2):
        device = harness.connect("device")
        for topic in ("sensors/1", "sensors/2"):
            put(device, topic, b"x", options={"message-id": "1"})
        # One of each: neither is taken for the other, and both are recognized as duplicates.
        assert harness.depth("temps") == 2
        harness.crash()


@pytest.mark.parametrize("type_", ["work", "compacted"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("priority", "high"), ("delay", "5"), ("deliver-at", "soon"), ("message-id", "x" * 1025)],
)
def test_plain_publish_is_not_refused_for_queue_properties_with_another_meaning(
    type_: str, name: str, value: str
) -> None:
    harness = BrokerHarness()
    config = {"name": "temps", "type": type_, "bindings": ["sensors/#"]}
    put(harness.connect("admin"), "$admin/queue/create", json.dumps(config).encode())
    listener, worker = harness.connect("listener"), harness.connect("worker-1")
    listener.subscribe("sensors/#")
    join(worker, "$queue/temps")
    assert put(harness.connect("device"), "sensors/1", b"x", user=[(name, value), ("a", "1")]) == (
        0,
        "",
    )
    assert listener.payloads() == [b"x"]
    (message,) = take(worker)
    assert delivery_properties(message)["a"] == "1"
    settle(worker, "ack", message)


def test_tombstone_for_a_missing_key_of_a_full_queue_succeeds() -> None:
    harness = BrokerHarness()
    config = {"name": "prices", "type": "compacted", "limits": {"max_queue_depth": 1}}
    admin = harness.connect("admin")
    put(admin, "$admin/queue/create", json.dumps(config).encode())
    join(harness.connect("shop-1"), "$queue/prices")
    assert put(admin, "$queue/prices", b"7", options={"partition-key": "pears"}) == (0, "")
    assert put(admin, "$queue/prices", b"", options={"partition-key": "apples"}) == (0, "")
    assert put(admin, "$queue/prices", b"1", options={"partition-key": "apples"})[0] == 0x97
    assert put(admin, "$queue/prices", b"", options={"partition-key": "pears"}) == (0, "")


def test_will_can_be_bound_and_enqueued() -> None:
    harness = broker_with_binding("gone/#", max_queue_depth=1)
    harness.connect("one", will=will("gone/one", b"1")).drop()
    # No space: the error is logged, and nothing breaks.
    harness.connect("two", will=will("gone/two", b"2")).drop()
    harness.connect("three", will=will("$queue/wills", b"3")).drop()
    harness.connect("four", will=will("$queue/wills/$ack", b"4")).drop()
    assert (harness.depth("temps"), harness.depth("wills")) == (1, 1)
    assert len(harness.warnings) == 2


# ---- bindings to queues


def test_one_publish_is_routed_to_several_queues_by_headers(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    source = "$queue/orders"
    admin(client, "create", name="orders", bindings=["shop/+/order"])
    admin(client, "create", name="audit", bindings=[source])
    admin(
        client,
        "create",
        name="eu",
        bindings=[{"topic": source, "headers": {"region": "eu", "kind": "new"}}],
    )
    either = {"topic": source, "headers": {"region": "eu", "vip": "yes"}, "match": "any"}
    admin(client, "create", name="care", bindings=[either])
    for user in ([("region", "eu"), ("kind", "new")], [("region", "eu")], [("vip", "yes")], []):
        assert put(client, source, b"order", user=user) == (0, "")
    depths = {name: harness.depth(name) for name in ("orders", "audit", "eu", "care")}
    assert depths == {"orders": 4, "audit": 4, "eu": 1, "care": 3}
    put(client, "shop/1/order", b"by a plain topic")
    assert (harness.depth("orders"), harness.depth("audit")) == (5, 5)
    harness.crash()
    assert harness.depth("audit") == 5  # bindings and copies are in the store


def test_queue_that_refuses_its_copy_refuses_the_publish(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    admin(client, "create", name="small", bindings=["$queue/a"], limits={"max_queue_depth": 1})
    assert put(client, "$queue/a", b"1") == (0, "")
    assert put(client, "$queue/a", b"2")[0] == 0x97
    assert (harness.depth("a"), harness.depth("small")) == (1, 1)


def test_bindings_in_a_circle_are_refused(harness: BrokerHarness) -> None:
    client = harness.connect("shop")
    assert admin(client, "create", name="b", bindings=["$queue/a"]) == (0, "")
    assert admin(client, "create", name="c", bindings=["$queue/b"]) == (0, "")
    reason, why = admin(client, "create", name="a", bindings=["$queue/c"])
    assert (reason, "lead back to it: a to b to c to a" in why) == (0x99, True)
    assert admin(client, "create", name="a") == (0, "")
    assert admin(client, "a/config", bindings=["$queue/c"])[0] == 0x99


def test_circle_made_by_a_template_ends() -> None:
    harness = BrokerHarness([("#", {"bindings": ["$queue/a", "$queue/b"]})])
    client = harness.connect("shop")
    put(client, "$queue/a", b"makes a")
    put(client, "$queue/b", b"makes b")
    before = harness.depth("a") + harness.depth("b")
    assert put(client, "$queue/a", b"x") == (0, "")
    assert harness.depth("a") + harness.depth("b") == before + 2


# ---- templates and $admin


def test_new_queue_is_created_from_the_first_matching_template() -> None:
    harness = BrokerHarness([("tasks/#", {"partitions": 3}), ("#", {"partitions": 7})])
    client = harness.connect("maker")
    put(client, "$queue/tasks/a", b"x")
    join(client, "$queue/others")
    assert [len(harness.queue(name).partitions) for name in ("tasks/a", "others")] == [3, 7]


def test_template_applies_to_a_queue_that_a_client_creates_and_is_overridden_key_by_key() -> None:
    template = {"partitions": 3, "retry_policy": {"max_retries": 2, "initial_backoff": "1s"}}
    harness = BrokerHarness([("tasks/#", template)])
    client = harness.connect("maker")
    assert admin(client, "create", name="$queue/tasks/a") == (0, "")
    assert admin(client, "create", name="tasks/b", retry_policy={"max_retries": 7}) == (0, "")
    rules = [harness.queue(name).rules for name in ("tasks/a", "tasks/b")]
    assert [int(one.partitions) for one in rules] == [3, 3]
    assert [(int(one.max_retries), one.initial_backoff) for one in rules] == [(2, 1.0), (7, 1.0)]


def test_template_is_named_at_creation() -> None:
    harness = BrokerHarness()
    harness.set_templates(Template("#", {"partitions": 3}), Template("-", {"partitions": 5}, "big"))
    client = harness.connect("maker")
    assert admin(client, "create", name="a", template="big") == (0, "")
    assert len(harness.queue("a").partitions) == 5
    reason, why = admin(client, "create", name="b", template="bigger")
    assert (reason, "b" in harness.engine.queues) == (0x99, False)
    assert "there is no template of this name" in why
    assert "Use one of big" in why


def test_without_auto_create_use_is_refused_and_creation_is_not() -> None:
    harness = BrokerHarness()
    open_template = Template("free/#", {}, auto_create=True)
    harness.set_templates(open_template, auto_create=False)
    client = harness.connect("maker")
    for reason, why in (put(client, "$queue/tipo", b"x"), join(client, "$queue/tipo")):
        assert reason in (0x90, 0x8F)
        assert "create it: `sluice queue create tipo`" in why
    assert not harness.engine.queues
    assert put(client, "$queue/free/a", b"x") == (0, "")
    assert admin(client, "create", name="typo", retry_policy={"max_retries": 0}) == (0, "")
    assert put(client, "$queue/typo", b"x") == (0, "")
    worker = harness.connect("worker-1")
    join(worker, "$queue/typo")
    settle(worker, "reject", take(worker)[0])
    assert harness.depth("dlq/typo") == 1  # dead letters are never lost by it


def admin(client: Client, topic: str, **config: Any) -> tuple[int, str]:
    return put(client, f"$admin/queue/{topic}", json.dumps(config).encode())


def test_queue_is_created_over_mqtt(harness: BrokerHarness) -> None:
    client = harness.connect("admin")
    assert admin(client, "create", name="tasks/a", partitions=4, ordering="none") == (0, "")
    assert len(harness.queue("tasks/a").partitions) == 4
    assert admin(client, "create", name="$queue/tasks/b") == (0, "")
    assert "tasks/b" in harness.engine.queues
    harness.crash()
    assert set(harness.engine.queues) == {"tasks/a", "tasks/b"}


def test_existing_queue_is_not_created_again(harness: BrokerHarness) -> None:
    client = harness.connect("admin")
    admin(client, "create", name="a")
    reason, why = admin(client, "create", name="a")
    assert reason == 0x83
    assert "exists already" in why


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        (b"", "not JSON"),
        (b"[1]", "JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "name is missing"),
        (b'{"name": "a//b"}', "none of them empty"),
        (b'{"name": "a", "partitons": 3}', "partitons is not a setting"),
        (b'{"name": "a", "partitions": 0}', "partitions must be from 1 to 4096"),
        (b'{"name": "a", "partitions": true}', "partitions must be a number, from 1 to 4096"),
        (b'{"name": "a", "limits": {"message_ttl": 5}}', "limits.message_ttl"),
        (b'{"name": "a", "limits": {"overflow": "burn"}}', "limits.overflow"),
        (b'{"name": "a", "bindings": ["a/#/b"]}', "bindings"),
        (b'{"name": "a", "bindings": ["$queue/b/#"]}', "bindings"),
        (b'{"name": "a", "bindings": ["$queue/a"]}', "a to a"),
        (b'{"name": "a", "bindings": [{"topic": "x", "match": "some"}]}', "match"),
        (b'{"name": "a", "bindings": [""]}', "bindings"),
        (b'{"name": "a", "dlq_config": {"alert_webhook": "ftp://x"}}', "alert_webhook"),
        (b'{"name": "a", "schema": {"type": 7}}', "schema"),
    ],
)
def test_impossible_configuration_is_refused_with_its_key(
    harness: BrokerHarness, payload: bytes, words: str
) -> None:
    client = harness.connect("admin")
    reason, why = put(client, "$admin/queue/create", payload)
    assert reason == 0x99
    assert words in why
    assert not harness.engine.queues


def test_unknown_admin_topic_is_refused(harness: BrokerHarness) -> None:
    client = harness.connect("admin")
    for topic in ("$admin/queue", "$admin/queue/a/frob", "$admin/", "$admin/queue/none/config"):
        reason, why = put(client, topic, b"{}")
        assert reason == 0x90
        assert why


def test_configuration_change_applies_at_once_and_to_nothing_else(harness: BrokerHarness) -> None:
    client = harness.connect("admin")
    admin(client, "create", name="a/b", partitions=2, limits={"max_queue_depth": 1})
    put(client, "$queue/a/b", b"x")
    assert put(client, "$queue/a/b", b"x")[0] == 0x97
    assert admin(client, "a/b/config", limits={"max_queue_depth": 2}) == (0, "")
    assert put(client, "$queue/a/b", b"x")[0] == 0
    rules = harness.queue("a/b").rules
    assert (rules.partitions, rules.max_depth) == (2, 2)
    harness.crash()
    assert harness.queue("a/b").rules.max_depth == 2


def test_changed_delivery_timeout_applies_to_the_next_delivery(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    admin(
        worker,
        "jobs/config",
        performance={"delivery_timeout": "2s"},
        retry_policy={"initial_backoff": "1s"},
    )
    put(worker, "$queue/jobs", b"x")
    take(worker)
    harness.advance(3.1)
    assert delivery_properties(take(worker)[0])["attempt"] == "2"


def test_partitions_are_added_to_a_live_queue(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    admin(worker, "create", name="jobs", partitions=1)
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"old", options={"partition-key": "k"})
    assert admin(worker, "jobs/config", partitions=8) == (0, "")
    put(worker, "$queue/jobs", b"new", options={"partition-key": "k"})
    (message,) = take(worker)
    assert message.payload == b"old"  # the older message of the key first, on any partition
    settle(worker, "ack", message)
    assert payloads(take(worker)) == [b"new"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"partitions": 5}, "number can only grow"),
        ({"type": "compacted"}, "its type cannot change"),
        ({"ordering": "strict"}, "strict ordering cannot change"),
        ({"name": "other"}, "Leave name out"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_immutable_settings_of_a_live_queue_are_refused(
    harness: BrokerHarness, change: dict[str, object], words: str
) -> None:
    client = harness.connect("admin")
    put(client, "$queue/jobs", b"x")
    reason, why = admin(client, "jobs/config", **change)
    assert (reason, words in why) == (0x99, True)
    assert len(harness.queue("jobs").partitions) == 10


def test_bindings_can_be_changed_live(harness: BrokerHarness) -> None:
    client = harness.connect("admin")
    admin(client, "create", name="temps")
    put(client, "sensors/1", b"1")
    admin(client, "temps/config", bindings=["sensors/#"])
    put(client, "sensors/1", b"2")
    admin(client, "temps/config", bindings=[])
    put(client, "sensors/1", b"3")
    join(client, "$queue/temps")
    assert payloads(take(client)) == [b"2"]


def test_stats_topic_is_published_each_second_while_subscribed(harness: BrokerHarness) -> None:
    client, bystander = harness.connect("admin"), harness.connect("bystander")
    bystander.subscribe("news")
    put(client, "$queue/a/b", b"x")
    client.subscribe("$admin/queue/a/b/stats")
    harness.advance(1.5)
    (first,) = client.messages()
    reported = json.loads(first.payload)
    assert (reported["name"], reported["total_messages"], reported["enqueued"]) == ("a/b", 1, 1)
    put(client, "$queue/a/b", b"x")
    harness.advance(3)
    later = [json.loads(message.payload) for message in client.messages()]
    assert [one["total_messages"] for one in later] == [2, 2, 2]
    assert later[0]["enqueue_rate"] == 1.0
    client.unsubscribe("$admin/queue/a/b/stats")
    timers = len(harness.broker.scheduler)
    harness.advance(2)
    # No subscriber: no statistics are computed.
    assert len(harness.broker.scheduler) == timers - 1
    harness.advance(100)
    assert client.take() == []
    client.subscribe("$admin/queue/+/+/stats")
    harness.advance(1.5)
    assert len(client.messages()) == 1


def test_stats_of_a_queue_created_later_are_published(harness: BrokerHarness) -> None:
    client = harness.connect("admin")
    client.subscribe("$admin/queue/later/stats")
    harness.advance(5)
    assert client.take() == []
    put(client, "$queue/later", b"x")
    harness.advance(1)
    assert len(client.messages()) == 1


# ---- deleted and recreated queues


def test_consumer_of_a_deleted_queue_consumes_it_again_when_recreated(
    harness: BrokerHarness,
) -> None:
    named, wild, gone = harness.connect("a-1"), harness.connect("b-1"), harness.connect("c-1")
    join(named, "$queue/jobs")
    join(wild, "$queue/#")
    join(gone, "$queue/jobs")
    put(named, "$queue/jobs", b"old")
    before = take(named)
    queue_handler = harness.core.queue_handler
    queue_handler.delete_queue(harness.queue("jobs"))
    harness.loop.settle()
    gone.disconnect()
    take(wild)
    assert settle(named, "ack", before[0])[0] == 0x10
    put(named, "$queue/jobs", b"new")
    assert payloads(take(named)) == payloads(take(wild)) == [b"new"]
    assert set(harness.queue("jobs").groups) == {"a", "b"}


def test_recreated_queue_delivers_nothing_to_an_offline_consumer(harness: BrokerHarness) -> None:
    away = harness.connect_persistent("worker-1")
    join(away, "$queue/jobs")
    put(away, "$queue/jobs", b"0")
    away.transport.abort()
    harness.loop.settle()
    queue_handler = harness.core.queue_handler
    queue_handler.delete_queue(harness.queue("jobs"))
    other = harness.connect("worker-2")
    join(other, "$queue/jobs")
    for number in range(20):
        put(other, "$queue/jobs", b"%d" % number)
    assert len(take(other)) == 20


def test_wildcard_of_an_ended_session_joins_no_queue(harness: BrokerHarness) -> None:
    gone = harness.connect("worker-1")
    join(gone, "$queue/tasks/#")
    gone.disconnect()
    harness.loop.settle()
    put(harness.connect("maker"), "$queue/tasks/a", b"x")
    assert harness.queue("tasks/a").groups == {}


def test_puback_for_a_message_of_a_deleted_queue_is_harmless(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    put(worker, "$queue/jobs", b"old")
    (message,) = worker.messages()
    queue_handler = harness.core.queue_handler
    queue_handler.delete_queue(harness.queue("jobs"))
    worker.ack(message)
    worker.ping()
    put(worker, "$queue/jobs", b"new")
    (message,) = worker.messages()
    worker.ack(message)
    assert harness.depth("jobs") == 0


# ---- $SYS, and queues disabled


def test_sys_topics_count_queues(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=2)
    for _ in range(5):
        put(worker, "$queue/jobs", b"x")
    held = take(worker)
    settle(worker, "reject", held[0])
    SysTopics(harness.broker, "1").start()
    worker.subscribe("$SYS/broker/queues/#")
    reported = {
        message.topic.decode(): message.payload.decode()
        for message in worker.messages()
        if message.retain
    }
    assert reported == {
        "$SYS/broker/queues/count": "2",
        "$SYS/broker/queues/messages/waiting": "5",
        "$SYS/broker/queues/messages/inflight": "2",
        "$SYS/broker/queues/messages/dead": "1",
    }


def test_with_queues_disabled_their_topics_are_ordinary_ones() -> None:
    harness = BrokerHarness(queues=False)
    first, second = harness.connect("first"), harness.connect("second")
    for client in (first, second):
        assert client.subscribe("$queue/jobs", "$queue/+/$ack", "$admin/#", qos=1) == [1, 1, 1]
    assert put(first, "$queue/jobs", b"x") == (0, "")
    assert put(first, "$queue/jobs/$ack", b"y")[0] == 0
    assert put(first, "$admin/queue/create", b"z")[0] == 0
    assert payloads(take(second)) == [b"x", b"y", b"z"]
    assert not harness.engine.queues
    assert put(first, "$queue/a//b", b"x")[0] == 0x10


# ---- limits


def test_total_partitions_are_limited_however_a_queue_is_created() -> None:
    harness = BrokerHarness([("wide/#", {"partitions": 4096})])
    harness.engine.lifecycle.max_partitions = 10_000
    client = harness.connect("maker")
    for name in ("a", "b"):
        assert (
            put(
                client,
                "$admin/queue/create",
                json.dumps({"name": name, "partitions": 4096}).encode(),
            )[0]
            == 0
        )
    reason, why = put(client, "$admin/queue/create", b'{"name": "c", "partitions": 4096}')
    assert reason == 0x97 and "queues.max_partitions" in why
    reason, why = put(client, "$queue/wide/d", b"x")
    assert reason == 0x97 and "queues.max_partitions" in why
    reason, why = join(client, "$queue/wide/d")
    assert reason == 0x97 and "queues.max_partitions" in why
    assert sorted(harness.engine.queues) == ["a", "b"]
    assert put(client, "$queue/small", b"x") == (0, "")
    reason, why = put(client, "$admin/queue/small/config", b'{"partitions": 4096}')
    assert reason == 0x97 and len(harness.queue("small").partitions) == 10


def test_partitions_times_groups_are_limited() -> None:
    harness = BrokerHarness([("wide", {"partitions": 400})])
    harness.engine.lifecycle.max_partitions = 400
    for nth in range(5):
        assert join(harness.connect(f"worker-{nth}"), f"$queue/wide/$group/g{nth}") == (1, "")
    late = harness.connect("late")
    for topic_filter in ("$queue/wide/$group/g5", "$queue/+/$group/g5"):
        reason, why = join(late, topic_filter)
        assert reason == 0x97 and "queues.max_partitions" in why
    assert join(late, "$queue/wide/$group/g4") == (1, "")
    assert len(harness.engine.groups) == 5


def test_lower_partition_limit_blocks_no_existing_queue_and_no_dead_letter() -> None:
    harness = BrokerHarness([("jobs", {"retry_policy": {"max_retries": 0}})])
    worker = harness.connect("worker")
    join(worker, "$queue/jobs")
    harness.engine.lifecycle.max_partitions = 1
    put(worker, "$queue/jobs", b"poison")
    (message,) = take(worker)
    settle(worker, "reject", message)
    assert harness.depth("dlq/jobs") == 1


def test_message_size_is_checked_before_its_schema() -> None:
    checked: list[int] = []

    def check(payload: bytes) -> str:
        checked.append(len(payload))
        return ""

    config = {"schema": {"type": "object"}, "limits": {"max_message_size": 100}}
    harness = BrokerHarness([("small", config)])
    client = harness.connect("maker")
    put(client, "$queue/small", b"{}")
    queue_handler = harness.core.queue_handler
    queue_handler.schemas._validators[harness.queue("small").rules.schema] = check
    assert put(client, "$queue/small", b"[" * 101)[0] == 0x97
    assert checked == []
    assert put(client, "$queue/small", b"{ }") == (0, "")
    assert checked == [3]


# ---- groups of clients that do not come back


@pytest.mark.parametrize(
    ("client_id", "warned"),
    [
        ("mqttjs_aa98f3e1", True),
        ("sluice-0123456789abcdef01234567", True),
        ("auto-5f2b9c7e-8a1d-4c3b-9e2f-1a2b3c4d5e6f", True),
        ("worker-1", False),
        ("image-resizer-12", False),
        ("node20260101", False),
    ],
)
def test_group_of_a_generated_client_id_is_reported(
    harness: BrokerHarness, client_id: str, warned: bool
) -> None:
    client = harness.connect(client_id)
    reason, why = join(client, "$queue/jobs")
    assert (reason, "Set consumer-group" in why) == (1, warned)
    assert any("generated client id" in one for one in harness.warnings) is warned
    assert join(client, "$queue/jobs") == (1, "")  # the group is no longer new
    assert join(harness.connect(f"{client_id}x"), "$queue/named", consumer_group="g") == (1, "")


def test_group_without_consumers_expires_and_frees_its_messages(harness: BrokerHarness) -> None:
    handler = harness.core.queue_handler
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", ack_mode="puback")
    gone = harness.connect("gone-1")
    join(gone, "$queue/jobs")
    gone.disconnect()
    put(worker, "$queue/jobs", b"x")
    take(worker)
    for _ in range(3):
        harness.broker.turn.begin()
        handler.expire_groups(100.0)
        harness.advance(49.0)
    assert (set(harness.queue("jobs").groups), harness.depth("jobs")) == ({"worker", "gone"}, 1)
    harness.advance(10.0)
    harness.broker.turn.begin()
    handler.expire_groups(100.0)
    harness.advance(1.0)
    assert (set(harness.queue("jobs").groups), harness.depth("jobs")) == ({"worker"}, 0)
    assert any("group expired: gone of queue jobs" in one for one in harness.warnings)
    harness.crash()
    assert set(harness.queue("jobs").groups) == {"worker"}


def test_client_that_ends_while_its_consumer_is_blocked_gives_back_its_deliveries(
    harness: BrokerHarness,
) -> None:
    client = harness.connect("worker-1", receive_maximum=1)
    join(client, "$queue/jobs")
    for nth in range(3):
        put(client, "$queue/jobs", b"%d" % nth)
    assert len(client.messages()) == 1  # no PUBACK: the receive maximum blocks the consumer
    client.disconnect()
    assert not harness.queue("jobs").groups["worker"].consumers
    other = harness.connect("worker-2")
    join(other, "$queue/jobs")
    assert len(take(other)) == 3
