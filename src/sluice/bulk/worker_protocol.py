"""What door and worker say to each other: a letter, a length and a body; answers are lines of JSON."""

from __future__ import annotations

import struct
from typing import Final

COMMAND_HEADER: Final = struct.Struct("<cI")
REQUEST: Final = b"Q"  # JSON: what is to be read, once
PLACES: Final = b"P"  # of a part: where its next messages are
START: Final = b"G"  # the answer has begun: send
RESTART: Final = (
    b"A"  # of a part: a message was missing, and this is known: what follows is asked for anew
)
END: Final = b"L"  # of a part: there is no more of it

PART_HEADER: Final = struct.Struct("<I")  # what is said of a part begins with its number
PLACE: Final = struct.Struct("<qqi")  # seq, address and size
MERGED_PLACE: Final = struct.Struct("<qqii")  # the same and the part


def encode_command(kind: bytes, body: bytes = b"") -> bytes:
    return COMMAND_HEADER.pack(kind, len(body)) + body


def encode_part_command(part: int, kind: bytes, body: bytes = b"") -> bytes:
    return encode_command(kind, PART_HEADER.pack(part) + body)
