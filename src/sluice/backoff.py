"""Delays between the attempts of an action that fails: they grow, have a limit and a random part.

The module counts nothing and never sleeps: the caller has the number of the attempt, the random
number and the clock.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait between attempts."""

    initial_seconds: float = 0.1
    multiplier: float = 2.0
    max_seconds: float = 30.0
    # After a connection that lasted this long, the delay starts at `initial_seconds` again.
    stable_seconds: float = 5.0

    def delay(self, attempt: int, draw: float = 1.0) -> float:
        """Return the seconds to wait after failed attempt number `attempt`, from 0 on.

        Half of the delay depends on `draw`, from 0 to 1. Without a random part, all clients of a
        restarting server would reconnect at the same instant.
        """
        step = min(self.initial_seconds * self.multiplier ** min(attempt, 60), self.max_seconds)
        return step / 2 + step / 2 * draw
