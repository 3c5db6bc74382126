"""Decide when to ping and when to give up the server. The caller passes the time.

MQTT only requires that we send often enough. We also need to receive: a connection whose other end
lost its power looks alive to the kernel for many minutes. So after silence we send a ping, and
after more silence we end the connection.
"""

from __future__ import annotations

from enum import Enum


class KeepAliveAction(Enum):
    WAIT = "fine"
    PING = "ping"
    TIMED_OUT = "dead"


class KeepAlive:
    def __init__(self, seconds: float, now: float) -> None:
        self.seconds = seconds
        self.sent_at = now
        self.received_at = now
        self._pinged_at: float | None = None

    @property
    def answer_seconds(self) -> float:
        """Return how long a ping may stay unanswered."""
        return self.seconds / 2

    def on_received(self, now: float) -> None:
        """Record received data, as a sign of life."""
        self.received_at = now
        self._pinged_at = None

    def check(self, now: float) -> KeepAliveAction:
        if self._pinged_at is not None:
            return (
                KeepAliveAction.TIMED_OUT
                if now >= self._pinged_at + self.answer_seconds
                else KeepAliveAction.WAIT
            )
        if now >= self._silent_since() + self.seconds:
            self._pinged_at = now
            return KeepAliveAction.PING
        return KeepAliveAction.WAIT

    def next_check_at(self) -> float:
        """Return when to call `check` again."""
        if self._pinged_at is not None:
            return self._pinged_at + self.answer_seconds
        return self._silent_since() + self.seconds

    def reset_silence(self, now: float) -> None:
        """Restart the measurement, because the silence is due to our own read pause."""
        self._pinged_at = None
        self.received_at = now

    def _silent_since(self) -> float:
        return min(self.sent_at, self.received_at)
