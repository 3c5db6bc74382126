"""Reads a segment of the log, which is a stream of frames, in batches."""

from __future__ import annotations

from collections.abc import Iterator

from sluice.store.redis.connection import RedisChannel
from sluice.store.redis.keys import RedisKeys, entry_sequence

FRAME_GAP_BYTES = 28  # frames are not adjacent: no code may compute an address across two of them
_BATCH_SIZE = 64  # frames in one reply


class LoggedFrame:
    def __init__(self, number: int, address: int, size: int, log_entry: bytes) -> None:
        self.number = number
        self.address = address  # address of its first record
        self.size = size  # size of its records, as they were committed
        self.log_entry = log_entry


def read_frames(
    channel: RedisChannel, keys: RedisKeys, segment: int
) -> Iterator[list[LoggedFrame]]:
    start = "-"
    while True:
        key = keys.segment(segment)
        entries = channel.execute([(key, ["XRANGE", key, start, "+", "COUNT", _BATCH_SIZE])])[0]
        if not entries:
            return
        frames: list[LoggedFrame] = []
        for entry, fields in entries:
            # The fields at (address), size and log (bytes) keep this order since the first version.
            frames.append(
                LoggedFrame(
                    entry_sequence(entry),
                    segment << 32 | int(fields[1]),
                    int(fields[3]),
                    bytes(fields[5]),
                )
            )
        yield frames
        start = f"{frames[-1].number + 1}-0"
