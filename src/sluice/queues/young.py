"""The bodies of messages that are likely to be delivered soon, within one budget for all queues.

A consumer that keeps up never causes a read. When the budget is used up, the partitions that have held something the
longest give up their oldest half first.
"""

from __future__ import annotations

from collections import deque

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.partition import Partition


class Young:
    def __init__(self, budget: int) -> None:
        self.budget: i64 = budget
        self.bytes: i64 = 0
        self._holders: deque[Partition] = deque()

    def put(self, partition: Partition, seq: i64, message: Message) -> None:
        if not partition.is_holder:
            partition.is_holder = True
            self._holders.append(partition)
        partition.young[int(seq)] = message
        message.cost = message.size()
        self.bytes += message.cost
        if self.bytes > self.budget:
            self._make_room()

    def drop(self, partition: Partition, seq: i64) -> None:
        message = partition.young.pop(int(seq), None)
        if message is not None:
            self.bytes -= message.cost

    def forget(self, partition: Partition) -> None:
        """The partition itself is gone."""
        for message in partition.young.values():
            self.bytes -= message.cost
        partition.young = {}
        if partition.is_holder:
            partition.is_holder = False
            self._holders.remove(partition)

    def _make_room(self) -> None:
        for _ in range(len(self._holders)):
            partition = self._holders.popleft()
            young = partition.young
            for seq in list(young)[: (len(young) + 1) // 2]:
                self.bytes -= young.pop(seq).cost
            if young:
                self._holders.append(partition)
            else:
                partition.is_holder = False
            if self.bytes <= self.budget:
                return
