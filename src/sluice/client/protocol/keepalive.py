"""When to ping, and when to give the server up. The time is handed in.

MQTT asks only that we are heard often enough. We also want to hear: a connection whose other end lost its power looks
alive to the kernel for many minutes, so silence is answered with a ping, and silence after that is the end.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    FINE = "fine"
    PING = "ping"
    DEAD = "dead"


class KeepAlive:
    def __init__(self, seconds: float, now: float) -> None:
        self.seconds = seconds
        self.sent_at = now
        self.heard_at = now
        self._pinged_at: float | None = None

    @property
    def answer_seconds(self) -> float:
        """How long a ping may stay unanswered."""
        return self.seconds / 2

    def heard(self, now: float) -> None:
        """Any byte is a sign of life."""
        self.heard_at = now
        self._pinged_at = None

    def judge(self, now: float) -> Verdict:
        if self._pinged_at is not None:
            return Verdict.DEAD if now >= self._pinged_at + self.answer_seconds else Verdict.FINE
        if now >= self._silent_since() + self.seconds:
            self._pinged_at = now
            return Verdict.PING
        return Verdict.FINE

    def next_look(self) -> float:
        """When to call `judge` again."""
        if self._pinged_at is not None:
            return self._pinged_at + self.answer_seconds
        return self._silent_since() + self.seconds

    def excuse(self, now: float) -> None:
        """We were not reading, so the silence is ours."""
        self._pinged_at = None
        self.heard_at = now

    def _silent_since(self) -> float:
        return min(self.sent_at, self.heard_at)
