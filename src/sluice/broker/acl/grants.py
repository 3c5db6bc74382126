"""The rights of one client: a `Grant` made from the rules in force.

A client without a grant may do everything and is never checked. With a grant, the result for a
topic is computed once and cached, so a publish costs one lookup. This module parses topics below
`$queue/` and `$admin/`: queues have actions of their own, and the topics are only their spelling.
"""

from __future__ import annotations

import json
from typing import Final

from sluice.broker.acl.acl import PUBLISH as PUBLISH_ACTION
from sluice.broker.acl.acl import (
    QUEUE_ADMIN,
    QUEUE_CANCEL,
    QUEUE_CONSUME,
    QUEUE_PUBLISH,
    QUEUE_SETTLE,
    SUBSCRIBE,
    AccessControlList,
    Clause,
    clause_for_filter,
    clause_for_topic,
)
from sluice.broker.queue_topics import (
    ACK,
    CANCEL,
    RELEASE,
    RESCHEDULE,
    RESPONSE,
    parse_queue_topic,
)
from sluice.broker.queue_topics import QUEUE_PREFIX as QUEUE_PREFIX
from sluice.queues.service import MAX_CONFIG_BYTES
from sluice.wire.packets import Publish
from sluice.wire.topics import split_share

ADMIN_PREFIX: Final = b"$admin/"
ECQ_PREFIX: Final = b"$ECQ/"
MAX_CACHED_TOPICS: Final = 1024  # of one client; longer topics are not cached
MAX_CACHED_TOPIC_BYTES: Final = 256
MAX_LOGGED_REFUSALS: Final = 16  # per client

MAY_NOT_PUBLISH: Final = (
    "this client may not publish to this topic: the access rules do not allow it; "
    "use another topic, or have a rule added for it"
)
MAY_NOT_SUBSCRIBE: Final = (
    "this client may not subscribe to this filter: "
    "the access rules must allow every topic that it matches; "
    "use a narrower one, or have a rule added for it"
)


class Grant:
    def __init__(self, acl: AccessControlList, user: str, client_id: str) -> None:
        self._acl: AccessControlList = acl
        self._version: int = acl.version
        self.user: str = user
        self.client_id: str = client_id
        self._publish_cache: dict[bytes, bool] = {}
        self._clauses_by_action: dict[int, list[Clause]] = {}
        self._logged_topics: set[bytes] = set()

    def may_publish(self, packet: Publish) -> bool:
        if self._version != self._acl.version:
            self._refresh()
        cached = self._publish_cache.get(packet.topic)
        return cached if cached is not None else self._check_publish(packet)

    def _refresh(self) -> None:
        """Drop the caches after the rules have changed."""
        self._version = self._acl.version
        self._publish_cache.clear()
        self._clauses_by_action.clear()
        self._logged_topics.clear()

    def _check_publish(self, packet: Publish) -> bool:
        topic = packet.topic
        if topic[:1] != b"$":
            return self._cache_publish(topic, self.allows(PUBLISH_ACTION, topic))
        if topic.startswith(QUEUE_PREFIX):
            parsed = parse_queue_topic(topic)
            if ACK <= parsed.verb <= RELEASE:
                allowed = self.allows(QUEUE_SETTLE, parsed.queue.encode())
                return allowed if parsed.argument else self._cache_publish(topic, allowed)
            if parsed.verb == CANCEL or parsed.verb == RESCHEDULE:
                allowed = self.allows(QUEUE_CANCEL, parsed.queue.encode())
                return allowed if parsed.argument else self._cache_publish(topic, allowed)
            # The queue handler refuses an invalid queue name with a better text.
            name = f"responses/{parsed.queue}" if parsed.verb == RESPONSE else parsed.queue
            return self._cache_publish(topic, self.allows(QUEUE_PUBLISH, name.encode()))
        if topic.startswith(ADMIN_PREFIX):
            return self._check_admin(topic, packet.payload)
        return self._cache_publish(topic, self.allows(PUBLISH_ACTION, topic))

    def _check_admin(self, topic: bytes, payload: bytes) -> bool:
        """Check the right to create or change a queue.

        A right to the queue is not enough. The client must also be allowed to subscribe to the
        topics of its bindings and to publish to its dead-letter queues. Otherwise a queue could
        bypass every other rule.
        """
        try:
            # The queue handler refuses a payload that is too large.
            config: object = json.loads(payload) if len(payload) <= MAX_CONFIG_BYTES else {}
        except (ValueError, RecursionError):
            config = {}
        wanted: dict[str, object] = config if isinstance(config, dict) else {}
        levels = topic.decode().split("/")
        if levels[1:] == ["queue", "create"]:
            name = wanted.get("name")
            if not isinstance(name, str):
                # The handler then reports that the name is missing.
                return any(clause.allow for clause in self._clauses_for(QUEUE_ADMIN))
            target = name.removeprefix("$queue/")
        else:
            target = "/".join(levels[2:-1])
        if not self.allows(QUEUE_ADMIN, target.encode()):
            return False
        bindings = wanted.get("bindings")
        for binding in bindings if isinstance(bindings, list) else []:
            bound_topic: object = binding.get("topic") if isinstance(binding, dict) else binding
            if not isinstance(bound_topic, str):
                continue
            if bound_topic.startswith("$queue/"):
                if not self.allows(QUEUE_CONSUME, bound_topic.removeprefix("$queue/").encode()):
                    return False
            elif not self.allows_filter(SUBSCRIBE, bound_topic.encode()):
                return False
        dlq_config = wanted.get("dlq_config")
        if isinstance(dlq_config, dict):
            for key in ("topic", "invalid_topic"):
                queue: object = dlq_config.get(key)
                if isinstance(queue, str) and not self.allows(
                    QUEUE_PUBLISH, queue.removeprefix("$queue/").encode()
                ):
                    return False
        return True

    def may_subscribe(self, topic_filter: bytes) -> bool:
        _, inner = split_share(topic_filter)
        if inner.startswith(QUEUE_PREFIX):
            parsed = parse_queue_topic(inner)
            name = f"responses/{parsed.queue}" if parsed.verb == RESPONSE else parsed.queue
            return self.allows_filter(QUEUE_CONSUME, name.encode())
        if inner.startswith(ADMIN_PREFIX):
            return self.allows_filter(QUEUE_ADMIN, _watched_queues(inner))
        if inner.startswith(ECQ_PREFIX):
            return self._may_read_exclusive(inner)
        return self.allows_filter(SUBSCRIBE, inner)

    def _may_read_exclusive(self, topic_filter: bytes) -> bool:
        """Apply the built-in rule of exclusive queues.

        A client may subscribe to its own queue unless a rule denies it, and never to another
        client's.
        """
        if topic_filter != ECQ_PREFIX + self.client_id.encode() + b"/#":
            return False
        clause = clause_for_filter(self._clauses_for(SUBSCRIBE), topic_filter)
        return clause is None or clause.allow

    def is_client_id_bound(self) -> bool:
        """Return whether the rules let no other user connect with this client id."""
        return self._acl.is_bound_to_user(self.user, self.client_id)

    def may_receive(self, topic: bytes) -> bool:
        """Return whether a message that is queued for this client may still be delivered to it."""
        if topic.startswith(QUEUE_PREFIX):
            parsed = parse_queue_topic(topic)
            name = f"responses/{parsed.queue}" if parsed.verb == RESPONSE else parsed.queue
            return self.allows(QUEUE_CONSUME, name.encode())
        if topic.startswith(ADMIN_PREFIX):
            return self.allows(QUEUE_ADMIN, _watched_queues(topic))
        if topic.startswith(ECQ_PREFIX):
            return self._may_read_exclusive(ECQ_PREFIX + self.client_id.encode() + b"/#")
        return self.allows(SUBSCRIBE, topic)

    def allows(self, action: int, topic: bytes) -> bool:
        """Return whether the rules allow this action on one topic, or on one queue by its name."""
        clause = clause_for_topic(self._clauses_for(action), topic)
        return clause is not None and clause.allow

    def allows_filter(self, action: int, topic_filter: bytes) -> bool:
        """Return whether the rules allow this action on everything that the filter matches."""
        clause = clause_for_filter(self._clauses_for(action), topic_filter)
        return clause is not None and clause.allow

    def _clauses_for(self, action: int) -> list[Clause]:
        if self._version != self._acl.version:
            self._refresh()
        found = self._clauses_by_action.get(action)
        if found is None:
            found = self._clauses_by_action[action] = self._acl.build_clauses(
                action, self.user, self.client_id
            )
        return found

    def _cache_publish(self, topic: bytes, allowed: bool) -> bool:
        if len(topic) <= MAX_CACHED_TOPIC_BYTES:
            if len(self._publish_cache) >= MAX_CACHED_TOPICS:
                self._publish_cache.clear()
            self._publish_cache[topic] = allowed
        return allowed

    def is_new_refusal(self, topic: bytes) -> bool:
        """Return whether a refused publish to this topic should be logged: the first one is."""
        if topic in self._logged_topics or len(self._logged_topics) >= MAX_LOGGED_REFUSALS:
            return False
        self._logged_topics.add(topic)
        return True


def will_error(will: Publish, grant: Grant | None) -> str:
    """Return why a client may not have this will, or an empty string if it may."""
    if grant is not None and not grant.may_publish(will):
        return (
            "this client may not publish to the topic of its will: "
            "have a rule added, or use another topic"
        )
    return ""


def _watched_queues(topic_filter: bytes) -> bytes:
    """Return a filter for the queues whose statistics a filter under `$admin/` asks for."""
    levels = topic_filter.split(b"/")
    if len(levels) < 3 or levels[1] != b"queue" or levels[2] == b"#":
        return b"#"
    return b"/".join(levels[2:] if levels[-1] == b"#" else levels[2:-1]) or b"#"
