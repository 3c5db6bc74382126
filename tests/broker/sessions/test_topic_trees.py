"""The trees of filters and of retained topics agree with the plain definition of matching."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice.broker.limits import Limits
from sluice.broker.routing.router import Router
from sluice.broker.sessions.retained_messages import LEVEL_BYTES, Match, RetainedMessages
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.session_store import VolatileSessionStore
from sluice.broker.sessions.subscriptions import Subscription, SubscriptionTree
from sluice.broker.turn import Turn
from sluice.metrics import Counters
from sluice.wire.packets import Publish
from sluice.wire.topics import matches, split_share

# Few and short names, so that they collide; empty levels and `$` included.
LEVEL = st.sampled_from([b"a", b"b", b"", b"$s", b"\xc3\xa4"])
TOPICS = st.lists(LEVEL, min_size=1, max_size=4).map(b"/".join).filter(bool)


@st.composite
def plain_filters(draw: st.DrawFn) -> bytes:
    levels = draw(st.lists(st.one_of(LEVEL, st.just(b"+")), min_size=1, max_size=4))
    if draw(st.booleans()):
        levels[-1] = b"#"
    return b"/".join(levels) or b"+"


SHARED = st.builds(
    lambda group, inner: b"$share/%s/%s" % (group, inner),
    st.sampled_from([b"g", b"h"]),
    plain_filters(),
)
FILTERS = st.one_of(plain_filters(), SHARED)
# (whether it is added, which session, which filter); then a topic is looked up, so cached routes
# are tested as well.
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), FILTERS, TOPICS), max_size=40)


def sessions() -> list[Session]:
    limits = Limits()
    turn = Turn(lambda callback: None, lambda: 1.0)
    router = Router(limits, turn, Counters(), VolatileSessionStore())
    return [Session(name, router.session_services) for name in "abc"]


def check_route(
    tree: SubscriptionTree,
    held: dict[tuple[int, bytes], Subscription],
    all_: list[Session],
    topic: bytes,
) -> None:
    route = tree.find_route(topic)
    wanted: dict[int, list[Subscription]] = {}
    shares: dict[tuple[bytes, bytes], set[int]] = {}
    for (who, topic_filter), subscription in held.items():
        group, inner = split_share(topic_filter)
        if not matches(inner, topic):
            continue
        if group:
            shares.setdefault((group, inner), set()).add(who)
        else:
            wanted.setdefault(who, []).append(subscription)
    found = {all_.index(target.session): target for target in route.recipients}
    assert found.keys() == wanted.keys()
    assert len(route.recipients) == len(wanted)
    for who, target in found.items():
        assert target.qos == max(one.qos for one in wanted[who])
    reported = {
        (share.share_name, share.topic_filter): {
            all_.index(member.session) for member in share.members
        }
        for share in route.shares
    }
    assert reported == shares
    assert len(route.shares) == len(shares)


@given(STEPS, st.lists(TOPICS, max_size=10))
def test_filter_tree_agrees_with_the_definition_of_matching(
    steps: list[tuple[bool, int, bytes, bytes]], topics: list[bytes]
) -> None:
    tree, all_ = SubscriptionTree(), sessions()
    held: dict[tuple[int, bytes], Subscription] = {}
    for add, who, topic_filter, topic in steps:
        key = (who, topic_filter)
        if add:
            subscription = Subscription(all_[who], topic_filter, len(held) % 3)
            assert tree.add(subscription) is (key not in held)
            held[key] = subscription
        else:
            assert tree.remove(all_[who], topic_filter) is (key in held)
            held.pop(key, None)
        check_route(tree, held, all_, topic)
        assert tree.count == len(held)
        assert tree.shared_count == sum(1 for _, one in held if one.startswith(b"$share/"))
    for topic in topics:
        check_route(tree, held, all_, topic)
    for who, topic_filter in held:
        assert tree.remove(all_[who], topic_filter)
    assert levels(tree) == 1
    assert (tree.count, tree.shared_count) == (0, 0)
    for topic in topics:
        assert not tree.find_route(topic).recipients and not tree.find_route(topic).shares


def levels(tree: Any) -> int:
    """Return the number of levels of a tree, including the root."""
    found, rest = 0, [tree._root]
    while rest:
        found += 1
        rest.extend(rest.pop().children.values())
    return found


def topics_of(messages: Iterable[Publish]) -> list[bytes]:
    return sorted(message.topic for message in messages)


@given(
    st.lists(st.tuples(TOPICS, st.sampled_from([b"", b"x", b"yy"])), max_size=40),
    st.lists(plain_filters(), max_size=10),
)
def test_retained_tree_agrees_with_the_definition_of_matching(
    puts: list[tuple[bytes, bytes]], filters: list[bytes]
) -> None:
    stored, held = RetainedMessages(1000, 1_000_000), dict[bytes, bytes]()
    for topic, payload in puts:
        assert stored.put(Publish(topic, payload, 0, True), False)
        if payload:
            held[topic] = payload
        else:
            held.pop(topic, None)
        assert stored.count == len(held)
        assert stored.payload_bytes == sum(map(len, held.values()))
        assert stored.total_bytes == LEVEL_BYTES * (levels(stored) - 1) + sum(
            len(name) + len(body) for name, body in held.items()
        )
    for topic_filter in [*filters, *held]:
        found = stored.find_matching(topic_filter, 1.0)
        assert topics_of(found) == sorted(topic for topic in held if matches(topic_filter, topic))
        assert all(held[message.topic] == message.payload for message in found)
    for topic in held:
        stored.put(Publish(topic, b"", 0, True), False)
    assert levels(stored) == 1
    assert (stored.count, stored.payload_bytes, stored.total_bytes) == (0, 0, 0)


@given(st.lists(st.tuples(TOPICS, st.integers(0, 3)), max_size=30), plain_filters())
def test_expired_retained_topics_are_deleted_when_visited(
    puts: list[tuple[bytes, int]], topic_filter: bytes
) -> None:
    stored, held = RetainedMessages(1000, 1_000_000), dict[bytes, int]()
    for topic, expires in puts:
        message = Publish(topic, b"x", 0, True)
        message.expires_at = float(expires)
        stored.put(message, False)
        held[topic] = expires
    live = {topic for topic, expires in held.items() if expires == 0 or expires > 2}
    assert topics_of(stored.find_matching(topic_filter, 2.0)) == sorted(
        topic for topic in live if matches(topic_filter, topic)
    )
    gone = sum(1 for topic in held if topic not in live and matches(topic_filter, topic))
    assert stored.count == len(held) - gone
    assert stored.delete_expired(2.0) == len(held) - gone - len(live)
    assert stored.count == len(live)
    assert stored.total_bytes == LEVEL_BYTES * (levels(stored) - 1) + sum(
        len(topic) + 1 for topic in live
    )


# Between two steps of a walk: (topic, payload), stored or deleted.
CHANGES = st.lists(st.tuples(TOPICS, st.sampled_from([b"", b"new"])), max_size=3)


@given(
    st.lists(TOPICS, max_size=30, unique=True),
    st.lists(plain_filters(), min_size=1, max_size=6, unique=True),
    st.lists(CHANGES, max_size=60),
)
def test_walk_returns_each_remaining_topic_once_and_no_newer_one(
    topics: list[bytes], filters: list[bytes], changes: list[list[tuple[bytes, bytes]]]
) -> None:
    stored = RetainedMessages(1000, 1_000_000)
    for topic in topics:
        stored.put(Publish(topic, b"old", 0, True), False)
    stored.find_matching(b"#", 1.0)  # creates listings before some of the changes
    walk = stored.start_walk()
    for topic_filter in filters:
        walk.add(topic_filter)
    changed: set[bytes] = set()
    got: list[tuple[bytes, bytes]] = []
    found: list[Match] = []
    over = False
    while not over:
        found.clear()
        over = walk.advance(1, found)
        for topic, payload in changes.pop() if changes else []:
            stored.put(Publish(topic, payload, 0, True), False)
            changed.add(topic)
        for match in found:
            message = stored.get_current(match, 1.0)
            if message is not None:
                assert message.payload == b"old"
                got.append((match.walk_filter.topic_filter, message.topic))
    assert len(got) == len(set(got))
    stayed = {
        (f, topic)
        for f in filters
        for topic in topics
        if topic not in changed and matches(f, topic)
    }
    assert stayed <= set(got)
    assert all(topic in topics and matches(f, topic) for f, topic in got)


def test_route_cache_is_bounded() -> None:
    tree, [one, *_] = SubscriptionTree(), sessions()
    tree.add(Subscription(one, b"#", 0))
    for nth in range(70_000):
        tree.find_route(b"%d" % nth)
    tree.find_route(b"x" * 300)
    assert 0 < len(tree._routes) <= 65_536
    assert b"x" * 300 not in tree._routes


def test_retained_messages_of_clients_are_counted_without_those_of_the_server() -> None:
    stored = RetainedMessages(limit=10, byte_limit=1_000_000)
    stored.put(Publish(b"$SYS/broker/uptime", b"1", 0, True), True)
    stored.put(Publish(b"news", b"1", 0, True), False)
    assert stored.count_of_clients() == 1
    stored.put(Publish(b"$SYS/broker/uptime", b"", 0, True), True)
    stored.put(Publish(b"news", b"", 0, True), False)
    assert stored.count_of_clients() == 0
