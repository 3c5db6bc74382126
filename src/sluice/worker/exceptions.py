"""How a handler says what is to become of its job, other than by returning, and the words for what went wrong."""

from __future__ import annotations

from typing import Final

from sluice.client import UnreadablePayload
from sluice.client.queues.delivery import Reason

MAX_DESCRIPTION_CHARS: Final = 1000


class Retry(Exception):
    """Raise it to have the job again: after `delay` (seconds, or "5m"), or after the queue's own backoff."""

    def __init__(self, description: str = "", delay: float | str | None = None) -> None:
        super().__init__(description)
        self.delay = delay


class Reject(Exception):
    """Raise it for a job that will never succeed: it becomes a dead letter now. `reason="unacceptable"` sends it to the
    invalid-message channel, where the queue has one."""

    def __init__(self, description: str = "", reason: Reason = "delivery-error") -> None:
        super().__init__(description)
        self.reason: Reason = reason


def describe(error: BaseException) -> str:
    """What is told to the broker, and by it to whoever looks at the dead letters."""
    text = str(error)
    if not isinstance(error, Retry | Reject | UnreadablePayload):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # A string of MQTT has no NUL and no half characters, and a line of a table no line breaks.
    text = "".join(one if one.isprintable() else " " for one in text)
    return text if len(text) <= MAX_DESCRIPTION_CHARS else text[: MAX_DESCRIPTION_CHARS - 1] + "…"
