"""A message in a queue, and the bytes it is kept as.

It knows nothing of MQTT: what the publisher attached travels as opaque bytes (`props`), what Sluice attaches (where a
dead letter came from, for one) as pairs of names and values (`headers`).
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

# The flags of a kept message. The low four bits are its priority.
PRIORITY_MASK: Final = 0x0F
DELAYED: Final = 0x10  # not before the time in its header
TARGETED: Final = 0x20  # for one group alone
COMPRESSED: Final = 0x40
TOMBSTONE: Final = 0x80  # the end of its key, in a compacted queue

MAX_HEADER_BYTES: Final = 0x7FFF  # bytes of a value that Sluice attaches
MAX_EXPIRES: Final = (
    0xFFFF_FFFF  # times to live end in 2106, where the store's count of seconds does
)

FIXED_FIELDS_BYTES: Final = 28  # of a body: when it came, and five lengths


@mypyc_attr(acyclic=True)
class Message:
    def __init__(
        self, payload: bytes, props: bytes = b"", key: bytes = b"", message_id: bytes = b""
    ) -> None:
        self.payload: bytes = payload
        self.props: bytes = props
        self.key: bytes = key
        self.id: bytes = (
            message_id  # the publisher's own; empty: the queue names it by partition and sequence
        )
        self.topic: bytes = b""  # of a captured message: where it was published
        self.headers: bytes = b""
        self.priority: i64 = 0
        self.deliver_at: i64 = 0  # milliseconds since 1970; 0: at once
        self.expires: i64 = 0  # seconds since 1970; 0: never
        self.enqueued_at: i64 = 0  # milliseconds since 1970
        self.cached_bytes: i64 = 0  # its size, as long as the cache of bodies holds it

    def memory_bytes(self) -> i64:
        """About how much memory it takes."""
        return (
            200
            + len(self.payload)
            + len(self.props)
            + len(self.headers)
            + len(self.key)
            + len(self.topic)
        )

    def dedup_key(self) -> bytes:
        """By what a second publish of it is known; empty: by nothing. Who publishes to plain topics does not know that
        they meet in one queue: there an id, perhaps a mere counter, is one of its topic."""
        return self.topic + b"\0" + self.id if self.topic and self.id else self.id

    def expires_at(self) -> float:
        """The very moment of its end. `expires` is the whole second after it, so that nothing ends early; who is told
        how much time is left must not be told more than the publisher gave, which is whole seconds from its coming."""
        enqueued_at: i64 = self.enqueued_at
        enqueued_second: i64 = (enqueued_at + 999) // 1000
        return float(self.expires - enqueued_second) + float(enqueued_at) / 1000.0


def encoded_fields_size(message: Message) -> i64:
    """Of what `write_start` writes."""
    return (
        FIXED_FIELDS_BYTES
        + len(message.id)
        + len(message.key)
        + len(message.topic)
        + len(message.props)
        + len(message.headers)
    )


def write_message_fields(out: BytesWriter, message: Message) -> None:
    """What stands behind the header of its record and in front of its payload."""
    write_fields(
        out,
        message.enqueued_at,
        message.id,
        message.key,
        message.topic,
        message.props,
        message.headers,
    )


def write_fields(
    out: BytesWriter,
    enqueued_at: i64,
    message_id: bytes,
    key: bytes,
    topic: bytes,
    props: bytes,
    headers: bytes,
) -> None:
    """The same for what is no message yet."""
    write_i64_le(out, enqueued_at)
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
    """The message whose body begins at `start`: what `write_start` wrote, and its payload as it was kept. An index may
    have only its id and key; then it is not `whole`, and the rest is empty or cut off."""
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
    message.enqueued_at = read_i64_le(data, start)
    return message


def encode_header(name: str, value: str) -> bytes:
    """One pair of `headers`: each text behind its length, so that pairs can simply follow one another. A value that is
    too long ends with its last whole character: with half a one, no client would take the message any more."""
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


def fnv1a32(key: bytes) -> i64:
    """The hash that places a key: FNV-1a over its bytes, 32 bits."""
    value: i64 = 0x811C9DC5
    at: i64 = 0
    size: i64 = len(key)
    while at < size:
        value = ((value ^ i64(key[at])) * 0x01000193) & 0xFFFF_FFFF
        at += 1
    return value
