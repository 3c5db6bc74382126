"""Maps addresses to messages, with sixteen bytes of memory for each message.

The engine identifies messages by their address in a log; Redis by partition and sequence. The
writer's thread adds entries and the reader's thread looks them up: columns only grow, and a segment
is removed as a whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left


class _Segment:
    def __init__(self) -> None:
        self.offsets = array("I")
        self.pids = array("I")
        self.seqs = array("q")


class AddressIndex:
    def __init__(self) -> None:
        self._segments: dict[int, _Segment] = {}
        self._highest_seqs: dict[int, int] = {}  # by partition
        # Rewritten messages and the segment that they are in now.
        self._rewritten: dict[tuple[int, int], int] = {}

    def add(self, address: int, pid: int, seq: int) -> None:
        number = address >> 32
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = _Segment()
        segment.pids.append(pid)
        segment.seqs.append(seq)
        segment.offsets.append(address & 0xFFFF_FFFF)  # last: the reader searches this column
        if seq <= self._highest_seqs.get(pid, -1):
            self._rewritten[pid, seq] = number
        else:
            self._highest_seqs[pid] = seq

    def find(self, address: int) -> tuple[int, int] | None:
        """Return (pid, seq) of the message at an address, or None."""
        segment = self._segments.get(address >> 32)
        if segment is None:
            return None
        offset = address & 0xFFFF_FFFF
        at = bisect_left(segment.offsets, offset)
        if at == len(segment.offsets) or segment.offsets[at] != offset:
            return None
        return segment.pids[at], segment.seqs[at]

    def highest_seq(self, pid: int) -> int:
        return self._highest_seqs.get(pid, -1)

    def free_segment(self, number: int) -> dict[int, list[int]]:
        """Remove a segment and return the sequences, by partition, that no other segment has."""
        segment = self._segments.pop(number, None)
        freed: dict[int, list[int]] = {}
        if segment is None:
            return freed
        for pid, seq in zip(segment.pids, segment.seqs):
            if self._rewritten and (pid, seq) in self._rewritten:
                if self._rewritten[pid, seq] != number:
                    continue
                del self._rewritten[pid, seq]
            freed.setdefault(pid, []).append(seq)
        return freed

    def forget_partitions(self, pids: set[int]) -> None:
        """Remove deleted partitions."""
        for pid in pids:
            self._highest_seqs.pop(pid, None)
        if self._rewritten:
            self._rewritten = {
                key: number for key, number in self._rewritten.items() if key[0] not in pids
            }
