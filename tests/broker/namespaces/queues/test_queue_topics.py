"""The grammar of section 2: which topics mean a queue, and what publishing or subscribing to them does."""

from __future__ import annotations

import itertools
import json

import pytest

from sluice.broker.cluster_port import Abroad
from sluice.broker.sessions.subscriptions import Capture
from sluice.config.settings import Settings
from sluice.errors import ConfigError
from sluice.broker_core import check_templates
from sluice.queues.config import MAX_BINDING_LEVELS, read_config
from sluice.wire.packets import V311, Ack
from sluice.wire.properties import PUBCOMP, PUBREL
from tests.broker.namespaces.kit import QueueHouse, facts, join, payloads, put, settle, take


@pytest.mark.parametrize(
    "name", ["orders", "tasks/image", "a/b/c/d/e", "dlq/orders", "été/über", "x-1_2.3 y"]
)
def test_a_queue_has_a_name_of_one_or_more_levels(house: QueueHouse, name: str) -> None:
    client = house.connect("worker-1")
    assert put(client, f"$queue/{name}", b"one") == (0, "")
    assert join(client, f"$queue/{name}") == (1, "")
    (message,) = take(client)
    assert (message.topic.decode(), message.payload) == (f"$queue/{name}", b"one")
    assert facts(message)["queue"] == name


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
        ("$queue/a/$group/g", "subscribed to"),
        ("$queue/" + "x" * 1025, "1,024 bytes"),
    ],
)
@pytest.mark.parametrize("qos", [1, 2])
def test_a_topic_that_cannot_be_a_queue_is_refused_in_words(
    house: QueueHouse, topic: str, words: str, qos: int
) -> None:
    client = house.connect("worker-1")
    reason, why = put(client, topic, b"x", qos)
    assert reason == 0x90
    assert words in why
    assert not house.engine.queues
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
        "$queue//+",
    ],
)
def test_a_filter_that_cannot_be_a_queue_is_refused_in_words(house: QueueHouse, topic_filter: str) -> None:
    client = house.connect("worker-1")
    reason, why = join(client, topic_filter)
    assert reason == 0x8F
    assert why
    assert not house.engine.queues


def test_a_queue_is_made_by_the_first_subscription_as_well(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    assert join(worker, "$queue/jobs") == (1, "")
    house.connect("maker").publish("$queue/jobs", b"now", 1)
    assert payloads(take(worker)) == [b"now"]


@pytest.mark.parametrize("version", [4, 5])
def test_a_group_in_the_topic_shows_the_id_of_each_delivery_in_its_topic(
    house: QueueHouse, version: int
) -> None:
    maker = house.connect("maker")
    put(maker, "$queue/jobs/a", b"own", wishes={"message-id": "mine"})
    put(maker, "$queue/jobs/a", b"given")
    worker = house.connect("anybody", version)
    assert join(worker, "$queue/jobs/a/$group/g")[0] == 1
    messages = worker.messages()
    topics = {message.payload: message.topic.decode() for message in messages}
    assert topics[b"own"] == "$queue/jobs/a/$msg/mine"
    prefix, _, name = topics[b"given"].rpartition("/")
    assert prefix == "$queue/jobs/a/$msg"
    assert set(house.queue("jobs/a").groups) == {"g"}
    if version == 5:
        assert {facts(message)["message-id"] for message in messages} == {"mine", name}


def test_an_id_with_wildcard_characters_does_not_get_into_a_topic(house: QueueHouse) -> None:
    put(house.connect("maker"), "$queue/jobs", b"x", wishes={"message-id": "a+b/#"})
    worker = house.connect("old", V311)
    join(worker, "$queue/jobs/$group/g")
    (message,) = worker.messages()
    name = message.topic.decode().rpartition("/")[2]
    assert "+" not in name and "#" not in name
    worker.publish(f"$queue/jobs/$ack/{name}", b"", 1)
    assert house.depth("jobs") == 0


def test_an_old_client_settles_by_what_it_sees_in_the_topic(house: QueueHouse) -> None:
    put(house.connect("maker"), "$queue/jobs", b"x")
    worker = house.connect("old", V311)
    join(worker, "$queue/jobs/$group/g")
    (message,) = worker.messages()
    name = message.topic.decode().rpartition("/")[2]
    packet_id = worker.publish(f"$queue/jobs/$nack/{name}", b"", 1)
    worker.first_ack(4, packet_id)
    worker.ack(message)  # the message is not this delivery's any more: its PUBACK settles nothing
    assert house.depth("jobs") == 1
    house.advance(5)
    (again,) = worker.messages()
    assert again.payload == b"x"
    worker.ack(again)
    assert house.depth("jobs") == 0


# ---- settling

FORMS = ["property", "topic", "payload", "json"]


def named(form: str, verb: str, ids: list[str]) -> tuple[str, bytes, list[tuple[str, str]]]:
    """Topic, payload and user properties of a settling publish."""
    if form == "property":
        return f"$queue/jobs/${verb}", b"", [("message-id", one) for one in ids]
    if form == "topic":
        return f"$queue/jobs/${verb}/{ids[0]}", b"", []
    if form == "payload":
        return f"$queue/jobs/${verb}", f" {ids[0]}\n".encode(), []
    return f"$queue/jobs/${verb}", json.dumps(ids).encode(), []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend", "release"])
def test_every_verb_knows_every_form_of_naming_a_message(house: QueueHouse, verb: str, form: str) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    topic, payload, user = named(form, verb, [facts(message)["message-id"]])
    house.advance(20)
    assert put(worker, topic, payload, user=user) == (0, "")
    if verb == "ack":
        assert house.depth("jobs") == 0
        assert worker.take() == []
    elif verb == "nack":
        house.advance(4.9)
        assert worker.take() == []
        house.advance(0.2)
        (again,) = take(worker)
        assert facts(again)["attempt"] == "2"
    elif verb == "reject":
        assert (house.depth("jobs"), house.depth("dlq/jobs")) == (0, 1)
    elif verb == "extend":
        house.advance(29)
        assert put(worker, "$queue/jobs/$ack", facts(message)["message-id"].encode()) == (0, "")
        assert house.depth("jobs") == 0
    else:
        (again,) = take(worker)
        assert facts(again)["attempt"] == "1"


@pytest.mark.parametrize("form", ["property", "json"])
def test_a_batch_settles_many_at_once(house: QueueHouse, form: str) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    for _ in range(5):
        put(worker, "$queue/jobs", b"x")
    ids = [facts(message)["message-id"] for message in take(worker)]
    assert len(ids) == 5
    topic, payload, user = named(form, "ack", ids)
    assert put(worker, topic, payload, user=user) == (0, "")
    assert house.depth("jobs") == 0


def test_a_batch_settles_what_it_can_and_tells_of_the_rest(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    ids = [facts(message)["message-id"], "nobody-knows"]
    reason, why = put(worker, "$queue/jobs/$ack", json.dumps(ids).encode())
    assert reason == 0x10
    assert "1 of 2" in why
    assert house.depth("jobs") == 0


@pytest.mark.parametrize("payload", [b"", b"  ", b"[", b"[]", b"[" * 100_000])
def test_a_settling_publish_that_names_nothing_is_refused(house: QueueHouse, payload: bytes) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    reason, why = put(worker, "$queue/jobs/$ack", payload)
    assert reason == 0x99
    assert why


@pytest.mark.parametrize("dots", [".", ".."])
def test_names_that_paths_of_rest_lose_are_refused(house: QueueHouse, dots: str) -> None:
    client = house.connect("c")
    for topic in (f"$queue/{dots}", f"$queue/a/{dots}/b"):
        reason, why = put(client, topic, b"x")
        assert (reason, "'.' or '..'" in why) == (0x90, True)
        reason, why = join(client, topic)
        assert (reason, "'.' or '..'" in why) == (0x8F, True)
    assert put(client, "$queue/jobs", b"x", wishes={"message-id": dots})[0] == 0x99
    for name, filters in ((dots, ["$queue/jobs", "$queue/#"]), (f"{dots}-1", ["$queue/jobs"])):
        other = house.connect(name)
        for topic_filter in filters:
            reason, why = join(other, topic_filter)
            assert (reason, "consumer-group" in why) == (0x83, True)
        assert join(other, "$queue/jobs", consumer_group="g")[0] == 1
    assert join(client, f"$queue/jobs/$group/{dots}")[0] == 0x83
    for config in ({"name": f"a/{dots}"}, {"name": "a", "dlq_config": {"topic": f"$queue/dead/{dots}"}}):
        put(client, "$admin/queue/create", json.dumps(config).encode())
    assert set(house.engine.queues) == {"jobs"}
    assert set(house.queue("jobs").groups) == {"g"}


def test_names_of_dots_from_an_earlier_version_go_on_working(house: QueueHouse) -> None:
    config = read_config({"name": "old/.."})
    queue = house.engine.create(config.rules(), config.text())
    house.engine.group(queue, "..")
    house.advance(1)
    house.restart()
    worker = house.connect("w")
    assert put(worker, "$queue/old/..", b"x")[0] == 0
    assert join(worker, "$queue/old/..", consumer_group="..")[0] == 1
    (message,) = take(worker)
    assert settle(worker, "reject", message) == (0, "")
    assert house.depth("dlq/old/..") == 1


DEEPEST = "/".join(["a"] * MAX_BINDING_LEVELS)


def test_a_new_binding_has_so_many_levels_and_no_more(house: QueueHouse) -> None:
    client = house.connect("c")
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


def make_bound(house: QueueHouse, *topics: str) -> None:
    """A queue with bindings that only an earlier version accepted."""
    bindings = [{"topic": topic, "headers": {}} for topic in topics]
    rules = read_config({}, "old").rules()
    rules.bindings = list(topics)
    house.engine.create(rules, json.dumps({**read_config({}, "old").shown(), "bindings": bindings}))
    house.advance(1)


class OtherNodes(Abroad):
    """Collects the filters that a cell announces to the nodes of its cluster."""

    def __init__(self) -> None:
        self.announced: list[list[bytes]] = []

    def captures_changed(self, captures: list[Capture]) -> None:
        self.announced.append([capture.topic_filter for capture in captures])


def test_a_cluster_ignores_deeper_bindings_from_an_earlier_version_with_a_warning(house: QueueHouse) -> None:
    """Each level of a binding is a level of the tree that nodes route publishes by."""
    make_bound(house, DEEPEST, DEEPEST + "/a")
    nodes, door = OtherNodes(), house.broker.router.door
    assert door is not None
    door.abroad = nodes
    for _ in range(2):
        door.bindings_changed()
    door.abroad = None
    house.broker.turn.schedule()
    house.loop.settle()
    assert nodes.announced == [[DEEPEST.encode()]] * 2
    assert [warning for warning in house.warnings if "a binding of 513 levels" in warning] == house.warnings
    assert len(house.warnings) == 1


def test_deeper_bindings_from_an_earlier_version_go_on_working(house: QueueHouse) -> None:
    deep = "/".join(["a"] * 600)
    make_bound(house, deep)
    house.restart()
    client = house.connect("c")
    assert put(client, deep, b"captured")[0] == 0
    assert house.depth("old") == 1
    change = json.dumps({"limits": {"max_queue_depth": 7}}).encode()
    assert put(client, "$admin/queue/old/config", change) == (0, "")
    assert house.queue("old").rules.bindings == [deep]


@pytest.mark.parametrize("how", ["payload", "properties"])
def test_one_publish_settles_so_many_and_no_more(house: QueueHouse, how: str) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    name = facts(message)["message-id"]
    for count, answer in ((1001, 0x97), (1000, 0x10)):
        if how == "payload":
            reason, why = put(worker, "$queue/jobs/$ack", json.dumps([name] * count).encode())
        else:
            reason, why = put(worker, "$queue/jobs/$ack", user=[("message-id", name)] * count)
        assert (reason, "several" in why) == (answer, answer == 0x97)
        assert house.depth("jobs") == (1 if answer == 0x97 else 0)


def test_a_message_has_no_thousand_names(house: QueueHouse) -> None:
    client = house.connect("c")
    assert put(client, "$queue/jobs", b"x", user=[("message-id", "a")] * 1001)[0] == 0x97
    assert house.depth("jobs") == 0


def test_of_a_configuration_with_many_faults_ten_are_named(house: QueueHouse) -> None:
    client = house.connect("c")
    config = {"name": "a", **{f"key{nth}": 1 for nth in range(500)}}
    reason, why = put(client, "$admin/queue/create", json.dumps(config).encode())
    assert (reason, why.count("is not a key"), "and 490 more" in why) == (0x99, 10, True)
    for large in ({f"key{nth}": 1 for nth in range(1001)}, {"limits": {f"k{nth}": 1 for nth in range(1001)}}):
        reason, why = put(client, "$admin/queue/create", json.dumps({"name": "a", **large}).encode())
        assert (reason, "at most 1000" in why) == (0x99, True)
    reason, why = put(client, "$admin/queue/create", b"[" + b"[]," * 100_000 + b"[]]")
    assert (reason, "at most 262144" in why) == (0x99, True)
    assert house.engine.queues == {}


VERBS = ["ack", "nack", "reject", "extend", "release"]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("settler", ["stranger", "worker-2", "consumer of another group"])
def test_a_delivery_to_another_client_is_settled_by_its_token_only(
    house: QueueHouse, verb: str, settler: str
) -> None:
    """An id is easily guessed: neither the name of the group nor a client id that fits it is enough."""
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    other = house.connect(settler)
    if settler == "consumer of another group":
        join(other, "$queue/jobs", consumer_group="other")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    told = facts(message)
    reason, why = settle(other, verb, message, consumer_group="worker")
    assert (reason, "delivery-token" in why) == (0x87, True)
    counter, _, tag = told["delivery-token"].partition("-")
    guesses = [f"{int(counter, 16) + step:x}-{tag}" for step in (-1, 1, 2)]
    guesses += [counter, f"{counter}-{'0' * 24}", f"{counter}-{tag[:-1]}{int(tag[-1], 16) ^ 1:x}"]
    for token in ("1", *guesses):
        reason, why = settle(other, verb, message, consumer_group="worker", delivery_token=token)
        assert (reason, "as it came" in why) == (0x83, True), token
    assert house.counters.wrong_tokens == 7
    queue = house.queue("jobs")
    assert (queue.groups["worker"].nacked, queue.depth, house.depth("dlq/jobs")) == (0, 1, 0)
    token = told["delivery-token"]
    assert settle(other, verb, message, consumer_group="worker", delivery_token=token) == (0, "")
    if verb == "ack" and settler != "consumer of another group":
        assert house.depth("jobs") == 0


def test_a_batch_of_ids_that_others_hold_settles_none_of_them(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    for _ in range(3):
        put(worker, "$queue/jobs", b"x")
    names = [facts(message)["message-id"] for message in take(worker)]
    other = house.connect("boss")
    wishes = {"consumer-group": "worker"}
    reason, why = put(other, "$queue/jobs/$ack", json.dumps(names).encode(), wishes=wishes)
    assert (reason, "3 of 3" in why) == (0x87, True)
    assert house.depth("jobs") == 3
    assert put(worker, "$queue/jobs/$ack", json.dumps(names).encode()) == (0, "")


def test_a_message_that_was_never_delivered_cannot_be_settled_by_any_number_as_token(
    house: QueueHouse,
) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=1)
    put(worker, "$queue/jobs", b"first")
    put(worker, "$queue/jobs", b"second")
    (message,) = take(worker)
    pid, _, seq = facts(message)["message-id"].partition("-")
    partitions = house.queue("jobs").partitions
    names = [f"{int(one.pid):x}-{number:x}" for one in partitions for number in range(int(one.next))]
    assert facts(message)["message-id"] in names and len(names) == 2
    names.remove(f"{pid}-{seq}")
    for token in ("1", facts(message)["delivery-token"]):
        wishes = {"consumer-group": "worker", "delivery-token": token}
        assert put(house.connect("boss"), "$queue/jobs/$ack", names[0].encode(), wishes=wishes)[0] == 0x83
        assert put(worker, "$queue/jobs/$ack", names[0].encode(), wishes=wishes)[0] == 0x83
    assert house.depth("jobs") == 2


def test_a_client_settles_what_it_has_received_after_it_has_unsubscribed(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    worker.unsubscribe("$queue/jobs")
    assert settle(worker, "ack", message) == (0, "")
    assert house.depth("jobs") == 0


def test_tokens_do_not_follow_from_one_another(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=100)
    for _ in range(50):
        put(worker, "$queue/jobs", b"x")
    tags = [int(facts(message)["delivery-token"][-16:], 16) for message in take(worker)]
    steps = {later ^ earlier for earlier, later in itertools.pairwise(tags)}
    assert len(set(tags)) == 50 and len(steps) == 49
    for bit in range(64):
        assert 5 < sum(tag >> bit & 1 for tag in tags) < 45, f"bit {bit} of the tags hardly changes"


def test_a_consumer_cannot_settle_what_another_consumer_of_its_group_holds(house: QueueHouse) -> None:
    first, second = house.connect("worker-1"), house.connect("worker-2")
    join(first, "$queue/jobs")
    put(first, "$queue/jobs", b"x")
    (message,) = take(first)
    join(second, "$queue/jobs")
    reason, why = put(second, "$queue/jobs/$ack", facts(message)["message-id"].encode())
    assert reason == 0x83
    assert "another consumer" in why
    assert house.depth("jobs") == 1


def test_a_token_that_is_old_settles_nothing_and_the_new_one_does(house: QueueHouse) -> None:
    first, second = house.connect("worker-1"), house.connect("worker-2")
    join(first, "$queue/jobs")
    put(first, "$queue/jobs", b"x")
    (late,) = take(first)
    join(second, "$queue/jobs")
    house.advance(40)  # the deadline, and the backoff
    (message,) = take(first) + take(second)
    assert facts(message)["attempt"] == "2"
    reason, why = settle(first, "ack", late, delivery_token=facts(late)["delivery-token"])
    assert reason == 0x83
    assert "deadline" in why
    assert house.depth("jobs") == 1
    assert settle(second, "ack", message, delivery_token=facts(message)["delivery-token"]) == (0, "")
    assert house.depth("jobs") == 0


@pytest.mark.parametrize("token", ["zzz", "-1", "f" * 40, "0"])
def test_a_token_that_is_none_settles_nothing(house: QueueHouse, token: str) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    assert settle(worker, "ack", message, delivery_token=token)[0] == 0x83
    assert house.depth("jobs") == 1


@pytest.mark.parametrize("verb", ["ack", "nack", "reject", "extend", "release"])
def test_settling_what_is_settled_or_never_was_is_told(house: QueueHouse, verb: str) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    settle(worker, "ack", message)
    for topic in (f"$queue/jobs/${verb}/{facts(message)['message-id']}", f"$queue/none/${verb}/1-1"):
        reason, why = put(worker, topic)
        assert reason == 0x10
        assert why


def test_a_settling_publish_of_quality_2_that_is_refused_comes_to_its_end(house: QueueHouse) -> None:
    worker = house.connect("worker-1")
    join(worker, "$queue/jobs")
    assert put(worker, "$queue/jobs/$ack", b"1-1", qos=2)[0] == 0x10
    worker.send(Ack(PUBREL, 2))
    worker.first_ack(PUBCOMP, 2, 0)


def test_an_old_client_hears_nothing_of_a_late_settle_and_keeps_its_line(house: QueueHouse) -> None:
    worker = house.connect("old", V311)
    join(worker, "$queue/jobs")
    for qos in (0, 1):
        packet_id = worker.publish("$queue/jobs/$ack/1-1", b"", qos)
        if qos:
            worker.first_ack(4, packet_id)
    worker.ping()
