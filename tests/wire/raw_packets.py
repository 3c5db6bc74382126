"""Packets written byte by byte, without Sluice's encoder: a test must not trust what it tests.

`decoded` puts other bytes before and after the packet, as in a connection's buffer. A read past the
end of the packet then finds bytes there, and the wrong result shows; alone in its buffer it would
only raise an IndexError.
"""

from __future__ import annotations

from sluice.errors import ProtocolViolation
from sluice.wire.decode import decode
from sluice.wire.packets import (
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Publish,
    Suback,
    Subscribe,
    SubscriptionRequest,
    Unsuback,
    Unsubscribe,
)
from sluice.wire.properties import Properties

MALFORMED = 0x81
PROTOCOL_ERROR = 0x82
BAD_TOPIC = 0x90

FILLER = b"\x26\x00\x01\x00"  # would pass for a property, a length, a QoS or a packet id


def u16(value: int) -> bytes:
    return value.to_bytes(2, "big")


def u32(value: int) -> bytes:
    return value.to_bytes(4, "big")


def varint(value: int) -> bytes:
    out = bytearray()
    while True:
        value, low = divmod(value, 128)
        out.append(low | 0x80 if value else low)
        if not value:
            return bytes(out)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return u16(len(raw)) + raw


def user(key: str | bytes, value: str | bytes) -> bytes:
    return b"\x26" + text(key) + text(value)


def block(*properties: bytes) -> bytes:
    """Return properties with their length."""
    joined = b"".join(properties)
    return varint(len(joined)) + joined


def packet(head: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return bytes([head]) + varint(len(body)) + body


def connect(
    level: int,
    flags: int,
    *payload: bytes,
    keep_alive: int = 60,
    properties: bytes = b"\x00",
    name: str | bytes = "MQTT",
) -> bytes:
    """Return a CONNECT; `payload` begins with the client identifier."""
    middle = properties if level == 5 else b""
    return packet(0x10, text(name), bytes([level, flags]), u16(keep_alive), middle, *payload)


def body_start(data: bytes) -> int:
    """Return where the body begins: after the first length byte without a continuation bit."""
    return 2 + next(nth for nth, byte in enumerate(data[1:]) if byte < 0x80)


def decoded(data: bytes, version: int = 5) -> Packet:
    """Decode the one packet in `data` from the middle of a larger buffer."""
    start = len(FILLER)
    body = start + body_start(data)
    return decode(FILLER + data + FILLER, data[0], body, start + len(data), version)


def refused(data: bytes, version: int = 5) -> ProtocolViolation:
    """Return the violation that decoding `data` raises."""
    try:
        found = decoded(data, version)
    except ProtocolViolation as fault:
        return fault
    raise AssertionError(f"accepted as {field_values(found)}")


FIELDS: dict[type, tuple[str, ...]] = {
    Publish: (
        *("topic", "payload", "qos", "retain", "dup", "packet_id", "raw_properties"),
        *("expiry_seconds", "topic_alias", "subscription_ids"),
    ),
    Connect: (
        *("client_id", "version", "clean_start", "keep_alive", "properties"),
        *("will", "will_delay", "username", "password"),
    ),
    Connack: ("session_present", "reason", "properties"),
    Ack: ("packet_id", "reason", "properties"),
    Subscribe: ("packet_id", "requests", "properties"),
    SubscriptionRequest: (
        "topic_filter",
        "qos",
        "no_local",
        "retain_as_published",
        "retain_handling",
    ),
    Suback: ("packet_id", "reasons", "properties"),
    Unsubscribe: ("packet_id", "filters", "properties"),
    Unsuback: ("packet_id", "reasons", "properties"),
    Pingreq: (),
    Pingresp: (),
    Disconnect: ("reason", "properties"),
    Auth: ("reason", "properties"),
}


def field_values(item: object) -> object:
    """Return all fields of a packet as plain values, to compare and to print.

    An empty set of properties equals none.
    """
    if isinstance(item, Properties):
        return item.to_dict()
    if isinstance(item, list):
        return [field_values(each) for each in item]
    if type(item) not in FIELDS:
        return item
    reported: dict[str, object] = {"packet": type(item).__name__}
    if isinstance(item, Packet):
        reported["kind"] = int(item.kind)
    for name in FIELDS[type(item)]:
        value: object = getattr(item, name)
        reported[name] = {} if name == "properties" and value is None else field_values(value)
    return reported
