"""Compaction: copy the last live records of sparse segments into the open frame.

The store deletes segments as a whole, so a few old messages can keep a segment alive. Compaction
scans the index of such a segment and rewrites what is live, a batch of records at a time. The next
snapshot then deletes the segment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import i64

from sluice.queues.engine import Engine
from sluice.queues.log import FIRST_OWNER_PID, FIRST_STATE_PID
from sluice.store.protocol import ROW_BYTES, Record, Store, read_row, read_row_pid

if TYPE_CHECKING:
    from sluice.queues.commit_loop.loop import CommitLoop

# A segment whose last live messages stay for this long is compacted.
COMPACTION_RETRY_SECONDS: Final = 2.0
# A sealed segment with a smaller live share is compacted.
COMPACT_LIVE_SHARE: Final = 0.4
# The same, for segments whose live records are mostly last values of keys.
COMPACT_LAST_VALUE_SHARE: Final = 0.5
# The same after a retention sweep: the disk then holds at most about 1.5 times the live data.
COMPACT_SWEPT_SHARE: Final = 0.7
# Messages that compaction moves per step.
COMPACTION_BATCH_SIZE: Final = 256
# Index rows that compaction scans per step.
COMPACTION_SCAN_ROWS: Final = 4096


class SegmentCompaction:
    def __init__(
        self,
        commit_loop: CommitLoop,
        engine: Engine,
        store: Store,
        call_later: Callable[[float, Callable[[], None]], Any],
    ) -> None:
        self._commit_loop = commit_loop
        self._engine = engine
        self._store = store
        self._call_later = call_later
        self._segment: int = -1  # the segment that is being compacted; -1: none
        # Its index: the chunks that are still to be scanned, and the offset in the first one.
        self._index_chunks: list[bytes] = []
        self._chunk_offset: int = 0
        # Segments that were compacted: their remaining records cannot be moved.
        self._compacted_segments: set[int] = set()
        self._last_value_share: float = COMPACT_LAST_VALUE_SHARE
        self._retry_timer: Any = None

    def stop(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._retry_timer = None

    def compact_after_sweep(self) -> None:
        """Compact segments from which a retention sweep has removed last values."""
        self._last_value_share = COMPACT_SWEPT_SHARE
        self.compact_next_segment()

    def compact_next_segment(self) -> None:
        """Find a segment that only a few old messages keep alive, and start to compact it."""
        if self._segment >= 0 or not self._commit_loop.is_running():
            return
        sizes = self._store.segment_sizes()
        self._compacted_segments &= sizes.keys()
        segment = self._engine.segment_usage.find_sparse(
            sizes, COMPACT_LIVE_SHARE, self._last_value_share, self._compacted_segments
        )
        if self._engine.segment_usage.is_draining and self._retry_timer is None:
            self._retry_timer = self._call_later(COMPACTION_RETRY_SECONDS, self._retry)
        if segment >= 0:
            self._segment = segment
            self._compacted_segments.add(segment)
            self._store.scan_segment(segment, self._on_segment_scanned)
        else:
            self._last_value_share = COMPACT_LAST_VALUE_SHARE

    def _retry(self) -> None:
        self._retry_timer = None
        self.compact_next_segment()

    def _on_segment_scanned(self, chunks: list[bytes]) -> None:
        self._index_chunks = chunks
        self._chunk_offset = 0
        self._read_live_records()

    def _read_live_records(self) -> None:
        """Read a batch of live records; look for the next segment when the scan is complete."""
        if not self._commit_loop.is_running():
            return
        live: list[Record] = []
        scanned: i64 = 0
        while (
            self._index_chunks
            and scanned < COMPACTION_SCAN_ROWS
            and len(live) < COMPACTION_BATCH_SIZE
        ):
            chunk = self._index_chunks[0]
            offset: i64 = self._chunk_offset
            if offset >= len(chunk):
                self._index_chunks.pop(0)
                self._chunk_offset = 0
                continue
            end = self._engine.exclusive.warm_rows(chunk, offset)
            while offset < end and len(live) < COMPACTION_BATCH_SIZE:
                if self._is_row_live(chunk, offset):
                    live.append(read_row(chunk, offset))
                offset += ROW_BYTES
                scanned += 1
            self._chunk_offset = int(offset)
        if live or self._index_chunks:
            self._commit_loop.read(
                [int(record.address) for record in live], partial(self._on_records_read, live)
            )
            return
        self._segment = -1
        self.compact_next_segment()

    def _is_row_live(self, rows: bytes, offset: i64) -> bool:
        """Return whether an index row refers to a live record; rows of owners take a fast path."""
        if FIRST_OWNER_PID <= read_row_pid(rows, offset) < FIRST_STATE_PID:
            return self._engine.exclusive.is_row_live(rows, offset)
        return self._is_live(read_row(rows, offset))

    def _is_live(self, record: Record) -> bool:
        if record.pid >= FIRST_OWNER_PID:
            if record.pid >= FIRST_STATE_PID:
                return self._engine.broker_state.is_live(record)
            return self._engine.exclusive.is_live(record)
        partition = self._engine.partitions.get(int(record.pid))
        return partition is not None and partition.address(record.seq) == record.address

    def _on_records_read(self, live: list[Record], records: list[bytes | None]) -> None:
        """Rewrite the records that are still live, then continue with the next batch."""
        if not self._commit_loop.is_running():
            return
        self._commit_loop.begin_turn()
        engine = self._engine
        for record, data in zip(live, records, strict=True):
            if data is not None:
                engine.rewrite_record(data, record.address)
            elif record.pid < FIRST_STATE_PID and self._is_live(record):
                if record.pid >= FIRST_OWNER_PID:
                    engine.state.warn(engine.exclusive.drop_damaged(record, engine.now))
                else:
                    engine.removal.drop_damaged(engine.partitions[int(record.pid)], record.seq)
        self._commit_loop.end_turn()
        self._read_live_records()
