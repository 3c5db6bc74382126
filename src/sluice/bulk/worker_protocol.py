"""What door and worker say to each other: a letter, a length and a body; answers are lines of JSON."""

from __future__ import annotations

import struct
from typing import Final

HEAD: Final = struct.Struct("<cI")
REQUEST: Final = b"Q"  # JSON: what is to be read, once
PLACES: Final = b"P"  # of a part: where its next messages are
GO: Final = b"G"  # the answer has begun: send
AGAIN: Final = b"A"  # of a part: a message was missing, and this is known: what follows is asked for anew
LAST: Final = b"L"  # of a part: there is no more of it

PART: Final = struct.Struct("<I")  # what is said of a part begins with its number
PLACE: Final = struct.Struct("<qqi")  # seq, address and size
MERGED: Final = struct.Struct("<qqii")  # the same and the part


def said(kind: bytes, body: bytes = b"") -> bytes:
    return HEAD.pack(kind, len(body)) + body


def said_of(part: int, kind: bytes, body: bytes = b"") -> bytes:
    return said(kind, PART.pack(part) + body)
