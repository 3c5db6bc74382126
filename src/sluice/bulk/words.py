"""What door and worker say to each other: a letter, a length and a body; answers are lines of JSON."""

from __future__ import annotations

import struct
from typing import Final

HEAD: Final = struct.Struct("<cI")
REQUEST: Final = b"Q"  # JSON: what is to be read, once
PLACES: Final = b"P"  # where the next messages are: seq, address and size of each
GO: Final = b"G"  # the answer has begun: send
AGAIN: Final = b"A"  # a message was missing, and this is known: what follows is asked for anew
END: Final = b"E"  # there is no more

PLACE: Final = struct.Struct("<qqi")


def said(kind: bytes, body: bytes = b"") -> bytes:
    return HEAD.pack(kind, len(body)) + body
