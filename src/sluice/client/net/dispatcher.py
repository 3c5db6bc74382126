"""Route received messages by topic to the parts of the client.

One connection serves several consumers, the replies to requests, and `client.messages()`. A
receiver registers its topics; all other messages go to the receive buffer. The number of messages
to a receiver is bounded by its own requests (a prefetch, the number of open requests), so the limit
of the receive buffer does not apply to it.
"""

from __future__ import annotations

from typing import Final, Protocol

from sluice.client.errors import ClientError
from sluice.client.message import Message
from sluice.wire.topics import matches

MAX_CACHED_TOPICS: Final = 1024  # topics whose receiver is cached


class Receiver(Protocol):
    """Receives messages. Called while the socket is read: it must be quick and must not raise."""

    def receive(self, message: Message) -> None: ...

    def flush(self) -> None:
        """Send now what is scheduled for the end of the turn."""

    async def leave(self) -> None:
        """Release unsettled deliveries, before the client closes."""

    def on_reconnected(self) -> None:
        """Handle a new connection."""

    def on_session_lost(self) -> None:
        """Handle the loss of the session: the server redelivers what it had delivered to us."""

    def end(self, error: ClientError | None) -> None:
        """End the receiver; `error` is set if the connection is lost for good."""


class TopicDispatcher:
    __slots__ = ("_cache", "_routes")

    def __init__(self) -> None:
        self._routes: list[tuple[bytes, Receiver]] = []
        self._cache: dict[str, Receiver | None] = {}

    def __bool__(self) -> bool:
        return bool(self._routes)

    def add(self, topic_filter: str, receiver: Receiver) -> None:
        """Register a receiver before all others.

        So replies do not go to the consumer of a wildcard filter.
        """
        self._routes.insert(0, (topic_filter.encode(), receiver))
        self._cache.clear()

    def remove(self, receiver: Receiver) -> None:
        self._routes = [route for route in self._routes if route[1] is not receiver]
        self._cache.clear()

    def has_filter(self, topic_filter: str) -> bool:
        """Return whether a receiver is registered for exactly this filter."""
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
