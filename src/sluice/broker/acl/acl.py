"""Access rules as the broker uses them: who may do what to which topics and queues.

Rules stand in an order, and the first one that speaks of what is asked decides; when none does, the answer is no. Where
they are written, and how, is not known here.

A subscription is allowed only when every topic that its filter can ever match is allowed. Going through the rules in
order: a deny that overlaps the filter refuses it, an allow that covers all of it admits it, an allow that covers only a
part of it says nothing. So nothing is left to be looked at when a message is delivered. Several allows that would cover
a filter between them do not add up: that errs on the side of refusing.
"""

from __future__ import annotations

from typing import Final

from sluice.wire.topics import matches

CONNECT: Final = 1
PUBLISH: Final = 2
SUBSCRIBE: Final = 4
QUEUE_PUBLISH: Final = 8
QUEUE_CONSUME: Final = 16
QUEUE_SETTLE: Final = 32
QUEUE_ADMIN: Final = 64

ACTIONS: Final[dict[str, int]] = {
    "connect": CONNECT,
    "publish": PUBLISH,
    "subscribe": SUBSCRIBE,
    "queue-publish": QUEUE_PUBLISH,
    "queue-consume": QUEUE_CONSUME,
    "queue-settle": QUEUE_SETTLE,
    "queue-admin": QUEUE_ADMIN,
}
ANONYMOUS: Final = "$anonymous"
TOPIC_ACTIONS: Final = PUBLISH | SUBSCRIBE
QUEUE_ACTIONS: Final = QUEUE_PUBLISH | QUEUE_CONSUME | QUEUE_SETTLE | QUEUE_ADMIN


class Rule:
    """`users` and `clients` are patterns in which `*` stands for anything; an empty list is everybody. Somebody without
    a user name is matched by no pattern but the word `$anonymous`. In `clients`, `%u` stands for the user name, and a
    `*` in that name for itself; for a client without a user, a pattern with `%u` matches nothing. `topics` and
    `queues` are filters in which `%c` and `%u` stand for the client id and the user name; an empty list is all of
    them, topics that begin with `$` left out as by every wildcard."""

    def __init__(
        self,
        allow: bool,
        actions: int,
        users: list[str],
        clients: list[str],
        topics: list[str],
        queues: list[str],
        name: str,
    ) -> None:
        self.allow: bool = allow
        self.actions: int = actions
        self.users: list[str] = users
        self.clients: list[str] = clients
        self.topics: list[str] = topics
        self.queues: list[str] = queues
        self.name: str = name  # how people find it again

    def applies_to(self, user: str, client_id: str) -> bool:
        return _matches_any_glob(self.users, user or ANONYMOUS) and self._matches_client(
            user, client_id
        )

    def _matches_client(self, user: str, client_id: str) -> bool:
        if not self.clients:
            return True
        for pattern in self.clients:
            if (user or "%u" not in pattern) and matches_glob(pattern, client_id, user):
                return True
        return False

    def allows_other_users(self, user: str, client_id: str) -> bool:
        """Return whether this rule lets clients of other users than `user` connect as `client_id`."""
        if (
            not self.allow
            or not self.actions & CONNECT
            or (self.users == [user] and "*" not in user)
        ):
            return False
        return not self.clients or any(
            "%u" not in one and matches_glob(one, client_id) for one in self.clients
        )

    def denies_everyone(self, client_id: str) -> bool:
        """Return whether this rule lets no client connect as `client_id` that an earlier rule has not let in."""
        if self.allow or not self.actions & CONNECT or self.users:
            return False
        return not self.clients or any(
            "%u" not in one and matches_glob(one, client_id) for one in self.clients
        )

    def mentions(self, placeholder: str) -> bool:
        return any(placeholder in one for one in self.topics) or any(
            placeholder in one for one in self.queues
        )


class Clause:
    """A rule as one client sees it for one action: its name and user stand in the filters."""

    def __init__(self, allow: bool, filters: list[bytes], name: str) -> None:
        self.allow: bool = allow
        self.filters: list[bytes] = filters
        self.name: str = name


class AccessControlList:
    """All rules in force. `version` rises with each change, so that whoever remembers an answer knows its age."""

    def __init__(self, rules: list[Rule]) -> None:
        self.rules: list[Rule] = []
        self.version: int = 0
        self.uses_client_ids: bool = False  # a filter has %c: ids must fit into a level of a topic
        self.uses_user_names: bool = False
        self.replace(rules)

    def replace(self, rules: list[Rule]) -> None:
        self.rules = rules
        self.uses_client_ids = any(rule.mentions("%c") for rule in rules)
        self.uses_user_names = any(rule.mentions("%u") for rule in rules)
        self.version += 1

    def client_name_error(self, user: str, client_id: str) -> str:
        """Why the rules cannot be applied to a client of this name; the empty string when they can. A name with a
        wildcard or a further level in it would reach into other clients' topics."""
        if self.uses_client_ids and not _is_valid_level(client_id):
            return "the client id has one of / + # in it, and the access rules use it as a level of topics"
        if self.uses_user_names and user and not _is_valid_level(user):
            return "the user name has one of / + # in it, and the access rules use it as a level of topics"
        return ""

    def find_connect_rule(self, user: str, client_id: str) -> Rule | None:
        """The rule that decides whether this client may connect."""
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
        """What the rules say of one action of one client, in order."""
        found: list[Clause] = []
        for rule in self.rules:
            if not rule.actions & action or not rule.applies_to(user, client_id):
                continue
            patterns = rule.topics if action & TOPIC_ACTIONS else rule.queues
            filters: list[bytes] = []
            for one in patterns or ["#"]:
                if "%u" in one and not user:
                    continue  # somebody without a name has no topics of that name
                filters.append(_substitute_placeholders(one, client_id, user).encode())
            found.append(Clause(rule.allow, filters, rule.name))
        return found


def _substitute_placeholders(pattern: str, client_id: str, user: str) -> str:
    """Replace `%c` and `%u` at once: a client id that is `%u` stays what it is."""
    return client_id.join([part.replace("%u", user) for part in pattern.split("%c")])


def clause_for_topic(clauses: list[Clause], topic: bytes) -> Clause | None:
    """The first clause that speaks of `topic`."""
    for clause in clauses:
        for one in clause.filters:
            if matches(one, topic):
                return clause
    return None


def clause_for_filter(clauses: list[Clause], topic_filter: bytes) -> Clause | None:
    """The clause that decides about all topics of a filter: the first deny that overlaps it or allow that covers it."""
    for clause in clauses:
        for one in clause.filters:
            if covers(one, topic_filter) if clause.allow else overlaps(one, topic_filter):
                return clause
    return None


def covers(wide: bytes, narrow: bytes) -> bool:
    """Whether every topic that `narrow` matches is matched by `wide`."""
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
    """Whether there is a topic that both filters match."""
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
    """Whether `text` is `pattern`, in which each `*` stands for any run of characters and `%u` for `user`, if given."""
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
