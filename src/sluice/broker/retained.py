"""The last message of each topic that was published with the retain flag."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from sluice.wire.packets import Publish
from sluice.wire.topics import has_wildcard

FULL: Final = (
    "the server keeps no more retained messages; delete some by an empty payload, "
    "or raise mqtt.max_retained or mqtt.max_retained_bytes"
)


class _Level:
    def __init__(self) -> None:
        self.children: dict[bytes, _Level] = {}
        self.message: Publish | None = None
        self.ours: bool = False  # the server's own, outside the limit


class Retained:
    """A tree by topic level, so that a filter walks only the topics below its own prefix."""

    def __init__(self, limit: int, byte_limit: int) -> None:
        self._root = _Level()
        self._limit = limit
        self._byte_limit = byte_limit
        self._ours: int = 0
        self.count: int = 0
        self.bytes: int = 0  # of payloads
        self.held_bytes: int = 0  # of all that clients have retained: topics, properties and payloads
        self._promised: dict[bytes, Publish] = {}  # on their way to the store: nobody sees them yet
        self._promised_bytes: int = 0
        self.forgotten: Callable[[bytes], None] | None = (
            None  # told of each topic that has no message any more
        )

    def put(self, message: Publish, ours: bool) -> bool:
        """Keep `message`, or with an empty payload forget what its topic had [MQTT-3.3.1-6]; False when full: then what
        the topic had stays.

        What is `ours` ($SYS) takes no room from clients, and has room when they have none."""
        if self._promised:
            self._withdraw(message.topic)  # this one is newer
        if not message.payload:
            self._forget(message.topic)
            return True
        if not ours and not self._fits(message):
            return False
        self._set(message, ours)
        return True

    def _fits(self, message: Publish) -> bool:
        """Return whether there is room for `message` beside what is kept and promised."""
        node = self._find(message.topic.split(b"/"))
        before = node.message if node is not None else None
        if before is None and self.count - self._ours + len(self._promised) >= self._limit:
            return False
        grows_by = _size_of(message) - (_size_of(before) if before is not None else 0)
        return grows_by <= 0 or self.held_bytes + self._promised_bytes + grows_by <= self._byte_limit

    def promise(self, message: Publish) -> bool:
        """Reserve room for `message`, which `redeem` puts in its place; False when full."""
        earlier = self._withdraw(message.topic)
        if message.payload and not self._fits(message):
            if earlier is not None:
                self._reserve(earlier)
            return False
        self._reserve(message)
        return True

    def redeem(self, message: Publish) -> None:
        """The store has `message`: show it, unless the topic has had a newer one since."""
        if self._promised.get(message.topic) is message:
            self._withdraw(message.topic)
            if message.payload:
                self._set(message, False)
            else:
                self._forget(message.topic)

    def _reserve(self, message: Publish) -> None:
        self._promised[message.topic] = message
        self._promised_bytes += _size_of(message)

    def _withdraw(self, topic: bytes) -> Publish | None:
        message = self._promised.pop(topic, None)
        if message is not None:
            self._promised_bytes -= _size_of(message)
        return message

    def restore(self, message: Publish) -> None:
        """Keep a message that the store has: it was taken, whatever the limits are now."""
        self._set(message, False)

    def _set(self, message: Publish, ours: bool) -> None:
        levels = message.topic.split(b"/")
        size = 0 if ours else _size_of(message)
        node = self._find(levels)
        if node is not None and node.message is not None:
            self.bytes += len(message.payload) - len(node.message.payload)
            self.held_bytes += size - (0 if node.ours else _size_of(node.message))
            node.message = message
            return
        node = self._root
        for level in levels:
            child = node.children.get(level)
            if child is None:
                child = _Level()
                node.children[level] = child
            node = child
        node.message = message
        node.ours = ours
        self._ours += 1 if ours else 0
        self.count += 1
        self.bytes += len(message.payload)
        self.held_bytes += size

    def _find(self, levels: list[bytes]) -> _Level | None:
        node = self._root
        for level in levels:
            child = node.children.get(level)
            if child is None:
                return None
            node = child
        return node

    def _forget(self, topic: bytes) -> None:
        levels = topic.split(b"/")
        path: list[_Level] = [self._root]
        for level in levels:
            child = path[-1].children.get(level)
            if child is None:
                return
            path.append(child)
        gone = path[-1].message
        if gone is None:
            return
        path[-1].message = None
        self._ours -= 1 if path[-1].ours else 0
        self.count -= 1
        self.bytes -= len(gone.payload)
        self.held_bytes -= 0 if path[-1].ours else _size_of(gone)
        for depth in range(len(levels), 0, -1):
            if path[depth].children or path[depth].message is not None:
                break
            del path[depth - 1].children[levels[depth - 1]]
        if self.forgotten is not None:
            self.forgotten(topic)

    def matching(self, topic_filter: bytes, now: float) -> list[Publish]:
        """What a new subscription to `topic_filter` gets; what has expired is forgotten on the way."""
        found: list[Publish] = []
        levels = topic_filter.split(b"/")
        if not has_wildcard(topic_filter):
            node = self._find(levels)
            if node is not None and node.message is not None:
                found.append(node.message)
        else:
            _gather(self._root, levels, 0, found)
        living: list[Publish] = []
        for message in found:
            if message.expires_at and message.expires_at <= now:
                self._forget(message.topic)
            else:
                living.append(message)
        return living

    def sweep(self, now: float) -> int:
        """Forget all that has expired; how many that were."""
        every: list[Publish] = []
        _gather_all(self._root, False, every)
        expired = [message for message in every if message.expires_at and message.expires_at <= now]
        for message in expired:
            self._forget(message.topic)
        return len(expired)


def _size_of(message: Publish) -> int:
    return len(message.topic) + len(message.raw) + len(message.payload)


def _gather(node: _Level, levels: list[bytes], depth: int, found: list[Publish]) -> None:
    if depth == len(levels):
        if node.message is not None:
            found.append(node.message)
        return
    level = levels[depth]
    if level == b"#":
        _gather_all(node, depth == 0, found)
    elif level == b"+":
        for name, child in node.children.items():
            if depth > 0 or name[:1] != b"$":
                _gather(child, levels, depth + 1, found)
    else:
        exact = node.children.get(level)
        if exact is not None:
            _gather(exact, levels, depth + 1, found)


def _gather_all(node: _Level, top: bool, found: list[Publish]) -> None:
    """`node` and everything below it; at the top of the tree topics that begin with `$` stay hidden."""
    if node.message is not None:
        found.append(node.message)
    for name, child in node.children.items():
        if not (top and name[:1] == b"$"):
            _gather_all(child, False, found)
