"""The two reasons of a rejection, and their two spellings.

Arguments and the property `reason` of `$reject` are written `delivery-error` and `unacceptable`;
dead letters record `DeliveryError` and `Unacceptable`. Both spellings are accepted everywhere.
"""

from __future__ import annotations

from typing import Final, Literal

from sluice.client.errors import Unsupported

Reason = Literal["delivery-error", "unacceptable", "DeliveryError", "Unacceptable"]

DELIVERY_ERROR: Final = "delivery-error"
UNACCEPTABLE: Final = "unacceptable"
RECORDED_SPELLINGS: Final = {DELIVERY_ERROR: "DeliveryError", UNACCEPTABLE: "Unacceptable"}
_BY_SPELLING: Final = {
    spelling: reason
    for reason, recorded in RECORDED_SPELLINGS.items()
    for spelling in (reason, recorded)
}


def normalize_reason(reason: str | None) -> str:
    """Return `delivery-error` or `unacceptable` for either spelling; None is a delivery error."""
    try:
        return DELIVERY_ERROR if reason is None else _BY_SPELLING[reason]
    except KeyError:
        raise Unsupported(
            f"reason is {reason!r}",
            "Use delivery-error or unacceptable, also spelled DeliveryError or Unacceptable",
        ) from None
