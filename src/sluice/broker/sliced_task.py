"""Work that runs in slices, so that it does not block the event loop.

Each turn of the event loop runs one task for at most MAX_SLICE_SECONDS and then serves other
connections. The task must leave the broker in a valid state after each step: anything may happen
between two steps.
"""

from __future__ import annotations

from collections.abc import Callable

from sluice.broker.turn import MAX_SLICE_SECONDS, Turn


class SlicedTask:
    """Run `step` until it returns False.

    `begin` prepares a turn, as it does for a client's packet.
    """

    def __init__(self, turn: Turn, begin: Callable[[], None]) -> None:
        self._turn: Turn = turn
        self._begin = begin
        self.is_cancelled: bool = False

    def step(self) -> bool:
        """Do a small part of the work and return whether there is more."""
        raise NotImplementedError

    def start(self) -> None:
        """Run the first slice in the current turn."""
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
