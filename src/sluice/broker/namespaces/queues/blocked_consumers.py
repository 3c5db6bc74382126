"""Queue consumers that found their client's connection without capacity, in FIFO order.

A client may consume ten thousand queues over one connection. When the connection has capacity
again, the consumers are asked one after the other while capacity is left: the cost of a message
does not depend on the number of queues that its client consumes.
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
        """Add a consumer whose session had no capacity."""
        if not consumer.is_blocked:
            consumer.is_blocked = True
            self._fifo.append(consumer)

    def pop_next(self) -> QueueConsumer | None:
        """Remove and return the consumer that has waited longest, or None."""
        if not self._fifo:
            return None
        consumer = self._fifo.popleft()
        consumer.is_blocked = False
        return consumer

    def remove(self, consumer: QueueConsumer) -> None:
        """Remove a consumer that leaves its queue."""
        if consumer.is_blocked:
            consumer.is_blocked = False
            self._fifo.remove(consumer)

    def count(self) -> int:
        return len(self._fifo)
