"""Live records and bytes of each segment: which segments can be deleted or are worth compacting."""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

RECENT_SEGMENTS: Final = 64


class SegmentCounters:
    def __init__(self, number: i64) -> None:
        self.number: i64 = number
        self.live_records: i64 = 0
        self.live_bytes: i64 = 0
        # Bytes of last values of keys, live or not: they are replaced one by one, never all at
        # once.
        self.last_value_bytes: i64 = 0
        self.live_at_last_check: i64 = -1  # live records at the last compaction check


class SegmentUsage:
    def __init__(self) -> None:
        self._by_number: dict[int, SegmentCounters] = {}
        # The segment that was last added to.
        self._last_added: SegmentCounters = SegmentCounters(-1)
        # Segments that were recently dropped from, by the low bits of their number: last values are
        # dropped from any segment.
        self._recently_dropped: list[SegmentCounters] = [SegmentCounters(-1)] * RECENT_SEGMENTS
        # The last check found segments that are being consumed.
        self.is_draining: bool = False
        # A segment became empty since this flag was last reset.
        self.has_emptied: bool = False

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
        """Add the last value of a key, which stays until it is replaced."""
        self.add(address, size)
        self._last_added.last_value_bytes += size

    def find_free(self, sealed: list[int]) -> list[int]:
        """Return the sealed segments without live records."""
        found: list[int] = []
        for number in sealed:
            segment = self._by_number.get(number)
            if segment is None or segment.live_records == 0:
                found.append(number)
        return found

    def live_bytes(self, number: int) -> i64:
        """Return the live bytes of a segment."""
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
        """Return the oldest sealed segment with a smaller live share than the limit; -1 for none.

        A segment whose live records have decreased since the last check is being consumed: the rest
        will be deleted before it would be moved. That is not so for last values: the fewer are
        left, the longer they stay. If most live records are last values, `max_last_value_share`
        applies, without waiting.
        """
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
