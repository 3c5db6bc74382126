"""A client id is no proof: what was given to a client of one user is not settled or read by a client of another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.access.acl_file import read_rules
from sluice.admin.queries.message_lookup import holder_of
from sluice.broker.acl.access import Caller, Reply, Verdict
from sluice.broker.acl.acl import Book
from sluice.wire.packets import V5, V311, Connect, Publish
from sluice.wire.reasons import BAD_USER_NAME_OR_PASSWORD
from tests.access.kit import PASSWORD, GuardedHouse, make_user
from tests.broker.kit import Client
from tests.broker.namespaces.kit import facts, join, put, settle, take

Build = Callable[..., GuardedHouse]

RULES = """
[[rule]]
allow = ["connect", "queue-publish"]

[[rule]]
allow = ["queue-settle"]
users = ["alice", "mallory"]

[[rule]]
allow = ["queue-consume"]
users = ["alice"]
"""
VERBS = ["ack", "nack", "reject", "extend", "release"]


@pytest.fixture
def build(tmp_path: Path) -> Build:
    def make(rules: str | None = RULES) -> GuardedHouse:
        return GuardedHouse(tmp_path, rules, *(make_user(name) for name in ("alice", "mallory")))

    return make


def enter(house: GuardedHouse, user: str, client: str = "alice-1", version: int = V5) -> Client:
    connected = house.connect(client, version, username=user, password=PASSWORD.encode())
    assert connected.connack.reason == 0
    return connected


def restart(house: GuardedHouse) -> None:
    house.restart()
    house.broker.access = house.gate


def failed_delivery(house: GuardedHouse) -> Publish:
    """A message that alice has received and refused for a minute, before her session ended."""
    alice = enter(house, "alice")
    join(alice, "$queue/tasks")
    put(alice, "$queue/tasks", b"x")
    (message,) = take(alice)
    assert settle(alice, "nack", message, delay="60s")[0] == 0
    alice.disconnect()
    return message


@pytest.mark.parametrize("verb", VERBS)
def test_another_user_with_the_same_client_id_cannot_settle_a_delivery(build: Build, verb: str) -> None:
    house = build()
    message = failed_delivery(house)
    mallory = enter(house, "mallory")
    assert settle(mallory, verb, message, consumer_group="alice")[0] == 0x87
    assert (house.depth("tasks"), house.depth("dlq/tasks")) == (1, 0)


@pytest.mark.parametrize("verb", ["ack", "reject"])
def test_another_user_cannot_settle_by_a_topic_of_mqtt_3_either(build: Build, verb: str) -> None:
    house = build()
    message = failed_delivery(house)
    mallory = enter(house, "mallory", version=V311)
    put(mallory, f"$queue/tasks/${verb}/{facts(message)['message-id']}")
    assert (house.depth("tasks"), house.depth("dlq/tasks")) == (1, 0)


def test_another_user_that_consumes_with_the_same_client_id_cannot_settle_it_either(build: Build) -> None:
    house = build(None)  # every user may consume
    message = failed_delivery(house)
    mallory = enter(house, "mallory")
    join(mallory, "$queue/tasks")
    assert settle(mallory, "ack", message)[0] == 0x83
    assert house.depth("tasks") == 1


def test_a_user_that_returns_with_its_client_id_settles_late_without_a_token(build: Build) -> None:
    house = build()
    message = failed_delivery(house)
    alice = enter(house, "alice")
    assert settle(alice, "ack", message) == (0, "")
    assert house.depth("tasks") == 0


def test_after_a_restart_a_token_counts_for_the_user_that_received_it(build: Build) -> None:
    house = build()
    message = failed_delivery(house)
    token = facts(message)["delivery-token"]
    restart(house)
    mallory = enter(house, "mallory")
    assert settle(mallory, "ack", message, consumer_group="alice", delivery_token=token)[0] == 0x83
    assert house.depth("tasks") == 1
    mallory.disconnect()
    assert settle(enter(house, "alice"), "ack", message, delivery_token=token) == (0, "")
    assert house.depth("tasks") == 0


def test_a_persistent_session_settles_for_its_user_after_a_restart(build: Build) -> None:
    house = build()
    secret = PASSWORD.encode()
    alice = house.connect_lasting("alice-1", username="alice", password=secret)
    join(alice, "$queue/tasks")
    restart(house)
    alice = house.connect_lasting("alice-1", username="alice", password=secret)
    put(alice, "$queue/tasks", b"x")
    (message,) = take(alice)
    assert settle(alice, "ack", message) == (0, "")


def test_a_session_that_gets_a_user_settles_what_it_receives_from_then_on(build: Build) -> None:
    """It was made without a user, and its client has one since the restart."""
    house = build(None)
    join(house.connect_lasting("alice-1"), "$queue/tasks")
    restart(house)
    alice = house.connect_lasting("alice-1", username="alice", password=PASSWORD.encode())
    put(alice, "$queue/tasks", b"x")
    put(alice, "$queue/tasks", b"y")
    first, second = take(alice)
    assert settle(alice, "ack", first) == (0, "")
    restart(house)
    alice = house.connect_lasting("alice-1", username="alice", password=PASSWORD.encode())
    token = facts(second)["delivery-token"]
    assert settle(alice, "ack", second, delivery_token=token) == (0, "")


def test_a_holder_is_shown_by_its_client_id(build: Build) -> None:
    house = build()
    failed_delivery(house)
    cursors = house.queue("tasks").groups["alice"].cursors
    (lease,) = [one for cursor in cursors for one in cursor.leases.values()]
    assert holder_of(lease) == "alice-1"
    assert {step.consumer for step in lease.history or []} == {"alice-1"}


# ---- client ids of users

OPEN = """
[[rule]]
allow = ["connect"]

[[rule]]
allow = ["publish"]
topics = ["$ECQ/w/#"]
"""
BOUND = OPEN.replace('["connect"]', '["connect"]\nclients = ["%u", "%u:*"]')
SHARED = OPEN.replace('["connect"]', '["connect"]\nusers = ["alice"]\nclients = ["car-*"]')
UNBOUND = "exclusive queue not bound to a user"


def test_a_rule_binds_the_owner_of_an_exclusive_queue_to_its_user(build: Build) -> None:
    house = build(BOUND)
    alice = enter(house, "alice", "alice:car")
    put(alice, "$ECQ/w/alice:car/speed", b"80")
    assert join(alice, "$ECQ/alice:car/#")[0] == 1
    alice.disconnect()
    secret = PASSWORD.encode()
    mallory = house.connect("alice:car", username="mallory", password=secret)
    assert mallory.connack.reason == 0x87
    assert house.connect("alice:car").connack.reason == 0x87
    assert house.connect("mallory", username="mallory", password=secret).connack.reason == 0
    assert UNBOUND not in [event for event, _ in house.log]


def test_a_user_name_with_a_star_is_no_pattern_for_client_ids() -> None:
    (rule,) = read_rules('[[rule]]\nallow = ["connect"]\nclients = ["%u:*"]')
    assert rule.is_for("*", "*:1") and not rule.is_for("*", "alice:1")
    assert not rule.is_for("", "%u:1") and not rule.is_for("", ":1")


def test_an_owner_whose_client_id_other_users_can_take_is_logged_once(build: Build) -> None:
    house = build(OPEN)
    for client in ("car-7", "car-8"):
        join(enter(house, "alice", client), f"$ECQ/{client}/#")
    (told,) = [told for event, told in house.log if event == UNBOUND]
    assert (told["client"], told["user"]) == ("car-7", "alice")


def test_an_owner_whose_client_id_a_rule_gives_to_its_user_is_not_logged(build: Build) -> None:
    house = build(SHARED)
    assert join(enter(house, "alice", "car-7"), "$ECQ/car-7/#")[0] == 1
    assert UNBOUND not in [event for event, _ in house.log]


@pytest.mark.parametrize(
    ("rules", "bound"),
    [
        ('allow = ["connect"]', False),
        ('allow = ["connect"]\nclients = ["car-*"]', False),
        ('allow = ["connect"]\nusers = ["a*"]', False),
        ('allow = ["connect"]\nusers = ["alice"]', True),
        ('allow = ["connect"]\nclients = ["%u", "%u-*"]', True),
        ('deny = ["connect"]\nclients = ["car-*"]\n[[rule]]\nallow = ["connect"]', True),
        ('deny = ["connect"]\nusers = ["mallory"]\n[[rule]]\nallow = ["connect"]', False),
        ('allow = ["publish"]', True),
    ],
)
def test_rules_bind_a_client_id_that_they_let_no_other_user_connect_with(rules: str, bound: bool) -> None:
    assert Book(read_rules("[[rule]]\n" + rules)).binds("alice", "car-7") is bound


class NamedBy:
    """Access of a certificate or a JWT, which can name a user as no packet can."""

    def __init__(self, user: str) -> None:
        self._user = user

    def admit(self, connect: Connect, caller: Caller, reply: Reply) -> None:
        reply(Verdict(user=self._user))


@pytest.mark.parametrize("user", ["a\0b", "a\nb", "\ud800"])
def test_a_user_name_that_no_packet_can_carry_is_refused(build: Build, user: str) -> None:
    house = build()
    house.broker.access = NamedBy(user)
    assert house.connect("c").connack.reason == BAD_USER_NAME_OR_PASSWORD
