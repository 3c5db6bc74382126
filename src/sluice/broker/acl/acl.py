"""Access rules as the broker evaluates them: who may do what with which topics and queues.

Rules are ordered, and the first rule that applies decides; if none applies, the action is denied.
This module does not know where and how rules are written.

A subscription is allowed only if every topic that its filter can match is allowed. In rule order, a
deny that overlaps the filter refuses it, an allow that covers all of it admits it, and an allow
that covers only a part of it has no effect. So nothing needs to be checked when a message is
delivered. Several allows that together would cover a filter do not add up: the check refuses when
in doubt.
"""

from __future__ import annotations

from typing import Final

from sluice.broker.acl.client_pattern import ClientPattern
from sluice.wire.topics import matches

CONNECT: Final = 1
PUBLISH: Final = 2
SUBSCRIBE: Final = 4
QUEUE_PUBLISH: Final = 8
QUEUE_CONSUME: Final = 16
QUEUE_SETTLE: Final = 32
QUEUE_ADMIN: Final = 64
QUEUE_CANCEL: Final = 128

ACTIONS: Final[dict[str, int]] = {
    "connect": CONNECT,
    "publish": PUBLISH,
    "subscribe": SUBSCRIBE,
    "queue-publish": QUEUE_PUBLISH,
    "queue-consume": QUEUE_CONSUME,
    "queue-settle": QUEUE_SETTLE,
    "queue-admin": QUEUE_ADMIN,
    "queue-cancel": QUEUE_CANCEL,
}
ANONYMOUS: Final = "$anonymous"
# Marks a filter that applies to itself only. No topic contains this character.
EXACT: Final = "\0"
_EXACT_BYTE: Final = b"\0"
TOPIC_ACTIONS: Final = PUBLISH | SUBSCRIBE
QUEUE_ACTIONS: Final = QUEUE_PUBLISH | QUEUE_CONSUME | QUEUE_SETTLE | QUEUE_ADMIN | QUEUE_CANCEL


class Rule:
    """One access rule.

    `users` and `clients` are patterns in which `*` matches anything; an empty list matches
    everyone. A client without a user name is matched only by the pattern `$anonymous`. In
    `clients`, `%u` stands for the user name, and a `*` in that name is literal; for a client
    without a user, a pattern with `%u` matches nothing. `topics` and `queues` are filters in which
    `%c` and `%u` stand for the client id and the user name; an empty list matches all of them,
    except topics that begin with `$`, as with every wildcard. `client_patterns` are regular
    expressions besides `clients`. A filter after `EXACT` applies to the same filter or topic only.
    `auto_create` says whether the clients that this rule admits create missing queues by use; None:
    the server's settings decide.
    """

    def __init__(
        self,
        allow: bool,
        actions: int,
        users: list[str],
        clients: list[str],
        topics: list[str],
        queues: list[str],
        name: str,
        client_patterns: list[ClientPattern] | None = None,
        auto_create: bool | None = None,
    ) -> None:
        self.allow: bool = allow
        self.actions: int = actions
        self.auto_create: bool | None = auto_create
        self.client_patterns: list[ClientPattern] = client_patterns or []
        self.users: list[str] = users
        self.clients: list[str] = clients
        self.topics: list[str] = topics
        self.queues: list[str] = queues
        self.name: str = name  # number and title in the rules file, for error texts

    def applies_to(self, user: str, client_id: str) -> bool:
        return _matches_any_glob(self.users, user or ANONYMOUS) and self._matches_client(
            user, client_id
        )

    def _matches_client(self, user: str, client_id: str) -> bool:
        if self._applies_to_all_clients():
            return True
        for pattern in self.clients:
            if (user or "%u" not in pattern) and matches_glob(pattern, client_id, user):
                return True
        return self._matches_expression(client_id)

    def _applies_to_all_clients(self) -> bool:
        return not self.clients and not self.client_patterns

    def _matches_expression(self, client_id: str) -> bool:
        return any(one.matches(client_id) for one in self.client_patterns)

    def _matches_client_of_any_user(self, client_id: str) -> bool:
        return (
            self._applies_to_all_clients()
            or any("%u" not in one and matches_glob(one, client_id) for one in self.clients)
            or self._matches_expression(client_id)
        )

    def allows_other_users(self, user: str, client_id: str) -> bool:
        """Return whether this rule lets clients of other users connect as `client_id`."""
        if (
            not self.allow
            or not self.actions & CONNECT
            or (self.users == [user] and "*" not in user)
        ):
            return False
        return self._matches_client_of_any_user(client_id)

    def denies_everyone(self, client_id: str) -> bool:
        """Return whether no client may connect as `client_id` unless an earlier rule allows it."""
        if self.allow or not self.actions & CONNECT or self.users:
            return False
        return self._matches_client_of_any_user(client_id)

    def mentions(self, placeholder: str) -> bool:
        return any(placeholder in one for one in self.topics) or any(
            placeholder in one for one in self.queues
        )


class Clause:
    """A rule for one action of one client, with its client id and user name filled in."""

    def __init__(
        self, allow: bool, filters: list[bytes], name: str, auto_create: bool | None
    ) -> None:
        self.allow: bool = allow
        self.auto_create: bool | None = auto_create
        self.filters: list[bytes] = filters
        self.name: str = name


class AccessControlList:
    """All rules in force. `version` rises with each change, so that caches can be invalidated."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules: list[Rule] = []
        self.version: int = 0
        self.uses_client_ids: bool = False  # a filter has %c: client ids must be valid topic levels
        self.uses_user_names: bool = False
        self.replace(rules)

    def replace(self, rules: list[Rule]) -> None:
        self.rules = rules
        self.uses_client_ids = any(rule.mentions("%c") for rule in rules)
        self.uses_user_names = any(rule.mentions("%u") for rule in rules)
        self.version += 1

    def client_name_error(self, user: str, client_id: str) -> str:
        """Return why the rules cannot be applied to this client, or an empty string if they can.

        A name with a wildcard or a further level in it would match other clients' topics.
        """
        if self.uses_client_ids and not _is_valid_level(client_id):
            return (
                "the client id has one of / + # in it, "
                "and the access rules use it as a level of topics"
            )
        if self.uses_user_names and user and not _is_valid_level(user):
            return (
                "the user name has one of / + # in it, "
                "and the access rules use it as a level of topics"
            )
        return ""

    def find_connect_rule(self, user: str, client_id: str) -> Rule | None:
        """Return the rule that decides whether this client may connect, or None."""
        for rule in self.rules:
            if rule.actions & CONNECT and rule.applies_to(user, client_id):
                return rule
        return None

    def is_bound_to_user(self, user: str, client_id: str) -> bool:
        """Return whether the rules let only clients of `user` connect as `client_id`."""
        for rule in self.rules:
            if rule.allows_other_users(user, client_id):
                return False
            if rule.denies_everyone(client_id):
                return True
        return True

    def build_clauses(self, action: int, user: str, client_id: str) -> list[Clause]:
        """Return the clauses for one action of one client, in order."""
        found: list[Clause] = []
        for rule in self.rules:
            if not rule.actions & action or not rule.applies_to(user, client_id):
                continue
            patterns = rule.topics if action & TOPIC_ACTIONS else rule.queues
            filters: list[bytes] = []
            for one in patterns or ["#"]:
                if "%u" in one and not user:
                    continue  # a client without a user name has no such topics
                filters.append(_substitute_placeholders(one, client_id, user).encode())
            found.append(Clause(rule.allow, filters, rule.name, rule.auto_create))
        return found


def _substitute_placeholders(pattern: str, client_id: str, user: str) -> str:
    """Replace `%c` and `%u` in one pass: a client id `%u` stays as it is."""
    return client_id.join([part.replace("%u", user) for part in pattern.split("%c")])


def clause_for_topic(clauses: list[Clause], topic: bytes) -> Clause | None:
    """Return the first clause that matches `topic`."""
    for clause in clauses:
        for one in clause.filters:
            if one[1:] == topic if one[:1] == _EXACT_BYTE else matches(one, topic):
                return clause
    return None


def clause_for_filter(clauses: list[Clause], topic_filter: bytes) -> Clause | None:
    """Return the clause that decides about all topics of a filter.

    It is the first deny that overlaps the filter or the first allow that covers it.
    """
    for clause in clauses:
        for one in clause.filters:
            if one[:1] == _EXACT_BYTE:
                if one[1:] == topic_filter:
                    return clause
                continue
            if covers(one, topic_filter) if clause.allow else overlaps(one, topic_filter):
                return clause
    return None


def covers(wide: bytes, narrow: bytes) -> bool:
    """Return whether `wide` matches every topic that `narrow` matches."""
    if narrow[:1] == b"$" and wide[:1] in (b"+", b"#"):  # [MQTT-4.7.2-1]
        return False
    outer = wide.split(b"/")
    inner = narrow.split(b"/")
    for nth, level in enumerate(outer):
        if level == b"#":
            return True
        if nth == len(inner):
            return False
        found = inner[nth]
        if found == b"#" or (level != found and level != b"+"):
            return False
    return len(outer) == len(inner)


def overlaps(one: bytes, other: bytes) -> bool:
    """Return whether a topic exists that both filters match."""
    if one[:1] in (b"+", b"#"):
        if other[:1] == b"$":
            return False
    elif other[:1] in (b"+", b"#") and one[:1] == b"$":
        return False
    left = one.split(b"/")
    right = other.split(b"/")
    for nth in range(max(len(left), len(right))):
        mine = left[nth] if nth < len(left) else b""
        theirs = right[nth] if nth < len(right) else b""
        if mine == b"#" or theirs == b"#":
            return True
        if nth >= len(left) or nth >= len(right):
            return False
        if mine != theirs and mine != b"+" and theirs != b"+":
            return False
    return True


def matches_glob(pattern: str, text: str, user: str = "") -> bool:
    """Return whether `text` matches `pattern`; `*` matches any characters, `%u` is `user`."""
    parts = pattern.split("*")
    if user:
        parts = [part.replace("%u", user) for part in parts]
    if len(parts) == 1:
        return parts[0] == text
    first, last = parts[0], parts[-1]
    if len(text) < len(first) + len(last) or not text.startswith(first) or not text.endswith(last):
        return False
    at = len(first)
    end = len(text) - len(last)
    for part in parts[1:-1]:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _matches_any_glob(patterns: list[str], text: str) -> bool:
    if not patterns:
        return True
    if text == ANONYMOUS:
        return ANONYMOUS in patterns
    return any(matches_glob(pattern, text) for pattern in patterns)


def _is_valid_level(name: str) -> bool:
    return name != "" and "/" not in name and "+" not in name and "#" not in name
