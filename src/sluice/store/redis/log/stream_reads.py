"""Reads streams: messages by partition and sequence, and the frames of a segment of the log.

Messages with sequences close together are read as one range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from google_crc32c import value as crc32c

from sluice.store.protocol import HEADER_BYTES
from sluice.store.redis.connection import Command, RedisChannel
from sluice.store.redis.keys import RedisKeys, entry_id, entry_sequence, rewritten_key

# Settled messages between two wanted ones: reading these is cheaper than another range.
_MAX_GAP: Final = 4
_MAX_RANGE: Final = 256  # messages in one range
_BATCH_SIZE: Final = 64  # ranges in one request, or frames in one reply

FRAME_GAP_BYTES: Final = 28  # frames are not adjacent: no code may compute an address across two

StreamPosition = tuple[str, int]  # base key of a partition, and a sequence


def fetch_records(
    channel: RedisChannel, positions: Sequence[StreamPosition]
) -> dict[StreamPosition, bytes]:
    """Return the records that exist and are intact."""
    seqs_by_base: dict[str, list[int]] = {}
    for base, seq in positions:
        seqs_by_base.setdefault(base, []).append(seq)
    ranges: list[tuple[str, int, int]] = []
    for base, seqs in seqs_by_base.items():
        ranges += [(base, first, last) for first, last in _merge_ranges(sorted(set(seqs)))]
    found: dict[StreamPosition, bytes] = {}
    for start in range(0, len(ranges), _BATCH_SIZE):
        batch = ranges[start : start + _BATCH_SIZE]
        commands: list[tuple[str, Command]] = [
            (base, ["XRANGE", base, entry_id(first), entry_id(last)]) for base, first, last in batch
        ]
        for (base, _, _), entries in zip(batch, channel.execute(commands)):
            for entry, fields in entries:  # includes messages in gaps
                if is_intact(fields[1]):
                    found[base, entry_sequence(entry)] = fields[1]
    missing = [position for position in dict.fromkeys(positions) if position not in found]
    for start in range(0, len(missing), 1000):
        batch_missing = missing[start : start + 1000]
        answers = channel.execute(
            [(base, ["HGET", rewritten_key(base), seq]) for base, seq in batch_missing]
        )
        for position, data in zip(batch_missing, answers):
            if data is not None and is_intact(data):
                found[position] = data
    return found


def is_intact(record: bytes) -> bool:
    """Return whether a record has a valid checksum, in case another program wrote it."""
    return len(record) >= HEADER_BYTES and int.from_bytes(record[:4], "little") == crc32c(
        record[4:]
    )


def _merge_ranges(seqs: list[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    first = last = seqs[0]
    for seq in seqs[1:]:
        if seq - last > _MAX_GAP or seq - first >= _MAX_RANGE:
            ranges.append((first, last))
            first = seq
        last = seq
    ranges.append((first, last))
    return ranges


class LoggedFrame:
    def __init__(self, number: int, address: int, size: int, log_entry: bytes) -> None:
        self.number = number
        self.address = address  # address of its first record
        self.size = size  # size of its records, as they were committed
        self.log_entry = log_entry


def read_frames(
    channel: RedisChannel, keys: RedisKeys, segment: int
) -> Iterator[list[LoggedFrame]]:
    """Yield the frames of a segment in batches."""
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
