"""The bodies of messages that are likely to be delivered soon, within one budget for all queues, on two shelves.

Young: as they were published. A consumer that keeps up never causes a read. When there is no room, the partitions that
have held something the longest give up their oldest half first.

Ahead: as they were read, for one cursor that will want them next. They are most of what is wanted soon, so they may
take three quarters of the room, and the young give way; among themselves the cursors give up what they want last.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, cast

from mypy_extensions import i64

from sluice.message import Message
from sluice.queues.model.partition import Partition

if TYPE_CHECKING:
    from sluice.queues.model.cursor import Cursor


class Young:
    def __init__(self, budget: int) -> None:
        self.budget: i64 = budget
        self.bytes: i64 = 0  # on both shelves
        self.ahead_bytes: i64 = 0
        self._holders: deque[Partition] = deque()
        self._readers: deque[Cursor] = deque()

    # ---- young

    def put(self, partition: Partition, seq: i64, message: Message) -> None:
        if not partition.is_holder:
            partition.is_holder = True
            if not partition.young:
                partition.young = {}  # before, all partitions without any share one
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

    # ---- ahead

    def room_ahead(self) -> i64:
        """How much may be read ahead before somebody has to give up something."""
        return max(0, self.budget - self.budget // 4 - self.ahead_bytes)

    def put_ahead(self, cursor: Cursor, seq: i64, message: Message) -> None:
        if not cursor.is_reader:
            cursor.is_reader = True
            cursor.ahead = {}
            self._readers.append(cursor)
        cursor.ahead[int(seq)] = message
        message.cost = message.size()
        self.bytes += message.cost
        self.ahead_bytes += message.cost
        if self.ahead_bytes > self.budget - self.budget // 4:
            self._make_room_ahead()
        if self.bytes > self.budget:
            self._make_room()

    def drop_ahead(self, cursor: Cursor, seq: i64) -> None:
        message = cursor.ahead.pop(int(seq), None)
        if message is not None:
            self._took(message)

    def forget_ahead(self, cursor: Cursor) -> None:
        """The cursor has nobody to deliver to, or wants something else now."""
        if cursor.is_reader:
            for message in cursor.ahead.values():
                self._took(message)
            cursor.ahead = {}
            cursor.is_reader = False
            cursor.read_to = 0
            self._readers.remove(cursor)

    def _took(self, message: Message) -> None:
        self.bytes -= message.cost
        self.ahead_bytes -= message.cost

    def _make_room_ahead(self) -> None:
        for _ in range(len(self._readers)):
            cursor = self._readers.popleft()
            ahead = cursor.ahead
            for number in list(ahead)[len(ahead) // 2 :]:
                self._took(ahead.pop(number))
                seq: i64 = cast(int, number)
                if seq < cursor.read_to:
                    cursor.read_to = seq
            if ahead:
                self._readers.append(cursor)
            else:
                cursor.is_reader = False
            if self.ahead_bytes <= self.budget - self.budget // 4:
                return
