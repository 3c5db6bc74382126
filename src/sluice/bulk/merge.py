"""Partitions that are read together, one message behind the other as they lie in the log.

The messages of all partitions lie between one another in one log. Whoever reads the partitions one after the other
touches each of its pages for each of them, and finds a message here and one there; whoever reads them together goes
through it once. Compiled, because it is done for every message; it knows places and no bytes of messages.

    a place           i64 seq, i64 address, i32 size                what the broker tells (`queues/batches.collect`)
    a merged place    i64 seq, i64 address, i32 size, i32 part      the same, and whose it is

The messages of one part stay in their own order, wherever they lie.
"""

from __future__ import annotations

from typing import Final

from librt.strings import BytesWriter, read_i32_le, read_i64_le, write_i32_le, write_i64_le
from mypy_extensions import i32, i64

PLACE_BYTES: Final = 20
MERGED_BYTES: Final = 24

# Instead of the address of the next message.
_AWAITED: Final = -1  # before all others: nobody goes on without it
_OVER: Final = 1 << 61  # behind all others


class Merge:
    """Places of each part go in, slice by slice; merged ones come out as soon as it is certain that they are next."""

    def __init__(self, parts: i64) -> None:
        self._parts: i64 = parts
        self._slices: list[list[bytes]] = [[] for _ in range(parts)]  # the first is being taken from
        self._at: list[int] = [0] * parts  # where in that one
        self._heads: list[int] = [_AWAITED] * parts  # the address of the next message of each
        self._is_last: list[bool] = [False] * parts
        self._finished: list[int] = []
        self._out = BytesWriter()

    def add(self, part: i64, places: bytes) -> None:
        """The next places of a part; not none."""
        self._slices[part].append(places)
        if len(self._slices[part]) == 1:
            self._begin(part)

    def end(self, part: i64) -> None:
        """There is no more of it."""
        self._is_last[part] = True
        if not self._slices[part]:
            self._heads[part] = _OVER

    def drop(self, part: i64) -> None:
        """Forget what is known of a part: it is told anew."""
        self._slices[part].clear()
        self._is_last[part] = False
        self._heads[part] = _AWAITED

    def is_over(self) -> bool:
        return all(head == _OVER for head in self._heads)

    def take_finished(self) -> list[int]:
        """The part of each slice that was used up."""
        found, self._finished = self._finished, []
        return found

    def next(self, most: i64) -> bytes:
        """What comes next, at most so many; none when something must be told first, or all is over."""
        out = self._out
        out.truncate(0)
        heads = self._heads
        parts = self._parts
        count: i64 = 0
        while count < most:
            least: i64 = _OVER
            part: i64 = -1
            nth: i64 = 0
            while nth < parts:
                head: i64 = heads[nth]
                if head < least:
                    least = head
                    part = nth
                nth += 1
            if part < 0 or least == _AWAITED:
                break
            places = self._slices[part][0]
            at: i64 = self._at[part]
            write_i64_le(out, read_i64_le(places, at))
            write_i64_le(out, least)
            write_i32_le(out, read_i32_le(places, at + 16))
            write_i32_le(out, i32(part))
            count += 1
            at += PLACE_BYTES
            if at < len(places):
                self._at[part] = int(at)
                heads[part] = int(read_i64_le(places, at + 8))
            else:
                self._finished.append(int(part))
                self._slices[part].pop(0)
                self._begin(part)
        return out.getvalue()

    def _begin(self, part: i64) -> None:
        """With the first of the slices that are there."""
        self._at[part] = 0
        if self._slices[part]:
            self._heads[part] = int(read_i64_le(self._slices[part][0], 8))
        else:
            self._heads[part] = _OVER if self._is_last[part] else _AWAITED


def without(merged: bytes, part: int) -> bytes:
    """The same places but for those of one part."""
    kept = [merged[at : at + MERGED_BYTES] for at in range(0, len(merged), MERGED_BYTES)]
    return b"".join([one for one in kept if read_i32_le(one, 20) != part])
