"""A message of a queue and its stored form.

This module does not know MQTT: properties of the publisher are opaque bytes (`props`), properties
that Sluice adds (the origin of a dead letter, for example) are pairs of names and values
(`headers`).
"""

from __future__ import annotations

from typing import Final

from librt.strings import (
    BytesWriter,
    read_i16_be,
    read_i32_le,
    read_i64_le,
    write_i16_be,
    write_i32_le,
    write_i64_le,
)
from mypy_extensions import i16, i32, i64, mypyc_attr

# The flags of a stored message. The low four bits are its priority.
PRIORITY_MASK: Final = 0x0F
DELAYED: Final = 0x10  # not delivered before the time in its header
TARGETED: Final = 0x20  # for one group only
COMPRESSED: Final = 0x40
TOMBSTONE: Final = 0x80  # deletes its key in a compacted queue

MAX_HEADER_BYTES: Final = 0x7FFF  # size of a value that Sluice adds
# The store counts expiry in u32 seconds, so it ends in 2106.
MAX_EXPIRES: Final = 0xFFFF_FFFF

FIXED_FIELDS_BYTES: Final = 28  # of a body: time of enqueueing, and five lengths


@mypyc_attr(acyclic=True)
class Message:
    def __init__(
        self, payload: bytes, props: bytes = b"", key: bytes = b"", message_id: bytes = b""
    ) -> None:
        self.payload: bytes = payload
        self.props: bytes = props
        self.key: bytes = key
        # The publisher's id; if it is empty, the queue uses partition and sequence.
        self.id: bytes = message_id
        self.topic: bytes = b""  # the original topic, if a binding stored the message
        self.headers: bytes = b""
        self.priority: i64 = 0
        self.deliver_at_ms: i64 = 0  # since 1970; 0: at once
        self.expires: i64 = 0  # seconds since 1970; 0: never
        self.enqueued_at_ms: i64 = 0  # since 1970
        self.cached_bytes: i64 = 0  # its size while it is in the body cache

    def memory_bytes(self) -> i64:
        """Return the approximate memory that the message takes."""
        return (
            200
            + len(self.payload)
            + len(self.props)
            + len(self.headers)
            + len(self.key)
            + len(self.topic)
        )

    def dedup_key(self) -> bytes:
        """Return the key that identifies a repeated publish; empty for none.

        Publishers of plain topics do not know that their messages go to one queue. So for them the
        topic is part of the key: an id may be a mere counter.
        """
        return self.topic + b"\0" + self.id if self.topic and self.id else self.id

    def expires_at(self) -> float:
        """Return the exact time of expiry.

        `expires` is rounded up to a whole second, so that nothing expires early. The remaining time
        sent to a client must not exceed the publisher's value, which is whole seconds from
        enqueueing.
        """
        enqueued_at_ms: i64 = self.enqueued_at_ms
        enqueued_second: i64 = (enqueued_at_ms + 999) // 1000
        return float(self.expires - enqueued_second) + float(enqueued_at_ms) / 1000.0


def encoded_fields_size(message: Message) -> i64:
    """Return the size of the output of `write_message_fields`."""
    return (
        FIXED_FIELDS_BYTES
        + len(message.id)
        + len(message.key)
        + len(message.topic)
        + len(message.props)
        + len(message.headers)
    )


def write_message_fields(out: BytesWriter, message: Message) -> None:
    """Write the part of a body between the record's header and the payload."""
    write_fields(
        out,
        message.enqueued_at_ms,
        message.id,
        message.key,
        message.topic,
        message.props,
        message.headers,
    )


def write_fields(
    out: BytesWriter,
    enqueued_at_ms: i64,
    message_id: bytes,
    key: bytes,
    topic: bytes,
    props: bytes,
    headers: bytes,
) -> None:
    """Write the same fields without a Message object."""
    write_i64_le(out, enqueued_at_ms)
    write_i64_le(out, i64(len(key)) << 32 | len(message_id))
    write_i64_le(out, i64(len(props)) << 32 | len(topic))
    write_i32_le(out, i32(len(headers)))
    if len(message_id) > 0:
        out.write(message_id)
    out.write(key)
    if len(topic) > 0:
        out.write(topic)
    if len(props) > 0:
        out.write(props)
    if len(headers) > 0:
        out.write(headers)


def decode_body(data: bytes, start: i64 = 0, is_complete: bool = True) -> Message:
    """Decode the message whose body begins at `start`.

    Recovery may have read only the beginning of a record (id and key). Then `is_complete` is False,
    and the rest of the message is empty or cut off.
    """
    id_size: i64 = i64(read_i32_le(data, start + 8))
    key_size: i64 = i64(read_i32_le(data, start + 12))
    topic_size: i64 = i64(read_i32_le(data, start + 16))
    props_size: i64 = i64(read_i32_le(data, start + 20))
    headers_size: i64 = i64(read_i32_le(data, start + 24))
    at: i64 = start + FIXED_FIELDS_BYTES
    fields_end: i64 = at + id_size + key_size
    if is_complete:
        fields_end += topic_size + props_size + headers_size
    if (id_size | key_size | topic_size | props_size | headers_size) < 0 or fields_end > len(data):
        raise ValueError("the fields of a message are longer than its record")
    message_id = data[at : at + id_size]
    at += id_size
    key = data[at : at + key_size]
    at += key_size
    topic = data[at : at + topic_size]
    at += topic_size
    props = data[at : at + props_size]
    at += props_size
    message = Message(data[at + headers_size :], props, key, message_id)
    message.topic = topic
    message.headers = data[at : at + headers_size]
    message.enqueued_at_ms = read_i64_le(data, start)
    return message


def encode_header(name: str, value: str) -> bytes:
    """Encode one pair of `headers` with length prefixes, so that pairs can be concatenated.

    A value that is too long is cut after its last whole character: clients refuse invalid UTF-8.
    """
    encoded = value.encode()
    if len(encoded) > MAX_HEADER_BYTES:
        encoded = encoded[:MAX_HEADER_BYTES].decode("utf-8", "ignore").encode()
    out = BytesWriter()
    for text in (name.encode(), encoded):
        write_i16_be(out, i16(len(text)))
        out.write(text)
    return out.getvalue()


def decode_headers(headers: bytes) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    at: i64 = 0
    while at < len(headers):
        size: i64 = i64(read_i16_be(headers, at)) & 0xFFFF
        name = headers[at + 2 : at + 2 + size]
        at += 2 + size
        size = i64(read_i16_be(headers, at)) & 0xFFFF
        pairs.append((name.decode(), headers[at + 2 : at + 2 + size].decode()))
        at += 2 + size
    return pairs
