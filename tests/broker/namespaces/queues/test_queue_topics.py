"""The grammar of queue topics: which topics name a queue, and what publish and subscribe do."""

from __future__ import annotations

import itertools
import json

import pytest

from sluice.broker.routing.cluster_port import ClusterPort
from sluice.broker.sessions.subscriptions import TopicBinding
from sluice.config.queue_settings import check_templates
from sluice.config.settings import Settings
from sluice.errors import ConfigError
from sluice.queues.service.queue_config import MAX_BINDING_LEVELS, read_config
from sluice.wire.packets import V311, Ack, Publish
from sluice.wire.properties import PUBCOMP, PUBREL
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, settle, take


@pytest.mark.parametrize(
    "name", ["orders", "tasks/image", "a/b/c/d/e", "dlq/orders", "été/über", "x-1_2.3 y"]
)
def test_queue_name_has_one_or_more_levels(harness: BrokerHarness, name: str) -> None:
    client = harness.connect("worker-1")
    assert put(client, f"$queue/{name}", b"one") == (0, "")
    assert join(client, f"$queue/{name}") == (1, "")
    (message,) = take(client)
    assert (message.topic.decode(), message.payload) == (f"$queue/{name}", b"one")
    assert delivery_properties(message)["queue"] == name


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        ("$queue/", "none of them empty"),
        ("$queue//a", "none of them empty"),
        ("$queue/a/", "none of them empty"),
        ("$queue/a//b", "none of them empty"),
        ("$queue/a$b", "no +, # or $"),
        ("$queue/$a", "no +, # or $"),
        ("$queue/dlq", "reserved"),
        ("$queue/responses", "reserved"),
        ("$queue/a/$frob", "$frob"),
        ("$queue/a/$msg/1", "$msg"),
        ("$queue/a/$group", "$group/<group>"),
        ("$queue/a/$group/g", "only for SUBSCRIBE"),
        ("$queue/a/$group/g/$explicit", "only for SUBSCRIBE"),
        ("$queue/" + "x" * 1025, "1,024 bytes"),
    ],
)
@pytest.mark.parametrize("qos", [1, 2])
def test_topic_that_cannot_be_a_queue_is_refused_with_an_explanation(
    harness: BrokerHarness, topic: str, words: str, qos: int
) -> None:
    client = harness.connect("worker-1")
    reason, why = put(client, topic, b"x", qos)
    assert reason == 0x90
    assert words in why
    assert not harness.engine.queues
    client.ping()


@pytest.mark.parametrize(
    "topic_filter",
    [
        "$queue/",
        "$queue//a",
        "$queue/a/",
        "$queue/dlq",
        "$queue/responses",
        "$queue/a$b",
        "$queue/a/$ack",
        "$queue/a/$msg/+",
        "$queue/a/$group",
        "$queue/a/$group/g/h",
        "$queue/a/$group/g/$puback",
        "$queue/a/$group/g/h/$explicit",
        "$queue/a/$group//$explicit",
        "$queue/a/$group/g/$explicit/x",
        "$queue//+",
    ],
)
def test_filter_that_cannot_be_a_queue_is_refused_with_an_explanation(
    harness: BrokerHarness, topic_filter: str
) -> None:
    client = harness.connect("worker-1")
    reason, why = join(client, topic_filter)
    assert reason == 0x8F
    assert why
    assert not harness.engine.queues


def test_first_subscription_creates_the_queue_too(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    assert join(worker, "$queue/jobs") == (1, "")
    harness.connect("maker").publish("$queue/jobs", b"now", 1)
    assert payloads(take(worker)) == [b"now"]


@pytest.mark.parametrize("version", [4, 5])
def test_group_in_the_topic_adds_the_id_to_each_delivery_topic(
    harness: BrokerHarness, version: int
) -> None:
    maker = harness.connect("maker")
    put(maker, "$queue/jobs/a", b"own", options={"message-id": "mine"})
    put(maker, "$queue/jobs/a", b"given")
    worker = harness.connect("any-client", version)
    assert join(worker, "$queue/jobs/a/$group/g")[0] == 1
    messages = worker.messages()
    topics = {message.payload: message.topic.decode() for message in messages}
    assert topics[b"own"] == "$queue/jobs/a/$msg/mine"
    prefix, _, name = topics[b"given"].rpartition("/")
    assert prefix == "$queue/jobs/a/$msg"
    assert set(harness.queue("jobs/a").groups) == {"g"}
    if version == 5:
        assert {delivery_properties(message)["message-id"] for message in messages} == {
            "mine",
            name,
        }


def test_id_with_wildcard_characters_is_not_put_into_a_topic(harness: BrokerHarness) -> None:
    put(harness.connect("maker"), "$queue/jobs", b"x", options={"message-id": "a+b/#"})
    worker = harness.connect("old", V311)
    join(worker, "$queue/jobs/$group/g")
    (message,) = worker.messages()
    name = message.topic.decode().rpartition("/")[2]
    assert "+" not in name and "#" not in name
    worker.publish(f"$queue/jobs/$ack/{name}", b"", 1)
    assert harness.depth("jobs") == 0


def message_id(message: Publish) -> str:
    """Return the id at the end of the topic of a delivery."""
    return message.topic.decode().rpartition("/")[2]


@pytest.mark.parametrize("topic_filter", ["$queue/jobs", "$queue/+"])
@pytest.mark.parametrize("version", [4, 5])
def test_puback_does_not_settle_where_the_topic_says_explicit(
    harness: BrokerHarness, version: int, topic_filter: str
) -> None:
    put(harness.connect("maker"), "$queue/jobs", b"x")
    worker = harness.connect("old", version)
    # The property has no effect: the topic decides.
    join(worker, f"{topic_filter}/$group/g/$explicit", ack_mode="puback")
    (message,) = take(worker)
    assert harness.depth("jobs") == 1
    worker.ping()
    assert worker.take() == []
    packet_id = worker.publish(f"$queue/jobs/$ack/{message_id(message)}", b"", 1)
    worker.first_ack(4, packet_id)
    assert harness.depth("jobs") == 0


def test_3_1_1_client_uses_every_verb_after_its_pubacks(harness: BrokerHarness) -> None:
    worker = harness.connect("old", V311)
    join(worker, "$queue/jobs/$group/g/$explicit")
    put(harness.connect("maker"), "$queue/jobs", b"x")

    def settle_with(verb: str) -> None:
        (message,) = take(worker)
        assert message.payload == b"x"
        packet_id = worker.publish(f"$queue/jobs/${verb}/{message_id(message)}", b"", 1)
        worker.first_ack(4, packet_id)

    settle_with("nack")
    assert worker.take() == []
    harness.advance(5)
    settle_with("release")
    (message,) = take(worker)
    harness.advance(20)
    worker.publish(f"$queue/jobs/$extend/{message_id(message)}", b"", 1)
    harness.advance(20)  # past the first deadline
    assert harness.depth("dlq/jobs") == 0
    worker.publish(f"$queue/jobs/$reject/{message_id(message)}", b"", 1)
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 1)


def test_explicit_group_is_still_explicit_after_a_restart(harness: BrokerHarness) -> None:
    worker = harness.connect_persistent("old", V311)
    join(worker, "$queue/jobs/$group/g/$explicit")
    worker.drop()
    harness.restart()
    put(harness.connect("maker"), "$queue/jobs", b"x")
    worker = harness.connect_persistent("old", V311)
    (message,) = take(worker)
    assert harness.depth("jobs") == 1
    worker.publish(f"$queue/jobs/$ack/{message_id(message)}", b"", 1)
    assert harness.depth("jobs") == 0


def test_subscribing_again_changes_what_a_puback_does(harness: BrokerHarness) -> None:
    maker, worker = harness.connect("maker"), harness.connect("old", V311)
    join(worker, "$queue/jobs/$group/g")
    join(worker, "$queue/jobs/$group/g/$explicit")
    put(maker, "$queue/jobs", b"x")
    take(worker)
    assert harness.depth("jobs") == 1
    join(worker, "$queue/jobs/$group/g")
    put(maker, "$queue/jobs", b"y")
    take(worker)
    assert harness.depth("jobs") == 1  # x has been delivered as explicit


def test_3_1_1_client_settles_by_the_id_in_the_topic(harness: BrokerHarness) -> None:
    put(harness.connect("maker"), "$queue/jobs", b"x")
    worker = harness.connect("old", V311)
    join(worker, "$queue/jobs/$group/g")
    (message,) = worker.messages()
    name = message.topic.decode().rpartition("/")[2]
    packet_id = worker.publish(f"$queue/jobs/$nack/{name}", b"", 1)
    worker.first_ack(4, packet_id)
    worker.ack(message)  # the lease was settled: its PUBACK settles nothing
    assert harness.depth("jobs") == 1
    harness.advance(5)
    (again,) = worker.messages()
    assert again.payload == b"x"
    worker.ack(again)
    assert harness.depth("jobs") == 0


# ---- settling

FORMS = ["property", "topic", "payload", "json"]


def settlement_packet(
    form: str, verb: str, ids: list[str]
) -> tuple[str, bytes, list[tuple[str, str]]]:
    """Return topic, payload and user properties of a settlement."""
    if form == "property":
        return f"$queue/jobs/${verb}", b"", [("message-id", one) for one in ids]
    if form == "topic":
        return f"$queue/jobs/${verb}/{ids[0]}", b"", []
    if form == "payload":
        return f"$queue/jobs/${verb}", f" {ids[0]}\n".encode(), []
    return f"$queue/jobs/${verb}", json.dumps(ids).encode(), []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend", "release"])
def test_every_verb_accepts_every_form_of_message_id(
    harness: BrokerHarness, verb: str, form: str
) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    topic, payload, user = settlement_packet(
        form, verb, [delivery_properties(message)["message-id"]]
    )
    harness.advance(20)
    assert put(worker, topic, payload, user=user) == (0, "")
    if verb == "ack":
        assert harness.depth("jobs") == 0
        assert worker.take() == []
    elif verb == "nack":
        harness.advance(4.9)
        assert worker.take() == []
        harness.advance(0.2)
        (again,) = take(worker)
        assert delivery_properties(again)["attempt"] == "2"
    elif verb == "reject":
        assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (0, 1)
    elif verb == "extend":
        harness.advance(29)
        assert put(
            worker, "$queue/jobs/$ack", delivery_properties(message)["message-id"].encode()
        ) == (0, "")
        assert harness.depth("jobs") == 0
    else:
        (again,) = take(worker)
        assert delivery_properties(again)["attempt"] == "1"


@pytest.mark.parametrize("form", ["property", "json"])
def test_batch_settles_many_at_once(harness: BrokerHarness, form: str) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    for _ in range(5):
        put(worker, "$queue/jobs", b"x")
    ids = [delivery_properties(message)["message-id"] for message in take(worker)]
    assert len(ids) == 5
    topic, payload, user = settlement_packet(form, "ack", ids)
    assert put(worker, topic, payload, user=user) == (0, "")
    assert harness.depth("jobs") == 0


def test_batch_settles_what_it_can_and_reports_the_rest(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    ids = [delivery_properties(message)["message-id"], "unknown-id"]
    reason, why = put(worker, "$queue/jobs/$ack", json.dumps(ids).encode())
    assert reason == 0x10
    assert "1 of 2" in why
    assert harness.depth("jobs") == 0


@pytest.mark.parametrize("payload", [b"", b"  ", b"[", b"[]", b"[" * 100_000])
def test_settlement_without_an_id_is_refused(harness: BrokerHarness, payload: bytes) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    reason, why = put(worker, "$queue/jobs/$ack", payload)
    assert reason == 0x99
    assert why


@pytest.mark.parametrize("dots", [".", ".."])
def test_names_that_rest_paths_cannot_carry_are_refused(harness: BrokerHarness, dots: str) -> None:
    client = harness.connect("c")
    for topic in (f"$queue/{dots}", f"$queue/a/{dots}/b"):
        reason, why = put(client, topic, b"x")
        assert (reason, "'.' or '..'" in why) == (0x90, True)
        reason, why = join(client, topic)
        assert (reason, "'.' or '..'" in why) == (0x8F, True)
    assert put(client, "$queue/jobs", b"x", options={"message-id": dots})[0] == 0x99
    for name, filters in ((dots, ["$queue/jobs", "$queue/#"]), (f"{dots}-1", ["$queue/jobs"])):
        other = harness.connect(name)
        for topic_filter in filters:
            reason, why = join(other, topic_filter)
            assert (reason, "consumer-group" in why) == (0x83, True)
        assert join(other, "$queue/jobs", consumer_group="g")[0] == 1
    assert join(client, f"$queue/jobs/$group/{dots}")[0] == 0x83
    for config in (
        {"name": f"a/{dots}"},
        {"name": "a", "dlq_config": {"topic": f"$queue/dead/{dots}"}},
    ):
        put(client, "$admin/queue/create", json.dumps(config).encode())
    assert set(harness.engine.queues) == {"jobs"}
    assert set(harness.queue("jobs").groups) == {"g"}


def test_names_of_dots_from_an_earlier_version_still_work(harness: BrokerHarness) -> None:
    config = read_config({"name": "old/.."})
    queue = harness.engine.lifecycle.create_queue(config.rules(), config.as_json())
    harness.engine.lifecycle.get_or_create_group(queue, "..")
    harness.advance(1)
    harness.restart()
    worker = harness.connect("w")
    assert put(worker, "$queue/old/..", b"x")[0] == 0
    assert join(worker, "$queue/old/..", consumer_group="..")[0] == 1
    (message,) = take(worker)
    assert settle(worker, "reject", message) == (0, "")
    assert harness.depth("dlq/old/..") == 1


DEEPEST = "/".join(["a"] * MAX_BINDING_LEVELS)


def test_levels_of_a_new_binding_are_limited(harness: BrokerHarness) -> None:
    client = harness.connect("c")
    for nth, (topic, expected) in enumerate(((DEEPEST, 0), (DEEPEST + "/a", 0x99))):
        config = {"name": f"q{nth}", "bindings": [topic]}
        assert put(client, "$admin/queue/create", json.dumps(config).encode())[0] == expected
    change = json.dumps({"bindings": [DEEPEST + "/b"]}).encode()
    reason, why = put(client, "$admin/queue/q0/config", change)
    assert (reason, "513 levels" in why) == (0x99, True)
    templates = [{"match": "t/#", "config": {"bindings": [DEEPEST + "/a"]}}]
    settings = Settings.model_validate({"queues": {"templates": templates}})
    with pytest.raises(ConfigError, match="513 levels"):
        check_templates(settings, lambda url: "")


def make_bound(harness: BrokerHarness, *topics: str) -> None:
    """Create a queue with bindings that only an earlier version accepted."""
    bindings = [{"topic": topic, "headers": {}} for topic in topics]
    rules = read_config({}, "old").rules()
    rules.bindings = list(topics)
    harness.engine.lifecycle.create_queue(
        rules, json.dumps({**read_config({}, "old").as_dict(), "bindings": bindings})
    )
    harness.advance(1)


class RecordingClusterPort(ClusterPort):
    """Collect the filters that a cell announces to the nodes of its cluster."""

    def __init__(self) -> None:
        super().__init__()
        self.announced: list[list[bytes]] = []

    def on_bindings_changed(self, bindings: list[TopicBinding]) -> None:
        self.announced.append([capture.topic_filter for capture in bindings])


def test_cluster_ignores_deeper_bindings_from_an_earlier_version_with_a_warning(
    harness: BrokerHarness,
) -> None:
    """Each level of a binding is a level of the tree by which nodes route publishes."""
    make_bound(harness, DEEPEST, DEEPEST + "/a")
    nodes, queue_handler = RecordingClusterPort(), harness.core.queue_handler
    nodes.has_other_cells = True
    harness.broker.router.join_cluster(nodes)
    for _ in range(2):
        queue_handler.rebuild_bindings()
    harness.broker.router.join_cluster(ClusterPort())
    harness.broker.turn.schedule_flush()
    harness.loop.settle()
    assert nodes.announced == [[DEEPEST.encode()]] * 2
    assert [
        warning for warning in harness.warnings if "a binding of 513 levels" in warning
    ] == harness.warnings
    assert len(harness.warnings) == 1


def test_deeper_bindings_from_an_earlier_version_still_work(harness: BrokerHarness) -> None:
    deep = "/".join(["a"] * 600)
    make_bound(harness, deep)
    harness.restart()
    client = harness.connect("c")
    assert put(client, deep, b"captured")[0] == 0
    assert harness.depth("old") == 1
    change = json.dumps({"limits": {"max_queue_depth": 7}}).encode()
    assert put(client, "$admin/queue/old/config", change) == (0, "")
    assert harness.queue("old").rules.bindings == [deep]


@pytest.mark.parametrize("how", ["payload", "properties"])
def test_settlements_per_publish_are_limited(harness: BrokerHarness, how: str) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    name = delivery_properties(message)["message-id"]
    for count, answer in ((1001, 0x97), (1000, 0x10)):
        if how == "payload":
            reason, why = put(worker, "$queue/jobs/$ack", json.dumps([name] * count).encode())
        else:
            reason, why = put(worker, "$queue/jobs/$ack", user=[("message-id", name)] * count)
        assert (reason, "several" in why) == (answer, answer == 0x97)
        assert harness.depth("jobs") == (1 if answer == 0x97 else 0)


def test_ids_per_message_are_limited(harness: BrokerHarness) -> None:
    client = harness.connect("c")
    assert put(client, "$queue/jobs", b"x", user=[("message-id", "a")] * 1001)[0] == 0x97
    assert harness.depth("jobs") == 0


def test_configuration_with_many_errors_reports_ten(harness: BrokerHarness) -> None:
    client = harness.connect("c")
    config = {"name": "a", **{f"key{nth}": 1 for nth in range(500)}}
    reason, why = put(client, "$admin/queue/create", json.dumps(config).encode())
    assert (reason, why.count("is not a setting"), "and 490 more" in why) == (0x99, 10, True)
    for large in (
        {f"key{nth}": 1 for nth in range(1001)},
        {"limits": {f"k{nth}": 1 for nth in range(1001)}},
    ):
        reason, why = put(
            client, "$admin/queue/create", json.dumps({"name": "a", **large}).encode()
        )
        assert (reason, "at most 1000" in why) == (0x99, True)
    reason, why = put(client, "$admin/queue/create", b"[" + b"[]," * 100_000 + b"[]]")
    assert (reason, "at most 262144" in why) == (0x99, True)
    assert harness.engine.queues == {}


VERBS = ["ack", "nack", "reject", "extend", "release"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("settler", ["other client", "worker-2", "consumer of another group"])
def test_delivery_of_another_client_is_settled_by_its_token_only(
    harness: BrokerHarness, verb: str, settler: str
) -> None:
    """An id is easily guessed: neither the group name nor a matching client id is enough."""
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    other = harness.connect(settler)
    if settler == "consumer of another group":
        join(other, "$queue/jobs", consumer_group="other")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    reported = delivery_properties(message)
    reason, why = settle(other, verb, message, consumer_group="worker")
    assert (reason, "delivery-token" in why) == (0x87, True)
    counter, _, tag = reported["delivery-token"].partition("-")
    guesses = [f"{int(counter, 16) + step:x}-{tag}" for step in (-1, 1, 2)]
    guesses += [counter, f"{counter}-{'0' * 24}", f"{counter}-{tag[:-1]}{int(tag[-1], 16) ^ 1:x}"]
    for token in ("1", *guesses):
        reason, why = settle(other, verb, message, consumer_group="worker", delivery_token=token)
        assert (reason, "unchanged" in why) == (0x83, True), token
    assert harness.counters.wrong_tokens == 7
    queue = harness.queue("jobs")
    assert (queue.groups["worker"].nacked, queue.depth, harness.depth("dlq/jobs")) == (0, 1, 0)
    token = reported["delivery-token"]
    assert settle(other, verb, message, consumer_group="worker", delivery_token=token) == (0, "")
    if verb == "ack" and settler != "consumer of another group":
        assert harness.depth("jobs") == 0


def test_batch_of_ids_held_by_others_settles_none(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    for _ in range(3):
        put(worker, "$queue/jobs", b"x")
    names = [delivery_properties(message)["message-id"] for message in take(worker)]
    other = harness.connect("boss")
    options = {"consumer-group": "worker"}
    reason, why = put(other, "$queue/jobs/$ack", json.dumps(names).encode(), options=options)
    assert (reason, "3 of 3" in why) == (0x87, True)
    assert harness.depth("jobs") == 3
    assert put(worker, "$queue/jobs/$ack", json.dumps(names).encode()) == (0, "")


def test_undelivered_message_cannot_be_settled_by_any_token(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=1)
    put(worker, "$queue/jobs", b"first")
    put(worker, "$queue/jobs", b"second")
    (message,) = take(worker)
    pid, _, seq = delivery_properties(message)["message-id"].partition("-")
    partitions = harness.queue("jobs").partitions
    names = [
        f"{int(one.pid):x}-{number:x}" for one in partitions for number in range(int(one.next_seq))
    ]
    assert delivery_properties(message)["message-id"] in names and len(names) == 2
    names.remove(f"{pid}-{seq}")
    for token in ("1", delivery_properties(message)["delivery-token"]):
        options = {"consumer-group": "worker", "delivery-token": token}
        assert (
            put(harness.connect("boss"), "$queue/jobs/$ack", names[0].encode(), options=options)[0]
            == 0x83
        )
        assert put(worker, "$queue/jobs/$ack", names[0].encode(), options=options)[0] == 0x83
    assert harness.depth("jobs") == 2


def test_client_settles_its_deliveries_after_unsubscribing(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    worker.unsubscribe("$queue/jobs")
    assert settle(worker, "ack", message) == (0, "")
    assert harness.depth("jobs") == 0


def test_tokens_are_unpredictable(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=100)
    for _ in range(50):
        put(worker, "$queue/jobs", b"x")
    tags = [
        int(delivery_properties(message)["delivery-token"][-16:], 16) for message in take(worker)
    ]
    steps = {later ^ earlier for earlier, later in itertools.pairwise(tags)}
    assert len(set(tags)) == 50 and len(steps) == 49
    for bit in range(64):
        assert 5 < sum(tag >> bit & 1 for tag in tags) < 45, f"bit {bit} of the tags hardly changes"


def test_consumer_cannot_settle_a_delivery_of_another_consumer_of_its_group(
    harness: BrokerHarness,
) -> None:
    first, second = harness.connect("worker-1"), harness.connect("worker-2")
    join(first, "$queue/jobs")
    put(first, "$queue/jobs", b"x")
    (message,) = take(first)
    join(second, "$queue/jobs")
    reason, why = put(
        second, "$queue/jobs/$ack", delivery_properties(message)["message-id"].encode()
    )
    assert reason == 0x83
    assert "no longer leased" in why
    assert harness.depth("jobs") == 1


def test_old_token_settles_nothing_and_the_new_one_does(harness: BrokerHarness) -> None:
    first, second = harness.connect("worker-1"), harness.connect("worker-2")
    join(first, "$queue/jobs")
    put(first, "$queue/jobs", b"x")
    (late,) = take(first)
    join(second, "$queue/jobs")
    harness.advance(40)  # the deadline, and the backoff
    (message,) = take(first) + take(second)
    assert delivery_properties(message)["attempt"] == "2"
    reason, why = settle(
        first, "ack", late, delivery_token=delivery_properties(late)["delivery-token"]
    )
    assert reason == 0x83
    assert "deadline" in why
    assert harness.depth("jobs") == 1
    assert settle(
        second, "ack", message, delivery_token=delivery_properties(message)["delivery-token"]
    ) == (0, "")
    assert harness.depth("jobs") == 0


@pytest.mark.parametrize("token", ["zzz", "-1", "f" * 40, "0"])
def test_malformed_token_settles_nothing(harness: BrokerHarness, token: str) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    assert settle(worker, "ack", message, delivery_token=token)[0] == 0x83
    assert harness.depth("jobs") == 1


@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend", "release"])
def test_settling_a_settled_or_unknown_message_is_reported(
    harness: BrokerHarness, verb: str
) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    settle(worker, "ack", message)
    for topic in (
        f"$queue/jobs/${verb}/{delivery_properties(message)['message-id']}",
        f"$queue/none/${verb}/1-1",
    ):
        reason, why = put(worker, topic)
        assert reason == 0x10
        assert why


def test_refused_qos_2_settlement_is_completed(harness: BrokerHarness) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    assert put(worker, "$queue/jobs/$ack", b"1-1", qos=2)[0] == 0x10
    worker.send(Ack(PUBREL, 2))
    worker.first_ack(PUBCOMP, 2, 0)


def test_3_1_1_client_is_not_disconnected_for_a_late_settlement(harness: BrokerHarness) -> None:
    worker = harness.connect("old", V311)
    join(worker, "$queue/jobs")
    for qos in (0, 1):
        packet_id = worker.publish("$queue/jobs/$ack/1-1", b"", qos)
        if qos:
            worker.first_ack(4, packet_id)
    worker.ping()
