"""Derive the JSON Schema of a queue's configuration from its model: keys, ranges, defaults.

The model validates with our own functions, which pydantic cannot describe; this module does.
"""

from __future__ import annotations

from math import inf
from typing import Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, WithJsonSchema
from pydantic.fields import FieldInfo

from sluice.admin.rest.params import DURATION_PATTERN
from sluice.queues.service import QueueConfig
from sluice.units import format_duration, parse_duration

NAME_SCHEMA: dict[str, Any] = {
    "type": "string",
    "minLength": 1,
    "maxLength": 1024,
    "pattern": "^[^+#$/]+(/[^+#$/]+)*$",
    "examples": ["tasks/image"],
}
BINDING_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1, "examples": ["sensors/+/temp"]},
        {
            "type": "object",
            "properties": {
                "topic": {"type": "string", "minLength": 1},
                "headers": {"type": "object", "additionalProperties": {"type": "string"}},
                "match": {"enum": ["all", "any"], "default": "all"},
            },
            "required": ["topic"],
            "additionalProperties": False,
        },
    ]
}


def build_schema(model: type[BaseModel]) -> dict[str, Any]:
    keys = {
        name.removesuffix("_"): _field_schema(name.removesuffix("_"), field)
        for name, field in model.model_fields.items()
    }
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _field_schema(key: str, field: FieldInfo) -> dict[str, Any]:
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return build_schema(kind)
    found = _value_schema(key, field)
    if not field.is_required() and field.default not in (None, []):
        found["default"] = format_duration(field.default) if _is_duration(field) else field.default
    return found


def _value_schema(key: str, field: FieldInfo) -> dict[str, Any]:
    kind = field.annotation
    bounds = _range(field)
    if _is_duration(field):
        return {
            "anyOf": [{"type": "string", "pattern": DURATION_PATTERN}, {"const": 0}],
            "description": f"{bounds}",
        }
    if bounds is not None:
        found: dict[str, Any] = {
            "type": "integer" if kind is int else "number",
            "minimum": bounds.low,
        }
        return found if bounds.high == inf else {**found, "maximum": bounds.high}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if kind is bool:
        return {"type": "boolean"}
    if key == "bindings":
        return {"type": "array", "items": BINDING_SCHEMA}
    if key == "alert_webhook":
        return {"type": ["string", "null"], "pattern": "^https?://"}
    if key == "schema":
        return {"type": ["object", "null"], "description": "A JSON Schema for payloads"}
    return dict(NAME_SCHEMA) if key == "name" else {**NAME_SCHEMA, "type": ["string", "null"]}


def _range(field: FieldInfo) -> Any:
    """Return the closed range of the field's validator, an object with `low` and `high`."""
    checks = [check.func for check in field.metadata if isinstance(check, AfterValidator)]
    return next(
        (check for check in checks if hasattr(check, "low") and hasattr(check, "high")), None
    )


def _is_duration(field: FieldInfo) -> bool:
    return any(
        isinstance(check, BeforeValidator) and check.func is parse_duration
        for check in field.metadata
    )


_SCHEMA = build_schema(QueueConfig)

_TEMPLATE_SCHEMA = {
    "type": "string",
    "description": "Name of a template of the server, instead of the first that matches the name",
}
CONFIG_SCHEMA = WithJsonSchema(
    {
        **_SCHEMA,
        "properties": {**_SCHEMA["properties"], "template": _TEMPLATE_SCHEMA},
        "required": ["name"],
        "examples": [{"name": "tasks/image", "partitions": 4, "retry_policy": {"max_retries": 3}}],
    }
)
_CHANGEABLE = {key: value for key, value in _SCHEMA["properties"].items() if key != "name"}
CHANGES_SCHEMA = WithJsonSchema(
    {
        **_SCHEMA,
        "properties": _CHANGEABLE,
        "examples": [{"performance": {"delivery_timeout": "5m"}}],
    }
)
