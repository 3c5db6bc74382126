"""The last message of each topic that was published with the retain flag."""

from __future__ import annotations

from collections.abc import Callable

from sluice.wire.packets import Publish
from sluice.wire.topics import has_wildcard


class _Level:
    def __init__(self) -> None:
        self.children: dict[bytes, _Level] = {}
        self.message: Publish | None = None
        self.ours: bool = False  # the server's own, outside the limit


class Retained:
    """A tree by topic level, so that a filter walks only the topics below its own prefix."""

    def __init__(self, limit: int) -> None:
        self._root = _Level()
        self._limit = limit
        self._ours: int = 0
        self.count: int = 0
        self.bytes: int = 0
        self.forgotten: Callable[[bytes], None] | None = (
            None  # told of each topic that has no message any more
        )

    def put(self, message: Publish, ours: bool) -> bool:
        """Keep `message`, or with an empty payload forget what its topic had [MQTT-3.3.1-6]; False when full.

        What is `ours` ($SYS) takes no room from clients, and has room when they have none."""
        if not message.payload:
            self._forget(message.topic)
            return True
        levels = message.topic.split(b"/")
        node = self._find(levels)
        if node is not None and node.message is not None:
            self.bytes += len(message.payload) - len(node.message.payload)
            node.message = message
            return True
        if not ours and self.count - self._ours >= self._limit:
            return False
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
        return True

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
