"""Which segments of the store still hold something that lives: what may be given back, and what is worth compacting."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

NEAR: Final = 64


class Segment:
    def __init__(self, number: i64) -> None:
        self.number: i64 = number
        self.live: i64 = 0
        self.live_bytes: i64 = 0
        self.lasting_bytes: i64 = (
            0  # of last values of keys, living or not: such go one by one, never all at once
        )
        self.looked: i64 = -1  # how many lived when compaction last looked


class Segments:
    def __init__(self) -> None:
        self._by_number: dict[int, Segment] = {}
        self._last: Segment = Segment(-1)  # to which something was added,
        # From which something was dropped, by the end of their number: last values go from any of them.
        self._dropped: list[Segment] = [Segment(-1)] * NEAR
        self.draining: bool = False  # the last look found segments that are being consumed
        self.emptied: bool = False  # some segment holds nothing any more since this was last looked at

    def _of(self, address: i64) -> Segment:
        number: i64 = address >> 32
        last = self._last
        if last.number == number:
            return last
        self._last = self._find(number)
        return self._last

    def _find(self, number: i64) -> Segment:
        segment = self._by_number.get(int(number))
        if segment is None:
            segment = Segment(number)
            self._by_number[int(number)] = segment
        return segment

    def add(self, address: i64, size: i64) -> None:
        segment = self._of(address)
        segment.live += 1
        segment.live_bytes += size

    def drop(self, address: i64, size: i64) -> None:
        number: i64 = address >> 32
        segment = self._dropped[number & (NEAR - 1)]
        if segment.number != number:
            segment = self._find(number)
            self._dropped[number & (NEAR - 1)] = segment
        segment.live -= 1
        segment.live_bytes -= size
        if segment.live == 0:
            self.emptied = True

    def add_lasting(self, address: i64, size: i64) -> None:
        """The same for the last value of a key, which stays until it is replaced."""
        self.add(address, size)
        self._last.lasting_bytes += size

    def free(self, kept: list[int]) -> list[int]:
        """Of the sealed segments `kept` by the store, those in which nothing lives."""
        found: list[int] = []
        for number in kept:
            segment = self._by_number.get(number)
            if segment is None or segment.live == 0:
                found.append(number)
        return found

    def live_bytes(self, number: int) -> i64:
        """Bytes of a segment that live."""
        segment = self._by_number.get(number)
        return 0 if segment is None else segment.live_bytes

    def given_back(self, numbers: list[int]) -> None:
        for number in numbers:
            self._by_number.pop(number, None)
            if self._last.number == number:
                self._last = Segment(-1)
            if self._dropped[number & (NEAR - 1)].number == number:
                self._dropped[number & (NEAR - 1)] = Segment(-1)

    def pinned(self, sizes: dict[int, int], share: float, lasting_share: float, but: set[int]) -> int:
        """The oldest sealed segment, `but` for some, of which less than `share` lives; -1 when there is none. One that
        has become emptier since the last look is being consumed: what is left of it will be gone before it is moved.
        That is not so of last values: the fewer are left, the longer they stay. Where they are most of what lives,
        `lasting_share` counts, and nothing is waited for."""
        self.draining = False
        found = -1
        for number, size in sorted(sizes.items())[:-1]:
            segment = self._by_number.get(number)
            if segment is None or number in but or segment.live == 0:
                continue
            lasts = 2 * segment.lasting_bytes > segment.live_bytes
            if float(segment.live_bytes) >= size * (lasting_share if lasts else share):
                continue
            if not lasts and segment.looked != segment.live:
                segment.looked = segment.live
                self.draining = True
            elif found < 0:
                found = number
        return found
