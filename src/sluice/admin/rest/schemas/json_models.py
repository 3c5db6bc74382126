"""The JSON form of the resources in `admin.model`: pydantic models that are derived from them.

A model has the fields of its resource in the same order, with their descriptions. Times are ISO
8601 in UTC with milliseconds, null for never. Bytes are two fields: text, which is null when they
are not UTF-8, and base64. The models read the attributes of a resource and validate nothing that
the service has decided.
"""

from __future__ import annotations

import base64
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from sluice.admin.model import Doc, Unit
from sluice.admin.rest.params import format_iso_time


class ResourceModel(BaseModel):
    model_config = ConfigDict(from_attributes=True)


def _decode_text(value: bytes, info: ValidationInfo) -> str | None:
    """Decode bytes as text; a cut payload may end inside a character, which is left out."""
    is_cut = info.field_name == "payload" and info.data["size"] > len(value)
    for end in range(len(value), max(-1, len(value) - (4 if is_cut else 1)), -1):
        try:
            return value[:end].decode()
        except UnicodeDecodeError:
            continue
    return None


def _encode_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


TIME: Final = Annotated[
    str | None,
    BeforeValidator(format_iso_time),
    WithJsonSchema(
        {
            "anyOf": [{"type": "string", "format": "date-time"}, {"type": "null"}],
            "examples": ["2030-01-31T12:00:00.000Z"],
        }
    ),
]
TEXT: Final = Annotated[str | None, BeforeValidator(_decode_text)]
BASE64: Final = Annotated[str, BeforeValidator(_encode_base64)]
# An array of two strings, without `prefixItems`: not all tools that read descriptions know it.
PAIR: Final = Annotated[
    tuple[str, str],
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2}),
]


@cache
def json_type(kind: Any) -> Any:
    """Return the type that shows `kind` as JSON: a model for a resource, or a list of models."""
    if is_dataclass(kind):
        return _derive_model(kind)
    if get_origin(kind) is list:
        return list[json_type(get_args(kind)[0])]  # type: ignore[misc]
    if Unit.TIME in getattr(kind, "__metadata__", ()):  # in a list
        return TIME
    if kind == tuple[str, str]:
        return PAIR
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(json_type(one) for one in get_args(kind))]  # noqa: UP007
    return kind


@cache
def json_adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(json_type(kind))


def to_json(kind: Any, value: object) -> bytes:
    """Return a value of `kind` as JSON text."""
    adapter = json_adapter(kind)
    return adapter.dump_json(adapter.validate_python(value, from_attributes=True))


def _derive_model(resource: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, hint in get_type_hints(resource, include_extras=True).items():
        kind, *metadata = get_args(hint)
        doc = next(one for one in metadata if isinstance(one, Doc))
        unit = next((one for one in metadata if isinstance(one, Unit)), None)
        examples = None if doc.example is None else [doc.example]
        if kind is bytes:
            fields[name] = (TEXT, Field(description=doc.text, examples=examples))
            encoded = None if doc.example is None else [_encode_base64(str(doc.example).encode())]
            fields[f"{name}_base64"] = (
                BASE64,
                Field(validation_alias=name, description="As base64", examples=encoded),
            )
        elif unit is Unit.TIME:
            fields[name] = (TIME, Field(description=doc.text))
        else:
            text = doc.text if unit is None else f"{doc.text}, {_UNIT_TEXTS[unit]}"
            fields[name] = (json_type(kind), Field(description=text, examples=examples))
    return create_model(
        resource.__name__, __base__=ResourceModel, __doc__=resource.__doc__, **fields
    )


_UNIT_TEXTS: Final = {
    Unit.PER_SECOND: "per second",
    Unit.SECONDS: "in seconds",
    Unit.BYTES: "in bytes",
}


# ---- responses of single routes


class Purged(BaseModel):
    purged: int


class Listeners(BaseModel):
    """Addresses of the open MQTT listeners; empty: closed."""

    mqtt: str = Field(default="", description="HOST:PORT of MQTT over TCP")
    mqtts: str = Field(default="", description="Over TLS")
    ws: str = Field(default="", description="Over WebSocket")
    wss: str = Field(default="", description="Over WebSocket with TLS")


class QueueSamples(BaseModel):
    """Up to five minutes of a queue; null where nothing is known."""

    times: list[float] = Field(description="Seconds since 1970, oldest first")
    total_messages: list[float | None] = Field(description="Stored messages")
    enqueue_rate: list[float | None] = Field(description="Per second, as the following")
    dequeue_rate: list[float | None]
    ack_rate: list[float | None]


class NodeSamples(QueueSamples):
    """The same for a node: the sums of its queues, and its MQTT publishes."""

    node: str
    publishes_in: list[float | None]
    publishes_out: list[float | None]


class Found(BaseModel):
    queues: list[str] = Field(description="Queues that know the message")
