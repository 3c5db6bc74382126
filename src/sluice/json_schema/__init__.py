"""JSON Schema for the payloads of queues that ask for it: compiled once, checked within a bound on
time."""

from sluice.json_schema.validation import build_validator, find_schema_error

__all__ = ["build_validator", "find_schema_error"]
