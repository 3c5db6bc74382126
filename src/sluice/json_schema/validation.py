"""Checks payloads against a JSON Schema.

A check blocks the broker's event loop. So a schema is accepted only if its checks are bounded
(`cost`), a payload is refused if its check could take longer than BUDGET_NS, and patterns are
matched by an engine that needs time in proportion to the text.

The library is imported with the first schema: a broker without schemas does not need its 3 MB.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final, NoReturn

from sluice.json_schema.cost import Cost, TooCostly, compute_cost
from sluice.json_schema.payload import (
    EXTREME_WEIGHT,
    IntegerTooLong,
    ParsedPayload,
    count_brackets,
    count_values,
    measure_depth,
)
from sluice.json_schema.unique_items import UniqueItems

BUDGET_NS: Final = 400_000_000  # an upper bound; real checks are usually ten times faster
# Collecting errors takes about 1 KiB where a check takes KEYWORD_NS.
ERROR_BUDGET_NS: Final = 1_000_000
# An error contains a copy of its value: microseconds for each value inside.
MAX_EXPLAINED_VALUES: Final = 20_000
MAX_ERROR_CHARS: Final = 500
MAX_PATTERN_BYTES: Final = 1 << 20  # size of one compiled pattern

NO_MATCH: Final = "it does not match the schema"
NO_MATCH_LARGE: Final = (
    f"{NO_MATCH} (the place is named for payloads of up to {MAX_EXPLAINED_VALUES:,} values)"
)
# The library's own uniqueItems takes quadratic time.
CUSTOM_KEYWORDS: Final[dict[str, Any]] = {"uniqueItems": UniqueItems}
MIN_SLOW_NUMBER_BYTES: Final = 4  # with the comma: "1.5,"


def _reject_remote_reference(address: str) -> NoReturn:
    """Refuse a remote reference.

    Loading it would block the loop, and could reach what clients may not access, such as local
    files.
    """
    raise ValueError("a schema refers to itself only; put the definitions it needs under $defs")


def _compile(schema: str) -> tuple[Any, Cost]:
    import jsonschema_rs

    parsed = json.loads(schema)
    cost = compute_cost(parsed)
    options = jsonschema_rs.RegexOptions(size_limit=MAX_PATTERN_BYTES)
    validator = jsonschema_rs.validator_for(
        parsed,
        retriever=_reject_remote_reference,
        pattern_options=options,
        keywords=CUSTOM_KEYWORDS,
    )
    return validator, cost


def find_schema_error(schema: str) -> str:
    """Return what is wrong with a schema, or an empty string."""
    import jsonschema_rs

    try:
        _compile(schema)
    except TooCostly as fault:
        return f"checks against it could take too long: {fault}"
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as fault:
        line = str(fault).partition("\n")[0]
        if line.endswith('is not a "regex"'):
            line += (
                ", or one that cannot be matched in linear time: use no lookaround and no "
                "backreference"
            )
        return line
    return ""


def build_validator(schema: str) -> Callable[[bytes], str]:
    """Return a function that returns what is wrong with a payload, or an empty string.

    A schema that an earlier version accepted and this one does not refuses every payload.
    """
    schema_error = find_schema_error(schema)
    if schema_error:
        return _RejectingValidator(schema_error).find_error
    validator, cost = _compile(schema)
    return _PayloadValidator(validator, cost).find_error


class _RejectingValidator:
    def __init__(self, schema_error: str) -> None:
        self._error = (
            f"the schema of the queue cannot be used: {schema_error}. "
            "Change the schema of the queue"
        )

    def find_error(self, payload: bytes) -> str:
        return self._error


class _PayloadValidator:
    def __init__(self, validator: Any, cost: Cost) -> None:
        self._validator = validator
        self._cost = cost
        # A payload has at most as many values as bytes: most are so small that counting is not
        # needed.
        slowest_ns = cost.slow_ns * EXTREME_WEIGHT
        per_byte_ns = cost.value_ns + cost.byte_ns + slowest_ns // MIN_SLOW_NUMBER_BYTES + 1
        unchecked_bytes = (BUDGET_NS - cost.once_ns - slowest_ns) // per_byte_ns
        self._unchecked_bytes = 0 if cost.nested_ns else unchecked_bytes

    def find_error(self, payload: bytes) -> str:
        is_small = len(payload) <= self._unchecked_bytes
        if not is_small and self._estimate(payload, 0, 1) > BUDGET_NS:
            return _too_large_error(payload)
        try:
            parsed = ParsedPayload(payload, counts_floats=not is_small and self._cost.slow_ns > 0)
        except IntegerTooLong as fault:
            return str(fault)
        except (ValueError, RecursionError) as fault:
            return f"it is not JSON ({fault})"
        value = parsed.value
        levels = 1
        if self._cost.nested_ns or (
            self._cost.limits_depth and count_brackets(payload) >= self._cost.max_depth
        ):
            levels = measure_depth(value, self._cost.max_depth)
            if levels >= self._cost.max_depth:
                return (
                    f"it is nested more than {self._cost.max_depth} levels deep, too deep for its "
                    "schema"
                )
        if not is_small and self._estimate(payload, parsed.slow_number_weight, levels) > BUDGET_NS:
            return _too_large_error(payload, parsed.slow_number_weight)
        try:
            if self._validator.is_valid(value):
                return ""
            return self._explain(payload, parsed, levels)
        except ValueError as fault:  # a number or text that the library does not support
            return f"it cannot be checked ({fault})"

    def _estimate(self, payload: bytes, weight: int, levels: int) -> int:
        """Return the maximum nanoseconds of a check; `weight` counts slow numbers."""
        cost = self._cost
        value_ns = cost.value_ns + cost.nested_ns * levels
        return (
            cost.once_ns
            + value_ns * count_values(payload)
            + cost.slow_ns * weight
            + cost.byte_ns * len(payload)
        )

    def _explain(self, payload: bytes, parsed: ParsedPayload, levels: int) -> str:
        """Return the first error, if finding it takes bounded time and memory."""
        import jsonschema_rs

        cost = self._cost
        if count_values(payload) > MAX_EXPLAINED_VALUES:
            return NO_MATCH_LARGE
        if cost.is_recursive:
            return NO_MATCH
        if (
            cost.collects_errors
            and self._estimate(payload, parsed.slow_number_weight, levels) > ERROR_BUDGET_NS
        ):
            return NO_MATCH
        try:
            self._validator.validate(parsed.value)
        except jsonschema_rs.ValidationError as error:
            place = "/".join(str(part) for part in error.instance_path)
            return f"{_shorten(error.message)} (at /{_shorten(place)})"
        return NO_MATCH


def _too_large_error(payload: bytes, weight: int = 0) -> str:
    numbers = ", with many numbers that are not 64-bit integers" if weight else ""
    return (
        f"it is too large to be checked against its schema ({len(payload)} bytes with about "
        f"{count_values(payload)} values{numbers}); send smaller messages, or use a schema with "
        "fewer branches, patterns and comparisons of numbers"
    )


def _shorten(text: str) -> str:
    """Shorten a text in its middle: an error begins with the value and ends with the reason."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    return f"{text[: MAX_ERROR_CHARS // 2]} ... {text[-MAX_ERROR_CHARS // 2 :]}"
