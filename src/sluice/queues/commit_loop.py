"""Commit loop: drive the deterministic engine against a store that answers asynchronously.

At most one frame is in commit at any time. Records that arrive meanwhile collect in the next frame,
which is submitted as soon as the store confirms the previous one: group commit without a timer. The
commit loop owns the engine's clock, its wake-ups, its reads, its snapshots and the compaction of
segments. It knows nothing about sockets or MQTT.
"""

from __future__ import annotations

from collections.abc import Callable
from secrets import token_bytes
from typing import Any, Final

from mypy_extensions import i64

from sluice.clock import Clock
from sluice.message import Message
from sluice.queues.bodies.body_reads import BodyRead
from sluice.queues.compacted.exclusive import OwnerRead
from sluice.queues.engine import Engine
from sluice.queues.flow.dead_letters import Alert
from sluice.queues.flow.delivery_tokens import RUN_BYTES, SECRET_BYTES
from sluice.queues.log.broker_state import FIRST_OWNER_PID, FIRST_STATE_PID, RestoredRecord
from sluice.queues.log.frame_builder import Frame
from sluice.queues.model.message_columns import NO_ADDRESS
from sluice.queues.model.partition import Partition
from sluice.queues.model.queue import Queue
from sluice.queues.model.queue_rules import QueueRules
from sluice.queues.recovery.incremental_snapshot import IncrementalSnapshot
from sluice.queues.recovery.loader import EngineLoader
from sluice.store.protocol import ROW_BYTES, Record, RecoveryReport, Store, read_row, read_row_pid

# A segment whose last live messages stay for this long is compacted.
COMPACTION_RETRY_SECONDS: Final = 2.0
# How long to wait after a segment became empty before a snapshot is written to delete it: other
# segments may become empty meanwhile.
RECLAIM_DELAY_SECONDS: Final = 1.0
# The wait is one second longer for each so many bytes of the snapshot.
SNAPSHOT_BYTES_PER_DELAY_SECOND: Final = 4 << 20
# When disk space is low, the open segment is sealed only if at least this much of it is dead.
MIN_SEAL_BYTES: Final = 1 << 20
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
# Last values that are written into a snapshot per step.
SNAPSHOT_BATCH_SIZE: Final = 50_000
# Pause between two steps of a snapshot.
SNAPSHOT_PAUSE_SECONDS: Final = 0.001


class CommitLoop:
    """Commit frames, run timers and reads, write snapshots and compact segments.

    `on_flush` is called when the engine has finished its current work: bytes that consumers and
    publishers have written can leave. `report` receives alerts and warnings. `call_later` and
    `call_soon` belong to the event loop. `settlement_delay_seconds` is how long settlements alone
    wait for a more urgent record to share a frame with: a frame of their own costs as much as a
    full one. With `call_soon`, a frame that directly follows another one waits until the event loop
    has polled the sockets once: under load frames become fewer and larger, without a timer.
    `random_bytes(n)` returns n unpredictable bytes, for delivery tokens.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        clock: Clock,
        call_later: Callable[[float, Callable[[], None]], Any],
        on_flush: Callable[[], None],
        report: Callable[[list[Alert], list[str]], None],
        settlement_delay_seconds: float = 0.0,
        call_soon: Callable[[Callable[[], None]], Any] | None = None,
        random_bytes: Callable[[int], bytes] = token_bytes,
    ) -> None:
        self.engine: Engine = engine
        # Called for each queue that the engine created on its own.
        self.on_queue_created: Callable[[Queue], None] | None = None
        # Called for each frame that the store has committed.
        self.on_frame_committed: Callable[[Frame], None] | None = None
        # Called when the open frame must not be committed.
        self.on_batch_aborted: Callable[[Exception], None] | None = None
        # Called after each closed frame was submitted to the store.
        self.on_frame_closed: Callable[[], None] | None = None
        self._store = store
        self._clock = clock
        self._call_later = call_later
        self._on_flush = on_flush
        self._report = report
        self._settlement_delay_seconds = settlement_delay_seconds
        self._call_soon = call_soon
        self._random_bytes = random_bytes
        # A frame was just committed: records caused by its acknowledgements go into the next frame.
        self._is_coalescing: bool = False
        self._coalesce_callback: Callable[[], None] = self._coalesced
        self._settlement_timer: Any = None
        self._reclaim_timer: Any = None
        self._compaction_timer: Any = None
        self._snapshot_timer: Any = None
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
        self._frame_in_commit: Frame | None = None
        self._wake_timer: Any = None
        self._wake_at: float = 0.0
        self._compacting_segment: int = -1
        # Index of the segment that is being compacted: the chunks that are still to be scanned.
        self._index_chunks: list[bytes] = []
        # Offset in the first chunk.
        self._chunk_offset: int = 0
        # Segments that were compacted: their remaining records cannot be moved.
        self._compacted_segments: set[int] = set()
        self._last_value_share: float = COMPACT_LAST_VALUE_SHARE
        self._is_closed: bool = False
        self._is_frozen: bool = False
        self._is_frame_held: bool = False  # the open frame is not complete yet: see `hold_frame`
        # Records at or above these addresses are not in the store yet: of the frame in commit, and
        # of the open frame.
        self._uncommitted_from: int = 0
        self._open_frame_from: int = 0
        # Reads of records that are not committed yet.
        self._deferred_reads: list[tuple[list[int], Callable[[list[bytes | None]], None]]] = []
        # Callbacks that wait for a commit: of the frame in commit, and of the open frame.
        self._commit_waiters: list[Callable[[], None]] = []
        self._next_commit_waiters: list[Callable[[], None]] = []

    def open(self, parse: Callable[[str, str], QueueRules]) -> RecoveryReport:
        """Recover the queues and start. Blocks, because nothing else runs yet."""
        recovery = self.load(parse)
        self.start()
        return recovery

    def load(self, parse: Callable[[str, str], QueueRules]) -> RecoveryReport:
        """Recover the queues from the store: the slow part of `open`.

        May run in any thread; the engine must not be used meanwhile.
        """
        engine = self.engine
        engine.now = self._clock()
        engine.started_at = engine.now
        loader = EngineLoader(engine, parse)
        recovery = self._store.open(loader)
        try:
            loader.finish()
        except BaseException:
            self._store.close()
            raise
        return recovery

    def start(self) -> None:
        engine = self.engine
        self._begin_frame()
        run = int.from_bytes(self._random_bytes(RUN_BYTES), "little")
        engine.begin_tokens(self._random_bytes(SECRET_BYTES), run)
        self._uncommitted_from = self._open_frame_from
        engine.exclusive.durable_before = self._open_frame_from
        self._set_timer(engine.next_wakeup_at())

    def restore_broker_state(self, done: Callable[[list[RestoredRecord]], None]) -> None:
        """Read the stored records of the broker itself, oldest first.

        A new secret of delivery tokens is synced before: the broker serves no client until `done`
        is called, so a power cut cannot invalidate a token that a client has received.
        """
        self.after_commit(_RestoreAfterCommit(self, done))

    def read_broker_state(self, done: Callable[[list[RestoredRecord]], None]) -> None:
        self._store.read(
            self.engine.broker_state.addresses_to_restore(), _BrokerStateRead(self.engine, done)
        )

    # ---- turns

    def end_turn(self) -> None:
        """End a turn of the event loop: dispatch, read, commit, and report alerts."""
        if self._is_frozen:
            return
        engine = self.engine
        engine.end_turn()
        if engine.auto_created_queues:
            self._announce_created()
        self._read_and_commit()
        if engine.alerts or engine.warnings:
            alerts = engine.alerts
            warnings = engine.warnings
            engine.alerts = []
            engine.warnings = []
            self._report(alerts, warnings)
        wake = engine.next_wakeup_at()
        if wake and (self._wake_at == 0.0 or wake < self._wake_at):
            self._set_timer(wake)

    def _announce_created(self) -> None:
        created = self.engine.auto_created_queues
        self.engine.auto_created_queues = []
        if self.on_queue_created is not None:
            for queue in created:
                self.on_queue_created(queue)
            self.engine.end_turn()

    def _read_and_commit(self) -> None:
        if self._is_frozen:
            return
        engine = self.engine
        if engine.reads:
            reads = engine.reads
            engine.reads = []
            addresses = reads[0].addresses
            if len(reads) > 1:
                addresses = [address for read in reads for address in read.addresses]
            self.read(addresses, _ReadsDone(self, reads))
        if engine.exclusive.reads:
            owner_reads = engine.exclusive.reads
            engine.exclusive.reads = []
            self.read(
                [address for owner_read in owner_reads for address in owner_read.addresses],
                _OwnerReadsDone(self, owner_reads),
            )
        if (
            self._frame_in_commit is None
            and not self._is_coalescing
            and not self._is_frame_held
            and engine.frame_builder.has_pending()
        ):
            if (
                self._settlement_delay_seconds
                and not self._next_commit_waiters
                and not engine.frame_builder.is_urgent()
            ):
                if self._settlement_timer is None:
                    self._settlement_timer = self._call_later(
                        self._settlement_delay_seconds, self._commit_settlements
                    )
            else:
                self._commit()

    def _coalesced(self) -> None:
        self._is_coalescing = False
        if not self._is_closed:
            self._read_and_commit()

    def _commit_settlements(self) -> None:
        self._settlement_timer = None
        if self._is_frozen:
            return
        if (
            self._frame_in_commit is None
            and not self._is_closed
            and not self._is_frame_held
            and self.engine.frame_builder.has_pending()
        ):
            self._is_coalescing = False
            self.engine.now = self._clock()
            self._commit()

    def _commit(self) -> None:
        engine = self.engine
        frame = engine.take_frame()
        self._frame_in_commit = frame
        self._commit_waiters = self._next_commit_waiters
        self._next_commit_waiters = []
        if frame.count:
            self._submit_frame(frame)
            if self._open_snapshot is None and (
                self._wants_reclaim or self._store.is_snapshot_due()
            ):
                self._start_snapshot()
            if self.on_frame_closed is not None:
                self.on_frame_closed()
        else:
            self._on_committed()

    def _submit_frame(self, frame: Frame) -> None:
        self._store.commit(frame.data, int(frame.count), frame.sync, self._on_committed)
        if self._wants_seal:
            self._wants_seal = False
            self._wants_reclaim = self._store.seal_segment()
        self._begin_frame()

    def _begin_frame(self) -> None:
        self._open_frame_from = self._store.next_frame_address()
        self.engine.frame_builder.begin_frame(self._open_frame_from)

    def _on_committed(self) -> None:
        frame = self._frame_in_commit
        if frame is None or self._is_closed or self._is_frozen:
            return
        self._frame_in_commit = None
        self._uncommitted_from = self._open_frame_from
        if self._deferred_reads:
            deferred = self._deferred_reads
            self._deferred_reads = []
            for addresses, done in deferred:
                self.read(addresses, done)
        waiters = self._commit_waiters
        self._commit_waiters = []
        self.engine.now = self._clock()
        if self._call_soon is not None and self.engine.frame_builder.has_pending():
            self._is_coalescing = True
            self._call_soon(self._coalesce_callback)
        self.engine.on_frame_committed(frame)
        if self.on_frame_committed is not None:
            self.on_frame_committed(frame)
        self.end_turn()
        if self.engine.segment_usage.has_emptied and self._reclaim_timer is None:
            self._reclaim_timer = self._call_later(
                RECLAIM_DELAY_SECONDS + self._snapshot_bytes // SNAPSHOT_BYTES_PER_DELAY_SECOND,
                self._reclaim_space,
            )
        for callback in waiters:
            callback()
        self._on_flush()

    def read(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        """Read records after their commit: compaction may have moved them into the open frame."""
        if addresses and max(addresses) >= self._uncommitted_from:
            self._deferred_reads.append((addresses, done))
        else:
            self._store.read(addresses, done)

    def on_reads_done(self, reads: list[BodyRead], records: list[bytes | None]) -> None:
        if self._is_closed or self._is_frozen:
            return
        self.engine.now = self._clock()
        at = 0
        for read in reads:
            end = at + len(read.addresses)
            self.engine.on_read_done(read, records[at:end])
            at = end
        self.end_turn()
        self._on_flush()

    def on_owner_reads_done(self, reads: list[OwnerRead], records: list[bytes | None]) -> None:
        """Pass the records to the reads of exclusive queues."""
        if self._is_closed or self._is_frozen:
            return
        self.engine.now = self._clock()
        at = 0
        for read in reads:
            end = at + len(read.addresses)
            self.engine.on_owner_read_done(read, records[at:end])
            at = end
        self.end_turn()
        self._on_flush()

    # ---- time

    def _set_timer(self, wake_at: float) -> None:
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        self._wake_at = wake_at
        if wake_at:
            self._wake_timer = self._call_later(max(0.0, wake_at - self._clock()), self._wake)

    def _wake(self) -> None:
        self._wake_timer = None
        self._wake_at = 0.0
        if self._is_closed or self._is_frozen:
            return
        self._set_timer(self.engine.tick(self._clock()))
        self.end_turn()
        if self.engine.exclusive.wants_compaction:
            self.engine.exclusive.wants_compaction = False
            self._last_value_share = COMPACT_SWEPT_SHARE
            self._compact_next_segment()
        self._on_flush()

    # ---- disk space

    def _reclaim_space(self) -> None:
        """Start a snapshot, now or with the next frame, if it allows deleting empty segments."""
        self._reclaim_timer = None
        if self._is_closed or self._is_frozen:
            return
        is_sealed = False
        if self._is_disk_low:
            is_sealed = self._seal_if_mostly_dead()
            self._reclaim_timer = self._call_later(RECLAIM_DELAY_SECONDS, self._reclaim_space)
        self._wants_reclaim = (
            is_sealed or len(self.engine.segment_usage.find_free(self._sealed_segments())) > 0
        )
        self.engine.segment_usage.has_emptied = False
        if (
            self._wants_reclaim
            and self._frame_in_commit is None
            and self._open_snapshot is None
            and not self._is_frame_held
        ):
            if self.engine.frame_builder.has_pending():
                self._commit()
            else:
                self._start_snapshot()

    def set_disk_low(self, is_low: bool) -> None:
        """Switch the reclaiming of space on or off when the disk is nearly full or has space again.

        Segments are deleted as a whole, and the open segment never. While space is low, an open
        segment that is mostly dead is sealed early, so that acknowledging messages frees space.
        """
        self._is_disk_low = is_low
        if is_low and self._reclaim_timer is None:
            self._reclaim_timer = self._call_later(0.0, self._reclaim_space)

    def _seal_if_mostly_dead(self) -> bool:
        """Seal the open segment if that frees more than a snapshot takes; return whether it did."""
        sizes = self._store.segment_sizes()
        size = sizes[max(sizes)]
        live: i64 = self.engine.segment_usage.live_bytes(max(sizes))
        if (
            float(live) >= size * COMPACT_LIVE_SHARE
            or size - live < MIN_SEAL_BYTES + self._snapshot_bytes
        ):
            return False
        if (
            self._frame_in_commit is not None
            or self._is_frame_held
            or self.engine.frame_builder.has_pending()
        ):
            # Records of the open frame already have addresses in this segment: seal after that
            # frame.
            self._wants_seal = True
            return False
        if not self._store.seal_segment():
            return False
        self._begin_frame()
        self._uncommitted_from = self._open_frame_from
        return True

    def snapshot_after_salvage(self) -> None:
        """Write a snapshot after a salvage, so that the next recovery starts after the damage.

        A snapshot covers whole frames. If records are pending, their commit takes the snapshot: the
        commit made here, or the one that follows the frame in commit.
        """
        if self.engine.frame_builder.has_pending():
            if self._frame_in_commit is None and not self._is_frame_held:
                self._commit()
        elif self._open_snapshot is None and self._store.is_snapshot_due():
            self._start_snapshot()

    def _sealed_segments(self) -> list[int]:
        return sorted(self._store.segment_sizes())[:-1]

    def _start_snapshot(self) -> None:
        """Start a snapshot after all frames so far, and note the segments it makes obsolete."""
        if not self.engine.broker_state.is_restored:
            return
        self._wants_reclaim = False
        self._segments_to_delete = self.engine.segment_usage.find_free(self._sealed_segments())
        self._store.begin_snapshot()
        self._open_snapshot = IncrementalSnapshot(self.engine, self.snapshot_batch_size)
        self._continue_snapshot()

    def _continue_snapshot(self) -> None:
        """Write the next part of the snapshot; between the parts the event loop serves clients."""
        self._snapshot_timer = None
        snapshot = self._open_snapshot
        if snapshot is None or self._is_closed:
            return
        if not snapshot.write_step():
            self._snapshot_timer = self._call_later(SNAPSHOT_PAUSE_SECONDS, self._continue_snapshot)
            return
        self._open_snapshot = None
        chunks = snapshot.chunks()
        self._snapshot_bytes = sum(len(chunk) for chunk in chunks)
        self._store.snapshot(chunks, self._segments_to_delete, self._compact_next_segment)
        self.engine.segment_usage.forget_segments(self._segments_to_delete)

    def _compact_next_segment(self) -> None:
        """Find a segment that only a few old messages keep alive, and start to compact it."""
        if self._is_closed or self._compacting_segment >= 0:
            return
        sizes = self._store.segment_sizes()
        self._compacted_segments &= sizes.keys()
        segment = self.engine.segment_usage.find_sparse(
            sizes, COMPACT_LIVE_SHARE, self._last_value_share, self._compacted_segments
        )
        if self.engine.segment_usage.is_draining and self._compaction_timer is None:
            self._compaction_timer = self._call_later(
                COMPACTION_RETRY_SECONDS, self._retry_compaction
            )
        if segment >= 0:
            self._compacting_segment = segment
            self._compacted_segments.add(segment)
            self._store.scan_segment(segment, self._on_segment_scanned)
        else:
            self._last_value_share = COMPACT_LAST_VALUE_SHARE

    def _retry_compaction(self) -> None:
        self._compaction_timer = None
        self._compact_next_segment()

    def _on_segment_scanned(self, chunks: list[bytes]) -> None:
        self._index_chunks = chunks
        self._chunk_offset = 0
        self._read_live_records()

    def _is_row_live(self, rows: bytes, offset: i64) -> bool:
        """Return whether an index row refers to a live record; rows of owners take a fast path."""
        if FIRST_OWNER_PID <= read_row_pid(rows, offset) < FIRST_STATE_PID:
            return self.engine.exclusive.is_row_live(rows, offset)
        return self._is_live(read_row(rows, offset))

    def _is_live(self, record: Record) -> bool:
        if record.pid >= FIRST_OWNER_PID:
            if record.pid >= FIRST_STATE_PID:
                return self.engine.broker_state.is_live(record)
            return self.engine.exclusive.is_live(record)
        partition = self.engine.partitions.get(int(record.pid))
        return partition is not None and partition.address(record.seq) == record.address

    def _read_live_records(self) -> None:
        """Rewrite a batch of live records; look for the next segment when the scan is complete."""
        if self._is_closed:
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
            end = self.engine.exclusive.warm_rows(chunk, offset)
            while offset < end and len(live) < COMPACTION_BATCH_SIZE:
                if self._is_row_live(chunk, offset):
                    live.append(read_row(chunk, offset))
                offset += ROW_BYTES
                scanned += 1
            self._chunk_offset = int(offset)
        if live or self._index_chunks:
            self.read([int(record.address) for record in live], _CompactionReadDone(self, live))
            return
        self._compacting_segment = -1
        self._compact_next_segment()

    def on_live_records_read(self, live: list[Record], records: list[bytes | None]) -> None:
        if self._is_closed or self._is_frozen:
            return
        engine = self.engine
        engine.now = self._clock()
        for record, data in zip(live, records, strict=True):
            if data is not None:
                engine.rewrite_record(data, record.address)
            elif record.pid < FIRST_STATE_PID and self._is_live(record):
                if record.pid >= FIRST_OWNER_PID:
                    engine.warnings.append(engine.exclusive.drop_damaged(record, engine.now))
                else:
                    engine.drop_damaged(engine.partitions[int(record.pid)], record.seq)
        self.end_turn()
        self._read_live_records()

    # ---- interface for callers outside the engine

    def read_messages(
        self, locations: list[tuple[Partition, int]], done: Callable[[list[Message | None]], None]
    ) -> None:
        """Read the stored messages at these locations; None for deleted or damaged ones."""
        _MessageRead(self.engine, locations, done).start(self)

    def segment_sizes(self) -> dict[int, int]:
        """Return the size in bytes of each segment in the store."""
        return self._store.segment_sizes()

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call `callback` once everything that the engine has decided so far is committed."""
        if self.engine.frame_builder.has_pending():
            self._next_commit_waiters.append(callback)
            self._read_and_commit()
        elif self._frame_in_commit is not None:
            self._commit_waiters.append(callback)
        else:
            callback()

    # ---- frames that span several turns

    def hold_frame(self) -> None:
        """Keep the open frame open over several turns, until `release_frame`.

        Records of other commands in these turns go into the same frame.
        """
        self._is_frame_held = True

    def release_frame(self) -> None:
        self._is_frame_held = False
        self._read_and_commit()

    def abort_batch(self, error: BaseException) -> None:
        """Report that a batch failed when half of its records are in the open frame.

        The frame must not be committed and its records cannot be removed. So the process ends as if
        it had been killed now, and a restart finds none of them.
        """
        if self.on_batch_aborted is not None:
            self.on_batch_aborted(RuntimeError(f"a batch failed halfway: {error!r}"))

    def freeze(self) -> None:
        """Stop all writes, deliveries and acknowledgements: the state in memory is not reliable."""
        self._is_frozen = True

    def close(self) -> None:
        """Commit the pending records and close the store. Blocks."""
        close_store = self.shut_down()
        if close_store is not None:
            close_store()

    def shut_down(self, commit_pending: bool = True) -> Callable[[], None] | None:
        """Stop the timers, submit the last frame and return the function that closes the store.

        The returned function blocks and may run in another thread. Without `commit_pending`,
        records that are not in the store are dropped: no client has an acknowledgement for them.
        """
        for timer in (
            self._wake_timer,
            self._settlement_timer,
            self._reclaim_timer,
            self._compaction_timer,
            self._snapshot_timer,
        ):
            if timer is not None:
                timer.cancel()
        self._wake_timer = None
        self._settlement_timer = None
        self._reclaim_timer = None
        self._compaction_timer = None
        self._snapshot_timer = None
        if self._is_closed:
            return None
        self._is_closed = True
        if commit_pending and not self._is_frame_held and not self._is_frozen:
            frame = self.engine.take_frame()
            if frame.count:
                self._submit_frame(frame)
        return self._store.close


class _ReadsDone:
    """Callback for all body reads of one turn, which the store answers together."""

    def __init__(self, commit_loop: CommitLoop, reads: list[BodyRead]) -> None:
        self._commit_loop = commit_loop
        self._reads = reads

    def __call__(self, records: list[bytes | None]) -> None:
        self._commit_loop.on_reads_done(self._reads, records)


class _OwnerReadsDone:
    def __init__(self, commit_loop: CommitLoop, reads: list[OwnerRead]) -> None:
        self._commit_loop = commit_loop
        self._reads = reads

    def __call__(self, records: list[bytes | None]) -> None:
        self._commit_loop.on_owner_reads_done(self._reads, records)


class _CompactionReadDone:
    def __init__(self, commit_loop: CommitLoop, live: list[Record]) -> None:
        self._commit_loop = commit_loop
        self._live = live

    def __call__(self, records: list[bytes | None]) -> None:
        self._commit_loop.on_live_records_read(self._live, records)


class _RestoreAfterCommit:
    def __init__(
        self, commit_loop: CommitLoop, done: Callable[[list[RestoredRecord]], None]
    ) -> None:
        self._commit_loop = commit_loop
        self._done = done

    def __call__(self) -> None:
        self._commit_loop.read_broker_state(self._done)


class _BrokerStateRead:
    def __init__(self, engine: Engine, done: Callable[[list[RestoredRecord]], None]) -> None:
        self._engine = engine
        self._done = done

    def __call__(self, records: list[bytes | None]) -> None:
        self._done(self._engine.broker_state.restore(records))


class _MessageRead:
    """Read messages for a caller outside the engine; cached bodies need no read."""

    def __init__(
        self,
        engine: Engine,
        locations: list[tuple[Partition, int]],
        done: Callable[[list[Message | None]], None],
    ) -> None:
        self._engine = engine
        self._done = done
        self._found: list[Message | None] = []
        self._missing: list[int] = []
        self._addresses: list[int] = []
        for nth, (partition, seq) in enumerate(locations):
            message = partition.cached_bodies.get(seq)
            self._found.append(message)
            address = partition.address(seq)
            if message is None and address != NO_ADDRESS:
                self._missing.append(nth)
                self._addresses.append(int(address))

    def start(self, commit_loop: CommitLoop) -> None:
        if self._missing:
            commit_loop.read(self._addresses, self._on_read)
        else:
            self._done(self._found)

    def _on_read(self, records: list[bytes | None]) -> None:
        for nth, data in zip(self._missing, records, strict=True):
            self._found[nth] = None if data is None else self._engine.decode_message(data)
        self._done(self._found)
