"""The rules file: who may do what, in TOML. The first rule that applies decides.

    [[rule]]
    allow = ["connect"]                       # or deny = [...]
    users = ["sensor-*"]                      # leave out: everyone
    clients = ["%u", "%u:*"]                  # ids that are the user's own; leave out: all
    # clients = [{ re = "car-[0-9]+" }]       # or regular expressions

    [[rule]]
    allow = ["publish", "subscribe"]
    topics = ["devices/%c/#"]                 # %c: the client id, %u: the user name
    # topics = [{ eq = "devices/#" }]         # this filter itself, not the topics that it matches

    [[rule]]
    allow = ["queue-publish"]
    queues = ["tasks/#"]
    auto_create = false                       # a publish of these clients creates no queue

`broker/acl/acl.py` defines the meaning of actions and filters.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Final

from sluice.broker.acl import (
    ACTIONS,
    CONNECT,
    EXACT,
    QUEUE_ACTIONS,
    QUEUE_CONSUME,
    QUEUE_PUBLISH,
    TOPIC_ACTIONS,
    ClientPattern,
    Rule,
)
from sluice.wire.topics import topic_filter_error

_RULE_KEYS: Final = {
    "allow",
    "deny",
    "users",
    "clients",
    "topics",
    "queues",
    "name",
    "auto_create",
}


def read_rules(text: str) -> list[Rule]:
    """Return the rules; a ValueError names the rule and its error."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        raise ValueError(f"it is not TOML: {fault}") from None
    listed = document.pop("rule", [])
    if document or not isinstance(listed, list):
        raise ValueError("it contains something other than tables [[rule]]")
    return [_read_rule(nth, given) for nth, given in enumerate(listed, 1)]


def _read_rule(number: int, table: object) -> Rule:
    name = f"rule {number}"
    if not isinstance(table, Mapping):
        raise ValueError(f"{name} is not a table")
    if isinstance(table.get("name"), str):
        name = f"rule {number} ({table['name']})"
    unknown = table.keys() - _RULE_KEYS
    if unknown:
        raise ValueError(
            f"{name}: {sorted(unknown)[0]} is no key of a rule; "
            f"those are {', '.join(sorted(_RULE_KEYS))}"
        )
    if ("allow" in table) == ("deny" in table):
        raise ValueError(f"{name} needs either allow or deny, with a list of actions")
    allow = "allow" in table
    actions = _read_actions(name, table["allow" if allow else "deny"])
    topics = _read_filters(name, table)
    queues = [one.removeprefix("$queue/") for one in _read_strings(name, table, "queues")]
    if topics and not actions & TOPIC_ACTIONS:
        raise ValueError(f"{name} has topics, and no action on topics: publish, subscribe")
    if queues and not actions & QUEUE_ACTIONS:
        raise ValueError(
            f"{name} has queues, and no action on queues: queue-publish, queue-consume, ..."
        )
    for one in [filter_.removeprefix(EXACT) for filter_ in topics] + queues:
        fault = topic_filter_error(one.replace("%c", "c").replace("%u", "u").encode(), 65_535)
        if fault:
            raise ValueError(f"{name}: {one!r}: {fault}")
        if one.startswith("$share/"):
            raise ValueError(
                f"{name}: {one!r}: write the filter without $share, it holds for shared ones too"
            )
        if one.startswith(("$queue/", "$admin/")):
            raise ValueError(
                f"{name}: {one!r}: queues have actions of their own, with queues = [...]"
            )
    clients, patterns = _read_clients(name, table)
    return Rule(
        allow,
        actions,
        _read_strings(name, table, "users"),
        clients,
        topics,
        queues,
        name,
        patterns,
        _read_auto_create(name, table, actions),
    )


def _read_auto_create(name: str, table: Mapping[str, object], actions: int) -> bool | None:
    value = table.get("auto_create")
    if value is None:
        return None
    if not isinstance(value, bool):
        raise ValueError(f"{name}: auto_create must be true or false")
    if "allow" not in table or not actions & (QUEUE_PUBLISH | QUEUE_CONSUME):
        raise ValueError(
            f"{name} has auto_create, which belongs to rules that allow queue-publish or "
            "queue-consume"
        )
    return value


def _read_clients(name: str, table: Mapping[str, object]) -> tuple[list[str], list[ClientPattern]]:
    """Return the patterns with `*`, and the regular expressions: `{ re = "..." }`."""
    globs, expressions = _split(name, table, "clients", "re")
    patterns = []
    for one in expressions:
        try:
            patterns.append(ClientPattern(one))
        except ValueError as fault:
            raise ValueError(f"{name}: the regular expression {one!r} {fault}") from None
    return globs, patterns


def _read_filters(name: str, table: Mapping[str, object]) -> list[str]:
    """Return the filters of topics; `{ eq = "..." }` is marked as `EXACT`."""
    filters, exact = _split(name, table, "topics", "eq")
    found = filters + [EXACT + one for one in exact]
    return [one.replace("${clientid}", "%c").replace("${username}", "%u") for one in found]


def _split(
    name: str, table: Mapping[str, object], key: str, keyword: str
) -> tuple[list[str], list[str]]:
    """Split a list into its texts and the texts in tables such as `{ re = "..." }`."""
    value = table.get(key)
    given = value if isinstance(value, list) else [value]
    tables = [one for one in given if isinstance(one, Mapping)]
    for one in tables:
        if one.keys() != {keyword} or not isinstance(one[keyword], str) or not one[keyword]:
            raise ValueError(f'{name}: an entry of {key} is a text or {{ {keyword} = "..." }}')
    texts = [one for one in given if not isinstance(one, Mapping)]
    if tables and not texts:
        return [], [one[keyword] for one in tables]
    rest = {key: texts} if tables else table
    return _read_strings(name, rest, key), [one[keyword] for one in tables]


def _read_actions(name: str, value: object) -> int:
    action_names = [value] if isinstance(value, str) else value
    if not isinstance(action_names, list) or not action_names:
        raise ValueError(f"{name} has no list of actions; those are {', '.join(ACTIONS)}, or *")
    actions = 0
    for action_name in action_names:
        if action_name == "*":
            actions |= CONNECT | TOPIC_ACTIONS | QUEUE_ACTIONS
        elif action_name in ACTIONS:
            actions |= ACTIONS[action_name]
        else:
            raise ValueError(
                f"{name}: {action_name!r} is no action; those are {', '.join(ACTIONS)}, or *"
            )
    return actions


def _read_strings(name: str, table: Mapping[str, object], key: str) -> list[str]:
    """Return a list of strings; a single string stands for a list with one element.

    An empty list would mean everything and is most likely a mistake, so it is refused.
    """
    value = table.get(key)
    if value is None:
        return []
    strings = [value] if isinstance(value, str) else value
    if (
        not isinstance(strings, list)
        or not strings
        or not all(isinstance(one, str) for one in strings)
    ):
        raise ValueError(
            f"{name}: {key} must be a list of texts with something in it; "
            "leave it out for all of them"
        )
    return list(strings)
