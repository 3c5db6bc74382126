"""The decisions of a handler about its message: try again, or reject with one of two reasons.

Arguments and the property `reason` of `$reject` are written `delivery-error` and `unacceptable`;
dead letters record `DeliveryError` and `Unacceptable`. Both spellings are accepted everywhere.

A response with the user property `response-error` reports that its request failed, and the property
is its text. `response-error-type` is optional, the name of the error's class. The payload is the
text again, for callers that do not know the properties. Any MQTT 5.0 client can send such a
response.
"""

from __future__ import annotations

from typing import Final, Literal

from sluice.client.errors import Unsupported
from sluice.client.payload_codecs import UnreadablePayload

Reason = Literal["delivery-error", "unacceptable", "DeliveryError", "Unacceptable"]

DELIVERY_ERROR: Final = "delivery-error"
UNACCEPTABLE: Final = "unacceptable"
RECORDED_SPELLINGS: Final = {DELIVERY_ERROR: "DeliveryError", UNACCEPTABLE: "Unacceptable"}
_BY_SPELLING: Final = {
    spelling: reason
    for reason, recorded in RECORDED_SPELLINGS.items()
    for spelling in (reason, recorded)
}

RESPONSE_ERROR: Final = "response-error"
RESPONSE_ERROR_TYPE: Final = "response-error-type"
MAX_DESCRIPTION_CHARS: Final = 1000


def normalize_reason(reason: str | None) -> str:
    """Return `delivery-error` or `unacceptable` for either spelling; None is a delivery error."""
    try:
        return DELIVERY_ERROR if reason is None else _BY_SPELLING[reason]
    except KeyError:
        raise Unsupported(
            f"reason is {reason!r}",
            "Use delivery-error or unacceptable, also spelled DeliveryError or Unacceptable",
        ) from None


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
    text = _as_one_line(text)
    return text if len(text) <= MAX_DESCRIPTION_CHARS else text[: MAX_DESCRIPTION_CHARS - 1] + "…"


def error_response(error: BaseException | str) -> tuple[str, dict[str, str]]:
    """Return payload and headers of the response to a request that failed."""
    text, error_type = str(error), "" if isinstance(error, str) else type(error).__name__
    text = _as_one_line(text)[:MAX_DESCRIPTION_CHARS]
    text = text or error_type or "the request failed"
    headers = {RESPONSE_ERROR: text}
    if error_type:
        headers[RESPONSE_ERROR_TYPE] = error_type
    return text, headers


def _as_one_line(text: str) -> str:
    """Replace what no MQTT string has (NUL, surrogates) and no table row (line breaks)."""
    return "".join(one if one.isprintable() else " " for one in text)
