"""Access rules: what they mean, and that no filter bypasses them."""

from __future__ import annotations

import itertools
import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.access.acl_file import read_rules
from sluice.access.explanation import explain_access
from sluice.broker.acl import (
    AccessControlList,
    ClientPattern,
    Grant,
    covers,
    matches_glob,
    overlaps,
)
from sluice.wire.packets import Publish
from sluice.wire.topics import matches, topic_filter_error

WORDS = ["a", "b", "$s", ""]
EVERY_TOPIC = [
    "/".join(levels).encode()
    for size in (1, 2, 3, 4)
    for levels in itertools.product(WORDS, repeat=size)
]
EVERY_TOPIC = [topic for topic in EVERY_TOPIC if topic]
FILTERS = st.lists(st.sampled_from(["a", "b", "+", "$s", ""]), min_size=1, max_size=3).flatmap(
    lambda levels: st.sampled_from(["/".join(levels), "/".join([*levels[:-1], "#"])])
)


def is_filter(text: str) -> bool:
    return not topic_filter_error(text.encode(), 100)


@given(FILTERS.filter(is_filter), FILTERS.filter(is_filter))
def test_covering_and_overlapping_agree_with_counting_topics(one: str, other: str) -> None:
    wide, narrow = one.encode(), other.encode()
    ours = {topic for topic in EVERY_TOPIC if matches(wide, topic)}
    theirs = {topic for topic in EVERY_TOPIC if matches(narrow, topic)}
    # Filters may overlap in the empty topic, which no client can publish to.
    both_empty = matches(wide, b"") and matches(narrow, b"")
    assert overlaps(wide, narrow) == (bool(ours & theirs) or both_empty)
    assert overlaps(narrow, wide) == overlaps(wide, narrow)
    if covers(wide, narrow):
        assert theirs <= ours
    # The check may only err by refusing, and only where a level is spelled differently.
    elif theirs <= ours:
        assert b"+" in wide or b"#" in narrow or b"+" in narrow


@given(
    st.lists(st.tuples(st.booleans(), FILTERS.filter(is_filter)), max_size=4),
    FILTERS.filter(is_filter),
)
def test_allowed_filter_never_matches_a_denied_topic(
    listed: list[tuple[bool, str]], wanted: str
) -> None:
    text = "".join(
        f'[[rule]]\n{"allow" if allow else "deny"} = "subscribe"\ntopics = ["{one}"]\n'
        for allow, one in listed
    )
    grant = Grant(AccessControlList(read_rules(text)), "u", "c")
    if grant.may_subscribe(wanted.encode()):
        for topic in EVERY_TOPIC:
            if matches(wanted.encode(), topic):
                assert grant.may_receive(topic)


EVERY_QUEUE = [
    "/".join(levels)
    for size in (1, 2, 3)
    for levels in itertools.product(["a", "b", "responses", "dlq"], repeat=size)
]
QUEUE_FILTERS = st.lists(
    st.sampled_from(["a", "b", "+", "responses", "dlq"]), min_size=1, max_size=3
).flatmap(
    lambda levels: st.sampled_from(
        ["/".join(levels), "/".join([*levels[:-1], "#"]), "/".join([*levels, "#"])]
    )
)
QUEUE_SUBSCRIPTIONS = ["$queue/{}", "$share/s/$queue/{}", "$queue/{}/$group/g"]


def queue_rules(listed: list[tuple[bool, str]]) -> Grant:
    text = "".join(
        f'[[rule]]\n{"allow" if allow else "deny"} = "queue-consume"\nqueues = ["{one}"]\n'
        for allow, one in listed
    )
    return Grant(AccessControlList(read_rules(text)), "u", "c")


@given(
    st.lists(st.tuples(st.booleans(), QUEUE_FILTERS), max_size=4),
    QUEUE_FILTERS,
    st.sampled_from(QUEUE_SUBSCRIPTIONS),
)
@example([(False, "a/b"), (True, "a/#")], "a/#", "$queue/{}")
@example([(False, "a/b"), (True, "a/#")], "a/+", "$share/s/$queue/{}")
@example([(True, "a/+")], "a/#", "$queue/{}/$group/g")
@example([(False, "responses/a"), (True, "#")], "responses/+", "$queue/{}")
def test_allowed_queue_pattern_never_includes_a_queue_denied_by_name(
    listed: list[tuple[bool, str]], pattern: str, spelling: str
) -> None:
    grant = queue_rules(listed)
    if not grant.may_subscribe(spelling.format(pattern).encode()):
        return
    for queue in EVERY_QUEUE:
        if matches(f"$queue/{pattern}".encode(), f"$queue/{queue}".encode()):
            decided = [allow for allow, one in listed if matches(one.encode(), queue.encode())]
            assert decided[:1] == [True], queue


@pytest.mark.parametrize("spelling", QUEUE_SUBSCRIPTIONS)
@pytest.mark.parametrize(
    ("pattern", "allowed"),
    [
        ("tasks/image", True),
        ("tasks/secret", False),
        ("tasks/#", False),
        ("tasks/+", False),
        ("+/image", False),
        ("#", False),
        ("tasks/image/#", True),
        ("other/+", True),
        ("other/#", False),
        ("other/a/b", False),
    ],
)
def test_queue_pattern_needs_a_covering_allow_and_no_overlapping_deny(
    spelling: str, pattern: str, allowed: bool
) -> None:
    grant = queue_rules([(False, "tasks/secret"), (True, "tasks/#"), (True, "other/+")])
    assert grant.may_subscribe(spelling.format(pattern).encode()) is allowed


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("a", "a", True),
        ("a", "ab", False),
        ("*", "", True),
        ("*", "anything", True),
        ("sensor-*", "sensor-1", True),
        ("sensor-*", "sensor", False),
        ("*-x", "a-x", True),
        ("a*b*c", "a1b2c", True),
        ("a*b*c", "acb", False),
        ("ab*ba", "aba", False),
    ],
)
def test_star_matches_any_run_of_characters(pattern: str, text: str, fits: bool) -> None:
    assert matches_glob(pattern, text) is fits


RULES = """
[[rule]]
deny = ["publish", "subscribe"]
topics = ["secret/#"]

[[rule]]
name = "own topics"
allow = ["publish", "subscribe"]
topics = ["devices/%c/#", "users/%u"]

[[rule]]
allow = "subscribe"
users = ["boss"]
topics = ["#", "$SYS/#"]

[[rule]]
allow = ["connect", "queue-publish"]
queues = ["tasks/#"]

[[rule]]
allow = ["queue-consume", "queue-settle", "queue-admin"]
users = ["worker-*"]
queues = ["$queue/tasks/+"]
"""


@pytest.mark.parametrize(
    ("user", "action", "topic", "allowed", "word"),
    [
        ("ann", "connect", "", True, "rule 4"),
        ("ann", "publish", "devices/c1/temp", True, "own topics"),
        ("ann", "publish", "devices/c2/temp", False, "no rule"),
        ("ann", "subscribe", "devices/c1/+", True, "own topics"),
        ("ann", "subscribe", "devices/+/temp", False, "no rule"),
        ("ann", "subscribe", "devices/#", False, "no rule"),
        ("ann", "subscribe", "users/ann", True, "own topics"),
        ("ann", "subscribe", "users/+", False, "no rule"),
        ("", "subscribe", "users/", False, "no rule"),
        ("ann", "publish", "$SYS/broker/x", False, "reserved for the server"),
        ("boss", "subscribe", "other/#", True, "rule 3"),
        ("boss", "subscribe", "#", False, "rule 1"),
        ("boss", "subscribe", "secret/a", False, "rule 1"),
        ("boss", "subscribe", "+/a", False, "rule 1"),
        ("boss", "subscribe", "$SYS/#", True, "rule 3"),
        ("boss", "subscribe", "$share/g/other/x", True, "rule 3"),
        ("boss", "subscribe", "$share/g/secret/x", False, "rule 1"),
        ("ann", "subscribe", "$SYS/broker/uptime", False, "no rule"),
        ("ann", "subscribe", "$ECQ/c1/#", True, "belongs to its owner"),
        ("boss", "subscribe", "$ECQ/c2/#", False, "only its owner"),
        ("ann", "queue-publish", "tasks/image/big", True, "rule 4"),
        ("ann", "queue-publish", "$queue/tasks/image", True, "rule 4"),
        ("ann", "queue-publish", "other", False, "no rule"),
        ("ann", "queue-consume", "tasks/image", False, "no rule"),
        ("worker-1", "queue-consume", "tasks/image", True, "rule 5"),
        ("worker-1", "queue-consume", "tasks/image/big", False, "no rule"),
        ("worker-1", "queue-consume", "tasks/#", False, "no rule"),
        ("worker-1", "queue-admin", "tasks/image", True, "rule 5"),
        ("worker-1", "queue-admin", "other", False, "no rule"),
    ],
)
def test_first_matching_rule_decides(
    user: str, action: str, topic: str, allowed: bool, word: str
) -> None:
    answer, why = explain_access(read_rules(RULES), action, topic, user, "c1")
    assert (answer, word in why) == (allowed, True), why


ECQ_RULES = """
[[rule]]
allow = ["subscribe"]
clients = [{ re = "^ecq-.+" }, "other-*"]
topics = [{ eq = "$ECQ/${clientid}/#" }]

[[rule]]
deny = ["subscribe"]
topics = ["$ECQ/#"]

[[rule]]
deny = ["subscribe"]
topics = [{ eq = "#" }]

[[rule]]
allow = ["connect", "subscribe"]
topics = ["#"]
"""


@pytest.mark.parametrize(
    ("client", "topic", "allowed", "word"),
    [
        ("ecq-1", "$ECQ/ecq-1/#", True, "belongs to its owner"),
        ("other-1", "$ECQ/other-1/#", True, "belongs to its owner"),
        ("ecq-", "$ECQ/ecq-/#", False, "rule 2"),
        ("my-ecq-1", "$ECQ/my-ecq-1/#", False, "rule 2"),
        ("ecq-1", "$ECQ/ecq-2/#", False, ""),
        ("ecq-1", "#", False, "rule 3"),
        ("ecq-1", "a/#", True, "rule 4"),
    ],
)
def test_rule_with_a_regular_expression_and_an_exact_filter(
    client: str, topic: str, allowed: bool, word: str
) -> None:
    answer, why = explain_access(read_rules(ECQ_RULES), "subscribe", topic, "ann", client)
    assert (answer, word in why) == (allowed, True), why


@given(
    st.from_regex(r"(?a:[ab.|()*+?\[\]0-9-]|\\d|\\w|\{1,2\}){0,12}", fullmatch=True),
    st.text("ab0-(", max_size=8),
)
def test_client_pattern_agrees_with_the_library(pattern: str, text: str) -> None:
    try:
        compiled = ClientPattern(pattern)
    except ValueError:
        return
    assert compiled.matches(text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)(.*)(.*)(.*)b"])
def test_no_pattern_needs_long_for_a_client_id(pattern: str) -> None:
    started = time.perf_counter()
    assert not ClientPattern(pattern).matches("a" * 1024)
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(?=a)b", "nothing else"),
        (r"(a)\\1", "nothing else"),
        ("(?i)a", "flags"),
        ("a(", "is not a regular expression"),
        ("a" * 300, "at most 256"),
        ("(a{100}){100}", "too large"),
    ],
)
def test_unusable_client_pattern_is_refused_with_the_rule(pattern: str, words: str) -> None:
    text = f'[[rule]]\nallow = "connect"\nclients = [{{ re = "{pattern}" }}]'
    with pytest.raises(ValueError, match="rule 1") as refused:
        read_rules(text)
    assert words in str(refused.value)


def test_user_name_that_looks_like_a_placeholder_is_literal() -> None:
    rules = '[[rule]]\nallow = "publish"\ntopics = ["devices/%c/#", "of/%u/%c"]'
    acl = AccessControlList(read_rules(rules))
    grant = Grant(acl, "ann", "%u")
    assert not grant.may_publish(Publish(b"devices/ann/x", b"", 0))
    assert grant.may_publish(Publish(b"devices/%u/x", b"", 0))
    assert grant.may_publish(Publish(b"of/ann/%u", b"", 0))
    other = Grant(acl, "%c", "dev1")
    assert other.may_publish(Publish(b"of/%c/dev1", b"", 0))
    assert not other.may_publish(Publish(b"of/dev1/dev1", b"", 0))


def test_user_name_that_would_reach_other_topics_is_not_substituted() -> None:
    acl = AccessControlList(read_rules(RULES))
    for name in ("a/b", "+", "#", "a#"):
        assert "client id" in acl.client_name_error("u", name)
        assert "user name" in acl.client_name_error(name, "c")
    assert acl.client_name_error("u", "c") == ""
    assert (
        AccessControlList(read_rules('[[rule]]\nallow = "*"')).client_name_error("a/b", "#") == ""
    )


def test_anonymous_client_matches_no_user_pattern() -> None:
    named = read_rules('[[rule]]\nallow = "connect"\nusers = ["*"]')
    assert (
        AccessControlList(named).find_connect_rule("", "c") is None
        and AccessControlList(named).find_connect_rule("u", "c") is not None
    )
    nameless = read_rules('[[rule]]\nallow = "connect"\nusers = ["$anonymous"]')
    assert (
        AccessControlList(nameless).find_connect_rule("", "c") is not None
        and AccessControlList(nameless).find_connect_rule("u", "c") is None
    )


def test_permission_cache_is_bounded_and_cleared_by_new_rules() -> None:
    acl = AccessControlList(read_rules('[[rule]]\nallow = "publish"\ntopics = ["a/#"]'))
    grant = Grant(acl, "u", "c")
    for nth in range(5000):
        assert grant.may_publish(Publish(b"a/%d" % nth, b"", 0))
    assert len(grant._publish_cache) <= 1024
    acl.replace(read_rules('[[rule]]\nallow = "publish"\ntopics = ["b/#"]'))
    assert not grant.may_publish(Publish(b"a/4999", b"", 0))
    assert grant.may_publish(Publish(b"b/1", b"", 0))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[rule]\n", "not TOML"),
        ("x = 1", "something other"),
        ("[[rule]]\nusers = ['a']", "either allow or deny"),
        ("[[rule]]\nallow = 'publish'\ndeny = 'publish'", "either allow or deny"),
        ("[[rule]]\nallow = 'fly'", "'fly' is no action"),
        ("[[rule]]\nallow = []", "no list of actions"),
        ("[[rule]]\nallow = 'publish'\ntopic = ['a']", "topic is no key"),
        ("[[rule]]\nallow = 'publish'\ntopics = ['a/#/b']", "#"),
        ("[[rule]]\nallow = 'publish'\ntopics = []", "something in it"),
        ("[[rule]]\nallow = 'publish'\nqueues = ['a']", "no action on queues"),
        ("[[rule]]\nallow = 'connect'\ntopics = ['a']", "no action on topics"),
        ("[[rule]]\nallow = 'publish'\ntopics = ['$queue/a']", "actions of their own"),
        ("[[rule]]\nallow = 'subscribe'\ntopics = ['$share/g/a']", "without $share"),
        ("[[rule]]\nallow = 'connect'\n[[rule]]\nallow = 'publish'\ntopics = 7", "rule 2"),
        ("[[rule]]\nallow = 'publish'\nauto_create = false", "rules that allow queue-publish"),
        ("[[rule]]\ndeny = 'queue-publish'\nauto_create = false", "rules that allow queue-publish"),
        ("[[rule]]\nallow = 'queue-publish'\nauto_create = 'no'", "true or false"),
    ],
)
def test_invalid_rules_file_error_says_why(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        read_rules(text)
