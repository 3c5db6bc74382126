"""Fill protobuf messages from the resources of `admin.model`, as their descriptors say.

A field of a message has the value of the resource's field of that name, or of the one whose `Doc`
names it. The `.proto` file is the contract; a test compares it with the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtobufMessage
from google.protobuf.timestamp_pb2 import Timestamp

from sluice.admin import model
from sluice.admin.grpc import queue_admin_pb2 as pb

# In one response: gRPC clients accept 4 MiB by default.
MAX_PAYLOADS_BYTES: Final = 3 << 20

M = TypeVar("M", bound=ProtobufMessage)
Convert = Callable[[Any], Any]


def build(kind: type[M], resource: object) -> M:
    """Build a message of `kind` from a resource."""
    types: tuple[Any, Any] = kind, type(resource)
    values = {
        name: convert(getattr(resource, attribute)) for name, attribute, convert in _plan(*types)
    }
    message: M = kind(**values)
    return message


def build_all(kind: type[M], resources: Iterable[object]) -> list[M]:
    return [build(kind, one) for one in resources]


@cache
def _plan(kind: Any, resource: Any) -> list[tuple[str, str, Convert]]:
    """Return for each field of a message: its name, the resource's attribute, the conversion."""
    attributes = attribute_names(resource)
    return [
        (field.name, attributes[field.name], _conversion(field))
        for field in kind.DESCRIPTOR.fields
        if field.name in attributes
    ]


def attribute_names(resource: type) -> dict[str, str]:
    """Return the attributes of a resource by their names in gRPC."""
    names: dict[str, str] = {}
    for name, hint in get_type_hints(resource, include_extras=True).items():
        doc = next(one for one in get_args(hint)[1:] if isinstance(one, model.Doc))
        if doc.grpc != "":
            names[doc.grpc or name] = name
    return names


def _conversion(field: FieldDescriptor) -> Convert:
    kind = field.message_type
    if kind is None:
        return to_json if field.name == "config_json" else _unchanged
    if kind is Timestamp.DESCRIPTOR:
        return build_timestamp
    if kind.GetOptions().map_entry:
        return _unchanged
    if kind is pb.Property.DESCRIPTOR:
        return _build_properties
    message: type[ProtobufMessage] = getattr(pb, kind.name)
    if field.is_repeated:
        return lambda resources: build_all(message, resources)
    return lambda resource: None if resource is None else build(message, resource)


def _unchanged(value: Any) -> Any:
    return value


def _build_properties(pairs: list[tuple[str, str]]) -> list[pb.Property]:
    return [pb.Property(name=name, value=value) for name, value in pairs]


def build_timestamp(seconds: float) -> Timestamp | None:
    """Return a timestamp, or None for never."""
    if not seconds:
        return None
    milliseconds = round(seconds * 1000.0)
    return Timestamp(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)


def to_json(config: dict[str, object]) -> str:
    return json.dumps(config, ensure_ascii=False)


def build_messages(found: Iterable[model.Message]) -> list[pb.Message]:
    """Build messages that fit the default limits of a client: payloads beyond it are cut."""
    left = MAX_PAYLOADS_BYTES
    messages = []
    for message in found:
        payload = message.payload
        cut = message if len(payload) <= left else replace(message, payload=payload[:left])
        messages.append(build(pb.Message, cut))
        left = max(0, left - len(payload))
    return messages
