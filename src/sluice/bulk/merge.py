"""Merge the partitions of one read into the order of the log.

The messages of all partitions are interleaved in one log. Reading one partition after the other
touches each page once per partition; reading them merged passes over the log once. Compiled,
because it runs for every message. The module knows places and no message bytes.

    a place           i64 seq, i64 address, i32 size              from `collect_locations`
    a merged place    i64 seq, i64 address, i32 size, i32 part    the same with its partition

The messages of one part keep their own order, wherever they are stored.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

PLACE_BYTES: Final = 20
MERGED_PLACE_BYTES: Final = 24

# Sentinels instead of the address of the next message.
_AWAITED: Final = -1  # sorts before all addresses: the merge waits for the next slice of the part
_EXHAUSTED: Final = 1 << 61  # sorts after all addresses


class PlaceMerge:
    """Accept slices of places per part and emit merged places as soon as their order is certain."""

    def __init__(self, parts: i64) -> None:
        self._parts: i64 = parts
        # Slices per part; the merge consumes the first.
        self._slices: list[list[bytes]] = [[] for _ in range(parts)]
        self._offsets: list[int] = [0] * parts  # position in the first slice
        # The address of the next message of each part.
        self._next_addresses: list[int] = [_AWAITED] * parts
        self._has_last_slice: list[bool] = [False] * parts
        self._finished_parts: list[int] = []
        self._out = BytesWriter()

    def add_slice(self, part: i64, places: bytes) -> None:
        """Add the next places of a part; `places` is not empty."""
        self._slices[part].append(places)
        if len(self._slices[part]) == 1:
            self._begin_slice(part)

    def end_part(self, part: i64) -> None:
        """Mark a part as complete."""
        self._has_last_slice[part] = True
        if not self._slices[part]:
            self._next_addresses[part] = _EXHAUSTED

    def reset_part(self, part: i64) -> None:
        """Drop the places of a part; the caller adds new ones."""
        self._slices[part].clear()
        self._has_last_slice[part] = False
        self._next_addresses[part] = _AWAITED

    def is_exhausted(self) -> bool:
        return all(next_address == _EXHAUSTED for next_address in self._next_addresses)

    def take_finished(self) -> list[int]:
        """Return the part of each slice that was used up since the last call."""
        found, self._finished_parts = self._finished_parts, []
        return found

    def take_next(self, max_places: i64) -> bytes:
        """Return the next merged places, at most `max_places`.

        Empty if a slice is missing or all parts are exhausted.
        """
        out = self._out
        out.truncate(0)
        next_addresses = self._next_addresses
        parts = self._parts
        count: i64 = 0
        while count < max_places:
            lowest_address: i64 = _EXHAUSTED
            part: i64 = -1
            nth: i64 = 0
            while nth < parts:
                next_address: i64 = next_addresses[nth]
                if next_address < lowest_address:
                    lowest_address = next_address
                    part = nth
                nth += 1
            if part < 0 or lowest_address == _AWAITED:
                break
            places = self._slices[part][0]
            at: i64 = self._offsets[part]
            write_i64_le(out, read_i64_le(places, at))
            write_i64_le(out, lowest_address)
            write_i32_le(out, read_i32_le(places, at + 16))
            write_i32_le(out, i32(part))
            count += 1
            at += PLACE_BYTES
            if at < len(places):
                self._offsets[part] = int(at)
                next_addresses[part] = int(read_i64_le(places, at + 8))
            else:
                self._finished_parts.append(int(part))
                self._slices[part].pop(0)
                self._begin_slice(part)
        return out.getvalue()

    def _begin_slice(self, part: i64) -> None:
        """Start with the first slice of the part that is present."""
        self._offsets[part] = 0
        if self._slices[part]:
            self._next_addresses[part] = int(read_i64_le(self._slices[part][0], 8))
        else:
            self._next_addresses[part] = _EXHAUSTED if self._has_last_slice[part] else _AWAITED


def exclude_part(places: bytes, part: int) -> bytes:
    """Return the places without those of one part."""
    entries = [
        places[at : at + MERGED_PLACE_BYTES] for at in range(0, len(places), MERGED_PLACE_BYTES)
    ]
    return b"".join([one for one in entries if read_i32_le(one, 20) != part])
