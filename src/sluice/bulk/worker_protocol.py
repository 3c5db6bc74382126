"""The protocol between HTTP API and read worker.

Commands are a one-byte kind, a length and a body; answers are lines of JSON.
"""

from __future__ import annotations

import struct
from typing import Final

COMMAND_HEADER: Final = struct.Struct("<cI")
REQUEST: Final = b"Q"  # JSON: what to read; sent once
PLACES: Final = b"P"  # part command: where the next messages of the part are
START: Final = b"G"  # the HTTP response has begun: send
# Part command: the API has seen that a message is missing; the next places follow it.
RESTART: Final = b"A"
END: Final = b"L"  # part command: the part is complete

PART_HEADER: Final = struct.Struct("<I")  # a part command begins with the number of the part
PLACE: Final = struct.Struct("<qqi")  # seq, address, size
MERGED_PLACE: Final = struct.Struct("<qqii")  # seq, address, size, part


def encode_command(kind: bytes, body: bytes = b"") -> bytes:
    return COMMAND_HEADER.pack(kind, len(body)) + body


def encode_part_command(part: int, kind: bytes, body: bytes = b"") -> bytes:
    return encode_command(kind, PART_HEADER.pack(part) + body)
