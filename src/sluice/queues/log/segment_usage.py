"""Which segments of the store still hold something that lives: what may be given back, and what is worth compacting."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

RECENT_SEGMENTS: Final = 64


class SegmentCounters:
    def __init__(self, number: i64) -> None:
        self.number: i64 = number
        self.live_records: i64 = 0
        self.live_bytes: i64 = 0
        self.last_value_bytes: i64 = (
            0  # of last values of keys, living or not: such go one by one, never all at once
        )
        self.live_at_last_check: i64 = -1  # how many lived when compaction last looked


class SegmentUsage:
    def __init__(self) -> None:
        self._by_number: dict[int, SegmentCounters] = {}
        self._last_added: SegmentCounters = SegmentCounters(-1)  # to which something was added,
        # From which something was dropped, by the end of their number: last values go from any of them.
        self._recently_dropped: list[SegmentCounters] = [SegmentCounters(-1)] * RECENT_SEGMENTS
        self.is_draining: bool = False  # the last look found segments that are being consumed
        self.has_emptied: bool = (
            False  # some segment holds nothing any more since this was last looked at
        )

    def _counters_at(self, address: i64) -> SegmentCounters:
        number: i64 = address >> 32
        last = self._last_added
        if last.number == number:
            return last
        self._last_added = self._get_or_create(number)
        return self._last_added

    def _get_or_create(self, number: i64) -> SegmentCounters:
        segment = self._by_number.get(int(number))
        if segment is None:
            segment = SegmentCounters(number)
            self._by_number[int(number)] = segment
        return segment

    def add(self, address: i64, size: i64) -> None:
        segment = self._counters_at(address)
        segment.live_records += 1
        segment.live_bytes += size

    def drop(self, address: i64, size: i64) -> None:
        number: i64 = address >> 32
        segment = self._recently_dropped[number & (RECENT_SEGMENTS - 1)]
        if segment.number != number:
            segment = self._get_or_create(number)
            self._recently_dropped[number & (RECENT_SEGMENTS - 1)] = segment
        segment.live_records -= 1
        segment.live_bytes -= size
        if segment.live_records == 0:
            self.has_emptied = True

    def add_last_value(self, address: i64, size: i64) -> None:
        """The same for the last value of a key, which stays until it is replaced."""
        self.add(address, size)
        self._last_added.last_value_bytes += size

    def find_free(self, sealed: list[int]) -> list[int]:
        """Of the sealed segments `kept` by the store, those in which nothing lives."""
        found: list[int] = []
        for number in sealed:
            segment = self._by_number.get(number)
            if segment is None or segment.live_records == 0:
                found.append(number)
        return found

    def live_bytes(self, number: int) -> i64:
        """Bytes of a segment that live."""
        segment = self._by_number.get(number)
        return 0 if segment is None else segment.live_bytes

    def forget_segments(self, numbers: list[int]) -> None:
        for number in numbers:
            self._by_number.pop(number, None)
            if self._last_added.number == number:
                self._last_added = SegmentCounters(-1)
            if self._recently_dropped[number & (RECENT_SEGMENTS - 1)].number == number:
                self._recently_dropped[number & (RECENT_SEGMENTS - 1)] = SegmentCounters(-1)

    def find_sparse(
        self,
        sizes: dict[int, int],
        max_live_share: float,
        max_last_value_share: float,
        excluded: set[int],
    ) -> int:
        """The oldest sealed segment, `but` for some, of which less than `share` lives; -1 when there is none. One that
        has become emptier since the last look is being consumed: what is left of it will be gone before it is moved.
        That is not so of last values: the fewer are left, the longer they stay. Where they are most of what lives,
        `lasting_share` counts, and nothing is waited for."""
        self.is_draining = False
        found = -1
        for number, size in sorted(sizes.items())[:-1]:
            segment = self._by_number.get(number)
            if segment is None or number in excluded or segment.live_records == 0:
                continue
            is_mostly_last_values = 2 * segment.last_value_bytes > segment.live_bytes
            if float(segment.live_bytes) >= size * (
                max_last_value_share if is_mostly_last_values else max_live_share
            ):
                continue
            if not is_mostly_last_values and segment.live_at_last_check != segment.live_records:
                segment.live_at_last_check = segment.live_records
                self.is_draining = True
            elif found < 0:
                found = number
        return found
