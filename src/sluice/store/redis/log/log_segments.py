"""A segment of the log as a stream of its frames, read in portions."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.store.redis.keys import Keys, sequence_of
from sluice.store.redis.connection import Link

FRAME_GAP = 28  # frames do not touch: nobody may compute an address across two of them
_AT_ONCE = 64  # frames in one answer


class LoggedFrame:
    def __init__(self, number: int, address: int, size: int, log: bytes) -> None:
        self.number = number
        self.address = address  # of its first record
        self.size = size  # of its records, as they were committed
        self.log = log


def frames_of(link: Link, keys: Keys, segment: int) -> Iterator[list[LoggedFrame]]:
    start = "-"
    while True:
        key = keys.segment(segment)
        entries = link.ask([(key, ["XRANGE", key, start, "+", "COUNT", _AT_ONCE])])[0]
        if not entries:
            return
        frames: list[LoggedFrame] = []
        for entry, fields in entries:
            # at, its place; size; log, its bytes: in this order since the first version
            frames.append(
                LoggedFrame(
                    sequence_of(entry), segment << 32 | int(fields[1]), int(fields[3]), bytes(fields[5])
                )
            )
        yield frames
        start = f"{frames[-1].number + 1}-0"
