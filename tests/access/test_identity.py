"""A client id is no proof of identity.

A delivery to a client of one user cannot be settled or read by a client of another user.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.access.acl_file import read_rules
from sluice.broker.acl import AccessControl, AccessControlList, AuthCallback, AuthResult, PeerInfo
from sluice.wire.packets import V5, V311, Connect, Publish
from sluice.wire.reasons import BAD_USER_NAME_OR_PASSWORD
from tests.access.kit import PASSWORD, AccessHarness, make_user
from tests.broker.namespaces.kit import delivery_properties, join, put, settle, take
from tests.broker.peers import Client

Build = Callable[..., AccessHarness]

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
    def make(rules: str | None = RULES) -> AccessHarness:
        return AccessHarness(tmp_path, rules, *(make_user(name) for name in ("alice", "mallory")))

    return make


def connect_as(
    harness: AccessHarness, user: str, client: str = "alice-1", version: int = V5
) -> Client:
    connected = harness.connect(client, version, username=user, password=PASSWORD.encode())
    assert connected.connack.reason == 0
    return connected


def restart(harness: AccessHarness) -> None:
    harness.restart()
    harness.broker.access = harness.authenticator


def failed_delivery(harness: AccessHarness) -> Publish:
    """Return a message that alice received and nacked for a minute, before her session ended."""
    alice = connect_as(harness, "alice")
    join(alice, "$queue/tasks")
    put(alice, "$queue/tasks", b"x")
    (message,) = take(alice)
    assert settle(alice, "nack", message, delay="60s")[0] == 0
    alice.disconnect()
    return message


@pytest.mark.parametrize("verb", VERBS)
def test_another_user_with_the_same_client_id_cannot_settle_a_delivery(
    build: Build, verb: str
) -> None:
    harness = build()
    message = failed_delivery(harness)
    mallory = connect_as(harness, "mallory")
    assert settle(mallory, verb, message, consumer_group="alice")[0] == 0x87
    assert (harness.depth("tasks"), harness.depth("dlq/tasks")) == (1, 0)


@pytest.mark.parametrize("verb", ["ack", "reject"])
def test_another_user_cannot_settle_by_an_mqtt_3_topic(build: Build, verb: str) -> None:
    harness = build()
    message = failed_delivery(harness)
    mallory = connect_as(harness, "mallory", version=V311)
    put(mallory, f"$queue/tasks/${verb}/{delivery_properties(message)['message-id']}")
    assert (harness.depth("tasks"), harness.depth("dlq/tasks")) == (1, 0)


def test_another_user_that_consumes_with_the_same_client_id_cannot_settle_the_delivery(
    build: Build,
) -> None:
    harness = build(None)  # every user may consume
    message = failed_delivery(harness)
    mallory = connect_as(harness, "mallory")
    join(mallory, "$queue/tasks")
    assert settle(mallory, "ack", message)[0] == 0x83
    assert harness.depth("tasks") == 1


def test_user_that_returns_with_its_client_id_settles_late_without_token(build: Build) -> None:
    harness = build()
    message = failed_delivery(harness)
    alice = connect_as(harness, "alice")
    assert settle(alice, "ack", message) == (0, "")
    assert harness.depth("tasks") == 0


def test_after_restart_token_is_valid_for_the_user_that_received_it(build: Build) -> None:
    harness = build()
    message = failed_delivery(harness)
    token = delivery_properties(message)["delivery-token"]
    restart(harness)
    mallory = connect_as(harness, "mallory")
    assert settle(mallory, "ack", message, consumer_group="alice", delivery_token=token)[0] == 0x83
    assert harness.depth("tasks") == 1
    mallory.disconnect()
    assert settle(connect_as(harness, "alice"), "ack", message, delivery_token=token) == (0, "")
    assert harness.depth("tasks") == 0


def test_persistent_session_settles_for_its_user_after_restart(build: Build) -> None:
    harness = build()
    secret = PASSWORD.encode()
    alice = harness.connect_persistent("alice-1", username="alice", password=secret)
    join(alice, "$queue/tasks")
    restart(harness)
    alice = harness.connect_persistent("alice-1", username="alice", password=secret)
    put(alice, "$queue/tasks", b"x")
    (message,) = take(alice)
    assert settle(alice, "ack", message) == (0, "")


def test_session_that_gets_a_user_settles_later_deliveries_as_that_user(build: Build) -> None:
    """It was created without a user, and its client has one since the restart."""
    harness = build(None)
    join(harness.connect_persistent("alice-1"), "$queue/tasks")
    restart(harness)
    alice = harness.connect_persistent("alice-1", username="alice", password=PASSWORD.encode())
    put(alice, "$queue/tasks", b"x")
    put(alice, "$queue/tasks", b"y")
    first, second = take(alice)
    assert settle(alice, "ack", first) == (0, "")
    restart(harness)
    alice = harness.connect_persistent("alice-1", username="alice", password=PASSWORD.encode())
    token = delivery_properties(second)["delivery-token"]
    assert settle(alice, "ack", second, delivery_token=token) == (0, "")


def test_lease_holder_is_shown_by_client_id(build: Build) -> None:
    harness = build()
    failed_delivery(harness)
    cursors = harness.queue("tasks").groups["alice"].cursors
    (lease,) = [one for cursor in cursors for one in cursor.leases.values()]
    assert lease.holder_client_id() == "alice-1"
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


def test_rule_binds_owner_of_exclusive_queue_to_its_user(build: Build) -> None:
    harness = build(BOUND)
    alice = connect_as(harness, "alice", "alice:car")
    put(alice, "$ECQ/w/alice:car/speed", b"80")
    assert join(alice, "$ECQ/alice:car/#")[0] == 1
    alice.disconnect()
    secret = PASSWORD.encode()
    mallory = harness.connect("alice:car", username="mallory", password=secret)
    assert mallory.connack.reason == 0x87
    assert harness.connect("alice:car").connack.reason == 0x87
    assert harness.connect("mallory", username="mallory", password=secret).connack.reason == 0
    assert UNBOUND not in [event for event, _ in harness.log]


def test_star_in_user_name_is_not_a_pattern_for_client_ids() -> None:
    (rule,) = read_rules('[[rule]]\nallow = ["connect"]\nclients = ["%u:*"]')
    assert rule.applies_to("*", "*:1") and not rule.applies_to("*", "alice:1")
    assert not rule.applies_to("", "%u:1") and not rule.applies_to("", ":1")


def test_exclusive_queue_owner_with_unprotected_client_id_is_logged_once(build: Build) -> None:
    harness = build(OPEN)
    for client in ("car-7", "car-8"):
        join(connect_as(harness, "alice", client), f"$ECQ/{client}/#")
    (reported,) = [reported for event, reported in harness.log if event == UNBOUND]
    assert (reported["client"], reported["user"]) == ("car-7", "alice")


def test_exclusive_queue_owner_with_client_id_bound_by_rule_is_not_logged(build: Build) -> None:
    harness = build(SHARED)
    assert join(connect_as(harness, "alice", "car-7"), "$ECQ/car-7/#")[0] == 1
    assert UNBOUND not in [event for event, _ in harness.log]


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
def test_rules_bind_client_id_that_no_other_user_may_connect_with(rules: str, bound: bool) -> None:
    assert (
        AccessControlList(read_rules("[[rule]]\n" + rules)).is_bound_to_user("alice", "car-7")
        is bound
    )


class FixedUser(AccessControl):
    """Access by a certificate or a JWT, which can name a user as no packet can."""

    def __init__(self, user: str) -> None:
        self._user = user

    def authenticate(self, connect: Connect, peer: PeerInfo, on_result: AuthCallback) -> None:
        on_result(AuthResult(user=self._user))


@pytest.mark.parametrize("user", ["a\0b", "a\nb", "\ud800"])
def test_user_name_that_no_packet_can_carry_is_refused(build: Build, user: str) -> None:
    harness = build()
    harness.broker.access = FixedUser(user)
    assert harness.connect("c").connack.reason == BAD_USER_NAME_OR_PASSWORD
