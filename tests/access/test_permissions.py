"""What a client may not do is refused, on every way there is to do it. A broker without sockets, with real rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.access.identity import Role
from sluice.access.users import User
from sluice.wire.packets import V5, V311, Disconnect
from tests.access.kit import PASSWORD, GuardedHouse, make_user, touch_later, users_file
from tests.broker.kit import Client, will
from tests.broker.namespaces.kit import join, put, settle, take

Build = Callable[..., GuardedHouse]

RULES = """
[[rule]]
allow = ["connect"]

[[rule]]
allow = ["publish", "subscribe"]
topics = ["open/#", "own/%c/#"]

[[rule]]
allow = ["queue-publish"]
queues = ["tasks", "responses/#"]

[[rule]]
allow = ["queue-consume", "queue-settle"]
clients = ["worker*"]
queues = ["tasks", "dlq/tasks"]

[[rule]]
allow = ["queue-admin"]
clients = ["keeper*"]
queues = ["kept/#"]

[[rule]]
allow = ["subscribe"]
clients = ["watcher"]
topics = ["$SYS/#"]
"""


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(rules: str | None = RULES, *users: object, **options: object) -> GuardedHouse:
        return GuardedHouse(tmp_path, rules, *users, **options)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("qos", [1, 2])
def test_a_publish_that_is_not_allowed_is_answered_with_0x87_and_what_to_do(build: Build, qos: int) -> None:
    house = build()
    listener = house.connect("l")
    listener.subscribe("open/#")
    client = house.connect("c")
    reason, why = put(client, "closed/x", b"x", qos)
    assert (reason, "rule" in why) == (0x87, True)
    assert put(client, "open/x", b"x", qos)[0] == 0
    assert [one.topic for one in listener.messages()] == [b"open/x"]


@pytest.mark.parametrize("version", [V311, V5])
def test_at_qos_0_it_is_dropped_and_logged_once(build: Build, version: int) -> None:
    house = build()
    client = house.connect("c", version)
    for _ in range(3):
        client.publish("closed/x", b"x")
    client.ping()
    assert [facts["topic"] for event, facts in house.log if event == "publish not allowed"] == ["closed/x"]
    for nth in range(100):
        client.publish(f"closed/{nth}", b"x")
    assert len(house.log) <= 16  # a client cannot fill the log


def test_a_3_1_1_client_is_cut_off_without_an_acknowledgement(build: Build) -> None:
    client = build().connect("c", V311)
    client.publish("closed/x", b"x", 1)
    assert client.closed and client.take() == []


def test_a_topic_alias_is_no_way_round(build: Build) -> None:
    house = build()
    client = house.connect("c")
    assert put(client, "closed/x", b"", topic_alias=1)[0] == 0x87
    assert put(client, "", b"", topic_alias=1)[0] == 0x87


@pytest.mark.parametrize("version", [V311, V5])
def test_a_filter_must_be_inside_what_is_allowed(build: Build, version: int) -> None:
    client = build().connect("c", version)
    refused = 0x87 if version == V5 else 0x80
    assert client.subscribe("open/#", "open/+/a", "own/c/x") == [0, 0, 0]
    for topic_filter in ("#", "+/x", "own/+/x", "own/d/x", "$SYS/#", "$share/g/closed/#", "closed"):
        assert client.subscribe(topic_filter) == [refused], topic_filter
    assert client.subscribe("$share/g/open/x") == [0]


def test_retained_messages_of_other_topics_stay_hidden(build: Build) -> None:
    house = build()
    house.connect("d").publish("own/d/x", b"private", retain=True)
    client = house.connect("c")
    assert client.subscribe("own/d/x", "own/#", "#") == [0x87] * 3
    assert client.messages() == []


@pytest.mark.parametrize("topic", ["$SYS/broker/uptime", "$SYS", "$SYS/x"])
@pytest.mark.parametrize("rules", [None, RULES, '[[rule]]\nallow = "*"\ntopics = ["#", "$SYS/#", "$SYS"]'])
def test_nobody_publishes_under_sys(build: Build, rules: str | None, topic: str) -> None:
    house = build(rules)
    client = house.connect("c")
    assert put(client, topic, b"lies")[0] == 0x87
    client.publish(topic, b"lies", retain=True)
    client.ping()
    assert house.broker.router.retained.count == 0
    assert house.connect("d", will=will(topic)).connack.reason == 0x87


def test_sys_is_for_those_who_are_allowed(build: Build) -> None:
    house = build()
    assert house.connect("watcher").subscribe("$SYS/#", "$SYS/broker/uptime") == [0, 0]
    assert house.connect("c").subscribe("$SYS/broker/uptime") == [0x87]


def test_a_will_needs_the_right_to_publish_it(build: Build) -> None:
    house = build()
    for topic in ("closed/x", "$queue/other", "$admin/queue/create", "own/d/x"):
        assert house.connect("c", will=will(topic)).connack.reason == 0x87, topic
    assert house.connect("c", V311, will=will("closed/x")).connack.reason == 5
    assert house.connect("c", will=will("own/c/gone")).connack.reason == 0


# ---- queues


def test_each_thing_done_to_a_queue_has_a_rule_of_its_own(build: Build) -> None:
    house = build()
    sender, worker = house.connect("s"), house.connect("worker-1")
    assert put(sender, "$queue/tasks", b"1")[0] == 0
    assert put(sender, "$queue/other", b"1")[0] == 0x87
    assert join(sender, "$queue/tasks")[0] == 0x87
    assert join(sender, "$queue/#")[0] == 0x87
    assert join(worker, "$queue/#")[0] == 0x87
    assert join(worker, "$queue/tasks/$group/g")[0] == 1
    (message,) = take(worker)
    for verb in ("ack", "nack", "reject", "extend", "release"):
        assert settle(sender, verb, message, consumer_group="g")[0] == 0x87, verb
    assert put(sender, "$queue/tasks/$ack/1-1")[0] == 0x87
    assert settle(worker, "ack", message)[0] == 0
    assert "other" not in house.engine.queues


def test_a_right_to_administer_a_queue_settles_every_delivery_of_it(build: Build) -> None:
    rules = RULES.replace('queues = ["kept/#"]', 'queues = ["kept/#", "tasks"]')
    house = build(rules.replace('clients = ["worker*"]', 'clients = ["*"]'))
    worker = house.connect("worker-1")
    assert put(worker, "$queue/tasks", b"1")[0] == 0
    assert join(worker, "$queue/tasks/$group/g")[0] == 1
    (message,) = take(worker)
    assert settle(house.connect("other"), "ack", message, consumer_group="g")[0] == 0x87
    assert house.depth("tasks") == 1
    assert settle(house.connect("keeper-1"), "ack", message, consumer_group="g") == (0, "")
    assert house.depth("tasks") == 0


def test_dead_letters_are_a_queue_like_any_other(build: Build) -> None:
    house = build()
    assert join(house.connect("c"), "$queue/dlq/tasks")[0] == 0x87
    assert join(house.connect("worker-1"), "$queue/dlq/tasks")[0] == 1


def test_answers_go_where_the_rules_let_them(build: Build) -> None:
    house = build()
    asker = house.connect("c")
    assert asker.subscribe("$queue/responses/7") == [0x87]
    assert put(asker, "$queue/responses/7", b"yes")[0] == 0
    house.change_rules(RULES.replace('"dlq/tasks"', '"dlq/tasks", "responses/%c"').replace("worker*", "*"))
    assert asker.subscribe("$queue/responses/c") == [0]
    assert asker.subscribe("$queue/responses/+") == [0x87]


def create(client: Client, **config: object) -> int:
    return put(client, "$admin/queue/create", json.dumps(config).encode())[0]


def test_queues_are_managed_by_those_who_are_allowed(build: Build) -> None:
    house = build()
    keeper, other = house.connect("keeper"), house.connect("c")
    assert create(other, name="kept/a") == 0x87
    assert create(keeper, name="tasks") == 0x87
    assert create(keeper, name="$queue/kept/a") == 0
    assert put(other, "$admin/queue/kept/a/config", b'{"partitions": 20}')[0] == 0x87
    assert put(keeper, "$admin/queue/kept/a/config", b'{"partitions": 20}')[0] == 0
    assert put(keeper, "$admin/queue/create", b"no JSON")[0] == 0x99
    assert put(other, "$admin/queue/create", b"no JSON")[0] == 0x87
    assert other.subscribe("$admin/queue/kept/a/stats") == [0x87]
    assert keeper.subscribe("$admin/queue/kept/a/stats", "$admin/queue/kept/#") == [0, 0]
    assert keeper.subscribe("$admin/#", "$admin/queue/+/stats", "$admin/+/kept/a/stats") == [0x87] * 3


def test_a_queue_is_no_way_to_read_topics_that_are_closed_to_who_makes_it(build: Build) -> None:
    house = build()
    keeper = house.connect("keeper")
    for bindings in (["closed/#"], ["#"], [{"topic": "own/+/x"}], ["open/#", "$SYS/#"]):
        assert create(keeper, name="kept/a", bindings=bindings) == 0x87, bindings
    assert create(keeper, name="kept/a", bindings=["open/#"]) == 0
    assert put(keeper, "$admin/queue/kept/a/config", b'{"bindings": ["closed/#"]}')[0] == 0x87


def test_a_queue_is_no_way_to_write_into_queues_that_are_closed_to_who_makes_it(build: Build) -> None:
    keeper = build().connect("keeper")
    assert create(keeper, name="kept/a", dlq_config={"topic": "other"}) == 0x87
    assert create(keeper, name="kept/a", dlq_config={"invalid_topic": "$queue/other"}) == 0x87
    assert create(keeper, name="kept/a", dlq_config={"topic": "tasks"}) == 0


def test_without_rules_named_users_do_everything_but_manage_queues(build: Build) -> None:
    house = build(None, make_user("ann"), make_user("root", role=Role.ADMIN), anonymous=False)
    ann = house.connect("c", username="ann", password=PASSWORD.encode())
    assert put(ann, "any/thing")[0] in (0, 0x10) and put(ann, "$queue/q", b"x")[0] == 0
    assert ann.subscribe("#", "$SYS/#") == [0, 0] and join(ann, "$queue/q")[0] == 1
    assert create(ann, name="a") == 0x87
    root = house.connect("r", username="root", password=PASSWORD.encode())
    assert create(root, name="a") == 0


# ---- who connects


def test_who_is_not_let_in_by_the_rules_is_told_so(build: Build) -> None:
    house = build('[[rule]]\nallow = "connect"\nclients = ["known-*"]')
    assert house.connect("known-1").connack.reason == 0
    assert house.connect("stranger").connack.reason == 0x87
    assert house.connect("stranger", V311).connack.reason == 5
    assert house.connect("").connack.reason == 0x87


@pytest.mark.parametrize("client_id", ["a/b", "+", "#", "own/#"])
def test_a_client_id_that_would_widen_a_filter_is_refused(build: Build, client_id: str) -> None:
    house = build()
    assert house.connect(client_id).connack.reason == 0x85
    assert house.connect(client_id, V311).connack.reason == 2


def test_a_session_is_not_handed_to_another_user(build: Build) -> None:
    house = build(None, make_user("ann"), make_user("bob"), anonymous=False)
    ann = house.connect("c", clean=False, session_expiry=600, username="ann", password=PASSWORD.encode())
    ann.subscribe("private/ann", qos=1)
    for clean in (False, True):
        thief = house.connect("c", clean=clean, username="bob", password=PASSWORD.encode())
        assert thief.connack.reason == 0x85 and thief.closed
    ann.ping()
    ann.drop()
    assert house.connect("c", clean=False, username="bob", password=PASSWORD.encode()).connack.reason == 0x85
    again = house.connect("c", clean=False, username="ann", password=PASSWORD.encode())
    assert again.connack.session_present


# ---- what changes while it runs


def test_new_rules_hold_for_whoever_is_connected(build: Build) -> None:
    house = build()
    client, writer = house.connect("c"), house.connect("w")
    client.subscribe("open/#")
    assert put(client, "open/x")[0] == 0
    client.take()
    house.change_rules(RULES.replace('"open/#", ', ""))
    assert put(client, "open/x")[0] == 0x87
    house.change_rules(RULES.replace('allow = ["publish", "subscribe"]', 'allow = ["publish"]'))
    writer.publish("open/x", b"not for c")
    assert client.messages() == []  # its subscription went with the right to it
    house.change_rules(RULES)
    assert client.subscribe("open/#") == [0]


def test_a_consumer_that_loses_its_right_gets_no_more(build: Build) -> None:
    house = build()
    worker, sender = house.connect("worker-1"), house.connect("s")
    join(worker, "$queue/tasks")
    house.change_rules(RULES.replace("worker*", "nobody"))
    put(sender, "$queue/tasks", b"1")
    assert worker.messages() == []
    assert not house.queue("tasks").groups["worker"].consumers


def test_who_may_not_connect_any_more_is_sent_away(build: Build) -> None:
    house = build()
    client = house.connect("c")
    house.change_rules(RULES.replace('allow = ["connect"]', 'allow = ["connect"]\nclients = ["other"]'))
    assert client.fault()[0] == 0x87


def test_rules_that_cannot_be_read_change_nothing(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    house = build()
    client = house.connect("c")
    house.change_rules("[[rule]]\nallow = 'fly'")
    assert put(client, "open/x")[0] in (0, 0x10) and put(client, "closed/x")[0] == 0x87
    assert any("stays in force" in record.message for record in caplog.records)
    house.change_rules('[[rule]]\nallow = "*"')
    assert put(client, "closed/x")[0] in (0, 0x10)


def test_what_waits_for_a_client_that_is_away_is_held_to_the_rules_it_comes_back_under(build: Build) -> None:
    house = build()
    client, writer = house.connect_lasting("c"), house.connect("w")
    assert client.subscribe("open/#", "own/c/#", qos=1) == [1, 1]
    client.drop()
    put(writer, "open/x", b"was open")
    house.change_rules(RULES.replace('"open/#", ', ""))
    back = house.connect_lasting("c")
    assert back.connack.session_present and back.messages() == []
    assert back.subscribe("own/c/#", qos=1) == [1]


def test_a_will_that_is_not_allowed_any_more_is_not_published(build: Build) -> None:
    house = build()
    listener = house.connect("l")
    listener.subscribe("open/#")
    client = house.connect("c", will=will("own/c/gone"))
    other = house.connect("d", will=will("open/gone"))
    house.change_rules(RULES.replace('"open/#", ', "") + '[[rule]]\nallow = "subscribe"\ntopics = ["#"]')
    listener.subscribe("own/#", "open/#")
    other.drop()
    client.drop()
    assert [one.topic for one in listener.messages()] == [b"own/c/gone"]


def test_a_user_who_is_disabled_removed_or_has_a_new_password_is_sent_away(build: Build) -> None:
    names = ("gone", "off", "new", "same")
    house = build(None, *(make_user(name) for name in names), anonymous=False)
    clients = {name: house.connect(name, username=name, password=PASSWORD.encode()) for name in names}
    house.change_users(
        make_user("off", disabled=True), make_user("new", "another password"), make_user("same")
    )
    for name in ("gone", "off", "new"):
        assert clients[name].fault()[0] == 0x87, name
        assert house.connect(name, username=name, password=PASSWORD.encode()).connack.reason == 0x86
    clients["same"].ping()
    assert house.connect("new", username="new", password=b"another password").connack.reason == 0


def test_a_session_is_its_users_own_after_a_restart_too(build: Build) -> None:
    house = build(None, make_user("ann"), make_user("bob"), anonymous=False)
    secret = PASSWORD.encode()

    def come(user: str, client_id: str) -> Client:
        return house.connect_lasting(client_id, username=user, password=secret)

    come("ann", "c").subscribe("t")
    house.restart()
    house.broker.access = house.gate
    assert come("bob", "c").connack.reason == 0x85
    again = come("ann", "c")
    assert (again.connack.reason, again.connack.session_present) == (0, True)
    house.restart()  # and nobody is asked for a name any more
    assert house.connect("c", clean=False).connack.session_present


def test_a_change_that_another_thread_saw_first_is_not_missed(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admin doors look at the same file, in a thread of their own."""
    house = build(None, make_user("gone"), make_user("same"), anonymous=False)
    client = house.connect("c", username="gone", password=PASSWORD.encode())
    assert house.passwords is not None
    users = house.passwords.users
    look = users.current

    def overtaken(now: bool = False) -> dict[str, User]:
        found = users._content
        look(True)
        return found

    users_file(house.users_path.parent, make_user("same"))
    touch_later(house.users_path)
    monkeypatch.setattr(users, "current", overtaken)
    house.gate.look()
    house.loop.settle()
    assert client.fault()[0] == 0x87


def test_who_is_no_administrator_any_more_does_not_go_on_as_one(build: Build) -> None:
    house = build(None, make_user("ann", role=Role.ADMIN), make_user("bob"), anonymous=False)
    ann = house.connect("a", username="ann", password=PASSWORD.encode())
    assert create(ann, name="before") == 0
    house.change_users(make_user("ann", role=Role.VIEWER), make_user("bob"))
    assert ann.fault()[0] == 0x87
    again = house.connect("a", username="ann", password=PASSWORD.encode())
    assert create(again, name="after") == 0x87


@pytest.mark.parametrize(("version", "code"), [(V5, 0x86), (V311, 4)])
def test_wrong_user_and_wrong_password_get_the_same_answer(build: Build, version: int, code: int) -> None:
    house = build(None, make_user("ann"), make_user("off", disabled=True), anonymous=False)
    answers = []
    for name, password in (
        ("ann", b"wrong"),
        ("nobody", PASSWORD.encode()),
        ("off", PASSWORD.encode()),
        ("ann", b""),
    ):
        client = house.connect("c", version, username=name, password=password)
        why = client.connack.properties
        answers.append((client.connack.reason, why.reason_string if why else None, client.closed))
    assert set(answers) == {(code, answers[0][1], True)}


def test_who_says_no_name_is_refused_where_names_are_wanted(build: Build) -> None:
    house = build(None, make_user("ann"), anonymous=False)
    assert house.connect("c").connack.reason == 0x87
    assert house.connect("c", V311).connack.reason == 5


def test_a_client_without_a_grant_is_asked_nothing(build: Build) -> None:
    house = build(None)
    client = house.connect("c")
    assert house.broker.registry.sessions["c"].grant is None
    assert create(client, name="a") == 0
    assert not any(isinstance(packet, Disconnect) for packet in client.take())


def test_a_client_reads_its_own_exclusive_queue_without_a_rule_and_nobody_elses_with_one(
    build: Build,
) -> None:
    house = build(RULES + '\n[[rule]]\nallow = ["subscribe", "publish"]\ntopics = ["$ECQ/#"]\n')
    owner, other = house.connect("car-1"), house.connect("car-2")
    assert join(owner, "$ECQ/car-1/#") == (1, "")
    assert join(other, "$ECQ/car-1/#")[0] == 0x87
    assert put(other, "$ECQ/w/car-1/speed", b"80")[0] == 0
    assert [message.payload for message in take(owner)] == [b"80"]


def test_an_exclusive_queue_is_written_by_those_who_may_publish_to_its_topic(build: Build) -> None:
    house = build(RULES + '\n[[rule]]\nallow = ["publish"]\ntopics = ["$ECQ/w/+/own/%c"]\n')
    writer, owner = house.connect("sensor"), house.connect("car-1")
    assert join(owner, "$ECQ/car-1/#") == (1, "")
    assert put(writer, "$ECQ/w/car-1/own/sensor", b"1") == (0, "")
    assert put(writer, "$ECQ/w/car-1/own/other", b"2")[0] == 0x87
    assert [message.payload for message in take(owner)] == [b"1"]


def test_a_rule_can_take_its_queue_from_an_owner(build: Build) -> None:
    house = build(RULES + '\n[[rule]]\ndeny = ["subscribe"]\ntopics = ["$ECQ/car-1/#"]\n')
    assert join(house.connect("car-1"), "$ECQ/car-1/#")[0] == 0x87
    assert join(house.connect("car-2"), "$ECQ/car-2/#")[0] == 1


@pytest.mark.parametrize(
    ("topic_filter", "reason", "words"),
    [
        ("$ECQ/car-2/#", 0x87, "its own queue"),
        ("$ECQ/+/#", 0x8F, "its own queue"),
        ("$ECQ/car-1/speed", 0x8F, "its own queue"),
        ("$ECQ/w/car-1/#", 0x8F, "its own queue"),
        ("$share/g/$ECQ/car-1/#", 0x8F, "not shared"),
        ("$share/g/$ECQ/car-2/#", 0x8F, "not shared"),
    ],
)
@pytest.mark.parametrize("rule", ["", '\n[[rule]]\nallow = ["subscribe"]\ntopics = ["$ECQ/#"]\n'])
def test_what_no_rule_can_allow_below_ecq_is_not_refused_for_want_of_one(
    build: Build, topic_filter: str, reason: int, words: str, rule: str
) -> None:
    refused, why = join(build(RULES + rule).connect("car-1"), topic_filter)
    assert refused == reason
    assert words in why and "rule" not in why
