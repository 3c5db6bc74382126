"""Parses a payload as JSON and counts what determines the cost of a check.

The schema library computes with fractions of any size. It compares 64-bit integers at once; any
other number (a float, a longer integer) takes microseconds, and one with a large exponent ten times
as long. `ParsedPayload` counts such numbers during parsing.
"""

from __future__ import annotations

import json
from typing import Final

MAX_DIGITS: Final = 100  # of an integer
LONG_DIGITS: Final = 19  # fewer fit into 64 bits
EXTREME_DIGITS: Final = 30
EXTREME_WEIGHT: Final = 10
LARGE_NUMBER: Final = 1e30
SMALL_NUMBER: Final = 1e-30

_DIGITS_TO_ZERO: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_ZEROS: Final = b"0" * LONG_DIGITS


class IntegerTooLong(ValueError):
    """An integer with more digits than MAX_DIGITS."""

    def __init__(self, digits: int) -> None:
        super().__init__(
            f"it has an integer of {digits:,} digits, and at most {MAX_DIGITS} can be checked; "
            "send it as a string"
        )


class ParsedPayload:
    """A payload, parsed once: `value`, and `weight`, the weighted count of slow numbers."""

    def __init__(self, payload: bytes, counts_floats: bool) -> None:
        """Raise ValueError or RecursionError for invalid JSON, IntegerTooLong for long integers.

        Floats are counted only on request, because that calls a function for each of them.
        """
        self.slow_number_weight = 0
        # Digits in strings match too: then integers are checked one by one, with the same result.
        has_long = _LONG_ZEROS in payload.translate(_DIGITS_TO_ZERO)
        self.value: object = json.loads(
            payload,
            parse_float=self._read_float if counts_floats else None,
            parse_int=self._read_int if has_long else None,
        )

    def _read_float(self, text: str) -> float:
        number = float(text)
        size = abs(number)
        self.slow_number_weight += (
            1 if SMALL_NUMBER < size < LARGE_NUMBER or not number else EXTREME_WEIGHT
        )
        return number

    def _read_int(self, text: str) -> int:
        digits = len(text)
        if digits > MAX_DIGITS:
            raise IntegerTooLong(digits)
        if digits >= LONG_DIGITS:
            self.slow_number_weight += 1 if digits <= EXTREME_DIGITS else EXTREME_WEIGHT
        return int(text)


def count_values(payload: bytes) -> int:
    """Return an upper bound for the values in a JSON text.

    Each value is the first one or follows a comma or a bracket.
    """
    return 1 + payload.count(b",") + count_brackets(payload)


def count_brackets(payload: bytes) -> int:
    return payload.count(b"[") + payload.count(b"{")


def measure_depth(value: object, limit: int) -> int:
    """Return how many levels of values are inside a value; counting stops at `limit`."""
    level = [value]
    for depth in range(limit):
        level = [inner for one in level for inner in _nested_values(one)]
        if not level:
            return depth
    return limit


def _nested_values(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
