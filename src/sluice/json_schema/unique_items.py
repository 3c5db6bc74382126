"""The keyword `uniqueItems`, in time proportional to the array.

The library's own check puts items into a hash table, but its hash ignores brackets and gives all
large integers that round to the same double one value: `[[], [[]], [[], []], ...]` or integers
beyond 2^53 make it compare every item with every other one. Here each item becomes a key whose hash
a publisher cannot choose: text (Python hashes text with a secret), or a number of at most 64 bits.

Items are equal as JSON Schema defines it: 1 and 1.0 are equal, 1 and true are not, the order of an
object's members does not matter.
"""

from __future__ import annotations

import re
from typing import Final

NOT_UNIQUE: Final = "the items are not unique"

_CONSTANTS: Final = {None: b"null", False: b"false", True: b"true"}
_MAX_WORD: Final = 1 << 64
# An integer that may equal a float in exponent notation.
_LONG_NUMBER: Final = re.compile("[0-9]{19}")


class UniqueItems:
    """The keyword in the form that jsonschema-rs calls: `validate` raises for an error."""

    def __init__(self, parent: object, value: object, path: object) -> None:
        self._is_enabled = value is True

    def validate(self, instance: object) -> None:
        if self._is_enabled and type(instance) is list and has_duplicates(instance):
            raise ValueError(NOT_UNIQUE)


def has_duplicates(items: list[object]) -> bool:
    """Return whether two items of an array are equal."""
    if len(items) < 2:
        return False
    if all(type(item) is str for item in items):
        return len(set(items)) < len(items)
    seen = set()
    for item in items:
        key = _comparison_key(item)
        if key in seen:
            return True
        seen.add(key)
    return False


def _comparison_key(item: object) -> str | bytes | int | float:
    """Return a key that equal items share: strings for strings, bytes or numbers for the rest."""
    if isinstance(item, str):
        return item
    if item is None or isinstance(item, bool):
        return _CONSTANTS[item]
    if isinstance(item, int | float):
        number = _normalize_number(item)
        # Python's hash of a longer integer is its remainder, which a publisher can choose.
        is_long = isinstance(number, int) and abs(number) >= _MAX_WORD
        return b"%d" % number if is_long else number
    text = repr(item)
    if "{" in text or "." in text or "e+" in text or _LONG_NUMBER.search(text):
        text = repr(_normalize(item))
    return text.encode("utf-8", "surrogatepass")


def _normalize_number(number: int | float) -> int | float:
    """Return the canonical form of a number: an integer below 2^64, else a float, if exact."""
    if isinstance(number, float):
        return int(number) if number.is_integer() and abs(number) < _MAX_WORD else number
    if abs(number) < _MAX_WORD:
        return number
    try:
        as_float = float(number)
    except OverflowError:
        return number
    return as_float if as_float == number else number


def _normalize(value: object) -> object:
    """Return a value with sorted members and canonical numbers."""
    if isinstance(value, dict):
        return {key: _normalize(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_normalize(one) for one in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _normalize_number(value)
    return value
