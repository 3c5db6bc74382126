"""Acknowledgements of settlements whose dead letters are not written yet.

A dead letter and its settlement are in one frame. If the body must be read first, that frame is a
later one than the open frame at the time of the command. A kill before it loses the command, so its
acknowledgement waits for it.
"""

from __future__ import annotations

from collections import deque

from mypy_extensions import i64

from sluice.queues.model import DEAD_LETTERING, EngineState, Lease
from sluice.queues.ports import Publisher


class _PendingSettlement:
    """A command that settled deliveries, and those of them whose bodies are read."""

    def __init__(self, publisher: Publisher, tag: i64, leases: list[Lease]) -> None:
        self.publisher: Publisher = publisher
        self.tag: i64 = tag
        self.leases: list[Lease] = leases


class PendingDeadLetters:
    """The commands in the order of their arrival, in which they are also acknowledged."""

    def __init__(self, state: EngineState) -> None:
        self._state: EngineState = state
        self._settlements: deque[_PendingSettlement] = deque()

    def add_waiter(self, publisher: Publisher, tag: i64, leases: list[Lease]) -> None:
        """Notify `publisher` of the commit after none of `leases` is DEAD_LETTERING any more."""
        self._settlements.append(_PendingSettlement(publisher, tag, leases))

    def end_turn(self) -> None:
        """Let the commands wait for the open frame whose deliveries have ended in any way."""
        settlements = self._settlements
        while settlements:
            first = settlements[0]
            for lease in first.leases:
                if lease.state == DEAD_LETTERING:
                    return
            settlements.popleft()
            first.publisher.on_written(first.tag)
            self._state.frame_builder.add_commit_waiter(first.publisher, first.tag)
