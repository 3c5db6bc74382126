"""Consumers of queues that found their client's line full: first come, first served.

A client may read ten thousand queues over one line. When the line has room again they are not all asked, but one after
the other, as long as there is some of it left: a message costs the same however many queues its client reads.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.broker.namespaces.queues.queue_consumer import QueueConsumer


class BlockedConsumers:
    def __init__(self) -> None:
        self._fifo: deque[QueueConsumer] = deque()

    def add(self, consumer: QueueConsumer) -> None:
        """It was turned away."""
        if not consumer.is_blocked:
            consumer.is_blocked = True
            self._fifo.append(consumer)

    def pop_next(self) -> QueueConsumer | None:
        """Who has waited the longest; it waits no more."""
        if not self._fifo:
            return None
        consumer = self._fifo.popleft()
        consumer.is_blocked = False
        return consumer

    def remove(self, consumer: QueueConsumer) -> None:
        """It reads no more."""
        if consumer.is_blocked:
            consumer.is_blocked = False
            self._fifo.remove(consumer)

    def count(self) -> int:
        return len(self._fifo)
