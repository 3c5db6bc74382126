"""Explain which access rule decides whether a client may do something."""

from __future__ import annotations

from sluice.broker.acl import (
    ACTIONS,
    CONNECT,
    PUBLISH,
    SUBSCRIBE,
    AccessControlList,
    Rule,
    clause_for_filter,
    clause_for_topic,
)
from sluice.errors import ConfigError
from sluice.wire.topics import has_wildcard, split_share


def explain_access(
    rules: list[Rule], action: str, topic: str, user: str, client_id: str
) -> tuple[bool, str]:
    """Return whether `action` is allowed, and a text that names the rule."""
    if action not in ACTIONS:
        raise ConfigError(f"{action!r} is no action", f"Use one of {', '.join(ACTIONS)}")
    acl = AccessControlList(rules)
    fault = acl.client_name_error(user, client_id)
    if fault:
        return False, fault
    action_bit = ACTIONS[action]
    if action_bit == CONNECT:
        rule = acl.find_connect_rule(user, client_id)
        return (False, "no rule applies") if rule is None else (rule.allow, f"{rule.name} says so")
    if not topic:
        raise ConfigError(
            f"{action} needs a target", "Name a topic, a filter or a queue after the action"
        )
    if action_bit == PUBLISH and topic[:5] in ("$SYS/", "$SYS"):
        return False, "$SYS is reserved for the server, regardless of the rules"
    name = (
        topic.removeprefix("$queue/").encode()
        if action_bit > SUBSCRIBE
        else split_share(topic.encode())[1]
    )
    clauses = acl.build_clauses(action_bit, user, client_id)
    if action_bit == SUBSCRIBE and name.startswith(b"$ECQ/"):
        if name != f"$ECQ/{client_id}/#".encode():
            return (
                False,
                "only its owner may subscribe to an exclusive queue, regardless of the rules",
            )
        denied = clause_for_filter(clauses, name)
        if denied is None or denied.allow:
            return True, "an exclusive queue belongs to its owner"
    clause = (
        clause_for_filter(clauses, name) if has_wildcard(name) else clause_for_topic(clauses, name)
    )
    if clause is None:
        return False, "no rule allows it" + (
            " for all that the filter matches" if has_wildcard(name) else ""
        )
    return clause.allow, f"{clause.name} says so"
