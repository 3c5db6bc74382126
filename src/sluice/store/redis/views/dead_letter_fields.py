"""The extra fields of a dead letter's entry: where the message came from."""

from __future__ import annotations

from librt.strings import read_i32_le

from sluice.message import decode_body, decode_headers
from sluice.store.protocol import HEADER_BYTES

_HEADERS_SIZE_OFFSET = HEADER_BYTES + 24  # offset of the size of a message's headers
_FIELD_HEADERS = (
    ("originalTopic", "originalTopic"),
    ("partitionId", "original-partition"),
    ("originalMessageId", "original-message-id"),
    ("originalQueue", "original-queue"),
    ("reason", "dead-reason"),
)


def read_dead_letter_fields(record: bytes) -> list[tuple[str, str]]:
    """Return the fields, empty if the message is no dead letter; one number tells most of them."""
    if len(record) < _HEADERS_SIZE_OFFSET + 4 or read_i32_le(record, _HEADERS_SIZE_OFFSET) <= 0:
        return []
    try:
        headers = dict(decode_headers(decode_body(record, HEADER_BYTES).headers))
    except (ValueError, IndexError, SystemError):
        # Compiled code raises SystemError for a negative size.
        return []  # not a message of a queue
    if "dead-reason" not in headers:
        return []
    return [(name, headers.get(header, "")) for name, header in _FIELD_HEADERS]
