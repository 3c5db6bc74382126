"""Typed payloads: values to bytes for a publisher, bytes to the type that a handler declares.

    bytes, str                     unchanged, UTF-8
    a pydantic or msgspec model    its own JSON
    a dataclass                    JSON by pydantic, which reads it as well
    anything else                  JSON

pydantic and msgspec are used only if the application uses their models, so neither is required.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any, Final

from sluice.client.errors import ClientError, Unsupported
from sluice.units import parse_duration

JSON: Final = "application/json"

Decoder = Callable[[bytes], Any]


class UnreadablePayload(ClientError):
    """The payload does not have the type that the handler declares. A retry cannot help."""


def encode_payload(value: object) -> tuple[bytes, str | None]:
    """Return the bytes of a value, and the content type if it is JSON."""
    if isinstance(value, bytes):
        return value, None
    if isinstance(value, str):
        return value.encode(), None
    if isinstance(value, bytearray | memoryview):
        return bytes(value), None
    pydantic = sys.modules.get("pydantic")
    if pydantic is not None and isinstance(value, pydantic.BaseModel):
        return value.model_dump_json().encode(), JSON
    msgspec = sys.modules.get("msgspec")
    if msgspec is not None and isinstance(value, msgspec.Struct):
        encoded: bytes = msgspec.json.encode(value)
        return encoded, JSON
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        import pydantic_core

        return pydantic_core.to_json(value), JSON
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(), JSON


def decoder_for(kind: Any) -> Decoder:
    """Return a decoder for `kind`. It raises `UnreadablePayload` with a reason text."""
    if kind is bytes:
        return _identity
    if kind is str:
        return _read_text
    if kind in (Any, object, dict, list) or kind is None:
        return _JsonReader(kind if kind in (dict, list) else None)
    msgspec = sys.modules.get("msgspec")
    if msgspec is not None and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _ModelReader(msgspec.json.Decoder(kind).decode, msgspec.MsgspecError)
    import pydantic

    return _ModelReader(pydantic.TypeAdapter(kind).validate_json, pydantic.ValidationError)


def _identity(payload: bytes) -> bytes:
    return payload


def _read_text(payload: bytes) -> str:
    try:
        return payload.decode()
    except UnicodeDecodeError as fault:
        raise UnreadablePayload(
            f"the payload is not UTF-8: {fault.reason} at byte {fault.start}"
        ) from fault


class _JsonReader:
    def __init__(self, kind: type | None) -> None:
        self._kind = kind

    def __call__(self, payload: bytes) -> Any:
        try:
            value = json.loads(payload)
        except (ValueError, RecursionError) as fault:
            raise UnreadablePayload(f"the payload is not JSON: {fault}") from fault
        if self._kind is not None and not isinstance(value, self._kind):
            raise UnreadablePayload(f"the payload is JSON, but not a {self._kind.__name__}")
        return value


class _ModelReader:
    def __init__(self, read: Decoder, fault: type[Exception]) -> None:
        self._read = read
        self._error_type = fault

    def __call__(self, payload: bytes) -> Any:
        try:
            return self._read(payload)
        except self._error_type as fault:
            raise UnreadablePayload(_one_line(fault)) from fault


def _one_line(fault: Exception) -> str:
    """Return the error in one line. Pydantic uses several lines and a link for each fault."""
    errors = getattr(fault, "errors", None)
    if errors is None:
        return str(fault)
    details = errors(include_url=False, include_input=False)
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'payload'}: {one['msg']}" for one in details[:5]
    )


def duration_text(name: str, value: float | str) -> str:
    """Return a duration as the broker reads it. Raise `Unsupported` with the option's name."""
    try:
        if isinstance(value, str):
            parse_duration(value)
            return value
        if value >= 0:
            return f"{round(value * 1000)}ms"
    except ValueError:
        pass
    raise Unsupported(f"{name} is {value!r}", "Use seconds from 0, or text such as 500ms, 5m or 2h")
