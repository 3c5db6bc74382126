"""Consumers of queues that found their client's line full: first come, first served.

A client may read ten thousand queues over one line. When the line has room again they are not all asked, but one after
the other, as long as there is some of it left: a message costs the same however many queues its client reads.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer


class Starving:
    def __init__(self) -> None:
        self._line: deque[QueueConsumer] = deque()

    def add(self, consumer: QueueConsumer) -> None:
        """It was turned away."""
        if not consumer.is_starving:
            consumer.is_starving = True
            self._line.append(consumer)

    def next(self) -> QueueConsumer | None:
        """Who has waited the longest; it waits no more."""
        if not self._line:
            return None
        consumer = self._line.popleft()
        consumer.is_starving = False
        return consumer

    def remove(self, consumer: QueueConsumer) -> None:
        """It reads no more."""
        if consumer.is_starving:
            consumer.is_starving = False
            self._line.remove(consumer)

    def count(self) -> int:
        return len(self._line)
