"""The rules file: who may do what, in TOML, read from top to bottom. The first rule that speaks of something decides.

    [[rule]]
    allow = ["connect"]                       # or deny = [...]
    users = ["sensor-*"]                      # leave out: everybody
    clients = ["%u", "%u:*"]                  # ids that are the user's own; leave out: all

    [[rule]]
    allow = ["publish", "subscribe"]
    topics = ["devices/%c/#"]                 # %c: the client id, %u: the user name

    [[rule]]
    allow = ["queue-publish"]
    queues = ["tasks/#"]

What the actions and filters mean is `broker/rulebook.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Final

from sluice.broker.acl.acl import ACTIONS, CONNECT, ON_QUEUES, ON_TOPICS, Rule
from sluice.wire.topics import fault_of_filter

_KEYS: Final = {"allow", "deny", "users", "clients", "topics", "queues", "name"}


def read_rules(text: str) -> list[Rule]:
    """ValueError names the rule and what is wrong with it."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise ValueError(f"it is not TOML: {fault}") from None
    listed = document.pop("rule", [])
    if document or not isinstance(listed, list):
        raise ValueError("it has something else than tables [[rule]]")
    return [_read_rule(nth, given) for nth, given in enumerate(listed, 1)]


def _read_rule(nth: int, given: object) -> Rule:
    name = f"rule {nth}"
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} is not a table")
    if isinstance(given.get("name"), str):
        name = f"rule {nth} ({given['name']})"
    unknown = given.keys() - _KEYS
    if unknown:
        raise ValueError(
            f"{name}: {sorted(unknown)[0]} is no key of a rule; those are {', '.join(sorted(_KEYS))}"
        )
    if ("allow" in given) == ("deny" in given):
        raise ValueError(f"{name} needs either allow or deny, with a list of actions")
    allow = "allow" in given
    actions = _read_actions(name, given["allow" if allow else "deny"])
    topics = _texts(name, given, "topics")
    queues = [one.removeprefix("$queue/") for one in _texts(name, given, "queues")]
    if topics and not actions & ON_TOPICS:
        raise ValueError(f"{name} has topics, and no action on topics: publish, subscribe")
    if queues and not actions & ON_QUEUES:
        raise ValueError(f"{name} has queues, and no action on queues: queue-publish, queue-consume, ...")
    for one in topics + queues:
        fault = fault_of_filter(one.replace("%c", "c").replace("%u", "u").encode(), 65_535)
        if fault:
            raise ValueError(f"{name}: {one!r}: {fault}")
        if one.startswith("$share/"):
            raise ValueError(
                f"{name}: {one!r}: write the filter without $share, it holds for shared ones too"
            )
        if one.startswith(("$queue/", "$admin/")):
            raise ValueError(f"{name}: {one!r}: queues have actions of their own, with queues = [...]")
    return Rule(
        allow, actions, _texts(name, given, "users"), _texts(name, given, "clients"), topics, queues, name
    )


def _read_actions(name: str, given: object) -> int:
    words = [given] if isinstance(given, str) else given
    if not isinstance(words, list) or not words:
        raise ValueError(f"{name} has no list of actions; those are {', '.join(ACTIONS)}, or *")
    actions = 0
    for word in words:
        if word == "*":
            actions |= CONNECT | ON_TOPICS | ON_QUEUES
        elif word in ACTIONS:
            actions |= ACTIONS[word]
        else:
            raise ValueError(f"{name}: {word!r} is no action; those are {', '.join(ACTIONS)}, or *")
    return actions


def _texts(name: str, given: Mapping[str, object], key: str) -> list[str]:
    """A list of texts; one text stands for a list of it. An empty list would mean everything: most likely a slip."""
    value = given.get(key)
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise ValueError(
            f"{name}: {key} must be a list of texts with something in it; leave it out for all of them"
        )
    return list(texts)
