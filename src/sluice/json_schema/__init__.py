"""Validates the payloads of queues with a JSON Schema: compiled once, checked in bounded time."""

from sluice.json_schema.validation import build_validator, find_schema_error

__all__ = ["build_validator", "find_schema_error"]
