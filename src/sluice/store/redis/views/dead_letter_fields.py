"""What a dead letter shows besides its record: where it came from, as fields of its entry."""

from __future__ import annotations

from librt.strings import read_i32_le

from sluice.message import decode_body, decode_headers
from sluice.store.protocol import HEADER_BYTES

_HEADERS_SIZE_OFFSET = HEADER_BYTES + 24  # how long the headers of a message are
_FIELD_HEADERS = (
    ("originalTopic", "originalTopic"),
    ("partitionId", "original-partition"),
    ("originalMessageId", "original-message-id"),
    ("originalQueue", "original-queue"),
    ("reason", "dead-reason"),
)


def read_dead_letter_fields(record: bytes) -> list[tuple[str, str]]:
    """Empty for a message that is no dead letter: that is told from one number."""
    if len(record) < _HEADERS_SIZE_OFFSET + 4 or read_i32_le(record, _HEADERS_SIZE_OFFSET) <= 0:
        return []
    try:
        headers = dict(decode_headers(decode_body(record, HEADER_BYTES).headers))
    except (
        ValueError,
        IndexError,
        SystemError,
    ):  # the last one is what compiled code says of a negative size
        return []  # it only looked like a message of a queue
    if "dead-reason" not in headers:
        return []
    return [(name, headers.get(header, "")) for name, header in _FIELD_HEADERS]
