"""Forbidden actions are refused in every form. A broker without sockets, with real rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.access.identity import Role
from sluice.access.users import User
from sluice.wire.packets import V5, V311, Disconnect
from tests.access.kit import PASSWORD, AccessHarness, make_user, touch_in_future, users_file
from tests.broker.namespaces.kit import join, put, settle, take
from tests.broker.peers import Client, will

Build = Callable[..., AccessHarness]

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
allow = ["queue-cancel"]
clients = ["support"]
queues = ["tasks"]

[[rule]]
allow = ["queue-admin"]
clients = ["manager*"]
queues = ["kept/#"]

[[rule]]
allow = ["subscribe"]
clients = ["watcher"]
topics = ["$SYS/#"]
"""


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(rules: str | None = RULES, *users: object, **options: object) -> AccessHarness:
        return AccessHarness(tmp_path, rules, *users, **options)  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("qos", [1, 2])
def test_forbidden_publish_gets_0x87_and_a_remedy(build: Build, qos: int) -> None:
    harness = build()
    listener = harness.connect("l")
    listener.subscribe("open/#")
    client = harness.connect("c")
    reason, why = put(client, "closed/x", b"x", qos)
    assert (reason, "rule" in why) == (0x87, True)
    assert put(client, "open/x", b"x", qos)[0] == 0
    assert [one.topic for one in listener.messages()] == [b"open/x"]


def test_cancelling_needs_a_right_of_its_own(build: Build) -> None:
    harness = build()
    publisher = harness.connect("c")
    for message_id in ("a", "b"):
        assert put(publisher, "$queue/tasks", b"x", options={"message-id": message_id})[0] == 0
    assert put(publisher, "$queue/tasks/$cancel/a")[0] == 0x87
    assert put(publisher, "$queue/tasks/$cancel", b"a")[0] == 0x87
    assert put(publisher, "$queue/tasks/$reschedule/a", options={"delay": "1h"})[0] == 0x87
    support = harness.connect("support")
    assert put(support, "$queue/tasks/$reschedule/a", options={"delay": "1h"})[0] == 0
    assert put(support, "$queue/tasks/$cancel/a")[0] == 0
    assert put(support, "$queue/tasks/$cancel", b"b")[0] == 0
    assert put(support, "$queue/other/$cancel/a")[0] == 0x87


@pytest.mark.parametrize("version", [V311, V5])
def test_forbidden_qos_0_publish_is_dropped_and_logged_once(build: Build, version: int) -> None:
    harness = build()
    client = harness.connect("c", version)
    for _ in range(3):
        client.publish("closed/x", b"x")
    client.ping()
    assert [facts["topic"] for event, facts in harness.log if event == "publish not allowed"] == [
        "closed/x"
    ]
    for nth in range(100):
        client.publish(f"closed/{nth}", b"x")
    assert len(harness.log) <= 16  # a client cannot fill the log


def test_forbidden_publish_of_3_1_1_client_ends_connection_without_puback(build: Build) -> None:
    client = build().connect("c", V311)
    client.publish("closed/x", b"x", 1)
    assert client.closed and client.take() == []


def test_topic_alias_does_not_bypass_rules(build: Build) -> None:
    harness = build()
    client = harness.connect("c")
    assert put(client, "closed/x", b"", topic_alias=1)[0] == 0x87
    assert put(client, "", b"", topic_alias=1)[0] == 0x87


@pytest.mark.parametrize("version", [V311, V5])
def test_subscription_filter_must_lie_within_allowed_filters(build: Build, version: int) -> None:
    client = build().connect("c", version)
    refused = 0x87 if version == V5 else 0x80
    assert client.subscribe("open/#", "open/+/a", "own/c/x") == [0, 0, 0]
    for topic_filter in ("#", "+/x", "own/+/x", "own/d/x", "$SYS/#", "$share/g/closed/#", "closed"):
        assert client.subscribe(topic_filter) == [refused], topic_filter
    assert client.subscribe("$share/g/open/x") == [0]


def test_retained_messages_of_forbidden_topics_are_not_delivered(build: Build) -> None:
    harness = build()
    harness.connect("d").publish("own/d/x", b"private", retain=True)
    client = harness.connect("c")
    assert client.subscribe("own/d/x", "own/#", "#") == [0x87] * 3
    assert client.messages() == []


@pytest.mark.parametrize("topic", ["$SYS/broker/uptime", "$SYS", "$SYS/x"])
@pytest.mark.parametrize(
    "rules", [None, RULES, '[[rule]]\nallow = "*"\ntopics = ["#", "$SYS/#", "$SYS"]']
)
def test_publish_to_sys_topics_is_refused(build: Build, rules: str | None, topic: str) -> None:
    harness = build(rules)
    client = harness.connect("c")
    assert put(client, topic, b"lies")[0] == 0x87
    client.publish(topic, b"lies", retain=True)
    client.ping()
    assert harness.broker.router.retained.count == 0
    assert harness.connect("d", will=will(topic)).connack.reason == 0x87


def test_sys_topics_require_permission(build: Build) -> None:
    harness = build()
    assert harness.connect("watcher").subscribe("$SYS/#", "$SYS/broker/uptime") == [0, 0]
    assert harness.connect("c").subscribe("$SYS/broker/uptime") == [0x87]


def test_will_requires_permission_to_publish(build: Build) -> None:
    harness = build()
    for topic in ("closed/x", "$queue/other", "$admin/queue/create", "own/d/x"):
        assert harness.connect("c", will=will(topic)).connack.reason == 0x87, topic
    assert harness.connect("c", V311, will=will("closed/x")).connack.reason == 5
    assert harness.connect("c", will=will("own/c/gone")).connack.reason == 0


# ---- queues


def test_each_queue_action_has_its_own_permission(build: Build) -> None:
    harness = build()
    sender, worker = harness.connect("s"), harness.connect("worker-1")
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
    assert "other" not in harness.engine.queues


def test_permission_to_administer_a_queue_allows_settling_its_deliveries(build: Build) -> None:
    rules = RULES.replace('queues = ["kept/#"]', 'queues = ["kept/#", "tasks"]')
    harness = build(rules.replace('clients = ["worker*"]', 'clients = ["*"]'))
    worker = harness.connect("worker-1")
    assert put(worker, "$queue/tasks", b"1")[0] == 0
    assert join(worker, "$queue/tasks/$group/g")[0] == 1
    (message,) = take(worker)
    assert settle(harness.connect("other"), "ack", message, consumer_group="g")[0] == 0x87
    assert harness.depth("tasks") == 1
    assert settle(harness.connect("manager-1"), "ack", message, consumer_group="g") == (0, "")
    assert harness.depth("tasks") == 0


def test_dead_letter_queue_has_permissions_like_any_queue(build: Build) -> None:
    harness = build()
    assert join(harness.connect("c"), "$queue/dlq/tasks")[0] == 0x87
    assert join(harness.connect("worker-1"), "$queue/dlq/tasks")[0] == 1


def test_replies_need_permission_for_their_topic(build: Build) -> None:
    harness = build()
    requester = harness.connect("c")
    assert requester.subscribe("$queue/responses/7") == [0x87]
    assert put(requester, "$queue/responses/7", b"yes")[0] == 0
    harness.change_rules(
        RULES.replace('"dlq/tasks"', '"dlq/tasks", "responses/%c"').replace("worker*", "*")
    )
    assert requester.subscribe("$queue/responses/c") == [0]
    assert requester.subscribe("$queue/responses/+") == [0x87]


def create(client: Client, **config: object) -> int:
    return put(client, "$admin/queue/create", json.dumps(config).encode())[0]


def test_queue_administration_requires_permission(build: Build) -> None:
    harness = build()
    manager, other = harness.connect("manager"), harness.connect("c")
    assert create(other, name="kept/a") == 0x87
    assert create(manager, name="tasks") == 0x87
    assert create(manager, name="$queue/kept/a") == 0
    assert put(other, "$admin/queue/kept/a/config", b'{"partitions": 20}')[0] == 0x87
    assert put(manager, "$admin/queue/kept/a/config", b'{"partitions": 20}')[0] == 0
    assert put(manager, "$admin/queue/create", b"no JSON")[0] == 0x99
    assert put(other, "$admin/queue/create", b"no JSON")[0] == 0x87
    assert other.subscribe("$admin/queue/kept/a/stats") == [0x87]
    assert manager.subscribe("$admin/queue/kept/a/stats", "$admin/queue/kept/#") == [0, 0]
    assert (
        manager.subscribe("$admin/#", "$admin/queue/+/stats", "$admin/+/kept/a/stats") == [0x87] * 3
    )


def test_queue_binding_cannot_read_topics_forbidden_to_its_creator(build: Build) -> None:
    harness = build()
    manager = harness.connect("manager")
    for bindings in (["closed/#"], ["#"], [{"topic": "own/+/x"}], ["open/#", "$SYS/#"]):
        assert create(manager, name="kept/a", bindings=bindings) == 0x87, bindings
    assert create(manager, name="kept/a", bindings=["open/#"]) == 0
    assert put(manager, "$admin/queue/kept/a/config", b'{"bindings": ["closed/#"]}')[0] == 0x87


def test_dead_letter_target_cannot_write_queues_forbidden_to_its_creator(build: Build) -> None:
    manager = build().connect("manager")
    assert create(manager, name="kept/a", dlq_config={"topic": "other"}) == 0x87
    assert create(manager, name="kept/a", dlq_config={"invalid_topic": "$queue/other"}) == 0x87
    assert create(manager, name="kept/a", dlq_config={"topic": "tasks"}) == 0


def test_without_rules_named_users_may_do_everything_but_administer_queues(build: Build) -> None:
    harness = build(None, make_user("ann"), make_user("root", role=Role.ADMIN), anonymous=False)
    ann = harness.connect("c", username="ann", password=PASSWORD.encode())
    assert put(ann, "any/thing")[0] in (0, 0x10) and put(ann, "$queue/q", b"x")[0] == 0
    assert ann.subscribe("#", "$SYS/#") == [0, 0] and join(ann, "$queue/q")[0] == 1
    assert create(ann, name="a") == 0x87
    root = harness.connect("r", username="root", password=PASSWORD.encode())
    assert create(root, name="a") == 0


# ---- connecting


def test_client_refused_by_rules_gets_a_reason(build: Build) -> None:
    harness = build('[[rule]]\nallow = "connect"\nclients = ["known-*"]')
    assert harness.connect("known-1").connack.reason == 0
    assert harness.connect("unknown").connack.reason == 0x87
    assert harness.connect("unknown", V311).connack.reason == 5
    assert harness.connect("").connack.reason == 0x87


@pytest.mark.parametrize("client_id", ["a/b", "+", "#", "own/#"])
def test_client_id_that_would_widen_a_filter_is_refused(build: Build, client_id: str) -> None:
    harness = build()
    assert harness.connect(client_id).connack.reason == 0x85
    assert harness.connect(client_id, V311).connack.reason == 2


def test_session_cannot_be_taken_over_by_another_user(build: Build) -> None:
    harness = build(None, make_user("ann"), make_user("bob"), anonymous=False)
    ann = harness.connect(
        "c", clean=False, session_expiry=600, username="ann", password=PASSWORD.encode()
    )
    ann.subscribe("private/ann", qos=1)
    for clean in (False, True):
        thief = harness.connect("c", clean=clean, username="bob", password=PASSWORD.encode())
        assert thief.connack.reason == 0x85 and thief.closed
    ann.ping()
    ann.drop()
    assert (
        harness.connect("c", clean=False, username="bob", password=PASSWORD.encode()).connack.reason
        == 0x85
    )
    again = harness.connect("c", clean=False, username="ann", password=PASSWORD.encode())
    assert again.connack.session_present


# ---- changes at run time


def test_new_rules_apply_to_connected_clients(build: Build) -> None:
    harness = build()
    client, writer = harness.connect("c"), harness.connect("w")
    client.subscribe("open/#")
    assert put(client, "open/x")[0] == 0
    client.take()
    harness.change_rules(RULES.replace('"open/#", ', ""))
    assert put(client, "open/x")[0] == 0x87
    harness.change_rules(RULES.replace('allow = ["publish", "subscribe"]', 'allow = ["publish"]'))
    writer.publish("open/x", b"not for c")
    assert client.messages() == []  # its subscription ended with the permission
    harness.change_rules(RULES)
    assert client.subscribe("open/#") == [0]


def test_consumer_that_loses_permission_gets_no_more_deliveries(build: Build) -> None:
    harness = build()
    worker, sender = harness.connect("worker-1"), harness.connect("s")
    join(worker, "$queue/tasks")
    harness.change_rules(RULES.replace("worker*", "unknown"))
    put(sender, "$queue/tasks", b"1")
    assert worker.messages() == []
    assert not harness.queue("tasks").groups["worker"].consumers


def test_client_that_may_no_longer_connect_is_disconnected(build: Build) -> None:
    harness = build()
    client = harness.connect("c")
    harness.change_rules(
        RULES.replace('allow = ["connect"]', 'allow = ["connect"]\nclients = ["other"]')
    )
    assert client.fault()[0] == 0x87


def test_unreadable_rules_change_nothing(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    harness = build()
    client = harness.connect("c")
    harness.change_rules("[[rule]]\nallow = 'fly'")
    assert put(client, "open/x")[0] in (0, 0x10) and put(client, "closed/x")[0] == 0x87
    assert any("stays in force" in record.message for record in caplog.records)
    harness.change_rules('[[rule]]\nallow = "*"')
    assert put(client, "closed/x")[0] in (0, 0x10)


def test_pending_messages_are_checked_against_rules_when_client_returns(build: Build) -> None:
    harness = build()
    client, writer = harness.connect_persistent("c"), harness.connect("w")
    assert client.subscribe("open/#", "own/c/#", qos=1) == [1, 1]
    client.drop()
    put(writer, "open/x", b"was open")
    harness.change_rules(RULES.replace('"open/#", ', ""))
    back = harness.connect_persistent("c")
    assert back.connack.session_present and back.messages() == []
    assert back.subscribe("own/c/#", qos=1) == [1]


def test_will_that_is_no_longer_allowed_is_not_published(build: Build) -> None:
    harness = build()
    listener = harness.connect("l")
    listener.subscribe("open/#")
    client = harness.connect("c", will=will("own/c/gone"))
    other = harness.connect("d", will=will("open/gone"))
    harness.change_rules(
        RULES.replace('"open/#", ', "") + '[[rule]]\nallow = "subscribe"\ntopics = ["#"]'
    )
    listener.subscribe("own/#", "open/#")
    other.drop()
    client.drop()
    assert [one.topic for one in listener.messages()] == [b"own/c/gone"]


def test_disabled_removed_or_changed_user_is_disconnected(build: Build) -> None:
    names = ("gone", "off", "new", "same")
    harness = build(None, *(make_user(name) for name in names), anonymous=False)
    clients = {
        name: harness.connect(name, username=name, password=PASSWORD.encode()) for name in names
    }
    harness.change_users(
        make_user("off", disabled=True), make_user("new", "another password"), make_user("same")
    )
    for name in ("gone", "off", "new"):
        assert clients[name].fault()[0] == 0x87, name
        assert (
            harness.connect(name, username=name, password=PASSWORD.encode()).connack.reason == 0x86
        )
    clients["same"].ping()
    assert harness.connect("new", username="new", password=b"another password").connack.reason == 0


def test_session_belongs_to_its_user_after_restart(build: Build) -> None:
    harness = build(None, make_user("ann"), make_user("bob"), anonymous=False)
    secret = PASSWORD.encode()

    def connect(user: str, client_id: str) -> Client:
        return harness.connect_persistent(client_id, username=user, password=secret)

    connect("ann", "c").subscribe("t")
    harness.restart()
    assert connect("bob", "c").connack.reason == 0x85
    again = connect("ann", "c")
    assert (again.connack.reason, again.connack.session_present) == (0, True)
    harness.access = None  # user names are no longer checked
    harness.restart()
    assert harness.connect("c", clean=False).connack.session_present


def test_change_seen_first_by_another_thread_is_not_missed(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admin APIs watch the same file, in a thread of their own."""
    harness = build(None, make_user("gone"), make_user("same"), anonymous=False)
    client = harness.connect("c", username="gone", password=PASSWORD.encode())
    assert harness.passwords is not None
    users = harness.passwords.users
    current = users.current

    def read_by_other_thread_first(now: bool = False) -> dict[str, User]:
        found = users._content
        current(True)
        return found

    users_file(harness.users_path.parent, make_user("same"))
    touch_in_future(harness.users_path)
    monkeypatch.setattr(users, "current", read_by_other_thread_first)
    harness.authenticator.reload_files()
    harness.loop.settle()
    assert client.fault()[0] == 0x87


def test_user_that_loses_administrator_role_loses_its_rights(build: Build) -> None:
    harness = build(None, make_user("ann", role=Role.ADMIN), make_user("bob"), anonymous=False)
    ann = harness.connect("a", username="ann", password=PASSWORD.encode())
    assert create(ann, name="before") == 0
    harness.change_users(make_user("ann", role=Role.VIEWER), make_user("bob"))
    assert ann.fault()[0] == 0x87
    again = harness.connect("a", username="ann", password=PASSWORD.encode())
    assert create(again, name="after") == 0x87


@pytest.mark.parametrize(("version", "code"), [(V5, 0x86), (V311, 4)])
def test_wrong_user_and_wrong_password_get_the_same_error(
    build: Build, version: int, code: int
) -> None:
    harness = build(None, make_user("ann"), make_user("off", disabled=True), anonymous=False)
    answers = []
    for name, password in (
        ("ann", b"wrong"),
        ("unknown", PASSWORD.encode()),
        ("off", PASSWORD.encode()),
        ("ann", b""),
    ):
        client = harness.connect("c", version, username=name, password=password)
        why = client.connack.properties
        answers.append((client.connack.reason, why.reason_string if why else None, client.closed))
    assert set(answers) == {(code, answers[0][1], True)}


def test_anonymous_client_is_refused_where_users_are_required(build: Build) -> None:
    harness = build(None, make_user("ann"), anonymous=False)
    assert harness.connect("c").connack.reason == 0x87
    assert harness.connect("c", V311).connack.reason == 5


def test_client_without_permissions_needs_no_rule_check(build: Build) -> None:
    harness = build(None)
    client = harness.connect("c")
    assert harness.broker.registry.sessions["c"].grant is None
    assert create(client, name="a") == 0
    assert not any(isinstance(packet, Disconnect) for packet in client.take())


def test_client_reads_its_own_exclusive_queue_without_a_rule_and_no_other_with_one(
    build: Build,
) -> None:
    harness = build(RULES + '\n[[rule]]\nallow = ["subscribe", "publish"]\ntopics = ["$ECQ/#"]\n')
    owner, other = harness.connect("car-1"), harness.connect("car-2")
    assert join(owner, "$ECQ/car-1/#") == (1, "")
    assert join(other, "$ECQ/car-1/#")[0] == 0x87
    assert put(other, "$ECQ/w/car-1/speed", b"80")[0] == 0
    assert [message.payload for message in take(owner)] == [b"80"]


def test_write_to_exclusive_queue_requires_permission_for_its_topic(build: Build) -> None:
    harness = build(RULES + '\n[[rule]]\nallow = ["publish"]\ntopics = ["$ECQ/w/+/own/%c"]\n')
    writer, owner = harness.connect("sensor"), harness.connect("car-1")
    assert join(owner, "$ECQ/car-1/#") == (1, "")
    assert put(writer, "$ECQ/w/car-1/own/sensor", b"1") == (0, "")
    assert put(writer, "$ECQ/w/car-1/own/other", b"2")[0] == 0x87
    assert [message.payload for message in take(owner)] == [b"1"]


def test_rule_can_deny_an_owner_its_exclusive_queue(build: Build) -> None:
    harness = build(RULES + '\n[[rule]]\ndeny = ["subscribe"]\ntopics = ["$ECQ/car-1/#"]\n')
    assert join(harness.connect("car-1"), "$ECQ/car-1/#")[0] == 0x87
    assert join(harness.connect("car-2"), "$ECQ/car-2/#")[0] == 1


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
def test_invalid_ecq_topic_is_not_reported_as_forbidden(
    build: Build, topic_filter: str, reason: int, words: str, rule: str
) -> None:
    refused, why = join(build(RULES + rule).connect("car-1"), topic_filter)
    assert refused == reason
    assert words in why and "rule" not in why


def test_refused_subscribe_is_logged_with_its_filter(build: Build) -> None:
    harness = build()
    client = harness.connect("c")
    assert client.subscribe("closed/#")[0] >= 0x80
    [facts] = [facts for event, facts in harness.log if event == "subscribe refused"]
    assert (facts["client"], facts["filter"], facts["reason"]) == (
        "c",
        "closed/#",
        "not authorized",
    )
    assert facts["why"]
    client.subscribe("open/#")
    assert len([event for event, _ in harness.log if event == "subscribe refused"]) == 1


CREATION_RULES = """
[[rule]]
allow = ["connect"]

[[rule]]
allow = ["queue-publish", "queue-consume"]
users = ["$anonymous"]
clients = ["sensor-*"]
auto_create = false

[[rule]]
allow = ["queue-publish"]
clients = ["maker"]
auto_create = true

[[rule]]
allow = ["queue-publish", "queue-consume", "queue-admin"]
"""


def test_rule_decides_whether_its_clients_create_queues_by_use(build: Build) -> None:
    harness = build(CREATION_RULES)
    sensor, other = harness.connect("sensor-1"), harness.connect("other")
    for reason, why in (put(sensor, "$queue/typo", b"x"), join(sensor, "$queue/typo")):
        assert reason in (0x90, 0x8F)
        assert "rule of this client has auto_create = false" in why
        assert "`sluice queue create typo`" in why
    assert not harness.engine.queues
    assert put(other, "$queue/jobs", b"x") == (0, "")  # its rule says nothing: the setting decides
    assert put(sensor, "$queue/jobs", b"x") == (0, "")
    assert join(sensor, "$queue/jobs") == (1, "")


def test_rule_overrides_the_setting_of_the_server(build: Build) -> None:
    harness = build(CREATION_RULES)
    harness.set_templates(auto_create=False)
    assert put(harness.connect("maker"), "$queue/made", b"x") == (0, "")
    reason, why = put(harness.connect("other"), "$queue/typo", b"x")
    assert reason == 0x90 and "queues.auto_create is false" in why
    harness.change_rules(CREATION_RULES.replace("auto_create = true", "auto_create = false"))
    assert put(harness.connect("maker"), "$queue/again", b"x")[0] == 0x90
