"""The retained messages: the last message of each topic that was published with the retain flag.

The messages are stored in a tree by topic level. Each level costs memory of its own, so
`total_bytes` counts levels as well as messages, and a level without messages below it is deleted at
once.

A `RetainedWalk` finds the messages for a set of filters in steps, so that the caller can spread the
work over several turns. The tree may change between two steps. Invariant: a message that is in the
tree from the first to the last step is found exactly once for each filter that matches it; a
message that was stored after a filter was added to the walk is not found for that filter, because
its subscription has received it as a live message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from sluice.wire.packets import Publish

RETAINED_FULL: Final = (
    "the limit of retained messages is reached; delete some with an empty payload, "
    "or raise mqtt.max_retained or mqtt.max_retained_bytes"
)


LEVEL_BYTES: Final = 320  # of one level: its object, its dict entry, its own dict


STEPS_PER_SLICE: Final = 128  # levels that a walk visits between two reads of the clock
LOOKUPS_PER_STEP: Final = 8


class _Level:
    def __init__(self) -> None:
        self.children: dict[bytes, _Level] = {}
        self.message: Publish | None = None
        self.is_server_owned: bool = False  # published by the broker, not limited
        # The name begins with `$`: as a first level it does not match wildcards.
        self.is_dollar_level: bool = False
        self.change_number: i64 = 0  # the change of the tree that stored `message`
        # The children in insertion order, for walks. The list only grows, so a walk remembers a
        # position in it. Deleted children stay in it without messages; when they are too many it is
        # rebuilt.
        self._listing: list[_Level] | None = None
        self._removed_count: int = 0

    def list_children(self) -> list[_Level]:
        if self._listing is None:
            self._listing = list(self.children.values())
            self._removed_count = 0
        return self._listing

    def add(self, name: bytes, is_server_owned: bool) -> _Level:
        child = _Level()
        child.is_server_owned = is_server_owned
        child.is_dollar_level = name[:1] == b"$"
        self.children[name] = child
        if self._listing is not None:
            self._listing.append(child)
        return child

    def remove(self, name: bytes) -> None:
        del self.children[name]
        if self._listing is not None:
            self._removed_count += 1
            if 2 * self._removed_count >= len(self._listing):
                self._listing = None  # running walks keep the old list


def _ignore_topic(topic: bytes) -> None:
    """Do nothing with a deleted topic."""


class RetainedMessages:
    """A tree by topic level, so that a filter walks only the topics below its own prefix.

    `on_deleted` is called with each topic whose message was deleted.
    """

    def __init__(
        self,
        limit: int,
        byte_limit: int,
        on_deleted: Callable[[bytes], None] = _ignore_topic,
    ) -> None:
        self._root = _Level()
        self._limit = limit
        self._byte_limit = byte_limit
        self._server_owned_count: int = 0
        self.count: int = 0
        self.payload_bytes: int = 0
        # Bytes that clients have retained: topics, properties, payloads, and LEVEL_BYTES for each
        # level.
        self.total_bytes: int = 0
        self.changes: i64 = 0  # counts stored messages; see `_Level.change_number`
        self._reserved: dict[bytes, Publish] = {}  # waiting for a commit: not visible yet
        self._reserved_bytes: int = 0
        self._on_deleted = on_deleted

    def put(self, message: Publish, is_server_owned: bool) -> bool:
        """Store `message`, or delete the topic's message if the payload is empty [MQTT-3.3.1-6].

        Return False if the limit is reached; the topic then keeps its message. Messages of the
        broker itself (`is_server_owned`, $SYS) do not count against the limit.
        """
        if self._reserved:
            self._cancel_reservation(message.topic)  # this message is newer
        if not message.payload:
            self._delete(message.topic)
            return True
        if not is_server_owned and not self._fits(message):
            return False
        self._set(message, is_server_owned)
        return True

    def _fits(self, message: Publish) -> bool:
        """Return whether `message` fits in the limits, with stored and reserved messages."""
        node = self._root
        missing = 0  # levels
        for level in message.topic.split(b"/"):
            child = node.children.get(level) if missing == 0 else None
            if child is None:
                missing += 1
            else:
                node = child
        before = node.message if missing == 0 else None
        if (
            before is None
            and self.count - self._server_owned_count + len(self._reserved) >= self._limit
        ):
            return False
        grows_by = _size_of(message) - (_size_of(before) if before is not None else 0)
        grows_by += missing * LEVEL_BYTES
        return (
            grows_by <= 0 or self.total_bytes + self._reserved_bytes + grows_by <= self._byte_limit
        )

    def reserve(self, message: Publish) -> bool:
        """Reserve memory for `message` until `commit_reservation`.

        Return False if the limit is reached.
        """
        earlier = self._cancel_reservation(message.topic)
        if message.payload and not self._fits(message):
            if earlier is not None:
                self._add_reservation(earlier)
            return False
        self._add_reservation(message)
        return True

    def is_reserved(self, topic: bytes) -> bool:
        """Return whether a newer message of `topic` waits for its commit.

        `Router.forward_committed` will deliver it to the subscribers, so they need not get the
        current one.
        """
        return topic in self._reserved

    def commit_reservation(self, message: Publish) -> None:
        """Make the committed `message` visible, unless the topic has a newer one by now."""
        if self._reserved.get(message.topic) is message:
            self._cancel_reservation(message.topic)
            if message.payload:
                self._set(message, False)
            else:
                self._delete(message.topic)

    def _add_reservation(self, message: Publish) -> None:
        self._reserved[message.topic] = message
        self._reserved_bytes += _size_with_levels(message)

    def _cancel_reservation(self, topic: bytes) -> Publish | None:
        message = self._reserved.pop(topic, None)
        if message is not None:
            self._reserved_bytes -= _size_with_levels(message)
        return message

    def restore(self, message: Publish) -> None:
        """Restore a stored message, regardless of the limits."""
        self._set(message, False)

    def _set(self, message: Publish, is_server_owned: bool) -> None:
        node = self._root
        for level in message.topic.split(b"/"):
            child = node.children.get(level)
            if child is None:
                child = node.add(level, is_server_owned)
                self.total_bytes += 0 if is_server_owned else LEVEL_BYTES
            node = child
        before = node.message
        if before is None:
            node.is_server_owned = is_server_owned
            self._server_owned_count += 1 if is_server_owned else 0
            self.count += 1
        else:
            self.payload_bytes -= len(before.payload)
            self.total_bytes -= 0 if node.is_server_owned else _size_of(before)
        self.payload_bytes += len(message.payload)
        self.total_bytes += 0 if node.is_server_owned else _size_of(message)
        self.changes += 1
        node.message = message
        node.change_number = self.changes

    def count_of_clients(self) -> int:
        """Return the number of messages that clients have retained: without `$SYS/...`."""
        return self.count - self._server_owned_count

    def _find(self, levels: list[bytes]) -> _Level | None:
        node = self._root
        for level in levels:
            child = node.children.get(level)
            if child is None:
                return None
            node = child
        return node

    def _delete(self, topic: bytes) -> None:
        levels = topic.split(b"/")
        path: list[_Level] = [self._root]
        for level in levels:
            child = path[-1].children.get(level)
            if child is None:
                return
            path.append(child)
        deleted = path[-1].message
        if deleted is None:
            return
        path[-1].message = None
        self._server_owned_count -= 1 if path[-1].is_server_owned else 0
        self.count -= 1
        self.payload_bytes -= len(deleted.payload)
        self.total_bytes -= 0 if path[-1].is_server_owned else _size_of(deleted)
        for depth in range(len(levels), 0, -1):
            if path[depth].children or path[depth].message is not None:
                break
            path[depth - 1].remove(levels[depth - 1])
            self.total_bytes -= 0 if path[depth].is_server_owned else LEVEL_BYTES
        self._on_deleted(topic)

    def find(self, topic: bytes, now: float) -> Publish | None:
        """Return the message of `topic`, unless it has expired."""
        node = self._find(topic.split(b"/"))
        return None if node is None else self._get_unexpired(node, now)

    def _get_unexpired(self, node: _Level, now: float) -> Publish | None:
        message = node.message
        if message is not None and message.expires_at and message.expires_at <= now:
            self._delete(message.topic)
            return None
        return message

    def find_matching(self, topic_filter: bytes, now: float) -> list[Publish]:
        """Return all messages for `topic_filter` at once, regardless of their number."""
        found: list[Match] = []
        walk = self.start_walk()
        walk.add(topic_filter)
        while not walk.advance(STEPS_PER_SLICE, found):
            pass
        messages = [self.get_current(match, now) for match in found]
        return [message for message in messages if message is not None]

    def get_current(self, match: Match, now: float) -> Publish | None:
        """Return the message of a match, if it still applies to the filter."""
        if (
            match.walk_filter.is_cancelled
            or match.level.change_number > match.walk_filter.since_change
        ):
            return None
        return self._get_unexpired(match.level, now)

    def start_walk(self) -> RetainedWalk:
        return RetainedWalk(self, self._root)

    def list_topics(self) -> list[bytes]:
        """Return the topics of all messages, in no order."""
        topics: list[bytes] = []
        nodes: list[_Level] = [self._root]
        while nodes:
            node = nodes.pop()
            if node.message is not None:
                topics.append(node.message.topic)
            nodes.extend(node.children.values())
        return topics

    def delete_expired(self, now: float) -> int:
        """Delete all expired messages and return their number."""
        expired: list[Publish] = []
        nodes: list[_Level] = [self._root]
        while nodes:
            node = nodes.pop()
            message = node.message
            if message is not None and message.expires_at and message.expires_at <= now:
                expired.append(message)
            nodes.extend(node.children.values())
        for message in expired:
            self._delete(message.topic)
        return len(expired)


class WalkFilter:
    """One filter of a walk; messages stored after change `since_change` do not match it."""

    def __init__(self, topic_filter: bytes, since_change: i64) -> None:
        self.topic_filter: bytes = topic_filter
        self.since_change: i64 = since_change
        self.is_cancelled: bool = False


class Match:
    """A topic that a walk has found for a filter; see `RetainedMessages.get_current`."""

    def __init__(self, walk_filter: WalkFilter, level: _Level) -> None:
        self.walk_filter: WalkFilter = walk_filter
        self.level: _Level = level


class _FilterNode:
    """One level of the filters of a walk. As in the subscription tree, filters share prefixes."""

    def __init__(self) -> None:
        self.children: dict[bytes, _FilterNode] = {}
        self.single_level: _FilterNode | None = None
        self.multi_level: _FilterNode | None = None  # the child for `#`
        # This is the node of a `#`: it matches all levels below as well.
        self.is_multi_level: bool = False
        self.walk_filter: WalkFilter | None = None  # the filter that ends here


class _WalkFrame:
    """Levels of the tree that one branch of the filters still has to visit."""

    def __init__(
        self, levels: list[_Level], branch: _FilterNode, includes_dollar_levels: bool
    ) -> None:
        self.levels: list[_Level] = levels
        self.branch: _FilterNode = branch
        # Also visit levels that begin with `$`.
        self.includes_dollar_levels: bool = includes_dollar_levels
        self.position: int = 0
        self.end: int = len(levels)  # levels appended later are newer than the walk


class RetainedWalk:
    """Search for the messages of several filters at once.

    The walk descends the tree and the filters together: `+/+/a` and `+/+/b` visit their common
    levels once. Where a level has fewer children than the filters have names, its children are
    looked up in the filters.
    """

    def __init__(self, retained: RetainedMessages, root: _Level) -> None:
        self._retained: RetainedMessages = retained
        self._root: _Level = root
        self._filters: _FilterNode = _FilterNode()
        self._stack: list[_WalkFrame] = [_WalkFrame([root], self._filters, True)]

    def add(self, topic_filter: bytes, since_change: i64 = -1) -> WalkFilter:
        """Add a filter before the first step; -1: all messages stored so far match."""
        branch = self._filters
        for level in topic_filter.split(b"/"):
            if level == b"#":
                if branch.multi_level is None:
                    branch.multi_level = _FilterNode()
                    branch.multi_level.is_multi_level = True
                branch = branch.multi_level
            elif level == b"+":
                if branch.single_level is None:
                    branch.single_level = _FilterNode()
                branch = branch.single_level
            else:
                child = branch.children.get(level)
                if child is None:
                    child = _FilterNode()
                    branch.children[level] = child
                branch = child
        walk_filter = WalkFilter(
            topic_filter, since_change if since_change >= 0 else self._retained.changes
        )
        branch.walk_filter = walk_filter
        return walk_filter

    def advance(self, steps: int, found: list[Match]) -> bool:
        """Visit at most `steps` levels and append matches; return whether the walk is over."""
        stack = self._stack
        while stack:
            if steps <= 0:
                return False
            frame = stack[-1]
            if frame.position >= frame.end:
                stack.pop()
                continue
            level = frame.levels[frame.position]
            frame.position += 1
            steps -= 1
            if frame.includes_dollar_levels or not level.is_dollar_level:
                steps -= self._visit(level, frame.branch, found)
        return True

    def _visit(self, level: _Level, branch: _FilterNode, found: list[Match]) -> int:
        """Visit a level and return the number of additional steps to charge."""
        walk_filter = branch.walk_filter
        if walk_filter is not None and level.message is not None:
            found.append(Match(walk_filter, level))
        if not level.children:
            if branch.multi_level is not None:
                self._push([level], branch.multi_level)  # `a/#` matches `a`
            return 0
        if branch.is_multi_level:
            self._push_below(level, branch)
            return 0
        if branch.multi_level is not None:
            self._push([level], branch.multi_level)
        if branch.single_level is not None:
            self._push_below(level, branch.single_level)
        if not branch.children:
            return 0
        if len(branch.children) <= len(level.children):
            for name, child_node in branch.children.items():
                child = level.children.get(name)
                if child is not None:
                    self._push([child], child_node)
            return len(branch.children) // LOOKUPS_PER_STEP
        for name, child in level.children.items():
            child_branch = branch.children.get(name)
            if child_branch is not None:
                self._push([child], child_branch)
        return len(level.children) // LOOKUPS_PER_STEP

    def _push(self, levels: list[_Level], branch: _FilterNode) -> None:
        self._stack.append(_WalkFrame(levels, branch, True))

    def _push_below(self, level: _Level, branch: _FilterNode) -> None:
        """Visit the children that a wildcard matches [MQTT-4.7.2-1]."""
        self._stack.append(_WalkFrame(level.list_children(), branch, level is not self._root))


def _size_of(message: Publish) -> int:
    return len(message.topic) + len(message.raw_properties) + len(message.payload)


def _size_with_levels(message: Publish) -> int:
    """Return the maximum size of `message`: as if all of its levels were new."""
    return _size_of(message) + LEVEL_BYTES * (message.topic.count(b"/") + 1)
