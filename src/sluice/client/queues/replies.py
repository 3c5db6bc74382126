"""Response topics and correlation data of requests and replies.

MQTT 5.0 has properties for them; clients that cannot set those use the user properties
`response-topic` and `correlation-id`. Both forms are read, and a reply carries both, so that either
kind of client can be at either end.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from sluice.client.errors import Unsupported
from sluice.client.message import Message, ReplyOptions
from sluice.client.net import Confirm
from sluice.client.options import user_pairs
from sluice.client.payload_codecs import encode_payload
from sluice.client.protocol import PublishProperties, make_publish
from sluice.wire.properties import Properties

REPLY_QUEUE_PREFIX: Final = "$queue/responses/"


class HasProperties(Protocol):
    """A message, a delivery, or their forms in `sluice.client.sync`."""

    @property
    def properties(self) -> Properties: ...


class ResponseInfo(NamedTuple):
    """Where the sender of a message expects the reply, and what the reply has to repeat."""

    response_topic: str | None
    correlation_id: str | None


def response_info(message: HasProperties) -> ResponseInfo:
    """Return response topic and correlation id, of the MQTT 5.0 or of the user properties.

    Each is None if the message has none. Bytes of a correlation id that are not UTF-8 are escaped
    as by `os.fsdecode`.
    """
    correlation = correlation_of(message.properties)
    return ResponseInfo(
        response_topic_of(message.properties),
        None if correlation is None else correlation.decode("utf-8", "surrogateescape"),
    )


def response_topic_of(properties: Properties) -> str | None:
    """Return the topic for the reply, or None if the sender requests none."""
    return properties.response_topic or _user_property(properties, "response-topic")


def correlation_of(properties: Properties) -> bytes | None:
    data = properties.correlation_data
    if data is not None:
        return data
    text = _user_property(properties, "correlation-id")
    return None if text is None else text.encode()


def make_reply(version: int, message: Message, payload: object, options: ReplyOptions) -> Confirm:
    """Return the reply to `message`, at QoS 1."""
    request = message.properties
    topic = response_topic_of(request)
    if topic is None:
        raise Unsupported(
            f"the message on {message.topic!r} asks for no answer",
            "Reply only to messages with a response topic; `client.request` sets one",
        )
    body, content_type = encode_payload(payload)
    user = user_pairs(options.get("headers") or ())
    given: PublishProperties = {
        "content_type": options.get("content_type") or content_type,
        "user": user,
    }
    correlation = correlation_of(request)
    if correlation is not None:
        given["correlation_data"] = correlation
        try:
            user.append(("correlation-id", correlation.decode()))
        except UnicodeDecodeError:
            pass  # binary correlation data came as a property, which the requester reads
    return Confirm(make_publish(version, topic, body, 1, False, given))


def _user_property(properties: Properties, name: str) -> str | None:
    return next((value for key, value in properties.user if key == name), None)
