"""The trees of filters and of retained topics agree with the plain definition of matching, whatever is put in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sluice.broker.limits import Limits
from sluice.broker.sessions.retained import LEVEL_BYTES, Match, Retained
from sluice.broker.router import Router
from sluice.broker.sessions.session import Session
from sluice.broker.sessions.subscriptions import Subscription, Subscriptions
from sluice.broker.turn import Turn
from sluice.metrics import Counters
from sluice.wire.packets import Publish
from sluice.wire.topics import matches, split_share

# Few and short names, so that they meet; empty levels and `$` included.
LEVEL = st.sampled_from([b"a", b"b", b"", b"$s", b"\xc3\xa4"])
TOPICS = st.lists(LEVEL, min_size=1, max_size=4).map(b"/".join).filter(bool)


@st.composite
def plain_filters(draw: st.DrawFn) -> bytes:
    levels = draw(st.lists(st.one_of(LEVEL, st.just(b"+")), min_size=1, max_size=4))
    if draw(st.booleans()):
        levels[-1] = b"#"
    return b"/".join(levels) or b"+"


SHARED = st.builds(
    lambda group, inner: b"$share/%s/%s" % (group, inner), st.sampled_from([b"g", b"h"]), plain_filters()
)
FILTERS = st.one_of(plain_filters(), SHARED)
# (whether it is added, which session, which filter); then a topic is looked up, so kept routes are tried as well.
STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 2), FILTERS, TOPICS), max_size=40)


def sessions() -> list[Session]:
    limits = Limits()
    router = Router(limits, Turn(lambda callback: None, lambda: 1.0), Counters())
    return [Session(name, router) for name in "abc"]


def check_route(
    tree: Subscriptions, held: dict[tuple[int, bytes], Subscription], all_: list[Session], topic: bytes
) -> None:
    route = tree.route(topic)
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
    found = {all_.index(target.session): target for target in route.targets}
    assert found.keys() == wanted.keys()
    assert len(route.targets) == len(wanted)
    for who, target in found.items():
        assert target.qos == max(one.qos for one in wanted[who])
    told = {
        (share.group, share.topic_filter): {all_.index(member.session) for member in share.members}
        for share in route.shares
    }
    assert told == shares
    assert len(route.shares) == len(shares)


@given(STEPS, st.lists(TOPICS, max_size=10))
def test_the_tree_of_filters_agrees_with_the_definition(
    steps: list[tuple[bool, int, bytes, bytes]], topics: list[bytes]
) -> None:
    tree, all_ = Subscriptions(), sessions()
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
        assert not tree.route(topic).targets and not tree.route(topic).shares


def levels(tree: Any) -> int:
    """How many levels a tree holds, the root included."""
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
def test_the_tree_of_retained_topics_agrees_with_the_definition(
    puts: list[tuple[bytes, bytes]], filters: list[bytes]
) -> None:
    kept, held = Retained(1000, 1_000_000), dict[bytes, bytes]()
    for topic, payload in puts:
        assert kept.put(Publish(topic, payload, 0, True), False)
        if payload:
            held[topic] = payload
        else:
            held.pop(topic, None)
        assert kept.count == len(held)
        assert kept.bytes == sum(map(len, held.values()))
        assert kept.held_bytes == LEVEL_BYTES * (levels(kept) - 1) + sum(
            len(name) + len(body) for name, body in held.items()
        )
    for topic_filter in [*filters, *held]:
        found = kept.matching(topic_filter, 1.0)
        assert topics_of(found) == sorted(topic for topic in held if matches(topic_filter, topic))
        assert all(held[message.topic] == message.payload for message in found)
    for topic in held:
        kept.put(Publish(topic, b"", 0, True), False)
    assert levels(kept) == 1
    assert (kept.count, kept.bytes, kept.held_bytes) == (0, 0, 0)


@given(st.lists(st.tuples(TOPICS, st.integers(0, 3)), max_size=30), plain_filters())
def test_expired_retained_topics_are_forgotten_when_met(
    puts: list[tuple[bytes, int]], topic_filter: bytes
) -> None:
    kept, held = Retained(1000, 1_000_000), dict[bytes, int]()
    for topic, expires in puts:
        message = Publish(topic, b"x", 0, True)
        message.expires_at = float(expires)
        kept.put(message, False)
        held[topic] = expires
    living = {topic for topic, expires in held.items() if expires == 0 or expires > 2}
    assert topics_of(kept.matching(topic_filter, 2.0)) == sorted(
        topic for topic in living if matches(topic_filter, topic)
    )
    gone = sum(1 for topic in held if topic not in living and matches(topic_filter, topic))
    assert kept.count == len(held) - gone
    assert kept.sweep(2.0) == len(held) - gone - len(living)
    assert kept.count == len(living)
    assert kept.held_bytes == LEVEL_BYTES * (levels(kept) - 1) + sum(len(topic) + 1 for topic in living)


# Between two steps of a walk: (topic, payload), stored or deleted.
CHANGES = st.lists(st.tuples(TOPICS, st.sampled_from([b"", b"new"])), max_size=3)


@given(
    st.lists(TOPICS, max_size=30, unique=True),
    st.lists(plain_filters(), min_size=1, max_size=6, unique=True),
    st.lists(CHANGES, max_size=60),
)
def test_a_walk_finds_what_stays_exactly_once_and_nothing_that_is_newer(
    topics: list[bytes], filters: list[bytes], changes: list[list[tuple[bytes, bytes]]]
) -> None:
    kept = Retained(1000, 1_000_000)
    for topic in topics:
        kept.put(Publish(topic, b"old", 0, True), False)
    kept.matching(b"#", 1.0)  # listings are there before some of the changes
    walk = kept.walk()
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
            kept.put(Publish(topic, payload, 0, True), False)
            changed.add(topic)
        for match in found:
            message = kept.current(match, 1.0)
            if message is not None:
                assert message.payload == b"old"
                got.append((match.wanted.topic_filter, message.topic))
    assert len(got) == len(set(got))
    stayed = {(f, topic) for f in filters for topic in topics if topic not in changed and matches(f, topic)}
    assert stayed <= set(got)
    assert all(topic in topics and matches(f, topic) for f, topic in got)


def test_routes_are_not_kept_for_more_topics_than_agreed() -> None:
    tree, [one, *_] = Subscriptions(), sessions()
    tree.add(Subscription(one, b"#", 0))
    for nth in range(70_000):
        tree.route(b"%d" % nth)
    tree.route(b"x" * 300)
    assert 0 < len(tree._routes) <= 65_536
    assert b"x" * 300 not in tree._routes
