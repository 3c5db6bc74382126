"""Metadata of rejected messages: user properties in MQTT 5.0, part of the payload in 3.1.1.

3.1.1 has no properties, so a rejected message is wrapped in a JSON envelope with the metadata in
the `bag` of its header. A payload that is such an envelope already keeps its form and gets the
metadata added:

    {"header": {"topic": "orders", "messageType": "Order", "bag": {"originalTopic": "orders", ...}},
     "body": ...}

A text body stays readable; other bytes are base64. The header of an envelope that was added has the
encoding, so that a replay removes the envelope again.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any, Final

from sluice.client.errors import Unsupported
from sluice.client.message import Message
from sluice.client.outcomes import normalize_reason

ORIGINAL_TOPIC: Final = "originalTopic"
ORIGINAL_MESSAGE_TYPE: Final = "originalMessageType"
REJECTION_REASON: Final = "rejectionReason"
REJECTION_TIMESTAMP: Final = "rejectionTimestamp"
REJECTION_MESSAGE: Final = "rejectionMessage"

METADATA: Final = frozenset(
    (
        ORIGINAL_TOPIC,
        ORIGINAL_MESSAGE_TYPE,
        REJECTION_REASON,
        REJECTION_TIMESTAMP,
        REJECTION_MESSAGE,
    )
)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A rejected message, decoded: its original payload and its metadata."""

    payload: bytes
    metadata: dict[str, str]

    @property
    def original_topic(self) -> str:
        return self.metadata.get(ORIGINAL_TOPIC, "")

    @property
    def reason(self) -> str:
        """Return `delivery-error` or `unacceptable`; both spellings are understood."""
        recorded = self.metadata.get(REJECTION_REASON)
        try:
            return "" if recorded is None else normalize_reason(recorded)
        except Unsupported:  # another program wrote it
            return recorded or ""


def add_to_properties(
    user: list[tuple[str, str]], metadata: dict[str, str]
) -> list[tuple[str, str]]:
    """Add metadata to user properties, and replace that of an earlier rejection."""
    return [*((name, value) for name, value in user if name not in METADATA), *metadata.items()]


def add_to_payload(payload: bytes, topic: str, metadata: dict[str, str]) -> bytes:
    envelope = _parse_envelope(payload)
    if envelope is None:
        header: dict[str, Any] = {"topic": topic, "messageType": metadata[ORIGINAL_MESSAGE_TYPE]}
        try:
            body = payload.decode()
            header["encoding"] = "utf-8"
        except UnicodeDecodeError:
            header["encoding"] = "base64"
            body = base64.b64encode(payload).decode()
        envelope = {"header": header, "body": body}
    header = envelope["header"]
    bag = header.get("bag")
    previous = bag if isinstance(bag, dict) else {}
    header["bag"] = {
        **{name: value for name, value in previous.items() if name not in METADATA},
        **metadata,
    }
    return json.dumps(envelope, ensure_ascii=False).encode()


def message_type_in(payload: bytes) -> str | None:
    """Return the message type in the header of an envelope."""
    envelope = _parse_envelope(payload)
    message_type = None if envelope is None else envelope["header"].get("messageType")
    return message_type if isinstance(message_type, str) else None


def read_dead_letter(message: Message) -> DeadLetter:
    """Decode a message that `reject` has sent, in either form."""
    metadata_properties = {
        name: value for name, value in message.properties.user if name in METADATA
    }
    if metadata_properties:
        return DeadLetter(message.payload, metadata_properties)
    envelope = _parse_envelope(message.payload)
    bag = None if envelope is None else envelope["header"].get("bag")
    if envelope is None or not isinstance(bag, dict):
        return DeadLetter(message.payload, {})
    metadata = {name: str(value) for name, value in bag.items() if name in METADATA}
    body = envelope.get("body")
    if not isinstance(body, str):
        return DeadLetter(json.dumps(body, ensure_ascii=False).encode(), metadata)
    if envelope["header"].get("encoding") == "base64":
        return DeadLetter(base64.b64decode(body), metadata)
    return DeadLetter(body.encode(), metadata)


def original_payload(message: Message) -> bytes:
    """Return the payload that was rejected, for a replay to the original topic.

    An envelope that the publisher sent keeps its form, without the metadata of the rejection.
    """
    envelope = _parse_envelope(message.payload)
    if envelope is None or "encoding" in envelope["header"]:
        return read_dead_letter(message).payload
    bag = envelope["header"].get("bag")
    if isinstance(bag, dict) and not METADATA.isdisjoint(bag):
        rest = {name: value for name, value in bag.items() if name not in METADATA}
        if rest:
            envelope["header"]["bag"] = rest
        else:
            del envelope["header"]["bag"]
        return json.dumps(envelope, ensure_ascii=False).encode()
    return message.payload


def _parse_envelope(payload: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("header"), dict) and "body" in value:
        return value
    return None
