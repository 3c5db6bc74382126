"""Build the packet of a publish, with all checks that do not depend on the server."""

from __future__ import annotations

from typing import TypedDict

from sluice.client.errors import Unsupported
from sluice.client.options import UserProperties, check_text, user_pairs
from sluice.wire.packets import V5, Publish, build_publish
from sluice.wire.properties import Properties

Payload = bytes | bytearray | memoryview | str


class PublishProperties(TypedDict, total=False):
    """MQTT 5.0 properties of a message, as keywords of `publish`.

    `properties` gives them as one object; the other keywords override it, and `user` is added.
    """

    properties: Properties | None
    user: UserProperties | None
    content_type: str | None
    response_topic: str | None
    correlation_data: bytes | None
    payload_format: int | None
    expiry_seconds: int | None


def refuse_properties(version: int, given: bool) -> None:
    """Refuse properties with MQTT 3.1.1, which would drop them silently."""
    if given and version != V5:
        raise Unsupported(
            "MQTT 3.1.1 carries no properties",
            "Connect with version=5, or leave the properties out",
        )


def make_publish(
    version: int, topic: str, payload: Payload, qos: int, retain: bool, given: PublishProperties
) -> Publish:
    name = _encode_topic(topic)
    if qos not in (0, 1, 2):
        raise Unsupported(f"qos is {qos}", "Use 0, 1 or 2")
    if type(payload) is not bytes:
        payload = payload.encode() if isinstance(payload, str) else bytes(payload)
    if not given:
        return Publish(name, payload, qos, retain)
    joined = _merge_properties(given)
    refuse_properties(version, bool(joined.to_dict()))
    return build_publish(name, payload, qos, retain, joined)


def _encode_topic(topic: str) -> bytes:
    name = topic.encode()
    if not name or len(name) > 0xFFFF or b"+" in name or b"#" in name or b"\0" in name:
        raise Unsupported(
            f"{topic[:100]!r} is not a topic to publish to",
            "Use 1 to 65,535 bytes of UTF-8 without + and #; only filters have wildcards",
        )
    return name


def _merge_properties(given: PublishProperties) -> Properties:
    """Merge the given keywords into new properties; the caller's object is not changed."""
    base = given.get("properties") or Properties()
    if base.topic_alias is not None:
        raise Unsupported(
            "the client assigns topic aliases itself", "Set topic_aliases=True on the client"
        )
    joined = Properties()
    joined.user = [*base.user, *user_pairs(given.get("user") or ())]
    joined.content_type = _first_set(given.get("content_type"), base.content_type)
    # An empty one means none: MQTT forbids it, and servers end the connection.
    joined.response_topic = _first_set(given.get("response_topic"), base.response_topic) or None
    for text in (joined.content_type, joined.response_topic):
        if text is not None:
            check_text(text)
    if joined.response_topic is not None:
        _encode_topic(joined.response_topic)
    data = given.get("correlation_data")
    joined.correlation_data = base.correlation_data if data is None else data
    form = given.get("payload_format")
    joined.payload_format = base.payload_format if form is None else form
    expiry = given.get("expiry_seconds")
    joined.message_expiry = base.message_expiry if expiry is None else expiry
    return joined


def _first_set(one: str | None, other: str | None) -> str | None:
    return other if one is None else one
