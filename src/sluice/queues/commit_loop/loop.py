"""Commit loop: drive the deterministic engine against a store that answers asynchronously.

At most one frame is in commit at any time. Records that arrive meanwhile collect in the next frame,
which is submitted as soon as the store confirms the previous one: group commit without a timer. The
commit loop owns the engine's clock, its wake-ups and its reads; `housekeeping` writes snapshots and
compacts segments. It knows nothing about sockets or MQTT.

    Turn.flush ─▶ end_turn ─▶ Engine.end_turn (dispatch), reads, submit_frame ─▶ Store.commit …
    … _on_committed ─▶ Publishing.on_frame_committed (PUBACKs), Dispatch.on_frame_committed
                    ─▶ end_turn ─▶ flush_output
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from secrets import token_bytes
from typing import Any

from sluice.clock import Clock
from sluice.queues.commit_loop.housekeeping import Housekeeping
from sluice.queues.commit_loop.listener import CommitListener
from sluice.queues.compacted import OwnerRead
from sluice.queues.engine import Engine
from sluice.queues.flow import RUN_BYTES, SECRET_BYTES
from sluice.queues.log import Frame, RestoredRecord
from sluice.queues.model import Alert, BodyRead, Effects, QueueRules
from sluice.queues.ports import Committer
from sluice.queues.recovery import EngineLoader
from sluice.store.protocol import RecoveryReport, Store


class CommitLoop(Committer):
    """Commit frames, run timers and reads.

    `flush_output` writes what consumers and publishers have collected in this turn, at the end of
    turns that no packet began. `report` receives alerts and warnings. `call_later` and
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
        flush_output: Callable[[], None],
        report: Callable[[list[Alert], list[str]], None],
        settlement_delay_seconds: float = 0.0,
        call_soon: Callable[[Callable[[], None]], Any] | None = None,
        random_bytes: Callable[[int], bytes] = token_bytes,
    ) -> None:
        self.engine: Engine = engine
        self._store = store
        self._clock = clock
        self._call_later = call_later
        self._flush_output = flush_output
        self._report = report
        self._settlement_delay_seconds = settlement_delay_seconds
        self._call_soon = call_soon
        self._random_bytes = random_bytes
        # A frame was just committed: records caused by its acknowledgements go into the next frame.
        self._is_coalescing: bool = False
        self._coalesce_callback: Callable[[], None] = self._end_coalescing
        self._settlement_timer: Any = None
        self._frame_in_commit: Frame | None = None
        self._wake_timer: Any = None
        self._wake_at: float = 0.0
        self._is_closed: bool = False
        self._is_frozen: bool = False
        self._is_frame_held: bool = False  # the open frame is not complete yet: see `hold_frame`
        self._open_frame_from: int = 0  # address of the open frame
        # To call after a commit: of the frame in commit, and of the open frame.
        self._commit_callbacks: list[Callable[[], None]] = []
        self._next_commit_callbacks: list[Callable[[], None]] = []
        # Records at or above this address are not in the store yet; reads of them wait.
        self._uncommitted_from: int = 0
        self._deferred_reads: list[tuple[list[int], Callable[[list[bytes | None]], None]]] = []
        self.housekeeping: Housekeeping = Housekeeping(self, engine, store, call_later)
        self._listeners: list[CommitListener] = [self.housekeeping]

    def add_listener(self, listener: CommitListener) -> None:
        """Notify `listener` from now on, after the listeners that were added before."""
        self._listeners.append(listener)

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
        engine.state.started_at = engine.now
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
        self._begin_frame(self._store.next_frame_address())
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
        self.after_commit(partial(self._read_broker_state, done))

    def _read_broker_state(self, done: Callable[[list[RestoredRecord]], None]) -> None:
        self._store.read(
            self.engine.broker_state.addresses_to_restore(),
            partial(self._on_broker_state_read, done),
        )

    def _on_broker_state_read(
        self, done: Callable[[list[RestoredRecord]], None], records: list[bytes | None]
    ) -> None:
        done(self.engine.broker_state.restore(records))

    def is_running(self) -> bool:
        """Return whether the loop is neither closed nor frozen."""
        return not self._is_closed and not self._is_frozen

    # ---- turns

    def begin_turn(self) -> None:
        """Set the clock of the engine."""
        self.engine.now = self._clock()

    def end_turn(self) -> None:
        """End a turn of the event loop: dispatch, read, commit, and report alerts."""
        if self._is_frozen:
            return
        engine = self.engine
        effects = engine.end_turn()
        if effects.created_queues:
            self._announce_created(effects)
        if effects.reads:
            self._read_bodies(effects.reads)
        self._read_and_commit()
        if effects.alerts or effects.warnings:
            self._report(effects.alerts, effects.warnings)
        wake = engine.wake_at
        if wake and (self._wake_at == 0.0 or wake < self._wake_at):
            self._set_timer(wake)

    def _announce_created(self, effects: Effects) -> None:
        """Announce created queues; consumers that join them may have further effects."""
        created = effects.created_queues
        while created:
            for queue in created:
                for listener in self._listeners:
                    listener.on_queue_created(queue)
            later = self.engine.end_turn()
            effects.add(later)
            created = later.created_queues

    def _read_bodies(self, reads: list[BodyRead]) -> None:
        addresses = reads[0].addresses
        if len(reads) > 1:
            addresses = [address for read in reads for address in read.addresses]
        self.read(addresses, partial(self._on_reads_done, reads))

    def _read_and_commit(self) -> None:
        """Start reads of exclusive queues, and submit the open frame unless it has to wait."""
        if self._is_frozen:
            return
        engine = self.engine
        if engine.exclusive.reads:
            owner_reads = engine.exclusive.reads
            engine.exclusive.reads = []
            self.read(
                [address for owner_read in owner_reads for address in owner_read.addresses],
                partial(self._on_owner_reads_done, owner_reads),
            )
        if (
            self.can_submit_frame()
            and not self._is_coalescing
            and engine.frame_builder.has_pending()
        ):
            if (
                self._settlement_delay_seconds
                and not self._next_commit_callbacks
                and not engine.frame_builder.is_urgent()
            ):
                if self._settlement_timer is None:
                    self._settlement_timer = self._call_later(
                        self._settlement_delay_seconds, self._commit_settlements
                    )
            else:
                self.submit_frame()

    def _end_coalescing(self) -> None:
        """Submit the next frame: the sockets were polled once since the last commit."""
        self._is_coalescing = False
        if not self._is_closed:
            self._read_and_commit()

    def _commit_settlements(self) -> None:
        """Submit a frame that has only settlements: no publish came to share it with."""
        self._settlement_timer = None
        if (
            self.is_running()
            and self.can_submit_frame()
            and self.engine.frame_builder.has_pending()
        ):
            self._is_coalescing = False
            self.begin_turn()
            self.submit_frame()

    def can_submit_frame(self) -> bool:
        """Return whether no frame is in commit and the open frame is not held."""
        return self._frame_in_commit is None and not self._is_frame_held

    def submit_frame(self) -> None:
        """Close the open frame and submit it to the store; `can_submit_frame` must be true."""
        frame = self._close_frame()
        self._frame_in_commit = frame
        self._commit_callbacks = self._next_commit_callbacks
        self._next_commit_callbacks = []
        if frame.count:
            self._commit(frame)
            for listener in self._listeners:
                listener.on_frame_closed()
            if self._store.is_snapshot_due():
                self.housekeeping.start_due_snapshot()
        else:
            self._on_committed()

    def _close_frame(self) -> Frame:
        engine = self.engine
        frame = engine.frame_builder.close(engine.state.now_ms())
        engine.appender.on_frame_closed()
        engine.exclusive.on_frame_closed()
        return frame

    def _commit(self, frame: Frame) -> None:
        self._begin_frame(
            self._store.commit(frame.data, int(frame.count), frame.sync, self._on_committed)
        )

    def _begin_frame(self, address: int) -> None:
        self._open_frame_from = address
        self.engine.frame_builder.begin_frame(address)

    def seal_segment(self) -> bool:
        """Seal the open segment of the store while the open frame is empty.

        Return whether a new segment was begun.
        """
        if not self._store.seal_segment():
            return False
        self._begin_frame(self._store.next_frame_address())
        if self._frame_in_commit is None:
            self._on_committed_to(self._open_frame_from)
        return True

    def _on_committed(self) -> None:
        """Notify publishers of the commit, deliver its messages, and end this turn."""
        frame = self._frame_in_commit
        if frame is None or not self.is_running():
            return
        self._frame_in_commit = None
        self._on_committed_to(self._open_frame_from)
        callbacks = self._commit_callbacks
        self._commit_callbacks = []
        self.begin_turn()
        engine = self.engine
        if self._call_soon is not None and engine.frame_builder.has_pending():
            self._is_coalescing = True
            self._call_soon(self._coalesce_callback)
        engine.publishing.on_frame_committed(frame)
        engine.appender.on_frame_committed(frame)
        engine.dispatch.on_frame_committed(frame)
        engine.exclusive.on_frame_committed(self._open_frame_from, engine.now)
        for listener in self._listeners:
            listener.on_frame_committed(frame)
        self.end_turn()
        for callback in callbacks:
            callback()
        self._flush_output()

    def _on_reads_done(self, reads: list[BodyRead], records: list[bytes | None]) -> None:
        """Pass the records to all body reads of one turn, which the store answers together."""
        if not self.is_running():
            return
        self.begin_turn()
        at = 0
        for read in reads:
            end = at + len(read.addresses)
            self.engine.on_read_done(read, records[at:end])
            at = end
        self.end_turn()
        self._flush_output()

    def _on_owner_reads_done(self, reads: list[OwnerRead], records: list[bytes | None]) -> None:
        """Pass the records to the reads of exclusive queues."""
        if not self.is_running():
            return
        self.begin_turn()
        at = 0
        for read in reads:
            end = at + len(read.addresses)
            self.engine.on_owner_read_done(read, records[at:end])
            at = end
        self.end_turn()
        self._flush_output()

    # ---- time

    def _set_timer(self, wake_at: float) -> None:
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        self._wake_at = wake_at
        if wake_at:
            self._wake_timer = self._call_later(max(0.0, wake_at - self._clock()), self._wake)

    def _wake(self) -> None:
        """Run the timers that are due, as a turn of their own."""
        self._wake_timer = None
        self._wake_at = 0.0
        if not self.is_running():
            return
        self.engine.tick(self._clock())
        self.end_turn()
        self.housekeeping.on_tick()
        self._flush_output()

    # ---- reads

    def read(self, addresses: list[int], done: Callable[[list[bytes | None]], None]) -> None:
        """Read records after their commit: compaction may have moved them into the open frame."""
        if addresses and max(addresses) >= self._uncommitted_from:
            self._deferred_reads.append((addresses, done))
        else:
            self._store.read(addresses, done)

    def _on_committed_to(self, address: int) -> None:
        """Start the reads that waited for the commit of the records before `address`."""
        self._uncommitted_from = address
        if self._deferred_reads:
            deferred = self._deferred_reads
            self._deferred_reads = []
            for addresses, done in deferred:
                self.read(addresses, done)

    # ---- interface for callers outside the engine

    def segment_sizes(self) -> dict[int, int]:
        """Return the size in bytes of each segment in the store."""
        return self._store.segment_sizes()

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Call `callback` once everything that the engine has decided so far is committed."""
        if self.engine.frame_builder.has_pending():
            self._next_commit_callbacks.append(callback)
            self._read_and_commit()
        elif self._frame_in_commit is not None:
            self._commit_callbacks.append(callback)
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
        """Report that a batch failed when half of its records are in the open frame."""
        failure = RuntimeError(f"a batch failed halfway: {error!r}")
        for listener in self._listeners:
            listener.on_failure(failure)

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
        for timer in (self._wake_timer, self._settlement_timer):
            if timer is not None:
                timer.cancel()
        self._wake_timer = None
        self._settlement_timer = None
        self.housekeeping.stop()
        if self._is_closed:
            return None
        self._is_closed = True
        if commit_pending and not self._is_frame_held and not self._is_frozen:
            frame = self._close_frame()
            if frame.count:
                self._commit(frame)
        return self._store.close
