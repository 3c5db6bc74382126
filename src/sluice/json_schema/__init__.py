"""JSON Schema for the payloads of queues that ask for it: compiled once, checked within a bound on
time."""

from sluice.json_schema.validation import fault_of_schema, validator_of

__all__ = ["fault_of_schema", "validator_of"]
