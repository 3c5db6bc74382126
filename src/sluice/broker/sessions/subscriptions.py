"""The tree of subscriptions, and a cache of routes.

A route is computed once per topic and cached. Overlapping subscriptions of one session are merged
into one recipient (the highest QoS, all subscription identifiers [MQTT-3.3.4-2..5]), so that a
message costs one dictionary lookup and no decision about filters. A subscription without wildcards
invalidates one cached route, a subscription with wildcards all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.broker.sessions.inflight import Share
from sluice.wire.primitives import write_varint
from sluice.wire.topics import has_wildcard, matches, split_share

if TYPE_CHECKING:
    from sluice.broker.sessions.session import Session

# Both limits bound the memory that publishers can make the cache use.
MAX_CACHED_ROUTES: Final = 65_536
MAX_CACHED_TOPIC_BYTES: Final = 256

# Memory charged for a subscription against mqtt.max_subscription_bytes; measured on a chain of
# levels.
LEVEL_BYTES: Final = 400
SUBSCRIPTION_BYTES: Final = 400


def estimate_filter_bytes(topic_filter: bytes) -> int:
    """Estimate the memory of a subscription as if it shared no level with others."""
    return SUBSCRIPTION_BYTES + len(topic_filter) + LEVEL_BYTES * (topic_filter.count(b"/") + 1)


class Subscription:
    """One filter of one session, with its options."""

    def __init__(
        self,
        session: Session,
        topic_filter: bytes,
        qos: i64,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
        identifier: int = 0,
    ) -> None:
        self.session: Session = session
        self.topic_filter: bytes = topic_filter
        self.qos: i64 = qos
        self.no_local: bool = no_local
        self.retain_as_published: bool = retain_as_published
        self.retain_handling: int = retain_handling
        self.identifier: int = identifier

    def encode_extra_properties(self) -> bytes:
        """Return the encoded properties of its deliveries."""
        return encode_subscription_ids([self.identifier] if self.identifier else [])


class Recipient:
    """One session that receives a topic, with all its matching subscriptions merged."""

    def __init__(self, session: Session, subscriptions: list[Subscription]) -> None:
        self.session: Session = session
        self.qos: i64 = max(subscription.qos for subscription in subscriptions)
        self.retain_as_published: bool = any(one.retain_as_published for one in subscriptions)
        self.extra_properties: bytes = encode_subscription_ids(
            [one.identifier for one in subscriptions if one.identifier]
        )
        # If one of them is "no local", only the others apply to the session's own messages.
        self.no_local: bool = any(one.no_local for one in subscriptions)
        self.without_no_local: Recipient | None = None
        if self.no_local:
            others = [one for one in subscriptions if not one.no_local]
            if others:
                self.without_no_local = Recipient(session, others)


def encode_subscription_ids(identifiers: list[int]) -> bytes:
    if not identifiers:
        return b""
    out = BytesWriter()
    for identifier in identifiers:
        out.append(0x0B)
        write_varint(out, identifier)
    return out.getvalue()


class SharedSubscription(Share):
    """One shared subscription: each message goes to one of its members, in turn."""

    def __init__(self, share_name: bytes, topic_filter: bytes) -> None:
        self.share_name: bytes = share_name
        self.topic_filter: bytes = topic_filter
        self.members: list[Recipient] = []
        self._next: i64 = 0

    def add_member(self, subscription: Subscription) -> None:
        self.remove_member(subscription.session)
        self.members.append(Recipient(subscription.session, [subscription]))

    def remove_member(self, session: Session) -> None:
        self.members = [member for member in self.members if member.session is not session]

    def pick_member(self, qos: i64, excluded: Session | None) -> Recipient | None:
        """Return the member whose turn it is, or None.

        Prefer a member with capacity; otherwise take one whose session can queue the message.
        `excluded` is a session that has just returned the message.
        """
        count: i64 = len(self.members)
        fallback: Recipient | None = None
        for step in range(count):
            at: i64 = (self._next + step) % count
            member = self.members[at]
            if member.session is excluded:
                continue
            if member.session.outbound.has_capacity():
                self._next = at + 1
                return member
            if fallback is None and (
                (qos > 0 and member.qos > 0) or member.session.connection is not None
            ):
                fallback = member
        self._next += 1
        return fallback


class TopicBinding:
    """A queue that stores a copy of messages of plain topics, or of another queue.

    `headers`: only messages with these user properties, all or any of them; empty: all messages.
    """

    def __init__(
        self,
        queue: str,
        topic_filter: bytes,
        headers: list[tuple[str, str]],
        matches_any: bool = False,
    ) -> None:
        self.queue: str = queue
        self.topic_filter: bytes = topic_filter
        self.headers: list[tuple[str, str]] = headers
        self.matches_any: bool = matches_any


class Route:
    """All recipients of one topic."""

    def __init__(self) -> None:
        self.recipients: list[Recipient] = []
        self.shares: list[SharedSubscription] = []
        self.bindings: list[TopicBinding] = []


class _FilterNode:
    """One level of the filter tree. `+` and `#` are children like any other.

    Most levels only lead to others, so the dicts are created when a filter ends here.
    """

    def __init__(self) -> None:
        self.children: dict[bytes, _FilterNode] = {}
        self.subscriptions: dict[Session, Subscription] | None = None
        self.shares: dict[bytes, SharedSubscription] | None = None

    def is_empty(self) -> bool:
        return not self.children and not self.subscriptions and not self.shares


class SubscriptionTree:
    def __init__(self) -> None:
        self._root = _FilterNode()
        self._routes: dict[bytes, Route] = {}
        self._empty_route = Route()
        # The topic of the last lookup: a publisher often repeats its topic.
        self._last_topic: bytes | None = None
        self._last_route = self._empty_route
        self._bindings: list[TopicBinding] = []
        self.count: int = 0
        self.shared_count: int = 0

    def set_bindings(self, bindings: list[TopicBinding]) -> None:
        """Replace the bindings of all queues."""
        self._bindings = bindings
        self._routes.clear()
        self._last_topic = None

    def add(self, subscription: Subscription) -> bool:
        """Add or replace the subscription of a session and filter; return whether it is new."""
        share_name, topic_filter = split_share(subscription.topic_filter)
        node = self._root
        for level in topic_filter.split(b"/"):
            child = node.children.get(level)
            if child is None:
                child = _FilterNode()
                node.children[level] = child
            node = child
        session = subscription.session
        if share_name:
            shares = node.shares
            if shares is None:
                shares = node.shares = {}
            share = shares.get(share_name)
            if share is None:
                share = SharedSubscription(share_name, topic_filter)
                shares[share_name] = share
            before = len(share.members)
            share.add_member(subscription)
            is_new = len(share.members) > before
            self.shared_count += 1 if is_new else 0
        else:
            subscriptions = node.subscriptions
            if subscriptions is None:
                subscriptions = node.subscriptions = {}
            is_new = session not in subscriptions
            subscriptions[session] = subscription
        self.count += 1 if is_new else 0
        self._invalidate_routes(topic_filter)
        return is_new

    def remove(self, session: Session, topic_filter: bytes) -> bool:
        """Remove a subscription and the levels that become unused; return whether it existed."""
        share_name, topic_filter = split_share(topic_filter)
        levels = topic_filter.split(b"/")
        path: list[_FilterNode] = [self._root]
        for level in levels:
            child = path[-1].children.get(level)
            if child is None:
                return False
            path.append(child)
        node = path[-1]
        if share_name:
            shares = node.shares
            share = shares.get(share_name) if shares is not None else None
            if shares is None or share is None:
                return False
            before = len(share.members)
            share.remove_member(session)
            if len(share.members) == before:
                return False
            self.shared_count -= 1
            if not share.members:
                del shares[share_name]
        elif node.subscriptions is None or node.subscriptions.pop(session, None) is None:
            return False
        self.count -= 1
        for depth in range(len(levels), 0, -1):
            if not path[depth].is_empty():
                break
            del path[depth - 1].children[levels[depth - 1]]
        self._invalidate_routes(topic_filter)
        return True

    def find_share(self, shared_filter: bytes) -> SharedSubscription | None:
        """Return the shared subscription `$share/<name>/<filter>`, if it has members."""
        share_name, topic_filter = split_share(shared_filter)
        node: _FilterNode | None = self._root
        for level in topic_filter.split(b"/"):
            node = node.children.get(level) if node is not None else None
        return node.shares.get(share_name) if node is not None and node.shares is not None else None

    def has_filters_below(self, level: bytes) -> bool:
        """Return whether a subscription begins with this level."""
        return level in self._root.children

    def _invalidate_routes(self, topic_filter: bytes) -> None:
        self._last_topic = None
        if has_wildcard(topic_filter):
            self._routes.clear()
        else:
            self._routes.pop(topic_filter, None)

    def find_route(self, topic: bytes) -> Route:
        if topic is self._last_topic:  # same object: a connection reuses its last topic
            return self._last_route
        route = self._routes.get(topic)
        if route is None:
            route = self._build_route(topic)
            if len(topic) <= MAX_CACHED_TOPIC_BYTES:
                if len(self._routes) >= MAX_CACHED_ROUTES:
                    self._routes.clear()
                self._routes[topic] = route
        self._last_topic = topic
        self._last_route = route
        return route

    def _build_route(self, topic: bytes) -> Route:
        found: list[_FilterNode] = []
        _collect_matches(self._root, topic.split(b"/"), 0, topic[:1] == b"$", found)
        bindings = [one for one in self._bindings if matches(one.topic_filter, topic)]
        if not found and not bindings:
            return self._empty_route
        route = Route()
        route.bindings = bindings
        by_session: dict[Session, list[Subscription]] = {}
        for node in found:
            if node.subscriptions is not None:
                for session, subscription in node.subscriptions.items():
                    by_session.setdefault(session, []).append(subscription)
            if node.shares is not None:
                route.shares.extend(node.shares.values())
        for session, subscriptions in by_session.items():
            route.recipients.append(Recipient(session, subscriptions))
        return route


def _collect_matches(
    node: _FilterNode,
    levels: list[bytes],
    depth: int,
    is_dollar_topic: bool,
    found: list[_FilterNode],
) -> None:
    """Collect every node whose filter matches.

    Wildcards do not match a first level that begins with `$` [MQTT-4.7.2-1].
    """
    allows_wildcards = not (is_dollar_topic and depth == 0)
    if allows_wildcards:
        multi_level = node.children.get(b"#")
        if multi_level is not None:
            found.append(multi_level)
    if depth == len(levels):
        found.append(node)
        return
    child = node.children.get(levels[depth])
    if child is not None:
        _collect_matches(child, levels, depth + 1, is_dollar_topic, found)
    if allows_wildcards:
        child = node.children.get(b"+")
        if child is not None:
            _collect_matches(child, levels, depth + 1, is_dollar_topic, found)
