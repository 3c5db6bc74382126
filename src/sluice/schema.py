"""JSON Schema for the payloads of queues that ask for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NoReturn

import jsonschema_rs


def _nothing_elsewhere(address: str) -> NoReturn:
    """Never fetched: the broker would wait for a stranger's answer with its loop, and reach what its clients may not,
    files of this machine among it."""
    raise ValueError("a schema refers to itself only; put what it needs under $defs")


def fault_of_schema(schema: str) -> str:
    """What is wrong with a schema, or the empty string."""
    try:
        jsonschema_rs.validator_for(json.loads(schema), retriever=_nothing_elsewhere)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as fault:
        return str(fault).partition("\n")[0]
    return ""


def validator_of(schema: str) -> Callable[[bytes], str]:
    """A check for one schema: what is wrong with a payload, or the empty string."""
    validator = jsonschema_rs.validator_for(json.loads(schema), retriever=_nothing_elsewhere)

    def fault_of(payload: bytes) -> str:
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as fault:
            return f"it is not JSON ({fault})"
        for error in validator.iter_errors(value):
            place = "/".join(str(part) for part in error.instance_path)
            return f"{error.message} (at /{place})"
        return ""

    return fault_of
