"""Routes about messages: show, publish, trace, cancel, reschedule."""

from __future__ import annotations

import base64
import binascii
import json
from itertools import combinations
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    model_validator,
)

from sluice.access.identity import Role
from sluice.admin import model
from sluice.admin.rest.deps import (
    call_service,
    caller,
    require_queues_enabled,
    requires_role,
    respond,
)
from sluice.admin.rest.errors import error_responses
from sluice.admin.rest.params import (
    DurationRange,
    IntegerRange,
    MessageId,
    MqttString,
    QueueName,
    Timestamp,
    UnicodeText,
)
from sluice.admin.rest.schemas.json_models import Found, json_type

router = APIRouter(
    prefix="/api/v1", dependencies=[Depends(require_queues_enabled)], tags=["messages"]
)

# Payload bytes in one response: many messages are cut shorter each.
MAX_RESPONSE_PAYLOAD_BYTES: Final = 16_777_216
MAX_DELAY_SECONDS: Final = 36_500 * 86_400.0


def payload_bytes_each(payload_bytes: int, limit: int) -> int:
    return min(payload_bytes, MAX_RESPONSE_PAYLOAD_BYTES // limit)


class PeekQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    group: str = Field(
        default="", description="Only messages this group has not settled, with their state there"
    )
    partition: Annotated[int, IntegerRange(-1, 4095)] = Field(
        default=-1, description="-1: all, the oldest first"
    )
    start: Annotated[int, IntegerRange(-1, 2**53)] = Field(
        default=-1, description="Sequence to begin at; -1: the oldest"
    )
    limit: Annotated[int, IntegerRange(1, 1000)] = 50
    payload_bytes: Annotated[int, IntegerRange(0, MAX_RESPONSE_PAYLOAD_BYTES)] = Field(
        default=65_536, description="Cut each payload to this size; at most 16 MiB per response"
    )


def _from_base64(value: object) -> bytes:
    try:
        if not isinstance(value, str):
            raise ValueError
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("must be base64") from None


def _as_json(value: object) -> bytes:
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).encode()
    except (ValueError, RecursionError):
        raise ValueError(
            "must be JSON: no NaN, no infinity, no lone surrogates, not nested too deeply"
        ) from None


def _pairs(value: object) -> object:
    """Accept a JSON object, or a list of pairs: a user property may occur more than once."""
    return list(value.items()) if isinstance(value, dict) else value


Bytes = Annotated[bytes, BeforeValidator(_from_base64)]
BASE64_SCHEMA: dict[str, Any] = {
    "type": "string",
    "format": "byte",
    "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
MqttText = Annotated[str, MqttString()]
MQTT_TEXT_SCHEMA: dict[str, Any] = {"type": "string", "maxLength": 65_535, "pattern": r"^[^\x00]*$"}
_PROPERTIES_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "additionalProperties": MQTT_TEXT_SCHEMA},
        {
            "type": "array",
            "items": {"type": "array", "items": MQTT_TEXT_SCHEMA, "minItems": 2, "maxItems": 2},
        },
    ],
    "examples": [{"tenant": "north"}],
}


PAYLOAD_FIELDS: Final = ("payload", "payload_base64", "json")


class Publish(BaseModel):
    """A message; its payload is one of `payload`, `payload_base64` and `json`, or empty."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "not": {"anyOf": [{"required": list(two)} for two in combinations(PAYLOAD_FIELDS, 2)]}
        },
    )

    payload: UnicodeText = Field(default="", description="As text", examples=["resize cat.png"])
    payload_base64: Bytes = Field(
        default=b"", description="As base64", json_schema_extra=BASE64_SCHEMA
    )
    json_: Annotated[Any, AfterValidator(_as_json)] = Field(
        default=None, alias="json", description="Any JSON value, written as UTF-8"
    )
    message_id: Annotated[str, MqttString(1024)] = Field(
        default="",
        description="The publisher's own id: a second one within the dedup window is not stored",
    )
    key: MqttText = Field(default="", description="Messages with the same key stay in order")
    priority: Annotated[int, IntegerRange(0, 9)] = 0
    delay: Annotated[float, DurationRange(0.0, MAX_DELAY_SECONDS)] = Field(
        default="0s", validate_default=True, description="Deliver after this time has passed"
    )
    deliver_at: Annotated[float, Timestamp()] = Field(
        default="", validate_default=True, description="Deliver at or after this time"
    )
    expiry: Annotated[float, DurationRange(0.0, MAX_DELAY_SECONDS)] = Field(
        default="0s",
        validate_default=True,
        description="Expires after this time, in whole seconds; 0s: the queue's message_ttl",
    )
    content_type: MqttText = Field(default="", examples=["text/plain"])
    response_topic: Annotated[str, MqttString(forbidden="+#")] = ""
    correlation_data_base64: Bytes = Field(default=b"", json_schema_extra=BASE64_SCHEMA)
    properties: Annotated[list[tuple[MqttText, MqttText]], BeforeValidator(_pairs)] = Field(
        default=[],
        description="User properties: an object, or a list of pairs",
        json_schema_extra=_PROPERTIES_SCHEMA,
    )

    @model_validator(mode="after")
    def _one_payload(self) -> Publish:
        given = self.model_fields_set & {"payload", "payload_base64", "json_"}
        if len(given) > 1:
            raise ValueError("has more than one of payload, payload_base64 and json; give one")
        return self

    def to_outgoing_message(self) -> model.OutgoingMessage:
        payload = self.payload_base64 or self.payload.encode()
        content_type = self.content_type
        if "json_" in self.model_fields_set:
            payload = self.json_
            content_type = content_type or "application/json"
        return model.OutgoingMessage(
            payload=payload,
            message_id=self.message_id,
            key=self.key,
            priority=self.priority,
            delay=self.delay,
            deliver_at=self.deliver_at,
            expiry=self.expiry,
            content_type=content_type,
            response_topic=self.response_topic,
            correlation_data=self.correlation_data_base64,
            properties=self.properties,
        )


class NewTime(BaseModel):
    """When to deliver: one of `delay` and `deliver_at`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"oneOf": [{"required": ["delay"]}, {"required": ["deliver_at"]}]},
    )

    delay: Annotated[float, DurationRange(0.0, MAX_DELAY_SECONDS)] = Field(
        default="0s", validate_default=True, description="After this time; 0s: deliver now"
    )
    deliver_at: Annotated[float, Timestamp()] = Field(
        default="", validate_default=True, description="At or after this time"
    )

    @model_validator(mode="after")
    def _one_time(self) -> NewTime:
        if len(self.model_fields_set & {"delay", "deliver_at"}) > 1:
            raise ValueError("has both delay and deliver_at; give one")
        return self

    def given_delay(self) -> float | None:
        return self.delay if "delay" in self.model_fields_set else None


class CancelMany(BaseModel):
    """A selection of messages that wait; fields that are not given match all."""

    model_config = ConfigDict(extra="forbid")

    key: UnicodeText = Field(default="", description="With this partition key")
    state: UnicodeText = Field(default="", description="waiting, delayed or retrying")
    since: Annotated[float, Timestamp()] = Field(
        default="", validate_default=True, description="Enqueued at or after this time"
    )
    until: Annotated[float, Timestamp()] = Field(
        default="", validate_default=True, description="Enqueued before this time"
    )
    contains: UnicodeText = Field(default="", description="Text in the payload")
    limit: Annotated[int, IntegerRange(1, 100_000)] = 1000
    dry_run: StrictBool = Field(default=False, description="Only count the messages")

    def to_filter(self) -> model.MessageFilter:
        return model.MessageFilter(self.key, self.state, self.since, self.until, self.contains)


class RescheduleMany(CancelMany, NewTime):
    """A selection of messages that wait, and when to deliver them."""


@router.get(
    "/queues/{name}/messages",
    response_model=json_type(list[model.Message]),
    responses=error_responses(404, 409),
)
async def peek(request: Request, name: QueueName, query: Annotated[PeekQuery, Query()]) -> Response:
    """Show stored messages, oldest first. Takes and changes nothing."""
    return await respond(
        request,
        list[model.Message],
        lambda service: service.peek(
            name,
            query.group,
            query.partition,
            query.start,
            query.limit,
            payload_bytes_each(query.payload_bytes, query.limit),
        ),
    )


@router.post(
    "/queues/{name}/messages",
    status_code=201,
    response_model=json_type(model.Published),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "publish"),
)
async def publish(request: Request, name: QueueName, message: Publish) -> Response:
    """Publish a message; answered after the commit. The queue is created if it does not exist."""
    outgoing = message.to_outgoing_message()
    return await respond(
        request, model.Published, lambda service: service.publish(name, outgoing), 201
    )


@router.get(
    "/queues/{name}/messages/{message_id}",
    response_model=json_type(model.MessageTrace),
    responses=error_responses(404, 409),
)
async def trace_message(request: Request, name: QueueName, message_id: MessageId) -> Response:
    """The history of a message, its state in each group, and why."""
    return await respond(
        request, model.MessageTrace, lambda service: service.trace_message(name, message_id)
    )


@router.get("/messages/{message_id}", response_model=Found, responses=error_responses(409))
async def find(request: Request, message_id: MessageId) -> Found:
    """The queues that know a message; an empty list is not an error."""
    return Found(queues=await call_service(request, lambda service: service.find(message_id)))


@router.delete(
    "/queues/{name}/messages/{message_id}",
    status_code=204,
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "cancel messages"),
)
async def cancel_message(request: Request, name: QueueName, message_id: MessageId) -> Response:
    """Cancel a message that waits, is delayed or waits for a retry: it is never delivered.
    409: too late, a consumer is working on it."""
    by = caller(request).name
    await call_service(request, lambda service: service.cancel_message(name, message_id, by))
    return Response(status_code=204)


@router.post(
    "/queues/{name}/messages/{message_id}/reschedule",
    response_model=json_type(model.Message),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "reschedule messages"),
)
async def reschedule_message(
    request: Request, name: QueueName, message_id: MessageId, when: NewTime
) -> Response:
    """Deliver a message at another time: delay it, end its delay, or retry it now."""
    by = caller(request).name
    return await respond(
        request,
        model.Message,
        lambda service: service.reschedule_message(
            name, message_id, when.given_delay(), when.deliver_at, by
        ),
    )


@router.post(
    "/queues/{name}/messages/cancel",
    response_model=json_type(model.Commanded),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "cancel messages"),
)
async def cancel_messages(request: Request, name: QueueName, chosen: CancelMany) -> Response:
    """Cancel the messages that a filter matches, or count them."""
    by = caller(request).name
    return await respond(
        request,
        model.Commanded,
        lambda service: service.cancel_messages(
            name, chosen.to_filter(), chosen.limit, chosen.dry_run, by
        ),
    )


@router.post(
    "/queues/{name}/messages/reschedule",
    response_model=json_type(model.Commanded),
    responses=error_responses(404, 408, 409, 413, 415),
    **requires_role(Role.OPERATOR, "reschedule messages"),
)
async def reschedule_messages(
    request: Request, name: QueueName, chosen: RescheduleMany
) -> Response:
    """Deliver the messages that a filter matches at another time, or count them."""
    by = caller(request).name
    return await respond(
        request,
        model.Commanded,
        lambda service: service.reschedule_messages(
            name,
            chosen.to_filter(),
            chosen.limit,
            chosen.dry_run,
            chosen.given_delay(),
            chosen.deliver_at,
            by,
        ),
    )
