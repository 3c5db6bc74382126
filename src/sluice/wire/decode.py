"""Decode packets: no socket, no clock; a slice of a buffer in, a packet out or an exception.

`decode` handles every packet in both directions: the broker reads what clients send, the client
reads what brokers send. PUBLISH and the acknowledgements make up nearly all traffic and have
functions of their own that a connection calls directly. Every read is bounded by `end`: a length
inside a packet can be false, the end of the packet cannot.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from sluice.errors import InvalidTopic, MalformedPacket, ProtocolViolation, UnsupportedVersion
from sluice.wire.packets import (
    V5,
    V311,
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
    build_publish,
)
from sluice.wire.primitives import (
    read_binary,
    read_text,
    read_u16,
    read_u32,
    read_varint,
    varint_size,
)
from sluice.wire.properties import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBLISH,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    WILL,
    read_property_block,
    too_many_properties_error,
)
from sluice.wire.reasons import QUOTA_EXCEEDED, SUCCESS, TOPIC_ALIAS_INVALID
from sluice.wire.topics import check_topic_filter, check_topic_name, check_utf8

# Of one SUBSCRIBE or UNSUBSCRIBE; further filters are counted, and not read.
MAX_FILTERS: Final = 1000
NO_PROPERTY_LIMIT: Final = 0x7FFF_FFFF


def decode(data: bytes, head: i64, at: i64, end: i64, version: i64) -> Packet:
    """Return the packet whose fixed header begins with `head` and whose body is `data[at:end]`."""
    kind: i64 = head >> 4
    flags: i64 = head & 0x0F
    if kind == PUBLISH:
        return decode_publish(data, flags, at, end, version)
    expected_flags: i64 = 2 if kind == PUBREL or kind == SUBSCRIBE or kind == UNSUBSCRIBE else 0
    if flags != expected_flags:  # [MQTT-2.1.3-1]
        raise MalformedPacket(
            f"the fixed header of packet type {kind} has flags {flags} instead of {expected_flags}"
        )
    if PUBACK <= kind < SUBSCRIBE:
        return decode_ack(data, kind, at, end, version)
    if kind == PINGREQ or kind == PINGRESP:
        if at != end:
            raise MalformedPacket("a ping carries no bytes")
        return Pingreq() if kind == PINGREQ else Pingresp()
    if kind == CONNECT:
        return _decode_connect(data, at, end)
    if kind == CONNACK:
        return _decode_connack(data, at, end, version)
    if kind == SUBSCRIBE:
        return _decode_subscribe(data, at, end, version)
    if kind == UNSUBSCRIBE:
        return _decode_unsubscribe(data, at, end, version)
    if kind == SUBACK:
        return _decode_suback(data, at, end, version)
    if kind == UNSUBACK:
        return _decode_unsuback(data, at, end, version)
    if kind == DISCONNECT:
        return _decode_disconnect(data, at, end, version)
    if kind == AUTH:
        return _decode_auth(data, at, end, version)
    raise MalformedPacket("packet type 0 is reserved")


def decode_publish(
    data: bytes,
    flags: i64,
    at: i64,
    end: i64,
    version: i64,
    last_topic: bytes = b"",
    max_user_properties: i64 = NO_PROPERTY_LIMIT,
) -> Publish:
    """Decode a PUBLISH.

    `last_topic` is the topic of the previous PUBLISH: most clients repeat it, and then it is not
    checked, copied and hashed again. `max_user_properties` limits the properties that may occur
    more than once.
    """
    qos: i64 = (flags >> 1) & 3
    if qos == 3:
        raise MalformedPacket("a PUBLISH has QoS 3")  # [MQTT-3.3.1-4]
    if qos == 0 and flags & 8:
        raise MalformedPacket("a QoS 0 PUBLISH has the DUP flag")  # [MQTT-3.3.1-2]
    size = read_u16(data, at, end)
    at += 2
    past: i64 = at + size
    if past > end:
        raise MalformedPacket("the topic name runs past the end of the packet")
    if size == len(last_topic) and _equals_at(data, at, last_topic):
        topic = last_topic
    else:
        check_topic_name(data, at, past)
        topic = data[at:past]
    at = past
    packet_id: i64 = 0
    if qos > 0:
        packet_id = read_u16(data, at, end)
        if packet_id == 0:
            raise MalformedPacket("a QoS 1 or 2 PUBLISH has packet identifier 0")  # [MQTT-2.2.1-3]
        at += 2
    if version != V5:
        if size == 0:
            raise InvalidTopic(
                "the topic name is empty", "Publish to a name of at least one character"
            )
        return Publish(topic, data[at:end], qos, (flags & 1) != 0, (flags & 8) != 0, packet_id)
    length = read_varint(data, at, end)
    at += varint_size(length)
    past = at + length
    if past > end:
        raise MalformedPacket("the properties run past the end of the packet")
    packet = Publish(topic, data[past:end], qos, (flags & 1) != 0, (flags & 8) != 0, packet_id)
    if length:
        _read_publish_properties(packet, data, at, past, max_user_properties)
    if size == 0 and packet.topic_alias == 0:
        raise ProtocolViolation(  # section 3.3.2.1
            "the topic name is empty and no topic alias stands for it", "Send the name or an alias"
        )
    return packet


def _equals_at(data: bytes, at: i64, text: bytes) -> bool:
    """Return whether `text` is at `data[at:]`.

    The ends of topics differ more often than their starts.
    """
    nth: i64 = len(text)
    while nth > 0:
        nth -= 1
        if data[at + nth] != text[nth]:
            return False
    return True


def _read_publish_properties(
    packet: Publish, data: bytes, start: i64, end: i64, max_user_properties: i64
) -> None:
    """Check the properties of a PUBLISH and set them in `packet`.

    The forwarded ones are one slice if possible.
    """
    at: i64 = start
    pairs: i64 = 0  # properties that may occur more than once
    # One bit for each property that may occur once; `packet.topic_alias` shows a repeated alias.
    seen: i64 = 0
    forwarded_from: i64 = start
    forwarded = b""
    # From the second slice on; joined once, because repeated concatenation copies much.
    pieces: list[bytes] | None = None
    while at < end:
        property_start: i64 = at
        identifier: i64 = data[at]
        at += 1
        is_hop_property = False  # applies to this hop alone: not forwarded
        if identifier == 0x26:
            size = read_u16(data, at, end)
            at += 2
            if at + size > end:
                raise MalformedPacket("a user property runs past the end of the properties")
            check_utf8(data, at, at + size)
            at += size
            size = read_u16(data, at, end)
            at += 2
            if at + size > end:
                raise MalformedPacket("a user property runs past the end of the properties")
            check_utf8(data, at, at + size)
            at += size
            pairs += 1
            if pairs > max_user_properties:
                raise too_many_properties_error(max_user_properties)
            continue
        if identifier < 0x0B:
            bit: i64 = 1 << identifier  # compiled, this is a C int: never shift it by 32 or more
            if seen & bit:
                raise ProtocolViolation(f"property 0x{identifier:02x} is included more than once")
            seen |= bit
        if identifier == 0x01:
            if at >= end:
                raise MalformedPacket("the packet ends inside a property")
            if data[at] > 1:
                raise ProtocolViolation(
                    f"the payload format indicator is {data[at]}, neither 0 nor 1"
                )
            at += 1
        elif identifier == 0x02:
            packet.expiry_seconds = read_u32(data, at, end)
            at += 4
            is_hop_property = True
        elif identifier == 0x03 or identifier == 0x08 or identifier == 0x09:
            size = read_u16(data, at, end)
            at += 2
            if at + size > end:
                raise MalformedPacket("a string runs past the end of the properties")
            if identifier == 0x03:
                check_utf8(data, at, at + size)
            elif identifier == 0x08:
                if size == 0:
                    raise _empty_response_topic_error()
                check_topic_name(data, at, at + size)  # [MQTT-3.3.2-14]
            at += size
        elif identifier == 0x0B:
            number = read_varint(data, at, end)
            if number == 0:
                raise ProtocolViolation("a subscription identifier is 0")
            at += varint_size(number)
            if packet.subscription_ids is None:
                packet.subscription_ids = []
            packet.subscription_ids.append(int(number))
            pairs += 1
            if pairs > max_user_properties:
                raise too_many_properties_error(max_user_properties)
            is_hop_property = True
        elif identifier == 0x23:
            if packet.topic_alias:
                raise ProtocolViolation("property 0x23 is included more than once")
            packet.topic_alias = read_u16(data, at, end)
            at += 2
            if packet.topic_alias == 0:
                # [MQTT-3.3.2-8]
                raise ProtocolViolation("the topic alias is 0", reason=TOPIC_ALIAS_INVALID)
            is_hop_property = True
        else:
            raise MalformedPacket(f"property 0x{identifier:02x} is not allowed in this packet")
        if is_hop_property:
            if property_start > forwarded_from:
                if not forwarded:
                    forwarded = data[forwarded_from:property_start]
                else:
                    if pieces is None:
                        pieces = [forwarded]
                    pieces.append(data[forwarded_from:property_start])
            forwarded_from = at
    if pieces is not None:
        pieces.append(data[forwarded_from:end])
        forwarded = b"".join(pieces)
    elif forwarded_from < end:
        forwarded = forwarded + data[forwarded_from:end] if forwarded else data[forwarded_from:end]
    packet.raw_properties = forwarded


def _empty_response_topic_error() -> ProtocolViolation:
    return ProtocolViolation(  # [MQTT-4.7.3-1]
        "the response topic is empty", "Name a topic for the response, or leave the property out"
    )


def decode_ack(data: bytes, kind: i64, at: i64, end: i64, version: i64) -> Ack:
    packet_id = read_u16(data, at, end)
    if packet_id == 0:
        raise MalformedPacket("an acknowledgement has packet identifier 0")
    at += 2
    if at == end:
        return Ack(kind, packet_id)
    if version != V5:
        raise MalformedPacket("an acknowledgement has bytes after its packet identifier")
    reason: i64 = data[at]
    at += 1
    if at == end:
        return Ack(kind, packet_id, reason)
    properties, past = read_property_block(data, at, end, kind)
    if past != end:
        raise MalformedPacket("an acknowledgement has bytes after its properties")
    return Ack(kind, packet_id, reason, properties)


def _decode_connect(data: bytes, at: i64, end: i64) -> Connect:
    name = read_text(data, at, end)
    at += 2 + len(name)
    if at + 4 > end:
        raise MalformedPacket("the CONNECT ends before its keep alive")
    level: int = data[at]
    if name != b"MQTT" or level not in (V311, V5):
        raise UnsupportedVersion(name.decode(), level)
    flags: i64 = data[at + 1]
    keep_alive = read_u16(data, at + 2, end)
    at += 4
    if flags & 1:
        raise MalformedPacket("the reserved flag of the CONNECT is set")  # [MQTT-3.1.2-3]
    has_will = (flags & 0x04) != 0
    will_qos: i64 = (flags >> 3) & 3
    if will_qos == 3 or (not has_will and flags & 0x38):
        # [MQTT-3.1.2-11..15]
        raise MalformedPacket("the will flags of the CONNECT contradict each other")
    if level == V311 and flags & 0x40 and not flags & 0x80:
        # MQTT 3.1.1 [MQTT-3.1.2-22]
        raise MalformedPacket("the CONNECT has a password and no user name")
    packet = Connect("", level, (flags & 2) != 0, int(keep_alive))
    if level == V5:
        packet.properties, past = read_property_block(data, at, end, CONNECT)
        at = past
    client_id = read_text(data, at, end)
    at += 2 + len(client_id)
    packet.client_id = client_id.decode()
    if has_will:
        properties = None
        if level == V5:
            properties, past = read_property_block(data, at, end, WILL)
            at = past
            packet.will_delay = properties.will_delay or 0
            if properties.response_topic == "":
                raise _empty_response_topic_error()
        topic = read_text(data, at, end)
        check_topic_name(topic, 0, len(topic))
        if not topic:
            raise InvalidTopic(
                "the topic of the will is empty", "Give the will a topic of at least one character"
            )
        at += 2 + len(topic)
        payload = read_binary(data, at, end)
        at += 2 + len(payload)
        packet.will = build_publish(topic, payload, int(will_qos), (flags & 0x20) != 0, properties)
    if flags & 0x80:
        username = read_text(data, at, end)
        at += 2 + len(username)
        packet.username = username.decode()
    if flags & 0x40:
        packet.password = read_binary(data, at, end)
        at += 2 + len(packet.password)
    if at != end:
        raise MalformedPacket("the CONNECT has bytes after its last field")
    return packet


def _decode_connack(data: bytes, at: i64, end: i64, version: i64) -> Connack:
    if at + 2 > end or data[at] > 1:
        raise MalformedPacket("the CONNACK is too short or has reserved flags set")
    packet = Connack(data[at] == 1, data[at + 1])
    at += 2
    if version == V5:
        packet.properties, past = read_property_block(data, at, end, CONNACK)
        at = past
    if at != end:
        raise MalformedPacket("the CONNACK has bytes after its last field")
    return packet


def _read_packet_id(data: bytes, at: i64, end: i64) -> int:
    packet_id = read_u16(data, at, end)
    if packet_id == 0:
        raise MalformedPacket("the packet identifier is 0")  # [MQTT-2.2.1-3]
    return int(packet_id)


def _decode_subscribe(data: bytes, at: i64, end: i64, version: i64) -> Subscribe:
    packet = Subscribe(_read_packet_id(data, at, end), [])
    at += 2
    if version == V5:
        packet.properties, past = read_property_block(data, at, end, SUBSCRIBE)
        at = past
    while at < end:
        if packet.count == MAX_FILTERS:
            packet.count += _count_fields(data, at, end, 1)
            break
        topic_filter = read_text(data, at, end)
        check_topic_filter(topic_filter)
        at += 2 + len(topic_filter)
        if at >= end:
            raise MalformedPacket("the SUBSCRIBE ends before the options of its last filter")
        options: i64 = data[at]
        at += 1
        qos: i64 = options & 3
        if qos == 3:
            raise MalformedPacket("a subscription asks for QoS 3")  # [MQTT-3.8.3-5]
        if options & (0xC0 if version == V5 else 0xFC):
            raise MalformedPacket("a subscription has reserved option bits set")
        handling: i64 = (options >> 4) & 3
        if handling == 3:
            raise ProtocolViolation("a subscription has retain handling 3")
        packet.requests.append(
            SubscriptionRequest(
                topic_filter, int(qos), (options & 4) != 0, (options & 8) != 0, int(handling)
            )
        )
        packet.count += 1
    if not packet.requests:
        raise ProtocolViolation("a SUBSCRIBE has no topic filter")  # [MQTT-3.8.3-2]
    return packet


def _count_fields(data: bytes, at: i64, end: i64, trailing_bytes: i64) -> int:
    """Count the strings that have `trailing_bytes` after each; the packet is refused anyway."""
    count = 0
    while at < end:
        at += 2 + read_u16(data, at, end) + trailing_bytes
        if at > end:
            raise MalformedPacket("a topic filter runs past the end of the packet")
        count += 1
        if count > 10 * MAX_FILTERS:  # the SUBACK has a byte for each
            raise ProtocolViolation(
                f"the packet has far more than {MAX_FILTERS} topic filters",
                "Send several packets",
                QUOTA_EXCEEDED,
            )
    return count


def _decode_unsubscribe(data: bytes, at: i64, end: i64, version: i64) -> Unsubscribe:
    packet = Unsubscribe(_read_packet_id(data, at, end), [])
    at += 2
    if version == V5:
        packet.properties, past = read_property_block(data, at, end, UNSUBSCRIBE)
        at = past
    while at < end:
        if packet.count == MAX_FILTERS:
            packet.count += _count_fields(data, at, end, 0)
            break
        topic_filter = read_text(data, at, end)
        check_topic_filter(topic_filter)
        at += 2 + len(topic_filter)
        packet.filters.append(topic_filter)
        packet.count += 1
    if not packet.filters:
        raise ProtocolViolation("an UNSUBSCRIBE has no topic filter")  # [MQTT-3.10.3-2]
    return packet


def _decode_suback(data: bytes, at: i64, end: i64, version: i64) -> Suback:
    packet = Suback(_read_packet_id(data, at, end), [])
    at += 2
    if version == V5:
        packet.properties, past = read_property_block(data, at, end, SUBACK)
        at = past
    packet.reasons = list(data[at:end])
    return packet


def _decode_unsuback(data: bytes, at: i64, end: i64, version: i64) -> Unsuback:
    packet = Unsuback(_read_packet_id(data, at, end), [])
    at += 2
    if version == V5:
        packet.properties, past = read_property_block(data, at, end, UNSUBACK)
        at = past
    elif at != end:
        raise MalformedPacket("the UNSUBACK has bytes after its packet identifier")
    packet.reasons = list(data[at:end])
    return packet


def _decode_disconnect(data: bytes, at: i64, end: i64, version: i64) -> Disconnect:
    if at == end:
        return Disconnect()
    if version != V5:
        raise MalformedPacket("a 3.1.1 DISCONNECT carries no bytes")
    packet = Disconnect(data[at])
    at += 1
    if at < end:
        packet.properties, past = read_property_block(data, at, end, DISCONNECT)
        at = past
    if at != end:
        raise MalformedPacket("the DISCONNECT has bytes after its properties")
    return packet


def _decode_auth(data: bytes, at: i64, end: i64, version: i64) -> Auth:
    if version != V5:
        raise ProtocolViolation("AUTH is a packet of MQTT 5.0")
    if at == end:
        return Auth(SUCCESS)
    packet = Auth(data[at])
    # A DISCONNECT may omit its properties alone, an AUTH may not (section 3.15.2.1).
    packet.properties, past = read_property_block(data, at + 1, end, AUTH)
    if past != end:
        raise MalformedPacket("the AUTH has bytes after its properties")
    return packet
