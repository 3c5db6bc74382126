"""The properties of MQTT 5.0 section 2.2.2: one table of their types and allowed packets.

`Properties` is the convenient form, for all packets outside the message path. On the message path
the properties of a PUBLISH stay raw bytes; `decode.py` scans them without building this object.
"""

from __future__ import annotations

from typing import Final, cast

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.errors import MalformedPacket, ProtocolViolation
from sluice.wire.primitives import (
    read_binary,
    read_text,
    read_u16,
    read_u32,
    read_varint,
    varint_size,
    write_binary,
    write_u16,
    write_u32,
    write_varint,
)
from sluice.wire.reasons import QUOTA_EXCEEDED
from sluice.wire.topics import check_topic_name

MAX_USER_PROPERTIES: Final = 1000  # of one packet that is not a PUBLISH

# Types of values.
BYTE: Final = 0
U16: Final = 1
U32: Final = 2
VARINT: Final = 3
TEXT: Final = 4
BINARY: Final = 5
STRING_PAIR: Final = 6

# Packet types (section 2.1.2); WILL means the will properties inside a CONNECT.
WILL: Final = 0
CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15

_ACKS: Final = (CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH)
_ALL: Final = (WILL, CONNECT, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, *_ACKS)

# identifier: (attribute, type, packets that may carry it, minimum, maximum)
PROPERTY_TABLE: Final[dict[int, tuple[str, int, tuple[int, ...], int, int]]] = {
    0x01: ("payload_format", BYTE, (PUBLISH, WILL), 0, 1),
    0x02: ("message_expiry", U32, (PUBLISH, WILL), 0, 0xFFFF_FFFF),
    0x03: ("content_type", TEXT, (PUBLISH, WILL), 0, 0),
    0x08: ("response_topic", TEXT, (PUBLISH, WILL), 0, 0),
    0x09: ("correlation_data", BINARY, (PUBLISH, WILL), 0, 0),
    0x0B: ("subscription_ids", VARINT, (PUBLISH, SUBSCRIBE), 1, 268_435_455),
    0x11: ("session_expiry", U32, (CONNECT, CONNACK, DISCONNECT), 0, 0xFFFF_FFFF),
    0x12: ("assigned_client_id", TEXT, (CONNACK,), 0, 0),
    0x13: ("server_keep_alive", U16, (CONNACK,), 0, 0xFFFF),
    0x15: ("auth_method", TEXT, (CONNECT, CONNACK, AUTH), 0, 0),
    0x16: ("auth_data", BINARY, (CONNECT, CONNACK, AUTH), 0, 0),
    0x17: ("request_problem", BYTE, (CONNECT,), 0, 1),
    0x18: ("will_delay", U32, (WILL,), 0, 0xFFFF_FFFF),
    0x19: ("request_response", BYTE, (CONNECT,), 0, 1),
    0x1A: ("response_information", TEXT, (CONNACK,), 0, 0),
    0x1C: ("server_reference", TEXT, (CONNACK, DISCONNECT), 0, 0),
    0x1F: ("reason_string", TEXT, _ACKS, 0, 0),
    0x21: ("receive_maximum", U16, (CONNECT, CONNACK), 1, 0xFFFF),
    0x22: ("topic_alias_maximum", U16, (CONNECT, CONNACK), 0, 0xFFFF),
    0x23: ("topic_alias", U16, (PUBLISH,), 1, 0xFFFF),
    0x24: ("maximum_qos", BYTE, (CONNACK,), 0, 1),
    0x25: ("retain_available", BYTE, (CONNACK,), 0, 1),
    0x26: ("user", STRING_PAIR, _ALL, 0, 0),
    0x27: ("maximum_packet_size", U32, (CONNECT, CONNACK), 1, 0xFFFF_FFFF),
    0x28: ("wildcard_available", BYTE, (CONNACK,), 0, 1),
    0x29: ("subscription_ids_available", BYTE, (CONNACK,), 0, 1),
    0x2A: ("shared_available", BYTE, (CONNACK,), 0, 1),
}


class Properties:
    """One set of properties. An absent property is None (or an empty list)."""

    def __init__(self) -> None:
        self.payload_format: int | None = None
        self.message_expiry: int | None = None
        self.content_type: str | None = None
        self.response_topic: str | None = None
        self.correlation_data: bytes | None = None
        self.subscription_ids: list[int] = []
        self.session_expiry: int | None = None
        self.assigned_client_id: str | None = None
        self.server_keep_alive: int | None = None
        self.auth_method: str | None = None
        self.auth_data: bytes | None = None
        self.request_problem: int | None = None
        self.will_delay: int | None = None
        self.request_response: int | None = None
        self.response_information: str | None = None
        self.server_reference: str | None = None
        self.reason_string: str | None = None
        self.receive_maximum: int | None = None
        self.topic_alias_maximum: int | None = None
        self.topic_alias: int | None = None
        self.maximum_qos: int | None = None
        self.retain_available: int | None = None
        self.user: list[tuple[str, str]] = []
        self.maximum_packet_size: int | None = None
        self.wildcard_available: int | None = None
        self.subscription_ids_available: int | None = None
        self.shared_available: int | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the properties that are set, by name: for logs and comparisons."""
        found: dict[str, object] = {}
        for name, _, _, _, _ in PROPERTY_TABLE.values():
            value: object = getattr(self, name)
            if value is not None and value != []:
                found[name] = value
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Properties) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return (
            "Properties("
            + ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
            + ")"
        )


def too_many_properties_error(maximum: i64) -> ProtocolViolation:
    return ProtocolViolation(
        f"the packet has more than {maximum} user properties",
        "Send fewer, or put them in the payload",
        QUOTA_EXCEEDED,
    )


def read_properties(data: bytes, at: i64, end: i64, packet_type: int) -> Properties:
    """Decode the properties in `data[at:end]`, without length prefix, for a packet type."""
    found = Properties()
    seen: set[int] = set()
    while at < end:
        identifier: int = data[at]
        at += 1
        row = PROPERTY_TABLE.get(identifier)
        if row is None or packet_type not in row[2]:
            raise MalformedPacket(f"property 0x{identifier:02x} is not allowed in this packet")
        name, kind, _, minimum, maximum = row
        if kind == STRING_PAIR:
            key = read_text(data, at, end)
            at += 2 + len(key)
            text = read_text(data, at, end)
            at += 2 + len(text)
            found.user.append((key.decode(), text.decode()))
            if packet_type != PUBLISH and len(found.user) > MAX_USER_PROPERTIES:
                raise too_many_properties_error(MAX_USER_PROPERTIES)
            continue
        if identifier in seen and not (kind == VARINT and packet_type == PUBLISH):
            raise ProtocolViolation(f"property {name} is included more than once")
        seen.add(identifier)
        if kind == TEXT:
            text = read_text(data, at, end)
            if identifier == 0x08:
                check_topic_name(text, 0, len(text))  # [MQTT-3.3.2-14], also for a will
            at += 2 + len(text)
            setattr(found, name, text.decode())
        elif kind == BINARY:
            raw = read_binary(data, at, end)
            at += 2 + len(raw)
            setattr(found, name, raw)
        else:
            number: i64
            if kind == BYTE:
                if at >= end:
                    raise MalformedPacket("the packet ends inside a property")
                number = data[at]
                at += 1
            elif kind == U16:
                number = read_u16(data, at, end)
                at += 2
            elif kind == U32:
                number = read_u32(data, at, end)
                at += 4
            else:
                number = read_varint(data, at, end)
                at += varint_size(number)
            value = int(number)
            if value < minimum or value > maximum:
                raise ProtocolViolation(
                    f"property {name} is {value}, outside {minimum} to {maximum}"
                )
            if kind == VARINT:
                found.subscription_ids.append(value)
            else:
                setattr(found, name, value)
    if found.auth_data is not None and found.auth_method is None:
        raise ProtocolViolation("authentication data is present without an authentication method")
    return found


def read_property_block(data: bytes, at: i64, end: i64, packet_type: int) -> tuple[Properties, int]:
    """Return a length-prefixed block of properties and the position after it."""
    size = read_varint(data, at, end)
    start = at + varint_size(size)
    if start + size > end:
        raise MalformedPacket("the properties run past the end of the packet")
    return read_properties(data, start, start + size, packet_type), int(start + size)


def encode_properties(properties: Properties) -> bytes:
    """Return the encoded properties without their length prefix, in the order of the table."""
    out = BytesWriter()
    for identifier, (name, kind, _, _, _) in PROPERTY_TABLE.items():
        value: object = getattr(properties, name)
        if value is None:
            continue
        if kind == STRING_PAIR:
            for key, text in properties.user:
                out.append(identifier)
                write_binary(out, key.encode())
                write_binary(out, text.encode())
        elif kind == VARINT:
            for number in properties.subscription_ids:
                out.append(identifier)
                write_varint(out, number)
        else:
            out.append(identifier)
            if kind == TEXT:
                write_binary(out, cast(str, value).encode())
            elif kind == BINARY:
                write_binary(out, cast(bytes, value))
            elif kind == BYTE:
                out.append(cast(int, value))
            elif kind == U16:
                write_u16(out, cast(int, value))
            else:
                write_u32(out, cast(int, value))
    return out.getvalue()


def write_property_block(out: BytesWriter, properties: Properties | None) -> None:
    """Write the length-prefixed block; no properties are a zero."""
    if properties is None:
        out.append(0)
        return
    encoded = encode_properties(properties)
    write_varint(out, len(encoded))
    out.write(encoded)
