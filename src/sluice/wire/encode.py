"""Encode packets into a buffer that the caller owns.

One buffer collects all output of a connection in one turn of the loop, so that one write per turn
is enough. `write_publish` is on the hot path: it copies the stored topic, properties and payload
and allocates nothing.
"""

from __future__ import annotations

from librt.strings import BytesWriter
from mypy_extensions import i64

from sluice.wire.packets import (
    V5,
    Ack,
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Publish,
    Suback,
    Subscribe,
    Unsuback,
    Unsubscribe,
)
from sluice.wire.primitives import (
    MAX_VARINT,
    varint_size,
    write_binary,
    write_u16,
    write_u32,
    write_varint,
)
from sluice.wire.properties import (
    Properties,
    encode_properties,
    write_property_block,
)
from sluice.wire.reasons import map_connack_311


def encode(packet: Packet, version: int) -> bytes:
    """Return one packet as bytes: for the client and for tests, not for the message path."""
    out = BytesWriter()
    write_packet(out, packet, version)
    return out.getvalue()


def write_packet(out: BytesWriter, packet: Packet, version: int) -> None:
    if isinstance(packet, Publish):
        extra_properties = b"" if version != V5 else encode_hop_properties(packet)
        write_publish(
            out,
            packet,
            packet.topic,
            packet.qos,
            packet.retain,
            packet.dup,
            packet.packet_id,
            extra_properties,
            version,
        )
    elif isinstance(packet, Ack):
        write_ack(out, packet.kind, packet.packet_id, packet.reason, packet.properties, version)
    elif isinstance(packet, Connect):
        _write_connect(out, packet)
    elif isinstance(packet, Connack):
        write_connack(out, packet, version)
    elif isinstance(packet, Subscribe):
        _write_subscribe(out, packet, version)
    elif isinstance(packet, Unsubscribe):
        _write_unsubscribe(out, packet, version)
    elif isinstance(packet, Suback):
        write_suback(out, 0x90, packet.packet_id, packet.reasons, packet.properties, version)
    elif isinstance(packet, Unsuback):
        reasons = packet.reasons if version == V5 else []
        write_suback(out, 0xB0, packet.packet_id, reasons, packet.properties, version)
    elif isinstance(packet, Disconnect):
        write_disconnect_or_auth(out, 0xE0, packet.reason, packet.properties, version)
    elif isinstance(packet, Auth):
        write_disconnect_or_auth(out, 0xF0, packet.reason, packet.properties, version)
    else:
        out.append(0xC0 if isinstance(packet, Pingreq) else 0xD0)
        out.append(0)


def write_publish(
    out: BytesWriter,
    message: Publish,
    topic: bytes,
    qos: i64,
    retain: bool,
    dup: bool,
    packet_id: i64,
    extra_properties: bytes,
    version: i64,
) -> None:
    """Write `message` as a PUBLISH of this hop, with its own topic, QoS and flags.

    `extra_properties` are encoded properties for this recipient alone; they precede the forwarded
    ones.
    """
    head: i64 = 0x30 | (qos << 1)
    if retain:
        head |= 1
    if dup:
        head |= 8
    raw = message.raw_properties
    payload = message.payload
    topic_size: i64 = len(topic)
    properties: i64 = len(extra_properties) + len(raw)
    length: i64 = 2 + topic_size + len(payload)
    if qos > 0:
        length += 2
    if version == V5:
        length += properties + varint_size(properties)
    # Check before the first byte is written: `out` holds other packets too.
    if topic_size > 0xFFFF or length > MAX_VARINT:
        raise ValueError("the topic name or the message is too long for an MQTT packet")
    out.append(int(head))
    write_varint(out, length)
    write_u16(out, topic_size)
    out.write(topic)
    if qos > 0:
        write_u16(out, packet_id)
    if version == V5:
        write_varint(out, properties)
        if properties:
            if extra_properties:
                out.write(extra_properties)
            out.write(raw)
    out.write(payload)


def measure_publish(
    message: Publish, topic: bytes, qos: i64, extra_properties: bytes, version: i64
) -> i64:
    """Return the size of the packet that `write_publish` would write."""
    length: i64 = 2 + len(topic) + len(message.payload)
    if qos > 0:
        length += 2
    if version == V5:
        properties: i64 = len(extra_properties) + len(message.raw_properties)
        length += properties + varint_size(properties)
    return 1 + varint_size(length) + length


def encode_hop_properties(packet: Publish) -> bytes:
    """Return the encoded properties that apply to this hop alone."""
    if packet.expiry_seconds < 0 and packet.topic_alias == 0 and packet.subscription_ids is None:
        return b""
    out = BytesWriter()
    if packet.expiry_seconds >= 0:
        out.append(0x02)
        write_u32(out, packet.expiry_seconds)
    if packet.topic_alias:
        out.append(0x23)
        write_u16(out, packet.topic_alias)
    if packet.subscription_ids is not None:
        for identifier in packet.subscription_ids:
            out.append(0x0B)
            write_varint(out, identifier)
    return out.getvalue()


def write_ack(
    out: BytesWriter,
    kind: i64,
    packet_id: i64,
    reason: i64,
    properties: Properties | None,
    version: i64,
) -> None:
    """Write PUBACK, PUBREC, PUBREL or PUBCOMP. A plain success has four bytes in both versions."""
    head: i64 = (kind << 4) | (2 if kind == 6 else 0)
    if version != V5 or (reason == 0 and properties is None):
        out.append(int(head))
        out.append(2)
        write_u16(out, packet_id)
        return
    if properties is None:
        out.append(int(head))
        out.append(3)
        write_u16(out, packet_id)
        out.append(int(reason))
        return
    encoded = encode_properties(properties)  # may raise: nothing of the packet is written yet
    size: i64 = len(encoded)
    out.append(int(head))
    write_varint(out, 3 + varint_size(size) + size)
    write_u16(out, packet_id)
    out.append(int(reason))
    write_varint(out, size)
    out.write(encoded)


def _write_with_header(out: BytesWriter, head: int, body: BytesWriter) -> None:
    out.append(head)
    write_varint(out, len(body))
    out.write(body.getvalue())


def _write_connect(out: BytesWriter, packet: Connect) -> None:
    body = BytesWriter()
    write_binary(body, b"MQTT")
    body.append(packet.version)
    flags = 2 if packet.clean_start else 0
    will = packet.will
    if will is not None:
        flags |= 0x04 | (int(will.qos) << 3) | (0x20 if will.retain else 0)
    if packet.username is not None:
        flags |= 0x80
    if packet.password is not None:
        flags |= 0x40
    body.append(flags)
    write_u16(body, packet.keep_alive)
    if packet.version == V5:
        write_property_block(body, packet.properties)
    write_binary(body, packet.client_id.encode())
    if will is not None:
        if packet.version == V5:
            properties = will.decode_properties()
            properties.will_delay = packet.will_delay or None
            write_property_block(body, properties)
        write_binary(body, will.topic)
        write_binary(body, will.payload)
    if packet.username is not None:
        write_binary(body, packet.username.encode())
    if packet.password is not None:
        write_binary(body, packet.password)
    _write_with_header(out, 0x10, body)


def write_connack(out: BytesWriter, packet: Connack, version: int) -> None:
    body = BytesWriter()
    body.append(1 if packet.session_present else 0)
    body.append(packet.reason if version == V5 else map_connack_311(packet.reason))
    if version == V5:
        write_property_block(body, packet.properties)
    _write_with_header(out, 0x20, body)


def _write_subscribe(out: BytesWriter, packet: Subscribe, version: int) -> None:
    body = BytesWriter()
    write_u16(body, packet.packet_id)
    if version == V5:
        write_property_block(body, packet.properties)
    for request in packet.requests:
        write_binary(body, request.topic_filter)
        options = request.qos
        if version == V5:
            options |= (4 if request.no_local else 0) | (8 if request.retain_as_published else 0)
            options |= request.retain_handling << 4
        body.append(options)
    _write_with_header(out, 0x82, body)


def _write_unsubscribe(out: BytesWriter, packet: Unsubscribe, version: int) -> None:
    body = BytesWriter()
    write_u16(body, packet.packet_id)
    if version == V5:
        write_property_block(body, packet.properties)
    for topic_filter in packet.filters:
        write_binary(body, topic_filter)
    _write_with_header(out, 0xA2, body)


def write_suback(
    out: BytesWriter,
    head: int,
    packet_id: int,
    reasons: list[int],
    properties: Properties | None,
    version: int,
) -> None:
    """Write SUBACK (head 0x90) or UNSUBACK (head 0xB0).

    A 3.1.1 SUBACK has only one failure code, 0x80 [MQTT-3.9.3-2].
    """
    body = BytesWriter()
    write_u16(body, packet_id)
    if version == V5:
        write_property_block(body, properties)
    for reason in reasons:
        body.append(reason if version == V5 or reason < 0x80 else 0x80)
    _write_with_header(out, head, body)


def write_disconnect_or_auth(
    out: BytesWriter, head: int, reason: int, properties: Properties | None, version: int
) -> None:
    """Write DISCONNECT (head 0xE0) or AUTH (head 0xF0); a normal one has two bytes."""
    body = BytesWriter()
    if version == V5 and (reason or properties is not None):
        body.append(reason)
        # An AUTH may omit both fields or none (section 3.15.2.1).
        if properties is not None or head == 0xF0:
            write_property_block(body, properties)
    _write_with_header(out, head, body)
