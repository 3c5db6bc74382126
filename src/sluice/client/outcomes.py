"""Exceptions by which a handler decides about its message, and the description of failures."""

from __future__ import annotations

from typing import Final

from sluice.client.payload_codecs import UnreadablePayload
from sluice.client.rejection_reasons import Reason

MAX_DESCRIPTION_CHARS: Final = 1000


class Retry(Exception):
    """Raise it to try again after `delay` (seconds or "5m"), or after the configured delay."""

    def __init__(self, description: str = "", delay: float | str | None = None) -> None:
        super().__init__(description)
        self.delay = delay


class Reject(Exception):
    """Raise it for a message that can never succeed: it becomes a dead letter at once.

    `reason="unacceptable"` sends it to the invalid-message channel, if there is one.
    """

    def __init__(self, description: str = "", reason: Reason | None = None) -> None:
        super().__init__(description)
        self.reason: Reason = reason or "delivery-error"


def describe(error: BaseException) -> str:
    """Return the description of a failure, which is stored with a dead letter."""
    text = str(error)
    if not isinstance(error, Retry | Reject | UnreadablePayload):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # An MQTT string has no NUL and no surrogates, and a table row no line breaks.
    text = "".join(one if one.isprintable() else " " for one in text)
    return text if len(text) <= MAX_DESCRIPTION_CHARS else text[: MAX_DESCRIPTION_CHARS - 1] + "…"
