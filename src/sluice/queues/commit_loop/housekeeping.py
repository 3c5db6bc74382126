"""Housekeeping of the log: snapshots, and deletion of the segments that a snapshot makes obsolete.

A snapshot covers whole frames. It starts right after a frame was submitted, or while the open frame
is empty, and is written in steps between which the event loop serves clients. Notes that settle
older messages may be in the segments that are deleted: so segments are deleted after the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import i64

from sluice.queues.commit_loop.listener import CommitListener
from sluice.queues.commit_loop.segment_compaction import COMPACT_LIVE_SHARE, SegmentCompaction
from sluice.queues.engine import Engine
from sluice.queues.recovery import IncrementalSnapshot
from sluice.store.protocol import Store

if TYPE_CHECKING:
    from sluice.queues.commit_loop.loop import CommitLoop
    from sluice.queues.log import Frame

# How long to wait after a segment became empty before a snapshot is written to delete it: other
# segments may become empty meanwhile.
RECLAIM_DELAY_SECONDS: Final = 1.0
# The wait is one second longer for each so many bytes of the snapshot.
SNAPSHOT_BYTES_PER_DELAY_SECOND: Final = 4 << 20
# When disk space is low, the open segment is sealed only if at least this much of it is dead.
MIN_SEAL_BYTES: Final = 1 << 20
# Last values that are written into a snapshot per step.
SNAPSHOT_BATCH_SIZE: Final = 50_000
# Pause between two steps of a snapshot.
SNAPSHOT_PAUSE_SECONDS: Final = 0.001


class Housekeeping(CommitListener):
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
        self._compaction = SegmentCompaction(commit_loop, engine, store, call_later)
        self.snapshot_batch_size: int = SNAPSHOT_BATCH_SIZE
        # Size of the last snapshot.
        self._snapshot_bytes: int = 0
        # The snapshot that is being written.
        self._open_snapshot: IncrementalSnapshot | None = None
        # Segments that the snapshot makes obsolete.
        self._segments_to_delete: list[int] = []
        self._wants_reclaim: bool = False
        self._is_disk_low: bool = False
        # Seal the open segment after the next frame.
        self._wants_seal: bool = False
        self._reclaim_timer: Any = None
        self._snapshot_timer: Any = None

    # ---- events of the commit loop

    def on_frame_closed(self) -> None:
        if self._wants_seal:
            self._wants_seal = False
            self._wants_reclaim = self._commit_loop.seal_segment()
        if self._wants_reclaim:
            self.start_due_snapshot()

    def on_frame_committed(self, frame: Frame) -> None:
        if self._engine.segment_usage.has_emptied and self._reclaim_timer is None:
            self._reclaim_timer = self._call_later(
                RECLAIM_DELAY_SECONDS + self._snapshot_bytes // SNAPSHOT_BYTES_PER_DELAY_SECOND,
                self._reclaim_space,
            )

    def start_due_snapshot(self) -> None:
        """Start a snapshot, unless one is being written."""
        if self._open_snapshot is None:
            self._start_snapshot()

    def on_tick(self) -> None:
        """Continue after the engine has run its timers."""
        if self._engine.exclusive.wants_compaction:
            self._engine.exclusive.wants_compaction = False
            self._compaction.compact_after_sweep()

    def stop(self) -> None:
        """Cancel all timers."""
        for timer in (self._reclaim_timer, self._snapshot_timer):
            if timer is not None:
                timer.cancel()
        self._reclaim_timer = None
        self._snapshot_timer = None
        self._compaction.stop()

    # ---- disk space

    def set_disk_low(self, is_low: bool) -> None:
        """Switch the reclaiming of space on or off when the disk is nearly full or has space again.

        Segments are deleted as a whole, and the open segment never. While space is low, an open
        segment that is mostly dead is sealed early, so that acknowledging messages frees space.
        """
        self._is_disk_low = is_low
        if is_low and self._reclaim_timer is None:
            self._reclaim_timer = self._call_later(0.0, self._reclaim_space)

    def _reclaim_space(self) -> None:
        """Start a snapshot, now or with the next frame, if it allows deleting empty segments."""
        self._reclaim_timer = None
        if not self._commit_loop.is_running():
            return
        is_sealed = False
        if self._is_disk_low:
            is_sealed = self._seal_if_mostly_dead()
            self._reclaim_timer = self._call_later(RECLAIM_DELAY_SECONDS, self._reclaim_space)
        self._wants_reclaim = (
            is_sealed or len(self._engine.segment_usage.find_free(self._sealed_segments())) > 0
        )
        self._engine.segment_usage.has_emptied = False
        if (
            self._wants_reclaim
            and self._open_snapshot is None
            and self._commit_loop.can_submit_frame()
        ):
            if self._engine.frame_builder.has_pending():
                self._commit_loop.submit_frame()
            else:
                self._start_snapshot()

    def _seal_if_mostly_dead(self) -> bool:
        """Seal the open segment if that frees more than a snapshot takes; return whether it did."""
        sizes = self._store.segment_sizes()
        size = sizes[max(sizes)]
        live: i64 = self._engine.segment_usage.live_bytes(max(sizes))
        if (
            float(live) >= size * COMPACT_LIVE_SHARE
            or size - live < MIN_SEAL_BYTES + self._snapshot_bytes
        ):
            return False
        if not self._commit_loop.can_submit_frame() or self._engine.frame_builder.has_pending():
            # Records of the open frame already have addresses in this segment: seal after that
            # frame.
            self._wants_seal = True
            return False
        return self._commit_loop.seal_segment()

    def _sealed_segments(self) -> list[int]:
        return sorted(self._store.segment_sizes())[:-1]

    # ---- snapshots

    def snapshot_after_salvage(self) -> None:
        """Write a snapshot after a salvage, so that the next recovery starts after the damage.

        If records are pending, their commit starts the snapshot: the commit made here, or the one
        that follows the frame in commit.
        """
        if self._engine.frame_builder.has_pending():
            if self._commit_loop.can_submit_frame():
                self._commit_loop.submit_frame()
        elif self._open_snapshot is None and self._store.is_snapshot_due():
            self._start_snapshot()

    def _start_snapshot(self) -> None:
        """Start a snapshot after all frames so far, and note the segments it makes obsolete."""
        if not self._engine.broker_state.is_restored:
            return
        self._wants_reclaim = False
        self._segments_to_delete = self._engine.segment_usage.find_free(self._sealed_segments())
        self._store.begin_snapshot()
        self._open_snapshot = IncrementalSnapshot(self._engine, self.snapshot_batch_size)
        self._continue_snapshot()

    def _continue_snapshot(self) -> None:
        """Write the next part of the snapshot."""
        self._snapshot_timer = None
        snapshot = self._open_snapshot
        if snapshot is None or not self._commit_loop.is_running():
            return
        if not snapshot.write_step():
            self._snapshot_timer = self._call_later(SNAPSHOT_PAUSE_SECONDS, self._continue_snapshot)
            return
        self._open_snapshot = None
        chunks = snapshot.chunks()
        self._snapshot_bytes = sum(len(chunk) for chunk in chunks)
        self._store.snapshot(
            chunks, self._segments_to_delete, self._compaction.compact_next_segment
        )
        self._engine.segment_usage.forget_segments(self._segments_to_delete)
