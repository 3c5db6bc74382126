"""Which part of the application a message is for, told by its topic.

One connection serves several consumers, the answers to requests, and whoever reads `client.messages()`. A receiver says
which topics are its own; everything else goes to the inbox. What receivers are sent is bounded by what they asked for
(a prefetch, a number of open requests), so the inbox's limit is not theirs.
"""

from __future__ import annotations

from typing import Final, Protocol

from sluice.client.errors import ClientError
from sluice.client.message import Message
from sluice.wire.topics import matches

MAX_CACHED_TOPICS: Final = 1024  # topics whose receiver is remembered


class Receiver(Protocol):
    """Called while the socket is read: it must be short, and must not raise."""

    def receive(self, message: Message) -> None: ...

    def flush(self) -> None:
        """Say now what was to be said at the end of the turn."""

    async def leave(self) -> None:
        """The client is about to close: say goodbye, and give back what is not settled."""

    def on_reconnected(self) -> None:
        """There is another connection than before."""

    def on_session_lost(self) -> None:
        """The server has forgotten the session: what it had given us, it gives again."""

    def end(self, error: ClientError | None) -> None:
        """Nothing more will come; with an error, because the connection is lost for good."""


class TopicDispatcher:
    __slots__ = ("_cache", "_routes")

    def __init__(self) -> None:
        self._routes: list[tuple[bytes, Receiver]] = []
        self._cache: dict[str, Receiver | None] = {}

    def __bool__(self) -> bool:
        return bool(self._routes)

    def add(self, topic_filter: str, receiver: Receiver) -> None:
        """The last added goes first: answers are told apart from a queue that a wildcard would mean as well."""
        self._routes.insert(0, (topic_filter.encode(), receiver))
        self._cache.clear()

    def remove(self, receiver: Receiver) -> None:
        self._routes = [route for route in self._routes if route[1] is not receiver]
        self._cache.clear()

    def has_filter(self, topic_filter: str) -> bool:
        """Whether somebody has said that these topics are its own."""
        return any(known == topic_filter.encode() for known, _ in self._routes)

    def find(self, topic: str) -> Receiver | None:
        try:
            return self._cache[topic]
        except KeyError:
            pass
        name = topic.encode()
        found = next(
            (one for topic_filter, one in self._routes if matches(topic_filter, name)), None
        )
        if len(self._cache) >= MAX_CACHED_TOPICS:
            self._cache.clear()
        self._cache[topic] = found
        return found

    def receivers(self) -> list[Receiver]:
        return list(dict.fromkeys(receiver for _, receiver in self._routes))
