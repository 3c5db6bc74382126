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
PRIORITY_BITS: Final = 0x0F
DELAYED: Final = 0x10  # not before the time in its header
TARGETED: Final = 0x20  # for one group alone
COMPRESSED: Final = 0x40
TOMBSTONE: Final = 0x80  # the end of its key, in a compacted queue

LONGEST_HEADER: Final = 0x7FFF  # bytes of a value that Sluice attaches
LAST_SECOND: Final = 0xFFFF_FFFF  # times to live end in 2106, where the store's count of seconds does

FIELDS_BYTES: Final = 28  # of a body: when it came, and five lengths


@mypyc_attr(acyclic=True)
class Message:
    def __init__(self, payload: bytes, props: bytes = b"", key: bytes = b"", message_id: bytes = b"") -> None:
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
        self.cost: i64 = 0  # its size, as long as the cache of bodies holds it

    def size(self) -> i64:
        """About how much memory it takes."""
        return 200 + len(self.payload) + len(self.props) + len(self.headers) + len(self.key) + len(self.topic)

    def known_by(self) -> bytes:
        """By what a second publish of it is known; empty: by nothing. Who publishes to plain topics does not know that
        they meet in one queue: there an id, perhaps a mere counter, is one of its topic."""
        return self.topic + b"\0" + self.id if self.topic and self.id else self.id

    def ends_at(self) -> float:
        """The very moment of its end. `expires` is the whole second after it, so that nothing ends early; who is told
        how much time is left must not be told more than the publisher gave, which is whole seconds from its coming."""
        came_at: i64 = self.enqueued_at
        whole: i64 = (came_at + 999) // 1000
        return float(self.expires - whole) + float(came_at) / 1000.0


def size_of_start(message: Message) -> i64:
    """Of what `write_start` writes."""
    return (
        FIELDS_BYTES
        + len(message.id)
        + len(message.key)
        + len(message.topic)
        + len(message.props)
        + len(message.headers)
    )


def write_start(out: BytesWriter, message: Message) -> None:
    """What stands behind the header of its record and in front of its payload."""
    write_fields(
        out, message.enqueued_at, message.id, message.key, message.topic, message.props, message.headers
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


def decode_body(data: bytes, start: i64 = 0, whole: bool = True) -> Message:
    """The message whose body begins at `start`: what `write_start` wrote, and its payload as it was kept. An index may
    have only its id and key; then it is not `whole`, and the rest is empty or cut off."""
    ids: i64 = i64(read_i32_le(data, start + 8))
    keys: i64 = i64(read_i32_le(data, start + 12))
    topics: i64 = i64(read_i32_le(data, start + 16))
    properties: i64 = i64(read_i32_le(data, start + 20))
    headers: i64 = i64(read_i32_le(data, start + 24))
    at: i64 = start + FIELDS_BYTES
    most: i64 = at + ids + keys
    if whole:
        most += topics + properties + headers
    if (ids | keys | topics | properties | headers) < 0 or most > len(data):
        raise ValueError("the fields of a message are longer than its record")
    message_id = data[at : at + ids]
    at += ids
    key = data[at : at + keys]
    at += keys
    topic = data[at : at + topics]
    at += topics
    props = data[at : at + properties]
    at += properties
    message = Message(data[at + headers :], props, key, message_id)
    message.topic = topic
    message.headers = data[at : at + headers]
    message.enqueued_at = read_i64_le(data, start)
    return message


def encode_header(name: str, value: str) -> bytes:
    """One pair of `headers`: each text behind its length, so that pairs can simply follow one another. A value that is
    too long ends with its last whole character: with half a one, no client would take the message any more."""
    kept = value.encode()
    if len(kept) > LONGEST_HEADER:
        kept = kept[:LONGEST_HEADER].decode("utf-8", "ignore").encode()
    out = BytesWriter()
    for text in (name.encode(), kept):
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
