"""What a client can do with its own delivery tokens, with those of others, and with forged ones."""

from __future__ import annotations

import json

import pytest

from sluice.wire.packets import V311, Publish
from tests.broker.kit import BrokerHarness
from tests.broker.namespaces.kit import delivery_properties, join, payloads, put, settle, take
from tests.broker.peers import Client

VERBS = ["ack", "nack", "reject", "extend", "release"]


def receive_one(harness: BrokerHarness, client: str = "worker-1", **options: str) -> Publish:
    """Return a message that a client has received."""
    worker = harness.connect(client)
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x", options=options)
    (message,) = take(worker)
    return message


def token_of(message: Publish) -> str:
    return delivery_properties(message)["delivery-token"]


@pytest.mark.parametrize("own", ["", "mine"])
@pytest.mark.parametrize("verb", VERBS)
def test_settlement_after_a_restart_counts_by_the_token_of_its_client(
    harness: BrokerHarness, verb: str, own: str
) -> None:
    message = receive_one(harness, **({"message-id": own} if own else {}))
    harness.restart()
    worker = harness.connect("worker-1")
    assert settle(worker, verb, message, delivery_token=token_of(message)) == (0, "")
    queue = harness.queue("jobs")
    assert queue.depth == (0 if verb in ("ack", "reject") else 1)
    assert harness.depth("dlq/jobs") == (verb == "reject")
    assert queue.groups["worker"].nacked == (verb == "nack")


@pytest.mark.parametrize("own", ["", "mine"])
@pytest.mark.parametrize("verb", VERBS)
def test_group_member_cannot_settle_deliveries_of_others_after_a_restart(
    harness: BrokerHarness, verb: str, own: str
) -> None:
    """Neither with the token of the previous holder, nor with its own token, nor without any."""
    message = receive_one(harness, **({"message-id": own} if own else {}))
    other = harness.connect("worker-2")
    join(other, "$queue/jobs", prefetch=1)
    mine: list[Publish] = []
    while not mine:
        put(other, "$queue/jobs", b"y")
        mine = take(other)
    harness.restart()
    other = harness.connect("worker-2")
    join(other, "$queue/jobs", prefetch=0)
    depth = harness.depth("jobs")
    place = "." + token_of(message).partition(".")[2] if own else ""
    counter = token_of(message).partition("-")[0]
    tag = token_of(mine[0]).partition("-")[2]
    for token in (
        token_of(message),
        token_of(mine[0]) + place,
        f"{counter}-{tag}{place}",
        f"1-{tag}{place}",
    ):
        reason, why = settle(other, verb, message, delivery_token=token)
        assert (reason, "client id that received it" in why) == (0x83, True), token
    assert settle(other, verb, message)[0] == (0x10 if own else 0x83)
    assert (harness.depth("jobs"), harness.depth("dlq/jobs")) == (depth, 0)
    assert harness.queue("jobs").groups["worker"].nacked == 0


def test_mqtt_5_client_needs_its_token_after_a_restart(harness: BrokerHarness) -> None:
    message = receive_one(harness)
    harness.restart()
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs", prefetch=0)
    reason, why = settle(worker, "ack", message)
    assert (reason, "Send its delivery-token" in why) == (0x83, True)
    names = json.dumps([delivery_properties(message)["message-id"]]).encode()
    assert put(worker, "$queue/jobs/$ack", names)[0] == 0x83
    assert harness.depth("jobs") == 1
    assert settle(worker, "ack", message, delivery_token=token_of(message)) == (0, "")
    assert harness.depth("jobs") == 0


def receive_id(harness: BrokerHarness, client: Client) -> str:
    (message,) = client.messages()
    return message.topic.decode().partition("/$msg/")[2]


@pytest.mark.parametrize("verb", ["ack", "reject"])
def test_mqtt_3_client_settles_by_id_after_a_restart_too(harness: BrokerHarness, verb: str) -> None:
    worker = harness.connect("old", version=V311)
    join(worker, "$queue/jobs/$group/g", version=V311)
    put(harness.connect("maker"), "$queue/jobs", b"x")
    name = receive_id(harness, worker)
    harness.restart()
    other = harness.connect("other", version=V311)
    put(other, f"$queue/jobs/${verb}/{name}")
    assert harness.depth("jobs") == 1, "it is no member of the group"
    worker = harness.connect("old", version=V311)
    harness.engine.queues["jobs"].rules.prefetch = 0
    join(worker, "$queue/jobs/$group/g", version=V311)
    put(worker, f"$queue/jobs/${verb}/{name}")
    assert harness.depth("jobs") == 0


def test_wrong_tokens_are_counted_per_client_and_logged_once_a_second(
    harness: BrokerHarness,
) -> None:
    message = receive_one(harness)
    thief, other = harness.connect("thief"), harness.connect("other")
    for _ in range(20):
        assert (
            settle(thief, "ack", message, consumer_group="worker", delivery_token="1-2")[0] == 0x83
        )
    settle(other, "ack", message, consumer_group="worker", delivery_token="1-2")
    sessions = harness.broker.registry.sessions
    assert [sessions[name].wrong_tokens for name in ("thief", "other", "worker-1")] == [20, 1, 0]
    assert harness.counters.wrong_tokens == 21
    events = [fields for event, fields in harness.log if event == "wrong delivery token"]
    assert len(events) == 1 and (events[0]["client"], events[0]["group"]) == ("thief", "worker")
    harness.advance(2)
    settle(thief, "ack", message, consumer_group="worker", delivery_token="1-2")
    events = [fields for event, fields in harness.log if event == "wrong delivery token"]
    assert [fields["count"] for fields in events] == [1, 21]


@pytest.mark.parametrize("run", ["present", "earlier"])
def test_packet_with_a_wrong_token_for_many_deliveries_is_counted_once(
    harness: BrokerHarness, run: str
) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    for _ in range(50):
        put(worker, "$queue/jobs", b"x")
    messages = take(worker)
    names = ["gone-1", *(delivery_properties(message)["message-id"] for message in messages)]
    token = token_of(messages[0])
    token = token[:-1] + ("0" if token[-1] != "0" else "1")
    if run == "earlier":
        harness.restart()
    thief = harness.connect("thief")
    options = {"consumer-group": "worker", "delivery-token": token}
    for nth in (1, 2):
        reason, why = put(thief, "$queue/jobs/$ack", json.dumps(names).encode(), options=options)
        assert (reason != 0, "51 of 51" in why) == (True, True)
        assert (harness.counters.wrong_tokens, harness.depth("jobs")) == (nth, 50)
    assert len([event for event, _ in harness.log if event == "wrong delivery token"]) == 1


def test_late_settlement_is_not_counted_as_a_wrong_token(harness: BrokerHarness) -> None:
    message = receive_one(harness)
    second = harness.connect("worker-2")
    join(second, "$queue/jobs")
    harness.advance(40)
    sessions = harness.broker.registry.sessions
    first = harness.connect("worker-1")
    reason, why = settle(first, "nack", message, delivery_token=token_of(message))
    assert (reason, "no longer leased" in why) == (0x83, True)
    assert (harness.counters.wrong_tokens, sessions["worker-1"].wrong_tokens) == (0, 0)
    assert payloads(take(second)) == [b"x"]


def test_late_settlement_with_another_clients_token_is_not_counted_as_a_wrong_token(
    harness: BrokerHarness,
) -> None:
    message = receive_one(harness)
    delegate = harness.connect("delegate")
    second = harness.connect("worker-2")
    join(second, "$queue/jobs")
    options = {"consumer_group": "worker", "delivery_token": token_of(message)}
    harness.advance(40)
    (again,) = take(second)
    for verb in VERBS:
        reason, why = settle(delegate, verb, message, **options)
        assert (reason, "no longer leased" in why) == (0x83, True)
    assert (harness.counters.wrong_tokens, harness.depth("jobs")) == (0, 1)
    assert not [event for event, _ in harness.log if event == "wrong delivery token"]
    current = token_of(again)
    guess = current[:-1] + ("0" if current[-1] != "0" else "1")
    reason, why = settle(delegate, "ack", message, consumer_group="worker", delivery_token=guess)
    assert (reason, "unchanged" in why, harness.counters.wrong_tokens) == (0x83, True, 1)
    assert settle(delegate, "ack", message, consumer_group="worker", delivery_token=current) == (
        0,
        "",
    )


def test_delegate_that_settles_a_released_delivery_is_not_counted_as_a_wrong_token(
    harness: BrokerHarness,
) -> None:
    worker = harness.connect("worker-1")
    join(worker, "$queue/jobs")
    put(worker, "$queue/jobs", b"x")
    (message,) = take(worker)
    join(worker, "$queue/jobs", prefetch=0)
    delegate = harness.connect("delegate")
    options = {"consumer_group": "worker", "delivery_token": token_of(message)}
    assert settle(delegate, "release", message, **options) == (0, "")
    assert settle(delegate, "ack", message, **options)[0] != 0
    assert (harness.counters.wrong_tokens, harness.depth("jobs")) == (0, 1)
