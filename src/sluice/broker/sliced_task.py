"""A piece of work that is done in slices, so that it does not hold the event loop.

Each turn of the event loop does at most TURN_SECONDS of one piece and then serves other connections.
The work must leave the broker in a valid state after each step: anything may happen between two of them.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice.broker.turn import MAX_SLICE_SECONDS, Turn


class SlicedTask:
    """`begin` prepares a turn, as each packet of a client does."""

    def __init__(self, turn: Turn, begin: Callable[[], None]) -> None:
        self._turn: Turn = turn
        self._begin = begin
        self.is_cancelled: bool = False

    def step(self) -> bool:
        """Do a small part of the work. Return whether there is more."""
        raise NotImplementedError

    def start(self) -> None:
        """Do the first slice, in the present turn."""
        self._run(self._turn.now)

    def _resume(self) -> None:
        if not self.is_cancelled:
            self._run(self._turn.begin())

    def _run(self, started: float) -> None:
        self._begin()
        while not self.is_cancelled and self.step():
            if self._turn.current_time() - started > MAX_SLICE_SECONDS:
                self._turn.resume_later(self._resume)
                return
