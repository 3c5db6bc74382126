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

from sluice.schema.cost import Cost, TooCostly, cost_of

BUDGET_NS: Final = 500_000_000  # an upper bound; real checks are usually ten times faster
# collecting errors takes about a KiB where a check takes KEYWORD_NS
ERROR_BUDGET_NS: Final = 1_000_000
MAX_ERROR_CHARS: Final = 500
PATTERN_BYTES: Final = 1 << 20  # of one compiled pattern

NO_MATCH: Final = "it does not match the schema"


def _refuse_to_fetch(address: str) -> NoReturn:
    """The broker would wait for the answer with its loop, and could reach what its clients may not:
    files of this machine, say."""
    raise ValueError("a schema refers to itself only; put what it needs under $defs")


def _compiled(schema: str) -> tuple[Any, Cost]:
    parsed = json.loads(schema)
    cost = cost_of(parsed)
    options = jsonschema_rs.RegexOptions(size_limit=PATTERN_BYTES)
    return jsonschema_rs.validator_for(parsed, retriever=_refuse_to_fetch, pattern_options=options), cost


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
        free_bytes = (BUDGET_NS - cost.once_ns) // (cost.value_ns + cost.byte_ns + 1)
        self._free_bytes = 0 if cost.nested_ns else free_bytes

    def fault_of(self, payload: bytes) -> str:
        if len(payload) > self._free_bytes:
            fault = self._fault_of_size(payload)
            if fault:
                return fault
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as fault:
            return f"it is not JSON ({fault})"
        if self._cost.limits_depth and self._is_too_deep(payload, value):
            return f"it is nested more than {self._cost.max_depth} levels deep, too deep for its schema"
        try:
            if self._validator.is_valid(value):
                return ""
            return self._explain(payload, value)
        except ValueError as fault:  # a number or text that the library cannot take
            return f"it cannot be checked ({fault})"

    def _fault_of_size(self, payload: bytes) -> str:
        if self._estimate(payload) <= BUDGET_NS:
            return ""
        return (
            f"it is too large to be checked against its schema ({len(payload)} bytes with about "
            f"{_values_in(payload)} values); send smaller messages, or use a schema with fewer "
            "branches and patterns"
        )

    def _estimate(self, payload: bytes) -> int:
        cost = self._cost
        value_ns = cost.value_ns
        if cost.nested_ns:
            value_ns += cost.nested_ns * min(_brackets_in(payload), cost.max_depth)
        return cost.once_ns + value_ns * _values_in(payload) + cost.byte_ns * len(payload)

    def _is_too_deep(self, payload: bytes, value: object) -> bool:
        limit = self._cost.max_depth
        if _brackets_in(payload) <= limit:
            return False
        level = [value]
        for _ in range(limit):
            level = [inner for one in level for inner in _inside(one)]
            if not level:
                return False
        return True

    def _explain(self, payload: bytes, value: object) -> str:
        """Return the first error, if finding it takes a bounded amount of time and memory."""
        cost = self._cost
        if cost.is_recursive or (cost.collects_errors and self._estimate(payload) > ERROR_BUDGET_NS):
            return NO_MATCH
        try:
            self._validator.validate(value)
        except jsonschema_rs.ValidationError as error:
            place = "/".join(str(part) for part in error.instance_path)
            return f"{_cut(error.message)} (at /{_cut(place)})"
        return NO_MATCH


def _values_in(payload: bytes) -> int:
    """At most how many values a JSON text has: each is the first of it or stands behind a comma or
    a bracket."""
    return 1 + payload.count(b",") + _brackets_in(payload)


def _brackets_in(payload: bytes) -> int:
    return payload.count(b"[") + payload.count(b"{")


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _cut(text: str) -> str:
    """Shorten a text in its middle: an error begins with the value and ends with the reason."""
    if len(text) <= MAX_ERROR_CHARS:
        return text
    return f"{text[: MAX_ERROR_CHARS // 2]} ... {text[-MAX_ERROR_CHARS // 2 :]}"
