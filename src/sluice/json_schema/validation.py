"""Checks of payloads against a JSON Schema.

A check runs on the broker's event loop: nobody else is served meanwhile. So a schema is accepted
only if its checks are bounded (`cost`), each payload is refused if its own check could take longer
than BUDGET_NS, and patterns are matched by an engine that needs time in proportion to the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, NoReturn

import jsonschema_rs

from sluice.json_schema.cost import Cost, TooCostly, cost_of
from sluice.json_schema.payload import EXTREME_WEIGHT, LongNumber, Reading, brackets_in, depth_of, values_in
from sluice.json_schema.unique_items import UniqueItems

BUDGET_NS: Final = 400_000_000  # an upper bound; real checks are usually ten times faster
# collecting errors takes about a KiB where a check takes KEYWORD_NS
ERROR_BUDGET_NS: Final = 1_000_000
# An error carries a copy of the value it is about: microseconds for each value inside.
MAX_EXPLAINED_VALUES: Final = 20_000
MAX_ERROR_CHARS: Final = 500
PATTERN_BYTES: Final = 1 << 20  # of one compiled pattern

NO_MATCH: Final = "it does not match the schema"
NO_MATCH_LARGE: Final = (
    f"{NO_MATCH} (the place is named for payloads of up to {MAX_EXPLAINED_VALUES:,} values)"
)
KEYWORDS: Final[dict[str, Any]] = {"uniqueItems": UniqueItems}  # the library's own takes time squared
SMALLEST_SLOW_NUMBER: Final = 4  # bytes, with the comma behind it: "1.5,"


def _refuse_to_fetch(address: str) -> NoReturn:
    """The broker would wait for the answer with its loop, and could reach what its clients may not:
    files of this machine, say."""
    raise ValueError("a schema refers to itself only; put what it needs under $defs")


def _compiled(schema: str) -> tuple[Any, Cost]:
    parsed = json.loads(schema)
    cost = cost_of(parsed)
    options = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES)
    validator = jsonschema_rs.validator_for(
        parsed, retriever=_refuse_to_fetch, pattern_options=options, keywords=KEYWORDS
    )
    return validator, cost


def fault_of_schema(schema: str) -> str:
    """Return what is wrong with a schema, or the empty string."""
    try:
        _compiled(schema)
    except TooCostly as fault:
        return f"checks against it could take too long: {fault}"
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as fault:
        line = str(fault).partition("\n")[0]
        if line.endswith('is not a "regex"'):
            line += ", or one that cannot be matched in linear time: use no lookaround and no backreference"
        return line
    return ""


def validator_of(schema: str) -> Callable[[bytes], str]:
    """Return a check for one schema: what is wrong with a payload, or the empty string.

    A schema that was stored by a version which accepted more refuses every payload, and says why.
    """
    fault = fault_of_schema(schema)
    if fault:
        return _Refusing(fault).fault_of
    validator, cost = _compiled(schema)
    return _Checking(validator, cost).fault_of


class _Refusing:
    def __init__(self, fault: str) -> None:
        self._fault = f"the schema of the queue cannot be used: {fault}. Change the schema of the queue"

    def fault_of(self, payload: bytes) -> str:
        return self._fault


class _Checking:
    def __init__(self, validator: Any, cost: Cost) -> None:
        self._validator = validator
        self._cost = cost
        # A payload has at most as many values as bytes: most are small enough to need no counting.
        slowest_ns = cost.slow_ns * EXTREME_WEIGHT
        each_ns = cost.value_ns + cost.byte_ns + slowest_ns // SMALLEST_SLOW_NUMBER + 1
        free_bytes = (BUDGET_NS - cost.once_ns - slowest_ns) // each_ns
        self._free_bytes = 0 if cost.nested_ns else free_bytes

    def fault_of(self, payload: bytes) -> str:
        is_small = len(payload) <= self._free_bytes
        if not is_small and self._estimate(payload, 0, 1) > BUDGET_NS:
            return _too_large(payload)
        try:
            reading = Reading(payload, counts_floats=not is_small and self._cost.slow_ns > 0)
        except LongNumber as fault:
            return str(fault)
        except (ValueError, RecursionError) as fault:
            return f"it is not JSON ({fault})"
        value = reading.value
        levels = 1
        if self._cost.nested_ns or (self._cost.limits_depth and brackets_in(payload) >= self._cost.max_depth):
            levels = depth_of(value, self._cost.max_depth)
            if levels >= self._cost.max_depth:
                return f"it is nested more than {self._cost.max_depth} levels deep, too deep for its schema"
        if not is_small and self._estimate(payload, reading.weight, levels) > BUDGET_NS:
            return _too_large(payload, reading.weight)
        try:
            if self._validator.is_valid(value):
                return ""
            return self._explain(payload, reading, levels)
        except ValueError as fault:  # a number or text that the library cannot take
            return f"it cannot be checked ({fault})"

    def _estimate(self, payload: bytes, weight: int, levels: int) -> int:
        """Return the most nanoseconds that a check can take: `weight` stands for slow numbers."""
        cost = self._cost
        value_ns = cost.value_ns + cost.nested_ns * levels
        return (
            cost.once_ns + value_ns * values_in(payload) + cost.slow_ns * weight + cost.byte_ns * len(payload)
        )

    def _explain(self, payload: bytes, reading: Reading, levels: int) -> str:
        """Return the first error, if finding it takes a bounded amount of time and memory."""
        cost = self._cost
        if values_in(payload) > MAX_EXPLAINED_VALUES:
            return NO_MATCH_LARGE
        if cost.is_recursive:
            return NO_MATCH
        if cost.collects_errors and self._estimate(payload, reading.weight, levels) > ERROR_BUDGET_NS:
            return NO_MATCH
        try:
            self._validator.validate(reading.value)
        except jsonschema_rs.ValidationError as error:
            place = "/".join(str(part) for part in error.instance_path)
            return f"{_cut(error.message)} (at /{_cut(place)})"
        return NO_MATCH


def _too_large(payload: bytes, weight: int = 0) -> str:
    numbers = ", with many numbers that are no integers of 64 bits" if weight else ""
    return (
        f"it is too large to be checked against its schema ({len(payload)} bytes with about "
        f"{values_in(payload)} values{numbers}); send smaller messages, or use a schema with fewer "
        "branches, patterns and comparisons of numbers"
    )


def _cut(text: str) -> str:
    """Shorten a text in its middle: an error begins with the value and ends with the reason."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    return f"{text[: MAX_ERROR_CHARS // 2]} ... {text[-MAX_ERROR_CHARS // 2 :]}"
